"""What was sampled beside the requests, below the run's timeline: CPUs, memory, power, temperatures, clocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from llmrepro import samples
from llmrepro.charts import timeline
from llmrepro.charts.drawings import COLOURS, Drawing, grid, handles, legend, servers_of
from llmrepro.charts.timeline import Timeline
from llmrepro.findings import Findings
from llmrepro.notation import number, plural
from llmrepro.samples import HOST, Sample

TITLE, NAME = "Timeline and telemetry", "telemetry"
STEAL = 0.01  # share of the CPU's time from which on what the hypervisor takes is shown
MOST_POINTS = 600  # of a line: beyond it, of each slice of time the least and the greatest
ROW_IN, LANE_IN = 0.78, 0.19
FIRST = {"color": COLOURS[0], "linestyle": "-"}
SECOND = {"color": COLOURS[1], "linestyle": "--"}
WHOLE = {"color": COLOURS[4], "linestyle": "-"}
LIMIT = {"color": COLOURS[4], "linestyle": ":"}
SHOWN = (
    *("busy", "server_cpus", "server_gib", "page_cache_gib", "steal_share", "temperature_c"),
    *("memory_temperature_c", "power_w", "power_limit_w", "sm_clock_mhz"),
)


@dataclass(frozen=True)
class Panel:
    """A row of the chart: lines of one device in one unit, {quantity: (label, look)}; `filled` is one of them.
    `marked`: with the seconds in which the clocks were held back."""

    device: str
    title: str
    unit: str
    lines: dict[str, tuple[str, dict]]
    filled: str = ""
    from_nought: bool = True
    marked: bool = False
    factor: float = 1.0


HOST_PANELS = (
    Panel(HOST, "CPUs busy", "CPUs", {"server_cpus": ("server", FIRST), "busy": ("all", WHOLE)}, "server_cpus"),
    Panel(
        HOST,
        "Memory",
        "GiB",
        {"server_gib": ("server", FIRST), "page_cache_gib": ("page cache", SECOND)},
        "server_gib",
    ),
    Panel(HOST, "CPU time taken by the hypervisor", "%", {"steal_share": ("", FIRST)}, factor=100),
    Panel(HOST, "Temperature of the CPU", "°C", {"temperature_c": ("", FIRST)}, from_nought=False),
)


def telemetry(found: Findings) -> Drawing | None:
    """The bands of boots and workloads, below them a row for whatever was sampled; None without a sample."""
    panels = [panel for panel in _panels(found) if _told(found, panel)]
    time = timeline.of(found)
    if not panels or not time.spans:
        return None
    bands = list(timeline.rows(found, time))
    top_in = 0.75 + LANE_IN * (1 + len(timeline.lanes(bands)))
    figure, (top, *below) = grid(found, [top_in, *(ROW_IN for _ in panels[1:]), ROW_IN + 0.35])
    timeline.draw(figure, top, found, time, bands)
    thinned = [_draw(axes, found, time, panel) for axes, panel in zip(below, panels, strict=True)]
    for axes in (top, *below):
        axes.set_xlim(0, time.end_s)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.6g}"))
        for cut in time.cuts:
            axes.axvline(cut, color="#8a8a8a", linewidth=0.8, linestyle=(0, (1, 2)))
        axes.tick_params(axis="x", labelbottom=axes is below[-1])
    top.set_title(TITLE)
    below[-1].set_xlabel("time from the first boot's start (s)" + (", gaps cut" if time.cuts else ""), fontsize=9)
    figure.align_ylabels(below)
    servers = servers_of(found, bands)
    if len(servers) > 1:
        legend(figure, handles(servers, marker="s"), min(3, len(servers)))
    data = [*bands, *_rows(found, time)]
    columns = dict.fromkeys(name for row in data for name in row)
    data = [dict.fromkeys(columns) | row for row in data]
    caption = _caption(found, time, bands, any(thinned))
    return Drawing(NAME, TITLE, caption, _alt(found, time, bands, panels), figure, data)


def _panels(found: Findings) -> Iterator[Panel]:
    yield from HOST_PANELS
    for gpu in dict.fromkeys(d for n in found.samples for d in found.beside.gpus(n)):
        name = f"GPU {gpu.removeprefix(samples.GPU)}"
        power = {"power_w": ("", FIRST), "power_limit_w": ("limit", LIMIT)}
        heat = {"temperature_c": ("core", FIRST), "memory_temperature_c": ("memory", SECOND)}
        yield Panel(gpu, f"{name}, power", "W", power)
        yield Panel(gpu, f"{name}, temperature", "°C", heat, from_nought=False)
        yield Panel(gpu, f"{name}, SM clock", "MHz", {"sm_clock_mhz": ("", FIRST)}, marked=True)


def _told(found: Findings, panel: Panel) -> bool:
    """Whether there is anything to show: of what the hypervisor takes, whether it is worth a row."""
    least = STEAL if "steal_share" in panel.lines else float("-inf")
    return any(value > least for q in panel.lines for value in _values(found, panel.device, q))


def _values(found: Findings, device: str, quantity: str) -> list[float]:
    return [v for by_device in found.samples.values() for v in samples.told(by_device.get(device, []), quantity)]


def _draw(axes: Axes, found: Findings, time: Timeline, panel: Panel) -> bool:
    """A row of the chart; whether its lines had to be thinned."""
    entries, thinned, greatest = [], False, 0.0
    for quantity, (label, look) in panel.lines.items():
        points = list(_points(found, time, panel, quantity))
        values = [v for _, v in points if v == v]
        if not values:
            continue
        thinned |= len(values) > MOST_POINTS
        points = _thin(points, time.end_s) if len(values) > MOST_POINTS else points
        greatest = max(greatest, *values)
        x, y = [x for x, _ in points], [y for _, y in points]
        fills = quantity == panel.filled
        if fills:
            axes.fill_between(x, y, color=look["color"], alpha=0.35, linewidth=0)
        axes.plot(x, y, linewidth=1.1, **look)
        shape = {"alpha": 0.5, "color": look["color"]}
        entries += [Patch(label=label, **shape) if fills else Line2D([], [], label=label, **look)] if label else []
    if panel.marked:
        entries += _mark(axes, found, time, panel.device)
    if panel.from_nought:
        axes.set_ylim(0, 1.12 * greatest or 1)
    else:
        axes.margins(y=0.12)
    axes.set_title(panel.title, fontsize=9, pad=3)
    axes.set_ylabel(panel.unit, fontsize=8)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.6g}"))
    axes.tick_params(labelsize=8)
    if entries:
        place = {"loc": "lower right", "bbox_to_anchor": (1, 0.98), "borderaxespad": 0, "ncols": 3}
        axes.legend(handles=entries, frameon=False, fontsize=8, handlelength=1.6, columnspacing=1.2, **place)
    return thinned


def _mark(axes: Axes, found: Findings, time: Timeline, device: str) -> list[Line2D]:
    """A tick at the foot for every sample in which a GPU's clocks were held back."""
    at = [time.at(n, s.t_ns) for n, s in _samples(found, time, device) if s.throttle]
    if not at:
        return []
    look = {"linestyle": "", "marker": "|", "color": COLOURS[5], "markersize": 7}
    slices = {round(x / time.end_s * MOST_POINTS): x for x in at}
    axes.plot(list(slices.values()), [0.06] * len(slices), transform=axes.get_xaxis_transform(), **look)
    return [Line2D([], [], label="held back", **look)]


