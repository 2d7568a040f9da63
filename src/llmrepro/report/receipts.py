"""Imported numbers as a page, each of them labelled."""

from collections.abc import Iterator

from llmrepro import __version__, imported, pairing, receipt_results, terms
from llmrepro.imported import Imported
from llmrepro.markup import Html, facts, folded, join, table, tag
from llmrepro.notation import NOTHING, number, plural, published, quantity
from llmrepro.receipt_results import LABEL, NOT_HERE
from llmrepro.report import headline
from llmrepro.report.appendix import definition
from llmrepro.report.averages import TEXT, TITLE, other_statistics
from llmrepro.report.comparisons import EVIDENCE
from llmrepro.report.sections import Section
from llmrepro.report.values import COLUMNS
from llmrepro.report.words import value, word

MOST_ROWS, MOST_TILES = 3000, 6
SPEED = receipt_results.PER_SUITE[0]
SHOWN = (  # of each prompt
    *("prompt_tokens", "cached_tokens", "output_tokens", "ttft_s", SPEED, "e2e_tps"),
    *("prefill_tps", "prefill_tps.published_2026_10"),
)


def head(found: Imported) -> Html:
    """What was imported from where, and the speeds that one publication's numbers can be read as."""
    told = found.told
    judged = found.result["verdicts"]
    rest = (
        f"{plural(len(judged), 'claim')} of {told['recipe']} can be seen beside them; none is judged, since "
        "nothing was measured here."
        if found.recipe
        else "No recipe is attached, so no claim stands beside them."
    )
    tiles = [
        tag(
            "li",
            f"{suite}, decode",
            tag("strong", speeds, tag("span", " tok/s")),
            tag("small", f"in this order: {' / '.join(terms.STATISTICS[s] for s in pairing.of_suite(SPEED))}"),
            tag("small", f"each of the {terms.METRICS[SPEED].title}: ", tag("code", SPEED)),
            tag("small", NOT_HERE),
        )
        for suite, speeds in imported.summary(found)[:MOST_TILES]
    ]
    return join(
        [
            tag("p", join(["llmrepro report · ", tag("strong", LABEL), " · ", told["file"]]), class_="from quiet"),
            tag("h1", found.title),
            tag("p", f"Held beside: {found.recipe.title} ({found.recipe.id})", class_="question")
            if found.recipe
            else None,
            headline.box(
                {"outcome": LABEL},
                {v["word"] for v in judged},
                f"Imported: {plural(len(found.rows), 'request')} that somebody else measured.",
                rest,
                found.result["flags"],
            ),
            tag("ul", *tiles, class_="tiles") if tiles else None,
            tag("p", f"From {told['file']}, {LABEL} {told['imported_at'][:10]}.", class_="by quiet"),
        ]
    )


def sections(found: Imported, figures: Html) -> Iterator[Section]:
    """The parts of the page in order; a part without content is left out."""
    suites = {workload: suite for suite, workload in found.told["suites"].items()}
    statistics = other_statistics(f"Decode speed of each suite ({LABEL})", found.result["metrics"], suites)
    if statistics:
        yield Section("statistics", TITLE, TEXT, statistics)
    if found.result["flags"]:
        flags = tag("ul", *(tag("li", f) for f in found.result["flags"]), class_="flags")
        yield Section("flags", "Before you believe a number", "", flags)
    if found.result["verdicts"]:
        text = "What was published, and the same of the imported numbers. Nothing was measured here."
        yield Section("claims", "Claims", text, _claims(found))
    yield Section(
        "values",
        "Imported values",
        "Means over the repeats of each prompt, below them the least and the greatest. None was measured here.",
        join([_prompts(found, workload, suite) for workload, suite in suites.items()]),
    )
    if figures:
        yield Section("charts", "Charts", "The data behind each chart lie as CSV in `figures/`.", figures)
    yield Section(
        "untold",
        "What these numbers do not tell",
        "Definitions that need more than the time of the first token, the end and the counts.",
        table(
            f"Metrics that the file is not enough for ({LABEL})",
            ["Metric", "Why"],
            [(join([tag("code", n) for n in names], ", "), why) for names, why in found.result["untold"]],
            words=(1,),
        ),
    )
    yield Section("methods", "Methods", "", _methods(found))
    yield Section("requests", "Every request", "As the file states them.", _requests(found))


