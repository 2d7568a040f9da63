"""The client against a server of known truth, and against bytes of any kind."""

import base64
import json
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager

import pytest
import truth_server
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrepro import metrics, stream
from llmrepro.client import Question, Record, ask

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDINGS = {"ok", "early_stop", "context_overflow", "http_error", "stream_error", "timeout", "engine_died", "oom"}


@pytest.fixture(scope="module")
def server():
    with truth_server.start() as running:
        yield running


def put(server, endpoint=CHAT, *, silence_s=10.0, timeout_s=20.0, body=None, **script) -> Record:
    script = {"ttft_s": 0.004, "gap_s": 0.0005, **script}
    asked = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "max_tokens": 20, **(body or {})}
    return ask(server.url, Question(endpoint, {**asked, "script": script}), silence_s=silence_s, timeout_s=timeout_s)


def data(event) -> str:
    return f"data: {json.dumps(event)}\n\n"


def delta(text="a", finish=None, **more) -> str:
    return data({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **more})


def kinds(record):
    return [event.kind for event in record.events]


def said(tokens: int = 20) -> str:
    words = truth_server.WORDS
    return "".join(words[i % len(words)] for i in range(tokens))


# --- the clock -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_every_event_is_stamped_when_it_is_sent_not_at_the_end(server, framing):
    record = put(server, framing=framing, ttft_s=0.05, gap_s=0.02)
    sent = server.truth()[-1]["sent"]
    assert record.status == "ok" and record.text == said()
    assert len(record.events) == len(sent)
    for event, (sent_ns, *_rest) in zip(record.events, sent, strict=True):
        late_s = event.t_s - (sent_ns - record.t_send_ns) / 1e9
        assert 0 <= late_s < 0.05           # generous: the whole answer takes 0.4 s


def test_ttft_skips_role_progress_pings_and_empty_deltas(server):
    record = put(server, ttft_s=0.01, gap_s=0.03, raw=[
        ": ping\n\n", data({"choices": [], "prompt_progress": {"total": 9, "processed": 9}}),
        data({"choices": [{"delta": {"role": "assistant", "content": None}}]}), delta(""), delta("x"),
        delta("", "stop"), "data: [DONE]\n\n"])
    assert kinds(record) == ["ping", "progress", "role", "empty", "text", "finish", "done"]
    assert metrics.ttft_s(record) == record.events[4].t_s >= 0.13
    assert metrics.ttfr_s(record) == record.events[0].t_s < 0.13


def test_events_of_one_read_share_its_time(server):
    record = put(server, batch=4, gap_s=0.004, framing="length")
    times = [event.t_s for event in record.events]
    assert len(times) == 24 and len(set(times)) <= 6
    assert record.text == said()


def test_the_connection_is_open_before_the_clock_starts_and_health_is_asked_on_it():
    seen = []

    def serve(connection):
        request = b""
        while b"\r\n\r\n" not in request:
            request += connection.recv(4096)
        seen.append((id(connection), request.split(b"\r\n")[0], request))
        if request.startswith(b"GET"):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return serve(connection)
        stream_bytes = (delta("x", "stop") + "data: [DONE]\n\n").encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + stream_bytes)

    with listener(serve) as url:
        record = ask(url, Question(CHAT, {"max_tokens": 1}), api_key="secret")
    assert record.status == "ok"
    assert [line for _, line, _ in seen] == [b"GET /health HTTP/1.1", b"POST /v1/chat/completions HTTP/1.1"]
    assert seen[0][0] == seen[1][0]
    for *_, request in seen:
        assert b"Accept-Encoding: identity\r\n" in request and b"Authorization: Bearer secret\r\n" in request


def test_a_proxy_variable_does_not_catch_the_request(server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert put(server).status == "ok"


def test_the_question_is_asked_as_given_and_filed_without_its_prompt(server):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 7}
    question = Question(CHAT, body, server="d4", boot=2, workload="chat", case="code", repeat=1, warmup=True,
                        prompt_sha256="ab")
    record = ask(server.url, question)
    assert body == {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 7}
    assert record.request == {"max_tokens": 3, "seed": 7, "stream": True, "stream_options": {"include_usage": True}}
    assert (record.server, record.boot, record.workload, record.case, record.repeat, record.warmup,
            record.prompt_sha256) == ("d4", 2, "chat", "code", 1, True, "ab")


