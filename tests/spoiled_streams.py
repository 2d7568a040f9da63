"""Every way to spoil an answer on its way: `spoiled(Random(seed))` is one of random_streams, damaged.

Each way says which statuses and which counts are then still true: none, that of the whole answer, or of what came.
"""

import json
import zlib
from collections.abc import Callable
from random import Random

from random_streams import OK, SPOKEN, Exchange, Step, encoded, whole

CUT, SILENT, DEAD = {"stream_error"}, {"timeout"}, {"engine_died"}
# What JSON can hold that is no count.
NO_COUNTS = [2**53, 10**400, -5, 2.5, 1e999, float("nan"), "7", True, None, [4], {}, "", [], {"a": [{}]}]
# What is no JSON object, whatever it looks like.
NO_OBJECTS = [
    *(b"{", b"}", b"[]", b"null", b"7", b'"x"', b"NaN", b"[DONE", b"<html>", b"{}{}", b"\xff\xfe", b"[" * 3000),
    *(b"{'a': 1}", b'{"a": 1,}', b'{"a": 01}', b'{"a": "\\ud8"}', b'{"a": "\x01"}'),
    *(b"9" * 5000, b'{"a": ' + b"9" * 5000 + b"}"),
]
NO_HEADS = [
    *(b"", b"\r\n", b"hello\r\n\r\n", b"\x00" * 50, b"HTTP/1.1 200", b"HTTP/1.1 abc\r\n\r\n"),
    *(b"HTTP/9.9 200 OK\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n"),
    b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70000 + b"\r\n\r\n",
]
MESSAGES = {
    "the request exceeds the available context size, try increasing it": "context_overflow",
    "This model's maximum context length is 8192 tokens": "context_overflow",
    "CUDA error: out of memory": "oom",
    "EngineCore encountered an issue. See stack trace": "engine_died",
    "Internal Server Error": None,
}


def spoiled(rng: Random) -> Exchange:
    one = whole(rng)
    one.what = rng.choice(list(SPOILERS))
    SPOILERS[one.what](rng, one)
    return one


def _so_far(one: Exchange, length: int) -> None:
    """What is true when only that many bytes of the body came."""
    ends, at = [], 0
    for event in one.events:
        at += len(event)
        ends.append(at)
    # a last event that lacks no more than its blank line is an event all the same
    got = [sum(end <= length + slack for end in ends) for slack in (0, 4)]
    came = [one.steps[:n] for n in got]
    last = [next((s.told for s in reversed(steps) if s.told), set()) for steps in came]
    one.counts = {None}.union(*last)
    if any("done" in s.kinds for s in came[0]):
        return
    if any("finish" in s.kinds for s in came[1]):
        one.statuses = one.statuses | CUT | OK
        one.counts.add(one.truth.tokens)
    else:
        one.statuses = CUT


def _cut(rng: Random, one: Exchange) -> None:
    body = b"".join(one.events)
    length = rng.choice([rng.randrange(len(body)), max(0, len(body) - rng.randint(1, 600))])
    _so_far(one, length)
    headers = {"Content_Length": str(len(body))} if one.framing == "length" else {}
    one.tear(rng, body[:length], **headers)


def _reset(rng: Random, one: Exchange) -> None:
    _cut(rng, one)
    one.end = "reset"  # may take with it what was sent before
    one.statuses = one.statuses | CUT
    one.counts |= _told(one)


def _told(one: Exchange) -> set[int | None]:
    """Every count that some part of the answer tells, and none."""
    return {None}.union(*(step.told for step in one.steps))


def _silence(rng: Random, one: Exchange) -> None:
    _cut(rng, one)
    one.end = "silence"
    one.statuses = (one.statuses - CUT) | SILENT
    one.counts |= _told(one)  # silence may come early where the machine is busy


def _death(rng: Random, one: Exchange) -> None:
    _cut(rng, one)
    one.end = "death"
    one.statuses = (one.statuses - CUT) | DEAD


