"""Whether the code that a recipe chooses may be installed: the kit's own may; any other waits for a yes.

A yes holds for one run, and for going on with it on this machine: what a run folder says of itself counts for
nothing, since a folder can be anybody's.
"""

import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

from llmrepro import catalog, machine
from llmrepro.parameters import Parameters
from llmrepro.parts import CONTROL
from llmrepro.recipe import Recipe
from llmrepro.run_folder import RunError


class Asked(NamedTuple):
    """A resolved recipe that is about to be run. `folder` is the recipe's, with its engine.lock."""

    recipe: Recipe
    params: Parameters
    folder: Path


def require(*asked: Asked) -> None:
    """Raises RunError, telling what each would install, when a recipe is a stranger's and was not trusted."""
    strangers = [one for one in asked if _installs(one) and not _is_own(one)]
    told = [_told(one) for one in strangers if not one.params.trust]
    if told:
        raise RunError(
            "\n".join(told) + "\nRead these, and with --dry-run every command; then give --trust (in a notebook: "
            "trust=True), or only look with mode published"
        )
    for one in strangers:
        with contextlib.suppress(OSError):  # then going on asks again
            _yes(one).parent.mkdir(parents=True, exist_ok=True)
            _yes(one).touch()


def given_before(one: Asked) -> bool:
    """Whether a yes to just this, with all its files of hashes and patches, was given on this machine."""
    return _yes(one).is_file()


def _installs(one: Asked) -> bool:
    return one.params.mode != "published" and one.params.server_url is None


def _is_own(one: Asked) -> bool:
    """Whether it is a recipe of this kit, whose overrides have changed nothing that is installed."""
    if not one.folder.is_relative_to(catalog.home()):
        return False
    committed = catalog.load(one.params.recipe) if one.params.overrides else one.recipe
    return (committed.engine, committed.model) == (one.recipe.engine, one.recipe.model)


def _yes(one: Asked) -> Path:
    decides = [one.recipe.model_dump_json(by_alias=True), *(_sha256(file) for file in _files(one))]
    return machine.cache_dir() / "trusted" / hashlib.sha256(json.dumps(decides).encode()).hexdigest()


def _files(one: Asked) -> list[Path]:
    """What lies beside a recipe and decides what is installed: its locks, its own patches."""
    fixes = one.recipe.engine.fixes
    names = [] if one.recipe.engine.install.container is not None else ["engine.lock"]
    names += [fix.lock for fix in fixes if fix.lock is not None]
    names += [patch.file for fix in fixes for patch in fix.patches if patch.file is not None]
    return [one.folder / name for name in names]


def _sha256(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _told(one: Asked) -> str:
    kind, indexes = one.recipe.engine.install.kind, one.recipe.engine.install.indexes
    whence = f"comes from {one.folder}, not from this kit"
    if one.folder.is_relative_to(catalog.home()):
        whence = "is not as this kit has it, since overrides change what is installed"
    beside = f", of this machine's index or {', '.join(indexes)}" if indexes else ""
    said = (
        f"{one.recipe.id} {whence}, and installing it runs code that it names: {', '.join(_code(one.recipe))} "
        f"({kind}{beside}); hashes: {', '.join(map(_hashed, _files(one))) or 'the image by its own'}; "
        f"weights: {', '.join(_weights(one.recipe))}."
    )
    return CONTROL.sub("?", said)  # a folder may be called anything


def _hashed(file: Path) -> str:
    sha256 = _sha256(file)
    if sha256 is None:
        return f"{file} is missing"
    pinned = len(re.findall(rb"(?m)^[A-Za-z0-9][\w.-]*(\[[^\]]*\])?==", file.read_bytes()))
    packages = f", {pinned} package{'s' * (pinned != 1)}" if file.suffix == ".lock" else ""
    return f"{file} (sha256 {sha256}{packages})"


def _weights(recipe: Recipe) -> list[str]:
    """Where weights are taken from: the model's repository by any of its names, the overlay's, the drafter's; and
    how many of the files have no hash of their own."""
    model = recipe.model
    return [
        f"{' or '.join([one.repo, *one.also_named])} {one.revision or 'at its main'} of {one.source}"
        + (f", {loose} of {len(one.files)} files without a sha256" if loose else "")
        for one in (model, model.overlay, model.draft)
        if one is not None
        for loose in [sum(file.sha256 is None for file in one.files)]
    ]


def _code(recipe: Recipe) -> list[str]:
    """Everything of which code is run, as its packages, commits and image name it."""
    install, prepare = recipe.engine.install, recipe.model.prepare
    patches = [p.source for fix in recipe.engine.fixes for p in fix.patches if p.source is not None]
    return [
        *(f"{name} {version}" for name, version in install.pins.items()),
        *([f"sha256 {install.sha256}"] if install.sha256 is not None else []),
        *(f"{c.repo} at {c.commit}" for c in install.checkouts),
        *(f"built with {name}={value}" for name, value in install.build.items()),
        *([install.container.image] if install.container is not None else []),
        *(f"{source.path} of {source.repo} at {source.commit}" for source in patches),
        *(f"{script} of {prepare.repo} at {prepare.commit}" for script in (prepare.scripts if prepare else [])),
    ]
