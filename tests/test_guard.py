"""What must not go on is stopped, with what was found, the limit and what to do; what was measured is kept."""

import json
import os
import sys
from pathlib import Path

import psutil
import pytest
from test_server import marker, start  # noqa: F401
from test_supervisor import alive, gone, soon
from test_telemetry import rows, told

from llmrepro import catalog, guard, guard_log, limits, parameters, run_folder, stages, telemetry, workloads
from llmrepro import run as runs
from llmrepro.comparison import ArmFailure
from llmrepro.guard import GuardStop, Listener
from llmrepro.limits import FATAL_XIDS, Limits

HOT = Path(__file__).with_name("hot_sampler.py")
HOST = {"device": "host", "temperature_c": None, "free_gib": 8.0, "swap_free_gib": 0.0, "disk_free_gib": 40.0}
GPU = {"device": "gpu1", "temperature_c": 70, "memory_temperature_c": 80, "power_limit_w": 180.0, "lost": None}
LIMITS = Limits(core_c=80, memory_c=85, power_limit_w={1: 180.0})


def test_what_keeps_the_limits_goes_on():
    assert limits.broken([HOST, GPU], LIMITS) is None
    assert limits.broken([HOST | {"temperature_c": 99.0}], Limits()) is None, "without a limit none is broken"
    unknown = dict.fromkeys(("temperature_c", "memory_temperature_c", "power_limit_w"))
    assert limits.broken([HOST, GPU | unknown], LIMITS) is None, "what is not known is not held against it"
    assert limits.broken([HOST, GPU | {"temperature_c": 80, "memory_temperature_c": 85}], LIMITS) is None
    assert limits.broken([HOST, GPU | {"power_limit_w": 181.0}], LIMITS) is None, "drivers round"
    assert limits.broken([HOST | {"free_gib": 0.1, "swap_free_gib": 4.0}], LIMITS) is None, "there is swap left"


@pytest.mark.parametrize(
    ("host", "card", "said"),
    [
        ({}, {"temperature_c": 81}, "GPU 1 was at 81 °C, and the recipe allows 80"),
        ({}, {"memory_temperature_c": 86}, "the memory of GPU 1 was at 86 °C, and the recipe allows 85"),
        ({"temperature_c": 80.5}, None, "the CPU was at 80.5 °C, and the recipe allows 80"),
        ({}, {"power_limit_w": 250.0}, "power limit of GPU 1 is 250 W, and it was 180 W when the run began"),
        ({}, {"power_limit_w": 178.5}, "power limit of GPU 1 is 178.5 W, and it was 180 W when the run began"),
        ({}, {"lost": "GPU is lost"}, "GPU 1 is gone: NVML says GPU is lost"),
        ({"free_gib": 0.1, "swap_free_gib": 0.1}, {}, "0.20 GiB of memory were left, swap counted"),
        ({"disk_free_gib": 0.4}, {}, "0.40 GiB were free on the run folder's disk; below 0.5"),
    ],
)
def test_a_limit_that_is_broken_is_said_with_what_was_found_and_what_to_do(host, card, said):
    stop = limits.broken([HOST | host, *([] if card is None else [GPU | card])], LIMITS)
    assert said in stop.reason and len(stop.next_step) > 5


def test_the_cpus_temperature_is_no_limit_where_the_recipe_needs_a_gpu():
    assert limits.broken([HOST | {"temperature_c": 95.0}, GPU], LIMITS) is None


def test_gpus_that_are_gone_since_the_run_began():
    assert limits.fewer(2, Limits(gpu_count=2)) is None
    assert "NVML shows 1 of the 2 GPUs" in limits.fewer(1, Limits(gpu_count=2)).reason
    assert limits.fewer(0, Limits(gpu_count=1), "its driver is not loaded").reason.endswith(
        "when the run began: its driver is not loaded"
    )


