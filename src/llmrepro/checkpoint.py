"""A checkpoint's shape, read from its files: a config.json and safetensors' headers, or a GGUF's metadata.

No tensor is read. What is kept in another way than keys and values per head (multi-head latent attention), or laid
out in a way that these keys do not tell, is refused with a ValueError and not guessed.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmrepro.shape import Attention, LinearAttention, Read, Shape

# llama.cpp's loader has these for the architecture, not the file: three chunked layers of 8,192, then a full one.
LLAMA4_CHUNK_TOKENS, LLAMA4_PATTERN = 8192, 4
LINEAR_INTERVAL = 4  # of transformers' Qwen3NextConfig and of llama.cpp, where a file states none
NOT_DECODED = re.compile(r"(^|\.)(visual|vision_\w+|multi_modal_projector|mtp|nextn)(\.|$)")
EXPERT = re.compile(r"\.experts\.|_exps\.")
EMBEDDING = re.compile(r"(^|\.)(embed_tokens|token_embd)\.")
HEAD = re.compile(r"(^|\.)(lm_head|output)\.")
SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


def of(path: Path) -> Shape:
    """The shape of weights on disk: a GGUF file (of several, the first) or a folder with a config.json.

    Raises ValueError saying what the files do not tell.
    """
    return _of_folder(path) if path.is_dir() else _of_gguf(path)


def told(path: Path) -> dict[str, Any]:
    """What weights.json keeps of it: {"shape": …}, or {"shape_unknown": why} where the files do not tell."""
    try:
        return {"shape": of(path).model_dump(exclude_none=True)}
    except ValueError as error:
        return {"shape_unknown": str(error)}


def of_config(config: Mapping[str, Any], locator: str = "config.json") -> Shape:
    """The shape that a Hugging Face config.json tells, its language model nested in `text_config` or not."""
    config = config.get("text_config") or config
    layers = _needed(config, "num_hidden_layers")
    if config.get("kv_lora_rank"):
        raise ValueError("it keeps a compressed latent (kv_lora_rank), which is not accounted for here")
    heads = _needed(config, "num_attention_heads")
    kinds = Counter(_kinds(config, layers))
    unknown = set(kinds) - {"full_attention", "chunked_attention", "sliding_attention", "linear_attention"}
    if unknown:
        raise ValueError(f"layers of {sorted(unknown)[0]!r} are not accounted for here")
    windowed = "chunked" if kinds["chunked_attention"] else "sliding" if kinds["sliding_attention"] else None
    if kinds["chunked_attention"] and kinds["sliding_attention"]:
        raise ValueError("it has chunked and sliding layers; one kind of window is accounted for here")
    attention = Attention(
        full_layers=kinds["full_attention"],
        windowed_layers=kinds["chunked_attention"] + kinds["sliding_attention"],
        window=windowed,
        window_tokens={
            None: None,
            "chunked": config.get("attention_chunk_size"),
            "sliding": config.get("sliding_window"),
        }[windowed],
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or _needed(config, "hidden_size") // heads,
        locator=locator,
    )
    linear = None
    if kinds["linear_attention"]:
        linear = LinearAttention(
            layers=kinds["linear_attention"],
            key_heads=_needed(config, "linear_num_key_heads"),
            value_heads=_needed(config, "linear_num_value_heads"),
            key_head_dim=_needed(config, "linear_key_head_dim"),
            value_head_dim=_needed(config, "linear_value_head_dim"),
            conv_kernel=_needed(config, "linear_conv_kernel_dim"),
            state_dtype=config.get("mamba_ssm_dtype"),
            locator=locator,
        )
    return Shape(attention=attention, linear=linear)


def _kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """What each layer is, by the names of transformers' `layer_types`."""
    if config.get("layer_types"):
        return config["layer_types"]
    if config.get("attention_chunk_size"):
        interval = config.get("no_rope_layer_interval") or LLAMA4_PATTERN
        roped = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
        return ["chunked_attention" if rope else "full_attention" for rope in roped]
    if config.get("linear_num_value_heads"):
        interval = config.get("full_attention_interval") or LINEAR_INTERVAL
        return ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        pattern = config.get("sliding_window_pattern")  # Gemma 3: every so many is full
        first = config.get("max_window_layers", 0)  # Qwen 2: those before are full
        return [
            "full_attention" if i < first or (pattern and (i + 1) % pattern == 0) else "sliding_attention"
            for i in range(layers)
        ]
    return ["full_attention"] * layers


