"""The arms' metrics beside each other: boots and whole workloads first, then each case, then facts."""

from collections.abc import Iterator

from llmrepro import terms
from llmrepro.markup import Html, folded, join, table, tag
from llmrepro.notation import NOTHING, measured, number
from llmrepro.report.values import ELSEWHERE
from llmrepro.report.words import value
from llmrepro.study_findings import StudyFindings


def tables(found: StudyFindings) -> Iterator[Html]:
    """Whole workloads and boots in one table, each case in another."""
    arms = list(found.arms)
    titles = {w.id: w.title or w.id for arm in found.arms.values() for w in arm.recipe.workloads}
    rows = [r for r in found.result["metrics"] if any(v["value"] is not None for v in r["values"])]
    facts_ = [r for r in rows if r["workload"] is None and terms.METRICS[r["metric"]].better is None]
    whole = [r for r in rows if r["case"] is None and r not in facts_ and r["statistic"] not in ELSEWHERE]
    ratio = [" / ".join(arms)] if len(arms) == 2 else []
    if whole:
        yield table(
            "Start-up and whole workloads"
            + (f"; {ratio[0]} is the geometric mean over the pairs of boots" if ratio else ""),
            ["Metric", "Of", *arms, *ratio],
            [
                (
                    _metric(r),
                    titles.get(r["workload"], "a boot") + _statistic(r),
                    *(_cell(r, arm) for arm in arms),
                    *([_ratio(r["ratio"])] if ratio else []),
                )
                for r in whole
            ],
            words=(1,),
        )
    cases = [r for r in rows if r["case"] is not None]
    if cases:
        yield folded(
            "Each prompt, length and case",
            table(
                "Each prompt, length and case, means over rounds and boots",
                ["Metric", "Workload", "Case", *arms, *ratio],
                [
                    (
                        _metric(r),
                        titles[r["workload"]],
                        r["case"],
                        *(_cell(r, arm) for arm in arms),
                        *([_ratio(r["ratio"])] if ratio else []),
                    )
                    for r in cases
                ],
                words=(1, 2),
            ),
        )
    if facts_:
        yield folded(
            "Facts of the weights and the engines",
            table(
                "Facts of the weights and the engines, as found here",
                ["Fact", *arms],
                [(_metric(r), *(_cell(r, arm) for arm in arms)) for r in facts_],
            ),
        )


def _ratio(found: dict | None) -> Html:
    if found is None:
        return tag("span", NOTHING)
    shown, interval = measured(found["mean"], found["low"], found["high"])
    return tag("span", shown, tag("small", interval) if interval else None)


def _metric(row: dict) -> Html:
    unit = f", {row['unit']}" if row["unit"] else ""
    return join([terms.METRICS[row["metric"]].title, unit, tag("small", tag("code", row["metric"]))])


def _statistic(row: dict) -> str:
    several = row["statistic"] in ("mean_of_means", "token_weighted")
    return f" · {terms.STATISTICS[row['statistic']]}" if several else ""


def _cell(row: dict, arm: str) -> Html:
    """An arm's values of a row: one per server, the server named where it has several."""
    mine = [v for v in row["values"] if v["arm"] == arm]
    if not mine:
        return tag("span", NOTHING)
    parts = []
    for told in mine:
        if isinstance(told["value"], float):
            shown, interval = measured(told["value"], told["low"], told["high"])
        else:
            shown, interval = number(told["value"]), ""
        server = f" · {told['server']}" if len(mine) > 1 and told["server"] else ""
        small = interval or (told["note"] if told["value"] is None else "")
        parts.append(tag("span", value(shown, told["value"]), server, tag("small", small) if small else None))
    return join(parts, tag("br"))
