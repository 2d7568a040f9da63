"""What llama-server's log tells: how a request got its slot, how it drafts, its cache, how it started.

Pure functions over the text of a log. The wording moves between builds; what is not told is None.
"""

import re
from itertools import pairwise


def request(text: str) -> dict | None:
    """How a request got its slot, in the log's words.

    `f_sim` is the longest common prefix by the new prompt's length, `f_keep` by the old length of what was
    taken: neither is a hit rate. `taken_from`: "slot", as another request left it; "prompt cache", read back
    from what --cache-ram keeps; None, nothing. `evicted`: prompts that had to leave that cache.
    """
    chosen = re.search(  # older builds say sim_best and sim
        r"selected slot by (LCP similarity|LRU)(?:.*?sim_best = (\d+(?:\.\d+)?).*?f_keep = (\d+(?:\.\d+)?))?",
        text,
        re.IGNORECASE,
    )
    if chosen is None:
        return None
    pair = r"f_keep = (\d+(?:\.\d+)?), (?:f_)?sim = (\d+(?:\.\d+)?)"  # an empty slot has -1 there
    loaded = re.search(f"found better prompt with {pair}", text)
    base = loaded or re.search(f"looking for better prompt, base {pair}", text)
    f_sim, f_keep = (base[2], base[1]) if base else (chosen[2], chosen[3])
    return {
        "selected_by": chosen[1],
        "taken_from": "prompt cache" if loaded else "slot" if chosen[2] else None,
        "f_sim": f_sim and float(f_sim),
        "f_keep": f_keep and float(f_keep),
        "evicted": len(re.findall(r"removing oldest entry", text)),
    }


def drafting(log: str) -> str | None:
    """The speculation that a server says it has set up, in the words of `speculation`, defaults included; None
    where its log does not tell, which it does from --log-verbosity 4 on."""
    kinds = re.findall(r"adding speculative implementation '([\w-]+)'\n.*? - ([^\n]*)", log)
    if not kinds:
        return "none" if "no implementations specified for speculative decoding" in log else None
    told = []
    for kind, line in kinds:
        sizes = re.findall(r"(\w+=[\w.]+)", line)
        if kind.startswith("draft-"):
            sizes = [size.replace("n_max=", "k=") for size in sizes if size.startswith("n_max=")]
        told.append(" ".join([kind, *sizes]))
    return " + ".join(told)


def kv_cache(log: str) -> dict | None:
    """The cache as allocated: `llama_kv_cache: size = 180.00 MiB (2048 cells, 30 layers, 4/4 seqs), K (f16): …, V
    (f16): …`, where behind the stroke stands how many times there are so many cells."""
    found = re.search(
        r"llama_kv_cache: size =\s*([\d.]+) MiB \(\s*(\d+) cells(?:, *\d+ layers, *\d+/(\d+) seqs)?"
        r".*?K \((\w+)\).*?V \((\w+)\)",
        log,
    )
    if found is None:
        return None
    return {"mib": float(found[1]), "cells": int(found[2]) * int(found[3] or 1), "k": found[4], "v": found[5]}


def found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match and match[1]


# Lines that begin a phase of the start; each phase ends where the next begins.
_BEGINS = [
    ("read metadata", "loading model '"),
    ("load tensors", "loading model tensors"),
    ("allocate KV cache", "constructing llama_context"),
    ("warm-up run", "warming up the model"),
    ("set up slots", "initializing, n_slots"),
    ("", "model loaded"),
]


def phases(log: str) -> list[tuple[str, float, float]]:
    """(name, start_s, end_s) after the process began to log; by the engine's own time stamps `m.ss.mmm.uuu`."""
    seen = []
    for line in log.splitlines():
        stamp = re.match(r"(\d+)\.(\d\d)\.(\d{3})\.(\d{3}) ", line)
        for name, words in _BEGINS:
            if stamp and words in line and name not in [n for n, _ in seen]:
                minutes, seconds, milli, micro = map(int, stamp.groups())
                seen.append((name, round(minutes * 60 + seconds + milli / 1e3 + micro / 1e6, 6)))
    return [(name, start, end) for (name, start), (_, end) in pairwise(seen)]
