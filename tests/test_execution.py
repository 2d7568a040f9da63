"""A notebook run headless ends with the exit code that is true, and its cells say what really ran."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import nbformat
import psutil
import pytest
from test_server import HOLDS, outcome
from test_supervisor import FAKE, alive, gone, kill, soon

from llmrepro.executed import repair

pytestmark = pytest.mark.engine

RUN = """
import json, sys
from pathlib import Path
from llmrepro import execution
notebook, output, parameters, deadline_s, patience_s = sys.argv[1:]
execution.PATIENCE_S = float(patience_s)
sys.exit(execution.execute(Path(notebook), Path(output), json.loads(parameters),
                           deadline_s=float(deadline_s) if deadline_s else None).code)
"""
MEASURE = """
print("interpreter", sys.executable, flush=True)
if act == "exit": sys.exit(0)
if act == "print": print("x" * 3_000_000); import psutil; psutil.cpu_count()
if act == "stubborn":
    (folder / "up").touch()
    while True:
        try: time.sleep(60)
        except KeyboardInterrupt: pass
if act == "swallow":
    (folder / "up").touch()
    try: time.sleep(60)
    except KeyboardInterrupt: pass
inside = {"hold": "time.sleep(600)", "hold, die": "os.kill(os.getpid(), signal.SIGKILL)",
          "hold, raise": "raise ValueError('boom')", "hold, end": "pass"}
if act in inside:
    exec(holds.replace("time.sleep(600)", inside[act]))
"""


class Outcome:
    """One notebook in a process of its own, and what it left."""

    def __init__(
        self,
        folder: Path,
        act: str,
        deadline_s: str = "",
        patience_s: str = "40",
        env: dict | None = None,
        **parameters,
    ):
        self.folder, self.marker = folder, f"marker-{uuid.uuid4().hex}"
        self.output = folder / "run {x}" / "out.ipynb"
        self.temporary = tempfile.mkdtemp(prefix="llmrepro-", dir="/tmp")  # short enough for sockets
        (folder / "status.json").write_text(json.dumps({"outcome": "running", "stage": "measure"}))
        holds = HOLDS.format(folder=str(folder), fake=str(FAKE), marker=self.marker)
        v4 = nbformat.v4
        cells = [
            v4.new_markdown_cell("# A title", id="title"),
            v4.new_code_cell(
                "act = ''\nplace = ''\nholds = ''", id="parameters", metadata={"tags": ["parameters"]}
            ),
            v4.new_code_cell(
                "import os, signal, sys, time\nfrom pathlib import Path\nfolder = Path(place)", id="card"
            ),
            v4.new_code_cell(MEASURE, id="measure"),
            v4.new_markdown_cell("## Afterwards", id="later"),
            v4.new_code_cell("print('reported')", id="report"),
        ]
        kernelspec = {"name": "python3", "language": "python", "display_name": "Python 3"}
        nbformat.write(v4.new_notebook(cells=cells, metadata={"kernelspec": kernelspec}), folder / "in.ipynb")
        values = {"act": act, "place": str(folder), "holds": holds, **parameters}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                RUN,
                str(folder / "in.ipynb"),
                str(self.output),
                json.dumps(values),
                deadline_s,
                patience_s,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": self.temporary, **(env or {})},
            cwd=folder,
        )

    def up(self) -> "Outcome":
        assert soon((self.folder / "up").exists), self.process.communicate(timeout=30)
        return self

    def signal(self, number: int) -> "Outcome":
        os.kill(self.process.pid, number)
        return self

    def end(self) -> int:
        self.out, self.err = self.process.communicate(timeout=60)
        return self.process.returncode

    def cells(self) -> dict[str, str]:
        """What the executed notebook says of each cell, papermill's own markers left out."""
        cells = nbformat.read(self.output, as_version=4).cells
        return {
            cell.id: cell.metadata.papermill.status
            for cell in cells
            if "papermill" in cell.metadata and "injected-parameters" not in cell.metadata.get("tags", [])
        }


@pytest.fixture
def run(tmp_path):
    outcomes = []

    def begin(act, deadline_s="", **more):
        outcomes.append(Outcome(tmp_path, act, deadline_s, **more))
        return outcomes[-1]

    yield begin
    for it in outcomes:
        if it.process.poll() is None:
            kill([*psutil.Process(it.process.pid).children(recursive=True), psutil.Process(it.process.pid)])
        kill(alive(it.marker))
        it.process.communicate()
        shutil.rmtree(it.temporary)


UNTIL_MEASURE = {
    "title": "completed",
    "parameters": "completed",
    "card": "completed",
    "measure": "failed",
    "later": "pending",
    "report": "pending",
}


