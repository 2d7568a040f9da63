"""The head of the report: title, question, the verdict in a sentence, the figures that people look for."""

from collections import Counter

from llmrepro import intervals, jobs, running_server, terms
from llmrepro.findings import Findings
from llmrepro.markup import Html, code, join, tag
from llmrepro.notation import measured, plural, seconds
from llmrepro.report.words import WORDS

OUTCOMES = {
    "running": "The run is still going on: this is what it has so far.",
    "completed": "The run is complete.",
    "failed": "The run failed",
    "stopped": "The run was stopped",
    "interrupted": "The run was interrupted",
    "lacking": "Nothing was measured here: this page shows what was published and what would be run.",
}
STOPPED_BY = {
    "person": "by a person",
    "guard": "by the guard",
    "deadline": "at its deadline",
    "study": "with its study",
}


def head(found: Findings) -> Html:
    """Title, question, the verdict in a sentence, and the figures that people look for."""
    recipe = found.recipe
    source = recipe.source
    by = (
        f"Published: {source.publication}{f', {source.date}' if source.date else ''}."
        if source
        else "The recipe names no publication."
    )
    cpu = found.machine.get("cpu", {}).get("model") or "an unknown processor"
    when = f" · measured {found.records[0].started_at[:10]} on {cpu}" if found.records else ""
    return join(
        [
            tag("p", join(["llmrepro report · ", tag("code", recipe.id), when]), class_="from quiet"),
            tag("h1", recipe.title),
            tag("p", recipe.question, class_="question"),
            _verdict(found),
            tiles(found),
            tag("p", by, class_="by quiet"),
        ]
    )


def sentence(found: Findings) -> str:
    """The verdict of the whole run, in a sentence or two."""
    words = Counter(v["word"] for v in found.judged)
    made = len(found.recipe.claims) + len(found.recipe.comparisons)
    if found.published_only and made:
        return (
            f"{plural(made, 'claim')} as published; this machine tests none of them. What lacks is said "
            "below, and what would run."
        )
    said = counted(words, "The recipe")
    speeds = any(
        terms.METRICS[c.metric].better
        for c in (*found.recipe.claims, *found.recipe.comparisons)
        if c.id not in found.out_of_profile
    )
    if set(words) == {"reproduced"} and not speeds and found.asked:
        said += (
            " They are facts that hold on any machine; no speed was published, so the speeds below stand for "
            "this machine alone."
        )
    left = len(found.out_of_profile)
    if left:
        said += f" {left:,} more {'was' if left == 1 else 'were'} not asked, by this run's profile or choice."
    return said


def counted(words: Counter, whose: str) -> str:
    """How many claims got which word, in a sentence."""
    total = words.total()
    if not total:
        return f"{whose} makes no claims."
    if len(words) == 1:
        word = WORDS[next(iter(words))][1]
        return f"All {total:,} claims are {word}." if total > 1 else f"Its one claim is {word}."
    return f"Of {total:,} claims: {', '.join(f'{words[w]:,} {WORDS[w][1]}' for w in WORDS if words[w])}."


def _verdict(found: Findings) -> Html:
    status = found.status
    outcome = status["outcome"]
    parts = [OUTCOMES.get(outcome, outcome)]
    if outcome in ("failed", "stopped", "interrupted"):
        parts = [
            f"{OUTCOMES[outcome]} in the stage {status.get('stage', 'unknown')}"
            + (
                f", {STOPPED_BY.get(status['stopped_by'], status['stopped_by'])}"
                if status.get("stopped_by")
                else ""
            )
            + "."
        ]
    left = jobs.left(found.recipe, found.parameters, found.boots, [vars(r) for r in found.records])
    planned = len(found.asked) + jobs.requests(found.recipe, left)
    if left and outcome != "lacking":
        parts.append(f"{len(found.asked):,} of {planned:,} planned requests were made.")
    if found.asked:
        statuses = Counter(r.status for r in found.asked)
        ladders = {w.id for w in found.recipe.workloads if w.rises}
        short = sum(r.status == "early_stop" and r.workload not in ladders for r in found.asked)
        good = statuses["ok"] + short
        parts.append(
            f"{good:,} of {plural(len(found.asked), 'request')} answered"
            + (
                ": " + ", ".join(f"{n:,} {s.replace('_', ' ')}" for s, n in statuses.items())
                if good < len(found.asked)
                else ""
            )
            + "."
        )
    parts += [f"{held}." for held in found.result["held"]]
    return box(status, {v["word"] for v in found.judged}, " ".join(parts), sentence(found), found.result["flags"])


def box(status: dict, words: set[str], outcome: str, said: str, flags: list[str]) -> Html:
    """The verdict in its box: how the run ended, what that says of the claims, what to know before believing it,
    and what to do next."""
    looks = [WORDS[w][2] for w in words] or ["none"]
    look = next(x for x in ("bad", "open", "none", "good") if x in looks)
    if status["outcome"] != "completed":  # what is not whole does not look fine
        look = {"good": "open"}.get(look, look) if status["outcome"] not in ("failed", "interrupted") else "bad"
    trouble = [
        tag("p", join([tag("strong", label), " ", tag("span", status[key])]))
        for key, label in (("reason", "Why:"), ("next_step", "Next:"))
        if status.get(key)
    ]
    if status.get("log_tail"):
        lines = status["log_tail"]
        trouble.append(
            join(
                [
                    tag("p", tag("strong", "Last lines of its log:")),
                    code("\n".join(map(str, lines)) if isinstance(lines, list) else lines),
                ]
            )
        )
    return tag(
        "div",
        tag("p", outcome, class_="outcome"),
        tag("p", said, class_="said"),
        tag("p", tag("a", f"{plural(len(flags), 'thing')} to know before believing a number", href="#flags"))
        if flags
        else None,
        *trouble,
        class_=f"verdict {look}",
    )


def _threads(found: Findings, server: str) -> str:
    """How many threads the engine said it used: a speed is one of so many."""
    told = {b.get("effective", {}).get("threads") for b in found.boots.values() if b.get("server") == server}
    count = told.pop() if len(told) == 1 else None
    return f", {plural(count, 'thread')}" if isinstance(count, int) else ""


def _of(found: Findings, row: dict) -> str:
    """What served it: boots that this kit made, or a server that ran before it."""
    return "a running server" if running_server.of(found.boots) else plural(row["boots"], "boot")


def tiles(found: Findings) -> Html | None:
    """The figures that people look for, each with its interval; none where nothing was measured."""
    wanted = (
        ("decode_tps", "decode speed", {"statistic": "mean_of_means"}),
        ("prefill_tps.slope", "prefill speed", {}),
        ("startup.first_completion_s", "start to first token", {"case": None}),
    )
    several = len(found.servers) > 1
    shown = []
    for metric, label, where in wanted:
        for server in found.recipe.servers:
            for row in found.rows(metric, server=server.id, **where)[:1]:
                mean, interval = measured(row["value"], row["low"], row["high"])
                mean = seconds(row["value"]) if not interval and row["unit"] == "s" else mean
                shown.append(
                    tag(
                        "li",
                        join([label, f" · {server.id}" if several else ""]),
                        tag("strong", mean, tag("span", f" {row['unit']}")),
                        tag("small", f"{intervals.LEVEL:.0%} interval {interval}") if interval else None,
                        tag("small", f"measured here, {_of(found, row)}{_threads(found, server.id)}"),
                    )
                )
    return tag("ul", *shown, class_="tiles") if shown else None
