"""Waits until a started server is ready, and tells when it could do what on the way.

Ready means a completed generation: servers say healthy minutes before they can answer, and after they died.
"""

import re
import socket
import threading
import time
from collections.abc import Callable

import requests

from llmrepro.boot import Boot, ServerFailure
from llmrepro.client import Question, Record, ask

POLL_S = 0.05  # how finely the start-up times are resolved
REQUEST_TIMEOUT_S = (0.5, 1.0)  # connect, read: a stuck answer must not hold up the polling
# What engines write when another program holds the port: errno 98 in its several spellings.
PORT_TAKEN = re.compile(
    r"address already in use|address in use|EADDRINUSE|errno[ :=]*98\b|could ?n[o']t bind"
    r"|failed to bind|unable to bind|port \d+ is already in use|port is already allocated",
    re.IGNORECASE,
)


def until_ready(
    running: Boot, ready: Question, timeout_s: float, health_path: str, on_wait: Callable[[float, str], None]
) -> None:
    """Fill `running.startup`; return once `ready` was answered. Raises ServerFailure."""
    port = int(running.url.rpartition(":")[2])
    paths = {"startup.models_s": "/v1/models", "startup.health_s": health_path}
    waiting = f"port {port} is closed"
    with requests.Session() as session:
        session.trust_env = False  # a proxy variable must not catch loopback
        session.headers["Authorization"] = f"Bearer {running.api_key}"
        while True:
            tick = time.monotonic()
            _check(running, timeout_s, waiting)
            on_wait(_since_spawn(running), waiting)
            if running.startup["startup.port_s"] is None and _listens(port):
                running.startup["startup.port_s"] = _since_spawn(running)
            if running.startup["startup.port_s"] is not None:
                for name, path in list(paths.items()):
                    status = _get(session, running.url + path)
                    if status in (200, 404):  # 404: this server has no such path to wait for
                        running.startup[name] = _since_spawn(running) if status == 200 else None
                        del paths[name]
                    else:
                        waiting = f"GET {path} answers {status}"
                if not paths:
                    record = _asked(running, ready, timeout_s, on_wait)
                    first = next(
                        (event for event in record.events if {"text", "reasoning"} & set(event.kind.split("+"))),
                        None,
                    )
                    if record.status == "ok" and first is not None:
                        break
                    waiting = (
                        "a completion comes back empty"
                        if record.status == "ok"
                        else f"a completion ends as {record.status}: {record.error}"
                    )
            time.sleep(max(0.005, POLL_S - (time.monotonic() - tick)))
    _check(running, float("inf"), waiting)  # what answered may be another program's server
    running.startup["startup.first_completion_s"] = (record.t_send_ns - running.started_ns) / 1e9 + first.t_s


def _check(running: Boot, timeout_s: float, waiting: str) -> None:
    """Raises ServerFailure when the server has ended or its time is over."""
    seconds = _since_spawn(running)
    last = running.last_words()
    if last is None and seconds <= timeout_s:
        return
    tail = running.tail()
    if last is not None and PORT_TAKEN.search("\n".join(tail)):
        raise ServerFailure(
            "port_taken",
            f"Another program has {running.url} and not the server: {last}.",
            "run again; if it repeats, see with `ss -ltnp` which program opens so many ports",
            running.log,
            tail,
        )
    if last is not None:
        raise ServerFailure(
            "died",
            f"After {seconds:.1f} s, before its first completion, {last}.",
            "mend what the last lines of its log name, then run again",
            running.log,
            tail,
        )
    raise ServerFailure(
        "never_ready",
        f"After {timeout_s:g} s the server is alive and not ready: {waiting}.",
        "read its log; give it more time, or a smaller context or model",
        running.log,
        tail,
    )


def _asked(running: Boot, ready: Question, timeout_s: float, on_wait: Callable[[float, str], None]) -> Record:
    """The record of `ready`; asked in a thread, so that the server's end is seen meanwhile."""
    answers: list[Record] = []
    left_s = max(1.0, timeout_s - _since_spawn(running))
    thread = threading.Thread(
        daemon=True,
        target=lambda: answers.append(
            ask(running.url, ready, api_key=running.api_key, timeout_s=left_s, silence_s=left_s)
        ),
    )
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        if not answers:
            _check(running, timeout_s + 5, "a completion has not come back")
            on_wait(_since_spawn(running), "first completion")
    if not answers:
        raise RuntimeError("the first question could not be asked; see the traceback above")
    return answers[0]


def _since_spawn(running: Boot) -> float:
    return (time.perf_counter_ns() - running.started_ns) / 1e9


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=REQUEST_TIMEOUT_S[0]).close()
    except OSError:
        return False
    return True


def _get(session: requests.Session, url: str) -> int | str:
    """The status of a GET, or why there is none."""
    try:
        return session.get(url, timeout=REQUEST_TIMEOUT_S, allow_redirects=False).status_code
    except requests.RequestException as error:
        return f"nothing ({type(error).__name__})"
