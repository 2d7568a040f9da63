"""A word is said only when it is earned: by an interval, by equal conditions, by a value measured here."""

import pytest
from claims import RECIPE, around, between, claim, fact, sampled, tolerance

from llmrepro import conditions, intervals, noise, rows, terms, verdict
from llmrepro import tolerance as tolerances

STEADY = (99.9, 100.0, 100.1, 100.0, 100.0)


def at(mean: float, boots: int = 2) -> list[tuple]:
    """Boots of five rounds around a mean, 0.07 % apart."""
    return [tuple(x * mean / 100 for x in STEADY)] * boots


def judged(about, *found, bound=(), **changes):
    return verdict.judge(about, list(found), list(bound), around(**changes))


def condition(relation, deciding=True, name="weights_sha256", **changes):
    return conditions.Condition(name, deciding, "a", "b", relation, **changes)


# ---- exact claims -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "bound", "word", "reason"),
    [
        ([fact(55)], [], "reproduced", "equal"),
        ([fact(56)], [], "not_reproduced", "published 55, here 56"),
        ([], [], "not_evaluated", "no such value in this run"),
        ([fact(None)], [], "not_evaluated", "the engine does not tell it"),
        ([fact(None, note="it varied: [1, 2]")], [], "not_evaluated", "it varied: [1, 2]"),
        (
            [fact(55)],
            [condition("differs")],
            "not_comparable",
            "sha256 of the weights: published a, here b; equal here",
        ),
        (
            [fact(56)],
            [condition("differs")],
            "not_comparable",
            "sha256 of the weights: published a, here b; differs here",
        ),
        ([fact(55)], [condition("differs", deciding=False)], "reproduced", "equal"),
        (
            [fact(55)],
            [condition("unstated_there"), condition("unknown_here")],
            "reproduced",
            "equal; 1 condition unstated by the publication, 1 condition not observable here",
        ),
    ],
)
def test_the_words_of_an_exact_claim(found, bound, word, reason):
    said = judged(claim("prompt_tokens", {"exact": 55}), *found, bound=bound)
    assert said.word == word
    assert said.reason.startswith(reason)


@pytest.mark.parametrize("metric", ["model.bytes", "startup.port_s", "memory.weights_gib", "kv_tokens"])
def test_what_only_a_start_tells_is_not_told_by_a_server_that_already_ran(metric):
    about = claim(metric, {"about": 1.0}, server=None)
    assert judged(about, running=True).reason == "a server that already ran does not tell it"
    assert judged(about).reason.startswith("no such value in this run")
    assert judged(claim("decode_tps"), running=True).reason.startswith("no such value in this run")


def test_two_values_that_fit_are_not_chosen_from():
    about = claim("prompt_tokens", {"exact": 55}, server=None)
    said = judged(about, fact(55), fact(55, server="other"))
    assert said.word == "not_evaluated"
    assert said.reason.startswith("2 measured values fit this claim")


def test_a_claim_means_the_server_workload_and_case_it_names():
    said = judged(
        claim("prompt_tokens", {"exact": 55}), fact(55), fact(60, case="other"), fact(61, server="other")
    )
    assert (said.word, said.here, said.published) == ("reproduced", 55, 55)


def test_no_case_means_the_whole_workload_by_the_claims_statistic():
    found = [
        sampled(*at(1.0)),
        sampled(*at(2.0), case=None, statistic="mean_of_means"),
        sampled(*at(3.0), case=None, statistic="token_weighted"),
    ]
    whole = claim(value={"point": 3.0}, case=None, statistic="token_weighted")
    assert judged(whole, *found).here == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ("workloads.chat.max_tokens", "not_comparable"),
        ("workloads.prefill.lengths", "reproduced"),
        ("servers.default.args", "not_comparable"),
        ("servers.other.args", "reproduced"),
        ("model.license", "not_comparable"),
        ("claims.c.value.exact", "not_comparable"),
        ("claims.d.value.exact", "reproduced"),
    ],
)
def test_only_settings_that_concern_a_claim_decide_it(changed, word):
    differs = conditions.Condition(changed, True, "a", "b", "differs")
    assert judged(claim("prompt_tokens", {"exact": 55}), fact(55), bound=[differs]).word == word


