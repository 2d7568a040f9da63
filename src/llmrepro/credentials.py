"""Credentials that have got into a run folder, by a log, a command or a notebook: found by their shape, or as what
this process's environment holds, and blanked before a page is made of it.

Shapes are those that their issuers publish (GitHub, GitLab, Hugging Face, npm, PyPI, Slack, AWS, Google: their own
prefixes; RFC 7519 for JSON web tokens, RFC 7468 for keys, RFC 3986 for addresses).
"""

import contextlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llmrepro.run_folder import read_json_if_there

FILE = "blanked.json"
SHAPES = {
    "a Hugging Face token": rb"\b(?:hf|api_org)_[A-Za-z0-9]{30,}",
    "a GitHub token": rb"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})",
    "a GitLab token": rb"\bgl(?:pat|dt|rt|cbt|ptt|soat)-[A-Za-z0-9_-]{20,}",
    "an API key": rb"\bsk-(?:[a-z]+-)*[A-Za-z0-9_-]{32,}",
    "an AWS key": rb"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a Google key": rb"\bAIza[A-Za-z0-9_-]{35}",
    "a Slack token": rb"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    "an npm token": rb"\bnpm_[A-Za-z0-9]{36}",
    "a PyPI token": rb"\bpypi-AgE[A-Za-z0-9_-]{50,}",
    "a JSON web token": rb"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.{0,20000}?)-----END [A-Z ]*PRIVATE KEY-----",
    "a bearer token": rb"(?<=[Bb]earer )[A-Za-z0-9._~+/-]{20,}=*",
    "a password in an address": rb"(?<=://)[^\s/:@\"'<>\\\[]{1,256}:[^\s/@\"'<>\\]{1,256}(?=@)",
}
SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|PAT)(_|$)", re.IGNORECASE)
LEAST = 8  # characters of a variable's value: shorter ones would be found in anything
PICTURES = {".png", ".svg"}
MOST_BYTES = 256 * 2**20  # of one file


class Found(NamedTuple):
    file: str
    kind: str
    count: int


def kinds(text: str) -> list[str]:
    """What kinds of credentials a text holds."""
    return list(_blanked(text.encode(errors="surrogatepass"), _of_environment())[1])


def blank(folder: Path) -> bool:
    """Blank every credential in the files of a run's or a study's folder, each file replaced whole, and keep in
    `blanked.json` what was found; whether anything was. Links are not followed, and a file too large to look
    through is left. Raises OSError."""
    of_arms = [blank(arm) for arm in sorted(folder.glob("arms/*")) if arm.is_dir() and not arm.is_symlink()]
    values = _of_environment()
    before = Counter({(f.file, f.kind): f.count for f in told(folder)})
    now: Counter = Counter()
    for path in _files(folder):
        text, found = _blanked(path.read_bytes(), values)
        if found:
            _replace(path, text)
            now.update({(path.relative_to(folder).as_posix(), kind): n for kind, n in found.items()})
    if now:
        rows = [{"file": file, "kind": kind, "count": n} for (file, kind), n in sorted((before + now).items())]
        _replace(folder / FILE, (json.dumps(rows, indent=1) + "\n").encode())
    return bool(now) or any(of_arms)


def told(folder: Path) -> list[Found]:
    """What was blanked in a folder until now."""
    return [Found(one["file"], one["kind"], one["count"]) for one in read_json_if_there(folder / FILE) or []]


def flags(folder: Path) -> list[str]:
    """What a reader is told of it."""
    return [
        f"{one.kind} stood in {one.file} and was blanked before this page was made: put a new one in its place"
        for one in told(folder)
    ]


def _files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(root) / name for name in sorted(names)):
            with contextlib.suppress(OSError):
                about = path.lstat()
                if stat.S_ISREG(about.st_mode) and path.suffix not in PICTURES and 0 < about.st_size <= MOST_BYTES:
                    yield path


def _blanked(text: bytes, values: dict[bytes, str]) -> tuple[bytes, Counter]:
    found: Counter = Counter()
    for kind, pattern in [*((k, re.escape(v)) for v, k in values.items()), *SHAPES.items()]:
        text, count = re.subn(pattern, f"[{kind} was here]".encode(), text)
        if count:
            found[kind] += count
    return text, found


def _of_environment() -> dict[bytes, str]:
    """Values of variables whose names say that they are secret, as they are and as JSON writes them."""
    found = {}
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= LEAST and not os.path.exists(value):
            for written in {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}:
                found[written.encode(errors="surrogateescape")] = f"the value of {name}"
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _replace(path: Path, text: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(text)
    with contextlib.suppress(FileNotFoundError):
        part.chmod(stat.S_IMODE(path.stat().st_mode))
    os.replace(part, path)
