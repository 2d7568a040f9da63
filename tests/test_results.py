"""From records to result.json: intervals over rounds and boots, facts, flags; the same folder, the same result."""

import pytest
from folders import CASES, LENGTHS, MACHINE, boot, chat, failure, folder, record

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


def test_a_row_keeps_what_its_interval_is_made_of(tmp_path):
    asked = [
        record(repeat=r, boot=b, tps=tps)
        for b, of in ((1, (99.0, 101.0)), (2, (110.0,)))
        for r, tps in enumerate(of)
    ]
    found = row(computed(tmp_path, asked, [boot(), boot(replicate=1)]), "decode_tps", case="code_runs")
    assert (found["rounds"], found["by_boot"]) == (3, pytest.approx([100.0, 110.0]))
    assert found["within"] == pytest.approx(0.01 * 2**0.5)  # one degree of freedom
    assert (found["least"], found["greatest"], found["output_tokens"]) == (
        pytest.approx(99.0),
        pytest.approx(110.0),
        48,
    )


def test_how_a_slope_is_told_of_one_boot_is_its_fits_own_interval(tmp_path):
    found = row(computed(tmp_path, lengths(tps=200, jitter_s=5e-3)), "prefill_tps.slope")
    half = intervals.quantile(found["rounds"] - 1) * found["within"] / found["rounds"] ** 0.5
    assert half == pytest.approx((found["high"] - found["low"]) / 2 / found["value"], rel=0.02)


def claiming(*claims):
    """The default recipe with these claims alone, each a metric of the case code_runs unless it says otherwise."""

    def change(recipe):
        usual = {"server": "default", "workload": "chat", "case": "code_runs"}
        told = {"unit": "tok/s", "evidence": "measured", "locator": "page 1"}
        recipe["claims"] = [{"id": f"c{n}", **usual, **told, **c} for n, c in enumerate(claims)]
        recipe["comparisons"] = []

    return change


def verdicts(result):
    return {v["claim"]: (v["word"], v["reason"]) for v in result["verdicts"]}


def test_a_publications_own_definition_is_told_of_each_case_where_it_is_claimed(tmp_path):
    metric = {"metric": "decode_tps.published_2026_10", "value": {"about": 100.0}}
    result = computed(tmp_path, [record(repeat=r) for r in range(3)], change=claiming(metric))
    assert row(result, "decode_tps.published_2026_10", case="code_runs")["value"] == pytest.approx(100.0, rel=0.05)
    assert verdicts(result)["c0"][0] == "reproduced"
    bare = computed(tmp_path / "bare", [record()])
    assert not [r for r in bare["metrics"] if r["metric"].endswith("2026_10") and r["case"]]


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([{}, {"n": 20}], "1 of 2 answers have not the 48 tokens asked for under ignore_eos (one has 20)"),
        ([{"same_token_share": 0.95}, {}], "1 of 2 answers are one token for 90% or more of their length"),
    ],
)
def test_answers_that_were_not_asked_for_gate_a_speed_and_no_other_claim(tmp_path, records, why):
    claims = (
        {"metric": "decode_tps", "value": {"point": 100.0}},
        {"metric": "ttft_s", "unit": "s", "value": {"point": 0.2}},
        {"metric": "prompt_tokens", "unit": "tok", "value": {"exact": 55}},
    )
    (tmp_path / "new").mkdir()
    asked = [record(repeat=n, **changes) for n, changes in enumerate(records)]
    said = verdicts(computed(tmp_path / "new", asked, change=claiming(*claims)))
    assert (said["c0"][0], said["c0"][1].partition(";")[0]) == ("not_evaluated", why)
    assert [said[c][0] for c in ("c1", "c2")] == ["reproduced", "reproduced"]


def test_one_word_over_and_over_is_told_and_no_gate_where_token_ids_are_not(tmp_path):
    claims = {"metric": "decode_tps", "value": {"point": 100.0}}
    asked = [record(repeat=n, text="a " * 48) for n in range(3)]
    result = computed(tmp_path, asked, change=claiming(claims))
    assert verdicts(result)["c0"][0] == "reproduced"
    assert "3 of 3 answers are one token over and over" in result["flags"]


