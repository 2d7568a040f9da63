"""A study's run: its folder, its turns, its arms, what it refuses, and how it goes on."""

import contextlib
import json

import pytest
import sampled
from folders import boot, chat, fill
from folders import folder as run_folder_of
from studies import LLAMA, VLLM, both, claim, folder, measured, written

from llmrepro import compare_stages, comparison, results, run_folder, study_results
from llmrepro import run as runs
from llmrepro.comparison import ArmFailure, StudyParameters
from llmrepro.parameters import checked
from llmrepro.run_folder import RunError


def made(tmp_path, *claims, **values):
    given = {"study": str(written(tmp_path, *claims)), "runs_dir": str(tmp_path / "runs"), "trust": True}
    return comparison.create(checked(given | values, StudyParameters))


def test_its_folder_holds_the_study_and_an_ordinary_run_for_every_arm(tmp_path):
    run = made(tmp_path, claim(), boots=2, repeats=4)
    assert run.path.parent == tmp_path / "runs" / "smollm2-135m" / "tested"
    assert run.study.boots == 2
    assert list(run.arms) == ["llama-cpp", "vllm"]
    for arm, recipe in (("llama-cpp", LLAMA), ("vllm", VLLM)):
        own = run.arms[arm]
        assert own.recipe.id == recipe
        assert {s.boots for s in own.recipe.servers} == {2}
        assert {w.repeats for w in own.recipe.workloads} == {4}
        assert (own.path / "recipe.committed.json").exists()
    assert run.arms["vllm"].parameters.servers == ["eager"]


