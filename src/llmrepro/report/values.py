"""What was measured: whole workloads first, then each prompt or length, then each boot."""

from llmrepro import terms
from llmrepro.client import Record
from llmrepro.findings import Findings
from llmrepro.markup import Html, escaped, facts, folded, join, table, tag
from llmrepro.notation import NOTHING, measured, number, plural, quantity, seconds
from llmrepro.report.words import value
from llmrepro.workload import CASES, Workload

OF_LADDERS = ("verified_tokens", "failed_tokens")  # shown in a section of their own
ELSEWHERE = ("harmonic", "median")  # of a suite, shown side by side in a section of their own
COLUMNS = {
    "prompt_tokens": "prompt tokens",
    "cached_tokens": "of them cached",
    "prefix_hit_rate": "cached share",
    "output_tokens": "output tokens",
    "reasoning_tokens": "of them reasoning",
    "ttft_s": "TTFT, s",
    "reasoning_s": "reasoning, s",
    "decode_tps": "decode, tok/s",
    "decode_tps.server": "decode by the server, tok/s",
    "prefill_tps": "prefill, tok/s",
    "prefill_tps.server": "prefill by the server, tok/s",
    "e2e_tps": "whole request, tok/s",
    "throughput_tps": "all streams together, tok/s",
    "acceptance": "drafts accepted",
    "acceptance_length": "tokens of a step with a draft",
    "tokens_per_step": "tokens per step",
}
# What a server logs of a request, by the column's head.
LOGGED = {"f_sim": "f_sim", "f_keep": "f_keep", "prompts evicted": "evicted"}
OF = {"prefill": "length", "concurrency": "number of streams"}
COUNTERS = {
    "prefix_queries_tokens": "prompt tokens by its counters",
    "prefix_hits_tokens": "of them from the cache",
}
CASE_WORDS = {
    "uncached": "a new head, the first tail",
    "new_tail": "the same head, the second tail",
    "new_tail_2": "the same head, the third tail",
    "changed_head": "its first character another one, the second tail",
    "original_again": "the original head, the second tail",
    "newest_after_fill": "after other heads: the newest of them, a new tail",
    "oldest_after_fill": "then the first request again",
    "first": "a server just started, its weights out of the page cache",
    "second": "the same request again",
    "restarted": "the same request to a server just started, weights in the page cache",
    "restored": "the same, after the server read its saved prompt cache back",
}
LOG_NOTE = (
    "f_sim and f_keep are what the server logged: the longest common prefix over the new prompt's length, and "
    "over the length of what it was found in. Neither is a hit rate: that is the cached share, told with each "
    "answer."
)


def measured_values(found: Findings) -> Html:
    ladders = {w.id for w in found.recipe.workloads if w.kind == "ladder"}
    rows = [  # the flags tell what failed
        r
        for r in found.result["metrics"]
        if r["metric"] not in ("outcome", *OF_LADDERS) and r["workload"] not in ladders
    ]
    several = len(found.servers) > 1
    titles = {w.id: w.title or w.id for w in found.recipe.workloads}
    whole = [
        (
            join([terms.METRICS[r["metric"]].title, tag("small", tag("code", r["metric"]))]),
            _whole(r),
            terms.STATISTICS[r["statistic"]],
            join([titles[r["workload"]], f" · {r['server']}" if several else ""]),
            f"{r['n']:,}",
            f"{r['boots']:,}",
        )
        for r in rows
        if r["workload"] is not None and r["case"] is None and r["statistic"] not in ELSEWHERE
    ]
    parts = (
        [
            table(
                "Whole workloads",
                ["Metric", "Value, interval", "Statistic", "Workload", "n", "Boots"],
                whole,
                words=(2, 3),
            )
        ]
        if whole
        else []
    )
    for workload in found.recipe.workloads:
        for server in (s.id for s in found.recipe.servers if s.id in workload.on):
            mine = [
                r for r in rows if (r["workload"], r["server"]) == (workload.id, server) and r["case"] is not None
            ]
            if mine:
                logs = [r for r in found.asked if (r.workload, r.server) == (workload.id, server) and r.engine_log]
                parts.append(_cases(workload, server if several else None, mine, logs))
    if any(r.engine_log for r in found.asked):
        parts.append(tag("p", LOG_NOTE))
    told = [
        (
            terms.METRICS[r["metric"]].title + (f" · {r['server']}" if several and r["server"] else ""),
            value(quantity(r["value"], r["unit"]) if r["value"] is not None else r["note"] or NOTHING, r["value"]),
        )
        for r in rows
        if r["workload"] is None and terms.METRICS[r["metric"]].better is None
    ]
    return join([*parts, facts("Facts of the weights and the engine, as found here", told) if told else None])


