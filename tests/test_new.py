"""A recipe adopted for one's own machine: complete, ready to run, its claims as they were published."""

import json
import shutil
from pathlib import Path

import folders
import pytest
from click.testing import CliRunner

from llmrepro import adoption, catalog, cli, machine, parameters, results, verdict
from llmrepro import run as runs
from llmrepro.recipe import RecipeError
from llmrepro.run_folder import RunError

GPU = {
    "name": "A GPU 24G",
    "memory_gib": 23.5,
    "driver": "570.1",
    "compute_capability": "8.6",
    "power_limit_w": 300.0,
}


@pytest.fixture
def here(monkeypatch):
    """This machine, as if it had what a test says."""
    facts = machine.describe(machine.cache_dir())

    def set_(**changes):
        changed = json.loads(json.dumps(facts)) | changes
        monkeypatch.setattr(machine, "describe", lambda *_: changed)
        return changed

    set_(gpus=[], cpu={**facts["cpu"], "model": "Intel(R) Xeon(R) Processor @ 2.90GHz", "architecture": "x86_64"})
    return set_


def edited(tmp_path, change):
    """The default recipe elsewhere, changed."""
    home = catalog.path_of(catalog.DEFAULT).parent
    shutil.copytree(home.parent, tmp_path / "model")
    path = tmp_path / "model" / home.name / "recipe.json"
    data = json.loads(path.read_text())
    data.pop("$schema")
    change(data)
    path.write_text(json.dumps(data))
    return str(path)


def copied(made):
    return json.loads((made.folder / "recipe.json").read_text())


@pytest.mark.parametrize("name", catalog.ids())
def test_every_recipe_can_be_adopted_and_its_copy_is_whole(tmp_path, here, name):
    made = adoption.adopt(name, tmp_path / "mine")
    (tmp_path / "mine").rename(tmp_path / "moved")  # it leans on nothing beside it
    copy, original = catalog.load(str(tmp_path / "moved")), catalog.load(name)
    assert copy.claims == original.claims and copy.comparisons == original.comparisons
    assert copy.workloads == original.workloads and copy.servers == original.servers
    assert copy.engine == original.engine and copy.model == original.model
    assert copy.conditions.deciding == original.conditions.deciding, "claims are held against these"
    assert copy.id != name and copy.id.endswith("/mine") and copy.title.endswith(" · for Intel Xeon")
    assert f"based on {name}" in copy.source.publication
    assert sorted(made.files) == sorted(
        str(p.relative_to(tmp_path / "moved")) for p in (tmp_path / "moved").rglob("*") if p.is_file()
    )


def test_a_copy_runs_once_it_is_trusted(tmp_path, here):
    made = adoption.adopt(catalog.DEFAULT, tmp_path / "mine")
    values = {"recipe": str(made.folder), "runs_dir": str(tmp_path / "runs")}
    with pytest.raises(RunError, match="give --trust"):
        runs.create(parameters.checked(values))
    run = runs.create(parameters.checked({**values, "trust": True}))
    assert run.recipe.id == made.recipe.id
    run.close()
    lock = Path("engine.lock")
    assert (made.folder / lock).read_bytes() == (catalog.home() / catalog.DEFAULT / lock).read_bytes()


def test_this_machines_facts_are_filled_in_where_the_publication_states_none(tmp_path, here):
    here(gpus=[GPU])
    stated = {"deciding": {"gpu_name": "Another", "gpu_power_limit_w": None}, "noted": {"os": "Some OS"}}
    made = adoption.adopt(edited(tmp_path, lambda d: d.update(conditions=stated)), tmp_path / "mine")
    found = copied(made)["conditions"]
    assert found["deciding"] == {"gpu_name": "Another", "gpu_power_limit_w": 300.0}
    assert found["noted"]["os"] == "Some OS"
    assert (found["noted"]["gpu_driver"], found["noted"]["gpu_count"]) == ("570.1", 1)
    assert found["noted"]["cpu_model"] == machine.describe(None)["cpu"]["model"]
    assert any(c.startswith("conditions kept as published") and "gpu_name Another" in c for c in made.changes)
    assert "gpu_name" not in found["noted"]


