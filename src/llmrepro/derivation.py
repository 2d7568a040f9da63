"""Folders made out of weights, once: kept under a key over everything that decides what is in them, and checked.

A folder is made under another name and moved into place when it is whole. Every file's sha256 is in its
`.complete`, and compared at each use.
"""

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmrepro import hashes, machine
from llmrepro.environment import locked
from llmrepro.weights_store import WeightsFailure

TAIL_LINES = 3


def made(
    kind: str, decides: list[Any], make: Callable[[Path, int], None], cache: Path | None = None
) -> tuple[Path, dict[str, str]]:
    """A folder and the sha256 of its files by path: from the cache when it is whole, else made.

    `make(folder, held)` fills the folder; it hands `held`, the lock's descriptor, on to every tool, so that not
    even one whose run was killed is worked beside. `kind` is the participle of what is done, and the folder's
    name in the cache. Raises WeightsFailure.
    """
    cache = cache or machine.cache_dir()
    place = place_of(kind, decides, cache)
    part = place.with_suffix(".part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.with_suffix(".lock")) as held:
            files = _whole(place, cache)
            if files is not None:
                return place, files
            shutil.rmtree(part, ignore_errors=True)
            try:
                make(part, held)
                for path in part.rglob("*"):
                    path.chmod(0o755 if path.is_dir() else 0o644)
                files = _files(part, cache)
                (part / ".complete").write_text(json.dumps(files), encoding="utf-8")
                shutil.rmtree(place, ignore_errors=True)
                os.replace(part, place)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise WeightsFailure(
            f"the weights could not be {kind}: {error}; make room, or name another cache in LLMREPRO_CACHE"
        ) from None
    return place, files


def place_of(kind: str, decides: list[Any], cache: Path) -> Path:
    key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
    return cache / kind / key


def tool(
    argv: list[str], log: Path, held: int, waiting: Callable[[float], None], doing: str, cwd: Path | None = None
) -> None:
    """Run a tool, its output into `log`; `waiting` is told the seconds that it runs. It gets none of the user's
    tokens and is told not to download. Raises WeightsFailure, which begins with `doing`, when it fails.
    """
    start = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        out.write(f"$ {' '.join(argv)}\n".encode())
        out.flush()
        try:
            process = subprocess.Popen(
                argv,
                env={**machine.minimal_environment(), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                pass_fds=[held],
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        except FileNotFoundError:
            raise WeightsFailure(f"{doing}: {argv[0]} is missing; remove its environment and run again") from None
        try:
            while process.poll() is None:
                waiting(time.monotonic() - start)
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        tail = " | ".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        raise WeightsFailure(f"{doing} (ended with {process.returncode}): {tail}; the whole is in {log}")


def _files(folder: Path, cache: Path) -> dict[str, str]:
    found = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / ".complete")
    return {str(p.relative_to(folder)): hashes.sha256_of(p, cache) for p in found}


def _whole(folder: Path, cache: Path) -> dict[str, str] | None:
    try:
        told = json.loads((folder / ".complete").read_text(encoding="utf-8"))
        return told if told == _files(folder, cache) else None
    except (OSError, ValueError):
        return None
