"""The section on memory and bandwidth: what is computed, beside what the engine printed and what was published."""

from collections.abc import Iterator

from llmrepro import capacity, ceilings, sizing
from llmrepro.capacity import GIB
from llmrepro.findings import Findings
from llmrepro.markup import Html, facts, folded, join, table, tag
from llmrepro.notation import NOTHING, number, plural
from llmrepro.report.sections import Section
from llmrepro.sizing import Room

TEXT = (
    "What the layers of the model make of a memory, by arithmetic, beside what the engine printed here and what "
    "was published. The arithmetic is an upper bound: engines pad pages and groups of layers, and keep a "
    "drafter's cache."
)
MOST_OPEN = 12  # rates in a table that is not folded
FORMULAS = (
    (
        "KV cache per token",
        "attention layers × KV heads × (length of a key × its bytes + length of a value × its bytes)",
    ),
    ("uniform", "the memory over that, in whole blocks: every layer keeps every token"),
    (
        "hybrid",
        "the longest sequence that fits: full layers keep every token, windowed ones no more than their window "
        "and what is in flight, linear ones a state that does not grow",
    ),
    (
        "state of linear layers",
        "layers × (1 + speculative tokens) × (convolution window + value heads × length of a value × of a key)",
    ),
    (
        "roofline",
        "bandwidth over the bytes that one token reads: all weights of a dense model, of a mixture of experts the "
        "active share, and the KV cache before it",
    ),
)


def sections(found: Findings) -> Iterator[Section]:
    """The section, where the model's layers or the bytes of a token are known."""
    rooms, rates = sizing.rooms(found), ceilings.rates(found)
    none = ceilings.why_none(found)
    if not rooms and not rates:
        if ceilings.speeds(found):
            yield Section("capacity", "Capacity", "", tag("p", none, class_="quiet"))
        return
    differs = sizing.shape_differs(found)
    yield Section(
        "capacity",
        "Capacity",
        TEXT,
        join(
            [
                tag("ul", *(tag("li", f"The {d}") for d in differs), class_="flags") if differs else None,
                *(_room(room, several=len(rooms) > 1) for room in rooms),
                tag("p", none, class_="quiet") if none else None,
                _roofline(found, rates) if rates else None,
                folded("How it is computed", facts("Formulas", FORMULAS)),
            ]
        ),
    )


def _room(room: Room, *, several: bool) -> Html:
    which = f" · {', '.join(room.servers)}" if several else ""
    said = [
        f"Layers {room.shape_from}: {room.shape.attention.locator}.",
        f"Memory of the cache: {number(room.memory_bytes.value / GIB)} GiB, {room.memory_bytes.source}."
        if room.memory_bytes
        else "How much memory the cache has is not known.",
        f"Assumed, for nothing tells it: {'; '.join(room.assumed)}." if room.assumed else None,
        _accounting(room),
    ]
    return join(
        [
            table(
                f"KV cache{which}",
                ["Quantity", "Computed", "Printed by the engine here", "Published"],
                list(_rows(room)),
            ),
            tag("p", join([s for s in said if s], " "), class_="quiet"),
        ]
    )


def _rows(room: Room) -> Iterator[tuple]:
    """(what, computed, printed, published) of one cache."""
    attention, cache = room.shape.attention, room.least
    kinds = [
        (attention.full_layers, "full"),
        (attention.windowed_layers, f"{attention.window} at {number(attention.window_tokens)} tokens"),
        (room.shape.linear.layers if room.shape.linear else 0, "linear"),
    ]
    yield "layers", ", ".join(f"{n:,} {kind}" for n, kind in kinds if n), NOTHING, NOTHING
    each = capacity.bytes_per_token(room.shape, cache)
    yield f"KV cache per token, {_types(room)} (B)", number(each), *_beside(room, "kv_bytes_per_token")
    if room.shape.linear:
        state = capacity.state_bytes(room.shape.linear, cache) / 2**20
        yield f"state of a sequence, {cache.state_dtype} (MiB)", number(state), NOTHING, NOTHING
    context = room.context_tokens and f"{room.context_tokens:,} tokens"
    if room.memory_bytes is None:
        for kind in ("uniform", "hybrid") if room.shape.hybrid else ("uniform",):
            needed = room.needed_bytes(hybrid=kind == "hybrid")
            if needed is not None:
                yield f"cache of {context}, {kind} (GiB)", number(needed / GIB), NOTHING, NOTHING
        return
    yield "memory of the cache (GiB)", NOTHING, *_beside(room, "memory.kv_gib")
    blocks = f" in blocks of {room.least.block_tokens:,}"
    yield f"tokens{blocks}, uniform", number(room.uniform_tokens), *_beside(room, "kv_tokens")
    if room.hybrid_tokens is not None:
        yield f"tokens{blocks} of one sequence, hybrid", _span(room.hybrid_tokens), NOTHING, NOTHING
    uniform, hybrid = room.concurrency(hybrid=False), room.concurrency(hybrid=True)
    if uniform is not None:
        yield f"sequences of {context}, uniform", f"{uniform[0]:.2f}", *_beside(room, "kv_concurrency")
        if room.shape.hybrid:
            yield f"sequences of {context}, hybrid", _span(hybrid, "{:.2f}"), NOTHING, NOTHING