def test_a_record_survives_its_line_of_json(server):
    record = put(server, finish="stop", body={"timings_per_token": True})
    assert Record.model_validate_json(record.model_dump_json()) == record


# --- counting ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("endpoint", [CHAT, TEXT])
@pytest.mark.parametrize("finish", ["length", "stop"])
@pytest.mark.parametrize("dialect, option, source", [
    ("llama.cpp", {}, "usage"), ("llama.cpp", {"timings_per_token": True}, "usage_delta"),
    ("vllm", {}, "usage"), ("vllm", {"return_token_ids": True}, "ids"),
    ("vllm", {"stream_options": {"continuous_usage_stats": True}}, "usage_delta")])
def test_tokens_and_times_are_the_servers_in_both_dialects(server, endpoint, finish, dialect, option, source):
    record = put(server, endpoint, dialect=dialect, finish=finish, chunks=[3, 1, 5, 1, 1, 9], body=option)
    sent = server.truth()[-1]["sent"]
    assert (record.status, record.error) == ("ok", None)
    assert record.output_tokens == 20 + (finish == "stop") and record.output_tokens_source == source
    assert record.text == said() and record.finish_reason == finish
    assert record.prompt_tokens == 300 and record.cached_tokens == 0
    assert kinds(record)[-1] == "done"
    first, last = (next(ns for ns, tokens, *_ in order if tokens) for order in (sent, sent[::-1]))
    assert metrics.k0(record) == (None if source == "usage" else 3)
    assert metrics.t_first_s(record) == pytest.approx((first - record.t_send_ns) / 1e9, abs=0.05)
    assert metrics.t_last_s(record) == pytest.approx((last - record.t_send_ns) / 1e9, abs=0.05)
    # t_last is the very event that brought the last token
    accounted = [event.t_s for event, (_, tokens, *_rest) in zip(record.events, sent, strict=True) if tokens]
    assert metrics.t_last_s(record) == accounted[-1]


def test_tokens_of_chunks_without_text_are_counted(server):
    record = put(server, dialect="vllm", chunks=[1] * 20, held=[0, 5, 6], body={"return_token_ids": True})
    assert kinds(record)[1] == "empty" and record.events[1].tokens == 1
    assert record.output_tokens == 20 and metrics.k0(record) == 2


@pytest.mark.parametrize("dialect, key", [("llama.cpp", "reasoning_content"), ("vllm", "reasoning"),
                                          ("vllm", "reasoning_content")])
def test_reasoning_is_first_token_and_the_answer_is_timed_apart(server, dialect, key):
    record = put(server, dialect=dialect, reasoning=5, reasoning_key=key, gap_s=0.004)
    assert record.reasoning + record.text == said() and record.reasoning == said(5)
    assert metrics.ttft_s(record) == record.events[1].t_s and record.events[1].kind == "reasoning"
    assert metrics.ttfat_s(record) == record.events[6].t_s
    assert record.output_tokens == 20


def test_a_tool_call_is_a_first_token(server):
    call = {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}]}
    record = put(server, raw=[data({"choices": [{"delta": {"role": "assistant"}}]}), data(call),
                              delta("", "tool_calls"), "data: [DONE]\n\n"])
    assert record.status == "ok" and kinds(record) == ["role", "tool", "finish", "done"]
    assert metrics.ttft_s(record) == record.events[1].t_s


def test_without_usage_there_is_no_count_and_no_rate(server):
    record = put(server, dialect="vllm", usage="never")
    assert record.status == "ok" and record.output_tokens is None and record.output_tokens_source is None
    assert metrics.decode_tps(record) is None and metrics.e2e_tps(record) is None


def test_llama_cpp_timings_count_where_usage_is_absent(server):
    record = put(server, usage="never")
    assert record.usage is None and (record.output_tokens, record.output_tokens_source) == (20, "timings")


def test_a_wrong_usage_is_noted_and_the_better_source_used(server):
    record = put(server, dialect="vllm", usage="13", body={"return_token_ids": True})
    assert (record.output_tokens, record.output_tokens_source) == (20, "ids")
    assert any("ids 20" in note and "usage 13" in note for note in record.notes)
    record = put(server, usage="13")
    assert any("usage 13" in note and "timings 20" in note for note in record.notes)


