"""Binding a program to the CPUs and the memory of one NUMA node, which numactl does."""

import shutil
from pathlib import Path

from llmrepro import processor


class NumaError(RuntimeError):
    """A binding that cannot be made here; the text says why and what to do."""


def cpus(node: int) -> str:
    """The CPUs of one node, as the kernel lists them ("0-15,32-47"). Raises NumaError for a node that is not
    here, or holds memory alone."""
    known = {one["node"]: one["cpus"] for one in processor.numa_nodes() or []}
    if not known.get(node):
        here = ", ".join(f"{n} (CPUs {c or 'none'})" for n, c in known.items()) or "none that the kernel tells"
        raise NumaError(
            f"the server is to be bound to NUMA node {node}, which has no CPUs here; nodes of this machine: "
            f"{here}. Change the server's `numa_node` to one of those, or leave it out"
        )
    return known[node]


def prefix(node: int, program: str = "numactl") -> list[str]:
    """What stands before a command that is to run on a node's CPUs and take memory from it alone."""
    return [program, f"--cpunodebind={node}", f"--membind={node}", "--"]


def checked(node: int) -> list[str]:
    """`prefix`, with numactl's own path. Raises NumaError for a node that is not here, or without numactl."""
    cpus(node)
    program = shutil.which("numactl")
    if program is None:
        raise NumaError(
            f"the server is to be bound to NUMA node {node}, and numactl is not installed here. Install the "
            "package numactl, or leave out the server's `numa_node`"
        )
    return prefix(node, program)


def allowed(pid: int | None) -> str | None:
    """The CPUs that a process may run on, as the kernel lists them; None when it cannot be known."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":")[1].strip() for line in lines if line.startswith("Cpus_allowed_list")), None)
