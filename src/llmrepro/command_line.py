"""What the commands share: options from a notebook's parameters, times, and sentences in place of tracebacks."""

import contextlib
import os
import re
import sys

import click
import yaml
from pydantic import BaseModel, ValidationError

from llmrepro import credentials, run_folder
from llmrepro.markup import showable
from llmrepro.recipe import RecipeError

# What pydantic and plain Python say of a file that is JSON and yet not what this kit wrote.
UNREADABLE = (ValidationError, KeyError, TypeError, AttributeError, ValueError, RecursionError)


class Duration(click.ParamType):
    """Seconds, or a number with s, m or h behind it. The value is in seconds."""

    name = "duration"

    def convert(self, value, param, ctx) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value).strip())
        if found is None or not float(found[1]):
            self.fail(f"{value!r} is no time; give seconds, or a number with s, m or h: 90, 15m, 2h", param, ctx)
        return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


DURATION = Duration()


def parameter_options(model: type[BaseModel], *arguments: str):
    """One option per parameter of a notebook, so that both are the same list, but for the command's arguments."""

    def add(command):
        for name, field in reversed(model.model_fields.items()):
            if name in arguments:
                continue
            flag = f"--{name.replace('_', '-')}"
            if field.annotation is bool:
                command = click.option(flag, is_flag=True, default=None, help=field.description)(command)
            else:
                shown = None if field.default in (None, {}) else field.default
                command = click.option(
                    flag,
                    metavar="TEXT" if _is_text(model, name) else "YAML",
                    show_default=shown or False,
                    help=field.description,
                )(command)
        return command

    return add


def _is_text(model: type[BaseModel], name: str) -> bool:
    """Whether a parameter is a text, which is taken as it stands: 007 stays 007."""
    annotation = str(model.model_fields[name].annotation)
    return not any(word in annotation for word in ("int", "list", "dict"))


def draw_on_terminal() -> None:
    """Tell the kernel, which has no terminal of its own, where its progress can be drawn."""
    if sys.stdout.isatty():
        os.environ["LLMREPRO_TERMINAL"] = os.ttyname(sys.stdout.fileno())


def values_of(model: type[BaseModel], options: dict) -> dict:
    """The values of the options that were given, by parameter. Raises RunError."""
    return {n: _value(model, n, v) for n, v in options.items() if v is not None}


def _value(model: type[BaseModel], name: str, given):
    if _is_text(model, name) or isinstance(given, bool):
        return given
    try:
        return yaml.safe_load(given)
    except yaml.YAMLError as error:
        raise run_folder.RunError(f"--{name.replace('_', '-')} {given!r} is no YAML: {error}") from None


@contextlib.contextmanager
def sentences():
    """What a person can mend is shown as its sentence, without a traceback and without credentials."""
    try:
        yield
    except (RecipeError, run_folder.RunError) as error:
        raise click.ClickException(showable(credentials.without(str(error)))) from None
    except UNREADABLE as error:
        first = showable(error).splitlines()[0]
        raise click.ClickException(
            f"this run folder cannot be read ({type(error).__name__}: {first}); a file of it was changed, or it "
            "is of another version of the kit: restore it, or start a new run"
        ) from None
    except OSError as error:
        raise click.ClickException(
            f"{showable(error)}; make room, or choose another folder, then go on with --resume"
        ) from None
