"""A scripted server process for the tests of supervisor, server and execution; it measures nothing.

Every process of it carries `--marker` in its command line, so that a test can look for what is left.
"""

import argparse
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def spawn(marker: str, *, session: bool, daemon: bool) -> None:
    """A descendant that ignores TERM; as a daemon it is forked twice and has an empty environment."""
    if os.fork():
        return
    if session or daemon:
        os.setsid()
    if daemon and os.fork():
        os._exit(0)
    os.execve(
        sys.executable, [sys.executable, "-I", "-S", "-c", STUBBORN, marker], {} if daemon else dict(os.environ)
    )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        args = self.server.args
        if self.path == "/v1/models":
            wrong_key = args.key and self.headers.get("Authorization") != f"Bearer {args.key}"
            self.answer(401 if wrong_key else 503 if args.loading else 200)
        else:
            self.answer(args.health if self.path == "/health" else 404)

    def do_POST(self):
        args = self.server.args
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if args.key and self.headers.get("Authorization") != f"Bearer {args.key}":
            return self.answer(401)
        if args.die_when_asked:
            print("engine core died", flush=True)
            os._exit(0)
        time.sleep(args.think_s)
        if args.completions != 200:
            return self.answer(args.completions)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for delta, finish in (
            ({"role": "assistant", "content": ""}, None),
            ({"content": "one"}, None),
            ({"content": " two"}, None),
            ({}, "length"),
        ):
            self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
        self.event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, value):
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def answer(self, status):
        body = b'{"error": {"message": "scripted"}}' if status >= 400 else b"{}"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--marker", default="")
    parser.add_argument("--port", type=int, default=0, help="0: listens nowhere, only lives")
    parser.add_argument("--key", default="")
    parser.add_argument("--say", default="", help="a line for the log")
    parser.add_argument("--family", action="store_true", help="with a child, a setsid child and a daemon")
    parser.add_argument("--stubborn", action="store_true", help="ignores TERM itself")
    parser.add_argument("--exit", type=int, help="end with this code at once")
    parser.add_argument("--health", type=int, default=200)
    parser.add_argument("--completions", type=int, default=200)
    parser.add_argument("--loading", action="store_true", help="/v1/models says 503 for ever")
    parser.add_argument("--think-s", type=float, default=0)
    parser.add_argument("--die-when-asked", action="store_true")
    args = parser.parse_args()
    if args.say:
        print(args.say, flush=True)
    if args.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.family:
        spawn(args.marker, session=False, daemon=False)
        spawn(args.marker, session=True, daemon=False)
        spawn(args.marker, session=True, daemon=True)
    if args.exit is not None:
        sys.exit(args.exit)
    if not args.port:
        time.sleep(600)
    server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    server.daemon_threads = True
    server.args = args
    server.serve_forever()


if __name__ == "__main__":
    main()
