"""A run folder as bytes, to be sent: its regular files, with a manifest of their sizes and sha256."""

import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
from pathlib import Path

from llmrepro.run_folder import RunError

MANIFEST = "MANIFEST.json"
LEFT_OUT = {".lock"}
MOST_FILES, MOST_BYTES = 20_000, 4 * 2**30


def pack(folder: Path) -> bytes:
    """Every regular file of a folder, links and sockets left out, as a compressed tar file."""
    files = {}
    for root, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(root) / name for name in sorted(names) if name not in LEFT_OUT):
            if stat.S_ISREG(path.lstat().st_mode):
                files[path.relative_to(folder).as_posix()] = path.read_bytes()
    told = {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in files.items()}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=6) as tar:
        for name, data in {MANIFEST: json.dumps(told).encode(), **files}.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    return out.getvalue()


def unpack(packed: bytes, target: Path) -> None:
    """Put a folder that was packed to `target`, which is not there yet: the whole of it, every hash checked, or
    nothing. Raises RunError."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
            _fill(part, tar)
        part.rename(target)
    except (tarfile.TarError, OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"a run folder came damaged and is not taken: {error}; run it again") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fill(part: Path, tar: tarfile.TarFile) -> None:
    first = tar.next()
    if first is None or first.name != MANIFEST or not first.isreg() or first.size > 2**26:
        raise ValueError("it has no manifest")
    left = {name: (int(size), str(sha256)) for name, (size, sha256) in json.load(tar.extractfile(first)).items()}
    if len(left) > MOST_FILES or sum(size for size, _ in left.values()) > MOST_BYTES:
        raise ValueError("it is larger than any run folder")
    part.mkdir(parents=True)
    while (one := tar.next()) is not None:
        size, sha256 = left.pop(one.name)
        place = (part / one.name).resolve()
        if not one.isreg() or one.size != size or not place.is_relative_to(part.resolve()) or place.exists():
            raise ValueError(f"{one.name!r} is not what the manifest says")
        data = tar.extractfile(one).read()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(f"{one.name!r} has another sha256 than the manifest says")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    if left:
        raise ValueError(f"{next(iter(left))!r} is missing")
