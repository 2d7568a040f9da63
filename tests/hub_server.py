"""A stand-in of the Hugging Face Hub on loopback, and of the store that it sends people to for large files.

It answers as the hub does: a repository's listing with hashes and sizes, 302 to a signed address on another host
for a large file (LFS, Xet), 307 to a cached address of its own for a small one, and for what it does not give the
status, X-Error-Code and X-Error-Message by which huggingface_hub tells the reasons apart. The store's ETag is not
the hub's X-Linked-Etag. What goes wrong is set on the object: cut connections, changed bytes, refused ranges.
"""

import hashlib
import json
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub import close_session, constants

from llmrepro import hub

LARGE = (".gguf", ".safetensors", ".bin")
BLOCK = 1 << 16


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Asked:
    host: str  # "hub" or "store"
    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0  # bytes of the body


@dataclass
class Hub:
    """What there is, what goes wrong, and what was asked. `commits` are {repo: {commit: {path: content}}}, the
    last one being `main`."""

    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=set)  # that are valid
    allowed: set[str] = field(default_factory=set)  # of these, those that gated repositories are given to
    cuts: list[int] = field(default_factory=list)  # after so many bytes the next answers of the store break off
    faults: list[int] = field(default_factory=list)  # statuses that the next answers of the store have
    change: int | None = None  # the offset of a byte that the store changes
    ranges: bool = True  # whether the store knows ranges
    shift: int = 0  # by how much the ranges that it answers with are others than those asked for
    hashes: bool = True  # whether listings tell hashes and sizes, as an old mirror's do not
    pause_s: float = 0.0  # after every block of the store
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    store_url: str = ""

    def add(self, repo: str, files: dict[str, bytes]) -> str:
        """A new commit of a repository, which becomes its `main`."""
        commit = hashlib.sha1(
            repr((repo, sorted(files.items()), len(self.commits.get(repo, {})))).encode()
        ).hexdigest()
        self.commits.setdefault(repo, {})[commit] = files
        return commit

    def content(self, digest: str) -> bytes | None:
        everything = (c for repo in self.commits.values() for files in repo.values() for c in files.values())
        return next((c for c in everything if sha256(c) == digest), None)

    def sent(self, host: str = "store") -> int:
        return sum(a.sent for a in self.asked if a.host == host)

    def __enter__(self):
        self._servers = []
        for host in ("hub", "store"):
            server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self, "host": host}))
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
            self._servers.append(server)
        self.url = f"http://127.0.0.1:{self._servers[0].server_port}"
        self.store_url = f"http://localhost:{self._servers[1].server_port}"  # another host by name
        return self

    def __exit__(self, *_):
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):  # whoever asked is gone
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    host: str

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.asked = Asked(self.host, self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
        self.hub.asked.append(self.asked)
        path = unquote(urlsplit(self.path).path)
        if self.host == "store":
            self._store(path)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self._listing(found[1], found[2])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*found.groups())
        elif found := re.fullmatch(r"/api/resolve-cache/models/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            content = self.hub.commits[found[1]][found[2]][found[3]]
            self._body(content, {"ETag": f'"{git_sha1(content)}"', "X-Repo-Commit": found[2]})
        else:
            self._error(404, None, "Not found")

    def _listing(self, repo: str, revision: str | None) -> None:
        if repo in self.hub.renamed:
            self._answer(307, {"Location": self.path.replace(repo, self.hub.renamed[repo])})
            return
        commit = self._commit(repo, revision, gated=False)  # a gated repository's listing is public
        if commit is None:
            return
        files = self.hub.commits[repo][commit]
        blobs = parse_qs(urlsplit(self.path).query).get("blobs") in (["true"], ["True"], ["1"]) and self.hub.hashes
        told = {
            "_id": "0",
            "id": repo,
            "modelId": repo,
            "sha": commit,
            "private": False,
            "gated": "manual" if repo in self.hub.gated else False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [_sibling(path, content, blobs) for path, content in files.items()],
        }
        self._answer(200, {"Content-Type": "application/json"}, json.dumps(told).encode())

    def _resolve(self, repo: str, revision: str, path: str) -> None:
        commit = self._commit(repo, revision, gated=True)
        if commit is None:
            return
        content = self.hub.commits[repo][commit].get(path)
        if content is None:
            self._error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        elif path.endswith(LARGE):
            told = {
                "X-Repo-Commit": commit,
                "X-Linked-Size": str(len(content)),
                "X-Linked-ETag": f'"{sha256(content)}"',
            }
            where = f"{self.hub.store_url}/{sha256(content)}?Expires=1&Signature=signed-secret"
            self._answer(302, {**told, "Location": where, "ETag": f'"{git_sha1(where.encode())}"'})
        else:
            where = f"/api/resolve-cache/models/{repo}/{commit}/{path}?etag={git_sha1(content)}"
            self._answer(307, {"X-Repo-Commit": commit, "Location": where, "ETag": f'"{git_sha1(content)}"'})

    def _commit(self, repo: str, revision: str | None, gated: bool) -> str | None:
        """The commit that is meant, or None when the answer was given already."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            return self._error(401, None, "Invalid credentials in Authorization header")
        if repo not in self.hub.commits:
            if token:
                return self._error(404, "RepoNotFound", "Repository not found")
            return self._error(401, None, "Invalid username or password.")
        if gated and repo in self.hub.gated and token not in self.hub.allowed:
            said = f"Access to model {repo} is restricted. You must have access to it and be authenticated."
            return self._error(403 if token else 401, "GatedRepo", said)
        commits = list(self.hub.commits[repo])
        if revision in (None, "main"):
            return commits[-1]
        if revision not in commits:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return revision

    def _store(self, path: str) -> None:
        content = self.hub.content(path.strip("/"))
        if "Signature=signed-secret" not in self.path or content is None:
            self._answer(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
        elif self.hub.faults:
            self._answer(self.hub.faults.pop(0), {}, b"not now")
        else:
            etag = f'"{hashlib.md5(content).hexdigest()}-1"'  # of the store, no sha256
            if self.hub.change is not None:
                at = self.hub.change
                content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
            self._body(content, {"ETag": etag, "Accept-Ranges": "bytes"} if self.hub.ranges else {})

    def _body(self, content: bytes, headers: dict[str, str]) -> None:
        start, status = 0, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        same = self.headers.get("If-Range", headers.get("ETag")) == headers.get("ETag")
        if asked and same and (self.host == "hub" or self.hub.ranges):
            start = int(asked[1]) + self.hub.shift
            if start >= len(content):
                self._answer(416, {"Content-Range": f"bytes */{len(content)}"})
                return
            status, headers = 206, {**headers, "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        self._answer(
            status,
            headers,
            content[start:],
            cut=self.hub.cuts.pop(0) if self.hub.cuts and self.host == "store" else None,
        )

    def _error(self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None) -> None:
        told = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}
        self._answer(status, {"Content-Type": "application/json", **told}, json.dumps({"error": message}).encode())

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"", cut: int | None = None) -> None:
        self.asked.status = status
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for at in range(0, len(body) if cut is None else cut, BLOCK):
            block = body[at : min(at + BLOCK, len(body) if cut is None else cut)]
            try:
                self.wfile.write(block)
            except OSError:  # whoever asked is gone
                self.close_connection = True
                return
            self.asked.sent += len(block)
            if self.host == "store" and self.hub.pause_s:
                time.sleep(self.hub.pause_s)
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


@contextmanager
def serving(monkeypatch, tmp_path):
    """A Hub that the kit takes for the hub, asked by somebody without a token, with no time lost between tries."""
    with Hub() as made:
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "HTTP_PROXY", "http_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))  # for processes that a test starts
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf-home" / "token"))
        monkeypatch.setattr(hub, "PAUSE_S", 0.01)
        close_session()
        yield made
    close_session()


def _sibling(path: str, content: bytes, blobs: bool) -> dict:
    if not blobs:
        return {"rfilename": path}
    told = {"rfilename": path, "size": len(content), "blobId": git_sha1(content)}
    if path.endswith(LARGE):  # what git has of it is a pointer
        pointer = (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256(content)}\nsize {len(content)}\n"
        )
        told["blobId"] = git_sha1(pointer.encode())
        told["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": len(pointer)}
    return told
