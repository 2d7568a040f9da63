"""llmrepro: list the recipes, run one headless, make a report again."""

import contextlib
import json
import shlex
import sys
from pathlib import Path

import click

from llmrepro import catalog, credentials, run_folder, terms
from llmrepro import run as runs
from llmrepro import study as studies_
from llmrepro.command_line import DURATION, draw_on_terminal, parameter_options, sentences, values_of
from llmrepro.comparison import StudyParameters
from llmrepro.markup import showable
from llmrepro.matrix_command import matrix, worker
from llmrepro.parameters import Parameters, checked, resolved, settled
from llmrepro.recipe import json_schema

COMPARED = "compare.ipynb"
EXECUTED = "reproduce.ipynb"  # in the run folder, whichever notebook it was
STOPPED_BY = {
    124: ("deadline", "the deadline of the whole run has passed"),
    125: ("signal", "the matrix that it belongs to was gone"),
    129: ("signal", "stopped by SIGHUP: its terminal was closed"),
    143: ("signal", "stopped by SIGTERM, as a scheduler or a shutdown sends it"),
}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="llmrepro")
def main() -> None:
    """Re-run a published LLM-inference measurement, and see whether it holds on this machine."""


@main.command("list")
def list_() -> None:
    """The recipes of this kit and its studies: what each needs, and what runs here or why not."""
    from llmrepro import listing

    faults: list[str] = []
    for line in listing.lines(faults):
        click.echo(line)
    if faults:
        raise click.ClickException("\n".join(faults))


@main.command()
@click.argument("recipe", required=False)
def doctor(recipe: str | None) -> None:
    """What RECIPE (or every one) needs, whether this machine has it, and what is repaired or adapted here.

    Nothing is installed or fetched. Exits with 1 when something is wrong that can be mended, and says how. A
    machine without the processor, memory or GPU that a recipe needs is no fault: nothing that could be mended
    makes that recipe run on it, so whatever else is missing for it is only told, and counts for nothing: 0.
    """
    from llmrepro import doctor as doctor_

    faults = 0
    for name in [recipe] if recipe else catalog.ids():
        click.echo(showable(name))
        for check in doctor_.examine(name):
            click.echo(f"  {check.what:<20} {showable(check.found)}")
            if check.next_step:
                click.echo(f"  {'→ next':<20} {check.next_step}")
                faults += 1
    if faults:
        raise click.ClickException(f"{faults} thing{'s' * (faults > 1)} to mend; each next step stands above")


@main.command()
@click.argument("recipe", required=False)
@click.option("--dry-run", is_flag=True, help="only show every command that a run executes here; nothing is run")
@click.option("--deadline", type=DURATION, help="stop the run, in order, when it has taken so long: 90, 15m, 2h")
@parameter_options(Parameters, "recipe")
def run(recipe: str | None, dry_run: bool, deadline: float | None, **options) -> None:
    """Run RECIPE's notebook through papermill and say where its report is.

    RECIPE is an id of `llmrepro list` (the first when it is left out) or the path of a recipe.json. Values
    marked YAML are written as in --servers '[default]' or --overrides '{workloads.chat.max_tokens: 32}'.

    Exits with 0 when the run came to its end, whatever its verdicts are or when this machine lacks something;
    1 or 2 when it could not begin, 3 when a step failed, 4 when its kernel died and 5 when that never started, 124
    at the deadline, 128 + n when signal n stopped it.
    """
    from llmrepro import execution  # papermill takes a second to import: help does not wait
    from llmrepro import notebooks as notebooks_

    with sentences():
        given = values_of(Parameters, options) | ({"recipe": recipe} if recipe else {})
        if dry_run:
            return _dry_run(checked(given))
        new = runs.create(checked(given))
        asked = new.parameters.model_dump(exclude_defaults=True)
        new.close()  # the notebook's kernel takes the folder over
        path = new.path
        draw_on_terminal()
        click.echo(f"{new.recipe.id} → {path}")
        notebook, why = notebooks_.to_execute(new.parameters.recipe)
        if why:
            click.echo(why)
        ended = execution.execute(notebook, path / EXECUTED, {**asked, "resume": str(path)}, deadline_s=deadline)
        code = _end(path, *ended)
    sys.exit(code)


def _dry_run(params: Parameters) -> None:
    from llmrepro import commands, machine, requirements

    if params.resume is not None:
        raise run_folder.RunError("a dry run shows what a new run would do; leave --resume out")
    committed = catalog.load(params.recipe)
    params = settled(committed, params)
    recipe = resolved(committed, params)
    cache = machine.cache_dir()
    missing = [] if params.server_url else requirements.missing(recipe, machine.describe(cache), cache)
    said = commands.comment(f"{recipe.id}: {recipe.title}")
    told = f"does not run here, where a run shows what is published: it {'; '.join(missing)}"
    said += commands.comment(f"It {told if missing else 'runs here'}.")
    for line in said + commands.lines(commands.of(recipe, params, catalog.path_of(params.recipe).parent)):
        click.echo(line)


