"""What was seen beside a server: the sampler's telemetry.csv.

A row of telemetry.csv is one device at one moment, about once a second: the host, or a GPU. Its times are
perf_counter_ns, the clock of a record's t_send_ns and of a boot's started_at_ns. A blank cell is unknown.
"""

import csv
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

from llmrepro.client import Record
from llmrepro.run_folder import RunError

FILE, HOST, GPU = "telemetry.csv", "host", "gpu"
LABELS = ("t_ns", "boot", "device", "throttle")  # what is no quantity
MOST = 1e15  # of any quantity, in its unit
HOLE_S = 5.0  # without a sample for longer, nobody looked


@dataclass(frozen=True, slots=True)
class Sample:
    """One device at one moment; None is unknown.

    `busy`: of the host CPUs kept busy, of a GPU the share of its time. `steal_share`: 0 to 1. `energy_j` counts
    from an arbitrary start. `throttle`: why the clocks of a GPU are held back, none where it is idle or free.
    """

    t_ns: int
    boot: int
    device: str
    throttle: tuple[str, ...] = ()
    busy: float | None = None
    memory_gib: float | None = None
    free_gib: float | None = None
    page_cache_gib: float | None = None
    steal_share: float | None = None
    temperature_c: float | None = None
    memory_temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    pcie_generation: float | None = None
    pcie_width: float | None = None
    server_cpus: float | None = None
    server_gib: float | None = None
    disk_free_gib: float | None = None
    sampler_cpu_s: float | None = None


Samples = dict[str, list[Sample]]  # of one boot, by device in the sampler's order, each in the order of time
Span = tuple[int, int]  # from and to, perf_counter_ns
QUANTITIES = tuple(f.name for f in fields(Sample) if f.name not in LABELS)


def read(run_path: Path) -> dict[int, Samples]:
    """The samples of every boot that has some. Only a torn last line is forgiven, as a kill leaves it.

    Raises RunError naming the line and column of what is no sample.
    """
    path = run_path / FILE
    if not path.exists():
        return {}
    *lines, _torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = csv.reader(lines, strict=True)
    found: dict[int, Samples] = {}
    try:
        names = next(rows, [])
        if names and not {"t_ns", "boot", "device"} <= set(names):
            raise _broken(path, 1, f"its head is {','.join(names)[:80]!r}, and t_ns, boot and device were needed")
        for cells in rows:
            if len(cells) != len(names):
                raise _broken(path, rows.line_num, f"{len(cells)} cells, and {len(names)} were needed")
            sample = _sample(dict(zip(names, cells, strict=True)), path, rows.line_num)
            found.setdefault(sample.boot, {}).setdefault(sample.device, []).append(sample)
    except csv.Error as error:
        raise _broken(path, rows.line_num, str(error)) from None
    for samples in (s for by_device in found.values() for s in by_device.values()):
        samples.sort(key=lambda s: s.t_ns)
    return found


def _sample(told: dict[str, str], path: Path, line: int) -> Sample:
    try:
        t_ns, boot = int(told["t_ns"]), int(told["boot"])
    except ValueError:
        raise _broken(path, line, f"t_ns {told['t_ns'][:20]!r}, boot {told['boot'][:20]!r}: no numbers") from None
    quantities = {name: _number(told[name], name, path, line) for name in QUANTITIES if told.get(name)}
    reasons = tuple(word.replace("_", " ") for word in told.get("throttle", "").split("+") if word)
    return Sample(t_ns, boot, told["device"], reasons, **quantities)


def _number(cell: str, name: str, path: Path, line: int) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = float("nan")
    least, most = (-300.0, 3000.0) if name.endswith("temperature_c") else (0.0, MOST)
    if not least <= value <= most:  # which a NaN is not
        raise _broken(path, line, f"column {name}: {cell[:20]!r} cannot be")
    return value


def _broken(path: Path, line: int, why: str) -> RunError:
    return RunError(
        f"{path}, line {line}: {why}; the file was changed after it was written. Remove that line if you know why "
        "it is broken"
    )


def gpus(samples: Samples, count: int) -> Samples:
    """The GPUs of a run that needs `count` of them: an engine takes the first that it sees; of none, none."""
    there = [device for device in samples if device.startswith(GPU)]
    return {device: samples[device] for device in there[:count]}


def ended_ns(record: Record) -> int | None:
    """When a request ended: its stream's end, or else its last event; None where it has neither."""
    told = [record.t_done_s] if record.t_done_s is not None else [e.t_s for e in record.events[-1:]]
    return record.t_send_ns + round(told[0] * 1e9) if told else None


def in_flight(records: Iterable[Record]) -> list[Span]:
    """When at least one of the requests was under way, in order and apart from each other; those that were not
    sent, or of which nothing is known but that they were, have no such time."""
    spans = [(r.t_send_ns, end) for r in records if r.status != "skipped" and (end := ended_ns(r)) is not None]
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def during(samples: Sequence[Sample], spans: Sequence[Span]) -> list[Sample]:
    """The samples that were taken within spans, which lie in order and apart."""
    starts = [start for start, _ in spans]
    places = ((s, bisect_right(starts, s.t_ns) - 1) for s in samples)
    return [s for s, place in places if place >= 0 and s.t_ns <= spans[place][1]]


def told(samples: Iterable[Sample], quantity: str) -> list[float]:
    """The known values of a quantity."""
    return [value for s in samples if (value := getattr(s, quantity)) is not None]


def energy_j(samples: Sequence[Sample], start_ns: int, end_ns: int) -> float | None:
    """Joules between two moments, by the counter of one device, linear between its samples.

    None where a moment does not lie between two samples that are near each other, or where the counter fell or
    stood still: it was reset, or counts nothing.
    """
    known = [s for s in samples if s.energy_j is not None]
    times = [s.t_ns for s in known]
    ends = [_counter_j(known, times, t_ns) for t_ns in (start_ns, end_ns)]
    if None in ends:
        return None
    within = [
        ends[0],
        *(s.energy_j for s in known[bisect_left(times, start_ns) : bisect_right(times, end_ns)]),
        ends[1],
    ]
    fell = any(later < earlier for earlier, later in pairwise(within))
    return None if fell or ends[1] == ends[0] else ends[1] - ends[0]


def _counter_j(known: Sequence[Sample], times: Sequence[int], t_ns: int) -> float | None:
    after = bisect_left(times, t_ns)
    if after < len(times) and times[after] == t_ns:
        return known[after].energy_j
    if not 0 < after < len(times) or times[after] - times[after - 1] > HOLE_S * 1e9:
        return None
    a, b = known[after - 1], known[after]
    return a.energy_j + (b.energy_j - a.energy_j) * (t_ns - a.t_ns) / (b.t_ns - a.t_ns)


def unseen_s(samples: Sequence[Sample], start_ns: int, end_ns: int) -> float:
    """The longest time without a sample between two moments, in seconds."""
    inside = [s.t_ns for s in samples if start_ns < s.t_ns < end_ns]
    marks = [start_ns, *inside, end_ns]
    return max(later - earlier for earlier, later in pairwise(marks)) / 1e9
