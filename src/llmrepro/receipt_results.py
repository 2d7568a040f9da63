"""What imported requests tell: values under every definition that they allow, late first tokens, claims beside.

Pure functions over receipts; `imported` reads and writes the folder.
"""

from collections import defaultdict
from statistics import fmean, median

from llmrepro import metrics, notation, pairing, terms
from llmrepro.claim import Claim
from llmrepro.client import Event, Record
from llmrepro.receipts import Receipt
from llmrepro.recipe import Recipe

LABEL = "imported"
NOT_HERE = "imported, not measured here"
# Two of an answer's moments are stated, its first token and its end. What that is enough for:
DEFINED = (
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "ttft_s",
    "decode_tps.published_2026_10",
    "e2e_tps",
    "prefill_tps",
    "prefill_tps.published_2026_10",
    "prefix_hit_rate",
)
PER_SUITE = ("decode_tps.published_2026_10", "ttft_s")
# What it is not enough for, each with its reason; those of DEFINED that need a column which may be absent too.
NO_FIRST_EVENT = "the time of the first event of any kind is not in the file, only that of the first token"
NO_REASONING = "where reasoning ended is not in the file"
UNTOLD = {
    "decode_tps": "how many tokens the first event held, and when the last token came, are not in the file",
    "ttfr_s": NO_FIRST_EVENT,
    "decode_tps.published_2026_08": NO_FIRST_EVENT,
    "prefill_tps.published_2026_08": NO_FIRST_EVENT,
    "ttfat_s": NO_REASONING,
    "reasoning_s": NO_REASONING,
    "reasoning_tokens": NO_REASONING,
    "decode_tps.server": "times by the server's own clock are not in the file",
    "memory.server_peak_gib": "what memory the server took is not in the file",
    "prefill_tps.server": "times by the server's own clock are not in the file",
    "acceptance": "how many tokens were drafted and accepted is not in the file",
    "f_keep": "what the server logged is not in the file",
    "prompt_tokens": "the file has no column for it",
    "cached_tokens": "the file has no column for it",
    "outcome": "the file says of no request how it ended",
    "prefill_tps": "how much of each prompt came from a cache is not in the file, or no prompt has "
    f"{metrics.MIN_PREFILL_TOKENS} tokens",
    "prefix_hit_rate": "how much of each prompt came from a cache is not in the file",
    "prefill_tps.published_2026_10": "the prompts' tokens are not in the file",
}
# An outlier by Iglewicz and Hoaglin (1993), How to Detect and Handle Outliers: 0.6745 (x - median) / MAD beyond
# 3.5. With few values or a spread near nought that finds trifles, so there must be five, and half as much again.
OUTLYING, FEWEST, TIMES = 3.5, 5, 1.5

# A record in which nothing is told: definitions take records, and a receipt fills in what it has.
EMPTY = Record(
    **dict.fromkeys(("server", "workload", "case", "prompt_sha256", "endpoint", "started_at"), ""),
    **{"boot": 0, "repeat": 0, "warmup": False, "request": {}, "t_send_ns": 0, "status": "ok"},
)


def compute(told: dict, recipe: Recipe | None, found: list[Receipt]) -> dict:
    """The content of result.json, without the hashes of what it was made from; `told` is imported.json.

    `metrics` are rows as results.py has them, labelled: {metric, server, workload, case, statistic, value, unit,
    low, high, n, boots, note, label}, with the least and the greatest in place of an interval, as nothing is known
    of boots. `untold` are [metrics, why] that the file is not enough for.
    """
    by_suite: dict[str, list[tuple[Record, Receipt]]] = defaultdict(list)
    for row in found:
        by_suite[row.suite].append((record(row, told, recipe), row))
    rows = []
    for suite, workload in told["suites"].items():
        rows += _suite_rows(told["server"], workload, [one for one, _ in by_suite[suite]])
    verdicts = _verdicts(recipe, told["server"], rows) if recipe else []
    return {
        "label": LABEL,
        "recipe": told["recipe"],
        "metrics": rows,
        "requests": {workload: {"ok": len(by_suite[suite])} for suite, workload in told["suites"].items()},
        "flags": [flag for suite, mine in by_suite.items() for flag in _outliers(suite, mine)],
        "untold": _untold({row["metric"] for row in rows}),
        "conditions": [],
        "verdicts": verdicts,
        "comparisons": [],
    }


def record(row: Receipt, told: dict, recipe: Recipe | None) -> Record:
    """A row as definitions take it: an answer with two events, its first token and its end. For computing only;
    what no file states (a hash, a time of day) is empty in it, and it is never written anywhere."""
    workload = told["suites"][row.suite]
    return EMPTY.model_copy(
        update={
            "server": told["server"] or "",
            "workload": workload,
            "case": _case(row, workload, recipe),
            "repeat": row.repeat,
            "events": [Event(row.ttft_s, "text", 0, None), Event(row.total_s, "finish", 0, None)],
            "t_done_s": row.total_s,
            "prompt_tokens": row.prompt_tokens,
            "cached_tokens": row.cached_tokens,
            "output_tokens": row.output_tokens,
        }
    )


def _case(row: Receipt, workload: str, recipe: Recipe | None) -> str:
    """The recipe's name of a row's case: its own, or for a prefill workload the length of its prompt."""
    for one in recipe.workloads if recipe else []:
        if one.id == workload and row.case not in one.cases and str(row.prompt_tokens) in one.cases:
            return str(row.prompt_tokens)
    return row.case


