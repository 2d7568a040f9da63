"""Weights from the hub: which files of a repository a recipe means, and those fetched that are not here.

What a repository holds at a commit never changes, so it is kept in `weights/hub/` once it was told: what is here
whole is used without asking anybody.
"""

import contextlib
import json
import os
import re
import tempfile
import time
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from llmrepro import hub, weights_store
from llmrepro.environment import locked
from llmrepro.hub import Snapshot
from llmrepro.model import PART, PATTERN, Weights, WeightsFile
from llmrepro.progress import Progress
from llmrepro.weights_store import ELSEWHERE, Piece, WeightsFailure


def look(weights: Weights, cache: Path) -> tuple[str, Snapshot]:
    """The repository that has one of the names of `weights`, and what it holds at their revision: from the cache
    where an earlier run was told of that commit, else from the hub. Raises WeightsFailure.
    """
    known = _known(weights, cache)
    if known is not None:
        return known
    try:
        name, snapshot = hub.look([weights.repo, *weights.also_named], weights.revision)
    except hub.HubFailure as failure:
        raise WeightsFailure(f"{failure}{_pinnable(weights, cache)}") from None
    before = _kept(name, snapshot.commit, cache)  # with the sha256 of small files, which the hub does not tell
    if before is None:
        _keep(name, snapshot, cache)
    return name, before or snapshot


def _known(weights: Weights, cache: Path) -> tuple[str, Snapshot] | None:
    if re.fullmatch(r"[0-9a-f]{40}", weights.revision or ""):
        for name in (weights.repo, *weights.also_named):
            snapshot = _kept(name, weights.revision, cache)
            if snapshot is not None:
                return name, snapshot
    return None


def _pinnable(weights: Weights, cache: Path) -> str:
    """A commit of which the cache has every file: what could be used where the hub cannot be asked for `main`."""
    for name in (weights.repo, *weights.also_named):
        for listing in sorted(_listing(name, "*", cache).parent.glob("*.json")):
            snapshot = _kept(name, listing.stem, cache)
            with contextlib.suppress(WeightsFailure):
                if snapshot and not any(missing_bytes(f, cache) for f in chosen(weights, snapshot)):
                    return f". Commit {listing.stem} is whole in the cache: pin it as `revision` to use that"
    return ""


def _kept(name: str, commit: str, cache: Path) -> Snapshot | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        told = json.loads(_listing(name, commit, cache).read_bytes())
        return Snapshot(told["repo"], commit, {f[0]: hub.File(*f) for f in told["files"]})
    return None


def _listing(name: str, commit: str, cache: Path) -> Path:
    return cache / "weights" / "hub" / name.replace("/", "--") / f"{commit}.json"


def _keep(name: str, snapshot: Snapshot, cache: Path) -> None:
    if any(f.bytes is None for f in snapshot.files.values()):  # of a mirror that tells no more than names
        return
    target = _listing(name, snapshot.commit, cache)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=".", delete=False) as part:
            json.dump({"repo": snapshot.repo, "files": [list(f) for f in snapshot.files.values()]}, part)
        os.replace(part.name, target)
    except OSError as error:
        raise WeightsFailure(f"the cache folder cannot be written: {error}; {ELSEWHERE}") from None


def chosen(weights: Weights, snapshot: Snapshot) -> list[hub.File]:
    """The files of a snapshot that a recipe names, in its order, each against what the recipe pins.

    Raises WeightsFailure when one is missing or is another.
    """
    found: dict[str, hub.File] = {}
    inside = [
        path for path in snapshot.files if ".." not in PurePosixPath(path).parts and not path.startswith("/")
    ]
    for wanted in weights.files:
        for path in matching(wanted.path, inside):
            found.setdefault(path, _pinned(wanted, snapshot.files[path], snapshot))
        if wanted.path not in found and not PATTERN.search(wanted.path):
            raise WeightsFailure(_lacks(weights, snapshot, wanted.path))
    kind = [f.path for f in weights.files if f.path.endswith(f".{weights.format}")]  # an overlay may have none
    if kind and not any(path.endswith(f".{weights.format}") for path in found):
        raise WeightsFailure(_lacks(weights, snapshot, ", ".join(kind)))
    for path in found:
        part = PART.fullmatch(path)
        for number in range(1, int(part["of"]) + 1) if part else ():
            other = f"{part['stem']}-{number:05}-of-{part['of']}.gguf"
            if other not in found:
                raise WeightsFailure(
                    f"the recipe names {path} and not {other}, which belongs to it; add it to `files`"
                )
    return list(found.values())


def _lacks(weights: Weights, snapshot: Snapshot, path: str) -> str:
    where = f"{snapshot.repo} holds no {path} at commit {snapshot.commit[:12]}"
    if weights.revision is None:
        return (
            f"{where}, which is its `main` now: it was renamed or taken away. Look for the commit that held it at "
            f"{hub.site()}/{snapshot.repo}/commits/main and pin that as the recipe's `revision`, {hub.OWN_COPY}"
        )
    return f"{where}; mend `files` or `revision` of the recipe's model"


