"""What a true clock needs beneath a request: reads that are stamped, a deadline that ends any of them, and an
interpreter that does nothing else meanwhile."""

import functools
import gc
import io
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


class Stamp:
    """When bytes last left the socket."""

    ns = 0


class _Stamped(io.RawIOBase):
    """A socket's file that stamps each read: parsing the headers takes 0.3 ms, and the first token is often
    behind them in the same read."""

    def __init__(self, raw: io.RawIOBase, stamp: Stamp) -> None:
        self._raw, self._stamp = raw, stamp

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        size = self._raw.readinto(buffer)
        self._stamp.ns = time.perf_counter_ns()
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()


def connection(kind: Callable[..., Any], stamp: Stamp, watch: "Watch", *args: Any, **kwargs: Any) -> Any:
    """A connection of that kind whose reads are stamped, and which `watch` can end."""
    made = kind(*args, **kwargs)
    # From here on the deadline can end any read: a drip of headers, or a health path that never stops.
    watch.shutdown = lambda: made.sock and made.sock.shutdown(socket.SHUT_RDWR)
    made.response_class = functools.partial(_response, made.response_class, stamp)
    return made


def _response(kind: Callable[..., Any], stamp: Stamp, *args: Any, **kwargs: Any) -> Any:
    response = kind(*args, **kwargs)
    response.fp = io.BufferedReader(_Stamped(response.fp.detach(), stamp))
    return response


@dataclass
class Watch:
    """Ends what it watches, and remembers that it did."""

    expired: threading.Event = field(default_factory=threading.Event)
    shutdown: Callable[[], None] | None = None

    def end(self) -> None:
        self.expired.set()
        if self.shutdown is not None:
            # The reader may have finished this instant; then there is no socket left to shut down.
            with suppress(OSError, ValueError, RuntimeError):
                self.shutdown()


@contextmanager
def deadline(timeout_s: float):
    """Ends a blocked read when timeout_s has passed: a socket timeout alone starts anew with every byte."""
    watch = Watch()
    timer = threading.Timer(min(timeout_s, threading.TIMEOUT_MAX), watch.end)
    timer.daemon = True
    timer.start()
    try:
        yield watch
    finally:
        timer.cancel()


# Otherwise a thread that waits for the interpreter gets it after 5 ms, and so late are its reads while another's
# answer is parsed. With eight streams of 250 tokens a second the latest hundredth of reads: 5 ms, with this 0.7.
TURN_S = 0.0005
_lock = threading.Lock()
_measured = 0  # requests at this moment, of all threads
_before = (True, 0.005)  # whether collections were on, and how long a turn was


@contextmanager
def undisturbed():
    """While any request of any thread is measured: no garbage collection, since a full one with pandas loaded
    stops the clock for tens of ms, and short turns for threads. The last to end puts back what the first found."""
    global _measured, _before
    with _lock:
        if _measured == 0:
            _before = gc.isenabled(), sys.getswitchinterval()
            gc.disable()
            sys.setswitchinterval(min(TURN_S, _before[1]))
        _measured += 1
    try:
        yield
    finally:
        with _lock:
            _measured -= 1
            if _measured == 0:
                collecting, turn_s = _before
                sys.setswitchinterval(turn_s)
                if collecting:
                    gc.enable()
