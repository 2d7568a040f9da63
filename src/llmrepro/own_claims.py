"""What a run of one's own measured, as the claims of a recipe: others can then hold their machine against it."""

from pathlib import Path

from llmrepro import conditions, facts, imported, results, running_server, terms
from llmrepro.notation import plural
from llmrepro.recipe import Recipe
from llmrepro.run import boots, load_recipe
from llmrepro.run_folder import RunError, read_lines, status

# Facts of the machine and the engine that decide whether somebody else's run is the same measurement.
DECIDING = ("cpu_model", "cpu_simd", "gpu_name", "gpu_count", "gpu_power_limit_w", "kv_dtype", "speculation")
# What else is told of the machine as it stood; clocks and links of an idle GPU say nothing of it at work.
NOTED = ("cpu_cores", "memory_gib", "memory_speed", "os", "gpu_memory_gib", "gpu_driver")
IDENTITY = ("weights", "engine", "drafter")  # how conditions begin that tell what was measured
METRICS = ("decode_tps", "ttft_s", "prefill_tps", "prefill_tps.slope", "startup.first_completion_s")
START = {"relative": 0.25, "reason": "a start is short, and the page cache and other programs decide it"}
DIGITS = 6  # significant ones of a claim's numbers
FEW_BOOTS = 3  # fewer say next to nothing of how far boots lie apart


def of(path: Path, recipe: Recipe) -> tuple[dict, list[str]]:
    """The keys `claims`, `comparisons`, `conditions` and `source` of a recipe's JSON from a run of that recipe,
    and what there is to say of them, a sentence each.

    Values are the run's means with their samples, the conditions are the run's own, and what it was flagged with
    stays with its source: whoever reads the later page can judge it. Raises RunError when it is a run of another
    recipe, measured nothing, or not what the recipe says.
    """
    path = path.expanduser().resolve()
    if imported.there(path):
        raise RunError(f"{path} holds imported numbers, which were not measured here; give a run of one's own")
    run = load_recipe(path)
    if run.id != recipe.id:
        raise RunError(f"{path} is a run of {run.id}, not of {recipe.id}; give a run of that")
    result = results.compute(path)
    seen = facts.read(path)
    own = _of_one_server(seen)
    claims = [_claim(row, path, own.get(row["server"], {})) for row in result["metrics"] if _tells(row)]
    if not claims:
        ended = status(path, page=False)["outcome"]
        raise RunError(f"{path} measured nothing that could be claimed: {ended}; give a complete run")
    _must_be_the_recipes(path, result)
    here = {name: value for name, value in seen.shared.items() if not any(name in told for told in own.values())}
    deciding, noted = (
        {name: here[name] for name in names if here.get(name) not in (None, "none", 0)}
        for names in (DECIDING, NOTED)
    )
    day = min((r["started_at"][:10] for r in read_lines(path / "records.jsonl")), default=None)
    flagged = f"; the run was flagged: {' | '.join(result['flags'])}" if result["flags"] else ""
    written = {
        "claims": claims,
        "comparisons": [],
        "conditions": {"deciding": deciding, "noted": noted},
        "source": {"publication": f"a run of one's own, {path.name} (based on {run.id}){flagged}", "date": day},
    }
    return written, _said(written, path.name, result)


def _said(written: dict, name: str, result: dict) -> list[str]:
    """What was taken from the run, and what speaks against believing it."""
    told = [f"claims: {plural(len(written['claims']), 'value')} that {name} measured, in place of others'"]
    for part, what in (("deciding", "that decide"), ("noted", "noted")):
        if named := ", ".join(f"{n} {v}" for n, v in written["conditions"][part].items()):
            told.append(f"conditions {what}, as {name} found them: {named}")
    fewest = min(row["boots"] for row in result["metrics"] if _tells(row))
    if fewest < FEW_BOOTS:
        told.append(
            f"warning: they rest on {plural(fewest, 'boot')}, from which nobody knows how far boots lie apart; "
            f"{FEW_BOOTS} or more make better claims"
        )
    return [*told, *(f"warning: {name} was flagged: {flag}" for flag in result["flags"])]


def _must_be_the_recipes(path: Path, result: dict) -> None:
    """Raises RunError unless a run is complete, this kit's own, and the measurement that its recipe describes.
    The machine may be another than the published one: the claims are bound to the run's own."""
    ended = status(path, page=False)["outcome"]
    if ended != "completed":
        raise RunError(f"{path} is {ended}, and only a complete run is claimed; finish it, or give another")
    if running_server.of(boots(path)):
        raise RunError(
            f"{path} asked a server that somebody else started, so that what was measured is not known; "
            "give a run without server_url"
        )
    if changed := results.measured(path).absent:
        raise RunError(f"{path}: {changed}; give a run as it was written")
    found = [conditions.Condition(**c) for c in result["conditions"]]
    differs = [c for c in conditions.differing(found) if not c.name.startswith(("cpu_", "gpu_"))]
    if differs:
        raise RunError(
            f"{path} is not the measurement that its recipe describes ({conditions.named(differs)}); "
            "give a run of the recipe as it is"
        )
    unknown = [c for c in found if c.deciding and c.relation == "unknown_here" and c.name.startswith(IDENTITY)]
    if unknown:
        names = ", ".join(map(conditions.label, unknown))
        raise RunError(f"{path} does not tell its {names}, so nobody could measure it again; give a run that does")


def _tells(row: dict) -> bool:
    """Whether a row is a value that a claim can name: a mean of requests or boots, of a suite the plain one."""
    made_for_a_case = row["metric"].startswith("startup.") and row["workload"] is not None
    of_one = row["statistic"] in ("mean", "slope", "mean_of_means")
    return row["metric"] in METRICS and row["value"] is not None and of_one and not made_for_a_case


def _of_one_server(seen: facts.Facts) -> dict[str, dict]:
    """By server what decides there and not everywhere: what one server drafts binds no claim of another."""
    return {
        server: {n: told[n] for n in DECIDING if told.get(n) not in (None, seen.shared.get(n))}
        for server, told in seen.servers.items()
    }


def _rounded(value: float) -> float:
    """No clock and no noise here carries more digits, and a page shows a published figure with all it has."""
    return float(f"{value:.{DIGITS}g}")


def _claim(row: dict, path: Path, own: dict) -> dict:
    parts = [p for p in (row["metric"], row["server"], row["workload"], row["case"]) if p is not None]
    samples = [_rounded(value) for value in row["by_boot"]] if len(row["by_boot"]) > 1 else []
    # one value has no spread, nor has a line through all of them; of several boots the samples say it
    alone = samples or row["n"] < 2 or row["statistic"] == "slope" or row["least"] in (None, row["greatest"])
    return {
        "id": "-".join(parts)[:80],
        "title": " · ".join([terms.METRICS[row["metric"]].title, *parts[1:]]),
        **{key: row[key] for key in ("server", "workload", "case") if row[key] is not None},
        "metric": row["metric"],
        **({"statistic": "mean_of_means"} if row["statistic"] == "mean_of_means" else {}),
        "value": {"point": _rounded(row["value"])},
        "unit": row["unit"],
        "n": row["n"],
        **({"samples": samples} if samples else {}),
        **({} if alone else {"spread": [_rounded(row["least"]), _rounded(row["greatest"])]}),
        **({"conditions": {"deciding": own}} if own else {}),
        **({"tolerance": START} if row["metric"].startswith("startup.") else {}),
        "evidence": "measured",
        "locator": f"run {path.name}, result.json: {', '.join(parts)}",
    }
