"""Server-sent events: bytes to payloads, as they arrive."""

from collections.abc import Iterable

DONE = b"[DONE]"
IGNORED = (b"event", b"id", b"retry", b"data")  # fields without news, and `data` with no value
SHOWN_BYTES = 200  # of a line that is none


class Reader:
    """Cuts bytes into SSE payloads (bytes, data lines joined) and pings (None) as they arrive.

    Lines end in LF, CRLF or CR (WHATWG HTML, 9.2.6). A split character or line waits for its rest.
    A line of no known field is a payload too, which the standard would drop: it is what is left of an event that
    was damaged on its way, or an older server's `error: {...}`. Before the first event it waits for one, since
    then it may be a line of a body that is no stream.
    """

    def __init__(self) -> None:
        self.spoke = False
        self._partial: list[bytes] = []
        self._data: list[bytes] = []
        self._after_cr = False
        self._stray = b""

    def feed(self, chunk: bytes) -> list[bytes | None]:
        if self._after_cr and chunk[:1] == b"\n":
            chunk = chunk[1:]
        self._after_cr = chunk[-1:] == b"\r"
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = chunk.split(b"\n")
        if len(lines) > 1 and self._partial:
            lines[0] = b"".join((*self._partial, lines[0]))
            self._partial.clear()
        if lines[-1]:
            self._partial.append(lines[-1])
        return self._lines(lines[:-1])

    def close(self) -> list[bytes | None]:
        """What the end of the stream completes: a server may close without the last blank line."""
        lines = [b"".join(self._partial), b""]
        self._partial.clear()
        return self._lines(lines)

    def _lines(self, lines: Iterable[bytes]) -> list[bytes | None]:
        out: list[bytes | None] = []
        for line in lines:
            if not line:
                if self._data:
                    out.append(b"\n".join(self._data))
                    self._data.clear()
                continue
            if not self.spoke:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.startswith(b"data:"):
                self.spoke = True
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line.startswith(b":"):
                self.spoke = True
                out.append(None)
            elif line.partition(b":")[0] not in IGNORED:
                self._stray = self._stray or line[:SHOWN_BYTES]
            if self.spoke and self._stray:
                out.append(self._stray)
                self._stray = b""
        return out
