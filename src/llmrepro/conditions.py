"""What two measurements must share: published against here. Each is equal, differs, unknown here, unstated."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from llmrepro import prompts, terms
from llmrepro.claim import Claim, Conditions, Side
from llmrepro.gpus import power_limit_command
from llmrepro.matching import same
from llmrepro.model import Weights
from llmrepro.notation import number
from llmrepro.recipe import Recipe

Relation = Literal["equal", "differs", "unknown_here", "unstated_there"]
COMMIT = re.compile(r"[0-9a-f]{40}")
NOTED = ("threads", "fixes", "adaptations", "load_1min", "steal_share")  # told of every run


class Condition(NamedTuple):
    """`name` is one of terms.CONDITIONS, or the dotted path of a setting of the recipe. `server` is None where it
    concerns them all; `remedy` is the command that would make it equal, where there is one."""

    name: str
    deciding: bool
    published: str | int | float | bool | None
    here: str | int | float | bool | None
    relation: Relation
    server: str | None = None
    remedy: str | None = None


def compare(
    committed: Recipe, resolved: Recipe, here: Mapping, servers: Mapping[str, Mapping] | None = None
) -> list[Condition]:
    """Conditions of a run. `here` are facts found, by the names that recipes' conditions use (facts.py), `servers`
    those of its servers that are not the same for all. What a run changed against the committed recipe is a
    deciding condition; so is which text of a prompt was asked. `here["weights"]` is the run's weights.json.
    """
    bound = committed.conditions
    given = {**bound.deciding, **bound.noted}
    found = []
    if "weights_sha256" not in given:
        found.append(condition("weights_sha256", True, _weights(committed), here.get("weights_sha256")))
    if not {"engine_version", "engine_commit"} & set(given):
        found.append(condition("engine_version", True, committed.engine.version, here.get("engine_version")))
    found += stated(bound, here, servers, also=[committed.model.repo, *committed.model.also_named])
    found += _weights_served(committed, given, here.get("weights"))
    found += _prompts(committed, here.get("prompts"))
    found += [
        Condition(path, True, *("not set" if v is None else v for v in (was, now)), "differs")
        for path, was, now in _differences(
            json.loads(committed.model_dump_json()), json.loads(resolved.model_dump_json())
        )
    ]
    return found + [
        condition(name, False, None, here[name])
        for name in NOTED
        if name not in given and here.get(name) is not None
    ]


def stated(
    bound: Conditions, here: Mapping, servers: Mapping[str, Mapping] | None = None, also: Iterable[str] = ()
) -> list[Condition]:
    """Conditions that something published is bound to, against what was found here by the same names. A fact that
    the servers do not share is one condition of each. `also` are further names of the weights' repository."""
    return [
        _finished(condition(name, deciding, value, facts.get(name), server), facts, also)
        for deciding, values in ((True, bound.deciding), (False, bound.noted))
        for name, value in values.items()
        for server, facts in _holders(name, here, servers or {})
    ]


def of_claim(
    claim: Claim, found: list[Condition], here: Mapping, servers: Mapping[str, Mapping] | None = None
) -> list[Condition]:
    """A run's conditions as they bear on one claim: what it is bound to itself stands in place of the recipe's."""
    servers = servers or {}
    if claim.server in servers:
        here, servers = {**here, **servers[claim.server]}, {}
    names = {*claim.conditions.deciding, *claim.conditions.noted}
    kept = [c for c in concerning(found, claim) if c.name not in names]
    return kept + concerning(stated(claim.conditions, here, servers), claim)


def concerning(conditions: Iterable[Condition], about: Claim | Side) -> list[Condition]:
    """Those that bear on a claim, or on a side of a comparison: a setting of another workload or server
    (`workloads.chat.…`) changes nothing for it."""
    return [c for c in conditions if _concerns(c, about)]


def differing(conditions: Iterable[Condition]) -> list[Condition]:
    """Those that bar a verdict."""
    return [c for c in conditions if c.deciding and c.relation == "differs"]


