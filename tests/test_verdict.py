"""A word is said only when it is earned, and a differing condition is named before any word."""

import pytest

from llmrepro import catalog, conditions, parameters, verdict
from llmrepro.claim import Claim


def claim(metric="prompt_tokens", value=None, **changes):
    unit = {"prompt_tokens": "tok", "model.bytes": "B", "decode_tps": "tok/s"}.get(metric, "")
    return Claim.model_validate(
        {
            "id": "c",
            "metric": metric,
            "value": value or {"exact": 55},
            "unit": unit,
            "workload": "chat",
            "case": "code_runs",
            "evidence": "stated",
            "locator": "here",
            **changes,
        }
    )


def row(value, metric="prompt_tokens", **changes):
    return {
        "metric": metric,
        "server": "default",
        "workload": "chat",
        "case": "code_runs",
        "value": value,
        "statistic": "value",
        "note": None,
        **changes,
    }


def condition(relation, deciding=True):
    return conditions.Condition("weights sha256", deciding, "a", "b", relation)


@pytest.mark.parametrize(
    ("rows", "found", "word", "reason"),
    [
        ([row(55)], [], "reproduced", "equal"),
        ([row(56)], [], "not_reproduced", "published 55, here 56"),
        ([], [], "not_evaluated", "no such value in this run"),
        ([row(None)], [], "not_evaluated", "the engine does not tell it"),
        ([row(55), row(55, server="other")], [], "not_evaluated", "2 measured values fit this claim"),
        ([row(55)], [condition("differs")], "not_comparable", "weights sha256: published a, here b"),
        ([row(55)], [condition("differs", deciding=False)], "reproduced", "equal"),
        (
            [row(55)],
            [condition("unstated_there"), condition("unknown_here")],
            "reproduced",
            "equal; 1 condition unstated by the publication, 1 condition not observable here",
        ),
    ],
)
def test_the_words_of_an_exact_claim(rows, found, word, reason):
    said = verdict.judge(claim(), rows, found)
    assert said.word == word
    assert said.reason.startswith(reason)


def test_a_claim_means_the_server_workload_and_case_it_names():
    said = verdict.judge(claim(workload="chat", case="code_runs"), [row(55), row(60, case="other")], [])
    assert (said.word, said.here, said.published) == ("reproduced", 55, 55)


def test_no_case_means_the_whole_workload_by_the_claims_statistic():
    rows = [
        row(1, "decode_tps"),
        row(2, "decode_tps", case=None, statistic="mean_of_means"),
        row(3, "decode_tps", case=None, statistic="token_weighted"),
    ]
    whole = {"case": None, "statistic": "token_weighted"}
    assert verdict.judge(claim("decode_tps", {"point": 3.0}, **whole), rows, []).here == 3


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ("workloads.chat.max_tokens", "not_comparable"),
        ("workloads.prefill.lengths", "reproduced"),
        ("servers.default.args", "not_comparable"),
        ("servers.other.args", "reproduced"),
        ("model.license", "not_comparable"),
    ],
)
def test_only_settings_that_concern_a_claim_decide_it(changed, word):
    differs = conditions.Condition(changed, True, "a", "b", "differs")
    assert verdict.judge(claim(server="default"), [row(55)], [differs]).word == word


def test_a_fact_of_the_file_depends_on_no_condition():
    said = verdict.judge(claim("model.bytes", {"exact": 1}), [row(2, "model.bytes")], [condition("differs")])
    assert said.word == "not_reproduced"


@pytest.mark.parametrize(
    "value", [{"point": 55}, {"range": (50, 60)}, {"about": 55}, {"peak": 55}, {"at_least": 1}]
)
def test_a_claim_that_needs_statistics_is_not_judged_without_them(value):
    said = verdict.judge(claim("decode_tps", value), [row(55, "decode_tps")], [])
    assert (said.word, said.here) == ("not_evaluated", 55)


def compared(here, **values):
    committed = catalog.load(catalog.DEFAULT)
    return conditions.compare(committed, parameters.resolved(committed, parameters.checked(values)), here)


def test_conditions_are_equal_differ_or_are_unknown():
    sha = catalog.load(catalog.DEFAULT).model.files[0].sha256
    found = {c.name: c for c in compared({"weights_sha256": sha, "engine_version": "1", "threads": 2})}
    assert found["weights sha256"].relation == "equal"
    assert found["engine version"].relation == "differs"
    assert found["threads"] == ("threads", False, None, 2, "unstated_there")
    assert {c.relation for c in compared({}) if c.deciding} == {"unknown_here"}


def test_what_a_run_overrides_decides_and_is_named():
    found = [
        c
        for c in compared({}, overrides={"workloads.chat.max_tokens": 20, "servers.default.args": ["--ui"]})
        if c.relation == "differs"
    ]
    assert [(c.name, c.deciding) for c in found] == [
        ("servers.default.args", True),
        ("workloads.chat.max_tokens", True),
    ]
    assert found[1][2:4] == (48, 20)


def test_more_rounds_and_fewer_servers_are_no_other_measurement():
    assert not [c for c in compared({}, repeats=9, servers=["default"], profile="full") if c.relation == "differs"]
