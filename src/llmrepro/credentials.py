"""Credentials that have got into a run folder, by a log, a command or a notebook: found by their shape, or as what
this process's environment holds, and blanked before a page is made of it.

Shapes are those that their issuers publish (GitHub, GitLab, Hugging Face, npm, PyPI, Slack, AWS, Google: their own
prefixes; RFC 7519 for JSON web tokens, RFC 7468 for keys, RFC 7617 for headers, RFC 3986 for addresses). They are
looked for in bytes as they lie there: behind a line's end a token has an `n` before it in JSON, behind a colour an
`m`. None of them matches a quotation mark alone or a bracket: what was JSON stays JSON. Each is looked for once
from where a word begins, so that no text takes long for its length.
"""

import contextlib
import html
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llmrepro import own_words

FILE = "blanked.json"


def _begins(prefix: bytes) -> bytes:
    """A prefix where a word begins: behind what is in none, an escaped line's end or tab, or a terminal's colour.
    It comes first in the pattern, since text is searched for a literal ten times as fast."""
    behind = (rb"\\[nrtbf]", rb"\[[0-9]m", rb"[0-9][0-9]m")
    others = b"".join(b"|(?<=" + one + prefix + b")" for one in behind)
    return prefix + rb"(?:(?<![A-Za-z0-9_+/=-]" + prefix + b")" + others + b")"


# What stands in a key between its first and its last line: base64, ends of lines as text and as JSON writes them.
IN_KEY = (
    rb"(?:(?:Proc-Type|DEK-Info|Version|Comment): ?[A-Za-z0-9,. -]*+"
    rb'|[A-Za-z0-9+/=\s]|\\++[nr]|"\s*+,\s*+")'
)
SHAPES = {
    "a Hugging Face token": rb"(?:hf|api_org)_[A-Za-z0-9]{30,}",
    "a GitHub token": rb"(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})",
    "a GitLab token": rb"gl(?:pat|dt|rt|cbt|ptt|soat)-[A-Za-z0-9_-]{20,}",
    "an API key": _begins(b"sk-") + rb"(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{32,}",
    "an AWS key": b"(?:" + _begins(b"AKIA") + b"|" + _begins(b"ASIA") + rb")[A-Z0-9]{16}(?![A-Za-z0-9_+/=])",
    "a Google key": _begins(b"AIza") + rb"[A-Za-z0-9_-]{35}(?![A-Za-z0-9_+/=-])",
    "a Slack token": rb"xox[abeprs]-[A-Za-z0-9-]{10,}",
    "an npm token": rb"npm_[A-Za-z0-9]{36}",
    "a PyPI token": rb"pypi-AgE[A-Za-z0-9_-]{50,}",
    "a JSON web token": _begins(b"eyJ") + rb"[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    # Whole, or cut off behind lines of it: its first line alone is only spoken of.
    "a private key": rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----(?:"
    + IN_KEY
    + rb"*+-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
    rb'|(?:(?:\s|\\++[nr]|"\s*+,\s*+")++[A-Za-z0-9+/]{40,}+)+)',
    "a bearer token": rb"(?P<kept>(?i:bearer)(?: |%20))(?=[A-Za-z._~+/-]*[0-9])[A-Za-z0-9._~+/-]{20,}=*",
    "a password in a header": rb"(?P<kept>(?i:authorization)[\\\"':= ]{1,8}(?i:basic) )[A-Za-z0-9+/_-]{6,}=*",
    # Not one that was made stars by whoever wrote it.
    "a password in an address": rb"(?<=://)[^\s/:@\"'<>\\\[]{1,256}:(?!\*+@)[^\s/@\"'<>\\]{1,256}(?=@)",
    "a token in an address": rb"(?<=://)(?=[A-Za-z._~%-]*[0-9])[A-Za-z0-9._~%-]{16,256}(?=@)",
}
SECRET = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEY|(^|_)(KEY|PAT|PASS)|_PWD)(_|$)", re.IGNORECASE
)
NO_SECRET = re.compile(r"_(PATH|FILE|DIR|SOCK)$", re.IGNORECASE)
LEAST = 8  # characters of a variable's value: shorter ones would be found in anything
NUMBER = re.compile(r"[0-9.,+eE-]+")  # blanked where JSON has a number, it would be JSON no more
PICTURES = {".png", ".svg"}
HASHED = {"prompts.json"}  # texts kept by their hash, looked through before they are asked
MOST_BYTES = 256 * 2**20  # of one file


