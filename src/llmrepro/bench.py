"""One boot of a recipe's server: in which state it starts, what is written of it, how it is asked."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import requests

from llmrepro import engines, fixes, machine, page_cache, server
from llmrepro.client import Question, Record, ask
from llmrepro.progress import Progress
from llmrepro.recipe import Recipe, Server
from llmrepro.run import Run
from llmrepro.run_folder import read_lines
from llmrepro.workload import Workload

SLOTS = "slots"  # folder of a run in which servers keep a prompt cache over a restart


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
    exports: dict[str, str]  # variables that the environment's fixes give the engine


@contextmanager
def boot(bench: Bench, one: Server, told: dict[str, Any]) -> Iterator[server.Boot]:
    """A ready server. `told` becomes boots/<n>.json: who starts the boot puts its labels in, who asks may add.

    With `page_cache` "evicted" or "warm" among the labels the weights are put out of the page cache, or read
    into it, right before the start.
    """
    run, recipe, engine = bench.run, bench.recipe, bench.engine
    known = [int(p.name.split(".")[0]) for p in (run.path / "boots").glob("[0-9]*")]
    number = 1 + max([*known, *(r["boot"] for r in read_lines(run.path / "records.jsonl"))], default=0)
    threads = machine.threads()
    told.update(server=one.id, threads=threads)
    started = _with_slots(bench, one)

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
        )
        told.update(
            command=[machine.shortened(a.replace(api_key, server.KEY)) for a in launch.argv],
            adaptations=launch.adaptations,
        )
        inherited = machine.minimal_environment()
        exports = fixes.exported(bench.exports, bench.environment, inherited)
        return server.Command(launch.argv, {**inherited, **exports, **launch.env})

    ready = warmup(bench, recipe.workloads[0], one.id, number)
    ready = replace(ready, body={**ready.body, "max_tokens": 4})
    watch = machine.Stopwatch()
    if told.get("page_cache") == "evicted":
        page_cache.evict(bench.weights)
    elif told.get("page_cache") == "warm":
        page_cache.bring_in(bench.weights)
    told["weights_cached_share"] = page_cache.resident_share(bench.weights)
    with server.boot(
        command,
        folder=run.path,
        number=number,
        ready=ready,
        status_file=run.path / "status.json",
        on_wait=lambda s, what: bench.bar.to(bench.bar.done, f"{one.id} · {what}"),
    ) as running:
        told.update(startup=running.startup, started_at_ns=running.started_ns)
        run.write_json(f"boots/{number}.json", told)
        try:
            yield running
        finally:
            alive = running.ended() is None
            told.update(machine=watch.reading(running.pid if alive else None))
            if alive:
                log = running.log.read_text(errors="replace")
                told.update(engine.observe(lambda path: call(running, path), log))
            run.write_json(f"boots/{number}.json", told)


def _with_slots(bench: Bench, one: Server) -> Server:
    """The server, with where it may save its prompt cache if one of its workloads wants that and it can."""
    wanted = any(w.restore for w in bench.recipe.workloads if one.id in w.on)
    if not wanted or not hasattr(bench.engine, "slot_arguments"):
        return one
    folder = bench.run.path / SLOTS
    folder.mkdir(exist_ok=True)
    return one.model_copy(update={"args": [*one.args, *bench.engine.slot_arguments(folder)]})


def warmup(bench: Bench, workload: Workload, server_id: str, number: int) -> Question:
    """The workload's warm-up, which is no measured prompt."""
    return question(
        bench,
        workload,
        bench.texts[workload.warmup.sha256],
        server=server_id,
        boot=number,
        case=workload.warmup.id,
        warmup=True,
    )


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


def ask_one(running: server.Boot, asked: Question, timeout_s: float = 600) -> Record:
    return ask(running.url, asked, api_key=running.api_key, timeout_s=timeout_s)


def call(running: server.Boot, path: str, body: dict | None = None) -> Any:
    """A plain request to the server's API: parsed JSON, or the text that is none; None without a good answer."""
    with requests.Session() as session:
        session.trust_env = False  # a proxy variable must not catch loopback
        session.headers["Authorization"] = f"Bearer {running.api_key}"
        try:
            answer = (
                session.get(running.url + path, timeout=30, allow_redirects=False)
                if body is None
                else session.post(running.url + path, json=body, timeout=30)
            )
            if not answer.ok:
                return None
            return answer.json() if "json" in answer.headers.get("Content-Type", "") else answer.text
        except (requests.RequestException, json.JSONDecodeError):
            return None
