"""Protocols on the real engine: order, exact lengths, no caches, deaths and interruptions that lose nothing."""

import os
import signal
from collections import Counter

import psutil
import pytest

from llmrepro import catalog, machine, parameters, results, run_folder, weights, workloads
from llmrepro import run as runs
from llmrepro.client import Record
from llmrepro.workloads import MeasureFailure

SMALL = {"workloads.chat.max_tokens": 20, "workloads.prefill.lengths": [32, 64, 300]}


@pytest.fixture
def run(tmp_path, prepared):
    made = runs.create(parameters.checked({"runs_dir": str(tmp_path), "repeats": 2, "overrides": SMALL}))
    made.set_status("running", "measure")
    yield made
    made.close()
    assert not servers(made), "a server is left"


def servers(run):
    """The engine's processes of one run: they work in its folder."""
    return [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(run.path)]


def measure(run, prepared):
    workloads.measure(run, prepared[0].path, prepared[1])
    return read(run)


def read(run):
    return [Record.model_validate(r) for r in run_folder.read_lines(run.path / "records.jsonl")]


def test_a_plan_asks_every_case_once_a_round(tmp_path):
    params = parameters.checked({"repeats": 2})
    recipe = parameters.resolved(catalog.load(catalog.DEFAULT), params)
    plan = workloads.plan(recipe, params)
    assert [j.case for j in plan[:10]] == 2 * list(recipe.workloads[0].cases)
    assert [j.repeat for j in plan[:10]] == 5 * [0] + 5 * [1]
    assert len(plan) == len(set(plan)) == 2 * 5 + 2 * 3
    assert 0 < workloads.estimate_s(recipe, plan) < 600


@pytest.mark.engine
def test_every_request_is_recorded_with_exact_counts_and_no_cache(run, prepared):
    records = measure(run, prepared)
    assert [(r.workload, r.warmup) for r in records] == [
        ("chat", True),
        *10 * [("chat", False)],
        ("prefill", True),
        *6 * [("prefill", False)],
    ]
    asked = [r for r in records if not r.warmup]
    assert {r.status for r in asked} == {"ok"}
    assert {r.output_tokens for r in asked if r.workload == "chat"} == {20}
    assert [r.prompt_tokens for r in asked if r.workload == "prefill"] == 2 * [32, 64, 300]
    assert {r.cached_tokens for r in asked} == {0}
    assert {r.output_tokens_source for r in asked} == {"usage_delta"}
    assert len({r.prompt_sha256 for r in asked if r.workload == "prefill"}) == 6
    warm_up = next(r for r in records if r.warmup)
    assert warm_up.prompt_sha256 not in {r.prompt_sha256 for r in asked}
    assert workloads.missing(run) == []
    texts = {r.case: r.text_sha256 for r in asked if r.workload == "chat"}
    assert all(texts[r.case] == r.text_sha256 for r in asked if r.workload == "chat")  # greedy, one thread
    boot = runs.boots(run.path)[1]
    assert boot["effective"]["threads"] == boot["threads"] == machine.threads()
    assert boot["effective"]["context_tokens"] == 8192
    assert boot["metrics"] == {"kv_bytes_per_token": 23040}
    assert boot["phases"][0][0] == "read metadata"
    start = boot["startup"]
    assert 0 < start["startup.port_s"] <= start["startup.health_s"] <= start["startup.first_completion_s"]
    assert "steal_share" in boot["machine"]
    assert 0 <= boot["weights_cached_share"] <= 1


@pytest.mark.engine
def test_no_key_is_left_in_any_file(run, prepared, monkeypatch):
    keys = []
    launch = workloads.engines.load("llama-cpp").launch

    def spying(*args, api_key, **more):
        keys.append(api_key)
        return launch(*args, api_key=api_key, **more)

    monkeypatch.setattr(workloads.engines.load("llama-cpp"), "launch", spying)
    measure(run, prepared)
    assert all(len(key) > 20 for key in keys)
    for file in (f for f in run.path.rglob("*") if f.is_file()):
        assert not [k for k in keys if k.encode() in file.read_bytes()], file


@pytest.mark.engine
def test_a_server_that_dies_is_a_row_and_the_rest_goes_on(run, prepared, monkeypatch):
    append, seen = run.append, Counter()

    def killing(record):
        append(record)
        seen["records"] += 1
        if seen["records"] == 4:
            os.kill(servers(run)[0].pid, signal.SIGKILL)

    monkeypatch.setattr(run, "append", killing)
    records = measure(run, prepared)
    (dead,) = [r for r in records if r.status == "engine_died"]
    assert "SIGKILL" in dead.error
    assert set(runs.boots(run.path)) == {1, 2}
    asked = [r for r in records if not r.warmup]
    assert workloads.missing(run) == []
    assert len(asked) == 17  # the one in which it was killed was asked once more
    (again,) = [r for r in asked if (r.case, r.repeat, r.status) == (dead.case, dead.repeat, "ok")]
    assert again.boot == 2
    assert {r.status for r in asked} == {"ok", "engine_died"}


@pytest.mark.engine
def test_a_server_that_dies_while_a_prompt_is_cut_is_a_row_too(run, prepared, monkeypatch):
    monkeypatch.setattr(workloads, "DEATHS", 0)
    count = workloads._Asker._count

    def killing(asker, text):
        for process in servers(run):
            process.kill()
        return count(asker, text)

    monkeypatch.setattr(workloads._Asker, "_count", killing)
    with pytest.raises(MeasureFailure, match="died 1 time, last during prefill 32"):
        measure(run, prepared)
    dead = read(run)[-1]
    assert (dead.status, dead.workload, dead.case, dead.events) == ("engine_died", "prefill", "32", [])
    assert "SIGKILL" in dead.error


@pytest.mark.engine
def test_a_server_that_dies_of_everything_ends_the_run_in_a_sentence(run, prepared, monkeypatch):
    append = run.append

    def killing(record):
        append(record)
        if record.warmup:
            os.kill(servers(run)[0].pid, signal.SIGKILL)

    monkeypatch.setattr(run, "append", killing)
    with pytest.raises(MeasureFailure, match="died 4 times, last during chat"):
        measure(run, prepared)
    assert Counter(r.status for r in read(run) if not r.warmup) == {"engine_died": 4}


@pytest.mark.engine
def test_an_interrupted_run_keeps_its_records_and_resumes_with_what_is_missing(run, prepared, monkeypatch):
    append, seen = run.append, Counter()

    def interrupting(record):
        append(record)
        seen["records"] += 1
        if seen["records"] == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "append", interrupting)
        with pytest.raises(KeyboardInterrupt), run.stage("measure"):
            workloads.measure(run, prepared[0].path, prepared[1])
    assert run_folder.status(run.path)["outcome"] == "stopped"
    assert not servers(run)
    assert len(read(run)) == 7
    left = workloads.missing(run)
    assert len(left) == 10
    again = runs.create(parameters.checked({"resume": str(run.path)}))
    records = measure(again, prepared)
    again.close()
    asked = [(r.workload, r.case, r.repeat) for r in records if not r.warmup]
    assert len(asked) == len(set(asked)) == 16
    assert {r.boot for r in records} == {1, 2}
    assert len([r for r in records if r.warmup]) == 3  # a new boot warms up again
    for name, value in (("machine.json", {}), ("weights.json", {"facts": weights.facts(prepared[1])})):
        again.write_json(name, value)
    again.write_text("engine-freeze.txt", prepared[0].freeze)
    words = Counter(v["word"] for v in results.compute(run.path)["verdicts"])
    assert words == {"reproduced": 5, "not_comparable": 5}  # the prompts were asked for fewer tokens
