"""Drafted tokens that were accepted, by their position in the draft; where positions are untold, by draft."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from llmrepro import speculation
from llmrepro.charts.drawings import Drawing, grid, handles, legend, look
from llmrepro.findings import Findings
from llmrepro.notation import number, plural
from llmrepro.speculation import Sums

TITLE, NAME = "Drafted tokens that were accepted", "acceptance"


def acceptance(found: Findings) -> Drawing | None:
    """A panel per workload, the share of drafts over the position of the token, a line per server; workloads of
    which no positions are told share one panel, accepted tokens per draft. None without an accepted token."""
    groups = speculation.by_boot(found.boots)
    whole = {key: told for key, mine in groups.items() if (told := speculation.together(mine.values())).accepted}
    if not whole:
        return None
    servers = [s.id for s in found.recipe.servers if any(s.id == server for _, server in whole)]
    by_position = list(dict.fromkeys(w for (w, _), d in whole.items() if d.by_position))
    others = list(dict.fromkeys(w for (w, _), d in whole.items() if not d.by_position))
    figure, axes = _canvas(found, len(by_position), len(others))
    for place, workload in enumerate(by_position):
        _positions(axes[place], workload, servers, groups, whole, several=len(by_position) + len(others) > 1)
    if others:
        _means(axes[-1], others, servers, groups, whole)
    axes[0].set_title(TITLE)
    if len(servers) > 1:
        legend(figure, handles(servers), min(3, len(servers)))
    data = [row for key, told in whole.items() for row in _rows(*key, groups[key], told)]
    return Drawing(
        NAME, TITLE, _caption(groups, whole, by_position, others), _alt(whole, len(servers) > 1), figure, data
    )


def _canvas(found: Findings, panels: int, others: int) -> tuple[Figure, list[Axes]]:
    return grid(found, [*([2.6] * panels), *([1.3 + 0.4 * others] if others else [])])


def _positions(axes: Axes, workload: str, servers: list[str], groups: dict, whole: dict, *, several: bool) -> None:
    """A workload's panel: the line is all boots together, small each boot."""
    longest = 1
    for place, server in enumerate(servers):
        mine = whole.get((workload, server))
        if mine is None or not mine.by_position:
            continue
        longest = max(longest, len(mine.by_position))
        x = range(1, len(mine.by_position) + 1)
        boots = groups[workload, server]
        for one in boots.values() if len(boots) > 1 else []:
            axes.plot(x, one.shares, linestyle="", markersize=4, alpha=0.5, clip_on=False, **look(place))
        axes.plot(x, mine.shares, markersize=7, markeredgecolor="white", clip_on=False, **look(place))
    axes.set(
        xlabel="position in the draft" + (f", {workload}" if several else ""),
        ylabel="share of drafts",
        xlim=(0.7, longest + 0.3),
        ylim=(0, 1.03),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _means(axes: Axes, workloads: list[str], servers: list[str], groups: dict, whole: dict) -> None:
    """The panel of workloads without positions: the large point is all boots together, small each boot."""
    greatest = 0.0
    for row, workload in enumerate(workloads):
        for place, server in enumerate(servers):
            mine = whole.get((workload, server))
            if mine is None or mine.by_position:
                continue
            y = row + 0.6 * ((place + 0.5) / len(servers) - 0.5)
            each = [d.accepted / d.checks for d in groups[workload, server].values()]
            greatest = max(greatest, *each)
            if len(each) > 1:
                axes.plot(each, [y - 0.06] * len(each), linestyle="", markersize=4, alpha=0.5, **look(place))
            axes.plot(mine.accepted / mine.checks, y, markersize=8, markeredgecolor="white", **look(place))
    axes.set(
        xlabel="accepted tokens per draft",
        xlim=(0, 1.12 * greatest),
        ylim=(len(workloads) - 0.4, -0.6),
        yticks=range(len(workloads)),
        yticklabels=workloads,
    )
    axes.grid(visible=False, axis="y")


def _rows(workload: str, server: str, boots: dict[int, Sums], whole: Sums) -> list[dict]:
    """Each boot, and all together where they are several."""
    every = [("boot", n, d) for n, d in boots.items()] + ([("all boots", None, whole)] if len(boots) > 1 else [])
    rows = []
    for kind, n, d in every:
        same = {"kind": kind, "server": server, "workload": workload, "boot": n}
        counts = {"drafts": d.checks, "draft_tokens": d.drafted, "accepted_tokens": d.accepted}
        rows += [
            {**same, **counts, "position": position, "accepted_share": share}
            for position, share in enumerate(d.shares, 1)
        ] or [{**same, **counts, "position": None, "accepted_share": None}]
    return rows


def _caption(groups: dict, whole: dict, by_position: list[str], others: list[str]) -> str:
    boots = len({n for key in whole for n in groups[key]})
    drafts = plural(round(sum(d.checks for d in whole.values())), "draft")
    said = [
        f"n = {drafts} of {plural(boots, 'boot')}, by the engine's own counters, warm-ups included.",
        "A token counts only when all before it in its draft were accepted." if by_position else "",
        "Of which position the accepted tokens were the engine does not tell: their mean per draft."
        if others
        else "",
        "Small: each boot." if boots > 1 else "",
    ]
    return " ".join(s for s in said if s)


def _alt(whole: dict[tuple[str, str], Sums], several: bool) -> str:
    said = []
    for (workload, server), d in whole.items():
        where = f"{workload}{f' on {server}' if several else ''}"
        if d.by_position:
            shares = ", ".join(f"{share:.0%}" for share in d.shares)
            said.append(f"{where}: {shares} of {d.checks:,.0f} drafts at positions 1 to {len(d.shares)}")
        else:
            said.append(
                f"{where}: {number(d.accepted / d.checks)} accepted tokens per draft, {d.checks:,.0f} drafts"
            )
    return f"Chart of drafted tokens that were accepted. {'; '.join(said)}."
