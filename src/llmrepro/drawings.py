"""The charts themselves: what is drawn, the data behind it, and the words beside it. `charts` writes the files."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from llmrepro import intervals, metrics, terms
from llmrepro.client import Record
from llmrepro.findings import Findings
from llmrepro.notation import measured, number, plural, seconds
from llmrepro.recipe import Workload
from llmrepro.results import ANSWERED

NAMES = ("decode-per-prompt", "ttft-by-length", "startup")
WIDTH_IN = 5.6
# Told apart by people who see red and green alike, at least 4.5 : 1 against white; shapes say the same again.
COLOURS = ("#0b66a8", "#b34a00", "#0a7355", "#8a3a93", "#5a5a5a", "#a01c44")
MARKERS = ("o", "s", "^", "D", "v", "P")
CLIENT, ENGINE = COLOURS[0], COLOURS[1]


@dataclass(frozen=True)
class Drawing:
    """A chart before it is a file. `data` are the rows drawn, nothing else."""

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure
    data: list[dict]


def of(found: Findings) -> list[Drawing]:
    """Every chart that there are data for, in the order in which they are shown."""
    chats = [w for w in found.recipe.workloads if w.kind == "chat"]
    prefills = [w for w in found.recipe.workloads if w.kind == "prefill"]
    drawn = [decode_per_prompt(found, w, _name(NAMES[0], w, chats)) for w in chats]
    drawn += [ttft_by_length(found, w, _name(NAMES[1], w, prefills)) for w in prefills]
    return [d for d in (*drawn, startup(found)) if d is not None]


def _name(base: str, workload: Workload, of_its_kind: list[Workload]) -> str:
    return base if len(of_its_kind) == 1 else f"{base}-{workload.id}"


# ---- decode-per-prompt ------------------------------------------------------------------------------------

def decode_per_prompt(found: Findings, workload: Workload, name: str) -> Drawing | None:
    """Every request's decode speed, one line of points a prompt, with the mean and its interval."""
    samples = [{"kind": "sample", "server": r.server, "case": r.case, "boot": r.boot, "round": r.repeat + 1,
                "decode_tps": speed, "low": None, "high": None, "n": None}
               for r in _asked(found, workload) if (speed := _of("decode_tps", r)) is not None]
    if not samples:
        return None
    rows = [r for case in workload.cases for r in found.rows("decode_tps", workload=workload.id, case=case)]
    rows += found.rows("decode_tps", workload=workload.id, case=None, statistic="mean_of_means")
    means = [{"kind": "mean", "server": r["server"], "case": r["case"] or "", "boot": None, "round": None,
              "decode_tps": r["value"], "low": r["low"], "high": r["high"], "n": r["n"]} for r in rows]
    servers, lines = _servers(found, samples), [c for c in (*workload.cases, "") if any(m["case"] == c for m in means)]
    figure, axes = _canvas(found, 1.3 + 0.42 * len(lines) * max(1, 0.75 * len(servers)))
    for place, server in enumerate(servers):
        style = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
        mine = pd.DataFrame([{"speed": s["decode_tps"], "line": _line(lines, s, samples, place, len(servers))}
                             for s in samples if s["server"] == server])
        sns.stripplot(mine, x="speed", y="line", orient="y", native_scale=True, jitter=False, size=5, alpha=0.6,
                      ax=axes, legend=False, **style)
        for mean in (m for m in means if m["server"] == server):
            y = lines.index(mean["case"]) + _shift(place, len(servers)) + (0.25 if mean["case"] else 0) / len(servers)
            low, high = (mean["decode_tps"] if mean[k] is None else mean[k] for k in ("low", "high"))
            axes.plot([low, high], [y, y], color=style["color"], linewidth=2.5, solid_capstyle="butt", zorder=3)
            axes.plot(mean["decode_tps"], y, markersize=9, markeredgecolor="white", zorder=4, linestyle="", **style,
                      label=server if mean["case"] == lines[0] else None)
    axes.set(title="Decode speed per prompt", xlabel="decode speed (tok/s)", ylabel="",
             yticks=range(len(lines)), yticklabels=[c or "all prompts" for c in lines], ylim=(len(lines) - 0.4, -0.6))
    if "" in lines:
        axes.axhline(len(lines) - 1.5, color="#8a8a8a", linewidth=0.8)
    axes.grid(visible=False, axis="y")
    from_zero = _wide_enough(axes, [v for m in (*samples, *means) for v in (m["decode_tps"], m["low"], m["high"])])
    _legend(axes, servers)
    rounds = {(s["boot"], s["round"]) for s in samples}
    caption = (f"n = {plural(len(samples), 'request')} in {plural(len(rounds), 'round')} of "
               f"{plural(len({s['boot'] for s in samples}), 'boot')}. Small: each request, the first round on top; "
               f"large: the mean with its {intervals.LEVEL:.0%} interval, where there is more than one sample. "
               + ("All prompts: the mean of the prompts' means, its interval over rounds. " if "" in lines else "")
               + ("" if from_zero else "The axis does not start at zero. ") + _failed(found, workload))
    told = [f"{_title(m, servers)}: mean {_speed(m)}"
            + (f", {plural(len(of_it), 'request')} from {number(min(of_it))} to {number(max(of_it))}" if
               (of_it := [s["decode_tps"] for s in samples if (s["case"], s["server"]) == (m["case"], m["server"])])
               else "") for m in means]
    return Drawing(name, "Decode speed per prompt", caption.strip(),
                   f"Chart of decode speed in tokens per second, per prompt. {'; '.join(told)}.", figure,
                   samples + means)


