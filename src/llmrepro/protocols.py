"""What a round of a workload asks, step by step, and how its long prompts are cut. Nothing is asked here.

In a `prefix` round every request is the history of the next: a case that is asked without the steps before it
would measure something else. So each case names the steps that the same server must have been asked before it.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from llmrepro.workload import CASES, Workload

SLOW_PREFILL_TPS, SLOW_DECODE_TPS = 60.0, 40.0  # two slow cores, one of them for the engine
# Where a text may be cut: behind a word, or where a script has no spaces or words are endless, within it.
PIECE = re.compile(r"[!-~]{1,24}|\s+|\S{1,4}")
MOST_PADDING = 48  # tokens
SHORTEST = 20  # tokens of a salted prompt: its head has half of them
SHORT_TOKENS = 60  # of a prompt in the cache, or of a chat prompt


class MeasureFailure(RuntimeError):
    """Measuring cannot go on; what was measured is kept. The text says why and what to do."""


@dataclass(frozen=True)
class Step:
    """One request of a round. A step that no case names only brings the cache into its state.

    `head` numbers the round's heads, which differ in their salt from the first character on; `changed` has
    one character of it replaced. `cold`: for the estimate of time, it counts as not cached. `fresh`: it is
    asked of a server just started, with the weights in the page cache, or `evicted` from it. `slot`: the
    server's prompt cache is saved after it, or restored before it.
    """

    case: str
    head: int = 0
    changed: bool = False
    tail: int = 0
    cold: bool = False
    fresh: bool = False
    evicted: bool = False
    slot: Literal["save", "restore"] | None = None


def steps(workload: Workload) -> list[Step]:
    """The steps of one round, in order."""
    if workload.kind == "prefix":
        fill = workload.fill
        return [
            Step("uncached", cold=True),
            Step("new_tail", tail=1),
            Step("new_tail_2", tail=2),
            Step("changed_head", changed=True, tail=1, cold=True),
            Step("original_again", tail=1),
            *(Step(f"fill_{n}", head=n, cold=True) for n in range(1, fill + 1)),
            *(
                [Step("newest_after_fill", head=fill, tail=1), Step("oldest_after_fill", cold=True)]
                if fill
                else []
            ),
        ]
    if workload.kind == "restart":
        return [
            Step("first", cold=True, fresh=True, evicted=True),
            Step("second", slot="save" if workload.restore else None),
            Step("restarted", cold=True, fresh=True),
            *([Step("restored", fresh=True, slot="restore")] if workload.restore else []),
        ]
    return [Step(case, cold=workload.kind in ("prefill", "ladder")) for case in workload.cases]


def needed(workload: Workload, case: str) -> list[Step]:
    """The step of a case, last, after those that the same boot must have been asked in the same round."""
    whole = steps(workload)
    end = next(i for i, s in enumerate(whole) if s.case == case)
    if workload.kind not in CASES:
        return [whole[end]]
    begin = max((i for i in range(end + 1) if whole[i].fresh), default=0)
    return whole[begin : end + 1]


def seconds(workload: Workload, case: str) -> float:
    """Seconds that a case may take on two slow cores, with the steps of no case right before it."""
    own = needed(workload, case)
    start = max((i + 1 for i, s in enumerate(own[:-1]) if s.case in workload.cases), default=0)
    streams = int(case) if workload.kind == "concurrency" else 1
    return streams * sum(
        _prompt_tokens(workload, s) / SLOW_PREFILL_TPS + workload.max_tokens / SLOW_DECODE_TPS for s in own[start:]
    )


def _prompt_tokens(workload: Workload, step: Step) -> int:
    if not step.cold:
        return SHORT_TOKENS
    return int(step.case) if workload.kind in ("prefill", "ladder") else workload.head_tokens


def salt(*of: object) -> str:
    """Eight digits that the same labels always give. Digits, because a tokenizer takes them one by one or in
    threes: another digit in a place changes no count."""
    return str(int(hashlib.sha256(" ".join(map(str, of)).encode()).hexdigest(), 16))[:8]


def head(salt: str) -> str:
    """The line that salted prompts begin with."""
    return f"{salt}: a note.\n"


def with_own_line(text: str, salt: str) -> str:
    """A prompt behind a line of its own, so that no cache of an earlier prompt reaches into it."""
    return f"[run {salt}]\n{text}"


def changed(head: str) -> str:
    """A salted head with its first character, a digit, replaced by the next one."""
    return f"{(int(head[0]) + 1) % 10}{head[1:]}"


def salted(text: str, tokens: int, salt: str, count: Callable[[str], int]) -> str:
    """A prompt of exactly `tokens` tokens by `count`: a line that begins with the salt, then as much of `text`
    as fits.

    The salt stands at the head, so that no prefix of an earlier prompt can be reused. Raises MeasureFailure
    when the text is too short or the count cannot be met.
    """
    begin, longest = head(salt), count(head(salt) + text)
    if longest < tokens:
        raise MeasureFailure(
            f"a prompt of {tokens} tokens is wanted and the workload's text has {longest}; give it a longer text"
        )
    ends = [0, *(found.end() for found in PIECE.finditer(text))]
    low, high = 0, len(ends) - 1
    while low < high:  # most of it that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(begin + text[: ends[middle]]) <= tokens else (low, middle - 1)
    prompt = begin + text[: ends[low]]
    for _ in range(MOST_PADDING):
        if count(prompt) >= tokens:
            break
        prompt += " a"  # a token of its own in the vocabularies met so far
    if count(prompt) != tokens:
        raise MeasureFailure(f"no prompt of exactly {tokens} tokens could be cut; choose another length")
    return prompt
