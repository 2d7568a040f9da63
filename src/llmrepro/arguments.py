"""Which words of a server's arguments belong together, and what may stand where a model or code could be named.

The engines' parsers differ, so that the strictest reading counts: a flag with at most one value, in its long form
wherever its value is an object.
"""

import json
import re

from llmrepro.parts import flag_of

DRAFTERS = {"-md", "--model-draft", "--spec-draft-model"}
SPECULATION, COMPILATION = "--speculative-config", "--compilation-config"
SEVERAL = {"--cudagraph-capture-sizes", "--control-vector-layer-range"}  # their values are whole numbers
SWITCH = re.compile(
    r"--(no|enable|disable|enforce|trust|calculate|skip)-.+|--(async-scheduling|language-model-only|metrics|jinja|"
    r"mlock|no|mmap|cont-batching|context-shift|swa-full|verbose|embeddings?|reranking|offline)"
)
VALUED = {"--disable-by-batch-size", "--enable-lora-bias", "--disable-log-prefix"}
TUNING = {  # keys of vLLM's compilation that choose how, and neither what code nor where it is written
    *("level", "mode", "custom_ops", "splitting_ops", "use_inductor", "use_cudagraph", "pass_config"),
    *("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "cudagraph_num_of_warmups"),
    *("cudagraph_copy_inputs", "cudagraph_specialize_lora", "full_cuda_graph", "use_inductor_graph_partition"),
    *("compile_sizes", "compile_ranges_endpoints", "compile_ranges_split_points", "compile_mm_encoder"),
    *("cudagraph_mm_encoder", "fast_moe_cold_start", "dynamic_shapes_config"),
}
DRAFTING = {  # keys of vLLM's speculation: no other model, no other revision, no acceptance that is made up
    *("method", "model", "num_speculative_tokens", "max_model_len", "quantization", "enforce_eager"),
    *("draft_tensor_parallel_size", "attention_backend", "moe_backend", "kv_cache_dtype", "parallel_drafting"),
    *("disable_padded_drafter_batch", "disable_by_batch_size", "prompt_lookup_max", "prompt_lookup_min"),
    *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
    *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
    *("rejection_sample_method", "draft_sample_method", "use_local_argmax_reduction", "use_heterogeneous_vocab"),
}


def check(words: list[str]) -> None:
    """Raises ValueError where a word is neither a flag nor the value of one, or a value is not pinned."""
    flag, values = None, 0
    for word in words:
        if re.match(r"--|-[A-Za-z]", word):
            _has_value(flag, values)
            flag, values = _flag(word), 0
            if "=" in word:
                values = 1
                _check_value(flag, word.partition("=")[2])
            joined = values == 1
            continue
        if flag is None or (SWITCH.fullmatch(flag) and flag not in VALUED):
            raise ValueError(
                f"{word!r} stands where a flag is due: an engine may take it for a model; leave it out"
            )
        if values and (joined or flag not in SEVERAL or not word.isdecimal()):
            raise ValueError(f"{flag} has a value already, and {word!r} is no flag; leave one of them out")
        values += 1
        _check_value(flag, word)
    _has_value(flag, values)


def _has_value(flag: str | None, values: int) -> None:
    if flag in {*DRAFTERS, SPECULATION, COMPILATION} and not values:
        raise ValueError(f"{flag} needs a value after it, found none")


def _flag(word: str) -> str:
    name, flag = word.partition("=")[0], flag_of(word)
    if not name.startswith("--") and not re.fullmatch(r"-[A-Za-z]+\d?", word):
        raise ValueError(f"{word!r} is a short flag and more in one word; give its long form and its value apart")
    if "." in name and flag in (SPECULATION, COMPILATION):
        raise ValueError(f"{name} is a part of {flag}; give {flag} as one JSON object")
    return flag


def _check_value(flag: str, value: str) -> None:
    if flag in DRAFTERS and value != "{draft}":
        raise ValueError(f"{flag} drafts with {value!r}, which the recipe does not pin; write {{draft}}")
    if flag == SPECULATION:
        told = _object(flag, value, DRAFTING)
        if told.get("model") not in (None, "{draft}"):
            raise ValueError(
                f"{flag} drafts with {told['model']!r}, which the recipe does not pin; write {{draft}}"
            )
    elif flag == COMPILATION and not value.isdecimal():
        _object(flag, value, TUNING)
    elif not flag.startswith("--") and "{" in value and value not in ("{threads}", "{draft}"):
        raise ValueError(f"{flag} is given {value!r}; give the long form of a flag that takes an object")


def _object(flag: str, text: str, known: set[str]) -> dict:
    """A JSON object of keys that are known. Raises ValueError for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{flag} needs a JSON object, found {text!r}")
    found = {key.replace("-", "_"): value for key, value in found.items()}
    strange = sorted(found.keys() - known)
    if strange:
        raise ValueError(
            f"{flag} may not set {strange[0]!r}: it could name code, a model or a folder that the recipe does not "
            f"pin; known are {', '.join(sorted(known))}"
        )
    for key, value in found.items():
        nested = value.values() if isinstance(value, dict) and key.endswith("_config") else ()
        if isinstance(value, dict) and (not nested or any(isinstance(one, str | dict | list) for one in nested)):
            raise ValueError(f"{flag}: {key} takes plain values, found {value!r}")
    return found
