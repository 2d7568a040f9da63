"""A stand-in for a server that never ends its answer, and never falls silent."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def dripping(head: bytes, drop: bytes, drops: int = 200):
    """Its address: there it answers `head`, then `drop` ten times a second. After `drops` of them it cuts the
    connection, so that a test that waits for its end fails instead of hanging."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(OSError):
                self.wfile.write(head)
                for _ in range(drops):
                    if over.wait(0.1):
                        break
                    self.wfile.write(drop)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()
