"""Runs in processes of their own, forked from one that has imported the kit: what the tests of kills let die.

Of some the server or they themselves are killed at a moment that chance would seldom hit.
"""

import json
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

from kill_rig import RealRig, Rig

from llmrepro import asker, bench, charts, cli, machine, report, run_folder, stages
from llmrepro import run as runs
from llmrepro.boot import Boot
from llmrepro.client import Question, Record
from llmrepro.workload import Workload

FORKS = multiprocessing.get_context("forkserver")
# Of what takes seconds to import; modules of the tests are not found there.
PRELOADED = [
    "llmrepro.stages",
    "llmrepro.cli",
    "llmrepro.execution",
    "gguf",
    "nbformat",
    "pytest",
    "psutil",
    "yaml",
]
FORKS.set_forkserver_preload(PRELOADED)


def begin(what, rig: Rig | RealRig, **given) -> multiprocessing.Process:
    """Start one of the functions below. Its output goes to the rig's out.log."""
    process = FORKS.Process(target=_apart, args=(what, rig, given))
    process.start()
    return process


def _apart(what, rig: Rig | RealRig, given: dict) -> None:
    os.environ |= {"LLMREPRO_CACHE": str(rig.cache), "TMPDIR": rig.temporary}
    os.environ["LLMREPRO_LOCKS"] = str(rig.locks)  # each of them measures, and most all at once
    tempfile.tempdir = None  # found anew: papermill's sockets are left where it is killed
    os.chdir(rig.folder)
    out = os.open(rig.folder / "out.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    what(rig, **given)


def measures(rig: Rig, **given) -> None:
    """A program that uses the library: every stage of a run, one after the other."""
    machine.measured_bandwidth = lambda earlier: {}  # this and the figures are seconds that say nothing here
    charts.draw = lambda path: []
    run = stages.start({**rig.parameters(), **given})
    stages.machine(run)
    rig.prepare(run)
    for stage in ("measure", "results", "report"):
        getattr(stages, stage)(run)


def commands(rig: Rig, **given) -> None:
    """`llmrepro run`, whose notebook runs in a kernel of its own."""
    os.setsid()  # else a terminal's Ctrl-C would reach it
    options = [w for name, value in given.items() for w in (f"--{name.replace('_', '-')}", value)]
    cli.main([*rig.command(), *options])


def tears(rig: Rig, **given) -> None:
    """`measures`, killed while the records of four streams are written: any part of them may be in the file."""
    append = run_folder.Folder.append

    def half(folder: run_folder.Folder, *records: Record) -> None:
        if len(records) < 4:
            return append(folder, *records)
        lines = b"".join(r.model_dump_json().encode() + b"\n" for r in records)
        with open(folder.path / "records.jsonl", "ab") as file:
            file.write(lines[: rig.cut % len(lines)])
        os.kill(os.getpid(), signal.SIGKILL)

    run_folder.Folder.append = half
    measures(rig, **given)


def reports(rig: Rig, **given) -> None:
    """`measures`, killed while its page is made; there is one already, of an earlier sitting."""

    def dies(path: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    finish, report.write = stages.finish, dies

    def with_a_page(run: runs.Run) -> None:
        (run.path / "report.html").write_text("what there was until then")
        finish(run)

    stages.finish = with_a_page
    measures(rig, **given)


def twice(rig: Rig, **given) -> None:
    """`measures`, its server killed when the first of four streams has its answer, and in a ladder's warm-up."""
    ask_one, warm_up = bench.ask_one, asker.Asker._warm_up
    moments = ["four streams", "warm-up"]

    def kill_at(moment: str) -> None:
        if moment in moments:
            moments.remove(moment)
            os.kill(rig.server(), signal.SIGKILL)

    def killed_after(running: Boot, asked: Question, *more, **named) -> Record:
        record = ask_one(running, asked, *more, **named)
        if (asked.workload, asked.case) == ("concurrency", "4"):
            kill_at("four streams")
        return record

    def killed_before(self: asker.Asker, workload: Workload) -> bool:
        if workload.kind == "ladder":
            kill_at("warm-up")
        return warm_up(self, workload)

    bench.ask_one, asker.Asker._warm_up = killed_after, killed_before
    measures(rig, **given)


def always(rig: Rig, says: str = "", **given) -> None:
    """`measures`, its server killed in every warm-up of the ladder; by the guard, where that says so."""
    warm_up = asker.Asker._warm_up

    def killed_before(self: asker.Asker, workload: Workload) -> bool:
        if workload.kind == "ladder":
            with open(self.guard.path, "a") as file:
                file.write(says)
            os.kill(rig.server(), signal.SIGKILL)
        return warm_up(self, workload)

    asker.Asker._warm_up = killed_before
    measures(rig, **given)


def guarded(rig: Rig) -> None:
    stop = {"kind": "stop", "at": run_folder.now(), "t_ns": 1, "reason": "It was hot", "next_step": "let it cool"}
    always(rig, says=json.dumps(stop) + "\n")
