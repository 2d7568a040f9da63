"""result.json: every value with its interval, every condition and verdict, computed from the run folder alone."""

from collections import Counter
from pathlib import Path

from llmrepro import (
    cache_use,
    ceilings,
    conditions,
    contrast,
    credentials,
    engines,
    facts,
    flags,
    guard_log,
    ladder,
    request_rows,
    rows,
    running_server,
    sample_flags,
    sample_rows,
    samples,
    speculation,
    verdict,
)
from llmrepro.client import Record
from llmrepro.measurements import Findings
from llmrepro.metrics import ANSWERED
from llmrepro.pairing import Measured
from llmrepro.parameters import Parameters
from llmrepro.recipe import Recipe
from llmrepro.run import boots, load_recipe
from llmrepro.run_folder import read_json, read_json_if_there, read_lines, sha256_of, status
from llmrepro.verdict import Around

INPUTS = (
    *("recipe.json", "recipe.committed.json", "machine.json", "weights.json", "records.jsonl"),
    *("published_prompts.json", samples.FILE, credentials.FILE),
)
BEFORE_RECORDS = ("card", "machine", "prepare", "measure")  # a run that failed there has not what it should


def compute(path: Path) -> dict:
    """The content of result.json for a run folder. The same files always give the same result.

    `metrics` are rows, see rows.py; `requests` counts statuses per workload; `flags` are sentences; `verdicts` see
    verdict.Verdict, `comparisons` contrast.Compared; `speculation` see
    speculation.with_and_without; `inputs` are the sha256 of what was read.
    """
    recipe = load_recipe(path)
    started = boots(path)
    written = [Record.model_validate(r) for r in read_lines(path / "records.jsonl")]
    records = _by_replicate(written, started, recipe)
    seen_beside = sample_rows.beside(
        recipe, started, written, samples.read(path), guard_log.of_boots(path, started)
    )
    told = _rows(path, recipe, started, records) + sample_rows.of_run(seen_beside)
    seen = facts.read(path)
    found = conditions.compare(load_recipe(path, "recipe.committed.json"), recipe, seen.shared, seen.servers)
    found += _settings(recipe, started)
    asked = [r for r in records if not r.warmup]
    machine = read_json_if_there(path / "machine.json")
    above = ceilings.above(
        Findings(recipe, Parameters(), {}, machine, started, written, {"metrics": told}, {}, "", _weights(path))
    )
    bars = {r.server: r.sentence for r in above if r.finding == "bars"} if ceilings.trusted(machine) else {}
    around = _around(path, recipe, started, bars, _changed(records, started))
    return {
        "recipe": recipe.id,
        "metrics": told,
        "requests": {w.id: dict(Counter(r.status for r in asked if r.workload == w.id)) for w in recipe.workloads},
        "flags": flags.of(asked, told, recipe)
        + cache_use.flags(started, written)
        + speculation.flags(started, written)
        + running_server.flags(started)
        + flags.without_boot(written, started)
        + [f"{rate.what} ({rate.server}): {rate.sentence}" for rate in above]
        + flags.disturbances(started, machine.get("cpu", {}).get("usable_cpus"))
        + sample_flags.of(seen_beside)
        + credentials.flags(path),
        "held": ladder.sentences(recipe, asked),
        "conditions": [c._asdict() for c in found],
        "verdicts": [
            verdict.judge(c, told, conditions.of_claim(c, found, seen.shared, seen.servers), around).model_dump()
            for c in recipe.claims
        ],
        "comparisons": _comparisons(
            Measured(recipe, started, _counting(records), absent=around.absent), found, seen.shared, around
        ),
        "speculation": [
            compared
            for workload in recipe.workloads
            for compared in speculation.with_and_without(workload, _speculation(seen), _counting(records))
        ],
        "inputs": {
            n: sha256_of(path / n)
            for n in (*INPUTS, *(file for b in started for file in (f"boots/{b}.json", guard_log.name(b))))
            if (path / n).exists()
        },
    }


def measured(path: Path) -> Measured:
    """What a run measured, as comparisons take it."""
    recipe, started = load_recipe(path), boots(path)
    written = [Record.model_validate(r) for r in read_lines(path / "records.jsonl")]
    records = _by_replicate(written, started, recipe)
    return Measured(recipe, started, _counting(records), absent=_changed(records, started))


def _changed(records: list[Record], started: dict[int, dict]) -> str | None:
    """Why no word is earned by a folder that was changed by hand: what its flags say, or None."""
    return "; ".join(flags.changed(records, started)) or None


def here(path: Path) -> dict:
    """Facts found in a run, by the names of conditions."""
    return facts.read(path).shared


def _weights(path: Path) -> dict:
    return read_json(path / "weights.json") if (path / "weights.json").exists() else {"facts": {}}