@main.command()
@click.argument("study_or_runs", nargs=-1)
@parameter_options(StudyParameters, "study", "runs")
def compare(study_or_runs: tuple[str, ...], **options) -> None:
    """Measure the arms of a STUDY in turns and hold them against each other, or compare RUNS that are there.

    Give a study (its id or the path of its JSON file; the first when left out), or run folders, or both: then the
    runs are judged by the study's claims and nothing is measured. Options and exit codes are those of `run`.
    """
    from llmrepro import comparison, execution

    with sentences():
        folders = [given for given in study_or_runs if Path(given).expanduser().is_dir()]
        studies = [given for given in study_or_runs if given not in folders]
        if len(studies) > 1:
            raise run_folder.RunError(f"{studies[1]!r} is no run folder, and only one study can be given")
        given = values_of(StudyParameters, options) | ({"runs": folders} if folders else {})
        given |= {"study": studies[0]} if studies else {"study": None} if folders else {}
        new = comparison.create(checked(given, StudyParameters))
        path, name = new.path, new.study.id
        asked = new.parameters.model_dump(exclude_defaults=True)
        new.close()  # the notebook's kernel takes the folder over
        draw_on_terminal()
        click.echo(f"{name} → {path}")
        notebook = catalog.home().parent / "notebooks" / COMPARED
        code = _end(path, *execution.execute(notebook, path / COMPARED, {**asked, "resume": str(path)}))
    sys.exit(code)


def _end(path: Path, code: int, why: str = "") -> int:
    """Say how a run ended; what there is of it gets a report even when it did not get to its own.

    `why` is what the execution of its notebook knows of the end. The kernel knew only that it was interrupted, or
    nothing at all.
    """
    status = run_folder.status(path)
    more = {}
    if status["outcome"] == "stopped" and code in STOPPED_BY:
        more = dict(zip(("stopped_by", "reason"), STOPPED_BY[code], strict=True))
    elif status["outcome"] == "interrupted" and not run_folder.held(path):
        more = {"reason": why or "its notebook came to its end and made no report"}
    if more:
        with contextlib.closing(run_folder.Folder(path)) as run:
            run.set_status(status["outcome"], status["stage"], next_step=status["next_step"], **more)
        status = run_folder.status(path)
    with sentences():
        blanked = _blank(path)  # in what papermill saved after the report was made
    if blanked:
        _report(path)
        status = run_folder.status(path)
    click.echo(f"{status['outcome']}" + (f": {status['reason']}" if status.get("reason") else ""))
    if status.get("next_step"):
        click.echo(f"next: {status['next_step']}")
    if status["outcome"] in {"completed", "lacking"} and (path / "report.html").exists():
        result = run_folder.read_json(path / "result.json")
        judged = [*result.get("verdicts", []), *result["comparisons"]]
        for flag in result["flags"]:
            click.echo(f"  {'mind':<16} {flag}")
        for held in result.get("held", []):
            click.echo(f"  {'holds':<16} {held}")
        if status["outcome"] == "lacking" and all(v["word"] == "not_evaluated" for v in judged):
            click.echo(f"  {len(judged)} claims, in the report as published: nothing was measured here")
            verdicts, left_out = [], 0
        else:
            verdicts, left_out = _verdicts(path)
        for verdict in verdicts:
            click.echo(f"  {verdict['word'].replace('_', ' '):<16} {verdict['claim']}{_times(verdict)}")
        if left_out:
            click.echo(
                f"  {'not asked':<16} {left_out} more, by the profile, --workloads or --servers of this run"
            )
        click.echo(f"report: {path / 'report.html'}")
        return code
    click.echo(f"report of what there is: {_report(path)}")
    return code or 1


def _times(judged: dict) -> str:
    """The ratio behind a word, where there is one: to what was published, or a comparison's own."""
    if "ratios" in judged:
        return "" if judged.get("here") is None else f": {judged['here']:.2f}× here"
    return "" if judged.get("ratio") is None else f": {judged['ratio']:.2f}× of what was published"


def _verdicts(path: Path) -> tuple[list[dict], int]:
    """What was judged in a run or a study, and how many claims are about what was not asked."""
    from llmrepro import findings  # scipy and more, which help does not wait for

    if (path / "study.json").exists():
        return run_folder.read_json(path / "result.json")["comparisons"], 0
    found = findings.read(path)
    return found.judged, len(found.out_of_profile)


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--public", is_flag=True, help="report-public.html: without names of host and user, without paths")
def report(folder: Path, public: bool) -> None:
    """Make report.html of a run FOLDER again, from the folder alone."""
    click.echo(_report(folder.resolve(), public))


def _report(folder: Path, public: bool = False) -> Path:
    from llmrepro import report as made  # matplotlib and nbconvert, which nothing else here needs

    with sentences():
        if _blank(folder) and public:
            made.write(folder)  # which tells of it too
        return made.write(folder, public=public)


