"""What of a machine is occupied while a run is measured; `locks` keeps it from being measured twice at once."""

from llmrepro import gpus, jobs, running_server
from llmrepro.locks import Part
from llmrepro.run import Run


def of(run: Run) -> list[Part]:
    """What measuring a live run occupies: nothing once everything is asked.

    A GPU's measurement needs some of the CPU as well: two cards are measured beside each other, and nothing beside
    a measurement of the CPU. Engines may spread over every card that they see. Where no card is told, or a server
    runs here already and what it computes on is not known, nothing is measured beside it at all. Of a server that
    runs on another machine nothing here is occupied.
    """
    url = run.parameters.server_url
    if not jobs.missing(run) or (url is not None and not running_server.is_here(url)):
        return []
    cards = gpus.uuids() if run.recipe.needs.gpu_count and url is None else []
    return [Part("cpu", not cards), *(Part(f"gpu-{uuid}", True) for uuid in cards)]