def test_a_usage_of_zero_beside_text_is_no_count(server):
    record = put(server, dialect="vllm", usage="0")
    assert record.output_tokens is None and any("0 output tokens" in note for note in record.notes)


def test_a_usage_that_falls_or_skips_text_is_not_taken_event_by_event(server):
    falling = [delta(usage={"completion_tokens": n}) for n in (1, 5, 3)]
    record = put(server, raw=[*falling, delta("", "stop"), data({"choices": [], "usage": {"completion_tokens": 9}}),
                              "data: [DONE]\n\n"])
    assert (record.output_tokens, record.output_tokens_source) == (9, "usage") and metrics.k0(record) is None
    skipping = [delta(), delta(usage={"completion_tokens": 2}), delta("", "stop"), "data: [DONE]\n\n"]
    record = put(server, raw=skipping)
    assert (record.output_tokens, record.output_tokens_source) == (2, "usage") and metrics.k0(record) is None


@pytest.mark.parametrize("wrong", ["7", None, -3, 2.5, True, [4], 10**30, {}])
def test_a_count_that_is_no_count_is_unknown(server, wrong):
    record = put(server, raw=[delta("a", "stop"), data({"choices": [], "usage": {"completion_tokens": wrong,
                              "prompt_tokens": wrong, "prompt_tokens_details": wrong}}), "data: [DONE]\n\n"])
    assert record.status == "ok"
    assert (record.output_tokens, record.prompt_tokens, record.cached_tokens) == (None, None, None)


def test_cached_tokens_are_unknown_never_zero_when_untold(server):
    assert put(server, dialect="vllm", cached_tokens=None).cached_tokens is None
    assert put(server, dialect="vllm", cached_tokens=64).cached_tokens == 64
    record = put(server, cached_tokens=299)
    assert record.cached_tokens == 299 and record.prompt_tokens == 300


def test_an_answer_that_repeats_one_token_is_seen(server):
    event = {"choices": [{"index": 0, "delta": {"content": "la "}, "token_ids": [5]}]}
    last = {"index": 0, "delta": {"content": "x"}, "token_ids": [6], "finish_reason": "stop"}
    record = put(server, raw=[data(event)] * 19 + [data({"choices": [last]}), "data: [DONE]\n\n"])
    assert record.same_token_share == pytest.approx(0.95) == metrics.repetition_share(record)


# --- the stream's form ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", [{"newline": "\r\n"}, {"newline": "\r"}, {"split_bytes": 7}, {"split_bytes": 1},
                                  {"newline": "\r\n", "split_bytes": 13}, {"framing": "close", "split_bytes": 50},
                                  {"batch": 24}, {"comments": True}, {"content_type": "text/plain"}])
def test_no_form_of_the_stream_changes_what_it_says(server, form):
    gap_s = 0.0 if "split_bytes" in form else 0.0005
    record = put(server, **form, gap_s=gap_s, max_tokens=4, chunks=[1] * 4)
    assert (record.status, record.error, record.notes) == ("ok", None, [])
    assert record.text == said(4) and record.output_tokens == 4
    assert kinds(record).count("ping") == (8 if "comments" in form else 0)


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_gzip_sent_all_the_same_is_read_and_noted(server, framing):
    record = put(server, gzip=True, framing=framing)
    assert record.status == "ok" and record.text == said() and record.output_tokens == 20
    assert any("gzip" in note for note in record.notes)


def test_an_event_of_several_data_lines_is_one(server):
    record = put(server, raw=['data: {"choices": [{"delta":\ndata: {"content": "ab"},\ndata:"finish_reason":"stop"}]}'
                              "\n\n", "data: [DONE]\n\n"])
    assert (record.status, record.text) == ("ok", "ab")


def test_the_last_blank_line_may_be_missing(server):
    record = put(server, raw=[delta("ab"), delta("", "stop").rstrip("\n")], framing="close")
    assert (record.status, record.text, record.finish_reason) == ("ok", "ab", "stop")


def test_an_emoji_split_over_two_escapes_is_joined_and_half_of_one_replaced(server):
    halves = ['data: {"choices": [{"delta": {"content": "\\ud83d"}}]}\n\n',
              'data: {"choices": [{"delta": {"content": "\\ude42"}}]}\n\n',
              'data: {"choices": [{"delta": {"content": "\\ud83d"}, "finish_reason": "stop"}]}\n\n']
    record = put(server, raw=[*halves, "data: [DONE]\n\n"])
    assert record.status == "ok" and record.text == "🙂?"
    assert Record.model_validate_json(record.model_dump_json()) == record


