"""Protocols of requests. A workload's rounds run inside a boot that is started and ended here."""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import requests

from llmrepro import engines, machine, page_cache, server
from llmrepro.client import Question, Record, ask
from llmrepro.parameters import Parameters
from llmrepro.progress import Progress
from llmrepro.recipe import Recipe, Server, Workload
from llmrepro.run import Run, boots
from llmrepro.run_folder import now, read_json, read_lines

ATTEMPTS = 2  # at a request in which the server dies
DEATHS = 3  # a server is started again after this many deaths, no more
SLOW_PREFILL_TPS, SLOW_DECODE_TPS = 60.0, 40.0  # two slow cores, one of them for the engine
ANSWERED = {"ok", "early_stop", "context_overflow"}  # the server lived on and said something definite


class MeasureFailure(RuntimeError):
    """Measuring cannot go on; what was measured is kept. The text says why and what to do."""


@dataclass(frozen=True)
class Job:
    """One request of the plan. `replicate` counts a server's boots as the recipe asks for them."""

    server: str
    replicate: int
    workload: str
    case: str
    repeat: int


def plan(recipe: Recipe, params: Parameters) -> list[Job]:
    """Every request that a complete run has, in order: per boot, per workload, rounds that ask every case.

    The parameters choose servers and the profile's workloads.
    """
    return [
        Job(s.id, replicate, w.id, case, repeat)
        for s in recipe.servers
        if params.servers is None or s.id in params.servers
        for replicate in range(s.boots)
        for w in recipe.workloads
        if s.id in w.on and params.profile in w.profiles
        for repeat in range(w.repeats)
        for case in w.cases
    ]


def estimate_s(recipe: Recipe, jobs: list[Job]) -> float:
    """Seconds that jobs may take on two slow cores, start-up included."""
    workloads = {w.id: w for w in recipe.workloads}
    starts = {(j.server, j.replicate) for j in jobs}
    return sum(_cost_s(workloads[j.workload], j.case) for j in jobs) + 10 * len(starts)


def _cost_s(workload: Workload, case: str) -> float:
    prompt = int(case) if workload.kind == "prefill" else 60
    return prompt / SLOW_PREFILL_TPS + workload.max_tokens / SLOW_DECODE_TPS


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


@dataclass(frozen=True)
class Bench:
    """What every boot of a run needs. `texts` are prompts by sha256, `bar` shows seconds of the estimate."""

    run: Run
    recipe: Recipe
    engine: engines.Engine
    environment: Path
    weights: Path
    texts: dict[str, str]
    bar: Progress


def measure(run: Run, environment: Path, weights: Path) -> None:
    """Ask everything that is missing, a boot per server and replicate, each record written as it ends.

    A failed request is a record with its status. A dead server is started again, and what killed it
    twice is not asked again. Raises ServerFailure when a server never gets ready, MeasureFailure after too many
    deaths.
    """
    recipe = run.recipe
    jobs = missing(run)
    by_id = {w.id: w for w in recipe.workloads}
    with Progress("measure", sum(_cost_s(by_id[j.workload], j.case) for j in jobs)) as bar:
        bench = Bench(run, recipe, engines.load(recipe.engine.name), environment, weights, _texts(run), bar)
        for one in recipe.servers:
            for replicate in range(one.boots):
                _replicate(bench, one, replicate)


def _texts(run: Run) -> dict[str, str]:
    """The prompts of a run by sha256. Raises MeasureFailure when one is not what its hash says."""
    texts = read_json(run.path / "prompts.json")
    for sha256, text in texts.items():
        if hashlib.sha256(str(text).encode()).hexdigest() != sha256:
            raise MeasureFailure(
                f"{run.path}/prompts.json was changed: a text has not the sha256 {sha256}; start a new run"
            )
    return texts


def _replicate(bench: Bench, one: Server, replicate: int) -> None:
    deaths = 0
    while jobs := [j for j in missing(bench.run) if (j.server, j.replicate) == (one.id, replicate)]:
        with _boot(bench, one, replicate) as asker:
            for workload in bench.recipe.workloads:
                asker.ask_all(workload, [j for j in jobs if j.workload == workload.id])
        killer = asker.killer
        deaths += killer is not None
        if deaths > DEATHS:
            raise MeasureFailure(
                f"the server {one.id!r} died {deaths} time{'s' * (deaths > 1)}, last during {killer.workload} "
                f"{killer.case}; the records until then are kept; its logs are in {bench.run.path}/boots/"
            )


