"""A stand-in for open-jet's server: its flags, log lines, endpoints, answers and refusals, with no GPU or model.

What a client sees of the real one is answered as it does; what its engine computes is not: a word is a token, and
every answer says the same words. Imports nothing but the standard library, so that any Python runs it.
"""

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MOST_CANDIDATES = 32
OPENS, END = {"user": ["<user>"], "assistant": ["<assistant>", "<think>"]}, "<end>"
HELD_BACK = len("</think>") - 1
THOUGHTS = "first I look at what is asked and then I answer it".split()  # noqa: SIM905
WORDS = "the answer is that nothing here was computed and every word counts as one token".split()  # noqa: SIM905
LOAD_S, STEP_S = 0.3, 0.002


def say(*words) -> None:
    print(*words, file=sys.stderr, flush=True)


class Refused(Exception):
    """What the real server answers with 400."""


class Engine:
    """One sequence and where its last prompt ended, as far as reuse goes."""

    def __init__(self, args):
        self.args, self.sequence, self.checkpoint = args, [], 0
        self.lock, self.warned = threading.Lock(), False
        if not os.path.isfile(args.model):
            raise RuntimeError("failed to load the vocabulary")
        time.sleep(LOAD_S)
        say("[mk] KV cache fp16, 4.56 GB for", args.ctx, "positions")
        say(f"[mk] weights 16.72 GB on device, 74 SMs, ctx {args.ctx}, n_draft {args.draft}")

    def taken(self, prompt: list[str]) -> int:
        """How many tokens of a prompt are there already: all that goes on from the sequence, or from the end of
        the last prompt, and nothing when it differs before that."""
        same = 0
        while same < min(len(self.sequence), len(prompt) - 1) and self.sequence[same] == prompt[same]:
            same += 1
        if self.sequence and same >= len(self.sequence):
            return same
        return self.checkpoint if 0 < self.checkpoint <= same else 0

    def answer(self, body: dict, emit) -> tuple[str, dict, dict]:
        """Calls `emit(kind, text)` for every piece; gives finish reason, usage and timings."""
        messages = body.get("messages") or []
        options = body.get("chat_template_kwargs") or {}
        thinks = options.get("enable_thinking", True)
        prompt = [token for m in messages for token in (*OPENS[m["role"]], *m["content"].split(), END)]
        prompt += OPENS["assistant"]
        room = self.args.ctx - len(prompt) - 16
        if room <= 0:
            raise Refused(f"prompt of {len(prompt)} tokens does not fit the context of {self.args.ctx}")
        asked = int(body.get("max_tokens") or -1)
        asked = room if asked <= 0 else min(asked, room)
        top_k = 40 if body.get("top_k") is None else int(body["top_k"])
        if not 1 <= top_k <= MOST_CANDIDATES and not self.warned:
            self.warned = True
            say(
                f"[mk-server] warning: top_k {top_k} -> {MOST_CANDIDATES} (the megakernel samples from at most 32)"
            )
        sampled = float(0.8 if body.get("temperature") is None else body["temperature"]) > 0
        start = time.perf_counter()
        reused = self.taken(prompt)
        time.sleep(1e-5 * (len(prompt) - reused))
        prefilled = time.perf_counter()
        said = self._say(thinks, asked, emit, f" {body.get('seed')}" if sampled else "")
        end = time.perf_counter()
        self.sequence, self.checkpoint = prompt + said[0], len(prompt)
        n, finish = len(said[0]), said[1]
        say(
            f"[mk-server] prompt {len(prompt)} tok ({reused} reused) in {prefilled - start:.2f} s, {n} tok in "
            f"{end - prefilled:.2f} s ({n / (end - prefilled):.1f} tok/s), {finish}"
        )
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": n,
            "total_tokens": len(prompt) + n,
            "prompt_tokens_details": {"cached_tokens": reused},
        }
        timings = {
            "prompt_n": len(prompt) - reused,
            "prompt_ms": (prefilled - start) * 1e3,
            "predicted_n": n,
            "predicted_ms": (end - prefilled) * 1e3,
            "predicted_per_second": n / (end - prefilled),
        }
        return finish, usage, timings

    def _say(self, thinks: bool, asked: int, emit, ending: str) -> tuple[list[str], str]:
        """The tokens of an answer, the end's included; with drafts several come out of one step."""
        tokens = [*THOUGHTS, "</think>"] if thinks else []
        first = len(tokens)
        while len(tokens) < first + self.args.words:
            tokens.append(WORDS[len(tokens) % len(WORDS)])
        tokens[-1] += ending
        tokens.append(END)
        held, out = "", []
        for number, token in enumerate(tokens[:asked]):
            if number % (1 + self.args.draft) == 0:
                time.sleep(STEP_S)
            out.append(token)
            if token == END:
                return out, "stop"
            if thinks and number < first - 1:  # what may be the beginning of the end of thinking waits
                held += f"{token} "
                if len(held) > HELD_BACK:
                    emit("reasoning_content", held[:-HELD_BACK])
                    held = held[-HELD_BACK:]
            elif token == "</think>":
                emit("reasoning_content", held)
                held = ""
            else:
                emit("content", f" {token}" if number > first else token)
        if held:
            emit("reasoning_content", held)
        return out, "length"


