"""Answers as engines stream them, at random: `whole(Random(seed))` is what comes back for one request.

What is true of it comes from the script that it was written from, never from reading it.
"""

import json
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import dialects
from asking import CHAT, TEXT

WORDS = [
    " quick",
    " café",
    "🙂",
    " 日本",
    '"',
    "\\",
    "\n\n",
    "data: [DONE]\n\n",
    "\u2028",
    "\x85",
    "</think>",
    "\x00",
    "7",
]
OK = {"ok"}
SPOKEN = {"text", "reasoning", "tool"}


@dataclass
class Step:
    """An event on its way: what it says (None: [DONE]) and what is true of it."""

    says: dict[str, Any] | None
    tokens: int
    kinds: set[str]
    told: set[int] = field(default_factory=set)  # how many tokens have come, as it tells by ids, usage or timings

    def said(self, kind: str) -> str:
        """Its text or its reasoning."""
        choice = self.choice()
        delta = choice.get("delta") or {}
        if kind == "text":
            return delta.get("content") or choice.get("text") or ""
        return delta.get("reasoning") or delta.get("reasoning_content") or ""

    def choice(self) -> dict[str, Any]:
        return self.says["choices"][0] if self.says and self.says.get("choices") else {}


@dataclass
class Truth:
    """What is true of a whole answer."""

    tokens: int
    finish: str
    prompt_tokens: int | None
    cached_tokens: int | None
    counted: bool  # whether the stream tells how many tokens it has
    by_event: bool  # and how many each event has


@dataclass
class Exchange:
    """What comes back for one request. `statuses` and `counts` are those that may be said of it."""

    what: str
    endpoint: str
    body: dict[str, Any]
    truth: Truth
    steps: list[Step]
    events: list[bytes]  # a step each, in the form that is sent
    framing: str = "close"  # close, length or chunked
    pieces: list[bytes] = field(default_factory=list)  # of the body, as they are sent
    head: bytes = b""  # status line and headers
    end: str = "close"  # then: close, reset, silence or death (no port any more)
    statuses: set[str] = field(default_factory=lambda: set(OK))
    counts: set[int | None] = field(default_factory=set)

    def tear(self, rng: Random, body: bytes | None = None, status: str = "200 OK", **headers: str) -> None:
        """Send this body (None: the events) in pieces of any size, cut in the middle of whatever lies there."""
        body, self.pieces = b"".join(self.events) if body is None else body, []
        size = rng.choice([1, 7, 40, 300, 2000, 10**6][0 if len(body) < 3000 else 3 :])
        while body:
            n = rng.randint(1, 2 * size)
            self.pieces.append(body[:n])
            body = body[n:]
        lines = {"Content-Type": rng.choice(["text/event-stream", "text/plain"]), "X-Odd": "ü" * 3}
        if self.framing == "chunked":
            lines["Transfer-Encoding"] = "chunked"
        elif self.framing == "length":
            lines["Content-Length"] = str(sum(map(len, self.pieces)))
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        case = rng.choice([str, str.lower])
        head = [f"HTTP/1.1 {status}", *(f"{case(name)}: {value}" for name, value in lines.items()), "", ""]
        self.head = "\r\n".join(head).encode("latin-1")

    def sent(self) -> list[bytes]:
        """Head and pieces as they go over the wire."""
        pieces = self.pieces
        if self.framing == "chunked":
            pieces = [b"%x%s\r\n%s\r\n" % (len(p), b";a=b" * (len(p) % 7 == 0), p) for p in pieces if p]
            pieces += [b"0\r\n\r\n"] if self.end == "close" and not self.what.startswith("cut") else []
        return [self.head, *pieces]