def matching(pattern: str, paths: list[str]) -> list[str]:
    """Paths that are a pattern or match it. Without a slash it is of a file's name: at the root where any match
    there, since a folder often holds the same in another format, else in folders."""
    if pattern in paths or not PATTERN.search(pattern):
        return [p for p in paths if p == pattern]
    if "/" in pattern:
        return sorted(p for p in paths if fnmatchcase(p, pattern))
    found = sorted(p for p in paths if fnmatchcase(PurePosixPath(p).name, pattern))
    return [p for p in found if "/" not in p] or found


def _pinned(wanted: WeightsFile, told: hub.File, snapshot: Snapshot) -> hub.File:
    """A file of the hub with what the recipe adds. Raises WeightsFailure where the two disagree."""
    for name in ("sha256", "bytes"):
        pinned, found = getattr(wanted, name), getattr(told, name)
        if pinned is not None and found is not None and pinned != found:
            raise WeightsFailure(
                f"{told.path} of {snapshot.repo} at {snapshot.commit[:12]} has {name} {found}, the recipe pins "
                f"{pinned}: these are not the recipe's weights, and nothing was fetched; pin the revision that "
                "held them"
            )
    size = wanted.bytes if told.bytes is None else told.bytes
    return told._replace(bytes=size, sha256=told.sha256 or wanted.sha256)


def missing_bytes(file: hub.File, cache: Path) -> int:
    """What is still to fetch of a file. One of the right size counts as there; its content is looked at later."""
    place = weights_store.place_of(file.path, file.sha256, cache) if file.sha256 else None
    if place is not None and place.is_file() and file.bytes in (None, place.stat().st_size):
        return 0
    with contextlib.suppress(OSError):
        return max(0, (file.bytes or 0) - _part(file, cache).stat().st_size)
    return file.bytes or 1


def fetch(name: str, snapshot: Snapshot, files: list[hub.File], cache: Path) -> list[Piece]:
    """These files, each from the cache or from the hub, checked. `name` is what the listing is kept under.

    Raises WeightsFailure; what was fetched whole by then is kept, what was begun is gone on with next time.
    """
    pieces = {f.path: weights_store.held(f.path, f.sha256, cache) for f in files}
    missing = [f for f in files if pieces[f.path] is None]
    if missing:
        with Progress(f"fetch {snapshot.repo}", sum(f.bytes or 0 for f in missing)) as bar:
            meter = _Meter(bar)
            for file in missing:
                pieces[file.path] = _fetched(snapshot, file, cache, meter)
                meter.done += file.bytes or 0
        found = {f.path: f._replace(sha256=pieces[f.path].sha256) for f in files}
        _keep(name, snapshot._replace(files={**snapshot.files, **found}), cache)
    return list(pieces.values())


def _fetched(snapshot: Snapshot, file: hub.File, cache: Path, meter) -> Piece:
    """One file from the hub, by one process at a time; another that waited finds it here."""
    part = _part(file, cache)
    part.parent.mkdir(parents=True, exist_ok=True)
    with locked(part.with_suffix(".lock")):
        here = weights_store.held(file.path, file.sha256, cache)
        if here is not None:
            return here
        # The hub's own hash tells whether it came whole, the recipe's whether it is the recipe's file.
        told = snapshot.files[file.path]
        asked = (told if told.sha256 or told.git_sha1 else file)._replace(bytes=file.bytes)
        try:
            sha256 = hub.download(snapshot, asked, part, lambda have: meter(have, PurePosixPath(file.path).name))
        except hub.HubFailure as failure:
            raise WeightsFailure(str(failure)) from None
        if file.sha256 not in (None, sha256):
            part.unlink()
            source = f"{snapshot.repo} {snapshot.commit[:12]}"
            raise WeightsFailure(weights_store.others(file.path, source, sha256, file.sha256))
        return weights_store.put(part, file.path, sha256, cache)


def _part(file: hub.File, cache: Path) -> Path:
    return cache / "weights" / "hub" / "parts" / f"{file.sha256 or file.git_sha1}.part"


class _Meter:
    """Shows how much of all files is there, and what came per second lately. `done` is that of files before."""

    WINDOW_S, STEP_S = 5.0, 0.25

    def __init__(self, bar: Progress):
        self.bar, self.done = bar, 0
        self._seen: list[tuple[float, int]] = []

    def __call__(self, have: int, name: str) -> None:
        now, have = time.monotonic(), self.done + have
        if not self._seen or now - self._seen[-1][0] >= self.STEP_S:
            self._seen = [s for s in self._seen if now - s[0] <= self.WINDOW_S] + [(now, have)]
        then, had = self._seen[0]
        rate = f" · {(have - had) / (now - then) / 1e6:.1f} MB/s" if now - then >= self.STEP_S else ""
        self.bar.to(have, f"{name} · {have / 1e9:.2f} of {self.bar.total / 1e9:.2f} GB{rate}")
