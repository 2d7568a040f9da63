"""open-jet: a CUDA megakernel for Qwen3.8-27B, built at a commit and served by its own Python server.

The server runs from the checkout that it was built in and takes tokenizer and GGUF reader from llama.cpp's
library, the recipe's second checkout. It answers chat completions, one at a time, and counts no tokens for others.
"""

import os
import re
import subprocess
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from llmrepro.engines import EngineError, Launch, filled
from llmrepro.install import Install
from llmrepro.machine import minimal_environment
from llmrepro.processor import usable_cpus
from llmrepro.recipe import Server
from llmrepro.requirements import which
from llmrepro.workload import Workload

MOST_CANDIDATES = 32  # that a sampled token is chosen from, whatever top_k says
GIB_PER_GB = 1e9 / 2**30
SOURCE = "source"  # folder of the environment with the checkouts


def build(source: Path, environment: Path, install: Install) -> list[list[str]]:
    """llama.cpp's library with cmake, then the megakernel against it with make; run in the checkouts' folder.

    Paths among the sources are relative where the tools keep them. Only the megakernel's library keeps one: it
    looks for libllama where that lay while it was built, so `launch` tells the loader where it lies now.
    """
    own, llama = _checkouts(install)
    bin_ = environment / "bin"
    architecture = install.build.get("ARCH", "")
    nvcc = which("nvcc") or "nvcc"
    if re.search(r"[\s$]", str(source)):
        raise EngineError(f"make cannot build in {source}: its path must hold neither blanks nor $")
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",
        "GGML_CUDA": "ON",
        "CMAKE_CUDA_ARCHITECTURES": architecture.removeprefix("sm_"),
        "LLAMA_CURL": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        **{name: value for name, value in install.build.items() if name != "ARCH"},
    }
    if settings["GGML_CUDA"] == "ON":
        settings["CMAKE_CUDA_COMPILER"] = nvcc
    return [
        [
            f"{bin_}/cmake",
            "-S",
            llama,
            "-B",
            f"{llama}/build",
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={bin_}/ninja",
            *(f"-D{name}={value}" for name, value in settings.items() if value),
        ],
        [f"{bin_}/cmake", "--build", f"{llama}/build", "-j", str(usable_cpus()), "--target", "llama"],
        ["make", "-C", f"{own}/megakernel", f"ARCH={architecture}", f"LLAMA=../../{llama}", f"NVCC={nvcc}"],
    ]


def _checkouts(install: Install) -> tuple[str, str]:
    """The names of the engine's own checkout and of llama.cpp's."""
    if install.kind != "git" or len(install.checkouts) != 2 or "ARCH" not in install.build:
        raise EngineError(
            "open-jet is built from git: give its recipe the install kind `git`, two `checkouts` (its own, then "
            "llama.cpp's), and `build` with ARCH, such as sm_80"
        )
    return install.checkouts[0].name, install.checkouts[1].name


def toolchain(install: Install) -> dict[str, str]:
    """The release of nvcc, which decides what a build makes. Raises EngineError without one."""
    nvcc = which("nvcc")
    if nvcc is None:
        capability = re.sub(r"sm_(\d+)(\d)", r"\1.\2", install.build.get("ARCH", ""))
        raise EngineError(
            "building open-jet needs nvcc of a CUDA toolkit of 12.0 or later (its publication had 12.8), and "
            f"running it a GPU of compute capability {capability}; there is no nvcc on PATH, below CUDA_HOME "
            "or in /usr/local/cuda"
        )
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    release = re.search(r"release .*", told)
    return {"nvcc": release[0] if release else told.strip()[-200:]}


def programs(install: Install) -> list[str]:
    own, llama = _checkouts(install)
    return [
        "bin/python",
        f"{SOURCE}/{own}/megakernel/server/mk_server.py",
        f"{SOURCE}/{own}/megakernel/libqwen38mk.so",
        f"{SOURCE}/{llama}/build/bin/libllama.so",
    ]


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
    own, llama = _checkouts(install)
    start = _start(environment, own)
    args = filled(server.args, threads, draft)
    if Path(start[1]).is_file():
        _check(args, flags(environment, install))
    library = environment / SOURCE / llama / "build/bin"
    inherited = os.environ.get("LD_LIBRARY_PATH")
    # The kit's own come last: of an option given twice, argparse takes the last.
    return Launch(
        [*start, *args, "-m", str(weights), "--host", "127.0.0.1", "--port", str(port)],
        {**server.env, "LD_LIBRARY_PATH": f"{library}:{inherited}" if inherited else str(library)},
        [
            "open-jet knows no API key: while it runs, every program on this machine can ask it",
            f"open-jet calls the model by its file's name and answers to any, {alias} too",
        ],
    )


def _check(args: list[str], known: frozenset[str]) -> None:
    """Options by their whole names only: argparse would take `--dr` for any that begins so."""
    for word in args:
        if word.startswith("-") and not re.fullmatch(r"-\d.*", word) and word.partition("=")[0] not in known:
            raise EngineError(
                f"this open-jet has no argument {word!r}; its --help lists what it has. "
                "Mend the recipe's server args"
            )


def flags(environment: Path, install: Install) -> frozenset[str]:
    """The options that this checkout's own --help lists."""
    return _flags(tuple(_start(environment, _checkouts(install)[0])))


