"""compare.ipynb: papermill and `llmrepro compare` are one run, its arms take turns, and a kill loses no turn."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import nbformat
import pytest
import yaml
from browser import jupyterlab
from studies import ARMS, both, claim, folder, written
from test_notebook import BIN, STAGES, command, left_below

from llmrepro import catalog, run_folder
from llmrepro.comparison import StudyParameters

NOTEBOOK = catalog.home().parent / "notebooks" / "compare.ipynb"
SMALL = {
    "workloads.chat.max_tokens": 20,
    "workloads.prefill.lengths": [32, 64],
    "b:servers.default.args": [
        "--ctx-size",
        "2048",
        "--threads",
        "{threads}",
        "--log-verbosity",
        "4",
        "--metrics",
    ],
}
TWO = [{**ARMS[0], "id": "a"}, {**ARMS[0], "id": "b"}]
CLAIM = claim(a={"arm": "a", "workload": "chat"}, b={"arm": "b", "workload": "chat"})
OPTIONS = {"boots": 2, "repeats": 1, "overrides": SMALL}


def papermill(tmp_path, *options):
    out = tmp_path / "out.ipynb"
    quiet = ["--log-level", "ERROR", "--no-progress-bar"]
    return command(
        BIN / "papermill", *quiet, NOTEBOOK, out, "-p", "runs_dir", tmp_path / "runs", *options, cwd=tmp_path
    )


def compare_words(study, runs_dir) -> list[str]:
    given = [w for name, value in OPTIONS.items() for w in (f"--{name}", json.dumps(value))]
    return [str(w) for w in (BIN / "llmrepro", "compare", study, "--runs-dir", runs_dir, *given)]


def only(tmp_path, runs_dir="runs") -> Path:
    (found,) = (tmp_path / runs_dir).glob("*/*/*")
    return found


def files(run: Path) -> set[str]:
    return {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()} - {"compare.ipynb"}


def asked(run: Path) -> list[dict]:
    """The requests of both arms in the order in which they were sent."""
    records = [
        {**r, "arm": arm}
        for arm in ("a", "b")
        for r in run_folder.read_lines(run / "arms" / arm / "records.jsonl")
        if not r["warmup"]
    ]
    return sorted(records, key=lambda r: r["started_at"])


def turns(run: Path) -> list[tuple[str, int]]:
    """(arm, boot as the study counts them) in the order in which they were asked."""
    order = []
    for r in asked(run):
        boot = run_folder.read_json(run / "arms" / r["arm"] / "boots" / f"{r['boot']}.json")
        if not order or order[-1] != (r["arm"], boot["replicate"]):
            order.append((r["arm"], boot["replicate"]))
    return order


def test_the_notebook_is_committed_without_outputs_and_only_calls_the_library():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    code = [c for c in cells if c.cell_type == "code"]
    assert [c.id for c in code] == ["parameters", *STAGES]
    assert all(c.outputs == [] and c.execution_count is None for c in code)
    assert all(len(c.source.splitlines()) <= 8 for c in code[1:])
    assert not [line for c in code for line in c.source.splitlines() if line.lstrip().startswith(("!", "%"))]
    assert {cells[i - 1].cell_type for i, c in enumerate(cells) if c.cell_type == "code"} == {"markdown"}


def test_the_parameters_cell_is_the_parameters_model():
    cell = next(
        c for c in nbformat.read(NOTEBOOK, as_version=4).cells if "parameters" in c.metadata.get("tags", [])
    )
    space: dict = {}
    exec(cell.source, space)
    fields = StudyParameters.model_fields
    assert [n for n in space if not n.startswith("__")] == list(fields)
    assert {n: space[n] for n in fields} == {n: f.default for n, f in fields.items()}
    assert re.findall(r"#\s+(.*)", cell.source)[1:] == [f.description for f in fields.values()]


@pytest.mark.engine
def test_papermill_and_the_command_write_the_same_files_and_the_arms_take_turns(tmp_path):
    study = written(tmp_path, CLAIM, arms=TWO)
    by_papermill = papermill(tmp_path, "-y", yaml.safe_dump({"study": str(study), **OPTIONS}))
    assert by_papermill.returncode == 0, by_papermill.stderr
    by_command = command(*compare_words(study, tmp_path / "runs2"), cwd=tmp_path)
    assert by_command.returncode == 0, by_command.stdout + by_command.stderr
    one, two = only(tmp_path), only(tmp_path, "runs2")
    assert files(one) == files(two)
    assert {
        "study.json",
        "status.json",
        "result.json",
        "report.html",
        "arms/a/report.html",
        "arms/b/records.jsonl",
        "arms/b/result.json",
        "figures/decode-per-prompt.svg",
        "figures/ttft-by-length.csv",
        "figures/startup.png",
    } <= files(one)
    for run in (one, two):
        assert turns(run) == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
        for path in (run, run / "arms" / "a", run / "arms" / "b"):
            assert run_folder.status(path)["outcome"] == "completed"
            assert not run_folder.held(path)
        result = run_folder.read_json(run / "result.json")
        assert "context 8,192 against 2,048" in result["line"]
        (verdict,) = result["comparisons"]
        assert verdict["word"] == "not_comparable"  # of an overridden recipe nothing was claimed
        assert 0.1 < verdict["here"] < 10
        assert result["break_even"][0]["boots"] == 2
        assert not [f for f in result["flags"] if "not in turns" in f]
    assert f"report: {two / 'report.html'}" in by_command.stdout
    assert [line.split()[0] for line in by_command.stdout.splitlines() if line.endswith("...")] == STAGES
    assert not left_below(tmp_path)


@pytest.mark.engine
def test_a_kill_in_the_middle_loses_no_turn(tmp_path):
    study = written(tmp_path, CLAIM, arms=TWO)
    words = compare_words(study, tmp_path / "runs")
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as running:
        deadline = time.monotonic() + 240
        while not list((tmp_path / "runs").glob("*/*/*/arms/b/records.jsonl")):  # a had its first turn
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)
        running.send_signal(signal.SIGKILL)
    run = only(tmp_path)
    while left_below(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    status = run_folder.status(run)
    assert (status["outcome"], status["stage"]) == ("interrupted", "measure")
    assert f"`llmrepro compare --resume {run}`" in status["next_step"]
    before = asked(run)
    assert {r["arm"] for r in before} <= {"a", "b"}
    again = command(BIN / "llmrepro", "compare", "--resume", run, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    after = asked(run)
    assert after[: len(before)] == before
    keys = [
        (
            r["arm"],
            run_folder.read_json(run / f"arms/{r['arm']}/boots/{r['boot']}.json")["replicate"],
            r["workload"],
            r["case"],
        )
        for r in after
    ]
    assert len(keys) == len(set(keys)) == 2 * 2 * (5 + 2)
    assert turns(run) == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert run_folder.status(run)["outcome"] == "completed"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-p", "stduy", "x"], "no parameter is called 'stduy'; did you mean 'study'?"),
        (["-p", "study", "smollm2-135m/two-engine"], "did you mean 'smollm2-135m/two-engines'?"),
        (["-p", "runs", "x"], "give them with -y"),
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
        (["smollm2-135m/two-engine"], "did you mean 'smollm2-135m/two-engines'?"),
        (["one", "two"], "'two' is no run folder, and only one study can be given"),
        (["--boots", "many"], "parameter boots: "),
        (["--resume", "/nonexistent"], "is no study's run folder"),
        (["."], "is no run folder (it has no recipe.json)"),
    ],
)
def test_the_command_refuses_in_one_sentence(tmp_path, arguments, said):
    refused = command(BIN / "llmrepro", "compare", *arguments, cwd=tmp_path)
    assert refused.returncode != 0
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr


def test_runs_that_are_there_are_compared_without_measuring(tmp_path):
    path = folder(tmp_path, [claim()], both())
    arms = [path / "arms" / arm for arm in ("llama-cpp", "vllm")]
    done = command(
        BIN / "llmrepro", "compare", tmp_path / "study.json", *arms, "--runs-dir", tmp_path / "runs2", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = only(tmp_path, "runs2")
    assert "reproduced" in done.stdout
    assert run_folder.status(run)["outcome"] == "completed"
    assert (run / "report.html").exists()
    assert (run / "arms" / "vllm" / "records.jsonl").read_bytes() == (arms[1] / "records.jsonl").read_bytes()
    again = command(BIN / "llmrepro", "report", run, cwd=tmp_path)
    assert again.stdout.strip() == str(run / "report.html")


def test_an_arm_that_cannot_run_here_does_not_hide_the_others_page(tmp_path):
    study = written(tmp_path, claim())
    needs = {"overrides": {"needs.memory_gib": 90000.0}}
    done = papermill(tmp_path, "-y", yaml.safe_dump({"study": str(study), **needs}))
    assert done.returncode == 0, done.stderr
    run = only(tmp_path)
    status = run_folder.status(run)
    assert status["outcome"] == "lacking"
    assert status["reason"].startswith("llama-cpp and vllm: needs 90000 GiB of memory")
    (verdict,) = run_folder.read_json(run / "result.json")["comparisons"]
    assert verdict["word"] == "not_evaluated"
    assert (run / "report.html").exists()
    assert (run / "arms" / "vllm" / "report.html").exists()


@pytest.mark.engine
@pytest.mark.browser
def test_run_all_in_jupyterlab_compares_runs_that_are_there(tmp_path):
    path = folder(tmp_path, [claim()], both())
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cell = next(c for c in notebook.cells if c.id == "parameters")
    arms = [str(path / "arms" / arm) for arm in ("llama-cpp", "vllm")]
    given = {"study": str(tmp_path / "study.json"), "runs": arms, "runs_dir": str(tmp_path / "runs2")}
    for name, value in given.items():
        cell.source, n = re.subn(
            rf"(?m)^({name}: \w+ = )[^#\n]*", lambda m, v=value: f"{m[1]}{v!r}  ", cell.source
        )
        assert n == 1
    nbformat.write(notebook, tmp_path / "compare.ipynb")
    with jupyterlab(tmp_path) as lab, lab.open("compare.ipynb") as page:
        page.run_all()
        page.wait_done(timeout_s=300)
        assert "report.html" in page.outputs(7)
        assert "not 2 engines" in page.outputs(5)
    assert run_folder.status(only(tmp_path, "runs2"))["outcome"] == "completed"
    assert [c["execution_count"] for c in page.saved_code_cells()] == [1, 2, 3, 4, 5, 6, 7, 8]
