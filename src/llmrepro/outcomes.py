"""Claims about how requests end: completed up to a length, or failed at one."""

from typing import NamedTuple

from llmrepro import terms
from llmrepro.claim import Value

NEAR = 0.02  # a prompt cut to a length misses it by a few tokens


class Told(NamedTuple):
    word: terms.Word
    reason: str
    here: str | None


def judge(value: Value, rows: list[dict], of_case: bool = False) -> Told:
    """The word for `completed_to` or `failed_at`, from rows of the metric outcome (see rows.py).

    It completes when every request of at least that many prompt tokens was answered, and none of a shorter one
    failed. It fails when one of about that length did, and none much shorter. `of_case`: the rows are of the one
    case that is claimed, so that a prompt whose length nobody counted has the claimed one.
    """
    tokens = value.published
    if of_case:
        rows = [{**r, "prompt_tokens": tokens if r["prompt_tokens"] is None else r["prompt_tokens"]} for r in rows]
    bad = sorted((r for r in rows if r["value"] != "ok"), key=_length)
    good = [r for r in rows if r["value"] == "ok" and _length(r) >= tokens * (1 - NEAR)]
    early = next((r for r in bad if _length(r) <= tokens * (1 + NEAR)), None)
    here = (early or (good or bad or rows or [{"value": None}])[0])["value"]
    if any(r["prompt_tokens"] is None for r in bad):
        return Told("not_evaluated", f"how long the prompt was that failed is not known: {bad[0]['note']}", here)
    if early is not None:
        much = _length(early) < tokens * (1 - NEAR)
        said = f"fails here at {_length(early):,} tokens: {early['note']}"
        if value.form == "completed_to" or much:
            return Told("not_reproduced", said, here)
        return Told("reproduced", said, here)
    if not good:
        longest = max((_length(r) for r in rows if r["value"] == "ok"), default=0)
        return Told(
            "not_evaluated",
            f"no prompt of {tokens:,} tokens was asked; the longest that completed had {longest:,}",
            here,
        )
    said = f"completes here with {min(_length(r) for r in good):,} tokens: {good[0]['note']}"
    if bad:
        said += f"; fails at {_length(bad[0]):,}: {bad[0]['note']}"
    return Told("reproduced" if value.form == "completed_to" else "not_reproduced", said, here)


def _length(row: dict) -> int:
    return row["prompt_tokens"] or 0
