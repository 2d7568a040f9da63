"""What the guard of a boot tells, boots/<n>.guard.jsonl: the sampler writes it as it happens, others read it.

A JSON object a line, each with its `kind`, `at` and `t_ns`: `watch` with the limits, the cards and where Xids are
read from, anew when that changes; `xid` for each error of a GPU's driver; `stop` when the server must not go on.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from llmrepro.run_folder import RunError, now, read_lines
from llmrepro.xids import UNKNOWN, Xid

SAFETY = ("core_c", "memory_c")


class Stop(NamedTuple):
    """When and why the guard ended a server, and what to do next."""

    t_ns: int
    reason: str
    next_step: str = ""


@dataclass(frozen=True)
class Guarded:
    """What the guard told of a boot. `xids_by` says how the driver's errors were watched ("nvml", "kernel log"
    or "unknown: why"), the last where that changed, None where it never said; `gpus` are the cards that it
    watched, `limits` what it allowed, by the names of a recipe's safety."""

    gpus: tuple = ()
    limits: dict = field(default_factory=dict)
    xids_by: str | None = None
    xids: tuple[Xid, ...] = ()
    stop: Stop | None = None

    @property
    def unwatched(self) -> str | None:
        """Why the driver's errors could not be watched; None where they could, or nobody said."""
        if self.xids_by is None or not self.xids_by.startswith(UNKNOWN):
            return None
        return self.xids_by.removeprefix(UNKNOWN).lstrip(": ") or "no reason told"


def name(boot: int) -> str:
    """The file of a boot, below the run folder."""
    return f"boots/{boot}.guard.jsonl"


def line(kind: str, t_ns: int | None = None, **facts) -> bytes:
    """A line as it is written; of now, without a `t_ns` (perf_counter_ns)."""
    told = {"kind": kind, "at": now(), "t_ns": t_ns or time.perf_counter_ns(), **facts}
    return json.dumps(told, ensure_ascii=False).encode() + b"\n"


def read(path: Path | None) -> Guarded:
    """A file, as far as it is written; nothing told where there is none. Raises RunError naming a file that the
    guard did not write so, or its line that is broken and not the last."""
    lines = read_lines(path) if path is not None else []
    try:
        of = {kind: [line for line in lines if line["kind"] == kind] for kind in ("watch", "xid", "stop")}
        watch = of["watch"][-1] if of["watch"] else {}
        xids = [
            Xid(int(x["t_ns"]), int(x["xid"]), _index(x.get("gpu")), str(x.get("text") or "")) for x in of["xid"]
        ]
        stops = [Stop(int(s["t_ns"]), str(s["reason"]), str(s.get("next_step") or "")) for s in of["stop"]]
        by = watch.get("xids")
        limits = {k: float(v) for k, v in (watch.get("limits") or {}).items() if k in SAFETY and v is not None}
        told = tuple(map(int, watch.get("gpus") or ())), limits
        return Guarded(*told, None if by is None else str(by), tuple(xids), stops[0] if stops else None)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RunError(f"{path} is not as the guard writes it ({error!r}); restore it, or run again") from None


def _index(gpu: object) -> int | None:
    return None if gpu is None else int(gpu)


def of_boots(run_path: Path, boots: Iterable[int]) -> dict[int, Guarded]:
    """What the guard told of the boots that it watched. Raises RunError as `read` does."""
    paths = {n: run_path / name(n) for n in boots}
    return {n: read(path) for n, path in paths.items() if path.exists()}


def latest(run_path: Path) -> Guarded:
    """What the guard told of the latest boot that it watched."""
    numbers = [int(path.name.partition(".")[0]) for path in run_path.glob("boots/*.guard.jsonl")]
    return read(run_path / name(max(numbers)) if numbers else None)
