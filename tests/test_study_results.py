"""A study's verdicts on records of known truth: the word that is earned, and no other."""

import pytest
from folders import CASES, MACHINE, boot, failure, record
from studies import ARMS, both, claim, folder, measured

from llmrepro import run_folder, study_results


def computed(tmp_path, *claims, arms=None, **more):
    return study_results.compute(folder(tmp_path, claims, both() if arms is None else arms, **more))


def judged(tmp_path, arms=None, **changes) -> dict:
    (found,) = computed(tmp_path, claim(**changes), arms=arms)["comparisons"]
    return found


def test_the_pairs_are_boots_and_the_ratio_is_the_geometric_mean_of_their_means(tmp_path):
    found = judged(tmp_path)
    # chat() adds 10 a round and 1 a prompt to a boot's speed: 12 to its mean
    pairs = [((f + 12) / (s + 12)) for f, s in zip((100, 104, 102), (50, 51, 53), strict=True)]
    assert found["here"] == pytest.approx((pairs[0] * pairs[1] * pairs[2]) ** (1 / 3))
    assert found["low"] < found["here"] < found["high"]
    (ratio,) = found["ratios"]
    assert (ratio["n"], ratio["of"]) == (3, "boot")
    assert (ratio["a"], ratio["b"]) == pytest.approx((114.0, sum((62, 63, 65)) / 3))


@pytest.mark.parametrize(
    ("changes", "word", "reason"),
    [
        ({"order": "above"}, "reproduced", "llama-cpp 114 tok/s, vllm 63.33 tok/s: 1.80 times"),
        ({"order": "below"}, "not_reproduced", "that is higher than claimed"),
        ({"order": None, "at_least": 1.5}, "reproduced", "3 boots each"),
        ({"order": None, "at_least": 2.5}, "not_reproduced", "that is lower than claimed"),
        ({"order": None, "at_most": 1.5}, "not_reproduced", "that is higher than claimed"),
        ({"order": None, "at_most": 2.5}, "reproduced", "3 boots each"),
        ({"order": None, "at_least": 1.8}, "inconclusive", "3 boots each; "),
        ({"order": None, "ratio": {"point": 1.8}}, "reproduced", "3 boots each"),
        ({"order": None, "ratio": {"point": 2.5}}, "not_reproduced", "that is lower than claimed"),
        ({"order": None, "ratio": {"about": 1.9}}, "reproduced", "3 boots each"),
        ({"order": None, "ratio": {"range": (1.7, 1.9)}}, "reproduced", "3 boots each"),
        (
            {"order": None, "ratio": {"point": 1.8}, "tolerance": {"relative": 0.001, "reason": "narrow"}},
            "inconclusive",
            "more boots",
        ),
    ],
)
def test_the_word_is_where_the_interval_lies(tmp_path, changes, word, reason):
    found = judged(tmp_path, **changes)
    assert (found["word"], reason in found["reason"]) == (word, True), found["reason"]


def test_noise_makes_it_inconclusive_and_says_how_many_more_boots_would_decide(tmp_path):
    found = judged(tmp_path, both((100.0, 60.0, 120.0), (70.0, 75.0, 60.0)))
    assert found["word"] == "inconclusive"
    assert "more boots would decide" in found["reason"]


def test_equal_arms_are_never_told_apart(tmp_path):
    found = judged(tmp_path, both((100.0, 104.0, 102.0), (104.0, 102.0, 100.0)))
    assert (found["word"], found["here"]) == ("inconclusive", pytest.approx(1.0))
    assert "too near the border for more boots to decide" in found["reason"]


@pytest.mark.parametrize("boots", [1, 2])
def test_fewer_than_three_boots_show_the_ratio_and_decide_nothing(tmp_path, boots):
    found = judged(tmp_path, both((100.0, 104.0)[:boots], (50.0, 51.0)[:boots]))
    assert (found["word"], found["low"]) == ("inconclusive", None)
    assert found["here"] > 1.5
    assert found["reason"].endswith(f"{boots} boot{'s' * (boots > 1)} each; 3 are needed")


