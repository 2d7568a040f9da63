"""What two measurements must share: published against here. Each is equal, differs, unknown here, unstated."""

import json
from typing import Literal, NamedTuple

from llmrepro.claim import Conditions
from llmrepro.recipe import Recipe

Relation = Literal["equal", "differs", "unknown_here", "unstated_there"]


class Condition(NamedTuple):
    name: str
    deciding: bool
    published: str | int | float | bool | None
    here: str | int | float | bool | None
    relation: Relation


def compare(committed: Recipe, resolved: Recipe, here: dict) -> list[Condition]:
    """Conditions of a run. `here` are facts found: `weights_sha256`, `engine_version`, and any name that the
    recipe's own conditions use. What a run changed against the committed recipe is a deciding condition.
    """
    found = [
        condition("weights sha256", True, committed.model.files[0].sha256, here.get("weights_sha256")),
        condition("engine version", True, committed.engine.version, here.get("engine_version")),
    ]
    found += stated(committed.conditions, here)
    found += [
        condition(path, True, was, now)
        for path, was, now in _differences(
            json.loads(committed.model_dump_json()), json.loads(resolved.model_dump_json())
        )
    ]
    noted = ("threads", "fixes", "adaptations", "load_1min", "steal_share")
    return found + [condition(name, False, None, here[name]) for name in noted if here.get(name) is not None]


def stated(bound: Conditions, here: dict) -> list[Condition]:
    """The conditions that a claim itself is bound to, against what was found here by the same names."""
    return [
        condition(name, deciding, value, here.get(name))
        for deciding, values in ((True, bound.deciding), (False, bound.noted))
        for name, value in values.items()
    ]


def condition(name: str, deciding: bool, published, here) -> Condition:
    """One condition with its relation; None is unstated there, or unknown here."""
    relation = (
        "unstated_there"
        if published is None
        else "unknown_here"
        if here is None
        else "equal"
        if published == here
        else "differs"
    )
    return Condition(name, deciding, published, here, relation)


def _differences(was, now, path: str = "") -> list[tuple]:
    """(dotted path, committed, resolved) of every leaf that differs; entries with an `id` are matched by it."""
    if isinstance(was, dict) and isinstance(now, dict):
        keys = [*was, *(k for k in now if k not in was)]
        return [
            d
            for k in keys
            if k not in _FREE
            for d in _differences(was.get(k), now.get(k), f"{path}.{k}".lstrip("."))
        ]
    if isinstance(was, list) and isinstance(now, list) and any(isinstance(x, dict) and "id" in x for x in was):
        by_id = {x["id"]: x for x in was}
        return [d for x in now for d in _differences(by_id.get(x["id"]), x, f"{path}.{x['id']}")]
    if was == now:
        return []
    return [(path, *(v if isinstance(v, str | int | float | bool | None) else json.dumps(v) for v in (was, now)))]


# What a run may choose freely: more or fewer rounds is n, not another measurement; words are not settings.
_FREE = {
    *("claims", "comparisons", "needs", "title", "question", "source", "schema_"),
    *("repeats", "boots", "profiles"),
}
