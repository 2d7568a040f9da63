"""This kit's client beside llama-benchy, AIPerf and `vllm bench serve`: what each tells of the same requests.

Run as `python tests/bench_peers.py [rounds] [requests]`, or `make bench-peers`; about half an hour. The
clients take turns, one at a time, in another order every round. Two targets: the truth server, held against its
own log of send times, and a real llama.cpp server, held against the times that it logs of every request. Each
client's own figures are used, under its own definition; the tables are Markdown, as appendix/methods.md has them.
"""

import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import peers
import truth_server
from peers import Client, ClientFailure, Reading, Request

from llmrepro import catalog, engines, environment, machine, preparation, processor, server
from llmrepro.client import Question

LLAMA_CPP, VLLM = "smollm2-135m/llama-cpp--cpu", "smollm2-135m/vllm--cpu"
TOKENS = 48
SCHEDULE = {"ttft_s": 0.03, "gap_s": 0.004}
SCENARIOS = {
    "one token a chunk": {},
    "role chunk 25 ms early": {"role_s": 0.005},
    "reasoning first": {"reasoning": 16},
    "several tokens a chunk": {"dialect": "vllm", "chunks": [8, 1, 3, 1, 5, 2, 8, 4, 1, 6, 1, 8]},
    "ends by itself": {"dialect": "vllm", "finish": "stop"},
}
# Answers for the CPU time: long, so that the difference of two runs is far above what two starts differ by.
LONG_TOKENS, LONG_SCHEDULE, FEW, MANY = 2000, {"ttft_s": 0.05, "gap_s": 0.0005}, 1, 9
LOGGED = re.compile(r"(prompt eval|  eval) time = +([\d.]+) ms / +(\d+) tokens")


class Truth(NamedTuple):
    """What really happened to one request: the first token's time by the server's clock, decode, and tokens."""

    ttft_ms: float
    decode_tps: float
    output_tokens: int


class Seen(NamedTuple):
    """A round of one client: its error per answer (None: untold), the tokens that it counts, of how many, and the
    requests that failed."""

    ttft_ms: list[float | None]
    decode_pct: list[float | None]
    counted: str
    failed: int


def errors(readings: list[Reading | None], truths: list[Truth]) -> Seen:
    """`truths` are of all that were answered, in order, warm-ups perhaps before them."""
    answered = [reading for reading in readings if reading is not None]
    truths = truths[-len(answered) :]
    ttft_ms, decode_pct = [], []
    for reading, true in zip(answered, truths, strict=True):
        ttft_ms.append(None if reading.ttft_ms is None else reading.ttft_ms - true.ttft_ms)
        tps = reading.decode_tps
        decode_pct.append(None if tps is None else (tps / true.decode_tps - 1) * 100)
    told, of = {reading.output_tokens for reading in answered}, truths[0].output_tokens
    counted = "not told" if told == {None} else f"{'/'.join(map(str, sorted(told)))} of {of}"
    return Seen(ttft_ms, decode_pct, counted, len(readings) - len(answered))


def scripted(client: Client, folder: Path, *, request: Request, script: dict, requests: int) -> Seen:
    with truth_server.start(**{**SCHEDULE, **script}) as truth:
        readings, _ = peers.run(client, replace(request, url=truth.url), requests, folder)
        body, logs = truth.asked(), truth.truth()
    said = body["messages"][-1]["content"]
    said = said if isinstance(said, str) else "".join(part["text"] for part in said)
    if said != request.prompt or request.max_tokens not in (
        body.get("max_tokens"),
        body.get("max_completion_tokens"),
    ):
        raise ClientFailure("it sent another request than it was asked for")
    return errors(readings, [_true(log) for log in logs])


def _true(log: dict) -> Truth:
    spoken = next(i for i, (_, _, has_text, _) in enumerate(log["sent"]) if has_text)
    first_ns, last_ns = log["sent"][spoken][0], max(ns for ns, tokens, _, _ in log["sent"] if tokens)
    counts = [tokens for _, tokens, _, _ in log["sent"]]
    tps = sum(counts[spoken + 1 :]) / (last_ns - first_ns) * 1e9
    return Truth((first_ns - log["recv_ns"]) / 1e6, tps, sum(counts))


