"""`llmrepro matrix`: every recipe, one after the other, and one page over all of them."""

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from llmrepro.command_line import DURATION, parameter_options, sentences, values_of
from llmrepro.markup import showable
from llmrepro.notation import plural
from llmrepro.parameters import Parameters
from llmrepro.run import base_of
from llmrepro.run_folder import RunError

# Parameters that say something of one recipe, or of one server: those are for `llmrepro run`.
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
OF_ONE = ("recipe", "servers", "workloads", "resume", "weights_path", "prompts_file", "server_url", "overrides")


def tls_options(command):
    """The three files that connections to a scheduler take."""
    for name, what in (
        ("key", "its key"),
        ("cert", "this machine's certificate"),
        ("ca-file", "who signed all of them"),
    ):
        command = click.option(f"--tls-{name}", metavar="FILE", help=f"for --scheduler on other machines: {what}")(
            command
        )
    return command


@click.command()
@click.argument("recipes", nargs=-1)
@click.option(
    "--study", "studies", multiple=True, help="only recipes that this study compares; may be given again"
)
@click.option("--engine", "engines", multiple=True, help="only recipes of this engine; may be given again")
@click.option("--here", is_flag=True, help="only what this machine can run")
@click.option("--dry-run", is_flag=True, help="only show what would be done, with minutes and gigabytes")
@click.option("--force", is_flag=True, help="measure again what is there and has not changed")
@click.option("--deadline", type=DURATION, help="stop, in order, when all have taken so long: 90, 15m, 2h")
@click.option("--cell-deadline", type=DURATION, help="stop one recipe, in order, when it has taken so long")
@click.option("--collect", multiple=True, type=FOLDER, help="run nothing: verify and index the run folders below")
@click.option("--scheduler", metavar="ADDRESS", help="send them to the workers of this Dask scheduler")
@tls_options
@parameter_options(Parameters, *OF_ONE)
def matrix(
    recipes: tuple[str, ...],
    studies: tuple[str, ...],
    engines: tuple[str, ...],
    here: bool,
    dry_run: bool,
    force: bool,
    deadline: float | None,
    cell_deadline: float | None,
    collect: tuple[Path, ...],
    scheduler: str | None,
    tls_ca_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    **options,
) -> None:
    """Run RECIPES (all, when left out) through papermill, one after the other, and write one page over them.

    RECIPES are ids of `llmrepro list`, globs over them ('qwen*'), or paths. A run that is there and of which
    nothing has changed is left as it is; one that was interrupted is gone on with. Below --runs-dir lie then
    index.html, summary.json and summary.csv.

    Exits with 0 when all is well, 10 when some recipes lack what they need here, 11 when a claim is not
    reproduced, 12 when a run failed: the highest that is true. With 124 at --deadline, 128 + n when stopped by
    signal n.
    """
    from llmrepro import matrix as matrix_  # scipy and more, which help does not wait for

    with sentences():
        given = values_of(Parameters, options)
        if collect:
            sys.exit(_collect(collect, base_of(given.get("runs_dir"))))
        if scheduler is not None and (here or deadline):
            raise RunError("--scheduler goes neither with --here nor with --deadline: leave one of them out")
        choice = matrix_.Choice(recipes, studies, engines, here)
        cells = matrix_.plan(choice, given, force=force, elsewhere=scheduler is not None)
        if dry_run:
            for line in _planned(cells):
                click.echo(showable(line))
            return
        runs_dir = base_of(given.get("runs_dir"))
        try:
            runs_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {runs_dir}: {error.strerror}; give another --runs-dir") from None
        if scheduler is None:
            run = partial(matrix_.run, deadline_s=deadline, cell_deadline_s=cell_deadline)
        else:
            from llmrepro import cluster, worker

            tls = worker.Tls(tls_ca_file, tls_cert, tls_key)
            run = partial(cluster.run, address=scheduler, tls=tls, cell_deadline_s=cell_deadline)
        code = _run(cells, runs_dir, run)
    sys.exit(code)


@click.command()
@click.argument("address")
@tls_options
@click.option("--runs-dir", help="where run folders go; None: runs/ of the project")
@click.option("--declare", multiple=True, metavar="NAME=NUMBER", help="a resource beside those that were found")
def worker(
    address: str,
    tls_ca_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    runs_dir: str | None,
    declare: tuple[str, ...],
) -> None:
    """Run cells of matrices for the Dask scheduler at ADDRESS, such as tcp://127.0.0.1:8786, one at a time.

    What this machine has is declared, so that it gets the recipes that it can run. Ctrl-C stops the cell that runs
    in order, and sends what there is of it. Whoever reaches the scheduler runs code as you.
    """
    from llmrepro import worker as worker_

    with sentences():
        more = {}
        for one in declare:
            name, _, amount = one.partition("=")
            try:
                more[name] = float(amount)
            except ValueError:
                raise RunError(f"--declare {one!r} is not of the form NAME=NUMBER") from None
        worker_.serve(address, worker_.Tls(tls_ca_file, tls_cert, tls_key), runs_dir, more)


