"""A server that already runs: it is asked and looked at, and neither installed, started nor ended.

What its API does not tell is unknown: the weights' hash, how it was started, often the engine's version.
"""

import hashlib
import ipaddress
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from llmrepro.client import Record
from llmrepro.exchange import TRANSPORT_ERRORS, Unread, asked, fetch, without
from llmrepro.run_folder import RunError
from llmrepro.stream import storable

KEY_VARIABLE = "LLMREPRO_SERVER_KEY"  # where its API key is taken from; it is written nowhere
# What of a record a server writes; all else is the kit's own, and holds words that may be a key too.
SAID = ("text", "reasoning", "error", "notes", "finish_reason", "usage", "timings", "engine_log")


class Identity(NamedTuple):
    """What a server says that it is: the name it serves its model under, and the names of its engine's version."""

    model: str
    versions: list[str]


@dataclass
class Running:
    """A server that somebody else started, with what `server.Boot` has for those that ask. `log` holds one line:
    its own log is where it was started."""

    number: int
    url: str
    api_key: str | None = field(repr=False)
    log: Path
    started_ns: int = field(default_factory=time.perf_counter_ns)  # when it was first looked at
    guard_file: Path | None = None

    def without_key(self, record: Record) -> Record:
        """A record in whose texts the server did not write the key back; see `without`."""
        said = {name: without(getattr(record, name), self.api_key) for name in SAID}
        if said["text"] != record.text:
            said["text_sha256"] = hashlib.sha256(said["text"].encode()).hexdigest()
        return record.model_copy(update=said)

    main_pid = None  # its process is not known

    def ran_out_of_memory(self) -> bool:
        """False: neither its log nor its end is seen."""
        return False

    def killed_by_somebody(self) -> bool:
        """False: likewise."""
        return False

    def ended(self) -> str | None:
        """None: its process cannot be seen. Whether it lives is asked of it, by a generation."""
        return None


def address(url: str) -> str:
    """The URL that paths like /v1/models are put behind. Raises RunError saying what is wrong with it."""
    try:
        url.encode()
        given = urlsplit(url.strip())
        good = given.scheme in ("http", "https") and given.hostname and (given.port is None or given.port > 0)
    except ValueError:
        good = False
    if not good:
        shown = url.rpartition("@")[2]  # before it a password may stand
        raise RunError(f"server_url {shown!r} is no address of a server; write http://127.0.0.1:8080 or https://…")
    if given.username is not None or given.password is not None:
        raise RunError(
            f"server_url holds a password, and would be written down; set {KEY_VARIABLE} to the API key"
        )
    if given.query or given.fragment:
        raise RunError(f"server_url {url!r} has something behind its path; leave ? and # out")
    path = given.path.rstrip("/").removesuffix("/v1").rstrip("/")  # many write it so, and paths bring their own
    return f"{given.scheme}://{given.netloc}{path}"


