"""Helpers of the client's tests: one scripted request to the truth server, a port that answers with any bytes, and
events written short."""

import json
import socket
import threading
from contextlib import contextmanager, suppress

import dialects

from llmrepro.client import Question, Record, ask

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
END = "data: [DONE]\n\n"


def put(server, endpoint=CHAT, *, silence_s=10.0, timeout_s=20.0, body=None, **script) -> Record:
    """Ask for 20 tokens; `body` adds to the request, the rest are fields of the Script."""
    script = {"ttft_s": 0.004, "gap_s": 0.0005, **script}
    asked = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "max_tokens": 20, **(body or {})}
    question = Question(endpoint, {**asked, "script": script})
    return ask(server.url, question, silence_s=silence_s, timeout_s=timeout_s)


def data(event) -> str:
    return f"data: {json.dumps(event)}\n\n"


def delta(text="a", finish=None, **more) -> str:
    return data({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **more})


def kinds(record):
    return [event.kind for event in record.events]


def said(tokens: int = 20) -> str:
    words = dialects.WORDS
    return "".join(words[i % len(words)] for i in range(tokens))


@contextmanager
def listener(serve):
    """A loopback port whose every connection is handed to `serve`, then closed: before it the port, where `serve`
    says True."""
    with socket.create_server(("127.0.0.1", 0)) as accepting:

        def run():
            while True:
                try:
                    connection, _ = accepting.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    if serve(connection):
                        accepting.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{accepting.getsockname()[1]}"
        with suppress(OSError):  # it may be closed
            accepting.shutdown(socket.SHUT_RDWR)
    thread.join(5)