def test_a_boot_that_only_one_arm_had_is_in_no_pair(tmp_path):
    found = judged(tmp_path, both((100.0, 104.0, 102.0), (50.0, 51.0)))
    assert found["ratios"][0]["n"] == 2


def test_every_case_must_hold_and_the_ones_that_do_not_are_named(tmp_path):
    arms = both()
    arms["llama-cpp"]["records"] = [
        r
        if r.case != CASES[1] or r.workload != "chat"
        else record(r.case, r.repeat, boot=r.boot, tps=20.0 + r.boot)
        for r in arms["llama-cpp"]["records"]
    ]
    found = judged(tmp_path, arms, each_case=True)
    assert found["word"] == "not_reproduced"
    assert f"fails for {CASES[1]} (" in found["reason"]
    assert {r["case"]: r["word"] for r in found["ratios"]} == {
        case: "not_reproduced" if case == CASES[1] else "reproduced" for case in CASES
    }


def test_when_every_case_holds_so_does_the_claim(tmp_path):
    found = judged(tmp_path, each_case=True)
    assert found["word"] == "reproduced"
    assert found["here"] is None
    assert [r["case"] for r in found["ratios"]] == list(CASES)


def test_a_case_without_an_answer_is_not_judged_and_the_claim_neither(tmp_path):
    arms = both()
    arms["vllm"]["records"] = [
        failure(r.case, r.repeat, server="eager", boot=r.boot) if r.case == CASES[0] else r
        for r in arms["vllm"]["records"]
    ]
    found = judged(tmp_path, arms, each_case=True)
    assert found["word"] == "not_evaluated"
    assert f"not judged for {CASES[0]}" in found["reason"]
    (flag,) = [f for f in study_results.compute(next((tmp_path / "runs").glob("*/*/*")))["flags"] if "failed" in f]
    assert flag.startswith("vllm: ")


def test_starts_are_compared_by_boot(tmp_path):
    found = judged(
        tmp_path, metric="startup.first_completion_s", a={"arm": "llama-cpp"}, b={"arm": "vllm"}, order="below"
    )
    assert (found["word"], found["here"]) == ("reproduced", pytest.approx(0.1))


def test_slopes_are_compared_by_boot(tmp_path):
    sides = {x: {"arm": arm, "workload": "prefill"} for x, arm in (("a", "llama-cpp"), ("b", "vllm"))}
    arms = both()
    arms["llama-cpp"]["records"], arms["llama-cpp"]["boots"] = measured("default", (100.0,) * 3, prefill_tps=400.0)
    found = judged(tmp_path, arms, metric="prefill_tps.slope", **sides)
    assert (found["word"], found["here"]) == ("reproduced", pytest.approx(2.0, rel=0.01))


def test_two_cases_of_one_server_are_paired_round_by_round(tmp_path):
    sides = {x: {"arm": "vllm", "workload": "prefill", "case": case} for x, case in (("a", "512"), ("b", "128"))}
    one = judged(tmp_path, both((100.0,), (50.0,)), metric="ttft_s", order=None, at_least=2.0, **sides)
    assert one["word"] == "reproduced"
    assert (one["ratios"][0]["n"], one["ratios"][0]["of"]) == (3, "round")
    assert "3 rounds of one boot" in one["reason"]


def test_two_cases_over_several_boots_are_paired_by_boot(tmp_path):
    sides = {x: {"arm": "vllm", "workload": "prefill", "case": case} for x, case in (("a", "512"), ("b", "128"))}
    found = judged(tmp_path, metric="ttft_s", order=None, at_least=2.0, **sides)
    assert (found["word"], found["ratios"][0]["of"], found["ratios"][0]["n"]) == ("reproduced", "boot", 3)


