"""How long it holds: what may kill an engine comes last, climbs until a rung fails, and says how far it held."""

import os
import resource
import signal

import psutil
import pytest

from llmrepro import catalog, jobs, ladder, outcomes, parameters, results, run_folder, workloads
from llmrepro import run as runs
from llmrepro.claim import Value
from llmrepro.client import Record
from llmrepro.jobs import Job
from llmrepro.prompt_lengths import Lengths
from llmrepro.protocols import MeasureFailure
from llmrepro.recipe import RecipeError
from llmrepro.run_folder import RunError

CLIMB = {"workloads": ["chat", "ladder", "ladder-chat"], "repeats": 2}


def resolved(**given):
    params = parameters.checked(given)
    return parameters.resolved(catalog.load(catalog.DEFAULT), params), params


def row(job: Job, status="ok", *, boot=1, **more) -> dict:
    """A record's fields, as far as the plan looks at them."""
    fields = {"server": job.server, "boot": boot, "workload": job.workload, "case": job.case, "repeat": job.repeat}
    return {**fields, "warmup": False, "status": status, "xids": [], "stream_number": 0, **more}


# ---- the plan ------------------------------------------------------------------------------------------------


def test_what_may_kill_the_engine_is_asked_last_and_the_boot_that_is_up_goes_on():
    recipe, params = resolved(**CLIMB, overrides={"servers.default.boots": 2})
    plan = jobs.plan(recipe, params)
    rising = [j for j in plan if j.workload != "chat"]
    assert plan[-len(rising) :] == rising
    assert [j.replicate for j in plan if j.workload == "chat"] == 10 * [0] + 10 * [1]
    assert list(dict.fromkeys(j.replicate for j in rising)) == [1, 0]
    assert jobs.starts(recipe, plan) == 3


def test_a_profile_full_has_ladders_and_streams_and_the_quick_one_does_not():
    for recipe_id in (i for i in catalog.ids() if i.startswith("smollm2")):
        recipe = catalog.load(recipe_id)
        kinds = {
            profile: {
                jobs.workload_of(recipe, j).kind
                for j in jobs.plan(recipe, parameters.checked({"profile": profile}))
            }
            for profile in ("quick", "full")
        }
        assert kinds["quick"] == {"chat", "prefill"}
        assert kinds["full"] == {"chat", "prefill", "prefix", "restart", "ladder", "concurrency"}


def test_rungs_are_doubled_up_to_the_limit_or_as_the_recipe_says():
    up_to = {"workloads.ladder.lengths": [], "workloads.ladder.up_to": 1500}
    recipe, _ = resolved(overrides=up_to)
    assert next(w for w in recipe.workloads if w.id == "ladder").cases == ["128", "256", "512", "1024", "1500"]
    for overrides, said in (
        ({"workloads.ladder.lengths": [512, 256]}, "rise from rung to rung"),
        ({"workloads.ladder.up_to": 512}, "either `lengths` or `up_to`"),
        ({"workloads.ladder.lengths": []}, "either `lengths` or `up_to`"),
        ({"workloads.chat.up_to": 512}, "`up_to` belongs to a ladder workload"),
        ({"workloads.concurrency.streams": [1, 1]}, "stands twice"),
        ({"workloads.concurrency.streams": []}, "needs `prompts` and `streams`"),
        ({"workloads.prefill.risky": True}, "`risky` belongs to a chat workload"),
    ):
        with pytest.raises((RunError, RecipeError), match=said):
            resolved(overrides=overrides)


@pytest.fixture
def climbing():
    """The rungs of one ladder, two rounds, and what is left of them behind given rows."""
    short = {"workloads.ladder.lengths": [64, 128, 256], "workloads.ladder.repeats": 2}
    recipe, params = resolved(workloads=["ladder"], repeats=2, overrides=short)
    plan = jobs.plan(recipe, params)

    def left(rows):
        boots = {1: {"replicate": 0}, 2: {"replicate": 0}}
        return [(j.case, j.repeat) for j in jobs.left(recipe, params, boots, rows)]

    return plan, left


def test_a_ladder_ends_at_the_rung_that_fails_and_later_rounds_stay_below_it(climbing):
    plan, left = climbing
    assert left([]) == [("64", 0), ("128", 0), ("256", 0), ("64", 1), ("128", 1), ("256", 1)]
    for status in ("engine_died", "context_overflow", "timeout", "oom", "early_stop", "http_error"):
        assert left([row(plan[0]), row(plan[1], status)]) == [("64", 1)], status
    assert left([row(plan[0]), row(plan[1], xids=[31])]) == [("64", 1)], "an Xid fails a rung that was answered"
    assert left([row(plan[0]), row(plan[1], "skipped")]) == [("256", 0), ("64", 1), ("128", 1), ("256", 1)]


def test_an_engine_that_died_on_two_rungs_is_not_started_for_a_third(climbing):
    plan, left = climbing
    died = [row(plan[0]), row(plan[1]), row(plan[2], "engine_died")]
    assert left(died) == [("64", 1), ("128", 1)]
    assert left([*died, row(plan[3], "engine_died", boot=2)]) == []


