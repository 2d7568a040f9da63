"""llama.cpp's adapter: arguments translated or refused, its log and API read as they are."""

import re
import subprocess
import sys
import textwrap

import pytest

from llmrepro.engines import EngineError, _llama_cpp_log, llama_cpp

NEW = frozenset({"--ctx-size", "--threads", "--load-mode", "--ui", "--no-ui", "--spec-draft-n-max", "-c"})
OLD = frozenset({"--ctx-size", "--threads", "--mlock", "--no-mmap", "--webui", "--no-webui", "--draft-max"})

# In the form that llama-server prints at verbosity 4.
LOG = """\
0.00.003.516 I srv          init: loading model
0.00.003.558 I srv    load_model: loading model '/w/m.gguf'
0.00.001.586 I cmn  common_param: system_info: n_threads = 3 (n_threads_batch = 3) / 4 | CPU : AVX2 = 1 |
0.00.241.744 I load_tensors: loading model tensors, this can take a while... (load_mode = mmap)
0.00.285.797 I llama_context: constructing llama_context
0.00.381.770 I llama_kv_cache: size =  137.81 MiB (  8192 cells,  30 layers,  1/1 seqs), K (q8_0):   47.81 MiB, \
V (f16):   90.00 MiB
0.00.384.210 I cmn  common_init_: warming up the model with an empty run - please wait ... (--no-warmup to disable)
0.01.428.555 I srv    load_model: initializing, n_slots = 1, n_ctx_slot = 8192, kv_unified = 'false'
1.02.430.631 I srv          init: model loaded
"""


@pytest.mark.parametrize(
    ("args", "known", "adapted"),
    [
        (["--mlock", "--ctx-size", "512"], NEW, ["--load-mode", "mmap+mlock", "--ctx-size", "512"]),
        (["--no-mmap"], NEW, ["--load-mode", "none"]),
        (["--load-mode", "mmap+mlock"], OLD, ["--mlock"]),
        (["--load-mode", "none", "--threads", "-1"], OLD, ["--no-mmap", "--threads", "-1"]),
        (["--draft-max", "3"], NEW, ["--spec-draft-n-max", "3"]),
        (["--no-ui"], OLD, ["--no-webui"]),
    ],
)
def test_renamed_flags_are_translated_both_ways_and_told(args, known, adapted):
    found, told = llama_cpp.adapt(args, known)
    assert found == adapted
    assert len(told) == 1
    assert told[0].endswith("in this build")


def test_what_needs_no_translation_is_left_alone():
    assert llama_cpp.adapt(["-c", "512", "--threads", "2"], NEW) == (["-c", "512", "--threads", "2"], [])


@pytest.mark.parametrize("args", [["--flash-atn", "on"], ["--load-mode", "dio"]])
def test_a_flag_that_no_build_maps_is_refused_by_name(args):
    with pytest.raises(EngineError, match=f"has no argument '{args[0]}'"):
        llama_cpp.adapt(args, OLD)


def test_phases_follow_the_engines_own_clock():
    assert _llama_cpp_log.phases(LOG) == [
        ("read metadata", 0.003558, 0.241744),
        ("load tensors", 0.241744, 0.285797),
        ("allocate KV cache", 0.285797, 0.38421),
        ("warm-up run", 0.38421, 1.428555),
        ("set up slots", 1.428555, 62.430631),
    ]


def test_what_a_server_tells_is_read_back():
    props = {
        "default_generation_settings": {"n_ctx": 8192},
        "total_slots": 1,
        "model_ftype": "Q4_1",
        "build_info": "b0-unknown",
    }
    seen = llama_cpp.observe({"/props": props}.get, LOG)
    assert seen["effective"] == {
        "context_tokens": 8192,
        "slots": 1,
        "quantization": "Q4_1",
        "build": "b0-unknown",
        "threads": 3,
        "load_mode": "mmap",
        "kv_dtype": "q8_0/f16",
    }
    assert seen["metrics"] == {"kv_bytes_per_token": round(137.81 * 2**20 / 8192)}


def test_what_is_not_told_is_left_out_and_never_nought():
    seen = llama_cpp.observe(lambda path: None, "")
    assert seen == {"effective": {}, "phases": [], "metrics": {}}


