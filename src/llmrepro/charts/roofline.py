"""Decode rates under the bandwidth that bounds them: a line per machine, a point per rate."""

from collections import defaultdict

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from llmrepro import roofline
from llmrepro.ceilings import Rate, Roof, rates, roofs
from llmrepro.charts.drawings import Drawing, canvas, legend
from llmrepro.charts.sources import HERE, PUBLISHED
from llmrepro.findings import Findings
from llmrepro.notation import number, plural

TITLE = "Decode speed and the bandwidth roofline"
NAME = "roofline"
AROUND = 4.0  # times the points' own range that is shown to either side


def decode_roofline(found: Findings) -> Drawing | None:
    """Every decode rate over the bytes that its token reads; None without a rate that a bandwidth is known for."""
    lines = roofs(found)
    points = [r for r in rates(found) if r.here in {line.here for line in lines}]
    if not points:
        return None
    lines = [line for line in lines if line.here in {p.here for p in points}]
    figure, axes = canvas(found, 3.3)
    ends = _range([p.bytes_per_token / 1e9 for p in points])
    read = np.geomspace(*ends, 50)
    for line in lines:
        axes.plot(read, line.bandwidth.value / read, color=_look(line.here)["color"], linestyle=_style(line.here))
        resident = line.llc_bytes and roofline.CACHE_RESIDENT * line.llc_bytes / 1e9
        if resident and resident > ends[0]:
            axes.axvspan(ends[0], min(resident, ends[1]), color=_look(line.here)["color"], alpha=0.08, linewidth=0)
    for p in points:
        axes.plot(
            p.bytes_per_token / 1e9,
            p.tps,
            linestyle="",
            markersize=7,
            zorder=4,
            alpha=0.85,
            fillstyle="none" if p.speculative else "full",
            **_look(p.here),
        )
    bounds = [r.bandwidth.value * 1e9 / p.bytes_per_token for p in points for r in lines if r.here == p.here]
    axes.set(
        title=TITLE,
        xlabel="read per token: weights and KV cache (GB)",
        ylabel="decode speed (tok/s)",
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=(min(p.tps for p in points) / 2.5, max(*(p.tps for p in points), *bounds) * 2.5),
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.6g}"))
        axis.set_minor_formatter(NullFormatter())
    legend(figure, _entries(lines, points, ends[0]), 2)
    data = _data(lines, points)
    return Drawing(NAME, TITLE, _caption(lines, points), _alt(lines, points), figure, data)


def _look(here: bool) -> dict:
    return HERE if here else PUBLISHED


def _style(here: bool) -> str:
    return "-" if here else "--"


def _range(gigabytes: list[float]) -> tuple[float, float]:
    return min(gigabytes) / AROUND, max(gigabytes) * AROUND


def _entries(lines: list[Roof], points: list[Rate], start_gb: float) -> list:
    entries: list = [
        Line2D(
            [],
            [],
            color=_look(r.here)["color"],
            linestyle=_style(r.here),
            label=f"{number(float(r.bandwidth.value))} GB/s, {'measured here' if r.here else 'published machine'}",
        )
        for r in lines
    ]
    for here, speculative in sorted({(p.here, p.speculative) for p in points}, reverse=True):
        label = "measured here" if here else "published"
        entries.append(
            Line2D(
                [],
                [],
                linestyle="",
                markersize=7,
                fillstyle="none" if speculative else "full",
                label=f"{label}, speculative" if speculative else label,
                **_look(here),
            )
        )
    shaded = [r for r in lines if r.llc_bytes and roofline.CACHE_RESIDENT * r.llc_bytes / 1e9 > start_gb]
    if shaded:
        colour = _look(shaded[0].here)["color"]
        entries.append(Patch(color=colour, alpha=0.12, label="under two last-level caches"))
    return entries


def _data(lines: list[Roof], points: list[Rate]) -> list[dict]:
    rows = [
        {
            "kind": "bandwidth",
            "from": "measured here" if r.here else "published machine",
            "what": r.bandwidth.source,
            "gb_per_token": None,
            "value": r.bandwidth.value,
            "unit": "GB/s",
            "finding": None,
        }
        for r in lines
    ]
    return rows + [
        {
            "kind": "speculative rate" if p.speculative else "rate",
            "from": "measured here" if p.here else "published",
            "what": p.what,
            "gb_per_token": p.bytes_per_token / 1e9,
            "value": p.tps,
            "unit": "tok/s",
            "finding": p.finding,
        }
        for p in points
    ]


def _caption(lines: list[Roof], points: list[Rate]) -> str:
    here, there = (sum(p.here is side for p in points) for side in (True, False))
    said = [f"n = {plural(here, 'rate')} measured here (means of a prompt), {there:,} published."]
    said += [f"{number(float(r.bandwidth.value))} GB/s: {r.bandwidth.source}." for r in lines]
    said.append("A token cannot come faster than what it reads: filled points lie below their line.")
    if any(p.speculative for p in points):
        said.append("With speculation the line bounds steps, and a step may yield several tokens: hollow.")
    if any(p.finding for p in points):
        said.append(f"{plural(sum(p.finding is not None for p in points), 'rate')} above the line.")
    return " ".join(said)


def _alt(lines: list[Roof], points: list[Rate]) -> str:
    told = [
        f"{number(float(r.bandwidth.value))} GB/s {'measured here' if r.here else 'of the published machine'}"
        for r in lines
    ]
    groups: dict[tuple, list[Rate]] = defaultdict(list)
    for p in points:
        groups[p.here, p.speculative, p.server].append(p)
    for (here, speculative, server), same in groups.items():
        which = [
            "measured here" if here else "published",
            "speculative" if speculative else "",
            f"server {server}" if server else "",
        ]
        told.append(
            f"{', '.join(w for w in which if w)}: {plural(len(same), 'rate')}, "
            f"{_ends([p.tps for p in same])} tok/s at {_ends([p.bytes_per_token / 1e9 for p in same])} GB a token"
        )
    return f"Chart of decode speed against bytes read per token, with the bandwidth roofline. {'; '.join(told)}."


def _ends(values: list[float]) -> str:
    low, high = number(float(min(values))), number(float(max(values)))
    return low if low == high else f"{low} to {high}"
