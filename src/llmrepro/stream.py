"""What a streamed completion says: server-sent events to text and token counts.

Pure functions over what `client` received; nothing here reads a clock or a socket.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from llmrepro.sse import DONE
from llmrepro.terms import Status

# JSON numbers beyond this are no counts, and not exact everywhere.
LARGEST_COUNT = 2**53
SPOKEN = {"text", "reasoning", "tool"}
UNTOLD = "the server told no number of output tokens that goes to the answer's end"

OVERFLOW = re.compile(
    r"exceed_context_size|context_length_exceeded|context (length|size|window)"
    r"|max(imum)?[ _]model[ _]len|prompt (is )?too long|does not fit the context"
    # vLLM lowers max_tokens to what the context has left, and refuses the 0 that a full one leaves.
    r"|max_tokens must be at least 1, got 0",
    re.IGNORECASE,
)
MEMORY = re.compile(
    r"out of memory|OutOfMemory|bad_alloc|MemoryError|cannot allocate memory|(failed|unable) to allocate",
    re.IGNORECASE,
)
DEAD = re.compile(r"EngineDead|EngineCore encountered", re.IGNORECASE)

Source = Literal["ids", "usage_delta", "usage", "timings"]


class Event(NamedTuple):
    """One server-sent event as received."""

    t_s: float
    """Seconds after t_send: the read that completed the event, so all events of one read share it."""
    kind: str
    """'+'-joined, of: role text reasoning tool empty finish usage progress ping error done."""
    chars: int
    """Characters of text and reasoning in it."""
    tokens: int | None
    """Output tokens it newly accounts for, as the server tells; None where it tells nothing."""


class Seen(NamedTuple):
    """One event with every count it carries; `stream.count` decides which of them to believe."""

    t_s: float
    kinds: tuple[str, ...]
    chars: int
    ids: int | None
    usage_n: int | None
    timings_n: int | None
    drafted_n: int | None = None


@dataclass
class Answer:
    """All that the events of one request said."""

    seen: list[Seen] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    error: Any = None
    malformed: str | None = None  # what is wrong with the first event that cannot be read
    lost: bool = False  # whether others came after it
    done: bool = False
    spoke: bool = False
    ids: Counter[int] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether the server said that this was all, and nothing that cannot be read came of it."""
        return self.done or self.error is not None or (self.finish_reason is not None and self.malformed is None)


class Counts(NamedTuple):
    """Token counts of one request, where each comes from, and what contradicts it."""

    events: list[Event]
    output_tokens: int | None
    source: Source | None
    prompt_tokens: int | None
    cached_tokens: int | None
    same_token_share: float | None
    notes: list[str]


def read(arrivals: Iterable[tuple[int, bytes | None]], t_send_ns: int) -> Answer:
    """What (time in ns, payload or None for a ping) pairs say; never raises for any payload."""
    answer = Answer()
    for t_ns, payload in arrivals:
        t_s = (t_ns - t_send_ns) / 1e9
        answer.lost = answer.malformed is not None
        if payload is None:
            answer.seen.append(Seen(t_s, ("ping",), 0, None, None, None))
        elif payload.strip() == DONE:
            answer.done = True
            answer.seen.append(Seen(t_s, ("done",), 0, None, None, None))
        else:
            answer.seen.append(_event(answer, t_s, payload))
    return answer


def _event(answer: Answer, t_s: float, payload: bytes) -> Seen:
    try:
        event = json.loads(_decoded(payload, answer.notes))
    except (ValueError, RecursionError) as error:
        event = error
    if isinstance(event, dict) and (event.get("error") or event.get("object") == "error"):
        answer.error = answer.error or event
        return Seen(t_s, ("error",), 0, None, None, None)
    fault = _fault(event)
    if fault is not None:
        found = payload[:80].decode("utf-8", "replace")
        answer.malformed = answer.malformed or (
            f"event {len(answer.seen) + 1} {fault}: {found!r}; a server log or a proxy between may say why"
        )
        return Seen(t_s, ("error",), 0, None, None, None)

    kinds: dict[str, None] = {}
    chars, ids = 0, None
    for choice in event.get("choices") or ():
        if choice.get("index"):
            _note(answer.notes, "the server sent more than one choice; their tokens are counted together")
        delta = choice.get("delta") or {}
        text = delta.get("content") or choice.get("text") or ""
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
        tool = bool(delta.get("tool_calls") or delta.get("function_call"))
        told = choice.get("token_ids")
        if told is not None:
            ids = (ids or 0) + len(told)
            answer.ids.update(told)
        if text:
            answer.text.append(text)
        if reasoning:
            answer.reasoning.append(reasoning)
        chars += len(text) + len(reasoning)
        finish = choice.get("finish_reason")
        answer.finish_reason = finish or answer.finish_reason
        says = {"text": text, "reasoning": reasoning, "tool": tool}
        kinds |= {kind: None for kind, said in says.items() if said}
        if not any(says.values()):
            # vLLM and llama.cpp name the role in a first event of its own; a repeated one is no news.
            if delta.get("role"):
                kinds["role"] = None
            elif not finish and "prompt_progress" not in event:
                kinds["empty"] = None
        if finish:
            kinds["finish"] = None
    answer.spoke = answer.spoke or not SPOKEN.isdisjoint(kinds)

    # llama.cpp's "timings"; vLLM's "metrics", once, with the final usage (0.32, --enable-per-request-metrics)
    usage, timings = event.get("usage"), event.get("timings") or event.get("metrics")
    if isinstance(usage, dict):
        kinds["usage"] = None
        answer.usage = _plain(usage)
    if isinstance(timings, dict):
        answer.timings = _plain(timings)
    if "prompt_progress" in event:
        kinds.pop("role", None)
        kinds["progress"] = None
    return Seen(
        t_s,
        tuple(kinds) or ("empty",),
        chars,
        ids,
        _number(usage, "completion_tokens"),
        _number(timings, "predicted_n"),
        _number(timings, "draft_n"),
    )


