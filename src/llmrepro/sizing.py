"""The KV caches of a run, or of a recipe alone: what is computed, beside what was printed and published.

`capacity` is the arithmetic; this finds what goes into it and says where it is from.
"""

from dataclasses import dataclass
from typing import NamedTuple

from llmrepro import capacity, engines
from llmrepro.capacity import GIB, Cache
from llmrepro.claim import Claim
from llmrepro.measurements import Findings
from llmrepro.recipe import Server
from llmrepro.shape import Shape

# Where an engine does not tell what is in flight: one of vLLM's smaller batches, and two of its larger ones.
IN_FLIGHT_TOKENS = (2048, 16384)
PRINTED = ("kv_bytes_per_token", "memory.kv_gib", "kv_tokens", "kv_concurrency")


class Known(NamedTuple):
    """A number and where it is from, in words."""

    value: float
    source: str


@dataclass(frozen=True)
class Room:
    """The KV cache of one server, or of several alike.

    `least` and `most` are its layout with the fewest and the most tokens in flight, the same where the engine
    tells or nothing depends on it. `memory_bytes` is what the cache has, where anything tells. By metric:
    `printed` values of result.json, and `published` claims.
    """

    servers: tuple[str, ...]
    shape: Shape
    shape_from: str
    least: Cache
    most: Cache
    assumed: tuple[str, ...]
    context_tokens: int | None
    memory_bytes: Known | None
    printed: dict[str, float]
    published: dict[str, tuple[Claim, ...]]

    @property
    def uniform_tokens(self) -> int | None:
        return self.memory_bytes and capacity.uniform_tokens(self.memory_bytes.value, self.shape, self.least)

    @property
    def hybrid_tokens(self) -> tuple[int | None, int | None] | None:
        """(with the most in flight, with the fewest); None of a uniform model or without a known memory."""
        if self.memory_bytes is None or not self.shape.hybrid:
            return None
        found = [capacity.hybrid_tokens(self.memory_bytes.value, self.shape, c) for c in (self.most, self.least)]
        return found[0], found[1]

    def needed_bytes(self, *, hybrid: bool) -> int | None:
        """Bytes that a sequence as long as the context needs, with the most in flight; None without a context."""
        if self.context_tokens is None:
            return None
        if hybrid:
            return capacity.sequence_bytes(self.shape, self.context_tokens, self.most)
        return self.context_tokens * capacity.bytes_per_token(self.shape, self.most)

    def concurrency(self, *, hybrid: bool) -> tuple[float, float] | None:
        """Requests of full length that fit, (with the most in flight, with the fewest)."""
        if self.memory_bytes is None or self.context_tokens is None:
            return None
        memory = self.memory_bytes.value
        found = [
            capacity.concurrency(memory, self.shape, self.context_tokens, c, hybrid=hybrid)
            for c in (self.most, self.least)
        ]
        return found[0], found[1]

    def accounting(self, printed: float) -> str | None:
        """`uniform` or `hybrid`, by a printed concurrency; None where it does not tell."""
        uniform, hybrid = self.concurrency(hybrid=False), self.concurrency(hybrid=True)
        if uniform is None or not self.shape.hybrid or not uniform[0]:
            return None
        return capacity.accounting(printed, uniform[0], hybrid)


def rooms(found: Findings) -> list[Room]:
    """The KV caches of the servers that were started, else of all of the recipe's; alike ones are one."""
    shape, shape_from = shape_of(found)
    if shape is None:
        return []
    merged: dict[tuple, Room] = {}
    for server in servers_of(found):
        try:
            room = _room(found, server, shape, shape_from)
        except ValueError:  # a type of cache whose size is not known: nothing can be said
            continue
        key = (room.least, room.most, room.context_tokens, room.memory_bytes, tuple(room.printed.items()))
        same = merged.get(key)
        if same is not None:
            room = Room(**{**vars(room), "servers": same.servers + room.servers})
        merged[key] = room
    return list(merged.values())


def shape_of(found: Findings) -> tuple[Shape | None, str]:
    """The shape of the served weights where they are here, else as the recipe states it; and which of them."""
    if "shape" in found.weights:
        return Shape.model_validate(found.weights["shape"]), "read from the weights served here"
    return found.recipe.model.shape, "as the recipe states them"


def shape_differs(found: Findings) -> list[str]:
    """What the recipe states of the layers and the weights here have otherwise, a sentence each."""
    stated = found.recipe.model.shape
    if stated is None or "shape" not in found.weights:
        return []
    said = []
    for part in ("attention", "linear"):
        there = getattr(stated, part)
        there = there.model_dump(exclude_none=True) if there else {}
        here = found.weights["shape"].get(part, {})
        said += [
            f"{part} layers: {name} is {there.get(name)} in the recipe, {here.get(name)} in these weights"
            for name in sorted((there.keys() | here.keys()) - {"locator", "state_dtype"})
            if there.get(name) != here.get(name)
        ]
    return said


