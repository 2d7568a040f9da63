"""sha256 of large files, computed once: 60 GB of weights take minutes to hash and are asked about at every run.

What was found is kept in the cache under the file's device and inode, so that every hard link of it shares it,
with its size, mtime and ctime. It is believed while all of these are the same. That is enough: every way to write
into a file moves its ctime, which, unlike mtime, nobody can set back; a file put in its place has another inode.
What remains unseen is a disk that rots and somebody who sets the clock: `rm -r` the folder `hashes` of the cache
to have everything hashed anew.
"""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from llmrepro import machine
from llmrepro.progress import Progress

SMALL_BYTES = 16 << 20  # hashed each time: that takes a hundredth of a second
SHOWN_BYTES = 1 << 30  # from here on a person sees how far it is
READ_BYTES = 4 << 20
TICK_S = 0.05  # file systems take their times from a clock that stands still for up to 10 ms


def sha256_of(path: Path, cache: Path | None = None) -> str:
    """Lower-case hex sha256 of a file, from the record of an earlier time where nothing was written since."""
    before = os.stat(path)
    if before.st_size >= SMALL_BYTES:
        told = _recorded(before, cache)
        if told is not None:
            return told
    found = _hashed(path, before.st_size)
    if before.st_size >= SMALL_BYTES and _state(os.stat(path)) == _state(before):
        remember(path, found, cache)
    return found


def remember(path: Path, sha256: str, cache: Path | None = None) -> None:
    """Keep a sha256 that the caller found just now. A cache that cannot be written only means hashing again."""
    facts = os.stat(path)
    if facts.st_size < SMALL_BYTES:
        return
    if 0 <= time.time_ns() - facts.st_ctime_ns < TICK_S * 1e9:
        time.sleep(TICK_S)  # else what is written right now could get the time that is recorded
        facts = os.stat(path)
    target = _place(facts, cache)
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}")
        part.write_text(json.dumps({"sha256": sha256, **_state(facts)}), encoding="utf-8")
        os.replace(part, target)


def link(source: Path, target: Path, sha256: str, cache: Path | None = None) -> None:
    """A hard link to a file that was just found to have this sha256. It moves the ctime; the record follows."""
    target.parent.mkdir(parents=True, exist_ok=True)
    os.link(source, target)
    remember(target, sha256, cache)


def _recorded(facts: os.stat_result, cache: Path | None) -> str | None:
    try:
        told = json.loads(_place(facts, cache).read_bytes())
        return told["sha256"] if told == {"sha256": told["sha256"], **_state(facts)} else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _place(facts: os.stat_result, cache: Path | None) -> Path:
    return (cache or machine.cache_dir()) / "hashes" / f"{facts.st_dev}-{facts.st_ino}.json"


def _state(facts: os.stat_result) -> dict[str, int]:
    return {"bytes": facts.st_size, "mtime_ns": facts.st_mtime_ns, "ctime_ns": facts.st_ctime_ns}


def _hashed(path: Path, size: int) -> str:
    digest, done = hashlib.sha256(), 0
    bar = Progress(f"check {path.name}", size) if size >= SHOWN_BYTES else contextlib.nullcontext()
    with open(path, "rb", buffering=0) as file, bar:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if size >= SHOWN_BYTES:
                bar.to(done, f"{done / 1e9:.1f} of {size / 1e9:.1f} GB")
    return digest.hexdigest()