class Found(NamedTuple):
    file: str
    kind: str
    count: int


def kinds(text: str) -> list[str]:
    """What kinds of credentials a text holds."""
    return list(_blanked(text.encode(errors="surrogatepass"), _of_environment())[1])


def without(text: str) -> str:
    """A text with every credential in it blanked, as it may be shown and kept."""
    blanked, _ = _blanked(text.encode(errors="surrogatepass"), _of_environment())
    return blanked.decode(errors="surrogatepass")


def blank(folder: Path) -> bool:
    """Blank every credential in the files of a run's or a study's folder, each file replaced whole, and keep in
    `blanked.json` what was found; whether anything was. Links are not followed, and a file too large to look
    through is left. Raises OSError."""
    arms = [arm for arm in sorted(folder.glob("arms/*")) if arm.is_dir() and not arm.is_symlink()]
    of_arms = [blank(arm) for arm in arms]
    values = _of_environment()
    before = Counter({(f.file, f.kind): f.count for f in told(folder)})
    now: Counter = Counter()
    for path in _files(folder, arms):
        text, found = _blanked(path.read_bytes(), values)
        if found:
            _replace(path, text)
            now.update({(path.relative_to(folder).as_posix(), kind): n for kind, n in found.items()})
    if now:
        rows = [{"file": file, "kind": kind, "count": n} for (file, kind), n in sorted((before + now).items())]
        _replace(folder / FILE, (json.dumps(rows, indent=1) + "\n").encode())
    return bool(now) or any(of_arms)


def told(folder: Path) -> list[Found]:
    """What was blanked in a folder until now, without its arms."""
    try:
        rows = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return [Found(one["file"], one["kind"], one["count"]) for one in rows]


def flags(folder: Path) -> list[str]:
    """What a reader is told of it."""
    return [
        f"{one.kind} stood in {one.file} and was blanked before this page was made: put a new one in its place"
        for one in told(folder)
    ]


def _files(folder: Path, arms: list[Path]) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if Path(root, name) not in arms)
        for path in (Path(root) / name for name in sorted(names)):
            with contextlib.suppress(OSError):
                about = path.lstat()
                if not stat.S_ISREG(about.st_mode) or not 0 < about.st_size <= MOST_BYTES:
                    continue
                if path.suffix not in PICTURES and path.name not in HASHED:
                    yield path


def _blanked(text: bytes, values: dict[bytes, str]) -> tuple[bytes, Counter]:
    found: Counter = Counter()
    for kind, pattern in [*((k, re.escape(v)) for v, k in values.items()), *SHAPES.items()]:
        said = f"[{kind} was here]".encode()
        text, count = re.subn(pattern, lambda m, said=said: m.groupdict().get("kept", b"") + said, text)
        if count:
            found[kind] += count
    return text, found


def _of_environment() -> dict[bytes, str]:
    """Values of variables whose names say that they are secret, as they are and as JSON and HTML write them."""
    found = {}
    for name, value in os.environ.items():
        if SECRET.search(name) and not NO_SECRET.search(name) and not _tells_nothing(value):
            for text in (value, html.escape(value)):
                for written in {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}:
                    found[written.encode(errors="surrogateescape")] = f"the value of {name}"
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _tells_nothing(value: str) -> bool:
    """Whether blanking a value everywhere would hide no secret, and spoil what is none."""
    return (
        len(value) < LEAST
        or NUMBER.fullmatch(value) is not None
        or os.path.exists(value)
        or own_words.holds(value)
    )


def _replace(path: Path, text: bytes) -> None:
    """Another content for a file, whole; where this process's own output goes, it goes on into the same file."""
    with contextlib.suppress(OSError):
        about = path.stat()
        if any(os.path.samestat(os.fstat(fd), about) for fd in (1, 2)):
            with open(path, "r+b") as file:
                file.write(text)
                file.truncate()
            return
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(text)
    with contextlib.suppress(FileNotFoundError):
        part.chmod(stat.S_IMODE(path.stat().st_mode))
    os.replace(part, path)
