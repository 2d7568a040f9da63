"""Holds one server on a leash: when whoever measures goes, however it goes, nothing of the server is left.

A script of its own (the standard library only), run as `python -I supervisor.py SPEC.json` in its own
session, with the read end of a pipe as stdin. SPEC.json holds `parent_pid`, `grace_s`, `server` and `sampler`
(null, or `{argv, env, cwd, log}`; of the sampler `tells` as well, see below), `cleanup` (commands that take away
what is no descendant, such as a container: run with the server's environment before the server is told to end,
and again after), `exit_file`,
`status_file` (a path or null) and `secret` (null, or the text in argv and env that stands for a secret: then
the first line on stdin is the secret, so that no file ever holds it).

Both levels hold a lock on SPEC.json as long as anything of the server may be left.

stdin: `stop` on a line stops in order; the end of the pipe without it, or the end of `parent_pid`, means that
whoever measured has died. stdout: one JSON line, `{pid, started_ns}` or `{failed, errno}`; started_ns is
`time.perf_counter_ns()`, which all processes of a Linux machine share.

What this took, each found by trying: a process group, PR_SET_PDEATHSIG and a mark in the environment each
miss some descendant, so both levels are child subreapers, and every orphan below becomes their child. A
forked child of the parent keeps the pipe open, so the parent's pidfd is watched too. There are two levels
because either may be killed: the guard clears up after the worker, the worker is told when the guard dies.

The sampler is started first, and the server once the file `tells` is there: then it watches. A sampler that ends
with STOP_CODE has found that the server must not go on: the server is ended, and the last line of `tells` has the
reason. However else the sampler ends, measuring goes on.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
REST_S = 2.0  # what is left once the server's main process is gone has this long to end by itself
STUCK_S = 30.0  # a process in uninterruptible sleep (a driver) cannot be killed: then say so and go
CLEANUP_S = 30.0  # for each clean-up command: a container's runtime may hang
ARMED_S = 15.0  # for the sampler to watch: opening a GPU's driver takes seconds where nothing else uses it
STOP_CODE = 3
OOM_SCORE = 500  # of 1000: short of memory, the machine ends the server and not the notebook
LIBC = ctypes.CDLL(None, use_errno=True)


def main(spec_path: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it says `stop`
    with open(spec_path, encoding="utf-8") as file:
        spec = json.load(file)
    held = os.open(spec_path, os.O_RDONLY)  # by both levels, and inherited by nothing that they start
    with contextlib.suppress(OSError):  # a disk without locks: then nobody waits for this one
        fcntl.flock(held, fcntl.LOCK_EX)
    try:
        parent = os.pidfd_open(spec["parent_pid"])
    except ProcessLookupError:
        return 1
    except OSError:  # a sandbox without pidfd: the pipe alone has to do
        parent = None
    if os.getppid() != spec["parent_pid"]:  # asked after the pidfd, which then is the parent's
        return 1
    secret = _first_line() if spec.get("secret") else ""
    if spec.get("secret") and not secret:
        return 1
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        code = 1
        try:
            if os.getppid() == guard:
                code = Worker(spec, parent, secret).run()
        except BaseException:
            log(traceback.format_exc())
        os._exit(code)  # the guard's own clean-up is not the worker's
    return _guard(spec, worker, secret)


def _guard(spec: dict, worker: int, secret: str) -> int:
    """Wait for the worker; when it was killed itself, end what it held. Returns the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _frame: _send(n, [worker]))
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == worker:
            break
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return 0
    log(f"the worker ended with {code}")
    clean_up(spec)
    end_tree(_reap, spec["grace_s"], lambda: False)
    hide(spec["server"]["log"], secret)
    if not os.path.exists(spec["exit_file"]):
        write_exit(spec, None, "its supervisor was killed, so the server was ended too")
    return 1


