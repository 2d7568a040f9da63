"""result.json: every value with its interval, every condition and verdict, computed from the run folder alone."""

from collections import Counter, defaultdict
from pathlib import Path

from llmrepro import cache_use, conditions, engines, flags, intervals, metrics, terms, verdict
from llmrepro.client import Record
from llmrepro.metrics import ANSWERED
from llmrepro.pairing import Measured, mean_of_means, token_weighted
from llmrepro.recipe import Recipe
from llmrepro.run import boots, load_recipe
from llmrepro.run_folder import read_json, read_lines, sha256_of
from llmrepro.workload import CASES, Workload

INPUTS = ("recipe.json", "recipe.committed.json", "machine.json", "weights.json", "records.jsonl")
PER_CASE = ("ttfr_s", "ttft_s", "decode_tps", "decode_tps.server", "prefill_tps", "prefill_tps.server", "e2e_tps")
PER_CASE_CACHED = ("ttfr_s", "ttft_s", "prefix_hit_rate")  # a cached prompt has no prefill speed
COUNTS = ("prompt_tokens", "output_tokens", "cached_tokens")


def compute(path: Path) -> dict:
    """The content of result.json for a run folder. The same files always give the same result.

    `metrics` are rows {metric, server, workload, case, statistic, value, unit, low, high, n, boots, note};
    `requests` counts statuses per workload; `flags` are sentences; `inputs` are the sha256 of what was read.
    """
    recipe = load_recipe(path)
    started = boots(path)
    written = [Record.model_validate(r) for r in read_lines(path / "records.jsonl")]
    records = _by_replicate(written, started)
    weights = read_json(path / "weights.json") if (path / "weights.json").exists() else {"facts": {}}
    rows = [_row(m, v) for m, v in weights["facts"].items()] + _boot_rows(recipe, started)
    for workload in recipe.workloads:
        for server in workload.on:
            mine = [r for r in records if not r.warmup and (r.workload, r.server) == (workload.id, server)]
            rows += _workload_rows(workload, server, mine)
            if workload.kind == "prefix" and mine:
                rows += _hit_rows(workload, server, started)
    found_here = _here(path, recipe, started, weights)
    found = conditions.compare(load_recipe(path, "recipe.committed.json"), recipe, found_here)
    found += _settings(recipe, started)
    asked = [r for r in records if not r.warmup]
    facts = read_json(path / "machine.json") if (path / "machine.json").exists() else {}
    return {
        "recipe": recipe.id,
        "metrics": rows,
        "requests": {w.id: dict(Counter(r.status for r in asked if r.workload == w.id)) for w in recipe.workloads},
        "flags": flags.of(asked, rows)
        + cache_use.flags(started, written)
        + flags.without_boot(written, started)
        + flags.disturbances(started, facts.get("cpu", {}).get("usable_cpus")),
        "conditions": [c._asdict() for c in found],
        "verdicts": [verdict.judge(c, rows, found).model_dump() for c in recipe.claims],
        "comparisons": _comparisons(Measured(recipe, started, _counting(records)), found, found_here),
        "inputs": {
            n: sha256_of(path / n) for n in (*INPUTS, *(f"boots/{b}.json" for b in started)) if (path / n).exists()
        },
    }


def measured(path: Path) -> Measured:
    """What a run measured, as comparisons take it."""
    started = boots(path)
    records = [Record.model_validate(r) for r in read_lines(path / "records.jsonl")]
    return Measured(load_recipe(path), started, _counting(_by_replicate(records, started)))


def here(path: Path) -> dict:
    """Facts found in a run, by the names of conditions."""
    weights = read_json(path / "weights.json") if (path / "weights.json").exists() else {"facts": {}}
    return _here(path, load_recipe(path), boots(path), weights)


def _comparisons(run: Measured, found: list[conditions.Condition], here: dict) -> list[dict]:
    """Claims across two measurements of this run."""
    return [
        verdict.compare(
            c,
            run,
            run,
            [x for x in found if x in verdict.concerning(found, c.a) or x in verdict.concerning(found, c.b)]
            + conditions.stated(c.conditions, here),
        ).model_dump()
        for c in run.recipe.comparisons
    ]


