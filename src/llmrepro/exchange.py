"""One plain request to an API: its answer bounded in bytes, in silence and in whole time, and without the key."""

import http.client
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, quote_plus

import requests
import urllib3

from llmrepro.stream import storable

SILENCE_S, WHOLE_S, MOST_BYTES = 30.0, 120.0, 64 << 20
HIDDEN = "<api key>"
SHORTEST_HIDDEN = 8  # characters
# Everything that sockets, http.client, urllib3 and requests raise when a server misbehaves.
TRANSPORT_ERRORS = (
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
    ValueError,
)

T = TypeVar("T")


class Unread(requests.RequestException):
    """An answer that was not taken whole; the text says why, as the end of a sentence about who answers."""


class Late(Unread):
    """One that was not at its end in time."""


class TooLarge(Unread):
    """One of more bytes than are taken."""


@dataclass(frozen=True)
class Bounds:
    """What an exchange may take: seconds from now to its end, and bytes of one answer, as decoded."""

    whole_s: float
    most_bytes: int
    began_s: float = field(default_factory=time.monotonic)

    def wait(self, work: Callable[[], T]) -> T:
        """What `work` gives or raises; Late when it does neither in time."""
        ended: list[tuple[T | None, BaseException | None]] = []

        def run() -> None:
            try:
                ended.append((work(), None))
            except BaseException as error:
                ended.append((None, error))

        # A socket's timeout starts anew with every byte, also of the headers: only a thread can be left waiting.
        thread = threading.Thread(target=run, name="exchange", daemon=True)
        thread.start()
        thread.join(self._left_s())
        found, error = ended[0] if ended else (None, self._late())
        if error is not None:
            raise error
        return found

    def read(self, answer: requests.Response) -> bytes:
        """The body of an answer asked for with stream=True. Raises Late, TooLarge, or an error of urllib3."""
        content = bytearray()
        while chunk := answer.raw.read1(65536, decode_content=True):
            content += chunk
            if len(content) > self.most_bytes:
                raise TooLarge(f"answers with more than {self.most_bytes >> 20} MiB")
            if self._left_s() <= 0:
                raise self._late()
        return bytes(content)

    def _left_s(self) -> float:
        return self.began_s + self.whole_s - time.monotonic()

    def _late(self) -> Late:
        return Late(f"did not end its answer within {self.whole_s:g} s")


class Answer(NamedTuple):
    """What a server answered to a plain request."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    def read(self, api_key: str | None) -> Any:
        """Parsed JSON, or the text that is none, as a run folder can hold it, without the key; a number that JSON
        has no word for is None. Raises ValueError or RecursionError for JSON that cannot be read."""
        if "json" not in self.headers.get("Content-Type", ""):
            return without(self.content.decode(errors="replace"), api_key)
        found = json.loads(self.content, parse_float=_finite, parse_constant=lambda word: None)
        return without(storable(found), api_key)


def asked(where: str, api_key: str | None, body: dict | None = None) -> Any:
    """What a server answers to `fetch`, as `Answer.read` gives it; None without a good answer."""
    try:
        answer = fetch(where, api_key, body)
        return answer.read(api_key) if answer.status < 400 else None
    except (*TRANSPORT_ERRORS, RecursionError):
        return None


def fetch(where: str, api_key: str | None, body: dict | None = None) -> Answer:
    """A plain GET, or a POST of a body. Redirects are not followed.

    Raises one of TRANSPORT_ERRORS; of them Unread when the answer is not at its end after WHOLE_S or beyond
    MOST_BYTES.
    """
    bounds = Bounds(WHOLE_S, MOST_BYTES)
    return bounds.wait(lambda: _exchange(where, api_key, body, bounds))


def _exchange(where: str, api_key: str | None, body: dict | None, bounds: Bounds) -> Answer:
    with requests.Session() as session:
        session.trust_env = False  # a proxy variable must not catch loopback, and .netrc is not asked for
        session.headers["Accept-Encoding"] = "identity"
        if api_key:
            session.headers["Authorization"] = f"Bearer {api_key}"
        method = "GET" if body is None else "POST"
        with session.request(
            method, where, json=body, timeout=SILENCE_S, allow_redirects=False, stream=True
        ) as answer:
            return Answer(answer.status_code, answer.headers, bounds.read(answer))


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def without(value: Any, api_key: str | None) -> Any:
    """A value whose strings do not hold the key, however it is spelt in them: plain, escaped, or as in a URL.

    Names of fields stay. A key shorter than 8 characters is not looked for: in free text it may be any word, or
    a part of one. llmrepro itself writes no key, whatever its length.
    """
    if not api_key or len(api_key) < SHORTEST_HIDDEN:
        return value
    return _replaced(value, _spellings(api_key))


def _spellings(api_key: str) -> list[str]:
    found = {api_key}
    for _ in range(2):  # an error that is quoted in an error
        found |= {form(s)[1:-1] for s in found for form in (json.dumps, repr)}
    found |= {quote(api_key), quote(api_key, safe=""), quote_plus(api_key)}
    return sorted(found, key=len, reverse=True)


def _replaced(value: Any, spellings: list[str]) -> Any:
    if isinstance(value, str):
        for spelling in spellings:
            value = value.replace(spelling, HIDDEN)
        return value
    if isinstance(value, dict):
        return {name: _replaced(one, spellings) for name, one in value.items()}
    return [_replaced(one, spellings) for one in value] if isinstance(value, list) else value