def served(client: Client, folder: Path, *, request: Request, boot: server.Boot, requests: int) -> Seen:
    begun = boot.log.stat().st_size
    readings, _ = peers.run(client, replace(request, url=boot.url, api_key=boot.api_key), requests, folder)
    time.sleep(0.5)  # the log goes through a pipe
    logged = LOGGED.findall(boot.log.read_bytes()[begun:].decode(errors="replace"))
    prompts, answers = logged[::2], logged[1::2]
    if len({n for _, _, n in prompts}) != 1 or {int(n) for _, _, n in answers} != {request.max_tokens}:
        raise ClientFailure("its requests were not all of the length that was asked for")
    return errors(
        readings,
        [
            Truth(float(prompt_ms), (int(n) - 1) / float(ms) * 1e3, int(n))
            for (_, prompt_ms, _), (_, ms, n) in zip(prompts, answers, strict=True)
        ],
    )


def cpu(client: Client, folder: Path, *, request: Request) -> tuple[float, float]:
    """CPU microseconds per chunk, and CPU seconds of the start: from a run of few requests and one of many."""
    used = []
    for requests in (FEW, MANY):
        with truth_server.start(**LONG_SCHEDULE) as truth:
            long = replace(request, url=truth.url, max_tokens=LONG_TOKENS)
            used.append(peers.run(client, long, requests, folder / str(requests))[1])
    per_chunk_s = (used[1] - used[0]) / ((MANY - FEW) * LONG_TOKENS)
    return per_chunk_s * 1e6, used[0] - per_chunk_s * (FEW + peers.WARMUPS) * LONG_TOKENS


def in_turn(clients: list[Client], rounds: int, measured: Callable[[Client, Path], object], place: Path) -> dict:
    """Client name to what `measured` gave in each round, or to the reason why there is nothing."""
    found: dict[str, list | str] = {client.name: [] for client in clients}
    for i in range(rounds):
        for client in clients[i % len(clients) :] + clients[: i % len(clients)]:
            if isinstance(found[client.name], str):
                continue
            try:
                found[client.name].append(measured(client, place / f"{client.name}-{i}"))
            except ClientFailure as failure:
                found[client.name] = _cell(failure)
    return found


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f} over the last minute"


def _cell(failure: Exception) -> str:
    return " ".join(str(failure).replace("|", "/").split())


def spread(rounds: list[list[float | None]], form: str = "+.2f") -> str:
    """The median over all, and over which the rounds' medians range, then the 95th percentile of its size."""
    if any(value is None for values in rounds for value in values):
        return "not told"
    medians, every = [statistics.median(values) for values in rounds], [v for values in rounds for v in values]
    p95 = statistics.quantiles(map(abs, every), n=20)[-1]
    return f"{statistics.median(every):{form}} ({min(medians):{form}} to {max(medians):{form}}), {p95:{form[1:]}}"


def table(columns: list[str], rows: list[list[str]]) -> None:
    for row in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(row) + " |", flush=True)
    print()


def told(name: str, seen: list[Seen] | str, head: list[str]) -> list[str]:
    if isinstance(seen, str):
        return [*head, name, f"nothing: {seen}", "", "", ""]
    n, failed = sum(len(one.ttft_ms) for one in seen), sum(one.failed for one in seen)
    columns = [spread([one.ttft_ms for one in seen]), spread([one.decode_pct for one in seen])]
    return [*head, name, *columns, seen[-1].counted, f"{n}, {failed} more failed" if failed else str(n)]


