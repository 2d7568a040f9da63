"""From records to result.json: intervals over rounds and boots, facts, flags; the same folder, the same result."""

import pytest
from folders import CASES, LENGTHS, boot, folder, record

from llmrepro import intervals, results, run_folder


def computed(tmp_path, records=(), boots=None, **more) -> dict:
    return results.compute(folder(tmp_path, records, boots, result=False, **more))


def row(result, metric, **where):
    found = [r for r in result["metrics"] if r["metric"] == metric and all(r[k] == v for k, v in where.items())]
    assert len(found) == 1, found
    return found[0]


def lengths(boot=1, *, tps, fixed_s=0.0, jitter_s=1e-3) -> list:
    """Three rounds over the lengths: a fixed part, and the prompt's tokens at `tps`, each round a jitter later."""
    return [
        record(
            str(n),
            repeat,
            workload="prefill",
            boot=boot,
            n=4,
            prompt=n,
            ttft_s=fixed_s + n / tps + repeat * jitter_s,
        )
        for repeat in range(3)
        for n in LENGTHS
    ]


def test_an_interval_is_students():
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


def test_a_case_is_averaged_over_its_rounds(tmp_path):
    asked = [record(repeat=repeat, tps=tps) for repeat, tps in enumerate((90.0, 100.0, 110.0))]
    found = row(computed(tmp_path, asked), "decode_tps", case="code_runs")
    assert found["value"] == pytest.approx(100.0)
    assert found["n"] == 3
    assert found["high"] - found["value"] == pytest.approx(24.84, abs=0.01)


def test_a_suite_is_the_mean_over_prompts_per_round_and_token_weighted_beside_it(tmp_path):
    speeds = dict(zip(CASES, (100.0, 100.0, 100.0, 100.0, 50.0), strict=True))
    result = computed(tmp_path, [record(c, r, tps=tps) for r in range(3) for c, tps in speeds.items()])
    assert row(result, "decode_tps", case=None, statistic="mean_of_means")["value"] == pytest.approx(90.0)
    weighted = row(result, "decode_tps", case=None, statistic="token_weighted")
    assert weighted["value"] == pytest.approx(5 / (4 / 100 + 1 / 50))
    assert weighted["n"] == 3  # rounds, not requests


def test_a_round_that_lacks_a_case_is_no_round(tmp_path):
    asked = [*(record(case, 0) for case in CASES), record(CASES[0], 1)]
    assert row(computed(tmp_path, asked), "decode_tps", statistic="mean_of_means")["n"] == 1


def test_warm_ups_and_failures_are_kept_out_of_means_and_failures_are_told(tmp_path):
    asked = [
        record(repeat=0, tps=100.0),
        record("warmup", tps=1.0, warmup=True),
        record(repeat=1, tps=1.0, status="stream_error", error="cut"),
    ]
    result = computed(tmp_path, asked)
    assert row(result, "decode_tps", case="code_runs")["value"] == pytest.approx(100.0)
    assert result["requests"]["chat"] == {"ok": 1, "stream_error": 1}
    assert result["flags"] == [
        "1 of 2 requests failed (1 stream error); no mean includes them",
        "1 of 2 rounds of chat lack an answer; no suite value includes them",
    ]


def test_the_slope_of_ttft_is_a_prefill_speed_without_the_fixed_part(tmp_path):
    result = computed(tmp_path, lengths(tps=200, fixed_s=0.3))
    assert row(result, "prefill_tps.slope")["value"] == pytest.approx(200.0, rel=1e-3)
    assert row(result, "prefill_tps", case="512")["value"] < 190
    assert not [r for r in result["metrics"] if r["metric"] == "prefill_tps" and r["case"] == "128"]


def test_start_up_is_averaged_over_boots(tmp_path):
    result = computed(tmp_path, boots=[boot(), boot(replicate=1, scale=3.0)])
    found = row(result, "startup.first_completion_s")
    assert (found["value"], found["n"], found["boots"]) == (pytest.approx(2 * 0.6), 2, 2)


def test_a_fact_that_varies_has_no_value_and_says_why(tmp_path):
    result = computed(tmp_path, boots=[boot(), boot(replicate=1, metrics={"kv_bytes_per_token": 1})])
    found = row(result, "kv_bytes_per_token")
    assert found["value"] is None
    assert found["note"] == "it varied: [1, 23040]"
    verdict = next(v for v in result["verdicts"] if v["claim"] == "kv-bytes")
    assert (verdict["word"], verdict["reason"]) == ("not_evaluated", "it varied: [1, 23040]")


def test_a_drifting_machine_is_told(tmp_path):
    asked = [record(case, repeat, tps=100.0 - 10 * repeat) for repeat in range(3) for case in CASES]
    assert any("decode speed of chat drifts by -11" in f for f in computed(tmp_path, asked)["flags"])


