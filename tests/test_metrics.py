"""The definitions on records written by hand, so that each number can be checked on paper."""

import pytest

from llmrepro import metrics, terms
from llmrepro.client import Event, Record


def record(events=(), **more) -> Record:
    base = {
        "server": "",
        "boot": 0,
        "workload": "",
        "case": "",
        "repeat": 0,
        "warmup": False,
        "prompt_sha256": "",
        "endpoint": "/v1/chat/completions",
        "request": {},
        "started_at": "",
        "t_send_ns": 0,
        "status": "ok",
        "finish_reason": "length",
    }
    return Record(**base | more, events=[Event(*event) for event in events])


def told(chunks, first_s=0.5, gap_s=0.1):
    """Text events that tell their tokens, one each `gap_s`, then the finish at once."""
    events = [(0.4, "role", 0, 0)] + [(first_s + i * gap_s, "text", 4 * k, k) for i, k in enumerate(chunks)]
    return [*events, (events[-1][0], "finish", 0, None), (events[-1][0] + 1, "done", 0, None)]


def untold(chunks, **times):
    return [(t_s, kind, chars, None) for t_s, kind, chars, _ in told(chunks, **times)]


def test_the_first_chunks_tokens_are_no_part_of_the_rate():
    # 8 tokens at 0.5 s, then 50 in 10 events of 0.1 s: 50 / 1.0 s; (N-1) would read 57 / 1.0, 14 % faster.
    asked = record(told([8] + [5] * 10), output_tokens=58)
    assert metrics.k0(asked) == 8
    assert metrics.decode_tps(asked) == pytest.approx(50.0)
    assert metrics.decode_tps_bound(asked) == 0.0


def test_tokens_before_the_first_text_belong_to_k0():
    events = [(0.3, "empty", 0, 2), *told([1] * 20)]
    assert metrics.k0(record(events, output_tokens=22)) == 3


def test_an_unknown_k0_counts_one_and_says_how_far_off_that_may_be():
    asked = record(untold([8] + [5] * 10), output_tokens=58)
    assert metrics.k0(asked) is None
    assert metrics.decode_tps(asked) == pytest.approx(57.0)
    bound = metrics.decode_tps_bound(asked)
    # the largest event holds 32 of 232 characters: 8 of 58 tokens, so the truth may be 7/57 lower: 50
    assert bound == pytest.approx(7 / 57)
    assert metrics.decode_tps(asked) * (1 - bound) == pytest.approx(50.0)


def test_one_token_per_event_leaves_nothing_unknown():
    events = [(0.5 + i, "text", 12 if i == 3 else 1, None) for i in range(20)]
    assert metrics.decode_tps_bound(record(events, output_tokens=20)) == 0.0


def test_the_end_token_moves_t_last_to_the_finish():
    events = [(0.5 + 0.1 * i, "text", 4, None) for i in range(20)] + [
        (2.5, "finish", 0, None),
        (2.5, "usage", 0, None),
    ]
    stopped = record(events, output_tokens=21, finish_reason="stop")
    assert metrics.t_last_s(stopped) == 2.5 and metrics.decode_tps(stopped) == pytest.approx(10.0)
    full = record(events, output_tokens=20)
    assert metrics.t_last_s(full) == pytest.approx(2.4) and metrics.decode_tps(full) == pytest.approx(10.0)


def test_counts_told_after_the_finish_belong_to_the_finish():
    events = [(0.5 + 0.1 * i, "text", 4, 1) for i in range(20)] + [(2.5, "finish", 0, None), (3.5, "usage", 0, 1)]
    stopped = record(events, output_tokens=21, finish_reason="stop")
    assert metrics.t_last_s(stopped) == 2.5 and metrics.decode_tps(stopped) == pytest.approx(10.0)


@pytest.mark.parametrize(
    "events, n",
    [
        ([], None),
        (told([1] * 20), None),  # no count, no rate
        (told([1] * 16), 16),
        (untold([1] * 16), 16),  # 15 after the first
        (told([40]), 40),
        (untold([40]), 40),  # a single event has no duration
        ([(0.5, "text", 160, None), (0.9, "finish", 0, None)], 40),
        ([(0.5, "text", 4, 1), (0.5, "text", 80, 30)], 31),  # one read
        ([(0.4, "role", 0, None), (0.5, "done", 0, None)], 0),
    ],
)
@pytest.mark.parametrize("finish_reason", ["length", "stop"])
def test_no_decode_rate_where_it_would_be_a_guess(events, n, finish_reason):
    asked = record(events, output_tokens=n, finish_reason=finish_reason)
    assert metrics.decode_tps(asked) is None and metrics.decode_tps_bound(asked) is None


def test_sixteen_tokens_after_the_first_are_enough():
    assert metrics.decode_tps(record(told([1] * 17), output_tokens=17)) == pytest.approx(10.0)


def test_a_count_that_lags_behind_the_text_tells_no_k0():
    assert metrics.k0(record([(0.5, "text", 4, 0), (0.6, "text", 4, 2)], output_tokens=2)) is None


def test_the_publications_rate_runs_to_the_end_of_the_stream():
    asked = record(told([8] + [5] * 10), output_tokens=58, t_done_s=2.5)
    assert metrics.decode_tps_published_2026_10(asked) == pytest.approx(57 / 2.0)
    assert metrics.decode_tps_published_2026_10(record(told([1] * 20), output_tokens=20)) is None