def _room(found: Findings, server: Server, shape: Shape, shape_from: str) -> Room:
    cache, layout = layout_of(found, server, shape)
    if cache is None:
        raise ValueError("how this engine keeps its cache is not known")
    if cache.block_tokens < 1 or min(cache.in_flight_tokens, cache.speculative_tokens) < 0:
        raise ValueError("its arguments ask for a cache that nobody can have")
    assumed = []
    if "kv_dtype" not in layout:
        assumed.append(f"the cache is {cache.key_dtype}")
    flights = (cache.in_flight_tokens,) * 2
    if shape.attention.windowed_layers and "in_flight_tokens" not in layout:
        flights = IN_FLIGHT_TOKENS
        assumed.append(f"between {flights[0]:,} and {flights[1]:,} tokens are in flight")
    if shape.linear and "ssm_dtype" not in layout and shape.linear.state_dtype is None:
        assumed.append(f"the linear layers' state is {cache.state_dtype}")
    printed = {m: rows[0]["value"] for m in PRINTED if (rows := found.rows(m, server=server.id))}
    printed = {m: v for m, v in printed.items() if v is not None}
    published = {
        m: tuple(c for c in found.recipe.claims if c.metric == m and c.server in (None, server.id))
        for m in PRINTED
    }
    least, most = (cache._replace(in_flight_tokens=n) for n in flights)
    return Room(
        servers=(server.id,),
        shape=shape,
        shape_from=shape_from,
        least=least,
        most=most,
        assumed=tuple(assumed),
        context_tokens=max(0, layout.get("context_tokens") or 0) or None,  # 0: the model's own
        memory_bytes=_memory(layout, printed, published, shape, most),
        printed=printed,
        published={m: claims for m, claims in published.items() if claims},
    )


def _memory(layout: dict, printed: dict, published: dict, shape: Shape, cache: Cache) -> Known | None:
    """What the cache has, from the best that tells it."""
    context = layout.get("context_tokens")
    if "kv_blocks" in layout:
        tokens = layout["kv_blocks"] * cache.block_tokens
        return Known(
            tokens * capacity.bytes_per_token(shape, cache),
            f"{layout['kv_blocks']:,} blocks, as its arguments ask",
        )
    if "kv_bytes" in layout:
        return Known(layout["kv_bytes"], "set, as the server says or its arguments ask")
    if "memory.kv_gib" in printed:
        return Known(printed["memory.kv_gib"] * GIB, "as the engine printed it here")
    if "kv_bytes_per_token" in printed and context:
        return Known(
            printed["kv_bytes_per_token"] * context, "allocated for its context, as the engine printed it"
        )
    stated = [n for claim in published["memory.kv_gib"] for n in numbers(claim)]
    if stated:
        return Known(min(stated) * GIB, "as published")
    return None


def layout_of(
    found: Findings, server: Server, shape: Shape | None, *, live: bool = True
) -> tuple[Cache | None, dict]:
    """How the engine keeps its cache, and what of it was told. (None, {}) where the engine tells nothing."""
    try:
        tell = getattr(engines.load(found.recipe.engine.name), "cache_layout", None)
    except ImportError:
        tell = None
    if tell is None:
        return None, {}
    boot = next((b for b in found.boots.values() if b["server"] == server.id), {}) if live else {}
    told = tell(list(server.args), boot.get("effective", {}))
    key, _, value = str(told.get("kv_dtype", "bfloat16")).partition("/")
    state = shape.linear.state_dtype if shape is not None and shape.linear else None
    cache = Cache(
        key_dtype=key,
        value_dtype=value or key,
        block_tokens=told.get("block_tokens", capacity.BLOCK_TOKENS),
        in_flight_tokens=told.get("in_flight_tokens", 0),
        conv_dtype=told.get("conv_dtype", "bfloat16"),
        state_dtype=told.get("ssm_dtype") or state or "float32",
        speculative_tokens=told.get("draft_tokens", 0),
    )
    return cache, told


def servers_of(found: Findings) -> list[Server]:
    """The servers that were started, else all of the recipe's."""
    started = set(found.servers)
    return [s for s in found.recipe.servers if s.id in started or not started]


def numbers(claim: Claim) -> list[float]:
    """The numbers that a claim states: of a range both ends, of words none; whole ones as int."""
    value = claim.value.published
    values = value if isinstance(value, tuple) else (value,)
    return [int(v) if float(v).is_integer() else v for v in values if isinstance(v, int | float)]
