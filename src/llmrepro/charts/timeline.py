"""The time of a run on an axis: every boot at its place, long gaps between them cut, its requests as bands."""

from collections.abc import Iterator
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmrepro import samples
from llmrepro.charts.drawings import COLOURS, WIDTH_IN, look, servers_of
from llmrepro.findings import Findings
from llmrepro.guard_log import Guarded
from llmrepro.markup import showable
from llmrepro.metrics import ANSWERED

CUT_S = 60.0  # a gap between two boots that is longer is cut out
GAP_SHARE = 0.02  # of the time that is shown stands in its place
LABEL_IN = 0.07  # a character of a label takes about so much
MOST_CHARACTERS = 18  # of a workload's name
START = "#c9d3db"  # a server that is not ready yet
MARKED = {"failure": "X", "xid": "*", "stop": "v"}
EVENT = {"color": COLOURS[5], "markersize": 8, "markeredgecolor": "white"}


@dataclass(frozen=True)
class Timeline:
    """Where the boots of a run lie on an axis that begins with the first one. `cuts` are the places, in seconds,
    at which a gap was cut out."""

    spans: dict[int, samples.Span]
    places: dict[int, float]
    cuts: list[float]

    def at(self, boot: int, t_ns: int) -> float:
        """The place of a moment of a boot, in seconds."""
        return self.places[boot] + (t_ns - self.spans[boot][0]) / 1e9

    @property
    def end_s(self) -> float:
        return max(self.at(boot, end) for boot, (_, end) in self.spans.items())


def of(found: Findings) -> Timeline:
    """The timeline of the boots of which anything is known that happened at a time.

    A boot whose clock stands before the end of the one before it was measured after the machine was started anew:
    how long that took is not known, and it is cut out too.
    """
    spans = {n: span for n, boot in found.boots.items() if (span := _span(found, n, boot)) is not None}
    gaps_s = [(b - a) / 1e9 for (_, a), (b, _) in zip(spans.values(), list(spans.values())[1:], strict=False)]
    kept = [gap if 0 <= gap <= CUT_S else None for gap in gaps_s]
    shown_s = sum((b - a) / 1e9 for a, b in spans.values()) + sum(gap for gap in kept if gap is not None)
    places, cuts, now_s = {}, [], 0.0
    for (n, (start, end)), gap in zip(spans.items(), [0.0, *kept], strict=False):
        if gap is None:
            cuts.append(now_s + GAP_SHARE * shown_s / 2)
        places[n] = now_s + (GAP_SHARE * shown_s if gap is None else gap)
        now_s = places[n] + (end - start) / 1e9
    return Timeline(spans, places, cuts)


def _span(found: Findings, n: int, boot: dict) -> samples.Span | None:
    began, stop = boot.get("started_at_ns"), found.guarded[n].stop if n in found.guarded else None
    requests = samples.in_flight(r for r in found.records if r.boot == n)
    moments = [
        *([began] if isinstance(began, int) else []),
        *(of_device[place].t_ns for of_device in found.samples.get(n, {}).values() for place in (0, -1)),
        *(moment for span in requests for moment in span),
        *([stop.t_ns] if stop else []),
    ]
    return (min(moments), max(moments)) if moments and max(moments) > min(moments) else None


def rows(found: Findings, time: Timeline) -> Iterator[dict]:
    """What the bands show: boots, their workloads, requests that failed, errors of the GPU's driver, stops."""
    for n in time.spans:
        boot = found.boots[n]
        where = {"boot": n, "server": boot["server"]}
        ready_s = (boot.get("startup") or {}).get("startup.first_completion_s")
        start_s, end_s = (time.at(n, moment) for moment in time.spans[n])
        ready = {} if ready_s is None else {"ready_s": start_s + ready_s}
        yield {"kind": "boot", **where, "start_s": start_s, "end_s": end_s, **ready}
        mine = [r for r in found.records if r.boot == n and r.status != "skipped"]
        for workload in dict.fromkeys(r.workload for r in mine):
            spans = samples.in_flight(r for r in mine if r.workload == workload)
            if spans:
                ends = {"start_s": time.at(n, spans[0][0]), "end_s": time.at(n, spans[-1][1])}
                yield {"kind": "workload", **where, "what": workload, **ends}
        for r in (r for r in mine if not r.warmup and r.status not in ANSWERED):
            at_s = time.at(n, samples.ended_ns(r) or r.t_send_ns)
            told = {"what": r.workload, "status": r.status}
            yield {"kind": "failure", **where, **told, "start_s": at_s, "end_s": at_s}
        guarded = found.guarded.get(n, Guarded())
        for kind, what, t_ns in (
            *(("xid", f"Xid {x.number}", x.t_ns) for x in guarded.xids),
            *(("stop", "guard", s.t_ns) for s in [guarded.stop] if s),
        ):
            at_s = time.at(n, t_ns)
            yield {"kind": kind, **where, "what": what, "start_s": at_s, "end_s": at_s}


def lanes(bands: list[dict]) -> list[str]:
    """The workloads that were asked, each in a lane of its own below the boots'."""
    return list(dict.fromkeys(b["what"] for b in bands if b["kind"] in ("workload", "failure")))


def draw(figure: Figure, axes: Axes, found: Findings, time: Timeline, bands: list[dict]) -> None:
    """The bands: boots in the first lane, by the colour of their server, then a lane a workload."""
    names, servers = lanes(bands), servers_of(found, bands)
    end_s = time.end_s
    for b in bands:
        colour = look(servers.index(b["server"]))["color"]
        y = 1 + names.index(b["what"]) if b["kind"] in ("workload", "failure") else 0
        if b["kind"] == "boot":
            ready_s = min(b.get("ready_s", b["start_s"]), b["end_s"])
            _bar(axes, b["start_s"], ready_s, y, START)
            _bar(axes, ready_s, b["end_s"], y, colour)
            _label(axes, f"{b['boot']}", ready_s, b["end_s"], end_s)
        elif b["kind"] == "workload":
            _bar(axes, b["start_s"], max(b["end_s"], b["start_s"] + end_s / 1000), y, colour)
    for b in (b for b in bands if b["kind"] in MARKED):
        y = 1 + names.index(b["what"]) if b["kind"] == "failure" else 0
        axes.plot(b["start_s"], y, marker=MARKED[b["kind"]], clip_on=False, zorder=5, **EVENT)
    shown = [n if len(n) <= MOST_CHARACTERS else f"{n[: MOST_CHARACTERS - 1]}…" for n in map(showable, names)]
    axes.set(ylim=(len(names) + 0.6, -0.6), yticks=range(len(names) + 1), yticklabels=["boot", *shown])
    axes.tick_params(labelsize=8)
    axes.grid(visible=False, axis="y")


def _bar(axes: Axes, start_s: float, end_s: float, y: int, colour: str) -> None:
    axes.barh(y, end_s - start_s, left=start_s, height=0.72, color=colour, linewidth=0.6)


def _label(axes: Axes, text: str, start_s: float, end_s: float, whole_s: float) -> None:
    """A boot's number, where its band has room for it."""
    if (end_s - start_s) / whole_s * (WIDTH_IN - 1) > LABEL_IN * (len(text) + 1):
        axes.text((start_s + end_s) / 2, 0, text, color="white", fontsize=8, ha="center", va="center")
