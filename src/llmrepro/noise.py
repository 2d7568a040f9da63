"""How far apart equal measurements lie: from round to round within a boot, and from one start or card to another.

Public measurements lie 0.2 % apart within a boot and about 2.8 % from boot to boot, so rounds alone say little.
"""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from llmrepro import terms
from llmrepro.claim import Between, Claim
from llmrepro.intervals import quantile
from llmrepro.workload import Workload

ENOUGH_BOOTS = 5  # from which on the spread between boots is read from the run itself
PREFILL, GREEDY, SAMPLED = 0.005, 0.01, 0.03
STARTUP = 0.05
MOST_BOOTS = 100  # beyond which no one waits for a decision


class Noise(NamedTuple):
    """What an interval is made from. `within` and `between` are relative standard deviations.

    `within` is None where no boot has two rounds, and nought for what a boot has once, such as its start.
    `source` says where `between` comes from, in words.
    """

    within: float | None
    rounds: int
    boots: int
    between: float
    of: Literal["boot", "card"]
    origin: Literal["declared", "measured", "assumed"]
    source: str

    def half_width(self, boots: int | None = None) -> float | None:
        """Of measured / published, relative: h² = (t · within / √n)² + z² · between² · (1 + 1 / boots).

        The 1 is the publication's own boot, n all rounds, t has n - boots degrees of freedom. What lies between
        cards no more boots of one card make smaller: then there is one of each side. With `boots` it is what it
        would be with that many, as many rounds in each. None where `within` is unknown.
        """
        boots = boots or self.boots
        rounds = round(self.rounds / self.boots * boots)
        if self.within is None:
            return None
        inside = quantile(rounds - boots) * self.within / sqrt(rounds) if self.within else 0.0
        drawn = 1 if self.of == "card" else boots
        return sqrt(inside**2 + (quantile(0) * self.between) ** 2 * (1 + 1 / drawn))

    def told(self) -> str:
        """What is known of the spread between starts, for a sentence. A declared source may be one itself."""
        where = " by the recipe" if self.origin == "declared" else f" ({self.source})"
        return f"noise of {100 * self.between:.2g} % between {self.of}s, {self.origin}{where}"


def of_row(claim: Claim, row: dict, workload: Workload | None, declared: Sequence[Between] = ()) -> Noise:
    """The noise of a metric row (see rows.py). Between boots it is what the claim declares, else the first of
    `declared` (the recipe's) that fits, else measured in this run from five boots on, else assumed."""
    means = row["by_boot"]
    once = terms.METRICS[claim.metric].of == "boot" and not claim.metric.startswith("log_window.")
    own = (0.0 if once else row["within"], row["rounds"], len(means))
    found = claim.between or next((b for b in declared if _fits(b, claim.metric, workload)), None)
    if found is not None:
        return Noise(*own, found.relative, found.of, "declared", found.source)
    if len(means) >= ENOUGH_BOOTS and fmean(means):
        spread = stdev(means) / abs(fmean(means))
        return Noise(*own, spread, "boot", "measured", f"this run's {len(means)} boots")
    share, kind = assumed(claim.metric, workload)
    return Noise(*own, share, "boot", "assumed", kind)


def assumed(metric: str, workload: Workload | None) -> tuple[float, str]:
    """(relative standard deviation between boots, of what) where nobody declared it and too few boots tell it.

    Prefill 0.5 %, greedy decode 1 %, sampled decode 3 %; start-up times, which hang on disks, 5 %; of a time to
    the first token outside prefill, of log averages and of all else as for sampled decode.
    """
    if metric.startswith("prefill_tps") or (metric == "ttft_s" and workload and workload.kind == "prefill"):
        return PREFILL, "prefill"
    if metric.startswith("startup."):
        return STARTUP, "start-up"
    if metric.startswith(("decode_tps", "e2e_tps")) and workload is not None:
        return (SAMPLED, "sampled decode") if workload.sampling.temperature > 0 else (GREEDY, "greedy decode")
    return SAMPLED, "as for sampled decode"


def _fits(between: Between, metric: str, workload: Workload | None) -> bool:
    sampled = workload is not None and workload.sampling.temperature > 0
    return metric.startswith(between.metric) and between.sampled in (None, sampled)