FAKE_XLLAMACPP = """
class _Enum:
    def __getattr__(self, name): return name
llama_flash_attn_type = llama_load_mode = ggml_type = _Enum()
class common_speculative_type:
    COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE, COMMON_SPECULATIVE_TYPE_NGRAM_MAP_K = "simple", "map-k"
class _Any:
    pass
class CommonParams:
    def __init__(self):
        self.model, self.cpuparams, self.cpuparams_batch = _Any(), _Any(), _Any()
        self.model.path = self.cpuparams.n_threads = self.cpuparams_batch.n_threads = None
        self.n_ctx = self.hostnames = self.port = self.load_mode = self.flash_attn_type = self.api_keys = None
        self.endpoint_metrics = self.cache_type_k = self.model_alias = None
        self.speculative = _Any()
        self.speculative.types = []
        self.speculative.ngram_simple = _Any()
        self.speculative.ngram_simple.size_n = self.speculative.ngram_simple.size_m = 12
class Server:
    def __init__(self, params):
        import json, sys
        print(json.dumps(params.__dict__, default=lambda v: sorted(v) if isinstance(v, set) else v.__dict__))
        sys.stdout.flush(); sys.exit(0)
"""


# One request each, in the wordings of several builds.
STAMP = "0.08.483.504 I "
BY_PREFIX = f"{STAMP}slot get_availabl: id  0 | task -1 | selected slot by LCP similarity, "
LOADED = f"{STAMP}srv          load:  - found better prompt with f_keep = 0.985, f_sim = 0.987\n"
LRU = (
    f"{STAMP}slot get_availabl: id  0 | task -1 | selected slot by LRU, t_last = 12028553025\n"
    f"{STAMP}srv          load:  - looking for better prompt, base f_keep = 0.002, f_sim = 0.003\n"
)
ROOM = "W srv         alloc:  - making room for prompt cache entry, removing oldest entry (size = 10.421 MiB)\n"


@pytest.mark.parametrize(
    ("log", "told"),
    [
        (BY_PREFIX + "f_sim_best = 0.996 (> 0.100 thold), f_keep = 0.790\n", ("slot", 0.996, 0.79, 0)),
        (BY_PREFIX + "sim_best = 0.996 (> 0.100 thold), f_keep = 0.790\n", ("slot", 0.996, 0.79, 0)),
        (LRU + ROOM + ROOM, (None, 0.003, 0.002, 2)),
        (LRU + LOADED, ("prompt cache", 0.987, 0.985, 0)),
        (LRU + LOADED.replace("f_sim", "sim"), ("prompt cache", 0.987, 0.985, 0)),
        (LRU.splitlines()[0], (None, None, None, 0)),
    ],
)
def test_what_the_log_says_of_a_requests_slot(log, told):
    found = llama_cpp.request_log(f"something before\n{log}something after\n")
    assert (found["taken_from"], found["f_sim"], found["f_keep"], found["evicted"]) == told


def test_a_log_without_a_slot_says_nothing():
    assert llama_cpp.request_log(f"{STAMP}srv  update_slots: all slots are idle\n") is None


def test_prompt_tokens_are_counted_with_those_from_the_cache():
    page = (
        "# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.\n"
        "# TYPE llamacpp:prompt_tokens_total counter\nllamacpp:prompt_tokens_total 2823\n"
        "# TYPE llamacpp:prompt_tokens_cached_total counter\nllamacpp:prompt_tokens_cached_total 2334\n"
    )
    counted = llama_cpp.counters({"/metrics": page}.get)
    assert (counted["prefix_queries_tokens"], counted["prefix_hits_tokens"]) == (2823 + 2334, 2334)
    assert llama_cpp.counters({}.get) == {}, "a server without --metrics counts nothing"
    assert llama_cpp.counters({"/metrics": page.split("# TYPE llamacpp:prompt_tokens_cached")[0]}.get) == {}


