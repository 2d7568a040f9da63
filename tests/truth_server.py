"""A completion server whose every send time and token is known: the truth that the client is held against.

`with start() as server:` runs it in a process of its own. A request's body may carry a "script" (see
`dialects.Script`); without one the server answers as llama.cpp does, for `max_tokens` tokens.
Just before each send it notes its perf_counter_ns, which is CLOCK_MONOTONIC and so the client's clock too;
`server.truth()` tells what it noted.
"""

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
from dataclasses import asdict, dataclass, fields
from http.client import HTTPConnection
from typing import Any

from dialects import MODEL, Script, Sent, answer, overflow


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
        known = {
            "/health": {"status": "ok"},
            "/truth": self.server.truth,
            "/asked": self.server.asked,
            "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model"}]},
        }
        return self.whole(200 if path in known else 404, json.dumps(known.get(path, {})).encode())

    def whole(self, status: int, body: bytes, content_type: str = "application/json") -> bool:
        self.request.sendall(
            f"HTTP/1.1 {status} Status\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        return True

    def complete(self, path: str, body: dict[str, Any], recv_ns: int) -> bool:
        self.server.asked = body
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
        head += {
            "chunked": ["Transfer-Encoding: chunked"],
            "close": ["Connection: close"],
            "length": [f"Content-Length: {sum(len(e.data) for e in events)}"],
        }[script.framing]
        opening = "\r\n".join(head).encode() + b"\r\n\r\n"
        stops = {
            script.cut_after: self.reset,
            script.stall_after: self.stall,
            script.die_after: lambda: os._exit(0),
        }
        for i in range(0, len(events), script.batch):
            if i in stops:
                return stops[i]()
            if i == script.close_after:
                break
            group = events[i : i + script.batch]
            data = b"".join(b": ping\n\n" * script.comments + e.data for e in group).replace(
                b"\n", script.newline.encode()
            )
            data = pack.compress(data) + pack.flush(zlib.Z_SYNC_FLUSH) if pack else data
            size = script.split_bytes or len(data)
            pieces = [data[j : j + size] for j in range(0, len(data), size)]
            if script.framing == "chunked":
                pieces = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
            time.sleep(max(0.0, group[0].at_s - (time.perf_counter_ns() - recv_ns) / 1e9))
            for piece in pieces[:-1]:
                self.request.sendall(opening + piece)
                opening = b""
                time.sleep(0.001)
            self.note(log, group)
            self.request.sendall(opening + pieces[-1])
            opening = b""
        if len(events) in stops:
            return stops[len(events)]()
        if script.framing == "chunked":
            self.request.sendall(b"0\r\n\r\n")
        return script.framing == "chunked" or (script.framing == "length" and script.close_after is None)

    def note(self, log: list, group: list[Sent]) -> None:
        """Called right before a group is sent."""
        log += [[time.perf_counter_ns(), e.tokens, e.spoke, e.finish] for e in group]

    def reset(self) -> bool:
        time.sleep(0.02)  # what was sent arrives first
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        return False

    def stall(self) -> bool:
        self.request.settimeout(30)
        self.request.recv(1)  # until the client gives up
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
        """Per completion request: recv_ns and sent, a list of [ns just before, tokens, text?, finish?]."""
        return self._get("/truth")

    def asked(self) -> dict[str, Any]:
        """The body of the last completion request."""
        return self._get("/asked")

    def _get(self, path: str) -> Any:
        connection = HTTPConnection(self.url.removeprefix("http://"), timeout=10)
        connection.request("GET", path)
        told = json.loads(connection.getresponse().read())
        connection.close()
        return told


@contextmanager
def start(**default: Any) -> Iterator[Truth]:
    """Run the server in its own process on a free loopback port; `default`: fields of every Script."""
    assert set(default) <= set(asdict(Script())), f"no such Script field: {default}"
    process = subprocess.Popen(
        [sys.executable, __file__, json.dumps(default)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Truth(f"http://127.0.0.1:{int(process.stdout.readline())}", process)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def main() -> None:
    server = _Server(("127.0.0.1", 0), _Connection)
    server.truth, server.asked, server.default = [], {}, json.loads(sys.argv[1])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()  # ends with whoever started it


if __name__ == "__main__":
    main()
