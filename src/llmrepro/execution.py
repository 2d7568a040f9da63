"""Runs one notebook headless, as papermill does it, and says truthfully how it went: by its exit code.

papermill alone logs an unknown parameter and goes on, dies at once of SIGTERM, has no clock for a whole
notebook, and calls every cell completed after its kernel has died. To be called in a process of its own.
"""

import llmrepro.lean  # noqa: F401 - before anything that imports nbformat

# isort: split
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import papermill
import zmq
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError

from llmrepro import executed, terms
from llmrepro.markup import showable

OK, BAD_PARAMETERS, CELL_RAISED, KERNEL_DIED, NOT_STARTED = 0, 2, 3, 4, 5  # and 128 + the signal's number
DEADLINE, ABANDONED = 124, 125
PARENT = "LLMREPRO_PARENT"  # the pid of the matrix: a notebook that it began does not outlive it
PATIENCE_S = 60.0  # from the interrupt to the kill: stopping a server in order takes its grace
TICK_S = 0.1
KERNEL_START_S = 120
IOPUB_TIMEOUT_S = 60  # papermill's 4 s lose the end of a cell on a loaded machine
TMPDIR_MAX_BYTES = 75  # a socket's path has 107 bytes at most, and folder and name come behind
RANDOM_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f-]+)?")  # a cell id that nobody chose


class Execution(NamedTuple):
    """How an execution went: its exit code, and a sentence where that is not 0."""

    code: int
    why: str = ""


class _Stopped(Exception):
    """The notebook was told to stop while no cell was running."""


class _OwnKernel(AsyncKernelManager):
    """A kernel of this very interpreter, whatever kernelspecs are installed.

    Its sockets lie in a private folder of its own: no two runs can take each other's address (so, other than
    with TCP, there is nothing to try again), and no port is open to other users.
    """

    conductor: "_Conductor"  # both set by the subclass that one execution makes
    folder: Path

    def __init__(self, **kw):
        super().__init__(**kw)
        self.transport = "ipc"
        self.ip = str(self.folder / "s")
        self.connection_file = str(self.folder / "kernel.json")
        if self.has_trait("transport_encryption") and zmq.has("curve"):
            self.transport_encryption = "auto"
        self.conductor.kernels.append(self)

    @property
    def kernel_spec(self) -> KernelSpec:
        spec = get_kernel_dict()
        spec["argv"][0] = sys.executable
        # Else the debugger warns on stderr, in every run, that it cannot look into frozen modules.
        spec["env"] = {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        # Else a library's name that lies where the command was typed is imported for it: it may be a stranger's.
        spec["argv"].append("--InteractiveShellApp.ignore_cwd=True")
        return KernelSpec(**spec)

    async def _async_interrupt_kernel(self) -> None:
        # jupyter_client interrupts before every shutdown, and an idle kernel complains of it on stderr.
        if self.conductor.busy():
            await super()._async_interrupt_kernel()

    @property
    def pid(self) -> int | None:
        """The kernel's pid, which is its group's too, once it was started."""
        return getattr(self.provisioner, "pid", None)


class _Conductor(threading.Thread):
    """Ends the notebook on a signal, at the deadline, or when its matrix is gone: one interrupt, then, after
    PATIENCE_S, a kill.

    One interrupt only, since a second would break the orderly stop that the first began.
    """

    def __init__(self, deadline_s: float | None):
        super().__init__(daemon=True)
        self.end = None if deadline_s is None else time.monotonic() + deadline_s
        self.parent = os.environ.get(PARENT)
        self.code: int | None = None  # the exit code once the notebook has been told to stop
        self.kill = False
        self.cell: NotebookNode | None = None  # the one that papermill asked the kernel to run
        self.name = ""
        self.kernels: list[_OwnKernel] = []
        self.done = threading.Event()

    def on_signal(self, number: int, _frame) -> None:
        if self.code is None:
            self.code = 128 + number
        else:
            self.kill = True

    def busy(self) -> bool:
        """Whether the kernel is within a cell."""
        return self.cell is not None and executed.began(self.cell) and not executed.ended(self.cell)

    def run(self) -> None:
        interrupted_at = None
        while not self.done.wait(TICK_S):
            now = time.monotonic()
            if self.code is None and self.end is not None and now > self.end:
                self.code = DEADLINE
            if self.code is None and self.parent is not None and str(os.getppid()) != self.parent:
                self.code = ABANDONED
            pid = self.kernels[-1].pid if self.kernels else None
            if self.code is None or pid is None:
                continue
            if self.kill or (interrupted_at is not None and now > interrupted_at + PATIENCE_S):
                kill_group(pid)
                return
            # Before the kernel has begun with the cell it would ignore the interrupt.
            if interrupted_at is None and self.busy():
                interrupted_at = now
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)  # the kernel only: it knows how to end what it started