def _samples(found: Findings, time: Timeline, device: str) -> Iterator[tuple[int, Sample]]:
    for n in time.spans:
        yield from ((n, s) for s in found.samples.get(n, {}).get(device, []))


def _points(found: Findings, time: Timeline, panel: Panel, quantity: str) -> Iterator[tuple[float, float]]:
    """(seconds, value) of a line; (x, NaN) where it breaks: between boots, in a hole, where nothing was told."""
    last: tuple[int, int] | None = None
    for n, s in _samples(found, time, panel.device):
        value, x = getattr(s, quantity), time.at(n, s.t_ns)
        if last is not None and (last[0] != n or s.t_ns - last[1] > samples.HOLE_S * 1e9):
            yield x, float("nan")
        last = n, s.t_ns
        yield x, float("nan") if value is None else value * panel.factor


def _thin(points: list[tuple[float, float]], end_s: float) -> list[tuple[float, float]]:
    """Of each slice of time the least and the greatest value in their order, and that it breaks where it does."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    breaks = 0
    for x, y in points:
        breaks += y != y
        slices.setdefault((breaks, int(x / end_s * MOST_POINTS / 2)), []).append((x, y))
    kept = []
    for mine in slices.values():
        told = [p for p in mine if p[1] == p[1]]
        kept += [p for p in mine if p[1] != p[1]]
        kept += sorted({min(told, key=lambda p: p[1]), max(told, key=lambda p: p[1])}) if told else []
    return kept


def _rows(found: Findings, time: Timeline) -> Iterator[dict]:
    """Every sample of what is shown, at its place on the axis."""
    devices = [HOST, *dict.fromkeys(d for n in time.spans for d in found.beside.gpus(n))]
    for n in time.spans:
        where = {"kind": "sample", "boot": n, "server": found.boots[n]["server"]}
        for device in (d for d in devices if d in found.samples.get(n, {})):
            for s in found.samples[n][device]:
                at_s = round(time.at(n, s.t_ns), 3)
                told = {name: getattr(s, name) for name in SHOWN}
                yield {
                    **where,
                    "device": device,
                    "start_s": at_s,
                    "end_s": at_s,
                    **told,
                    "held_back": "+".join(s.throttle),
                }


def _caption(found: Findings, time: Timeline, bands: list[dict], thinned: bool) -> str:
    kinds = {b["kind"] for b in bands}
    count = sum(len(max(found.samples[n].values(), key=len)) for n in time.spans if n in found.samples)
    boots = sum(b["kind"] == "boot" for b in bands)
    said = [
        f"n = {plural(count, 'sample')} of {plural(boots, 'boot')}, about one a second.",
        "Top: each boot, pale until its first token, and below it when each workload was asked.",
        "✕: a request that failed." if "failure" in kinds else "",
        "★: an error that the GPU's driver reported." if "xid" in kinds else "",
        "▼: the guard stopped the server." if "stop" in kinds else "",
        f"Dotted: {plural(len(time.cuts), 'gap')} between boots cut out, each over a minute or of unknown length."
        if time.cuts
        else "",
        "Lines run through the least and the greatest of each slice of time." if thinned else "",
        "Held back: the driver says why the clocks are lower than they could be." if _held(found) else "",
    ]
    return " ".join(s for s in said if s)


def _held(found: Findings) -> int:
    every = (of_gpu for n in found.samples for of_gpu in found.beside.gpus(n).values())
    return sum(bool(s.throttle) for of_gpu in every for s in of_gpu)


def _alt(found: Findings, time: Timeline, bands: list[dict], panels: list[Panel]) -> str:
    told = [f"{plural(len(time.spans), 'boot')} over {number(round(time.end_s))} s"]
    for workload in timeline.lanes(bands):
        mine = [b for b in bands if b.get("what") == workload]
        failed = sum(b["kind"] == "failure" for b in mine)
        asked = sorted({b["boot"] for b in mine})
        told.append(
            f"{workload} in {plural(len(asked), 'boot')}"
            + (f", {plural(failed, 'request')} failed" if failed else "")
        )
    told += [f"boot {b['boot']}: {b['what']} reported" for b in bands if b["kind"] == "xid"]
    told += [
        f"boot {b['boot']}: stopped by the guard at {b['start_s']:.0f} s" for b in bands if b["kind"] == "stop"
    ]
    told += [f"{panel.title}: {', '.join(_said(found, panel))}" for panel in panels]
    held = _held(found)
    told += [f"clocks held back in {plural(held, 'sample')}"] if held else []
    return f"Timeline of the run with what was sampled beside it. {'; '.join(told)}."


def _said(found: Findings, panel: Panel) -> Iterator[str]:
    for quantity, (label, _) in panel.lines.items():
        values = [v * panel.factor for v in _values(found, panel.device, quantity)]
        if values:
            mean, most = (number(float(f"{v:.3g}")) for v in (fmean(values), max(values)))
            told = f"mean {mean}, at most {most}" if min(values) < max(values) else most
            yield f"{label} {told} {panel.unit}".strip()
