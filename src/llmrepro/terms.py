"""The kit's vocabulary: metrics, outcomes, verdict words, and which engines and fixes exist."""

import difflib
from collections.abc import Iterable
from importlib import resources
from typing import Literal, NamedTuple

Outcome = Literal["running", "completed", "failed", "stopped", "lacking", "interrupted", "imported"]
Word = Literal["reproduced", "not_reproduced", "inconclusive", "not_comparable", "not_evaluated"]
Mode = Literal["auto", "live", "published"]
Profile = Literal["quick", "full"]
Evidence = Literal["measured", "community", "stated", "computed"]
WorkloadKind = Literal["chat", "prefill", "prefix", "restart", "ladder", "concurrency"]
Status = Literal[
    "ok",
    "early_stop",
    "context_overflow",
    "http_error",
    "stream_error",
    "timeout",
    "engine_died",
    "oom",
    "skipped",
]

STAGES = ("card", "machine", "prepare", "measure", "results", "charts", "report")


class Metric(NamedTuple):
    """What a metric id stands for. `of` says what one value of it describes."""

    title: str
    unit: str  # "" for a plain number or a word
    better: Literal["higher", "lower"] | None  # None: neither way is better, it is a fact
    of: Literal["weights", "boot", "request", "workload"]


METRICS = {
    "model.sha256": Metric("sha256 of the weights file", "", None, "weights"),
    "model.bytes": Metric("size of the weights file", "B", None, "weights"),
    "model.converted_sha256": Metric("sha256 of the converted weights", "", None, "weights"),
    "model.layers": Metric("layers", "", None, "weights"),
    "model.context_tokens": Metric("context the model was trained for", "tok", None, "weights"),
    "kv_bytes_per_token": Metric("KV cache per token, as the engine allocates it", "B/tok", None, "boot"),
    "kv_tokens": Metric("tokens that the KV cache holds, as the engine prints it", "tok", None, "boot"),
    "kv_concurrency": Metric("requests of full length that fit, as the engine prints it", "", None, "boot"),
    "memory.weights_gib": Metric("memory of the weights, as the engine prints it", "GiB", None, "boot"),
    "memory.kv_gib": Metric("memory for the KV cache, as the engine prints it", "GiB", None, "boot"),
    "memory.graphs_gib": Metric("memory of captured graphs, as the engine prints it", "GiB", None, "boot"),
    "memory.device_gib": Metric("memory taken on the device", "GiB", None, "boot"),
    "startup.port_s": Metric("port open", "s", "lower", "boot"),
    "startup.models_s": Metric("/v1/models answers", "s", "lower", "boot"),
    "startup.health_s": Metric("/health says ready", "s", "lower", "boot"),
    "startup.first_completion_s": Metric("first token of the first completion", "s", "lower", "boot"),
    "outcome": Metric("how the request ended", "", None, "request"),
    "prompt_tokens": Metric("prompt tokens as the server counts them", "tok", None, "request"),
    "output_tokens": Metric("output tokens", "tok", None, "request"),
    "cached_tokens": Metric("prompt tokens taken from the cache", "tok", None, "request"),
    "ttfr_s": Metric("time to the first event", "s", "lower", "request"),
    "ttft_s": Metric("time to the first token (TTFT)", "s", "lower", "request"),
    "ttfat_s": Metric("time to the first answer token after reasoning", "s", "lower", "request"),
    "reasoning_s": Metric("time from the first token to the first of the answer", "s", "lower", "request"),
    "reasoning_tokens": Metric("output tokens of reasoning", "tok", None, "request"),
    "decode_tps": Metric("decode speed", "tok/s", "higher", "request"),
    "decode_tps.published_2026_10": Metric(
        "decode speed, (N-1) to the stream's end", "tok/s", "higher", "request"
    ),
    "decode_tps.published_2026_08": Metric(
        "decode speed, (N-1) from the first event to the stream's end", "tok/s", "higher", "request"
    ),
    "decode_tps.server": Metric("decode speed by the server's own clock", "tok/s", "higher", "request"),
    "e2e_tps": Metric("output tokens per second of the whole request", "tok/s", "higher", "request"),
    "prefill_tps": Metric("prefill speed", "tok/s", "higher", "request"),
    "prefill_tps.published_2026_10": Metric(
        "prefill speed, prompt tokens / TTFT, cached or not", "tok/s", "higher", "request"
    ),
    "prefill_tps.published_2026_08": Metric(
        "prefill speed, prompt tokens / first event, cached or not", "tok/s", "higher", "request"
    ),
    "prefill_tps.server": Metric("prefill speed by the server's own clock", "tok/s", "higher", "request"),
    "prefill_tps.slope": Metric(
        "prefill speed from the slope of TTFT over lengths", "tok/s", "higher", "workload"
    ),
    "verified_tokens": Metric("longest prompt that was answered in every round", "tok", "higher", "workload"),
    "failed_tokens": Metric("shortest prompt that failed", "tok", "higher", "workload"),
    "throughput_tps": Metric("output tokens per second of all streams together", "tok/s", "higher", "workload"),
    "memory.server_peak_gib": Metric("memory of the server's processes, peak", "GiB", "lower", "request"),
    "prefix_hit_rate": Metric("share of prompt tokens from the prefix cache", "", None, "workload"),
    "f_keep": Metric("share of the slot's earlier prompt that was kept", "", None, "request"),
    "log_window.prompt_tps": Metric(
        "prompt tokens per second as the log averages them, cached ones counted", "tok/s", "higher", "boot"
    ),
    "log_window.generation_tps": Metric(
        "output tokens per second as the log averages them", "tok/s", "higher", "boot"
    ),
    "log_window.prefix_hit_rate": Metric("prefix cache hit rate as the log rolls it", "", None, "boot"),
    "power.busy_w": Metric("power of the GPU while it works, mean", "W", None, "boot"),
    "temperature.core_c": Metric("temperature of the core, peak", "°C", "lower", "boot"),
    "temperature.memory_c": Metric("temperature of the GPU's memory, peak", "°C", "lower", "boot"),
    "guard.stop_s": Metric("time under load until the guard stops the run", "s", "higher", "boot"),
    "energy_j_per_token": Metric("energy per output token, prefill included", "J/tok", "lower", "workload"),
    "acceptance": Metric("accepted share of drafted tokens", "", "higher", "request"),
    "acceptance_length": Metric("tokens of a step that checked a draft", "tok", "higher", "workload"),
    "tokens_per_step": Metric("output tokens per step of the engine", "tok", "higher", "workload"),
}

