"""Metric rows (see rows.py) of what was sampled beside the requests: power, temperatures, energy, a guard's stop.

A boot is one value, as its samples follow each other; `n` counts the samples, or for energy the requests, that
stand behind a row. Boots made for one case of a workload start in a state of their own and are left out. What is
not known has no row.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from llmrepro import metrics, rows, samples
from llmrepro.client import Record
from llmrepro.guard_log import Guarded
from llmrepro.metrics import ANSWERED
from llmrepro.notation import plural
from llmrepro.recipe import Recipe
from llmrepro.samples import Samples

# At both ends the counter is read between two samples, at worst a quarter of a second's difference between busy
# and idle off: of ten seconds that is a twentieth.
LEAST_S = 10.0
TEMPERATURES = {"core_c": "temperature_c", "memory_c": "memory_temperature_c"}


@dataclass(frozen=True)
class Beside:
    """A run's boots, what each was asked (warm-ups too), and what was seen beside them, by boot."""

    recipe: Recipe
    boots: Mapping[int, dict]
    records: Mapping[int, list[Record]]
    samples: Mapping[int, Samples]
    guarded: Mapping[int, Guarded]

    def asked(self, boot: int) -> list[Record]:
        """The requests of a boot that were sent and count."""
        return [r for r in self.records.get(boot, []) if not r.warmup and r.status != "skipped"]

    def gpus(self, boot: int) -> Samples:
        """The GPUs that the recipe uses, as they were sampled."""
        return samples.gpus(self.samples.get(boot, {}), self.recipe.needs.gpu_count)

    def at_work(self, boot: int) -> Samples:
        """What the run computes on: its GPUs, or the host where it uses none."""
        if self.recipe.needs.gpu_count:
            return self.gpus(boot)
        return {d: s for d, s in self.samples.get(boot, {}).items() if d == samples.HOST}

    def replicates(self, server: str) -> dict[int, list[int]]:
        """The boots of a server that were made for no case, by replicate: one that went on where another stopped
        belongs to it."""
        found: dict[int, list[int]] = defaultdict(list)
        for n, boot in self.boots.items():
            if boot["server"] == server and "case" not in boot:
                found[boot["replicate"]].append(n)
        return found


class Spent(NamedTuple):
    """Energy of a workload in one boot, and the output tokens and requests that it went into."""

    joules: float
    tokens: int
    requests: int


def beside(
    recipe: Recipe, boots: Mapping[int, dict], records: list[Record], seen: Mapping[int, Samples], guarded
) -> Beside:
    """A run's boots with their records and samples; `records` have the boots that asked them."""
    by_boot: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_boot[record.boot].append(record)
    return Beside(recipe, boots, by_boot, seen, guarded)


def of_run(run: Beside) -> list[dict]:
    """The rows of every server."""
    found = []
    for server in (s.id for s in run.recipe.servers):
        replicates = run.replicates(server)
        found += _power(run, server, replicates)
        for limit, quantity in TEMPERATURES.items():
            found += _temperature(run, server, replicates, f"temperature.{limit}", quantity)
        found += _device_memory(run, server, replicates)
        found += _stops(run, server)
        found += [
            r for w in run.recipe.workloads if server in w.on for r in _energy(run, server, w.id, replicates)
        ]
    return found


def power_w(run: Beside, boots: list[int]) -> tuple[float, int] | None:
    """(mean power of the run's GPUs together while a request was in flight, samples of each): every GPU's mean
    over the samples taken then, summed; None where one of them did not tell."""
    values: dict[str, list[float]] = defaultdict(list)
    for boot in boots:
        spans = samples.in_flight(run.asked(boot))
        for device, of_gpu in run.gpus(boot).items():
            values[device] += samples.told(samples.during(of_gpu, spans), "power_w")
    if len(values) < max(1, run.recipe.needs.gpu_count) or not all(values.values()):
        return None
    return sum(fmean(v) for v in values.values()), min(len(v) for v in values.values())


def peak(run: Beside, boots: list[int], quantity: str) -> tuple[float, int] | None:
    """(greatest value of what the run computes on, samples); None where nothing was told."""
    found = [samples.told(s, quantity) for boot in boots for s in run.at_work(boot).values()]
    values = [v for told in found for v in told]
    return (max(values), len(values)) if values else None


