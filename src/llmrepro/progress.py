"""A line that says how far a long step is and how long it still takes, in a terminal and in a notebook."""

import contextlib
import sys
import time

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle
from tqdm import tqdm


class Progress:
    """`with Progress("measure", total) as bar: bar.to(n, "note")`.

    In a notebook one output is replaced in place, so that the saved notebook keeps only the last state;
    a terminal gets a moving line, and a file or pipe only the first and the last.
    """

    def __init__(self, what: str, total: float, *, every_s: float = 0.5):
        self.what, self.total, self.every_s = what, total, every_s
        self.done, self._note, self._shown_at = 0.0, "", 0.0
        self._start = time.monotonic()
        shell = get_ipython()
        self._handle = DisplayHandle() if shell is not None and hasattr(shell, "kernel") else None
        self._seen = False

    def __enter__(self):
        self._show()
        return self

    def __exit__(self, *_):
        self._show(last=True)

    def to(self, done: float, note: str = "") -> None:
        """Say that `done` of the total is reached; shown at most every `every_s` seconds."""
        self.done, self._note = done, note
        if time.monotonic() - self._shown_at >= self.every_s:
            self._show()

    def _show(self, last: bool = False) -> None:
        self._shown_at = time.monotonic()
        line = tqdm.format_meter(round(self.done), round(self.total), self._shown_at - self._start, ncols=100,
                                 prefix=self.what, postfix=self._note, unit="",
                                 bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left{postfix}")
        with contextlib.suppress(BrokenPipeError):
            if self._handle is not None:
                show = self._handle.update if self._seen else self._handle.display
                show({"text/plain": line}, raw=True)
            elif sys.stdout.isatty():
                print(f"\r{line}", end="\n" if last else "", flush=True)
            elif last or not self._seen:
                print(line, flush=True)
        self._seen = True
