"""The client against a server of known truth, and against bytes of any kind."""

import copy
import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import truth_server
from asking import CHAT, END, TEXT, data, delta, kinds, listener, put, said
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrepro import client, metrics
from llmrepro.client import Question, Record, ask

ENDINGS = {"ok", "early_stop", "context_overflow", "http_error", "stream_error", "timeout", "engine_died", "oom"}


@pytest.fixture(scope="module")
def server():
    with truth_server.start() as running:
        yield running


# --- the clock --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_every_event_is_stamped_when_it_is_sent_not_at_the_end(server, framing):
    record = put(server, framing=framing, ttft_s=0.05, gap_s=0.02)
    sent = server.truth()[-1]["sent"]
    assert record.status == "ok" and record.text == said()
    assert len(record.events) == len(sent)
    for event, (sent_ns, *_rest) in zip(record.events, sent, strict=True):
        late_s = event.t_s - (sent_ns - record.t_send_ns) / 1e9
        assert 0 <= late_s < 0.05  # generous: the whole answer takes 0.4 s


def test_ttft_skips_role_progress_pings_and_empty_deltas(server):
    role = {"delta": {"role": "assistant", "content": None}}
    record = put(
        server,
        ttft_s=0.01,
        gap_s=0.03,
        raw=[
            ": ping\n\n",
            data({"choices": [role], "prompt_progress": {"total": 9, "processed": 9}}),
            data({"choices": [role]}),
            delta(""),
            delta("x"),
            delta("", "stop"),
            END,
        ],
    )
    assert kinds(record) == ["ping", "progress", "role", "empty", "text", "finish", "done"]
    assert metrics.ttft_s(record) == record.events[4].t_s >= 0.13
    assert metrics.ttfr_s(record) == record.events[0].t_s <= record.events[1].t_s - 0.01


def test_events_of_one_read_share_its_time(server):
    record = put(server, batch=4, gap_s=0.004, framing="length")
    times = [event.t_s for event in record.events]
    assert len(times) == 24 and len(set(times)) <= 6
    assert record.text == said()


@pytest.mark.parametrize("length", [b"Content-Length", b"content-length"])
def test_the_connection_is_open_before_the_clock_starts_and_health_is_asked_on_it(length):
    seen = []

    def serve(connection):
        request = b""
        while b"\r\n\r\n" not in request:
            request += connection.recv(4096)
        seen.append((id(connection), request.split(b"\r\n")[0], request))
        if request.startswith(b"GET"):
            connection.sendall(b"HTTP/1.1 200 OK\r\n" + length + b": 2\r\n\r\n{}")
            return serve(connection)
        stream_bytes = (delta("x", "stop") + END).encode()
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
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "max_tokens": 3, "seed": 7}
    before = copy.deepcopy(body)
    question = Question(
        CHAT, body, server="d4", boot=2, workload="chat", case="code", repeat=1, warmup=True, prompt_sha256="ab"
    )
    record = ask(server.url, question)
    assert body == before
    assert record.request == {
        "max_tokens": 3,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (
        record.server,
        record.boot,
        record.workload,
        record.case,
        record.repeat,
        record.warmup,
        record.prompt_sha256,
    ) == ("d4", 2, "chat", "code", 1, True, "ab")


def test_a_record_survives_its_line_of_json(server):
    record = put(server, finish="stop", body={"timings_per_token": True})
    assert Record.model_validate_json(record.model_dump_json()) == record


@pytest.mark.parametrize("endpoint", [CHAT, TEXT])
@pytest.mark.parametrize("finish", ["length", "stop"])
@pytest.mark.parametrize(
    "dialect, option, source",
    [
        ("llama.cpp", {}, "usage"),
        ("llama.cpp", {"timings_per_token": True}, "usage_delta"),
        ("vllm", {}, "usage"),
        ("vllm", {"return_token_ids": True}, "ids"),
        ("vllm", {"stream_options": {"continuous_usage_stats": True}}, "usage_delta"),
    ],
)
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


# --- several threads at once -------------------------------------------------------------------------------


def test_eight_requests_at_once_have_each_their_own_truth(server):
    lengths = range(20, 28)  # a length each, by which the server's notes are told apart
    before = len(server.truth())

    def one(tokens):
        asked = {"max_tokens": tokens, "timings_per_token": True}
        return put(server, ttft_s=0.01 * tokens, gap_s=0.005, finish="stop", body=asked)

    with ThreadPoolExecutor(len(lengths)) as threads:
        records = list(threads.map(one, lengths))
    notes = {sum(tokens for _, tokens, *_ in log["sent"]): log for log in server.truth()[before:]}
    for tokens, record in zip(lengths, records, strict=True):
        assert (record.status, record.output_tokens, record.text) == ("ok", tokens + 1, said(tokens))
        sent = notes[tokens + 1]["sent"]
        first_ns = next(ns for ns, *_, spoke, _ in sent if spoke)
        assert 0 <= metrics.ttft_s(record) - (first_ns - record.t_send_ns) / 1e9 < 0.05
        for event, (sent_ns, *_) in zip(record.events, sent, strict=True):
            assert 0 <= event.t_s - (sent_ns - record.t_send_ns) / 1e9 < 0.1
    assert max(r.t_send_ns for r in records) < min(r.t_send_ns + r.t_done_s * 1e9 for r in records), "in turn"


@pytest.mark.parametrize("collecting", [True, False])
def test_the_interpreter_is_left_as_it_was_when_the_last_request_ends(server, collecting):
    turn_s, begun, release = sys.getswitchinterval(), threading.Event(), threading.Event()

    def serve(connection):
        while connection.recv(4096).startswith(b"GET"):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        begun.set()
        release.wait(10)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + delta("x", "stop").encode())

    (gc.enable if collecting else gc.disable)()
    try:
        with listener(serve) as url, ThreadPoolExecutor(1) as threads:
            long = threads.submit(ask, url, Question(CHAT, {"max_tokens": 1}))
            assert begun.wait(10) and put(server).status == "ok"
            during = gc.isenabled(), sys.getswitchinterval()
            release.set()
            assert long.result().status == "ok"
        assert during[0] is False and during[1] < turn_s, "the longer one was on its way still"
        assert gc.isenabled() == collecting and sys.getswitchinterval() == turn_s
        assert put(server, stall_after=2, silence_s=0.05).status == "timeout"
        assert gc.isenabled() == collecting and sys.getswitchinterval() == turn_s
    finally:
        gc.enable()


