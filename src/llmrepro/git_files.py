"""Single files of public repositories at a commit: fetched over https from their forge, and kept in the cache."""

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from urllib.parse import quote, urljoin, urlsplit

import requests
import urllib3

from llmrepro.exchange import Bounds, Late, TooLarge
from llmrepro.parts import GitFile

# {repo} is what stands between the host and the end of the repository's address: owner/name, or more on GitLab.
FORGES = {
    "github.com": "https://raw.githubusercontent.com/{repo}/{commit}/{path}",
    "gitlab.com": "https://gitlab.com/{repo}/-/raw/{commit}/{path}",
    "codeberg.org": "https://codeberg.org/{repo}/raw/commit/{commit}/{path}",
}
MOST_BYTES = 16 << 20
CONNECT_S, SILENCE_S, WHOLE_S = 10.0, 30.0, 120.0
MOST_REDIRECTS = 3


class GitFileFailure(RuntimeError):
    """A file that cannot be had; the text says which, why, and what to do."""


def address(file: GitFile) -> str:
    """Where the forge of a repository gives out one file of one commit as it is. Raises GitFileFailure."""
    where = urlsplit(file.repo)
    repo = where.path.strip("/").removesuffix(".git")
    parts = repo.split("/")
    if where.netloc not in FORGES:
        raise GitFileFailure(
            f"{file.path} lies in {file.repo}, and single files are fetched from {', '.join(FORGES)} only; "
            "name a repository there, or a mirror of this one"
        )
    if len(parts) < 2 or not all(re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", part) for part in parts):
        raise GitFileFailure(f"{file.repo} is no address of a repository; write https://{where.netloc}/owner/name")
    return FORGES[where.netloc].format(repo=repo, commit=file.commit, path=quote(file.path))


def fetch(file: GitFile, cache: Path) -> bytes:
    """The content of a file at its commit, from the cache where it is there with the sha256 that it had.

    A commit is immutable, so what was fetched once is never asked for again. Raises GitFileFailure.
    """
    url = address(file)
    name = hashlib.sha256(f"{file.repo}\n{file.commit}\n{file.path}".encode()).hexdigest()
    folder = cache / "publications" / name
    kept = _kept(folder)
    if kept is not None:
        return kept
    content = _get(url)
    told = {"url": url, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "content", content)
        _write(folder / "source.json", json.dumps(told, indent=1).encode())
    except OSError as error:
        raise GitFileFailure(f"the cache cannot be written: {error}; name another in LLMREPRO_CACHE") from None
    return content


def _kept(folder: Path) -> bytes | None:
    try:
        content = (folder / "content").read_bytes()
        told = json.loads((folder / "source.json").read_bytes())
        return content if hashlib.sha256(content).hexdigest() == told["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(target: Path, content: bytes) -> None:
    """Written whole under a name of its own first: two runs may fetch one file at once."""
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}-", delete=False) as part:
        part.write(content)
    os.replace(part.name, target)


def _get(url: str) -> bytes:
    """The body of a good answer, at its end within WHOLE_S of the first question."""
    bounds = Bounds(WHOLE_S, MOST_BYTES)
    try:
        return bounds.wait(lambda: _followed(url, bounds))
    except TooLarge:
        raise GitFileFailure(
            f"{url} has more than {MOST_BYTES >> 20} MiB, which is no prompt; nothing was kept"
        ) from None
    except Late:
        raise GitFileFailure(f"{url} did not end within {WHOLE_S:g} s; try again on a better line") from None
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise GitFileFailure(
            f"{url} could not be fetched ({_reason(error)}); check the network, then start a new run"
        ) from None


def _followed(first: str, bounds: Bounds) -> bytes:
    """A redirect is followed to the hosts of FORGES only, never to another."""
    known = {urlsplit(form).netloc for form in FORGES.values()} | {urlsplit(first).netloc}
    url = first
    with requests.Session() as session:
        session.auth = lambda request: request  # else requests sends what ~/.netrc has for the host
        for _ in range(MOST_REDIRECTS + 1):
            timeouts = (CONNECT_S, SILENCE_S)
            with session.get(url, timeout=timeouts, stream=True, allow_redirects=False) as answer:
                if not answer.is_redirect:
                    return _body(answer, first, bounds)
                url = urljoin(url, answer.headers["Location"])
            if urlsplit(url).netloc not in known or urlsplit(url).scheme != urlsplit(first).scheme:
                raise GitFileFailure(f"{first} leads to {url}, which is another host; nothing was fetched from it")
    raise GitFileFailure(f"{first} leads on more than {MOST_REDIRECTS} times; look at it in a browser")


def _body(answer: requests.Response, url: str, bounds: Bounds) -> bytes:
    if answer.status_code != 200:
        gone = (
            "; the repository, the commit or the file is gone or not public" if answer.status_code == 404 else ""
        )
        raise GitFileFailure(f"{url} answered {answer.status_code} {answer.reason or ''}".rstrip() + gone)
    return bounds.read(answer)


def _reason(error: requests.RequestException | urllib3.exceptions.HTTPError) -> str:
    if isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError):
        return "no answer in time"
    if isinstance(error, urllib3.exceptions.ProtocolError):
        return "the connection broke off"
    if isinstance(error, requests.exceptions.SSLError):
        return "its certificate is not trusted here"
    if isinstance(error, requests.exceptions.ProxyError):
        return "the proxy refused it"
    return "no connection" if isinstance(error, requests.ConnectionError) else type(error).__name__