def _whole(row: dict) -> Html:
    value, interval = _texts(row)
    return join([f"{value} {row['unit']}".rstrip(), tag("small", interval or row["note"])])


def _texts(row: dict) -> tuple[str, str]:
    """(value, interval) of a row as text."""
    if row["metric"] in ("prefix_hit_rate", "acceptance"):
        return NOTHING if row["value"] is None else f"{row['value']:.1%}", ""
    return measured(row["value"], row["low"], row["high"])


def _cases(workload: Workload, server: str | None, rows: list[dict], logs: list[Record]) -> Html:
    """A row per prompt, length or case: counts, the client's values and the server's own, how far apart, and
    what it logged."""
    by = {(r["case"], r["metric"]): r for r in rows}
    shown = [
        m for m in COLUMNS if any(metric == m for _, metric in by) and (m != "e2e_tps" or workload.kind == "chat")
    ]
    if all((r := by.get((c, "cached_tokens"))) is None or r["value"] is None for c in workload.cases):
        shown = [m for m in shown if m != "cached_tokens"]
    pairs = [m for m in ("decode_tps", "prefill_tps") if m in shown and f"{m}.server" in shown]
    logged = {head: name for head, name in LOGGED.items() if any(r.engine_log.get(name) for r in logs)}
    body = []
    for case in workload.cases:
        if not any(c == case for c, _ in by):
            continue
        cells = [_cell(by.get((case, m))) for m in shown]
        for metric in pairs:
            client, own = by.get((case, metric)), by.get((case, f"{metric}.server"))
            known = client and own and own["value"]
            cells.append(_apart(client["value"] / own["value"] - 1) if known else NOTHING)
        n = max(by[k]["n"] for k in by if k[0] == case)
        body.append(
            (_case(workload, case), *cells, *(_logged(logs, name, case) for name in logged.values()), f"{n:,}")
        )
    of = "case" if workload.kind in CASES else OF.get(workload.kind, "prompt")
    pair = ["client against server" for _ in pairs]
    header = [of.capitalize(), *(COLUMNS[m] for m in shown), *pair, *logged, "n"]
    return table(
        f"{workload.title or workload.id}{f' · {server}' if server else ''}: each {of}, by the client's clock "
        "unless said",
        header,
        body,
    )


def _case(workload: Workload, case: str) -> Html:
    words = CASE_WORDS.get(case) if workload.kind in CASES else None
    name = case
    if workload.kind == "prefill":
        name = f"{int(case):,} tokens"
    if workload.kind == "concurrency":
        name = plural(int(case), "stream")
    return join([tag("span", name, class_="whole"), tag("small", words) if words else None])


def _logged(logs: list[Record], name: str, case: str) -> str:
    """What the server logged of a case's requests: the value, or its range over the rounds."""
    values = sorted({r.engine_log[name] for r in logs if r.case == case and r.engine_log.get(name) is not None})
    return " to ".join(number(v) for v in dict.fromkeys((values[0], values[-1]))) if values else NOTHING


def _apart(share: float) -> str:
    return "0.0%" if abs(share) < 0.0005 else f"{share:+.1%}"


