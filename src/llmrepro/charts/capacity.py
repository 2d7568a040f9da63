"""KV cache against tokens: how much memory a sequence needs, what there is, and what was printed and published."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from llmrepro import capacity
from llmrepro.capacity import GIB, Cache
from llmrepro.charts.drawings import Drawing, canvas, legend
from llmrepro.charts.sources import COMPUTED, HERE, PUBLISHED
from llmrepro.findings import Findings
from llmrepro.notation import number, plural
from llmrepro.sizing import Room, numbers

TITLE = "KV cache: memory against tokens"
STEPS = 200  # points of a line
TOGETHER = 0.12  # of the axis: points that are nearer share a label
# Points that fall on one another are still told apart: a ring around a disc around a cross.
LOOKS = {
    "published": {**PUBLISHED, "markersize": 14, "fillstyle": "none", "markeredgewidth": 2, "zorder": 4},
    "printed": {**HERE, "markersize": 10, "zorder": 5},
    "computed": {**COMPUTED, "markersize": 6, "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 6},
}
LITTLE_GIB = 1.0  # below it the axis is in MiB


def kv_cache(found: Findings, room: Room, name: str) -> Drawing | None:
    """One sequence's cache by length, uniform and hybrid, up to its memory, or to its context where no memory is
    known; None without either."""
    rows = _rows(room)
    if not rows:
        return None
    longest = 1.12 * max(r["tokens"] for r in rows)
    highest = max(r["gib"] for r in rows)
    unit, scale = ("MiB", 1024) if highest < LITTLE_GIB else ("GiB", 1)
    figure, axes = canvas(found, 3.1)
    tokens = np.linspace(0, longest, STEPS)
    each = capacity.bytes_per_token(room.shape, room.least)
    axes.plot(tokens, tokens * each / GIB * scale, color=COMPUTED["color"])
    for cache, style in _hybrid(room):
        line = [capacity.sequence_bytes(room.shape, round(n), cache) / GIB * scale for n in tokens]
        axes.plot(tokens, line, color=COMPUTED["color"], linestyle=style)
    if room.memory_bytes is not None:
        axes.axhline(room.memory_bytes.value / GIB * scale, color="#222222", linewidth=1, linestyle=":")
    for row in rows:
        axes.plot(row["tokens"], row["gib"] * scale, linestyle="", **LOOKS[row["kind"]])
    _label(axes, rows, scale, longest)
    axes.set(
        title=TITLE,
        xlabel="tokens of one sequence",
        ylabel=f"KV cache ({unit})",
        xlim=(0, longest),
        ylim=(0, 1.42 * highest * scale),
    )
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    legend(figure, _entries(rows, room), 2)
    return Drawing(name, TITLE, _caption(room, rows), _alt(room, rows), figure, rows)


def _hybrid(room: Room) -> list[tuple[Cache, str]]:
    """The layouts that hybrid lines are drawn of, with their styles: two where what is in flight is not told."""
    layouts = dict.fromkeys((room.least, room.most)) if room.shape.hybrid else ()
    return list(zip(layouts, ("--", "-."), strict=False))


def _flight(room: Room, cache: Cache) -> str:
    """What of it is in flight, where that changes how much a windowed layer keeps."""
    return f", {cache.in_flight_tokens:,} tokens in flight" if room.shape.attention.windowed_layers else ""


def _rows(room: Room) -> list[dict]:
    """The points {kind, what, tokens, gib}: where a line meets the memory, what was printed, what published."""
    rows: list[tuple] = []
    each = room.printed.get("kv_bytes_per_token")
    if room.memory_bytes is None:
        for kind in ("uniform", "hybrid") if room.shape.hybrid else ("uniform",):
            needed = room.needed_bytes(hybrid=kind == "hybrid")
            rows.append(("computed", f"{kind}, its context", room.context_tokens, (needed or 0) / GIB))
    else:
        gib = room.memory_bytes.value / GIB
        rows.append(("computed", "uniform", room.uniform_tokens, gib))
        for cache, tokens in zip((room.most, room.least), room.hybrid_tokens or (), strict=False):
            rows.append(("computed", f"hybrid, one sequence{_flight(room, cache)}", tokens, gib))
        if "kv_tokens" in room.printed:
            rows.append(("printed", "KV cache size", room.printed["kv_tokens"], gib))
        rows += [
            ("published", claim.title or claim.id, n, gib)
            for claim in room.published.get("kv_tokens", ())
            for n in numbers(claim)
        ]
    if each and room.context_tokens and "kv_tokens" not in room.printed:
        printed_gib = each * room.context_tokens / GIB
        rows.append(("printed", "its context at its bytes per token", room.context_tokens, printed_gib))
    keys = ("kind", "what", "tokens", "gib")
    return [dict(zip(keys, row, strict=True)) for row in dict.fromkeys(rows) if row[2]]


def _label(axes: Axes, rows: list[dict], scale: float, longest: float) -> None:
    """Beside each place where points are, what they are and how many tokens; one label where several meet."""
    places: list[list[dict]] = []
    for row in sorted(rows, key=lambda r: r["tokens"]):
        if places and row["tokens"] - places[-1][-1]["tokens"] < TOGETHER * longest:
            places[-1].append(row)
        else:
            places.append([row])
    for place in places:
        axes.annotate(
            "\n".join(dict.fromkeys(f"{r['kind']} {number(r['tokens'])}" for r in place)),
            (place[0]["tokens"], place[0]["gib"] * scale),
            (-8, 8),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _entries(rows: list[dict], room: Room) -> list[Line2D]:
    kinds = {r["kind"] for r in rows}
    lines = [Line2D([], [], color=COMPUTED["color"], label="computed, uniform")]
    for cache, style in _hybrid(room):
        lines.append(
            Line2D(
                [], [], color=COMPUTED["color"], linestyle=style, label=f"computed, hybrid{_flight(room, cache)}"
            )
        )
    if room.memory_bytes is not None:
        lines.append(Line2D([], [], color="#222222", linewidth=1, linestyle=":", label="memory of the cache"))
    told = {"printed": "printed by the engine here", "published": "published"}
    return lines + [
        Line2D([], [], linestyle="", label=label, **(LOOKS[kind] | {"markersize": 8}))
        for kind, label in told.items()
        if kind in kinds
    ]


def _caption(room: Room, rows: list[dict]) -> str:
    printed = sum(r["kind"] == "printed" for r in rows)
    published = sum(r["kind"] == "published" for r in rows)
    said = [
        f"n = {plural(printed, 'figure')} printed here, {published:,} published; the lines are arithmetic.",
        "Uniform: every layer keeps every token." + (f" Hybrid: {_kept(room)}." if room.shape.hybrid else ""),
        f"Layers {room.shape_from} ({room.shape.attention.locator}).",
        _memory(room),
        f"Assumed: {'; '.join(room.assumed)}." if room.assumed else "",
        "What is computed is an upper bound: engines pad pages and groups of layers.",
    ]
    return " ".join(s for s in said if s)


def _kept(room: Room) -> str:
    """What the layers of a hybrid model keep."""
    windowed, linear = room.shape.attention.windowed_layers, room.shape.linear
    kept = [
        "full layers keep every token",
        "windowed ones their window and the tokens in flight, those of the batch that is being read"
        if windowed
        else "",
        "linear ones a state that does not grow" if linear else "",
    ]
    return ", ".join(k for k in kept if k)


def _memory(room: Room) -> str:
    if room.memory_bytes is None:
        return "How much memory the cache has is not known: marked is what its context needs."
    return f"Memory of the cache: {number(room.memory_bytes.value / GIB)} GiB, {room.memory_bytes.source}."


def _alt(room: Room, rows: list[dict]) -> str:
    told = "; ".join(
        f"{r['kind']}, {r['what']}: {number(r['tokens'])} tokens in {number(r['gib'])} GiB" for r in rows
    )
    return f"Chart of KV cache memory against tokens of one sequence. {told}."
