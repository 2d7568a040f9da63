"""What arms differ in beyond the engine, read from their recipes, their servers and their machines."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

from llmrepro.model import Model
from llmrepro.notation import number
from llmrepro.recipe import Recipe
from llmrepro.workload import Workload

DTYPES = {"bf16": "bfloat16", "f16": "float16", "fp16": "float16", "f32": "float32", "half": "float16"}
LABELS = {
    "context_tokens": "context",
    "kv_dtype": "KV cache",
    "slots": "requests at a time",
    "dtype": "arithmetic",
    "prefix_caching": "prefix cache",
    "quantization": "quantization",
}
# What an engine says of itself, which is the engine and no setting, or follows from another setting.
ENGINES_OWN = {"build", "version", "quantization", "kv_tokens", "kv_blocks", "kv_bytes", "device"}


@dataclass(frozen=True)
class Setup:
    """What is known of an arm. `boots` are those that count for it; `machine` is {} before it was looked at."""

    recipe: Recipe
    boots: list[dict] = field(default_factory=list)
    machine: dict = field(default_factory=dict)


class Difference(NamedTuple):
    """`values` by arm, as text."""

    name: str
    values: dict[str, str]


def between(arms: Mapping[str, Setup]) -> list[Difference]:
    """Everything known of every arm that is not the same in all of them."""
    told = [
        ("weights", {a: _weights(s) for a, s in arms.items()}),
        ("checkpoint", {a: _checkpoint(s.recipe.model) for a, s in arms.items()}),
        *((LABELS.get(n, n.replace("_", " ")), v) for n, v in _settings(arms).items()),
        *_arguments({a: s.recipe for a, s in arms.items()}),
        *_asked({a: s.recipe for a, s in arms.items()}),
        *_machines(arms),
    ]
    return [
        Difference(name, values)
        for name, values in told
        if len(values) == len(arms) and None not in values.values() and len(set(values.values())) > 1
    ]


def untold(arms: Mapping[str, Setup]) -> list[str]:
    """Settings that some arms' servers tell and others do not: they may differ, and nobody can see it."""
    told = [_effective(s) for s in arms.values() if s.boots]
    names = set().union(*told) - ENGINES_OWN
    return sorted(LABELS.get(n, n.replace("_", " ")) for n in names if not all(n in one for one in told))


def line(arms: Mapping[str, Setup], stated: list[str]) -> str:
    """The sentence above every comparison: whether these are engines or configurations, and what differs.

    `stated` is what the study's author says on top of what can be seen.
    """
    found = [f"{d.name} {' against '.join(d.values.values())}" for d in between(arms)]
    found += [text.rstrip(".") for text in stated]
    engines = list(dict.fromkeys(f"{s.recipe.engine.name} {s.recipe.engine.version}" for s in arms.values()))
    names = " against ".join(arms)
    if len(engines) > 1 and found:
        return f"These are {len(arms)} configurations, not {len(engines)} engines ({names}): {'; '.join(found)}."
    if found:
        return f"All run {engines[0]} ({names}) and differ in: {'; '.join(found)}."
    if not all(s.boots for s in arms.values()):
        return f"By their recipes nothing differs beyond the engine ({names}); their servers were not asked yet."
    return f"Nothing that is known here differs beyond the engine ({names})."


def _weights(setup: Setup) -> str:
    """The form in which the engine gets the weights: BF16, Q4_1."""
    model = setup.recipe.model
    if model.convert is not None:
        return f"{_short(model.convert.dtype)} ({model.convert.format}, converted)"
    if model.format == "gguf":
        told = _effective(setup).get("quantization")
        file = PurePosixPath(model.files[0].path).name  # of one in parts: name-Q6_K-00001-of-00003.gguf
        named = re.search(r"[.*-]((?:I?Q\d\w*)|BF16|F16|F32)(-[^.]*)?\.gguf$", file)
        return f"{told or (named[1] if named else 'of unknown quantization')} (gguf)"
    dtype = _effective(setup).get("dtype")
    return f"{_short(dtype)} ({model.format})" if dtype else model.format