def of_metadata(metadata: Mapping[str, Any], locator: str = "GGUF metadata") -> Shape:
    """The shape that a GGUF's metadata tell. Layers for prediction ahead (nextn) are left out."""
    architecture = _needed(metadata, "general.architecture")

    def told(key: str, default=None):
        return metadata.get(f"{architecture}.{key}", default)

    layers = _needed(metadata, f"{architecture}.block_count") - told("nextn_predict_layers", 0)
    if told("attention.kv_lora_rank"):
        raise ValueError("it keeps a compressed latent (kv_lora_rank), which is not accounted for here")
    heads = _needed(metadata, f"{architecture}.attention.head_count")
    heads = max(heads) if isinstance(heads, list) else heads
    of_layers = told("attention.head_count_kv", heads)
    of_layers = of_layers[:layers] if isinstance(of_layers, list) else [of_layers] * layers
    kv_heads = {n for n in of_layers if n}
    if len(kv_heads) != 1:
        raise ValueError(f"its layers have {sorted(kv_heads)} KV heads; one number is accounted for here")
    inner = told("ssm.inner_size")
    interval = told("full_attention_interval", LINEAR_INTERVAL)
    if inner and all(of_layers):
        linear_layers = [(i + 1) % interval != 0 for i in range(layers)]
    else:
        linear_layers = [not n for n in of_layers]
    window, windowed = _windows(architecture, told, layers)
    dim = told("attention.key_length") or _needed(metadata, f"{architecture}.embedding_length") // heads
    value_dim = told("attention.value_length")
    attention = Attention(
        full_layers=layers - sum(linear_layers) - sum(windowed),
        windowed_layers=sum(windowed),
        window=("chunked" if architecture == "llama4" else "sliding") if any(windowed) else None,
        window_tokens=window if any(windowed) else None,
        kv_heads=kv_heads.pop(),
        head_dim=dim,
        value_head_dim=None if value_dim == dim else value_dim,
        locator=locator,
    )
    linear = None
    if any(linear_layers):
        heads = _needed(metadata, f"{architecture}.ssm.time_step_rank")
        linear = LinearAttention(
            layers=sum(linear_layers),
            key_heads=_needed(metadata, f"{architecture}.ssm.group_count"),
            value_heads=heads,
            key_head_dim=_needed(metadata, f"{architecture}.ssm.state_size"),
            value_head_dim=_needed(metadata, f"{architecture}.ssm.inner_size") // heads,
            conv_kernel=_needed(metadata, f"{architecture}.ssm.conv_kernel"),
            locator=locator,
        )
    return Shape(attention=attention, linear=linear)


def _windows(architecture: str, told, layers: int) -> tuple[int | None, list[bool]]:
    """(tokens of the window, which layers have one)."""
    window, pattern = told("attention.sliding_window"), told("attention.sliding_window_pattern")
    if architecture == "llama4" and window != 0:
        return LLAMA4_CHUNK_TOKENS, [(i + 1) % LLAMA4_PATTERN != 0 for i in range(layers)]
    if not window:
        return None, [False] * layers
    if isinstance(pattern, list):
        return window, [bool(x) for x in pattern[:layers]]
    if isinstance(pattern, int) and pattern > 0:
        return window, [(i + 1) % pattern != 0 for i in range(layers)]
    raise ValueError(f"it has a sliding window of {window} tokens and does not tell which layers have it")


def bytes_read(tensors: Iterable[tuple[str, int]], active_experts: float, layers: int) -> int:
    """Bytes that decoding one token reads, from (name, bytes) of every tensor.

    All of them, but: of experts the active share; no vision tower and no layer for prediction ahead; of an
    embedding table one row (taken as nothing) where the output has a table of its own.
    """
    tensors = list(tensors)
    untied = any(HEAD.search(name) for name, _ in tensors)
    total = 0.0
    for name, size in tensors:
        block = re.match(r"blk\.(\d+)\.", name)
        ahead = block is not None and int(block[1]) >= layers
        if ahead or NOT_DECODED.search(name) or (untied and EMBEDDING.search(name)):
            continue
        total += size * (active_experts if EXPERT.search(name) else 1.0)
    return round(total)


def _of_gguf(path: Path) -> Shape:
    from gguf import GGUFReader  # half a second to import; only needed here

    shard = SHARD.search(path.name)
    parts = sorted(path.parent.glob(SHARD.sub(f"-*-of-{shard[1]}.gguf", path.name))) if shard else [path]
    try:
        readers = [GGUFReader(part) for part in parts]
        metadata = {
            name: f.contents() for name, f in readers[0].fields.items() if not name.startswith("tokenizer.")
        }
        tensors = [(t.name, int(t.n_bytes)) for reader in readers for t in reader.tensors]
    except (OSError, KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from None
    shape = of_metadata(metadata, f"metadata of {path.name}")
    prefix = metadata["general.architecture"]
    experts, used = (metadata.get(f"{prefix}.expert_{key}") for key in ("count", "used_count"))
    layers = metadata[f"{prefix}.block_count"] - metadata.get(f"{prefix}.nextn_predict_layers", 0)
    return _with_read(shape, tensors, used / experts if experts and used else 1.0, layers, path.name)


def _of_folder(path: Path) -> Shape:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        tensors = [t for file in sorted(path.glob("*.safetensors")) for t in _header(file)]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} has no readable config.json and safetensors: {error}") from None
    text = config.get("text_config") or config
    experts = text.get("num_local_experts") or text.get("num_experts") or text.get("n_routed_experts")
    used = text.get("num_experts_per_tok")
    share = used / experts if experts and used else 1.0
    return _with_read(of_config(config), tensors, share, text["num_hidden_layers"], "the safetensors")


def _header(file: Path) -> list[tuple[str, int]]:
    """(name, bytes) of every tensor: a safetensors file begins with the length of a JSON header, then has it."""
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > min(file.stat().st_size, 100_000_000):
            raise ValueError(f"{file.name} is no safetensors file")
        header = json.loads(opened.read(length))
    return [(n, t["data_offsets"][1] - t["data_offsets"][0]) for n, t in header.items() if n != "__metadata__"]


def _with_read(shape: Shape, tensors: list[tuple[str, int]], share: float, layers: int, of_what: str) -> Shape:
    size = bytes_read(tensors, share, layers)
    if not size:
        return shape
    return shape.model_copy(
        update={"read": Read(bytes_per_token=size, locator=f"sizes of the tensors of {of_what}")}
    )


def _needed(told: Mapping[str, Any], key: str):
    if told.get(key) is None:
        raise ValueError(f"it does not tell {key}")
    return told[key]
