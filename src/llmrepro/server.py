"""Starts an engine's server under the supervisor, waits until it really answers, and leaves nothing behind."""

import contextlib
import errno
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from llmrepro import earlier_boots, guard, guard_log, locks, supervisor
from llmrepro.boot import KEY, Boot, ServerFailure, exit_file, log_tail
from llmrepro.client import Question
from llmrepro.readiness import until_ready

SUPERVISOR_START_S = 60.0


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
    on_wait = on_wait or (lambda _s, _what: None)
    earlier_boots.wait(folder.resolve() / "boots", on_wait)
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
                until_ready(running, ready, timeout_s, health_path, on_wait)
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
            pass_fds=locks.descriptors(),  # and to nothing that it starts: until nothing of the server is left
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
