"""A study's run: its arms, each an ordinary run folder, measured in turns so that drift falls on all of them."""

import shutil
import stat
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmrepro import catalog, credentials, own_prompts, terms, trust
from llmrepro import run as runs
from llmrepro import study as studies
from llmrepro.parameters import Parameters, resolved
from llmrepro.recipe import Recipe
from llmrepro.run import Run
from llmrepro.run_folder import Folder, RunError, held, read_json
from llmrepro.study import Arm, Study
from llmrepro.trust import Asked


class StudyParameters(BaseModel):
    """The parameters cell of compare.ipynb."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    study: str | None = Field(catalog.DEFAULT_STUDY, description="id, or path of a study; None: the runs below")
    runs: list[str] = Field([], description="run folders to compare; empty: measure anew")
    mode: terms.Mode = Field("auto", description="auto | live | published")
    profile: terms.Profile = Field("quick", description="quick | full")
    boots: int | None = Field(None, ge=1, le=100, description="of every server, in turns; None: the study's")
    repeats: int | None = Field(None, ge=1, le=1000, description="rounds per workload; None: the study's")
    workloads: list[str] | None = Field(None, description="ids, asked of every arm; None: the study's")
    resume: str | None = Field(None, description="a study's run folder to go on with")
    runs_dir: str | None = Field(None, description="folder of the runs; None: runs/ of the project")
    prompts_file: str | None = Field(None, description="your own prompts (.jsonl), or text for ladders")
    trust: bool = Field(False, description="install what recipes from elsewhere name")
    overrides: dict[str, Any] = Field({}, description="dotted path, or arm:path for one arm: value")


class StudyRun(Folder):
    """The folder of a study's run. Its arms lie below it, each in an ordinary run folder."""

    @property
    def parameters(self) -> StudyParameters:
        return StudyParameters.model_validate(read_json(self.path / "parameters.json"))

    @property
    def study(self) -> Study:
        return load_study(self.path)

    @cached_property
    def arms(self) -> dict[str, Run]:
        """The arms' runs in the study's order, held as long as this is. Raises RunError."""
        return {arm: Run(folder) for arm, folder in arm_folders(self.path).items()}

    def close(self) -> None:
        for arm in self.__dict__.get("arms", {}).values():
            arm.close()
        super().close()


def load_study(path: Path) -> Study:
    """The study of a study's run folder, as it is run."""
    return studies.validated(read_json(path / "study.json"), str(path / "study.json"))


def arm_folders(path: Path) -> dict[str, Path]:
    """The run folder of each arm, by arm."""
    return {arm.id: path / "arms" / arm.id for arm in load_study(path).arms}


def create(params: StudyParameters) -> StudyRun:
    """A new folder `<runs_dir>/<study id>/<UTC time>/` with one run per arm, or the one to resume.

    With `runs` given their folders are copied in and nothing is measured. Raises RunError or RecipeError before
    anything is written.
    """
    if params.resume is not None:
        return _resumed(params)
    if params.study is None and not params.runs:
        raise RunError("neither a study nor runs are given; name a study, or two run folders or more")
    study, given = _of_runs(params) if params.runs else (_as_run(params), {})
    asked = {} if given else _asked(study, params)
    trust.require(*map(_resolved, asked.values()))  # refused before a folder is made
    for one in map(_resolved, asked.values()):
        runs.texts(*one)
    into = Path(params.runs_dir).expanduser().resolve() if params.runs_dir else None
    for folder in given.values():
        if into is not None and into.is_relative_to(folder.resolve()):
            raise RunError(f"runs_dir {into} lies inside the run folder {folder}; give one outside of it")
    path = runs.new_folder(params.runs_dir, study.id)
    for arm, folder in given.items():
        _copy(folder, path / "arms" / arm)
    for arm, one in asked.items():
        runs.create(one, path / "arms" / arm).close()
    made = StudyRun(path)
    made.write_text("study.json", study.model_dump_json(by_alias=True, exclude_unset=True, indent=1) + "\n")
    made.write_json("parameters.json", params.model_copy(update=_from_anywhere(params)).model_dump())
    made.set_status("running", "card")
    return made


