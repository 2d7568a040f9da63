"""A completion server whose every send time and token is known: the truth that the client is held against.

`with start() as server:` runs it in a process of its own. A request's body may carry a "script" (see `Script`);
without one the server answers as llama.cpp does, for `max_tokens` tokens. Just before each send it notes its
perf_counter_ns, which is CLOCK_MONOTONIC and so the client's clock too; `server.truth()` tells what it noted.
"""

import base64
import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from http.client import HTTPConnection
from typing import Any

WORDS = [" quick", " café", " fox", " 🙂", " jumps", " 日本", " over", " naïve", " dog", "."]
MODEL = "truth-model"


@dataclass
class Script:
    """One scripted answer. Times are seconds after the request was received."""

    dialect: str = "llama.cpp"              # or "vllm"
    ttft_s: float = 0.02
    gap_s: float = 0.002
    chunks: list[int] = field(default_factory=list)     # tokens per chunk; empty: one each, max_tokens of them
    reasoning: int = 0                      # that many first chunks are reasoning
    reasoning_key: str = "reasoning_content"
    held: list[int] = field(default_factory=list)       # chunks whose tokens bring no text (vllm)
    finish: str = "length"                  # with "stop" an end token without text is counted too
    finish_gap_s: float | None = None       # None: the finish follows its token at once, as engines do it
    usage: str = "asked"                    # asked, never, or a number: a wrong count
    cached_tokens: int | None = 0           # None: not told
    prompt_tokens: int = 300
    n_ctx: int = 8192
    raw: list[str] = field(default_factory=list)        # events, in place of the dialect's; base64 for bytes "b64:"
    status: int = 200
    body: str | None = None                 # one body in place of the stream
    content_type: str = "text/event-stream"
    framing: str = "chunked"                # chunked, length or close
    gzip: bool = False
    newline: str = "\n"
    comments: bool = False                  # a comment before each event
    batch: int = 1                          # events per send
    split_bytes: int = 0                    # cut each event's bytes into sends of that size
    cut_after: int | None = None            # reset the connection after that many events
    stall_after: int | None = None          # say no more after that many events, keep the connection
    die_after: int | None = None            # the server's process exits
    close_after: int | None = None          # end the stream in order, though early


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
        return [Sent(script.ttft_s + i * script.gap_s, base64.b64decode(text[4:]) if text.startswith("b64:")
                     else text.encode()) for i, text in enumerate(script.raw)]
    chunks = script.chunks or [1] * int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
    return (_vllm if script.dialect == "vllm" else _llama_cpp)(script, chunks, "chat" in path, body)