def test_one_token_over_and_over_is_told(tmp_path):
    asked = [record(text="a " * 48), record("plan_move", text="a a a a", n=4)]  # a few tokens cannot tell
    assert "1 of 2 answers are one token over and over" in computed(tmp_path, asked)["flags"]


def test_an_answer_without_a_word_is_no_fault(tmp_path):
    assert computed(tmp_path, [record(text="")])["flags"] == []


def test_a_busy_machine_is_told(tmp_path):
    meanwhile = [(0.05, 0.0), (None, 0.01), (1.3, 0.2)]  # CPUs of others, share of steal
    boots = [
        boot(replicate=n, machine={"other_cpus": others, "steal_share": steal})
        for n, (others, steal) in enumerate(meanwhile)
    ]
    flags = computed(tmp_path, boots=boots, machine={"cpu": {"usable_cpus": 2}})["flags"]
    assert flags == [
        "boot 3: other programs kept 1.3 of 2 CPUs busy meanwhile; close what else runs",
        "boot 3: the hypervisor took 20% of the CPU's time; choose a calmer hour",
    ]


def test_a_boot_whose_file_is_gone_is_told(tmp_path):
    flags = computed(tmp_path, [record(boot=1), record(boot=2)], [boot(replicate=0)])["flags"]
    assert "boot 2: its file is missing, the folder was changed by hand" in flags


def test_the_server_that_counts_otherwise_is_told(tmp_path):
    asked = [record(tps=100.0, timings={"predicted_n": 48, "predicted_ms": 47 / 80 * 1000})]
    assert any("the client says 100.0, the server 80.0 tok/s" in f for f in computed(tmp_path, asked)["flags"])


def test_the_same_folder_gives_the_same_result_and_names_what_it_read(tmp_path):
    path = folder(tmp_path, [record()])
    first = results.compute(path)
    assert results.compute(path) == first == run_folder.read_json(path / "result.json")
    assert first["inputs"]["records.jsonl"] == run_folder.sha256_of(path / "records.jsonl")
    assert set(first["inputs"]) == {
        "recipe.json",
        "recipe.committed.json",
        "machine.json",
        "weights.json",
        "records.jsonl",
        "boots/1.json",
    }


def test_a_run_that_measured_nothing_has_a_result_too(tmp_path):
    result = computed(tmp_path, parameters={"mode": "published"}, machine={}, outcome="lacking")
    assert {v["word"] for v in result["verdicts"]} == {"not_evaluated"}
    assert result["metrics"] == []


def test_a_boot_that_goes_on_for_a_dead_one_continues_its_rounds(tmp_path):
    """One replicate in two boots: its rounds are whole, and it is one boot in the interval."""
    asked = [
        record(case, repeat, boot=1 if (repeat, place) < (1, 2) else 2)
        for repeat in range(3)
        for place, case in enumerate(CASES)
    ]
    result = computed(tmp_path, asked, [boot(), boot()])
    found = row(result, "decode_tps", case=None, statistic="mean_of_means")
    assert (found["n"], found["boots"]) == (3, 1)
    assert result["flags"] == []


def test_a_record_that_stands_twice_is_told(tmp_path):
    assert any("stand more than once" in f for f in computed(tmp_path, [record(), record()])["flags"])


def test_the_slope_of_several_boots_is_over_the_boots(tmp_path):
    asked = [one for n, tps in enumerate((180.0, 200.0, 220.0), 1) for one in lengths(n, tps=tps, jitter_s=1e-5)]
    result = computed(tmp_path, asked, [boot(replicate=n) for n in range(3)])
    found = row(result, "prefill_tps.slope")
    assert (found["value"], found["n"], found["boots"]) == (pytest.approx(200.0, rel=1e-3), 3, 3)
    assert found["high"] - found["value"] == pytest.approx(49.7, rel=2e-2)


def test_speeds_too_scattered_for_an_interval_get_none(tmp_path):
    asked = [one for n, tps in enumerate((100.0, 200.0, 300.0), 1) for one in lengths(n, tps=tps, jitter_s=1e-5)]
    found = row(computed(tmp_path, asked, [boot(replicate=n) for n in range(3)]), "prefill_tps.slope")
    assert (found["value"], found["low"], found["high"]) == (pytest.approx(200.0, rel=1e-3), None, None)


@pytest.mark.parametrize("timing", [10**400, 5e-324, 1e300, -1, True])
def test_an_impossible_timing_is_no_value(tmp_path, timing):
    asked = [record(timings={"predicted_n": 48, "predicted_ms": timing, "prompt_n": timing, "prompt_ms": 1.0})]
    assert not [r for r in computed(tmp_path, asked)["metrics"] if r["metric"] == "decode_tps.server"]
