"""The front of the report: the verdict in a sentence, the claims, what was measured. `appendix` has the rest."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from llmrepro import intervals, terms
from llmrepro.findings import Findings
from llmrepro.markup import Html, code, escaped, facts, folded, is_hash, join, short_hash, table, tag
from llmrepro.notation import NOTHING, measured, number, plural, published, quantity, seconds
from llmrepro.recipe import Claim, Workload

# Sign, words, look: a word is told by its text and its sign, the colour only repeats it.
WORDS = {"reproduced": ("✓", "reproduced", "good"), "not_reproduced": ("✗", "not reproduced", "bad"),
         "inconclusive": ("≈", "inconclusive", "open"), "not_comparable": ("≠", "not comparable", "open"),
         "not_evaluated": ("–", "not evaluated", "none")}
OUTCOMES = {"running": "The run is still going on: this is what it has so far.", "completed": "The run is complete.",
            "failed": "The run failed", "stopped": "The run was stopped", "interrupted": "The run was interrupted",
            "lacking": "Nothing was measured here: this page shows what was published and what would be run."}
EVIDENCE = {"measured": "measured by the publication", "community": "reported by the community", "stated": "stated"}
STATISTICS = {"mean_of_means": "mean of the prompts' means", "token_weighted": "token-weighted mean",
              "slope": "slope over lengths", "mean": "mean", "value": "value"}
COLUMNS = {"prompt_tokens": "prompt tokens", "cached_tokens": "of them cached", "output_tokens": "output tokens",
           "ttft_s": "TTFT, s", "decode_tps": "decode, tok/s", "decode_tps.server": "decode by the server, tok/s",
           "prefill_tps": "prefill, tok/s", "prefill_tps.server": "prefill by the server, tok/s",
           "e2e_tps": "whole request, tok/s"}


class Section(NamedTuple):
    """A part of the page. `text` is the kit's own Markdown and holds no value; every value is in `body`."""

    anchor: str
    title: str
    text: str
    body: Html


def head(found: Findings) -> Html:
    """Title, question, the verdict in a sentence, and the figures that people look for."""
    recipe = found.recipe
    source = recipe.source
    by = f"Published: {source.publication}{f', {source.date}' if source.date else ''}." if source else \
        "A recipe of this kit; nothing was published of it."
    cpu = found.machine.get("cpu", {}).get("model") or "an unknown processor"
    when = f" · measured {found.records[0].started_at[:10]} on {cpu}" if found.records else ""
    return join([
        tag("p", join(["llmrepro report · ", tag("code", recipe.id), when]), class_="from quiet"),
        tag("h1", recipe.title), tag("p", recipe.question, class_="question"),
        _verdict(found), _tiles(found), tag("p", by, class_="by quiet"),
    ])


def sections(found: Findings, figures: Html) -> Iterator[Section]:
    """The front parts in order; a part without content is left out."""
    if found.recipe.claims:
        yield Section("claims", "Claims", "What was published, what was found here, and whether the two agree.",
                      _claims(found))
    if found.result["flags"]:
        yield Section("flags", "Before you believe a number", "",
                      tag("ul", *(tag("li", f) for f in found.result["flags"]), class_="flags"))
    if found.asked:
        yield Section("values", "Measured here",
                      f"All of it was measured in this run. Intervals are {intervals.LEVEL:.0%} intervals of the mean; "
                      "how they are made is said under [Methods](#methods).", _values(found))
    if found.boots:
        yield Section("startup", "Start-up", "From the start of the server's process until the client saw each mark. "
                      "Ready is when the first completion has begun.", _startup(found))
    if figures:
        yield Section("charts", "Charts", "Every sample is shown. The data behind each chart lie as CSV in `figures/` of "
                      "the run folder.", figures)
    yield Section("conditions", "Conditions", "Two measurements are comparable when what decides them is equal: those "
                  "conditions come first. What a publication does not state blocks nothing; it is counted.",
                  _conditions(found))


# ---- the verdict ------------------------------------------------------------------------------------------

