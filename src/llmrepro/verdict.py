"""A claim held against a run: one word, its reason, and the numbers that a chart of it needs.

A measured value is held against the published one through the 95 % interval of their ratio: wholly within the
tolerance it is `reproduced`, wholly beyond it `not_reproduced`, across its border `inconclusive`. A word is said
only when it is earned: a differing condition, a gate, a failed run or a value that was not measured here bar it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel

from llmrepro import agreement, outcomes, terms
from llmrepro.claim import Claim
from llmrepro.conditions import Condition, concerning, counted, differing, named
from llmrepro.notation import published
from llmrepro.recipe import Recipe

# What is known of weights that the kit fetched and of a server that it started, by the beginnings of metrics' ids.
TOLD_AT_A_START = ("model.", "startup.", "memory.", "kv_", "log_window.")


class Verdict(BaseModel):
    """What is said of one claim. `published` and `here` are shown side by side, never mixed.

    `ratio` is measured / published with its 95 % interval `low` to `high`, of a range measured / its middle; the
    greatest sample, for a peak, and a fact have none. `tolerance` are the ratios between which the claim holds,
    None an open end. `here_low` and `here_high` are the same interval in the metric's unit, `published_low` and
    `published_high` the ends of what was published. `more_boots` is how many more would decide, where some would.
    `conditions` are those that differ.
    """

    claim: str
    word: terms.Word
    reason: str
    published: str | int | float | list | None
    here: str | int | float | None
    metric: str = ""
    unit: str = ""
    server: str | None = None
    workload: str | None = None
    case: str | None = None
    form: str = ""
    text: str = ""  # the published value in the words of its form
    published_low: float | None = None
    published_high: float | None = None
    samples: list[float] = []
    spread: tuple[float, float] | None = None
    here_low: float | None = None
    here_high: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    tolerance: tuple[float | None, float | None] | None = None
    tolerance_reason: str = ""
    noise: dict | None = None
    more_boots: int | None = None
    notes: list[str] = []
    conditions: list[dict] = []


@dataclass(frozen=True)
class Around:
    """What a verdict takes besides values and conditions. `recipe` is the one that was run.

    `absent` is why nothing of this run is judged (it lacks something, it failed), `unfinished` why a value may
    be missing, `changed` why no word is earned though there are values. `running`: the server ran before the kit
    came. `bars` are reasons against a server's speeds, such as one above the bandwidth roofline, by server.
    """

    recipe: Recipe | None = None
    absent: str | None = None
    unfinished: str | None = None
    changed: str | None = None
    imported: bool = False
    running: bool = False
    bars: Mapping[str, str] = field(default_factory=dict)


def judge(claim: Claim, rows: list[dict], conditions: list[Condition], around: Around = Around()) -> Verdict:
    """The verdict of a claim from a result's metric rows (see rows.py) and conditions.

    A metric's id is its definition, so that only a row of the same id is held against a claim, of the statistic
    that it names; values of a log's windows only against log_window.* of the same id. Protocol and endpoint are
    settings of a workload: one that was changed for the run is a differing condition.
    """
    bound = concerning(conditions, claim)
    said = _Saying(claim, bound)
    if around.absent:
        return said("not_evaluated", around.absent)
    found = matching(claim, rows)
    if claim.value.form == "words":
        here = found[0]["value"] if len(found) == 1 else None
        return said("not_evaluated", f"published without a number: {claim.value.words}", here=here)
    if not found:
        return said("not_evaluated", _missing(claim, around))
    if claim.value.form in ("completed_to", "failed_at"):
        told = outcomes.judge(claim.value, found, of_case=claim.case is not None)
        if told.word == "not_evaluated":
            return said(told.word, told.reason, here=told.here)
        return _barred(said, around, bound, told.word, told.reason, told.reason, here=told.here)
    if len(found) > 1:
        return said(
            "not_evaluated",
            f"{len(found)} measured values fit this claim; its recipe must name the "
            "server, workload, case and statistic it means",
        )
    row = found[0]
    if row["value"] is None:
        return said("not_evaluated", row["note"] or "the engine does not tell it")
    if claim.value.form != "exact":
        return _number(claim, row, around, said, bound)
    here, wanted = row["value"], claim.value.exact
    equal = here == wanted
    word, reason = ("reproduced", "equal") if equal else ("not_reproduced", f"published {wanted}, here {here}")
    line = "" if around.imported else "equal here" if equal else "differs here"
    return _barred(said, around, bound, word, reason, line, here=here)


def matching(claim: Claim, rows: list[dict]) -> list[dict]:
    """The rows that a claim speaks of: no case named means the whole workload, not every case."""
    return [row for row in rows if row["metric"] == claim.metric and _same(claim, row)]


def _same(claim: Claim, row: dict) -> bool:
    of_boot = terms.METRICS[claim.metric].of == "boot" and row["workload"] is None
    every_case = claim.metric == "outcome" and claim.case is None
    return (
        (row["case"] == claim.case or every_case)
        and claim.statistic in ("value", row["statistic"])
        and claim.server in (None, row["server"])
        and (claim.workload in (None, row["workload"]) or of_boot)
    )


class _Saying:
    """Makes a claim's verdicts, each with what is the same in all of them."""

    def __init__(self, claim: Claim, bound: list[Condition]):
        self.claim = claim
        low, high = agreement.ends(claim)
        value = claim.value.published
        self._same = {
            "claim": claim.id,
            "published": list(value) if isinstance(value, tuple) else value,
            "metric": claim.metric,
            "unit": terms.METRICS[claim.metric].unit,
            "server": claim.server,
            "workload": claim.workload,
            "case": claim.case,
            "form": claim.value.form,
            "text": published(claim.value, claim.unit),
            "published_low": low,
            "published_high": high,
            "samples": claim.samples,
            "spread": claim.spread,
            "conditions": [c._asdict() for c in bound if c.relation == "differs"],
        }

    def __call__(self, word: terms.Word, reason: str, here=None, **more) -> Verdict:
        return Verdict(word=word, reason=reason, here=here, **{**self._same, **more})


