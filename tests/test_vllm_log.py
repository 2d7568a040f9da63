"""What vLLM's log and metrics page tell, in every wording; data/ holds pages and logs in the engines' forms."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrepro.engines import _prometheus, _vllm_log, _vllm_settings, llama_cpp

DATA = Path(__file__).parent / "data"
LOGS = sorted(path.name for path in (DATA / "vllm").glob("*.log"))


def log(name: str) -> str:
    return (DATA / "vllm" / f"{name}.log").read_text()


def page(name: str) -> str:
    return (DATA / f"{name}.prom").read_text()


def spans(name: str) -> dict[str, tuple[float, float]]:
    return {phase: (start, end) for phase, start, end in _vllm_log.phases(log(name))}


# --- phases


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "gpu-0.14",
            {"load model": 45.13, "torch.compile": 42.47, "capture graphs": 9, "init engine, in all": 66.31},
        ),
        ("gpu-0.27.1-v1", {"load model": 142.7, "profiling run": 5.9, "capture graphs": 25}),
        ("gpu-0.27.1-v2", {"load model": 142.7, "profiling run": 5.9, "capture graphs": 23}),
        ("gpu-0.32", {"load model": 14.25, "torch.compile": 19.8, "profiling run": 0.62, "capture graphs": 6}),
        ("gpu-0.33", {"load model": 14.25, "torch.compile": 19.8, "profiling run": 0.62, "capture graphs": 6}),
        ("cpu-0.32-eager", {"load weights": 0.76, "init engine, in all": 2.77}),
        ("cpu-0.32-compiled", {"load weights": 0.76, "profiling run": 1.28, "init engine, in all": 88.79}),
    ],
)
def test_a_phase_whose_line_tells_its_duration_has_it_and_ends_there(name, told):
    found = spans(name)
    assert {phase: pytest.approx(found[phase][1] - found[phase][0], abs=0.01) for phase in told} == told
    assert all(found[phase][1] == int(found[phase][1]) for phase in told)


def test_phases_without_a_printed_duration_lie_between_stamps():
    assert _vllm_log.phases(log("cpu-0.32-eager")) == [
        ("read settings, spawn engine", 0.0, 26.0),
        ("start the worker", 26.0, 39.0),
        ("load weights", 39.24, 40.0),
        ("size and allocate KV cache", 40.0, 42.0),
        ("init engine, in all", 42.23, 45.0),
        ("start the API", 45.0, 47.0),
    ]
    assert spans("cpu-0.32-compiled")["compile, warm up"] == (41.0, 129.0)


def test_what_was_not_done_is_no_phase():
    assert not {"torch.compile", "compile, warm up", "capture graphs"} & set(spans("cpu-0.32-eager"))


def test_a_start_over_new_years_midnight_goes_on_counting():
    found = spans("gpu-0.14")
    assert found["start the worker"] == (22.0, 30.0)  # 23:59:12 to 23:59:20
    assert found["load model"] == (30.87, 76.0)  # to 00:00:06
    assert found["start the API"] == (145.0, 148.0)


@pytest.mark.parametrize(
    ("days", "expected"), [(("02-28", "02-29", "03-01"), [0, 86400, 172800]), (("02-28", "03-01"), [0, 86400])]
)
def test_a_leap_day_is_counted_when_there_was_one(days, expected):
    text = "\n".join(f"(APIServer pid=1) INFO {day} 12:00:00 [x.py:1] a" for day in days)
    assert [line.at_s for line in _vllm_log.lines(text)] == expected


def test_of_several_workers_one_is_told():
    assert [name for name, *_ in _vllm_log.phases(log("gpu-0.14"))].count("torch.compile") == 1
    assert _vllm_log.memory(log("gpu-0.14"))["memory.weights_gib"] == 58.7344


def test_a_drafters_compilation_is_a_phase_of_its_own():
    phases = [p for p in _vllm_log.phases(log("gpu-0.27.1-v1")) if p[0] == "torch.compile"]
    assert phases == [("torch.compile", 171.75, 202.0), ("torch.compile", 208.54, 212.0)]


@pytest.mark.parametrize(
    "line",
    [
        "torch.compile takes 7.25 s in total",  # 0.14
        "torch.compile took 7.25 s in total",  # 0.27.1
        "[backbone] torch.compile took 7.25 s in total",  # 0.32
        "torch.compile and initial profiling/warmup run together took 7.25 s in total",
    ],
)
def test_every_wording_of_compilation_is_known(line):
    text = f"INFO 11-30 00:00:00 [a.py:1] x\nINFO 11-30 00:00:09 [monitor.py:1] {line}\n"
    assert _vllm_log.phases(text) == [("torch.compile", 1.75, 9.0)]


@pytest.mark.parametrize("told", ["took 66.31 seconds", "took 66.31 s", "took 66.31 s (compilation: 42.00 s)"])
def test_every_wording_of_the_whole_is_known(told):
    line = f"init engine (profile, create kv cache, warmup model) {told}"
    text = f"INFO 11-30 00:00:00 [a.py:1] x\nINFO 11-30 00:02:00 [core.py:1] {line}\n"
    assert _vllm_log.phases(text) == [("init engine, in all", 53.69, 120.0)]


@pytest.mark.parametrize("name", LOGS)
def test_phases_run_forward_within_the_log(name):
    text = (DATA / "vllm" / name).read_text()
    last = _vllm_log.lines(text)[-1].at_s
    phases = _vllm_log.phases(text)
    assert all(0 <= start <= end <= last for _, start, end in phases)
    assert [start for _, start, _ in phases] == sorted(start for _, start, _ in phases)


# --- memory


@pytest.mark.parametrize(
    ("name", "weights", "kv", "graphs", "tokens", "concurrency"),
    [
        ("gpu-0.14", 58.7344, 20.19, 0.62, 110256, 3.21),
        ("gpu-0.27.1-v1", 18.42, 20.19, 0.45, 264192, 4.03),
        ("gpu-0.27.1-v2", 18.42, 20.19, 0.45, 264192, 4.03),
        ("gpu-0.32", 28.31, 42.07, 0.59, 689216, 21.03),
        ("gpu-0.33", 28.31, 42.07, 0.59, 689216, 21.03),
        ("cpu-0.32-eager", None, 1.0, None, 46592, 5.69),
        ("cpu-0.32-compiled", None, 1.0, None, 46592, 5.69),
    ],
)
def test_memory_is_told_as_printed_and_left_out_where_it_is_not(name, weights, kv, graphs, tokens, concurrency):
    told = {
        "memory.weights_gib": weights,
        "memory.kv_gib": kv,
        "memory.graphs_gib": graphs,
        "kv_tokens": tokens,
        "kv_concurrency": concurrency,
    }
    assert _vllm_log.memory(log(name)) == {metric: value for metric, value in told.items() if value is not None}


def test_a_cpu_of_0_27_1_calls_its_cache_gpu_and_is_read_all_the_same():
    text = (
        "INFO 11-30 00:00:00 [cpu_worker.py:248] Explicitly set (0.12/3.73) GiB for KV cache on node 0.\n"
        "INFO 11-30 00:00:00 [kv_cache_utils.py:2235] GPU KV cache size: 5,760 tokens\n"
        "INFO 11-30 00:00:00 [kv_cache_utils.py:2236] Maximum concurrency for 128 tokens per request: 45.00x\n"
    )
    assert _vllm_log.memory(text) == {"memory.kv_gib": 0.12, "kv_tokens": 5760, "kv_concurrency": 45.0}


def test_a_cpu_that_sizes_its_cache_itself_is_read():
    text = "INFO 11-30 00:00:00 [cpu_worker.py:260] Auto set (7.5/15.6) GiB for KV cache on node 0, with 8 GiB …"
    assert _vllm_log.memory(text) == {"memory.kv_gib": 7.5}


# --- the log's windows


def test_windows_are_told_with_shares_for_percentages():
    first, second = _vllm_log.rolling(log("cpu-0.32-eager"))
    assert first == {
        "at_s": 107.0,
        "engine": 0,
        "prompt_tps": 815.0,
        "generation_tps": 0.5,
        "running": 1,
        "waiting": 0,
        "kv_usage": 0.176,
        "prefix_hit_rate": 0.0,
    }
    assert (second["prompt_tps"], second["prefix_hit_rate"]) == (0.0, 0.075)


def test_a_window_holds_its_speculation_and_no_hit_rate_without_a_prefix_cache():
    (window,) = _vllm_log.rolling(log("gpu-0.27.1-v1"))
    assert "prefix_hit_rate" not in window  # the cache is off, and no rate is not a rate of nought
    assert window["acceptance_length"] == 3.85 and window["acceptance"] == 0.407
    assert (window["accepted_tokens"], window["drafted_tokens"]) == (1346, 3306)
    assert window["acceptance_by_position"] == [0.801, 0.62, 0.48, 0.371, 0.262, 0.19, 0.126]


def test_other_caches_rates_are_not_taken_for_the_prefix_caches():
    (window,) = _vllm_log.rolling(log("gpu-0.32"))
    assert window["prefix_hit_rate"] == 0.125 and (window["running"], window["waiting"]) == (4, 2)
    (window,) = _vllm_log.rolling(log("gpu-0.32").replace("Prefix cache hit rate: 12.5%, ", ""))
    assert "prefix_hit_rate" not in window


def test_every_engine_of_a_server_has_its_window_and_its_own_speculation():
    old = "Draft acceptance rate: 15.5%, Mean acceptance length: 1.77, Accepted: 17 tokens, Drafted: 110 tokens"
    text = "".join(
        f"(APIServer pid=1) INFO 09-01 14:28:09 [loggers.py:1] Engine 00{n}: Avg prompt throughput: "
        f"{n}.4 tokens/s, Avg generation throughput: 16.0 tokens/s\n"
        f"(APIServer pid=1) INFO 09-01 14:28:09 [metrics.py:1] SpecDecoding metrics: {old}, "
        f"Per-position acceptance rate: 0.{n}18, 0.182\n"
        for n in (0, 1)
    )
    windows = _vllm_log.rolling(text)
    assert [(w["engine"], w["acceptance_by_position"]) for w in windows] == [
        (0, [0.018, 0.182]),
        (1, [0.118, 0.182]),
    ]
    assert windows[0]["acceptance"] == 0.155


# --- settings read back


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "gpu-0.14",
            {
                "version": "0.14.0",
                "context_tokens": 131072,
                "tensor_parallel": 2,
                "quantization": "compressed-tensors",
                "kv_dtype": "bfloat16",
                "attention_backend": "FLASH_ATTN",
                "batch_tokens": 8192,
                "slots": 8,
                "compilation": "VLLM_COMPILE",
                "cuda_graphs": "FULL_AND_PIECEWISE",
                "speculation": "none",
            },
        ),
        (
            "gpu-0.27.1-v1",
            {
                "version": "0.27.1",
                "prefix_caching": False,
                "speculation": "dflash",
                "draft_tokens": 7,
                "batch_tokens": 2048,
                "attention_backend": "FLASH_ATTN",
            },
        ),
        (
            "gpu-0.33",
            {"version": "0.33.0", "kv_dtype": "fp8", "attention_backend": "FLASHINFER", "model_runner": "V2"},
        ),
        (
            "cpu-0.32-eager",
            {
                "device": "cpu",
                "dtype": "bfloat16",
                "enforce_eager": True,
                "compilation": "NONE",
                "threads": 3,
                "slots": 1,
                "model_runner": "V1",
                "chunked_prefill": True,
            },
        ),
        ("cpu-0.32-compiled", {"enforce_eager": False, "compilation": "DYNAMO_TRACE_ONCE"}),
    ],
)
def test_settings_are_read_back_from_the_log(name, expected):
    found = _vllm_settings.effective("", log(name), None)
    assert {key: found.get(key) for key in expected} == expected


def test_the_servers_own_api_outranks_its_log():
    models = {"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}
    found = _vllm_settings.effective(page("vllm/cpu-0.32"), log("cpu-0.32-eager"), models)
    assert found["context_tokens"] == 4096
    assert (found["block_tokens"], found["kv_blocks"], found["kv_tokens"]) == (128, 364, 46592)
    assert found["prefix_caching"] is True and found["kv_dtype"] == "bfloat16"  # "auto" is the model's own
    assert "gpu_memory_utilization" not in found  # printed on a CPU too, where it means nothing
    assert "sliding_window" not in found
    json.dumps(found, allow_nan=False)


def test_a_prefix_cache_that_is_off_is_told_as_off():
    found = _vllm_settings.effective(page("vllm/gpu-0.27.1"), log("gpu-0.27.1-v1"), None)
    assert (found["prefix_caching"], found["block_tokens"], found["ssm_dtype"]) == (False, 1568, "float16")


@pytest.mark.parametrize(
    "models", [None, "<html>", {}, {"data": []}, {"data": [7]}, {"data": [{"max_model_len": None}]}]
)
def test_what_is_not_told_is_left_out_and_never_nought(models):
    assert _vllm_settings.effective("", "", models) == {}
    assert _vllm_log.memory("") == {} and _vllm_log.phases("") == [] and _vllm_log.rolling("") == []
    assert _vllm_settings.counters("") == {} and llama_cpp.counters(lambda path: None) == {}


def test_arguments_are_read_without_paths_and_keys_even_between_objects():
    assert _vllm_settings.arguments(log("gpu-0.33")) == {"max_model_len": 32768, "kv_cache_dtype": "fp8"}
    # 0.14 prints a configuration object, in which the same names mean other things
    assert _vllm_settings.arguments(log("gpu-0.14")) == {
        "max_model_len": 131072,
        "tensor_parallel_size": 2,
        "max_num_seqs": 8,
        "compilation_config": None,
    }


def test_arguments_are_never_evaluated():
    line = "(APIServer pid=1) INFO 11-30 00:00:00 [a.py:1] non-default args: "
    for text in ("{'a': __import__('os').getpid()}", "{" * 5000, "{'a': " + "[" * 3000, "{'a': 1"):
        assert set(map(type, _vllm_settings.arguments(line + text).values())) <= {type(None)}


# --- asked for against found


def test_what_the_server_does_as_asked_is_equal_and_the_rest_shows_both():
    effective = _vllm_settings.effective(page("vllm/cpu-0.32"), log("cpu-0.32-eager"), None)
    asked = ["--max-model-len", "8K", "--enforce-eager", "--block-size=16", "--no-enable-prefix-caching"]
    asked += ["--max_num_seqs", "1", "--dtype", "auto", "--enable-prompt-tokens-details", "--seed", "0"]
    assert _vllm_settings.requested_against_effective(asked, effective) == [
        ("context_tokens", 8192, 8192),
        ("enforce_eager", True, True),
        ("block_tokens", 16, 128),
        ("prefix_caching", False, True),
        ("slots", 1, 1),
    ]


def test_a_setting_that_the_server_does_not_tell_is_unknown():
    found = _vllm_settings.requested_against_effective(["--attention-backend", "FLASH_ATTN"], {})
    assert found == [("attention_backend", "FLASH_ATTN", None)]


@pytest.mark.parametrize(
    ("args", "asked"),
    [
        (["--max-model-len", "8k"], ("context_tokens", 8000)),
        (["--max-model-len", "1M"], ("context_tokens", 1048576)),
        (["--max-model-len", "512", "--max-model-len=1024"], ("context_tokens", 1024)),
        (["--kv-cache-dtype", "fp8"], ("kv_dtype", "fp8_e4m3")),
        (["--dtype", "half"], ("dtype", "float16")),
        (["--gpu-memory-utilization", "0.9"], ("gpu_memory_utilization", 0.9)),
        (["--enforce-eager", "--no-enforce-eager"], ("enforce_eager", False)),
    ],
)
def test_arguments_are_read_as_vllm_reads_them(args, asked):
    ((name, want, found),) = _vllm_settings.requested_against_effective(args, {})
    assert (name, want, found) == (*asked, None)


@pytest.mark.parametrize(
    "args", [["--kv-cache-dtype", "auto"], ["--max-model-len", "auto"], ["--max-model-len"], []]
)
def test_auto_asks_for_nothing(args):
    assert _vllm_settings.requested_against_effective(args, {"kv_dtype": "bfloat16"}) == []


def test_speculation_asked_for_is_held_against_what_runs():
    args = ["--speculative-config", '{"method":"dflash","model":"/draft","num_speculative_tokens":5}']
    effective = _vllm_settings.effective("", log("gpu-0.27.1-v1"), None)
    assert _vllm_settings.requested_against_effective(args, effective) == [
        ("speculation", "dflash", "dflash"),
        ("draft_tokens", 5, 7),
    ]


# --- counters


def test_counters_of_vllm_are_tokens_and_prompts_hold_the_cached_ones():
    found = _vllm_settings.counters(page("vllm/cpu-0.32"))
    assert found == {
        "prefix_queries_tokens": 20441,
        "prefix_hits_tokens": 1536,
        "prompt_tokens": 20441,
        "generation_tokens": 816,
        "preemptions": 0,
    }


def test_counters_are_summed_over_engines_and_positions_kept_apart():
    found = _vllm_settings.counters(page("vllm/gpu-0.27.1"))
    assert (found["prompt_tokens"], found["generation_tokens"]) == (1000, 4652)
    assert (found["spec_drafts"], found["spec_draft_tokens"], found["spec_accepted_tokens"]) == (472, 3304, 1346)
    assert (found["spec_accepted_by_position.0"], found["spec_accepted_by_position.1"]) == (820, 526)
    assert "preemptions" not in found


def test_counters_of_llama_cpp_mean_the_same():
    """Its own prompt_tokens_total counts 888 computed ones, beside 1,320 from the cache."""
    found = llama_cpp.counters({"/metrics": page("llama-cpp/metrics")}.get)
    assert found["prompt_tokens"] == found["prefix_queries_tokens"] == 888 + 1320
    assert (found["prefix_hits_tokens"], found["generation_tokens"]) == (1320, 22)
    older = re.sub(r".*prompt_tokens_cached_total.*\n", "", page("llama-cpp/metrics"))
    assert not {"prompt_tokens", "prefix_queries_tokens", "prefix_hits_tokens"} & set(
        llama_cpp.counters({"/metrics": older}.get)
    )


def test_a_metrics_page_cut_short_tells_what_came_before():
    text = page("vllm/cpu-0.32")
    cut = text[: text.index("vllm:generation_tokens_total{") + 40]
    assert _vllm_settings.counters(cut)["prompt_tokens"] == 20441
    assert _prometheus.totals("<html>nothing here</html>", {"a": "b"}) == {}


# --- text of any kind


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(LOGS),
    cut=st.integers(0, 5000),
    junk=st.text(max_size=60),
    colour=st.booleans(),
    carriage=st.booleans(),
)
def test_a_log_that_is_cut_or_mixed_with_other_words_is_read_as_far_as_it_goes(name, cut, junk, colour, carriage):
    text = (DATA / "vllm" / name).read_text()
    whole, cut = _vllm_log.phases(text), min(cut, len(text))
    text = text[:cut] + junk + text[cut:]
    if colour:
        text = text.replace("INFO ", "\x1b[32mINFO\x1b[0m ")
    if carriage:
        text = text.replace("\n", "\r\n")
    for read in (_vllm_log.phases, _vllm_log.memory, _vllm_log.rolling, _vllm_settings.arguments):
        json.dumps(read(text), allow_nan=False)
    assert len(_vllm_log.phases(text)) >= len(whole) - 3  # one line is spoiled at most
    # without the line of the whole load, that of the weights stands in for it
    assert {phase[0] for phase in _vllm_log.phases(text)} <= {phase[0] for phase in whole} | {"load weights"}
