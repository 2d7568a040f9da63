"""result.json: every value with its interval, every condition and verdict, computed from the run folder alone."""

from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean

from llmrepro import conditions, intervals, metrics, terms, verdict
from llmrepro.client import Record
from llmrepro.recipe import Recipe, Workload
from llmrepro.run import boots, load_recipe
from llmrepro.run_folder import read_json, read_lines, sha256_of

INPUTS = ("recipe.json", "recipe.committed.json", "machine.json", "weights.json", "records.jsonl")
PER_CASE = ("ttfr_s", "ttft_s", "decode_tps", "decode_tps.server", "prefill_tps", "prefill_tps.server", "e2e_tps")
COUNTS = ("prompt_tokens", "output_tokens", "cached_tokens")
BUSY_LOAD, BUSY_STEAL = 0.75, 0.05  # per CPU before a boot; share of all CPU time during it
DIFFERS = 0.03  # client against server beyond this is flagged
ANSWERED = ("ok", "early_stop")


def compute(path: Path) -> dict:
    """The content of result.json for a run folder. The same files always give the same result.

    `metrics` are rows {metric, server, workload, case, statistic, value, unit, low, high, n, boots, note};
    `requests` counts statuses per workload; `flags` are sentences; `inputs` are the sha256 of what was read.
    """
    recipe = load_recipe(path)
    started = boots(path)
    records = _by_replicate([Record.model_validate(r) for r in read_lines(path / "records.jsonl")], started)
    weights = read_json(path / "weights.json") if (path / "weights.json").exists() else {"facts": {}}
    rows = [_row(m, v) for m, v in weights["facts"].items()] + _boot_rows(recipe, started)
    for workload in recipe.workloads:
        for server in workload.on:
            mine = [r for r in records if not r.warmup and (r.workload, r.server) == (workload.id, server)]
            rows += _workload_rows(workload, server, mine)
    found = conditions.compare(
        load_recipe(path, "recipe.committed.json"), recipe, _here(path, recipe, started, weights)
    )
    asked = [r for r in records if not r.warmup]
    facts = read_json(path / "machine.json") if (path / "machine.json").exists() else {}
    return {
        "recipe": recipe.id,
        "metrics": rows,
        "requests": {w.id: dict(Counter(r.status for r in asked if r.workload == w.id)) for w in recipe.workloads},
        "flags": _flags(asked, rows) + _disturbances(started, facts.get("cpu", {}).get("usable_cpus")),
        "conditions": [c._asdict() for c in found],
        "verdicts": [verdict.judge(c, rows, found).model_dump() for c in recipe.claims],
        "inputs": {
            n: sha256_of(path / n) for n in (*INPUTS, *(f"boots/{b}.json" for b in started)) if (path / n).exists()
        },
    }


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
    """Start-up times (the mean over a server's boots) and what the engine told of itself."""
    rows = []
    for server in recipe.servers:
        mine = [b for b in started.values() if b["server"] == server.id]
        told: dict[str, list] = defaultdict(list)
        for boot in mine:
            for metric, value in {**boot.get("startup", {}), **boot.get("metrics", {})}.items():
                if value is not None:
                    told[metric].append(value)
        for metric, values in told.items():
            where = {"server": server.id, "boots": len(values)}
            if terms.METRICS[metric].better is None:
                rows.append(_constant_row(metric, values, **where))
            else:
                rows.append(_interval_row(metric, intervals.of(values), statistic="mean", **where))
    return rows


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
        for metric in PER_CASE:
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
        fit = intervals.slope([p for p, _ in points], [t for _, t in points])
        if fit is not None and fit.low > 0:  # a slope that may be nought says nothing of a speed
            fits.append(fit)
    if not fits:
        return []
    found = intervals.of([1 / f.mean for f in fits])
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
    for statistic, over in (("mean_of_means", _mean), ("token_weighted", _token_weighted)):
        if statistic == "token_weighted" and not metric.startswith("decode_tps"):
            continue
        by_boot: dict[int, list[float]] = defaultdict(list)
        for (boot, _), asked in sorted(whole.items()):
            by_boot[boot].append(over(metric, asked))
        rows.append(
            _interval_row(metric, intervals.over_boots(by_boot), statistic=statistic, boots=len(by_boot), **where)
        )
    return rows


def _mean(metric: str, records: list[Record]) -> float:
    return fmean(metrics.DEFINITIONS[metric](r) for r in records)


def _token_weighted(metric: str, records: list[Record]) -> float:
    """Σ tokens / Σ seconds: the speed of the whole round, in which a long answer weighs more."""
    speeds = [(metrics.DEFINITIONS[metric](r), r.output_tokens) for r in records]
    return sum(n for _, n in speeds) / sum(n / s for s, n in speeds)


