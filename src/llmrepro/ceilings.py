"""Decode rates beside their bandwidth roofline: of a run, and as published.

`roofline` is the arithmetic; this finds what goes into it. A rate is held against the bandwidth of the machine
that it was measured on, and against no other.
"""

from collections.abc import Iterator
from typing import NamedTuple

from llmrepro import roofline
from llmrepro.capacity import GIB
from llmrepro.claim import Claim
from llmrepro.measurements import Findings
from llmrepro.recipe import Recipe
from llmrepro.sizing import Known, layout_of, numbers, servers_of, shape_of

QUIET_CPUS = 0.2  # that other programs kept busy while the bandwidth was measured


class Roof(NamedTuple):
    """A bandwidth that decoding is bounded by. `here`: measured on this machine, or published of another."""

    here: bool
    bandwidth: Known
    llc_bytes: float | None


class Rate(NamedTuple):
    """A decode rate and its roofline: `bytes_per_token` of weights and cache, `bound_tps` (steps, if speculative)
    None without a bandwidth, `finding` and `sentence` as of roofline.check."""

    here: bool
    server: str | None
    what: str
    tps: float
    bytes_per_token: float
    speculative: bool
    bound_tps: float | None
    finding: str | None
    sentence: str


def weights_read(found: Findings) -> Known | None:
    """Bytes of weights that decoding one token reads."""
    shape, _ = shape_of(found)
    stated = found.recipe.model.shape
    for one in (shape, stated):
        if one is not None and one.read is not None:
            return Known(one.read.bytes_per_token, one.read.locator)
    parameters = stated.parameters if stated else None
    active = f", {parameters.active_share:.0%} of it active" if parameters and parameters.active_b else ""
    for size, source in _sizes(found):
        return Known(roofline.weights_bytes(size, parameters), f"estimated: {source}{active}")
    if parameters is None or parameters.bits_per_weight is None:
        return None
    used_b = parameters.total_b if parameters.active_b is None else parameters.active_b
    told = f"estimated: {used_b:g} billion parameters of {parameters.bits_per_weight:g} bits, {parameters.locator}"
    return Known(round(used_b * 1e9 * parameters.bits_per_weight / 8), told)


def _sizes(found: Findings) -> Iterator[tuple[int, str]]:
    """(bytes, source) of all weights, the best first."""
    sizes = [file.bytes for file in found.recipe.model.files if file.path.endswith((".gguf", ".safetensors"))]
    if sizes and None not in sizes:
        yield sum(sizes), "the size of the files"
    for row in found.rows("memory.weights_gib"):
        if row["value"] is not None:
            yield round(row["value"] * GIB), "the memory of the weights, as the engine printed it here"
    for claim in found.recipe.claims:
        for value in numbers(claim) if claim.metric == "memory.weights_gib" else ():
            yield round(value * GIB), "the memory of the weights, as published"


def roofs(found: Findings) -> list[Roof]:
    """Bandwidths known: this machine's own for what a CPU serves, and the published machine's."""
    known = []
    memory = found.machine.get("memory", {})
    # The fastest pass: other programs make a median too low, and none makes a pass too fast.
    own = (memory.get("bandwidth") or {}).get("fastest_gb_s") or memory.get("bandwidth_gb_s")
    if own is not None and not found.recipe.needs.vram_gib:
        l3 = found.machine.get("cpu", {}).get("l3_mib")
        known.append(Roof(True, Known(own, "measured on this machine"), l3 and l3 * 2**20))
    there = found.recipe.memory
    if there is not None:
        llc = there.llc_mib and there.llc_mib * 2**20
        known.append(Roof(False, Known(there.bandwidth_gb_s, f"{there.kind}: {there.locator}"), llc))
    return known


def above(found: Findings) -> list[Rate]:
    """The rates measured here that lie above this machine's roofline."""
    return [rate for rate in rates(found) if rate.here and rate.finding is not None]


def trusted(machine: dict) -> bool:
    """Whether the bandwidth is one that a rate can be told wrong by: measured with little else going on."""
    busy = (machine.get("memory", {}).get("bandwidth") or {}).get("other_cpus")
    return busy is not None and busy <= QUIET_CPUS


def rates(found: Findings) -> list[Rate]:
    """Every decode rate measured here beside this machine's roofline, every published one beside the published
    machine's. None where the bytes of a token are not known; without a bandwidth no finding."""
    weights = weights_read(found)
    if weights is None:
        return []
    by_side = {roof.here: roof for roof in roofs(found)}
    shape, _ = shape_of(found)
    together = {w.id for w in found.recipe.workloads if w.kind == "concurrency"}
    told = []
    for server in servers_of(found):
        cache, layout = layout_of(found, server, shape)
        for row in found.rows("decode_tps", server=server.id, statistic="mean"):
            if row["workload"] in together:  # one reading of the weights serves several streams
                continue
            tokens = _context(found, row)
            told.append(
                (True, server.id, row["case"], row["value"], tokens, cache, layout.get("speculative", False))
            )
    servers = {s.id: s for s in found.recipe.servers}
    for claim in found.recipe.claims:
        if not claim.metric.startswith("decode_tps") or claim.server not in (None, *servers):
            continue
        server = servers.get(claim.server) or found.recipe.servers[0]
        cache, layout = layout_of(found, server, shape, live=False)
        for value in numbers(claim):
            tokens = _prompt_tokens(found.recipe, claim)
            what = claim.title or claim.id
            told.append((False, claim.server, what, value, tokens, cache, layout.get("speculative", False)))
    return [_rate(*one, weights, shape, by_side.get(one[0])) for one in told]


def why_none(found: Findings) -> str | None:
    """Why nothing can be held against a roofline, as a sentence; None where there are rates."""
    if not speeds(found):
        return "No roofline: no decode speed of a request is published, and none was measured here."
    if weights_read(found) is None:
        return "No roofline: how many bytes of weights a token reads is not stated."
    return None


def speeds(found: Findings) -> bool:
    """Whether any decode speed of a request is published or measured."""
    claimed = any(claim.metric.startswith("decode_tps") for claim in found.recipe.claims)
    return claimed or bool(found.rows("decode_tps"))


def _rate(here, server, what, tps, tokens, cache, speculative, weights, shape, roof) -> Rate:
    read = weights.value + (roofline.cache_bytes(shape, tokens, cache) if shape is not None and cache else 0)
    if roof is None:
        return Rate(
            here, server, what, tps, read, speculative, None, None, "no bandwidth is known to hold it against"
        )
    bandwidth = roof.bandwidth.value
    finding, sentence = roofline.check(tps, read, bandwidth, roof.llc_bytes, speculative=speculative)
    bound = roofline.bound_tps(bandwidth, read)
    return Rate(here, server, what, tps, read, speculative, bound, finding, sentence)


def _context(found: Findings, row: dict) -> int:
    """Tokens that a case's answer has before it, half way through: the mean over its decoding."""
    where = {key: row[key] for key in ("server", "workload", "case")}
    prompt, output = (found.rows(m, **where) for m in ("prompt_tokens", "output_tokens"))
    told = [rows[0]["value"] if rows else None for rows in (prompt, output)]
    return round((told[0] or 0) + (told[1] or 0) / 2)


def _prompt_tokens(recipe: Recipe, claim: Claim) -> int:
    """Prompt tokens of a published rate, where they are known: fewer make its roofline no lower."""
    for workload in recipe.workloads:
        for prompt in workload.prompts:
            if workload.id == claim.workload and prompt.id == claim.case and prompt.source:
                return prompt.source.prompt_tokens or 0
    return int(claim.case) if claim.case and claim.case.isdecimal() else 0
