"""However a request ends, its record says so: a status, and a sentence where it is not ok."""

import os
import signal
import socket
import threading
import time
from contextlib import suppress

import pytest
import truth_server
from asking import CHAT, END, data, delta, kinds, put, said

from llmrepro import client, metrics
from llmrepro.client import Question, ask


@pytest.fixture(scope="module")
def server():
    with truth_server.start() as running:
        yield running


@pytest.mark.parametrize("dialect", ["llama.cpp", "vllm"])
def test_a_prompt_too_long_is_context_overflow(server, dialect):
    record = put(server, dialect=dialect, prompt_tokens=9000)
    assert (record.status, record.http_status) == ("context_overflow", 400)
    assert "8192" in record.error and "shorten" in record.error
    assert record.prompt_tokens == (9000 if dialect == "llama.cpp" else None)


@pytest.mark.parametrize(
    "status, body, word",
    [
        (
            400,
            '{"error":{"code":400,"message":"messages: an array expected","type":"invalid_request_error"}}',
            "http_error",
        ),
        (
            400,  # of vLLM 0.32, for a prompt that fills its context to the last token
            '{"error":{"message":"max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",'
            '"type":"BadRequestError","param":"max_tokens","code":400}}',
            "context_overflow",
        ),
        (401, '{"error":"Invalid API Key"}', "http_error"),
        (404, '{"detail":"Not Found"}', "http_error"),
        (500, "Internal Server Error", "http_error"),
        (503, "", "http_error"),
        (500, '{"error":{"message":"CUDA out of memory. Tried to allocate 2.00 GiB"}}', "oom"),
        (500, '{"error":{"message":"EngineCore encountered an issue. See stack trace"}}', "engine_died"),
        (200, '{"error":{"message":"boom"}}', "stream_error"),
        (200, '{"object":"error","message":"boom"}', "stream_error"),
        (200, '{"choices":[{"message":{"content":"hi"}}],"usage":{"completion_tokens":1}}', "stream_error"),
        (200, "<html>proxy</html>", "stream_error"),
        (200, "", "stream_error"),
        (204, "", "http_error"),
        (302, "", "http_error"),
    ],
)
def test_an_error_is_never_a_success(server, status, body, word):
    script = {"status": status, "body": body, "content_type": "application/json"}
    record = ask(server.url, Question(CHAT, {"max_tokens": 20, "script": script}))
    assert (record.status, record.http_status) == (word, status)
    assert record.error and metrics.ttft_s(record) is None and record.output_tokens is None


def test_an_error_inside_the_stream_is_a_stream_error(server):
    record = put(server, raw=[delta("a"), data({"error": {"message": "kaput", "code": 500}}), END])
    assert record.status == "stream_error" and "kaput" in record.error
    assert kinds(record) == ["text", "error", "done"] and record.text == "a"
    record = put(server, raw=[delta("a", "stop"), data({"object": "error", "message": "kaput"}), END])
    assert record.status == "stream_error" and "kaput" in record.error


def test_malformed_json_is_a_stream_error_and_the_rest_is_kept(server):
    record = put(server, raw=[delta("a"), 'data: {"choices": [\n\n', "data: 5\n\n", delta("b", "stop"), END])
    assert record.status == "stream_error" and "event 2" in record.error and record.text == "ab"


@pytest.mark.parametrize("end", ["cut_after", "close_after"])
@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_a_cut_stream_is_a_stream_error(server, end, framing):
    record = put(server, **{end: 6}, framing=framing)
    assert record.status == "stream_error" and record.error
    assert record.text == said(5) and record.output_tokens is None


def test_a_cut_after_the_finish_keeps_the_answer_and_says_so(server):
    record = put(server, cut_after=22)
    assert record.status == "ok" and record.finish_reason == "length" and record.t_done_s is None
    assert any("before [DONE]" in note for note in record.notes)


def test_a_finish_without_done_ends_with_the_close(server):
    record = put(server, raw=[delta("a", "stop")], framing="close")
    assert record.status == "ok" and record.t_done_s >= record.events[-1].t_s


def test_an_aborted_answer_is_a_stream_error(server):
    assert put(server, raw=[delta("a", "abort"), END]).status == "stream_error"


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_a_stall_is_a_timeout_after_the_silence_allowed(server, framing):
    begun = time.monotonic()
    record = put(server, stall_after=5, framing=framing, silence_s=0.3)
    assert record.status == "timeout" and "0.3 s" in record.error
    assert 0.3 <= time.monotonic() - begun < 5
    assert record.text == said(4)


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_the_whole_request_has_a_limit_though_bytes_keep_coming(server, framing):
    record = put(server, gap_s=0.05, framing=framing, body={"max_tokens": 200}, timeout_s=0.5)
    assert record.status == "timeout" and "0.5 s" in record.error and record.text
    record = put(server, stall_after=5, framing=framing, timeout_s=0.5)
    assert record.status == "timeout" and record.text == said(4)


def test_silence_before_the_first_byte_is_a_timeout(server):
    record = put(server, ttft_s=5.0, silence_s=0.2)
    assert record.status == "timeout" and record.events == []


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_a_server_that_dies_under_the_request_is_engine_died(framing):
    with truth_server.start() as server:
        record = put(server, die_after=6, framing=framing)
        assert record.status == "engine_died" and record.text == said(5)
        assert server.process.wait(10) == 0  # as crashed servers do: the exit code says nothing
        record = put(server)
        assert record.status == "engine_died" and "refuses" in record.error and record.http_status is None


def test_ignore_eos_that_is_ignored_is_early_stop(server):
    record = put(server, chunks=[1] * 8, body={"ignore_eos": True})
    assert record.status == "early_stop" and "8 tokens" in record.error and "20" in record.error
    assert put(server, body={"ignore_eos": True}).status == "ok"
    assert put(server, chunks=[1] * 8, finish="stop").status == "ok"


@pytest.mark.parametrize("dialect", ["llama.cpp", "vllm"])
def test_an_answer_that_fills_the_context_is_early_stop(server, dialect):
    """Both engines take max_tokens down in silence where prompt and answer do not fit."""
    record = put(server, dialect=dialect, chunks=[1] * 11)
    assert record.status == "early_stop" and "11 tokens of 20" in record.error and "context" in record.error
    assert record.output_tokens == 11


def test_more_tokens_than_asked_are_noted(server):
    record = put(server, chunks=[1] * 30)
    assert record.status == "ok" and any("20 were asked" in note for note in record.notes)
    assert record.output_tokens is None and metrics.decode_tps(record) is None


@pytest.mark.parametrize("drip", ["headers", "body", "long body"])
def test_the_deadline_ends_a_health_path_that_drips(drip):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def dripping():
            with suppress(OSError):
                connection = listener.accept()[0]
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\n"
                    + {"headers": b"", "body": b"\r\n", "long body": b"Content-Length: 999999\r\n\r\n"}[drip]
                )
                while True:
                    connection.sendall(b"a")
                    time.sleep(0.05)

        threading.Thread(target=dripping, daemon=True).start()
        begin = time.monotonic()
        record = ask(
            f"http://127.0.0.1:{listener.getsockname()[1]}", Question("/v1/completions", {}), timeout_s=0.5
        )
    assert record.status == "timeout"
    assert time.monotonic() - begin < 5


def test_an_answer_without_end_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(client, "MOST_EVENTS", 10)
    record = put(server)
    assert record.status == "stream_error" and "beyond" in record.error


def test_an_interrupt_passes_through(server):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        put(server, stall_after=3)