class _Echo:
    """Passes a cell's output on, without what a terminal would obey; a reader that went away does not end the
    run."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self.stream.write(showable(text))

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self.stream.flush()

    def line(self, text: str) -> None:
        self.write(f"{text}\n")
        self.flush()


def execute(
    notebook: Path,
    output: Path,
    parameters: dict,
    *,
    deadline_s: float | None = None,
    kernel_name: str = "python3",
) -> Execution:
    """Run `notebook` with `parameters` into `output`; call it in the main thread of its own process.

    The kernel is this interpreter; `kernel_name` is only what the output notebook says. Cells' output goes to
    stdout, what went wrong to stderr. The first SIGTERM, SIGINT or SIGHUP, and the deadline for the whole
    notebook, interrupt the running cell and save; the second signal kills the kernel.

    Its code is 0, 2 (unknown parameter or unreadable notebook: nothing ran), 3 (a cell raised), 4 (the kernel
    died), 5 (it never started), 124 (deadline), 125 (its matrix was gone), 128 + the signal's number.
    """
    out, err = _Echo(sys.stdout), _Echo(sys.stderr)
    wrong = _wrong(notebook, parameters)
    if wrong:
        err.line(wrong)
        return Execution(BAD_PARAMETERS, wrong)
    output.parent.mkdir(parents=True, exist_ok=True)
    conductor = _Conductor(deadline_s)

    def starting(cell, cell_index) -> None:
        if conductor.code is not None:
            raise _Stopped
        conductor.cell, conductor.name = cell, _name(cell, cell_index)
        if conductor.name != "parameters":
            out.line(f"{conductor.name} ...")

    code, why = OK, ""
    with _signals(conductor), _quiet(), _socket_folder() as folder:
        kernel = type("Kernel", (_OwnKernel,), {"folder": folder, "conductor": conductor})
        conductor.start()
        try:
            done = papermill.execute_notebook(
                _literal(notebook),
                _literal(output),
                parameters,
                kernel_name=kernel_name,
                language="python",
                progress_bar=False,
                stdout_file=out,
                stderr_file=err,
                start_timeout=KERNEL_START_S,
                kernel_manager_class=kernel,
                on_cell_execute=starting,
                iopub_timeout=IOPUB_TIMEOUT_S,
            )
            if done.metadata.papermill.exception:  # sys.exit(0) in a cell: papermill sees no error in that
                code, why = CELL_RAISED, f"{conductor.name} left by SystemExit, so no later cell ran"
        except PapermillExecutionError as error:
            code, why = CELL_RAISED, f"{conductor.name} raised {error.ename}: {error.evalue}"
        except CellTimeoutError:
            code, why = CELL_RAISED, f"{conductor.name} ended, but its output was lost; print less in it"
        except _Stopped:
            pass
        except OSError as error:  # a full disk: papermill writes the notebook after every cell
            code, why = CELL_RAISED, f"the notebook could not be saved in {conductor.name or 'its start'}: {error}"
        except (DeadKernelError, RuntimeError) as error:
            code = NOT_STARTED if conductor.cell is None else KERNEL_DIED
            why = (
                f"the kernel ({sys.executable}) died in {conductor.name or 'its start'} ({error}); the "
                "usual cause is memory: see the system's log"
            )
        finally:
            conductor.done.set()
            for manager in conductor.kernels:
                if manager.pid is not None:
                    kill_group(manager.pid)  # what a dead kernel left in its own group
    if conductor.code is not None:
        code = conductor.code
        told = {
            DEADLINE: f"the notebook's deadline of {deadline_s or 0:g} s has passed",
            ABANDONED: "its matrix was gone",
        }
        why = told.get(code) or f"stopped by {signal.Signals(code - 128).name}"
        why += f" in {conductor.name or 'the start'}"
    if code != OK:
        executed.repair(output, why)
        err.line(f"{why}. The executed notebook is {output}")
    return Execution(code, why)


def _name(cell: NotebookNode, index: int) -> str:
    """What to call a cell: the id that its author chose, else its position."""
    if {"parameters", "injected-parameters"} & set(cell.metadata.get("tags", [])):
        return "parameters"
    chosen = cell.get("id", "")
    return chosen if chosen and not RANDOM_ID.fullmatch(chosen) else f"cell {index + 1}"


def _wrong(notebook: Path, parameters: dict) -> str | None:
    """Why this notebook cannot be run with these parameters, or None."""
    if not notebook.is_file():
        return f"There is no notebook {notebook}; give the path of one"
    try:
        with _quiet():
            known = papermill.inspect_notebook(_literal(notebook))
    except Exception as error:  # whatever papermill finds wrong with the file
        return f"{notebook} is no notebook ({type(error).__name__}: {error}); give another, or save it again"
    unknown = [name for name in parameters if name not in known]
    if not unknown:
        return None
    return f"{notebook.name} has no parameter {unknown[0]!r}; {terms.nearest(unknown[0], known)}"


def _literal(path: Path) -> str:
    """The path as papermill takes it, which fills {parameters} into paths."""
    return str(path).replace("{", "{{").replace("}", "}}")


def kill_group(pid: int) -> None:
    """SIGKILL for a kernel and what it started in its own process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@contextmanager
def _signals(conductor: _Conductor):
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: the run outlives its terminal
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, conductor.on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet():
    """papermill and Jupyter log what the exit code and one sentence say better."""
    loggers = [logging.getLogger(name) for name in ("papermill", "traitlets")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def _socket_folder():
    """A folder of mode 0700 whose path is short enough for sockets, wherever TMPDIR points."""
    base = tempfile.gettempdir()
    short = len(os.fsencode(base)) <= TMPDIR_MAX_BYTES
    folder = Path(tempfile.mkdtemp(prefix="llmrepro-", dir=base if short else "/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