def test_a_condition_of_another_server_changes_nothing():
    about = claim("prompt_tokens", {"exact": 55})
    other, own = (condition("differs", name="kv_dtype", server=s) for s in ("other", "default"))
    assert judged(about, fact(55), bound=[other]).word == "reproduced"
    said = judged(about, fact(55), bound=[own])
    assert (said.word, said.reason) == (
        "not_comparable",
        "type of the KV cache (default): published a, here b; equal here",
    )


def test_a_fact_of_the_file_depends_on_no_condition():
    about = claim("model.bytes", {"exact": 1}, server=None)
    found = fact(2, "model.bytes", server=None, workload=None, case=None)
    assert judged(about, found, bound=[condition("differs")]).word == "not_reproduced"


# ---- measured numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "mean", "word", "said"),
    [
        ({"point": 100.0}, 100.0, "reproduced", "100 tok/s here, 1.000 times the published (0.976 to 1.024)"),
        ({"point": 100.0}, 85.0, "not_reproduced", "lower than published: worse"),
        ({"point": 100.0}, 115.0, "not_reproduced", "higher than published: better"),
        ({"point": 100.0}, 94.0, "inconclusive", "too near the tolerance"),
        ({"range": (90.0, 110.0)}, 112.0, "reproduced", "1.120 times the middle of the published range"),
        ({"range": (90.0, 110.0)}, 120.0, "not_reproduced", "higher than published"),
        ({"about": 100.0}, 112.0, "reproduced", "which holds from 0.85 to 1.15"),
        ({"at_least": 100.0}, 500.0, "reproduced", "which holds from 0.95 on"),
        ({"at_least": 100.0}, 90.0, "not_reproduced", "lower than published: worse"),
        ({"at_most": 100.0}, 50.0, "reproduced", "which holds up to 1.05"),
        ({"at_most": 100.0}, 120.0, "not_reproduced", "higher than published: better"),
    ],
)
def test_the_word_is_where_the_interval_of_measured_by_published_lies(value, mean, word, said):
    found = judged(claim(value=value), sampled(*at(mean)))
    assert (found.word, said in found.reason) == (word, True), found.reason


def test_lower_is_better_for_a_time():
    about = claim("ttft_s", {"point": 0.2}, tolerance=tolerance(0.05))
    assert "lower than published: better" in judged(about, sampled(*at(0.1), metric="ttft_s")).reason


def test_the_interval_is_the_formula():
    """h² = (t · s_within / √n)² + z² · s_between² · (1 + 1 / boots), with n - boots degrees of freedom."""
    boots = [(99.0, 101.0, 100.0), (102.0, 104.0, 103.0)]
    said = judged(claim(between=between(0.02)), sampled(*boots))
    deviations = [x / mean - 1 for boot, mean in zip(boots, (100.0, 103.0), strict=True) for x in boot]
    within = (sum(d * d for d in deviations) / 4) ** 0.5
    t, z = 2.776445, 1.959964  # of 4 degrees of freedom, from the tables
    half = ((t * within / 6**0.5) ** 2 + z**2 * 0.02**2 * 1.5) ** 0.5
    assert said.ratio == pytest.approx(1.015)
    assert (said.low, said.high) == pytest.approx((1.015 * (1 - half), 1.015 * (1 + half)), rel=1e-6)


def test_a_spread_between_cards_is_not_averaged_by_more_boots_of_one():
    def width(of, boots):
        said = judged(claim(between=between(0.02, of=of)), sampled(*at(100.0, boots)))
        return said.high - said.low

    assert width("card", 4) == pytest.approx(width("card", 1), rel=1e-2)
    assert width("boot", 4) < 0.85 * width("boot", 1)