KEPT = (
    *("status.json", "recipe.json", "recipe.committed.json", "parameters.json", "machine.json"),
    *("prompts.json", "published_prompts.json"),
    *("weights.json", "environment.json", "engine-freeze.txt", "commands.txt", "records.jsonl", "boots/*.json"),
    *("telemetry.csv", "boots/*.guard.jsonl", credentials.FILE),
)


def _copy(folder: Path, target: Path) -> None:
    """What a run is computed from, regular files only: a link could bring in anything."""
    for path in (p for pattern in KEPT for p in sorted(folder.glob(pattern))):
        if stat.S_ISREG(path.lstat().st_mode) and not path.parent.is_symlink():
            (target / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.relative_to(folder))


def _as_run(params: StudyParameters) -> Study:
    study = catalog.load_study(params.study)
    return study if params.boots is None else study.model_copy(update={"boots": params.boots})


def _asked(study: Study, params: StudyParameters) -> dict[str, Parameters]:
    """The parameters of each arm's run: those of the study's, and the study's number of boots of every server."""
    found = {}
    for arm in study.arms:
        recipe = catalog.recipe_of(arm, catalog.study_path(params.study))
        servers = catalog.load(recipe).servers
        found[arm.id] = Parameters(
            recipe=recipe,
            mode=params.mode,
            profile=params.profile,
            workloads=_workloads(arm, params),
            prompts_file=params.prompts_file,
            repeats=params.repeats or study.repeats,
            servers=arm.servers,
            trust=params.trust,
            overrides={
                **_overrides(arm, study, params),
                **{f"servers.{n}.boots": study.boots for n in range(len(servers))},
            },
        )
    return found


def _resolved(one: Parameters) -> Asked:
    return Asked(resolved(catalog.load(one.recipe), one), one, catalog.path_of(one.recipe).parent)


def _workloads(arm: Arm, params: StudyParameters) -> list[str] | None:
    """Those asked of an arm: as the parameters say, else as the study does, with the user's own prompts."""
    if params.workloads is not None or arm.workloads is None:
        return params.workloads
    return [*arm.workloads, *(own_prompts.suite(params.prompts_file) if params.prompts_file else [])]


def _overrides(arm: Arm, study: Study, params: StudyParameters) -> dict[str, Any]:
    found = {}
    for path, value in params.overrides.items():
        name, colon, rest = path.partition(":")
        if colon and name not in {a.id for a in study.arms}:
            known = terms.nearest(name, [a.id for a in study.arms])
            raise RunError(f"override {path!r}: no arm is called {name!r}; {known}")
        if not colon or name == arm.id:
            found[rest if colon else path] = value
    return found


def _from_anywhere(params: StudyParameters) -> dict[str, Any]:
    """The paths among the parameters, made whole: a run is gone on with from any folder."""
    own = params.study is None or params.study in catalog.studies()
    return {
        "study": params.study if own else str(catalog.study_path(params.study)),
        "runs": [str(Path(folder).expanduser().resolve()) for folder in params.runs],
    }


def _resumed(params: StudyParameters) -> StudyRun:
    path = Path(params.resume).expanduser().resolve()
    if not (path / "study.json").is_file():
        raise RunError(
            f"resume: {path} is no study's run folder (it has no study.json); give one that `compare` made"
        )
    try:
        was = StudyParameters.model_validate(read_json(path / "parameters.json"))
    except ValidationError:
        raise RunError(f"{path}/parameters.json is not of this version of the kit; start a new run") from None
    asked = params.model_dump(exclude_defaults=True, exclude={"resume", "trust", "runs_dir"})
    differs = [n for n, v in asked.items() if getattr(was, n) != v]
    if differs:
        raise RunError(
            f"resume: {differs[0]} was {getattr(was, differs[0])!r} in {path} and is now {asked[differs[0]]!r}; "
            "leave it as it was, or start a new run"
        )
    if not was.runs and _as_run(was) != load_study(path):
        raise RunError(
            f"resume: the study {was.study} has changed since {path} was begun, so its arms cannot be mixed with "
            "new ones; start a new run"
        )
    runs.check_room(path)
    made = StudyRun(path)
    if not was.runs:
        for folder in arm_folders(path).values():
            runs.create(Parameters(resume=str(folder), trust=params.trust)).close()
    made.set_status("running", "card")
    return made


