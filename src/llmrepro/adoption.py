"""A recipe adopted for this machine: a copy of its folder with its own id, needs and conditions, ready to edit."""

import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from llmrepro import catalog, facts, machine, own_claims
from llmrepro import recipe as recipes
from llmrepro.recipe import Recipe
from llmrepro.run_folder import RunError

BESIDE = ("engine.in", "engine.lock", "engine.exclude")  # files of an engine's environment, by their fixed names
# What is told of a machine as it stands; clocks and links of an idle GPU say nothing of it at work.
CONDITIONS = (
    *("cpu_model", "cpu_simd", "cpu_cores", "memory_gib", "memory_speed", "os"),
    *("gpu_name", "gpu_count", "gpu_memory_gib", "gpu_driver", "gpu_power_limit_w"),
)
FOR = " · for "  # between a recipe's title and the machine it was copied for
SLUG, FOLDER = 40, 70  # characters of a machine's and of a folder's name in an id


@dataclass(frozen=True)
class Adopted:
    """What was written: the folder, its files, and what became of needs and conditions, a sentence each."""

    folder: Path
    recipe: Recipe
    files: list[str]
    changes: list[str]

    @property
    def edit_first(self) -> list[str]:
        """The three places of recipe.json that a person looks at first."""
        server = self.recipe.servers[0]
        args = " ".join(server.args) or "none"
        return [
            f"title, question: what you want to know (now: {self.recipe.title!r})",
            f"servers: how this machine should serve it (now {server.id}: {args})",
            "needs, conditions: what it takes, and what must be equal for the claims to be judged",
        ]


