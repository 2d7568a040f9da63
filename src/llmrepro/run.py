"""A run of one recipe: what it was asked, and what its folder holds of boots and records."""

import shutil
from pathlib import Path

from pydantic import ValidationError

from llmrepro import catalog, credentials, earlier_runs, own_prompts, trust
from llmrepro import recipe as recipes
from llmrepro.parameters import Parameters, resolved, settled
from llmrepro.recipe import Recipe
from llmrepro.run_folder import Folder, RunError, read_json, stamp
from llmrepro.trust import Asked

LEAST_FREE_BYTES = 100e6  # of the disk that a run folder is made on: records, logs, figures and a page


class Run(Folder):
    """The folder of a recipe's run. Raises RunError when another live process holds it."""

    @property
    def parameters(self) -> Parameters:
        return Parameters.model_validate(read_json(self.path / "parameters.json"))

    @property
    def recipe(self) -> Recipe:
        return load_recipe(self.path)


def create(params: Parameters, path: Path | None = None) -> Run:
    """A new run folder `<runs_dir>/<recipe id>/<UTC time>/`, the new folder `path` where one is given, or the one
    to resume. Raises RunError.
    """
    if params.resume is not None:
        return _resumed(params)
    committed = catalog.load(params.recipe)
    params = settled(committed, params)
    recipe = resolved(committed, params)
    folder = catalog.path_of(params.recipe).parent
    trust.require(Asked(recipe, params, folder))
    asked = texts(recipe, params, folder)
    params = params.model_copy(update=_from_anywhere(params, folder))
    if path is None:
        path = new_folder(params.runs_dir, recipe.id)
    else:
        path.mkdir(parents=True)
    run = Run(path)
    run.write_json("parameters.json", params.model_dump())
    for name, one in (("recipe.committed.json", committed), ("recipe.json", recipe)):
        run.write_text(name, one.model_dump_json(by_alias=True, exclude_unset=True, indent=1) + "\n")
    run.write_json("prompts.json", asked)
    run.write_json(earlier_runs.PINS, earlier_runs.pins(folder))
    run.set_status("running", "card")
    return run


def texts(recipe: Recipe, params: Parameters, folder: Path) -> dict[str, str]:
    """The texts of a recipe's prompts by their sha256. Raises RunError where one of them, or the recipe, holds a
    credential: both are kept in the run folder as they are, by their hash or to go on with."""
    own = own_prompts.by_hash(params.prompts_file)
    found = {p.sha256: own.get(p.sha256) or catalog.prompt_text(p, folder) for p in recipes.prompts(recipe)}
    named = {p.sha256: f"its prompt {p.id!r}" for p in recipes.prompts(recipe)}
    everything = {"": recipe.model_dump_json(by_alias=True, exclude_unset=True), **found}
    for sha256, text in everything.items():
        if held := credentials.kinds(text):
            raise RunError(
                f"{recipe.id}: {named.get(sha256, 'its recipe.json')} holds {held[0]}, and a run keeps that and "
                "shows it on its page; take it out"
            )
    return found


def base_of(runs_dir: str | None) -> Path:
    """Where run folders go: `runs_dir`, else runs/ of the project."""
    return Path(runs_dir).expanduser().resolve() if runs_dir else catalog.home().parent / "runs"


def check_room(base: Path) -> None:
    """Raises RunError when the disk of a folder, which need not be there, is too full for a run."""
    there = next(folder for folder in (base, *base.parents) if folder.exists())
    if (free := shutil.disk_usage(there).free) < LEAST_FREE_BYTES:
        raise RunError(
            f"{base} has {free / 1e6:.0f} MB free, and a run wants 100; make room or give another runs_dir"
        )


def new_folder(runs_dir: str | None, name: str) -> Path:
    """A folder `<runs_dir>/<name>/<UTC time>/` that was not there before. Raises RunError."""
    base = base_of(runs_dir)
    check_room(base)
    for attempt in range(100):
        path = base / name / (stamp() + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"cannot make a run folder under {base}: {error}; give another runs_dir") from None
    raise RunError(f"a hundred runs were begun within a second under {base / name}; give another runs_dir")


def _from_anywhere(params: Parameters, folder: Path) -> dict[str, str]:
    """The paths among the parameters, made whole: a run is gone on with from any folder."""
    paths = {} if params.recipe in catalog.ids() else {"recipe": str(folder / catalog.path_of(params.recipe).name)}
    for name in ("weights_path", "prompts_file"):
        if getattr(params, name) is not None:
            paths[name] = str(Path(getattr(params, name)).expanduser().resolve())
    return paths


def _resumed(params: Parameters) -> Run:
    path = Path(params.resume).expanduser().resolve()
    if not (path / "recipe.json").is_file():
        raise RunError(f"resume: {path} is no run folder (it has no recipe.json); give the folder that a run made")
    try:
        was = Parameters.model_validate(read_json(path / "parameters.json"))
    except ValidationError:
        raise RunError(f"{path}/parameters.json is not of this version of the kit; start a new run") from None
    given = params.model_copy(update=_from_anywhere(params, catalog.path_of(params.recipe).parent))
    asked = given.model_dump(exclude_defaults=True, exclude={"resume"})
    differs = [n for n, v in asked.items() if getattr(was, n) != v and n not in {"trust", "runs_dir"}]
    if differs:
        raise RunError(
            f"resume: {differs[0]} was {getattr(was, differs[0])!r} in {path} and is now "
            f"{asked[differs[0]]!r}; leave it as it was, or start a new run"
        )
    committed = resolved(catalog.load(was.recipe), was)
    if committed != load_recipe(path):
        raise RunError(
            f"resume: the recipe {committed.id} has changed since {path} was begun, so its records "
            "cannot be mixed with new ones; start a new run"
        )
    beside = catalog.path_of(was.recipe).parent
    pinned = path / earlier_runs.PINS
    if pinned.exists() and earlier_runs.pins(beside) != read_json(pinned):
        raise RunError(
            f"resume: a lock of {committed.id} has changed since {path} was begun, so another engine would answer "
            "the rest; start a new run"
        )
    asking = Asked(committed, was, beside)
    trusting = was.model_copy(update={"trust": params.trust or (was.trust and trust.given_before(asking))})
    trust.require(asking._replace(params=trusting))
    check_room(path)
    run = Run(path)
    if params.trust and not was.trust:
        run.write_json("parameters.json", trusting.model_dump())
    run.set_status("running", "card")
    return run


def load_recipe(path: Path, name: str = "recipe.json") -> Recipe:
    """The resolved recipe of a run folder, or the committed one (`recipe.committed.json`)."""
    return recipes.validated(read_json(path / name), str(path / name))


def boots(path: Path) -> dict[int, dict]:
    """boots/<n>.json of a run folder by number, in order."""
    numbers = sorted(int(p.stem) for p in (path / "boots").glob("*.json") if p.stem.isdigit())
    return {n: read_json(path / "boots" / f"{n}.json") for n in numbers}
