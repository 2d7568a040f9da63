"""Prompts of given lengths as the server counts them, the chat template's own tokens included."""

from collections.abc import Callable
from math import ceil

from llmrepro import protocols


class Lengths:
    """Cuts prompts to a number of prompt tokens. `count` counts the tokens of a text with the server's own
    tokenizer; without one lengths are estimated, from what the server counted of the prompts before.

    A long text is wanted for a long prompt: a shorter one is repeated, each copy behind its number.
    """

    def __init__(self, count: Callable[[str], int] | None):
        self._count = count
        self._template = 0  # tokens that the chat template adds
        self._seen: list[tuple[int, int]] = []  # (characters, prompt tokens), the newest last

    def learn(self, text: str, prompt_tokens: int | None) -> None:
        """What the server counted of a prompt with this text."""
        if prompt_tokens is None:
            return
        if self._count is None:
            self._seen = [*(s for s in self._seen if s[0] != len(text)), (len(text), prompt_tokens)][-2:]
        else:
            self._template = max(0, prompt_tokens - self._count(text))

    def prompt(self, text: str, tokens: int, salt: str) -> str:
        """A prompt that begins with the salt. Exact where tokens are counted: raises MeasureFailure when that
        cannot be met, as when the template alone is longer."""
        if self._count is None:
            return _estimated(text, self._characters(tokens), salt)
        wanted = tokens - self._template
        if wanted < protocols.SHORTEST:
            raise protocols.MeasureFailure(
                f"a prompt of {tokens} tokens is wanted, and with its salt and template one has "
                f"{self._template + protocols.SHORTEST} at least; choose a greater length"
            )
        copies = ceil(wanted / max(1, self._count(text)))
        return protocols.salted(_repeated(text, copies + 1), wanted, salt, self._count)

    def _characters(self, tokens: int) -> int:
        """How long a text the server is expected to count as so many tokens."""
        if not self._seen:
            return tokens * 4
        (chars, counted), *more = self._seen[::-1]
        if more and counted != more[0][1]:
            slope = (chars - more[0][0]) / (counted - more[0][1])
            return round(chars + slope * (tokens - counted))
        return round(tokens * chars / max(1, counted))


def _repeated(text: str, copies: int) -> str:
    return "\n\n".join([text, *(f"[{n}]\n{text}" for n in range(2, copies + 1))])


def _estimated(text: str, characters: int, salt: str) -> str:
    head = protocols.head(salt)
    return (head + _repeated(text, ceil(characters / len(text)) + 1))[: max(characters, len(head))]