def spent(run: Beside, boot: int, workload: str) -> Spent | None:
    """Energy from the first request that counts to the last token, prefill and whatever lies between included, by
    the GPUs' counters, or the CPU's where the run uses none.

    None where a counter or a count of tokens is not known, a request failed, or all of it took under LEAST_S.
    """
    mine = [r for r in run.records.get(boot, []) if r.workload == workload and r.status != "skipped"]
    start_ns = min((r.t_send_ns for r in mine if not r.warmup), default=None)
    if start_ns is None:
        return None
    mine = [r for r in mine if r.t_send_ns >= start_ns]  # warm-ups in between used energy too, and made tokens
    lasts = [metrics.t_last_s(r) for r in mine]
    if None in lasts or any(r.status not in ANSWERED or not r.output_tokens for r in mine):
        return None
    end_ns = max(r.t_send_ns + round(last * 1e9) for r, last in zip(mine, lasts, strict=True))
    used = [samples.energy_j(of, start_ns, end_ns) for of in run.at_work(boot).values()]
    if end_ns - start_ns < LEAST_S * 1e9 or len(used) < max(1, run.recipe.needs.gpu_count) or None in used:
        return None
    return Spent(sum(used), sum(r.output_tokens for r in mine), len(mine))


def counter(recipe: Recipe) -> str:
    """Whose counter an energy is from."""
    return "the GPU's counter" if recipe.needs.gpu_count else "the CPU package's counter (RAPL)"


def stop_s(run: Beside, boot: int) -> float | None:
    """Seconds from a boot's first request that counts to the guard's stop; None where it did not stop it."""
    stop = run.guarded[boot].stop if boot in run.guarded else None
    first_ns = min((r.t_send_ns for r in run.asked(boot)), default=None)
    if stop is None or first_ns is None or stop.t_ns < first_ns:
        return None
    return (stop.t_ns - first_ns) / 1e9


def _power(run: Beside, server: str, replicates: dict[int, list[int]]) -> list[dict]:
    found = {n: told for n, boots in replicates.items() if (told := power_w(run, boots)) is not None}
    count = run.recipe.needs.gpu_count
    note = "while a request was in flight" + (f", {count} GPUs together" if count > 1 else "")
    return _row("power.busy_w", found, server, note)


def _temperature(
    run: Beside, server: str, replicates: dict[int, list[int]], metric: str, quantity: str
) -> list[dict]:
    found = {n: told for n, boots in replicates.items() if (told := peak(run, boots, quantity)) is not None}
    of = "of the GPU" if run.recipe.needs.gpu_count else "of the CPU's package"
    how = f"mean of {plural(len(found), 'boot')}, each its peak" if len(found) > 1 else "its peak"
    return _row(metric, found, server, f"{of}, {how}")


def _device_memory(run: Beside, server: str, replicates: dict[int, list[int]]) -> list[dict]:
    """What is taken on the GPUs at the peak of each, whoever takes it; nothing where the recipe uses none."""
    found = {n: told for n, boots in replicates.items() if (told := _taken(run, boots)) is not None}
    return _row("memory.device_gib", found, server, "peak, whoever takes it")


def _taken(run: Beside, boots: list[int]) -> tuple[float, int] | None:
    values: dict[str, list[float]] = defaultdict(list)
    for boot in boots:
        for device, of_gpu in run.gpus(boot).items():
            values[device] += samples.told(of_gpu, "memory_gib")
    if not values or len(values) < run.recipe.needs.gpu_count or not all(values.values()):
        return None
    return sum(map(max, values.values())), sum(map(len, values.values()))


def _row(metric: str, found: dict[int, tuple[float, int]], server: str, note: str) -> list[dict]:
    if not found:
        return []
    row = rows.sampled(metric, {n: [value] for n, (value, _) in found.items()}, server=server, note=note)
    return [row | {"n": sum(n for _, n in found.values())}]


def _stops(run: Beside, server: str) -> list[dict]:
    mine = [n for n, boot in run.boots.items() if boot["server"] == server]
    found = {n: [seconds] for n in mine if (seconds := stop_s(run, n)) is not None}
    if not found:
        return []
    reasons = "; ".join(dict.fromkeys(run.guarded[n].stop.reason for n in found))
    cool = [run.guarded[n].stop.reason for n in found if not _was_hot(run, n)]
    gate = f"the guard stopped it for something else than heat: {cool[0]}" if cool else None
    return [rows.sampled("guard.stop_s", found, server=server, note=reasons, gate=gate)]


def _was_hot(run: Beside, boot: int) -> bool:
    """Whether a temperature of a boot was above what the guard allowed."""
    allowed = run.guarded[boot].limits
    peaks = {limit: peak(run, [boot], quantity) for limit, quantity in TEMPERATURES.items()}
    return any(
        found is not None and allowed.get(limit) is not None and found[0] > allowed[limit]
        for limit, found in peaks.items()
    )


def _energy(run: Beside, server: str, workload: str, replicates: dict[int, list[int]]) -> list[dict]:
    found = {
        n: told
        for n, boots in replicates.items()
        if (told := [s for b in boots if (s := spent(run, b, workload))])
    }
    if not found:
        return []
    by_boot = {n: [sum(s.joules for s in told) / sum(s.tokens for s in told)] for n, told in found.items()}
    where = {"server": server, "workload": workload, "note": f"by {counter(run.recipe)}"}
    row = rows.sampled("energy_j_per_token", by_boot, **where)
    return [row | {"n": sum(s.requests for told in found.values() for s in told)}]