def test_these_errors_stop_a_run_at_any_time_and_no_others():
    assert set(FATAL_XIDS) == {48, 63, 64, 74, 79, 94, 95}
    assert limits.fatal(31, 0, "") is None
    assert limits.fatal(94, 0, "Contained").reason.startswith(
        "the driver reported Xid 94 of GPU 0, an uncorrectable"
    )
    assert "of a GPU, " in limits.fatal(48, None, "").reason


# what the guard told


def line(kind, **facts) -> str:
    return json.dumps({"kind": kind, "at": "2026-01-01T00:00:00.000+00:00", "t_ns": 7, **facts}) + "\n"


WATCH = line("watch", limits={}, gpus=[0, 2], xids="nvml")
CHAT, LADDER = (
    catalog.load(catalog.DEFAULT).workloads[0].model_copy(update={"risky": risky}) for risky in (False, True)
)


def xid(number, gpu=0) -> str:
    return line("xid", xid=number, gpu=gpu, text="MMU Fault")


@pytest.fixture
def path(tmp_path):
    (tmp_path / "boots").mkdir()
    return tmp_path / guard_log.name(3)


def test_a_guard_file_is_read_as_far_as_it_is_written(path):
    assert guard_log.read(None) == guard_log.read(path) == guard_log.Guarded()
    path.write_text(WATCH + xid(31) + line("stop", reason="It was hot", next_step="let it cool")[:-9])
    seen = guard_log.read(path)
    assert (seen.stop, seen.xids_by, seen.gpus, seen.xids) == (None, "nvml", (0, 2), ((7, 31, 0, "MMU Fault"),))
    path.write_text(WATCH + line("watch", gpus=[0], xids="unknown: gone") + line("stop", reason="It was hot"))
    assert (guard_log.read(path).stop, guard_log.read(path).xids_by) == ((7, "It was hot", ""), "unknown: gone")
    path.write_text('{"kind": "wat\n' + WATCH)
    with pytest.raises(run_folder.RunError, match="line 1"):
        guard_log.read(path)


def test_the_latest_boots_guard_tells_why_a_run_stands(path):
    assert guard_log.latest(path.parents[1]).stop is None
    path.write_text(line("stop", reason="It was hot"))
    (path.parents[1] / guard_log.name(10)).write_text(WATCH)
    assert guard_log.latest(path.parents[1]).stop is None, "boot 10 is later than boot 3"


def test_a_server_that_the_guard_stopped_stops_the_run(path):
    path.write_text(WATCH)
    listener = Listener(path)
    assert listener.hear(CHAT) == listener.hear(LADDER) == []
    path.write_text(WATCH + line("stop", reason="GPU 0 was at 84 °C", next_step="let it cool down"))
    for workload in (CHAT, LADDER):
        with pytest.raises(GuardStop, match="^GPU 0 was at 84 °C$") as caught:
            listener.hear(workload)
        assert (caught.value.next_step, caught.value.stopped_by) == ("let it cool down", "guard")


def test_an_xid_is_a_rungs_own_result_and_anywhere_else_it_stops_the_run(path):
    path.write_text(WATCH + xid(31))
    assert Listener(path).hear(LADDER) == [31]
    for workload, more in ((CHAT, {}), (LADDER, {"rung": False})):  # of a ladder the warm-up is none
        path.write_text(WATCH + xid(31))
        with pytest.raises(GuardStop, match=f"Xid 31 of GPU 0 during {workload.id}: MMU Fault"):
            Listener(path).hear(workload, **more)
    assert guard_log.read(path).stop.reason.startswith("the driver reported Xid 31"), (
        "one place tells of every stop"
    )


def test_an_xid_is_heard_once(path):
    path.write_text(WATCH + xid(31))
    listener = Listener(path)
    assert listener.hear(LADDER) == [31] and listener.hear(CHAT) == []
    path.write_text(path.read_text() + xid(13, gpu=None) + xid(43))
    assert listener.hear(LADDER) == [13, 43], "of a card that is not known too"


def test_errors_of_cards_that_the_run_does_not_use_stop_nothing(path):
    path.write_text(WATCH + xid(31, gpu=1))
    assert Listener(path).hear(CHAT) == []
    assert Listener(None).hear(CHAT) == [], "without a sampler nothing is heard"


