"""What a recipe needs of a machine, in words, and what of it a machine lacks."""

import os
import shutil
from pathlib import Path

from llmrepro import environment, gpus
from llmrepro.recipe import Needs, Recipe

GIB = 2**30
DISK = "the disk of the kit's cache"  # as a run's own pages call it: a path would tell of this machine


def of(recipe: Recipe) -> Needs:
    """A recipe's needs, with the commands that its kind of install takes."""
    taken = {"git": ["git"], "container": ["podman|docker"]}.get(recipe.engine.install.kind, [])
    named = recipe.needs.commands
    left = [c for c in taken if not any(set(n.split("|")) <= set(c.split("|")) for n in named)]
    return recipe.needs.model_copy(update={"commands": [*named, *left]})


def missing(recipe: Recipe, facts: dict, folder: Path | str) -> list[str]:
    """All that a live run of a recipe would lack here, a sentence each: its needs as in `lacks`, room in memory
    for its weights, and the Python of its engine's environment."""
    install = recipe.engine.install
    python = lacks_python(None if install.kind == "container" else install.python)
    room = lacks_room(recipe, facts)
    return [*lacks(of(recipe), facts, folder), *(sentence for sentence in (room, python) if sentence)]


def lacks_room(recipe: Recipe, facts: dict) -> str | None:
    """The sentence of memory that is there and taken by other programs: the weights must fit into what is free.
    None where there is too little in any case, which `lacks` tells, or where a size is unknown."""
    sizes = [file.bytes for file in recipe.model.files]
    too_small = facts["memory"]["total_gib"] < recipe.needs.memory_gib
    free = facts["memory"].get("available_gib")
    if recipe.needs.gpu_count or too_small or None in (free, *sizes):
        return None
    wanted = sum(sizes) / GIB
    if free >= wanted:
        return None
    return (
        f"needs {wanted:.3g} GiB of free memory for the weights, and {free:g} GiB are free now; end other programs"
    )


def lacks_python(wanted: str | None) -> str | None:
    """The sentence of a Python that is not installed here, or None."""
    try:
        environment.interpreter(wanted)
    except environment.EnvironmentFailure as failure:
        return f"needs Python {wanted} and none is installed here; {failure.next_step}"
    return None


def lacks(needs: Needs, facts: dict, folder: Path | str) -> list[str]:
    """What a machine is missing of a recipe's needs, a sentence each. `folder` is what they call the place whose
    free disk is meant.

    A power limit that is not the published one is not missing: it is a condition.
    """
    found = []
    architecture = facts["cpu"]["architecture"]
    if needs.architectures and architecture not in needs.architectures:
        found.append(f"needs a CPU of {' or '.join(needs.architectures)}; this one is {architecture}")
    gpu = _lacks_gpus(needs, facts)
    if gpu:
        found.append(gpu)
    total = facts["memory"]["total_gib"]
    if total < needs.memory_gib:
        found.append(f"needs {needs.memory_gib:g} GiB of memory; this machine has {total:g}")
    if facts["disk_free_gib"] < needs.disk_gib:
        found.append(f"needs {needs.disk_gib:g} GiB of free disk; {folder} has {facts['disk_free_gib']:g}")
    for command in needs.commands:
        if not any(which(one) for one in command.split("|")):
            named = " or ".join(repr(one) for one in command.split("|"))
            found.append(f"needs the command {named}; install the package that brings it")
    return found


def which(command: str) -> str | None:
    """Where a command is: on the PATH; nvcc also where CUDA's variables and packages put it, off the PATH."""
    found = shutil.which(command)
    if found or command != "nvcc":
        return found
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return next((path for home in homes if home and (path := shutil.which(f"{home}/bin/nvcc"))), None)


def told(needs: Needs) -> str:
    """A recipe's needs in words."""
    commands = [command.replace("|", " or ") for command in needs.commands]
    parts = [
        " or ".join(needs.architectures),
        f"{needs.memory_gib:g} GiB of memory" if needs.memory_gib else "",
        f"{needs.disk_gib:g} GiB of disk" if needs.disk_gib else "",
        _gpus(needs),
        f"the command{'s' * (len(commands) > 1)} {', '.join(commands)}" if commands else "",
        f"about {needs.minutes:g} minutes",
    ]
    return ", ".join(part for part in parts if part)


def _lacks_gpus(needs: Needs, facts: dict) -> str | None:
    """What `machine.describe` found of GPUs against a recipe's needs: the sentence of what is missing, or None.

    What is not known of a GPU is not held against it. An engine takes the first GPUs there are, so these must do.
    """
    count = needs.gpu_count
    if not count:
        return None
    wanted, there = _gpus(needs), facts["gpus"]
    if there is None:
        why = facts.get("gpus_unknown", "nobody looked")
        return f"needs {wanted}; whether there is a GPU is not known: {why}{_beside(facts)}"
    fitting = [gpu for gpu in there if _fits(gpu, needs)]
    if len(there) >= count and all(gpu in fitting for gpu in there[:count]):
        return None
    if len(fitting) >= count:
        numbers = ",".join(str(gpu["index"]) for gpu in fitting[:count])
        first = f"an engine takes {_names(there[:count])} first: set {gpus.VISIBLE}={numbers}"
        return f"needs {wanted}; {_names(fitting[:count])} would do, and {first}"
    visible = facts.get("cuda_visible_devices")
    left = "" if visible is None else f" that {gpus.VISIBLE}={visible!r} leaves"
    return f"needs {wanted}; this machine has {_names(there) or 'none'}{left}{_beside(facts)}"


def _gpus(needs: Needs) -> str:
    """The GPUs that a recipe needs, in words; "" when it needs none."""
    count = needs.gpu_count
    asked = [
        f"{needs.vram_gib:g} GiB{' each' * (count > 1)}" if needs.vram_gib else "",
        f"compute capability {needs.compute_capability} or newer" if needs.compute_capability else "",
    ]
    asked = " and ".join(a for a in asked if a)
    kind = "" if not count else "a GPU" if count == 1 else f"{count} GPUs"
    return f"{kind} with {asked}" if asked else kind


def _fits(gpu: dict, needs: Needs) -> bool:
    memory, capability = gpu["memory_gib"], gpu["compute_capability"]
    enough = memory is None or memory >= needs.vram_gib
    return enough and (
        None in (capability, needs.compute_capability) or _newer(capability, needs.compute_capability)
    )


def _newer(capability: str, least: str) -> bool:
    return [int(n) for n in capability.split(".")] >= [int(n) for n in least.split(".")]


def _names(there: list[dict]) -> str:
    return " and ".join(
        f"{gpu['name'] or 'a GPU that cannot be asked'}"
        + (f" with {gpu['memory_gib']:g} GiB" if gpu["memory_gib"] else "")
        + (f" ({gpu['compute_capability']})" if gpu["compute_capability"] else "")
        for gpu in there
    )


def _beside(facts: dict) -> str:
    others = facts.get("other_gpus")
    return f"; there is {' and '.join(others)}, which NVML does not know" if others else ""