def _start(environment: Path, own: str) -> list[str]:
    return [str(environment / "bin/python"), str(environment / SOURCE / own / "megakernel/server/mk_server.py")]


@lru_cache(maxsize=8)
def _flags(start: tuple[str, ...]) -> frozenset[str]:
    shown = subprocess.run(
        [*start, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        cwd="/",
        env=minimal_environment(),
        check=False,
    )
    flags = frozenset(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", shown.stdout))
    if shown.returncode != 0 or "--draft" not in flags:
        raise EngineError(
            f"{' '.join(start)} --help ended with {shown.returncode}: "
            f"{(shown.stderr or shown.stdout).strip()[-300:]}; remove its environment and run again"
        )
    return flags


def request(body: dict, *, cache: str) -> dict:
    """Both are sent: its own defaults are temperature 0.8 and top_k 40, and it samples from MOST_CANDIDATES.

    It has no switch for its prompt cache, which is the last request: only a prompt that goes on from the whole of
    that one meets any of it, and `cached_tokens` shows it.
    """
    body = {key: value for key, value in body.items() if key != "ignore_eos"}
    if not 1 <= body.get("top_k", 0) <= MOST_CANDIDATES:
        body["top_k"] = MOST_CANDIDATES
    return {"temperature": 0.0, **body}


def impossible(workload: Workload) -> str | None:
    """Why a workload cannot be asked of it, or None."""
    if workload.endpoint != "/v1/chat/completions":
        return f"open-jet answers /v1/chat/completions only, and {workload.id} is asked at {workload.endpoint}"
    if workload.ignore_eos:
        return f"open-jet has no ignore_eos, and the lengths of {workload.id} rest on it; leave it out there"
    return None


def sequences(args: list[str]) -> int | None:
    """One: whatever comes meanwhile waits."""
    return 1


def adapted(workload: Workload) -> list[str]:
    """What of a workload's requests it gets otherwise than the recipe says, a sentence each."""
    sampling = workload.sampling
    if sampling.temperature == 0 or 1 <= sampling.top_k <= MOST_CANDIDATES:  # greedy: nothing is chosen from
        return []
    asked = f"top_k {sampling.top_k}" if sampling.top_k else "no top_k"
    return [f"{workload.id}: {asked} is top_k {MOST_CANDIDATES} here, the most that open-jet samples from"]


def settings(args: list[str], effective: dict) -> list[tuple]:
    """(name, asked, found) of context and drafts, which it prints when it has loaded."""
    names = {"-c": "context_tokens", "--ctx": "context_tokens", "-d": "draft_tokens", "--draft": "draft_tokens"}
    given = dict(pairwise(args))
    return [
        (name, int(given[flag]), effective[name])
        for flag, name in names.items()
        if given.get(flag, "").isdecimal() and effective.get(name) is not None
    ]


def cache_layout(args: list[str], effective: dict) -> dict:
    """f16 unless told otherwise, position by position; one float32 state, whatever the number of drafts."""
    given = dict(pairwise(args))
    asked = {"q8": "q8_0"}.get(given.get("--kv", "auto"), "f16")
    context = effective.get("context_tokens") or given.get("-c") or given.get("--ctx")
    found = {
        "kv_dtype": effective.get("kv_dtype") or asked,
        "block_tokens": 1,
        "conv_dtype": "f32",
        "ssm_dtype": "f32",
        "draft_tokens": 0,
        "speculative": (given.get("-d") or given.get("--draft") or "4") != "0",
        "context_tokens": context and int(context),
    }
    return {name: value for name, value in found.items() if value is not None}


_KV_DTYPES = {"fp16": "f16", "q8_0": "q8_0"}  # as llama.cpp and the recipes call them


def observe(get, log: str) -> dict:
    props = get("/props")
    loaded = re.search(r"\[mk\] weights ([\d.]+) GB on device, (\d+) SMs, ctx (\d+), n_draft (\d+)", log)
    cache = re.search(r"\[mk\] KV cache (\w+), ([\d.]+) GB for (\d+) positions", log)
    ready = re.search(r"\[mk-server\] ready in ([\d.]+) s: ", log)
    reused = [int(n) for n in re.findall(r"\[mk-server\] prompt \d+ tok \((\d+) reused\)", log)]
    told = props.get("default_generation_settings") or {} if isinstance(props, dict) else {}
    drafts = int(loaded[4]) if loaded else None
    effective = {
        "context_tokens": told.get("n_ctx") or (int(loaded[3]) if loaded else None),
        "slots": props.get("total_slots") if isinstance(props, dict) else None,
        "draft_tokens": drafts,
        "speculation": None if drafts is None else f"mtp d={drafts}" if drafts else "none",
        "kv_dtype": _KV_DTYPES.get(cache[1], cache[1]) if cache else None,
        "multiprocessors": int(loaded[2]) if loaded else None,
        "reused_tokens": sum(reused) if reused else None,
    }
    metrics = {
        "memory.weights_gib": round(float(loaded[1]) * GIB_PER_GB, 2) if loaded else None,
        "memory.kv_gib": round(float(cache[2]) * GIB_PER_GB, 2) if cache else None,
        "kv_tokens": int(cache[3]) if cache else None,
    }
    return {
        "effective": {k: v for k, v in effective.items() if v is not None},
        "phases": [("load weights, allocate KV cache, warm up", 0.0, float(ready[1]))] if ready else [],
        "metrics": {k: v for k, v in metrics.items() if v is not None},
    }
