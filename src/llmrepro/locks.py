"""Nothing is measured beside something else: the locks of a machine's CPU and of each of its GPUs.

They are files that all users of the machine share, held with flock while a run measures, and by the supervisor of
its server too: a server that outlives its notebook by seconds still occupies what it ran on.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from llmrepro.markup import showable
from llmrepro.run_folder import RunError

FOLDER = "LLMREPRO_LOCKS"  # where the files lie, for containers that share a machine; else SHARED
SHARED = Path("/tmp")
POLL_S = 0.2
TOLD = 300  # bytes that are read of who holds a lock


class Part(NamedTuple):
    """What of a machine a measurement occupies. A part that is not `alone` bears others that are not."""

    name: str  # "cpu", or "gpu-" and the card's UUID
    alone: bool


class _Held(NamedTuple):
    fd: int
    part: Part
    times: int


_held: dict[str, _Held] = {}  # of this process: an arm's run is within its study's


def descriptors() -> list[int]:
    """The locks that this process holds, for who else has to hold them."""
    return [held.fd for held in _held.values()]


@contextmanager
def held(parts: Iterable[Part], holder: Path) -> Iterator[None]:
    """While the context lasts these parts of the machine are occupied by this process; `holder` is the folder that
    is told to who waits. Waits as long as it takes, and says for whom. What this process has already it keeps.

    All take their locks in the same order, so that none waits for one that waits for it. Raises RunError where a
    lock is no file.
    """
    alone: dict[str, bool] = {}
    for part in parts:
        alone[part.name] = alone.get(part.name, False) or part.alone
    with ExitStack() as stack:
        for name in sorted(alone):
            stack.enter_context(_one(Part(name, alone[name]), holder))
        yield


@contextmanager
def _one(part: Part, holder: Path) -> Iterator[None]:
    had = _held.get(part.name)
    if had is None:
        fd = _taken(part, holder)
        if fd is None:
            yield
            return
        had = _Held(fd, part, 0)
    _held[part.name] = had._replace(times=had.times + 1)
    try:
        yield
    finally:
        left = _held.pop(part.name)
        if left.times > 1:
            _held[part.name] = left._replace(times=left.times - 1)
        else:
            os.close(left.fd)


def _taken(part: Part, holder: Path) -> int | None:
    """The lock's descriptor once it is held; None on a disk that has no locks, which is said."""
    path = Path(os.environ.get(FOLDER) or SHARED) / f"llmrepro-{part.name}.lock"
    said = ""
    while True:
        fd = _opened(path)
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if part.alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            if _is(path, fd):
                _tell(path, fd, holder)
                return fd
            os.close(fd)  # it was deleted and made anew meanwhile
        except BlockingIOError:
            who = _holder(fd)
            os.close(fd)
            if who != said:
                print(f"waiting: {_named(part)} is measured by {who or 'another process'}", flush=True)
                said = who
            time.sleep(POLL_S)
        except OSError as error:
            os.close(fd)
            print(f"{path} cannot be locked ({error}): see that nothing else is measured meanwhile", flush=True)
            return None


def _named(part: Part) -> str:
    return "the CPU" if part.name == "cpu" else part.name.replace("gpu-", "the GPU ", 1)


def _opened(path: Path) -> int:
    """The file, made where it is not there. In a folder that all may write to the file of another user can be
    opened for reading only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else str(error)
        raise RunError(
            f"{path} is what keeps two measurements apart, and {why}; remove it, or set {FOLDER}"
        ) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RunError(f"{path} is what keeps two measurements apart, and it is no regular file; remove it")
    return fd


def _is(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _tell(path: Path, fd: int, holder: Path) -> None:
    """Write who holds a lock, where this user may; of several the last."""
    if os.fstat(fd).st_uid == os.geteuid():
        path.write_text(f"process {os.getpid()}, {holder}\n", encoding="utf-8")


def _holder(fd: int) -> str:
    """What a lock's file says of who holds it: another user may have written anything."""
    return " ".join(showable(os.pread(fd, TOLD, 0).decode(errors="replace")).split())