def _cell(row: dict | None) -> Html:
    if row is None:
        return escaped(NOTHING)
    if row["value"] is None:
        return tag("span", NOTHING, tag("small", row["note"]))
    value, interval = _texts(row)
    return join([value, tag("small", interval) if interval else None])


def startup(found: Findings) -> Html:
    marks = [m for m in terms.METRICS if m.startswith("startup.")]
    rows = [
        (
            f"boot {n}",
            boot.get("server", ""),
            f"{boot['workload']} · {boot['case']}" if "case" in boot else "",
            _share(boot.get("weights_cached_share")),
            *(seconds(boot.get("startup", {}).get(m)) for m in marks),
        )
        for n, boot in found.boots.items()
    ]
    for server in found.recipe.servers:
        means = [r for m in marks for r in found.rows(m, server=server.id) if r["boots"] > 1]
        for workload, case in dict.fromkeys((r["workload"], r["case"]) for r in means):
            by = {r["metric"]: r for r in means if (r["workload"], r["case"]) == (workload, case)}
            made_for = f"{workload} · {case}" if case else ""
            rows.append(("mean", server.id, made_for, "", *(_cell(by.get(m)) for m in marks)))
    parts = [
        table(
            "Seconds from the start of the process, by the client's clock",
            ["Boot", "Server", "Made for", "weights in the page cache", *(terms.METRICS[m].title for m in marks)],
            rows,
            words=(1, 2),
        )
    ]
    cached = {w.id for w in found.recipe.workloads if w.cache == "on"}
    parts += [_boot(n, boot, cached) for n, boot in found.boots.items()]
    return join(parts)


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0%}"


def _counted(boot: dict, cached: set[str]) -> list[tuple[str, str]]:
    """The engine's own count of prompt tokens over a workload."""
    told = []
    for workload, read in boot.get("counters", {}).items():
        if workload not in cached:
            continue
        grown = {k: v - read["before"].get(k, 0) for k, v in read["after"].items()}
        told += [(f"{name} during {workload}", f"{grown[k]:,.0f}") for k, name in COUNTERS.items() if k in grown]
    return told


def _boot(n: int, boot: dict, cached: set[str]) -> Html:
    """What a server says of itself once it runs, and how it was started."""
    machine = boot.get("machine", {})
    told = [
        *boot.get("effective", {}).items(),
        *boot.get("metrics", {}).items(),
        (
            "load of the machine, before and after",
            " · ".join(number(machine.get(k)) for k in ("load_before", "load_after")),
        ),
        ("CPUs that other programs kept busy meanwhile", number(machine.get("other_cpus"))),
        (
            "share of the CPU's time taken by the hypervisor",
            f"{machine['steal_share']:.2%}" if machine.get("steal_share") is not None else "unknown",
        ),
        *_counted(boot, cached),
        ("lived for", quantity(machine.get("seconds"), "s")),
    ]
    told = [(str(k).replace("_", " "), quantity(v) if isinstance(v, int | float) else v) for k, v in told]
    adapted = boot.get("adaptations", [])
    # Full paths name the machine's user and are of no use elsewhere; boots/<n>.json has them.
    command = " ".join(
        f"…/{a.rsplit('/', 1)[1]}" if str(a).startswith("/") else str(a) for a in boot.get("command", [])
    )
    phases = [
        (name, seconds(start), seconds(end), seconds(end - start)) for name, start, end in boot.get("phases", [])
    ]
    return folded(
        f"Boot {n}: the engine's own phases, settings read back from it, command",
        table(
            f"Phases of boot {n} in seconds, by the engine's clock, which starts when it first logs",
            ["Phase", "From", "To", "Took"],
            phases,
        )
        if phases
        else None,
        facts(f"Read back from the running server of boot {n}", told),
        tag("p", "Adapted to this build: ", "; ".join(map(str, adapted))) if adapted else None,
        tag("pre", tag("code", command), class_="wrap")
        if command
        else tag("p", "It was running already: how it was started is not known."),
    )