class Worker:
    """Starts the server and the sampler, waits for a reason to end them, and ends them."""

    def __init__(self, spec: dict, parent: int | None, secret: str):
        self.spec, self.parent, self.secret = spec, parent, secret
        self.signals: list[int] = []
        self.said = b""  # what came on stdin
        self.pipe_ended = False
        self.server: int | None = None  # its pid while it lives
        self.sampler: int | None = None  # likewise
        self.forbidden = ""  # why the sampler wants the server ended
        self.ending = False
        self.reason = "it ended by itself"

    def run(self) -> int:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda n, _frame: self.signals.append(n))
        signal.signal(signal.SIGCHLD, lambda _n, _frame: None)  # a handler: it makes the wake-up byte
        self._start_sampler()
        try:
            self.server, started_ns = start(self.spec["server"], self.spec.get("secret"), self.secret)
        except OSError as error:
            write_exit(self.spec, None, f"it could not be started: {error}")
            say({"failed": str(error), "errno": error.errno})
        else:
            say({"pid": self.server, "started_ns": started_ns})
            self._wait(wake)
        self.ending = True
        status = content(self.spec["status_file"])
        heard = len(self.signals)
        clean_up(self.spec)
        end_first(self.reap, self.server, self.spec["grace_s"], lambda: len(self.signals) > heard)
        clean_up(self.spec)  # for what came to be after it was first looked for
        left = end_tree(self.reap, self.spec["grace_s"], lambda: len(self.signals) > heard)
        if left:
            log(f"could not be ended (uninterruptible): {left}")
        hide(self.spec["server"]["log"], self.secret)
        # With another status somebody has gone on with the run while this server was being ended.
        if self._parent_died() and content(self.spec["status_file"]) == status:
            interrupt(self.spec["status_file"], self.spec["parent_pid"])
        return 0

    @property
    def stopped(self) -> bool:
        """Whether the parent asked for an orderly stop."""
        return b"stop\n" in self.said

    def reap(self) -> bool:
        return _reap(self._ended)

    def _start_sampler(self) -> None:
        """Start it and wait until it watches, or there is something else to do."""
        sampler = self.spec["sampler"]
        if sampler is None:
            return
        try:
            self.sampler, _ = start(sampler, None, "")
        except OSError as error:  # no telemetry is no reason not to measure
            log(f"the sampler could not be started: {error}")
        told = [fd for fd in (0, self.parent) if fd is not None]
        end = time.monotonic() + ARMED_S
        while self.sampler is not None and not os.path.exists(sampler["tells"]) and time.monotonic() < end:
            if select.select(told, [], [], 0.02)[0] or self.signals:
                return
            self.reap()

    def _wait(self, wake: int) -> None:
        """Return when the server has ended or there is a reason to end it, which is then `self.reason`."""
        poll = select.poll()
        for fd in (0, wake, *([self.parent] if self.parent is not None else [])):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _event in poll.poll(1000)}
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
            self.reap()
            if 0 in ready:
                self._read_pipe()
            if self.server is None:
                return
            if self.stopped:
                self.reason = "it was stopped in order"
            elif self.pipe_ended or self.parent in ready:
                self.reason = f"the process that measured (pid {self.spec['parent_pid']}) was gone"
            elif self.forbidden:
                self.reason = f"the guard stopped it: {self.forbidden}"
            elif self.signals:
                self.reason = f"its supervisor was told to end by {signal.Signals(self.signals[0]).name}"
            else:
                continue
            log(f"ending the server: {self.reason}")
            return

    def _read_pipe(self) -> None:
        data = os.read(0, 4096)
        self.said += data
        self.pipe_ended |= not data

    def _parent_died(self) -> bool:
        """Whether the parent is gone by now without having asked for a stop, or since it asked."""
        watched = [fd for fd in (0 if not self.pipe_ended else None, self.parent) if fd is not None]
        ready = select.select(watched, [], [], 0)[0]
        if 0 in ready:
            self._read_pipe()
        return self.parent in ready or (self.pipe_ended and not self.stopped)

    def _ended(self, pid: int, status: int) -> None:
        if pid == self.server:
            self.server = None
            write_exit(self.spec, status, self.reason)
        if pid == self.sampler:
            self.sampler = None
            code = os.waitstatus_to_exitcode(status)
            if code == STOP_CODE:
                self.forbidden = last_reason(self.spec["sampler"]["tells"])
            elif not self.ending:
                log(f"the sampler ended with {code}: what the machine does is written down no longer")