def test_streams_are_asked_until_every_one_of_them_has_a_record():
    recipe, params = resolved(
        workloads=["concurrency"], repeats=1, overrides={"workloads.concurrency.streams": [1, 4]}
    )
    one, four = jobs.plan(recipe, params)
    assert jobs.requests(recipe, [one, four]) == 5
    rows = [row(four, stream_number=n) for n in range(4)]
    boots = {1: {"replicate": 0}}
    assert jobs.left(recipe, params, boots, rows[:3]) == [one, four]
    assert jobs.left(recipe, params, boots, rows) == [one]
    assert jobs.left(recipe, params, boots, [row(four, "skipped")]) == [one]
    assert jobs.left(recipe, params, boots, [row(four, "engine_died", stream_number=n) for n in range(4)]) == [
        one,
        four,
    ]


# ---- lengths -------------------------------------------------------------------------------------------------


def words(text: str) -> int:
    return len(text.split())


def test_a_chat_prompt_leaves_room_for_its_template_and_a_short_text_is_repeated():
    lengths = Lengths(words)
    lengths.learn("one two three", 3 + 30)
    text = lengths.prompt("alpha beta gamma " * 20, 200, "12345678")
    assert words(text) == 170
    assert text.startswith("12345678") and "[2]" in text
    with pytest.raises(MeasureFailure, match="with its salt and template one has 50 at least"):
        lengths.prompt("alpha", 40, "12345678")


def test_without_a_tokenizer_lengths_are_learned_from_what_the_server_counted():
    lengths = Lengths(None)

    def server(text: str) -> int:
        return 25 + len(text) // 5

    text = "Harbours are places where ships rest. " * 30
    lengths.learn("Say hello to the sea, in one short line.", server("Say hello to the sea, in one short line."))
    found = []
    for tokens in (200, 400, 800, 1600):
        prompt = lengths.prompt(text, tokens, "12345678")
        lengths.learn(prompt, server(prompt))
        found.append(server(prompt))
    assert found[1:] == [pytest.approx(n, rel=0.01) for n in (400, 800, 1600)]


# ---- on the real engine --------------------------------------------------------------------------------------

LENGTHS = [64, 128, 208, 256]


@pytest.fixture
def run(tmp_path, prepared):
    args = {s.id: s.args for s in catalog.load(catalog.DEFAULT).servers}
    overrides = {
        "servers.default.args": [*args["default"], "--ctx-size", "256"],
        "servers.four-slots.args": [*args["four-slots"], "--ctx-size", "1024"],
        "workloads.concurrency.streams": [1, 2],
        "workloads.concurrency.on": ["default", "four-slots"],
        **{f"workloads.{w}.lengths": LENGTHS for w in ("ladder", "ladder-chat")},
        **{f"workloads.{w}.max_tokens": 20 for w in ("ladder", "ladder-chat", "concurrency")},
    }
    given = {"runs_dir": str(tmp_path), "workloads": ["concurrency", "ladder", "ladder-chat"], "repeats": 2}
    run = runs.create(parameters.checked({**given, "overrides": overrides}))
    run.set_status("running", "measure")
    yield run
    run.close()
    assert not servers(run), "a server is left"


def servers(run):
    here = [p for p in psutil.process_iter(["cwd", "cmdline"]) if p.info["cwd"] == str(run.path)]
    return [p for p in here if "llmrepro.telemetry" not in (p.info["cmdline"] or [])]


def measured(run, prepared) -> list[Record]:
    workloads.measure(run, prepared[0].path, prepared[1])
    found = [Record.model_validate(r) for r in run_folder.read_lines(run.path / "records.jsonl")]
    return [r for r in found if not r.warmup]