def test_invalid_utf8_is_replaced_and_noted(server):
    raw = base64.b64encode(b'data: {"choices": [{"delta": {"content": "a\xff"}, "finish_reason": "stop"}]}\n\n')
    record = put(server, raw=["b64:" + raw.decode(), "data: [DONE]\n\n"])
    assert record.status == "ok" and record.text == "a\ufffd" and any("UTF-8" in note for note in record.notes)


# --- how it ends ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dialect", ["llama.cpp", "vllm"])
def test_a_prompt_too_long_is_context_overflow(server, dialect):
    record = put(server, dialect=dialect, prompt_tokens=9000)
    assert (record.status, record.http_status) == ("context_overflow", 400)
    assert "8192" in record.error and "shorten" in record.error
    assert record.prompt_tokens == (9000 if dialect == "llama.cpp" else None)


@pytest.mark.parametrize("status, body, word", [
    (400, '{"error":{"code":400,"message":"Expected \'messages\' to be an array","type":"invalid_request_error"}}',
     "http_error"), (401, '{"error":"Invalid API Key"}', "http_error"), (404, '{"detail":"Not Found"}', "http_error"),
    (500, "Internal Server Error", "http_error"), (503, "", "http_error"),
    (500, '{"error":{"message":"CUDA out of memory. Tried to allocate 2.00 GiB"}}', "oom"),
    (500, '{"error":{"message":"EngineCore encountered an issue. See stack trace"}}', "engine_died"),
    (200, '{"error":{"message":"boom"}}', "stream_error"), (200, '{"object":"error","message":"boom"}', "stream_error"),
    (200, '{"choices":[{"message":{"content":"hi"}}],"usage":{"completion_tokens":1}}', "stream_error"),
    (200, "<html>proxy</html>", "stream_error"), (200, "", "stream_error"), (204, "", "http_error"),
    (302, "", "http_error")])
def test_an_error_is_never_a_success(server, status, body, word):
    script = {"status": status, "body": body, "content_type": "application/json"}
    record = ask(server.url, Question(CHAT, {"max_tokens": 20, "script": script}))
    assert (record.status, record.http_status) == (word, status)
    assert record.error and metrics.ttft_s(record) is None and record.output_tokens is None


def test_an_error_inside_the_stream_is_a_stream_error(server):
    record = put(server, raw=[delta("a"), data({"error": {"message": "kaput", "code": 500}}), "data: [DONE]\n\n"])
    assert record.status == "stream_error" and "kaput" in record.error
    assert kinds(record) == ["text", "error", "done"] and record.text == "a"


def test_malformed_json_is_a_stream_error_and_the_rest_is_kept(server):
    record = put(server, raw=[delta("a"), 'data: {"choices": [\n\n', "data: 5\n\n", delta("b", "stop"),
                              "data: [DONE]\n\n"])
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
    assert put(server, raw=[delta("a", "abort"), "data: [DONE]\n\n"]).status == "stream_error"


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


def test_a_server_that_dies_under_the_request_is_engine_died():
    with truth_server.start() as server:
        record = put(server, die_after=6)
        assert record.status == "engine_died" and record.text == said(5)
        assert server.process.wait(10) == 0          # as crashed servers do: the exit code says nothing
        record = put(server)
        assert record.status == "engine_died" and "refuses" in record.error and record.http_status is None


def test_ignore_eos_that_is_ignored_is_early_stop(server):
    record = put(server, chunks=[1] * 8, body={"ignore_eos": True})
    assert record.status == "early_stop" and "8 tokens of 20" in record.error
    assert put(server, body={"ignore_eos": True}).status == "ok"
    assert put(server, chunks=[1] * 8, finish="stop").status == "ok"


def test_more_tokens_than_asked_are_noted(server):
    record = put(server, chunks=[1] * 30)
    assert record.status == "ok" and any("20 were asked" in note for note in record.notes)


def test_an_interrupt_passes_through(server):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        put(server, stall_after=3)


# --- bytes of any kind ----------------------------------------------------------------------------------------

