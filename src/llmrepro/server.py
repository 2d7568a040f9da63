"""Starts an engine's server under the supervisor, waits until it really answers, and leaves nothing behind.

Ready means a completed generation: servers say healthy minutes before they can answer, and after they died.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import requests

from llmrepro import guard, guard_log, memory_use, supervisor
from llmrepro.client import Question, Record, ask

POLL_S = 0.05  # how finely the start-up times are resolved
REQUEST_TIMEOUT_S = (0.5, 1.0)  # connect, read: a stuck answer must not hold up the polling
SUPERVISOR_START_S = 60.0
TAIL_LINES, TAIL_BYTES = 15, 65536
KEY = "<api key>"  # stands for the key in every file: the key itself goes through a pipe
# What engines write when another program holds the port: errno 98 in its several spellings.
PORT_TAKEN = re.compile(
    r"address already in use|address in use|EADDRINUSE|errno[ :=]*98\b|could ?n[o']t bind"
    r"|failed to bind|unable to bind|port \d+ is already in use|port is already allocated",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Command:
    """How one server is started. `env` is its whole environment; without `cwd` it runs in the run folder.

    `cleanup` are commands that end what `argv` starts outside of its own tree, such as a container; they are run
    in any case, before `argv` itself is told to end and again after.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: Path | None = None
    cleanup: list[list[str]] = field(default_factory=list)


class ServerFailure(RuntimeError):
    """A server that cannot be measured: what happened, the log's last lines, and what to do next.

    `reason`: port_taken, binary_missing, permission_denied, not_started, died, never_ready, supervisor.
    """

    def __init__(self, reason: str, sentence: str, next_step: str, log: Path, log_tail: list[str]):
        self.reason, self.sentence, self.next_step = reason, sentence, next_step
        self.log, self.log_tail = log, log_tail
        lines = "".join(f"\n    | {line}" for line in log_tail) or " (it is empty)"
        super().__init__(f"{sentence}\n  Last lines of {log}:{lines}\n  Next: {next_step}.")


@dataclass
class Boot:
    """One start of a server, alive inside `with boot(...)`."""

    number: int
    url: str
    api_key: str = field(repr=False)
    log: Path
    pid: int
    startup: dict[str, float | None]  # seconds from spawn; None where the server does not offer the path
    started_ns: int  # perf_counter_ns at spawn
    _supervisor: subprocess.Popen = field(repr=False)
    main_pid: int | None = None  # of the server itself, where `pid` is that of a container's client
    oom_kills: int | None = field(default_factory=memory_use.kills)
    guard_file: Path | None = None  # what its sampler tells for `guard_log.read`; None without a sampler
    answered: Callable[[], None] = field(default=lambda: None, repr=False)  # called after each of its answers

    def ended(self) -> str | None:
        """None while the server lives, else a sentence: its exit code or signal and the log's last lines."""
        last = self.last_words()
        return last and f"{last}; last log lines: " + (" | ".join(self.tail(5)) or "(none)")

    def ran_out_of_memory(self) -> bool:
        """Whether the server, which has died, died for want of memory."""
        killed = "SIGKILL" in (self.last_words() or "")
        return memory_use.ran_out(self.tail(200), killed, self.oom_kills)

    def last_words(self) -> str | None:
        """How the server ended, without its log; None while it lives."""
        gone = self._supervisor.poll() is not None  # asked first: it writes the exit file before it ends
        try:
            found = json.loads(exit_file(self.log).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return "the server and its supervisor were killed" if gone else None
        if found["signal"] is not None:
            name = signal.Signals(found["signal"]).name
            oom = ", as the system does when memory runs out" if found["signal"] == signal.SIGKILL else ""
            return f"the server was killed by {name}{oom} ({found['reason']})"
        return f"the server ended with code {found['code']} ({found['reason']})"

    def tail(self, lines: int = TAIL_LINES) -> list[str]:
        """The log's last lines, without the key."""
        return log_tail(self.log, lines, self.api_key)


def exit_file(log: Path) -> Path:
    """Where the supervisor writes {code, signal, at, reason} of the server that writes this log."""
    return log.with_name(f"{log.stem}.exit.json")


def log_tail(log: Path, lines: int = TAIL_LINES, hidden: str = "") -> list[str]:
    """The last non-empty lines of a log; empty when there is none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    if hidden:
        text = text.replace(hidden, KEY)
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def free_port() -> int:
    """A loopback port that nothing listens on now; another program may still take it first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def boot(
    command: Callable[[int, str], Command],
    *,
    folder: Path,
    number: int,
    ready: Question,
    timeout_s: float = 900,
    grace_s: float = 10,
    health_path: str = "/health",
    status_file: Path | None = None,
    sampler: list[str] | None = None,
    on_wait: Callable[[float, str], None] | None = None,
) -> Iterator[Boot]:
    """A server that has answered `ready`, while the context lasts; then it and all below it are ended.

    `command(port, api_key)` says how to start it. Writes `folder/boots/<number>.log` and beside it what was
    started, how it ended and what the supervisor did. `on_wait(seconds, what)` is called while it starts.
    `sampler` is a command that runs beside it and may stop it, see telemetry.
    Raises ServerFailure; a port that was taken meanwhile is tried again once, on another.
    """
    with ExitStack() as tree:
        for last_try in (False, True):
            api_key = f"k{secrets.token_urlsafe(24)}"  # one in 64 begins with -, and would be an option
            port = free_port()
            running = tree.enter_context(
                _leashed(
                    command(port, api_key), port, api_key, folder.resolve(), number, grace_s, status_file, sampler
                )
            )
            try:
                _until_ready(running, ready, timeout_s, health_path, on_wait or (lambda _s, _what: None))
                break
            except ServerFailure as failure:
                if failure.reason != "port_taken" or last_try:
                    raise
            tree.close()
            running.log.replace(running.log.with_name(f"{number}.port-taken.log"))
        yield running


@contextmanager
def _leashed(
    command: Command,
    port: int,
    api_key: str,
    folder: Path,
    number: int,
    grace_s: float,
    status_file: Path | None,
    sampler: list[str] | None,
) -> Iterator[Boot]:
    """The started server, not yet ready. On leaving, the whole tree is ended."""
    boots = folder / "boots"
    boots.mkdir(parents=True, exist_ok=True)
    log, notes = boots / f"{number}.log", boots / f"{number}.supervisor.log"
    told = folder / guard_log.name(number)
    for stale in (log, notes, exit_file(log), told):
        stale.unlink(missing_ok=True)
    spec = {
        "parent_pid": os.getpid(),
        "grace_s": grace_s,
        "secret": KEY,
        "server": _program(command, log, folder),
        "cleanup": command.cleanup,
        "sampler": None,
        "exit_file": str(exit_file(log)),
        "status_file": status_file and str(status_file.resolve()),
    }
    if sampler is not None:
        program = _program(Command(sampler, guard.environment()), boots / f"{number}.sampler.log", folder)
        spec["sampler"] = {**program, "tells": str(told)}
    path = boots / f"{number}.spec.json"
    path.write_text(json.dumps(spec, indent=1).replace(api_key, KEY) + "\n", encoding="utf-8")
    with open(notes, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-I", supervisor.__file__, str(path)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    try:
        said = _first_words(process, api_key)
        if "pid" not in said:
            raise _not_started(said, command, log, notes)
        yield Boot(
            number=number,
            url=f"http://127.0.0.1:{port}",
            api_key=api_key,
            log=log,
            pid=said["pid"],
            startup=dict.fromkeys(
                ("startup.port_s", "startup.models_s", "startup.health_s", "startup.first_completion_s")
            ),
            started_ns=said["started_ns"],
            _supervisor=process,
            guard_file=told if sampler is not None else None,
        )
    finally:
        _stop(process, grace_s + 2 * len(command.cleanup) * supervisor.CLEANUP_S)


def _program(command: Command, log: Path, folder: Path) -> dict:
    return {
        "argv": list(command.argv),
        "env": dict(command.env),
        "cwd": str(command.cwd or folder),
        "log": str(log),
    }


def _first_words(process: subprocess.Popen, api_key: str) -> dict:
    """Hand the key over and read what the supervisor says of the start; {} when it says nothing."""
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{api_key}\n".encode())
    line, end = b"", time.monotonic() + SUPERVISOR_START_S
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], max(0, end - time.monotonic()))[0]:
            return {}
        part = process.stdout.read(4096)
        if not part:
            return {}
        line += part
    return json.loads(line)


