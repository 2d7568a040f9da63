"""Repairs as build steps of an engine's environment, one module each. `FixModule` says what one provides.

An environment without the fix is another environment, so nothing is ever undone.
"""

import hashlib
import importlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from llmrepro import checkouts, git_files
from llmrepro.install import Fix, Patch
from llmrepro.parts import GitFile

ALL = "*.patch"  # as the last part of a path: every patch of that folder


class FixFailure(RuntimeError):
    """A fix that cannot be made or does not hold: what was found, what was needed; `next_step` is what to do."""

    def __init__(self, message: str, next_step: str):
        self.next_step = next_step
        super().__init__(message)


class Finding(NamedTuple):
    needed: bool
    why: str  # a sentence
    evidence: dict[str, Any]  # JSON values: what was found, paths below the environment


class FixModule(Protocol):
    """What a module in this folder provides, as plain functions. `place` is the environment's folder."""

    def detect(self, place: Path, fix: Fix) -> Finding:
        """Whether the fix is still needed in this environment. Changes nothing."""

    def apply(self, place: Path, fix: Fix) -> dict[str, Any]:
        """Make it; gives evidence of what was changed. Links are relative: the environment is moved afterwards."""

    def verify(self, place: Path, fix: Fix) -> dict[str, Any]:
        """Prove that it holds; gives evidence. Raises FixFailure."""

    def exports(self, place: Path) -> dict[str, str]:
        """Variables that the engine gets at its start, in the form of `exported`."""


def load(name: str) -> FixModule:
    """The module of a fix by the name recipes use."""
    return importlib.import_module(f"llmrepro.fixes.{name.replace('-', '_')}")


def repair(place: Path, fix: Fix, beside: Path, cache: Path) -> dict[str, Any]:
    """Make a recipe's fix in an environment that nobody uses yet, and prove it.

    `beside` is the recipe's folder, where patch files of ours lie. Returns
    {name, needed, applied, why, evidence, exports}. Raises FixFailure.
    """
    bring(fix, beside, cache, place)
    module = load(fix.name)
    needed, why, evidence = module.detect(place, fix)
    if needed:
        evidence = evidence | module.apply(place, fix)
    evidence = evidence | module.verify(place, fix)
    return {
        "name": fix.name,
        "needed": needed,
        "applied": needed,
        "why": why,
        "evidence": evidence,
        "exports": module.exports(place),
    }


def exported(exports: Mapping[str, str], place: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of an engine whose environment lies at `place`.

    In a value `{environment}` stands for that place and `{PATH}` for what the variable PATH holds already.
    """
    return {
        name: value.replace("{environment}", str(place)).replace("{PATH}", inherited.get("PATH", ""))
        for name, value in exports.items()
    }


def patch_files(place: Path, fix: Fix) -> list[Path]:
    """The patches of a fix as an environment keeps them, `<number>-<name>`, in the order in which they apply."""
    return sorted((place / "patches" / str(fix.package)).glob("*.patch"))


def bring(fix: Fix, beside: Path, cache: Path, place: Path) -> None:
    """Put the patches of a fix into the environment, each checked. Raises FixFailure."""
    with tempfile.TemporaryDirectory(prefix="llmrepro-patches-") as scratch:
        found = [file for patch in fix.patches for file in _had(patch, beside, cache, Path(scratch))]
        for number, file in enumerate(found):
            target = place / "patches" / str(fix.package) / f"{number:03}-{file.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def _had(patch: Patch, beside: Path, cache: Path, scratch: Path) -> list[Path]:
    """The files of a patch: ours, or a publication's by its hash, or all that its path means at its commit."""
    if patch.source is not None and patch.sha256 is None:
        return _at_commit(patch.source, scratch / f"{patch.source.commit}-{len(list(scratch.iterdir()))}")
    if patch.file is not None:
        found, where = beside / patch.file, f"{patch.file} beside the recipe"
        if not found.is_file():
            raise FixFailure(f"the patch {where} is missing", "restore it, or mend the recipe's `patches`")
    else:
        try:
            found, where = scratch / Path(patch.source.path).name, git_files.address(patch.source)
            found.write_bytes(git_files.fetch(patch.source, cache))
        except git_files.GitFileFailure as failure:
            raise FixFailure(f"a publication's patch: {failure}", "then run again") from None
    if _sha256(found) != patch.sha256:
        raise FixFailure(
            f"the patch {where} has sha256 {_sha256(found)}, the recipe says {patch.sha256}",
            "do not use it before you know why; restore it, or mend the recipe if the change is meant",
        )
    return [found]


def _at_commit(source: GitFile, folder: Path) -> list[Path]:
    """The patches that a path means at its commit, which pins them: one, or with `*.patch` as its last part every
    one of that folder, in the order in which a shell names them where only bytes count."""
    try:
        checkouts.fetch(source.repo, source.commit, folder)
    except checkouts.CheckoutFailure as failure:
        raise FixFailure(f"a publication's patches: {failure}", failure.next_step) from None
    above, name = (folder / source.path).parent, Path(source.path).name
    found = sorted(above.glob("[!.]*.patch") if name == ALL else [above / name])
    wrong = [file for file in found if not file.is_file() or not file.resolve().is_relative_to(folder.resolve())]
    if not found or wrong:
        lacking = wrong[0].relative_to(folder) if wrong else source.path
        raise FixFailure(
            f"{source.repo} has no patch {lacking} at {source.commit}", "mend the `path` of the recipe's `source`"
        )
    return found


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
