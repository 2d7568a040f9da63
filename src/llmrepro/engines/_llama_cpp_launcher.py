"""Start xllamacpp's native HTTP server from llama-server's own arguments.

Runs inside the engine's environment, where nothing but xllamacpp is installed. TABLE is the one mapping from
llama-server's names; an argument that is not in it is refused, never ignored. The API key comes from
LLAMA_API_KEY, as with llama-server, so that it shows in no process list.
"""

import argparse
import os
import signal
import sys

import xllamacpp

FLASH = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
LOAD = {
    "auto": "AUTO",
    "none": "NONE",
    "mmap": "MMAP",
    "mlock": "MLOCK",
    "mmap+mlock": "MMAP_MLOCK",
    "dio": "DIRECT_IO",
}


def _flash(word):
    return getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{FLASH[word]}")


def _load(word):
    return getattr(xllamacpp.llama_load_mode, f"LLAMA_LOAD_MODE_{LOAD[word]}")


def _folder(word):
    return os.path.join(word, "")  # file names are put right behind it


def _cache(word):
    return getattr(xllamacpp.ggml_type, f"GGML_TYPE_{word.upper()}")


def _drafting(words):
    kinds = getattr(xllamacpp, "common_speculative_type", None)
    names = [(word, f"COMMON_SPECULATIVE_TYPE_{word.upper().replace('-', '_')}") for word in words.split(",")]
    for word, name in names:
        if not hasattr(kinds, name):
            raise argparse.ArgumentTypeError(f"this xllamacpp has no speculation called {word!r}")
    return [getattr(kinds, name) for _, name in names]


# What each way of drafting from n-grams takes: lengths in tokens, and how often one must have been seen.
NGRAMS = {
    **dict.fromkeys(("simple", "map-k", "map-k4v"), ("size-n", "size-m", "min-hits")),
    "mod": ("n-match", "n-min", "n-max"),
}

# names as llama-server has them: (attribute of CommonParams, type)
TABLE = {
    ("--model", "-m"): ("model.path", str),
    ("--alias", "-a"): ("model_alias", lambda word: {word}),
    ("--ctx-size", "-c"): ("n_ctx", int),
    ("--batch-size", "-b"): ("n_batch", int),
    ("--ubatch-size", "-ub"): ("n_ubatch", int),
    ("--threads", "-t"): ("cpuparams.n_threads", int),
    ("--threads-batch", "-tb"): ("cpuparams_batch.n_threads", int),
    ("--poll",): ("cpuparams.poll", int),
    ("--parallel", "-np"): ("n_parallel", int),
    ("--flash-attn", "-fa"): ("flash_attn_type", _flash),
    ("--cache-type-k", "-ctk"): ("cache_type_k", _cache),
    ("--cache-type-v", "-ctv"): ("cache_type_v", _cache),
    ("--load-mode", "-lm"): ("load_mode", _load),
    ("--cache-ram", "-cram"): ("cache_ram_mib", int),
    ("--cache-reuse",): ("n_cache_reuse", int),
    ("--ctx-checkpoints", "-ctxcp"): ("n_ctx_checkpoints", int),
    ("--slot-prompt-similarity", "-sps"): ("slot_prompt_similarity", float),
    ("--slot-save-path",): ("slot_save_path", _folder),
    ("--spec-type",): ("speculative.types", _drafting),
    **{
        (f"--spec-ngram-{kind}-{name}",): (f"speculative.ngram_{kind}.{name}".replace("-", "_"), int)
        for kind, names in NGRAMS.items()
        for name in names
    },
    ("--host",): ("hostnames", lambda word: [word]),
    ("--port",): ("port", int),
    ("--log-verbosity", "-lv"): ("verbosity", int),
}
# names that take no value: (attribute, value)
SWITCHES = {
    ("--metrics",): ("endpoint_metrics", True),
    ("--no-slots",): ("endpoint_slots", False),
    ("--no-warmup",): ("warmup", False),
    ("--jinja",): ("use_jinja", True),
    ("--no-jinja",): ("use_jinja", False),
    ("--no-cache-prompt",): ("cache_prompt", False),
    ("--no-cont-batching", "-nocb"): ("cont_batching", False),
    ("--swa-full",): ("swa_full", True),
    ("--no-ui",): ("ui", False),
}


def parser() -> argparse.ArgumentParser:
    parsed = argparse.ArgumentParser(
        prog="llama_cpp_launcher", allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    for names, (attribute, kind) in TABLE.items():
        words = {_flash: FLASH, _load: LOAD}.get(kind)
        parsed.add_argument(
            *names, dest=attribute, type=str if words else kind, choices=words, help=f"sets {attribute}"
        )
    for names, (attribute, value) in SWITCHES.items():
        parsed.add_argument(*names, dest=attribute, action="store_const", const=value, help=f"sets {attribute}")
    return parsed


def set_parameters(params, values: dict) -> None:
    """Set dotted attributes; one that this xllamacpp lacks ends the program with its name."""
    kinds = {attribute: kind for attribute, kind in TABLE.values()}
    for name, value in values.items():
        target = params
        *parents, last = name.split(".")
        for parent in parents:
            target = getattr(target, parent)
        if not hasattr(target, last):
            sys.exit(f"error: this xllamacpp has no parameter {name}; take another version, or leave it out")
        if kinds.get(name) in (_flash, _load):
            value = kinds[name](value)
        setattr(target, last, value)


def main() -> None:
    values = vars(parser().parse_args())
    values.setdefault("cpuparams_batch.n_threads", values.get("cpuparams.n_threads", -1))
    params = xllamacpp.CommonParams()
    set_parameters(params, values)
    if os.environ.get("LLAMA_API_KEY"):
        params.api_keys = [os.environ.pop("LLAMA_API_KEY")]
    try:
        server = xllamacpp.Server(params)  # serves from its own threads; returns once loaded
    except RuntimeError as error:
        sys.exit(f"error: {error} (the lines above say which)")
    print(f"launcher: listening on {server.listening_address}", file=sys.stderr, flush=True)
    while True:
        signal.pause()  # TERM ends the process, as it does llama-server


if __name__ == "__main__":
    main()
