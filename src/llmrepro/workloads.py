"""Workloads of a run: what is to be asked, and the boots in which all that is missing of it is asked."""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from llmrepro import bench as benches
from llmrepro import engines, prompts, protocols, running_server, server
from llmrepro.bench import Bench
from llmrepro.client import Record
from llmrepro.parameters import Parameters
from llmrepro.progress import Progress
from llmrepro.protocols import MeasureFailure, Step
from llmrepro.recipe import Recipe, Server
from llmrepro.run import Run, boots
from llmrepro.run_folder import now, read_lines
from llmrepro.workload import CASES, Workload

ATTEMPTS = 2  # at a request in which the server dies
DEATHS = 3  # a server is started again after this many deaths, no more
ANSWERED = {"ok", "early_stop", "context_overflow"}  # the server lived on and said something definite


@dataclass(frozen=True)
class Job:
    """One request of the plan. `replicate` counts a server's boots as the recipe asks for them."""

    server: str
    replicate: int
    workload: str
    case: str
    repeat: int


def plan(recipe: Recipe, params: Parameters) -> list[Job]:
    """Every request that a complete run has, in order: per boot, per workload, rounds that ask every case, or case
    by case all its repeats.

    The parameters choose servers and workloads, by name or by their profile.
    """
    return [
        Job(s.id, replicate, w.id, case, repeat)
        for s in recipe.servers
        if params.servers is None or s.id in params.servers
        for replicate in range(s.boots)
        for w in recipe.workloads
        if s.id in w.on
        and (params.profile in w.profiles if params.workloads is None else w.id in params.workloads)
        for case, repeat in _order(w)
    ]


def _order(workload: Workload) -> list[tuple[str, int]]:
    """(case, repeat) of one boot, in the order of the workload's protocol."""
    if workload.protocol == "prompt_by_prompt":
        return [(case, repeat) for case in workload.cases for repeat in range(workload.repeats)]
    return [(case, repeat) for repeat in range(workload.repeats) for case in workload.cases]


def estimate_s(recipe: Recipe, jobs: list[Job]) -> float:
    """Seconds that jobs may take on two slow cores, start-up included."""
    workloads = {w.id: w for w in recipe.workloads}
    asking_s = sum(protocols.seconds(workloads[j.workload], j.case) for j in jobs)
    return asking_s + 10 * starts(recipe, jobs)


def starts(recipe: Recipe, jobs: list[Job]) -> int:
    """How many boots the jobs take: one a server and replicate, and one more for each case that wants its own."""
    first = {(j.server, j.replicate): j for j in reversed(jobs)}
    fresh = [j for j in jobs if _step(recipe, j).fresh]
    return len(fresh) + sum(j not in fresh for j in first.values())


def _step(recipe: Recipe, job: Job) -> Step:
    workload = next(w for w in recipe.workloads if w.id == job.workload)
    return protocols.needed(workload, job.case)[-1]


def missing(run: Run) -> list[Job]:
    """The jobs that no record answers yet. Boots that an earlier sitting began are gone on with.

    A request in which the server died is asked once more, since somebody else may have killed it; a case in
    which it died twice is given up.
    """
    replicates = {n: b["replicate"] for n, b in boots(run.path).items()}
    records = [r for r in read_lines(run.path / "records.jsonl") if not r["warmup"]]
    deaths = Counter((r["server"], r["workload"], r["case"]) for r in records if r["status"] == "engine_died")
    done = {
        (r["server"], replicates.get(r["boot"]), r["workload"], r["case"], r["repeat"])
        for r in records
        if r["status"] != "engine_died"
    }
    return [
        j
        for j in plan(run.recipe, run.parameters)
        if (j.server, j.replicate, j.workload, j.case, j.repeat) not in done
        and deaths[j.server, j.workload, j.case] < ATTEMPTS
    ]


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
    jobs = [j for j in missing(run) if only is None or j.replicate == only]
    by_id = {w.id: w for w in recipe.workloads}
    with Progress("measure", sum(protocols.seconds(by_id[j.workload], j.case) for j in jobs)) as bar:
        engine = engines.load(recipe.engine.name)
        url = run.parameters.server_url
        running = identity(url, recipe) if url is not None and jobs else None
        texts = prompts.texts(run.path)
        bench = Bench(run, recipe, engine, environment, weights, texts, bar, exports or {}, running, draft)
        for one in recipe.servers:
            for replicate in range(one.boots) if only is None else [only]:
                _replicate(bench, one, replicate)


def identity(url: str, recipe: Recipe) -> running_server.Identity:
    """Who answers at the address of a server that already runs. Raises RunError when that cannot be measured."""
    versions = getattr(engines.load(recipe.engine.name), "versions", None)
    wanted = {recipe.id, recipe.model.repo, *recipe.model.also_named}
    return running_server.identity(url, versions, wanted)