class _Asker:
    """Asks one live server. `killer` is the job it died in."""

    def __init__(self, bench: Bench, boot: server.Boot, one: Server):
        self.bench, self.boot, self.one = bench, boot, one
        self.killer: Job | None = None

    def ask_all(self, workload: Workload, jobs: list[Job]) -> None:
        """Warm up, then ask the jobs in order, until the server dies."""
        bar = self.bench.bar
        if not jobs or self.killer is not None:
            return
        self.bench.run.append(ask_one(self.boot, _warmup(self.bench, workload, self.one.id, self.boot.number)))
        for job in jobs:
            bar.to(bar.done, f"{self.one.id} · {workload.id} · {job.case} · round {job.repeat + 1}")
            record = self._ask(workload, job)
            died = None if record.status in ANSWERED else self._died()
            if died is not None:
                record = record.model_copy(update={"status": "engine_died", "error": died})
                self.killer = job
            self.bench.run.append(record)
            bar.to(bar.done + _cost_s(workload, job.case))
            if died is not None:
                return

    def _ask(self, workload: Workload, job: Job) -> Record:
        try:
            return ask_one(self.boot, self._question(workload, job))
        except MeasureFailure as failure:  # its prompt could not be cut, since nobody counted its tokens
            if self._died() is None:
                raise
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
                status="engine_died",
                error=str(failure),
            )

    def _died(self) -> str | None:
        """Why the server is dead, or None: a server lives when it can still generate."""
        for _ in range(20):  # an exit is seen a moment after its last answer
            ended = self.boot.ended()
            if ended is not None:
                return ended
            time.sleep(0.05)
        asked = _warmup(self.bench, self.bench.recipe.workloads[0], self.one.id, self.boot.number)
        probe = ask_one(self.boot, asked, timeout_s=60)
        return None if probe.status in ANSWERED else f"it no longer generates: {probe.status}, {probe.error}"

    def _question(self, workload: Workload, job: Job) -> Question:
        if workload.kind == "prefill":
            salt = hashlib.sha256(f"{self.bench.run.path.name} {self.boot.number} {job}".encode()).hexdigest()[:12]
            text = salted(self.bench.texts[workload.text.sha256], int(job.case), salt, self._count)
        else:
            text = self.bench.texts[next(p.sha256 for p in workload.prompts if p.id == job.case)]
        return question(
            self.bench, workload, text, server=self.one.id, boot=self.boot.number, case=job.case, repeat=job.repeat
        )

    def _count(self, text: str) -> int:
        path, body = self.bench.engine.tokenize(text)
        answer = call(self.boot, path, body)
        if answer is None or "tokens" not in answer:
            raise MeasureFailure(
                f"{path} of the server did not count the tokens of a prompt; its log {self.boot.log} may say why"
            )
        return len(answer["tokens"])


@contextmanager
def _boot(bench: Bench, one: Server, replicate: int) -> Iterator[_Asker]:
    run, recipe, engine = bench.run, bench.recipe, bench.engine
    known = [int(p.name.split(".")[0]) for p in (run.path / "boots").glob("[0-9]*")]
    number = 1 + max([*known, *(r["boot"] for r in read_lines(run.path / "records.jsonl"))], default=0)
    threads = machine.threads()
    told: dict = {"server": one.id, "replicate": replicate, "threads": threads}

    def command(port: int, api_key: str) -> server.Command:
        launch = engine.launch(
            bench.environment,
            recipe.engine.install,
            one,
            bench.weights,
            alias=recipe.id,
            port=port,
            api_key=api_key,
            threads=threads,
        )
        told.update(
            command=[machine.shortened(a.replace(api_key, server.KEY)) for a in launch.argv],
            adaptations=launch.adaptations,
        )
        return server.Command(launch.argv, {**_minimal_environment(), **launch.env})

    ready = _warmup(bench, recipe.workloads[0], one.id, number)
    ready = replace(ready, body={**ready.body, "max_tokens": 4})
    watch = machine.Stopwatch()
    told["weights_cached_share"] = page_cache.resident_share(bench.weights)
    with server.boot(
        command,
        folder=run.path,
        number=number,
        ready=ready,
        status_file=run.path / "status.json",
        on_wait=lambda s, what: bench.bar.to(bench.bar.done, f"{one.id} · {what}"),
    ) as boot:
        told.update(startup=boot.startup, started_at_ns=boot.started_ns)
        run.write_json(f"boots/{number}.json", told)
        try:
            yield _Asker(bench, boot, one)
        finally:
            if boot.ended() is None:
                told.update(engine.observe(lambda path: call(boot, path), boot.log.read_text(errors="replace")))
            told.update(machine=watch.reading())
            run.write_json(f"boots/{number}.json", told)