def test_a_condition_that_differs_bars_the_word_and_the_ratio_is_still_shown(tmp_path):
    bound = {"conditions": {"deciding": {"cpu_model": "Another processor"}}}
    found = judged(tmp_path, **bound)
    assert found["word"] == "not_comparable"
    assert "CPU: published Another processor, here A processor; llama-cpp 114 tok/s" in found["reason"]
    assert found["here"] == pytest.approx(1.8, rel=0.01)


def test_a_condition_that_holds_bars_nothing(tmp_path):
    found = judged(tmp_path, conditions={"deciding": {"cpu_model": MACHINE["cpu"]["model"]}})
    assert found["word"] == "reproduced"


def test_what_is_unstated_or_unknown_is_counted(tmp_path):
    found = judged(tmp_path, conditions={"deciding": {"cpu_model": None, "cooling": "water"}})
    assert found["word"] == "reproduced"
    assert found["reason"].endswith("1 condition unstated by the publication, 1 condition not observable here")


def test_a_fact_that_the_arms_do_not_share_is_told_of_both(tmp_path):
    arms = both()
    arms["vllm"]["machine"] = {**MACHINE, "cpu": {**MACHINE["cpu"], "model": "Another"}}
    found = judged(tmp_path, arms, conditions={"deciding": {"cpu_model": "A processor"}})
    assert "published A processor, here A processor and Another" in found["reason"]


def test_an_override_is_named_as_a_condition_of_its_arm(tmp_path):
    changed = {"overrides": {"vllm:workloads.chat.max_tokens": 20}}
    result = computed(tmp_path, claim(), **changed)
    (found,) = result["comparisons"]
    assert found["word"] == "not_comparable"
    assert "vllm: workloads.chat.max tokens: published 48, here 20" in found["reason"]
    assert "output tokens of chat 48 against 20" in result["line"]


def test_an_arm_that_lacks_something_is_said_and_its_claims_are_not_evaluated(tmp_path):
    arms = both(vllm={"outcome": "lacking", "reason": "needs 90000 GiB of memory"})
    found = computed(tmp_path, claim(), arms=arms, outcome="lacking")
    (one,) = found["comparisons"]
    assert (one["word"], one["reason"]) == ("not_evaluated", "vllm: lacking: needs 90000 GiB of memory")
    assert [a["outcome"] for a in found["arms"]] == ["completed", "lacking"]


def test_a_ratio_without_a_tolerance_of_its_own_must_state_one(tmp_path):
    sides = {"a": {"arm": "vllm"}, "b": {"arm": "llama-cpp"}}
    bare = {"metric": "startup.first_completion_s", "order": None, "ratio": {"point": 10.0}, **sides}
    assert "must state one" in judged(tmp_path, **bare)["reason"]
    stated = judged(tmp_path / "again", **bare, tolerance={"relative": 0.1, "reason": "starts vary"})
    assert stated["word"] == "reproduced"


def test_several_servers_must_be_named(tmp_path):
    arms = [ARMS[0], {**ARMS[1], "servers": ["eager", "compiled"]}]
    given = both()
    given["vllm"]["boots"] = [*given["vllm"]["boots"], boot("compiled", 0)]
    sides = {"a": {"arm": "llama-cpp"}, "b": {"arm": "vllm"}}
    result = computed(
        tmp_path,
        claim(metric="startup.first_completion_s", order="below", **sides),
        arms=given,
        changes={"arms": arms},
    )
    assert "several servers, eager, compiled; the claim must name one" in result["comparisons"][0]["reason"]


def test_servers_that_an_arm_leaves_out_are_in_no_table(tmp_path):
    given = both()
    given["vllm"]["boots"] = [*given["vllm"]["boots"], boot("compiled", 0, 9.0)]
    result = computed(tmp_path, claim(), arms=given)
    shown = {(v["arm"], v["server"]) for r in result["metrics"] for v in r["values"]}
    assert ("vllm", "eager") in shown
    assert ("vllm", "compiled") not in shown


