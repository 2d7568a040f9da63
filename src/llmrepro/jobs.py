"""The jobs of a run: every request that a complete one has, in order, and those that are still missing."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from llmrepro import protocols
from llmrepro.parameters import Parameters
from llmrepro.protocols import Step
from llmrepro.recipe import Recipe
from llmrepro.run import Run, boots
from llmrepro.run_folder import read_lines
from llmrepro.workload import Workload

ALL = 10**9  # more than any workload has of streams or cases
ATTEMPTS = 2  # at a request in which the server dies, and at climbing a ladder on which it does


@dataclass(frozen=True)
class Job:
    """One case of the plan, asked once. `replicate` counts a server's boots as the recipe asks for them."""

    server: str
    replicate: int
    workload: str
    case: str
    repeat: int


def plan(recipe: Recipe, params: Parameters) -> list[Job]:
    """Every job that a complete run has, in order: per boot, per workload, rounds that ask every case, or case
    by case all its repeats. The parameters choose servers and workloads, by name or by their profile.

    What may kill an engine comes after everything else. The boots go backwards then, so that the last one, which
    is still up, goes straight on.
    """
    safe = [j for boot in _boots(recipe, params) for j in _asked(recipe, params, *boot, rises=False)]
    risky = [j for boot in reversed([*_boots(recipe, params)]) for j in _asked(recipe, params, *boot, rises=True)]
    return safe + risky


def _boots(recipe: Recipe, params: Parameters) -> Iterator[tuple[str, int]]:
    for server in recipe.servers:
        if params.servers is None or server.id in params.servers:
            yield from ((server.id, replicate) for replicate in range(server.boots))


def _asked(recipe: Recipe, params: Parameters, server: str, replicate: int, *, rises: bool) -> Iterator[Job]:
    for w in recipe.workloads:
        if server in w.on and params.chooses(w) and w.rises == rises:
            yield from (Job(server, replicate, w.id, case, repeat) for case, repeat in _order(w))


def _order(workload: Workload) -> list[tuple[str, int]]:
    """(case, repeat) of one boot, in the order of the workload's protocol."""
    if workload.protocol == "prompt_by_prompt":
        return [(case, repeat) for case in workload.cases for repeat in range(workload.repeats)]
    return [(case, repeat) for repeat in range(workload.repeats) for case in workload.cases]


def workload_of(recipe: Recipe, job: Job) -> Workload:
    return next(w for w in recipe.workloads if w.id == job.workload)


def step(recipe: Recipe, job: Job) -> Step:
    """The step that a job is asked by."""
    return protocols.needed(workload_of(recipe, job), job.case)[-1]


def estimate_s(recipe: Recipe, jobs: list[Job]) -> float:
    """Seconds that jobs may take on two slow cores, start-up included."""
    asking_s = sum(protocols.seconds(workload_of(recipe, j), j.case) for j in jobs)
    return asking_s + 10 * starts(recipe, jobs)


def starts(recipe: Recipe, jobs: list[Job]) -> int:
    """How many boots the jobs take."""
    return sum(boots_by_server(recipe, jobs).values())


def boots_by_server(recipe: Recipe, jobs: list[Job]) -> Counter[str]:
    """How many boots the jobs take of each server: one for each stretch of the same server and replicate, and one
    more for each case that wants its own."""
    fresh = [j for j in jobs if step(recipe, j).fresh]
    first = [j for n, j in enumerate(jobs) if n == 0 or boot(j) != boot(jobs[n - 1])]
    return Counter(j.server for j in [*fresh, *(j for j in first if j not in fresh)])


def boot(job: Job) -> tuple[str, int]:
    return job.server, job.replicate


def requests(recipe: Recipe, jobs: list[Job]) -> int:
    """How many requests jobs are: as many as there are streams, of concurrent ones."""
    return sum(streams(workload_of(recipe, j), j.case) for j in jobs)


def streams(workload: Workload, case: str) -> int:
    """How many requests a case sends at once."""
    return int(case) if workload.kind == "concurrency" else 1


def missing(run: Run) -> list[Job]:
    """The jobs of a run that are still to be asked; see `left`. Boots that an earlier sitting began are gone on
    with."""
    return left(run.recipe, run.parameters, boots(run.path), read_lines(run.path / "records.jsonl"))


def left(recipe: Recipe, params: Parameters, started: dict[int, dict], records: list[dict]) -> list[Job]:
    """The jobs that no record answers yet. `started` are the boots, `records` the fields of each record.

    A request in which the server died is asked once more, since somebody else may have killed it; a case in
    which it died twice is given up. A ladder goes no further than where a rung failed on that server, in no boot.
    """
    replicates = {n: b["replicate"] for n, b in started.items()}
    records = [r for r in records if not r["warmup"]]
    died = {_asked_once(r) for r in records if r["status"] == "engine_died"}
    deaths = Counter((server, workload, case) for server, _, workload, case, _ in died)
    answered: Counter = Counter()  # a case of several streams has as many records
    for r in records:
        if _asked_once(r) not in died:
            key = (r["server"], replicates.get(r["boot"]), r["workload"], r["case"], r["repeat"])
            answered[key] += ALL if r["status"] == "skipped" else 1
    ends = {(s, w.id): end for w in recipe.workloads if w.rises for s, end in _ends(w, records).items()}
    return [
        j
        for j in plan(recipe, params)
        if answered[j.server, j.replicate, j.workload, j.case, j.repeat]
        < streams(workload := workload_of(recipe, j), j.case)
        and deaths[j.server, j.workload, j.case] < ATTEMPTS
        and not (workload.rises and workload.cases.index(j.case) >= ends.get((j.server, j.workload), ALL))
    ]


def _asked_once(record: dict) -> tuple:
    return tuple(record[k] for k in ("server", "boot", "workload", "case", "repeat"))


def _ends(ladder: Workload, records: list[dict]) -> dict[str, int]:
    """{server: place among the cases of the first rung that is not asked any more}: where one failed, or the
    first of all, after the engine died on as many of them as it is allowed to."""
    ends: dict[str, int] = {}
    deaths: dict[str, set] = defaultdict(set)
    for r in records:
        if r["workload"] == ladder.id and r["case"] in ladder.cases and failed(r["status"], r.get("xids", [])):
            place = ladder.cases.index(r["case"])
            ends[r["server"]] = min(place, ends.get(r["server"], place))
            if r["status"] in ("engine_died", "oom"):
                deaths[r["server"]].add(_asked_once(r))
    return {server: 0 if len(deaths[server]) >= ATTEMPTS else end for server, end in ends.items()}


def failed(status: str, xids: list[int]) -> bool:
    """Whether a rung failed: not answered whole, or with an error of the GPU's driver meanwhile."""
    return status not in ("ok", "skipped") or bool(xids)
