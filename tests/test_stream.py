"""What a stream says and how many tokens it holds, in every form that engines and mishaps give it."""

import base64
import json
from pathlib import Path

import dialects
import pytest
import truth_server
from asking import CHAT, END, TEXT, data, delta, kinds, put, said
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrepro import metrics, sse, stream
from llmrepro.client import Record


@pytest.fixture(scope="module")
def server():
    with truth_server.start() as running:
        yield running


# --- counting


def test_tokens_of_chunks_without_text_are_counted(server):
    record = put(server, dialect="vllm", chunks=[1] * 20, held=[0, 5, 6], body={"return_token_ids": True})
    assert kinds(record)[1] == "empty" and record.events[1].tokens == 1
    assert record.output_tokens == 20 and metrics.k0(record) == 2


@pytest.mark.parametrize(
    "dialect, key", [("llama.cpp", "reasoning_content"), ("vllm", "reasoning"), ("vllm", "reasoning_content")]
)
def test_reasoning_is_first_token_and_the_answer_is_timed_apart(server, dialect, key):
    record = put(server, dialect=dialect, reasoning=5, reasoning_key=key, gap_s=0.004)
    assert record.reasoning + record.text == said() and record.reasoning == said(5)
    assert metrics.ttft_s(record) == record.events[1].t_s and record.events[1].kind == "reasoning"
    assert metrics.ttfat_s(record) == record.events[6].t_s
    assert record.output_tokens == 20


@pytest.mark.parametrize(
    "dialect, option, known",
    [
        ("llama.cpp", {"timings_per_token": True}, True),
        ("vllm-0.14", {"return_token_ids": True}, True),
        ("vllm", {"stream_options": {"continuous_usage_stats": True}}, True),
        ("vllm", {}, False),
        ("open-jet", {}, False),
    ],
)
def test_reasoning_is_counted_and_timed_apart_where_the_stream_tells(server, dialect, option, known):
    key = "reasoning_content" if dialect == "llama.cpp" else "reasoning"
    script = {"dialect": dialect, "reasoning": 3, "reasoning_key": key, "gap_s": 0.02, "finish": "stop"}
    body = {"max_tokens": 40, **option}
    record = put(server, chunks=[4, 1, 5, *[2] * 10], body=body, **script)
    assert record.status == "ok" and record.reasoning == said(10) and record.output_tokens == 31
    assert metrics.reasoning_tokens(record) == (10 if known else None)
    sent_ns = [ns for ns, *_ in server.truth()[-1]["sent"]]
    first, answer = (
        next(i for i, found in enumerate(kinds(record)) if kind in found) for kind in ("reas", "text")
    )
    assert metrics.reasoning_s(record) == pytest.approx((sent_ns[answer] - sent_ns[first]) / 1e9, abs=0.05)
    plain = put(server, dialect=dialect, body=option)
    assert metrics.reasoning_tokens(plain) is metrics.reasoning_s(plain) is None


def test_a_tool_call_is_a_first_token(server):
    call = {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}]}
    record = put(
        server,
        raw=[data({"choices": [{"delta": {"role": "assistant"}}]}), data(call), delta("", "tool_calls"), END],
    )
    assert record.status == "ok" and kinds(record) == ["role", "tool", "finish", "done"]
    assert metrics.ttft_s(record) == record.events[1].t_s


def test_without_usage_there_is_no_count_and_no_rate(server):
    record = put(server, dialect="vllm", usage="never")
    assert record.status == "ok" and record.output_tokens is None and record.output_tokens_source is None
    assert metrics.decode_tps(record) is None and metrics.e2e_tps(record) is None


