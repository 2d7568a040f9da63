"""A page for others: without the names of host and user, and without paths of any machine."""

import getpass
import html
import re
import socket
from contextlib import suppress
from pathlib import Path

from llmrepro.machine import private

OWN, SHARED = "report.html", "report-public.html"
# What every machine has at the same place, and the paths of the engines' own interfaces, tell nothing of anybody.
PUBLIC = (
    *("usr", "bin", "sbin", "lib", "lib64", "etc", "proc", "sys", "dev", "run"),
    *("v1", "v2", "health", "metrics", "props", "slots", "tokenize", "models", "completion"),
)
PATH = re.compile(
    r"(?<![\w./<}~%@+-])/(?!(?:"
    + "|".join(PUBLIC)
    + r")\b)[\w.@+-]+(?:/[\w.@+=,%-]+)+/?|(?<![\w/])/(?:root|home)\b/?"
)
FILES = re.compile(r"\bfile:[^\s\"'<>&]*")
WINDOWS = re.compile(r"\b[A-Za-z]:\\[^\s\"'<>]+")
ADDRESS = re.compile(r"\b[A-Za-z0-9._-]+@(?=[A-Za-z0-9])[A-Za-z0-9.-]+\b(?!/)")
PICTURE = re.compile(r"(data:[a-z]+/[a-z+]+;base64,[A-Za-z0-9+/=]*)")
# Names that are words of these pages as well: only beside an @ or in a path do they tell of a person or a machine.
WORDS = {
    "root",
    "user",
    "test",
    "admin",
    "ubuntu",
    "debian",
    "gpu",
    "cpu",
    "server",
    "host",
    "local",
    "localhost",
    "model",
}


def public(page: str, folder: Path) -> str:
    """The page of a run folder with what tells of a person or a machine replaced by what it is; its pictures stay
    as they are, and its links lead to other public pages."""
    page = page.replace(html.escape(str(folder)), "[run folder]")
    page = re.sub(rf'(href="[^":]*/){re.escape(OWN)}', rf"\g<1>{SHARED}", page)
    return "".join(part if PICTURE.fullmatch(part) else _without(part) for part in PICTURE.split(page))


def _without(text: str) -> str:
    text = FILES.sub("[path]", private(text))
    text = WINDOWS.sub("[path]", PATH.sub("[path]", ADDRESS.sub("[user and host]", text)))
    for name, what in _names():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", f"[{what}]", text)
    return text


def _names() -> list[tuple[str, str]]:
    """Names of this machine and user that stand for nothing else, the longest first."""
    found = {(socket.gethostname(), "host"), (socket.getfqdn(), "host")}
    with suppress(OSError, KeyError):  # a user without an entry, as in a container
        found.add((getpass.getuser(), "user"))
    named = [(name, what) for name, what in found if len(name) >= 3 and name.lower() not in WORDS]
    return sorted(named, key=lambda one: -len(one[0]))