@pytest.mark.parametrize(
    ("sampling", "metric", "boots", "declared", "origin", "relative"),
    [
        (0.0, "decode_tps", 2, None, "assumed", 0.01),
        (0.7, "decode_tps", 2, None, "assumed", 0.03),
        (0.0, "prefill_tps", 2, None, "assumed", 0.005),
        (0.0, "decode_tps", 2, between(0.02), "declared", 0.02),
        (0.0, "decode_tps", 2, between(0.02, sampled=True), "assumed", 0.01),
        (0.0, "decode_tps", 2, between(0.02, metric="prefill_tps"), "assumed", 0.01),
        (0.0, "decode_tps", 5, None, "measured", 0.0158),
        (0.0, "decode_tps", 5, between(0.02), "declared", 0.02),
    ],
)
def test_the_spread_between_boots_is_declared_or_measured_or_assumed(
    sampling, metric, boots, declared, origin, relative
):
    recipe = _recipe(sampling, between=[declared] if declared else [])
    means = [98.0, 99.0, 100.0, 101.0, 102.0][:boots]
    row = sampled(*((m, m) for m in means), metric=metric)
    said = verdict.judge(claim(metric), [row], [], verdict.Around(recipe))
    assert said.noise["origin"] == origin
    assert said.noise["between"] == pytest.approx(relative, rel=1e-2)
    assert f" % between boots, {origin} " in said.reason


def test_a_claims_own_spread_comes_before_its_recipes():
    recipe = _recipe(0.0, between=[between(0.02)])
    said = verdict.judge(claim(between=between(0.001)), [sampled(*at(100.0))], [], verdict.Around(recipe))
    assert said.noise["between"] == 0.001


def _recipe(temperature: float, **changes):
    chat = next(w for w in RECIPE.workloads if w.id == "chat")
    asked = chat.model_copy(update={"sampling": chat.sampling.model_copy(update={"temperature": temperature})})
    declared = [claim(between=b).between for b in changes.pop("between", [])]
    return RECIPE.model_copy(update={"workloads": [asked], "between": declared, **changes})


@pytest.mark.parametrize(
    ("metric", "temperature", "tokens", "relative"),
    [
        ("prefill_tps", 0.0, 4, 0.03),
        ("decode_tps", 0.0, 512, 0.05),
        ("decode_tps.published_2026_10", 0.0, 512, 0.05),
        ("decode_tps", 0.0, 58, 0.10),  # however many were allowed
        ("decode_tps", 1.0, 512, 0.15),
        ("decode_tps", 1.0, 58, 0.15),  # a short answer makes nothing stricter
        ("ttft_s", 0.0, 512, 0.10),
    ],
)
def test_the_tolerance_is_the_metrics_own(metric, temperature, tokens, relative):
    workload = _recipe(temperature).workloads[0]
    assert tolerances.of_claim(claim(metric), workload, tokens).relative == relative
    stated = claim(metric, tolerance=tolerance(0.01))
    assert tolerances.of_claim(stated, workload, tokens) == (0.01, "so it is")


def test_short_answers_are_told_by_their_own_tokens():
    """58 tokens came of the 48 to 128 that were allowed: by the answers, not by what was allowed."""
    off = sampled(*at(107.0), tokens=58)
    assert judged(claim(between=between(0.001)), off).word == "reproduced"
    assert judged(claim(between=between(0.001)), {**off, "output_tokens": 500.0}).word == "not_reproduced"


def test_a_start_up_time_needs_a_tolerance_of_its_claim():
    row = sampled((60.0,), (62.0,), metric="startup.first_completion_s")
    bare = judged(claim("startup.first_completion_s", {"point": 61.0}), row)
    assert bare.word == "not_evaluated"
    assert "1.00 times the published" in bare.reason
    assert "must state a tolerance" in bare.reason
    assert judged(claim("startup.first_completion_s", {"range": (50.0, 70.0)}), row).word == "not_evaluated"
    stated = claim("startup.first_completion_s", {"point": 61.0}, tolerance=tolerance(0.25))
    assert judged(stated, row).word == "reproduced"


def test_a_metric_without_a_tolerance_says_so():
    said = judged(claim("e2e_tps"), sampled(*at(100.0), metric="e2e_tps"))
    assert (said.word, said.tolerance) == ("not_evaluated", None)
    assert "the claim must state one" in said.reason