def test_memory_that_could_not_be_locked_is_told():
    refused = "0.00.359.353 W warning: failed to mlock 31866880-byte buffer (after previously locking 0 bytes): "
    effective = llama_cpp.observe({}.get, f"{refused}Cannot allocate memory\nTry increasing RLIMIT_MEMLOCK")[
        "effective"
    ]
    assert effective["memory_lock"].startswith("failed to mlock 31866880-byte buffer")
    assert "memory_lock" not in llama_cpp.observe({}.get, "load_tensors: (load_mode = mmap+mlock)")["effective"]


@pytest.fixture
def launcher(tmp_path):
    """The launcher against an xllamacpp that prints the parameters it was given."""
    (tmp_path / "xllamacpp.py").write_text(textwrap.dedent(FAKE_XLLAMACPP))

    def run(*args):
        return subprocess.run(
            [sys.executable, llama_cpp.LAUNCHER, *args],
            capture_output=True,
            text=True,
            check=False,
            env={"PYTHONPATH": str(tmp_path), "LLAMA_API_KEY": "secret", "PATH": "/usr/bin:/bin"},
        )

    return run


def test_the_launcher_owns_one_mapping_from_llama_servers_names(launcher):
    shown = launcher(
        "--model",
        "/w",
        "-c",
        "512",
        "--threads",
        "2",
        "--load-mode",
        "mmap+mlock",
        "--flash-attn",
        "on",
        "--cache-type-k",
        "q8_0",
        "--metrics",
        "--host",
        "127.0.0.1",
        "--port",
        "7",
        "--alias",
        "a/b",
        "--spec-type",
        "ngram-simple,ngram-map-k",
        "--spec-ngram-simple-size-n",
        "4",
    )
    assert shown.returncode == 0, shown.stderr
    for said in (
        '"model": {"path": "/w"}',
        '"n_ctx": 512',
        '"cpuparams": {"n_threads": 2}',
        '"cpuparams_batch": {"n_threads": 2}',
        '"load_mode": "LLAMA_LOAD_MODE_MMAP_MLOCK"',
        '"flash_attn_type": "LLAMA_FLASH_ATTN_TYPE_ENABLED"',
        '"cache_type_k": "GGML_TYPE_Q8_0"',
        '"endpoint_metrics": true',
        '"hostnames": ["127.0.0.1"]',
        '"port": 7',
        '"api_keys": ["secret"]',
        '"model_alias": ["a/b"]',
        '"speculative": {"types": ["simple", "map-k"], "ngram_simple": {"size_n": 4, "size_m": 12}}',
    ):
        assert said in shown.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--nonsense", "3"), "unrecognized arguments: --nonsense"),
        (("--model", "/w", "--thread", "3"), "unrecognized arguments: --thread"),  # no abbreviations
        (("--model", "/w", "--load-mode", "fast"), "invalid choice: 'fast'"),
        (("--model", "/w", "--ubatch-size", "3"), "this xllamacpp has no parameter n_ubatch"),
        (("--model", "/w", "--spec-type", "ngram-simple,oracle"), "no speculation called 'oracle'"),
    ],
)
def test_the_launcher_refuses_what_it_lacks(launcher, args, said):
    shown = launcher(*args)
    assert shown.returncode != 0
    assert said in shown.stderr


def test_the_launchers_help_lists_its_flags(launcher):
    shown = launcher("--help")
    assert {"--ctx-size", "--load-mode", "--no-ui"} <= set(re.findall(r"--[a-z][a-z0-9-]*", shown.stdout))


def test_several_slots_share_the_cache_and_the_context_evenly():
    """As build 2026.10.11549 logs and tells it for --ctx-size 8192 --parallel 4."""
    log = (
        "llama_kv_cache: size =  180.00 MiB (  2048 cells,  30 layers,  4/4 seqs), K (f16):   90.00 MiB, "
        "V (f16):   90.00 MiB\n"
    )
    told = llama_cpp.observe(lambda path: None, log)
    assert told["metrics"]["kv_bytes_per_token"] == 23040
    args = ["--ctx-size", "8192", "--parallel", "4"]
    same = llama_cpp.settings(args, {"context_tokens": 2048, "slots": 4})
    assert ("context_tokens", 8192, 8192) in same
    other = llama_cpp.settings(args, {"context_tokens": 1024, "slots": 4})
    assert ("context_tokens", 8192, 1024) in other
