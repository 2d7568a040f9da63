"""The front of the report below its head: claims, values, charts, conditions. `appendix` has the rest."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from llmrepro import intervals, terms
from llmrepro.charts import acceptance, telemetry
from llmrepro.claim import Claim
from llmrepro.findings import Findings
from llmrepro.markup import Html, code, join, table, tag
from llmrepro.notation import NOTHING, measured, number, quantity
from llmrepro.notation import published as as_published
from llmrepro.report import averages, comparisons, ladders, published, speculation
from llmrepro.report.comparisons import EVIDENCE
from llmrepro.report.values import measured_values, startup
from llmrepro.report.words import RELATIONS, relation, value, word

LABELS = {
    "load_1min": "load of the machine before (1 minute)",
    "steal_share": "share of the CPU's time taken by the hypervisor",
}

WIDER = (
    "The interval of a verdict is not that of the mean under [Measured here](#values): it also counts how far "
    "starts lie apart, and is the wider for it."
)
OWN = (acceptance.NAME, telemetry.NAME)  # figures that stand in a part of their own and not among the charts


class Section(NamedTuple):
    """A part of the page. `text` is the kit's own Markdown and holds no value; every value is in `body`."""

    anchor: str
    title: str
    text: str
    body: Html


def sections(found: Findings, drawn: Mapping[str, Html]) -> Iterator[Section]:
    """The front parts in order, with the figures `drawn` by name; a part without content is left out."""
    figures = join([figure for name, figure in drawn.items() if name not in OWN])
    if figures and found.published_only:  # nothing else is to be read first
        yield _charts(figures, "Every point is published, none was measured here.")
    if found.recipe.claims or found.recipe.comparisons:
        across = found.recipe.comparisons
        yield Section(
            "claims",
            "Claims",
            published.TEXT
            if found.published_only
            else "What was published, what was found here, and whether the two agree."
            + (f" {WIDER}" if any(v["noise"] for v in found.result["verdicts"]) else ""),
            join(
                [
                    (published.claims if found.published_only else _claims)(found)
                    if found.recipe.claims
                    else None,
                    _across(found) if across else None,
                ]
            ),
        )
    if found.result["flags"]:
        yield Section(
            "flags",
            "Before you believe a number",
            "",
            tag("ul", *(tag("li", f) for f in found.result["flags"]), class_="flags"),
        )
    if found.asked:
        yield Section(
            "values",
            "Measured here",
            f"All of it was measured in this run. Intervals are {intervals.LEVEL:.0%} intervals of the mean; "
            "how they are made is said under [Methods](#methods).",
            measured_values(found),
        )
    held = ladders.of(found)
    if held:
        yield Section(
            "ladders",
            "How long it holds",
            "Prompts of rising length, asked last, up to the first that failed. A length that failed, and every "
            "longer one, lies outside the verified range: nothing is said of it.",
            held,
        )
    titles = {w.id: w.title or w.id for w in found.recipe.workloads}
    statistics = averages.other_statistics(
        "Decode speed of each suite, measured here", found.result["metrics"], titles
    )
    if statistics:
        yield Section("statistics", averages.TITLE, averages.TEXT, statistics)
    drafted = speculation.told(found, drawn)
    if drafted:
        yield Section("speculation", speculation.TITLE, speculation.TEXT, drafted)
    if found.boots:
        yield Section(
            "startup",
            "Start-up",
            "From the start of the server's process until the client saw each mark. "
            "Ready is when the first completion has begun.",
            startup(found),
        )
    if figures and not found.published_only:
        yield _charts(figures, "Every sample is shown.")
    if found.published_only and found.commands:
        yield Section("commands", "What would run", published.WOULD_RUN, code(found.commands.rstrip("\n")))
    yield Section(
        "conditions",
        "Conditions",
        "Two measurements are comparable when what decides them is equal: those "
        "conditions come first. What a publication does not state blocks nothing; it is counted.",
        _conditions(found),
    )


def _charts(figures: Html, what: str) -> Section:
    where = "The data behind each chart lie as CSV in `figures/` of the run folder."
    return Section("charts", "Charts", f"{what} {where}", figures)


def _across(found: Findings) -> Html:
    if found.published_only:
        return published.across(found)
    told = found.result["comparisons"]
    return comparisons.claims("Claims across two measurements of this run", found.recipe.comparisons, told)


def _claims(found: Findings) -> Html:
    verdicts = {v["claim"]: v for v in found.result["verdicts"]}
    rows = [
        (
            join([claim.title or claim.id, tag("small", _where(claim, found))]),
            word(verdicts[claim.id]["word"]),
            join(
                [
                    value(as_published(claim.value, claim.unit), claim.value.published),
                    comparisons.ours(claim),
                    tag("small", f"{EVIDENCE[claim.evidence]}: {claim.locator}"),
                ]
            ),
            value(quantity(verdicts[claim.id]["here"], claim.unit), verdicts[claim.id]["here"]),
            _ratio(verdicts[claim.id]),
            verdicts[claim.id]["reason"],
        )
        for claim in found.recipe.claims
    ]
    return table(
        "Claims against this run",
        ["Claim", "Verdict", "Published", "Found here", "Ratio", "Why"],
        rows,
        words=(1, 2, 3, 5),
        ids=[f"claim-{c.id}" for c in found.recipe.claims],
    )


def _ratio(verdict: dict) -> Html | str:
    """Found here over published, with its interval; a fact has none."""
    if verdict["ratio"] is None:
        return NOTHING
    mean, interval = measured(verdict["ratio"], verdict["low"], verdict["high"])
    return join([mean, tag("small", interval)]) if interval else mean


def _where(claim: Claim, found: Findings) -> str:
    title = terms.METRICS[claim.metric].title
    parts = [
        title if title.lower() != claim.title.lower() else None,
        claim.workload,
        claim.case,
        claim.server if len(found.servers) > 1 else None,
    ]
    return " · ".join(p for p in parts if p)


def _conditions(found: Findings) -> Html:
    order = list(RELATIONS)
    rows = sorted(
        found.result["conditions"],
        key=lambda c: (not c["deciding"], -(c["relation"] == "differs"), order.index(c["relation"])),
    )
    return table(
        "Conditions, published and here",
        ["Condition", "Weight", "Published, or set by the recipe", "Here", "Relation"],
        [
            (
                _condition(c["name"]) + (f" · {c['server']}" if c["server"] else ""),
                "deciding" if c["deciding"] else "noted",
                *(value(number(c[side]), c[side]) for side in ("published", "here")),
                relation(c["relation"]),
            )
            for c in rows
        ],
        words=(1, 2, 3, 4),
    )


def _condition(name: str) -> str:
    return LABELS.get(name) or terms.CONDITIONS.get(name) or name.replace("_", " ")