def sentence(found: Findings) -> str:
    """The verdict of the whole run, in a sentence or two."""
    words = Counter(v["word"] for v in found.result["verdicts"])
    total = words.total()
    if not total:
        said = "The recipe makes no claims."
    elif len(words) == 1:
        word = WORDS[next(iter(words))][1]
        said = f"All {total:,} claims are {word}." if total > 1 else f"Its one claim is {word}."
    else:
        parts = [f"{words[w]:,} {WORDS[w][1]}" for w in WORDS if words[w]]
        said = f"Of {total:,} claims: {', '.join(parts)}."
    speeds = any(terms.METRICS[c.metric].better for c in found.recipe.claims)
    if words["reproduced"] and not speeds and found.asked:
        said += " They are facts that hold on any machine; no speed was published, so the speeds below stand for " \
                "this machine alone."
    return said


def _verdict(found: Findings) -> Html:
    status = found.status
    outcome = status["outcome"]
    words = {v["word"] for v in found.result["verdicts"]}
    looks = [WORDS[w][2] for w in words] or ["none"]
    look = "bad" if outcome in ("failed", "interrupted") else next(x for x in ("bad", "open", "none", "good") if x in looks)
    parts = [OUTCOMES.get(outcome, outcome)]
    if outcome in ("failed", "stopped", "interrupted"):
        parts = [f"{OUTCOMES[outcome]} in the stage {status.get('stage', 'unknown')}"
                 + (f", by {status['stopped_by']}" if status.get("stopped_by") else "") + "."]
    if found.asked:
        statuses = Counter(r.status for r in found.asked)
        good = statuses["ok"] + statuses["early_stop"]
        parts.append(f"{good:,} of {plural(len(found.asked), 'request')} answered" + (
            ": " + ", ".join(f"{n:,} {s.replace('_', ' ')}" for s, n in statuses.items()) if good < len(found.asked)
            else "") + ".")
    trouble = [tag("p", join([tag("strong", label), " ", tag("span", status[key])]))
               for key, label in (("reason", "Why:"), ("next_step", "Next:")) if status.get(key)]
    if status.get("log_tail"):
        lines = status["log_tail"]
        trouble.append(join([tag("p", tag("strong", "Last lines of its log:")),
                             code("\n".join(map(str, lines)) if isinstance(lines, list) else lines)]))
    return tag("div", tag("p", " ".join(parts), class_="outcome"), tag("p", sentence(found), class_="said"), *trouble,
               class_=f"verdict {look}")


def _tiles(found: Findings) -> Html | None:
    """The figures that people look for, each with its interval; none where nothing was measured."""
    wanted = (("decode_tps", "decode speed", {"statistic": "mean_of_means"}), ("prefill_tps.slope", "prefill speed", {}),
              ("startup.first_completion_s", "start to first token", {}))
    several = len(found.recipe.servers) > 1
    tiles = []
    for server in found.recipe.servers:
        for metric, label, where in wanted:
            for row in found.rows(metric, server=server.id, **where)[:1]:
                mean, interval = measured(row["value"], row["low"], row["high"])
                mean = seconds(row["value"]) if not interval and row["unit"] == "s" else mean
                tiles.append(tag(
                    "li", join([label, f" · {server.id}" if several else ""]),
                    tag("strong", mean, tag("span", f" {row['unit']}")),
                    tag("small", f"{intervals.LEVEL:.0%} interval {interval}") if interval else None,
                    tag("small", f"measured here, {plural(row['boots'], 'boot')}")))
    return tag("ul", *tiles, class_="tiles") if tiles else None


# ---- claims -----------------------------------------------------------------------------------------------

def word(name: str) -> Html:
    sign, words, look = WORDS[name]
    return tag("span", tag("span", f"{sign} ", aria_hidden="true"), words, class_=f"word {look}")


