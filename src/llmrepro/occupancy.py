"""What of a machine is occupied while a run is measured; `locks` keeps it from being measured twice at once."""

from llmrepro import gpus, running_server
from llmrepro.locks import Part
from llmrepro.run import Run


def of(run: Run) -> list[Part]:
    """What measuring a run occupies.

    A GPU's measurement needs some of the CPU as well: two cards are measured beside each other, and nothing beside
    a measurement of the CPU. Of a server that runs on another machine nothing here is occupied.
    """
    url, count = run.parameters.server_url, run.recipe.needs.gpu_count
    if url is not None and not running_server.is_here(url):
        return []
    cards = gpus.uuids(count) if count else []
    return [Part("cpu", not cards), *(Part(f"gpu-{uuid}", True) for uuid in cards)]
