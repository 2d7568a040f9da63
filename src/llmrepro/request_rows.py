"""Metric rows (see rows.py) of a workload's requests: of each case, of the whole, and how the requests ended."""

from collections import defaultdict
from math import sqrt
from statistics import fmean

from llmrepro import intervals, jobs, ladder, metrics, outcomes, pairing, rows, speculation, terms
from llmrepro.client import Record
from llmrepro.metrics import ANSWERED
from llmrepro.workload import CASES, Workload

PER_CASE = (
    *("ttfr_s", "ttft_s", "decode_tps", "decode_tps.server", "prefill_tps", "prefill_tps.server", "e2e_tps"),
    *("reasoning_tokens", "reasoning_s"),  # of answers that reason
)
PER_CASE_CACHED = ("ttfr_s", "ttft_s", "prefix_hit_rate")  # a cached prompt has no prefill speed
PER_SUITE = ("decode_tps", "decode_tps.published_2026_10", "ttft_s")
COUNTS = ("prompt_tokens", "output_tokens", "cached_tokens")
REPEATED = 0.9  # share of one token id from which on an answer says nothing about real text


def of_workload(
    workload: Workload, server: str, records: list[Record], claimed: set[str], boots: int = 1
) -> list[dict]:
    """Rows of one server's answers, warm-ups left out; `records` have as their boot the first of their replicate.

    A metric that is not told of every run is told where it is `claimed`. A complete run has `boots` boots.
    """
    found = []
    good = [r for r in records if r.status in ANSWERED]
    where = {"server": server, "workload": workload.id}
    usual = PER_CASE_CACHED if workload.kind in CASES else PER_CASE
    usual = (*usual, "memory.server_peak_gib") if workload.kind == "ladder" else usual
    suites = PER_SUITE if workload.kind == "chat" else ()
    for case in workload.cases:
        mine = [r for r in good if r.case == case]
        for metric in (*usual, *_claimed(claimed, usual)):
            by_boot = _by_boot(metric, mine)
            if by_boot:
                told = {"statistic": "mean", **_answers(metric, workload, mine)}
                found.append(rows.sampled(metric, by_boot, case=case, **told, **where))
        for metric in COUNTS if mine else ():
            counted = [metrics.DEFINITIONS[metric](r) for r in mine]
            found.append(rows.constant(metric, counted, case=case, boots=len({r.boot for r in mine}), **where))
        found += _outcome(workload, [r for r in records if r.case == case], boots, case=case, **where)
    whole = workload.kind in ("chat", "prefill")  # else its cases are no suite
    for metric in (*suites, *(_claimed(claimed, suites) if whole else ())):
        found += _suite(workload, metric, good, **where)
    if workload.kind == "prefill":
        found += _slope(good, **where)
    if workload.kind == "concurrency":
        found += _throughput(workload, good, **where)
    if workload.rises:
        found += ladder.reached(workload, records, **where)
    return found


