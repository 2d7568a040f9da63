"""The shape of a checkpoint, from config.json, from GGUF metadata and from tensors' names and sizes."""

import json
import struct

import gguf
import numpy as np
import pytest
from test_capacity import QWEN, SCOUT, SMOLLM

from llmrepro import checkpoint

QWEN_GGUF = {
    "general.architecture": "qwen35",
    "qwen35.block_count": 65,
    "qwen35.nextn_predict_layers": 1,
    "qwen35.embedding_length": 5120,
    "qwen35.attention.head_count": 24,
    "qwen35.attention.head_count_kv": 4,
    "qwen35.attention.key_length": 256,
    "qwen35.attention.value_length": 256,
    "qwen35.full_attention_interval": 4,
    "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.state_size": 128,
    "qwen35.ssm.group_count": 16,
    "qwen35.ssm.inner_size": 6144,
    "qwen35.ssm.time_step_rank": 48,
}
SCOUT_GGUF = {
    "general.architecture": "llama4",
    "llama4.block_count": 48,
    "llama4.embedding_length": 5120,
    "llama4.attention.head_count": 40,
    "llama4.attention.head_count_kv": 8,
    "llama4.attention.key_length": 128,
    "llama4.attention.value_length": 128,
}


def plain(shape):
    return shape.model_dump(
        exclude_none=True, exclude={"attention": {"locator"}, "linear": {"locator", "state_dtype"}}
    )


@pytest.mark.parametrize("config,metadata", [(QWEN, QWEN_GGUF), (SCOUT, SCOUT_GGUF)])
def test_a_gguf_and_a_config_of_one_model_have_one_shape(config, metadata):
    assert plain(checkpoint.of_metadata(metadata)) == plain(checkpoint.of_config(config))


def test_scouts_pattern_may_be_left_to_the_architecture():
    assert plain(checkpoint.of_config({**SCOUT, "no_rope_layers": []})) == plain(checkpoint.of_config(SCOUT))


def test_layer_types_go_before_every_pattern():
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    found = checkpoint.of_config({**SMOLLM, "num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 512})
    assert (found.attention.full_layers, found.attention.windowed_layers) == (1, 2)
    assert (found.attention.window, found.attention.window_tokens) == ("sliding", 512)


def test_a_window_that_is_switched_off_is_none():
    found = checkpoint.of_config({**SMOLLM, "sliding_window": 4096, "use_sliding_window": False})
    assert found.attention.windowed_layers == 0 and not found.hybrid


@pytest.mark.parametrize(
    "config,said",
    [
        ({**SMOLLM, "kv_lora_rank": 512}, "latent"),
        ({**SMOLLM, "layer_types": ["full_attention"] * 29 + ["mamba"]}, "'mamba' are not accounted"),
        ({"num_attention_heads": 9}, "num_hidden_layers"),
    ],
)
def test_what_is_kept_otherwise_is_refused_and_not_guessed(config, said):
    with pytest.raises(ValueError, match=said):
        checkpoint.of_config(config)


def test_a_window_without_its_layers_is_refused():
    other = {name.replace("llama4.", "other."): value for name, value in SCOUT_GGUF.items()}
    told = {**other, "general.architecture": "other", "other.attention.sliding_window": 512}
    with pytest.raises(ValueError, match="which layers"):
        checkpoint.of_metadata(told)
    found = checkpoint.of_metadata({**told, "other.attention.sliding_window_pattern": 6})
    assert (found.attention.full_layers, found.attention.windowed_layers) == (8, 40)


def test_layers_without_kv_heads_are_linear():
    found = checkpoint.of_metadata({**QWEN_GGUF, "qwen35.attention.head_count_kv": [0, 0, 0, 4] * 16 + [4]})
    assert plain(found) == plain(checkpoint.of_config(QWEN))


TENSORS = [
    ("token_embd.weight", 1000),
    ("blk.0.attn_q.weight", 100),
    ("blk.0.ffn_down_exps.weight", 1600),
    ("blk.0.ffn_down_shexp.weight", 100),
    ("blk.1.nextn.eh_proj.weight", 70),
    ("output.weight", 500),
]


def test_a_token_reads_active_experts_and_no_table_it_looks_one_row_up_in():
    assert checkpoint.bytes_read(TENSORS, 1 / 16, layers=1) == 100 + 100 + 100 + 500


def test_a_tied_table_is_read_whole():
    assert checkpoint.bytes_read(TENSORS[:2], 1.0, layers=1) == 1100


def test_towers_and_layers_ahead_are_not_read():
    names = ("model.visual.blocks.0.w", "model.mtp.layers.0.w", "vision_tower.w", "model.layers.0.mlp.w")
    assert checkpoint.bytes_read([(name, 10) for name in names], 1.0, layers=1) == 10


def test_a_folder_tells_its_shape_and_what_a_token_reads(tmp_path):
    config = {**SMOLLM, "num_experts": 4, "num_experts_per_tok": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "model.layers.0.mlp.experts.0.w": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]},
            "lm_head.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [8, 16]},
        }
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    found = checkpoint.of(tmp_path)
    assert found.attention.kv_heads == 3
    assert found.read.bytes_per_token == 2 + 8


def test_a_gguf_file_tells_its_shape_and_what_a_token_reads(tmp_path):
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_tensor("token_embd.weight", np.zeros((10, 64), np.float16))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((64, 64), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = checkpoint.of(path)
    assert (found.attention.full_layers, found.attention.kv_heads, found.attention.head_dim) == (2, 2, 16)
    assert found.read.bytes_per_token == (10 + 64) * 64 * 2
    assert checkpoint.told(path)["shape"]["attention"]["locator"] == "metadata of small.gguf"


def test_what_is_no_checkpoint_is_told_and_stops_nothing(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    assert "not a readable GGUF" in checkpoint.told(tmp_path / "x.gguf")["shape_unknown"]
    assert "config.json" in checkpoint.told(tmp_path)["shape_unknown"]