def test_how_a_case_ended_is_a_row_and_a_death_that_was_asked_again_is_told(tmp_path):
    asked = [
        record(repeat=0),
        failure("code_runs", 1),
        record(repeat=1),
        record("plan_move", prompt=59),
        failure("plan_move", 1),
        failure("plan_move", 1),
    ]
    claims = (
        {"metric": "outcome", "unit": "", "value": {"completed_to": 55}},
        {"metric": "outcome", "unit": "", "value": {"failed_at": 59}, "case": "plan_move"},
        {"metric": "outcome", "unit": "", "value": {"completed_to": 59}, "case": "plan_move"},
    )

    def twice(recipe):
        claiming(*claims)(recipe)
        recipe["workloads"][0]["repeats"] = 2

    result = computed(tmp_path, asked, change=twice)
    fine, dead = (row(result, "outcome", case=c) for c in ("code_runs", "plan_move"))
    assert (fine["value"], fine["prompt_tokens"], fine["n"]) == ("ok", 55, 2)
    assert fine["note"] == "2 of 2 requests answered; 1 died and was asked again"
    assert (dead["value"], dead["prompt_tokens"]) == ("engine_died", 59)
    assert dead["note"].startswith("1 of 2 requests answered; engine died: killed by signal 9")
    assert [v[0] for v in verdicts(result).values()] == ["reproduced", "reproduced", "not_reproduced"]


def test_windows_of_the_log_are_rows_where_they_are_claimed(tmp_path):
    windows = [
        {"at_s": 1.0 * n, "prompt_tps": 0.0, "generation_tps": tps} for n, tps in enumerate((0.0, 30.0, 50.0))
    ]
    log = {"workload": None, "case": None, "statistic": "log_window", "metric": "log_window.generation_tps"}
    claims = ({**log, "value": {"range": (35.0, 45.0)}}, {**log, "value": {"peak": 50.0}})
    result = computed(tmp_path, boots=[boot(log_window=windows)], change=claiming(*claims))
    found = row(result, "log_window.generation_tps")
    assert (found["value"], found["greatest"], found["rounds"]) == (40.0, 50.0, 2)  # idle ones say nothing
    assert verdicts(result)["c1"][0] == "reproduced"


def test_gibibytes_that_vary_a_little_over_boots_have_a_mean(tmp_path):
    metrics = ({"memory.kv_gib": 20.1}, {"memory.kv_gib": 20.3})
    boots = [boot(replicate=n, metrics=told) for n, told in enumerate(metrics)]
    about = {"metric": "memory.kv_gib", "unit": "GiB", "workload": None, "case": None, "value": {"about": 20.2}}
    result = computed(tmp_path, boots=boots, change=claiming(about))
    assert row(result, "memory.kv_gib")["value"] == pytest.approx(20.2)
    assert verdicts(result)["c0"][0] == "reproduced"


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        ({"outcome": "lacking", "reason": "needs a GPU with 60 GiB"}, "lacking: needs a GPU with 60 GiB"),
        ({"outcome": "failed", "reason": "no port"}, "failed in the stage measure: no port"),
    ],
)
def test_a_run_that_did_not_get_there_gives_its_reason_for_every_claim(tmp_path, ended, reason):
    result = computed(tmp_path, **ended)
    assert {(v["word"], v["reason"]) for v in result["verdicts"]} == {("not_evaluated", reason)}
    assert {(c["word"], c["reason"]) for c in result["comparisons"]} == {("not_evaluated", reason)}


def test_a_run_that_was_stopped_judges_what_it_has(tmp_path):
    claims = [{"metric": "prompt_tokens", "unit": "tok", "value": {"exact": 55}, "case": c} for c in CASES[:2]]
    ended = {"outcome": "stopped", "reason": "by a person"}
    said = verdicts(computed(tmp_path, [record()], change=claiming(*claims), **ended))
    assert said["c0"] == ("reproduced", "equal")
    assert said["c1"] == ("not_evaluated", "stopped in the stage measure: by a person")


def test_a_rate_above_the_bandwidth_roofline_gets_no_verdict_where_the_bandwidth_can_be_trusted(tmp_path):
    """98 MB of weights at 48 tok/s take 4.7 GB/s; a machine of 1 GB/s and a small cache cannot have read them."""

    def claimed(recipe):
        recipe["claims"] = [
            {"id": "speed", "metric": "decode_tps", "statistic": "mean_of_means", "server": "default"}
            | {"workload": "chat", "value": {"point": 100.0}, "unit": "tok/s", "evidence": "stated"}
            | {"locator": "nowhere but here"}
        ]
        attention = {"full_layers": 30, "kv_heads": 3, "head_dim": 64, "locator": "its metadata"}
        read = {"bytes_per_token": 98_000_000, "locator": "its size"}
        recipe["model"]["shape"] = {"attention": attention, "read": read}

    words = {}
    for name, others in (("quiet", 0.0), ("busy", 1.5)):
        memory = {"bandwidth_gb_s": 1.0, "bandwidth": {"fastest_gb_s": 1.0, "other_cpus": others}}
        machine = {**MACHINE, "memory": {**MACHINE["memory"], **memory}}
        machine["cpu"] = {**machine["cpu"], "l3_mib": 1}
        (tmp_path / name).mkdir()
        path = folder(tmp_path / name, chat(), change=claimed, machine=machine)
        result = results.compute(path)
        words[name] = result["verdicts"][0]["reason"]
        assert any("above the bandwidth roofline" in flag for flag in result["flags"])
    assert "above the bandwidth roofline" in words["quiet"]
    assert "above the bandwidth roofline" not in words["busy"]


