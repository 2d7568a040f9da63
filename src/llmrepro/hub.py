"""The Hugging Face Hub: what a repository holds at a revision, and its files, fetched so that nothing is lost.

`huggingface_hub` knows the API, its errors, the token and the connection's settings; the transfer is ours, because
the library neither goes on where another process stopped nor checks what it got. Bytes are appended to a part
that is named by the hash it must end with, so that a range of it is of the same content whoever sends it. That is
why no `If-Range` goes with the range: the hub's X-Linked-Etag is not the ETag of the store that it leads to
(github.com/asteroid-team/asteroid/pull/377), each resume would begin anew; the hash at the end decides instead.
The token is sent to the hub and to nobody that it leads to.
"""

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import httpx2
from huggingface_hub import HfApi, errors, get_session
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from llmrepro import __version__

TRIES = 6  # in a row without a byte; the pauses between them add up to half a minute
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
TIMEOUT = httpx2.Timeout(30.0, read=60.0)
MOST_REDIRECTS = 5
CHUNK_BYTES = 1 << 20
PASSING = {408, 429, 500, 502, 503, 504}
OWN_COPY = "or download the files elsewhere and give them as weights_path"


class HubFailure(RuntimeError):
    """What the hub did not give, in a sentence that says why and what to do."""


class File(NamedTuple):
    """A file as the hub knows it: `sha256` of a large one (LFS, Xet), of any other its git blob id."""

    path: str
    bytes: int | None
    sha256: str | None
    git_sha1: str | None


class Snapshot(NamedTuple):
    repo: str  # its name now, which may be another than the one that was asked for
    commit: str
    files: dict[str, File]  # by path


class _Passing(Exception):
    """A fault that the next try may not meet."""


def endpoint() -> str:
    """The hub's address without a slash at its end: HF_ENDPOINT, or the public one."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def site() -> str:
    """The hub's address as it may be shown: without a name and password that somebody put in it."""
    return re.sub(r"//[^/@]*@", "//", endpoint())


def look(names: list[str], revision: str | None) -> tuple[str, Snapshot]:
    """The first of `names` that is a repository, and what it holds at a revision; None: at `main` as it is now.

    Raises HubFailure: no such repository or revision, no access, no answer.
    """
    api = HfApi(endpoint=endpoint(), library_name="llmrepro", library_version=__version__)
    for name in names:
        try:
            info = api.model_info(name, revision=revision, files_metadata=True, timeout=60)
        except errors.GatedRepoError:
            raise HubFailure(_gated(name)) from None
        except errors.RepositoryNotFoundError:
            continue
        except errors.RevisionNotFoundError:
            raise HubFailure(
                f"{name} has no revision {revision or 'main'} any more; look at {site()}/{name}/commits/main, "
                f"pin one that is there in the recipe's model, {OWN_COPY}"
            ) from None
        except (httpx2.HTTPError, OSError, ValueError) as error:
            if getattr(getattr(error, "response", None), "status_code", None) == 401 and not _token_sent():
                continue  # what the hub says of a repository that is not there to somebody whom it does not know
            raise HubFailure(_said(name, error)) from None
        if not info.sha:
            raise HubFailure(f"{site()} names no commit for {name}; unset HF_ENDPOINT to ask the hub itself")
        return name, Snapshot(info.id, info.sha, {s.rfilename: _file(s) for s in info.siblings or []})
    hint = "" if _token_sent() else "; no token was found, and without one a private repository looks the same"
    tried = names[0] if len(names) == 1 else f"none of {', '.join(names)}"
    verb = "is not" if len(names) == 1 else "is"
    raise HubFailure(
        f"{tried} {verb} on {site()}: gone, renamed or private{hint}. Look there for its name now and add "
        f"it to `also_named`, set HF_TOKEN to a token that may read it, {OWN_COPY}"
    )