def test_llama_cpp_timings_count_where_usage_is_absent(server):
    record = put(server, usage="never")
    assert record.usage is None and (record.output_tokens, record.output_tokens_source) == (20, "timings")
    record = put(server, usage="never", cached_tokens=100)
    assert (record.prompt_tokens, record.cached_tokens) == (300, 100)


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
    record = put(
        server, raw=[*falling, delta("", "stop"), data({"choices": [], "usage": {"completion_tokens": 9}}), END]
    )
    assert (record.output_tokens, record.output_tokens_source) == (9, "usage") and metrics.k0(record) is None
    skipping = [
        delta(),
        delta(usage={"completion_tokens": 1}),
        delta("", "stop", usage={"completion_tokens": 2}),
        END,
    ]
    record = put(server, raw=skipping)
    assert (record.output_tokens, record.output_tokens_source) == (2, "usage") and metrics.k0(record) is None
    late = [delta(usage={"completion_tokens": n}) for n in (0, 0, 0)]
    record = put(server, raw=[*late, delta("", "stop", usage={"completion_tokens": 9}), END])
    assert (record.output_tokens, record.output_tokens_source) == (9, "usage") and metrics.k0(record) is None


def test_a_count_that_ends_before_the_finish_may_lack_the_end_token_and_is_not_taken(server):
    running = [delta(timings={"predicted_n": n}, usage={"completion_tokens": n}) for n in (1, 2, 3)]
    record = put(server, raw=[*running, delta("", "stop"), END])
    assert record.status == "ok" and record.output_tokens is None and record.notes == [stream.UNTOLD]
    ids = [data({"choices": [{"delta": {"content": "a"}, "token_ids": [n]}]}) for n in (5, 6)]
    record = put(server, raw=[*ids, delta("", "stop"), END])
    assert record.output_tokens is None and any("some events only" in note for note in record.notes)
    record = put(server, raw=[*running, delta("", "stop"), data({"usage": {"completion_tokens": 4}}), END])
    assert (record.output_tokens, record.output_tokens_source) == (4, "usage_delta")
    # between the last text and the finish it is there
    record = put(server, raw=[*running, data({"usage": {"completion_tokens": 4}}), delta("", "stop"), END])
    assert record.output_tokens == 4


def test_of_a_cut_answer_the_tokens_that_came_are_counted(server):
    record = put(server, body={"timings_per_token": True}, chunks=[2] * 10, close_after=5, framing="close")
    assert record.status == "stream_error" and record.output_tokens == 8


@pytest.mark.parametrize(
    "lost, said",
    [
        ("data: {'a': 1}\n\n", "no JSON object"),
        ('data: {"choices": "x"}\n\n', "no list of objects"),
        ('data: {"choices": [{"delta": "x"}]}\n\n', "a delta"),
        ('data: {"choices": [{"delta": {"content": ["x"]}}]}\n\n', "no string"),
        ('data: {"choices": [{"text": "x", "finish_reason": {}}]}\n\n', "no string"),
        ('data: {"choices": [{"text": "x", "token_ids": ["7"]}]}\n\n', "whole numbers"),
        ('error: {"message": "boom"}\n\n', "boom"),
        ('d\0ta: {"choices": []}\n\n', "no JSON object"),
    ],
)
def test_an_event_that_cannot_be_read_is_an_error_and_leaves_no_count(server, lost, said):
    last = data({"choices": [], "usage": {"completion_tokens": 3}})
    record = put(server, raw=[delta("a"), lost, delta("c", "stop"), last, END])
    assert record.status == "stream_error" and said in record.error and "event 2" in record.error
    assert record.output_tokens is None and any("could not be read" in note for note in record.notes)
    first = put(server, raw=[lost, delta("c", "stop"), last, END])
    assert first.status == "stream_error" and first.output_tokens is None


def test_lines_without_news_are_passed_over(server):
    raw = ["event: message\nid: 7\nretry: 10\ndata\n" + delta("ab"), "id\n\n", delta("", "stop"), END]
    record = put(server, raw=raw)
    assert (record.status, record.text) == ("ok", "ab")