def _not_started(said: dict, command: Command, log: Path, notes: Path) -> ServerFailure:
    program = command.argv[0]
    if "failed" not in said:
        return ServerFailure(
            "supervisor",
            "The supervisor did not start the server.",
            "mend what the lines above name, then run again",
            notes,
            log_tail(notes),
        )
    if said["errno"] == errno.ENOENT:
        return ServerFailure(
            "binary_missing",
            f"The server's program is not there: {said['failed']}.",
            "remove the engine's environment and prepare it again",
            log,
            log_tail(log),
        )
    if said["errno"] == errno.EACCES:
        return ServerFailure(
            "permission_denied",
            f"The server's program may not be run: {said['failed']}.",
            f"make it executable (chmod +x {program}), and check that its disk is not mounted noexec",
            log,
            log_tail(log),
        )
    return ServerFailure(
        "not_started",
        f"The system refused to start {program}: {said['failed']}.",
        "check that it was built for this machine, and prepare it again",
        log,
        log_tail(log),
    )


def _stop(process: subprocess.Popen, polite_s: float) -> None:
    """Have the supervisor end the tree, and wait until it has. An interrupt meanwhile skips the grace.

    `polite_s` is what it gives the server and the clean-up before it kills.
    """
    limit_s = polite_s + supervisor.REST_S + supervisor.STUCK_S + 10
    try:
        with contextlib.suppress(OSError):
            process.stdin.write(b"stop\n")
        process.stdin.close()
        over = _over(process, limit_s)
    except KeyboardInterrupt:
        process.stdin.close()
        process.terminate()
        _over(process, limit_s)
        raise
    finally:
        process.stdout.close()
    if not over:
        warnings.warn(
            f"the supervisor (pid {process.pid}) cannot end the server in {limit_s:g} s: a driver "
            "may hold it; look with ps before measuring again",
            RuntimeWarning,
            stacklevel=2,
        )


def _over(process: subprocess.Popen, within_s: float) -> bool:
    """Wait until both levels of the supervisor have ended: then nothing holds its output open any more."""
    end = time.monotonic() + within_s
    while select.select([process.stdout], [], [], max(0, end - time.monotonic()))[0]:
        if not process.stdout.read(4096):
            process.wait()
            return True
    return False


def _until_ready(
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