def test_the_line_names_what_differs_beyond_the_engine(tmp_path):
    line = computed(tmp_path, claim(), changes={"differs_in": ["the moon"]})["line"]
    assert line.startswith(
        "These are 2 configurations, not 2 engines (llama-cpp against vllm): weights Q4_1 (gguf) "
    )
    assert "against BF16 (safetensors, converted)" in line
    assert line.endswith("; the moon.")
    assert "context" not in line  # 8,192 in both


def test_settings_read_back_from_the_servers_are_held_against_each_other(tmp_path):
    given = both()
    for n, arm in enumerate(given.values(), 1):
        arm["boots"] = [
            {**b, "effective": {"context_tokens": 4096 * n, "kv_dtype": ("f16/f16", "float16")[n - 1]}}
            for b in arm["boots"]
        ]
    given["vllm"]["boots"] = [
        {**b, "effective": {**b["effective"], "block_tokens": 16}} for b in given["vllm"]["boots"]
    ]
    result = computed(tmp_path, claim(), arms=given)
    assert "context 4,096 against 8,192" in result["line"]
    assert "KV cache" not in result["line"]  # two spellings of one thing
    assert result["untold"] == ["block tokens"]


def test_one_engine_on_two_machines_says_so(tmp_path):
    arms = [ARMS[0], {**ARMS[0], "id": "vllm"}]
    given = both()
    given["vllm"]["records"], given["vllm"]["boots"] = measured("default", (50.0, 51.0, 53.0))
    given["vllm"]["machine"] = {**MACHINE, "cpu": {**MACHINE["cpu"], "model": "Another"}}
    line = computed(tmp_path, claim(), arms=given, changes={"arms": arms})["line"]
    said = "All run llama-cpp 2026.10.11549 (llama-cpp against vllm) and differ in: "
    assert line == f"{said}processor A processor against Another."


def test_the_break_even_comes_from_the_boots(tmp_path):
    slow_start = both((50.0, 51.0, 53.0), (100.0, 104.0, 102.0))
    (found,) = computed(tmp_path, claim(), arms=slow_start)["break_even"]
    assert (found["found"], found["slow"]) == ("pays", "vllm")
    starts = [b - a for a, b in zip(found["starts_s"]["llama-cpp"], found["starts_s"]["vllm"], strict=True)]
    saved = [a - b for a, b in zip(found["requests_s"]["llama-cpp"], found["requests_s"]["vllm"], strict=True)]
    assert found["requests"]["mean"] == pytest.approx(sum(starts) / sum(saved))
    assert found["request"] == "one of 5 prompts with 48 output tokens"
    (never,) = computed(tmp_path / "other", claim())["break_even"]
    assert (never["found"], never["requests"]) == ("never", None)


def test_arms_that_did_not_take_turns_are_flagged(tmp_path):
    def at(arm, order):
        arm["records"] = [
            r.model_copy(update={"started_at": f"2026-01-02T{order(r.boot):02}:00:00.000+00:00"})
            for r in arm["records"]
        ]

    for name, orders, flagged in (
        ("turns", (lambda n: 2 * n, lambda n: 2 * n + 1), False),
        ("one after the other", (lambda n: n, lambda n: n + 10), True),
    ):
        given = both()
        for arm, order in zip(given.values(), orders, strict=True):
            at(arm, order)
        flags = computed(tmp_path / name, claim(), arms=given)["flags"]
        assert any("not in turns" in f for f in flags) == flagged


def test_the_same_folder_gives_the_same_result_and_names_what_it_read(tmp_path):
    path = folder(tmp_path, [claim()], both())
    result = study_results.compute(path)
    assert study_results.compute(path) == result
    assert result["inputs"]["arms/vllm/records.jsonl"] == run_folder.sha256_of(path / "arms/vllm/records.jsonl")
