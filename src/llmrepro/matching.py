"""Whether two spellings name one fact: a published condition against the one that was found."""

import re

# Measured, or rounded by whoever published: (share, amount) by which the two may lie apart.
NEAR = {
    "gpu_power_limit_w": (0.0, 1.0),
    "gpu_memory_clock_mhz": (0.01, 0.0),
    "gpu_memory_gib": (0.07, 0.0),  # makers count in GB, drivers keep some for themselves
    "memory_gib": (0.07, 0.0),
}
DTYPES = {
    **{"bf16": "bfloat16", "f16": "float16", "fp16": "float16", "half": "float16", "f32": "float32"},
    **{"fp8": "fp8_e4m3"},
}
# Words that a maker or a driver puts around a name without meaning another product by it.
PADDING = {
    *("nvidia", "geforce", "amd", "intel", "r", "tm", "cpu", "gpu", "processor", "core", "graphics", "edition"),
    *("workstation", "generation", "card", "accelerator"),
}
MODULES = {"in", "of", "x", "channel", "channels", "module", "modules", "mt", "s"}
SYSTEMS = {"os", "python", "cuda"}  # a published 24.04 is any 24.04.x
ALIKE = {"gpu_name", "cpu_model", "gpu_pcie", "speculation", "kv_dtype", "gpu_driver", "memory_speed", *SYSTEMS}


def same(name: str, published: object, here: object) -> bool:
    """Whether the condition `name` is the same on both sides, neither of them None."""
    if _is_number(published) and _is_number(here):
        share, amount = NEAR.get(name, (0.0, 0.0))
        return abs(published - here) <= max(abs(published) * max(share, 1e-9), amount)
    if name not in ALIKE or not (isinstance(published, str) and isinstance(here, str)):
        return published == here
    if name == "kv_dtype":
        return _dtypes(published) == _dtypes(here)
    wanted, found = _words(published), _words(here)
    if name == "cpu_model" and (model := _model(published)):  # EPYC 9175F, whatever stands around it
        return model <= _model(here)
    if name == "gpu_name":  # one word more is another card: Ti, Max-Q, Laptop
        sizes = [set(re.findall(r"\b(\d+)\s?gi?b\b", text.lower())) for text in (published, here)]
        if all(sizes) and sizes[0] != sizes[1]:
            return False
        bare = [_words(re.sub(r"(?i)\b\d+\s?gi?b\b", " ", text)) - PADDING for text in (published, here)]
        return bare[0] == bare[1]
    if name in SYSTEMS:
        return all(any(f == w or f.startswith(f"{w}.") for f in found) for w in wanted)
    return wanted - MODULES == found - MODULES if name == "memory_speed" else wanted == found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _dtypes(text: str) -> set[str]:
    """f16/f16 is what is published as FP16: keys and values have one type each."""
    return {DTYPES.get(part.strip(), part.strip()) for part in text.lower().split("/")}


def _model(text: str) -> set[str]:
    """The words of a processor's name, empty where none is a model's number: a bare AMD EPYC, as virtual machines
    call themselves, is no model, and neither a clock nor a count of cores makes it one. A v4 is part of a number.
    """
    text = re.sub(r"(?i)@.*|\b\d+[\s-]core\b|\b[\d.]+\s?[gm]hz\b", " ", text)
    words = _words(re.sub(r"(?i)(\d)\s+(v\d+)\b", r"\1\2", text)) - PADDING
    return words if any(re.search(r"\d{3}", word) for word in words) else set()


def _words(text: str) -> set[str]:
    """The words of a name, without case or punctuation: "DFlash2, k = 7" is "dflash2 k=7", "Gen 2" is "Gen2"."""
    text = re.sub(r"\s*=\s*", "=", text.lower())
    text = re.sub(r"\bpcie\b|\bpci express\b", " ", text)
    text = re.sub(r"\bgen\s+(\d)", r"gen\1", text)
    return {word for word in re.split(r"[\s,;()/@-]+", text) if word}