def download(snapshot: Snapshot, file: File, part: Path, to: Callable[[int], None] = lambda done: None) -> str:
    """Make `part` the whole file, going on with what is there; its sha256. `to` is told the bytes that are there.

    What turns out to be another file than the hub's own hash says is removed; when it was gone on with, it is
    fetched once more from the start. Who calls holds a lock. Raises HubFailure.
    """
    if file.bytes is None or not (file.sha256 or file.git_sha1):
        raise HubFailure(
            f"{site()} tells neither size nor hash of {file.path} in {snapshot.repo}; give `bytes` and "
            "`sha256` in the recipe's model, or unset HF_ENDPOINT to ask the hub itself"
        )
    for last_try in (False, True):
        hashes = _Hashes(file.bytes)
        resumed = part.exists() and part.stat().st_size > 0
        _fill(snapshot, file, part, hashes, to)
        found, wanted = (
            (hashes.sha256.hexdigest(), file.sha256)
            if file.sha256
            else (hashes.git_sha1.hexdigest(), file.git_sha1)
        )
        if found == wanted:
            return hashes.sha256.hexdigest()
        part.unlink()
        if last_try or not resumed:
            kind = "sha256" if file.sha256 else "git blob id"
            raise HubFailure(
                f"{file.path} of {snapshot.repo} came with the {kind} {found}, and {wanted} was wanted: it was "
                "changed on its way, and nothing was kept. Run again; if it stays so, look at the network's proxy"
            )
    raise AssertionError("not reached")


class _Hashes:
    """Hashes of what a part holds so far, fed in order."""

    def __init__(self, size: int):
        self.size = size
        self.clear()

    def clear(self) -> None:
        self.sha256 = hashlib.sha256()
        self.git_sha1 = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)

    def update(self, chunk: bytes) -> None:
        self.sha256.update(chunk)
        self.git_sha1.update(chunk)


def _fill(snapshot: Snapshot, file: File, part: Path, hashes: _Hashes, to: Callable[[int], None]) -> None:
    """Append to `part` until it has all bytes, over as many connections as that takes."""
    part.parent.mkdir(parents=True, exist_ok=True)
    url = f"{endpoint()}/{snapshot.repo}/resolve/{snapshot.commit}/{quote(file.path)}"
    with open(part, "a+b") as target:
        if target.tell() > file.bytes:
            target.truncate(0)
        target.seek(0)
        while chunk := target.read(CHUNK_BYTES):  # of an earlier try
            hashes.update(chunk)
            to(target.tell())
        failed = 0
        while (have := target.seek(0, os.SEEK_END)) < file.bytes:
            to(have)
            try:
                _append(url, snapshot.repo, file, target, hashes, to)
            except (_Passing, httpx2.TransportError) as error:
                failed = 1 if target.seek(0, os.SEEK_END) > have else failed + 1
                if failed >= TRIES:
                    why = str(error) if isinstance(error, _Passing) else _reason(error)
                    raise HubFailure(
                        f"{file.path} of {snapshot.repo} stopped at {have:,} of {file.bytes:,} bytes ({why}, "
                        f"{TRIES} times); check the network and run again: it goes on from there"
                    ) from None
                time.sleep(min(PAUSE_S * 2 ** (failed - 1), LONGEST_PAUSE_S))
        target.flush()
        os.fsync(target.fileno())


def _append(url: str, repo: str, file: File, target, hashes: _Hashes, to: Callable[[int], None]) -> None:
    """One answer's bytes, appended. Raises _Passing or a transport error when it ends too early."""
    have = target.tell()
    with _opened(url, {"Range": f"bytes={have}-"} if have else {}) as answer:
        if answer.status_code >= 400:
            _refused(answer, url, repo, file, target, hashes)
        if have and answer.status_code == 206:
            span = answer.headers.get("Content-Range", "")
            if span != f"bytes {have}-{file.bytes - 1}/{file.bytes}":
                target.truncate(0)
                hashes.clear()
                raise _Passing(f"{urlsplit(str(answer.url)).hostname} answers with {span!r}")
        elif have:  # the whole comes: the part begins anew
            target.truncate(0)
            hashes.clear()
            have = 0
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise _Passing("it came compressed, which was not asked for")
        for chunk in answer.iter_raw():  # as it comes: of a larger chunk a cut connection would lose the beginning
            if have + len(chunk) > file.bytes:
                target.truncate(0)
                raise HubFailure(
                    f"{file.path} of {repo} came with more than the {file.bytes:,} bytes that {site()} tells of "
                    "it; nothing was kept. Run again; if it stays so, look at the network's proxy"
                )
            target.write(chunk)
            hashes.update(chunk)
            have += len(chunk)
            to(have)
    if have < file.bytes:
        raise _Passing("it ended too early")


