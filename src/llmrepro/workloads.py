"""Workloads of a run: the boots in which all that is missing of it is asked."""

from collections import Counter
from itertools import takewhile
from pathlib import Path

from llmrepro import bench as benches
from llmrepro import engines, prompts, protocols, running_server
from llmrepro.asker import Asker
from llmrepro.bench import Bench
from llmrepro.jobs import Job, boot, missing, step, workload_of
from llmrepro.progress import Progress
from llmrepro.protocols import MeasureFailure
from llmrepro.recipe import Recipe
from llmrepro.run import Run

DEATHS = 3  # a server is started again after this many deaths outside of ladders, no more


def measure(
    run: Run,
    environment: Path | None,
    weights: Path | None,
    only: int | None = None,
    exports: dict[str, str] | None = None,
    draft: Path | None = None,
) -> None:
    """Ask everything that is missing, a boot per server and replicate, each record written as it ends. `only` is
    the one replicate to ask of, so that the boots of several runs can take turns; `exports` are what the
    environment's fixes give the engine, `draft` is the drafter's checkpoint.

    A failed request is a record with its status. A dead server is started again, and what killed it
    twice is not asked again. Raises ServerFailure when a server never gets ready, MeasureFailure after too many
    deaths, RunError when a prompt in the folder is not what its hash says.
    """
    recipe = run.recipe
    jobs = _wanted(run, only)
    with Progress("measure", sum(protocols.seconds(workload_of(recipe, j), j.case) for j in jobs)) as bar:
        engine = engines.load(recipe.engine.name)
        url = run.parameters.server_url
        running = identity(url, recipe) if url is not None and jobs else None
        texts = prompts.texts(run.path)
        bench = Bench(run, recipe, engine, environment, weights, texts, bar, exports or {}, running, draft)
        deaths: Counter = Counter()
        while jobs := _wanted(run, only):
            _boot(bench, list(takewhile(lambda j: boot(j) == boot(jobs[0]), jobs)), deaths)


def _wanted(run: Run, only: int | None) -> list[Job]:
    return [j for j in missing(run) if only is None or j.replicate == only]


def identity(url: str, recipe: Recipe) -> running_server.Identity:
    """Who answers at the address of a server that already runs. Raises RunError when that cannot be measured."""
    versions = getattr(engines.load(recipe.engine.name), "versions", None)
    wanted = {recipe.id, recipe.model.repo, *recipe.model.also_named}
    return running_server.identity(url, versions, wanted)


def _boot(bench: Bench, jobs: list[Job], deaths: Counter) -> None:
    """One boot, asked of these jobs as many as it lives for. `deaths` counts how often each of the boots died."""
    one = next(s for s in bench.recipe.servers if s.id == jobs[0].server)
    first = step(bench.recipe, jobs[0])
    opener = jobs[0] if first.fresh and not bench.running else None
    told = {"replicate": jobs[0].replicate}
    if opener is not None:  # what this boot is made for, and in which state of the page cache it starts
        state = "evicted" if first.evicted else "warm"
        labels = {"workload": opener.workload, "case": opener.case, "repeat": opener.repeat}
        told |= {**labels, "page_cache": state}
    with (benches.attached if bench.running else benches.boot)(bench, one, told) as running:
        asker = Asker(bench, running, one, told, opener)
        for name in dict.fromkeys(j.workload for j in jobs):
            mine = [j for j in jobs if j.workload == name]
            asker.ask_all(workload_of(bench.recipe, mine[0]), mine)
    killer = asker.killer
    during = killer and f"{killer.workload} {'(its warm-up)' if asker.warming else killer.case}"
    if killer and bench.running and missing(bench.run):
        raise MeasureFailure(
            f"the server at {running.url} died or stopped answering during {during}; it is not llmrepro's to "
            "start again. The records until then are kept: start it, then go on"
        )
    if killer and (asker.warming or not workload_of(bench.recipe, killer).rises):  # a ladder ends where it does
        deaths[boot(killer)] += 1
    if (times := deaths[boot(jobs[0])]) > DEATHS:
        raise MeasureFailure(
            f"the server {one.id!r} died {times} time{'s' * (times > 1)}, last during {during}; "
            f"the records until then are kept; its logs are in {bench.run.path}/boots/"
        )
