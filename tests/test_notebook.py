"""One notebook, three ways in, one run: JupyterLab's Run All, papermill, and `llmrepro run`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
import yaml
from browser import jupyterlab

from llmrepro import catalog, parameters, run_folder
from llmrepro.comparison import StudyParameters

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "reproduce.ipynb"
OWN = ROOT / "notebooks" / f"{catalog.DEFAULT}.ipynb"
BIN = Path(sys.executable).parent
SMALL = {"workloads.chat.max_tokens": 20, "workloads.prefill.lengths": [32, 64, 300]}
STAGES = ["card", "machine", "prepare", "measure", "results", "charts", "report"]


def command(*argv, cwd, **more):
    return subprocess.run(
        [str(a) for a in argv],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        stdin=subprocess.DEVNULL,
        **more,
    )


def papermill(tmp_path, *options, runs_dir="runs", notebook=OWN):
    return command(
        BIN / "papermill",
        "--log-level",
        "ERROR",
        "--no-progress-bar",
        notebook,
        tmp_path / "out.ipynb",
        "-p",
        "runs_dir",
        tmp_path / runs_dir,
        *options,
        cwd=tmp_path,
    )


def only_run(folder) -> Path:
    (found,) = folder.glob("*/*/*")
    return found


def files(run: Path) -> set[str]:
    return {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()} - {"reproduce.ipynb"}


def left_below(folder: Path) -> list[psutil.Process]:
    """Processes that work in a folder or name it: the server runs in its run folder, the supervisor names it."""
    return [
        p
        for p in psutil.process_iter(["cmdline", "cwd"])
        if str(folder) in " ".join([p.info["cwd"] or "", *(p.info["cmdline"] or [])])
    ]


def cells():
    return nbformat.read(NOTEBOOK, as_version=4).cells


def test_the_notebook_is_committed_without_outputs_and_only_calls_the_library():
    code = [c for c in cells() if c.cell_type == "code"]
    assert [c.id for c in code] == ["parameters", *STAGES]
    assert all(c.outputs == [] and c.execution_count is None for c in code)
    assert all(len(c.source.splitlines()) <= 8 for c in code[1:])
    assert not [line for c in code for line in c.source.splitlines() if line.lstrip().startswith(("!", "%"))]
    texts = {cells()[i - 1].cell_type for i, c in enumerate(cells()) if c.cell_type == "code"}
    assert texts == {"markdown"}  # a sentence before every step


def test_the_parameters_cell_is_the_parameters_model():
    """Names, order, defaults and descriptions, so that neither drifts."""
    (cell,) = [c for c in cells() if "parameters" in c.metadata.get("tags", [])]
    assert cell.source.startswith("# Parameters")
    space: dict = {}
    exec(cell.source, space)
    fields = parameters.Parameters.model_fields
    assert [n for n in space if not n.startswith("__")] == list(fields)
    assert {n: space[n] for n in fields} == {n: f.default for n, f in fields.items()}
    assert re.findall(r"#\s+(.*)", cell.source)[1:] == [f.description for f in fields.values()]


@pytest.mark.parametrize(
    ("name", "model"), [(OWN, parameters.Parameters), (ROOT / "notebooks/compare.ipynb", StudyParameters)]
)
def test_papermills_help_lists_every_parameter_with_what_it_is(name, model):
    said = subprocess.run([BIN / "papermill", "--help-notebook", name], capture_output=True, text=True, check=True)
    shown = " ".join(said.stdout.split())
    for parameter, field in model.model_fields.items():
        kind = re.search(rf"{parameter}: (str|int|bool|list|dict) \(default [^)]*\) ", shown)
        assert kind and shown[kind.end() :].startswith(" ".join(field.description.split())), parameter
    rows = said.stdout.partition("Parameters inferred for")[2].splitlines()[1:]  # the title names a path
    assert max(map(len, rows)) <= 80


@pytest.mark.engine
def test_papermill_and_the_command_write_the_same_files(tmp_path):
    by_papermill = papermill(tmp_path, "-p", "repeats", "1", "-y", yaml.safe_dump({"overrides": SMALL}))
    assert by_papermill.returncode == 0, by_papermill.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    by_command = command(
        BIN / "llmrepro",
        "run",
        "--runs-dir",
        tmp_path / "runs2",
        "--repeats",
        "1",
        "--overrides",
        json.dumps(SMALL),
        cwd=elsewhere,
    )
    assert by_command.returncode == 0, by_command.stdout + by_command.stderr
    one, two = only_run(tmp_path / "runs"), only_run(tmp_path / "runs2")
    assert files(one) == files(two)
    assert {
        "status.json",
        "recipe.json",
        "machine.json",
        "engine-freeze.txt",
        "records.jsonl",
        "result.json",
        "report.html",
        "figures/decode-per-prompt.svg",
        "figures/ttft-by-length.png",
        "figures/startup.csv",
    } <= files(one)
    for run in (one, two):
        assert run_folder.status(run)["outcome"] == "completed"
        assert not run_folder.held(run)
    keys = [
        {
            (r["workload"], r["case"], r["repeat"], r["warmup"])
            for r in run_folder.read_lines(run / "records.jsonl")
        }
        for run in (one, two)
    ]
    assert keys[0] == keys[1]
    words = [[v["word"] for v in run_folder.read_json(run / "result.json")["verdicts"]] for run in (one, two)]
    assert words[0] == words[1]
    for run in (one, two):  # facts of the file hold; the rest was overridden, and is named
        found = {
            c["name"]: c["relation"]
            for c in run_folder.read_json(run / "result.json")["conditions"]
            if c["deciding"]
        }
        assert found["weights_sha256"] == found["engine_version"] == "equal"
        assert {name: relation for name, relation in found.items() if relation != "equal"} == {
            "workloads.chat.max_tokens": "differs",
            "workloads.prefill.lengths": "differs",
        }
    assert str(two / "report.html") in by_command.stdout
    assert [line.split()[0] for line in by_command.stdout.splitlines() if line.endswith("...")] == STAGES
    executed = nbformat.read(two / "reproduce.ipynb", as_version=4)
    assert all(c.metadata.papermill.status == "completed" for c in executed.cells)
    assert executed.cells[0].source == nbformat.read(OWN, as_version=4).cells[0].source
    assert not left_below(tmp_path)
    shown = command(
        BIN / "jupyter",
        "nbconvert",
        "--to",
        "html",
        "--output",
        tmp_path / "plain.html",
        two / "reproduce.ipynb",
        cwd=tmp_path,
    )
    assert shown.returncode == 0, shown.stderr
    page = (tmp_path / "plain.html").read_text()
    assert "weights-sha256" in page
    assert page.count("100%|") == 1  # the progress of measuring: its last state only


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-p", "recip", "x"], "no parameter is called 'recip'; did you mean 'recipe'?"),
        (["-p", "recipe", "smollm2-135m/lama-cpp--cpu"], "did you mean 'smollm2-135m/llama-cpp--cpu'?"),
        (["-p", "mode", "life"], "parameter mode: Input should be 'auto', 'live' or 'published', found 'life'"),
        (["-p", "resume", "007"], "-r for text that looks like a number"),
    ],
)
def test_what_papermill_lets_pass_is_refused_by_the_notebook(tmp_path, options, said):
    refused = papermill(tmp_path, *options)
    assert refused.returncode != 0
    assert said in re.sub(r"\x1b\[[0-9;]*m", "", refused.stderr)
    assert not list((tmp_path / "runs").glob("*/*/*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "smollm2-135m/lama-cpp--cpu"], "did you mean 'smollm2-135m/llama-cpp--cpu'?"),
        (["run", "--mode", "life"], "parameter mode: "),
        (["run", "--repeats", "many"], "parameter repeats: "),
        (["run", "--repeat", "3"], "Did you mean one of: '--repeats'"),
        (["run", "--resume", "/nonexistent"], "is no run folder"),
        (["report", "/nonexistent"], "does not exist"),
    ],
)
def test_the_command_refuses_in_one_sentence(tmp_path, arguments, said):
    refused = command(BIN / "llmrepro", *arguments, cwd=tmp_path)
    assert refused.returncode != 0
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_command_lists_every_recipe_and_study_and_a_folder_that_is_no_run_is_told(tmp_path):
    shown = command(BIN / "llmrepro", "list", cwd=tmp_path)
    entries = [line for line in shown.stdout.splitlines() if not line.startswith(" ")]
    assert {line.split()[2] for line in entries} == {*catalog.ids(), *catalog.studies()}
    told = command(BIN / "llmrepro", "report", tmp_path, cwd=tmp_path)
    assert told.returncode == 1
    assert "is missing; is" in told.stderr


def test_published_mode_says_what_lacks_and_still_makes_a_page(tmp_path):
    other = "smollm2-135m/llama-cpp-native--cpu"
    done = papermill(tmp_path, "-p", "mode", "published", notebook=ROOT / "notebooks" / f"{other}.ipynb")
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path / "runs")
    assert run_folder.read_json(run / "recipe.json")["id"] == other  # the one that its notebook opens on
    assert run_folder.status(run)["outcome"] == "lacking"
    assert "published mode was asked for" in run_folder.status(run)["reason"]
    page = (run / "report.html").read_text()
    assert "23,040" in page or "23040" in page  # what is published is shown
    assert not (run / "records.jsonl").exists()
    assert not (run / "install.log").exists()


def test_a_machine_that_lacks_something_is_told_what(tmp_path):
    needs = {"needs.memory_gib": 90000.0}
    done = papermill(tmp_path, "-y", yaml.safe_dump({"overrides": needs}))
    assert done.returncode == 0, done.stderr
    assert (
        "needs 90000 GiB of memory; this machine has" in run_folder.status(only_run(tmp_path / "runs"))["reason"]
    )
    refused = papermill(
        tmp_path, "-p", "mode", "live", "-y", yaml.safe_dump({"overrides": needs}), runs_dir="live"
    )
    assert refused.returncode != 0
    status = run_folder.status(only_run(tmp_path / "live"))
    assert (status["outcome"], status["stage"]) == ("failed", "prepare")


def test_a_recipe_from_elsewhere_installs_nothing_without_trust(tmp_path):
    home = catalog.home() / catalog.DEFAULT
    (tmp_path / "prompts").mkdir()
    for text in (home.parent / "prompts").iterdir():
        (tmp_path / "prompts" / text.name).write_bytes(text.read_bytes())
    (tmp_path / "recipe.json").write_bytes((home / "recipe.json").read_bytes())
    (tmp_path / "engine.lock").write_bytes((home / "engine.lock").read_bytes())
    refused = command(BIN / "llmrepro", "run", tmp_path, "--runs-dir", tmp_path / "runs", cwd=tmp_path)
    assert refused.returncode == 1
    assert "xllamacpp 2026.10.11549" in refused.stderr
    assert "then give --trust" in refused.stderr
    assert not (tmp_path / "runs").exists()
    looked = command(
        BIN / "llmrepro", "run", tmp_path, "--runs-dir", tmp_path / "runs", "--mode", "published", cwd=tmp_path
    )
    assert looked.returncode == 0, looked.stderr
    assert not (only_run(tmp_path / "runs") / "install.log").exists()


def mine(folder: Path, **values) -> str:
    """The notebook as a person edits it, other values in its parameters cell, in a folder as the committed one.
    Returns its path below `folder`."""
    notebook = nbformat.read(OWN, as_version=4)
    cell = next(c for c in notebook.cells if c.id == "parameters")
    for name, value in values.items():
        cell.source, n = re.subn(
            rf"^({name}: \w+ = )[^#\n]*?(  #|$)",
            lambda m, v=value: f"{m[1]}{v!r}{m[2]}",
            cell.source,
            flags=re.MULTILINE,
        )
        assert n == 1, name
    path = folder / f"{catalog.DEFAULT}.ipynb"
    path.parent.mkdir()
    nbformat.write(notebook, path)
    return str(path.relative_to(folder))


@pytest.mark.engine
@pytest.mark.browser
def test_run_all_in_jupyterlab_gives_the_same_run(tmp_path):
    notebook = mine(tmp_path, runs_dir=str(tmp_path / "runs"), repeats=1, overrides=SMALL)
    with jupyterlab(tmp_path) as lab, lab.open(notebook) as page:
        page.run_all()
        page.wait_done(timeout_s=300)
        assert "report.html" in page.outputs(7)
        page.screenshot(tmp_path / "lab.png")
    run = only_run(tmp_path / "runs")
    assert run_folder.status(run)["outcome"] == "completed"
    assert {"report.html", "result.json", "figures/startup.svg", "boots/1.log"} <= files(run)
    assert [c["execution_count"] for c in page.saved_code_cells()] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not left_below(tmp_path)


@pytest.mark.engine
@pytest.mark.browser
def test_the_stop_button_keeps_the_records_and_leaves_no_process(tmp_path):
    notebook = mine(tmp_path, runs_dir=str(tmp_path / "runs"), repeats=100)
    with jupyterlab(tmp_path) as lab, lab.open(notebook) as page:
        page.run_all()
        page.wait_for_output(4, "round 2", timeout_s=120)
        assert any("_llama_cpp_launcher" in word for p in left_below(tmp_path) for word in p.info["cmdline"])
        page.stop(timeout_s=60)
        assert "KeyboardInterrupt" in page.outputs(4)
    run = only_run(tmp_path / "runs")
    status = run_folder.status(run)
    assert (status["outcome"], status["stopped_by"], status["stage"]) == ("stopped", "person", "measure")
    assert len(run_folder.read_lines(run / "records.jsonl")) > 6
    assert not left_below(tmp_path)
