"""A study's page: its arms side by side, what they differ in above every comparison, and its claims."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator

from llmrepro import __version__, intervals, study_findings, terms
from llmrepro.charts import break_even
from llmrepro.comparison import StudyParameters
from llmrepro.markup import Html, code, facts, folded, join, table, tag
from llmrepro.notation import number, plural
from llmrepro.report import comparisons, headline, published, quotations, side_by_side
from llmrepro.report.appendix import definition, shown
from llmrepro.report.quotations import PAGE
from llmrepro.report.sections import Section
from llmrepro.report.words import RELATIONS, WORDS, relation, value
from llmrepro.study_findings import StudyFindings

OUTCOMES = {
    "running": "The comparison is still going on: this is what it has so far.",
    "completed": "The comparison is complete.",
    "failed": "The comparison failed",
    "stopped": "The comparison was stopped",
    "interrupted": "The comparison was interrupted",
    "lacking": "Not every arm could run here.",
}
PUBLISHED_ONLY = "Nothing was measured here: this page shows what was published of each arm and what would be run."
NOT_REPEATED = frozenset({"study", "runs", "resume", "runs_dir"})


def head(found: StudyFindings) -> Html:
    """Title, question, the verdict in a sentence, what the arms differ in, the figures that people look for."""
    study = found.study
    first = next((r.started_at[:10] for arm in found.arms.values() for r in arm.records), None)
    cpu = next((m.get("cpu", {}).get("model") for m in _machines(found) if m), None) or "an unknown processor"
    when = f" · measured {first} on {cpu}" if first else ""
    by = (
        f"Published: {study.source.publication}{f', {study.source.date}' if study.source.date else ''}."
        if study.source
        else "The study names no publication."
    )
    return join(
        [
            tag("p", join(["llmrepro comparison · ", tag("code", study.id), when]), class_="from quiet"),
            tag("h1", study.title),
            tag("p", study.question, class_="question"),
            _verdict(found),
            None if found.published_only else _line(found),  # the page opens with all of the caveats
            headline.tiles(study_findings.merged(found)),
            tag("p", by, class_="by quiet"),
        ]
    )


def _machines(found: StudyFindings) -> list[dict]:
    return [found.machine, *(arm.machine for arm in found.arms.values())]


def _verdict(found: StudyFindings) -> Html:
    status = found.status
    if found.published_only:
        sentence = (
            f"{plural(len(found.study.comparisons), 'claim')} across the arms as published; this machine tests "
            "none of them. What lacks is said below, and what would run."
        )
        return headline.box(status, {"not_evaluated"}, PUBLISHED_ONLY, sentence, found.result["flags"])
    said = [OUTCOMES[status["outcome"]]]
    if status["outcome"] in ("failed", "stopped", "interrupted"):
        by = headline.STOPPED_BY.get(status.get("stopped_by"), status.get("stopped_by"))
        stage = status.get("stage", "unknown")
        said = [f"{OUTCOMES[status['outcome']]} in the stage {stage}{f', {by}' if by else ''}."]
    for arm, one in found.arms.items():
        answered = sum(r.status in ("ok", "early_stop") for r in one.asked)
        boots = len({(b["server"], b["replicate"]) for b in one.boots.values()})
        said.append(
            f"{arm}: {answered:,} of {plural(len(one.asked), 'request')} answered in {plural(boots, 'boot')}."
            if one.asked
            else f"{arm}: nothing was measured."
        )
    said += [f"{held}." for held in found.result["held"]]
    words = Counter(c["word"] for c in found.result["comparisons"])
    flags = found.result["flags"]
    return headline.box(status, set(words), " ".join(said), headline.counted(words, "The study"), flags)


def _line(found: StudyFindings) -> Html:
    """What stands above every comparison: what the arms differ in beyond the engine."""
    return tag("p", tag("strong", "Mind: "), found.result["line"], class_="line")


def sections(found: StudyFindings, figures: Html) -> Iterator[Section]:
    """The page below its head, in order; a part without content is left out."""
    yield from _published(found, figures) if found.published_only else _measured(found, figures)
    if found.study.out_of_scope:
        yield Section(
            "scope",
            "Out of scope",
            "Not measured here.",
            tag("ul", *(tag("li", text) for text in found.study.out_of_scope)),
        )
    own = "Each is an ordinary run with a page of its own."
    more = f"{own} There are its claims, its capacity, its conditions and its pins."
    yield Section("arms", "Arms", more if found.published_only else own, _arms(found))
    yield Section(
        "repeat", "How to repeat it", "In a checkout of llmrepro, after `make setup`:", code(command(found))
    )
    if not found.published_only:
        yield Section("methods", "Methods", "", _methods(found))


def _published(found: StudyFindings, figures: Html) -> Iterator[Section]:
    """What was published: the caveats before anything else, since all that follows sets one arm beside another."""
    caveats = quotations.caveats(found)
    if caveats:
        yield caveats
    if found.study.comparisons:
        yield Section("claims", "Claims", published.TEXT, quotations.claims(found))
    if figures:
        yield Section("charts", "Charts", quotations.TEXT, join([_mind(found), figures]))
    tables = list(quotations.side_by_side(found))
    if tables:
        yield Section("published", "Side by side, as published", quotations.TEXT, join([_mind(found), *tables]))
    commands = quotations.commands(found)
    if commands:
        yield Section("commands", "What would run", published.WOULD_RUN, commands)
    yield Section("differences", "What the arms differ in", "By their recipes.", _differences(found))


def _mind(found: StudyFindings) -> Html | None:
    """The caveats in one line, wherever one arm stands beside another."""
    said = " ".join(found.study.differs_in)
    return tag("p", tag("strong", "Mind: "), said, class_="line") if said else None


def _measured(found: StudyFindings, figures: Html) -> Iterator[Section]:
    result = found.result
    if found.study.comparisons:
        yield Section(
            "claims",
            "Claims",
            "What was claimed of a against b, and what their pairs say here.",
            join(
                [
                    _line(found),
                    comparisons.claims("Claims of this study", found.study.comparisons, result["comparisons"]),
                ]
            ),
        )
    if result["flags"]:
        flags = tag("ul", *(tag("li", f) for f in result["flags"]), class_="flags")
        yield Section("flags", "Before you believe a number", "", flags)
    if found.asked:
        yield Section(
            "values",
            "Side by side",
            f"All of it was measured in these runs. Intervals are {intervals.LEVEL:.0%} intervals of means, over "
            "the rounds of one boot or over the boots where there are several.",
            join([_line(found), *side_by_side.tables(found)]),
        )
    if result["break_even"]:
        yield Section(
            "break-even",
            "When the slower start pays",
            "A server that starts later and answers faster makes up for its start after so many requests.",
            tag("ul", *(tag("li", break_even.sentence(told)) for told in result["break_even"])),
        )
    if figures:
        yield Section(
            "charts",
            "Charts",
            "Every sample is shown. The data behind each chart lie as CSV in `figures/` of the run folder.",
            join([_line(found), figures]),
        )
    yield Section("differences", "What the arms differ in", "", _differences(found))
    bound = _conditions(found)
    if bound:
        yield Section(
            "conditions",
            "Conditions",
            "What a claim is bound to. One that differs makes it not comparable; what is unstated or unknown "
            "blocks nothing and is counted.",
            bound,
        )


def _differences(found: StudyFindings) -> Html:
    arms = list(found.arms)
    engines = ("engine", {told["arm"]: told["engine"] for told in found.result["arms"]})
    rows = [engines, *((d["name"], d["values"]) for d in found.result["differences"])]
    stated = [tag("li", text) for text in found.study.differs_in if not found.published_only]
    untold = found.result["untold"]
    return join(
        [
            table(
                "Known of every arm, and not the same",
                ["What", *arms],
                [(n, *(v[a] for a in arms)) for n, v in rows],
                words=range(1, len(arms) + 1),
            ),
            tag("ul", *stated) if stated else None,
            tag("p", "Told by some of the servers only, so it may differ unseen: ", ", ".join(untold), ".")
            if untold
            else None,
        ]
    )


def _conditions(found: StudyFindings) -> Html | None:
    """Every condition of every claim once, differing ones first."""
    seen = {}
    for judged in found.result["comparisons"]:
        for condition in judged["conditions"]:
            if condition["deciding"] or condition["relation"] == "differs":
                seen.setdefault(tuple(condition.values()), (condition, []))[1].append(judged["claim"])
    order = ["differs", *(r for r in RELATIONS if r != "differs")]
    rows = sorted(seen.values(), key=lambda c: order.index(c[0]["relation"]))
    if not rows:
        return None
    differing = sum(c["relation"] == "differs" for c, _ in rows)
    return folded(
        f"{plural(len(rows), 'condition')}, {plural(differing, 'difference')}",
        table(
            "Conditions, published and here",
            ["Condition", "Weight", "Published, or set by the recipe", "Here", "Relation", "Claims"],
            [
                (
                    c["name"].replace("_", " "),
                    "deciding" if c["deciding"] else "noted",
                    *(value(number(c[side]), c[side]) for side in ("published", "here")),
                    relation(c["relation"]),
                    ", ".join(claims) if len(claims) < len(found.study.comparisons) else "all",
                )
                for c, claims in rows
            ],
            words=(1, 2, 3, 4, 5),
        ),
    )


def _arms(found: StudyFindings) -> Html:
    rows = [
        (
            told["arm"],
            tag("code", told["recipe"]),
            told["engine"],
            ", ".join(told["servers"]),
            told["outcome"] + (f": {told['reason']}" if told["reason"] else ""),
            tag("a", f"report of {told['arm']}", href=PAGE.format(told["arm"])),
        )
        for told in found.result["arms"]
    ]
    return table(
        "The arms of this study",
        ["Arm", "Recipe", "Engine", "Servers", "Outcome", "Page"],
        rows,
        words=range(1, 6),
    )


def command(found: StudyFindings) -> str:
    """The command line that asks for the same comparison, with every parameter that is not the default."""
    given = found.parameters
    words = ["llmrepro", "compare", *([given.study] if given.study else []), *given.runs]
    for name, chosen in given.model_dump().items():
        if name in NOT_REPEATED or chosen == StudyParameters.model_fields[name].default:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if chosen is not True:
            words.append(shown(chosen) if isinstance(chosen, str) else json.dumps(chosen, ensure_ascii=False))
    return shlex.join(words)


def _methods(found: StudyFindings) -> Html:
    rules = [
        "The arms take turns, one boot of each and then the next of each, so that what the machine does meanwhile "
        "falls on all of them."
        if not found.parameters.runs
        else "Nothing was measured for this page: these runs were there already. Where they did not take turns, "
        "what drifted between them is in every ratio.",
        "A pair is a's i-th boot and b's i-th, each the mean over its rounds; of two cases of one server in one "
        "boot a pair is a round.",
        f"a / b is the geometric mean over the pairs, its interval the {intervals.LEVEL:.0%} Student t interval "
        f"of the logarithms, turned back; there is none below {intervals.FEWEST} pairs.",
        f"A claim is {WORDS['reproduced'][1]} when that interval lies wholly where it says, "
        f"{WORDS['not_reproduced'][1]} when wholly elsewhere, else {WORDS['inconclusive'][1]}. One of each case "
        f"needs every case, each at its own {intervals.LEVEL:.0%}.",
        "Break-even: (difference of the starts) / (difference of the requests), with Fieller's interval for a "
        "ratio of two means; requests are counted one at a time.",
        "Every request, answer, log and pin is on the arms' own pages.",
    ]
    shown = dict.fromkeys(r["metric"] for r in found.result["metrics"])
    terms_ = [
        join([tag("dt", terms.METRICS[m].title, " ", tag("code", m)), tag("dd", definition(m))])
        for m in shown
        if definition(m)
    ]
    parts = [tag("ul", *(tag("li", r) for r in rules))]
    if terms_:
        parts += [tag("h3", "Definitions of what is shown"), tag("dl", *terms_)]
    return join(parts)


def foot(found: StudyFindings) -> Html:
    """Who made the page, and the hashes of what it was made from."""
    at = re.sub(r"^(\S{10})T(\d\d:\d\d:\d\d)\S*\+00:00$", r"\1 \2 UTC", found.status.get("at", "unknown time"))
    inputs = [(name, tag("code", digest, class_="long")) for name, digest in found.result["inputs"].items()]
    return tag(
        "footer",
        tag("p", f"Rendered by llmrepro {__version__}; status of {at}."),
        folded("The files this page was made from", facts("sha256 of each", inputs)),
    )
