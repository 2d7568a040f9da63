"""Repairs as build steps of an engine's environment, one module each. `FixModule` says what one provides.

An environment without the fix is another environment, so nothing is ever undone.
"""

import hashlib
import importlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import requests

from llmrepro.install import Fix, Patch
from llmrepro.parts import GitFile


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
    for patch in fix.patches:
        bring(patch, beside, cache, place)
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


def patch_file(place: Path, patch: Patch) -> Path:
    """Where an environment keeps a patch that belongs to it."""
    return place / "patches" / f"{patch.sha256}.patch"


def bring(patch: Patch, beside: Path, cache: Path, place: Path) -> None:
    """Put a patch into the environment, its sha256 checked. Raises FixFailure."""
    if patch.file is not None:
        found, where = beside / patch.file, f"{patch.file} beside the recipe"
        if not found.is_file():
            raise FixFailure(f"the patch {where} is missing", "restore it, or mend the recipe's `patches`")
    else:
        found, where = cache / "patches" / f"{patch.sha256}.patch", raw_url(patch.source)
        if not found.is_file() or _sha256(found) != patch.sha256:
            _fetch(where, found)
    if _sha256(found) != patch.sha256:
        raise FixFailure(
            f"the patch {where} has sha256 {_sha256(found)}, the recipe says {patch.sha256}",
            "do not use it before you know why; restore it, or mend the recipe if the change is meant",
        )
    target = patch_file(place, patch)
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(found, target)


def raw_url(source: GitFile) -> str:
    """Where a public repository serves one file of one commit as it is; GitHub's, GitLab's and Gitea's forms."""
    repo = source.repo.removesuffix("/").removesuffix(".git")
    host = repo.split("/")[2]
    raw = "-/raw" if "gitlab" in host else "raw" if host == "github.com" else "raw/commit"
    return f"{repo}/{raw}/{source.commit}/{source.path}"


def _fetch(url: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        answer = requests.get(url, timeout=60)
        answer.raise_for_status()
    except requests.RequestException as error:
        raise FixFailure(
            f"a patch could not be fetched: {error}", "check the network and the recipe's `source`, run again"
        ) from None
    part = target.with_suffix(".part")
    part.write_bytes(answer.content)
    part.replace(target)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
