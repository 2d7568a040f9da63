"""What each recipe needs and whether this machine has it: looked at, nothing installed, fetched or changed."""

from pathlib import Path
from typing import NamedTuple

from llmrepro import catalog, commands, containers, engines, environment, fixes, gpus, machine, requirements
from llmrepro.install import Engine, Fix
from llmrepro.recipe import Needs, Recipe, RecipeError


class Check(NamedTuple):
    what: str
    found: str
    next_step: str = ""  # "" when nothing is wrong, or nothing can be mended here


def examine(name: str, cache: Path | None = None) -> list[Check]:
    """Everything about one recipe, by id or path. A check with a `next_step` is a fault that a person can mend.

    Where the machine lacks hardware that the recipe needs, the rest is still told and is no fault.
    """
    try:
        recipe = catalog.load(name)
    except RecipeError as error:
        known = name in catalog.ids() or Path(name).expanduser().exists()
        return [
            Check("recipe", str(error), "mend the file at the keys named above" if known else "give one of those")
        ]
    cache = cache or machine.cache_dir()
    facts = machine.describe(cache)
    needs = requirements.of(recipe)
    hardware = requirements.lacks(needs.model_copy(update={"commands": [], "disk_gib": 0}), facts, cache)
    disk = requirements.lacks(Needs(disk_gib=needs.disk_gib), facts, cache)
    programs = requirements.lacks(Needs(commands=needs.commands), facts, cache)
    crowded = requirements.lacks_room(recipe, facts)
    missing = requirements.missing(recipe, facts, cache)
    checks = [
        Check("recipe", "read, with the texts of its prompts"),
        Check("needs", requirements.told(needs)),
        Check("here", "; ".join(missing) or "this machine has that; the recipe runs live"),
        *(Check("disk", one, "free some, or name another folder in LLMREPRO_CACHE") for one in disk),
        *([Check("memory", crowded, "end other programs, then run doctor again")] if crowded else []),
        *(Check("command", sentence, "install it, then run doctor again") for sentence in programs),
        *_gpus(needs, facts),
        *_tools(recipe),
        *_environment(recipe, catalog.path_of(name).parent / "engine.lock", cache),
        *(Check("weights", commands.source(what, weights)) for what, weights in commands.published(recipe.model)),
    ]
    if hardware:
        return [check._replace(next_step="") for check in checks]
    return checks


def _gpus(needs: Needs, facts: dict) -> list[Check]:
    """Each GPU, for a recipe that needs one; a power limit that is not the published one is told by its run."""
    return [Check("GPU", gpus.line(gpu)) for gpu in facts["gpus"] or []] if needs.gpu_count else []


def _tools(recipe: Recipe) -> list[Check]:
    """What builds an engine from checkouts, or runs its container. Which of a build's programs are missing is
    told by `command`."""
    install = recipe.engine.install
    if install.kind == "container":
        try:
            runtime = containers.find()
        except containers.ContainerFailure as failure:
            return [Check("container", failure.found, failure.next_step)]
        return [Check("container", f"{runtime.path}, {runtime.name} {runtime.version}")]
    if install.kind != "git":
        return []
    wanted = ["git", *(["nvcc"] if "ARCH" in install.build else [])]
    return [Check(name, path) for name in wanted if (path := requirements.which(name))]


def _environment(recipe: Recipe, lock: Path, cache: Path) -> list[Check]:
    engine = recipe.engine
    if engine.install.kind == "container":
        return [Check("environment", f"the image {engine.install.container.image}")]
    if engine.install.kind == "git" and not lock.exists():
        sources = ", ".join(f"{c.repo} at {c.commit[:12]}" for c in engine.install.checkouts)
        return [Check("environment", f"built from {sources} by `llmrepro run {recipe.id}`"), *_to_make(engine)]
    try:
        python = environment.interpreter(engine.install.python)
        place = environment.place_of(engine, lock, cache)
    except environment.EnvironmentFailure as failure:
        return [Check("lock, Python", failure.found, failure.next_step), *_to_make(engine)]
    checks = [Check("lock", "read: pins and hashes only"), Check("Python", str(python))]
    found = environment.complete(place, engine)
    if found is None:
        state = (
            f"{place} was changed or is not whole: built anew" if place.exists() else "not installed yet: built"
        )
        return [*checks, Check("environment", f"{state} by `llmrepro run {recipe.id}`"), *_to_make(engine)]
    return [
        *checks,
        Check("environment", f"{place}, complete and unchanged"),
        *(_fix(place, fix) for fix in engine.fixes),
        *_arguments(recipe, place),
    ]


def _to_make(engine: Engine) -> list[Check]:
    """The fixes of an environment that is not there: whether they are needed is looked at in it."""
    return [Check("fix", f"{fix.name}: not installed yet, made with the environment") for fix in engine.fixes]


def _fix(place: Path, fix: Fix) -> Check:
    try:
        finding = fixes.load(fix.name).detect(place, fix)
    except fixes.FixFailure as failure:
        return Check("fix", f"{fix.name}: {failure}", failure.next_step)
    # an environment is complete only once its fixes are proved: one that is needed still was undone since
    again = f"remove {place}; the next run builds it with the fix" if finding.needed else ""
    return Check("fix", f"{fix.name}: {'needed' if finding.needed else 'in place'}: {finding.why}", again)


def _arguments(recipe: Recipe, place: Path) -> list[Check]:
    """What the engine adapter would translate in each server's arguments, by the build that is installed."""
    engine, checks = engines.load(recipe.engine.name), []
    for server in recipe.servers:
        try:
            launch = engine.launch(
                place,
                recipe.engine.install,
                server,
                Path("weights"),
                alias=recipe.id,
                port=1,
                api_key="none",
                threads=machine.threads(),
                draft=Path("draft") if recipe.model.draft else None,
            )
        except engines.EngineError as error:
            checks.append(Check(f"server {server.id}", str(error), "mend its `args` in the recipe, as told above"))
        else:
            told = "; ".join(launch.adaptations) or "its arguments are this build's own"
            checks.append(Check(f"server {server.id}", told))
    return checks