@pytest.mark.engine
def test_ladders_hold_up_to_the_context_and_a_server_killed_in_a_rung_is_that_rungs_row(
    run, prepared, monkeypatch
):
    append = run.append

    def killing(*records):
        append(*records)
        if [r.case for r in records if r.workload == "ladder-chat" and not r.warmup] == ["64"] and not killed:
            killed.append(True)
            os.kill(servers(run)[0].pid, signal.SIGKILL)  # so that the rung of 128 finds it dead

    killed: list[bool] = []
    monkeypatch.setattr(run, "append", killing)
    asked = measured(run, prepared)
    assert jobs.missing(run) == []
    rungs = {
        name: [(r.case, r.repeat, r.status) for r in asked if r.workload == name]
        for name in ("ladder", "ladder-chat")
    }
    assert rungs["ladder"] == [
        *(("64", 0, "ok"), ("128", 0, "ok"), ("208", 0, "ok"), ("256", 0, "context_overflow")),
        *(("64", 1, "ok"), ("128", 1, "ok"), ("208", 1, "ok")),
    ]
    assert rungs["ladder-chat"] == [("64", 0, "ok"), ("128", 0, "engine_died"), ("64", 1, "ok")]
    (dead,) = [r for r in asked if r.status == "engine_died"]
    assert dead.killed and "not by the system for want of memory" in dead.error
    good = [r for r in asked if r.workload.startswith("ladder") and r.status == "ok"]
    assert [r.prompt_tokens for r in good] == [int(r.case) for r in good], "exact, the chat template counted in"
    assert len({r.prompt_sha256 for r in good}) == len(good), "every prompt has a salt of its own"
    assert {r.cached_tokens for r in good} == {0}
    assert all(0 < r.memory["server"] <= r.memory["server_peak"] for r in good)

    found = results.compute(run.path)
    held = {
        (r["workload"], r["metric"]): r["value"]
        for r in found["metrics"]
        if r["metric"] in ("verified_tokens", "failed_tokens")
    }
    assert held == {
        ("ladder", "verified_tokens"): 208,
        ("ladder", "failed_tokens"): 256,
        ("ladder-chat", "verified_tokens"): 64,
        ("ladder-chat", "failed_tokens"): 128,
    }
    ends = {r["case"]: r for r in found["metrics"] if (r["metric"], r["workload"]) == ("outcome", "ladder-chat")}
    assert ends["128"]["value"] == "killed"
    told = outcomes.judge(Value(failed_at=128), [ends["128"]])
    assert told.word == "not_evaluated" and "no failure of an engine" in told.reason
    boots = runs.boots(run.path)
    assert [b["server"] for b in boots.values()] == ["default", "four-slots", "default", "default"]

    together = [r for r in asked if r.workload == "concurrency"]
    refused = [r for r in together if r.status == "skipped"]
    assert {(r.server, r.case) for r in refused} == {("default", "2")}
    assert "works here on 1 request at a time" in refused[0].error
    pairs = [[r for r in together if (r.server, r.case, r.repeat) == ("four-slots", "2", n)] for n in (0, 1)]
    for a, b in pairs:
        assert (a.stream_number, b.stream_number, a.status, b.status) == (0, 1, "ok", "ok")
        assert abs(a.t_send_ns - b.t_send_ns) / 1e9 < min(a.t_done_s, b.t_done_s), "they overlap"
    speeds = {
        r["case"]: r for r in found["metrics"] if r["metric"] == "throughput_tps" and r["server"] == "four-slots"
    }
    assert {case: r["n"] for case, r in speeds.items()} == {"1": 2, "2": 2}
    assert not any("more than once" in flag for flag in found["flags"])


@pytest.mark.engine
def test_a_limit_of_memory_that_ends_the_server_is_a_row_of_its_own(run, prepared, monkeypatch):
    """RLIMIT_DATA, lowered to what the server has: the next rung's buffers do not fit."""
    append = run.append

    def limiting(*records):
        append(*records)
        if [r.case for r in records if r.workload == "ladder" and not r.warmup] == ["128"]:
            for process in servers(run):
                resource.prlimit(process.pid, resource.RLIMIT_DATA, (1 << 20, 1 << 20))

    monkeypatch.setattr(run, "append", limiting)
    asked = measured(run, prepared)
    ends = [(r.case, r.repeat, r.status) for r in asked if r.workload == "ladder"]
    assert ends[:2] == [("64", 0, "ok"), ("128", 0, "ok")]
    bad = [e for e in ends if e[2] != "ok"]
    assert len(bad) >= 1 and {status for _, _, status in bad} == {"oom"}, bad
    (reached,) = [
        r
        for r in results.compute(run.path)["metrics"]
        if (r["metric"], r["workload"]) == ("failed_tokens", "ladder")
    ]
    assert "oom" in reached["note"]


def test_how_far_it_held_is_told_of_each_ending():
    recipe, _ = resolved(overrides={"workloads.ladder.lengths": [64, 128, 256]})
    workload = next(w for w in recipe.workloads if w.id == "ladder")

    def answer(case, status="ok", **more):
        fields = {"server": "default", "boot": 1, "workload": "ladder", "repeat": 0, "warmup": False}
        fields |= {
            "prompt_sha256": "",
            "endpoint": "/v1/completions",
            "request": {},
            "started_at": "",
            "t_send_ns": 0,
        }
        return Record(**fields, case=case, status=status, **more)

    whole = ladder.of(workload, [answer("64", prompt_tokens=64), answer("128", prompt_tokens=130)])
    assert whole == (130, None, None, None, [])
    died = answer("128", "engine_died", error="gone", xids=[31, 31])
    assert ladder.of(workload, [answer("64", prompt_tokens=64), died]) == (
        64,
        128,
        "engine died, Xid 31",
        "engine died, Xid 31: gone",
        ["256"],
    )
    odd = answer("64", prompt_tokens=64, xids=[13])
    assert ladder.of(workload, [odd])[:2] == (None, 64)
    assert ladder.ending(odd) == "xid"
    assert ladder.of(workload, []) == (None, None, None, None, [])
