"""Start-up with the weights out of the page cache against start-up with them in it."""

from statistics import fmean

from llmrepro import cache_use
from llmrepro.charts.drawings import Drawing, canvas, handles, legend, look, servers_of
from llmrepro.findings import Findings
from llmrepro.notation import number, plural
from llmrepro.workload import Workload

TITLE = "Cold and warm start of the server"
MARK = "startup.first_completion_s"
STATES = {"evicted": "out of the page cache", "warm": "in the page cache"}


def cold_start(found: Findings, workload: Workload, name: str) -> Drawing | None:
    """A point per boot that the workload made and that started in the state it was made for; None without both
    states."""
    made = {
        n: boot
        for n, boot in found.boots.items()
        if boot.get("workload") == workload.id and (boot.get("startup") or {}).get(MARK) is not None
    }
    samples = [
        {
            "kind": "sample",
            "server": boot["server"],
            "page_cache": boot["page_cache"],
            "boot": n,
            "case": boot["case"],
            "weights_cached_share": boot.get("weights_cached_share"),
            "startup_s": boot["startup"][MARK],
        }
        for n, boot in made.items()
        if cache_use.in_state(boot)
    ]
    if {s["page_cache"] for s in samples} != set(STATES):
        return None
    servers = servers_of(found, samples)
    figure, axes = canvas(found, 1.3 + 0.6 * len(servers))
    means = []
    for row, server in enumerate(servers):
        for place, state in enumerate(STATES):
            times = [s["startup_s"] for s in samples if (s["server"], s["page_cache"]) == (server, state)]
            if not times:
                continue
            mean = {"kind": "mean", "server": server, "page_cache": state, "startup_s": fmean(times)}
            means.append(dict.fromkeys(samples[0]) | mean)
            y = row + (place - 0.5) * 0.4
            axes.plot(times, [y - 0.05] * len(times), linestyle="", markersize=5, alpha=0.6, **look(place))
            axes.plot(mean["startup_s"], y + 0.06, markersize=9, markeredgecolor="white", **look(place))
    axes.set(
        title=TITLE,
        xlabel="from the start of the process to the first token (s)",
        xlim=(0, 1.08 * max(s["startup_s"] for s in samples)),
        ylim=(len(servers) - 0.4, -0.6),
        yticks=range(len(servers)),
        yticklabels=servers,
    )
    axes.grid(visible=False, axis="y")
    legend(figure, handles(list(STATES.values())), 2)
    return Drawing(name, TITLE, _caption(samples, len(made)), _alt(means), figure, [*samples, *means])


def _caption(samples: list[dict], made: int) -> str:
    share = max(s["weights_cached_share"] for s in samples if s["page_cache"] == "evicted")
    said = (
        f"n = {plural(len(samples), 'boot')}. Small: each boot; large: the mean. Put out of it by posix_fadvise; "
        f"mincore then found at most {share:.1%} of the weights in it."
    )
    left = made - len(samples)
    return said + (
        f" Left out: {plural(left, 'boot')} not shown to be in the state it was made for." if left else ""
    )


def _alt(means: list[dict]) -> str:
    told = [f"{m['server']}, {STATES[m['page_cache']]}: mean {number(m['startup_s'])} s" for m in means]
    return f"Chart of start-up to the first token in seconds. {'; '.join(told)}."