def test_what_is_not_known_here_is_not_filled_in(tmp_path, here):
    facts = here(gpus=None)
    here(gpus=None, cpu={**facts["cpu"], "simd": None})
    found = copied(adoption.adopt(catalog.DEFAULT, tmp_path / "mine"))["conditions"]["noted"]
    assert not [n for n in found if n.startswith("gpu_")] and "cpu_simd" not in found
    assert None not in found.values()


def test_needs_are_no_more_than_this_machine_has_and_it_is_said(tmp_path, here):
    here(gpus=[GPU])
    needs = {"vram_gib": 64, "compute_capability": "10.0", "memory_gib": 1e6, "disk_gib": 3, "minutes": 9}
    made = adoption.adopt(edited(tmp_path, lambda d: d.update(needs=needs)), tmp_path / "mine")
    total = machine.describe(None)["memory"]["total_gib"]
    adapted = {"vram_gib": 23.5, "compute_capability": "8.6", "memory_gib": total}
    assert copied(made)["needs"] == {**needs, **adapted}
    assert any(c.startswith("needs.vram_gib: 64") and "23.5" in c for c in made.changes)


def test_a_machine_without_a_gpu_keeps_the_need_of_one(tmp_path, here):
    made = adoption.adopt(edited(tmp_path, lambda d: d.update(needs={"vram_gib": 64})), tmp_path / "mine")
    assert copied(made)["needs"]["vram_gib"] == 64
    assert any("asks for a GPU and none is known here" in c for c in made.changes)


@pytest.mark.parametrize(
    ("changes", "id_"),
    [
        ({"gpus": [GPU]}, "llama-cpp--a-gpu-24g"),
        ({"gpus": [GPU, GPU]}, "llama-cpp--2x-a-gpu-24g"),
        ({"cpu": {"model": None, "architecture": "aarch64", "physical_cores": 2}}, "llama-cpp--aarch64-cpu"),
        ({"cpu": {"model": "日本語のCPU", "architecture": "x86_64", "physical_cores": 2}}, "llama-cpp--cpu"),
        ({"cpu": {"model": "A" * 200, "architecture": "x86_64", "physical_cores": 2}}, f"llama-cpp--{'a' * 40}"),
    ],
)
def test_the_copy_is_named_by_its_machine(tmp_path, here, monkeypatch, changes, id_):
    here(**changes)
    monkeypatch.chdir(tmp_path)
    assert adoption.adopt(catalog.DEFAULT).recipe.id.endswith(f"/{id_}")


def test_copies_in_folders_of_their_own_names_have_ids_of_their_own(tmp_path, here):
    names = ("mine", "mine2", "Mine_3", "x" * 200)
    ids = [adoption.adopt(catalog.DEFAULT, tmp_path / name).recipe.id.rpartition("/")[2] for name in names]
    assert ids == ["mine", "mine2", "mine_3", "x" * 70]


def test_a_copy_of_a_copy_is_for_one_machine(tmp_path, here):
    title = catalog.load(catalog.DEFAULT).title
    first = adoption.adopt(catalog.DEFAULT, tmp_path / "first")
    facts = machine.describe(None)
    here(cpu={**facts["cpu"], "model": "AMD EPYC"})
    second = adoption.adopt(str(first.folder), tmp_path / "second", None)
    assert (first.recipe.title, second.recipe.title) == (f"{title} · for Intel Xeon", f"{title} · for AMD EPYC")


