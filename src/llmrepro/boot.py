"""One start of a server, as it stands while it lives, and what went wrong with one that cannot be measured."""

import json
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from llmrepro import memory_use
from llmrepro.markup import showable

TAIL_LINES, TAIL_BYTES = 15, 65536
KEY = "<api key>"  # stands for the key in every file: the key itself goes through a pipe


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
    """One start of a server, alive inside `with server.boot(...)`."""

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

    def ended(self) -> str | None:
        """None while the server lives, else a sentence: its exit code or signal and the log's last lines."""
        last = self.last_words()
        return last and f"{last}; last log lines: " + (" | ".join(self.tail(5)) or "(none)")

    def ran_out_of_memory(self) -> bool:
        """Whether the server, which has died, died for want of memory."""
        return memory_use.ran_out(self.tail(200), self._signal() == signal.SIGKILL, self.oom_kills)

    def killed_by_somebody(self) -> bool:
        """Whether it was killed, and not by the system for want of memory: then it says nothing of the engine."""
        counted = None not in (memory_use.kills(), self.oom_kills)
        return self._signal() == signal.SIGKILL and counted and not self.ran_out_of_memory()

    def last_words(self) -> str | None:
        """How the server ended, without its log; None while it lives."""
        gone = self._supervisor.poll() is not None  # asked first: it writes the exit file before it ends
        found = self._exit()
        if found is None:
            return "the server and its supervisor were killed" if gone else None
        if found["signal"] is not None:
            name = signal.Signals(found["signal"]).name
            return f"the server was killed by {name}{self._whence(found['signal'])} ({found['reason']})"
        return f"the server ended with code {found['code']} ({found['reason']})"

    def _whence(self, number: int) -> str:
        """Of a SIGKILL whether it was the system, short of memory: its count of such kills tells."""
        now = memory_use.kills()
        if number != signal.SIGKILL:
            return ""
        if None in (now, self.oom_kills):
            return ", as the system does when memory runs out"
        if now > self.oom_kills:
            return ", and meanwhile the system killed a process for want of memory"
        return ", and not by the system for want of memory"

    def _exit(self) -> dict | None:
        """{code, signal, at, reason}, None while it lives or where its supervisor was killed with it."""
        try:
            return json.loads(exit_file(self.log).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def _signal(self) -> int | None:
        return (self._exit() or {}).get("signal")

    def tail(self, lines: int = TAIL_LINES) -> list[str]:
        """The log's last lines, without the key."""
        return log_tail(self.log, lines, self.api_key)


def exit_file(log: Path) -> Path:
    """Where the supervisor writes {code, signal, at, reason} of the server that writes this log."""
    return log.with_name(f"{log.stem}.exit.json")


def log_tail(log: Path, lines: int = TAIL_LINES, hidden: str = "") -> list[str]:
    """The last non-empty lines of a log, without what a terminal would obey; empty when there is none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    if hidden:
        text = text.replace(hidden, KEY)
    return [showable(line).rstrip() for line in text.splitlines() if line.strip()][-lines:]