def _line(lines: list[str], sample: dict, samples: list[dict], place: int, of: int) -> float:
    """Where a request's point lies: round below round around its prompt's line, so that a drift is seen."""
    same = [s for s in samples if (s["case"], s["server"]) == (sample["case"], sample["server"])]
    step = 0 if len(same) == 1 else 0.42 * (same.index(sample) / (len(same) - 1) - 0.5)
    return lines.index(sample["case"]) + _shift(place, of) + (step - 0.13) / of


def _shift(place: int, of: int) -> float:
    return 0 if of == 1 else 0.7 * (place / (of - 1) - 0.5)


def _title(mean: dict, servers: list[str]) -> str:
    return (mean["case"] or "all prompts") + (f" on {mean['server']}" if len(servers) > 1 else "")


def _speed(mean: dict) -> str:
    value, interval = measured(mean["decode_tps"], mean["low"], mean["high"])
    return f"{value}, {intervals.LEVEL:.0%} interval {interval}" if interval else value


def _wide_enough(axes: Axes, values: list[float | None]) -> bool:
    """Show at least a fifth of the mean, so that noise of a thousandth looks small. True when nought is on it."""
    known = [v for v in values if v is not None]
    low, high, least = min(known), max(known), 0.2 * fmean(known)
    room = max(0.08 * (high - low), (least - (high - low)) / 2)
    start = 0 if low - room < 0.35 * high else low - room
    axes.set_xlim(start, high + room)
    return start == 0


# ---- ttft-by-length ---------------------------------------------------------------------------------------