def _claims(found: Imported) -> Html:
    verdicts = {v["claim"]: v for v in found.result["verdicts"]}
    rows = [
        (
            join([c.title or c.id, tag("small", " · ".join(x for x in (c.workload, c.case) if x))]),
            word(verdicts[c.id]["word"]),
            join([published(c.value, c.unit), tag("small", f"{EVIDENCE[c.evidence]}: {c.locator}")]),
            value(quantity(verdicts[c.id][LABEL], c.unit), verdicts[c.id][LABEL]),
            verdicts[c.id]["reason"],
        )
        for c in found.recipe.claims
        if c.id in verdicts
    ]
    left = len(found.recipe.claims) - len(rows)
    return join(
        [
            table(
                f"Claims beside the imported values ({LABEL}, not measured here)",
                ["Claim", "Verdict", "Published", "Imported", "Why"],
                rows,
                words=(1, 2, 3, 4),
            ),
            tag("p", f"{plural(left, 'more claim')} of the recipe: nothing in the file is about it.")
            if left
            else None,
        ]
    )


def _prompts(found: Imported, workload: str, suite: str) -> Html:
    by = {(r["case"], r["metric"]): r for r in found.result["metrics"] if r["workload"] == workload and r["case"]}
    shown = [m for m in SHOWN if any(metric == m for _, metric in by)]
    cases = list(dict.fromkeys(case for case, _ in by))
    name = suite if suite == workload else f"{suite}, as the workload {workload}"
    rows = [
        (case, *(_cell(by.get((case, m))) for m in shown), number(by[case, "output_tokens"]["n"]))
        for case in cases[:MOST_ROWS]
    ]
    left = len(cases) - len(rows)
    return join(
        [
            table(f"{name}: each prompt ({LABEL})", ["Prompt", *(_column(m) for m in shown), "n"], rows),
            tag("p", f"{left:,} more are in result.json.") if left else None,
        ]
    )


def _column(metric: str) -> Html:
    shown = COLUMNS.get(metric) or f"{metric.partition('_')[0]}, {terms.METRICS[metric].unit}"
    return join([shown, tag("small", tag("code", metric))]) if "." in metric else join([shown])


def _cell(row: dict | None) -> Html:
    if row is None:
        return join([NOTHING])
    spread = f"{number(row['low'])} to {number(row['high'])}" if row["low"] != row["high"] else None
    return join([number(row["value"]), tag("small", spread) if spread else None])


def _methods(found: Imported) -> Html:
    told = found.told
    shown = dict.fromkeys(r["metric"] for r in found.result["metrics"])
    words = [
        join([tag("dt", terms.METRICS[m].title, " ", tag("code", m)), tag("dd", definition(m))])
        for m in shown
        if definition(m)
    ]
    columns = [(own, tag("code", name)) for own, name in told["columns"].items()]
    columns += [(own, "kept, not used") for own in told["extra_columns"]]
    rules = (
        "Of every answer two moments are stated: its first token and its end. The end stands for the last token "
        "too, which may have come a little earlier. What counts as the first token, and when a request began, is "
        "as whoever measured it had it.",
        "Each prompt's value is the mean over its repeats; a suite's value is its statistic over the prompts, and "
        "the token-weighted mean is over all its requests. Nothing is known of boots, so there are no intervals.",
        "A first token is told as late when it came after half as much again as the median of like requests and "
        f"lies more than {receipt_results.OUTLYING} modified z-scores above it (Iglewicz and Hoaglin 1993); "
        "alike are short prompts of one suite, and the repeats of a long one. At least "
        f"{receipt_results.FEWEST} are needed.",
    )
    return join(
        [
            tag("ul", *(tag("li", rule) for rule in rules)),
            facts(f"Columns of the file, and as what they were taken ({LABEL})", columns),
            tag("h3", "Definitions of what is shown"),
            tag("dl", *words),
        ]
    )


def _requests(found: Imported) -> Html:
    rows = [
        (
            f"{r.line}",
            r.suite,
            r.case,
            f"{r.repeat}",
            number(r.prompt_tokens),
            number(r.output_tokens),
            number(r.ttft_s),
            number(r.total_s),
            number(r.max_tokens),
        )
        for r in found.rows[:MOST_ROWS]
    ]
    left = len(found.rows) - len(rows)
    columns = ["Prompt tokens", "Output tokens", "TTFT, s", "Total, s", "Most tokens asked"]
    return folded(
        f"{plural(len(found.rows), 'request')}, {LABEL}",
        table(
            f"Requests in the order of the file ({LABEL}); “unknown” is a dash",
            ["Line", "Suite", "Prompt", "Repeat", *columns],
            rows,
            words=(1, 2),
        ),
        tag("p", f"{left:,} more are in {imported.ROWS}.") if left else None,
    )


def foot(found: Imported) -> Html:
    """Who made the page, and the hashes of what it was made from."""
    hashes = {found.told["file"]: found.told["sha256"], **found.result["inputs"]}
    pairs = [(name, tag("code", digest, class_="long")) for name, digest in hashes.items()]
    return tag(
        "footer",
        tag("p", f"Rendered by llmrepro {__version__} from {LABEL} numbers."),
        folded("The files this page was made from", facts("sha256 of each", pairs)),
    )
