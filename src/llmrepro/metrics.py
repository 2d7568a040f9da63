"""Per-request metric definitions: pure functions from a Record to a number, or None where it cannot be told.

Times are seconds after t_send, rates are tokens per second. A rate that would need a guess is
None, and stands as untold on a page.
`DEFINITIONS` maps metric ids to them, so that old records can be read again under a new definition.
"""

import math
import re
from collections import Counter
from collections.abc import Callable

from llmrepro.client import Event, Record

ANSWERED = ("ok", "early_stop")  # statuses of answers that are measured
MIN_DECODE_TOKENS = 16
LEAST_TIMING, LARGEST_TIMING = 1e-6, 1e12
MIN_PREFILL_TOKENS = 256
# Latin, Greek and Cyrillic letters and digits form words; scripts without spaces count by the character.
WORD = re.compile("[0-9A-Za-z_\u00c0-\u024f\u0370-\u04ff]+|\\S")

Definition = Callable[[Record], float | int | None]


def ttfr_s(record: Record) -> float | None:
    """Time to the first event of any kind: role chunk, ping, progress, text."""
    return record.events[0].t_s if record.events else None


def ttft_s(record: Record) -> float | None:
    """Time to the first event with text, reasoning or a tool call; never a role chunk or an empty delta."""
    first = _first_spoken(record)
    return None if first is None else record.events[first].t_s


def ttfat_s(record: Record) -> float | None:
    """Time to the first answer text after reasoning; untold where the answer had no reasoning."""
    reasoned = False
    for event in record.events:
        kinds = _kinds(event)
        reasoned = reasoned or "reasoning" in kinds
        if reasoned and "text" in kinds:
            return event.t_s
    return None


def reasoning_s(record: Record) -> float | None:
    """ttfat_s - ttft_s: how long an answer's reader waits after the first token; untold where one of both is."""
    answer_s, first_s = ttfat_s(record), ttft_s(record)
    return None if answer_s is None or first_s is None else answer_s - first_s


def reasoning_tokens(record: Record) -> int | None:
    """Output tokens told up to and including the last event of reasoning before the first answer text, all of
    that event's where it holds both; untold without reasoning, and where no count runs along."""
    reached, last, of_last = 0, None, 0
    for event in record.events:
        reached += event.tokens or 0
        if "reasoning" in _kinds(event):
            last, of_last = event, reached
        if last is not None and "text" in _kinds(event):
            break
    return None if last is None or last.tokens is None else of_last or None


def output_tokens(record: Record) -> int | None:
    """N, as the server tells it; `record.output_tokens_source` says how. Never a number of chunks."""
    return record.output_tokens


def prompt_tokens(record: Record) -> int | None:
    """Prompt tokens as the server counts them, chat template included."""
    return record.prompt_tokens


def cached_tokens(record: Record) -> int | None:
    """Prompt tokens taken from the cache; untold, never 0, where the server does not tell."""
    return record.cached_tokens


def prefix_hit_rate(record: Record) -> float | None:
    """Cached / prompt tokens of one request; untold where either is."""
    n, cached = record.prompt_tokens, record.cached_tokens
    return cached / n if n and cached is not None and cached <= n else None


def k0(record: Record) -> int | None:
    """Output tokens told up to and including the first event with text; untold where no count runs along."""
    first = _first_spoken(record)
    if first is None or record.events[first].tokens is None:
        return None
    # Zero beside text is a count that lags behind, so it tells nothing.
    return sum(event.tokens or 0 for event in record.events[: first + 1]) or None


def t_first_s(record: Record) -> float | None:
    """When the decode rate starts: the first event with text."""
    return ttft_s(record)


def t_last_s(record: Record) -> float | None:
    """When the last token came: the last event that tells tokens, or where none does, the last with text.

    An answer that ends by itself ends with a token that has no text (it is in the counts): then the finish
    event. Counts that come after the finish belong to the finish.
    """
    finish = next((event.t_s for event in record.events if "finish" in _kinds(event)), math.inf)
    if any(event.tokens is not None for event in record.events):
        last = max((event.t_s for event in record.events if event.tokens), default=None)
    elif finish < math.inf and record.finish_reason != "length":
        last = finish
    else:
        last = max((event.t_s for event in record.events if _speaks(event)), default=None)
    return None if last is None else min(last, finish)


def decode_tps(record: Record) -> float | None:
    """(N - k0) / (t_last - t_first); with k0 unknown (N - 1) in its place, see `decode_tps_bound`.

    Untold with fewer than two events of tokens, or fewer than 16 tokens after the first event.
    """
    n, first_s, last_s = record.output_tokens, t_first_s(record), t_last_s(record)
    if n is None or first_s is None or last_s is None or last_s <= first_s:
        return None
    if sum(1 for event in record.events if _speaks(event) or event.tokens) < 2:
        return None
    after_first = n - (k0(record) or 1)
    return after_first / (last_s - first_s) if after_first >= MIN_DECODE_TOKENS else None


