"""A claim held against a run: one word and its reason.

Exact claims are judged here. A claim of a rate needs the interval of measured / published and is said to be
`not_evaluated` until that can be computed: a word that is not earned is not given.
"""

from pydantic import BaseModel

from llmrepro import terms
from llmrepro.claim import Claim
from llmrepro.conditions import Condition


class Verdict(BaseModel):
    """What is said of one claim. `published` and `here` are shown side by side, never mixed."""

    claim: str
    word: terms.Word
    reason: str
    published: str | int | float | list | None
    here: str | int | float | None


def judge(claim: Claim, rows: list[dict], conditions: list[Condition]) -> Verdict:
    """The verdict of a claim from a result's metric rows (see results.py) and conditions."""
    published = claim.value.published
    found = [r for r in rows if r["metric"] == claim.metric and _same(claim, r)]
    conditions = [c for c in conditions if _concerns(c, claim)]

    def say(word: terms.Word, reason: str, here=None) -> Verdict:
        return Verdict(
            claim=claim.id,
            word=word,
            reason=reason,
            here=here,
            published=list(published) if isinstance(published, tuple) else published,
        )

    if not found:
        return say(
            "not_evaluated", "no such value in this run: not asked, not answered, or not told by its definition"
        )
    if len(found) > 1:
        return say(
            "not_evaluated",
            f"{len(found)} measured values fit this claim; its recipe must name the "
            "server, workload, case and statistic it means",
        )
    here = found[0]["value"]
    if claim.value.form != "exact":
        return say("not_evaluated", "this version judges exact claims only", here)
    if here is None:
        return say("not_evaluated", found[0].get("note") or "the engine does not tell it", here)
    differing = [c for c in conditions if c.deciding and c.relation == "differs"]
    if terms.METRICS[claim.metric].of != "weights" and differing:  # a file's facts depend on nothing else
        named = "; ".join(f"{c.name}: published {c.published}, here {c.here}" for c in differing)
        return say("not_comparable", named, here)
    if here == published:
        return say("reproduced", "equal" + _counted(conditions), here)
    return say("not_reproduced", f"published {published}, here {here}", here)


def _same(claim: Claim, row: dict) -> bool:
    """Whether a row is what the claim speaks of: no case named means the whole workload, not every case."""
    return (
        row["case"] == claim.case
        and claim.statistic in ("value", row["statistic"])
        and all(
            wanted is None or row[key] == wanted
            for key, wanted in (("server", claim.server), ("workload", claim.workload))
        )
    )


def _concerns(condition: Condition, claim: Claim) -> bool:
    """A setting of another workload or server (`workloads.chat.…`) changes nothing for this claim."""
    part, _, rest = condition.name.partition(".")
    own = {"workloads": claim.workload, "servers": claim.server}.get(part, ...)
    return own is ... or (own is None and part == "servers") or own == rest.partition(".")[0]


def _counted(conditions: list[Condition]) -> str:
    deciding = [c.relation for c in conditions if c.deciding]
    unstated, unknown = deciding.count("unstated_there"), deciding.count("unknown_here")
    said = [
        f"{n} condition{'s' if n > 1 else ''} {what}"
        for n, what in ((unstated, "unstated by the publication"), (unknown, "not observable here"))
        if n
    ]
    return "; " + ", ".join(said) if said else ""
