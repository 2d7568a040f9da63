"""llmrepro: list recipes, run one through papermill, make its report again."""

import sys
from pathlib import Path

import click

from llmrepro import execution, run as runs
from llmrepro import recipe as recipes
from llmrepro import report as report_

ERRORS = (recipes.RecipeError, runs.RunError)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="llmrepro")
def main() -> None:
    """Re-run a published LLM-inference measurement, and see whether it holds here."""


@main.command("list")
def list_() -> None:
    """The recipes of this kit."""
    for name in recipes.ids():
        click.echo(f"{name:<40} {recipes.load(name).title}")


@main.command()
@click.argument("recipe", default=recipes.DEFAULT)
@click.option("-p", "parameter", multiple=True, metavar="NAME=VALUE",
              help="A parameter of the notebook; VALUE is YAML, text where it is not. Repeat as needed.")
def run(recipe: str, parameter: tuple[str, ...]) -> None:
    """Run RECIPE's notebook through papermill and print where its report is."""
