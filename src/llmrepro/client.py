"""One streamed request in, one Record out: the clock of the whole kit."""

import functools
import hashlib
import json
import socket
import time
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import pydantic
import requests
import urllib3

from llmrepro import stream, wire
from llmrepro.exchange import TRANSPORT_ERRORS
from llmrepro.sse import DONE, Reader
from llmrepro.stream import Event, storable
from llmrepro.terms import Status

__all__ = ["Event", "Question", "Record", "ask"]

READ_BYTES = 65536
LENGTHS = ("Content-Length", "Transfer-Encoding")
# Enough of a body that is no stream to find its error message; a gigabyte of HTML is not kept.
HEAD_BYTES = 65536
# An answer of 100,000 tokens with llama.cpp's timings in every event is about 40 MB.
MOST_BYTES, MOST_EVENTS = 256 << 20, 500_000
# How long a dying process may take to close its port after it closed the connection.
DYING_S = 1.0
TIMEOUTS = (requests.Timeout, urllib3.exceptions.TimeoutError, TimeoutError)


@dataclass(frozen=True)
class Question:
    """A request to send and where it belongs. `body` is the JSON body; `ask` adds what streaming needs."""

    endpoint: str
    body: dict[str, Any]
    server: str = ""
    boot: int = 0
    workload: str = ""
    case: str = ""
    repeat: int = 0
    warmup: bool = False
    prompt_sha256: str = ""
    stream_number: int = 0