def adopt(name: str, to: Path | None = None, claims_from: Path | None = None) -> Adopted:
    """A copy of the recipe of an id or path in the new folder `to`, by default one named by its id below here.

    Its id ends in the folder's name where one is given: the runs of two copies do not mix. Claims stay as
    published, with the conditions that decide them: a run of the copy then shows ratios, and what differs. With
    `claims_from`, the folder of a run of that recipe, its claims and its conditions are that run's. Nothing is
    overwritten, and nothing half-written is left. Raises RunError or RecipeError.
    """
    original = catalog.load(name)
    path = catalog.path_of(name)
    here = machine.describe(machine.cache_dir())
    new_id = f"{_slug(original.model.repo.rpartition('/')[2])}/{original.engine.name}--{_slug(_name(here))}"
    if to is not None:
        new_id = f"{new_id.partition('/')[0]}/{_slug(to.expanduser().resolve().name, FOLDER)}"
    target = (to if to is not None else Path.cwd() / new_id.rpartition("/")[2]).expanduser().resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunError(f"{target} is there already, and nothing is overwritten; give another folder with --to")
    if target.is_relative_to(catalog.home()):  # there the folder says what a recipe is called
        new_id = str(target.relative_to(catalog.home()))
    data = json.loads(path.read_text(encoding="utf-8-sig"))
    changes = _adapt(data, original, new_id, here)
    if claims_from is not None:
        measured, told = own_claims.of(claims_from, original)
        data |= measured
        changes += told
    else:
        changes += _conditions(data, original, here)
    data = {"$schema": os.path.relpath(catalog.home() / "schema.json", target), **data}
    adopted = recipes.validated(data, str(target / "recipe.json"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise RunError(f"cannot make {target}: {error.strerror}; give another folder with --to") from None
    try:
        files = _write(part, data, original, path.parent)
        part.chmod(0o755)
        if target.exists():
            target.rmdir()
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return Adopted(target, adopted, files, changes)


def _slug(text: str, most: int = SLUG) -> str:
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-._")[:most].strip("-._") or "unnamed"


def _name(here: dict) -> str:
    """What a machine is called: by its GPUs where it has some, else by its CPU."""
    gpus = here["gpus"] or []
    if gpus:
        name = gpus[0].get("name") or "GPU"
        return f"{len(gpus)}x {name}" if len(gpus) > 1 else name
    words = re.sub(r"\((r|tm|c)\)|\b(cpu|processor)\b|@.*", " ", here["cpu"]["model"] or "", flags=re.IGNORECASE)
    return " ".join(words.split()) or f"{here['cpu']['architecture']} CPU"


def _adapt(data: dict, original: Recipe, new_id: str, here: dict) -> list[str]:
    """Make a recipe's JSON one of this machine, but for its conditions; what was changed of its needs."""
    data.pop("$schema", None)
    data["id"] = new_id
    based = "based on "
    copy_of_copy = original.source is not None and based in original.source.publication
    title = original.title.partition(FOR)[0] if copy_of_copy else original.title
    data["title"] = f"{title}{FOR}{_name(here)}"
    based += original.id
    if original.source is not None:
        data["source"]["publication"] = f"{original.source.publication} ({based})"
    else:
        data["source"] = {"publication": based}
    return _needs(data, original, here)


def _needs(data: dict, original: Recipe, here: dict) -> list[str]:
    """No more than this machine has, where it has any of it: whether that is enough is for its owner to try."""
    needs, gpus = original.needs, here["gpus"] or []
    has: dict[str, object] = {"memory_gib": here["memory"]["total_gib"]}
    if gpus:
        has |= {"vram_gib": gpus[0].get("memory_gib"), "compute_capability": gpus[0].get("compute_capability")}
        has["gpus"] = len(gpus)
    lower = {
        key: value
        for key, value in has.items()
        if value is not None and getattr(needs, key) and _ordered(value) < _ordered(getattr(needs, key))
    }
    changed = {key: (getattr(needs, key), value) for key, value in lower.items()}
    architecture = here["cpu"]["architecture"]
    if needs.architectures and architecture not in needs.architectures and architecture in ("x86_64", "aarch64"):
        changed["architectures"] = (needs.architectures, [architecture])
    data["needs"] = {**data.get("needs", {}), **{key: value for key, (_, value) in changed.items()}}
    told = [f"needs.{key}: {was} → {now}, what this machine has" for key, (was, now) in changed.items()]
    if needs.gpu_count and not gpus:
        told.append("needs: it asks for a GPU and none is known here, so a run of it says what is lacking")
    return told


def _ordered(value) -> float | list[int]:
    """8.0 and 10.3 as versions, other needs as numbers."""
    return [int(part) for part in value.split(".")] if isinstance(value, str) else value


def _conditions(data: dict, original: Recipe, here: dict) -> list[str]:
    """Facts of this machine as noted conditions, where the publication states none: what it states is kept, since
    its claims are held against that."""
    bound = original.conditions
    stated = {n: v for n, v in {**bound.noted, **bound.deciding}.items() if v is not None}
    known = facts.of_machine(here)
    found = {n: known[n] for n in CONDITIONS if known.get(n) is not None and known[n] != "none" and known[n] != 0}
    filled = {n: v for n, v in found.items() if n not in stated}
    written = data.setdefault("conditions", {})
    for name, value in filled.items():
        part = "deciding" if name in bound.deciding else "noted"
        written.setdefault(part, {})[name] = value
    told = [f"conditions filled in: {', '.join(f'{n} {v}' for n, v in filled.items())}"] if filled else []
    kept = [n for n in stated if n in found and stated[n] != found[n]]
    if kept:
        differ = ", ".join(f"{n} {stated[n]} (here {found[n]})" for n in kept)
        told.append(f"conditions kept as published, for the claims: {differ}")
    return told


def _write(folder: Path, data: dict, original: Recipe, source: Path) -> list[str]:
    """Write a copy's files: recipe.json, those of the engine's environment, patches of ours, every prompt."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / "recipe.json").write_text(f"{text}\n", encoding="utf-8")
    wanted = {name: source / name for name in BESIDE if (source / name).is_file()}
    for patch in (p for fix in original.engine.fixes for p in fix.patches if p.file is not None):
        if not (source / patch.file).is_file():
            raise RunError(f"the patch {source / patch.file} is missing; restore it, then adopt the recipe")
        wanted[patch.file] = source / patch.file
    for prompt in recipes.prompts(original):
        catalog.prompt_text(prompt, source)  # raises when it is not the text that the recipe means
        wanted[prompt.file] = next(p for p in (source / prompt.file, source.parent / prompt.file) if p.is_file())
    for name, path in wanted.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
    return ["recipe.json", *sorted(wanted)]