def _refused(answer: httpx2.Response, url: str, repo: str, file: File, target, hashes: _Hashes) -> None:
    """Raise what an answer of 400 and above means."""
    answer.read()
    status = answer.status_code
    if status == 416:  # the part cannot be of this file
        target.truncate(0)
        hashes.clear()
        raise _Passing("there is no such range of it")
    # A store's 403 is a signed address that has run out; the next try gets a new one.
    if status in PASSING or (status == 403 and _origin(str(answer.url)) != _origin(url)):
        raise _Passing(f"{urlsplit(str(answer.url)).hostname} answers {status}")
    try:
        hf_raise_for_status(answer)
    except errors.GatedRepoError:
        raise HubFailure(_gated(repo)) from None
    except errors.EntryNotFoundError:
        raise HubFailure(f"{repo} no longer gives out {file.path}; pin another revision, {OWN_COPY}") from None
    except (httpx2.HTTPError, OSError) as error:
        raise HubFailure(_said(repo, error)) from None


@contextlib.contextmanager
def _opened(url: str, headers: dict[str, str]) -> Iterator[httpx2.Response]:
    """The answer to a GET, redirects followed. The token goes to the hub's own origin only."""
    headers = {
        **build_hf_headers(library_name="llmrepro", library_version=__version__),
        "accept-encoding": "identity",
        **headers,
    }
    try:
        for _ in range(MOST_REDIRECTS + 1):
            if _origin(url) != _origin(endpoint()):
                headers.pop("authorization", None)
            asked = get_session().stream("GET", url, headers=headers, follow_redirects=False, timeout=TIMEOUT)
            with asked as answer:
                if not answer.has_redirect_location:
                    yield answer
                    return
                where = urljoin(url, answer.headers["Location"])
            if url.startswith("https:") and not where.startswith("https:"):
                raise HubFailure(
                    f"{urlsplit(url).hostname} leads from https to {urlsplit(where).scheme}; not followed"
                )
            url = where
    except errors.OfflineModeIsEnabled as error:
        raise HubFailure(_said("", error)) from None
    raise HubFailure(f"{site()} leads on more than {MOST_REDIRECTS} times; look at HF_ENDPOINT")


def _origin(url: str) -> tuple:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"https": 443, "http": 80}.get(parts.scheme)


def _file(sibling) -> File:
    return File(sibling.rfilename, sibling.size, sibling.lfs.sha256 if sibling.lfs else None, sibling.blob_id)


def _token_sent() -> bool:
    return "authorization" in build_hf_headers(library_name="llmrepro", library_version=__version__)


def _gated(repo: str) -> str:
    token = "the token that was sent has no access" if _token_sent() else "no token was found"
    return (
        f"{repo} is gated and {token}: ask for access at {site()}/{repo} with your account, set HF_TOKEN to a "
        f"token of that account (or log in with `hf auth login`), then run again; {OWN_COPY}"
    )


def _said(repo: str, error: Exception) -> str:
    """An error of the hub or of the way to it as a sentence. Addresses may be signed and are left out."""
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            "the weights are not all in the cache, and HF_HUB_OFFLINE forbids asking the hub for them; unset it, "
            f"{OWN_COPY}"
        )
    answer = getattr(error, "response", None)
    if answer is not None:
        told = answer.headers.get("X-Error-Message") or answer.reason_phrase
        if answer.status_code == 401:
            does = "refuses the token" if _token_sent() else "wants a token, and none was found,"
            return (
                f"{site()} {does} for {repo} ({told}); make one at {site()}/settings/tokens and set HF_TOKEN "
                "to it, or unset it where the repository is public"
            )
        return (
            f"{site()} answers {answer.status_code} for {repo} ({told}); look there, try again later, {OWN_COPY}"
        )
    if isinstance(error, httpx2.TransportError):
        return (
            f"{site()} could not be asked for {repo} ({_reason(error)}); check the network, its proxy and "
            f"HF_ENDPOINT, then run again: what was fetched is kept; {OWN_COPY}"
        )
    told = str(error).splitlines()[0] if str(error) else ""
    return (
        f"{repo} could not be looked up on {site()} ({type(error).__name__}: {told}); mend its name in the "
        "recipe, or HF_ENDPOINT"
    )


def _reason(error: httpx2.TransportError) -> str:
    if isinstance(error, httpx2.TimeoutException):
        return "no answer in time"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "its certificate is not trusted here"
    if isinstance(error, httpx2.UnsupportedProtocol):
        return "that is no https address"
    return "no connection" if isinstance(error, httpx2.ConnectError) else "the connection was cut"
