"""Every recipe through papermill, headless, one cell after the other: what would be done of each, and doing it.

A cell is one recipe with its parameters: one process, one execution of the recipe's own notebook (`cell`). How it
ended is what its folder's status.json says; `summary` reads it from there.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, NamedTuple

from llmrepro import (
    catalog,
    cell,
    earlier_runs,
    environment,
    execution,
    jobs,
    machine,
    requirements,
    run_folder,
    terms,
    trust,
)
from llmrepro import run as runs
from llmrepro.parameters import Parameters, checked, resolved
from llmrepro.recipe import Recipe, RecipeError
from llmrepro.run_folder import RunError
from llmrepro.trust import Asked

Act = Literal["new", "go on", "skip", "refuse"]
UNREADABLE = (RunError, KeyError, TypeError, AttributeError, ValueError)  # of a folder that was changed by hand
OF_AN_END = ("machine.json", "result.json", "report.html")  # what a run that came to its end has
SHOWN_S = 10.0  # a page of what is published
MEASURED_GIB, SHOWN_GIB = 0.02, 0.005  # of a run folder


class Choice(NamedTuple):
    """Which recipes: those that fit one of each kind that is given."""

    recipes: tuple[str, ...] = ()  # ids, globs over ids, paths of recipes from elsewhere
    studies: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    here: bool = False  # only what this machine can run


@dataclass(frozen=True)
class Cell:
    """What is to be done of one recipe, why, and what it will cost; afterwards also how its process ended."""

    name: str  # the recipe's id, or the path as it was given
    recipe: str  # its id, or the name where it cannot be read
    act: Act
    why: str = ""
    parameters: Parameters | None = None
    folder: Path | None = None  # the run that is gone on with or is left as it is; once done, the run
    lacking: tuple[str, ...] = ()
    seconds: float = 0.0  # expected
    gib: float = 0.0  # of disk, expected
    end: cell.End | None = None

    @property
    def does(self) -> bool:
        return self.act in ("new", "go on")


def chosen(choice: Choice) -> list[str]:
    """Ids or paths of the recipes that fit, the default first. Raises RecipeError for a name that fits none."""
    known = {catalog.path_of(name): name for name in catalog.ids()}
    named: dict[Path, str] = {}
    for wanted in choice.recipes:
        found = {path: name for path, name in known.items() if fnmatchcase(name, wanted)}
        if not found:  # a recipe by its path, or the sentence for a name that fits none
            path = catalog.path_of(wanted)
            found = {path: known.get(path, wanted)}
        named |= {path: name for path, name in found.items() if path not in named}
    if not choice.recipes:
        named = known
    if choice.studies:
        arms = {catalog.path_of(arm): arm for study in choice.studies for arm in _arms(study)}
        named = {path: name for path, name in named.items() if path in arms} if choice.recipes else arms
    for wanted in choice.engines:
        if wanted not in terms.engines():
            raise RecipeError(f"no engine is called {wanted!r}; {terms.nearest(wanted, terms.engines())}")
    return list(named.values())


def _arms(study: str) -> list[str]:
    path = catalog.study_path(study)
    return [catalog.recipe_of(arm, path) for arm in catalog.load_study(study).arms]


def plan(choice: Choice, given: dict, *, force: bool = False, elsewhere: bool = False) -> list[Cell]:
    """What is to be done of each recipe chosen, with the parameters `given`. Nothing is run or written.

    `elsewhere`: other machines will run them, so that nothing is said of what this one has.

    A recipe that cannot be read or run is a cell that is refused. Raises RecipeError for a choice that names what
    is not there or leaves nothing, RunError for parameters that no recipe could have.
    """
    names = chosen(choice)
    checked({**given, "recipe": catalog.DEFAULT})
    cache = machine.cache_dir()
    facts = machine.describe(cache)
    cells = []
    for name in names:
        try:
            params = checked({**given, "recipe": name})
            recipe = resolved(catalog.load(name), params)
            folder = catalog.path_of(name).parent
            trust.require(Asked(recipe, params, folder))
        except (RecipeError, RunError) as error:
            cells.append(Cell(name, name, "refuse", str(error)))
            continue
        lacking = [] if elsewhere else requirements.missing(recipe, facts, requirements.DISK)
        if (choice.engines and recipe.engine.name not in choice.engines) or (choice.here and lacking):
            continue
        if lacking and params.mode == "live":
            why = f"mode is live, and this machine {'; '.join(lacking)}; mode auto shows what is published"
            cells.append(Cell(name, recipe.id, "refuse", why))
            continue
        published = ["published mode was asked for"] if params.mode == "published" else []
        one = Cell(name, recipe.id, "new", parameters=params, lacking=(*published, *lacking))
        one = _with_cost(one, recipe, folder, cache)
        cells.append(one if force else _with_earlier(one, recipe, folder, None if elsewhere else facts))
    if not cells:
        raise RecipeError(
            "no recipe fits all that was asked for; leave out what narrows the choice: --here, --engine or --study"
        )
    return cells


def _with_cost(one: Cell, recipe: Recipe, folder: Path, cache: Path) -> Cell:
    """What a new run of a cell would take: installing, where it is not done, within the recipe's minutes."""
    if one.lacking:
        return replace(one, seconds=SHOWN_S, gib=SHOWN_GIB)
    asking_s = jobs.estimate_s(recipe, jobs.plan(recipe, one.parameters))
    if _installed(recipe, folder, cache):
        return replace(one, seconds=SHOWN_S + asking_s, gib=MEASURED_GIB)
    return replace(one, seconds=max(60 * recipe.needs.minutes, asking_s), gib=recipe.needs.disk_gib)


