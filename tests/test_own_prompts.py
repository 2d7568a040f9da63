"""Prompts of the user's own: a suite, or what ladders are cut from; what is no prompts file is refused."""

import hashlib
import json
import os

import pytest

from llmrepro import catalog, comparison, conditions, findings, jobs, parameters, prompts, results, run_folder
from llmrepro import run as runs
from llmrepro.comparison import StudyParameters
from llmrepro.report import appendix
from llmrepro.run_folder import RunError

OPEN_JET = "qwen3.8-27b/open-jet--cmp-170hx"


@pytest.fixture
def made(tmp_path):
    found = []

    def make(content, name="mine.jsonl", **given):
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        asked = {"prompts_file": str(file), "runs_dir": str(tmp_path / "runs"), **given}
        found.append(runs.create(parameters.checked(asked)))
        return found[-1]

    yield make
    for run in found:
        run.close()


def lines(*told) -> str:
    return "".join(json.dumps(one) + "\n" for one in told)


def workload(run, name):
    return next(w for w in run.recipe.workloads if w.id == name)


def test_a_file_of_prompts_is_a_suite_asked_as_the_recipe_asks_its_own(made):
    run = made(lines({"id": "rivers", "text": "Name three rivers."}, {"text": "2 + 3 = ?"}), repeats=2)
    own, chat = workload(run, "own-prompts"), workload(run, "chat")
    assert own.cases == ["rivers", "prompt_2"]
    same = ("endpoint", "max_tokens", "sampling", "ignore_eos", "on", "warmup", "repeats")
    assert {n: getattr(own, n) for n in same} == {n: getattr(chat, n) for n in same}
    planned = {(j.workload, j.case) for j in jobs.plan(run.recipe, run.parameters)}
    assert {("own-prompts", "rivers"), ("chat", "code_runs"), ("prefill", "512")} <= planned
    assert prompts.texts(run.path)["own-prompts/rivers"] == "Name three rivers."


def test_the_recipes_claims_are_judged_on_its_own_prompts_all_the_same(made):
    run = made(lines({"text": "Name three rivers."}))
    committed = catalog.load(catalog.DEFAULT)
    assert run.recipe.claims == committed.claims
    found = conditions.compare(committed, run.recipe, {}, {})
    differs = {c.name for c in found if c.relation == "differs"}
    assert differs == {"workloads.own-prompts"}, "what was added is shown"
    for claim in run.recipe.claims:
        assert not differs & {c.name for c in conditions.of_claim(claim, found, {}, {})}, "and bars nothing"


def test_a_text_is_what_ladders_are_cut_from_and_then_the_prompt_differs(made):
    run = made("The mill stood at the river.\n" * 40, "mine.txt", workloads=["ladder"])
    text = ("The mill stood at the river.\n" * 40).strip("\n")
    assert workload(run, "ladder").text.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert prompts.texts(run.path)["ladder/text"] == text
    found = conditions.compare(catalog.load(catalog.DEFAULT), run.recipe, {}, {})
    assert {c.name.rpartition(".")[0] for c in found if c.relation == "differs"} <= {
        "workloads.ladder",
        "workloads.ladder-chat",
        "workloads.ladder.text",
        "workloads.ladder-chat.text",
    }
    assert results.compute(run.path)["verdicts"], "claims of other workloads are untouched"


def test_its_lengths_are_changed_like_those_of_any_workload(made):
    run = made(lines({"text": "Name three rivers."}), overrides={"workloads.own-prompts.max_tokens": 7})
    assert (workload(run, "own-prompts").max_tokens, workload(run, "chat").max_tokens) == (7, 48)


def test_a_run_is_gone_on_with_from_another_folder_and_refuses_a_changed_file(made, tmp_path, monkeypatch):
    run = made(lines({"text": "Name three rivers."}))
    run.close()
    monkeypatch.chdir("/")
    again = runs.create(parameters.checked({"resume": str(run.path)}))
    assert again.recipe == run.recipe
    again.close()
    (tmp_path / "mine.jsonl").write_text(lines({"text": "Name four rivers."}))
    with pytest.raises(RunError, match="has changed since"):
        runs.create(parameters.checked({"resume": str(run.path)}))
    (tmp_path / "mine.jsonl").unlink()
    with pytest.raises(RunError, match="mine.jsonl is no file"):
        runs.create(parameters.checked({"resume": str(run.path)}))