def _rows(path: Path, recipe: Recipe, started: dict[int, dict], records: list[Record]) -> list[dict]:
    weights = _weights(path)
    claimed = {c.metric for c in (*recipe.claims, *recipe.comparisons)}
    found = [rows.row(m, v) for m, v in weights["facts"].items()] + rows.of_boots(recipe, started, claimed)
    planned = {s.id: s.boots for s in recipe.servers}
    for workload in recipe.workloads:
        for server in workload.on:
            mine = [r for r in records if not r.warmup and (r.workload, r.server) == (workload.id, server)]
            wanted = _claimed_of(recipe, workload.id)
            found += request_rows.of_workload(workload, server, mine, wanted, planned[server])
            if workload.kind == "prefix" and mine:
                found += rows.hit_rate(workload, server, started)
        found += speculation.rows(workload, _counting(records), started)
    return found


def _claimed_of(recipe: Recipe, workload: str) -> set[str]:
    """The metrics that are claimed of a workload, or of no workload in particular."""
    single = {c.metric for c in recipe.claims if c.workload in (None, workload)}
    return single | {c.metric for c in recipe.comparisons if workload in (c.a.workload, c.b.workload)}


def _around(
    path: Path, recipe: Recipe, started: dict[int, dict], bars: dict[str, str], changed: str | None
) -> Around:
    """How the run ended, as far as it bears on verdicts."""
    told = status(path, page=False)
    outcome, stage = told["outcome"], told.get("stage")
    where = "" if outcome == "lacking" else f" in the stage {stage}"
    why = f"{outcome}{where}: {told.get('reason') or 'no reason told'}"
    if outcome == "lacking" or (outcome == "failed" and stage in BEFORE_RECORDS):
        return Around(recipe, absent=why)
    unfinished = why if outcome in ("failed", "stopped", "interrupted") else None
    return Around(
        recipe,
        unfinished=unfinished,
        imported=outcome == "imported",
        running=running_server.of(started) is not None,
        bars=bars,
        changed=changed,
    )


def _comparisons(run: Measured, found: list[conditions.Condition], here: dict, around: Around) -> list[dict]:
    """Claims across two measurements of this run."""
    compared = [
        contrast.compare(
            c,
            run,
            run,
            [
                x
                for x in found
                if x in conditions.concerning(found, c.a)
                or x in conditions.concerning(found, c.b)
                or x.name.startswith(f"comparisons.{c.id}.")
            ]
            + conditions.stated(c.conditions, here),
        ).model_dump()
        for c in run.recipe.comparisons
    ]
    if around.changed and not around.absent:
        return [c | {"word": "not_evaluated", "reason": f"{around.changed}; {c['reason']}"} for c in compared]
    return compared


def _speculation(seen: facts.Facts) -> dict[str, str | None]:
    """What each server was found to do of speculative decoding."""
    return {server: told["speculation"] for server, told in seen.servers.items()}


def _counting(records: list[Record]) -> list[Record]:
    return [r for r in records if not r.warmup and r.status in ANSWERED]


def _by_replicate(records: list[Record], started: dict[int, dict], recipe: Recipe) -> list[Record]:
    """The records with, as their boot, the first boot of their replicate: a boot that went on where a dead or
    interrupted one stopped continues its rounds, and is no replication of its own. Left out are answers that a
    later boot was asked for again, which happens to streams: they are one measurement, or none."""
    first: dict[tuple, int] = {}
    for n, boot in started.items():
        first.setdefault((boot["server"], boot["replicate"]), n)
    own = {n: first[boot["server"], boot["replicate"]] for n, boot in started.items()}
    together = {w.id for w in recipe.workloads if w.kind == "concurrency"}
    last: dict[tuple, int] = {}
    for r in records:
        last[_asked(r, own)] = max(r.boot, last.get(_asked(r, own), 0))
    kept = [
        r
        for r in records
        if r.workload not in together or r.status not in ANSWERED or r.boot == last[_asked(r, own)]
    ]
    return [r.model_copy(update={"boot": own.get(r.boot, r.boot)}) for r in kept]


def _asked(record: Record, own: dict[int, int]) -> tuple:
    """What is asked once in a replicate."""
    return own.get(record.boot), record.workload, record.case, record.repeat, record.warmup


def _settings(recipe: Recipe, started: dict[int, dict]) -> list[conditions.Condition]:
    """What each server was asked for in its arguments against what it says it runs with, where it says so."""
    read = getattr(engines.load(recipe.engine.name), "settings", None)
    boot_of = {b["server"]: b for b in reversed(started.values())}
    external = [s for s in recipe.servers if boot_of.get(s.id, {}).get("external")]
    unseen = [conditions.condition(f"servers.{s.id}.args", True, " ".join(s.args), None) for s in external]
    if read is None:
        return unseen
    return unseen + [
        conditions.condition(f"servers.{s.id}.{name}", True, asked, found)
        for s in recipe.servers
        if s.id in boot_of
        for name, asked, found in read(_filled(s.args, boot_of[s.id]), boot_of[s.id].get("effective", {}))
        if found is not None
    ]


def _filled(args: list[str], boot: dict) -> list[str]:
    return [a.replace("{threads}", str(boot.get("threads"))) for a in args]
