"""One boot of a recipe's server: in which state it starts, what is written of it, how it is asked."""

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmrepro import (
    containers,
    engines,
    exchange,
    fixes,
    guard,
    guard_log,
    machine,
    numa,
    page_cache,
    prompts,
    protocols,
    running_server,
    server,
)
from llmrepro.client import Question, Record, ask
from llmrepro.progress import Progress
from llmrepro.recipe import Recipe, Server
from llmrepro.run import Run, boots
from llmrepro.run_folder import RunError, read_lines
from llmrepro.stopwatch import Stopwatch
from llmrepro.workload import Workload

SLOTS = "slots"  # folder of a run in which servers keep a prompt cache over a restart


@dataclass(frozen=True)
class Bench:
    """What every boot of a run needs. `texts` are those of `prompts.texts`, `bar` shows seconds of estimate."""

    run: Run
    recipe: Recipe
    engine: engines.Engine
    environment: Path | None
    weights: Path | None
    texts: dict[str, str]
    bar: Progress
    exports: dict[str, str]  # variables that the environment's fixes give the engine
    running: running_server.Identity | None = None  # a server that already runs, where that is asked
    draft: Path | None = None  # the drafter's checkpoint

    @property
    def label(self) -> str:
        """What no other run has in its salts: a server that outlives a run may have its prompts in a cache."""
        return "/".join(self.run.path.parts[-3:])  # an arm's folder is named like that of every such study


@contextmanager
def boot(bench: Bench, one: Server, told: dict[str, Any]) -> Iterator[server.Boot]:
    """A ready server. `told` becomes boots/<n>.json: who starts the boot puts its labels in, who asks may add.

    With `page_cache` "evicted" or "warm" among the labels the weights are put out of the page cache, or read
    into it, right before the start.
    """
    run, recipe, engine = bench.run, bench.recipe, bench.engine
    number = _next(run)
    threads = machine.threads()
    told.update(server=one.id, threads=threads)
    started = _with_slots(bench, one)
    adapted = _adapted(bench, one)
    cidfile: list[Path | None] = []  # of the command that was started last

    def command(port: int, api_key: str) -> server.Command:
        launch = engine.launch(
            bench.environment,
            recipe.engine.install,
            started,
            bench.weights,
            alias=recipe.id,
            port=port,
            api_key=api_key,
            threads=threads,
            draft=bench.draft,
        )
        argv = engines.placed(launch, one)
        told.update(
            command=[_shown(a.replace(api_key, server.KEY)) for a in argv],
            adaptations=[*launch.adaptations, *adapted],
        )
        cidfile.append(launch.cidfile)
        inherited = machine.minimal_environment()
        exports = fixes.exported(bench.exports, bench.environment, inherited)
        env = {**inherited, **exports, **launch.env}
        return server.Command(argv, env, cleanup=[*launch.cleanup])

    ready = sign_of_life(bench, one.id, number)
    watch = Stopwatch()
    change = {"evicted": page_cache.evict, "warm": page_cache.bring_in}.get(told.get("page_cache"))
    for checkpoint in (bench.weights, bench.draft) if change else ():
        if checkpoint is not None:
            change(checkpoint)
    told["weights_cached_share"] = page_cache.resident_share(bench.weights)
    pid_file = run.path / "boots" / f"{number}.pid" if recipe.engine.install.kind == "container" else None
    stopped = guard.heeded(run.path / guard_log.name(number))
    with (
        stopped,
        server.boot(
            command,
            folder=run.path,
            number=number,
            ready=ready,
            status_file=run.path / "status.json",
            sampler=guard.sampler(run.path, number, recipe, pid_file),
            on_wait=lambda s, what: bench.bar.to(bench.bar.done, f"{one.id} · {what}"),
        ) as running,
    ):
        # a container's server is no child of the command that was started
        pid = running.pid if cidfile[-1] is None else containers.main_pid(cidfile[-1])
        running.main_pid = pid
        if one.numa_node is not None:
            told["cpus_allowed"] = numa.allowed(pid)
        if cidfile[-1] is not None:
            running.startup["startup.port_s"] = None  # podman and docker open it before the server does
            if pid is not None:
                run.write_text(f"boots/{number}.pid", str(pid))
        told.update(startup=running.startup, started_at_ns=running.started_ns)
        told.update(_observed(engine, running))  # already now: it may be killed, and so may this process
        run.write_json(f"boots/{number}.json", told)
        try:
            yield running
        finally:
            alive = running.ended() is None
            told.update(machine=watch.reading(pid if alive else None))
            if alive:
                told.update(_observed(engine, running))
            run.write_json(f"boots/{number}.json", told)


def _observed(engine: engines.Engine, running: server.Boot) -> dict:
    return engine.observe(lambda path: call(running, path), running.log.read_text(errors="replace"))


def _adapted(bench: Bench, one: Server) -> list[str]:
    """What of a server's requests its engine gets otherwise than the recipe says."""
    changes = getattr(bench.engine, "adapted", lambda workload: [])
    return [sentence for w in bench.recipe.workloads if one.id in w.on for sentence in changes(w)]


def _next(run: Run) -> int:
    """The number of a run's next boot."""
    known = [int(p.name.split(".")[0]) for p in (run.path / "boots").glob("[0-9]*")]
    return 1 + max([*known, *(r["boot"] for r in read_lines(run.path / "records.jsonl"))], default=0)