def installed(place: Path) -> tuple[list[Client], dict[str, str]]:
    """The clients that are to be had here, and why the others are not."""
    recipe = catalog.load(VLLM)
    try:
        engine = environment.prepare(recipe.engine, catalog.home() / VLLM / "engine.lock", place / "vllm.log")
        tokenizer = preparation.ready(recipe.model, engine, place / "weights.log").path
    except RuntimeError as failure:  # nobody can be given a tokenizer then
        return [peers.kit()], dict.fromkeys(("llama-benchy", "AIPerf", "vllm bench serve"), _cell(failure))
    makers = {
        "llama-benchy": partial(peers.llama_benchy, place / "benchy", tokenizer),
        "AIPerf": partial(peers.aiperf, place / "aiperf", tokenizer, server_counts=True),
        "AIPerf, own tokenizer": partial(peers.aiperf, place / "aiperf", tokenizer, server_counts=False),
        "vllm bench serve": partial(
            peers.vllm_bench, place / "vllm", tokenizer, engine.path, recipe.engine.version
        ),
    }
    clients, missing = [peers.kit()], {}
    for name, make in makers.items():
        try:
            clients.append(make())
        except ClientFailure as failure:
            missing[name] = _cell(failure)
    return clients, missing


def llama_cpp(place: Path, ready: str):
    """A started server of the default recipe."""
    recipe = catalog.load(LLAMA_CPP)
    env = environment.prepare(recipe.engine, catalog.home() / LLAMA_CPP / "engine.lock", place / "engine.log")
    model = preparation.ready(recipe.model, env, place / "model.log").path
    engine = engines.load(recipe.engine.name)

    def command(port: int, api_key: str) -> server.Command:
        told = {"alias": recipe.id, "port": port, "api_key": api_key, "threads": machine.threads()}
        launch = engine.launch(env.path, recipe.engine.install, recipe.servers[0], model, **told)
        return server.Command(launch.argv, launch.env)

    body = {"model": recipe.id, "messages": [{"role": "user", "content": ready}], "max_tokens": 4}
    return server.boot(command, folder=place, number=1, ready=Question(peers.CHAT, body))


def main(rounds: int = 3, requests: int = 20) -> None:
    recipe = catalog.load(LLAMA_CPP)
    prompt = catalog.prompt_text(recipe.workloads[0].prompts[0], catalog.home() / LLAMA_CPP)
    with tempfile.TemporaryDirectory(prefix="llmrepro-peers-") as folder:
        place = Path(folder)
        clients, missing = installed(place)
        cores, model = processor.physical_cores(), processor.model()
        versions = ", ".join(f"{c.name} {c.version}" for c in clients)
        print(f"{date.today()}, {cores} cores ({model}), {_load()}: {versions}\n", flush=True)

        request = Request("", prompt, TOKENS, "llama-cpp")
        # Its tokenizer knows nothing of the truth server's tokens.
        counting = [client for client in clients if client.name != "AIPerf, own tokenizer"]
        rows = []
        for i, (title, script) in enumerate(SCENARIOS.items()):
            asked = replace(request, engine=script.get("dialect", request.engine))
            measured = partial(scripted, request=asked, script=script, requests=requests)
            seen = in_turn(counting, rounds, measured, place / f"truth-{i}")
            rows += [told(name, found, [title]) for name, found in {**seen, **missing}.items()]
        errors_of = ["TTFT error, ms", "decode error, %", "counted tokens", "requests"]
        table(["truth server", "client", *errors_of], rows)

        with llama_cpp(place / "server", prompt) as boot:
            asked = replace(request, model=recipe.id)
            seen = in_turn(
                clients, rounds, partial(served, request=asked, boot=boot, requests=requests), place / "real"
            )
        columns = ["llama.cpp server", "TTFT less the server's prompt time, ms", *errors_of[1:]]
        table(columns, [told(name, found, []) for name, found in {**seen, **missing}.items()])

        seen = in_turn(counting, rounds, partial(cpu, request=request), place / "cpu")
        rows = []
        for name, found in {**seen, **missing}.items():
            shown = [f"nothing: {found}", ""]
            if not isinstance(found, str):
                per_chunk_us, start_s = map(sorted, zip(*found, strict=True))
                middle = statistics.median(per_chunk_us)
                shown = [f"{middle:.0f} ({per_chunk_us[0]:.0f} to {per_chunk_us[-1]:.0f})"]
                shown += [f"{statistics.median(start_s):.1f}"]
            rows.append([name, *shown])
        table(["client", "CPU per chunk, us", "CPU of the start, s"], rows)
        print(_load())


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:3]))