def _counting(records: list[Record]) -> list[Record]:
    return [r for r in records if not r.warmup and r.status in ANSWERED]


def _by_replicate(records: list[Record], started: dict[int, dict]) -> list[Record]:
    """The records with, as their boot, the first boot of their replicate: a boot that went on where a dead or
    interrupted one stopped continues its rounds, and is no replication of its own."""
    first: dict[tuple, int] = {}
    for n, boot in started.items():
        first.setdefault((boot["server"], boot["replicate"]), n)
    own = {n: first[boot["server"], boot["replicate"]] for n, boot in started.items()}
    return [r.model_copy(update={"boot": own.get(r.boot, r.boot)}) for r in records]


def _row(
    metric: str,
    value,
    *,
    server=None,
    workload=None,
    case=None,
    statistic="value",
    low=None,
    high=None,
    n=1,
    boots=0,
    note=None,
) -> dict:
    return {
        "metric": metric,
        "server": server,
        "workload": workload,
        "case": case,
        "statistic": statistic,
        "value": value,
        "unit": terms.METRICS[metric].unit,
        "low": low,
        "high": high,
        "n": n,
        "boots": boots,
        "note": note,
    }


def _interval_row(metric: str, found: intervals.Interval, **where) -> dict:
    return _row(metric, found.mean, low=found.low, high=found.high, n=found.n, **where)


def _boot_rows(recipe: Recipe, started: dict[int, dict]) -> list[dict]:
    """Start-up times (the mean over a server's boots) and what the engine told of itself. Boots that were made
    for a case of a workload start in a state of its own: their times are that case's."""
    rows = []
    for server in recipe.servers:
        facts: dict[str, list] = defaultdict(list)
        times: dict[tuple, list] = defaultdict(list)
        for boot in (b for b in started.values() if b["server"] == server.id):
            for metric, value in {**boot.get("startup", {}), **boot.get("metrics", {})}.items():
                if value is not None and terms.METRICS[metric].better is None:
                    facts[metric].append(value)
                elif value is not None:
                    times[metric, boot.get("workload"), boot.get("case")].append(value)
        for metric, values in facts.items():
            rows.append(_constant_row(metric, values, server=server.id, boots=len(values)))
        for (metric, workload, case), values in times.items():
            where = {"server": server.id, "workload": workload, "case": case, "boots": len(values)}
            rows.append(_interval_row(metric, intervals.positive(values), statistic="mean", **where))
    return rows


def _hit_rows(workload: Workload, server: str, started: dict[int, dict]) -> list[dict]:
    """The hit rate of a workload by the engine's own counters."""
    rate, boots = cache_use.hit_rate(started, server, workload.id)
    note = "by the engine's counters" if boots else "the engine counts no prompt tokens"
    where = {"server": server, "workload": workload.id, "boots": boots, "n": boots, "note": note}
    return [_row("prefix_hit_rate", rate, **where)] if any(b["server"] == server for b in started.values()) else []


def _constant_row(metric: str, values: list, **where) -> dict:
    """A fact that must not vary: its value when it did not, else none and why."""
    known = [v for v in values if v is not None]
    if len(set(known)) == 1 and len(known) == len(values):
        return _row(metric, known[0], n=len(values), **where)
    note = f"it varied: {sorted(set(known))}" if known else "not told by the server"
    return _row(metric, None, n=len(values), note=note, **where)


def _workload_rows(workload: Workload, server: str, records: list[Record]) -> list[dict]:
    rows = []
    good = [r for r in records if r.status in ANSWERED]
    where = {"server": server, "workload": workload.id}
    for case in workload.cases:
        mine = [r for r in good if r.case == case]
        if not mine:
            continue
        for metric in PER_CASE_CACHED if workload.kind in CASES else PER_CASE:
            by_boot = _by_boot(metric, mine)
            if by_boot:
                rows.append(
                    _interval_row(
                        metric,
                        intervals.over_boots(by_boot),
                        case=case,
                        boots=len(by_boot),
                        statistic="mean",
                        **where,
                    )
                )
        rows += [
            _constant_row(
                m, [metrics.DEFINITIONS[m](r) for r in mine], case=case, boots=len({r.boot for r in mine}), **where
            )
            for m in COUNTS
        ]
    if workload.kind == "chat":
        for metric in ("decode_tps", "decode_tps.published_2026_10", "ttft_s"):
            rows += _suite_rows(workload.cases, metric, good, **where)
    if workload.kind == "prefill":
        rows += _slope_rows(good, **where)
    return rows