def test_facts_of_the_engine_are_held_without_noise():
    about = claim("memory.weights_gib", {"about": 63.5})
    said = judged(about, fact(63.48, "memory.weights_gib", workload=None, case=None))
    assert (said.word, said.low, said.noise) == ("reproduced", None, None)
    far = judged(about, fact(40.0, "memory.weights_gib", workload=None, case=None))
    assert (far.word, "lower than published" in far.reason) == ("not_reproduced", True)


def test_nothing_published_is_nought_times_anything():
    about = claim("memory.device_gib", {"point": 0.0}, tolerance=tolerance(0.1))
    for value, word in ((0.0, "reproduced"), (3.0, "not_reproduced")):
        said = judged(about, fact(value, "memory.device_gib", workload=None, case=None))
        assert (said.word, said.ratio) == (word, None)


def test_one_round_in_a_boot_does_not_tell_its_noise():
    said = judged(claim(), sampled((100.0,), (100.1,)))
    assert said.word == "inconclusive"
    assert "one round in a boot does not tell its noise" in said.reason


@pytest.mark.parametrize(("off", "least"), [(1.0, 1), (3.0, 2)])
def test_inconclusive_says_how_many_more_boots_would_decide(off, least):
    noisy = [(100 - off, 100 + off)]  # one boot of two rounds: t is 12.7
    said = judged(claim(), sampled(*noisy))
    assert said.word == "inconclusive"
    assert said.more_boots >= least
    assert (said.more_boots == 1) == (least == 1)
    assert f"about {said.more_boots} more boot" in said.reason
    more = judged(claim(), sampled(*noisy * (1 + said.more_boots)))
    assert more.noise["origin"] != "measured"  # else another formula would decide
    assert more.word == "reproduced"
    fewer = judged(claim(), sampled(*noisy * said.more_boots))
    assert fewer.word == "inconclusive"


@pytest.mark.parametrize(
    ("of", "where"), [("boot", "no number of boots"), ("card", "no number of boots of this card")]
)
def test_inconclusive_says_that_no_boots_will_decide(of, where):
    said = judged(claim(between=between(0.028, of=of)), sampled(*at(100.0)))
    assert (said.word, said.more_boots) == ("inconclusive", None)
    assert f"too near the tolerance for the noise between {of}s: {where} will decide" in said.reason


# ---- peaks, words, outcomes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("greatest", "n", "word", "said"),
    [
        (115.0, None, "reproduced", "the highest here is 115 tok/s"),
        (80.0, None, "inconclusive", "not reached in 4 samples; the publication does not say how many it watched"),
        (80.0, 9, "inconclusive", "the publication watched 9"),
        (80.0, 4, "not_reproduced", "lower than published: worse"),
    ],
)
def test_a_peak_is_reached_or_open_until_as_much_was_watched(greatest, n, word, said):
    about = claim("log_window.generation_tps", {"peak": 112.0}, statistic="log_window", n=n)
    row = sampled((40.0, 50.0), (45.0, greatest), metric="log_window.generation_tps", statistic="log_window")
    found = judged(about, row)
    assert (found.word, said in found.reason) == (word, True), found.reason
    assert found.here == greatest


def test_what_was_said_without_a_number_is_shown_and_not_judged():
    said = judged(claim("ttft_s", {"words": "extremely slow"}), sampled(*at(3.0), metric="ttft_s"))
    assert (said.word, said.reason) == ("not_evaluated", "published without a number: extremely slow")
    assert said.here == pytest.approx(3.0)


def outcome(value, tokens, **changes):
    note = "3 of 3 requests answered" if value == "ok" else f"{value}: killed by signal 9"
    return fact(value, "outcome", prompt_tokens=tokens, note=note, **changes)