class Record(pydantic.BaseModel):
    """One request as it was asked and answered: one line of records.jsonl. Times are seconds after t_send."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    server: str
    boot: int
    workload: str
    case: str
    repeat: int
    warmup: bool
    prompt_sha256: str
    stream_number: int = pydantic.Field(0, description="which of the requests that were sent at once")
    endpoint: str
    request: dict[str, Any] = pydantic.Field(description="the body as sent, without messages and prompt")
    started_at: str = pydantic.Field(description="UTC, ISO 8601")
    t_send_ns: int = pydantic.Field(description="perf_counter_ns just before the request was sent")
    status: Status
    error: str | None = None
    notes: list[str] = pydantic.Field(
        default_factory=list,
        description="contradictions and oddities that "
        "leave the record usable, such as two token counts that differ",
    )
    http_status: int | None = None
    events: list[Event] = []
    t_done_s: float | None = pydantic.Field(None, description="[DONE], or the close where none is sent")
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_source: stream.Source | None = None
    same_token_share: float | None = pydantic.Field(
        None, description="share of the most frequent token id, where the server tells ids"
    )
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = pydantic.Field(
        None, description="times by the engine's own clock: llama.cpp's `timings`, vLLM's `metrics`"
    )
    draft_checks: int | None = pydantic.Field(
        None, description="steps that checked a draft, where the running timings tell them"
    )
    engine_log: dict[str, Any] | None = pydantic.Field(
        None, description="what the engine logged of its prompt cache during the request"
    )
    memory: dict[str, float] | None = pydantic.Field(
        None, description="in GiB, right after the answer: server, server_peak, device, as far as they can be seen"
    )
    killed: bool = pydantic.Field(False, description="the server was killed meanwhile, by somebody else")
    xids: list[int] = pydantic.Field([], description="errors that the GPU's driver reported meanwhile")
    text_sha256: str = ""


@dataclass
class _Transfer:
    """What came over the wire: each SSE payload with the time of the read that completed it."""

    t_send_ns: int = 0
    http_status: int | None = None
    encoding: str | None = None
    open_ended: bool = False  # whether only the close tells where the body ends
    arrivals: list[tuple[int, bytes | None]] = field(default_factory=list)
    head: bytes = b""
    t_end_ns: int | None = None
    trouble: Status | None = None
    error: str | None = None


def ask(
    base_url: str,
    question: Question,
    *,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    silence_s: float = 300.0,
) -> Record:
    """Send one question and return its Record; whatever the server does becomes a status, never an exception.

    `timeout_s` bounds the whole request, `silence_s` the time without a byte. KeyboardInterrupt passes. Several
    threads may ask at once.
    """
    body = {**question.body, "stream": True}
    body["stream_options"] = {"include_usage": True, **(body.get("stream_options") or {})}
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    content = json.dumps(body).encode()
    transfer = _Transfer(t_send_ns=time.perf_counter_ns())
    try:
        _exchange(transfer, base_url.rstrip("/"), question.endpoint, content, api_key, timeout_s, silence_s)
    except TIMEOUTS as error:
        transfer.trouble = "timeout"
        found = (
            str(error)
            if isinstance(error, _Expired)
            else f"the server sent nothing for {min(silence_s, timeout_s):g} s"
        )
        transfer.error = f"{found}; raise the limit if the machine is slow, else read the server's log"
    except TRANSPORT_ERRORS as error:
        gone = _refuses(base_url)
        transfer.trouble = "engine_died" if gone else "stream_error"
        transfer.error = (
            f"the connection failed ({type(error).__name__}: {str(error)[:200]}) and the port "
            f"{'refuses' if gone else 'still accepts'} new ones; read the server's log"
        )
    said = stream.read(transfer.arrivals, transfer.t_send_ns)
    # A dying process closes its connections in order; where nothing else tells a body's end, that reads like one.
    cut = transfer.trouble is None and transfer.http_status == 200 and transfer.open_ended and not said.ended
    if cut and _refuses(base_url):
        transfer.trouble = "engine_died"
        transfer.error = "the answer was cut and the port refuses new connections; read the server's log"
    return _record(question, body, started_at, transfer, said)


class _Expired(TimeoutError):
    """timeout_s has passed."""


def _exchange(
    transfer: _Transfer,
    url: str,
    endpoint: str,
    body: bytes,
    api_key: str | None,
    timeout_s: float,
    silence_s: float,
) -> None:
    headers = {"Accept-Encoding": "identity"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    wait_s = min(silence_s, timeout_s)
    # A fresh session, so no connection is stale; trust_env off, so no proxy variable catches loopback.
    with requests.Session() as session, wire.deadline(timeout_s) as watch:
        session.trust_env = False
        prepared = session.prepare_request(
            requests.Request(
                "POST", url + endpoint, data=body, headers={**headers, "Content-Type": "application/json"}
            )
        )
        adapter = session.get_adapter(prepared.url)
        stamp = wire.Stamp()
        pool = adapter.get_connection_with_tls_context(prepared, verify=True)
        pool.ConnectionCls = functools.partial(wire.connection, pool.ConnectionCls, stamp, watch)
        try:
            # The health path opens the connection: the measured request then pays for no handshake.
            with session.get(
                f"{url}/health", headers=headers, timeout=wait_s, allow_redirects=False, stream=True
            ) as health:
                # A body without a length ends with the connection, which then opens nothing; it is not read.
                if any(name in health.headers for name in LENGTHS):
                    _ = health.content
            if not watch.expired.is_set():
                with wire.undisturbed():
                    transfer.t_send_ns = time.perf_counter_ns()
                    # The adapter's own send: session.send adds cookies, hooks and redirects to the measured time.
                    with closing(adapter.send(prepared, stream=True, timeout=wait_s)) as response:
                        _receive(transfer, response, stamp, watch, timeout_s)
        except TRANSPORT_ERRORS:
            if not watch.expired.is_set():
                raise
        if watch.expired.is_set() and transfer.t_end_ns is None:
            raise _Expired(f"the answer took longer than {timeout_s:g} s")


def _receive(
    transfer: _Transfer, response: requests.Response, stamp: wire.Stamp, watch: wire.Watch, timeout_s: float
) -> None:
    """Read until [DONE] or the end. Nothing is parsed here: what runs between two reads delays the clock."""
    transfer.http_status = response.status_code
    transfer.encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    transfer.open_ended = not any(name in response.headers for name in LENGTHS)
    watch.shutdown = response.raw.shutdown
    decode = transfer.encoding not in ("", "identity")
    reader, arrivals, raw = Reader(), transfer.arrivals, response.raw
    received, last_ns = 0, transfer.t_send_ns + int(timeout_s * 1e9)
    while True:
        chunk = raw.read1(READ_BYTES, decode_content=decode)
        now_ns = stamp.ns
        if now_ns > last_ns or watch.expired.is_set():
            raise _Expired(f"the answer took longer than {timeout_s:g} s")
        for payload in reader.feed(chunk) if chunk else reader.close():
            arrivals.append((now_ns, payload))
            if payload is not None and payload.strip() == DONE:
                transfer.t_end_ns = now_ns
                return
        if not chunk:
            transfer.t_end_ns = now_ns
            return
        received += len(chunk)
        if received > MOST_BYTES or len(arrivals) > MOST_EVENTS:
            raise ValueError(f"the answer is beyond {MOST_BYTES >> 20} MiB or {MOST_EVENTS:,} events")
        if not reader.spoke and len(transfer.head) < HEAD_BYTES:
            transfer.head += chunk[: HEAD_BYTES - len(transfer.head)]


def _refuses(base_url: str) -> bool:
    """True when nothing listens there any more, or stops to within DYING_S."""
    place = urlsplit(base_url)
    until_s = time.monotonic() + DYING_S
    while True:
        try:
            port = place.port or (443 if place.scheme == "https" else 80)
            socket.create_connection((place.hostname, port), timeout=2).close()
        except ConnectionRefusedError:
            return True
        except (OSError, ValueError):
            return False
        if time.monotonic() >= until_s:
            return False
        time.sleep(0.1)


def _record(
    question: Question, body: dict[str, Any], started_at: str, transfer: _Transfer, said: stream.Answer
) -> Record:
    counts = stream.count(said)
    status, error, prompt_tokens = _status(transfer, said)
    asked = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("n_predict")
    notes = said.notes + counts.notes
    if transfer.encoding not in (None, "", "identity"):
        notes.append(f"the server sent {transfer.encoding}, identity was asked: arrival times may be late")
    if counts.output_tokens is not None and isinstance(asked, int) and counts.output_tokens > asked + 1:
        # an end token may be counted beside them
        notes.append(f"the server counts {counts.output_tokens} output tokens, {asked} were asked: not used")
        untold = [event._replace(tokens=None) for event in counts.events]
        counts = counts._replace(output_tokens=None, source=None, events=untold)
    if status == "ok" and counts.output_tokens is not None and isinstance(asked, int):
        if said.finish_reason == "length" and counts.output_tokens < asked:
            # vLLM and llama.cpp both take max_tokens down without a word where prompt and answer fill the context.
            status = "early_stop"
            whole = counts.prompt_tokens and f", {counts.prompt_tokens + counts.output_tokens} with the prompt"
            error = (
                f"the server ended for length after {counts.output_tokens} tokens of {asked}{whole or ''}: its "
                "context is full; ask for less, or serve with a longer context"
            )
        elif body.get("ignore_eos") and counts.output_tokens < asked:
            status = "early_stop"
            error = (
                f"the server ended after {counts.output_tokens} tokens, ignore_eos asked for {asked}; "
                "check that it honours ignore_eos, and its context limit"
            )
    text = storable("".join(said.text))
    t_done_s = None if transfer.t_end_ns is None else (transfer.t_end_ns - transfer.t_send_ns) / 1e9
    return Record(
        server=question.server,
        boot=question.boot,
        workload=question.workload,
        case=question.case,
        repeat=question.repeat,
        warmup=question.warmup,
        prompt_sha256=question.prompt_sha256,
        stream_number=question.stream_number,
        endpoint=question.endpoint,
        started_at=started_at,
        t_send_ns=transfer.t_send_ns,
        request=storable({key: value for key, value in body.items() if key not in ("messages", "prompt")}),
        status=status,
        error=storable(error),
        notes=storable(notes),
        http_status=transfer.http_status,
        events=counts.events,
        t_done_s=t_done_s,
        text=text,
        reasoning=storable("".join(said.reasoning)),
        finish_reason=storable(said.finish_reason and said.finish_reason[:80]),
        prompt_tokens=prompt_tokens if counts.prompt_tokens is None else counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        output_tokens=counts.output_tokens,
        output_tokens_source=counts.source,
        same_token_share=counts.same_token_share,
        usage=said.usage,
        timings=said.timings,
        draft_checks=stream.draft_checks(said.seen),
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
    )


def _status(transfer: _Transfer, said: stream.Answer) -> tuple[Status, str | None, int | None]:
    """The status, its sentence, and the prompt tokens that a refusal names; the most telling cause first."""
    if transfer.http_status not in (None, 200):
        return stream.refusal(transfer.http_status, transfer.head)
    if said.error is not None:
        return stream.refusal(200, said.error)
    if transfer.trouble == "stream_error" and said.finish_reason:
        said.notes.append(f"{transfer.error} (after the finish, before [DONE])")
    elif transfer.trouble is not None:
        return transfer.trouble, transfer.error, None
    if said.malformed is not None:
        return "stream_error", said.malformed, None
    if said.finish_reason in ("error", "abort"):
        return "stream_error", f"the server ended the answer with {said.finish_reason!r}; read its log", None
    if not said.spoke and not said.finish_reason:
        if any(seen.kinds != ("ping",) for seen in said.seen):
            return (
                "stream_error",
                (f"{len(said.seen)} events came, none with text or a finish reason; read the server's log"),
                None,
            )
        return stream.refusal(200, transfer.head)
    if not said.finish_reason and not said.done:
        return (
            "stream_error",
            (
                "the stream ended with neither a finish reason nor [DONE], so the answer is "
                "cut; read the server's log"
            ),
            None,
        )
    return "ok", None, None
