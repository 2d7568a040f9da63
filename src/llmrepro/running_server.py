"""A server that already runs: it is asked and looked at, and neither installed, started nor ended.

What its API does not tell is unknown: the weights' hash, how it was started, often the engine's version.
"""

import ipaddress
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import requests

from llmrepro.client import Record
from llmrepro.run_folder import RunError

KEY_VARIABLE = "LLMREPRO_SERVER_KEY"  # where its API key is taken from; it is written nowhere
TIMEOUT_S = 30
HIDDEN = "<api key>"


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
    answered: Callable[[], None] = field(default=lambda: None, repr=False)

    def without_key(self, text: str) -> str:
        """A JSON text in which the server did not write the key back."""
        return text.replace(json.dumps(self.api_key)[1:-1], HIDDEN) if self.api_key else text

    def ended(self) -> str | None:
        """None: its process cannot be seen. Whether it lives is asked of it, by a generation."""
        return None


def address(url: str) -> str:
    """The URL that paths like /v1/models are put behind. Raises RunError saying what is wrong with it."""
    given = urlsplit(url.strip())
    try:
        port_ok = given.port is None or given.port > 0
    except ValueError:
        port_ok = False
    if given.scheme not in ("http", "https") or not given.hostname or not port_ok:
        raise RunError(f"server_url {url!r} is no address of a server; write http://127.0.0.1:8080 or https://…")
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
    return os.environ.get(KEY_VARIABLE) or None


def identity(url: str, versions: Callable[[Callable[[str], Any]], list[str]] | None, wanted: set[str]) -> Identity:
    """Who answers at an address. `versions` is the engine's reading of its version; of several models the one that
    is named in `wanted` is meant. Raises RunError with what to do when nothing there can be measured."""
    listed = _models(url)
    names = [one["id"] for one in listed]
    named = [one["id"] for one in listed if {one["id"], one.get("root")} & wanted]
    if len(names) > 1 and len(named) != 1:
        raise RunError(
            f"{url} serves {len(names)} models ({', '.join(names[:10])}), and which is meant cannot be told; "
            "serve one of them alone"
        )
    return Identity((named or names)[0], versions(lambda path: _got(url, path)) if versions else [])


def check(url: str, answer: Record) -> None:
    """Raises RunError when a first question was not answered: a server can list its model and refuse to use it."""
    if answer.status == "ok":
        return
    if answer.http_status in (401, 403):
        raise RunError(f"{url} answers {answer.http_status}: {_of_key()}; set {KEY_VARIABLE} in the environment")
    raise RunError(
        f"{url} did not answer a first question ({answer.status}: {answer.error}); mend that, then go on"
    )


def _of_key() -> str:
    return "the key is not the server's" if key() else "it wants an API key"


def _models(url: str) -> list[dict]:
    where = f"{url}/v1/models"
    try:
        answer = _request(where)
    except requests.RequestException as error:
        raise RunError(
            f"nothing answers at {where} ({type(error).__name__}); start the server, wait until it is ready, and "
            "mind the port in server_url"
        ) from None
    if answer.status_code in (401, 403):
        raise RunError(f"{where} answers {answer.status_code}: {_of_key()}; set {KEY_VARIABLE} in the environment")
    if 300 <= answer.status_code < 400:
        raise RunError(f"{where} leads elsewhere ({answer.headers.get('Location')}); give that address itself")
    try:
        listed = answer.json()["data"] if answer.ok else []
        found = [one for one in listed if isinstance(one.get("id"), str) and one["id"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        found = []
    if not found:
        raise RunError(
            f"{where} answers {answer.status_code} and names no model; it must be a server with the OpenAI API "
            "that has loaded its model"
        )
    return found


def _got(url: str, path: str) -> Any:
    """Parsed JSON, a text that is none, or None without a good answer: what engines are given to read."""
    try:
        answer = _request(url + path)
        if not answer.ok:
            return None
        return answer.json() if "json" in answer.headers.get("Content-Type", "") else answer.text
    except (requests.RequestException, ValueError):
        return None


def _request(where: str) -> requests.Response:
    with requests.Session() as session:
        session.trust_env = False  # a proxy variable must not catch loopback, and .netrc is not asked for
        if key():
            session.headers["Authorization"] = f"Bearer {key()}"
        return session.get(where, timeout=TIMEOUT_S, allow_redirects=False)


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