def _suite_rows(server: str | None, workload: str, records: list[Record]) -> list[dict]:
    """A row per case and metric, and one per statistic of what a whole suite is told by."""
    rows = []
    by_case: dict[str, list[Record]] = defaultdict(list)
    for one in records:
        by_case[one.case].append(one)
    for metric in DEFINED:
        definition = metrics.DEFINITIONS[metric]
        values = {case: [v for r in mine if (v := definition(r)) is not None] for case, mine in by_case.items()}
        where = {"metric": metric, "server": server, "workload": workload}
        rows += [_row(fmean(v), v, **where, case=case, statistic="mean") for case, v in values.items() if v]
        if metric not in PER_SUITE or not all(values.values()):
            continue
        told = [r for r in records if definition(r) is not None]
        every = [v for of_case in values.values() for v in of_case]
        rows += [
            _row(pairing.STATISTICS[statistic](metric, told), every, **where, case=None, statistic=statistic)
            for statistic in pairing.of_suite(metric)
        ]
    return rows


def _row(value: float, of: list, *, metric: str, **where) -> dict:
    constant = terms.METRICS[metric].better is None and len(set(of)) == 1
    return {
        "metric": metric,
        **where,
        "value": of[0] if constant else value,
        "unit": terms.METRICS[metric].unit,
        "low": min(of),
        "high": max(of),
        "n": len(of),
        "boots": 0,
        "note": f"least and greatest of {len(of)}; {LABEL}",
        "label": LABEL,
    }


def _untold(found: set[str]) -> list[list]:
    """[metrics, why] of each reason for which metrics of a request are not told."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for metric, why in UNTOLD.items():
        if metric not in found:
            reasons[why].append(metric)
    return [[names, why] for why, names in reasons.items()]


def _verdicts(recipe: Recipe, server: str | None, rows: list[dict]) -> list[dict]:
    """The recipe's claims about what was imported, each beside its imported value; never with another word than
    `not_evaluated`, since nothing was measured here."""
    return [
        {
            "claim": claim.id,
            "word": "not_evaluated",
            "reason": f"{NOT_HERE}{_others(claim, recipe, rows) or _held(claim, found)}",
            "published": claim.value.published,
            "here": None,
            LABEL: found["value"] if found else None,
        }
        for claim in recipe.claims
        if claim.server in (None, server) and (found := _of_claim(claim, rows)) is not None
    ]


def _of_claim(claim: Claim, rows: list[dict]) -> dict | None:
    """The one imported value that a claim speaks of. A whole suite without a statistic is the mean of means."""
    wanted = "mean_of_means" if claim.statistic == "value" and claim.case is None else claim.statistic
    fits = [
        r
        for r in rows
        if (r["metric"], r["workload"], r["case"]) == (claim.metric, claim.workload, claim.case)
        and (claim.case is not None or r["statistic"] == wanted)
    ]
    return fits[0] if len(fits) == 1 else None


def _others(claim: Claim, recipe: Recipe, rows: list[dict]) -> str:
    """Why a value of a whole suite is not held against a claim: it was asked other prompts, whatever its name."""
    if claim.case is not None:
        return ""
    published = next(list(w.cases) for w in recipe.workloads if w.id == claim.workload)
    here = list(
        dict.fromkeys(r["case"] for r in rows if r["workload"] == claim.workload and r["case"] is not None)
    )
    if set(here) == set(published):
        return ""
    return f"; no ratio: its prompts are {_list(here)}, the recipe's {_list(published)}"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"


def _held(claim: Claim, found: dict) -> str:
    """How the imported value stands to the published one."""
    form, published = claim.value.form, claim.value.published
    if form == "range":
        low, high = published
        place = "within" if low <= found["value"] <= high else "below" if found["value"] < low else "above"
        return f"; it lies {place} the published range"
    if form in ("point", "about", "peak", "at_least", "at_most") and published:
        return f"; {notation.number(float(found['value'] / published))} times the published value"
    return ""


def _outliers(suite: str, mine: list[tuple[Record, Receipt]]) -> list[str]:
    """Requests whose first token came far later than those of their like: a cold path, perhaps.

    Alike are the prompts of a suite below MIN_PREFILL_TOKENS, whose time to first token is mostly overhead; a
    longer one is like its own repeats only.
    """
    groups: dict[str | None, list[Receipt]] = defaultdict(list)
    for _, row in mine:
        short = row.prompt_tokens is not None and row.prompt_tokens < metrics.MIN_PREFILL_TOKENS
        groups[None if short else row.case].append(row)
    first = min(mine, key=lambda pair: pair[1].line)[1]
    return [said for rows in groups.values() for said in _late(suite, rows, first)]


def _late(suite: str, rows: list[Receipt], first: Receipt) -> list[str]:
    if len(rows) < FEWEST:
        return []
    middle = median(row.ttft_s for row in rows)
    spread = median(abs(row.ttft_s - middle) for row in rows)
    late = [
        row for row in rows if row.ttft_s > TIMES * middle and 0.6745 * (row.ttft_s - middle) > OUTLYING * spread
    ]
    if not late:
        return []
    others = fmean(row.ttft_s for row in rows if row not in late)
    named = ", ".join(f"{row.case} repeat {row.repeat} (line {row.line}): {row.ttft_s:.4g} s" for row in late[:5])
    more = f" and {len(late) - 5:,} more" if len(late) > 5 else ""
    cold = (
        " It is the first request of its suite in the file: a cold path within the repeats that were counted."
        if late == [first]
        else ""
    )
    return [
        f"{suite}: the first token of {named}{more} came late, where {notation.number(middle)} s is the median of "
        f"{len(rows):,} like requests.{cold} With it the mean is {fmean(r.ttft_s for r in rows):.3f} s, without "
        f"{others:.3f} s ({LABEL})"
    ]
