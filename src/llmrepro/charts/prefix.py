"""Time to first token by what the prompt cache held: every sample, the mean, the cached share beside it."""

from statistics import fmean

from matplotlib.axes import Axes

from llmrepro import metrics
from llmrepro.charts.drawings import Drawing, canvas, handles, legend, look, requests_of, servers_of
from llmrepro.findings import Findings
from llmrepro.metrics import ANSWERED
from llmrepro.notation import number, plural
from llmrepro.workload import Workload

TITLES = {"prefix": "Time to first token by prompt cache", "restart": "Time to first token, cold and warm"}


def ttft_by_cache(found: Findings, workload: Workload, name: str) -> Drawing | None:
    """A band per case in the order asked, a point per request; None without a time."""
    samples = _samples(found, workload)
    if not samples:
        return None
    servers = servers_of(found, samples)
    cases = [c for c in workload.cases if any(s["case"] == c for s in samples)]
    figure, axes = canvas(found, 1.3 + 0.4 * len(cases) * max(1, 0.6 * len(servers)))
    means = []
    for place, server in enumerate(servers):
        for row, case in enumerate(cases):
            mine = [s for s in samples if (s["server"], s["case"]) == (server, case)]
            if mine:
                means.append(_mean(server, case, mine))
                _draw(axes, mine, means[-1], row + 0.86 * ((place + 0.5) / len(servers) - 0.5), place)
    axes.set(
        title=TITLES[workload.kind],
        xlabel="time to first token (s)",
        xlim=(0, 1.05 * max(s["ttft_s"] for s in samples)),
        ylim=(len(cases) - 0.4, -0.7),
        yticks=range(len(cases)),
        yticklabels=[c.replace("_", " ") for c in cases],
    )
    axes.grid(visible=False, axis="y")
    for row in range(1, len(cases) if len(servers) > 1 else 1):
        axes.axhline(row - 0.5, color="#e3e3e3", linewidth=0.8)
    _beside(axes, "cached", -0.52)
    if len(servers) > 1:
        legend(figure, handles(servers), min(3, len(servers)))
    alt = _alt(workload, means, several=len(servers) > 1)
    caption = _caption(found, workload, samples)
    return Drawing(name, TITLES[workload.kind], caption, alt, figure, [*samples, *means])


def _samples(found: Findings, workload: Workload) -> list[dict]:
    """A row per request with a time, by server, case and round."""
    rows = [
        {
            "kind": "sample",
            "server": r.server,
            "case": r.case,
            "boot": r.boot,
            "round": r.repeat + 1,
            "prompt_tokens": r.prompt_tokens,
            "cached_tokens": r.cached_tokens,
            "cached_share": metrics.prefix_hit_rate(r),
            "ttft_s": metrics.ttft_s(r),
        }
        for r in requests_of(found, workload)
        if r.status in ANSWERED
    ]
    return [r for r in rows if r["ttft_s"] is not None]


def _mean(server: str, case: str, mine: list[dict]) -> dict:
    shares = [s["cached_share"] for s in mine]
    known = None not in shares
    return dict.fromkeys(mine[0]) | {
        "kind": "mean",
        "server": server,
        "case": case,
        "cached_share": fmean(shares) if known else None,
        "ttft_s": fmean(s["ttft_s"] for s in mine),
    }


def _draw(axes: Axes, mine: list[dict], mean: dict, y: float, place: int) -> None:
    times = [s["ttft_s"] for s in mine]
    axes.plot(times, [y - 0.06] * len(times), linestyle="", markersize=5, alpha=0.6, clip_on=False, **look(place))
    axes.plot(mean["ttft_s"], y + 0.08, markersize=9, markeredgecolor="white", clip_on=False, **look(place))
    _beside(axes, _share(mean["cached_share"]), y)


def _beside(axes: Axes, text: str, y: float) -> None:
    axes.annotate(
        text,
        (1.02, y),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=9,
        color="#3a3a3a",
        annotation_clip=False,
    )


def _share(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}" if share else "0%"


def _caption(found: Findings, workload: Workload, samples: list[dict]) -> str:
    asked = requests_of(found, workload)
    skipped = sum(r.status == "skipped" for r in asked)
    failed = sum(r.status not in ANSWERED for r in asked) - skipped
    said = [
        f"n = {plural(len(samples), 'request')} of {plural(len({s['boot'] for s in samples}), 'boot')}. Small: "
        "each request; large: the mean.",
        "Right: the mean share of the prompt's tokens that came from the cache, as each answer tells it.",
        f"{plural(failed, 'request')} failed and {'has' if failed == 1 else 'have'} no time." if failed else "",
        f"{plural(skipped, 'request')} could not be asked here." if skipped else "",
    ]
    return " ".join(s for s in said if s)


def _alt(workload: Workload, means: list[dict], *, several: bool) -> str:
    told = [
        f"{m['case'].replace('_', ' ')}{' on ' + m['server'] if several else ''}: mean {number(m['ttft_s'])} s, "
        f"{_share(m['cached_share'])} cached"
        for m in sorted(means, key=lambda m: workload.cases.index(m["case"]))
    ]
    return f"Chart of time to first token in seconds, per state of the prompt cache. {'; '.join(told)}."