def test_a_stage_that_the_guard_ends_is_stopped_and_says_why_and_how_to_go_on(tmp_path):
    run = runs.create(parameters.checked({"runs_dir": str(tmp_path)}))
    (run.path / "records.jsonl").touch()
    with pytest.raises(GuardStop), run.stage("measure"):
        raise GuardStop("GPU 0 was at 84 °C, and the recipe allows 80", "let it cool down")
    status = run_folder.status(run.path)
    assert (status["outcome"], status["stage"], status["stopped_by"]) == ("stopped", "measure", "guard")
    assert status["reason"] == "GPU 0 was at 84 °C, and the recipe allows 80"
    assert status["next_step"].startswith("let it cool down; then go on with `llmrepro run --resume ")


def test_a_study_is_stopped_by_the_guard_when_nothing_else_ended_an_arm():
    stop, failure = GuardStop("It was hot", "let it cool"), RuntimeError("The server died.")
    assert (ArmFailure({"a": stop}).stopped_by, ArmFailure({"a": stop}).next_step) == ("guard", "let it cool")
    assert ArmFailure({"a": stop, "b": failure}).stopped_by is None


def test_the_report_of_a_stopped_run_still_says_who_stopped_it(tmp_path):
    run = runs.create(parameters.checked({"runs_dir": str(tmp_path)}))
    run.write_json("machine.json", {**stages.machine_.describe(tmp_path), "gpus": []})
    (run.path / "boots").mkdir()
    guarded = run.path / guard_log.name(1)
    for text, by in ((line("stop", reason="It was hot", next_step="let it cool"), "guard"), (WATCH, "person")):
        guarded.write_text(text)
        stages.finish(run)
        assert run_folder.read_json(run.path / "status.json")["stopped_by"] == by
    run.close()


# a server under guard


def sampler(folder, *options, boot=1) -> list[str]:
    return [sys.executable, str(HOT), str(folder), str(boot), "--gpus", "1", *options]


def test_a_server_under_guard_is_ended_in_order_and_its_exit_says_why(start, marker, tmp_path):  # noqa: F811
    with start("--family", sampler=sampler(tmp_path, "--core-c", "80")) as it:
        assert it.guard_file == tmp_path / guard_log.name(1) and told(tmp_path)[0]["kind"] == "watch"
        assert soon(lambda: len(rows(tmp_path, "gpu0")) >= 2) and it.ended() is None
        family = sum(p.memory_info().rss for p in alive(marker))
        assert float(rows(tmp_path, "host")[-1]["server_gib"]) == pytest.approx(family / 2**30, rel=0.2)
        (tmp_path / "hot").touch()
        assert soon(it.ended)
        assert gone(marker), "with its whole family"
        reason = "the guard stopped it: GPU 0 was at 84 °C, and the recipe allows 80"
        assert json.loads((tmp_path / "boots" / "1.exit.json").read_text())["reason"] == reason
        assert reason in it.last_words()
        with pytest.raises(GuardStop, match="84 °C"):
            Listener(it.guard_file).hear(CHAT)


def test_a_sampler_that_is_killed_ends_nothing(start, marker, tmp_path):  # noqa: F811
    with start(sampler=sampler(tmp_path)) as it:
        assert soon(lambda: rows(tmp_path))
        (sampler_,) = [p for p in alive(str(HOT)) if str(tmp_path) in p.cmdline()]
        sampler_.kill()
        assert soon(lambda: str(HOT) not in [w for p in alive(str(tmp_path)) for w in p.cmdline()])
        last = len(rows(tmp_path))
        assert it.ended() is None and alive(marker)
        assert Listener(it.guard_file).hear(CHAT) == []
    assert len(rows(tmp_path)) == last
    assert "the sampler ended with -9" in (tmp_path / "boots" / "1.supervisor.log").read_text()


