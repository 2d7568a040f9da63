"""Speculative decoding: each server that drafts beside one that does not, prompt by prompt."""

from llmrepro.findings import Findings
from llmrepro.markup import Html, join, table, tag
from llmrepro.notation import NOTHING, number, plural

TITLE = "With and without speculation"
TEXT = (
    "The same prompts asked of a server that drafts and of one that does not. A step of the engine gives one "
    "token of its own and the drafted ones that it accepts; checking a draft costs time too, so that fewer steps "
    "are not always faster. Acceptance is the accepted share of the drafted tokens."
)
HEAD = ["decode, tok/s", "drafts accepted", "tokens of a step with a draft", "tokens per step", "Same text"]


def tables(found: Findings) -> Html | None:
    """A table per pair of servers, with what the page says of its answers; None where no server drafted."""
    titles = {w.id: w.title or w.id for w in found.recipe.workloads}
    return join([_table(titles[t["workload"]], t) for t in found.result["speculation"]]) or None


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
