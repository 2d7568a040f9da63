"""The run folder tells the truth about how a run ended, and loses nothing that was measured."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from llmrepro import catalog, comparison, parameters, run_folder
from llmrepro import run as runs
from llmrepro.run_folder import RunError


class Line(BaseModel):
    server: str
    n: int


def made(tmp_path, **values):
    return runs.create(parameters.checked({"runs_dir": str(tmp_path), **values}))


def test_a_folder_holds_the_resolved_recipe_its_parameters_and_its_prompts(tmp_path):
    run = made(tmp_path, repeats=2)
    assert run.path.parent == tmp_path / "smollm2-135m" / "llama-cpp--cpu"
    assert {w.repeats for w in run.recipe.workloads} == {2}
    assert run.parameters.repeats == 2
    assert len(run_folder.read_json(run.path / "prompts.json")) == 13
    assert run_folder.status(run.path)["outcome"] == "running"


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    begun = made(tmp_path)
    begun.close()
    there = set(tmp_path.rglob("*"))
    monkeypatch.setattr(runs.shutil, "disk_usage", lambda _path: SimpleNamespace(free=99_000_000))
    for values in ({}, {"resume": str(begun.path)}, {"runs_dir": str(tmp_path / "not" / "made")}):
        with pytest.raises(RunError, match="has 99 MB free, and a run wants 100; make room"):
            made(tmp_path, **values)
    with pytest.raises(RunError, match="has 99 MB free"):
        comparison.create(comparison.StudyParameters(runs_dir=str(tmp_path)))
    assert set(tmp_path.rglob("*")) == there


def test_two_runs_in_one_second_get_two_folders(tmp_path):
    assert made(tmp_path).path != made(tmp_path).path


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"recip": "x"}, "no parameter is called 'recip'; did you mean 'recipe'?"),
        ({"mode": "life"}, "parameter mode: Input should be 'auto', 'live' or 'published', found 'life'"),
        ({"repeats": "5"}, "parameter repeats: .*valid integer"),
        ({"repeats": 0}, "parameter repeats: "),
        ({"resume": 7}, "parameter resume: .*use -r for text that looks like a number"),
        ({"servers": "default"}, "parameter servers: .*written as YAML.*give them with -y"),
    ],
)
def test_a_wrong_parameter_is_refused_with_what_would_do(values, said):
    with pytest.raises(RunError, match=said):
        parameters.checked(values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"servers": ["defalt"]}, "has no server 'defalt'; did you mean 'default'?"),
        ({"overrides": {"workloads.chat.repeat": 2}}, "unknown key; did you mean 'repeats'?"),
        ({"overrides": {"workloads.chatt.repeats": 2}}, "no entry 'chatt'; did you mean 'chat'?"),
        ({"overrides": {"servers.default.args.0.x": 2}}, "nothing lies below"),
        ({"overrides": {"workloads.chat.max_tokens": "many"}}, "valid integer"),
        ({"resume": "/nonexistent"}, "is no run folder"),
        ({"runs_dir": "/proc/nowhere"}, "give another runs_dir"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_happens(tmp_path, values, said):
    with pytest.raises(RunError, match=said):
        made(tmp_path, **values)


def test_an_override_changes_the_resolved_recipe_only(tmp_path):
    run = made(tmp_path, overrides={"workloads.chat.max_tokens": 20, "servers.0.args": ["--ctx-size", "4096"]})
    assert run.recipe.workloads[0].max_tokens == 20
    assert run.recipe.servers[0].args == ["--ctx-size", "4096"]
    assert runs.load_recipe(run.path, "recipe.committed.json") == catalog.load(catalog.DEFAULT)


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    run = made(tmp_path)
    with pytest.raises(RunError, match="is being written by another process"):
        runs.Run(run.path)
    run.close()
    runs.Run(run.path)


def test_stages_move_the_status_and_an_error_says_which(tmp_path):
    run = made(tmp_path)
    with run.stage("measure"):
        assert run_folder.status(run.path) | {"at": 0} == {"outcome": "running", "stage": "measure", "at": 0}
    with pytest.raises(ZeroDivisionError), run.stage("results"):
        raise ZeroDivisionError("nought")
    status = run_folder.status(run.path)
    assert (status["outcome"], status["stage"], status["reason"]) == ("failed", "results", "nought")
    assert status["next_step"] == "run again: nothing was measured yet"
    run.append(Line(server="a", n=0))
    with pytest.raises(ZeroDivisionError), run.stage("results"):
        raise ZeroDivisionError("nought")
    assert f"--resume {run.path}" in run_folder.status(run.path)["next_step"]


def test_a_person_who_stops_a_cell_can_run_it_again(tmp_path):
    run = made(tmp_path)
    with pytest.raises(KeyboardInterrupt), run.stage("measure"):
        raise KeyboardInterrupt
    assert run_folder.status(run.path)["outcome"] == "stopped"
    assert not run_folder.held(run.path)
    with run.stage("measure"):
        assert run_folder.held(run.path)


def test_records_survive_a_kill_and_only_the_torn_last_line_is_lost(tmp_path):
    run = made(tmp_path)
    run.close()
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from pydantic import BaseModel
        from llmrepro.run import Run
        class Line(BaseModel):
            server: str
            n: int
        run = Run(Path({str(run.path)!r}))
        run.set_status("running", "measure")
        n = 0
        while True:
            run.append(Line(server="s" * 2000, n=n))
            n += 1
            print(n, flush=True)
        """),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    while int(child.stdout.readline()) < 50:
        pass
    os.kill(child.pid, signal.SIGKILL)
    told = [int(line) for line in child.stdout.read().split()] or [50]
    child.wait()
    records = run_folder.read_lines(run.path / "records.jsonl")
    assert [r["n"] for r in records] == list(range(len(records)))
    assert len(records) >= max(told) - 1 >= 49
    status = run_folder.status(run.path)
    assert status["outcome"] == "interrupted"
    assert "ended during measure" in status["reason"]


def test_a_torn_line_is_dropped_before_the_next_record(tmp_path):
    run = made(tmp_path)
    run.append(Line(server="a", n=0))
    with open(run.path / "records.jsonl", "ab") as file:
        file.write(b'{"server":"a","n":')
    assert [r["n"] for r in run_folder.read_lines(run.path / "records.jsonl")] == [0]
    run.append(Line(server="a", n=1))
    assert [r["n"] for r in run_folder.read_lines(run.path / "records.jsonl")] == [0, 1]


def test_a_broken_line_elsewhere_is_not_forgiven(tmp_path):
    run = made(tmp_path)
    for n in range(3):
        run.append(Line(server="a", n=n))
    path = run.path / "records.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"n":1}', b'"n":'))
    with pytest.raises(RunError, match="line 2: not a record"):
        run_folder.read_lines(path)


def test_resume_refuses_another_recipe_and_other_parameters(tmp_path):
    run = made(tmp_path, repeats=2)
    run.close()
    runs.create(parameters.checked({"resume": str(run.path)})).close()
    with pytest.raises(RunError, match="repeats was 2 in .* and is now 3"):
        runs.create(parameters.checked({"resume": str(run.path), "repeats": 3}))
    changed = json.loads((run.path / "recipe.json").read_text())
    changed["engine"]["version"] = "1"
    (run.path / "recipe.json").write_text(json.dumps(changed))
    with pytest.raises(RunError, match="has changed since"):
        runs.create(parameters.checked({"resume": str(run.path)}))


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(RunError, match="is missing; is .* a whole run folder"):
        run_folder.read_json(tmp_path / "status.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(RunError, match="is broken"):
        run_folder.read_json(tmp_path / "x.json")