def whole(rng: Random) -> Exchange:
    """An answer in a dialect that the kit meets, in an order and a form that a server may send it in."""
    dialect = rng.choice(["llama.cpp", "vllm", "vllm", "vllm-0.14", "open-jet"])
    endpoint = CHAT if dialect == "open-jet" or rng.random() < 0.6 else TEXT
    chunks = [rng.choice([1, 1, 1, 1, 2, 3, 8]) for _ in range(rng.choice([1, 2, 4, 8, 16, 60]))]
    prompt = rng.randint(1, 300)
    script = dialects.Script(
        dialect=dialect,
        chunks=chunks,
        finish=rng.choice(["length", "stop"]),
        reasoning=rng.randint(1, len(chunks)) if endpoint == CHAT and rng.random() < 0.4 else 0,
        reasoning_key="reasoning_content" if dialect == "llama.cpp" else "reasoning",
        words=rng.sample(WORDS, len(WORDS)),
        held=[i for i in range(len(chunks) - 1) if rng.random() < 0.1],
        usage="never" if rng.random() < 0.15 else "asked",
        cached_tokens=None if rng.random() < 0.2 else rng.randint(0, prompt),
        prompt_tokens=prompt,
        metrics=dialect == "vllm" and rng.random() < 0.3,
    )
    tokens = sum(chunks) + (script.finish == "stop")
    body: dict[str, Any] = {"max_tokens": tokens, "stream_options": {"include_usage": True}}
    body |= {"timings_per_token": True} if rng.random() < 0.5 else {}
    body |= {"return_progress": True} if rng.random() < 0.2 else {}
    body |= {"return_token_ids": True} if rng.random() < 0.4 else {}
    if rng.random() < 0.4:
        body["stream_options"]["continuous_usage_stats"] = True
    vllm, told = dialect.startswith("vllm"), script.usage != "never"
    ids, running = body.get("return_token_ids"), body["stream_options"].get("continuous_usage_stats") and told
    cached = script.cached_tokens if told else None
    truth = Truth(
        tokens,
        script.finish,
        # llama.cpp's timings tell both at all times, open-jet's no cached ones
        prompt if told or dialect == "llama.cpp" else None,
        (script.cached_tokens or 0) if dialect == "llama.cpp" else cached,
        counted=bool(not vllm or told or ids),
        by_event=bool(ids or running if vllm else dialect == "llama.cpp" and body.get("timings_per_token")),
    )
    steps = [_step(script, sent) for sent in dialects.answer(script, endpoint, body)]
    for change in (_tools, _usage_moved, _merged, _empties, _usage_null, _no_done):
        if rng.random() < 0.15:
            steps = change(rng, steps)
    if rng.random() < 0.1:
        body["max_tokens"] = tokens - (script.finish == "stop")  # whether the end token counts is the engine's own
    _tell(steps)
    one = Exchange("whole", endpoint, body, truth, steps, encoded(rng, steps))
    one.counts = {tokens} if truth.counted else {None}
    one.framing = rng.choice(["chunked", "chunked", "length", "close"])
    if rng.random() < 0.05 and script.finish == "length":
        body["max_tokens"], one.statuses = tokens + 3, {"early_stop"} if truth.counted else OK
    one.tear(rng)
    return one


def _step(script: dialects.Script, sent: dialects.Sent) -> Step:
    if sent.data == b"data: [DONE]\n\n":
        return Step(None, 0, {"done"})
    step = Step(json.loads(sent.data[6:]), sent.tokens, {"finish"} if sent.finish else set())
    if sent.spoke:
        step.kinds.add(
            "text" if "content" in step.choice().get("delta", {}) or script.reasoning == 0 else "reasoning"
        )
    return step


def _tell(steps: list[Step]) -> None:
    """Note what each event tells of how many tokens have come."""
    reached = 0
    for step in steps:
        says = step.says or {}
        reached += len(step.choice().get("token_ids") or ())
        step.told = {reached} if reached else set()
        for name, key in (("usage", "completion_tokens"), ("timings", "predicted_n")):
            if says.get(name):
                step.told.add(says[name][key])


def _tools(rng: Random, steps: list[Step]) -> list[Step]:
    """A tool call in place of some text."""
    for step in steps:
        delta = step.choice().get("delta")
        if step.kinds == {"text"} and delta and rng.random() < 0.3:
            del delta["content"]
            delta["tool_calls"] = [{"index": 0, "function": {"arguments": "{"}}]
            step.kinds = {"tool"}
    return steps


