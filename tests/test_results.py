"""From records to result.json: intervals over rounds and boots, facts, flags; the same folder, the same result."""

import pytest

from llmrepro import intervals, parameters, results, run_folder
from llmrepro import run as runs
from llmrepro.client import Event, Record


def record(
    case="code_runs", repeat=0, *, workload="chat", boot=1, tps=100.0, n=48, ttft=0.2, prompt=55, **changes
):
    """An answer of n tokens, one per event, at an exact speed after an exact TTFT."""
    events = [Event(ttft + i / tps, "text", 4, 1) for i in range(n)]
    last = events[-1].t_s if events else None
    return Record(
        **{
            "server": "default",
            "boot": boot,
            "workload": workload,
            "case": case,
            "repeat": repeat,
            "warmup": False,
            "prompt_sha256": "0" * 64,
            "endpoint": "/v1/chat/completions",
            "request": {},
            "started_at": "2026-01-01T00:00:00.000+00:00",
            "t_send_ns": 0,
            "status": "ok",
            "error": None,
            "http_status": 200,
            "events": events,
            "t_done_s": last,
            "text": "a b c",
            "reasoning": "",
            "finish_reason": "length",
            "prompt_tokens": prompt,
            "cached_tokens": 0,
            "output_tokens": n,
            "output_tokens_source": "ids",
            "usage": None,
            "timings": None,
            "text_sha256": "0" * 64,
            **changes,
        }
    )


@pytest.fixture
def run(tmp_path):
    made = runs.create(parameters.checked({"runs_dir": str(tmp_path), "repeats": 3}))
    made.write_json("machine.json", {"load_1min": 0.5})
    made.write_json(
        "weights.json",
        {
            "path": "/w",
            "facts": {
                "model.sha256": made.recipe.model.files[0].sha256,
                "model.bytes": 98362432,
                "model.layers": 30,
                "model.context_tokens": 8192,
            },
        },
    )
    made.write_text("engine-freeze.txt", "xllamacpp==2026.10.11549\n")
    boot(made, 1)
    return made


def boot(run, number, **told):
    run.write_json(
        f"boots/{number}.json",
        {
            "server": "default",
            "replicate": number - 1,
            "threads": 1,
            **{
                "startup": {"startup.first_completion_s": 0.5 + number},
                "metrics": {"kv_bytes_per_token": 23040},
                **told,
            },
        },
    )


def row(result, metric, **where):
    found = [r for r in result["metrics"] if r["metric"] == metric and all(r[k] == v for k, v in where.items())]
    assert len(found) == 1, found
    return found[0]


CASES = ("code_runs", "explain_hash", "plan_move", "story_clocks", "story_orchard")


def test_an_interval_is_students(run):
    assert intervals.of([9.0, 10.0, 11.0]) == pytest.approx((10.0, 10 - 2.484, 10 + 2.484, 3), abs=1e-3)
    assert intervals.of([9.0]) == (9.0, None, None, 1)
    assert intervals.of([9.0, 11.0]) == (10.0, None, None, 2)  # t is 12.7 there: it would say nothing
    with pytest.raises(ValueError, match="no samples"):
        intervals.of([])


def test_several_boots_are_the_samples_and_not_their_rounds():
    one = intervals.over_boots({1: [9.0, 10.0, 11.0]})
    two = intervals.over_boots({1: [9.0, 10.0, 11.0], 2: [19.0, 20.0, 21.0]})
    assert one.n == 3
    assert two == pytest.approx(intervals.of([10.0, 20.0]))


def test_a_case_is_averaged_over_its_rounds(run):
    for repeat, tps in enumerate((90.0, 100.0, 110.0)):
        run.append(record(repeat=repeat, tps=tps))
    found = row(results.compute(run.path), "decode_tps", case="code_runs")
    assert found["value"] == pytest.approx(100.0)
    assert found["n"] == 3
    assert found["high"] - found["value"] == pytest.approx(24.84, abs=0.01)


def test_a_suite_is_the_mean_over_prompts_per_round_and_token_weighted_beside_it(run):
    for repeat in range(3):
        for case, tps in zip(CASES, (100.0, 100.0, 100.0, 100.0, 50.0), strict=True):
            run.append(record(case, repeat, tps=tps))
    result = results.compute(run.path)
    assert row(result, "decode_tps", case=None, statistic="mean_of_means")["value"] == pytest.approx(90.0)
    weighted = row(result, "decode_tps", case=None, statistic="token_weighted")
    assert weighted["value"] == pytest.approx(5 / (4 / 100 + 1 / 50))
    assert weighted["n"] == 3  # rounds, not requests


def test_a_round_that_lacks_a_case_is_no_round(run):
    for case in CASES:
        run.append(record(case, 0))
    run.append(record(CASES[0], 1))
    assert row(results.compute(run.path), "decode_tps", statistic="mean_of_means")["n"] == 1


def test_warm_ups_and_failures_are_kept_out_of_means_and_failures_are_told(run):
    run.append(record(repeat=0, tps=100.0))
    run.append(record("warmup", tps=1.0, warmup=True))
    run.append(record(repeat=1, tps=1.0, status="stream_error", error="cut"))
    result = results.compute(run.path)
    assert row(result, "decode_tps", case="code_runs")["value"] == pytest.approx(100.0)
    assert result["requests"]["chat"] == {"ok": 1, "stream_error": 1}
    assert result["flags"] == [
        "1 of 2 requests failed (1 stream error); no mean includes them",
        "1 of 2 rounds of chat lack an answer; no suite value includes them",
    ]


