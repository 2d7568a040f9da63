"""What a matrix decides before it runs anything: which recipes, what of each, why, and at what cost."""

import contextlib
import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmrepro import __version__, catalog, cell, cli, earlier_runs, machine, matrix, requirements, run_folder
from llmrepro import run as runs
from llmrepro.matrix import Choice, chosen, plan
from llmrepro.parameters import Parameters
from llmrepro.recipe import RecipeError
from llmrepro.run_folder import RunError

GPU = {"name": "A card", "memory_gib": 80.0, "compute_capability": "9.0", "power_limit_w": 300.0, "index": 0}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """A machine that has what the default recipe needs, whatever this one is; a test may change it."""
    facts = {**machine.describe(machine.cache_dir()), "gpus": [], "disk_free_gib": 100.0}
    facts["memory"] = {**facts["memory"], "total_gib": 32.0, "available_gib": 30.0}
    monkeypatch.setattr(machine, "describe", lambda folder, bandwidth=False: json.loads(json.dumps(facts)))
    return facts


# ---- which -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        (Choice(), catalog.ids()),
        (Choice((catalog.DEFAULT,)), [catalog.DEFAULT]),
        (Choice(("qwen*", "qwen3.8-27b/open*")), [name for name in catalog.ids() if name.startswith("qwen")]),
        (Choice(studies=("smollm2-135m/two-engines",)), ["smollm2-135m/llama-cpp--cpu", "smollm2-135m/vllm--cpu"]),
        (Choice(("*vllm*",), ("smollm2-135m/two-engines",)), ["smollm2-135m/vllm--cpu"]),
    ],
)
def test_recipes_are_chosen_by_id_glob_and_study(choice, found):
    assert chosen(choice) == found


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (Choice(("smollm2-135m/llamacpp--cpu",)), "did you mean 'smollm2-135m/llama-cpp--cpu'"),
        (Choice(("gpt*",)), "no recipe is called 'gpt\\*'"),
        (Choice(studies=("two-engine",)), "no study is called 'two-engine'"),
        (Choice(engines=("vlm",)), "did you mean 'vllm'"),
    ],
)
def test_a_choice_that_fits_nothing_is_refused_with_the_nearest(choice, said):
    with pytest.raises(RecipeError, match=said):
        chosen(choice)


def test_a_recipe_that_is_named_in_several_ways_is_run_once(elsewhere, monkeypatch):
    own = str(catalog.home() / catalog.DEFAULT)
    assert chosen(Choice((own, catalog.DEFAULT, f"{own}/recipe.json", "smollm2*"))) == catalog.ids()[:1] + [
        name for name in catalog.ids() if name.startswith("smollm2") and name != catalog.DEFAULT
    ]
    monkeypatch.chdir(elsewhere.parent)
    assert chosen(Choice((elsewhere.name, str(elsewhere)))) == [elsewhere.name]
    assert chosen(Choice((own,), ("smollm2-135m/two-engines",))) == [catalog.DEFAULT]


@pytest.mark.parametrize(
    "choice",
    [
        Choice(("qwen*",), ("smollm2-135m/two-engines",)),
        Choice(("qwen*",), engines=("llama-cpp",)),
        Choice(("qwen*",), here=True),
    ],
)
def test_a_choice_that_leaves_nothing_is_no_matrix_that_ends_well(choice):
    with pytest.raises(RecipeError, match="no recipe fits all that was asked for; leave out"):
        plan(choice, {})


def test_an_engine_and_what_runs_here_narrow_the_choice():
    assert [c.recipe for c in plan(Choice(engines=("open-jet",)), {})] == ["qwen3.8-27b/open-jet--cmp-170hx"]
    assert all(not c.lacking and c.recipe.startswith("smollm2") for c in plan(Choice(here=True), {}))


def test_parameters_that_no_recipe_could_have_are_refused():
    with pytest.raises(RunError, match="parameter mode"):
        plan(Choice(), {"mode": "alive"})


def test_live_is_refused_where_something_lacks_and_nothing_is_begun():
    one, other = plan(Choice((catalog.DEFAULT, "qwen*open-jet*")), {"mode": "live"})
    assert (one.act, other.act) == ("new", "refuse") and "mode is live, and this machine needs a GPU" in other.why


