"""llmrepro: list the recipes, run one headless, make a report again."""

import contextlib
import json
import os
import sys
from pathlib import Path

import click
import yaml

from llmrepro import catalog
from llmrepro import run as runs
from llmrepro.recipe import RecipeError, json_schema

TEMPLATE = "reproduce.ipynb"
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
    for name in catalog.ids():
        click.echo(f"{name:<40} {catalog.load(name).title}")


def _options(command):
    """One option per parameter of the notebooks, so that both are the same list."""
    for name, field in reversed(runs.Parameters.model_fields.items()):
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
    return not any(word in str(runs.Parameters.model_fields[name].annotation) for word in ("int", "list", "dict"))


@main.command()
@click.argument("recipe", default=catalog.DEFAULT)
@_options
def run(recipe: str, **options) -> None:
    """Run RECIPE's notebook through papermill and say where its report is."""
    from llmrepro import execution  # papermill takes a second to import: help does not wait

    given = {
        n: v if _is_text(n) or isinstance(v, bool) else yaml.safe_load(v)
        for n, v in options.items()
        if v is not None
    }
    with _sentences():
        new = runs.create(runs.parameters({"recipe": recipe, **given}))
    new.close()  # the notebook's kernel takes the folder over
    path = new.path
    if sys.stdout.isatty():
        os.environ["LLMREPRO_TERMINAL"] = os.ttyname(sys.stdout.fileno())
    click.echo(f"{recipe} → {path}")
    code = execution.execute(
        catalog.home().parent / "notebooks" / TEMPLATE,
        path / TEMPLATE,
        {"recipe": recipe, **given, "resume": str(path)},
    )
    sys.exit(_end(path, code))


def _end(path: Path, code: int) -> int:
    """Say how a run ended; what there is of it gets a report even when it did not get to its own."""
    status = runs.status(path)
    if status["outcome"] == "stopped" and code in STOPPED_BY:  # the kernel knows only that it was interrupted
        with contextlib.closing(runs.Run(path)) as run:
            by, reason = STOPPED_BY[code]
            run.set_status("stopped", status["stage"], stopped_by=by, reason=reason, next_step=status["next_step"])
        status = runs.status(path)
    click.echo(f"{status['outcome']}" + (f": {status['reason']}" if status.get("reason") else ""))
    if status.get("next_step"):
        click.echo(f"next: {status['next_step']}")
    if status["outcome"] in {"completed", "lacking"} and (path / "report.html").exists():
        for verdict in runs.read_json(path / "result.json")["verdicts"]:
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
    except (RecipeError, runs.RunError) as error:
        raise click.ClickException(str(error)) from None