def test_the_slope_of_ttft_is_a_prefill_speed_without_the_fixed_part(run):
    for repeat in range(3):
        for length in (128, 256, 512):
            run.append(
                record(
                    str(length),
                    repeat,
                    workload="prefill",
                    n=4,
                    prompt=length,
                    ttft=0.3 + length / 200 + repeat / 1000,
                )
            )
    result = results.compute(run.path)
    assert row(result, "prefill_tps.slope")["value"] == pytest.approx(200.0, rel=1e-3)
    assert row(result, "prefill_tps", case="512")["value"] < 190
    assert not [r for r in result["metrics"] if r["metric"] == "prefill_tps" and r["case"] == "128"]


def test_start_up_is_averaged_over_boots(run):
    boot(run, 2)
    found = row(results.compute(run.path), "startup.first_completion_s")
    assert (found["value"], found["n"], found["boots"]) == (2.0, 2, 2)


def test_a_fact_that_varies_has_no_value_and_says_why(run):
    boot(run, 2, metrics={"kv_bytes_per_token": 1})
    result = results.compute(run.path)
    found = row(result, "kv_bytes_per_token")
    assert found["value"] is None
    assert found["note"] == "it varied: [1, 23040]"
    verdict = next(v for v in result["verdicts"] if v["claim"] == "kv-bytes")
    assert (verdict["word"], verdict["reason"]) == ("not_evaluated", "it varied: [1, 23040]")


def test_a_drifting_machine_is_told(run):
    for repeat in range(3):
        for case in CASES:
            run.append(record(case, repeat, tps=100.0 - 10 * repeat))
    assert any("decode speed of chat drifts by -11" in f for f in results.compute(run.path)["flags"])


def test_one_token_over_and_over_is_told(run):
    run.append(record(text="a " * 48))
    run.append(record(text="a a a a", n=4))  # a few tokens cannot tell
    assert any("one token over and over" in f for f in results.compute(run.path)["flags"])


def test_an_answer_without_a_word_is_no_fault(run):
    run.append(record(text=""))
    assert results.compute(run.path)["flags"] == []


def test_a_busy_machine_is_told(run):
    run.write_json("machine.json", {"cpu": {"usable_cpus": 2}})
    boot(run, 2, machine={"load_before": 1.4, "steal_share": 0.01})
    boot(run, 3, machine={"load_before": 9.0, "steal_share": 0.2})
    flags = results.compute(run.path)["flags"]
    assert flags == [
        "boot 3: the machine was busy before it, load 9 on 2 CPUs; close what else runs",
        "boot 3: the hypervisor took 20% of the CPU's time; choose a calmer hour",
    ]


def test_the_server_that_counts_otherwise_is_told(run):
    run.append(record(tps=100.0, timings={"predicted_n": 48, "predicted_ms": 47 / 80 * 1000}))
    assert any("the client says 100.0, the server 80.0 tok/s" in f for f in results.compute(run.path)["flags"])


def test_the_same_folder_gives_the_same_result_and_names_what_it_read(run):
    run.append(record())
    first = results.compute(run.path)
    assert results.compute(run.path) == first
    assert first["inputs"]["records.jsonl"] == run_folder.sha256_of(run.path / "records.jsonl")
    assert set(first["inputs"]) == {
        "recipe.json",
        "recipe.committed.json",
        "machine.json",
        "weights.json",
        "records.jsonl",
        "boots/1.json",
    }


def test_a_run_that_measured_nothing_has_a_result_too(tmp_path):
    made = runs.create(parameters.checked({"runs_dir": str(tmp_path), "mode": "published"}))
    made.write_json("machine.json", {})
    result = results.compute(made.path)
    assert {v["word"] for v in result["verdicts"]} == {"not_evaluated"}
    assert result["metrics"] == []


def test_a_boot_that_goes_on_for_a_dead_one_continues_its_rounds(run):
    """One replicate in two boots: its rounds are whole, and it is one boot in the interval."""
    boot(run, 2, replicate=0)
    for repeat in range(3):
        for place, case in enumerate(CASES):
            run.append(record(case, repeat, boot=1 if (repeat, place) < (1, 2) else 2))
    result = results.compute(run.path)
    found = row(result, "decode_tps", case=None, statistic="mean_of_means")
    assert (found["n"], found["boots"]) == (3, 1)
    assert result["flags"] == []


def test_a_record_that_stands_twice_is_told(run):
    for _ in range(2):
        run.append(record())
    assert any("stand more than once" in f for f in results.compute(run.path)["flags"])


def test_the_slope_of_several_boots_is_over_the_boots(run):
    for n, speed in enumerate((100.0, 200.0, 300.0), 1):
        boot(run, n)
        for repeat in range(3):
            for length in (128, 256, 512):
                ttft = length / speed + repeat / 1e5
                run.append(record(str(length), repeat, workload="prefill", n=4, prompt=length, ttft=ttft, boot=n))
    found = row(results.compute(run.path), "prefill_tps.slope")
    assert (found["value"], found["n"], found["boots"]) == (pytest.approx(200.0, rel=1e-3), 3, 3)
    assert found["high"] - found["value"] == pytest.approx(248.4, rel=1e-2)


@pytest.mark.parametrize("timing", [10**400, 5e-324, 1e300, -1, True])
def test_an_impossible_timing_is_no_value(run, timing):
    run.append(record(timings={"predicted_n": 48, "predicted_ms": timing, "prompt_n": timing, "prompt_ms": 1.0}))
    assert not [r for r in results.compute(run.path)["metrics"] if r["metric"] == "decode_tps.server"]