def test_more_tokens_than_were_asked_for_are_no_count_whatever_else_went_wrong(server):
    wild = [delta(usage={"completion_tokens": n}) for n in (1, 2**52)]
    for raw in ([*wild, delta("", "stop"), data({"usage": {"completion_tokens": 2**52}}), END], wild):
        record = put(server, raw=raw)
        assert record.output_tokens is None and {e.tokens for e in record.events} == {None}
        assert any("not used" in note for note in record.notes)


def test_token_ids_that_come_with_some_events_only_are_not_counted(server):
    some = data({"choices": [{"index": 0, "delta": {"content": "b"}, "token_ids": [5, 6]}]})
    record = put(server, raw=[delta("a"), some, delta("", "stop", usage={"completion_tokens": 4}), END])
    assert (record.output_tokens, record.output_tokens_source) == (4, "usage")
    assert record.same_token_share is None
    assert any("some events only" in note for note in record.notes)


@pytest.mark.parametrize("wrong", ["7", None, -3, 2.5, True, [4], 10**30, {}])
def test_a_count_that_is_no_count_is_unknown(server, wrong):
    record = put(
        server,
        raw=[
            delta("a", "stop"),
            data(
                {
                    "choices": [],
                    "usage": {"completion_tokens": wrong, "prompt_tokens": wrong, "prompt_tokens_details": wrong},
                }
            ),
            END,
        ],
    )
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
    record = put(server, raw=[data(event)] * 19 + [data({"choices": [last]}), END])
    assert record.same_token_share == pytest.approx(0.95) == metrics.repetition_share(record)


# --- the stream's form -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        {"newline": "\r\n"},
        {"newline": "\r"},
        {"split_bytes": 7},
        {"split_bytes": 1},
        {"newline": "\r\n", "split_bytes": 13},
        {"framing": "close", "split_bytes": 50},
        {"batch": 24},
        {"comments": True},
        {"content_type": "text/plain"},
    ],
)
def test_no_form_of_the_stream_changes_what_it_says(server, form):
    gap_s = 0.0 if "split_bytes" in form else 0.0005
    record = put(server, **form, gap_s=gap_s, chunks=[1] * 4, body={"max_tokens": 4})
    assert (record.status, record.error, record.notes) == ("ok", None, [])
    assert record.text == said(4) and record.output_tokens == 4
    assert kinds(record).count("ping") == (8 if "comments" in form else 0)


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_gzip_sent_all_the_same_is_read_and_noted(server, framing):
    record = put(server, gzip=True, framing=framing)
    assert record.status == "ok" and record.text == said() and record.output_tokens == 20
    assert any("gzip" in note for note in record.notes)


def test_an_event_of_several_data_lines_is_one(server):
    record = put(
        server,
        raw=['data: {"choices": [{"delta":\ndata: {"content": "ab"},\ndata:"finish_reason":"stop"}]}\n\n', END],
    )
    assert (record.status, record.text) == ("ok", "ab")


def test_a_line_end_cut_in_two_ends_one_line():
    reader = sse.Reader()
    assert reader.feed(b"data: a\r") + reader.feed(b"\ndata: b\r\n\r") == [b"a\nb"]
    assert reader.feed(b"\n: ping\r") == [None] and reader.close() == []


def test_the_last_blank_line_may_be_missing(server):
    record = put(server, raw=[delta("ab"), delta("", "stop").rstrip("\n")], framing="close")
    assert (record.status, record.text, record.finish_reason) == ("ok", "ab", "stop")


def test_an_emoji_split_over_two_escapes_is_joined_and_half_of_one_replaced(server):
    halves = [
        'data: {"choices": [{"delta": {"content": "\\ud83d"}}]}\n\n',
        'data: {"choices": [{"delta": {"content": "\\ude42"}}]}\n\n',
        'data: {"choices": [{"delta": {"content": "\\ud83d"}, "finish_reason": "stop"}]}\n\n',
    ]
    record = put(server, raw=[*halves, END])
    assert record.status == "ok" and record.text == "🙂?"
    assert Record.model_validate_json(record.model_dump_json()) == record


