"""Nothing is measured beside something else: the locks of a machine's CPU and of each of its GPUs.

They are files that all users of the machine share, held with flock while a run measures, and by the supervisor of
its server too: a server that outlives its notebook by seconds still occupies what it ran on.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from llmrepro.markup import showable
from llmrepro.run_folder import RunError

FOLDER = "LLMREPRO_LOCKS"  # where the files lie, for containers that share a machine; else SHARED
SHARED = Path("/tmp")
POLL_S = 0.2
TOLD = 1000  # bytes that are read of who holds a lock
SIGNED = re.compile(r"process (\d{1,10}), (.+)")


class Part(NamedTuple):
    """What of a machine a measurement occupies. A part that is not `alone` bears others that are not."""

    name: str  # "cpu", or "gpu-" and the card's UUID
    alone: bool


_held: dict[str, tuple[int, Part]] = {}  # descriptors of this process by part: an arm's run is within its study's
_said: set[Path] = set()  # the places that were said to have no locks


def descriptors() -> list[int]:
    """The locks that this process holds, for who else has to hold them."""
    return [fd for fd, _ in _held.values()]


@contextmanager
def held(parts: Iterable[Part], holder: Path) -> Iterator[bool]:
    """While the context lasts these parts of the machine are occupied by this process; `holder` is the folder that
    is told to who waits. Waits as long as it takes, says for whom, and yields whether it waited. What this process
    has already it keeps.

    All take their locks in the same order, so that none waits for one that waits for it; the CPU's is the first.
    Raises RunError where a lock is no file, or one that may not be opened.
    """
    alone: dict[str, bool] = {}
    for part in parts:
        alone[part.name] = alone.get(part.name, False) or part.alone
    before, waited = set(_held), False
    try:
        for name in sorted(alone):
            waited |= _take(Part(name, alone[name]), holder)
        yield waited
    finally:
        for name in set(_held) - before:  # closed, not unlocked: a server that cannot be ended keeps its lock
            os.close(_held.pop(name)[0])


def _take(part: Part, holder: Path) -> bool:
    """Put a part among those held, unless its disk has no locks, which is said. True when that took a wait."""
    path, said = Path(os.environ.get(FOLDER) or SHARED) / f"llmrepro-{part.name}.lock", ""
    if part.name in _held:
        assert _held[part.name][1].alone or not part.alone, f"{part.name} is shared, and now wanted alone"
        return False
    while True:
        fd = -1
        try:
            fd = _opened(path)
            fcntl.flock(fd, (fcntl.LOCK_EX if part.alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            if _is(path, fd):  # else it was deleted, and others lock a newer one
                _held[part.name] = fd, part
                _tell(fd, holder)
                return bool(said)
        except BlockingIOError:
            if said != (said := _holders(path, fd)):
                print(f"waiting: {_named(part)} is taken by {said}", flush=True)
        except OSError as error:
            if path not in _said:
                _said.add(path)
                print(f"{path} cannot be locked ({error}): see that nothing else is measured", flush=True)
            return bool(said)
        finally:
            if fd >= 0 and part.name not in _held:  # after an interrupt too
                os.close(fd)
        time.sleep(POLL_S if said else 0)


def _named(part: Part) -> str:
    return "the CPU" if part.name == "cpu" else part.name.replace("gpu-", "the GPU ", 1)


def _opened(path: Path) -> int:
    """The file, made where it is not there. In a folder that all may write to the file of another user can be
    opened for reading only. Raises OSError where there is no place for files, RunError for what only a person can
    put right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.fchmod(fd, 0o644)  # whatever the umask: other users have to open it
        return fd
    except FileExistsError:
        pass
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:  # deleted in between
        return _opened(path)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EACCES):
            raise
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


def _tell(fd: int, holder: Path) -> None:
    """Write who holds a lock, where the file is this user's and has no second name: that could be any file."""
    found = os.fstat(fd)
    if (found.st_uid, found.st_nlink) == (os.geteuid(), 1):
        with contextlib.suppress(OSError), open(f"/proc/self/fd/{fd}", "wb") as file:
            file.write(f"process {os.getpid()}, {holder}\n".encode())


def _holders(path: Path, fd: int) -> str:
    """Who holds a lock: the processes that the kernel tells, with the folders that they told of. One that has
    ended left a server behind, which its supervisor ends."""
    told = dict(pair for one in path.parent.glob("llmrepro-*.lock") if (pair := _told(one)))
    found = []
    for pid in _locked_by(os.fstat(fd).st_ino):
        who = f"process {pid}" if Path(f"/proc/{pid}").exists() else f"what process {pid} left running"
        found.append(f"{who} ({told[pid]})" if pid in told else who)
    return " and ".join(found) or "a process that cannot be seen from here"


def _told(path: Path) -> tuple[int, str] | None:
    """The process and the folder that a lock's file tells of, which may be an earlier holder's; another user may
    have written anything."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            text = file.read(TOLD).decode(errors="replace")
    except OSError:
        return None
    found = SIGNED.fullmatch(showable(text).strip())
    return (int(found[1]), found[2]) if found else None


def _locked_by(inode: int) -> list[int]:
    """The processes that /proc/locks has for a file, a line each: `1: FLOCK ADVISORY WRITE 4711 fe:00:12345 0
    EOF`. None of another namespace is there. By the inode alone: some file systems show another device."""
    try:
        lines = Path("/proc/locks").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    words = [line.split() for line in lines if " FLOCK " in line and " -> " not in line]
    return sorted({int(w[4]) for w in words if w[5].rpartition(":")[2] == str(inode) and int(w[4]) > 0})
