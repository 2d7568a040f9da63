"""What an environment holds: its files, and whether they are still what their wheels brought."""

import base64
import csv
import hashlib
import json
import os
import re
from pathlib import Path
from typing import NamedTuple


class File(NamedTuple):
    path: str  # below the environment
    bytes: int
    mtime_ns: int


def files(place: Path) -> list[File]:
    """Every regular file of an environment in order; links are not followed.

    Left out: the marker, and bytecode beside its source, which says nothing that the source does not.
    """
    found: list[File] = []
    folders = [(str(place), "")]
    while folders:
        folder, below = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name == "__pycache__" or (entry.name == ".complete" and not below):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append((entry.path, f"{below}{entry.name}/"))
                elif entry.is_file(follow_symlinks=False):
                    told = entry.stat(follow_symlinks=False)
                    found.append(File(below + entry.name, told.st_size, told.st_mtime_ns))
    return sorted(found)


def digest(found: list[File]) -> str:
    """sha256 over path, size and time of every file: one added, changed or gone makes it another."""
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def site_packages(place: Path) -> Path:
    """Where an environment's packages lie. Raises FileNotFoundError."""
    found = sorted(place.glob("lib/python3*/site-packages"))
    if not found:
        raise FileNotFoundError(f"{place} has no lib/python3*/site-packages")
    return found[0]


def altered(place: Path, found: list[File]) -> dict[str, str]:
    """Packages of which a file is not what its wheel brought, each with one such file.

    uv links files out of its cache without looking at them again, so one that was changed there would come
    into every environment made from it. A file is suspect when its size is not the one in RECORD or when it is
    newer than METADATA, which is unpacked last or nearly so; only suspects are read and hashed.
    """
    site = site_packages(place)
    by_path = {file.path: file for file in found}
    prefix = f"{site.relative_to(place)}/"
    changed: dict[str, str] = {}
    for record in sorted(site.glob("*.dist-info/RECORD")):
        package = re.sub(r"[-_.]+", "-", record.parent.name.partition("-")[0]).lower()
        metadata = by_path.get(f"{prefix}{record.parent.name}/METADATA")
        unpacked_ns = metadata.mtime_ns if metadata else 0
        with record.open(newline="", encoding="utf-8") as rows:
            for name, stated, size in (row for row in csv.reader(rows) if len(row) == 3):
                if re.fullmatch(r"[^/]+\.dist-info/METADATA", name):  # whatever that folder is called by now
                    name = f"{record.parent.name}/METADATA"
                file = by_path.get(prefix + name)  # None: in bin/, written by the installer, or left out above
                if file is None or not stated.startswith("sha256="):
                    continue
                same_size = not size or int(size) == file.bytes
                suspect = file.mtime_ns > unpacked_ns or file is metadata
                if not same_size or (suspect and _sha256(place / file.path) != stated):
                    changed.setdefault(package, name)
    return changed


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").digest()
    return "sha256=" + base64.urlsafe_b64encode(found).rstrip(b"=").decode()
