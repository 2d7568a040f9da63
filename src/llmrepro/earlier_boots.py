"""What earlier boots of a run folder may have left: a run that was killed is gone before its server has ended."""

import fcntl
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from llmrepro.boot import ServerFailure, log_tail

PATIENCE_S = 120.0  # a server's grace, its container's removal, and a driver that does not let go
POLL_S = 0.05


def wait(boots: Path, on_wait: Callable[[float, str], None]) -> None:
    """Wait until no supervisor ends a server any more, which then holds no memory. `on_wait(seconds, what)` is
    called meanwhile. Raises ServerFailure after PATIENCE_S."""
    begin = time.monotonic()
    for spec in sorted(boots.glob("*.spec.json")):
        with open(spec, "rb") as file:
            while _held(file):
                waited_s = time.monotonic() - begin
                if waited_s > PATIENCE_S:
                    raise _still_there(spec)
                on_wait(waited_s, "an earlier server is ended")
                time.sleep(POLL_S)


def _still_there(spec: Path) -> ServerFailure:
    notes = spec.with_name(spec.name.replace(".spec.json", ".supervisor.log"))
    return ServerFailure(
        "supervisor",
        f"After {PATIENCE_S:g} s the server of an earlier boot has still not ended.",
        "look with ps what of it runs, and end that",
        notes,
        log_tail(notes),
    )


def _held(file: IO[bytes]) -> bool:
    """Whether its supervisor, which holds a lock on its spec, is still there."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a disk without locks
        return False
    return False
