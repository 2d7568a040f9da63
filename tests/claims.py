"""Claims and metric rows for the tests of verdicts, made as recipes and results make them."""

from llmrepro import catalog, rows, terms, verdict
from llmrepro.claim import Claim

RECIPE = catalog.load(catalog.DEFAULT)


def claim(metric="decode_tps", value=None, **changes) -> Claim:
    """A claim of 100 tok/s about one case of the default recipe; `changes` are fields."""
    fields = {
        "id": "c",
        "metric": metric,
        "value": value or {"point": 100.0},
        "unit": terms.METRICS[metric].unit,
        "server": "default",
        "workload": "chat",
        "case": "code_runs",
        "evidence": "stated",
        "locator": "here",
    }
    if terms.METRICS[metric].of in ("boot", "weights"):
        fields |= {"workload": None, "case": None}
    return Claim.model_validate({**fields, **changes})


def fact(value, metric="prompt_tokens", **changes) -> dict:
    """The row of a fact, such as a count."""
    told = {"server": "default", "workload": "chat", "case": "code_runs", **changes}
    return rows.row(metric, value, **told)


def sampled(*boots, metric="decode_tps", tokens=256, **changes) -> dict:
    """The row of samples, a list per boot."""
    told = {"server": "default", "workload": "chat", "case": "code_runs", "statistic": "mean"}
    if terms.METRICS[metric].of == "boot":
        told |= {"workload": None, "case": None}
    return rows.sampled(metric, dict(enumerate(boots)), output_tokens=tokens, **{**told, **changes})


def around(**changes) -> verdict.Around:
    """What surrounds the verdicts of a run of the default recipe."""
    return verdict.Around(RECIPE, **changes)


def between(relative, metric="decode_tps", of="boot", **changes) -> dict:
    return {"metric": metric, "relative": relative, "of": of, "source": "measured before", **changes}


def tolerance(relative) -> dict:
    return {"relative": relative, "reason": "so it is"}
