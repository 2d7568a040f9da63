"""A plain request takes its time and no more, also of the threads that nobody waits for."""

import threading
import time

import pytest
from dripping import dripping

from llmrepro import exchange


def test_a_connection_whose_body_drips_is_let_go(monkeypatch):
    monkeypatch.setattr(exchange, "WHOLE_S", 0.3)
    with dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" ") as url:
        with pytest.raises(exchange.Late, match="did not end its answer within 0.3 s"):
            exchange.fetch(url, None)
        until_s = time.monotonic() + 10
        while left := [t for t in threading.enumerate() if t.name == "exchange"]:
            assert time.monotonic() < until_s, f"{left} still reads"
            time.sleep(0.02)


def test_what_the_work_of_an_exchange_raises_is_raised_to_who_waits():
    def work():
        raise KeyError("x")

    with pytest.raises(KeyError):
        exchange.Bounds(whole_s=5, most_bytes=1).wait(work)
    assert exchange.Bounds(whole_s=5, most_bytes=1).wait(lambda: None) is None