def test_a_server_that_is_stopped_while_it_loads_is_the_guards_stop(start, marker, tmp_path):  # noqa: F811
    (tmp_path / "hot").touch()
    guarded = guard.heeded(tmp_path / guard_log.name(1))
    with (
        pytest.raises(GuardStop, match="84 °C"),
        guarded,
        start("--loading", sampler=sampler(tmp_path, "--core-c", "80")),
    ):
        pytest.fail("it was called ready")
    assert not alive(marker)


def test_other_failures_keep_their_word(path):
    path.write_text(WATCH)
    with pytest.raises(ZeroDivisionError), guard.heeded(path):
        1 / 0  # noqa: B018


def test_the_sampler_of_a_boot_is_told_what_the_recipe_allows(tmp_path):
    recipe = catalog.load("qwen3.8-27b/vllm-dflash2--cmp-170hx")
    words = guard.sampler(tmp_path, 4, recipe, tmp_path / "4.pid")
    asked = telemetry._parser().parse_args(words[4:])
    assert (asked.folder, asked.boot, asked.gpus, asked.core_c, asked.memory_c) == (str(tmp_path), 4, 1, 80, 85)
    assert asked.pid_file == tmp_path / "4.pid"
    assert "--core-c" not in guard.sampler(tmp_path, 4, catalog.load(catalog.DEFAULT))


def test_beside_a_server_of_somebody_else_only_the_machine_is_sampled(tmp_path):
    (tmp_path / "boots").mkdir()
    with guard.beside(tmp_path, 2, catalog.load(catalog.DEFAULT)) as guarded:
        assert guard_log.read(guarded).xids_by is not None and soon(lambda: len(rows(tmp_path)) >= 2)
        processes = [p for p in psutil.Process().children() if "llmrepro.telemetry" in p.cmdline()]
        assert len(processes) == 1 and os.getsid(processes[0].pid) != os.getsid(0), "an interrupt is not for it"
    assert not processes[0].is_running()
    assert {row["server_gib"] for row in rows(tmp_path)} == {""} and rows(tmp_path)[-1]["busy"] != ""


@pytest.mark.engine
def test_a_run_that_the_guard_stops_keeps_its_rows_and_is_gone_on_with(tmp_path, prepared, monkeypatch):
    given = {"workloads": ["chat"], "overrides": {"workloads.chat.max_tokens": 12}, "repeats": 2}
    run = runs.create(parameters.checked({"runs_dir": str(tmp_path), **given}))
    append, own = run.append, guard.sampler
    hot = lambda folder, boot, *_: sampler(folder, "--core-c", "80", boot=boot)  # noqa: E731

    def heating(record):
        append(record)
        if not record.warmup:
            (run.path / "hot").touch()
            assert soon(lambda: guard_log.latest(run.path).stop)

    monkeypatch.setattr(run, "append", heating)
    monkeypatch.setattr(guard, "sampler", hot)
    with pytest.raises(GuardStop, match="GPU 0 was at 84 °C"), run.stage("measure"):
        workloads.measure(run, prepared[0].path, prepared[1])
    kept = run_folder.read_lines(run.path / "records.jsonl")
    assert [(r["status"], r["warmup"]) for r in kept] == [("ok", True), ("ok", False)], "not the one in flight"
    assert run_folder.status(run.path)["stopped_by"] == "guard"
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(run.path)], "a server is left"
    monkeypatch.setattr(run, "append", append)
    monkeypatch.setattr(guard, "sampler", own)
    with run.stage("measure"):
        workloads.measure(run, prepared[0].path, prepared[1])
    run.close()
    asked = [
        (r["case"], r["repeat"]) for r in run_folder.read_lines(run.path / "records.jsonl") if not r["warmup"]
    ]
    assert len(asked) == len(set(asked)) == 2 * len(CHAT.cases)
    assert {row["boot"] for row in rows(run.path, "host")} == {"1", "2"}
    sampled = [row for row in rows(run.path, "host") if row["boot"] == "2" and row["server_gib"]]
    assert max(float(row["server_gib"]) for row in sampled) > 0.1