def decode_tps_bound(record: Record) -> float | None:
    """How far above the truth `decode_tps` may be, as a share of it: 0 with k0 known, untold without a rate.

    With k0 unknown the first event may hold as many tokens as the largest one. That one holds at most
    k_max = N - (events with text) + 1, as every event with text brings a token, and judged by its characters
    ceil(N * largest / all); the smaller counts. The rate lies between (1 - bound) and 1 times the value.
    """
    n = record.output_tokens
    if n is None or decode_tps(record) is None:
        return None
    if k0(record) is not None:
        return 0.0
    chars = [event.chars for event in record.events if _speaks(event)]
    k_max = n - len(chars) + 1
    if sum(chars):  # tool calls alone show no characters
        k_max = min(k_max, math.ceil(n * max(chars) / sum(chars)))
    return max(0, k_max - 1) / (n - 1)


def decode_tps_published_2026_10(record: Record) -> float | None:
    """(N - 1) / (t_done - t_first), t_done the end of the stream: as the 2026-10 publication defines it."""
    n, first_s, done_s = record.output_tokens, t_first_s(record), record.t_done_s
    if n is None or n < 2 or first_s is None or done_s is None or done_s <= first_s:
        return None
    return (n - 1) / (done_s - first_s)


def decode_tps_published_2026_08(record: Record) -> float | None:
    """(N - 1) / (t_done - t_event), t_event the first event of any kind: the completions suite of the 2026-10
    publication, taken over from its record of 2026-08."""
    n, first_s, done_s = record.output_tokens, ttfr_s(record), record.t_done_s
    if n is None or n < 2 or first_s is None or done_s is None or done_s <= first_s:
        return None
    return (n - 1) / (done_s - first_s)


def e2e_tps(record: Record) -> float | None:
    """N / (t_last - t_send)."""
    n, last_s = record.output_tokens, t_last_s(record)
    return n / last_s if n and last_s else None


def throughput_tps(together: list[Record]) -> float | None:
    """Sum of N / (last t_last - first t_send) of requests that were sent at once; untold where one's N is."""
    counts, lasts = [r.output_tokens for r in together], [t_last_s(r) for r in together]
    if not together or None in counts or None in lasts:
        return None
    sent_ns = [r.t_send_ns for r in together]
    end_s = max((sent - min(sent_ns)) / 1e9 + last for sent, last in zip(sent_ns, lasts, strict=True))
    return sum(counts) / end_s if end_s > 0 else None


def server_peak_gib(record: Record) -> float | None:
    """Peak resident memory of the server's processes until right after this answer, since each began."""
    return (record.memory or {}).get("server_peak")


def prefill_tps(record: Record) -> float | None:
    """(prompt tokens - cached) / ttft; untold under 256 prompt tokens or with an unknown cached share."""
    n, cached, first_s = record.prompt_tokens, record.cached_tokens, ttft_s(record)
    if n is None or cached is None or not first_s or n < MIN_PREFILL_TOKENS or cached > n:
        return None
    return (n - cached) / first_s


def prefill_tps_published_2026_10(record: Record) -> float | None:
    """prompt tokens / ttft, cached or not: the definition of the 2026-10 publication."""
    first_s = ttft_s(record)
    return record.prompt_tokens / first_s if record.prompt_tokens and first_s else None


def prefill_tps_published_2026_08(record: Record) -> float | None:
    """prompt tokens / time to the first event of any kind, as in `decode_tps_published_2026_08`'s suite."""
    first_s = ttfr_s(record)
    return record.prompt_tokens / first_s if record.prompt_tokens and first_s else None


def decode_tps_server(record: Record) -> float | None:
    """(predicted_n - 1) / predicted_ms from llama.cpp's timings, (N - k0) / generation_time_ms from vLLM's.

    Recomputed: builds differ in whether `predicted_per_second` counts the first token, and vLLM's
    `tokens_per_second` counts the prefill. vLLM's interval runs from the first output to the last.
    """
    n, ms = _timing(record, "predicted_n"), _timing(record, "predicted_ms")
    after_first = n - 1 if n else 0
    if n is None and record.output_tokens is not None:
        after_first, ms = record.output_tokens - (k0(record) or 1), _timing(record, "generation_time_ms")
    return after_first / ms * 1e3 if ms and after_first >= MIN_DECODE_TOKENS else None


def prefill_tps_server(record: Record) -> float | None:
    """prompt_n / prompt_ms from llama.cpp's timings, whose prompt_n leaves cached tokens out; (prompt tokens -
    cached) / time_to_first_token_ms from vLLM's, which runs from scheduling to the first output.

    Untold under 256 prompt tokens, cached ones counted in, as for `prefill_tps`.
    """
    n, ms = _timing(record, "prompt_n"), _timing(record, "prompt_ms")
    if n is None and record.prompt_tokens is not None and record.cached_tokens is not None:
        n, ms = record.prompt_tokens - record.cached_tokens, _timing(record, "time_to_first_token_ms")
    if not n or not ms or (record.prompt_tokens or n) < MIN_PREFILL_TOKENS:
        return None
    return n / ms * 1e3


