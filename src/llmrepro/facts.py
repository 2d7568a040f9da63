"""What a run folder tells of the machine, the engine and the weights, by the names that conditions use.

What was not seen is None and stands as unknown: a recipe's own words are no observation.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from llmrepro import engines, prompts, running_server, samples
from llmrepro.client import Record
from llmrepro.recipe import Recipe
from llmrepro.run import boots, load_recipe
from llmrepro.run_folder import read_json_if_there, read_lines
from llmrepro.samples import Sample

SETTINGS = ("kv_dtype", "context_tokens", "threads")  # which a server tells of itself, each its own
GPU = {
    "gpu_power_limit_w": "power_limit_w",
    "gpu_memory_gib": "memory_gib",
    "gpu_memory_clock_mhz": "memory_clock_mhz",
    "gpu_driver": "driver",
}
LOADED = ("memory_clock_mhz", "sm_clock_mhz", "pcie_generation", "pcie_width")  # true only while a card works


@dataclass(frozen=True)
class Facts:
    """`shared` are facts of the whole run; one that its servers do not share is told of all of them there, as
    "a and b". `servers` holds those that a server has of its own, by server."""

    shared: dict
    servers: dict[str, dict]


def read(path: Path) -> Facts:
    """The facts of a run folder; of one that measured nothing those of its machine. Raises RunError."""
    recipe = load_recipe(path)
    started = _with_gpus(path, recipe, boots(path))
    machine = read_json_if_there(path / "machine.json")
    own = {
        server.id: _of_server(
            recipe, server.args, [b for b in started.values() if b["server"] == server.id], machine
        )
        for server in recipe.servers
        if any(b["server"] == server.id for b in started.values())
    }
    names = next(iter(own.values()), _of_server(recipe, [], [], machine))
    shared = {name: _joined(facts[name] for facts in own.values()) for name in names} if own else names
    asked = prompts.asked(path) if (path / "records.jsonl").exists() else None
    return Facts(
        {
            **shared,
            **_of_machine(machine),
            **(
                _of_running(started, recipe)
                if running_server.of(started)
                else _of_engine(path, recipe, bool(started), machine)
            ),
            **_of_weights(read_json_if_there(path / "weights.json"), recipe),
            **_noted(path, started, machine),
            "prompts": asked,
            "weights": read_json_if_there(path / "weights.json"),
        },
        own,
    )


def _with_gpus(path: Path, recipe: Recipe, started: dict[int, dict]) -> dict[int, dict]:
    """The boots, each with its GPUs as they were sampled while it was asked. An older run's boots tell that
    themselves."""
    if not recipe.needs.gpu_count:
        return started
    records = [Record.model_validate(r) for r in read_lines(path / "records.jsonl")]
    sampled = samples.read(path)
    found = {}
    for n, boot in started.items():
        spans = samples.in_flight(r for r in records if r.boot == n)
        cards = samples.gpus(sampled.get(n, {}), recipe.needs.gpu_count)
        busy = {device: taken for device, of in cards.items() if (taken := samples.during(of, spans))}
        gpus = [_at_work(int(device.removeprefix(samples.GPU)), taken) for device, taken in busy.items()]
        found[n] = {**boot, "machine": {"gpus": gpus or None, **(boot.get("machine") or {})}}
    return found


def _at_work(index: int, taken: list[Sample]) -> dict:
    """A card over some samples: `power_limit_w` as enforced, one number or a list of those that it took, in order;
    the clock's median; the fastest link that was seen, since links drop whenever there is nothing to send."""
    limits = list(dict.fromkeys(samples.told(taken, "power_limit_w")))
    clocks = samples.told(taken, "memory_clock_mhz")
    links = {name: samples.told(taken, name) for name in ("pcie_generation", "pcie_width")}
    return {
        "index": index,
        "power_limit_w": limits if len(limits) > 1 else next(iter(limits), None),
        "memory_clock_mhz": int(median_low(clocks)) if clocks else None,
        **{name: int(max(values)) if values else None for name, values in links.items()},
    }


