"""Prompt cache, page cache and restarts on the real llama.cpp: each case in the state that it names."""

import os
import shutil
import signal

import pytest
from test_workloads import read, servers

from llmrepro import jobs, page_cache, parameters, results, run_folder, weights, workloads
from llmrepro import run as runs
from llmrepro.engines import llama_cpp
from llmrepro.workloads import MeasureFailure

pytestmark = pytest.mark.engine

HEAD = 96
ARGS = ("--ctx-size", "2048", "--parallel", "1", "-t", "1", "-lv", "4", "--metrics", "--cache-ram")
SMALL = {
    "workloads.prefix.head_tokens": HEAD,
    "workloads.prefix.fill": 3,
    "workloads.restart.head_tokens": HEAD,
    # room for two prompts beside the one in the slot: a prompt of 110 tokens takes 2.5 MiB
    "servers.small-cache.args": [*ARGS, "6"],
}


@pytest.fixture
def new_run(tmp_path, prepared):
    made = []

    def new(server, repeats=1, **overrides):
        given = {"runs_dir": str(tmp_path), "profile": "full", "servers": [server], "repeats": repeats}
        run = runs.create(parameters.checked({**given, "overrides": {**SMALL, **overrides}}))
        run.set_status("running", "measure")
        made.append(run)
        return run

    yield new
    for run in made:
        run.close()
        assert not servers(run), "a server is left"


def measured(run, prepared):
    workloads.measure(run, prepared[0].path, prepared[1])
    assert jobs.missing(run) == []
    return read(run)


def result_of(run, prepared):
    run.write_json("machine.json", {})
    run.write_json("weights.json", {"facts": weights.facts(weights.own(prepared[1], run.recipe.model))})
    run.write_text("engine-freeze.txt", prepared[0].freeze)
    return results.compute(run.path)


def shown(records):
    """The requests as (case, warm-up?, whether the whole head came from the cache)."""
    return [(r.case, r.warmup, (r.cached_tokens or 0) >= HEAD) for r in records if r.case != "warmup"]


WHOLE = [
    ("uncached", False, False),
    ("new_tail", False, True),
    ("new_tail_2", False, True),
    ("changed_head", False, False),
    ("original_again", False, True),
    ("fill_1", True, False),
    ("fill_2", True, False),
    ("fill_3", True, False),
    ("newest_after_fill", False, True),
    ("oldest_after_fill", False, False),
]


def test_the_cache_keeps_a_head_loses_it_for_one_character_and_evicts_the_oldest(new_run, prepared):
    run = new_run("small-cache", repeats=2)
    records = measured(run, prepared)
    assert shown(records) == 2 * WHOLE
    by = {r.case: r for r in records if r.repeat == 0}
    assert by["uncached"].cached_tokens == by["changed_head"].cached_tokens == 0
    assert by["changed_head"].prompt_tokens == by["new_tail"].prompt_tokens
    assert len({r.prompt_sha256 for r in records if r.case == "uncached"}) == 2, "salted anew each round"
    logs = {case: r.engine_log for case, r in by.items()}
    assert logs["new_tail"]["taken_from"] == "slot"
    assert logs["new_tail"]["f_sim"] == pytest.approx(
        by["new_tail"].cached_tokens / by["new_tail"].prompt_tokens, abs=1e-3
    )
    assert logs["new_tail"]["f_keep"] < logs["new_tail"]["f_sim"]
    assert logs["original_again"]["taken_from"] == "prompt cache"
    assert logs["changed_head"]["taken_from"] is None
    assert sum(r.engine_log["evicted"] for r in records if r.case.startswith("fill")) >= 3
    found = result_of(run, prepared)
    (rate,) = [r for r in found["metrics"] if r["metric"] == "prefix_hit_rate" and r["case"] is None]
    asked = sum(r.prompt_tokens for r in records)
    assert rate["value"] == pytest.approx(sum(r.cached_tokens for r in records) / asked, abs=0.005)
    assert not [f for f in found["flags"] if "counted" in f]


def test_with_room_for_all_heads_the_oldest_is_still_there(new_run, prepared):
    records = measured(new_run("small-cache", **{"servers.small-cache.args": [*ARGS, "64"]}), prepared)
    assert shown(records)[-1] == ("oldest_after_fill", False, True)
    assert records[-1].engine_log["taken_from"] == "prompt cache"


def interrupted(run, prepared, monkeypatch, after):
    append, seen = run.append, []

    def interrupting(record):
        append(record)
        seen.append(record)
        if len(seen) == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "append", interrupting)
        with pytest.raises(KeyboardInterrupt):
            workloads.measure(run, prepared[0].path, prepared[1])


def test_a_round_split_by_a_restart_brings_the_cache_back_before_it_goes_on(new_run, prepared, monkeypatch):
    run = new_run("small-cache")
    interrupted(run, prepared, monkeypatch, after=5)  # the warm-up and four cases
    records = measured(run, prepared)
    later = [r for r in records if r.boot == 2]
    again = [(case, True, cached) for case, warmup, cached in WHOLE[:4]]
    assert shown(later) == [*again, *WHOLE[4:]]
    first = {r.case: r.prompt_sha256 for r in records if r.boot == 1}
    assert {r.case: r.prompt_sha256 for r in later if r.case in first} == first, "the same round, the same prompts"
    counted = [r.case for r in records if not r.warmup]
    assert counted == [case for case, warmup, _ in WHOLE if not warmup]
    assert not [f for f in result_of(run, prepared)["flags"] if "lack an answer" in f or "counted" in f]


