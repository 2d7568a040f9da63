"""What was published of a study's arms, side by side: a row per thing that was said of one or more of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmrepro.claim import Claim, Comparison
from llmrepro.recipe import Recipe
from llmrepro.study import Study, of_arm

# What is shown side by side, by the beginning of a metric's id. The averages of an engine's log stand with the
# speeds and never in the same row: they are another metric.
GROUPS = {
    "decode_tps": "Decode speed",
    "log_window.generation_tps": "Decode speed",
    "prefill_tps": "Prefill speed",
    "log_window.prompt_tps": "Prefill speed",
    "ttft_s": "Time to the first token",
    "startup": "Start-up",
    "outcome": "How far a prompt may go, in tokens",
}
SHARED = ("Start-up",)  # each arm's own mark of being ready: one row, each with its definition
SUBJECTS = ("Decode", "Prefill", "TTFT")  # what a title begins with, which the group says already


@dataclass(frozen=True)
class Row:
    """`claims` by arm, of those that say something; `number` is the published value where it is one number."""

    group: str
    title: str
    unit: str
    workload: str | None
    case: str | None
    claims: dict[str, Claim] = field(default_factory=dict)

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(c.metric for c in self.claims.values()))

    def ratio(self, a: str, b: str) -> float | None:
        """The published value of an arm by that of another, of one definition; None where either is no number."""
        values = [number(self.claims[arm]) for arm in (a, b) if arm in self.claims]
        if len(values) < 2 or None in values or len(self.metrics) > 1 or not values[1]:
            return None
        return values[0] / values[1]


def times(ratio: float) -> str:
    """A ratio of two published values, to the hundredth: they carry three digits or four."""
    return f"{ratio:.2f}"


def number(claim: Claim) -> float | None:
    """The published value where it is a single number, `about` included."""
    return claim.value.published if claim.value.form in ("point", "about") else None


def ends(claim: Claim) -> tuple[float, float] | None:
    """From where to where a published number goes; None for words and outcomes."""
    found = claim.value.published
    if claim.value.form in ("words", "exact", "completed_to", "failed_at"):
        return None
    return tuple(found) if claim.value.form == "range" else (found, found)


def rows(study: Study, recipes: Mapping[str, Recipe]) -> list[Row]:
    """A row per workload, case, statistic and metric that an arm's recipe has a claim of, group by group.

    `recipes` by arm. Claims made in other conditions than the arm's own are left out: see `elsewhere`.
    """
    found: dict[tuple, list[Row]] = {}
    for arm in study.arms:
        for claim in _claims(study, recipes, arm.id):
            group = next((name for start, name in GROUPS.items() if claim.metric.startswith(start)), None)
            if group is None or own_conditions(claim, recipes[arm.id]):
                continue
            metric = None if group in SHARED else claim.metric
            told = found.setdefault((group, claim.workload, claim.case, claim.statistic, metric), [])
            row = next((r for r in told if arm.id not in r.claims), None)
            if row is None:
                row = Row(group, _title(claim), claim.unit, claim.workload, claim.case)
                told.append(row)
            row.claims[arm.id] = claim
    order = list(dict.fromkeys(GROUPS.values()))
    every = [row for told in found.values() for row in told]
    return sorted(every, key=lambda r: (order.index(r.group), len(r.claims) < len(study.arms)))


def elsewhere(study: Study, recipes: Mapping[str, Recipe]) -> dict[str, int]:
    """How many claims of each arm were made in other conditions than its recipe's, and so stand in no row."""
    counts = {
        arm.id: sum(bool(own_conditions(c, recipes[arm.id])) for c in _claims(study, recipes, arm.id))
        for arm in study.arms
    }
    return {arm: n for arm, n in counts.items() if n}


def behind(comparison: Comparison, told: list[Row]) -> list[tuple[Row, float]]:
    """The rows that a comparison speaks of, with a / b of their published values."""
    a, b = comparison.a, comparison.b
    found = []
    for row in told:
        concerned = row.workload == a.workload == b.workload and row.metrics == [comparison.metric]
        cases = row.case is not None if comparison.each_case else row.case == a.case == b.case
        ratio = row.ratio(a.arm, b.arm) if concerned and cases else None
        if ratio is not None:
            found.append((row, ratio))
    return found


def _claims(study: Study, recipes: Mapping[str, Recipe], name: str) -> list[Claim]:
    """The claims about an arm's servers."""
    arm = next(a for a in study.arms if a.id == name)
    servers = {s.id for s in of_arm(recipes[name], arm).servers}
    return [c for c in recipes[name].claims if c.server is None or c.server in servers]


def own_conditions(claim: Claim, recipe: Recipe) -> dict:
    """The deciding conditions that a claim was made in and that are other ones than its recipe's."""
    usual = recipe.conditions.deciding
    return {name: told for name, told in claim.conditions.deciding.items() if usual.get(name, told) != told}


def _title(claim: Claim) -> str:
    subject, _, rest = claim.title.partition(", ")
    shown = rest if subject in SUBJECTS and " " in rest else claim.title or claim.id
    return f"{shown[:1].upper()}{shown[1:]}"