def ttft_by_length(found: Findings, workload: Workload, name: str) -> Drawing | None:
    """Every request's time to first token over its prompt tokens, the fitted line, failures as crosses."""
    asked = [r for r in found.asked if r.workload == workload.id]
    samples = [_point("sample", r, r.prompt_tokens, t) for r in asked
               if r.status in ANSWERED and r.prompt_tokens and (t := _of("ttft_s", r)) is not None]
    failures = [_point("failure", r, r.prompt_tokens or int(r.case), None) for r in asked if r.status not in ANSWERED]
    if not samples and not failures:
        return None
    servers = _servers(found, samples + failures)
    figure, axes = _canvas(found, 3.7)
    ends, told = [], []
    for place, server in enumerate(servers):
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        mine = pd.DataFrame([p for p in samples if p["server"] == server])
        if mine.empty:
            continue
        sns.stripplot(mine, x="prompt_tokens", y="ttft_s", native_scale=True, jitter=False, size=6, alpha=0.65,
                      color=colour, marker=marker, label=server, ax=axes)
        line, speed = _fitted(found, workload, server, mine)
        ends += line
        if line:
            sns.lineplot(pd.DataFrame(line), x="prompt_tokens", y="ttft_s", color=colour, errorbar=None, ax=axes)
            axes.annotate(f"prefill {speed}", (line[1]["prompt_tokens"], line[1]["ttft_s"]), (-8, 10),
                          textcoords="offset points", ha="right", color=colour)
        told += [f"{length:,} tokens{f' on {server}' if len(servers) > 1 else ''}: "
                 f"{plural(len(times), 'request')}, mean {number(fmean(times))} s"
                 for length, times in mine.groupby("prompt_tokens")["ttft_s"].apply(list).items()]
        told += [f"fitted line{f' of {server}' if len(servers) > 1 else ''}: prefill {speed}"] if line else []
    for place, server in enumerate(servers):
        crosses = [p["prompt_tokens"] for p in failures if p["server"] == server]
        if not crosses:
            continue
        axes.plot(crosses, [0.96] * len(crosses), transform=axes.get_xaxis_transform(), linestyle="", marker="X",
                  markersize=9, markeredgecolor="white", color=COLOURS[place % len(COLOURS)], clip_on=False)
    if failures:
        told.append("failed: " + ", ".join(f"{p['prompt_tokens']:,} tokens ({p['status']})" for p in failures))
    top = max((p["ttft_s"] for p in (*samples, *ends)), default=1)
    axes.set(title="Time to first token by prompt length", xlabel="prompt tokens, as the server counts them",
             ylabel="time to first token (s)", xlim=(0, 1.08 * max(p["prompt_tokens"] for p in samples + failures)),
             ylim=(0, 1.18 * top))
    _legend(axes, servers)
    fits = ("The line is the least-squares fit; its slope, turned over, is the prefill speed without fixed overhead, "
            f"with its {intervals.LEVEL:.0%} interval. " if ends else
            "No line: it takes three requests of two lengths, and a slope whose interval lies above nought. ")
    crossed = ("✕: a request that failed, at its length; it has no time and no place in the fit. " if failures else "")
    return Drawing(name, "Time to first token by prompt length",
                   f"n = {plural(len(samples), 'request')} of {plural(len({p['boot'] for p in samples}), 'boot')}, "
                   f"each shown. {fits}{crossed}".strip(),
                   f"Chart of time to first token in seconds over prompt tokens. {'; '.join(told)}.", figure,
                   samples + failures + ends)


def _point(kind: str, record: Record, tokens: int, ttft_s: float | None) -> dict:
    return {"kind": kind, "server": record.server, "boot": record.boot, "case": record.case,
            "round": record.repeat + 1, "prompt_tokens": tokens, "ttft_s": ttft_s, "status": record.status}


def _fitted(found: Findings, workload: Workload, server: str, points: pd.DataFrame) -> tuple[list[dict], str]:
    """Both ends of the least-squares line, and the speed that its slope is; none where result.json has no slope."""
    rows = found.rows("prefill_tps.slope", workload=workload.id, server=server)
    if not rows:
        return [], ""
    slope = 1 / rows[0]["value"]
    at_zero = points["ttft_s"].mean() - slope * points["prompt_tokens"].mean()
    value, interval = measured(rows[0]["value"], rows[0]["low"], rows[0]["high"])
    ends = [{"kind": "line", "server": server, "boot": None, "case": None, "round": None, "prompt_tokens": int(x),
             "ttft_s": float(at_zero + slope * x), "status": None}
            for x in (points["prompt_tokens"].min(), points["prompt_tokens"].max())]
    return ends, f"{value} tok/s ({interval})"


# ---- startup ----------------------------------------------------------------------------------------------