@contextmanager
def listener(serve):
    """A loopback port whose every connection is handed to `serve`, then closed."""
    with socket.create_server(("127.0.0.1", 0)) as accepting:
        def run():
            while True:
                try:
                    connection, _ = accepting.accept()
                except OSError:
                    return
                with connection:
                    try:
                        serve(connection)
                    except OSError:
                        continue

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{accepting.getsockname()[1]}"
        accepting.shutdown(socket.SHUT_RDWR)
    thread.join(5)


PIECES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"data: ", b"\n\n", b"\r\n", b"\r", b":", b"[DONE]", b"data: [DONE]\n\n", b'{"choices":[',
                     b'{"error":', delta("x").encode(), delta("y", "stop").encode(), b"\xef\xbb\xbf", b"\xf0\x9f",
                     b"data: " + b"[" * 3000 + b"\n\n", b'data: {"usage":' + b'{"a":' * 400 + b"1" + b"}" * 401
                     + b"\n\n", b'data: {"usage":{"completion_tokens":1e999,"\\ud800":"\\udfff"}}\n\n',
                     b'data: {"choices":[{"delta":7,"text":[],"token_ids":[null,{}],"finish_reason":{}}]}\n\n']),
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                 lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                     st.sampled_from(["choices", "delta", "content", "text", "usage", "timings", "error", "role",
                                      "prompt_tokens_details", "completion_tokens", "finish_reason", "token_ids",
                                      "predicted_n", "prompt_progress", "index"]), inner, max_size=4),
                 max_leaves=12).map(lambda event: data(event).encode()))


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(PIECES, max_size=8), opening=st.sampled_from([
    b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n",
    b"HTTP/1.1 400 Bad\r\n\r\n", b"HTTP/1.1 302 Moved\r\nLocation: http://[bad\r\n\r\n", b"HTTP/1.1 100\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b""]))
def test_any_bytes_at_all_yield_a_record_with_a_status(pieces, opening):
    def serve(connection):
        if connection.recv(65536).startswith(b"GET"):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            connection.recv(65536)
        connection.sendall(opening + b"".join(pieces))

    with listener(serve) as url:
        record = ask(url, Question(CHAT, {"max_tokens": 4}), timeout_s=5, silence_s=5)
    assert record.status in ENDINGS
    assert (record.error is None) == (record.status == "ok")
    assert Record.model_validate_json(record.model_dump_json()).status == record.status
    for definition in metrics.DEFINITIONS.values():
        definition(record)


@settings(max_examples=300, deadline=None)
@given(chunks=st.lists(st.integers(0, 9), min_size=1, max_size=30), dialect=st.sampled_from(["llama.cpp", "vllm"]),
       finish=st.sampled_from(["length", "stop"]), chat=st.booleans(), newline=st.sampled_from([b"\n", b"\r\n", b"\r"]),
       cuts=st.lists(st.integers(1, 400), min_size=1, max_size=6),
       option=st.sampled_from([{}, {"return_token_ids": True, "timings_per_token": True},
                               {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}]))
def test_a_well_formed_stream_is_counted_right_however_it_is_cut(chunks, dialect, finish, chat, newline, cuts, option):
    chunks = [max(1, k) if i in (0, len(chunks) - 1) or dialect == "llama.cpp" else k for i, k in enumerate(chunks)]
    body = {"stream_options": {"include_usage": True}, **option}
    script = truth_server.Script(dialect=dialect, finish=finish, chunks=chunks)
    events = truth_server.answer(script, CHAT if chat else TEXT, body)
    whole = b"".join(event.data for event in events).replace(b"\n", newline)
    reader, arrivals, at = stream.Reader(), [], 0
    while at < len(whole):
        size = cuts[len(arrivals) % len(cuts)]
        arrivals += [(at, payload) for payload in reader.feed(whole[at:at + size])]
        at += size
    arrivals += [(at, payload) for payload in reader.close()]
    answer = stream.read(arrivals, 0)
    counts = stream.count(answer)
    assert answer.error is answer.malformed is None and answer.done and answer.finish_reason == finish
    assert "".join(answer.text) == said(sum(chunks))
    assert counts.output_tokens == sum(chunks) + (finish == "stop") and counts.notes == []
    assert (counts.prompt_tokens, counts.cached_tokens) == (300, 0)
    if counts.source in ("ids", "usage_delta"):
        assert sum(event.tokens or 0 for event in counts.events) == counts.output_tokens
