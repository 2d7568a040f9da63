"""Where files of weights lie in the cache: each once, under its sha256.

That is `weights/<sha256>/<name>`. Files that an engine wants side by side are hard links to these in
`weights/checkpoints/<key>/`: hard ones, since an engine in a container is given that folder alone and could
follow no other link out of it.
"""

import hashlib
import os
import shutil
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from llmrepro import hashes, machine
from llmrepro.environment import locked

ELSEWHERE = "make room there, or name another cache in LLMREPRO_CACHE"


class WeightsFailure(RuntimeError):
    """Weights that cannot be had or are not the ones wanted; the text says which and what to do."""


class Piece(NamedTuple):
    """One file of a checkpoint: its path in the repository, and where it lies here."""

    path: str
    place: Path
    sha256: str
    bytes: int


def given(format: str, pieces: list[Piece], cache: Path | None = None) -> Path:
    """What an engine is given for these files: one GGUF file itself, else all of them laid out in one folder,
    and of that the first GGUF part, or the folder with config.json."""
    if format == "gguf" and len(pieces) == 1:
        return pieces[0].place
    folder = laid_out(pieces, cache)
    if format == "gguf":
        return folder / next(p.path for p in pieces if p.path.endswith(".gguf"))
    configs = sorted((p.path for p in pieces if PurePosixPath(p.path).name == "config.json"), key=len)
    return (folder / configs[0]).parent if configs else folder


def laid_out(pieces: list[Piece], cache: Path | None = None) -> Path:
    """A folder with hard links to these files under their own paths, and nothing else. Raises WeightsFailure."""
    cache = cache or machine.cache_dir()
    lines = "".join(f"{p.sha256}  {p.path}\n" for p in sorted(pieces))
    place = cache / "weights" / "checkpoints" / hashlib.sha256(lines.encode()).hexdigest()[:16]
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place.with_suffix(".lock")):
        if _holds(place, pieces):
            return place
        part = place.with_suffix(".part")
        for old in (part, place):
            remove(old)
        for piece in pieces:
            try:
                hashes.link(piece.place, part / piece.path, piece.sha256, cache)
            except OSError as error:
                raise WeightsFailure(
                    f"{cache} cannot hold a file under two names ({error}); name a cache in LLMREPRO_CACHE whose "
                    "file system has hard links"
                ) from None
        os.replace(part, place)
    return place


def _holds(folder: Path, pieces: list[Piece]) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}
    if found != {p.path for p in pieces}:
        return False
    return all(not (folder / p.path).is_symlink() and (folder / p.path).samefile(p.place) for p in pieces)


def others(path: str, source: str, found: str, pinned: str) -> str:
    return (
        f"{path} of {source} has sha256 {found}, the recipe pins {pinned}: these are not the recipe's weights, "
        "and nothing was kept; check where they come from, or mend the recipe"
    )


def place_of(path: str, sha256: str, cache: Path) -> Path:
    return cache / "weights" / sha256 / PurePosixPath(path).name


def held(path: str, sha256: str | None, cache: Path) -> Piece | None:
    """A file of the cache whose content is what its place says, or None."""
    place = place_of(path, sha256, cache) if sha256 else None
    if place is None or not place.is_file() or hashes.sha256_of(place, cache) != sha256:
        return None
    return Piece(path, place, sha256, place.stat().st_size)


def put(file: Path, path: str, sha256: str, cache: Path) -> Piece:
    """A checked file at its place in the cache; whatever else stands there gives way."""
    target = place_of(path, sha256, cache)
    if target.parent.is_symlink() or target.parent.is_file():
        target.parent.unlink()
    target.parent.mkdir(parents=True, exist_ok=True)
    remove(target)
    os.replace(file, target)
    hashes.remember(target, sha256, cache)
    return Piece(path, target, sha256, target.stat().st_size)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
