"""What `llmrepro list` shows: every recipe and study, what it needs, and whether it runs on this machine."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

from llmrepro import catalog, machine, requirements
from llmrepro.recipe import Recipe, RecipeError

WIDTH = 100
SHORT = 320  # characters of reasons that are shown in full
HERE, NOT_HERE = "runs here", "not here"


def lines(faults: list[str]) -> Iterator[str]:
    """The list, what runs here first. What is wrong with recipes that cannot be read goes to `faults`."""
    folder = machine.cache_dir()
    facts = machine.describe(folder)
    entries: list[list[str]] = []
    for name in catalog.ids():
        try:
            recipe = catalog.load(name)
        except RecipeError as error:
            faults.append(str(error))
        else:
            needs = requirements.of(recipe)
            lacking = requirements.missing(recipe, facts, folder)
            entries.append(_entry(name, recipe.title, f"needs {requirements.told(needs)}", lacking))
    for name in catalog.studies():
        try:
            study = catalog.load_study(name)
            path = catalog.study_path(name)
            arms = {arm.id: catalog.load(catalog.recipe_of(arm, path)) for arm in study.arms}
        except RecipeError as error:
            faults.append(str(error))
        else:
            compared = f"a study, for `llmrepro compare`: {' against '.join(r.id for r in arms.values())}"
            entries.append(_entry(name, study.title, compared, list(_lacking(arms, facts, folder))))
    for entry in sorted(entries, key=lambda e: e[0].startswith(NOT_HERE)):
        yield from entry


def _lacking(arms: dict[str, Recipe], facts: dict, folder: Path) -> Iterator[str]:
    """What is missing, each thing once, with the arms that need it."""
    needed: dict[str, list[str]] = {}
    for arm, recipe in arms.items():
        for sentence in requirements.missing(recipe, facts, folder):
            needed.setdefault(sentence, []).append(arm)
    for sentence, names in needed.items():
        yield f"{' and '.join(names)}: {sentence}"


def _entry(name: str, title: str, told: str, lacking: list[str]) -> list[str]:
    found = [f"{NOT_HERE if lacking else HERE:<10} {name}"]
    for bullet, text in (("", title), ("", told), *(("- ", reason) for reason in _short(lacking, name))):
        before = " " * 11 + bullet
        found += textwrap.wrap(
            text, WIDTH, initial_indent=before, subsequent_indent=" " * 13, break_on_hyphens=False
        )
    return found


def _short(lacking: list[str], name: str) -> list[str]:
    """All the reasons where they are short, else the first and where the rest is told; a study's are all told."""
    if len(lacking) < 2 or sum(map(len, lacking)) <= SHORT or name in catalog.studies():
        return lacking
    return [lacking[0], f"{len(lacking) - 1} more, told by `llmrepro doctor {name}`"]
