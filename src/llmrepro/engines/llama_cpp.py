"""llama.cpp: `xllamacpp` (a wheel with the native server), or `llama-server` built from source or in an image."""

import re
import subprocess
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from llmrepro import containers
from llmrepro.engines import EngineError, Launch, _llama_cpp_log, _prometheus, filled
from llmrepro.install import Container, Install
from llmrepro.machine import minimal_environment
from llmrepro.processor import usable_cpus
from llmrepro.recipe import Server

LAUNCHER = Path(__file__).with_name("_llama_cpp_launcher.py")
IN_IMAGE = ["/app/llama-server"]  # in the images that ggml-org publishes, of whatever build

# Flags that llama-server renamed: what a recipe may say, and what says the same in other builds.
# --load-mode came with PR 20834; the old ones went with PR 28334 (September 2026).
RENAMED = [
    (("--mlock",), ("--load-mode", "mmap+mlock")),
    (("--no-mmap",), ("--load-mode", "none")),
    (("--webui",), ("--ui",)),
    (("--no-webui",), ("--no-ui",)),
    (("--draft-max",), ("--spec-draft-n-max",)),
    (("--draft-min",), ("--spec-draft-n-min",)),
]


def build(source: Path, environment: Path, install: Install) -> list[list[str]]:
    """cmake on llama.cpp's folder, in an sdist or checked out: two targets, a bounded number of compilers."""
    bin_ = environment / "bin"
    folder = install.checkouts[0].name if install.checkouts else "llama.cpp"
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_OPENSSL": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        **install.build,
    }
    return [
        [
            f"{bin_}/cmake",
            "-S",
            folder,
            "-B",
            "build",
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={bin_}/ninja",
            *(f"-D{name}={value}" for name, value in settings.items()),
        ],
        [f"{bin_}/cmake", "--build", "build", "-j", str(usable_cpus()), "--target", "llama-server", "llama-bench"],
        ["cp", "build/bin/llama-server", "build/bin/llama-bench", str(bin_)],
    ]


def programs(install: Install) -> list[str]:
    if install.kind == "container":
        return [containers.FACTS]
    return ["bin/python"] if install.kind == "wheel" else ["bin/llama-server", "bin/llama-bench"]


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
    start = (
        [str(environment / "bin/python"), str(LAUNCHER)]
        if install.kind == "wheel"
        else [str(environment / "bin/llama-server")]
    )
    args, adaptations = filled(server.args, threads, draft), []
    if Path(start[0]).exists():
        args, adaptations = adapt(args, _flags((*start, "--help")))
    return Launch(
        [*start, "--model", str(weights), "--alias", alias, "--host", "127.0.0.1", "--port", str(port), *args],
        {"LLAMA_API_KEY": api_key, **server.env},
        adaptations,
    )


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
    args, adaptations = filled(server.args, threads, draft), []
    if "--slot-save-path" in args:  # the kit's own: a recipe may not set it
        at = args.index("--slot-save-path") + 1
        mounts.append(containers.Mount(Path(args[at]), containers.SLOTS, writable=True))
        args[at] = f"{containers.SLOTS}/"
    if containers.facts(environment) is not None:
        args, adaptations = adapt(args, _flags(tuple(containers.help_command(environment, container, IN_IMAGE))))
    start = containers.start(
        environment,
        container,
        IN_IMAGE,
        port=port,
        variables=["LLAMA_API_KEY", *server.env],
        mounts=mounts,
        numa_node=server.numa_node,
        read_only=True,
    )
    own = ["--model", model, "--alias", alias, "--host", "0.0.0.0", "--port", str(container.port)]
    return Launch(
        [*start.argv, *own, *args],
        {**start.env, "LLAMA_API_KEY": api_key, **server.env},
        adaptations,
        start.cleanup,
        start.cidfile,
        start.bound,
    )