def _llama_cpp(script: Script, chunks: list[int], chat: bool, body: dict[str, Any]) -> list[Sent]:
    sent: list[Sent] = []
    done = 0

    def event(at_s: float, choices: list[dict], tokens: int = 0, spoke: bool = False, finish: bool = False, **more):
        kind = "chat.completion.chunk" if chat else "text_completion"
        tail = {"created": 1796036458, "id": "chatcmpl-truth", "model": MODEL, "system_fingerprint": "b0-unknown",
                "object": kind}
        sent.append(Sent(at_s, _data({"choices": choices, **tail, **more}), tokens, spoke, finish))

    def choice(text: str | None, finish: str | None = None, key: str = "content", role: bool = False) -> list[dict]:
        if not chat:
            return [{"text": text or "", "index": 0, "logprobs": None, "finish_reason": finish}]
        delta: dict[str, Any] = {"role": "assistant", "content": None} if role else {}
        return [{"finish_reason": finish, "index": 0, "delta": delta if text is None else {key: text}}]

    def timings(at_s: float) -> dict[str, Any]:
        cached = script.cached_tokens or 0
        n, ms = script.prompt_tokens - cached, script.ttft_s * 1e3
        decode_ms = max(0.001, (at_s - script.ttft_s) * 1e3)
        told = {"cache_n": cached, "prompt_n": n, "prompt_ms": ms, "prompt_per_token_ms": ms / max(n, 1),
                "prompt_per_second": n / ms * 1e3 if ms else 0, "predicted_n": done, "predicted_ms": decode_ms,
                "predicted_per_token_ms": decode_ms / max(done - 1, 1),
                "predicted_per_second": (done - 1) / decode_ms * 1e3}
        return told

    if body.get("return_progress"):
        for part in (0, script.prompt_tokens):
            event(script.ttft_s * part / script.prompt_tokens / 2, choice(None, role=True),
                  prompt_progress={"total": script.prompt_tokens, "cache": 0, "processed": part, "time_ms": 0})
    if chat:
        event(script.ttft_s, choice(None, role=True))
    at_s = script.ttft_s
    for i, k in enumerate(chunks):
        at_s, done = script.ttft_s + i * script.gap_s, done + k
        more = {"timings": timings(at_s)} if body.get("timings_per_token") else {}
        text = "".join(WORDS[(done - k + j) % len(WORDS)] for j in range(k))
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
    sent: list[Sent] = []
    options = body.get("stream_options") or {}
    done = 0

    def event(at_s: float, choices: list[dict], tokens: int = 0, spoke: bool = False, finish: bool = False,
              usage: dict | None = None):
        kind = "chat.completion.chunk" if chat else "text_completion"
        chunk = {"id": "chatcmpl-truth" if chat else "cmpl-truth", "object": kind, "created": 1796036458,
                 "model": MODEL, "choices": choices}
        if usage or not chat:
            chunk["usage"] = usage
        sent.append(Sent(at_s, _data(chunk), tokens, spoke, finish))

    def usage() -> dict | None:
        return _usage(script, done, body) if options.get("continuous_usage_stats") else None

    if chat:
        event(script.ttft_s, [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                               "finish_reason": None}], usage=usage())
    ends = script.finish == "stop"
    steps = [*chunks, 1] if ends else chunks
    for i, k in enumerate(steps):
        final = i == len(steps) - 1
        silent = i in script.held or ends and final
        text = "" if silent else "".join(WORDS[(done + j) % len(WORDS)] for j in range(k))
        ids = list(range(1000 + done, 1000 + done + k)) if body.get("return_token_ids") else None
        done += k
        key = script.reasoning_key if i < script.reasoning else "content"
        said = {"delta": {key: text}} if chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": script.finish if final else None,
                  **({"stop_reason": None} if final or not chat else {}), "token_ids": ids}
        event(script.ttft_s + i * script.gap_s, [choice], k, bool(text), final, usage())
    at_s = script.ttft_s + (len(steps) - 1) * script.gap_s
    if options.get("include_usage") and script.usage != "never":
        event(at_s, [], usage=_usage(script, done, body))
    return [*sent, Sent(at_s, b"data: [DONE]\n\n")]