def test_invalid_utf8_is_replaced_and_noted(server):
    raw = base64.b64encode(b'data: {"choices": [{"delta": {"content": "a\xff"}, "finish_reason": "stop"}]}\n\n')
    record = put(server, raw=["b64:" + raw.decode(), END])
    assert record.status == "ok" and record.text == "a\ufffd" and any("UTF-8" in note for note in record.notes)


@settings(max_examples=300, deadline=None)
@given(
    chunks=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    dialect=st.sampled_from(["llama.cpp", "vllm"]),
    finish=st.sampled_from(["length", "stop"]),
    chat=st.booleans(),
    newline=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    cuts=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    option=st.sampled_from(
        [
            {},
            {"return_token_ids": True, "timings_per_token": True},
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ]
    ),
)
def test_a_well_formed_stream_is_counted_right_however_it_is_cut(
    chunks, dialect, finish, chat, newline, cuts, option
):
    chunks = [
        max(1, k) if i in (0, len(chunks) - 1) or dialect == "llama.cpp" else k for i, k in enumerate(chunks)
    ]
    body = {"stream_options": {"include_usage": True}, **option}
    script = dialects.Script(dialect=dialect, finish=finish, chunks=chunks)
    events = dialects.answer(script, CHAT if chat else TEXT, body)
    whole = b"".join(event.data for event in events).replace(b"\n", newline)
    reader, arrivals, at = sse.Reader(), [], 0
    while at < len(whole):
        size = cuts[len(arrivals) % len(cuts)]
        arrivals += [(at, payload) for payload in reader.feed(whole[at : at + size])]
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


# --- what a real server sent: vLLM 0.32 on a CPU, SmolLM2-135M, whole answers but for the requests' ids ----

CAPTURED = Path(__file__).parent / "data" / "vllm" / "streams"
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
REAL = {  # name: the fields asked that shape the stream, output tokens, finish, prompt and cached tokens
    "chat-plain": ({}, None, "length", None, None),
    "chat-usage": ({"stream_options": {"include_usage": True}}, 6, "length", 36, 0),
    "chat-continuous": ({"stream_options": CONTINUOUS}, 6, "length", 36, 0),
    "chat-ids": ({"stream_options": {"include_usage": True}, "return_token_ids": True}, 6, "length", 36, 0),
    "chat-stop": ({"stream_options": CONTINUOUS, "return_token_ids": True}, 8, "stop", 36, 0),
    "text-plain": ({}, None, "length", None, None),
    "text-usage": ({"stream_options": {"include_usage": True}}, 6, "length", 4, 0),
    "text-continuous": ({"stream_options": CONTINUOUS}, 6, "length", 4, 0),
    "text-ids": ({"stream_options": {"include_usage": True}, "return_token_ids": True}, 6, "length", 4, 0),
    "text-cached": ({"stream_options": {"include_usage": True}}, 5, "length", 441, 384),
    "text-speculation": (
        {"stream_options": {"include_usage": True}, "return_token_ids": True}, 60, "length", 11, 0
    ),
}  # fmt: skip


def payloads(name: str) -> list[bytes]:
    reader = sse.Reader()
    return reader.feed((CAPTURED / f"{name}.sse").read_bytes()) + reader.close()


def counted(name: str) -> tuple[stream.Answer, stream.Counts]:
    answer = stream.read([(i, payload) for i, payload in enumerate(payloads(name))], 0)
    return answer, stream.count(answer)