def _flags(records: list[Record], rows: list[dict]) -> list[str]:
    """What a reader must know before believing a number."""
    found = []
    failed = [r for r in records if r.status not in ANSWERED]
    if failed:
        kinds = ", ".join(f"{n} {s.replace('_', ' ')}" for s, n in Counter(r.status for r in failed).items())
        found.append(f"{len(failed)} of {len(records)} requests failed ({kinds}); no mean includes them")
    found += _disagreements(rows)
    repeated = sum(_repeats(r) for r in records if r.status in ANSWERED)
    if repeated:
        found.append(f"{repeated} of {len(records)} answers are one token over and over")
    found += _drift(records) + _broken_rounds(records)
    return found


def _broken_rounds(records: list[Record]) -> list[str]:
    """Rounds without an answer to every prompt, which are in no suite value; and requests that stand twice."""
    found = []
    good = [r for r in records if r.status in ANSWERED]
    keys = Counter((r.server, r.boot, r.workload, r.case, r.repeat) for r in good)
    twice = sum(n > 1 for n in keys.values())
    if twice:
        found.append(f"{twice} requests stand more than once in records.jsonl: the folder was changed by hand")
    for workload in sorted({r.workload for r in records}):
        mine = [k for k in {(r.server, r.boot, r.case, r.repeat) for r in records if r.workload == workload}]
        cases = {case for _, _, case, _ in mine}
        rounds = {(server, boot, repeat) for server, boot, _, repeat in mine}
        whole = [k for k in rounds if all(keys[k[0], k[1], workload, case, k[2]] for case in cases)]
        if len(whole) < len(rounds):
            found.append(
                f"{len(rounds) - len(whole)} of {len(rounds)} rounds of {workload} lack an answer; no suite value "
                "includes them"
            )
    return found


def _repeats(record: Record) -> bool:
    """Whether one token fills the answer; a few tokens cannot tell."""
    enough = (record.output_tokens or 0) >= metrics.MIN_DECODE_TOKENS
    return enough and (metrics.repetition_share(record) or 0) >= 0.9


def _disturbances(started: dict[int, dict], cpus: int | None) -> list[str]:
    """Boots beside which the machine did something else, by its load before the start and by CPU steal."""
    found = []
    for n, boot in started.items():
        machine = boot.get("machine", {})
        load, steal = machine.get("load_before"), machine.get("steal_share")
        if cpus and load is not None and load > BUSY_LOAD * cpus:
            found.append(
                f"boot {n}: the machine was busy before it, load {load:g} on {cpus} CPUs; close what else runs"
            )
        if steal is not None and steal > BUSY_STEAL:
            found.append(f"boot {n}: the hypervisor took {steal:.0%} of the CPU's time; choose a calmer hour")
    return found


def _disagreements(rows: list[dict]) -> list[str]:
    """Decode speeds that the client and the server's own clock put more than DIFFERS apart."""
    where = ("server", "workload", "case", "statistic")
    own = {tuple(r[k] for k in where): r for r in rows if r["metric"] == "decode_tps.server"}
    found = []
    for row in rows:
        twin = own.get(tuple(row[k] for k in where)) if row["metric"] == "decode_tps" else None
        if twin and abs(row["value"] / twin["value"] - 1) > DIFFERS:
            found.append(
                f"decode speed of {row['case']} ({row['server']}): the client says {row['value']:.1f}, "
                f"the server {twin['value']:.1f} tok/s: more than {DIFFERS:.0%} apart"
            )
    return found


def _drift(records: list[Record]) -> list[str]:
    """A slope of decode speed over the rounds that its interval keeps from nought."""
    found = []
    for workload in sorted({r.workload for r in records}):
        speeds = [
            (r.repeat, s) for r in records if r.workload == workload and (s := metrics.decode_tps(r)) is not None
        ]
        fit = intervals.slope([x for x, _ in speeds], [y for _, y in speeds])
        if fit is not None and (fit.low > 0 or fit.high < 0):
            mean = fmean(y for _, y in speeds)
            found.append(
                f"decode speed of {workload} drifts by {fit.mean / mean:+.1%} a round "
                f"({fit.low / mean:+.1%} to {fit.high / mean:+.1%}): the machine was not steady"
            )
    return found


def _here(path: Path, recipe: Recipe, started: dict[int, dict], weights: dict) -> dict:
    """Facts found in this run, by condition name."""
    facts = read_json(path / "machine.json") if (path / "machine.json").exists() else {}
    pins = recipe.engine.install.pins
    freeze = (path / "engine-freeze.txt").read_text() if (path / "engine-freeze.txt").exists() else ""
    installed = dict(line.split("  #")[0].strip().split("==") for line in freeze.splitlines() if "==" in line)
    versions = [installed.get(name) for name in pins]
    first = next(iter(started.values()), {})
    adapted = sorted({a for b in started.values() for a in b.get("adaptations", [])})
    steal = [b["machine"]["steal_share"] for b in started.values() if b.get("machine", {}).get("steal_share")]
    return {
        "weights_sha256": weights["facts"].get("model.sha256"),
        "engine_version": recipe.engine.version
        if versions == list(pins.values())
        else ", ".join(v for v in versions if v) or None,
        "threads": first.get("effective", {}).get("threads", first.get("threads")),
        "adaptations": "; ".join(adapted) or None,
        "load_1min": facts.get("load_1min"),
        "steal_share": max(steal, default=None),
    }