@contextmanager
def attached(bench: Bench, one: Server, told: dict[str, Any]) -> Iterator[running_server.Running]:
    """The server that already runs, as a boot; it is left as it was. Raises RunError when it is another one than
    earlier in this run."""
    run, url = bench.run, bench.run.parameters.server_url
    number, before = _next(run), running_server.of(boots(run.path))
    told.update(server=one.id, **running_server.told(url, bench.running), adaptations=_adapted(bench, one))
    for name in ("model", "versions"):
        if before is not None and before[name] != told[name]:
            raise RunError(
                f"{url} told {name} {before[name]} when this run began, and {told[name]} now; start a new run"
            )
    log = run.write_text(
        f"boots/{number}.log", "This server was running already: its log is where it was started.\n"
    )
    running = running_server.Running(number, url, running_server.key(), log)
    running_server.check(url, ask_one(running, sign_of_life(bench, one.id, number), timeout_s=120))
    watch = Stopwatch()
    told.update(started_at_ns=running.started_ns)
    told.update(bench.engine.observe(lambda path: call(running, path), ""))  # its log is not had
    run.write_json(f"boots/{number}.json", told)
    beside = guard.beside(run.path, number, bench.recipe) if told["here"] else nullcontext()
    with beside as running.guard_file:
        try:
            yield running
        finally:
            if told["here"]:
                told.update(machine=watch.reading(None))
            told.update(bench.engine.observe(lambda path: call(running, path), ""))
            run.write_json(f"boots/{number}.json", told)


def _shown(word: str) -> str:
    """A word of a command without this machine's folders, also where one is mounted from."""
    mounted = re.sub(r"(?<=,source=)[^,]+", lambda found: machine.shortened(found[0]), word)
    return machine.shortened(mounted)


def _with_slots(bench: Bench, one: Server) -> Server:
    """The server, with where it may save its prompt cache if one of its workloads wants that and it can."""
    wanted = any(w.restore for w in bench.recipe.workloads if one.id in w.on)
    if not wanted or not hasattr(bench.engine, "slot_arguments"):
        return one
    folder = bench.run.path / SLOTS
    folder.mkdir(exist_ok=True)
    return one.model_copy(update={"args": [*one.args, *bench.engine.slot_arguments(folder)]})


def warmup(bench: Bench, workload: Workload, server_id: str, number: int) -> Question:
    """The workload's warm-up, which is no measured prompt; answered without thinking where that can be chosen."""
    if workload.thinking:  # warming up is done by the first tokens, whatever they say
        workload = workload.model_copy(update={"thinking": False})
    text = bench.texts[prompts.key(workload, workload.warmup)]
    if workload.salted:
        text = protocols.with_own_line(text, protocols.salt(bench.label, number, workload.id, time.time_ns()))
    labels = {"server": server_id, "boot": number, "case": workload.warmup.id, "warmup": True}
    return question(bench, workload, text, **labels)


def sign_of_life(bench: Bench, server_id: str, number: int) -> Question:
    """The first workload's warm-up for four tokens: a server that answers it generates."""
    asked = warmup(bench, bench.recipe.workloads[0], server_id, number)
    return replace(asked, body={**asked.body, "max_tokens": 4})


def question(bench: Bench, workload: Workload, text: str, *, repeat: int = 0, **labels) -> Question:
    """A workload's request for one prompt text: every sampling field sent, streamed, usage asked for. Round
    `repeat` has its own seed where the workload has several."""
    sampling = workload.sampling.model_dump(exclude={"seeds"}, exclude_none=True)
    if workload.sampling.seeds:
        sampling["seed"] = workload.sampling.seeds[repeat]
    prompt = (
        {"messages": [{"role": "user", "content": text}]}
        if workload.endpoint == "/v1/chat/completions"
        else {"prompt": text}
    )
    body = {
        "model": bench.running.model if bench.running else bench.recipe.id,
        **prompt,
        "max_tokens": workload.max_tokens,
        **sampling,
    }
    if workload.ignore_eos:
        body["ignore_eos"] = True
    if workload.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": workload.thinking}
    return Question(
        workload.endpoint,
        bench.engine.request(body, cache=workload.cache),
        workload=workload.id,
        repeat=repeat,
        prompt_sha256=hashlib.sha256(text.encode()).hexdigest(),
        **labels,
    )


def ask_one(running: server.Boot | running_server.Running, asked: Question, timeout_s: float = 600) -> Record:
    record = ask(running.url, asked, api_key=running.api_key, timeout_s=timeout_s)
    if isinstance(running, running_server.Running):  # the key is somebody's own, and not of one boot
        return running.without_key(record)
    return record


def ask_together(
    running: server.Boot | running_server.Running, asked: list[Question], timeout_s: float = 600
) -> list[Record]:
    """The answers to requests that are sent at once, in their order. An interrupt leaves them unfinished."""
    answers: list[Record | None] = [None] * len(asked)
    start = threading.Barrier(len(asked))

    def one(place: int) -> None:
        start.wait()
        answers[place] = ask_one(running, asked[place], timeout_s)

    threads = [threading.Thread(target=one, args=(n,), daemon=True) for n in range(len(asked))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(0.2)
    if None in answers:
        raise RuntimeError("a request could not be asked; see the traceback above")
    return answers


def call(running: server.Boot | running_server.Running, path: str, body: dict | None = None) -> Any:
    """A plain request to the server's API: parsed JSON, or the text that is none; None without a good answer."""
    return exchange.asked(running.url + path, running.api_key, body)
