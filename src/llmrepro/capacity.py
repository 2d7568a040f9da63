"""KV-cache arithmetic: bytes of a token and of a sequence, and how many tokens a memory holds.

Pure functions of a checkpoint's shape. They are upper bounds: an engine pads pages and groups of layers, keeps
a drafter's cache, and holds blocks back; what it printed stands beside them wherever they are shown.
"""

from fractions import Fraction
from math import ceil
from typing import NamedTuple

from llmrepro.shape import Attention, LinearAttention, Shape

GIB = 2**30
BLOCK_TOKENS = 16  # vLLM's on CUDA, unless told otherwise
CONCURRENCY_WITHIN = 0.1  # of a printed concurrency, for it to tell one way of accounting from the other

# Bytes of one element. ggml's quantized types store blocks of 32 with their scales (ggml-common.h): q8_0 is 32
# bytes and an fp16 scale, q4_0 16 bytes and one, and so on.
BYTES = {
    **dict.fromkeys(("f32", "float32"), Fraction(4)),
    **dict.fromkeys(("f16", "float16", "fp16", "half", "bf16", "bfloat16"), Fraction(2)),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "int8"), Fraction(1)),
    "q8_0": Fraction(34, 32),
    "q5_1": Fraction(24, 32),
    "q5_0": Fraction(22, 32),
    "q4_1": Fraction(20, 32),
    **dict.fromkeys(("q4_0", "iq4_nl"), Fraction(18, 32)),
}


class Cache(NamedTuple):
    """How an engine keeps a cache. The fields that a checkpoint's shape does not tell.

    `in_flight_tokens` are those that a windowed layer keeps besides its window, because a scheduled batch is only
    let go of when it is done: vLLM's max_num_batched_tokens times the batches that run at once (two with
    asynchronous scheduling), llama.cpp's --ubatch-size. `states` are the copies of a linear layer's state that a
    sequence holds without speculation.
    """

    key_dtype: str = "bfloat16"
    value_dtype: str = "bfloat16"
    block_tokens: int = BLOCK_TOKENS
    in_flight_tokens: int = 0
    conv_dtype: str = "bfloat16"
    state_dtype: str = "float32"
    speculative_tokens: int = 0
    states: int = 1


BF16 = Cache()


def element_bytes(dtype: str) -> Fraction:
    """Bytes of one element of a KV cache. Raises ValueError for a type whose size is not known here."""
    if dtype not in BYTES:
        raise ValueError(f"no size is known for a KV cache of {dtype!r}; known are {', '.join(sorted(BYTES))}")
    return BYTES[dtype]


def layer_bytes_per_token(attention: Attention, cache: Cache = BF16) -> int:
    """Bytes that one layer keeps of one token: kv_heads x (head_dim of keys + head_dim of values) x bytes.

    vLLM's AttentionSpec.page_size_bytes over block_size; llama.cpp's n_embd_k_gqa and n_embd_v_gqa.
    """
    values = attention.value_head_dim or attention.head_dim
    keys = attention.head_dim * element_bytes(cache.key_dtype)
    return ceil(attention.kv_heads * (keys + values * element_bytes(cache.value_dtype)))


def bytes_per_token(shape: Shape, cache: Cache = BF16) -> int:
    """Bytes of one token where every attention layer keeps it: the uniform accounting, layers x one layer's."""
    return shape.attention.layers * layer_bytes_per_token(shape.attention, cache)


def state_bytes(linear: LinearAttention, cache: Cache = BF16) -> int:
    """Bytes of all linear layers' states for one sequence, however long it is.

    A layer's state is a convolution window of (kernel - 1) x (2 x key_heads x key_dim + value_heads x value_dim)
    and a matrix of value_heads x value_dim x key_dim. vLLM (MambaStateShapeCalculator.gated_delta_net_state_shape,
    MambaSpec.max_memory_usage_bytes) keeps 1 + k of them under speculation of k tokens, each with a convolution
    window that is k longer; llama.cpp (n_embd_r, n_embd_s) keeps both in float32.
    """
    channels = 2 * linear.key_heads * linear.key_head_dim + linear.value_heads * linear.value_head_dim
    window = (linear.conv_kernel - 1 + cache.speculative_tokens) * channels * element_bytes(cache.conv_dtype)
    matrix = linear.value_heads * linear.value_head_dim * linear.key_head_dim * element_bytes(cache.state_dtype)
    return ceil(linear.layers * (cache.states + cache.speculative_tokens) * (window + matrix))