# --- bytes of any kind -------------------------------------------------------------------------------------


PIECES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            b"data: ",
            b"\n\n",
            b"\r\n",
            b"\r",
            b":",
            b"[DONE]",
            b"data: [DONE]\n\n",
            b'{"choices":[',
            b'{"error":',
            delta("x").encode(),
            delta("y", "stop").encode(),
            b"\xef\xbb\xbf",
            b"\xf0\x9f",
            b"data: " + b"[" * 3000 + b"\n\n",
            b'data: {"usage":' + b'{"a":' * 400 + b"1" + b"}" * 401 + b"\n\n",
            b'data: {"usage":{"a":' + b"[" * 400 + b"]" * 400 + b"}}\n\n",
            b'data: {"usage":{"completion_tokens":1e999,"\\ud800":"\\udfff"}}\n\n',
            b'data: {"choices":[{"delta":7,"text":[],"token_ids":[null,{}],"finish_reason":{}}]}\n\n',
        ]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "choices",
                        "delta",
                        "content",
                        "text",
                        "usage",
                        "timings",
                        "error",
                        "role",
                        "prompt_tokens_details",
                        "completion_tokens",
                        "finish_reason",
                        "token_ids",
                        "predicted_n",
                        "prompt_progress",
                        "index",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ).map(lambda event: data(event).encode()),
)


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=8),
    opening=st.sampled_from(
        [
            b"HTTP/1.1 200 OK\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n",
            b"HTTP/1.1 400 Bad\r\n\r\n",
            b"HTTP/1.1 302 Moved\r\nLocation: http://[bad\r\n\r\n",
            b"HTTP/1.1 100\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n",
            b"HTTP/1.1 abc\r\n\r\n",
            b"",
        ]
    ),
)
def test_any_bytes_at_all_yield_a_record_with_a_status(pieces, opening):
    def serve(connection):
        if connection.recv(65536).startswith(b"GET"):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            connection.recv(65536)
        connection.sendall(opening + b"".join(pieces))

    with listener(serve) as url, mock.patch.object(client, "DYING_S", 0.0):
        record = ask(url, Question(CHAT, {"max_tokens": 4}), timeout_s=5, silence_s=5)
    assert record.status in ENDINGS
    assert (record.error is None) == (record.status == "ok")
    assert Record.model_validate_json(record.model_dump_json()).status == record.status
    for definition in metrics.DEFINITIONS.values():
        definition(record)