def _fault(event: Any) -> str | None:
    """Why an event cannot be read, or None. What its choices say must have its type: text in a form that is not
    known would be text that is left out."""
    if not isinstance(event, dict):
        return "is no JSON object"
    choices = event.get("choices")
    if not isinstance(choices, list | None) or not all(isinstance(choice, dict) for choice in choices or ()):
        return "has choices that are no list of objects"
    for choice in choices or ():
        delta, ids = choice.get("delta"), choice.get("token_ids")
        if not isinstance(delta, dict | None):
            return "has a delta that is no object"
        texts = [(delta or {}).get(key) for key in ("content", "reasoning", "reasoning_content")]
        if not all(
            isinstance(text, str | None) for text in (*texts, choice.get("text"), choice.get("finish_reason"))
        ):
            return "has a text or a finish reason that is no string"
        if not isinstance(ids, list | None) or not all(type(token) is int for token in ids or ()):
            return "has token ids that are no list of whole numbers"
    return None


def draft_checks(seen: Sequence[Seen]) -> int | None:
    """Steps of the engine that checked a draft: how often llama.cpp's running `timings.draft_n` grew, which sends
    an event per token. None where nothing was drafted, the timings do not run along, or an event tells of several
    tokens and so may hide a step."""
    if any(s.timings_n is None for s in seen if not SPOKEN.isdisjoint(s.kinds)):
        return None
    checks = tokens = drafted = 0
    for event in seen:
        reached = event.timings_n or tokens
        if (event.drafted_n or 0) > drafted:
            if reached > tokens + 1:
                return None
            checks, drafted = checks + 1, event.drafted_n or 0
        tokens = reached
    return checks or None


def count(answer: Answer) -> Counts:
    """Tokens per event and in all. Trusted in this order: ids, running usage (or llama.cpp's running
    `timings.predicted_n`), the final usage, the final timings; a source that leaves out an event with text
    is not trusted event by event, nor one that ends before the finish, which may bring the end token. What
    contradicts the chosen one becomes a note, never an average. Where an event was lost there is no count.
    """
    seen, usage, timings = answer.seen, answer.usage, answer.timings
    speaks = [not SPOKEN.isdisjoint(s.kinds) for s in seen]
    # With the finish, or between the last text and it, the end token comes. Of a cut answer any count will do: it
    # is one of what came.
    last = max((i for i, spoken in enumerate(speaks) if spoken), default=-1)
    finish = next((i for i, s in enumerate(seen) if "finish" in s.kinds), None)
    ends = 0 if finish is None else min(finish, last + 1)
    ids, usages, timed = (
        _to_the_end([getattr(s, source) for s in seen], ends) for source in ("ids", "usage_n", "timings_n")
    )
    complete_ids = (
        any(speaks)
        and all(n is not None for n, s in zip(ids, speaks, strict=True) if s)
        and sum(n or 0 for n in ids) > 0
    )
    running = _increments(usages, speaks) or _increments(timed, speaks)
    told: dict[Source, int | None] = {
        "ids": sum(n or 0 for n in ids) if complete_ids else None,
        "usage_delta": sum(n or 0 for n in running) if running else None,
        "usage": next((n for n in reversed(usages) if n is not None), None),
        "timings": next((n for n in reversed(timed) if n is not None), None),
    }
    notes = []
    if answer.lost:
        notes.append("an event could not be read: no tokens are counted")
        told = dict.fromkeys(told)
    for name, n in told.items():
        if n == 0 and answer.spoke:
            notes.append(f"{name} tells 0 output tokens although text arrived: not used")
            told[name] = None
    source = next((name for name, n in told.items() if n is not None), None)
    if len({n for n in told.values() if n is not None}) > 1:
        notes.append(
            "output token counts differ: "
            + ", ".join(f"{name} {n}" for name, n in told.items() if n is not None)
            + f"; {source} is used"
        )
    if any(s.ids is not None for s in seen) and not complete_ids and not answer.lost:
        notes.append("token ids came with some events only: not used")
    if source is None and answer.spoke and not notes:
        notes.append(UNTOLD)
    by_event: dict[Source | None, Sequence[int | None]] = {"ids": ids, "usage_delta": running or []}
    tokens = by_event.get(source, [None] * len(seen))
    share = max(answer.ids.values()) / answer.ids.total() if complete_ids and answer.ids else None
    prompt, cached = _prompt(usage, timings, notes)
    return Counts(
        [Event(s.t_s, "+".join(s.kinds), s.chars, n) for s, n in zip(seen, tokens, strict=True)],
        told[source] if source else None,
        source,
        prompt,
        cached,
        share,
        notes,
    )


