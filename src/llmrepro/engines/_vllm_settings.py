"""What a vLLM server really runs with, read back from its metrics page, its model list and its log, and held
against what it was asked for. Its counters too.

Pure functions; what a version does not tell is left out.
"""

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from llmrepro.engines import _prometheus
from llmrepro.engines._vllm_log import lines

# Counted in tokens over the server's life. Queries are all prompt tokens that were looked up, hits those found.
_COUNTERS = {
    "vllm:prefix_cache_queries_total": "prefix_queries_tokens",
    "vllm:prefix_cache_hits_total": "prefix_hits_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:iteration_tokens_total_count": "engine_steps",
    "vllm:spec_decode_num_drafts_total": "spec_drafts",
    "vllm:spec_decode_num_draft_tokens_total": "spec_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "spec_accepted_tokens",
}


def counters(metrics_text: str) -> dict[str, float]:
    """Counters of /metrics by the kit's names, summed over the server's engines; absent where not offered.

    `prompt_tokens` holds the cached ones. With speculation `spec_accepted_by_position.<i>` counts how often
    draft token i (from 0) was accepted. A server without prefix caching offers the cache's counters too, and
    they stay at 0: a hit rate needs queries. `engine_steps` are those that gave a token: the one that ends a
    prompt gives the first, and those that read only a part of it are not counted.
    """
    positions = _prometheus.by_label(
        metrics_text, "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"
    )
    return _prometheus.totals(metrics_text, _COUNTERS) | {
        f"spec_accepted_by_position.{i}": value for i, value in positions.items()
    }


def _word(text: str) -> str:
    return text


def _truth(text: str) -> bool | None:
    return {"True": True, "False": False}.get(text)


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,15}", text) else None


def _decimal(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d{1,15}(\.\d{1,15})?", text) else None


# Labels of the gauge vllm:cache_config_info, whose values are Python's words: "True", "None", "128".
_LABELS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "block_tokens": ("block_size", _whole),
    "kv_dtype": ("cache_dtype", _word),
    "prefix_caching": ("enable_prefix_caching", _truth),
    "kv_tokens": ("kv_cache_size_tokens", _whole),
    "kv_blocks": ("num_gpu_blocks", _whole),
    "kv_bytes": ("kv_cache_memory_bytes", _whole),
    "gpu_memory_utilization": ("gpu_memory_utilization", _decimal),
    "ssm_dtype": ("mamba_ssm_cache_dtype", _word),
    "sliding_window": ("sliding_window", _whole),
}
# The line "Initializing a V1 LLM engine (v0.32.0) with config: model=…, dtype=torch.bfloat16, …".
_CONFIG = {
    "version": (r"LLM engine \(v([^)\s]{1,60})\)", _word),
    "context_tokens": (r"\bmax_seq_len=(\d+)", _whole),
    "dtype": (r"\bdtype=torch\.(\w+)", _word),
    "quantization": (r"\bquantization=([\w-]+)", _word),
    "kv_dtype": (r"\bkv_cache_dtype=([\w.]+)", _word),
    "device": (r"\bdevice_config=(\w+)", _word),
    "enforce_eager": (r"\benforce_eager=(\w+)", _truth),
    "prefix_caching": (r"\benable_prefix_caching=(\w+)", _truth),
    "chunked_prefill": (r"\benable_chunked_prefill=(\w+)", _truth),
    "tensor_parallel": (r"\btensor_parallel_size=(\d+)", _whole),
    "compilation": (r"'mode': <CompilationMode\.(\w+)", _word),
    "cuda_graphs": (r"'cudagraph_mode': <CUDAGraphMode\.(\w+)", _word),
    "speculation": (r"\bspeculative_config=(?:SpeculativeConfig\(method=)?'?(\w+)", lambda m: m.lower()),
    "draft_tokens": (r"\bnum_spec_tokens=(\d+)", _whole),
}
# Lines of their own.
_LINES = {
    # 0.14 to 0.27.1 name what it was chosen from; 0.32 says "Using X backend." where one was asked for.
    "attention_backend": r"^Using (\w+) (?:attention )?backend(?: out of potential backends|\.$)",
    "batch_tokens": r"^Chunked prefill is enabled with max_num_batched_tokens=(\d{1,9})",
    # "Using V2 Model Runner"; "Model Runner V2 requires Triton; using the V1 model runner instead."
    "model_runner": r"(?i)^(?:Model Runner .*; )?using (?:the )?(V\d) model runner",
}
# What the server was told and tells nowhere else.
_ARGUMENTS = {"slots": "max_num_seqs", "batch_tokens": "max_num_batched_tokens"}
_PRIVATE = {"model", "model_tag", "host", "port", "api_key", "hf_token", "served_model_name", "uds", "tokenizer"}
MOST_ARGUMENTS, DEEPEST = 50_000, 20  # characters of the line that are read, and levels of nesting


