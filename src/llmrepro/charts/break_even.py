"""When the slower start pays: requests a day against restarts a day, and which of two servers costs less of it."""

import numpy as np
from matplotlib.patches import Patch

from llmrepro.break_even import DAY_S
from llmrepro.charts.drawings import Drawing, canvas, legend, look
from llmrepro.findings import Findings
from llmrepro.notation import measured, plural

TITLE = "When the slower start pays"
RESTARTS = (0.1, 100.0)  # a day: from once in ten days to every quarter of an hour
LEVELS_S = {60: "1 min", 600: "10 min", 3600: "1 h", 6 * 3600: "6 h"}


def break_even(found: Findings, told: dict, name: str) -> Drawing | None:
    """Shades which of two servers costs less of a day, with the break-even line; `told` is an entry of a study's
    `break_even`. None where the boots do not tell the two apart."""
    if told["found"] == "open":
        return None
    fast = told["b"] if told["slow"] == told["a"] else told["a"]
    labels = [told["a"], told["b"]]
    start_s, saved_s = told["start_s"]["mean"], told["saved_s"]["mean"]
    most = DAY_S / min(np.mean(told["requests_s"][label]) for label in labels)
    figure, axes = canvas(found, 3.9)
    x = np.geomspace(1, most, 200)
    y = np.geomspace(*RESTARTS, 200)
    requests, restarts = np.meshgrid(x, y)
    gain_s = requests * saved_s - restarts * start_s  # what the slower start spares of a day
    colours = {label: look(place)["color"] for place, label in enumerate(labels)}
    axes.set(
        title=TITLE,
        xscale="log",
        yscale="log",
        xlim=(1, most),
        ylim=RESTARTS,
        xlabel="requests a day",
        ylabel="restarts a day",
    )
    axes.contourf(
        x, y, gain_s, levels=[-np.inf, 0, np.inf], colors=[colours[fast], colours[told["slow"]]], alpha=0.22
    )
    lines = axes.contour(
        x, y, np.abs(gain_s), levels=list(LEVELS_S), colors="#5a5a5a", linewidths=0.8, linestyles="dotted"
    )
    figure.draw_without_rendering()  # else labels are cut into lines whose angles nobody knows yet
    axes.clabel(lines, fmt=LEVELS_S, fontsize=8, inline_spacing=2)
    if told["requests"]:
        _line(axes, told["requests"])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(visible=False)
    shown = labels if told["found"] == "pays" else [fast]
    patches = [Patch(color=colours[label], alpha=0.45, label=f"{label} costs less") for label in shown]
    legend(figure, patches, 2)
    said = sentence(told)
    return Drawing(
        name,
        TITLE,
        f"{said} {_reading(told)}",
        f"Chart of requests a day against restarts a day. {said}",
        figure,
        _rows(told),
    )


def _line(axes, ratio: dict) -> None:
    ends = np.array([1e-3, 1e9])  # beyond both ends of the axis
    axes.plot(ends, ends / ratio["mean"], color="#1a1f24", linewidth=2)
    if ratio["low"] is not None:
        above = ends / max(ratio["low"], 1e-9)  # from no request on: the band has no upper edge
        axes.fill_between(ends, ends / ratio["high"], above, color="#1a1f24", alpha=0.18, linewidth=0)


def sentence(told: dict) -> str:
    """What the measured boots say of one pair, in a sentence or two."""
    slow = told["slow"]
    fast = told["b"] if slow == told["a"] else told["a"]
    start, saved = (_seconds(told[k]) for k in ("start_s", "saved_s"))
    counted = f"{plural(told['boots'], 'boot')} each" + ("" if told["boots"] >= 3 else ", too few for an interval")
    if told["found"] == "open":
        which = [what for what in ("start", "request") if _holds_one(told[f"{what}_times"])]
        ranges = " and ".join(f"a {what} {_span(told[f'{what}_times'])} times as long" for what in which)
        return f"Not decided: {slow} takes for {ranges} as {fast}, which leaves open which is shorter ({counted})."
    if told["found"] == "never":
        return (
            f"{fast} starts {start} sooner than {slow}, and its request is {_seconds(told['saved_s'], -1)} "
            f"shorter too: {fast} costs less of any day ({counted})."
        )
    value, interval = measured(*(told["requests"][k] for k in ("mean", "low", "high")))
    return (
        f"{slow} starts {start} later than {fast} and spares {saved} a request: it pays from {value} requests per "
        f"restart on{f' ({interval})' if interval else ''} ({counted})."
    )


def _holds_one(found: dict) -> bool:
    return found["low"] is not None and found["low"] <= 1 <= found["high"]


def _span(found: dict) -> str:
    return f"{found['low']:.2g} to {found['high']:.2g}"


def _seconds(found: dict, sign: int = 1) -> str:
    low, high = (None, None) if found["low"] is None else sorted((sign * found["low"], sign * found["high"]))
    value, interval = measured(sign * found["mean"], low, high)
    return f"{value} s" + (f" ({interval})" if interval else "")


def _reading(told: dict) -> str:
    said = [
        f"A request is {told['request']}, asked one at a time; a start is counted to its first token.",
        "Dotted: by how much of a day the shaded one costs less.",
        "The line is the break-even." if told["requests"] else "",
        "The band around it is its 95 % interval."
        if told["requests"] and told["requests"]["low"] is not None
        else "",
        "The axis ends where a day holds no more requests.",
    ]
    return " ".join(s for s in said if s)


def _rows(told: dict) -> list[dict]:
    """The seconds of every boot, and the break-even that follows."""
    empty = dict.fromkeys(
        ("kind", "server", "boot", "start_s", "request_s", "requests_per_restart", "low", "high")
    )
    rows = [
        empty | {"kind": "boot", "server": label, "boot": n + 1, "start_s": start, "request_s": request}
        for label in (told["a"], told["b"])
        for n, (start, request) in enumerate(zip(told["starts_s"][label], told["requests_s"][label], strict=True))
    ]
    if told["requests"]:
        ratio = told["requests"]
        rows.append(
            empty
            | {
                "kind": "break-even",
                "server": told["slow"],
                "requests_per_restart": ratio["mean"],
                "low": ratio["low"],
                "high": ratio["high"],
            }
        )
    return rows