def _barred(
    said: _Saying, around: Around, bound: list[Condition], word, reason: str, line: str, **more
) -> Verdict:
    """The verdict, or what bars it: a value from elsewhere, or deciding conditions that differ. `line` is what is
    shown then."""
    if around.changed:
        return said("not_evaluated", _joined(around.changed, line), **more)
    if around.imported:
        return said("not_evaluated", _joined("imported, not measured here", line), **more)
    differs = [] if terms.METRICS[said.claim.metric].of == "weights" else differing(bound)
    if differs:  # a file's facts depend on nothing else
        return said("not_comparable", _joined(named(differs), line), **more)
    return said(word, reason + (counted(bound) if word in ("reproduced", "not_reproduced") else ""), **more)


def _number(claim: Claim, row: dict, around: Around, said: _Saying, bound: list[Condition]) -> Verdict:
    """The verdict of a measured number."""
    recipe = around.recipe
    workload = next((w for w in recipe.workloads if w.id == row["workload"]), None) if recipe else None
    found = agreement.of(claim, row, workload, recipe.between if recipe else ())
    speed = claim.metric.startswith(("decode_tps", "e2e_tps"))
    gate = row["gate"] or (around.bars.get(row["server"]) if speed else None)
    if gate:
        return said("not_evaluated", _joined(gate, found.line), **found.numbers)
    return _barred(said, around, bound, found.word, _joined(found.line, *found.why), found.line, **found.numbers)


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _missing(claim: Claim, around: Around) -> str:
    if claim.statistic == "log_window" and not claim.metric.startswith("log_window."):
        return "published as a window of a log, and no such value is held against a request's own"
    if around.running and claim.metric.startswith(TOLD_AT_A_START):
        return "a server that already ran does not tell it"
    if around.unfinished:
        return around.unfinished
    return "no such value in this run: not asked, not answered, or not told by its definition"