def effective(metrics_text: str, log: str, models: dict | None) -> dict[str, str | int | float | bool]:
    """{name: value} of the settings that a server tells it runs with, under the names that `llama_cpp.observe`
    uses where both have them. `models` is the answer of /v1/models.

    The metrics page outranks the log, which tells what was asked for where the engine changes it later, and
    the model list outranks both. `kv_dtype` is the model's own where the cache's is "auto". `threads` is told by
    the CPU build alone: the cores that its first worker is bound to.
    """
    said = lines(log)
    config = next((line.text for line in said if "LLM engine (v" in line.text), "")
    labels = _prometheus.labels(metrics_text, "vllm:cache_config_info")
    given = arguments(log)
    found: dict[str, Any] = {name: given.get(key) for name, key in _ARGUMENTS.items()}
    found["lookup_tokens"] = _lookup(given.get("speculative_config"))
    for name, pattern in _LINES.items():
        match = next((m for line in said if (m := re.search(pattern, line.text))), None)
        if match:
            found[name] = int(match[1]) if match[1].isdecimal() else match[1]
    found |= {name: convert(m[1]) for name, (p, convert) in _CONFIG.items() if (m := re.search(p, config))}
    told = {name: convert(labels[key]) for name, (key, convert) in _LABELS.items() if key in labels}
    found |= {name: value for name, value in told.items() if value is not None}
    cores = next(
        (m for line in said if (m := re.search(r"local_rank=0, core ids=\[([\d, ]+)\]", line.text))), None
    )
    if cores:
        found["threads"] = len(cores[1].split(","))
    if found.get("device") == "cpu":
        found.pop("gpu_memory_utilization", None)
    if found.get("kv_dtype") == "auto":
        found["kv_dtype"] = found.get("dtype")
    served = models.get("data") if isinstance(models, dict) else None
    if isinstance(served, list) and served and isinstance(served[0], dict):
        length = served[0].get("max_model_len")
        found["context_tokens"] = length if isinstance(length, int) else found.get("context_tokens")
    return {name: value for name, value in found.items() if value not in (None, "None")}


def _lookup(config: Any) -> str | None:
    """How many of the last tokens n-gram speculation looks up, "2 to 4", where both ends were asked for."""
    ends = [config.get(f"prompt_lookup_{end}") for end in ("min", "max")] if isinstance(config, dict) else [None]
    return None if None in ends else " to ".join(map(str, dict.fromkeys(ends)))