def _claims(found: Findings) -> Html:
    verdicts = {v["claim"]: v for v in found.result["verdicts"]}
    rows = [(join([claim.title or claim.id, tag("small", _where(claim, found))]),
             word(verdicts[claim.id]["word"]),
             join([_value(published(claim.value, claim.unit), claim.value.published),
                   tag("small", f"{EVIDENCE[claim.evidence]}: {claim.locator}")]),
             _value(quantity(verdicts[claim.id]["here"], claim.unit), verdicts[claim.id]["here"]),
             verdicts[claim.id]["reason"]) for claim in found.recipe.claims]
    return table("Claims against this run", ["Claim", "Verdict", "Published", "Found here", "Why"], rows,
                 words=(1, 2, 3, 4), ids=[f"claim-{c.id}" for c in found.recipe.claims])


def _where(claim: Claim, found: Findings) -> str:
    title = terms.METRICS[claim.metric].title
    parts = [title if title.lower() != claim.title.lower() else None, claim.workload, claim.case,
             claim.server if len(found.recipe.servers) > 1 else None]
    return " · ".join(p for p in parts if p)


def _value(text: str, value: object) -> Html:
    return short_hash(value) if is_hash(value) else tag("span", text, class_="whole" if len(text) < 24 else None)


# ---- values -----------------------------------------------------------------------------------------------

def _values(found: Findings) -> Html:
    rows = found.result["metrics"]
    several = len(found.recipe.servers) > 1
    titles = {w.id: w.title or w.id for w in found.recipe.workloads}
    whole = [(join([terms.METRICS[r["metric"]].title, tag("small", tag("code", r["metric"]))]),
              join([measured(r["value"], r["low"], r["high"])[0], f" {r['unit']}",
                    tag("small", measured(r["value"], r["low"], r["high"])[1])]),
              STATISTICS[r["statistic"]], join([titles[r["workload"]], f" · {r['server']}" if several else ""]),
              f"{r['n']:,}", f"{r['boots']:,}")
             for r in rows if r["workload"] is not None and r["case"] is None]
    parts = [table("Whole workloads", ["Metric", "Value, interval", "Statistic", "Workload", "n", "Boots"], whole,
                   words=(2, 3))] if whole else []
    for workload in found.recipe.workloads:
        for server in (s.id for s in found.recipe.servers if s.id in workload.on):
            mine = [r for r in rows if (r["workload"], r["server"]) == (workload.id, server) and r["case"] is not None]
            if mine:
                parts.append(_cases(workload, server if several else None, mine))
    told = [(terms.METRICS[r["metric"]].title, _value(quantity(r["value"], r["unit"]) if r["value"] is not None
                                                      else r["note"] or NOTHING, r["value"]))
            for r in rows if r["workload"] is None and terms.METRICS[r["metric"]].better is None]
    return join([*parts, facts("Facts of the weights and the engine, as found here", told) if told else None])


def _cases(workload: Workload, server: str | None, rows: list[dict]) -> Html:
    """A row per prompt or length: counts, the client's values, the server's own beside them, how far apart."""
    by = {(r["case"], r["metric"]): r for r in rows}
    shown = [m for m in COLUMNS if any(metric == m for _, metric in by) and (m != "e2e_tps" or workload.kind == "chat")]
    if all((r := by.get((c, "cached_tokens"))) is None or r["value"] is None for c in workload.cases):
        shown = [m for m in shown if m != "cached_tokens"]
    pairs = [m for m in ("decode_tps", "prefill_tps") if m in shown and f"{m}.server" in shown]
    body = []
    for case in workload.cases:
        if not any(c == case for c, _ in by):
            continue
        cells = [_cell(by.get((case, m))) for m in shown]
        for metric in pairs:
            client, own = by.get((case, metric)), by.get((case, f"{metric}.server"))
            cells.append(f"{client['value'] / own['value'] - 1:+.1%}".replace("-0.0%", "0.0%")
                         if client and own and own["value"] else NOTHING)
        n = max(by[k]["n"] for k in by if k[0] == case)
        body.append((f"{int(case):,} tokens" if workload.kind == "prefill" else case, *cells, f"{n:,}"))
    of = "Length" if workload.kind == "prefill" else "Prompt"
    header = [of, *(COLUMNS[m] for m in shown), *("client against server" for _ in pairs), "n"]
    return table(f"{workload.title or workload.id}{f' · {server}' if server else ''}: each "
                 f"{'length' if workload.kind == 'prefill' else 'prompt'}, by the client's clock unless said", header, body)


