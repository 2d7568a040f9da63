"""Claims about how requests end: completed up to a length, or failed at one."""

from typing import NamedTuple

from llmrepro import terms
from llmrepro.claim import Value

# How an engine fails at a length; whatever else goes wrong (a key, a busy server, a network) says nothing of it.
OF_LENGTH = {"context_overflow", "oom", "engine_died", "early_stop", "xid"}
REFUSED = {400, 413}  # a prompt too long, where the server does not say it in words that are known
NEAR = 0.02  # a prompt cut to a length misses it by a few tokens


class Told(NamedTuple):
    word: terms.Word
    reason: str
    here: str | None


def of_length(status: str | None, http_status: int | None) -> bool:
    """Whether a request ended as an engine fails at a length."""
    return status in OF_LENGTH or (status == "http_error" and http_status in REFUSED)


def judge(value: Value, rows: list[dict], of_case: bool = False) -> Told:
    """The word for `completed_to` or `failed_at`, from rows of the metric outcome (see rows.py).

    It completes when every request of at least that many prompt tokens was answered, and none of a shorter one
    failed. It fails when one of about that length did, and none much shorter. Only what an engine does at a length
    is a failure (`of_length`): a request that ended otherwise, or was not asked, leaves it open. `of_case`: the
    rows are of the one case that is claimed, so that a prompt whose length nobody counted has the claimed one.
    """
    tokens = value.published
    if of_case:
        rows = [{**r, "prompt_tokens": tokens if r["prompt_tokens"] is None else r["prompt_tokens"]} for r in rows]
    ended = [r for r in rows if r["value"] != "ok"]
    bad = sorted((r for r in ended if of_length(r["value"], r.get("http_status"))), key=_length)
    other = sorted((r for r in ended if r not in bad), key=_length)
    other = next((r for r in other if _length(r) <= tokens * (1 + NEAR)), None)  # one longer changes nothing
    good = [r for r in rows if r["value"] == "ok" and _length(r) >= tokens * (1 - NEAR)]
    early = next((r for r in bad if _length(r) <= tokens * (1 + NEAR)), None)
    here = (early or other or (good or bad or rows or [{"value": None}])[0])["value"]
    if any(r["prompt_tokens"] is None for r in bad):
        return Told("not_evaluated", f"how long the prompt was that failed is not known: {bad[0]['note']}", here)
    if early is not None:
        much = _length(early) < tokens * (1 - NEAR)
        said = f"fails here at {_length(early):,} tokens: {early['note']}"
        if value.form == "completed_to" or much:
            return Told("not_reproduced", said, here)
        if other is None:
            return Told("reproduced", said, here)
    if other is not None:
        return Told("not_evaluated", f"that is no failure of an engine at a length: {other['note']}", here)
    if not good:
        longest = max((_length(r) for r in rows if r["value"] == "ok"), default=0)
        return Told(
            "not_evaluated",
            f"no prompt of {tokens:,} tokens was asked; the longest that completed had {longest:,}",
            here,
        )
    partly = next((r for r in good if r.get("unasked")), None)
    if partly is not None:
        return Told("not_evaluated", f"not every request was asked: {partly['note']}", here)
    said = f"completes here with {min(_length(r) for r in good):,} tokens: {good[0]['note']}"
    if bad:
        said += f"; fails at {_length(bad[0]):,}: {bad[0]['note']}"
    return Told("reproduced" if value.form == "completed_to" else "not_reproduced", said, here)


def _length(row: dict) -> int:
    return row["prompt_tokens"] or 0