@pytest.mark.parametrize(
    ("content", "name", "given", "said"),
    [
        ("", "mine.jsonl", {}, "holds no text; give it one"),
        ("{}\n", "mine.jsonl", {}, 'line 1 of .* is no {"text": "…"}'),
        ('{"text": "a"}\n[1]\n', "mine.jsonl", {}, "line 2 of "),
        ('{"text": 3}\n', "mine.jsonl", {}, "line 1 of "),
        ('{"text": " "}\n', "mine.jsonl", {}, "holds no text for 'prompt_1'"),
        ('{"text": "a", "id": "x"}\n{"text": "b", "id": "x"}\n', "mine.jsonl", {}, "two prompts 'x'"),
        ('{"text": "a", "id": "../x"}\n', "mine.jsonl", {}, "'../x' is no id of a prompt"),
        ('{"text": "a", "id": "warmup"}\n', "mine.jsonl", {}, "warm-up must not be a measured prompt"),
        (b"\xff\xfe\x00", "mine.txt", {}, "cannot be read as UTF-8 text"),
        (" \n", "mine.txt", {}, "holds no text"),
        ("{" * 5000 + "\n", "mine.jsonl", {}, "line 1 of "),
    ],
)
def test_what_is_no_prompts_file_is_refused_in_a_sentence(made, tmp_path, content, name, given, said):
    with pytest.raises(RunError, match=said):
        made(content, name, **given)
    assert not (tmp_path / "runs").exists()


def test_both_arms_of_a_study_are_asked_the_users_prompts_and_the_workloads_named(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(lines({"text": "Name three rivers."}))
    for given, asked in (
        ({"prompts_file": str(file)}, {"chat", "prefill", "prefix", "own-prompts"}),
        ({"workloads": ["ladder"]}, {"ladder"}),
    ):
        run = comparison.create(StudyParameters(runs_dir=str(tmp_path / "runs"), **given))
        for arm in run.arms.values():
            assert {j.workload for j in jobs.plan(arm.recipe, arm.parameters)} == asked
        run.close()
    with pytest.raises(RunError, match="has no workload 'laddr'; did you mean 'ladder'?"):
        comparison.create(StudyParameters(runs_dir=str(tmp_path / "runs"), workloads=["laddr"]))
    assert run_folder.read_json(run.path / "parameters.json")["workloads"] == ["ladder"]


def test_a_text_for_no_ladder_that_is_asked_is_refused(made):
    with pytest.raises(RunError, match="no ladder of smollm2-135m/llama-cpp--cpu is asked.*take the profile full"):
        made("The mill stood at the river.", "mine.txt")
    made("The mill stood at the river.", "mine.txt", profile="full")


def test_a_device_and_a_pipe_are_no_prompts_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in ("/dev/zero", str(tmp_path / "pipe.jsonl"), str(tmp_path)):
        with pytest.raises(RunError, match="is no file; give the path of one"):
            runs.create(parameters.checked({"prompts_file": path, "runs_dir": str(tmp_path / "runs")}))


def test_what_json_may_hold_is_taken_and_half_a_character_is_not(made):
    odd = "One line\u2028and \x85 another"
    run = made("\ufeff" + json.dumps({"text": odd}, ensure_ascii=False) + "\r\n", "mine.JSONL")
    assert prompts.texts(run.path)["own-prompts/prompt_1"] == odd
    with pytest.raises(RunError, match="line 1 of .* of whole characters"):
        made('{"text": "x \\ud800 y"}\n')


def test_a_page_names_the_file_and_not_where_it_lay(made):
    run = made(lines({"text": "Name three rivers."}))
    found = findings.read(run.path)
    assert "--prompts-file mine.jsonl" in appendix.command(found) and "/tmp" not in appendix.command(found)
