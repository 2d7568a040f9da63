"""The streams of real engines, event by event, written from a Script: what the truth server sends."""

import base64
import json
from dataclasses import dataclass, field
from typing import Any

WORDS = [" quick", " café", " fox", " 🙂", " jumps", " 日本", " over", " naïve", " dog", "."]
MODEL = "truth-model"


@dataclass
class Script:
    """One scripted answer. Times are seconds after the request was received."""

    dialect: str = "llama.cpp"  # or "vllm", "vllm-0.14", "open-jet"
    ttft_s: float = 0.02
    gap_s: float = 0.002
    role_s: float | None = None  # when chat's role chunk goes; None: with the first token
    chunks: list[int] = field(default_factory=list)  # tokens per chunk; empty: one each, max_tokens of them
    reasoning: int = 0  # that many first chunks are reasoning
    reasoning_key: str = "reasoning_content"
    words: list[str] = field(default_factory=list)  # one a token, over and over, in place of WORDS
    held: list[int] = field(default_factory=list)  # chunks whose tokens bring no text (vllm)
    finish: str = "length"  # with "stop" an end token without text is counted too
    finish_gap_s: float | None = None  # None: the finish follows its token at once, as engines do it
    usage: str = "asked"  # asked, never, or a number: a wrong count
    cached_tokens: int | None = 0  # None: not told
    metrics: bool = False  # times by the server's clock (vllm)
    prompt_tokens: int = 300
    n_ctx: int = 8192
    raw: list[str] = field(default_factory=list)  # events, in place of the dialect's; base64 for bytes "b64:"
    status: int = 200
    body: str | None = None  # one body in place of the stream
    content_type: str = "text/event-stream"
    framing: str = "chunked"  # chunked, length or close
    gzip: bool = False
    newline: str = "\n"
    comments: bool = False  # a comment before each event
    batch: int = 1  # events per send
    split_bytes: int = 0  # cut each event's bytes into sends of that size
    cut_after: int | None = None  # reset the connection after that many events
    stall_after: int | None = None  # say no more after that many events, keep the connection
    die_after: int | None = None  # the server's process exits
    close_after: int | None = None  # end the stream in order, though early

    def said(self, first: int, tokens: int) -> str:
        words = self.words or WORDS
        return "".join(words[i % len(words)] for i in range(first, first + tokens))


@dataclass
class Sent:
    """One event of an answer: when to send it, its bytes, and what is true about it."""

    at_s: float
    data: bytes
    tokens: int = 0
    spoke: bool = False
    finish: bool = False


def answer(script: Script, path: str, body: dict[str, Any]) -> list[Sent]:
    """The events of the script, in the dialect's exact form."""
    if script.raw:
        return [
            Sent(
                script.ttft_s + i * script.gap_s,
                base64.b64decode(text[4:]) if text.startswith("b64:") else text.encode(),
            )
            for i, text in enumerate(script.raw)
        ]
    chunks = script.chunks or [1] * int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
    dialect = {"llama.cpp": _llama_cpp, "open-jet": _open_jet}.get(script.dialect, _vllm)
    return dialect(script, chunks, "chat" in path, body)