def adapt(args: list[str], known: frozenset[str]) -> tuple[list[str], list[str]]:
    """Arguments as this build names them, and a sentence for each that was renamed.

    `known` are the flags its --help lists. Raises EngineError for one that neither it nor RENAMED knows.
    """
    out, told, i = [], [], 0
    while i < len(args):
        if not args[i].startswith("-") or _is_number(args[i]) or args[i].split("=")[0] in known:
            out.append(args[i])
            i += 1
            continue
        for old, new in [*RENAMED, *((new, old) for old, new in RENAMED)]:
            if tuple(args[i : i + len(old)]) == old and new[0] in known:
                out += new
                i += len(old)
                told.append(f"{' '.join(old)} is {' '.join(new)} in this build")
                break
        else:
            raise EngineError(
                f"this build of llama.cpp has no argument {args[i]!r}; its --help lists what it has. "
                "Mend the recipe's server args, or pin a build that has it"
            )
    return out, told


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d+)?", word) is not None


@lru_cache(maxsize=8)
def _flags(command: tuple[str, ...]) -> frozenset[str]:
    """The flags that this build's own --help, which `command` asks for, lists."""
    env = {**minimal_environment(), **containers.client_environment()}
    shown = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        cwd="/",
        env=env,
        check=False,
    )
    flags = frozenset(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", shown.stdout))
    if shown.returncode != 0 or "--ctx-size" not in flags:
        raise EngineError(
            f"{' '.join(command)} ended with {shown.returncode}: "
            f"{(shown.stderr or shown.stdout).strip()[-300:]}; remove its environment and run again"
        )
    return flags


def request(body: dict, *, cache: str) -> dict:
    # timings in every chunk carry the number of tokens so far: k0 and N without guessing from chunks
    return {**body, "timings_per_token": True, "cache_prompt": cache == "on"}


def tokenize(text: str) -> tuple[str, dict]:
    return "/tokenize", {"content": text, "add_special": True}


def counters(get) -> dict[str, float]:
    """Running totals since the start, under the names of vLLM's; {} without --metrics.

    llama.cpp's prompt_tokens_total leaves the cached ones out: asked for are both together. A build from before
    prompt_tokens_cached_total tells neither. `engine_steps` is n_decode_total: one for every --batch-size of a
    prompt, the last of which gives the first token, and one for every step after, those that check a draft
    included, whatever its help says.
    """
    page = get("/metrics") or ""
    told = _prometheus.totals(page, _COUNTERS) | {
        f"spec_accepted_by_position.{i}": value
        for i, value in _prometheus.by_label(page, _BY_POSITION, "position").items()
    }
    computed, cached = told.pop("computed", None), told.get("prefix_hits_tokens")
    if computed is None or cached is None:
        return told
    return {**told, "prompt_tokens": computed + cached, "prefix_queries_tokens": computed + cached}


_COUNTERS = {
    "llamacpp:prompt_tokens_total": "computed",
    "llamacpp:prompt_tokens_cached_total": "prefix_hits_tokens",
    "llamacpp:tokens_predicted_total": "generation_tokens",
    "llamacpp:n_decode_total": "engine_steps",
    "llamacpp:spec_decode_num_drafts_total": "spec_drafts",
    "llamacpp:spec_decode_num_draft_tokens_total": "spec_draft_tokens",
    "llamacpp:spec_decode_num_accepted_tokens_total": "spec_accepted_tokens",
}
_BY_POSITION = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"


def slot_arguments(folder: Path) -> list[str]:
    return ["--slot-save-path", f"{folder}/"]


def slot(action: str, file: str) -> tuple[str, dict]:
    return f"/slots/0?action={action}", {"filename": file}


def request_log(text: str) -> dict | None:
    return _llama_cpp_log.request(text)


_SETTINGS = {
    "context_tokens": ("--ctx-size", "-c"),
    "slots": ("--parallel", "-np"),
    "threads": ("--threads", "-t"),
}


def settings(args: list[str], effective: dict) -> list[tuple]:
    """(name, asked, found) of the settings in whole numbers that the server tells, and of how it drafts. It tells
    the context of one slot, and is asked for that of all of them, which share it evenly unless told otherwise."""
    given = {a: b for a, b in pairwise(args) if a.startswith("-") and b.isdecimal()}
    here = dict(effective)
    whole = (here.get("context_tokens") or 0) * (here.get("slots") or 1)
    if str(whole) in (given.get(flag) for flag in _SETTINGS["context_tokens"]):
        here["context_tokens"] = whole
    found = [
        (name, int(given[flag]), here[name])
        for name, flags in _SETTINGS.items()
        for flag in flags
        if flag in given and here.get(name) is not None
    ]
    told = effective.get("speculation")
    if told is None or "--spec-type" not in args:
        return found
    return [*found, ("speculation", _kinds(speculation(args)), _kinds(told))]


def _kinds(speculation: str) -> str:
    """The kinds of drafts alone: arguments and log name their sizes differently."""
    return ", ".join(sorted(w for w in re.split(r"[ ,]", speculation) if w != "+" and "=" not in w))


def sequences(args: list[str]) -> int | None:
    """--parallel; without it, or with -1, the build chooses, and older ones choose 1."""
    given = {a: b for a, b in pairwise(args) if a in ("--parallel", "-np")}
    told = next(iter(given.values()), "")
    return int(told) if told.isdecimal() else None


def speculation(args: list[str]) -> str:
    """What the arguments ask of speculative decoding: "none", or the kind of drafts with how many a drafter
    makes, or what n-grams are given ("ngram-simple size_n=4 size_m=4"). The log tells more, see `observe`."""
    given = {a: b for a, b in pairwise((*args, "")) if a.startswith("--spec-")}
    kind, drafts = given.get("--spec-type", "none"), given.get("--spec-draft-n-max")
    own = f"--spec-{kind}-"
    sizes = [f"{a.removeprefix(own).replace('-', '_')}={b}" for a, b in given.items() if a.startswith(own)]
    if drafts and kind.startswith("draft-"):
        sizes = [f"k={drafts}"]
    return " ".join([kind, *sizes])


def cache_layout(args: list[str], effective: dict) -> dict:
    """f16, an ubatch of 512 and cells padded to 256 unless told otherwise; a recurrent state is float32 always."""
    given = {a: b for a, b in pairwise(args) if a.startswith("-")}

    def told(*flags: str) -> str | None:
        return next((given[f] for f in flags if f in given), None)

    key, value = told("--cache-type-k", "-ctk") or "f16", told("--cache-type-v", "-ctv") or "f16"
    ubatch, context = told("--ubatch-size", "-ub"), told("--ctx-size", "-c")
    found = {
        "kv_dtype": effective.get("kv_dtype") or f"{key}/{value}",
        "block_tokens": 256,
        "in_flight_tokens": int(ubatch) if ubatch and ubatch.isdecimal() else 512,
        "conv_dtype": "f32",
        "ssm_dtype": "f32",
        "draft_tokens": 0,
        "speculative": given.get("--spec-type", "none") != "none",
        "context_tokens": effective.get("context_tokens") or (int(context) if context else None),
    }
    return {name: value for name, value in found.items() if value is not None}


def versions(get) -> list[str]:
    """Of build_info `b11434-0a1b2c3` the whole, b11434 and 11434; wheels and source packages say b0-unknown."""
    props = get("/props")
    told = props.get("build_info") if isinstance(props, dict) else None
    build = re.match(r"b([1-9]\d*)\b", told) if isinstance(told, str) else None
    return [told, build[0], build[1]] if build else []


def observe(get, log: str) -> dict:
    props = get("/props")
    props = props if isinstance(props, dict) else {}
    kv = _llama_cpp_log.kv_cache(log)
    threads = re.search(r"system_info: n_threads = (\d+)|threadpool init, n_threads = (\d+)", log)
    settings = props.get("default_generation_settings") or {}
    effective = {
        "context_tokens": settings.get("n_ctx"),
        "slots": props.get("total_slots"),
        "quantization": props.get("model_ftype"),
        "build": props.get("build_info"),
        "threads": int(threads[1] or threads[2]) if threads else None,
        "load_mode": _llama_cpp_log.found(r"load_mode = (\S+?)\)", log),
        "memory_lock": _llama_cpp_log.found(r"warning: (failed to mlock.*)", log),
        "kv_dtype": f"{kv['k']}/{kv['v']}" if kv else None,
        "speculation": _llama_cpp_log.drafting(log),  # /props says "none" of it even where there is
    }
    return {
        "effective": {k: v for k, v in effective.items() if v is not None},
        "phases": _llama_cpp_log.phases(log),
        "metrics": {"kv_bytes_per_token": round(kv["mib"] * 2**20 / kv["cells"])} if kv else {},
    }