def named(conditions: Iterable[Condition]) -> str:
    """Each with what was published and what is here; of a power limit the command that sets it."""
    return "; ".join(
        f"{label(c)}: published {_text(c.published)}, here {_text(c.here)}"
        + (f" (set it with `{c.remedy}` and run again)" if c.remedy else "")
        for c in conditions
    )


def label(found: Condition) -> str:
    title = terms.CONDITIONS.get(found.name) or found.name.replace("_", " ")
    return title + (f" ({found.server})" if found.server else "")


def counted(conditions: Iterable[Condition]) -> str:
    """How many deciding conditions nobody can hold against each other, as the end of a sentence; "" for none."""
    deciding = [c.relation for c in conditions if c.deciding]
    unstated, unknown = deciding.count("unstated_there"), deciding.count("unknown_here")
    said = [
        f"{n} condition{'s' if n > 1 else ''} {what}"
        for n, what in ((unstated, "unstated by the publication"), (unknown, "not observable here"))
        if n
    ]
    return "; " + ", ".join(said) if said else ""


def condition(name: str, deciding: bool, published, here, server: str | None = None) -> Condition:
    """One condition with its relation; None is unstated there, or unknown here."""
    relation = (
        "unstated_there"
        if published is None
        else "unknown_here"
        if here is None
        else "equal"
        if same(name, published, here)
        else "differs"
    )
    return Condition(name, deciding, published, here, relation, server)


def _finished(found: Condition, facts: Mapping, also: Iterable[str]) -> Condition:
    """The weights' repository, equal under every name that the recipe gives it; a power limit with the command
    that sets it."""
    if found.relation != "differs":
        return found
    names = {name.lower() for name in also}
    if found.name == "weights_repo" and {str(found.published).lower(), str(found.here).lower()} <= names:
        return found._replace(relation="equal")
    if found.name == "gpu_power_limit_w" and isinstance(found.published, int | float):
        cards = facts.get("gpu_indexes") or [0]
        return found._replace(remedy="; ".join(power_limit_command(i, found.published) for i in cards))
    return found


def _holders(name: str, here: Mapping, servers: Mapping[str, Mapping]) -> list[tuple[str | None, Mapping]]:
    """(server, facts) for each of a fact's values: one for all servers where they agree."""
    values = {str(facts.get(name)) for facts in servers.values() if name in facts}
    if len(values) < 2:
        return [(None, here)]
    return [(server, facts) for server, facts in servers.items() if name in facts]


def _weights(recipe: Recipe) -> str | None:
    """The published hash, of several files all of them in order; None where one is not published."""
    known = [f.sha256 for f in recipe.model.files]
    return None if None in known else " ".join(known)


def _weights_served(recipe: Recipe, given: Mapping, told: Mapping | None) -> list[Condition]:
    """Of `told`, a run's weights.json: where the weights come from, unless the published hash of every file says
    what they are; what was made of them; and the drafter."""
    model, told = recipe.model, told or {}
    found = []
    if _weights(recipe) is None:
        found += _origin("weights", model, told, given, known="repo" in told)
    if model.prepare or model.overlay:
        as_published = model.prepare and model.prepare.model_dump()
        overlay = model.overlay and {"repo": model.overlay.repo, "revision": model.overlay.revision}
        over = _as_named(model.overlay, told.get("overlay"))
        here = _made(told.get("prepared"), over) if "repo" in told else None
        found.append(condition("weights_as_prepared", True, _made(as_published, overlay), here))
    if model.draft:
        found += _origin("drafter", model.draft, told.get("draft") or {}, {}, known="draft" in told)
    return found


def _origin(name: str, model: Weights, told: Mapping, given: Mapping, known: bool) -> list[Condition]:
    """Repository and revision of a checkpoint; of a person's own copy, which has none, that it is one. A commit
    names its content, under whatever name a repository stands now."""
    stated = f"{model.repo} at {model.revision or 'a revision that is not stated'}"
    if f"{name}_repo" in given and given[f"{name}_repo"] is None:
        stated = f"a checkpoint that the publication does not name (the recipe takes {model.repo})"
    if known and told.get("repo") is None:
        return [condition(name, True, stated, "your own copy, whose origin is not known")]
    here = _as_named(model, told) if known else {}
    repo = condition(f"{name}_repo", True, model.repo, here.get("repo"))
    revision = condition(f"{name}_revision", True, model.revision, here.get("revision"))
    if revision.relation == "equal" and COMMIT.fullmatch(model.revision):
        repo = repo._replace(relation="equal")
    return [one for one in (repo, revision) if one.name not in given and one.published is not None]