def _of_runs(params: StudyParameters) -> tuple[Study, dict[str, Path]]:
    """The study of runs that are there already, and which folder is which arm. Raises RunError."""
    folders = [Path(folder).expanduser().resolve() for folder in params.runs]
    for folder in folders:
        if not (folder / "recipe.json").is_file():
            raise RunError(f"runs: {folder} is no run folder (it has no recipe.json); give folders that runs made")
        if held(folder):
            raise RunError(f"runs: {folder} is still being written; wait for its end")
    if len(set(folders)) < max(2, len(folders)):
        raise RunError("runs: a comparison needs two run folders or more, each once")
    recipes = {folder: runs.load_recipe(folder) for folder in folders}
    if params.study is None:
        return _without_claims(recipes)
    study = catalog.load_study(params.study)
    source = catalog.study_path(params.study)
    wanted = {arm.id: catalog.load(catalog.recipe_of(arm, source)).id for arm in study.arms}
    found = {arm: [f for f, r in recipes.items() if r.id == recipe] for arm, recipe in wanted.items()}
    if any(len(f) != 1 for f in found.values()) or len(folders) != len(found):
        raise RunError(
            f"runs: the study {study.id} compares one run each of {', '.join(wanted.values())}, and these are of "
            f"{', '.join(r.id for r in recipes.values())}; give such runs, or study=None (in a shell, the folders "
            "alone) to compare these as they are"
        )
    return study, {arm: f[0] for arm, f in found.items()}


def _without_claims(recipes: dict[Path, Recipe]) -> tuple[Study, dict[str, Path]]:
    """Runs that no study speaks of: an arm each, no claims."""
    arms: dict[str, Path] = {}
    for folder, recipe in recipes.items():
        name = recipe.id.rpartition("/")[2]
        arms[name if name not in arms else f"{name}-{len(arms) + 1}"] = folder
    models = {recipe.id.partition("/")[0] for recipe in recipes.values()}
    study = Study(
        id=f"{models.pop() if len(models) == 1 else 'several-models'}/compared",
        title=" against ".join(arms),
        question="What do these runs differ in?",
        arms=[Arm(id=arm, recipe=recipes[folder].id) for arm, folder in arms.items()],
    )
    return study, arms


class ArmFailure(RuntimeError):
    """Arms that could not be measured to their end; what was measured, of them and of the others, is kept."""

    def __init__(self, failed: dict[str, Exception]):
        super().__init__("; ".join(f"{arm}: {error}" for arm, error in failed.items()))
        first = next(iter(failed.values()))
        self.log_tail = list(getattr(first, "log_tail", []))
        self.next_step = getattr(first, "next_step", "")
        by = {getattr(error, "stopped_by", None) for error in failed.values()}
        self.stopped_by = by.pop() if len(by) == 1 else None  # of arms that were all stopped in order


def take_turns(arms: dict[str, Run], boots: int, measure: Callable[[Run, int], None]) -> None:
    """A B A B: one boot of every arm, then the next of every arm, `measure(run, boot)` for each.

    An arm whose turn raises has no further turn; the others go on. Then raises ArmFailure.
    """
    failed: dict[str, Exception] = {}
    for boot in range(boots):
        for arm, run in arms.items():
            if arm in failed:
                continue
            try:
                measure(run, boot)
            except Exception as error:
                failed[arm] = error
    if failed:
        raise ArmFailure(failed)