def _llama_cpp(script: Script, chunks: list[int], chat: bool, body: dict[str, Any]) -> list[Sent]:
    sent: list[Sent] = []
    done = 0

    def event(
        at_s: float, choices: list[dict], tokens: int = 0, spoke: bool = False, finish: bool = False, **more
    ):
        kind = "chat.completion.chunk" if chat else "text_completion"
        tail = {
            "created": 1796036458,
            "id": "chatcmpl-truth",
            "model": MODEL,
            "system_fingerprint": "b0-unknown",
            "object": kind,
        }
        sent.append(Sent(at_s, _data({"choices": choices, **tail, **more}), tokens, spoke, finish))

    def choice(
        text: str | None, finish: str | None = None, key: str = "content", role: bool = False
    ) -> list[dict]:
        if not chat:
            return [{"text": text or "", "index": 0, "logprobs": None, "finish_reason": finish}]
        delta: dict[str, Any] = {"role": "assistant", "content": None} if role else {}
        return [{"finish_reason": finish, "index": 0, "delta": delta if text is None else {key: text}}]

    def timings(at_s: float) -> dict[str, Any]:
        cached = script.cached_tokens or 0
        n, ms = script.prompt_tokens - cached, script.ttft_s * 1e3
        decode_ms = max(0.001, (at_s - script.ttft_s) * 1e3)
        told = {
            "cache_n": cached,
            "prompt_n": n,
            "prompt_ms": ms,
            "prompt_per_token_ms": ms / max(n, 1),
            "prompt_per_second": n / ms * 1e3 if ms else 0,
            "predicted_n": done,
            "predicted_ms": decode_ms,
            "predicted_per_token_ms": decode_ms / max(done - 1, 1),
            "predicted_per_second": (done - 1) / decode_ms * 1e3,
        }
        return told

    if body.get("return_progress"):
        for part in (0, script.prompt_tokens):
            event(
                script.ttft_s * part / script.prompt_tokens / 2,
                choice(None, role=True),
                prompt_progress={"total": script.prompt_tokens, "cache": 0, "processed": part, "time_ms": 0},
            )
    if chat:
        event(script.ttft_s if script.role_s is None else script.role_s, choice(None, role=True))
    at_s = script.ttft_s
    for i, k in enumerate(chunks):
        at_s, done = script.ttft_s + i * script.gap_s, done + k
        more = {"timings": timings(at_s)} if body.get("timings_per_token") else {}
        text = script.said(done - k, k)
        event(at_s, choice(text, key=script.reasoning_key if i < script.reasoning else "content"), k, True, **more)
    ends = script.finish == "stop"
    at_s += (script.gap_s if ends else 0) if script.finish_gap_s is None else script.finish_gap_s
    done += ends
    usage = _usage(script, done, body)
    last = ({"usage": usage} if usage else {}) | {"timings": timings(at_s)}
    finish = choice(None, script.finish)
    if usage and chat:
        event(at_s, finish, int(ends), finish=True)
        event(at_s, [], **last)
    else:
        event(at_s, finish, int(ends), finish=True, **last)
    return [*sent, Sent(at_s, b"data: [DONE]\n\n")]


def _vllm(script: Script, chunks: list[int], chat: bool, body: dict[str, Any]) -> list[Sent]:
    """As vLLM 0.32 sends it; test_stream holds its form against streams of the real server. 0.14 says reasoning
    twice over, under its new name and its old one, and the old one with every delta."""
    sent: list[Sent] = []
    options = body.get("stream_options") or {}
    with_ids, counts = bool(body.get("return_token_ids")), bool(options.get("continuous_usage_stats"))
    usage_follows = bool(options.get("include_usage")) and script.usage != "never"
    print_of_the_build = {"system_fingerprint": "vllm-0.32.0-truth"}
    prompt_ids = list(range(script.prompt_tokens)) if with_ids else None
    old = script.dialect == "vllm-0.14"
    done = 0

    def event(
        at_s: float, choices: list[dict], tokens: int = 0, spoke: bool = False, finish: bool = False, **more
    ):
        chunk = {
            "id": "chatcmpl-truth" if chat else "cmpl-truth",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1796036458,
            "model": MODEL,
            "choices": choices,
        }
        sent.append(Sent(at_s, _data({**chunk, **more}), tokens, spoke, finish))

    def running() -> dict[str, Any]:
        told = _usage(script, done, body) if counts else None
        if told is None:
            return {}
        told.pop("prompt_tokens_details", None)
        return {"usage": told | ({"completion_tokens_details": None} if chat else {})}

    if chat:
        first = {"role": "assistant", "content": ""} | ({"reasoning_content": None} if old else {})
        role = {"delta": first, "logprobs": None, "finish_reason": None}
        more = {"prompt_token_ids": prompt_ids} | ({} if old else {"prompt_text": None})
        at_s = script.ttft_s if script.role_s is None else script.role_s
        event(at_s, [{"index": 0, **role}], **running(), **more)
    ends = script.finish == "stop"
    steps = [*chunks, 1] if ends else chunks
    for i, k in enumerate(steps):
        final = i == len(steps) - 1
        silent = i in script.held or (ends and final)
        text = "" if silent else script.said(done, k)
        ids = list(range(1000 + done, 1000 + done + k)) if with_ids else None
        done += k
        key = script.reasoning_key if i < script.reasoning else "content"
        if old and chat:
            thought = text if i < script.reasoning else None
            delta = {"reasoning": text} if i < script.reasoning else {"content": text}
            said = {"delta": {**delta, "reasoning_content": thought}}
        else:
            said = {"delta": {key: text}} if chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": script.finish if final else None}
        if final or not chat:
            choice["stop_reason"] = None
        if not chat:
            choice["prompt_token_ids"] = prompt_ids if i == 0 else None
        more = running() | (print_of_the_build if final and not usage_follows else {})
        event(script.ttft_s + i * script.gap_s, [{**choice, "token_ids": ids}], k, bool(text), final, **more)
    at_s = script.ttft_s + (len(steps) - 1) * script.gap_s
    if usage_follows:
        told = _usage(script, done, body)
        if chat and not old and script.cached_tokens is not None:
            told["prompt_tokens_details"]["created_cache_tokens"] = 0
        more = {"metrics": _metrics(script, done, at_s)} if script.metrics else {}
        event(at_s, [], usage=told, **print_of_the_build, **more)
    return [*sent, Sent(at_s, b"data: [DONE]\n\n")]