def _types(room: Room) -> str:
    key, value = room.least.key_dtype, room.least.value_dtype
    return key if key == value else f"{key} keys, {value} values"


def _beside(room: Room, metric: str) -> tuple[str, str]:
    claims = [c for c in room.published.get(metric, ()) if sizing.numbers(c)]
    told = "; ".join(c.stated or " to ".join(number(n) for n in sizing.numbers(c)) for c in claims)
    return number(room.printed.get(metric)), told or NOTHING


def _span(values: tuple, form: str = "{:,}") -> str:
    """The least and the greatest; None is without an end."""
    told = ["any" if v is None else form.format(v) for v in values]
    return told[0] if told[0] == told[1] else f"{told[0]} to {told[1]}"


def _accounting(room: Room) -> str | None:
    """Which way the engine counts, where its printed or published concurrency tells."""
    printed = room.printed.get("kv_concurrency")
    whose, values = "printed here", [printed] if printed is not None else []
    if not values:
        whose = "published"
        values = [n for c in room.published.get("kv_concurrency", ()) for n in sizing.numbers(c)]
    if not room.shape.hybrid or not {"kv_tokens", "kv_concurrency"} & {*room.printed, *room.published}:
        return None
    if not values:
        return (
            "Which way the engine counts is not told: older vLLM prints one number of tokens for both, and only "
            "its maximum concurrency differs."
        )
    found = room.accounting(values[0])
    told = f"A concurrency of {values[0]:.2f}, as {whose}, "
    return told + (f"is that of {found} accounting." if found else "does not tell which way the engine counts.")


def _roofline(found: Findings, rates: list[ceilings.Rate]) -> Html:
    weights, roofs = ceilings.weights_read(found), ceilings.roofs(found)
    told = [
        f"Weights read per token: {weights.value / 1e9:,.4g} GB ({weights.source}).",
        *(f"{number(float(r.bandwidth.value))} GB/s: {r.bandwidth.source}." for r in roofs),
        *(
            f"{'Measured' if here else 'Published'} rates have no bandwidth to be held against: "
            + ("none was measured." if here else "the recipe states none.")
            for here in (True, False)
            if any(r.here is here for r in rates) and all(r.here is not here for r in roofs)
        ),
    ]
    above = [r for r in rates if r.finding]
    warned = tag("ul", *(tag("li", f"{r.what}: {r.sentence}") for r in above), class_="flags") if above else None
    shown = table(
        "Decode speed beside the bandwidth roofline",
        ["Rate", "From", "tok/s", "GB per token", "Roofline, tok/s", "Share of it"],
        [
            (
                join([r.what, tag("small", r.server) if r.server else None]),
                "measured here" if r.here else "published",
                number(float(r.tps)),
                f"{r.bytes_per_token / 1e9:,.4g}",
                NOTHING
                if r.bound_tps is None
                else number(float(r.bound_tps)) + (" steps/s" if r.speculative else ""),
                NOTHING if r.bound_tps is None or r.speculative else f"{r.tps / r.bound_tps:.0%}",
            )
            for r in rates
        ],
        words=(1,),
    )
    if any(r.speculative for r in rates):
        told.append(
            "With speculation the roofline bounds verification steps, and a step may yield several tokens."
        )
    said = tag("p", join([t for t in told if t], " "), class_="quiet")
    if len(rates) > MOST_OPEN:
        shown = folded(f"Decode speed beside the bandwidth roofline: {plural(len(rates), 'rate')}", shown)
    return join([warned, shown, said])