def _cell(row: dict | None) -> Html:
    if row is None:
        return escaped(NOTHING)
    if row["value"] is None:
        return tag("span", NOTHING, tag("small", row["note"]))
    value, interval = measured(row["value"], row["low"], row["high"])
    return join([value, tag("small", interval) if interval else None])


# ---- start-up and conditions ------------------------------------------------------------------------------

def _startup(found: Findings) -> Html:
    marks = [m for m in terms.METRICS if m.startswith("startup.")]
    rows = [(f"boot {n}", boot.get("server", ""), *(seconds(boot.get("startup", {}).get(m)) for m in marks))
            for n, boot in found.boots.items()]
    for server in found.recipe.servers:
        means = {m: r for m in marks for r in found.rows(m, server=server.id) if r["boots"] > 1}
        if means:
            rows.append(("mean", server.id, *(_cell(means.get(m)) for m in marks)))
    parts = [table("Seconds from the start of the process, by the client's clock",
                   ["Boot", "Server", *(terms.METRICS[m].title for m in marks)], rows, words=(1,))]
    phases = [(name, f"boot {n}", seconds(start), seconds(end), seconds(end - start))
              for n, boot in found.boots.items() for name, start, end in boot.get("phases", [])]
    if phases:
        parts.append(table("The engine's own phases in seconds, by its own clock, which starts when it first logs",
                           ["Phase", "Boot", "From", "To", "Took"], phases, words=(1,)))
    parts += [_boot(n, boot) for n, boot in found.boots.items()]
    return join(parts)


def _boot(n: int, boot: dict) -> Html:
    """What a server says of itself once it runs, and how it was started."""
    machine = boot.get("machine", {})
    told = [*boot.get("effective", {}).items(), *boot.get("metrics", {}).items(),
            ("load of the machine, before and after", " · ".join(number(machine.get(k)) for k in ("load_before", "load_after"))),
            ("share of the CPU's time taken by the hypervisor", f"{machine['steal_share']:.2%}"
             if machine.get("steal_share") is not None else "unknown"),
            ("lived for", quantity(machine.get("seconds"), "s"))]
    told = [(str(k).replace("_", " "), quantity(v) if isinstance(v, int | float) else v) for k, v in told]
    adapted = boot.get("adaptations", [])
    # Full paths name the machine's user and are of no use elsewhere; boots/<n>.json has them.
    command = " ".join(f"…/{a.rsplit('/', 1)[1]}" if str(a).startswith("/") else str(a) for a in boot.get("command", []))
    return folded(f"Boot {n}: settings read back from the server, command", facts("Read back from the running server", told),
                  tag("p", "Adapted to this build: ", "; ".join(map(str, adapted))) if adapted else None,
                  tag("pre", tag("code", command), class_="wrap"))


LABELS = {"load_1min": "load of the machine before (1 minute)",
          "steal_share": "share of the CPU's time taken by the hypervisor"}
RELATIONS = {"equal": ("=", "equal", "good"), "differs": ("≠", "differs", "bad"),
             "unknown_here": ("?", "unknown here", "open"), "unstated_there": ("–", "not stated", "none")}


def _conditions(found: Findings) -> Html:
    order = list(RELATIONS)
    rows = sorted(found.result["conditions"], key=lambda c: (not c["deciding"], -(c["relation"] == "differs"),
                                                             order.index(c["relation"])))
    return table("Conditions, published and here", ["Condition", "Weight", "Published", "Here", "Relation"],
                 [(LABELS.get(c["name"], c["name"].replace("_", " ")), "deciding" if c["deciding"] else "noted",
                   *(_value(number(c[side]), c[side]) for side in ("published", "here")), relation(c["relation"]))
                  for c in rows], words=(1, 2, 3, 4))


def relation(name: str) -> Html:
    sign, words, look = RELATIONS[name]
    return tag("span", tag("span", f"{sign} ", aria_hidden="true"), words, class_=f"word {look}")