def _open_jet(script: Script, chunks: list[int], chat: bool, body: dict[str, Any]) -> list[Sent]:
    """As open_jet_server sends it: chat only, no count along the way, no cached tokens among the timings. What
    may be the beginning of `</think>` waits, so that pieces of reasoning are no tokens."""
    sent: list[Sent] = []
    done, at_s, held = 0, script.ttft_s, ""

    def event(delta: dict | None, finish: str | None = None, tokens: int = 0, spoke: bool = False, **more):
        choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
        about = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
        sent.append(Sent(at_s, _data({**about, "choices": choices, **more}), tokens, spoke, bool(finish)))

    event({"role": "assistant", "content": None})
    for i, k in enumerate(chunks):
        at_s, text, done = script.ttft_s + i * script.gap_s, script.said(done, k), done + k
        if i < script.reasoning:
            last = i == min(script.reasoning, len(chunks)) - 1
            text, held = (held + text, "") if last else ((held + text)[:-7], (held + text)[-7:])
        if text:
            event({"reasoning_content" if i < script.reasoning else "content": text}, tokens=k, spoke=True)
    done += script.finish == "stop"
    timings = {
        "prompt_n": script.prompt_tokens - (script.cached_tokens or 0),
        "prompt_ms": script.ttft_s * 1e3,
        "predicted_n": done,
        "predicted_ms": max(0.001, (at_s - script.ttft_s) * 1e3),
        "predicted_per_second": done / max(1e-6, at_s - script.ttft_s),
    }
    event({}, script.finish, tokens=int(script.finish == "stop"), timings=timings)
    usage = _usage(script, done, body)
    if usage:
        event(None, usage=usage)
    return [*sent, Sent(at_s, b"data: [DONE]\n\n")]


def _metrics(script: Script, done: int, at_s: float) -> dict[str, Any]:
    """What vLLM adds to the last usage under --enable-per-request-metrics."""
    decode_ms = (at_s - script.ttft_s) * 1e3
    return {
        "time_to_first_token_ms": script.ttft_s * 1e3,
        "generation_time_ms": decode_ms,
        "queue_time_ms": 0.01,
        "mean_itl_ms": decode_ms / max(done - 1, 1),
        "tokens_per_second": done / at_s,
    }


def _usage(script: Script, done: int, body: dict[str, Any]) -> dict[str, Any] | None:
    if script.usage == "never" or not (body.get("stream_options") or {}).get("include_usage"):
        return None
    n = done if script.usage == "asked" else int(script.usage)
    told = {
        "prompt_tokens": script.prompt_tokens,
        "total_tokens": script.prompt_tokens + n,
        "completion_tokens": n,
    }
    if script.cached_tokens is not None:
        told["prompt_tokens_details"] = {"cached_tokens": script.cached_tokens}
    return told


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def overflow(script: Script, n: int) -> bytes:
    """The body of the HTTP 400 with which the dialect refuses a prompt of n tokens."""
    error = {
        "code": 400,
        "message": f"request ({n} tokens) exceeds the available context size ({script.n_ctx} tokens)"
        ", try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": n,
        "n_ctx": script.n_ctx,
    }
    if script.dialect == "vllm":
        # It counts no further than one token too many, so how long the prompt is nobody learns.
        over = script.n_ctx + 1
        error = {
            "message": f"This model's maximum context length is {script.n_ctx} tokens. However, your prompt "
            f"contains at least {over} input tokens, which exceeds this limit even without any output tokens. "
            f"Please reduce the length of the input prompt. (parameter=input_tokens, value={over})",
            "type": "BadRequestError",
            "param": "input_tokens",
            "code": 400,
        }
    return json.dumps({"error": error}).encode()