def _as_named(model: Weights | None, told: Mapping | None) -> dict | None:
    """Repository and revision as found: by the recipe's name for it, and a commit where the recipe names one."""
    if told is None or model is None:
        return None
    names = {name.lower() for name in (model.repo, *model.also_named)}
    repo = model.repo if str(told.get("repo")).lower() in names else told.get("repo")
    named = repo == model.repo and not COMMIT.fullmatch(model.revision or "")  # "main", a tag, a version
    return {"repo": repo, "revision": model.revision if named else told.get("revision")}


def _made(prepared: Mapping | None, overlay: Mapping | None) -> str:
    """What an engine is given of a checkpoint, in words."""
    said = []
    if prepared:
        scripts = ", ".join(prepared["scripts"])
        said.append(f"prepared by {scripts} of {prepared['repo']} at {prepared['commit']}")
    if overlay:
        said.append(f"overlaid with {overlay['repo']} at {overlay['revision'] or 'its main'}")
    return ", ".join(said) or "as they are, neither prepared nor overlaid"


def _prompts(recipe: Recipe, asked: Mapping[str, str] | None) -> list[Condition]:
    """Of each workload whose prompts a publication has: whether its own texts were asked, or this kit's."""
    theirs = prompts.published(recipe)
    ours = {name: prompt.sha256 for name, prompt in prompts.every(recipe)}
    found = []
    for workload in recipe.workloads:
        measured = [*workload.prompts, *([workload.text] if workload.text else [])]
        names = {prompts.key(workload, p): p.id for p in measured if prompts.key(workload, p) in theirs}
        other = [
            name
            for key, name in names.items()
            if asked is not None
            and (asked.get(key) != theirs[key] if theirs[key] else asked.get(key) == ours[key])
        ]
        if names:
            whole = "the publication's texts"
            here = None if asked is None else f"texts of this kit for {', '.join(other)}" if other else whole
            found.append(condition(f"workloads.{workload.id}.prompt", True, whole, here))
    return found


def _concerns(found: Condition, about: Claim | Side) -> bool:
    if found.server is not None and about.server not in (None, found.server):
        return False
    part, _, rest = found.name.partition(".")
    if not rest:
        return True
    if part in ("claims", "comparisons"):  # one that a run rewrote is not the published one
        return part == "claims" and rest.partition(".")[0] == getattr(about, "id", None)
    own = {"workloads": about.workload, "servers": about.server}.get(part, ...)
    return own is ... or (own is None and part == "servers") or own == rest.partition(".")[0]


def _text(value: object) -> str:
    return value if isinstance(value, str) else number(value)


def _differences(was, now, path: str = "") -> list[tuple]:
    """(dotted path, committed, resolved) of every leaf that differs; entries with an `id` are matched by it."""
    if isinstance(was, dict) and isinstance(now, dict):
        keys = [*was, *(k for k in now if k not in was)]
        return [
            d
            for k in keys
            if k not in _FREE and (path or k not in _FREE_ABOVE)
            for d in _differences(was.get(k), now.get(k), f"{path}.{k}".lstrip("."))
        ]
    if isinstance(was, list) and isinstance(now, list) and any(isinstance(x, dict) and "id" in x for x in was):
        by_id = {x["id"]: x for x in was}
        return [d for x in now for d in _differences(by_id.get(x["id"]), x, f"{path}.{x['id']}")]
    if was == now:
        return []
    return [(path, *(v if isinstance(v, str | int | float | bool | None) else json.dumps(v) for v in (was, now)))]


# What a run may choose freely: more or fewer rounds is n, not another measurement; words are not settings.
_FREE = {"title", "repeats", "boots", "profiles"}
_FREE_ABOVE = {"needs", "question", "source", "schema_", "safety", "out_of_scope"}
