"""A ladder: time to first token and decode speed over prompt length, up to the rung that failed."""

import textwrap
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from llmrepro import ladder, metrics
from llmrepro.charts.drawings import Drawing, grid, handles, legend, look, requests_of, servers_of
from llmrepro.findings import Findings
from llmrepro.notation import number, plural
from llmrepro.workload import Workload

TITLE = "Up the ladder"
LABELS = {"ttft_s": "time to first token (s)", "decode_tps": "decode (tok/s)"}
WIDEST = 56  # characters of a title
OUTSIDE = "#ececec"
MOST_LABELLED = 2  # failed rungs: the words of more would hide each other


def climbed(found: Findings, workload: Workload, name: str) -> Drawing | None:
    """Both over the prompt tokens, every request a point, what failed a cross at its length, and what lies beyond
    the verified range grey; None where nothing was asked."""
    rows = _rows(found, workload)
    if not rows:
        return None
    servers = servers_of(found, rows)
    shown = [m for m in LABELS if any(r[m] is not None for r in rows)] or ["ttft_s"]
    figure, every = grid(found, [2.6] * len(shown))
    longest = max(r["prompt_tokens"] for r in rows)
    outside = _outside(found, workload, servers)
    for axes, metric in zip(every, shown, strict=True):
        for place, server in enumerate(servers):
            _draw(axes, metric, [r for r in rows if r["server"] == server], place, sole=len(servers) == 1)
        known = [r[metric] for r in rows if r[metric] is not None]
        axes.set(ylabel=LABELS[metric], xlim=(0, 1.06 * longest), ylim=(0, 1.3 * max(known, default=1)))
        if outside is not None:
            axes.axvspan(outside, 1.06 * longest, color=OUTSIDE, linewidth=0, zorder=0)
    every[0].set_title(textwrap.fill(workload.title, WIDEST) or TITLE)
    every[-1].set_xlabel("prompt tokens, as the server counts them")
    grey = [Patch(color=OUTSIDE, label="outside the verified range")] if outside is not None else []
    if grey or len(servers) > 1:
        legend(figure, [*(handles(servers) if len(servers) > 1 else []), *grey], 3)
    return Drawing(
        name, f"{TITLE}: {workload.id}", _caption(rows), _alt(found, workload, rows, servers), figure, rows
    )


def _rows(found: Findings, workload: Workload) -> list[dict]:
    """A row per request that has a length: as the server counted it, or where it counted none, as planned."""
    rows = []
    for r in requests_of(found, workload):
        tokens = ladder.asked_tokens(workload, r.case, [r])
        if r.status == "skipped" or tokens is None:
            continue
        bad = ladder.failed(r)
        rows.append(
            {
                "kind": "failure" if bad else "sample",
                "server": r.server,
                "boot": r.boot,
                "case": r.case,
                "round": r.repeat + 1,
                "prompt_tokens": tokens,
                "ttft_s": None if bad else metrics.ttft_s(r),
                "decode_tps": None if bad else metrics.decode_tps(r),
                "server_gib": (r.memory or {}).get("server"),
                "ending": ladder.ending(r),
            }
        )
    return rows


def _outside(found: Findings, workload: Workload, servers: list[str]) -> int | None:
    """From where on no server verified anything; None where nothing failed."""
    reached = [ladder.of(workload, [r for r in requests_of(found, workload) if r.server == s]) for s in servers]
    if all(one.fails is None for one in reached):
        return None
    return max((one.verified or 0 for one in reached), default=0)


def _draw(axes: Axes, metric: str, rows: list[dict], place: int, *, sole: bool) -> None:
    """A server's samples, their means joined, and its crosses."""
    looks = look(place)
    good = [r for r in rows if r[metric] is not None]
    lengths = sorted({r["prompt_tokens"] for r in good})
    means = [fmean(r[metric] for r in good if r["prompt_tokens"] == n) for n in lengths]
    axes.plot(lengths, means, color=looks["color"], linewidth=1.5)
    axes.plot(
        [r["prompt_tokens"] for r in good],
        [r[metric] for r in good],
        linestyle="",
        markersize=6,
        alpha=0.7,
        markeredgecolor="white",
        **looks,
    )
    bad = [r for r in rows if r["kind"] == "failure"]
    if bad:  # near the upper edge: they have a length and no value
        axes.plot(
            [r["prompt_tokens"] for r in bad],
            [0.9 - 0.08 * place] * len(bad),  # apart, where servers fail at one length
            transform=axes.get_xaxis_transform(),
            linestyle="",
            marker="X",
            markersize=9,
            markeredgecolor="white",
            color=looks["color"],
            clip_on=False,
        )
    for r in bad if sole and len(bad) <= MOST_LABELLED else []:
        axes.annotate(
            f"{r['ending'].replace('_', ' ')} at {r['prompt_tokens']:,}",
            (r["prompt_tokens"], 0.9 - 0.08 * place),
            (-9, 0),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=9,
            color=looks["color"],
        )


def _caption(rows: list[dict]) -> str:
    good = sum(r["kind"] == "sample" for r in rows)
    said = f"n = {plural(good, 'request')} of {plural(len({r['boot'] for r in rows}), 'boot')}, each shown; lines "
    said += "join their means."
    if good < len(rows):
        said += (
            " ✕: a request that failed, at its length, with no time of its own; no longer one was asked after it. "
            "Grey lies beyond the longest prompt that was answered in every round."
        )
    return said


def _alt(found: Findings, workload: Workload, rows: list[dict], servers: list[str]) -> str:
    told = []
    for server in servers:
        mine = [r for r in rows if r["server"] == server]
        on = f" on {server}" if len(servers) > 1 else ""
        for tokens in sorted({r["prompt_tokens"] for r in mine}):
            at = [r for r in mine if r["prompt_tokens"] == tokens]
            known = {m: [r[m] for r in at if r[m] is not None] for m in LABELS}
            said = [f"{LABELS[m]} {number(fmean(v))}" for m, v in known.items() if v]
            said += sorted({f"failed ({r['ending']})" for r in at if r["kind"] == "failure"})
            told.append(f"{tokens:,} tokens{on}: {', '.join(said)}")
        reached = ladder.of(workload, [r for r in requests_of(found, workload) if r.server == server])
        if reached.verified is not None:
            told.append(f"verified up to {reached.verified:,} tokens{on}")
    return f"Chart of time to first token and decode speed over prompt tokens. {'; '.join(told)}."