def handler(engine: Engine, name: str):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words):
            pass

        def told(self, code, value):
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            answers = {
                "/health": {"status": "ok"},
                "/v1/models": {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "openjet"}]},
                "/props": {"default_generation_settings": {"n_ctx": engine.args.ctx}, "total_slots": 1},
            }
            known = answers.get(self.path.split("?")[0])
            self.told(
                200 if known else 404, known or {"error": {"message": "not found", "type": "not_found_error"}}
            )

        def do_POST(self):
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path != "/v1/chat/completions":
                said = f"{self.path} is not supported by the megakernel server"
                return self.told(404, {"error": {"message": said, "type": "not_supported"}})
            with engine.lock:  # one at a time: the others wait
                try:
                    self.chat(json.loads(raw))
                except Refused as refused:
                    self.told(400, {"error": {"message": str(refused), "type": "invalid_request_error"}})

        def chat(self, body):
            said = {"reasoning_content": "", "content": ""}

            def collect(kind, text):
                said[kind] += text

            if not body.get("stream"):
                finish, usage, timings = engine.answer(body, collect)
                message = {"role": "assistant", "content": said["content"]}
                if said["reasoning_content"]:
                    message["reasoning_content"] = said["reasoning_content"].strip()
                choice = {"index": 0, "message": message, "finish_reason": finish}
                about = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": name}
                return self.told(200, {**about, "choices": [choice], "usage": usage, "timings": timings})
            begun = []

            def begin():
                if not begun:
                    begun.append(True)
                    self.send_response(200)
                    self.send_header("Content-Type", "text/event-stream")
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    self.event({"role": "assistant", "content": None})

            def emit(kind, text):
                begin()
                self.event({kind: text})

            finish, usage, timings = engine.answer(body, emit)
            begin()
            self.event({}, finish, timings=timings)
            if (body.get("stream_options") or {}).get("include_usage"):
                self.event(None, usage=usage)
            self.chunk(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")

        def event(self, delta, finish=None, **beside):
            choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
            about = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": name}
            self.chunk(b"data: " + json.dumps({**about, "choices": choices, **beside}).encode() + b"\n\n")

        def chunk(self, data):
            self.wfile.write(b"%x\r\n" % len(data) + data + b"\r\n")
            self.wfile.flush()

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description="a stand-in for OpenJet Engine")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("-c", "--ctx", type=int, default=32768)
    parser.add_argument("-d", "--draft", type=int, default=4)
    parser.add_argument("--draft-vocab")
    parser.add_argument("--lib")
    parser.add_argument("--kv", choices=["auto", "f16", "q8"], default="auto")
    args = parser.parse_args()
    args.words = 40
    start = time.perf_counter()
    engine, name = Engine(args), os.path.basename(args.model)
    took_s = time.perf_counter() - start
    say(f"[mk-server] ready in {took_s:.1f} s: {name}, ctx {args.ctx}, {args.draft} drafts")
    server = ThreadingHTTPServer((args.host, args.port), handler(engine, name))  # nothing listens before
    server.daemon_threads = True
    say(f"[mk-server] listening on http://{args.host}:{args.port}")
    server.serve_forever()


if __name__ == "__main__":
    main()