def arguments(log: str) -> dict[str, Any]:
    """The line "non-default args: {…}": what the server understood it was asked for, less paths, ports and keys.

    Read as Python literals, never evaluated. Older versions print objects among them; then what is nested
    is left unread.
    """
    text = next((line.text for line in lines(log) if "non-default args: {" in line.text), "")
    text = text.partition("non-default args: ")[2][:MOST_ARGUMENTS]
    found = _literal(text)
    if found is None:
        plain = text[1:-1]
        for _ in range(DEEPEST):  # from the inside out, until the outermost pairs alone are left
            plain, replaced = re.subn(r"\{[^{}]*\}|<[^<>]*>|\w{1,80}\([^()]*\)", "None", plain)
            if not replaced:
                break
        found = _literal(f"{{{plain}}}")
    return {k: v for k, v in found.items() if k not in _PRIVATE} if isinstance(found, dict) else {}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _count(text: str) -> int | None:
    """vLLM's own spelling of counts: 8192, 8k (thousands), 8K (1,024s); None for "auto" and -1."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kKmMgG]?)i?", text)
    if match is None:
        return None
    scale = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]]
    return int(float(match[1]) * scale)


_SAME_DTYPE = {"half": "float16", "float": "float32", "fp8": "fp8_e4m3"}


def _dtype(text: str) -> str | None:
    return None if text == "auto" else _SAME_DTYPE.get(text, text)


# The option of the command line: (the name above, how its value is read; a bool for an option without one).
_OPTIONS: dict[str, tuple[str, Callable[[str], Any] | bool]] = {
    "max-model-len": ("context_tokens", _count),
    "max-num-seqs": ("slots", _count),
    "max-num-batched-tokens": ("batch_tokens", _count),
    "block-size": ("block_tokens", _count),
    "num-gpu-blocks-override": ("kv_blocks", _count),
    "kv-cache-memory-bytes": ("kv_bytes", _count),
    "kv-cache-dtype": ("kv_dtype", _dtype),
    "mamba-ssm-cache-dtype": ("ssm_dtype", _dtype),
    "dtype": ("dtype", _dtype),
    "quantization": ("quantization", _word),
    "attention-backend": ("attention_backend", _word),
    "tensor-parallel-size": ("tensor_parallel", _count),
    "gpu-memory-utilization": ("gpu_memory_utilization", float),
    "enforce-eager": ("enforce_eager", True),
    "no-enforce-eager": ("enforce_eager", False),
    "enable-prefix-caching": ("prefix_caching", True),
    "no-enable-prefix-caching": ("prefix_caching", False),
    "enable-chunked-prefill": ("chunked_prefill", True),
    "no-enable-chunked-prefill": ("chunked_prefill", False),
}


def requested_against_effective(args: list[str], effective: dict) -> list[tuple[str, Any, Any]]:
    """(name, asked, found) for each server argument that can be read back; equal where the server does as
    asked, `found` None where it does not tell. "auto" asks for nothing, and an option given twice counts last.
    """
    asked: dict[str, Any] = {}
    for i, word in enumerate(args):
        option, _, value = word.partition("=")
        key = option.removeprefix("--").replace("_", "-") if option.startswith("--") else ""
        value = value or (args[i + 1] if i + 1 < len(args) else "")
        if key == "speculative-config":
            asked |= _speculation(value)
        elif key in _OPTIONS:
            name, read = _OPTIONS[key]
            try:
                asked[name] = read if isinstance(read, bool) else read(value)
            except ValueError:
                asked[name] = value
    found = {name: _SAME_DTYPE.get(v, v) if name.endswith("dtype") else v for name, v in effective.items()}
    return [(name, want, found.get(name)) for name, want in asked.items() if want is not None]


def cache_layout(args: list[str], effective: dict) -> dict[str, Any]:
    """How the KV cache is laid out: as the server says, else as its arguments ask, else blocks of 16 tokens.

    A window keeps what is in flight besides: max_num_batched_tokens, twice, since two batches are under way with
    asynchronous scheduling (VllmConfig.max_in_flight_tokens). Without that number it is left out.
    """
    asked = {name: want for name, want, _ in requested_against_effective(args, {})}
    told = {**asked, **effective}
    batch = told.get("batch_tokens")
    found = {
        "kv_dtype": told.get("kv_dtype") or told.get("dtype"),
        "block_tokens": told.get("block_tokens", 16),
        "in_flight_tokens": 2 * batch if isinstance(batch, int) else None,
        "conv_dtype": told.get("dtype"),
        "ssm_dtype": told.get("ssm_dtype"),
        "draft_tokens": told.get("draft_tokens", 0),
        "speculative": told.get("speculation", "none") != "none",
        "context_tokens": told.get("context_tokens"),
        "kv_bytes": told.get("kv_bytes"),
        "kv_blocks": asked.get("kv_blocks"),  # asked for, it decides whatever memory there is
    }
    return {name: value for name, value in found.items() if value is not None}


def _speculation(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(config, dict):
        return {}
    return {"speculation": config.get("method"), "draft_tokens": config.get("num_speculative_tokens")}