def _slope_rows(records: list[Record], **where) -> list[dict]:
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
    found = intervals.positive([1 / f.mean for f in fits])
    if len(fits) == 1:
        found = intervals.Interval(1 / fits[0].mean, 1 / fits[0].high, 1 / fits[0].low, fits[0].n)
    return [_interval_row("prefill_tps.slope", found, boots=len(fits), statistic="slope", **where)]


def _by_boot(metric: str, records: list[Record]) -> dict[int, list[float]]:
    values: dict[int, list[float]] = defaultdict(list)
    for record in records:
        value = metrics.DEFINITIONS[metric](record)
        if value is not None:
            values[record.boot].append(value)
    return dict(values)


def _suite_rows(cases: list[str], metric: str, records: list[Record], **where) -> list[dict]:
    """A suite's value per round is its statistic over the prompts; the interval is over rounds, then boots."""
    rounds: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for record in records:
        if metrics.DEFINITIONS[metric](record) is not None:
            rounds[record.boot, record.repeat].append(record)
    whole = {k: v for k, v in rounds.items() if len({r.case for r in v}) == len(cases)}
    if not whole:
        return []
    rows = []
    for statistic, over in (("mean_of_means", mean_of_means), ("token_weighted", token_weighted)):
        if statistic == "token_weighted" and not metric.startswith("decode_tps"):
            continue
        by_boot: dict[int, list[float]] = defaultdict(list)
        for (boot, _), asked in sorted(whole.items()):
            by_boot[boot].append(over(metric, asked))
        rows.append(
            _interval_row(metric, intervals.over_boots(by_boot), statistic=statistic, boots=len(by_boot), **where)
        )
    return rows


def _settings(recipe: Recipe, started: dict[int, dict]) -> list[conditions.Condition]:
    """What each server was asked for in its arguments against what it says it runs with, where it says so."""
    read = getattr(engines.load(recipe.engine.name), "settings", None)
    if read is None:
        return []
    boot_of = {b["server"]: b for b in reversed(started.values())}
    return [
        conditions.condition(f"servers.{s.id}.{name}", True, asked, found)
        for s in recipe.servers
        if s.id in boot_of
        for name, asked, found in read(_filled(s.args, boot_of[s.id]), boot_of[s.id].get("effective", {}))
        if found is not None
    ]


def _filled(args: list[str], boot: dict) -> list[str]:
    return [a.replace("{threads}", str(boot.get("threads"))) for a in args]


def _here(path: Path, recipe: Recipe, started: dict[int, dict], weights: dict) -> dict:
    """Facts found in this run, by condition name."""
    facts = read_json(path / "machine.json") if (path / "machine.json").exists() else {}
    pins = recipe.engine.install.pins
    freeze = (path / "engine-freeze.txt").read_text() if (path / "engine-freeze.txt").exists() else ""
    installed = dict(line.split("  #")[0].strip().split("==") for line in freeze.splitlines() if "==" in line)
    versions = [installed.get(name) for name in pins]
    first = next(iter(started.values()), {})
    made = read_json(path / "environment.json") if (path / "environment.json").exists() else {}
    adapted = sorted({a for b in started.values() for a in b.get("adaptations", [])})
    steal = [b["machine"]["steal_share"] for b in started.values() if b.get("machine", {}).get("steal_share")]
    return {
        "cpu_simd": facts.get("cpu", {}).get("simd"),
        "cpu_model": facts.get("cpu", {}).get("model"),
        "weights_sha256": weights["facts"].get("model.sha256"),
        "engine_version": recipe.engine.version
        if versions == list(pins.values())
        else ", ".join(v for v in versions if v) or None,
        "threads": first.get("effective", {}).get("threads", first.get("threads")),
        "adaptations": "; ".join(adapted) or None,
        "fixes": ", ".join(f["name"] for f in made.get("fixes", []) if f["applied"]) or None,
        "load_1min": facts.get("load_1min"),
        "steal_share": max(steal, default=None),
    }