def _of_machine(machine: dict) -> dict:
    cpu, memory, system = (machine.get(key) or {} for key in ("cpu", "memory", "os"))
    return {
        "cpu_model": cpu.get("model"),
        "cpu_simd": cpu.get("simd"),
        "cpu_cores": cpu.get("physical_cores"),
        "memory_gib": memory.get("total_gib"),
        "memory_speed": _modules(memory.get("modules") or {}),
        "os": system.get("name"),
        "host": None,
        "cooling": None,
    }


def _modules(told: dict) -> str | None:
    """DDR5-6400, 12 channels; None where the firmware tells neither."""
    kind = "-".join(str(told[key]) for key in ("type", "speed_mts") if told.get(key))
    channels = f"{told['channels']} channels" if told.get("channels") else None
    return ", ".join(part for part in (kind, channels) if part) or None


def of_machine(machine: dict) -> dict:
    """The facts that a machine alone has, of `machine.describe`."""
    gpus = _cards(machine)
    return {**_of_machine(machine), **_of_gpus([] if gpus is None else [gpus])}


def _of_engine(path: Path, recipe: Recipe, started: bool, machine: dict) -> dict:
    """What was installed. Sources and images are fetched by their commit or digest, so that one that started is
    the one that the recipe pins."""
    install = recipe.engine.install
    freeze = (path / "engine-freeze.txt").read_text() if (path / "engine-freeze.txt").exists() else ""
    installed = dict(line.split("  #")[0].strip().split("==") for line in freeze.splitlines() if "==" in line)
    versions = [installed.get(name) for name in install.pins]
    if install.kind in ("wheel", "sdist"):
        whole = versions == list(install.pins.values())
        version = recipe.engine.version if whole else ", ".join(v for v in versions if v) or None
    else:
        version = recipe.engine.version if started else None
    cuda = next((v for n, v in installed.items() if n.startswith("nvidia-cuda-runtime")), None)
    return {
        "engine_version": version,
        "engine_commit": install.checkouts[0].commit if install.checkouts and started else None,
        "container": install.container.image if install.container and started else None,
        "python": (install.python or machine.get("python")) if installed else None,
        "cuda": cuda,
    }


def _of_running(started: dict[int, dict], recipe: Recipe) -> dict:
    """Of an engine that somebody else installed and started: what its API tells, which is its version at most."""
    untold = dict.fromkeys(("engine_commit", "container", "python", "cuda"))
    return {"engine_version": running_server.engine_version(started, recipe.engine.version), **untold}


def _of_weights(weights: dict, recipe: Recipe) -> dict:
    """Of several files whose hashes the recipe pins, the hashes in its order; else the one of the whole."""
    found, pinned = weights.get("facts", {}).get("model.sha256"), recipe.model.files
    if len(pinned) > 1 and all(f.sha256 for f in pinned):
        by_path = {f["path"]: f["sha256"] for f in weights.get("files", [])}
        hashes = [by_path.get(f.path) for f in pinned]
        found = None if None in hashes else " ".join(hashes)
    return {
        "weights_sha256": found,
        "weights_repo": weights.get("repo"),
        "weights_revision": weights.get("revision"),
    }


def _noted(path: Path, started: dict[int, dict], machine: dict) -> dict:
    made = read_json_if_there(path / "environment.json")
    adapted = sorted({a for b in started.values() for a in b.get("adaptations", [])})
    steal = [b["machine"]["steal_share"] for b in started.values() if b.get("machine", {}).get("steal_share")]
    return {
        "adaptations": "; ".join(adapted) or None,
        "fixes": ", ".join(_fix(f) for f in made.get("fixes", []) if f["applied"]) or None,
        "load_1min": machine.get("load_1min"),
        "steal_share": max(steal, default=None),
    }