@pytest.fixture
def elsewhere(tmp_path):
    """The default recipe as somebody's own, in a folder of its own."""
    shutil.copytree(catalog.home() / "smollm2-135m", tmp_path / "mine")
    return tmp_path / "mine" / "llama-cpp--cpu"


def test_a_recipe_that_cannot_be_read_or_is_not_trusted_is_refused_and_the_others_go_on(elsewhere, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "recipe.json").write_text("{")
    names = (str(tmp_path / "broken"), str(elsewhere), catalog.DEFAULT)
    broken, strange, own = plan(Choice(names), {"runs_dir": str(tmp_path / "runs")})
    assert (broken.act, strange.act, own.act) == ("refuse", "refuse", "new")
    assert "recipe.json" in broken.why and "--trust" in strange.why
    (trusted,) = plan(Choice((str(elsewhere),)), {"runs_dir": str(tmp_path / "runs"), "trust": True})
    assert trusted.act == "new"


# ---- what of each ----------------------------------------------------------------------------------------


class There:
    """A run of a recipe that is there, as a run that came to its end leaves it."""

    def __init__(self, tmp_path: Path, recipe: Path, facts: dict):
        self.recipe, self.runs_dir, self.facts = recipe, tmp_path / "runs", facts
        given = {"recipe": str(recipe), "runs_dir": str(self.runs_dir), "trust": True}
        with contextlib.closing(runs.create(Parameters(**given))) as run:
            self.path = run.path
            run.write_json("machine.json", facts)
            run.set_status("completed", "report")
            run.write_text("report.html", "<p>")
            run.write_json("result.json", {"verdicts": [], "comparisons": []})

    def plan(self, **given) -> matrix.Cell:
        force = given.pop("force", False)
        asked = {"runs_dir": str(self.runs_dir), "trust": True, **given}
        (one,) = plan(Choice((str(self.recipe),)), asked, force=force)
        return one

    def ended(self, outcome: str, **more) -> None:
        with contextlib.closing(run_folder.Folder(self.path)) as folder:
            folder.set_status(outcome, "measure", **more)

    def edit(self, change) -> None:
        path = self.recipe / "recipe.json"
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))


@pytest.fixture
def there(tmp_path, elsewhere, here):
    return There(tmp_path, elsewhere, here)


def test_what_is_there_and_has_not_changed_is_left_as_it_is(there):
    one = there.plan()
    assert (one.act, one.folder, one.seconds, one.gib) == ("skip", there.path, 0.0, 0.0)
    assert "nothing has changed since" in one.why
    assert there.plan(force=True).act == "new"


def test_how_much_of_the_disk_is_free_and_what_else_runs_make_no_difference(there, here):
    here["disk_free_gib"], here["load_1min"] = 50.0, 9.0
    here["memory"]["available_gib"] = 12.0
    assert there.plan().act == "skip"


def prompt(there: There) -> None:
    text = (there.recipe / "recipe.json").read_text()
    path = there.recipe.parent / "prompts" / "code_runs.txt"
    old = hashlib.sha256(path.read_text().removesuffix("\n").encode()).hexdigest()
    path.write_text("something else\n")
    (there.recipe / "recipe.json").write_text(text.replace(old, hashlib.sha256(b"something else").hexdigest()))


def lock(there: There) -> None:
    with open(there.recipe / "engine.lock", "a") as file:
        file.write("# one line more\n")