def _replicate(bench: Bench, one: Server, replicate: int) -> None:
    deaths = 0
    while jobs := [j for j in missing(bench.run) if (j.server, j.replicate) == (one.id, replicate)]:
        step = _step(bench.recipe, jobs[0])
        opener = jobs[0] if step.fresh and not bench.running else None
        told = {"replicate": replicate}
        if opener is not None:  # what this boot is made for, and in which state of the page cache it starts
            state = "evicted" if step.evicted else "warm"
            labels = {"workload": opener.workload, "case": opener.case, "repeat": opener.repeat}
            told |= {**labels, "page_cache": state}
        with (benches.attached if bench.running else benches.boot)(bench, one, told) as boot:
            asker = _Asker(bench, boot, one, told, opener)
            for workload in bench.recipe.workloads:
                asker.ask_all(workload, [j for j in jobs if j.workload == workload.id])
        killer = asker.killer
        if killer and bench.running:
            raise MeasureFailure(
                f"the server at {boot.url} died or stopped answering during {killer.workload} {killer.case}; it "
                "is not llmrepro's to start again. The records until then are kept: start it, then go on"
            )
        deaths += killer is not None
        if deaths > DEATHS:
            raise MeasureFailure(
                f"the server {one.id!r} died {deaths} time{'s' * (deaths > 1)}, last during {killer.workload} "
                f"{killer.case}; the records until then are kept; its logs are in {bench.run.path}/boots/"
            )


