"""A line that says how far a long step is and how long it still takes, in a terminal and in a notebook."""

import contextlib
import os
import sys
import time

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle
from tqdm import tqdm

from llmrepro.markup import showable

BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left{postfix}"
WIDEST = 100


class Progress:
    """`with Progress("measure", total) as bar: bar.to(n, "note")`.

    In a notebook one output is replaced in place, so that the saved notebook keeps only the last state. A kernel
    that runs headless for a terminal draws on that terminal (LLMREPRO_TERMINAL, set by `llmrepro run`). Elsewhere
    the first and the last line are printed.
    """

    def __init__(self, what: str, total: float, *, every_s: float = 0.5):
        self.what, self.total, self.every_s = what, total, every_s
        self.done, self._note, self._shown_at, self._seen = 0.0, "", 0.0, False
        self._start = time.monotonic()
        shell = get_ipython()
        self._handle = DisplayHandle() if shell is not None and hasattr(shell, "kernel") else None
        self._terminal = _terminal()
        self._columns = WIDEST if self._terminal is None else _columns(self._terminal)

    def __enter__(self):
        self._show()
        return self

    def __exit__(self, *_):
        self._show(last=True)
        if self._terminal is not None:
            self._terminal.close()

    def to(self, done: float, note: str | None = None) -> None:
        """Say that `done` of the total is reached and what is going on; shown at most every `every_s` seconds."""
        self.done = done
        self._note = self._note if note is None else note
        if time.monotonic() - self._shown_at >= self.every_s:
            self._show()

    def _show(self, last: bool = False) -> None:
        self._shown_at = time.monotonic()
        line = tqdm.format_meter(
            round(self.done),
            round(self.total),
            self._shown_at - self._start,
            ncols=self._columns,
            prefix=self.what,
            postfix=self._note,
            unit="",
            bar_format=BAR,
        )
        with contextlib.suppress(OSError):  # nobody looks any more: the work goes on
            if self._handle is not None:
                show = self._handle.update if self._seen else self._handle.display
                show({"text/plain": line}, raw=True)
            if self._terminal is not None:
                self._terminal.write(f"\r\x1b[K{showable(line)}" + ("\n" if last else ""))
                self._terminal.flush()
            elif self._handle is None and (last or not self._seen):
                print(line, flush=True)
        self._seen = True


def _columns(terminal) -> int:
    """One less than the terminal has, so that a line never wraps; a terminal that tells none is taken as wide."""
    return min(WIDEST, (os.get_terminal_size(terminal.fileno()).columns or WIDEST + 1) - 1)


def _terminal():
    """The terminal to draw on, opened for writing, or None."""
    name = os.environ.get("LLMREPRO_TERMINAL") or (os.ttyname(1) if sys.stdout.isatty() and os.isatty(1) else None)
    try:
        return open(name, "w", encoding="utf-8") if name else None
    except OSError:
        return None
