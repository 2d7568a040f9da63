"""What was seen beside the requests: the strip, and a row per boot."""

from collections.abc import Iterator, Mapping
from statistics import fmean

from llmrepro import sample_rows, samples, xids
from llmrepro.charts import telemetry
from llmrepro.findings import Findings
from llmrepro.markup import Html, join, table, tag
from llmrepro.notation import NOTHING, number
from llmrepro.report.sections import Section
from llmrepro.sample_rows import Beside

TEXT = (
    "Looked at about once a second by a process of its own, from the start of each server to its end. CPUs and "
    "power are means over the samples taken while a request was in flight, memory and temperatures the highest of "
    "the boot. Xids are the errors that the GPU's driver reports."
)


def sections(found: Findings, figures: Mapping[str, Html]) -> Iterator[Section]:
    """The part of it, where there is something to tell; `figures` by their names."""
    if found.boots and (found.samples or found.guarded):  # one that was ended while it started is no boot yet
        yield Section(
            "telemetry", "Beside the requests", TEXT, join([figures.get(telemetry.NAME), _boots(found.beside)])
        )


def _boots(run: Beside) -> Html:
    """A row per boot; a column that no boot has anything for is left out."""
    cells = {n: _cells(run, n) for n in run.boots}
    head = [
        name for name in next(iter(cells.values())) if any(c[name] not in (None, NOTHING) for c in cells.values())
    ]
    words = [place for place, name in enumerate(head, 1) if name in WORDED]
    rows = [(f"boot {n}", *(NOTHING if c[name] is None else c[name] for name in head)) for n, c in cells.items()]
    return table("Each boot, as it was sampled", ["Boot", *head], rows, words=words)


WORDED = ("Server", "Energy, J/tok", "Xids")


def _cells(run: Beside, n: int) -> dict[str, object]:
    host = run.samples.get(n, {}).get(samples.HOST, [])
    asking = samples.during(host, samples.in_flight(run.asked(n)))
    power = sample_rows.power_w(run, [n])
    limits = dict.fromkeys(v for of_gpu in run.gpus(n).values() for v in samples.told(of_gpu, "power_limit_w"))
    core, memory = (sample_rows.peak(run, [n], q) for q in ("temperature_c", "memory_temperature_c"))
    return {
        "Server": run.boots[n]["server"],
        "samples": number(max(map(len, run.samples.get(n, {}).values()), default=0)),
        "CPUs busy": _of(fmean, asking, "busy"),
        "by the server": _of(fmean, asking, "server_cpus"),
        "its memory, GiB": _of(max, host, "server_gib"),
        "page cache, GiB": _of(max, host, "page_cache_gib"),
        "GPU power, W": power and number(round(power[0], 1)),
        "its limit, W": " and ".join(number(v) for v in limits) or None,
        "core, °C": core and number(core[0]),
        "memory, °C": memory and number(memory[0]),
        "Energy, J/tok": _energy(run, n),
        "Xids": _xids(run, n),
    }


def _of(over, of: list[samples.Sample], quantity: str) -> str | None:
    values = samples.told(of, quantity)
    return number(float(f"{over(values):.3g}")) if values else None


def _energy(run: Beside, n: int) -> Html | None:
    """Of each workload, with whose counter it is."""
    told = [(w.id, spent) for w in run.recipe.workloads if (spent := sample_rows.spent(run, n, w.id)) is not None]
    if not told:
        return None
    lines = ", ".join(f"{workload} {number(spent.joules / spent.tokens)}" for workload, spent in told)
    return join([lines, tag("small", f"by {sample_rows.counter(run.recipe)}")])


def _xids(run: Beside, n: int) -> Html | str | None:
    """What was seen and how it was watched: "none seen" only where somebody could look."""
    guarded = run.guarded.get(n)
    if guarded is None or not (guarded.gpus or run.recipe.needs.gpu_count):
        return None
    seen = ", ".join(f"{x.number}" + ("" if x.gpu is None else f" (GPU {x.gpu})") for x in guarded.xids)
    if guarded.unwatched is not None or guarded.xids_by is None:
        return join([seen or "unknown", tag("small", guarded.unwatched or "nobody told how they were watched")])
    return join(
        [seen or "none seen", tag("small", f"watched through {NAMES.get(guarded.xids_by, guarded.xids_by)}")]
    )


NAMES = {xids.NVML: "NVML", xids.KERNEL_LOG: "the kernel's log"}