def _to_the_end(told: list[int | None], ends: int) -> list[int | None]:
    """A source's counts, or none of them where it tells nothing from `ends` on."""
    return told if any(n is not None for n in told[ends:]) else [None] * len(told)


def _increments(cumulative: Sequence[int | None], speaks: Sequence[bool]) -> list[int | None] | None:
    """New tokens by event of a running count; None if an event with text lacks it or it falls."""
    last = max((i for i, spoken in enumerate(speaks) if spoken), default=-1)
    reached, new = 0, []
    for i, (total, spoken) in enumerate(zip(cumulative, speaks, strict=True)):
        if (total is None and spoken) or (total is not None and total < reached and i <= last):
            return None
        new.append(None if total is None else max(0, total - reached))
        reached = max(reached, total or 0)
        if i == last and not reached:
            return None
    return new if last >= 0 else None


def _prompt(usage: Any, timings: Any, notes: list[str]) -> tuple[int | None, int | None]:
    """(prompt tokens, cached tokens). llama.cpp's prompt_n leaves the cached ones out."""
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    computed, reused = _number(timings, "prompt_n"), _number(timings, "cache_n")
    totals = [_number(usage, "prompt_tokens"), None if computed is None or reused is None else computed + reused]
    cached = [_number(details, "cached_tokens"), _number(usage, "cached_tokens"), reused]
    chosen = []
    for name, values in (("prompt", totals), ("cached", cached)):
        known = [n for n in values if n is not None]
        if len(set(known)) > 1:
            notes.append(f"{name} token counts differ between usage and timings: {known}; the first is used")
        chosen.append(known[0] if known else None)
    return chosen[0], chosen[1]


def refusal(http_status: int, body: Any) -> tuple[Status, str, int | None]:
    """(status, sentence, prompt tokens it names) for an error event or the bytes of a body without events."""
    if isinstance(body, bytes):
        try:
            body = json.loads(body)
        except (ValueError, RecursionError):
            body = body.decode("utf-8", "replace").strip()
    error = body
    if isinstance(body, dict):
        error = next((body[key] for key in ("error", "detail") if body.get(key)), body)
        if http_status == 200 and error is body and body.get("object") != "error":
            return "stream_error", "one JSON body came instead of a stream; use a server that streams", None
    said = error if isinstance(error, str) else _json(error)
    message = _text(error.get("message")) if isinstance(error, dict) else ""
    message = (message or said)[:500]
    if http_status in (200, 400) and OVERFLOW.search(said):
        n = _number(error, "n_prompt_tokens")
        return (
            "context_overflow",
            (f"the prompt does not fit the context: {message}; shorten it or serve with a longer context"),
            n,
        )
    if MEMORY.search(said):
        return "oom", f"the server ran out of memory: {message}; serve with a shorter context", None
    if DEAD.search(said):
        return "engine_died", f"the engine behind the server died: {message}; read the server's log", None
    if http_status == 401:
        return "http_error", f"HTTP 401: {message or 'no body'}; ask with the API key the server was given", None
    if http_status != 200:
        return "http_error", f"HTTP {http_status}: {message or 'no body'}; read the server's log", None
    return "stream_error", f"the server sent {message or 'nothing at all'}; read the server's log", None


def storable(value: Any) -> Any:
    """The value with lone surrogates (half an emoji in an escape) joined or replaced: UTF-8 can hold it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        joined = json.loads(json.dumps(value))
        return json.loads(json.dumps(joined, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def _plain(value: Any, depth: int = 3) -> Any:
    """A server's object as records.jsonl can hold it: three levels deep, storable strings."""
    if isinstance(value, dict):
        return {storable(k): _plain(v, depth - 1) for k, v in value.items()} if depth else None
    if isinstance(value, list):
        return [_plain(v, depth - 1) for v in value] if depth else None
    return storable(value)


def _number(holder: Any, key: str) -> int | None:
    value = holder.get(key) if isinstance(holder, dict) else None
    return value if type(value) is int and 0 <= value < LARGEST_COUNT else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _decoded(payload: bytes, notes: list[str]) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError:
        _note(notes, "the server sent invalid UTF-8; replaced by U+FFFD")
        return payload.decode("utf-8", "replace")


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "an error object nested too deeply to show"


def _note(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)
