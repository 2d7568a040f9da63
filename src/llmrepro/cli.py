"""llmrepro: list the recipes, run one headless, make a report again."""

import contextlib
import json
import os
import sys
from pathlib import Path

import click
import yaml
from pydantic import ValidationError

from llmrepro import catalog, run_folder
from llmrepro import run as runs
from llmrepro.parameters import Parameters, checked
from llmrepro.recipe import RecipeError, json_schema

TEMPLATE = "reproduce.ipynb"
# What pydantic and plain Python say of a file that is JSON and yet not what this kit wrote.
UNREADABLE = (ValidationError, KeyError, TypeError, AttributeError, ValueError, RecursionError)
STOPPED_BY = {
    124: ("deadline", "the deadline of the whole run has passed"),
    129: ("signal", "stopped by SIGHUP: its terminal was closed"),
    143: ("signal", "stopped by SIGTERM, as a scheduler or a shutdown sends it"),
}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="llmrepro")
def main() -> None:
    """Re-run a published LLM-inference measurement, and see whether it holds on this machine."""


@main.command("list")
def list_() -> None:
    """The recipes of this kit."""
    faults = []
    for name in catalog.ids():
        try:
            click.echo(f"{name:<40} {catalog.load(name).title}")
        except RecipeError as error:
            faults.append(str(error))
    if faults:
        raise click.ClickException("\n".join(faults))


def _options(command):
    """One option per parameter of the notebooks, so that both are the same list."""
    for name, field in reversed(Parameters.model_fields.items()):
        if name == "recipe":
            continue
        flag = f"--{name.replace('_', '-')}"
        if field.annotation is bool:
            command = click.option(flag, is_flag=True, default=None, help=field.description)(command)
        else:
            shown = None if field.default in (None, {}) else field.default
            command = click.option(
                flag,
                metavar="TEXT" if _is_text(name) else "YAML",
                show_default=shown or False,
                help=field.description,
            )(command)
    return command


def _is_text(name: str) -> bool:
    """Whether a parameter is a text, which is taken as it stands: 007 stays 007."""
    annotation = str(Parameters.model_fields[name].annotation)
    return not any(word in annotation for word in ("int", "list", "dict"))


@main.command()
@click.argument("recipe", required=False)
@_options
def run(recipe: str | None, **options) -> None:
    """Run RECIPE's notebook through papermill and say where its report is.

    RECIPE is an id of `llmrepro list` (the first when it is left out) or the path of a recipe.json. Values
    marked YAML are written as in --servers '[default]' or --overrides '{workloads.chat.max_tokens: 32}'.

    Exits with 0 when the run came to its end, whatever its verdicts are or when this machine lacks something;
    1 or 2 when it could not begin, 3 when a step failed, 4 when its kernel died, 128 + n when signal n stopped it.
    """
    from llmrepro import execution  # papermill takes a second to import: help does not wait

    with _sentences():
        given = {n: _value(n, v) for n, v in options.items() if v is not None}
        given |= {"recipe": recipe} if recipe else {}
        new = runs.create(checked(given))
        asked = new.parameters.model_dump(exclude_defaults=True)
        new.close()  # the notebook's kernel takes the folder over
        path = new.path
        if sys.stdout.isatty():
            os.environ["LLMREPRO_TERMINAL"] = os.ttyname(sys.stdout.fileno())
        click.echo(f"{new.recipe.id} → {path}")
        notebook = catalog.home().parent / "notebooks" / TEMPLATE
        code = execution.execute(notebook, path / TEMPLATE, {**asked, "resume": str(path)})
        code = _end(path, code)
    sys.exit(code)


def _value(name: str, given):
    if _is_text(name) or isinstance(given, bool):
        return given
    try:
        return yaml.safe_load(given)
    except yaml.YAMLError as error:
        raise run_folder.RunError(f"--{name.replace('_', '-')} {given!r} is no YAML: {error}") from None


def _end(path: Path, code: int) -> int:
    """Say how a run ended; what there is of it gets a report even when it did not get to its own."""
    status = run_folder.status(path)
    if status["outcome"] == "stopped" and code in STOPPED_BY:  # the kernel knows only that it was interrupted
        with contextlib.closing(runs.Run(path)) as run:
            by, reason = STOPPED_BY[code]
            run.set_status("stopped", status["stage"], stopped_by=by, reason=reason, next_step=status["next_step"])
        status = run_folder.status(path)
    click.echo(f"{status['outcome']}" + (f": {status['reason']}" if status.get("reason") else ""))
    if status.get("next_step"):
        click.echo(f"next: {status['next_step']}")
    if status["outcome"] in {"completed", "lacking"} and (path / "report.html").exists():
        for verdict in run_folder.read_json(path / "result.json")["verdicts"]:
            click.echo(f"  {verdict['word'].replace('_', ' '):<16} {verdict['claim']}")
        click.echo(f"report: {path / 'report.html'}")
        return code
    click.echo(f"report of what there is: {_report(path)}")
    return code or 1


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def report(folder: Path) -> None:
    """Make report.html of a run FOLDER again, from the folder alone."""
    click.echo(_report(folder.resolve()))


def _report(folder: Path) -> Path:
    from llmrepro import report as made  # matplotlib and nbconvert, which nothing else here needs

    with _sentences():
        return made.write(folder)


@main.command()
def schema() -> None:
    """Write recipes/schema.json, from which editors complete recipes."""
    target = catalog.home() / "schema.json"
    target.write_text(json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    click.echo(target)


@contextlib.contextmanager
def _sentences():
    """What a person can mend is shown as its sentence, without a traceback."""
    try:
        yield
    except (RecipeError, run_folder.RunError) as error:
        raise click.ClickException(str(error)) from None
    except UNREADABLE as error:
        raise click.ClickException(
            f"this run folder cannot be read ({type(error).__name__}: {str(error).splitlines()[0]}); a file of it "
            "was changed, or it is of another version of the kit: restore it, or start a new run"
        ) from None
    except OSError as error:
        raise click.ClickException(
            f"{error}; make room, or choose another folder, then go on with --resume"
        ) from None