def window_cap(attention: Attention, cache: Cache = BF16) -> int:
    """Most tokens that a windowed layer keeps of one sequence, in whole blocks.

    A chunk and what is in flight (vLLM's ChunkedLocalAttentionSpec); of a sliding window one token less, and one
    block more, since a window need not begin with a block (SlidingWindowSpec). llama.cpp's llama_kv_cache_iswa
    has window + ubatch for either, padded to 256: take it as chunked in blocks of 256.
    """
    sliding = attention.window == "sliding"
    kept = attention.window_tokens - sliding + cache.in_flight_tokens
    return (ceil(kept / cache.block_tokens) + sliding) * cache.block_tokens


def sequence_bytes(shape: Shape, tokens: int, cache: Cache = BF16) -> int:
    """Bytes that one sequence of so many tokens keeps: full layers all of them, windowed ones what their window
    needs, linear ones their state. The hybrid accounting, of vLLM's hybrid KV cache manager."""
    attention = shape.attention
    whole = ceil(tokens / cache.block_tokens) * cache.block_tokens
    kept = attention.full_layers * whole
    if attention.windowed_layers:
        kept += attention.windowed_layers * min(whole, window_cap(attention, cache))
    state = state_bytes(shape.linear, cache) if shape.linear else 0
    return kept * layer_bytes_per_token(attention, cache) + state


def uniform_tokens(memory_bytes: float, shape: Shape, cache: Cache = BF16) -> int:
    """Tokens that a memory holds where every attention layer keeps every token, in whole blocks.

    vLLM without the hybrid manager. Linear layers' states are left out: they are a sequence's, not a token's.
    """
    return _floored(memory_bytes / bytes_per_token(shape, cache), cache)


def hybrid_tokens(memory_bytes: float, shape: Shape, cache: Cache = BF16) -> int | None:
    """Tokens of the one longest sequence that a memory holds by `sequence_bytes`, in whole blocks.

    0 where not even its states fit; None where no length is too long (no layer keeps every token).
    """
    attention, layer = shape.attention, layer_bytes_per_token(shape.attention, cache)
    room = memory_bytes - (state_bytes(shape.linear, cache) if shape.linear else 0)
    if room <= 0:
        return 0
    if not attention.windowed_layers:
        return _floored(room / layer / attention.full_layers, cache) if attention.full_layers else None
    cap = window_cap(attention, cache)
    if room < attention.layers * layer * cap:
        return _floored(room / layer / attention.layers, cache)
    if not attention.full_layers:
        return None
    return _floored((room / layer - attention.windowed_layers * cap) / attention.full_layers, cache)


def concurrency(memory_bytes: float, shape: Shape, context_tokens: int, cache: Cache, *, hybrid: bool) -> float:
    """Sequences of full length that fit, as vLLM's `Maximum concurrency for N tokens per request`."""
    if hybrid:
        return memory_bytes / sequence_bytes(shape, context_tokens, cache)
    return uniform_tokens(memory_bytes, shape, cache) / context_tokens


def accounting(printed: float, uniform: float, hybrid: tuple[float, float]) -> str | None:
    """Which way an engine counts, by the concurrency it printed: `uniform`, `hybrid` or None (neither, or both).

    `hybrid` is from the most to the fewest tokens in flight. Older vLLM (0.14, 0.27) prints as `KV cache size`
    blocks over groups, which is the same number of tokens either way: only the concurrency tells.
    """
    low, high = min(hybrid) * (1 - CONCURRENCY_WITHIN), max(hybrid) * (1 + CONCURRENCY_WITHIN)
    is_uniform = abs(printed / uniform - 1) <= CONCURRENCY_WITHIN
    is_hybrid = low <= printed <= high
    return None if is_uniform == is_hybrid else "uniform" if is_uniform else "hybrid"


def _floored(tokens: float, cache: Cache) -> int:
    return int(tokens // cache.block_tokens) * cache.block_tokens