def _planned(cells: list) -> list[str]:
    """The plan, a line each and a sum."""
    lines = []
    for one in cells:
        told = {"new": "measure", "go on": f"go on with {one.folder}", "skip": "skip", "refuse": "refuse"}[one.act]
        told = "show what is published" if one.act == "new" and one.lacking else told
        cost = f"{one.seconds / 60:6.1f} min {one.gib:7.2f} GiB" if one.does else " " * 22
        lines.append(f"{cost}  {one.recipe}: {told}" + (f" ({one.why})" if one.why else ""))
        lines += [f"{'':24}- {what}" for what in one.lacking if one.does]
    doing = [one for one in cells if one.does]
    total = f"{sum(c.seconds for c in doing) / 60:6.1f} min {sum(c.gib for c in doing):7.2f} GiB"
    return [*lines, f"{total}  at most, for {plural(len(doing), 'recipe')} of {len(cells)}"]


def _collect(folders: tuple[Path, ...], runs_dir: Path) -> int:
    """Verify run folders from elsewhere, and write the summaries over them and what is here."""
    from llmrepro import collection, summary
    from llmrepro.report import index

    rows = []
    for found in collection.collect(list(folders), runs_dir):
        row = summary.of_collected(found, runs_dir)
        rows.append(row)
        click.echo(
            f"{found.source}: {row.recipe}: {index.outcome(row)[1]}, {'whole' if found.whole else 'not whole'}"
        )
        for finding in row.findings or ([row.reason] if row.whole is False else []):
            click.echo(f"      {finding}")
    code = _write(runs_dir, rows, [], "")
    click.echo(f"index: {runs_dir / 'index.html'}")
    return code


class _Teller:
    """Says how far a matrix is: a line that moves in a terminal, plain lines elsewhere."""

    def __init__(self, cells: list):
        self.total = len(cells)
        self.all_s, self.done_s, self.number = sum(one.seconds for one in cells if one.does), 0.0, 0
        self.begin = self.cell_begin = time.monotonic()
        self.bar = None

    def __enter__(self):
        if sys.stdout.isatty() and self.all_s:
            from llmrepro.progress import Progress

            self.bar = Progress("matrix", self.all_s).__enter__()
        return self

    def __exit__(self, *error) -> None:
        if self.bar is not None:
            self.bar.__exit__(*error)

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody looks any more: the work goes on
            click.echo(("\r\x1b[K" if self.bar is not None else "") + showable(text))

    def begins(self, one) -> None:
        self.cell_begin = time.monotonic()
        self.say(f"[{self.number + 1}/{self.total}] {one.recipe} ...")

    def ticks(self, one) -> None:
        if self.bar is not None:
            spent_s = time.monotonic() - self.cell_begin
            stage = f": {_stage(one.folder)}" if one.folder else ""  # else it runs elsewhere
            self.bar.to(self.done_s + min(spent_s, 0.95 * one.seconds), f"{one.recipe}{stage}")

    def ended(self, one, row) -> None:
        from llmrepro.report import index

        self.number += 1
        self.done_s += one.seconds if one.does else 0.0
        words = {name: n for name, n in row.words.items() if name != "not_evaluated"}
        told = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in words.items())
        left_s = self._left_s()
        self.say(
            f"[{self.number}/{self.total}] {row.recipe}: {index.outcome(row)[1]}"
            + (f" ({row.seconds:.0f} s)" if row.seconds is not None else "")
            + (f": {told}" if told else "")
            + (f"; about {left_s / 60:.0f} min left" if left_s >= 30 else "")
        )
        if row.failed or row.did == "skipped":
            self.say(f"      {row.reason or one.why}")

    def _left_s(self) -> float:
        """What is still to be done, at the pace of what was done."""
        spent_s = time.monotonic() - self.begin
        return (self.all_s - self.done_s) * (spent_s / self.done_s if self.done_s else 1.0)


def _stage(folder: Path) -> str:
    from llmrepro.run_folder import RunError, read_json_if_there

    with contextlib.suppress(RunError):
        return read_json_if_there(folder / "status.json").get("stage", "")
    return ""


def _run(cells: list, runs_dir: Path, run: Callable) -> int:
    from llmrepro import matrix as matrix_
    from llmrepro import summary

    rows: list = []
    left = list(cells)

    with matrix_.Signals() as signals, _Teller(cells) as teller:

        def ended(one) -> None:
            rows.append(summary.of_cell(one, runs_dir))
            left[:] = [other for other in left if other.name != one.name]
            teller.ended(one, rows[-1])
            _write(runs_dir, rows, left, "still running")

        stopped = run(cells, signals, on_begin=teller.begins, on_end=ended, on_tick=teller.ticks)
        code = _write(runs_dir, rows, left, stopped.why if stopped else "")
    if stopped:
        click.echo(f"ended early: {stopped.why}; `llmrepro matrix` again goes on")
    click.echo(f"index: {runs_dir / 'index.html'}")
    return stopped.code if stopped else code


def _write(runs_dir: Path, rows: list, left: list, stopped: str) -> int:
    """The summaries of what is there until now; a full disk costs them, and no run."""
    from llmrepro import summary
    from llmrepro.report import index

    mine = [*rows, *(summary.not_reached(one, stopped) for one in left)]
    code = summary.exit_code(rows)
    try:
        earlier = summary.there(runs_dir, mine)
        summary.write(runs_dir, [*mine, *earlier], code, stopped)
        index.write(runs_dir / "index.html", mine, earlier, stopped, _command())
    except OSError as error:
        click.echo(
            f"the summary could not be written: {error}; make room, and `llmrepro matrix` again writes it",
            err=True,
        )
        return summary.FAILED
    return code


def _command() -> str:
    """What was typed, as far as it tells nothing of this machine."""
    from llmrepro.machine import private

    return private(shlex.join(["llmrepro", *(os.fsdecode(word) for word in sys.argv[1:])]))