def _installed(recipe: Recipe, folder: Path, cache: Path) -> bool:
    with contextlib.suppress(environment.EnvironmentFailure):  # which the run itself will tell
        return (environment.place_of(recipe.engine, folder / "engine.lock", cache) / ".complete").exists()
    return False


def _with_earlier(one: Cell, recipe: Recipe, folder: Path, facts: dict | None) -> Cell:
    """A cell, held against the runs of it that are there: the newest of which nothing has changed is left as it is
    when it is whole, else gone on with. Without `facts`, of whichever machine it is, one that measured."""
    runs_dir = runs.base_of(one.parameters.runs_dir)
    changed: list[str] = []
    for path in earlier_runs.of(runs_dir, recipe.id, one.parameters):
        try:
            status = run_folder.status(path)
            differs = earlier_runs.changed(path, recipe, folder, facts)
            same = status["outcome"] != "lacking" or earlier_runs.lacks_the_same(path, list(one.lacking))
            ended = f"{status['outcome']} on {status['at'][:10]}"
        except UNREADABLE:  # no run to go on with
            continue
        if facts is None and status["outcome"] != "completed":
            continue
        if status["outcome"] == "running":
            return replace(one, act="refuse", why="it is being run by another process", folder=path)
        if status["outcome"] == "completed" and one.lacking:
            differs = [*differs, "what this machine has"]
        if differs or not same:
            changed = changed or differs or ["what this machine lacks"]
            continue
        if status["outcome"] not in ("completed", "lacking"):
            return replace(one, act="go on", why=ended, folder=path)
        if lost := [name for name in OF_AN_END if not (path / name).is_file()]:
            return replace(one, act="go on", why=f"{ended}, and it has lost its {' and '.join(lost)}", folder=path)
        why = f"{ended}, and nothing has changed since"
        return replace(one, act="skip", why=why, folder=path, seconds=0.0, gib=0.0)
    return replace(one, why=f"changed since the last: {', '.join(changed)}") if changed else one


class Stopped(NamedTuple):
    """Why a matrix ended before its last cell, and the exit code that says so."""

    code: int
    why: str


class Signals:
    """The signals that came while a matrix runs, in order: `with Signals() as came`."""

    def __enter__(self) -> list[int]:
        came: list[int] = []
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: it outlives its terminal
            numbers.append(signal.SIGHUP)
        self.before = {n: signal.signal(n, lambda number, _frame: came.append(number)) for n in numbers}
        return came

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def run(
    cells: Iterable[Cell],
    signals: list[int],
    *,
    deadline_s: float | None = None,
    cell_deadline_s: float | None = None,
    on_begin: Callable[[Cell], None] = lambda _cell: None,
    on_end: Callable[[Cell], None] = lambda _cell: None,
    on_tick: Callable[[Cell], None] = lambda _cell: None,
) -> Stopped | None:
    """Do what is to be done of each cell, one after the other; `on_end` gets each as it then is.

    Whatever becomes of one, the next goes on, until a signal comes or `deadline_s` of all have passed; then the
    one that runs is stopped in order. Returns why it ended early, or None.
    """
    begin = time.monotonic()
    for one in cells:
        left_s = None if deadline_s is None else begin + deadline_s - time.monotonic()
        if stopped := _stopped(signals, left_s):
            return stopped
        if not one.does:
            on_end(one)
            continue
        limits = [s for s in (left_s, cell_deadline_s) if s is not None]
        on_begin(one)
        on_end(_done(one, min(limits, default=None), signals, on_tick))
    return _stopped(signals, None)


def _stopped(signals: list[int], left_s: float | None) -> Stopped | None:
    if signals:
        return Stopped(128 + signals[0], f"stopped by {signal.Signals(signals[0]).name}")
    if left_s is not None and left_s <= 0:
        return Stopped(execution.DEADLINE, "the deadline of the whole matrix has passed")
    return None


def _done(one: Cell, deadline_s: float | None, signals: list[int], on_tick: Callable[[Cell], None]) -> Cell:
    """A cell once its process has ended."""
    try:
        if one.act == "new":
            with contextlib.closing(runs.create(one.parameters)) as new:
                one = replace(one, folder=new.path)
        end = cell.run(one.folder, deadline_s=deadline_s, signals=signals, on_tick=lambda: on_tick(one))
    except (RecipeError, RunError, OSError) as error:
        return replace(one, act="refuse", why=str(error))
    return replace(one, end=end)