@pytest.mark.parametrize(
    ("value", "found", "word", "said"),
    [
        ({"completed_to": 9472}, [("ok", 9470)], "reproduced", "completes here with 9,470 tokens"),
        (
            {"completed_to": 9472},
            [("engine_died", 9472)],
            "not_reproduced",
            "fails here at 9,472 tokens: engine_died",
        ),
        ({"completed_to": 9472}, [("ok", 3163)], "not_evaluated", "the longest that completed had 3,163"),
        ({"failed_at": 9472}, [("engine_died", 9472)], "reproduced", "fails here at 9,472 tokens: engine_died"),
        ({"failed_at": 9472}, [("ok", 9472)], "not_reproduced", "completes here with 9,472 tokens"),
        ({"failed_at": 9472}, [("engine_died", 3163)], "not_reproduced", "fails here at 3,163 tokens"),
        ({"failed_at": 9472}, [("oom", None)], "reproduced", "fails here at 9,472 tokens: oom"),
    ],
)
def test_a_length_completes_or_fails(value, found, word, said):
    said_of = judged(claim("outcome", value), *(outcome(*one) for one in found))
    assert (said_of.word, said in said_of.reason) == (word, True), said_of.reason


def test_a_whole_workload_completes_to_its_longest_and_fails_at_its_first():
    steps = [outcome("ok", 3000, case="a"), outcome("ok", 9000, case="b"), outcome("oom", 20000, case="c")]
    said = judged(claim("outcome", {"completed_to": 9000}, case=None), *steps)
    assert said.word == "reproduced"
    assert "fails at 20,000" in said.reason
    assert judged(claim("outcome", {"failed_at": 20000}, case=None), *steps).word == "reproduced"


# ---- what bars a word -------------------------------------------------------------------------------------------


def test_a_differing_condition_is_named_and_the_ratio_still_shown():
    limit = conditions.stated(
        claim(conditions={"deciding": {"gpu_power_limit_w": 180}}).conditions,
        {"gpu_power_limit_w": 250.0, "gpu_indexes": [1]},
    )
    said = judged(claim(), sampled(*at(110.0)), bound=[condition("differs", name="cpu_model"), *limit])
    assert said.word == "not_comparable"
    assert said.reason.startswith(
        "CPU: published a, here b; enforced power limit (W): published 180, here 250 "
        "(set it with `sudo nvidia-smi -i 1 -pl 180` and run again); "
        "110 tok/s here, 1.100 times the published (1.07"
    )
    assert (said.ratio, len(said.conditions)) == (pytest.approx(1.1), 2)
    assert said.low < 1.1 < said.high


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gate": "2 of 9 answers are one token"}, "2 of 9 answers are one token; 100 tok/s here"),
        ({"bars": {"default": "above the roofline"}}, "above the roofline; 100 tok/s here"),
        ({"imported": True}, "imported, not measured here; 100 tok/s here, 1.000 times the published"),
    ],
)
def test_a_gate_bars_the_word_and_not_the_ratio(changes, reason):
    row = sampled(*at(100.0), gate=changes.pop("gate", None))
    said = judged(claim(), row, **changes)
    assert said.word == "not_evaluated"
    assert said.reason.startswith(reason)
    assert said.ratio == pytest.approx(1.0)


def test_the_roofline_of_another_server_bars_nothing_nor_does_it_bar_a_time():
    assert judged(claim(), sampled(*at(100.0)), bars={"other": "above"}).word == "reproduced"
    about = claim("ttft_s", {"point": 0.2})
    row = sampled((0.2, 0.2), (0.2, 0.2), metric="ttft_s")
    assert judged(about, row, bars={"default": "above"}).word == "reproduced"


def test_a_run_that_measured_nothing_says_why_of_every_claim():
    for about in (claim(), claim("outcome", {"completed_to": 10}), claim("prompt_tokens", {"exact": 1})):
        said = judged(about, sampled(*at(100.0)), absent="lacking: needs a GPU")
        assert (said.word, said.reason, said.here) == ("not_evaluated", "lacking: needs a GPU", None)


def test_an_unfinished_run_says_why_a_value_is_missing_and_judges_the_others():
    why = "stopped in the stage measure: by a person"
    assert judged(claim(), unfinished=why).reason == why
    assert judged(claim(), sampled(*at(100.0)), unfinished=why).word == "reproduced"


def test_imported_facts_are_never_reproduced():
    said = judged(claim("prompt_tokens", {"exact": 55}), fact(55), imported=True)
    assert (said.word, said.reason) == ("not_evaluated", "imported, not measured here")


