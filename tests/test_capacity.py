"""KV-cache arithmetic: published and printed figures, from the models' own configs."""

import json
from pathlib import Path

import pytest

from llmrepro import capacity, checkpoint
from llmrepro.capacity import GIB, Cache

FIGURES = Path(__file__).parents[1] / "figures/smollm2-135m"
# text_config of the models' config.json, less what has nothing to do with the cache.
SCOUT = {
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "attention_chunk_size": 8192,
    "no_rope_layers": [1, 1, 1, 0] * 12,
}
QWEN = {
    "num_hidden_layers": 64,
    "full_attention_interval": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
}
SMOLLM = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "head_dim": 64,
}
SCOUT_MEMORY = 20.19 * GIB


def shape(config):
    return checkpoint.of_config(config)


def test_scout_keeps_192_kib_a_token_and_its_memory_110_256():
    scout = shape({"text_config": SCOUT})
    assert capacity.bytes_per_token(scout) == 192 * 1024
    assert int(SCOUT_MEMORY / capacity.bytes_per_token(scout)) == 110_264
    assert capacity.uniform_tokens(SCOUT_MEMORY, scout) == 110_256


@pytest.mark.parametrize(
    "in_flight,tokens,concurrency", [(2048, 410_336, 3.13), (8192, 391_904, 2.77), (16384, 367_328, 2.40)]
)
def test_scout_by_the_hybrid_accounting_depends_on_what_is_in_flight(in_flight, tokens, concurrency):
    scout, cache = shape(SCOUT), Cache(in_flight_tokens=in_flight)
    assert capacity.hybrid_tokens(SCOUT_MEMORY, scout, cache) == tokens
    found = capacity.concurrency(SCOUT_MEMORY, scout, 110_000, cache, hybrid=True)
    assert found == pytest.approx(concurrency, abs=0.005)


def test_a_printed_concurrency_tells_which_way_the_engine_counts():
    hybrid = (2.40, 3.13)
    assert capacity.accounting(1.0, 1.002, hybrid) == "uniform"
    assert capacity.accounting(2.77, 1.002, hybrid) == "hybrid"
    assert capacity.accounting(1.6, 1.002, hybrid) is None
    assert capacity.accounting(1.0, 1.0, (1.0, 1.05)) is None  # a short context: both are the same


def test_qwen_keeps_64_kib_a_token_of_16_full_layers():
    qwen = shape(QWEN)
    assert (qwen.attention.full_layers, qwen.linear.layers) == (16, 48)
    assert capacity.bytes_per_token(qwen) == 64 * 1024


@pytest.mark.parametrize("dtype,mib", [("float16", 74.8), ("float32", 146.8)])
def test_qwens_states_are_as_published(dtype, mib):
    found = capacity.state_bytes(shape(QWEN).linear, Cache(state_dtype=dtype)) / 2**20
    assert found == pytest.approx(mib, abs=0.05)


def test_speculation_keeps_a_state_for_every_drafted_token_with_a_longer_convolution():
    linear = shape(QWEN).linear
    one = capacity.state_bytes(linear, Cache(state_dtype="float16"))
    drafting = capacity.state_bytes(linear, Cache(state_dtype="float16", speculative_tokens=7))
    channels = 2 * 16 * 128 + 48 * 128
    assert drafting == 8 * (one + 48 * 7 * channels * 2)


def test_a_sequences_bytes_are_its_tokens_and_its_states():
    qwen = shape(QWEN)
    state = capacity.state_bytes(qwen.linear)
    assert capacity.sequence_bytes(qwen, 1600) == 1600 * 64 * 1024 + state
    assert capacity.hybrid_tokens(state + 1600 * 64 * 1024, qwen) == 1600
    assert capacity.hybrid_tokens(state, qwen) == 0


@pytest.mark.parametrize("memory", [3e8, 1.9e9, 2.1e9, 2e10])
@pytest.mark.parametrize("config", [SCOUT, QWEN, {**SMOLLM, "sliding_window": 512, "sliding_window_pattern": 6}])
def test_the_longest_sequence_fits_and_one_block_more_does_not(memory, config):
    model, cache = shape(config), Cache(in_flight_tokens=512)
    tokens = capacity.hybrid_tokens(memory, model, cache)
    assert tokens % cache.block_tokens == 0
    assert capacity.sequence_bytes(model, tokens, cache) <= memory
    assert capacity.sequence_bytes(model, tokens + 1, cache) > memory


def test_a_sequence_of_windows_alone_never_gets_too_long():
    model = shape({**SMOLLM, "sliding_window": 512})
    assert capacity.hybrid_tokens(GIB, model) is None
    assert capacity.hybrid_tokens(1000 * 23_040, model) is None
    assert capacity.hybrid_tokens(100 * 23_040, model) == 96


@pytest.mark.parametrize(
    "key,value,each",
    [("f16", "f16", 23040), ("q8_0", "q8_0", 12240), ("f16", "q4_0", 14760), ("fp8", "fp8", 11520)],
)
def test_a_quantized_cache_counts_its_scales(key, value, each):
    assert capacity.bytes_per_token(shape(SMOLLM), Cache(key_dtype=key, value_dtype=value)) == each


def test_an_unknown_type_of_cache_is_refused_with_those_known():
    with pytest.raises(ValueError, match=r"'nvfp4'; known are .*q8_0"):
        capacity.bytes_per_token(shape(SMOLLM), Cache(key_dtype="nvfp4"))


def test_smollm_is_as_llama_cpp_printed_it_here():
    boot = json.loads((FIGURES / "run/boots/1.json").read_text())
    cache = Cache(*boot["effective"]["kv_dtype"].split("/"))
    assert capacity.bytes_per_token(shape(SMOLLM), cache) == boot["metrics"]["kv_bytes_per_token"] == 23_040


def test_smollm_is_as_vllm_printed_it_here():
    boot = json.loads((FIGURES / "two-engines/run/arms/vllm/boots/1.json").read_text())
    told = boot["effective"]
    cache = Cache(told["kv_dtype"], told["kv_dtype"], block_tokens=told["block_tokens"])
    tokens = capacity.uniform_tokens(told["kv_bytes"], shape(SMOLLM), cache)
    assert tokens == boot["metrics"]["kv_tokens"] == 46_592
    found = capacity.concurrency(told["kv_bytes"], shape(SMOLLM), told["context_tokens"], cache, hybrid=False)
    assert round(found, 2) == boot["metrics"]["kv_concurrency"]
