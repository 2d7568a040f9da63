"""A stand-in for the forge of a publication: serves what it is given, and keeps what it was asked with."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from llmrepro import git_files

COMMIT = "c" * 40


class Forge:
    """`files` are by path: bytes, or (status, location) of an answer without a body."""

    def __init__(self, url: str):
        self.url, self.files, self.seen = url, {}, []

    def source(self, path: str, **piece) -> dict:
        return {"repo": "https://github.com/a/b", "commit": COMMIT, "path": path, **piece}


@contextmanager
def forge(monkeypatch):
    """A Forge at whose address everything of github.com is looked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.removeprefix(f"/a/b/{COMMIT}/")
            made.seen.append((path, dict(self.headers)))
            answer = made.files.get(path, (404, None))
            status, location = (200, None) if isinstance(answer, bytes) else answer
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.end_headers()
            if isinstance(answer, bytes):
                self.wfile.write(answer)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Forge(f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setitem(git_files.FORGES, "github.com", made.url + "/{repo}/{commit}/{path}")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