def test_nothing_is_overwritten_and_nothing_half_made_is_left(tmp_path, here, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="nothing is overwritten; give another folder with --to"):
        adoption.adopt(catalog.DEFAULT, tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert adoption.adopt(catalog.DEFAULT, tmp_path / "empty").folder == tmp_path / "empty"

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space"):
        adoption.adopt(catalog.DEFAULT, tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "mine"]


def test_a_recipe_that_is_broken_is_not_copied(tmp_path, here):
    with pytest.raises(RecipeError, match="no recipe is called"):
        adoption.adopt("smollm2-135m/llama-cpp--gpu", tmp_path / "mine")
    path = Path(edited(tmp_path, lambda d: None))
    prompt = next((path.parent.parent / "prompts").glob("code_runs.txt"))
    prompt.write_text("changed")
    with pytest.raises(RecipeError, match="has sha256"):
        adoption.adopt(str(path), tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_the_command_says_what_it_wrote_and_what_to_edit_first(tmp_path, here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.main, ["new", catalog.DEFAULT])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "llama-cpp--intel-xeon"
    assert f"→ {folder}" in done.output and "wrote recipe.json, engine.in, engine.lock, prompts/" in done.output
    after = done.output.split("Edit first, in ")[1].splitlines()
    assert [line.split(":")[0].strip() for line in after[1:4]] == [
        "title, question",
        "servers",
        "needs, conditions",
    ]
    assert done.output.endswith(f"Then: llmrepro run {folder} --trust\n")
    again = CliRunner().invoke(cli.main, ["new", catalog.DEFAULT])
    assert again.exit_code == 1 and "is there already" in again.output


def measured_run(tmp_path, name, tps=100.0):
    (tmp_path / name).mkdir()
    records = [r for n in (1, 2, 3) for r in folders.chat(boot=n, rounds=4, tps=tps)]
    boots = [folders.boot(replicate=n) for n in range(3)]
    return folders.folder(tmp_path / name, records, boots)


def test_what_a_run_measured_becomes_the_claims_of_a_copy(tmp_path, here):
    run = measured_run(tmp_path, "first")
    made = adoption.adopt(catalog.DEFAULT, tmp_path / "mine", run)
    claims = {c.id: c for c in made.recipe.claims}
    rows = [r for r in results.compute(run)["metrics"] if r["metric"] == "decode_tps" and r["case"] == "plan_move"]
    assert claims["decode_tps-default-chat-plan_move"].value.point == pytest.approx(rows[0]["value"], rel=5e-6)
    assert claims["decode_tps-default-chat-plan_move"].n == 3, "boots, as the page has it: its samples are theirs"
    assert len(claims["decode_tps-default-chat-plan_move"].samples) == 3
    assert claims["decode_tps-default-chat"].statistic == "mean_of_means"
    assert made.recipe.comparisons == []
    assert made.recipe.conditions.deciding["cpu_model"] == folders.MACHINE["cpu"]["model"]


def test_the_conditions_of_own_claims_are_the_runs_and_what_is_printed_is_written(tmp_path, here):
    made = adoption.adopt(catalog.DEFAULT, tmp_path / "mine", measured_run(tmp_path, "first"))
    found = copied(made)["conditions"]
    assert found["deciding"]["cpu_model"] == "A processor"
    assert (found["noted"]["cpu_cores"], found["noted"]["memory_gib"]) == (2, 16.0)
    told = " ".join(c for c in made.changes if c.startswith("conditions"))
    for name, value in {**found["deciding"], **found["noted"]}.items():
        assert f"{name} {value}" in told
    assert "filled in" not in told and "Intel" not in told


def one_boot(tmp_path):
    (tmp_path / "one").mkdir()
    records = [*folders.chat(rounds=4, tps=100 / 3), *folders.prefill(rounds=3)]
    return folders.folder(tmp_path / "one", records, [folders.boot()])


def test_one_value_has_no_spread_and_n_is_the_pages(tmp_path, here):
    run = one_boot(tmp_path)
    made = adoption.adopt(catalog.DEFAULT, tmp_path / "mine", run)
    rows = {(r["metric"], r["case"], r["statistic"]): r for r in results.compute(run)["metrics"]}
    claims = {(c.metric, c.case): c for c in made.recipe.claims}
    slope, start = claims["prefill_tps.slope", None], claims["startup.first_completion_s", None]
    assert slope.n == rows["prefill_tps.slope", None, "slope"]["n"] and slope.spread is None
    assert (start.n, start.spread) == (1, None)
    speed = claims["decode_tps", "plan_move"]
    assert speed.n == 4 and speed.spread[0] < speed.value.point < speed.spread[1]


def test_own_claims_carry_six_digits(tmp_path, here):
    for place, run in enumerate((one_boot(tmp_path), measured_run(tmp_path, "three", tps=100 / 3))):
        for claim in adoption.adopt(catalog.DEFAULT, tmp_path / f"mine{place}", run).recipe.claims:
            for value in (claim.value.point, *claim.samples, *(claim.spread or ())):
                assert value == float(f"{value:.6g}")


def test_what_a_run_was_flagged_with_is_printed_and_stays_with_its_claims(tmp_path, here):
    run = one_boot(tmp_path)
    flags = results.compute(run)["flags"]
    made = adoption.adopt(catalog.DEFAULT, tmp_path / "mine", run)
    assert any("drifts" in flag for flag in flags)
    for flag in flags:
        assert f"warning: {run.name} was flagged: {flag}" in made.changes
        assert flag in made.recipe.source.publication
    assert any("rest on 1 boot," in c and "3 or more make better claims" in c for c in made.changes)
    three = adoption.adopt(catalog.DEFAULT, tmp_path / "three", measured_run(tmp_path, "steady"))
    assert not any("make better claims" in c for c in three.changes)


def test_a_run_holds_against_its_own_claims_and_a_slower_one_does_not(tmp_path, here):
    """A against A: equal numbers are reproduced, and half the speed is not."""
    run = measured_run(tmp_path, "first")
    made = adoption.adopt(catalog.DEFAULT, tmp_path / "mine", run)
    words = {}
    for name, tps in (("same", 100.0), ("slower", 40.0)):
        result = results.compute(measured_run(tmp_path, name, tps))
        claim = next(c for c in made.recipe.claims if c.id == "decode_tps-default-chat")
        around = verdict.Around(recipe=made.recipe)
        words[name] = verdict.judge(claim, result["metrics"], [], around).word
    assert words == {"same": "reproduced", "slower": "not_reproduced"}


def test_claims_are_taken_from_a_run_of_that_very_recipe(tmp_path, here):
    run = measured_run(tmp_path, "first")
    with pytest.raises(RunError, match="is a run of smollm2-135m/llama-cpp--cpu, not of smollm2-135m/vllm--cpu"):
        adoption.adopt("smollm2-135m/vllm--cpu", tmp_path / "mine", run)
    assert not (tmp_path / "mine").exists()


def test_a_run_that_measured_nothing_claims_nothing(tmp_path, here):
    (tmp_path / "none").mkdir()
    run = folders.folder(tmp_path / "none", outcome="lacking", reason="needs a GPU")
    with pytest.raises(RunError, match="measured nothing that could be claimed: lacking"):
        adoption.adopt(catalog.DEFAULT, tmp_path / "mine", run)


def _elsewhere(path):
    boot = json.loads((path / "boots/1.json").read_text())
    told = {"external": True, "here": True, "url": "http://127.0.0.1:8000", "model": "m"}
    (path / "boots/1.json").write_text(json.dumps({**boot, **told}))


def _overridden(path):
    recipe = json.loads((path / "recipe.json").read_text())
    recipe["workloads"][0]["max_tokens"] = 20
    (path / "recipe.json").write_text(json.dumps(recipe))


def _twice(path):
    records = (path / "records.jsonl").read_text()
    (path / "records.jsonl").write_text(records + records.splitlines(keepends=True)[0])


def _other_weights(path):
    weights = json.loads((path / "weights.json").read_text())
    weights["facts"]["model.sha256"] = "2" * 64
    (path / "weights.json").write_text(json.dumps(weights))


def _stopped(path):
    status = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps({**status, "outcome": "stopped"}))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_stopped, "is stopped, and only a complete run is claimed"),
        (_elsewhere, "asked a server that somebody else started"),
        (_overridden, "workloads.chat.max tokens: published 48, here 20"),
        (_other_weights, "sha256 of the weights: published"),
        (_twice, "the folder was changed by hand"),
        (lambda path: (path / "weights.json").unlink(), "does not tell its sha256 of the weights"),
        (lambda path: (path / "engine-freeze.txt").unlink(), "does not tell its engine version"),
        (lambda path: (path / "imported.json").write_text("{}"), "holds imported numbers"),
    ],
)
def test_only_a_complete_run_of_the_recipe_as_it_is_can_be_claimed(tmp_path, here, change, why):
    run = measured_run(tmp_path, "first")
    change(run)
    with pytest.raises(RunError, match=why):
        adoption.adopt(catalog.DEFAULT, tmp_path / "mine", run)
    assert not (tmp_path / "mine").exists()


def test_a_run_on_another_machine_than_the_published_can_be_claimed(tmp_path, here):
    """Its claims are bound to its own machine."""
    run = measured_run(tmp_path, "first")
    for name in ("recipe.json", "recipe.committed.json"):
        recipe = json.loads((run / name).read_text())
        recipe["conditions"] = {"deciding": {"cpu_model": "EPYC 9175F"}}
        (run / name).write_text(json.dumps(recipe))
    made = adoption.adopt(catalog.DEFAULT, tmp_path / "mine", run)
    assert made.recipe.conditions.deciding["cpu_model"] == folders.MACHINE["cpu"]["model"]
