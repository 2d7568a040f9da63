"""Runs of a recipe that are there already: whether one is what a new run would be, or what changed since."""

import json
import re
from pathlib import Path

from pydantic import ValidationError

from llmrepro import __version__, machine, run_folder
from llmrepro.parameters import Parameters
from llmrepro.recipe import Recipe
from llmrepro.run_folder import RunError, read_json, read_json_if_there, sha256_of

PINS = "pins.json"
# Where a folder goes and what it was gone on with make no other run of it; nor does it matter who was trusted.
NO_DIFFERENCE = {"resume", "runs_dir", "trust", "recipe"}


def pins(folder: Path) -> dict[str, str]:
    """sha256 of every lock beside a recipe, by file name."""
    return {lock.name: sha256_of(lock) for lock in sorted(folder.glob("*.lock"))}


def of(runs_dir: Path, recipe_id: str, params: Parameters) -> list[Path]:
    """The folders of a recipe's runs with these parameters, the newest first."""
    found = sorted((runs_dir / recipe_id).glob("*/status.json"), reverse=True)
    return [status.parent for status in found if _same(status.parent, params)]


def _same(path: Path, params: Parameters) -> bool:
    try:
        was = Parameters.model_validate(read_json(path / "parameters.json"))
    except (RunError, ValidationError):  # of another version of the kit
        return False
    return was.model_dump(exclude=NO_DIFFERENCE) == params.model_dump(exclude=NO_DIFFERENCE)


def changed(path: Path, recipe: Recipe, folder: Path, facts: dict | None) -> list[str]:
    """What is not as it was for the run at `path` any more: of the resolved recipe, the locks in its `folder`,
    this kit's version, what decides of this machine, whose `facts` are as `machine.describe` tells them (None: of
    whichever machine), and of a run that came to its end the files that its result was computed from."""
    found = []
    if json.loads(recipe.model_dump_json(by_alias=True, exclude_unset=True)) != read_json(path / "recipe.json"):
        found.append("the recipe")
    kept = read_json_if_there(path / PINS)
    found += [name for name in {**pins(folder), **kept} if pins(folder).get(name) != kept.get(name)]
    then = read_json_if_there(path / "machine.json")
    if not isinstance(then, dict):
        raise RunError(f"{path / 'machine.json'} is broken: it describes no machine; restore it, or run again")
    if then and then.get("llmrepro") != __version__:
        found.append(f"the version of llmrepro, which was {then.get('llmrepro')}")
    if then and facts is not None:
        found += [f"this machine's {name}" for name in machine.differing(then, facts)]
    if run_folder.status(path)["outcome"] in ("completed", "lacking"):
        found += _edited(path)
    return found


def _edited(path: Path) -> list[str]:
    """The files of a run that are not as they were when its result was computed from them: gone on with, it would
    pass off as measured what somebody changed."""
    result = read_json_if_there(path / "result.json")
    if not isinstance(result, dict):
        raise RunError(f"{path / 'result.json'} is broken: it holds no result; run again")
    inputs = result.get("inputs", {}).items()
    same = [name for name, digest in inputs if (path / name).is_file() and sha256_of(path / name) == digest]
    return [f"that run's {name}" for name, _ in inputs if name not in same]


def lacks_the_same(path: Path, missing: list[str]) -> bool:
    """Whether a run that lacked something lacked just this; how much of the disk is free may differ."""
    reason = run_folder.status(path).get("reason", "")
    return _without_numbers("; ".join(missing)) == _without_numbers(reason)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d[\d.,]*", "", text)
