"""Make safetensors of a GGUF file: dequantized by transformers, cast, saved, and checked against the file itself.

Runs inside an engine's environment, where torch, transformers, gguf and safetensors are::

    python -I _gguf_to_safetensors.py MODEL.gguf FOLDER bfloat16
"""

import hashlib
import sys
from collections import Counter
from pathlib import Path

import torch
from gguf import GGUFReader, dequantize
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write model.safetensors, config and tokenizer with its chat template into `folder`."""
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    )
    model.hf_quantizer = None  # transformers still takes the dense model for a GGUF one, and would not save it
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def check(source: Path, folder: Path, dtype: torch.dtype) -> int:
    """Number of tensors, each of which holds exactly the rows of one tensor of the GGUF, in any order.

    Dequantized here a second time, by gguf's own code. The order of rows differs in the attention's q and k,
    which GGUF keeps in another layout. Exits with a sentence when a tensor is missing, added or different.
    """
    wanted = Counter(
        _rows(torch.from_numpy(dequantize(t.data, t.tensor_type).copy()).to(dtype))
        for t in GGUFReader(source).tensors
        if not t.name.startswith("rope_")
    )
    found = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update(_rows(file.get_tensor(name)) for name in file.offset_keys())
    if wanted != found:
        sys.exit(
            f"{(wanted - found).total()} of {wanted.total()} tensors of {source.name} are not in what was made "
            f"of it, and {(found - wanted).total()} there are not in it: this transformers converts it wrongly; "
            "pin another in the recipe's engine.in"
        )
    return found.total()


def _rows(tensor: torch.Tensor) -> str:
    """A digest of a tensor's rows that is the same for every order of them."""
    rows = tensor.contiguous().view(torch.uint8).reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1).numpy()
    digests = sorted(hashlib.sha256(row.tobytes()).digest() for row in rows)
    return hashlib.sha256(b"".join(digests)).hexdigest() + f" {tuple(tensor.shape)}"


if __name__ == "__main__":
    torch.set_num_threads(1)  # spinning threads on a small machine cost more than they give
    source, folder, dtype = Path(sys.argv[1]), Path(sys.argv[2]), getattr(torch, sys.argv[3])
    convert(source, folder, dtype)
    print(f"{check(source, folder, dtype)} tensors, each equal to the file's")