CHANGES = {
    "the recipe": lambda there, here, patch: there.edit(lambda d: d["workloads"][0].update(max_tokens=9)),
    "the recipe (a prompt)": lambda there, here, patch: prompt(there),
    "engine.lock": lambda there, here, patch: lock(there),
    "version of llmrepro": lambda there, here, patch: patch.setattr(earlier_runs, "__version__", "9.9"),
    "processor": lambda there, here, patch: here["cpu"].update(model="another"),
    "memory": lambda there, here, patch: here["memory"].update(total_gib=64.0),
    "GPUs": lambda there, here, patch: here.update(gpus=[GPU]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_is_named_and_measured_again(there, here, monkeypatch, what):
    CHANGES[what](there, here, monkeypatch)
    one = there.plan()
    assert one.act == "new" and what.split(" (")[0] in one.why, one


def test_another_power_limit_is_another_machine(tmp_path, elsewhere, here):
    here["gpus"] = [GPU]
    there = There(tmp_path, elsewhere, here)
    assert there.plan().act == "skip"
    here["gpus"] = [{**GPU, "power_limit_w": 200.0}]
    assert there.plan().act == "new"


def test_other_parameters_are_another_run(there):
    assert there.plan(repeats=2).act == "new" and there.plan(profile="full").act == "new"


@pytest.mark.parametrize("outcome", ["interrupted", "stopped", "failed", "running"])
def test_what_did_not_come_to_its_end_is_gone_on_with(there, outcome):
    there.ended(outcome)
    one = there.plan()
    assert (one.act, one.folder) == ("go on", there.path)


def test_a_run_without_its_page_is_gone_on_with(there):
    (there.path / "report.html").unlink()
    assert there.plan().act == "go on"


@pytest.mark.parametrize("name", ["status.json", "recipe.json", "machine.json", "parameters.json"])
@pytest.mark.parametrize("text", ["", "[]", "{", '{"cpu": 1}'])
def test_a_folder_that_cannot_be_read_is_no_run_to_go_on_with(there, name, text):
    (there.path / name).write_text(text)
    assert there.plan().act != "skip"


@pytest.mark.parametrize("name", ["machine.json", "result.json", "report.html"])
def test_a_run_that_has_lost_a_file_is_gone_on_with(there, name):
    (there.path / name).unlink()
    one = there.plan()
    assert one.act == "go on" and (name == "report.html" or f"it has lost its {name}" in one.why)


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text("{}\n")])
def test_a_run_whose_records_are_not_those_of_its_result_is_measured_again(there, change):
    records = there.path / "records.jsonl"
    records.write_text('{"ttft_s": 1}\n')
    told = {"verdicts": [], "comparisons": [], "inputs": {"records.jsonl": run_folder.sha256_of(records)}}
    (there.path / "result.json").write_text(json.dumps(told))
    assert there.plan().act == "skip"
    change(records)
    one = there.plan()
    assert one.act == "new" and one.why == "changed since the last: that run's records.jsonl"
    there.ended("stopped")
    assert there.plan().act == "go on", "its result is older than its records"


@pytest.mark.parametrize("text", ["", "[]", "{", "5"])
def test_a_run_whose_result_is_broken_is_measured_again(there, text):
    (there.path / "result.json").write_text(text)
    assert there.plan().act == "new"


def test_a_run_that_does_not_say_when_it_ended_is_measured_again(there):
    for at in ("5", "null"):
        (there.path / "status.json").write_text(f'{{"outcome": "completed", "at": {at}}}')
        assert there.plan().act == "new", at


def test_a_run_that_another_process_holds_is_left_to_it(there):
    there.ended("running")
    with contextlib.closing(run_folder.Folder(there.path)):
        one = there.plan()
        assert one.act == "refuse" and "another process" in one.why


def test_a_run_that_lacked_something_is_shown_again_when_that_changes(there, here):
    here["memory"]["total_gib"] = 1.0
    assert there.plan().act == "new", "it was measured, and now the machine cannot"
    with contextlib.closing(run_folder.Folder(there.path)) as folder:
        folder.write_json("machine.json", here)
        recipe, facts = catalog.load(str(there.recipe)), here
        folder.set_status(
            "lacking", "report", reason="; ".join(requirements.missing(recipe, facts, requirements.DISK))
        )
    assert there.plan().act == "skip"
    here["disk_free_gib"] = 0.5
    assert there.plan().act == "new", "something else lacks too"


def test_with_other_machines_what_counts_is_whether_it_was_measured(there, here):
    here["cpu"]["model"] = "another"
    given = {"runs_dir": str(there.runs_dir), "trust": True}
    (one,) = plan(Choice((str(there.recipe),)), given, elsewhere=True)
    assert one.act == "skip"
    there.ended("stopped")
    (one,) = plan(Choice((str(there.recipe),)), given, elsewhere=True)
    assert one.act == "new"