def _claimed(claimed: set[str], told: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(m for m in _DEFINITIONS if m in claimed and m not in (*told, *COUNTS))


# What rows tell of a request: of the kit's definitions those that are published metrics. Drafts: speculation.py.
_DEFINITIONS = {
    name: definition
    for name, definition in metrics.DEFINITIONS.items()
    if name in terms.METRICS and name not in speculation.METRICS
}


def _answers(metric: str, workload: Workload, records: list[Record]) -> dict:
    """How long the answers were, and whether they can stand for a speed."""
    told = [r.output_tokens for r in records if r.output_tokens is not None]
    speed = metric.startswith(("decode_tps", "e2e_tps"))
    return {"output_tokens": fmean(told) if told else None, "gate": _gate(workload, records) if speed else None}


def _gate(workload: Workload, records: list[Record]) -> str | None:
    """Why a speed is no speed of what was asked: answers cut short, or one token over and over by its id."""
    if workload.ignore_eos:
        short = [r for r in records if r.output_tokens is not None and r.output_tokens != workload.max_tokens]
        if short:
            return (
                f"{len(short)} of {len(records)} answers have not the {workload.max_tokens} tokens asked for "
                f"under ignore_eos (one has {short[0].output_tokens})"
            )
    same = [
        r
        for r in records
        if (r.same_token_share or 0) >= REPEATED and (r.output_tokens or 0) >= metrics.MIN_DECODE_TOKENS
    ]
    if same:
        return f"{len(same)} of {len(records)} answers are one token for {REPEATED:.0%} or more of their length"
    return None


def _outcome(of: Workload, records: list[Record], boots: int, *, case: str, **where) -> list[dict]:
    """How a case's requests ended: "ok" when every one was answered, else the first bad status, and how.

    A failure that is the engine's own at a length goes before others (see outcomes.py). `http_status` is that of
    the one told; `unasked` are requests of a complete run that were skipped or are missing. A request that was
    asked again after the server died in it counts as it ended the last time. None of it where nothing was asked.
    """
    last = {(r.boot, r.repeat, r.stream_number): r for r in records if r.status != "skipped"}
    if not last:
        return []
    asked = list(last.values())
    bad = [r for r in asked if (ladder.failed(r) if of.rises else r.status not in ANSWERED)]
    bad.sort(key=lambda r: not outcomes.of_length(ladder.ending(r), r.http_status))
    unasked = max(boots * of.repeats * jobs.streams(of, case) - len(asked), 0)
    again = sum(r.status == "engine_died" for r in records) - sum(r.status == "engine_died" for r in asked)
    tokens = ladder.asked_tokens(of, case, asked)
    said = [f"{len(asked)} of {len(asked) + unasked} asked"] if unasked else []
    said += [f"{len(asked) - len(bad)} of {len(asked)} requests answered"]
    said += [ladder.reason(bad[0])] if bad else []
    said += [f"{again} died and was asked again"] if again else []
    return [
        rows.row(
            "outcome",
            ladder.ending(bad[0]) if bad else "ok",
            case=case,
            n=len(asked),
            boots=len({r.boot for r in asked}),
            note="; ".join(said),
            prompt_tokens=tokens,
            http_status=bad[0].http_status if bad else None,
            unasked=unasked,
            **where,
        )
    ]


def _throughput(of: Workload, records: list[Record], **where) -> list[dict]:
    """Output tokens of all streams per second, from the first request sent to the last token of any, a round each.
    A round in which a stream has no answer, or no count of tokens, has none."""
    rounds: dict[tuple, list[Record]] = defaultdict(list)
    for record in records:
        rounds[record.case, record.boot, record.repeat].append(record)
    found = []
    for case in of.cases:
        by_boot: dict[int, list[float]] = defaultdict(list)
        for (name, boot, _), together in sorted(rounds.items()):
            if name == case and len(together) == jobs.streams(of, case):
                speed = metrics.throughput_tps(together)
                if speed is not None:
                    by_boot[boot].append(speed)
        if by_boot:
            found.append(rows.sampled("throughput_tps", by_boot, case=case, statistic="mean", **where))
    return found


def _slope(records: list[Record], **where) -> list[dict]:
    """1 / slope of TTFT over prompt tokens: of one boot with the fit's own interval, of several over the boots."""
    fits = []
    for boot in sorted({r.boot for r in records}):
        points = [
            (r.prompt_tokens, t)
            for r in records
            if r.boot == boot and r.prompt_tokens and (t := metrics.ttft_s(r)) is not None
        ]
        fit = intervals.rising([p for p, _ in points], [t for _, t in points])
        if fit is not None:
            fits.append(fit)
    if not fits:
        return []
    found = rows.sampled(
        "prefill_tps.slope", {n: [1 / f.mean] for n, f in enumerate(fits)}, statistic="slope", **where
    )
    found |= _fitted(fits)
    if len(fits) == 1:
        found |= {"low": 1 / fits[0].high, "high": 1 / fits[0].low, "n": fits[0].n}
    return [found]


def _fitted(fits: list[intervals.Interval]) -> dict:
    """`rounds` and `within` that stand for what the fits leave open: t · within / √rounds is its half-width. A
    line takes two of a boot's points."""
    rounds = sum(f.n - 1 for f in fits)
    half = sqrt(sum(((f.high - f.low) / 2 / f.mean) ** 2 for f in fits)) / len(fits)
    return {"rounds": rounds, "within": half * sqrt(rounds) / intervals.quantile(rounds - len(fits))}


def _by_boot(metric: str, records: list[Record]) -> dict[int, list[float]]:
    values: dict[int, list[float]] = defaultdict(list)
    for record in records:
        value = _DEFINITIONS[metric](record)
        if value is not None:
            values[record.boot].append(value)
    return dict(values)


def _suite(of: Workload, metric: str, records: list[Record], **where) -> list[dict]:
    """A suite's value per round is its statistic over the prompts; the interval is over rounds, then boots."""
    rounds: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for record in records:
        if _DEFINITIONS[metric](record) is not None:
            rounds[record.boot, record.repeat].append(record)
    whole = {k: v for k, v in rounds.items() if len({r.case for r in v}) == len(of.cases)}
    if not whole or metric not in metrics.DEFINITIONS:
        return []
    found = []
    told = _answers(metric, of, [r for asked in whole.values() for r in asked])
    for statistic in _statistics(metric):
        by_boot: dict[int, list[float]] = defaultdict(list)
        for (boot, _), asked in sorted(whole.items()):
            by_boot[boot].append(pairing.STATISTICS[statistic](metric, asked))
        found.append(rows.sampled(metric, by_boot, statistic=statistic, **told, **where))
    return found


def _statistics(metric: str) -> tuple[str, ...]:
    """Those of a suite; only what is told per output token can be weighted by output tokens."""
    weighable = metric.startswith("decode_tps") or terms.METRICS[metric].unit != "tok/s"
    return pairing.of_suite(metric) if weighable else ("mean_of_means", "median")
