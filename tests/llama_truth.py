"""The truth server as a llama-server: its options, tokenizer, slots and context, and a journal on disk.

The journal outlives a server that is killed. A JSON line `what`: "up", with the pid of each start, its
arguments and environment; "begun", right after a request came; "ended", right before the last
byte of its answer is sent.
"""

import argparse
import hashlib
import json
import os
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dialects import Sent
from truth_server import _Connection, _Server

TEMPLATE = 7  # tokens that a chat message has beside its words
HELP = """\
-m,    --model FNAME                    model path to load
-a,    --alias STRING                   set alias for model name
       --host HOST                      ip address to listen
       --port PORT                      port to listen
-c,    --ctx-size N                     size of the prompt context
-np,   --parallel N                     number of server slots
"""


class _Llama(_Connection):
    def tell(self, path: str) -> bool:
        if path != "/props":
            return super().tell(path)
        told = {"default_generation_settings": {"n_ctx": self.server.context}, "total_slots": self.server.parallel}
        return self.whole(200, json.dumps(told).encode())

    def complete(self, path: str, body: dict[str, Any], recv_ns: int) -> bool:
        if path == "/tokenize":
            words = body["content"].split()
            return self.whole(200, json.dumps({"tokens": [len(word) for word in words]}).encode())
        chat = "messages" in body
        text = body["messages"][0]["content"] if chat else body["prompt"]
        tokens = len(text.split()) + TEMPLATE * chat
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.asked = {"prompt_sha256": digest, "max_tokens": body["max_tokens"], "recv_ns": recv_ns}
        self.journal("begun")
        # Streams that are asked together end apart, so that a kill finds some of them answered.
        pace = {"ttft_s": 0.005 + 0.00005 * tokens, "gap_s": 0.002 + int(digest[:2], 16) * 2e-5}
        if tokens > self.server.context:
            self.journal("ended", output_tokens=None)
        with self.server.slots:
            script = {"prompt_tokens": tokens, "n_ctx": self.server.context, **pace}
            return super().complete(path, {**body, "script": script}, time.perf_counter_ns())

    def note(self, log: list, group: list[Sent]) -> None:
        super().note(log, group)
        if group[-1].data.endswith(b"[DONE]\n\n"):
            self.journal("ended", output_tokens=sum(tokens for _, tokens, _, _ in log))

    def journal(self, what: str, **more) -> None:
        line = {"what": what, "at_ns": time.perf_counter_ns(), **self.asked, **more}
        os.write(self.server.journal, json.dumps(line).encode() + b"\n")


def install(environment: Path, journal: Path) -> None:
    """Put it where an environment of the engine has its llama-server."""
    (environment / "bin").mkdir(parents=True)
    (environment / "bin/python").symlink_to(sys.executable)
    words = shlex.join([sys.executable, "-S", __file__, "--journal", str(journal)])
    for program in ("llama-server", "llama-bench"):
        path = environment / "bin" / program
        path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        path.chmod(0o755)


def main() -> None:
    if "--help" in sys.argv:
        sys.exit(print(HELP))
    parser = argparse.ArgumentParser()
    parser.add_argument("--journal", required=True)
    for name in ("--model", "--alias", "--host"):
        parser.add_argument(name)
    for name in ("--port", "--ctx-size", "--parallel"):
        parser.add_argument(name, type=int, required=True)
    asked = parser.parse_args()
    server = _Server((asked.host, asked.port), _Llama)
    server.truth, server.asked, server.default = [], {}, {}
    server.context, server.parallel = asked.ctx_size, asked.parallel
    server.slots = threading.Semaphore(asked.parallel)
    server.journal = os.open(asked.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    up = {"what": "up", "at_ns": time.perf_counter_ns(), "pid": os.getpid()}
    up |= {"argv": sys.argv[1:], "environment": dict(os.environ)}
    os.write(server.journal, json.dumps(up).encode() + b"\n")
    server.serve_forever()


if __name__ == "__main__":
    main()