def _fix(made: dict) -> str:
    """A fix by its name, with the packages that it laid over the recorded ones."""
    over = ", ".join(f"{name} {version}" for name, version in made.get("laid_over", {}).items())
    return f"{made['name']} (laid over: {over})" if over else made["name"]


def _of_server(recipe: Recipe, args: list[str], boots: list[dict], machine: dict) -> dict:
    """What a server told of itself over its boots, and the GPUs that it had."""
    told = [{"threads": b.get("threads"), **b.get("effective", {})} for b in boots]
    speculation = getattr(engines.load(recipe.engine.name), "speculation", None)
    own = not any(b.get("external") for b in boots)  # else nobody knows whether it has the recipe's arguments
    asked = speculation(args) if speculation and boots and own else None
    count = recipe.needs.gpu_count or None  # an engine takes the first there are
    return {
        **{name: _joined(one.get(name) for one in told) for name in SETTINGS},
        "speculation": _joined(_speculation(one) or asked for one in told),
        **_of_gpus([gpus and gpus[:count] for b in boots or [{}] if (gpus := _gpus(machine, b)) is not None]),
    }


def _speculation(effective: dict) -> str | None:
    method, tokens = effective.get("speculation"), effective.get("draft_tokens")
    found = f"{method} k={tokens}" if method and tokens and "=" not in method else method
    lookup = effective.get("lookup_tokens")  # of n-grams: which of them are looked up decides what is drafted
    return f"{found} lookup={lookup.replace(' to ', '..')}" if found and lookup else found


def _cards(told: dict) -> list[dict] | None:
    """The GPUs that a file tells of; None where it tells none, or no list of them: files are changed by hand."""
    gpus = told.get("gpus")
    whole = isinstance(gpus, list) and all(
        isinstance(gpu, dict) and isinstance(gpu.get("index", 0), int) for gpu in gpus
    )
    return gpus if whole else None


def _gpus(machine: dict, boot: dict) -> list[dict] | None:
    """The GPUs of a boot: what the machine says of them, and on top what was read while they worked. Clocks and
    links drop when a card idles, so that without a boot they are not known."""
    during = boot.get("machine")
    there, seen = _cards(machine), _cards(during if isinstance(during, dict) else {})
    if there is None and seen is None:
        return None
    known = {
        gpu.get("index", n): {k: v for k, v in gpu.items() if k not in LOADED} for n, gpu in enumerate(there or [])
    }
    if seen is None:
        return list(known.values())
    return [{**known.get(gpu.get("index", n), {}), **gpu} for n, gpu in enumerate(seen)]


def _of_gpus(boots: list[list[dict]]) -> dict:
    """Facts of the GPUs over boots; a machine without one has 0 of them and the name "none"."""
    if not boots:
        return dict.fromkeys(("gpu_name", "gpu_count", *GPU, "gpu_pcie", "gpu_indexes"))
    every = [gpu for gpus in boots for gpu in gpus]
    return {
        "gpu_name": _joined(gpu.get("name") for gpu in every) if every else "none",
        "gpu_count": _joined(len(gpus) for gpus in boots),
        **{name: _joined(value for gpu in every for value in _listed(gpu.get(key))) for name, key in GPU.items()},
        "gpu_pcie": _joined(_pcie(gpu) for gpu in every),
        "gpu_indexes": sorted({gpu["index"] for gpu in every if "index" in gpu}),
    }


def _pcie(gpu: dict) -> str | None:
    generation, width = gpu.get("pcie_generation"), gpu.get("pcie_width")
    return f"Gen{generation} x{width}" if generation and width else None


def _listed(value: object) -> list:
    return value if isinstance(value, list) else [value]


def _joined(values: Iterable):
    """The one value there is; several as "a and b"; None where one of them is not known, or none is there."""
    values = list(values)
    if values and all(isinstance(v, list) for v in values):
        return sorted({one for v in values for one in v})
    found = list(dict.fromkeys(values))
    if not found or None in found:
        return None
    return found[0] if len(found) == 1 else " and ".join(map(str, found))
