"""Bandwidth roofline of decoding: no token comes faster than what it reads can be read.

Williams, Waterman and Patterson 2009 (Communications of the ACM 52(4):65), with nothing but memory in it: one
sequence decodes by reading weights and its cache once per token, and computes little meanwhile.
"""

from typing import Literal

from llmrepro import capacity
from llmrepro.capacity import BF16, Cache
from llmrepro.shape import Parameters, Shape

CACHE_RESIDENT = 2.0  # a token that reads less than so many last-level caches may come out of the cache

Finding = Literal["warning", "bars"]


def weights_bytes(file_bytes: int, parameters: Parameters | None) -> int:
    """Bytes of weights that one token reads, estimated from the size of the files: all of a dense model's, of a
    mixture of experts the active share. Files also hold what decoding does not read (an embedding table of its
    own, a vision tower, layers for prediction ahead), so it may be too much, and its bound too low.
    """
    return max(1, round(file_bytes * (parameters.active_share if parameters else 1.0)))


def cache_bytes(shape: Shape, context_tokens: int, cache: Cache = BF16) -> int:
    """Bytes of KV cache and states that one token reads at a context of so many tokens: what is attended to, so a
    window and no more of a windowed layer, and one state of a linear one."""
    attention = shape.attention
    seen = attention.full_layers * context_tokens
    if attention.windowed_layers:
        seen += attention.windowed_layers * min(context_tokens, attention.window_tokens)
    one = cache._replace(speculative_tokens=0, states=1)
    state = capacity.state_bytes(shape.linear, one) if shape.linear else 0
    return seen * capacity.layer_bytes_per_token(attention, cache) + state


def bound_tps(bandwidth_gb_s: float, bytes_per_token: float) -> float:
    """Most tokens (under speculation: verification steps) per second: bandwidth / bytes per token."""
    return bandwidth_gb_s * 1e9 / bytes_per_token


def cache_resident(bytes_per_token: float, llc_bytes: float | None) -> bool | None:
    """Whether what a token reads may stay in the last-level cache; None where its size is not known."""
    return None if llc_bytes is None else bytes_per_token < CACHE_RESIDENT * llc_bytes


def check(
    rate_tps: float,
    bytes_per_token: float,
    bandwidth_gb_s: float,
    llc_bytes: float | None,
    *,
    speculative: bool = False,
) -> tuple[Finding | None, str]:
    """What a decode rate says beside its roofline, and the sentence for it.

    Above it: `bars` a verdict where a token reads more than two last-level caches hold; else, and where the
    cache's size is not known, `warning`. Under speculation a step yields several tokens, so the roofline bounds
    steps and nothing is found. Raises ValueError for a rate, bytes or bandwidth that are not above nought.
    """
    if min(rate_tps, bytes_per_token, bandwidth_gb_s) <= 0:
        raise ValueError("a rate, the bytes of a token and a bandwidth are above nought")
    bound = bound_tps(bandwidth_gb_s, bytes_per_token)
    at = f"{bandwidth_gb_s:,.4g} GB/s over {bytes_per_token / 1e9:,.3g} GB"
    if speculative:
        return None, f"{at} is {bound:,.4g} verification steps per second; a step may yield several tokens"
    share = rate_tps / bound
    if share <= 1:
        return None, f"{rate_tps:,.4g} tok/s is {share:.0%} of the roofline, {bound:,.4g} tok/s ({at} a token)"
    said = f"{rate_tps:,.4g} tok/s is above the bandwidth roofline of {bound:,.4g} tok/s ({at} a token)"
    if cache_resident(bytes_per_token, llc_bytes) is False:
        return "bars", (
            f"{said}, and a token reads more than twice the last-level cache ({llc_bytes / 2**20:,.4g} MiB): a "
            "counting error, or bytes or bandwidth that are wrong"
        )
    unknown = "; the size of the last-level cache is not known" if llc_bytes is None else ""
    return "warning", f"{said}: cache-resident, or a counting error{unknown}"