@pytest.mark.parametrize(
    ("asked", "word", "said"),
    [
        (5, "reproduced", "completes here with 55 tokens: 5 of 5 requests answered"),
        (1, "not_evaluated", "not every request was asked: 1 of 5 asked; 1 of 1 requests answered"),
    ],
)
def test_what_was_skipped_or_is_missing_completes_nothing(tmp_path, asked, word, said):
    """A skipped request has a record, one that the run never came to has none."""
    about = {"metric": "outcome", "unit": "", "value": {"completed_to": 55}}
    skipped = {"status": "skipped", "error": "too slow", "events": [], "t_done_s": None, "output_tokens": None}
    records = [record(repeat=n, **({} if n < asked else skipped)) for n in range(max(asked, 3))]
    assert verdicts(computed(tmp_path, records, change=claiming(about)))["c0"] == (word, said)


@pytest.mark.parametrize(
    ("status", "http", "words"),
    [
        *((s, None, ("reproduced", "not_reproduced")) for s in ("context_overflow", "oom", "engine_died")),
        *(("http_error", http, ("reproduced", "not_reproduced")) for http in (400, 413)),
        *(("http_error", http, ("not_evaluated",) * 2) for http in (401, 429, 500)),
        *((s, None, ("not_evaluated",) * 2) for s in ("timeout", "stream_error")),
    ],
)
def test_only_what_an_engine_does_at_a_length_is_how_it_fails_there(tmp_path, status, http, words):
    claims = [{"metric": "outcome", "unit": "", "value": {form: 55}} for form in ("failed_at", "completed_to")]
    records = [failure("code_runs", n, status=status, http_status=http, error="so it said") for n in range(5)]
    records = [r.model_copy(update={"prompt_tokens": 55}) for r in records]
    result = computed(tmp_path, records, change=claiming(*claims))
    said = verdicts(result)
    assert tuple(said[c][0] for c in ("c0", "c1")) == words
    assert "so it said" in said["c0"][1]
    assert row(result, "outcome")["http_status"] == http


def test_an_engines_own_failure_goes_before_a_timeout_of_the_same_prompt(tmp_path):
    about = {"metric": "outcome", "unit": "", "value": {"failed_at": 55}}
    records = [failure("code_runs", 0, status="timeout"), failure("code_runs", 1)]
    result = computed(tmp_path, records, change=claiming(about))
    assert (row(result, "outcome")["value"], verdicts(result)["c0"][0]) == ("engine_died", "reproduced")


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([record(repeat=n) for n in (0, 1, 2, 2)], "1 requests stand more than once in records.jsonl"),
        ([record(repeat=n, boot=b) for b in (1, 2) for n in range(3)], "boot 2: its file is missing"),
    ],
)
def test_a_folder_that_was_changed_by_hand_earns_no_word_and_shows_its_ratios(tmp_path, records, why):
    claims = (
        {"metric": "decode_tps", "value": {"point": 100.0}},
        {"metric": "prompt_tokens", "unit": "tok", "value": {"exact": 55}},
        {"metric": "outcome", "unit": "", "value": {"completed_to": 55}},
    )

    def change(recipe):
        claiming(*claims)(recipe)
        recipe["workloads"][0]["repeats"] = 3

    (tmp_path / "whole").mkdir()
    whole = computed(tmp_path / "whole", [record(repeat=n) for n in range(3)], change=change)
    assert {v["word"] for v in whole["verdicts"]} == {"reproduced"}
    (tmp_path / "changed").mkdir()
    changed = computed(tmp_path / "changed", records, [boot()], change=change)
    assert {v["word"] for v in changed["verdicts"]} == {"not_evaluated"}
    assert all(v["reason"].startswith(why) for v in changed["verdicts"])
    assert changed["verdicts"][0]["ratio"] == pytest.approx(1.0)


def test_words_of_a_record_do_not_make_it_a_changed_folder(tmp_path):
    skipped = record("plan_move", status="skipped", error="as it says, the folder was changed by hand")
    about = {"metric": "decode_tps", "value": {"point": 100.0}, "case": "code_runs"}
    result = computed(tmp_path, [*(record(repeat=n) for n in range(3)), skipped], change=claiming(about))
    assert any(flag.endswith("the folder was changed by hand") for flag in result["flags"])
    assert verdicts(result)["c0"][0] == "reproduced"