def _warmup(bench: Bench, workload: Workload, server_id: str, boot: int) -> Question:
    return question(
        bench,
        workload,
        bench.texts[workload.warmup.sha256],
        server=server_id,
        boot=boot,
        case=workload.warmup.id,
        warmup=True,
    )


def _minimal_environment() -> dict[str, str]:
    """What an engine inherits: enough to find programs, caches and its locale, and none of the user's tokens."""
    names = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME")
    return {name: os.environ[name] for name in names if name in os.environ}


def question(bench: Bench, workload: Workload, text: str, **labels) -> Question:
    """A workload's request for one prompt text: every sampling field sent, streamed, usage asked for."""
    sampling = {k: v for k, v in workload.sampling.model_dump().items() if v is not None}
    prompt = (
        {"messages": [{"role": "user", "content": text}]}
        if workload.endpoint == "/v1/chat/completions"
        else {"prompt": text}
    )
    body = {"model": bench.recipe.id, **prompt, "max_tokens": workload.max_tokens, **sampling}
    if workload.ignore_eos:
        body["ignore_eos"] = True
    return Question(
        workload.endpoint,
        bench.engine.request(body, cache=workload.cache),
        workload=workload.id,
        prompt_sha256=hashlib.sha256(text.encode()).hexdigest(),
        **labels,
    )


def salted(text: str, tokens: int, salt: str, count) -> str:
    """A prompt of exactly `tokens` tokens by `count`: a salted first line, then as much of `text` as fits.

    The salt stands at the head, so that no prefix of an earlier prompt can be reused. Raises MeasureFailure
    when the text is too short or the count cannot be met.
    """
    head, words = f"Note {salt}.\n", text.split(" ")
    low, high = 0, len(words)
    longest = count(head + text)
    if longest < tokens:
        raise MeasureFailure(
            f"a prompt of {tokens} tokens is wanted and the workload's text has {longest}; give it a longer text"
        )
    while low < high:  # most words that fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(head + " ".join(words[:middle])) <= tokens else (low, middle - 1)
    prompt = head + " ".join(words[:low])
    for _ in range(tokens):
        if count(prompt) >= tokens:
            break
        prompt += " a"  # a token of its own in the vocabularies met so far
    if count(prompt) != tokens:
        raise MeasureFailure(f"no prompt of exactly {tokens} tokens could be cut; choose another length")
    return prompt


def ask_one(boot: server.Boot, asked: Question, timeout_s: float = 600) -> Record:
    return ask(boot.url, asked, api_key=boot.api_key, timeout_s=timeout_s)


def call(boot: server.Boot, path: str, body: dict | None = None) -> dict | None:
    """A plain request to the server's API: parsed JSON, or None when it gives none."""
    with requests.Session() as session:
        session.trust_env = False  # a proxy variable must not catch loopback
        session.headers["Authorization"] = f"Bearer {boot.api_key}"
        try:
            answer = (
                session.get(boot.url + path, timeout=30, allow_redirects=False)
                if body is None
                else session.post(boot.url + path, json=body, timeout=30)
            )
            return answer.json() if answer.ok else None
        except (requests.RequestException, json.JSONDecodeError):
            return None