def start(program: dict, placeholder: str | None, secret: str) -> tuple[int, int]:
    """Start one program in a session of its own: (pid, perf_counter_ns just before). Raises OSError."""

    def fill(text: str) -> str:
        return text.replace(placeholder, secret) if placeholder else text

    worker = os.getpid()

    def below() -> None:  # runs between fork and exec
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the last resort: both levels killed at once
        if os.getppid() != worker:
            os._exit(1)
        with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as file:
            if int(file.read()) < OOM_SCORE:
                file.seek(0)
                file.write(str(OOM_SCORE))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)

    with open(os.open(program["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        started_ns = time.perf_counter_ns()
        child = subprocess.Popen(
            [fill(word) for word in program["argv"]],
            cwd=program["cwd"],
            env={name: fill(value) for name, value in program["env"].items()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=below,
        )
    child.returncode = 0  # _reap waits for it; Popen must not
    return child.pid, started_ns


def end_first(reap, first: int | None, grace_s: float, hurry) -> None:
    """Tell the server's main process to end, since an engine ends its own workers best; return once it has, or
    after `grace_s`. `reap()` collects ended children and is true when there are none; `hurry()` true skips the
    waiting."""
    if first is None:
        return
    _send(signal.SIGTERM, [first])
    end = time.monotonic() + grace_s
    while time.monotonic() < end and not hurry():
        if reap() or parent_of(first) != os.getpid():
            return
        time.sleep(0.02)


def clean_up(spec: dict) -> None:
    """Run the clean-up commands in order, each for CLEANUP_S at most; what they say goes into this log.

    Before anything is told to end, since podman's monitor is a descendant: once that is killed its container
    cannot be removed, and `podman run` told to end while it makes a network leaves that behind.
    """
    for argv in spec.get("cleanup", []):
        try:
            process = subprocess.Popen(
                argv,
                cwd="/",  # the run folder may be gone
                env=spec["server"]["env"],
                stdin=subprocess.DEVNULL,
                stdout=2,
                stderr=2,
                start_new_session=True,
            )
        except OSError as error:
            log(f"clean-up could not be started: {error}")
            continue
        try:
            process.wait(CLEANUP_S)
        except subprocess.TimeoutExpired:
            log(f"clean-up does not end, so it is killed: {argv}")
            process.returncode = 0  # with the tree


def end_tree(reap, grace_s: float, hurry) -> list[int]:
    """End every descendant of this process. Returns the pids that could not be ended.

    All are told and have REST_S, or `grace_s` if that is less; then all are killed. `reap` and `hurry` as above.
    """
    _send(signal.SIGTERM, descendants())
    end = time.monotonic() + min(REST_S, grace_s)
    while time.monotonic() < end and not hurry():
        if reap():
            return []
        time.sleep(0.02)
    end = time.monotonic() + STUCK_S
    while not reap():
        _send(signal.SIGSTOP, descendants())  # frozen, nothing forks between listing and killing
        left = descendants()
        _send(signal.SIGKILL, left)
        if time.monotonic() > end:
            return left
        time.sleep(0.02)
    return []


def parent_of(pid: int) -> int | None:
    """The parent's pid, None when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])  # a name may hold blanks and brackets
    except (OSError, IndexError):
        return None


def descendants() -> list[int]:
    """Pids of everything below this process, zombies too: a leader that ended may still have live threads."""
    children: dict[int | None, list[int]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        children.setdefault(parent_of(pid), []).append(pid)
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _reap(ended=lambda pid, status: None) -> bool:
    """Collect ended children, telling `ended` of each. True when this process has no child left at all."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            return False
        ended(pid, status)


def _send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def write_exit(spec: dict, status: int | None, reason: str) -> None:
    """Write down how the server ended, or that nobody knows."""
    code = None if status is None else os.waitstatus_to_exitcode(status)
    number = -code if code is not None and code < 0 else None
    told = {"code": code if number is None else None, "signal": number, "at": now(), "reason": reason}
    write_json(spec["exit_file"], told)


def content(path: str | None) -> bytes:
    """What a file holds; nothing where it cannot be read."""
    try:
        with open(path or os.devnull, "rb") as file:
            return file.read()
    except OSError:
        return b""


def interrupt(status_file: str | None, parent_pid: int) -> None:
    """Write into status.json that the run was interrupted, when it still says that the run is going on."""
    try:
        with open(status_file or os.devnull, encoding="utf-8") as file:
            status = json.load(file)
        if status.get("outcome") != "running":
            return
    except (OSError, ValueError, AttributeError):
        return
    during, folder = status.get("stage", "the run"), os.path.dirname(os.path.abspath(status_file))
    told = {
        "reason": f"the process that measured (pid {parent_pid}) ended during {during} without a word, so its "
        "supervisor ended the server",
        "next_step": f"go on with resume={folder!r}",
    }
    write_json(status_file, {**status, "outcome": "interrupted", "at": now(), **told})


def last_reason(path: str) -> str:
    """The `reason` of the last of a file's JSON lines."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.loads(file.readlines()[-1])["reason"]
    except (OSError, ValueError, LookupError, TypeError):
        return f"{path} does not tell why"


def hide(path: str, secret: str) -> None:
    """Overwrite the secret where a server wrote its own command line into its log."""
    try:
        with open(path, "r+b") as file:
            text = file.read()
            if secret and secret.encode() in text:
                file.seek(0)
                file.write(text.replace(secret.encode(), b"*" * len(secret.encode())))
    except OSError as error:
        log(f"could not remove the key from {path}: {error}")


def write_json(path: str, value: dict) -> None:
    """Write a file whole or not at all; a full disk is logged, since the tree has still to be ended."""
    part = f"{path}.part"
    try:
        with open(part, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        log(f"could not write {path}: {error}")


def _first_line() -> str:
    """The first line on stdin, byte by byte: what follows it is the worker's to read. Empty at the end."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return ""
        line += byte
    return line[:-1].decode()


def prctl(option: int, value: int) -> None:
    if LIBC.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def say(fact: dict) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more: the pipe will tell
        os.write(1, json.dumps(fact).encode() + b"\n")


def log(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{now()} [{os.getpid()}] {text}\n".encode())


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