# Conditions by the names that recipes use for them, with what they are called on a page. Which of them decide is
# for a recipe to say; METRICS in appendix/methods.md says which usually do.
CONDITIONS = {
    "weights_sha256": "sha256 of the weights",
    "weights_repo": "repository of the weights",
    "weights_revision": "revision of the weights",
    "engine_version": "engine version",
    "engine_commit": "engine commit",
    "cpu_model": "CPU",
    "cpu_simd": "vector extensions of the CPU",
    "cpu_cores": "physical cores",
    "gpu_name": "GPU",
    "gpu_count": "number of GPUs",
    "gpu_power_limit_w": "enforced power limit (W)",
    "gpu_memory_gib": "memory of the GPU (GiB)",
    "gpu_memory_clock_mhz": "memory clock of the GPU (MHz)",
    "gpu_driver": "driver of the GPU",
    "gpu_pcie": "PCIe link of the GPU",
    "kv_dtype": "type of the KV cache",
    "speculation": "speculative decoding",
    "context_tokens": "context (tok)",
    "threads": "threads",
    "memory_gib": "memory (GiB)",
    "memory_speed": "memory modules",
    "os": "operating system",
    "container": "container",
    "host": "changes to the host",
    "cooling": "cooling",
    "python": "Python",
    "cuda": "CUDA toolkit",
}

# How one number is made of many.
STATISTICS = {
    "mean_of_means": "mean of the prompts' means",
    "token_weighted": "token-weighted mean",
    "harmonic": "harmonic mean of the prompts",
    "median": "median of the prompts",
    "slope": "slope over lengths",
    "pooled": "all requests together",
    "mean": "mean",
    "value": "value",
}


def engines() -> list[str]:
    """Names of the engines there are: one module each in `llmrepro.engines`."""
    return _modules("engines")


def fixes() -> list[str]:
    """Names of the fixes there are: one module each in `llmrepro.fixes`."""
    return _modules("fixes")


def _modules(package: str) -> list[str]:
    files = resources.files("llmrepro").joinpath(package).iterdir()
    return sorted(
        f.name[:-3].replace("_", "-") for f in files if f.name.endswith(".py") and not f.name.startswith("_")
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """The ending of a refusal: the nearest known name where one is near, then all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(known) or 'none'}"