def test_going_on_is_refused_where_a_lock_changed(there):
    there.ended("stopped")
    (there.recipe / "engine.lock").write_text("x==1")
    with pytest.raises(RunError, match="a lock of smollm2-135m/llama-cpp--cpu has changed"):
        runs.create(Parameters(resume=str(there.path), trust=True))


# ---- at what cost ----------------------------------------------------------------------------------------


def test_what_is_to_be_installed_is_counted_and_what_is_only_shown_is_cheap(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMREPRO_CACHE", str(tmp_path / "cache"))
    given = {"runs_dir": str(tmp_path / "runs")}
    (first,) = plan(Choice((catalog.DEFAULT,)), given)
    needs = catalog.load(catalog.DEFAULT).needs
    assert first.seconds >= 60 * needs.minutes and first.gib == needs.disk_gib
    (shown,) = plan(Choice((catalog.DEFAULT,)), {**given, "mode": "published"})
    assert shown.lacking == ("published mode was asked for",) and shown.seconds < 30 and shown.gib < 0.1


def test_a_dry_run_tells_it_and_writes_nothing(tmp_path):
    said = CliRunner().invoke(cli.main, ["matrix", "--dry-run", "--runs-dir", str(tmp_path / "runs")])
    assert said.exit_code == 0, said.output
    lines = said.output.splitlines()
    for name in catalog.ids():
        assert any(name in line and "min" in line and "GiB" in line for line in lines), name
    assert any("needs a GPU with 80 GiB" in line for line in lines)
    assert lines[-1].endswith(f"for {len(catalog.ids())} recipes of {len(catalog.ids())}")
    assert not (tmp_path / "runs").exists()


def test_a_plan_moves_no_cursor(tmp_path):
    odd = tmp_path / "odd\x1b[2J"
    odd.mkdir()
    (odd / "recipe.json").write_text("{")
    said = CliRunner().invoke(cli.main, ["matrix", "--dry-run", str(odd)], color=True)
    assert said.exit_code == 0 and "refuse" in said.output and "\x1b" not in said.output


# ---- doing it --------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Cells whose process ends as a script says; what it did is in their folder's matrix.log."""

    def script(text: str) -> None:
        monkeypatch.setattr(cell, "COMMAND", [sys.executable, "-c", text])

    return script


def test_a_kernel_that_never_started_is_tried_once_more_and_nothing_else_is(tmp_path, quick):
    for code, times in ((5, 2), (4, 1), (3, 1), (0, 1)):
        quick(f"print('begun'); raise SystemExit({code})")
        cells = plan(Choice((catalog.DEFAULT,)), {"runs_dir": str(tmp_path / str(code))})
        done = []
        assert matrix.run(cells, [], on_end=done.append) is None
        assert done[0].end.code == code
        assert (done[0].folder / cell.SAID).read_text().count("begun") == times, code


def test_what_cannot_be_begun_is_refused_and_the_next_goes_on(tmp_path, quick, monkeypatch):
    quick("pass")
    create = runs.create

    def once(params):
        monkeypatch.setattr(runs, "create", create)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs, "create", once)
    done = []
    matrix.run(plan(Choice(("smollm2*",)), {"runs_dir": str(tmp_path)}), [], on_end=done.append)
    assert done[0].act == "refuse" and "No space left" in done[0].why
    assert all(c.end.code == 0 for c in done[1:]) and len(done) == 3


def test_the_deadline_of_one_is_never_beyond_that_of_all(tmp_path, quick):
    quick("import sys; print(sys.argv[1:])")
    done = []
    cells = plan(Choice((catalog.DEFAULT,)), {"runs_dir": str(tmp_path)})
    matrix.run(cells, [], deadline_s=100.0, cell_deadline_s=900.0, on_end=done.append)
    said = (done[0].folder / cell.SAID).read_text()
    assert float(said.rstrip("]\n").rpartition("'--deadline', '")[2].rstrip("'")) <= 100.0
    assert matrix.run(cells, [], deadline_s=0.0).code == 124
    assert matrix.run(cells, [15]).code == 143
    assert __version__ == earlier_runs.__version__