def test_an_override_is_for_every_arm_or_for_the_one_it_names(tmp_path):
    given = {"workloads.chat.max_tokens": 20, "vllm:workloads.prefill.max_tokens": 5}
    run = made(tmp_path, overrides=given)
    asked = {
        a: {w.id: w.max_tokens for w in r.recipe.workloads if w.id in ("chat", "prefill")}
        for a, r in run.arms.items()
    }
    assert asked == {"llama-cpp": {"chat": 20, "prefill": 4}, "vllm": {"chat": 20, "prefill": 5}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"study": None}, "neither a study nor runs are given"),
        ({"overrides": {"lama-cpp:a": 1}}, "no arm is called 'lama-cpp'; did you mean 'llama-cpp'?"),
        ({"overrides": {"workloads.chat.max_token": 1}}, "did you mean 'max_tokens'?"),
        ({"resume": "/nonexistent"}, "is no study's run folder"),
        ({"runs": ["/nonexistent", "/other"]}, "is no run folder"),
        ({"boots": 0}, "parameter boots: "),
        ({"runs": "x"}, "parameter runs: .*give them with -y"),
        ({"stduy": "x"}, "no parameter is called 'stduy'; did you mean 'study'?"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_happens(tmp_path, values, said):
    with pytest.raises(RunError, match=said):
        made(tmp_path, **values)
    assert not (tmp_path / "runs").exists()


def test_recipes_from_elsewhere_wait_for_trust_before_a_folder_is_made(tmp_path):
    mine = run_folder_of(tmp_path, change=lambda recipe: None)  # copies the recipe's folder
    path = written(tmp_path, arms=[{"id": "a", "recipe": LLAMA}, {"id": "b", "recipe": "model/llama-cpp--cpu"}])
    given = {"study": str(path), "runs_dir": str(tmp_path / "none")}
    with pytest.raises(RunError, match="then give --trust"):
        comparison.create(checked(given, StudyParameters))
    assert not (tmp_path / "none").exists()
    assert mine.exists()
    comparison.create(checked(given | {"mode": "published"}, StudyParameters)).close()


def test_arms_take_turns(tmp_path):
    order = []
    comparison.take_turns({"a": "A", "b": "B"}, 3, lambda run, boot: order.append((run, boot)))
    assert order == [("A", 0), ("B", 0), ("A", 1), ("B", 1), ("A", 2), ("B", 2)]


def test_an_arm_that_fails_loses_its_turns_and_the_others_go_on():
    order = []

    def measure(run, boot):
        order.append((run, boot))
        if run == "A":
            raise RunError("its server died")

    with pytest.raises(ArmFailure, match="^a: its server died$"):
        comparison.take_turns({"a": "A", "b": "B"}, 2, measure)
    assert order == [("A", 0), ("B", 0), ("B", 1)]


def test_a_person_who_stops_it_stops_all_of_it():
    def measure(run, boot):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        comparison.take_turns({"a": "A", "b": "B"}, 2, measure)


def test_a_stage_that_fails_says_how_to_go_on_with_the_study(tmp_path):
    run = made(tmp_path)
    with pytest.raises(ZeroDivisionError), run.stage("measure"):
        raise ZeroDivisionError("nought")
    assert run_folder.status(run.path)["next_step"] == "run again: nothing was measured yet"
    fill(run.arms["vllm"], *measured("eager", (50.0,)))
    with pytest.raises(ZeroDivisionError), run.stage("measure"):
        raise ZeroDivisionError("nought")
    assert f"`llmrepro compare --resume {run.path}`" in run_folder.status(run.path)["next_step"]


def test_a_folder_and_its_arms_have_one_writer_at_a_time(tmp_path):
    run = made(tmp_path)
    assert run.arms
    with pytest.raises(RunError, match="is being written by another process"):
        comparison.StudyRun(run.path)
    with pytest.raises(RunError, match="is being written by another process"):
        runs.Run(run.path / "arms" / "vllm")
    run.close()
    runs.Run(run.path / "arms" / "vllm").close()


def test_it_goes_on_as_it_was_and_nothing_else(tmp_path):
    run = made(tmp_path, boots=2)
    run.close()
    again = comparison.create(checked({"resume": str(run.path)}, StudyParameters))
    assert again.path == run.path
    again.close()
    with pytest.raises(RunError, match="boots was 2 in .* and is now 3"):
        comparison.create(checked({"resume": str(run.path), "boots": 3}, StudyParameters))
    written(tmp_path, claim())
    with pytest.raises(RunError, match=r"the study .*study\.json has changed since"):
        comparison.create(checked({"resume": str(run.path)}, StudyParameters))


def test_runs_that_are_there_are_copied_and_judged_by_the_study(tmp_path):
    path = folder(tmp_path, [claim()], both())
    given = {"study": str(tmp_path / "study.json"), "runs_dir": str(tmp_path / "runs2")}
    arms = [str(path / "arms" / arm) for arm in ("vllm", "llama-cpp")]  # in another order than the study's
    with contextlib.closing(comparison.create(checked({**given, "runs": arms}, StudyParameters))) as run:
        assert list(run.arms) == ["llama-cpp", "vllm"]
        assert run.arms["vllm"].recipe.id == VLLM
        result = study_results.compute(run.path)
    assert [c["word"] for c in result["comparisons"]] == ["reproduced"]
    (path / "arms" / "vllm" / "records.jsonl").unlink()  # the copy does not need it
    assert study_results.compute(run.path) == result


def test_a_run_that_was_copied_gives_the_same_result(tmp_path):
    path = folder(tmp_path, [claim()], both())
    arms = [path / "arms" / arm for arm in ("llama-cpp", "vllm")]
    sampled.write(arms[0], [sampled.host(s, temperature_c=60.0) for s in range(3)])
    sampled.guard(arms[0], 1)
    given = {"study": None, "runs": [str(a) for a in arms], "runs_dir": str(tmp_path / "runs2")}
    with contextlib.closing(comparison.create(checked(given, StudyParameters))) as run:
        copies = [results.compute(run.arms[arm].path) for arm in run.arms]
    assert copies == [results.compute(arm) for arm in arms]
    assert {"telemetry.csv", "boots/1.guard.jsonl"} <= copies[0]["inputs"].keys()


def test_what_a_link_in_a_run_points_at_is_not_brought_along(tmp_path):
    path = folder(tmp_path, [claim()], both())
    (tmp_path / "secret").write_text("secret")
    arms = [path / "arms" / arm for arm in ("llama-cpp", "vllm")]
    for name in ("x", "boots/99.json", "weights.json"):
        (arms[0] / name).unlink(missing_ok=True)
        (arms[0] / name).symlink_to(tmp_path / "secret")
    given = {"study": None, "runs": [str(a) for a in arms], "runs_dir": str(tmp_path / "runs2")}
    with contextlib.closing(comparison.create(checked(given, StudyParameters))) as run:
        there = [p for p in run.path.rglob("*") if p.is_file() and p.read_bytes() == b"secret"]
    assert there == []


def test_a_run_is_not_copied_into_itself(tmp_path):
    path = folder(tmp_path, [claim()], both())
    arms = [str(path / "arms" / arm) for arm in ("llama-cpp", "vllm")]
    with pytest.raises(RunError, match="lies inside the run folder"):
        comparison.create(checked({"study": None, "runs": arms, "runs_dir": f"{arms[0]}/more"}, StudyParameters))
    assert not (path / "arms" / "llama-cpp" / "more").exists()


def test_an_arm_between_its_turns_ends_with_its_study_and_not_of_itself(tmp_path, monkeypatch):
    run = made(tmp_path, claim(), boots=2)
    monkeypatch.setattr(compare_stages.stages, "lacks", lambda _run: [])

    def measured_once(one, _boot):
        with one.stage("measure"):
            if one.path.name == "llama-cpp":
                raise RuntimeError("its server died")

    monkeypatch.setattr(compare_stages.stages, "measure", measured_once)
    with pytest.raises(ArmFailure, match="its server died"):
        compare_stages.measure(run)
    ends = {arm: run_folder.status(one.path) for arm, one in run.arms.items()}
    assert ends["llama-cpp"]["outcome"] == "failed"
    assert (ends["vllm"]["outcome"], ends["vllm"]["stopped_by"]) == ("stopped", "study")
    assert f"llmrepro compare --resume {run.path}" in ends["vllm"]["next_step"]


def test_runs_that_no_study_speaks_of_are_compared_without_claims(tmp_path):
    path = folder(tmp_path, [claim()], both())
    arms = [str(path / "arms" / arm) for arm in ("llama-cpp", "vllm")]
    given = {"study": None, "runs": arms, "runs_dir": str(tmp_path / "runs2")}
    with contextlib.closing(comparison.create(checked(given, StudyParameters))) as run:
        assert run.study.comparisons == []
        assert list(run.arms) == ["llama-cpp--cpu", "vllm--cpu"]
        assert len(study_results.compute(run.path)["break_even"]) == 1


def test_two_runs_of_one_recipe_are_two_arms(tmp_path):
    one = run_folder_of(tmp_path / "one", chat(), [boot()])
    two = run_folder_of(tmp_path / "two", chat(tps=90.0), [boot()])
    given = {"study": None, "runs": [str(one), str(two)], "runs_dir": str(tmp_path / "runs2")}
    with contextlib.closing(comparison.create(checked(given, StudyParameters))) as run:
        assert list(run.arms) == ["llama-cpp--cpu", "llama-cpp--cpu-2"]


def test_runs_that_do_not_fit_the_study_are_refused_with_what_to_do(tmp_path):
    one = run_folder_of(tmp_path / "one", chat(), [boot()])
    two = run_folder_of(tmp_path / "two", chat(), [boot()])
    for given, said in (
        ({"runs": [str(one), str(two)]}, "give such runs, or study=None"),
        ({"runs": [str(one)]}, "two run folders or more"),
        ({"runs": [str(one), str(one)]}, "each once"),
    ):
        with pytest.raises(RunError, match=said):
            made(tmp_path, **given)
    held = runs.Run(one)
    with pytest.raises(RunError, match="is still being written"):
        made(tmp_path, runs=[str(one), str(two)])
    held.close()


def test_paths_among_the_parameters_are_made_whole(tmp_path, monkeypatch):
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = comparison.create(checked({"study": "study.json", "runs_dir": "runs", "trust": True}, StudyParameters))
    assert json.loads((run.path / "parameters.json").read_text())["study"] == str(tmp_path / "study.json")
    run.close()
