"""What a run of one's own measured, as the claims of a recipe: others can then hold their machine against it."""

from pathlib import Path

from llmrepro import results, terms
from llmrepro.recipe import Recipe
from llmrepro.run import load_recipe
from llmrepro.run_folder import RunError, read_lines, status

# Facts of the machine and the engine that decide whether somebody else's run is the same measurement.
DECIDING = ("cpu_model", "cpu_simd", "gpu_name", "gpu_count", "gpu_power_limit_w", "kv_dtype", "speculation")
METRICS = ("decode_tps", "ttft_s", "prefill_tps", "prefill_tps.slope", "startup.first_completion_s")
START = {"relative": 0.25, "reason": "a start is short, and the page cache and other programs decide it"}


def of(path: Path, recipe: Recipe) -> dict:
    """The keys `claims`, `comparisons`, `conditions` and `source` of a recipe's JSON from a run of that recipe.

    Values are the run's means with their samples, and the conditions that decide are the run's own. Raises
    RunError when it is a run of another recipe or measured nothing.
    """
    path = path.expanduser().resolve()
    run = load_recipe(path)
    if run.id != recipe.id:
        raise RunError(f"{path} is a run of {run.id}, not of {recipe.id}; give a run of that")
    result = results.compute(path)
    claims = [_claim(row, path) for row in result["metrics"] if _tells(row)]
    if not claims:
        ended = status(path, page=False)["outcome"]
        raise RunError(f"{path} measured nothing that could be claimed: {ended}; give a complete run")
    here = results.here(path)
    deciding = {name: here[name] for name in DECIDING if here.get(name) not in (None, "none", 0)}
    day = min((r["started_at"][:10] for r in read_lines(path / "records.jsonl")), default=None)
    return {
        "claims": claims,
        "comparisons": [],
        "conditions": {"deciding": deciding},
        "source": {"publication": f"a run of one's own: {run.id}, {path.name}", "date": day},
    }


def _tells(row: dict) -> bool:
    """Whether a row is a value that a claim can name: a mean of requests or boots, of a suite the plain one."""
    made_for_a_case = row["metric"].startswith("startup.") and row["workload"] is not None
    of_one = row["statistic"] in ("mean", "slope", "mean_of_means")
    return row["metric"] in METRICS and row["value"] is not None and of_one and not made_for_a_case


def _claim(row: dict, path: Path) -> dict:
    parts = [p for p in (row["metric"], row["server"], row["workload"], row["case"]) if p is not None]
    several = len(row["by_boot"]) > 1
    return {
        "id": "-".join(parts)[:80],
        "title": " · ".join([terms.METRICS[row["metric"]].title, *parts[1:]]),
        **{key: row[key] for key in ("server", "workload", "case") if row[key] is not None},
        "metric": row["metric"],
        **({"statistic": "mean_of_means"} if row["statistic"] == "mean_of_means" else {}),
        "value": {"point": row["value"]},
        "unit": row["unit"],
        "n": row["rounds"],
        **({"samples": row["by_boot"]} if several else {}),
        **({"spread": [row["least"], row["greatest"]]} if row["least"] is not None else {}),
        **({"tolerance": START} if row["metric"].startswith("startup.") else {}),
        "evidence": "measured",
        "locator": f"run {path.name}, result.json: {', '.join(parts)}",
    }