class _Asker:
    """Asks one live server. `opener` is the job that this boot was made for, `killer` the one it died in,
    `over` whether no more is asked of it."""

    def __init__(
        self, bench: Bench, boot: server.Boot | running_server.Running, one: Server, told: dict, opener: Job | None
    ):
        self.bench, self.boot, self.one, self.told, self.opener = bench, boot, one, told, opener
        self.killer: Job | None = None
        self.over = False
        self.asked: set[tuple[str, int, str]] = set()  # (workload, round, step) that this boot was asked
        self.heads: dict[str, str] = {}  # by salt

    def ask_all(self, workload: Workload, jobs: list[Job]) -> None:
        """Warm up, then ask the jobs in order, until the server dies or a case wants one just started."""
        before = None
        for job in jobs:
            steps = protocols.needed(workload, job.case)
            reason = self._impossible(job, steps[-1])
            if self.over or (steps[-1].fresh and reason is None and job != self.opener):
                self.over = True
                break
            if reason is not None:
                self.bench.run.append(self._unanswered(job, workload, "skipped", reason))
            else:
                if before is None:
                    before = self._counters(workload)
                    warmup = benches.warmup(self.bench, workload, self.one.id, self.boot.number)
                    self.bench.run.append(benches.ask_one(self.boot, warmup))
                self._ask_steps(workload, job, steps)
            self.bench.bar.to(self.bench.bar.done + protocols.seconds(workload, job.case))
        if before:
            after = {} if self.killer else self._counters(workload)
            self.told.setdefault("counters", {})[workload.id] = {"before": before, "after": after}

    def _counters(self, workload: Workload) -> dict:
        """What the engine counts of its prompt cache and of its drafts; {} where it does not."""
        counters = getattr(self.bench.engine, "counters", None)
        return counters(self._get) or {} if counters else {}

    def _get(self, path: str):
        return benches.call(self.boot, path)

    def _ask_steps(self, workload: Workload, job: Job, steps: list[Step]) -> None:
        """Ask a case. Steps before it that this boot was not asked come first, as warm-ups: they fill the
        cache, or bring back the state in which an earlier boot ended."""
        for step in steps:
            warmup = step is not steps[-1]
            if warmup and (workload.id, job.repeat, step.case) in self.asked:
                continue
            self.bench.bar.to(
                self.bench.bar.done, f"{self.one.id} · {workload.id} · {step.case} · round {job.repeat + 1}"
            )
            record = self._ask(workload, job, step, warmup)
            died = None if record.status in (*ANSWERED, "skipped") else self._died()
            if died is not None:
                record = record.model_copy(update={"status": "engine_died", "error": died})
                self.killer, self.over = job, True
            elif step.slot == "save":
                self._slot(job, "save")
            self.bench.run.append(record)
            self.asked.add((workload.id, job.repeat, step.case))
            if died is not None:
                if record.warmup:  # the case could not be asked, and after enough of that it is given up
                    error = f"in {step.case}, which is asked before it: {died}"
                    self.bench.run.append(self._unanswered(job, workload, "engine_died", error))
                return
            if step.slot == "restore":  # no longer needed, and gigabytes for a large model
                self._slot_file(job).unlink(missing_ok=True)

    def _ask(self, workload: Workload, job: Job, step: Step, warmup: bool) -> Record:
        try:
            if step.slot == "restore" and not self._slot(job, "restore"):
                reason = "the server did not restore the prompt cache that it had saved; its log may say why"
                return self._unanswered(job, workload, "skipped", reason)
            labels = {"case": step.case, "repeat": job.repeat, "warmup": warmup}
            text = self._text(workload, job, step)
            log_bytes = self.boot.log.stat().st_size
            record = benches.ask_one(
                self.boot,
                benches.question(self.bench, workload, text, server=self.one.id, boot=self.boot.number, **labels),
            )
        except MeasureFailure as failure:  # its prompt could not be cut, since nobody counted its tokens
            if self._died() is None:
                raise
            return self._unanswered(job, workload, "engine_died", str(failure))
        return record.model_copy(update={"engine_log": self._logged(workload, log_bytes)})

    def _logged(self, workload: Workload, since: int) -> dict | None:
        """What the engine logged of a request about its prompt cache."""
        read = getattr(self.bench.engine, "request_log", None)
        if read is None or workload.kind not in CASES:
            return None
        with open(self.boot.log, "rb") as file:
            file.seek(since)
            return read(file.read().decode(errors="replace"))

    def _unanswered(self, job: Job, workload: Workload, status: str, error: str) -> Record:
        return Record(
            server=job.server,
            boot=self.boot.number,
            workload=job.workload,
            case=job.case,
            repeat=job.repeat,
            warmup=False,
            prompt_sha256="",
            endpoint=workload.endpoint,
            request={},
            started_at=now(),
            t_send_ns=time.perf_counter_ns(),
            status=status,
            error=error,
        )

    def _impossible(self, job: Job, step: Step) -> str | None:
        """Why a case cannot be asked, or None."""
        engine, name = self.bench.engine, self.bench.recipe.engine.name
        workload = next(w for w in self.bench.recipe.workloads if w.id == job.workload)
        if self.bench.running and workload.kind == "restart":
            return "this server was running already, and llmrepro neither ends nor starts it"
        reason = engine.impossible(workload) if hasattr(engine, "impossible") else None
        if reason is None and workload.kind != "chat" and not hasattr(engine, "tokenize"):
            reason = f"{name} counts the tokens of no text, and {workload.id} needs prompts of exact lengths"
        if reason is not None or step.slot != "restore":
            return reason
        if not hasattr(self.bench.engine, "slot"):
            return f"{name} cannot keep its prompt cache over a restart"
        if not self._slot_file(job).is_file():
            return "no prompt cache was saved before the restart; the log of the boot before may say why"
        return None

    def _slot_file(self, job: Job) -> Path:
        name = f"{job.server}-{job.replicate}-{job.workload}-{job.repeat}.bin"
        return self.bench.run.path / benches.SLOTS / name

    def _slot(self, job: Job, action: str) -> bool:
        """Have the server save its prompt cache, or restore it; whether it did."""
        if not hasattr(self.bench.engine, "slot"):
            return False
        path, body = self.bench.engine.slot(action, self._slot_file(job).name)
        return benches.call(self.boot, path, body) is not None

    def _died(self) -> str | None:
        """Why the server is dead, or None: a server lives when it can still generate."""
        for _ in range(20):  # an exit is seen a moment after its last answer
            ended = self.boot.ended()
            if ended is not None:
                return ended
            time.sleep(0.05)
        asked = benches.sign_of_life(self.bench, self.one.id, self.boot.number)
        probe = benches.ask_one(self.boot, asked, timeout_s=60)
        return None if probe.status in ANSWERED else f"it no longer generates: {probe.status}, {probe.error}"

    def _text(self, workload: Workload, job: Job, step: Step) -> str:
        """A step's prompt. Heads are salted anew each round, and the same in every boot that the round takes."""
        bench, by_id = self.bench, {p.id: p for p in workload.prompts}
        if workload.kind not in CASES:
            salt = protocols.salt(bench.label, self.boot.number, job)
            if workload.kind == "chat":
                text = bench.texts[prompts.key(workload, by_id[job.case])]
                return protocols.with_own_line(text, salt) if workload.salted else text
            return protocols.salted(
                bench.texts[prompts.key(workload, workload.text)], int(job.case), salt, self._count
            )
        salt = protocols.salt(bench.label, job.server, job.replicate, job.workload, job.repeat, step.head)
        if salt not in self.heads:
            text = bench.texts[prompts.key(workload, workload.text)]
            self.heads[salt] = protocols.salted(text, workload.head_tokens, salt, self._count)
        head = protocols.changed(self.heads[salt]) if step.changed else self.heads[salt]
        return f"{head}\n\n{bench.texts[prompts.key(workload, workload.prompts[step.tail])]}"

    def _count(self, text: str) -> int:
        path, body = self.bench.engine.tokenize(text)
        answer = benches.call(self.boot, path, body)
        if not isinstance(answer, dict) or "tokens" not in answer:
            raise MeasureFailure(
                f"{path} of the server did not count the tokens of a prompt; its log {self.boot.log} may say why"
            )
        return len(answer["tokens"])