def _checkpoint(model: Model) -> str:
    """Which published files the weights are of: by hash where that is pinned, else by where they lie."""
    first = model.files[0].sha256
    if first:
        return first[:12]
    return f"{model.repo} {model.revision[:12] if model.revision else 'at a revision not stated'}"


def _short(dtype: str) -> str:
    return {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(dtype, dtype)


def _settings(arms: Mapping[str, Setup]) -> dict[str, dict[str, str]]:
    """Settings read back from the servers of every arm."""
    told = {arm: _effective(setup) for arm, setup in arms.items()}
    names = dict.fromkeys(name for one in told.values() for name in one if name not in ENGINES_OWN)
    return {n: {arm: one[n] for arm, one in told.items() if n in one} for n in names}


def _effective(setup: Setup) -> dict[str, str]:
    """Each setting as text; one that varied over the boots has all its values."""
    found: dict[str, dict[str, None]] = {}
    for boot in setup.boots:
        for name, value in boot.get("effective", {}).items():
            if value is not None:
                found.setdefault(name, {})[_plain(value)] = None
    return {name: " or ".join(values) for name, values in found.items()}


def _plain(value: object) -> str:
    """f16/f16 and float16 are one thing."""
    parts = {DTYPES.get(part.lower(), part) for part in str(value).split("/")} if isinstance(value, str) else set()
    return parts.pop() if len(parts) == 1 else number(value)


def _arguments(recipes: Mapping[str, Recipe]) -> list[tuple[str, dict[str, str]]]:
    """Arguments and variables that not all arms' servers have; of one engine: two name things their own way."""
    if len({r.engine.name for r in recipes.values()}) > 1:
        return []
    given = {
        a: [" ; ".join([*(f"{k}={v}" for k, v in s.env.items()), " ".join(s.args)]) for s in r.servers]
        for a, r in recipes.items()
    }
    words = {a: [w for one in g for w in _options(one)] for a, g in given.items()}
    shared = set.intersection(*(set(w) for w in words.values()))
    own = {a: " ".join(x for x in dict.fromkeys(w) if x not in shared) or "none" for a, w in words.items()}
    return [("arguments", own)]


def _options(line: str) -> list[str]:
    """An argument list cut before each option, so that an option keeps its value."""
    return [part.strip() for part in re.split(r"(?:^|\s)(?=--?[A-Za-z])|\s;\s", line) if part.strip()]


def _asked(recipes: Mapping[str, Recipe]) -> list[tuple[str, dict[str, str]]]:
    """Settings of the workloads that all arms have, where one asks otherwise."""
    asked_of = {
        a: {w.id: w for w in r.workloads if {s.id for s in r.servers} & set(w.on)} for a, r in recipes.items()
    }
    found = []
    for name in next(iter(asked_of.values())):
        if not all(name in workloads for workloads in asked_of.values()):
            continue
        asked = {arm: _question(workloads[name]) for arm, workloads in asked_of.items()}
        for key in next(iter(asked.values())):
            found.append((f"{key} of {name}", {a: q[key] for a, q in asked.items()}))
    return found


def _question(workload: Workload) -> dict[str, str]:
    prompts = [*workload.prompts, *([workload.text] if workload.text else [])]
    return {
        "prompts": ", ".join(f"{p.id} {p.sha256[:8]}" for p in prompts),
        "cases": ", ".join(workload.cases),
        "output tokens": number(workload.max_tokens) + ("" if workload.ignore_eos else " at most"),
        "sampling": ", ".join(
            f"{k} {number(v)}" for k, v in workload.sampling.model_dump().items() if v not in (None, [])
        ),
        "endpoint": workload.endpoint,
        "prompt cache": workload.cache,
    }


def _machines(arms: Mapping[str, Setup]) -> list[tuple[str, dict[str, str | None]]]:
    def told(*keys: str) -> dict[str, str | None]:
        found = {}
        for arm, setup in arms.items():
            value = setup.machine
            for key in keys:
                value = (value or {}).get(key)
            found[arm] = None if value is None else number(value)
        return found

    return [
        ("processor", told("cpu", "model")),
        ("CPUs to use", told("cpu", "usable_cpus")),
        ("GiB of memory", told("memory", "total_gib")),
        ("system", told("os", "name")),
        ("kernel", told("os", "kernel")),
    ]