def _blank(folder: Path) -> bool:
    """Blank credentials in a folder that nobody writes any more; whether there were any."""
    if run_folder.held(folder) or not credentials.blank(folder):
        return False
    from llmrepro import verification

    verification.renew(folder)
    return True


main.add_command(matrix)
main.add_command(worker)


@main.command()
@click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
def verify(folders: tuple[Path, ...]) -> None:
    """Whether run folders are what they were: every number on a page made again from the records.

    RUN is the folder of a run, of a study or of an import, from here or copied from another machine. A line says
    for each whether it is whole, then one for every file that is not what it was, and why. Nothing is written.

    Exits with 0 when all are whole, else with 1.
    """
    from llmrepro import verification  # matplotlib and nbconvert, as above

    broken = 0
    for folder in folders:
        found = verification.verify(folder)
        click.echo(f"{'whole' if found.whole else 'not whole':<9} {folder}")
        for one in found.findings:
            click.echo(f"  {one.file or 'the folder'} {one.sentence}")
        broken += not found.whole
    sys.exit(1 if broken else 0)


@main.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--recipe", help="a recipe whose claims are shown beside the numbers: id, or path of a recipe.json")
@click.option("--server", help="which of the recipe's servers was asked")
@click.option("--map", "suites", multiple=True, metavar="SUITE=WORKLOAD", help="which suite is which workload")
@click.option("--runs-dir", help="where folders go; None: runs/ of the project")
def import_(file: Path, recipe: str | None, server: str | None, suites: tuple[str, ...], runs_dir: str | None):
    """Read per-request numbers that somebody else measured, a CSV FILE or JSON lines, into a folder with a page.

    A row is a request: suite, case, repeat, prompt_tokens, completion_tokens, ttft_s, total_s, max_tokens. All of
    it is labelled imported; no claim is judged by it, since nothing was measured here.
    """
    from llmrepro import imported, pairing, receipt_results

    with sentences():
        pairs = [pair.partition("=") for pair in suites]
        if wrong := [suite for suite, sign, workload in pairs if not (suite and sign and workload)]:
            raise run_folder.RunError(f"--map {wrong[0]!r} is not of the form suite=workload")
        path = imported.create(file, recipe, server, {suite: workload for suite, _, workload in pairs}, runs_dir)
        found = imported.read(path)
        click.echo(f"{file.name} → {path}")
        click.echo(f"{found.status['outcome']}: {found.status['reason']}")
        told = imported.summary(found)
        if told:
            speed = receipt_results.PER_SUITE[0]
            order = " / ".join(terms.STATISTICS[name] for name in pairing.of_suite(speed))
            click.echo(f"{terms.METRICS[speed].title} ({speed}), in tok/s as {order}:")
        for suite, speeds in told:
            click.echo(f"  {suite:<16} {speeds}")
        for flag in found.result["flags"]:
            click.echo(f"  {'mind':<16} {flag}")
        for verdict in found.result["verdicts"]:
            click.echo(f"  {verdict['claim']:<30} {verdict['reason']}")
        for names, why in found.result["untold"]:
            click.echo(f"  {'untold':<16} {', '.join(names)}: {why}")
        click.echo(f"report: {_report(path)}")


@main.command()
@click.argument("recipe")
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    help="a new folder, whose name ends the id; None: one named by this machine, below here",
)
@click.option(
    "--claims-from",
    type=click.Path(path_type=Path),
    help="a run folder whose values and conditions become the claims",
)
def new(recipe: str, to: Path | None, claims_from: Path | None) -> None:
    """Copy RECIPE for this machine: its engine, prompts and claims, with this machine's needs and conditions.

    RECIPE is an id of `llmrepro list` or the path of a recipe.json. Nothing is overwritten, installed or measured.
    """
    from llmrepro import adoption

    with sentences():
        made = adoption.adopt(recipe, to, claims_from)
    click.echo(f"{made.recipe.id} → {made.folder}")
    click.echo(f"wrote {', '.join(made.files)}")
    for change in made.changes:
        click.echo(f"  {change}")
    click.echo(f"Edit first, in {made.folder / 'recipe.json'}:")
    for line in made.edit_first:
        click.echo(f"  {line}")
    click.echo(f"Then: {shlex.join(['llmrepro', 'run', str(made.folder), '--trust'])}")


@main.command()
def schema() -> None:
    """Write recipes/schema.json and recipes/study.schema.json, from which editors complete recipes and studies."""
    for name, made in (("schema.json", json_schema()), ("study.schema.json", studies_.json_schema())):
        target = catalog.home() / name
        target.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        click.echo(target)


@main.command()
def notebooks() -> None:
    """Write every recipe's notebook, from notebooks/reproduce.ipynb and the recipe."""
    from llmrepro import notebooks as made

    try:
        done = made.write()
    except ValueError as error:  # a recipe's, the template's
        raise click.ClickException(str(error)) from None
    for what, path in done:
        click.echo(f"{what:<9} {path}")
    if any(what == "no recipe" for what, _ in done):
        click.echo("a notebook without a recipe is not deleted here: delete it if its recipe is gone")