def test_end_to_end_counts_all_tokens_over_all_the_time():
    assert metrics.e2e_tps(record(told([1] * 20), output_tokens=20)) == pytest.approx(20 / 2.4)


def test_first_event_first_token_first_answer():
    events = [
        (0.1, "ping", 0, None),
        (0.2, "role", 0, None),
        (0.3, "empty", 0, 1),
        (0.4, "reasoning", 4, 1),
        (0.5, "empty", 0, 1),
        (0.6, "text", 4, 1),
    ]
    asked = record(events)
    assert [metrics.ttfr_s(asked), metrics.ttft_s(asked), metrics.ttfat_s(asked)] == [0.1, 0.4, 0.6]
    assert metrics.ttfat_s(record(told([1] * 3))) is None
    assert metrics.ttft_s(record([(0.1, "role", 0, None), (0.2, "tool", 0, None)])) == 0.2


def test_reasoning_is_counted_up_to_the_answer_and_timed_to_it():
    thought = [(0.2, "role", 0, None), (0.5, "reasoning", 4, 3), (0.6, "empty", 0, 1), (0.7, "reasoning", 4, 2)]
    answer = [(0.8, "empty", 0, 1), (0.9, "text", 4, 1), (1.0, "reasoning", 4, 5), (1.1, "text", 4, 1)]
    asked = record([*thought, *answer])
    assert metrics.reasoning_tokens(asked) == 6 and metrics.reasoning_s(asked) == pytest.approx(0.4)
    assert metrics.reasoning_tokens(record(thought)) == 6 and metrics.reasoning_s(record(thought)) is None
    both = record([*thought, (0.8, "text+reasoning", 9, 4), (0.9, "text", 4, 1)])
    assert metrics.reasoning_tokens(both) == 10 and metrics.reasoning_s(both) == pytest.approx(0.3)
    untold = record([(t_s, kind, chars, None) for t_s, kind, chars, _ in thought + answer], output_tokens=14)
    assert metrics.reasoning_tokens(untold) is None and metrics.reasoning_s(untold) == pytest.approx(0.4)
    for without in (record(told([1] * 3)), record()):
        assert metrics.reasoning_tokens(without) is metrics.reasoning_s(without) is None


def test_prefill_leaves_the_cached_tokens_out():
    asked = {"events": told([1] * 20), "prompt_tokens": 512}
    assert metrics.prefill_tps(record(**asked, cached_tokens=0)) == pytest.approx(1024.0)
    assert metrics.prefill_tps(record(**asked, cached_tokens=112)) == pytest.approx(800.0)
    assert metrics.prefill_tps(record(**asked)) is None  # unknown is not zero
    assert metrics.prefill_tps_published_2026_10(record(**asked)) == pytest.approx(1024.0)


@pytest.mark.parametrize("n, known", [(255, False), (256, True), (None, False)])
def test_a_short_prompt_has_no_prefill_rate(n, known):
    asked = record(told([1] * 20), prompt_tokens=n, cached_tokens=0, timings={"prompt_n": n, "prompt_ms": 100.0})
    assert (metrics.prefill_tps(asked) is not None) == known
    assert (metrics.prefill_tps_server(asked) is not None) == known


def test_the_servers_rates_are_recomputed_from_its_raw_counts():
    timings = {
        "cache_n": 12,
        "prompt_n": 500,
        "prompt_ms": 250.0,
        "prompt_per_second": 1.0,
        "predicted_n": 41,
        "predicted_ms": 400.0,
        "predicted_per_second": 102.5,
    }
    asked = record(prompt_tokens=512, timings=timings)
    assert metrics.decode_tps_server(asked) == pytest.approx(100.0)
    assert metrics.prefill_tps_server(asked) == pytest.approx(2000.0)
    assert metrics.acceptance(asked) is None
    assert metrics.acceptance(record(timings=timings | {"draft_n": 40, "draft_n_accepted": 30})) == 0.75
    assert metrics.acceptance(record(timings={"draft_n": 0, "draft_n_accepted": 0})) is None


@pytest.mark.parametrize("bad", [None, "9", True, -1, float("inf"), float("nan"), 0, [1]])
def test_timings_that_are_no_numbers_give_no_rate(bad):
    asked = record(
        prompt_tokens=512,
        timings={
            "prompt_n": 512,
            "prompt_ms": bad,
            "predicted_n": 99,
            "predicted_ms": bad,
            "draft_n": bad,
            "draft_n_accepted": 1,
        },
    )
    assert metrics.decode_tps_server(asked) is None and metrics.prefill_tps_server(asked) is None
    assert metrics.acceptance(asked) is None


def test_repetition_is_the_share_of_the_commonest_word():
    assert metrics.repetition_share(record(text="no " * 18 + "yes maybe")) == pytest.approx(0.9)
    assert metrics.repetition_share(record(text="これはよい文です")) < 0.5  # no spaces is no repetition
    assert metrics.repetition_share(record(text="Привет мир")) == 0.5
    assert metrics.repetition_share(record()) is None
    assert metrics.repetition_share(record(text="a b", same_token_share=0.95)) == 0.95


def test_an_empty_record_has_no_number_at_all():
    assert {name: definition(record()) for name, definition in metrics.DEFINITIONS.items()} == dict.fromkeys(
        metrics.DEFINITIONS
    )


def test_every_request_metric_of_the_vocabulary_is_defined():
    """All but the outcome, which is a request's status and no number."""
    wanted = {name for name, metric in terms.METRICS.items() if metric.of == "request"} - {"outcome"}
    assert wanted <= set(metrics.DEFINITIONS)