def _usage_moved(rng: Random, steps: list[Step]) -> list[Step]:
    """The last usage (with what came beside it) on the finish, right before it, or twice."""
    i = next((i for i, s in enumerate(steps) if s.says and not s.says["choices"] and s.says.get("usage")), None)
    if i is None:
        return steps
    usage, rest = steps[i], [*steps[:i], *steps[i + 1 :]]
    finish = next(j for j, s in enumerate(rest) if "finish" in s.kinds)
    where = rng.choice(["on", "before", "twice", "without choices"])
    if where == "on":
        rest[finish].says |= {k: v for k, v in usage.says.items() if k in ("usage", "timings", "metrics")}
        return rest
    if where == "before" and not SPOKEN & rest[finish].kinds and not rest[finish].tokens:
        return [*rest[:finish], usage, *rest[finish:]]
    if where == "without choices":
        usage.says.pop("choices")
        return steps
    return [*steps[: i + 1], replace(usage, says=dict(usage.says)), *steps[i + 1 :]]


def _merged(rng: Random, steps: list[Step]) -> list[Step]:
    """Neighbours in one event, as engines send what one step of speculation brought: reasoning and text too."""
    out: list[Step] = []
    for step in steps:
        last = out[-1] if out else step
        speak = all(SPOKEN & s.kinds and "tool" not in s.kinds for s in (last, step))
        if last is step or not speak or "finish" in last.kinds or rng.random() < 0.6:
            out.append(step)
            continue
        a, b = last.choice(), step.choice()
        first, second = (a["delta"], b["delta"]) if "delta" in a else (a, b)
        for key in ("content", "text", "reasoning", "reasoning_content"):
            if first.get(key) or second.get(key):
                second[key] = (first.get(key) or "") + (second.get(key) or "")
        if a.get("token_ids") is not None:
            b["token_ids"] = a["token_ids"] + b["token_ids"]
        out[-1] = Step(step.says, last.tokens + step.tokens, last.kinds | step.kinds)
    return out


def _empties(rng: Random, steps: list[Step]) -> list[Step]:
    """Events without news, anywhere before the end."""
    for _ in range(rng.randint(1, 4)):
        delta = rng.choice([{"content": ""}, {"content": None}, {}, {"role": "assistant"}, {"reasoning": ""}])
        choice = rng.choice([{"delta": delta}, {"text": ""}, {"delta": None}])
        says = rng.choice([{"choices": [{"index": 0, **choice, "finish_reason": None}]}, {"choices": []}, {}])
        steps = list(steps)
        steps.insert(rng.randrange(len(steps)), Step(says, 0, set()))
    return steps


def _usage_null(rng: Random, steps: list[Step]) -> list[Step]:
    for step in steps:
        if step.says is not None:
            step.says.setdefault("usage", None)
            step.says.setdefault("error", None)
    return steps


def _no_done(rng: Random, steps: list[Step]) -> list[Step]:
    return [step for step in steps if "done" not in step.kinds]


def encoded(rng: Random, steps: list[Step]) -> list[bytes]:
    """The steps as server-sent events, in one of the forms that the standard allows."""
    newline = rng.choice(["\n", "\n", "\r\n", "\r"]).encode()
    colon, rare = rng.choice([b"data: ", b"data: ", b"data:"]), rng.random() < 0.1
    ascii_, indent = rng.random() < 0.3, 1 if rng.random() < 0.05 else None
    out = []
    for step in steps:
        text = "[DONE]" if step.says is None else json.dumps(step.says, ensure_ascii=ascii_, indent=indent)
        lines = [colon + line.encode() for line in text.split("\n")]
        if rare:
            lines[:0] = rng.choice(
                [[], [b": ping"], [b":"], [b"event: message"], [b"id: 7"], [b"retry: 9", b"id"]]
            )
        out.append(newline.join([*lines, b"", b""]))
    if rare and rng.random() < 0.5:
        out[0] = b"\xef\xbb\xbf" + out[0]
    return out
