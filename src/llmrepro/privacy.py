"""A page for others: without the names of host and user, and without paths of any machine."""

import getpass
import html
import re
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from llmrepro import own_words
from llmrepro.machine import private
from llmrepro.run_folder import RunError, read_json_if_there

OWN, SHARED = "report.html", "report-public.html"
# What every machine has at the same place, and the paths of the engines' own interfaces, tell nothing of anybody.
PUBLIC = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "proc", "sys", "dev", "v1", "v2", "slots")
PART = r"[\w.@+=,%-]+"
# A path of two parts or more, or a home alone. It is none behind what ends a path's own beginning ({cache}/…), or
# stands for one (…/receipts: where a publication says something), but is one behind a compiler's -I and -L.
PATH = re.compile(
    rf"(?:(?<![\w./<}}~%@+\]…-])|(?<=[\s\"';]-[IL]))/(?!(?:{'|'.join(PUBLIC)})(?![\w.@+-])){PART}(?:/{PART})+/?"
    rf"|(?<![\w/…])~[A-Za-z_.-]*(?:/{PART})+/?"
    r"|(?<![\w./…])/(?:root|home|Users)(?![\w.@+-])/?"
)
QUOTE = "(?P<quote>&#x27;|&quot;|[\"'`])"
QUOTED = re.compile(  # one with spaces in it
    rf"{QUOTE}(?P<to>/(?!(?:{'|'.join(PUBLIC)})(?![\w.@+-]))[\w.@+-](?:(?!(?P=quote))[^<>\n`/])*+/(?:(?!(?P=quote))[^<>\n`])*+)(?P=quote)"
)
FILES = re.compile(r"\bfile:[^\s\"'<>&]*")
WINDOWS = re.compile(r"\b[A-Za-z]:\\[^\s\"'<>]+")
ADDRESS = re.compile(  # not a package at its version, nor an image at its digest
    r"(?:(?<![\w./-])|(?<=//))(?!git@)[\w.-]+@(?!sha256\b|[0-9a-f]{40}\b)(?=[A-Za-z0-9])[A-Za-z0-9.-]+\b(?!/)"
)
# The host of an address that only its own network knows: a name without a domain, a private one, a number.
HOST = re.compile(
    r"(?<=://)(?!localhost\b|127\.|0\.0\.0\.0\b)"
    r"(?:[\w-]+|[\w.-]+\.(?:local|localdomain|lan|home|internal|intranet|corp|private)|\d+(?:\.\d+){3}|\[[0-9a-f:]{4,}\])"
    r"(?=[:/\s\"'`<&),;]|$)"
)
PICTURE = re.compile(r"(data:[a-z]+/[a-z+]+;base64,[A-Za-z0-9+/=]*)")
SYSTEMS = {"admin", "ubuntu", "debian", "fedora", "centos", "localhost"}  # names of users and hosts, and words


def public(page: str, folder: Path) -> str:
    """The page of a run folder with what tells of a person or a machine replaced by what it is; its pictures stay
    as they are, and its links lead to other public pages."""
    page = page.replace(html.escape(str(folder)), "[run folder]")
    page = re.sub(rf'(href="[^":]*/){re.escape(OWN)}', rf"\g<1>{SHARED}", page)
    names = _names(folder)
    return "".join(part if PICTURE.fullmatch(part) else _without(part, names) for part in PICTURE.split(page))


def _without(text: str, names: list[tuple[str, str]]) -> str:
    text = QUOTED.sub(r"\g<quote>[path]\g<quote>", FILES.sub("[path]", private(text)))
    text = WINDOWS.sub("[path]", PATH.sub("[path]", ADDRESS.sub("[user and host]", text)))
    for name, what in names:
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", f"[{what}]", text)
    return HOST.sub("[host]", text)


def _names(folder: Path) -> list[tuple[str, str]]:
    """Names of this machine, of its user and of the server that was asked, the longest first. One that is a word
    of these pages as well is left where neither @ nor a path nor an address makes a name of it: a host may be
    called gpu, and a user vllm."""
    found = {(socket.gethostname(), "host"), (socket.getfqdn(), "host"), (_asked(folder), "host")}
    with suppress(OSError, KeyError):  # a user without an entry, as in a container
        found.add((getpass.getuser(), "user"))
    named = [(name, what) for name, what in found if len(name) >= 3 and not _is_word(name)]
    return sorted(named, key=lambda one: -len(one[0]))


def _is_word(name: str) -> bool:
    return name.lower() in SYSTEMS or name.startswith("127.") or own_words.holds(name)


def _asked(folder: Path) -> str:
    """The host of a server that ran already, "" without one."""
    with suppress(RunError, ValueError, AttributeError):  # of a folder that was changed by hand
        return urlsplit(read_json_if_there(folder / "parameters.json").get("server_url") or "").hostname or ""
    return ""