def _usage(script: Script, done: int, body: dict[str, Any]) -> dict[str, Any] | None:
    if script.usage == "never" or not (body.get("stream_options") or {}).get("include_usage"):
        return None
    n = done if script.usage == "asked" else int(script.usage)
    told = {"completion_tokens": n, "prompt_tokens": script.prompt_tokens, "total_tokens": script.prompt_tokens + n}
    if script.cached_tokens is not None:
        told["prompt_tokens_details"] = {"cached_tokens": script.cached_tokens}
    return told


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def overflow(script: Script, n: int) -> bytes:
    """The body of the HTTP 400 with which the dialect refuses a prompt of n tokens."""
    error = {"code": 400, "message": f"request ({n} tokens) exceeds the available context size ({script.n_ctx} tokens)"
             ", try increasing it", "type": "exceed_context_size_error", "n_prompt_tokens": n, "n_ctx": script.n_ctx}
    if script.dialect == "vllm":
        error = {"message": f"This model's maximum context length is {script.n_ctx} tokens. However, your prompt "
                 f"contains {n} input tokens. Please reduce the length of the input prompt.",
                 "type": "BadRequestError", "param": "input_tokens", "code": 400}
    return json.dumps({"error": error}).encode()


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.request.makefile("rb")
        try:
            while line := self.file.readline():
                recv_ns = time.perf_counter_ns()
                method, path, _ = line.decode().split(" ", 2)
                length = 0
                while (header := self.file.readline()) not in (b"\r\n", b""):
                    name, _, value = header.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                body = self.file.read(length)
                if not (self.complete(path, json.loads(body), recv_ns) if method == "POST" else self.tell(path)):
                    return
        except (ConnectionError, TimeoutError):
            return

    def tell(self, path: str) -> bool:
        known = {"/health": {"status": "ok"}, "/truth": self.server.truth,
                 "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model"}]}}
        return self.whole(200 if path in known else 404, json.dumps(known.get(path, {})).encode())

    def whole(self, status: int, body: bytes, content_type: str = "application/json") -> bool:
        self.request.sendall(f"HTTP/1.1 {status} Status\r\nContent-Type: {content_type}\r\n"
                             f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return True

    def complete(self, path: str, body: dict[str, Any], recv_ns: int) -> bool:
        known = {f.name for f in fields(Script)}
        asked = {**self.server.default, **(body.get("script") or {})}
        script = Script(**{key: value for key, value in asked.items() if key in known})
        log: dict[str, Any] = {"recv_ns": recv_ns, "sent": []}
        self.server.truth.append(log)
        if script.body is not None or script.status != 200:
            return self.whole(script.status, (script.body or "").encode(), script.content_type)
        if script.prompt_tokens > script.n_ctx:
            return self.whole(400, overflow(script, script.prompt_tokens))
        return self.stream(script, answer(script, path, body), recv_ns, log["sent"])

    def stream(self, script: Script, events: list[Sent], recv_ns: int, log: list) -> bool:
        pack = zlib.compressobj(wbits=31) if script.gzip else None
        head = [f"HTTP/1.1 200 OK\r\nContent-Type: {script.content_type}"]
        head += ["Content-Encoding: gzip"] if pack else []
        head += {"chunked": ["Transfer-Encoding: chunked"], "close": ["Connection: close"],
                 "length": [f"Content-Length: {sum(len(e.data) for e in events)}"]}[script.framing]
        opening = "\r\n".join(head).encode() + b"\r\n\r\n"
        stops = {script.cut_after: self.reset, script.stall_after: self.stall, script.die_after: lambda: os._exit(0)}
        for i in range(0, len(events), script.batch):
            if i in stops:
                return stops[i]()
            if i == script.close_after:
                break
            group = events[i:i + script.batch]
            data = b"".join(b": ping\n\n" * script.comments + e.data for e in group).replace(
                b"\n", script.newline.encode())
            data = pack.compress(data) + pack.flush(zlib.Z_SYNC_FLUSH) if pack else data
            size = script.split_bytes or len(data)
            pieces = [data[j:j + size] for j in range(0, len(data), size)]
            if script.framing == "chunked":
                pieces = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
            time.sleep(max(0.0, group[0].at_s - (time.perf_counter_ns() - recv_ns) / 1e9))
            for piece in pieces[:-1]:
                self.request.sendall(opening + piece)
                opening = b""
                time.sleep(0.001)
            log += [[time.perf_counter_ns(), e.tokens, e.spoke, e.finish] for e in group]
            self.request.sendall(opening + pieces[-1])
            opening = b""
        if len(events) in stops:
            return stops[len(events)]()
        if script.framing == "chunked":
            self.request.sendall(b"0\r\n\r\n")
        return script.framing == "chunked" or script.framing == "length" and script.close_after is None

    def reset(self) -> bool:
        time.sleep(0.02)                    # what was sent arrives first
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        return False

    def stall(self) -> bool:
        self.request.settimeout(30)
        self.request.recv(1)                # until the client gives up
        return False


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


@dataclass
class Truth:
    """A running truth server."""

    url: str
    process: subprocess.Popen

    def truth(self) -> list[dict[str, Any]]:
        """Per completion request: recv_ns and sent, a list of [ns just before, tokens, has text, is finish]."""
        connection = HTTPConnection(self.url.removeprefix("http://"), timeout=10)
        connection.request("GET", "/truth")
        told = json.loads(connection.getresponse().read())
        connection.close()
        return told


@contextmanager
def start(**default: Any) -> Iterator[Truth]:
    """Run the server in its own process on a free loopback port; `default`: the Script of requests without one."""
    assert set(default) <= set(asdict(Script())), f"no such Script field: {default}"
    process = subprocess.Popen([sys.executable, __file__, json.dumps(default)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    try:
        yield Truth(f"http://127.0.0.1:{int(process.stdout.readline())}", process)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def main() -> None:
    server = _Server(("127.0.0.1", 0), _Connection)
    server.truth, server.default = [], json.loads(sys.argv[1])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()                        # ends with whoever started it


if __name__ == "__main__":
    main()
