"""Protocols on the real engine: order, exact lengths, no caches, deaths and interruptions that lose nothing."""

import hashlib
import os
import re
import signal
from collections import Counter

import psutil
import pytest

from llmrepro import (
    asker,
    catalog,
    engines,
    jobs,
    machine,
    parameters,
    prompts,
    results,
    run_folder,
    weights,
    workloads,
)
from llmrepro import bench as benches
from llmrepro import run as runs
from llmrepro.bench import Bench
from llmrepro.client import Record
from llmrepro.progress import Progress
from llmrepro.workloads import MeasureFailure

SMALL = {"workloads.chat.max_tokens": 20, "workloads.prefill.lengths": [32, 64, 300]}


@pytest.fixture
def new_run(tmp_path, prepared):
    made = []

    def new(workloads, overrides):
        given = {"runs_dir": str(tmp_path), "repeats": 2, "workloads": workloads, "overrides": overrides}
        made.append(runs.create(parameters.checked(given)))
        made[-1].set_status("running", "measure")
        return made[-1]

    yield new
    for run in made:
        run.close()
        assert not servers(run), "a server is left"


@pytest.fixture
def run(new_run):
    return new_run(None, SMALL)


def servers(run):
    """The engine's processes of one run: they work in its folder."""
    here = [p for p in psutil.process_iter(["cwd", "cmdline"]) if p.info["cwd"] == str(run.path)]
    return [p for p in here if "llmrepro.telemetry" not in (p.info["cmdline"] or [])]


def measure(run, prepared):
    workloads.measure(run, prepared[0].path, prepared[1])
    return read(run)


def read(run):
    return [Record.model_validate(r) for r in run_folder.read_lines(run.path / "records.jsonl")]


def test_a_plan_asks_every_case_once_a_round(tmp_path):
    params = parameters.checked({"repeats": 2})
    recipe = parameters.resolved(catalog.load(catalog.DEFAULT), params)
    plan = jobs.plan(recipe, params)
    assert [j.case for j in plan[:10]] == 2 * list(recipe.workloads[0].cases)
    assert [j.repeat for j in plan[:10]] == 5 * [0] + 5 * [1]
    assert len(plan) == len(set(plan)) == 2 * 5 + 2 * 3
    assert 0 < jobs.estimate_s(recipe, plan) < 600


def test_prompt_by_prompt_the_repeats_of_a_case_follow_each_other():
    plans = {}
    for protocol in ("rounds", "prompt_by_prompt"):
        params = parameters.checked({"repeats": 2, "overrides": {"workloads.chat.protocol": protocol}})
        recipe = parameters.resolved(catalog.load(catalog.DEFAULT), params)
        plans[protocol] = jobs.plan(recipe, params)
    chat = [j for j in plans["prompt_by_prompt"] if j.workload == "chat"]
    assert [j.case for j in chat] == [case for case in recipe.workloads[0].cases for _ in range(2)]
    assert [j.repeat for j in chat] == 5 * [0, 1]
    assert sorted(map(str, plans["rounds"])) == sorted(map(str, plans["prompt_by_prompt"]))


@pytest.fixture
def bench(tmp_path):
    """A bench without a server: what would be asked can be looked at."""
    made = []

    def new(**chat):
        overrides = {f"workloads.chat.{name.replace('__', '.')}": value for name, value in chat.items()}
        made.append(runs.create(parameters.checked({"runs_dir": str(tmp_path), "overrides": overrides})))
        run, engine = made[-1], engines.load("llama-cpp")
        bar = Progress("test", 1)
        return Bench(run, run.recipe, engine, tmp_path, tmp_path, prompts.texts(run.path), bar, {})

    yield new
    for run in made:
        run.close()


def body(bench, **labels):
    asked = benches.question(bench, bench.recipe.workloads[0], "How many plums?", **labels)
    return {k: v for k, v in asked.body.items() if k not in {"model", "messages"}}


def test_every_sampling_field_is_sent_and_nothing_else(bench):
    plain = {"max_tokens": 48, "temperature": 0.0, "top_p": 1.0, "top_k": 1, "min_p": 0.0, "seed": 0}
    engines_own = {"ignore_eos": True, "timings_per_token": True, "cache_prompt": False}
    assert body(bench()) == body(bench(), repeat=2) == {**plain, **engines_own}


def test_a_round_has_its_own_seed_and_the_template_is_told_to_think_or_not(bench):
    made = bench(repeats=2, sampling__seeds=[1000, 1001], thinking=True)
    for repeat in (0, 1):
        asked = body(made, repeat=repeat)
        assert (asked["seed"], asked["chat_template_kwargs"]) == (1000 + repeat, {"enable_thinking": True})
        assert "seeds" not in asked
    chat = made.recipe.workloads[0]
    warm = benches.warmup(made, chat, "default", 1)
    assert warm.body["chat_template_kwargs"] == {"enable_thinking": False}, "a warm-up need not think"
    assert warm.warmup and warm.body["seed"] == 1000
    alive = benches.sign_of_life(made, "default", 1)
    assert (alive.body["max_tokens"], alive.body["messages"]) == (4, warm.body["messages"])
    assert body(bench(thinking=False))["chat_template_kwargs"] == {"enable_thinking": False}
    assert (
        "chat_template_kwargs"
        not in benches.warmup(bench(), chat.model_copy(update={"thinking": None}), "", 1).body
    )