def startup(found: Findings) -> Drawing | None:
    """When each boot reached each mark by the client's clock, and the engine's own phases below it."""
    bars = [{"clock": clock, "server": boot["server"], "boot": n, "what": what, "start_s": start, "end_s": end}
            for n, boot in found.boots.items() for clock, what, start, end in _spans(boot)]
    if not bars:
        return None
    lines = list(dict.fromkeys((b["clock"], b["what"]) for b in sorted(bars, key=lambda b: b["clock"] != "client")))
    boots = sorted({b["boot"] for b in bars})
    servers = _servers(found, bars)
    height = 0.62 / len(boots)
    figure, axes = _canvas(found, 1.3 + len(lines) * (0.2 + min(0.12 * len(boots), 0.5)))
    end = max(b["end_s"] for b in bars)
    for bar in bars:
        client = bar["clock"] == "client"
        y = lines.index((bar["clock"], bar["what"])) + (boots.index(bar["boot"]) - (len(boots) - 1) / 2) * height
        axes.barh(y, bar["end_s"] - bar["start_s"], left=bar["start_s"], height=height * (0.35 if client else 0.9),
                  color=CLIENT if client else ENGINE, edgecolor=CLIENT if client else ENGINE, linewidth=1)
        if client:
            axes.plot(bar["end_s"], y, color=CLIENT, markeredgecolor="white", markersize=7 if len(boots) < 5 else 5,
                      marker=MARKERS[servers.index(bar["server"]) % len(MARKERS)])
        if len(boots) <= 3:
            axes.annotate(f"{seconds(bar['end_s'] if client else bar['end_s'] - bar['start_s'])} s", (bar["end_s"], y),
                          (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set(title="Start-up", xlabel="time (s)", xlim=(0, 1.16 * end), ylim=(len(lines) - 0.4, -0.6),
             yticks=range(len(lines)), yticklabels=[what for _, what in lines])
    axes.grid(visible=False, axis="y")
    phases = any(b["clock"] == "engine" for b in bars)
    figure.legend(handles=[Patch(color=CLIENT, label="seen by the client"),
                           *([Patch(color=ENGINE, label="the engine's own phases")] if phases else [])],
                  loc="outside upper right", ncols=2, frameon=False, fontsize=8.5)
    clients = len({what for clock, what in lines if clock == "client"})
    if phases and clients:
        axes.axhline(clients - 0.5, color="#8a8a8a", linewidth=0.8)
    caption = (f"n = {plural(len(boots), 'boot')}. Blue, with a marker: when the client first saw it, in seconds from "
               "the start of the process. " + (
                   "Orange: the engine's own phases by its own clock, which starts when its process first logs, so they "
                   "stand a little too far left beside the client's marks. " if phases else ""))
    told = [f"boot {n}" + (f" ({found.boots[n]['server']})" if len(servers) > 1 else "") + ": " + ", ".join(
        f"{b['what']} {seconds(b['end_s'])} s" if b["clock"] == "client" else
        f"engine phase {b['what']} {seconds(b['start_s'])} to {seconds(b['end_s'])} s"
        for b in bars if b["boot"] == n) for n in boots]
    return Drawing("startup", "Start-up", caption.strip(), f"Timeline of start-up. {'; '.join(told)}.", figure, bars)


def _spans(boot: dict) -> Iterator[tuple[str, str, float, float]]:
    """(clock, what, start_s, end_s), the client's marks in the order in which they came."""
    marks = {m: s for m, s in boot.get("startup", {}).items() if s is not None and m in terms.METRICS}
    for metric, seconds in sorted(marks.items(), key=lambda m: m[1]):
        yield "client", _MARKS.get(metric, terms.METRICS[metric].title), 0.0, seconds
    for name, start, end in boot.get("phases", []):
        yield "engine", name, start, end


_MARKS = {"startup.port_s": "port open", "startup.models_s": "/v1/models answers",
          "startup.health_s": "health path says ready", "startup.first_completion_s": "first token"}


# ---- what they share --------------------------------------------------------------------------------------

def _canvas(found: Findings, height_in: float) -> tuple[Figure, Axes]:
    """A figure that is nobody's current one, with where it comes from at its foot."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    days = sorted({r.started_at[:10] for r in found.records})
    when = f", measured {days[0]}" if days else ""
    figure.supxlabel(f"llmrepro · {found.recipe.id}{when}", x=0.99, ha="right", fontsize=7.5, color="#5a5a5a")
    axes = figure.subplots()
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    return figure, axes


def _asked(found: Findings, workload: Workload) -> list[Record]:
    """Requests of a workload that were answered, in the order of their boots and rounds."""
    mine = [r for r in found.asked if r.workload == workload.id and r.status in ANSWERED and r.case in workload.cases]
    return sorted(mine, key=lambda r: (r.boot, r.repeat))


def _of(metric: str, record: Record) -> float | None:
    return metrics.DEFINITIONS[metric](record)


def _servers(found: Findings, rows: list[dict]) -> list[str]:
    """The servers that rows speak of, in the recipe's order."""
    there = {r["server"] for r in rows}
    return [s.id for s in found.recipe.servers if s.id in there]


def _failed(found: Findings, workload: Workload) -> str:
    count = sum(r.workload == workload.id and r.status not in ANSWERED for r in found.asked)
    return f"{plural(count, 'request')} failed and {'has' if count == 1 else 'have'} no speed." if count else ""


def _legend(axes: Axes, servers: list[str]) -> None:
    """Only where there is something to tell apart."""
    if len(servers) > 1:
        axes.legend(title="server", frameon=False, fontsize=9, loc="best")
    elif axes.get_legend() is not None:
        axes.get_legend().remove()