@pytest.mark.parametrize("name", REAL)
def test_a_real_vllm_stream_is_counted_as_the_server_counts(name):
    body, tokens, finish, prompt, cached = REAL[name]
    answer, counts = counted(name)
    assert answer.error is answer.malformed is None and answer.done and answer.finish_reason == finish
    assert counts.output_tokens == tokens
    assert counts.notes == ([] if tokens else [stream.UNTOLD])
    assert (counts.prompt_tokens, counts.cached_tokens) == (prompt, cached)
    asked = "ids" if "return_token_ids" in body else "usage_delta" if "continuous" in name else "usage"
    assert counts.source == (asked if tokens else None)
    if asked != "usage":
        assert sum(event.tokens or 0 for event in counts.events) == tokens
    first = next(event for event in counts.events if "text" in event.kind)
    assert first.tokens == (1 if asked != "usage" else None)
    assert counts.events[0].kind.startswith("role" if name.startswith("chat") else "text")


def test_a_real_end_token_has_no_text_and_is_counted():
    _, counts = counted("chat-stop")
    assert [event for event in counts.events if "finish" in event.kind] == [
        stream.Event(counts.events[-3].t_s, "finish+usage", 0, 1)
    ]


def test_real_speculation_puts_several_tokens_into_an_event_and_tells_its_times():
    answer, counts = counted("text-speculation")
    assert max(event.tokens or 0 for event in counts.events) > 1
    assert len([event for event in counts.events if event.tokens]) < counts.output_tokens
    told = answer.timings["speculative_decoding"]
    # every step brings one token beside the accepted ones; the first token comes from the prefill
    assert told["num_spec_steps"] + told["num_accepted_draft_tokens"] <= counts.output_tokens
    assert answer.timings["generation_time_ms"] > 0


def shape(value):
    """What an event is made of: its keys and the kinds of their values, the words and numbers left out."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def shapes(data: list[bytes]) -> list:
    """The shapes of a stream's events in their order, equal ones in a row taken together."""
    found = [shape(json.loads(payload)) for payload in data if payload.strip() != sse.DONE]
    return [one for i, one in enumerate(found) if i == 0 or one != found[i - 1]]


@pytest.mark.parametrize("name", [name for name in REAL if "speculation" not in name])
def test_the_truth_servers_vllm_sends_what_the_real_one_sent(name):
    body, _, finish, prompt, cached = REAL[name]
    script = dialects.Script(
        dialect="vllm", chunks=[1] * 6, finish=finish, prompt_tokens=prompt or 36, cached_tokens=cached
    )
    reader = sse.Reader()
    sent = b"".join(event.data for event in dialects.answer(script, CHAT if "chat" in name else TEXT, body))
    assert shapes(reader.feed(sent)) == shapes(payloads(name))


@pytest.mark.parametrize(
    "name, http_status, word, said",
    [
        ("chat-long", 400, "context_overflow", "at least 8193 input tokens"),
        ("chat-wrong-key", 401, "http_error", "API key"),
        ("chat-bad-type", 400, "http_error", "valid integer"),
    ],
)
def test_a_real_refusal_of_vllm_is_understood(name, http_status, word, said):
    status, sentence, prompt_tokens = stream.refusal(http_status, (CAPTURED / f"{name}.json").read_bytes())
    assert status == word and said in sentence
    assert prompt_tokens is None  # "at least": the server stops counting at one too many


def test_the_truth_servers_vllm_refuses_a_long_prompt_in_the_real_ones_words():
    real = json.loads((CAPTURED / "chat-long.json").read_bytes())
    assert json.loads(dialects.overflow(dialects.Script(dialect="vllm"), 9000)) == real


def test_vllms_own_times_are_read_beside_the_clients(server):
    body = {"return_token_ids": True, "max_tokens": 40}
    record = put(server, dialect="vllm", metrics=True, chunks=[1] * 40, gap_s=0.004, ttft_s=0.05, body=body)
    assert metrics.decode_tps_server(record) == pytest.approx(250, rel=0.01)
    assert metrics.prefill_tps_server(record) == pytest.approx(300 / 0.05, rel=0.01)
    assert metrics.decode_tps_server(put(server, dialect="vllm", chunks=[1] * 40, body=body)) is None
