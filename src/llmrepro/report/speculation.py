"""Speculative decoding: what became of drafts, and each server that drafts beside one that does not."""

from collections.abc import Mapping

from llmrepro import speculation
from llmrepro.charts import acceptance
from llmrepro.findings import Findings
from llmrepro.markup import Html, join, table, tag
from llmrepro.notation import NOTHING, number, plural

TITLE = "Speculative decoding"
TEXT = (
    "A step of the engine gives one token of its own and the drafted ones that it accepts; checking a draft costs "
    "time too, so that fewer steps are not always faster. Of a workload drafts are told by the engine's own "
    "counters before and after it, warm-ups included; of a prompt by its answers. The two servers were asked "
    "one after the other, not in turns: their ratio has no interval, and whatever else ran meanwhile is in it."
)
HEAD = ["decode, tok/s", "drafts accepted", "tokens of a step with a draft", "tokens per step", "Same text"]


def told(found: Findings, figures: Mapping[str, Html]) -> Html | None:
    """Drafts by the counters, with their figure among `figures` by name; then a table per pair of servers, with
    what the page says of its answers. None where no server drafted."""
    titles = {w.id: w.title or w.id for w in found.recipe.workloads}
    pairs = [_table(titles[t["workload"]], t) for t in found.result["speculation"]]
    return join([figures.get(acceptance.NAME), _accepted(found), *pairs]) or None


def _accepted(found: Findings) -> Html | None:
    groups = speculation.by_boot(found.boots)
    if not groups:
        return None
    whole = {key: speculation.together(mine.values()) for key, mine in groups.items()}
    longest = max(len(d.by_position) for d in whole.values())
    head = ["Workload", "Server", "drafts", "drafted tokens", "accepted", "accepted share", "per draft"]
    rows = [
        (
            workload,
            server,
            number(round(d.checks)),
            number(d.drafted if d.drafted is None else round(d.drafted)),
            number(round(d.accepted)),
            f"{d.accepted / d.drafted:.1%}" if d.drafted else NOTHING,
            number(d.accepted / d.checks),
            *(f"{share:.0%}" for share in d.shares),
            *([NOTHING] * (longest - len(d.shares))),
        )
        for (workload, server), d in whole.items()
    ]
    positions = [f"position {i}" for i in range(1, longest + 1)]
    return table("Drafted tokens, and those accepted at each position", [*head, *positions], rows, words=(1,))


def _table(title: str, told: dict) -> Html:
    decode, *head = HEAD
    without, with_ = told["without"], told["with"]
    return join(
        [
            table(
                f"{title}: {with_} ({told['speculation']}) against {without}",
                ["Prompt", f"{without}: {decode}", f"{with_}: {decode}", f"{with_} / {without}", *head],
                [_row(c) for c in told["cases"]],
            ),
            tag("p", _said(told), class_="quiet"),
        ]
    )


def _row(case: dict) -> tuple:
    accepted = case["acceptance"]
    return (
        tag("span", case["case"], class_="whole"),
        number(case["without_tps"]),
        number(case["with_tps"]),
        _digits(case["ratio"]),
        NOTHING if accepted is None else f"{accepted:.1%}",
        _digits(case["acceptance_length"]),
        _digits(case["tokens_per_step"]),
        NOTHING if case["same"] is None else f"{case['same']} of {case['answers']}",
    )


def _digits(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _said(told: dict) -> str:
    """How many answers are the same, and what it means where not all are."""
    known = [c for c in told["cases"] if c["same"] is not None]
    same, answers = (sum(c[key] for c in known) for key in ("same", "answers"))
    if not known:
        return "Answers are sampled, so that they need not be the same with drafts and without."
    said = (
        f"{same} of {plural(answers, 'greedy answer')} with drafts {'is' if same == 1 else 'are'} word for word "
    )
    said += f"one that {told['without']} gave."
    if same == answers:
        return said
    return (
        f"{said} Greedy answers must be the same up to the engine's numerics: a step that checks a draft computes "
        "several tokens at once, in another order of sums, and where two tokens are about as probable it may "
        "choose the other one."
    )