def test_more_rounds_than_seeds_are_refused_before_a_folder_is_made(tmp_path):
    seeds = {"workloads.chat.repeats": 2, "workloads.chat.sampling.seeds": [1000, 1001]}
    values = {"runs_dir": str(tmp_path / "runs"), "overrides": seeds, "repeats": 3}
    with pytest.raises(run_folder.RunError, match="repeats 3: workload 'chat' has 2 seeds, .* at most 2"):
        runs.create(parameters.checked(values))
    assert not (tmp_path / "runs").exists()
    runs.create(parameters.checked({**values, "workloads": ["prefill"]})).close()


@pytest.mark.engine
def test_a_publications_protocol_is_asked_as_it_was_and_gone_on_with(new_run, prepared, monkeypatch):
    """Case by case with a seed each, a line of its own before every prompt; stopped in the midst of a case."""
    texts = {"code_runs": "How many plums?", "plan_move": "Name a pear."}
    protocol = {"protocol": "prompt_by_prompt", "salted": True, "thinking": False, "max_tokens": 4, "repeats": 2}
    protocol["sampling.seeds"] = [7, 8]
    overrides = {f"workloads.chat.{name}": value for name, value in protocol.items()}
    run = new_run(["chat"], overrides)
    ours = {name.removeprefix("chat/"): text for name, text in prompts.texts(run.path).items()}
    hashes = {hashlib.sha256(text.encode()).hexdigest(): text for text in texts.values()}
    run.write_json("prompts.json", {**run_folder.read_json(run.path / "prompts.json"), **hashes})
    theirs = {f"chat/{i}": hashlib.sha256(t.encode()).hexdigest() for i, t in texts.items()}
    run.write_json("published_prompts.json", theirs)
    asked, append = [], run.append
    ask_one = benches.ask_one

    def spying(running, question, **more):
        asked.append(question)
        return ask_one(running, question, **more)

    def interrupting(record):
        append(record)
        if sum(not r.warmup for r in read(run)) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(benches, "ask_one", spying)
    with monkeypatch.context() as patch:
        patch.setattr(run, "append", interrupting)
        with pytest.raises(KeyboardInterrupt):
            measure(run, prepared)
    measure(run, prepared)
    records = [r for r in read(run) if not r.warmup]
    cases = run.recipe.workloads[0].cases
    assert [(r.case, r.repeat) for r in records] == [(case, n) for case in cases for n in (0, 1)]
    assert [r.boot for r in records] == 3 * [1] + 7 * [2]
    assert {(r.repeat, r.request["seed"]) for r in records} == {(0, 7), (1, 8)}
    assert {r.request["chat_template_kwargs"]["enable_thinking"] for r in read(run)} == {False}
    prompt_of = [q.body["messages"][0]["content"] for q in asked]
    assert len(set(prompt_of)) == len(prompt_of) == 12, "warm-ups too"
    for question, prompt in zip(asked, prompt_of, strict=True):
        line, _, text = prompt.partition("\n")
        assert re.fullmatch(r"\[run \d{8}\]", line)
        assert text == (ours | texts)[question.case]
    for case in cases:
        assert len({r.prompt_tokens for r in records if r.case == case}) == 1, (
            "a line takes the same tokens each time"
        )
    assert {r.cached_tokens for r in records} == {0}


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
    assert jobs.missing(run) == []
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
    assert jobs.missing(run) == []
    assert len(asked) == 17  # the one in which it was killed was asked once more
    (again,) = [r for r in asked if (r.case, r.repeat, r.status) == (dead.case, dead.repeat, "ok")]
    assert again.boot == 2
    assert {r.status for r in asked} == {"ok", "engine_died"}


@pytest.mark.engine
def test_a_server_that_dies_while_a_prompt_is_cut_is_a_row_too(run, prepared, monkeypatch):
    monkeypatch.setattr(workloads, "DEATHS", 0)
    count = asker.Asker._count

    def killing(asked_by, text):
        for process in servers(run):
            process.kill()
        return count(asked_by, text)

    monkeypatch.setattr(asker.Asker, "_count", killing)
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
    left = jobs.missing(run)
    assert len(left) == 10
    again = runs.create(parameters.checked({"resume": str(run.path)}))
    records = measure(again, prepared)
    again.close()
    asked = [(r.workload, r.case, r.repeat) for r in records if not r.warmup]
    assert len(asked) == len(set(asked)) == 16
    assert {r.boot for r in records} == {1, 2}
    assert len([r for r in records if r.warmup]) == 3  # a new boot warms up again
    for name, value in (
        ("machine.json", {}),
        ("weights.json", {"facts": weights.facts(weights.own(prepared[1], again.recipe.model))}),
    ):
        again.write_json(name, value)
    again.write_text("engine-freeze.txt", prepared[0].freeze)
    words = Counter(v["word"] for v in results.compute(run.path)["verdicts"])
    assert words == {"reproduced": 5, "not_comparable": 5}  # the prompts were asked for fewer tokens
