"""What two measurements must share: published against here. Each is equal, differs, unknown here, unstated."""

import json
from typing import Literal, NamedTuple

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
        _condition("weights sha256", True, committed.model.files[0].sha256, here.get("weights_sha256")),
        _condition("engine version", True, committed.engine.version, here.get("engine_version")),
    ]
    for deciding, stated in ((True, committed.conditions.deciding), (False, committed.conditions.noted)):
        found += [_condition(name, deciding, value, here.get(name)) for name, value in stated.items()]
    found += [
        _condition(path, True, was, now)
        for path, was, now in _differences(
            json.loads(committed.model_dump_json()), json.loads(resolved.model_dump_json())
        )
    ]
    noted = ("threads", "adaptations", "load_1min", "steal_share")
    return found + [_condition(name, False, None, here[name]) for name in noted if here.get(name) is not None]


def _condition(name: str, deciding: bool, published, here) -> Condition:
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