def acceptance(record: Record) -> float | None:
    """Accepted / drafted tokens of speculation, as llama.cpp's timings tell them or vLLM's metrics (0.32,
    --per-request-spec-decode-metrics); untold when nothing was drafted."""
    drafted, accepted = drafts(record)
    return accepted / drafted if drafted and accepted is not None else None


def drafts(record: Record) -> tuple[float | None, float | None]:
    """(drafted tokens, of them accepted) of one request; None where the answer does not tell. llama.cpp does not
    tell where it drafted nothing."""
    drafted, accepted = _timing(record, "draft_n"), _timing(record, "draft_n_accepted")
    if drafted is None:
        told = _speculation(record)
        drafted, accepted = _number(told, "num_draft_tokens"), _number(told, "num_accepted_draft_tokens")
    if drafted is not None and accepted is not None and accepted > drafted:
        return None, None  # more than there were: neither is believed
    return drafted, accepted


def acceptance_length(record: Record) -> float | None:
    """1 + accepted / steps that checked a draft: what such a step gives, the token that it makes itself included.
    Steps are told by llama.cpp's running timings and by vLLM's metrics. Those without a draft are left out, so
    that it says how long drafts last and not how fast an answer comes: see `tokens_per_step`.
    """
    accepted, checks = drafts(record)[1], draft_checks(record)
    return 1 + accepted / checks if checks and accepted is not None else None


def draft_checks(record: Record) -> float | None:
    """Steps of one request that checked a draft; None where they are not told."""
    return record.draft_checks or _number(_speculation(record), "num_spec_steps")


def tokens_per_step(record: Record) -> float | None:
    """Output tokens per step of the engine. Of a request: N / (N - accepted), since a step gives one token of its
    own and those that it accepts; the step that ends the prompt gives the first. Of a workload: from the engine's
    counters before and after it, warm-ups included. llama.cpp counts a step more for every --batch-size of a
    prompt but the last, vLLM counts none that gave no token. Untold of a request whose drafts are.
    """
    n, (_, accepted) = record.output_tokens, drafts(record)
    return n / (n - accepted) if n and accepted is not None and accepted < n else None


def f_keep(record: Record) -> float | None:
    """Of the slot's earlier prompt the share that was kept, as llama.cpp logs it; untold where it logs none."""
    return _number(record.engine_log or {}, "f_keep")


def repetition_share(record: Record) -> float | None:
    """Share of the most frequent token id, or where ids are untold, of the most frequent word.

    From 0.9 on an answer says one thing over and over, and its rate is no claim about real text.
    """
    if record.same_token_share is not None:
        return record.same_token_share
    words = Counter(WORD.findall(record.reasoning + " " + record.text))
    return max(words.values()) / words.total() if words else None


DEFINITIONS: dict[str, Definition] = {
    "ttft_s": ttft_s,
    "ttfr_s": ttfr_s,
    "ttfat_s": ttfat_s,
    "reasoning_s": reasoning_s,
    "reasoning_tokens": reasoning_tokens,
    "output_tokens": output_tokens,
    "prompt_tokens": prompt_tokens,
    "cached_tokens": cached_tokens,
    "prefix_hit_rate": prefix_hit_rate,
    "k0": k0,
    "t_first_s": t_first_s,
    "t_last_s": t_last_s,
    "decode_tps": decode_tps,
    "decode_tps.published_2026_10": decode_tps_published_2026_10,
    "decode_tps.published_2026_08": decode_tps_published_2026_08,
    "decode_tps.server": decode_tps_server,
    "e2e_tps": e2e_tps,
    "prefill_tps": prefill_tps,
    "prefill_tps.published_2026_10": prefill_tps_published_2026_10,
    "prefill_tps.published_2026_08": prefill_tps_published_2026_08,
    "prefill_tps.server": prefill_tps_server,
    "acceptance": acceptance,
    "acceptance_length": acceptance_length,
    "tokens_per_step": tokens_per_step,
    "memory.server_peak_gib": server_peak_gib,
    "f_keep": f_keep,
    "repetition_share": repetition_share,
}


def _first_spoken(record: Record) -> int | None:
    return next((i for i, event in enumerate(record.events) if _speaks(event)), None)


def _speaks(event: Event) -> bool:
    return not _kinds(event).isdisjoint(("text", "reasoning", "tool"))


def _kinds(event: Event) -> set[str]:
    return set(event.kind.split("+"))


def _speculation(record: Record) -> dict:
    """What vLLM tells of one request's drafts; {} where it tells nothing."""
    told = (record.timings or {}).get("speculative_decoding")
    return told if isinstance(told, dict) else {}


def _timing(record: Record, key: str) -> float | None:
    return _number(record.timings or {}, key)


def _number(holder: dict, key: str) -> float | None:
    value = holder.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # outside of this it is no count and no time in ms, and its ratio would be no number
    return value if value == 0 or LEAST_TIMING <= value <= LARGEST_TIMING else None
