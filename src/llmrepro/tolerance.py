"""How far a measured value may be off and still be the published one. Fixed beforehand; noise never widens it."""

from typing import NamedTuple

from llmrepro.claim import Claim
from llmrepro.workload import Workload

ABOUT = 0.15
PREFILL, GREEDY, SAMPLED, SHORT = 0.03, 0.05, 0.15, 0.10
TTFT, LOG_WINDOW = 0.10, 0.15
SHORT_TOKENS = 100
BORDERED = {"range", "at_least", "at_most", "peak"}  # forms that say themselves where they end


class Tolerance(NamedTuple):
    """`relative` is a share of the published value; `reason` the words beside it."""

    relative: float
    reason: str


def of_claim(claim: Claim, workload: Workload | None, output_tokens: float | None) -> Tolerance | None:
    """The claim's own, else the default of its form and metric.

    A range and a border are taken as they stand where the metric has no default. None where the claim must say it
    itself: a point without a default, and any start-up time, which hangs on disks and caches.
    """
    if claim.tolerance is not None:
        return Tolerance(claim.tolerance.relative, claim.tolerance.reason)
    if claim.value.form == "about":
        return Tolerance(ABOUT, "about")
    found = default(claim.metric, workload, output_tokens)
    if found is None and claim.value.form in BORDERED and not claim.metric.startswith("startup."):
        return Tolerance(0.0, "as published")
    return found


def default(metric: str, workload: Workload | None, output_tokens: float | None = None) -> Tolerance | None:
    """The tolerance of a metric; `output_tokens` are those of the answers, None where nothing was answered yet."""
    if metric.startswith("prefill_tps") or (metric == "ttft_s" and workload and workload.kind == "prefill"):
        return Tolerance(PREFILL, "prefill")
    if metric == "ttft_s":
        return Tolerance(TTFT, "time to the first token")
    if metric.startswith("log_window."):
        return Tolerance(LOG_WINDOW, "averages of a log")
    if not metric.startswith("decode_tps") or workload is None:
        return None
    usual = (
        Tolerance(SAMPLED, "sampled decode")
        if workload.sampling.temperature > 0
        else Tolerance(GREEDY, "greedy decode")
    )
    short = (workload.max_tokens if output_tokens is None else output_tokens) < SHORT_TOKENS
    return max(usual, Tolerance(SHORT, f"outputs under {SHORT_TOKENS} tokens")) if short else usual