def _malformed(rng: Random, one: Exchange) -> None:
    i = rng.randrange(len(one.events) - ("done" in one.steps[-1].kinds))
    one.events[i] = b"data: " + rng.choice(NO_OBJECTS) + b"\n\n"
    one.statuses, one.counts = CUT, {None, one.truth.tokens}
    if i == len(one.events) - 1:
        one.counts |= _told(one)
    one.tear(rng)


def _garbage(rng: Random, one: Exchange) -> None:
    """Bytes that are no line of an event stream, on a line of their own or running into the next."""
    junk = bytes(rng.choice(b"\x00\x01 abcX{}\x80\xc3\xff\xf0") for _ in range(rng.randint(1, 30)))
    i = rng.randrange(len(one.events) - ("done" in one.steps[-1].kinds))
    one.events[i] = b"\n\n" + junk + rng.choice([b"\n", b""]) + one.events[i].removeprefix(b"\xef\xbb\xbf")
    one.statuses, one.counts = CUT, {None, one.truth.tokens}
    if i == len(one.events) - 1:
        one.counts |= _told(one)
    one.tear(rng)


def _flipped(rng: Random, one: Exchange) -> None:
    """A few bytes anywhere are others: what that does is known of no single one."""
    body = bytearray(b"".join(one.events))
    for _ in range(rng.randint(1, 4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    one.tear(rng, bytes(body))
    one.statuses, one.counts = set(), set()  # any


def _wrong_types(rng: Random, one: Exchange) -> None:
    """One field of one event is not what it must be: then what it said is lost."""
    places: list[tuple[Step, dict, str]] = []
    for step in one.steps:
        choice = step.choice()
        if SPOKEN & step.kinds:
            places += [(step, step.says, "choices"), (step, step.says["choices"], 0)]
            places += [(step, choice, k) for k in ("delta", "text", "token_ids", "finish_reason") if choice.get(k)]
            delta = choice.get("delta") or {}
            places += [(step, delta, k) for k in ("content", "reasoning") if delta.get(k)]
    step, holder, key = rng.choice(places)
    others = [v for v in (7, -1, 2.5, True, "x", [7.5], {"a": 1}) if type(v) is not type(holder[key])]
    holder[key] = rng.choice([*others, [None], ["7"], [True], [[7]]] if key == "token_ids" else others)
    one.events = encoded(rng, one.steps)
    one.statuses, one.counts = CUT, {None, one.truth.tokens}
    if step is one.steps[-1]:
        one.counts |= _told(one)
    one.tear(rng)


def _no_counts(rng: Random, one: Exchange) -> None:
    """A count in one event is none."""
    names = ("completion_tokens", "predicted_n")
    holders = [
        (told, name)
        for step in one.steps
        for told in ((step.says or {}).get("usage"), (step.says or {}).get("timings"))
        for name in names
        if told and name in told
    ]
    if holders:
        told, name = rng.choice([*holders, holders[-1], holders[-1]])
        told[name] = rng.choice([*NO_COUNTS, 2**53 - 1])
    one.events = encoded(rng, one.steps)
    one.counts = {None, one.truth.tokens}
    one.statuses = OK | {"early_stop"}
    one.tear(rng)


def _error(rng: Random, one: Exchange) -> None:
    """The server says midway that it failed."""
    message, status = rng.choice(list(MESSAGES.items()))
    error = rng.choice(
        [
            {"error": {"message": message, "code": 500}},
            {"error": message},
            {"object": "error", "message": message, "code": 400},
            {"error": [message]},
            {"error": {"error": {"message": message}}},
        ]
    )
    i = rng.randrange(len(one.events) - ("done" in one.steps[-1].kinds) + 1)
    colon = rng.choice([b"data: ", b"data: ", b"error: "] if i else [b"data: "])
    tail = rng.choice([one.events[i:], [b"data: [DONE]\n\n"], []])
    body = b"".join([*one.events[:i], b"\n\n", colon, json.dumps(error).encode(), b"\n\n", *tail])
    one.tear(rng, body)
    one.statuses = {status} if status and colon == b"data: " else {status or "stream_error", "stream_error"}
    one.counts = _told(one) | {one.truth.tokens}


def _lengths(rng: Random, one: Exchange) -> None:
    """A Content-Length, or a chunk's, that is not that of the body."""
    body = b"".join(one.events)
    one.framing = "length"
    told = rng.choice(["short", "short", "long", "long", "-5", "x", "1, 2", "", "9" * 400, "both", "chunks"])
    if told == "short":
        length = rng.randrange(len(body))
        _so_far(one, length)
        one.tear(rng, body, Content_Length=str(length))
    elif told == "long":
        _so_far(one, len(body))
        one.tear(rng, body, Content_Length=str(len(body) + rng.randint(1, 500)))
    elif told == "chunks":
        size = rng.choice([b"zz\r\n", b"f" * 40 + b"\r\n", b"\r\n", b"5\r\nab"])
        one.tear(rng, size + body, Transfer_Encoding="chunked")
        one.statuses, one.counts = one.statuses | CUT, one.counts | {None}  # a size too large is found at the end
    else:
        both = {"Content_Length": "7", "Transfer_Encoding": "chunked"}
        one.tear(rng, body, **(both if told == "both" else {"Content_Length": told}))
        _so_far(one, len(body))
        one.statuses, one.counts = one.statuses | CUT, one.counts | _told(one)


def _gzip(rng: Random, one: Exchange) -> None:
    """Compression that was not asked for: whole, cut, or only said to be."""
    packer = zlib.compressobj(wbits=31)
    packed = b"".join(packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH) for event in one.events)
    packed += packer.flush()
    encoding = rng.choice(["gzip", "gzip", "gzip, gzip", "br", "deflate", "x-odd", "GZIP"])
    kind = rng.choice(["whole", "cut", "plain"])
    if kind == "plain":
        packed = b"".join(one.events)
    elif kind == "cut":
        packed = packed[: rng.randrange(len(packed))]
    one.tear(rng, packed, Content_Encoding=encoding)
    one.counts = _told(one) | {one.truth.tokens}
    one.statuses = one.statuses | CUT if kind != "plain" or encoding in ("br", "x-odd") else CUT


def _refused(rng: Random, one: Exchange) -> None:
    """Another status, with the stream or with some other body."""
    code = rng.choice([201, 204, 206, 301, 302, 304, 400, 401, 403, 404, 413, 429, 500, 502, 503, 599])
    message, status = rng.choice(list(MESSAGES.items()))
    body = rng.choice(
        [
            b"",
            b"<html>502</html>",
            json.dumps({"error": {"message": message}}).encode(),
            json.dumps({"detail": message}).encode(),
            b"".join(one.events),
            b"\xff" * 70000,
        ]
    )
    one.tear(rng, body, f"{code} Odd", Location="http://127.0.0.1:9/[")
    told = message.encode() in body and (status != "context_overflow" or code == 400)
    one.statuses = {status} if status and told else {"http_error"}
    one.counts = _told(one) | {one.truth.tokens}
    if code in (204, 304):  # whose body is none
        one.statuses = one.statuses | {"http_error"}


def _no_stream(rng: Random, one: Exchange) -> None:
    """200, and then something that is no event stream."""
    body = rng.choice(
        [b"", b"<html>\n\nhello</html>", b'{"choices": [{"text": "x"}]}', b"[" * 9000, b"\x00" * 9, b"\r\n"]
    )
    one.statuses, one.counts = CUT, {None}
    one.tear(rng, body)


def _no_http(rng: Random, one: Exchange) -> None:
    """An answer that is none, or that begins oddly."""
    one.framing = "close"
    one.tear(rng)
    one.head = rng.choice(NO_HEADS)
    one.statuses, one.counts = CUT | OK | {"http_error", "early_stop"}, _told(one) | {one.truth.tokens}


SPOILERS: dict[str, Callable[[Random, Exchange], None]] = {
    "cut": _cut,
    "cut and reset": _reset,
    "cut, then silence": _silence,
    "cut, and the server died": _death,
    "an event that is no JSON object": _malformed,
    "garbage between events": _garbage,
    "bytes flipped": _flipped,
    "wrong types": _wrong_types,
    "no counts": _no_counts,
    "an error midway": _error,
    "lengths that lie": _lengths,
    "compression": _gzip,
    "another status": _refused,
    "no stream": _no_stream,
    "no HTTP": _no_http,
}