def test_a_notebook_that_ends_well_in_this_interpreter(run, tmp_path):
    # A kernelspec of the same name that would run another Python, as a user's own often does.
    other = tmp_path / "share" / "kernels" / "python3"
    other.mkdir(parents=True)
    (other / "kernel.json").write_text(json.dumps({"argv": ["/nowhere"], "display_name": "", "language": ""}))
    # A file of the user's that is called as a library is, where the command is typed.
    (tmp_path / "psutil.py").write_text("raise RuntimeError('a stray file was imported')")
    it = run("print", env={"JUPYTER_PATH": str(other.parents[1])})
    assert it.end() == 0, it.err
    assert set(it.cells().values()) == {"completed"}
    lines = [line for line in it.out.splitlines() if not line.startswith("xxx")]
    assert "stray" not in it.err
    assert lines == ["card ...", "measure ...", f"interpreter {sys.executable}", "report ...", "reported"]
    assert it.err == ""


def test_a_server_is_gone_when_the_notebook_has_ended(run):
    it = run("hold, end")
    assert it.end() == 0, it.err
    assert (it.folder / "up").exists() and not alive(it.marker)
    assert not os.listdir(it.temporary), "nor a socket"


def test_an_unknown_parameter_is_refused_before_anything_runs(run):
    it = run("", acts="raise")
    assert it.end() == 2
    assert "'acts'" in it.err and "did you mean 'act'?" in it.err
    assert not it.output.exists() and it.out == ""


def test_a_raising_cell_leaves_no_server(run):
    it = run("hold, raise")
    assert it.end() == 3
    assert "measure" in it.err and "ValueError: boom" in it.err and str(it.output) in it.err
    assert it.cells() == UNTIL_MEASURE
    assert (it.folder / "up").exists() and not alive(it.marker)


def test_a_cell_that_exits_with_0_has_not_succeeded(run):
    it = run("exit")
    assert it.end() == 3
    assert it.cells() == UNTIL_MEASURE


def test_a_dead_kernel_is_told_and_no_cell_claims_what_it_did_not_do(run):
    it = run("hold, die")
    assert it.end() == 4
    assert "kernel" in it.err and sys.executable in it.err
    assert it.cells() == UNTIL_MEASURE
    notebook = nbformat.read(it.output, as_version=4)
    assert notebook.metadata.papermill.exception is True
    measure = next(cell for cell in notebook.cells if cell.id == "measure")
    assert "kernel" in measure.outputs[-1].evalue
    assert gone(it.marker)
    assert soon(lambda: outcome(it.folder) == "interrupted")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_interrupts_the_cell_saves_and_leaves_no_server(run, number):
    it = run("hold").up().signal(number)
    assert it.end() == 128 + number
    assert it.cells() == UNTIL_MEASURE and '"ename": "KeyboardInterrupt"' in it.output.read_text()
    assert not alive(it.marker), "the interrupted cell itself has stopped it, in order"


def test_papermill_killed_leaves_no_server_and_an_interrupted_run(run):
    it = run("hold").up()
    kernel = psutil.Process(it.process.pid).children()[0]
    it.signal(signal.SIGKILL)
    assert gone(it.marker)
    assert soon(lambda: not kernel.is_running() or kernel.status() == psutil.STATUS_ZOMBIE)
    assert soon(lambda: outcome(it.folder) == "interrupted")


def test_the_second_signal_kills(run):
    begun = time.monotonic()
    it = run("stubborn").up().signal(signal.SIGTERM)
    time.sleep(0.5)  # two of a kind at once would arrive as one
    it.signal(signal.SIGTERM)
    assert it.end() == 143 and time.monotonic() - begun < 35, "not by losing patience"
    assert it.cells() == UNTIL_MEASURE


def test_the_deadline_ends_a_cell_that_ignores_the_interrupt(run):
    it = run("stubborn", "3", patience_s="1")
    assert it.end() == 124
    assert "deadline" in it.err and it.cells() == UNTIL_MEASURE


def test_the_deadline_holds_for_the_whole_notebook_when_a_cell_swallows_the_interrupt(run):
    it = run("swallow", "3")
    assert it.end() == 124
    assert it.cells() == {**UNTIL_MEASURE, "measure": "completed", "later": "completed"}


def test_repair_keeps_what_ran_and_takes_back_what_did_not(tmp_path):
    v4 = nbformat.v4

    def cell(**execution):
        made = v4.new_code_cell("1", metadata={"papermill": {"status": "completed", "exception": None}})
        made.metadata["execution"] = execution
        return made

    began, answered = {"iopub.execute_input": "t"}, {"shell.execute_reply": "t"}
    after = v4.new_markdown_cell("text", metadata={"papermill": {"status": "completed", "exception": None}})
    output = tmp_path / "out.ipynb"
    nbformat.write(v4.new_notebook(cells=[cell(**began, **answered), cell(**began), after, cell()]), output)
    repair(output, "the power went")
    said = nbformat.read(output, as_version=4)
    assert [c.metadata.papermill.status for c in said.cells] == ["completed", "failed", "pending", "pending"]
    assert said.cells[1].outputs[0].evalue == "the power went" and not said.cells[3].outputs
