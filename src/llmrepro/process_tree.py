"""A server's processes: what all of them use of the CPUs and of memory, at little cost however many others run."""

import os
from typing import NamedTuple

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Used(NamedTuple):
    """`cpu_s` is cumulated, with that of processes which have ended. `resident_bytes` is a sum over processes: a
    page that several of them share counts for each, and so does a file that each has mapped, such as weights."""

    cpu_s: float
    resident_bytes: int
    processes: int


class Tree:
    """The processes below `root`, which must be one that inherits the orphans among them: a child subreaper, or
    the first process of a container. Then whoever is once in the tree stays in it, and whoever is not comes never
    in, so that each look reads the files of new processes and of the tree, and of nobody else.

    `counted`: whether `root` is one of them itself. `but` is a child that is none of them, with all below it.
    """

    def __init__(self, root: int, counted: bool = False, but: int | None = None):
        self.root, self.counted = root, counted
        self._tree = {root}
        self._others = {but} if but is not None else set()

    def look(self) -> Used | None:
        """What the tree uses now; None when its root is gone."""
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._tree &= there
        self._others &= there
        self._sort(there - self._tree - self._others)
        cpu_ticks = resident_pages = processes = 0
        root = _stat(self.root)
        if root is None or self.root not in self._tree:
            return None
        for pid in self._tree:
            stat = root if pid == self.root else _stat(pid)
            if stat is None:
                continue
            cpu_ticks += stat.waited_ticks
            if pid != self.root or self.counted:
                cpu_ticks += stat.own_ticks
                resident_pages += _resident_pages(pid)
                processes += 1
        return Used(cpu_ticks * TICK_S, resident_pages * PAGE_BYTES, processes)

    def _sort(self, new: set[int]) -> None:
        parents = {pid: stat.parent for pid in new if (stat := _stat(pid)) is not None}
        while inside := {pid for pid, parent in parents.items() if parent in self._tree}:
            self._tree |= inside
            for pid in inside:
                del parents[pid]
        self._others |= parents.keys()


class _Stat(NamedTuple):
    parent: int
    own_ticks: int
    waited_ticks: int  # of children that ended and were waited for


def _stat(pid: int) -> _Stat | None:
    """None when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            words = file.read(1024).rpartition(b")")[2].split()  # a name may hold blanks and brackets
    except OSError:
        return None
    if len(words) < 15:
        return None
    user, system, waited_user, waited_system = map(int, words[11:15])
    return _Stat(int(words[1]), user + system, waited_user + waited_system)


def _resident_pages(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            return int(file.read(256).split()[1])
    except (OSError, IndexError):
        return 0