def is_here(url: str) -> bool:
    """Whether a server's address is this machine's own: loopback. A tunnel looks the same."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def key() -> str | None:
    """The API key, or None. Raises RunError when no request can carry it; its text does not hold it."""
    found = os.environ.get(KEY_VARIABLE) or None
    if found and not (found.isascii() and found.isprintable() and found == found.strip()):
        raise RunError(
            f"{KEY_VARIABLE} begins or ends with a space, or holds a line break or a character that is not ASCII, "
            "which no HTTP header carries; set it to the key alone"
        )
    return found


def identity(url: str, versions: Callable[[Callable[[str], Any]], list[str]] | None, wanted: set[str]) -> Identity:
    """Who answers at an address. `versions` is the engine's reading of its version; of several models the one that
    is named in `wanted` is meant. Raises RunError with what to do when nothing there can be measured."""
    listed = _models(url)
    names = [one["id"] for one in listed]
    named = [one["id"] for one in listed if one["id"] in wanted or one.get("root") in [*wanted]]
    if len(names) > 1 and len(named) != 1:
        shown = without(storable(", ".join(names[:10])), key())
        raise RunError(
            f"{url} serves {len(names)} models ({shown}), and which is meant cannot be told; "
            "serve one of them alone",
            next_step="serve one of them alone",
        )
    model = (named or names)[0]
    other = "serve it under another name"
    if without(model, key()) != model:  # under another name it could not be asked
        raise RunError(
            f"the name of the model that {url} serves holds the API key, and would be written down; {other}, or "
            "with another key",
            next_step=other,
        )
    if storable(model) != model:
        raise RunError(
            f"{url} calls its model {model!r}, which holds half a character and is no text; {other}",
            next_step=other,
        )
    return Identity(model, versions(lambda path: asked(url + path, key())) if versions else [])


def check(url: str, answer: Record) -> None:
    """Raises RunError when a first question was not answered: a server can list its model and refuse to use it."""
    if answer.status == "ok":
        return
    if answer.http_status in (401, 403):
        raise _refused(url, answer.http_status)
    raise RunError(
        f"{url} did not answer a first question ({answer.status}: {answer.error}); mend that, then go on",
        next_step="mend or restart the server",
    )


def _refused(where: str, status: int) -> RunError:
    told = f"set {KEY_VARIABLE} in the environment"
    return RunError(f"{where} answers {status}: {_of_key()}; {told}", next_step=told)


def _of_key() -> str:
    return "the key is not the server's" if key() else "it wants an API key"


def _models(url: str) -> list[dict]:
    where = f"{url}/v1/models"
    try:
        answer = fetch(where, key())
    except Unread as error:
        raise RunError(
            f"{where} {error}; it must be a server with the OpenAI API that has loaded its model",
            next_step="start one that has loaded its model, or give its address",
        ) from None
    except TRANSPORT_ERRORS as error:
        raise RunError(
            f"nothing answers at {where} ({type(error).__name__}); start the server, wait until it is ready, and "
            "mind the port in server_url",
            next_step="start the server and wait until it is ready",
        ) from None
    if answer.status in (401, 403):
        raise _refused(where, answer.status)
    if 300 <= answer.status < 400:
        there = without(answer.headers.get("Location"), key())
        raise RunError(
            f"{where} leads elsewhere ({there}); give that address itself",
            next_step="give that address as server_url",
        )
    try:
        listed = json.loads(answer.content)["data"] if answer.status < 400 else []
        found = [one for one in listed if isinstance(one.get("id"), str) and one["id"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        found = []
    if not found:
        raise RunError(
            f"{where} answers {answer.status} and names no model; it must be a server with the OpenAI API "
            "that has loaded its model",
            next_step="start one that has loaded its model, or give its address",
        )
    return found


def told(url: str, found: Identity) -> dict:
    """What boots/<n>.json says of a sitting with such a server."""
    return {"external": True, "url": url, "here": is_here(url), "model": found.model, "versions": found.versions}


def elsewhere(url: str, facts: dict) -> dict:
    """machine.json of a run whose server is not known to be here: the machine described is the one that asks."""
    said = f"at {url}; what machine it runs on is not known here"
    return {"server": said, "client": facts, "llmrepro": facts["llmrepro"]}


def of(started: dict[int, dict]) -> dict | None:
    """The first boot of a run that is none of the kit's own, or None."""
    return next((boot for boot in started.values() if boot.get("external")), None)


def engine_version(started: dict[int, dict], stated: str) -> str | None:
    """The engine's version as such a server tells it: as a recipe states it where that is one of its names."""
    names = (of(started) or {}).get("versions") or []
    return stated if stated in names else next(iter(names), None)


def flags(started: dict[int, dict]) -> list[str]:
    """What to know of a run whose server the kit did not start."""
    boot = of(started)
    if boot is None:
        return []
    where = (
        "it is taken to run on this machine, as its address is loopback, which a tunnel's is too"
        if boot["here"]
        else "on what machine it runs is not known here, and times include the network"
    )
    return [
        f"the server at {boot['url']} was running already: how it was started and which file it serves as "
        f"{boot['model']!r} is not known here; {where}; others may have used it meanwhile"
    ]