def test_windows_of_a_log_are_held_against_windows_of_a_log_alone():
    own = sampled(*at(40.0))
    said = judged(claim("decode_tps", {"range": (30.0, 60.0)}, statistic="log_window"), own)
    assert said.word == "not_evaluated"
    assert "published as a window of a log" in said.reason
    about = claim("log_window.generation_tps", {"range": (30.0, 60.0)}, statistic="log_window")
    assert judged(about, own).word == "not_evaluated"
    window = sampled((40.0, 45.0), (44.0, 41.0), metric="log_window.generation_tps", statistic="log_window")
    assert judged(about, own, window).word == "reproduced"


# ---- among the published samples --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spread", "word"),
    [(0.005, "reproduced"), (0.006, "reproduced"), (0.007, "inconclusive"), (0.028, "inconclusive")],
)
def test_the_golden_re_run_of_900_tokens(spread, word):
    """117.92 against three cards whose mean is 122.00, one boot of three requests."""
    about = claim(
        value={"point": 122.0},
        samples=[121.28, 124.78, 119.94],
        spread=(119.94, 124.78),
        tolerance=tolerance(0.05),
        between=between(spread, of="card"),
    )
    said = judged(about, sampled((117.84, 117.92, 118.0)))
    assert said.word == word
    assert said.ratio == pytest.approx(0.9666, abs=1e-4)
    assert said.notes == [
        "below every published sample (expected of 2/4 of repeats)",
        "inside the 95 % prediction interval",
    ]
    assert ", ".join(said.notes) in said.reason


def test_the_prediction_interval_is_students():
    low, high = intervals.prediction([121.28, 124.78, 119.94])
    assert (low, high) == pytest.approx((122.0 - 12.42, 122.0 + 12.42), abs=0.01)
    far = judged(claim(value={"point": 122.0}, samples=[121.28, 124.78, 119.94]), sampled(*at(105.0)))
    assert "outside the 95 % prediction interval" in far.notes


def test_two_samples_predict_nothing_and_a_bare_range_is_a_range():
    two = judged(claim(samples=[99.0, 101.0]), sampled(*at(100.0)))
    assert two.notes == []
    bare = judged(claim(spread=(99.0, 101.0)), sampled(*at(103.0)))
    assert bare.notes == ["outside the published min–max (99 to 101)"]
    assert judged(claim(spread=(99.0, 101.0)), sampled(*at(100.0))).notes == []


def test_a_verdict_has_what_a_chart_of_it_takes():
    said = judged(claim(value={"range": (90.0, 110.0)}), sampled(*at(100.0))).model_dump()
    assert said["metric"] == "decode_tps"
    assert (said["unit"], said["form"], said["text"]) == ("tok/s", "range", "90 to 110 tok/s")
    assert (said["published_low"], said["published_high"]) == (90.0, 110.0)
    assert said["here_low"] < said["here"] < said["here_high"]
    assert said["tolerance"] == pytest.approx((0.855, 1.155))
    open_end = judged(claim(value={"at_least": 90.0}), sampled(*at(100.0)))
    assert (open_end.published_high, open_end.tolerance[1]) == (None, None)


def test_noise_never_widens_the_tolerance():
    for spread in (0.001, 0.01, 0.05):
        said = judged(claim(between=between(spread)), sampled(*at(100.0)))
        assert said.tolerance == pytest.approx((0.95, 1.05))


def test_every_metric_can_be_claimed_and_judged():
    """No metric of the kit's makes the verdict stumble, with or without a workload."""
    for metric, told in terms.METRICS.items():
        if metric in ("outcome",) or metric.endswith("sha256"):
            continue
        of_request = told.of in ("request", "workload")
        row = (
            sampled(*at(1.0), metric=metric) if of_request else rows.sampled(metric, {1: [1.0]}, server="default")
        )
        said = judged(claim(metric, {"about": 1.0}), row)
        assert said.word in ("reproduced", "inconclusive"), (metric, said.reason)
        assert noise.assumed(metric, None)[0] > 0