def test_a_server_that_dies_in_a_round_goes_on_in_the_same_state(new_run, prepared, monkeypatch):
    run = new_run("small-cache")
    append, killed = run.append, []

    def killing(record):
        append(record)
        if record.case == "changed_head" and not killed:
            killed.append(os.kill(servers(run)[0].pid, signal.SIGKILL))

    monkeypatch.setattr(run, "append", killing)
    records = measured(run, prepared)
    dead = next(r for r in records if r.status == "engine_died")
    assert dead.case == "original_again"
    assert shown(r for r in records if r.status == "ok" and not r.warmup) == [s for s in WHOLE if not s[1]]


def test_a_server_that_dies_of_what_fills_the_cache_has_died_in_the_case_behind(new_run, prepared, monkeypatch):
    run = new_run("small-cache")
    append = run.append

    def killing(record):
        append(record)
        if record.case == "fill_1" or (record.case == "uncached" and record.warmup):
            for process in servers(run):
                process.kill()

    monkeypatch.setattr(run, "append", killing)
    with pytest.raises(MeasureFailure, match="died 4 times, last during prefix oldest_after_fill"):
        workloads.measure(run, prepared[0].path, prepared[1])
    dead = [(r.boot, r.case, r.error) for r in read(run) if r.status == "engine_died" and not r.warmup]
    assert [d[:2] for d in dead] == [
        (1, "newest_after_fill"),
        (2, "newest_after_fill"),
        (3, "oldest_after_fill"),
        (4, "oldest_after_fill"),
    ], "twice each, then given up"
    assert all(error.startswith("in new_tail, which is asked before it: ") for _, _, error in dead[1:])


def test_page_cache_and_prompt_cache_are_cold_and_warm_apart(new_run, prepared, tmp_path):
    run = new_run("mmap", repeats=2)
    own = tmp_path / "weights.gguf"  # what another process has mapped cannot be put out of the page cache
    shutil.copy(prepared[1], own)
    prepared = prepared[0], own
    records = measured(run, prepared)
    assert shown(records) == 2 * [
        ("first", False, False),
        ("second", False, True),
        ("restarted", False, False),
        ("restored", False, True),
    ]
    for repeat in (0, 1):
        mine = [r for r in records if r.repeat == repeat and not r.warmup]
        assert len({r.prompt_sha256 for r in mine}) == 1
        assert [r.boot for r in mine] == [3 * repeat + n for n in (1, 1, 2, 3)]
    started = runs.boots(run.path)
    assert [(b["case"], b["repeat"], b["page_cache"]) for b in started.values()] == [
        (case, repeat, state)
        for repeat in (0, 1)
        for case, state in (("first", "evicted"), ("restarted", "warm"), ("restored", "warm"))
    ]
    for boot in started.values():
        share = boot["weights_cached_share"]
        assert share <= page_cache.COLD if boot["page_cache"] == "evicted" else share >= page_cache.WARM, boot
    assert list((run.path / "slots").iterdir()) == [], "a restored prompt cache is removed"
    found = result_of(run, prepared)
    times = [r for r in found["metrics"] if r["metric"] == "startup.first_completion_s"]
    assert {(r["workload"], r["case"], r["n"]) for r in times} == {
        ("restart", case, 2) for case in ("first", "restarted", "restored")
    }, "no start of the server's ordinary ones"


def test_an_interrupted_restart_goes_on_with_the_case_it_was_in(new_run, prepared, monkeypatch):
    run = new_run("mmap")
    interrupted(run, prepared, monkeypatch, after=2)  # the warm-up and `first`
    records = measured(run, prepared)
    assert shown(records) == [
        ("first", False, False),
        ("first", True, False),
        ("second", False, True),
        ("restarted", False, False),
        ("restored", False, True),
    ]
    assert [b.get("case") for b in runs.boots(run.path).values()] == ["first", None, "restarted", "restored"]


def test_an_engine_that_keeps_no_prompt_cache_over_a_restart_skips_the_case_and_says_why(
    new_run, prepared, monkeypatch
):
    for name in ("slot", "slot_arguments"):
        monkeypatch.delattr(llama_cpp, name)
    run = new_run("mmap", repeats=2)
    records = measured(run, prepared)
    skipped = [r for r in records if r.status == "skipped"]
    assert [(r.case, r.repeat, r.boot, r.error) for r in skipped] == [
        ("restored", 0, 2, "llama-cpp cannot keep its prompt cache over a restart"),
        ("restored", 1, 4, "llama-cpp cannot keep its prompt cache over a restart"),
    ]
    assert set(runs.boots(run.path)) == {1, 2, 3, 4}, "no start for what cannot be asked"
    flags = result_of(run, prepared)["flags"]
    assert (
        "restored of restart (mmap) was not asked: llama-cpp cannot keep its prompt cache over a restart" in flags
    )
    assert not [f for f in flags if "failed" in f or "lack an answer" in f]


def test_a_prompt_cache_that_was_not_saved_is_not_restored(new_run, prepared, monkeypatch):
    slot = llama_cpp.slot
    monkeypatch.setattr(llama_cpp, "slot", lambda action, file: slot(action, f"none/{file}"))
    records = measured(new_run("mmap"), prepared)
    assert (records[-1].case, records[-1].status) == ("restored", "skipped")
    assert "no prompt cache was saved" in records[-1].error


def test_locked_memory_is_locked_or_said_not_to_be(new_run, prepared):
    run = new_run("mlock")
    measured(run, prepared)
    for boot in runs.boots(run.path).values():
        assert boot["effective"]["load_mode"] == "mmap+mlock"
        refused = "memory_lock" in boot["effective"]
        log = "".join(p.read_text() for p in (run.path / "boots").glob("*.log"))
        assert refused == ("failed to mlock" in log)
    assert run_folder.read_json(run.path / "status.json")["outcome"] == "running"
