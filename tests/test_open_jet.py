"""open-jet: built from two checkouts, asked only what it can answer, and read as it speaks."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import open_jet_server
import pytest
import requests

from llmrepro import asker, environment, guard, jobs, parameters, results, run_folder, workloads
from llmrepro import run as runs
from llmrepro.client import Question, Record, ask
from llmrepro.engines import EngineError, open_jet
from llmrepro.install import Install
from llmrepro.metrics import decode_tps_server
from llmrepro.recipe import Server, validated
from llmrepro.server import free_port
from llmrepro.workload import Workload

COMMIT = "1" * 40
INSTALL = {
    "kind": "git",
    "pins": {"jinja2": "3.1.6"},
    "checkouts": [
        {"name": "open-jet", "repo": "https://github.com/L-Forster/open-jet", "commit": COMMIT},
        {"name": "llama.cpp", "repo": "https://github.com/ggml-org/llama.cpp", "commit": COMMIT},
    ],
    "build": {"ARCH": "sm_80"},
}
TEXTS = {
    "hello": "Say hello to the person who sits beside you and ask what they are reading today",
    "count": "Count the boats in the harbour and say which of them has the oldest sail of all",
    "warm": "Name a tree",
    "long": "word " * 400,
}
# As the real server of 0.5.1 prints them, its numbers made up.
LOG = """\
[mk] MTP draft head restricted to 32768 tokens (/w/draft_vocab_32k.bin)
[mk] token_embd in mapped host memory (0.72 GB)
[mk] KV cache fp16, 4.56 GB for 65536 positions
[mk] weights 16.72 GB on device, 74 SMs, ctx 65536, n_draft 4
[mk-server] ready in 6.3 s: Qwen3.8-27B-Q4_K_M.gguf, ctx 65536, 4 drafts
[mk-server] listening on http://127.0.0.1:18080
[mk-server] prompt 35 tok (0 reused) in 0.13 s, 273 tok in 2.12 s (128.8 tok/s), stop
[mk-server] prompt 35 tok (20 reused) in 0.05 s, 512 tok in 4.81 s (106.4 tok/s), length
"""


def install(**changes) -> Install:
    return Install.model_validate({**INSTALL, **changes})


def prompt(name: str, key: str = "id") -> dict:
    text = TEXTS[name]
    return {key: name, "file": f"{name}.txt", "sha256": hashlib.sha256(text.strip().encode()).hexdigest()}


def workload(name: str, **changes) -> dict:
    return {
        "id": name,
        "kind": "chat",
        "on": ["d4"],
        "prompts": [prompt("hello"), prompt("count")],
        "warmup": prompt("warm"),
        "max_tokens": 64,
        "repeats": 2,
        **changes,
    }


def recipe(*asked: dict, args=("-c", "4096", "-d", "4")) -> dict:
    return {
        "id": "qwen3.8-27b/here",
        "title": "t",
        "question": "q",
        "engine": {"name": "open-jet", "version": "1", "install": INSTALL},
        "model": {
            "source": "huggingface",
            "repo": "a/b",
            "revision": COMMIT,
            "files": [{"path": "m.gguf"}],
            "format": "gguf",
        },
        "servers": [{"id": "d4", "args": list(args)}],
        "workloads": list(asked),
    }


@pytest.fixture
def place(tmp_path):
    """An environment as it lies when it is complete, with the stand-in where the server is."""
    place = tmp_path / "environment"
    server = place / "source/open-jet/megakernel/server/mk_server.py"
    for folder in (server.parent, place / "bin"):
        folder.mkdir(parents=True)
    (place / "bin/python").symlink_to(sys.executable)
    shutil.copyfile(open_jet_server.__file__, server)
    return place


@pytest.fixture
def measured(tmp_path, place):
    """Runs the workloads of a recipe against the stand-in, through all that a live run uses."""
    weights = tmp_path / "m.gguf"
    weights.write_bytes(b"x" * 4096)
    made = []

    def measure(*asked, **changes):
        folder = tmp_path / "recipe"
        folder.mkdir(exist_ok=True)
        for name, text in TEXTS.items():
            (folder / f"{name}.txt").write_text(text.strip() + "\n")
        (folder / "recipe.json").write_text(json.dumps(recipe(*asked, **changes)))
        asked_for = {"recipe": str(folder), "trust": True, "runs_dir": str(tmp_path / "runs")}
        run = runs.create(parameters.checked(asked_for))
        made.append(run)
        run.write_json("machine.json", {})
        run.set_status("running", "measure")
        workloads.measure(run, place, weights)
        records = [Record.model_validate(r) for r in run_folder.read_lines(run.path / "records.jsonl")]
        return run, [r for r in records if not r.warmup]

    yield measure
    for run in made:
        run.close()


def test_a_run_is_measured_through_its_api_and_told_what_it_did(measured):
    run, records = measured(workload("greedy", thinking=False), workload("think", thinking=True))
    assert [r.status for r in records] == ["ok"] * 8
    greedy = [r for r in records if r.workload == "greedy"]
    assert {r.finish_reason for r in records} == {"stop"}
    assert {(r.output_tokens, r.output_tokens_source) for r in greedy} == {(41, "usage")}  # its end token counts
    assert {r.request["temperature"] for r in records} == {0.0}
    for r in records:
        assert r.timings["predicted_n"] == r.output_tokens
        assert r.cached_tokens == r.prompt_tokens - r.timings["prompt_n"]
        assert decode_tps_server(r) == pytest.approx((r.output_tokens - 1) / r.timings["predicted_ms"] * 1e3)
    thought = [r for r in records if r.workload == "think"]
    assert all(r.reasoning.split() == open_jet_server.THOUGHTS for r in thought)
    assert all(r.text.startswith(open_jet_server.WORDS[len(open_jet_server.THOUGHTS) + 1]) for r in thought)
    assert not any(r.reasoning for r in greedy)
    boot = runs.boots(run.path)[1]
    assert boot["effective"] == {
        "context_tokens": 4096,
        "slots": 1,
        "draft_tokens": 4,
        "speculation": "mtp d=4",
        "kv_dtype": "f16",
        "multiprocessors": 74,
        "reused_tokens": 0,
    }
    assert boot["metrics"]["memory.weights_gib"] == round(16.72e9 / 2**30, 2)
    assert boot["startup"]["startup.first_completion_s"] > open_jet_server.LOAD_S
    assert "open-jet knows no API key" in boot["adaptations"][0]
    command = " ".join(boot["command"])
    assert "-c 4096 -d 4 -m " in command
    assert command.endswith(f"--host 127.0.0.1 --port {command.rpartition(' ')[2]}")
    assert results.compute(run.path)["flags"] is not None


def test_what_would_be_built_is_shown_before_it_is_trusted(tmp_path):
    data = recipe(workload("greedy"))
    data["engine"]["fixes"] = [
        {
            "name": "patch-package",
            "package": "jinja2",
            "patches": [
                {"source": {"repo": "https://github.com/a/p", "commit": COMMIT, "path": "patches/*.patch"}}
            ],
        }
    ]
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text.strip() + "\n")
    (tmp_path / "recipe.json").write_text(json.dumps(data))
    with pytest.raises(run_folder.RunError, match="not from this kit") as waits:
        runs.create(parameters.checked({"recipe": str(tmp_path), "runs_dir": str(tmp_path / "runs")}))
    for named in (
        "jinja2 3.1.6",
        f"https://github.com/ggml-org/llama.cpp at {COMMIT}",
        "patches/*.patch of https",
    ):
        assert named in str(waits.value)


def test_what_it_cannot_be_asked_is_skipped_with_its_reason_and_the_rest_is_asked(measured):
    _, records = measured(
        workload("greedy", thinking=False, repeats=1),
        workload("fixed", ignore_eos=True, repeats=1),
        workload("old", endpoint="/v1/completions", repeats=1),
        workload("lengths", kind="prefill", prompts=[], lengths=[64, 128], text=prompt("long"), repeats=1),
    )
    told = {(r.workload, r.status, r.error) for r in records}
    assert told == {
        ("greedy", "ok", None),
        ("fixed", "skipped", open_jet.impossible(validated_workload("fixed", ignore_eos=True))),
        ("old", "skipped", "open-jet answers /v1/chat/completions only, and old is asked at /v1/completions"),
        (
            "lengths",
            "skipped",
            "open-jet counts the tokens of no text, and lengths needs prompts of exact lengths",
        ),
    }


def validated_workload(name: str, **changes) -> Workload:
    return validated(recipe(workload(name, **changes)), "here").workloads[0]


def test_ignore_eos_is_refused_in_words():
    assert "has no ignore_eos, and the lengths of fixed rest on it" in open_jet.impossible(
        validated_workload("fixed", ignore_eos=True)
    )
    assert open_jet.impossible(validated_workload("greedy")) is None


def test_a_repeated_prompt_meets_no_cache(measured):
    told = {"protocol": "prompt_by_prompt", "repeats": 3, "thinking": False}
    _, records = measured(workload("greedy", prompts=[prompt("hello")], **told))
    assert [(r.cached_tokens, r.timings["prompt_n"]) for r in records] == 3 * [(0, records[0].prompt_tokens)]


def test_a_prompt_beyond_the_context_is_told_and_the_server_lives_on(measured):
    _, records = measured(workload("long", prompts=[prompt("long"), prompt("hello")]), args=("-c", "256"))
    assert [(r.case, r.status) for r in records] == 2 * [("long", "context_overflow"), ("hello", "ok")]
    assert "does not fit the context of 256" in records[0].error


def test_an_answer_that_the_context_cuts_is_an_early_stop(measured):
    _, (record, *_) = measured(workload("cut", prompts=[prompt("hello")], thinking=False), args=("-c", "64"))
    assert (record.status, record.finish_reason) == ("early_stop", "length")
    assert record.output_tokens == 64 - 16 - record.prompt_tokens


@pytest.fixture
def server(tmp_path, place):
    """The stand-in alone, for what a run does not ask."""
    port = free_port()
    (tmp_path / "m.gguf").write_bytes(b"x")
    argv = [*open_jet._start(place, "open-jet"), "-m", str(tmp_path / "m.gguf"), "--port", str(port)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            with pytest.raises(requests.ConnectionError):  # while it loads nothing listens
                requests.get(f"http://127.0.0.1:{port}/health", timeout=1)
            for line in process.stderr:
                if "listening" in line:
                    break
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def test_the_finish_chunk_carries_timings_and_the_usage_comes_after_it(server):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    said = requests.post(
        f"{server}/v1/chat/completions",
        json={**body, "stream": True, "stream_options": {"include_usage": True}},
        timeout=10,
    ).text
    *events, done = [line[6:] for line in said.splitlines() if line]
    events = [json.loads(e) for e in events]
    assert done == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    finish, usage = events[-2:]
    assert finish["choices"][0]["finish_reason"] == "length"
    assert finish["timings"]["predicted_n"] == usage["usage"]["completion_tokens"] == 12
    assert usage["choices"] == []
    assert "usage" not in finish
    record = ask(server, Question("/v1/chat/completions", body))
    assert (record.status, record.output_tokens, record.timings["predicted_n"]) == ("ok", 12, 12)
    assert record.reasoning.split() == open_jet_server.THOUGHTS
    assert requests.post(f"{server}/tokenize", json={"content": "x"}, timeout=10).status_code == 404


def test_what_goes_on_from_the_last_request_is_told_as_cached(server):
    def asked(*said: str):
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
        body = {"messages": messages, "temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
        return ask(server, Question("/v1/chat/completions", body))

    first = asked("What is the sea?")
    second = asked("What is the sea?", first.text, "And a lake?")
    third = asked("Something else")
    assert [first.cached_tokens, third.cached_tokens] == [0, 0]
    assert second.cached_tokens == first.prompt_tokens + first.output_tokens
    assert second.timings["prompt_n"] == second.prompt_tokens - second.cached_tokens


@pytest.mark.parametrize(
    ("sampling", "sent", "told"),
    [
        ({"temperature": 0.0, "top_k": 0}, 32, []),  # greedy: nothing is chosen from
        ({"temperature": 1.0, "top_k": 20}, 20, []),
        ({"temperature": 1.0, "top_k": 0}, 32, ["think: no top_k is top_k 32 here, the most that open-jet"]),
        ({"temperature": 1.0, "top_k": 40}, 32, ["think: top_k 40 is top_k 32 here, the most that open-jet"]),
    ],
)
def test_no_default_of_the_servers_decides_and_a_limit_of_it_is_told(sampling, sent, told):
    asked = validated_workload("think", sampling=sampling)
    body = open_jet.request({"ignore_eos": True, **asked.sampling.model_dump(exclude={"seeds"})}, cache="off")
    assert body == {"temperature": sampling["temperature"], "top_p": 1.0, "top_k": sent, "min_p": 0.0, "seed": 0}
    assert [s[: len(t)] for s, t in zip(open_jet.adapted(asked), told, strict=True)] == told
    assert open_jet.request({}, cache="on") == {"temperature": 0.0, "top_k": 32}


def test_what_its_log_and_api_tell():
    found = open_jet.observe(lambda path: None, LOG)
    assert found["effective"] == {
        "context_tokens": 65536,
        "draft_tokens": 4,
        "speculation": "mtp d=4",
        "kv_dtype": "f16",
        "multiprocessors": 74,
        "reused_tokens": 20,
    }
    assert found["metrics"] == {"memory.weights_gib": 15.57, "memory.kv_gib": 4.25, "kv_tokens": 65536}
    assert found["phases"] == [("load weights, allocate KV cache, warm up", 0.0, 6.3)]
    plain = open_jet.observe(lambda path: None, LOG.replace("n_draft 4", "n_draft 0").replace("fp16", "q8_0"))
    assert (plain["effective"]["speculation"], plain["effective"]["kv_dtype"]) == ("none", "q8_0")
    assert open_jet.observe(lambda path: None, "") == {"effective": {}, "phases": [], "metrics": {}}
    asked = open_jet.settings(["-c", "32768", "--draft", "3", "--kv", "f16"], found["effective"])
    assert asked == [("context_tokens", 32768, 65536), ("draft_tokens", 3, 4)]


def launch(place: Path, *args: str):
    server = Server(id="d4", args=list(args))
    given = {"alias": "a", "port": 7, "api_key": "k", "threads": 1}
    return open_jet.launch(place, install(), server, Path("/w/m.gguf"), **given)


def test_its_library_is_found_where_it_lies_now(place, monkeypatch):
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert launch(place).env == {"LD_LIBRARY_PATH": f"{place}/source/llama.cpp/build/bin"}
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/cuda/lib64")
    assert launch(place).env["LD_LIBRARY_PATH"].endswith("/build/bin:/opt/cuda/lib64")
    assert "k" not in launch(place).argv  # it knows no key


@pytest.mark.parametrize("args", [["--nothing"], ["--ct", "512"], ["-x"]])
def test_an_argument_that_the_installed_server_has_not_is_refused_whole_or_short(place, args):
    with pytest.raises(EngineError, match=f"has no argument '{args[0]}'"):
        launch(place, *args)
    assert launch(place.with_name("not-here"), *args).argv[2:4] == [*args, "-m"][:2]  # as written: nobody to ask


@pytest.mark.parametrize("args", [["--lib=/x.so"], ["--li", "/x.so"], ["--draft-vocab", "/x.bin"], ["--dra", "3"]])
def test_a_recipe_may_not_say_what_library_or_vocabulary_is_loaded(place, args):
    with pytest.raises(ValueError, match="would load, serve or write something|can be read as short for"):
        launch(place, *args)


def test_its_own_names_may_be_used(place):
    assert launch(place, "--draft", "0", "--ctx=512", "--kv", "f16").argv[2:6] == [
        "--draft",
        "0",
        "--ctx=512",
        "--kv",
    ]


def test_it_is_built_as_the_study_built_it(tmp_path, monkeypatch):
    monkeypatch.setattr(open_jet, "which", lambda command: f"/opt/cuda/bin/{command}")
    cmake, build, make = open_jet.build(tmp_path / "source", tmp_path, install())
    assert cmake[1:5] == ["-S", "llama.cpp", "-B", "llama.cpp/build"]
    wanted = (
        "GGML_CUDA=ON CMAKE_CUDA_ARCHITECTURES=80 CMAKE_BUILD_TYPE=Release LLAMA_CURL=OFF LLAMA_BUILD_TESTS=OFF"
    )
    assert {f"-D{word}" for word in wanted.split()} <= set(cmake)
    assert "-DCMAKE_CUDA_COMPILER=/opt/cuda/bin/nvcc" in cmake
    assert build[-2:] == ["--target", "llama"]
    assert make[1:] == [
        "-C",
        "open-jet/megakernel",
        "ARCH=sm_80",
        "LLAMA=../../llama.cpp",
        "NVCC=/opt/cuda/bin/nvcc",
    ]
    with pytest.raises(EngineError, match="its path must hold neither blanks nor"):
        open_jet.build(tmp_path / "a b", tmp_path, install())


@pytest.mark.parametrize(
    "changes",
    [{"checkouts": INSTALL["checkouts"][:1]}, {"build": {}}, {"kind": "wheel", "checkouts": [], "build": {}}],
)
def test_a_recipe_that_says_too_little_to_build_it_is_refused(tmp_path, changes):
    with pytest.raises(EngineError, match=r"built from git: .* two `checkouts`.* `build` with ARCH"):
        open_jet.build(tmp_path, tmp_path, install(**changes))


def test_without_nvcc_it_says_what_building_and_running_need(tmp_path, monkeypatch):
    monkeypatch.setattr(open_jet, "which", lambda command: None)
    engine = validated(recipe(workload("greedy")), "here").engine
    lock = tmp_path / "engine.lock"
    lock.write_text(f"jinja2==3.1.6 --hash=sha256:{'0' * 64}\n")
    needs = r"building open-jet needs nvcc of a CUDA toolkit .*12\.8.* running it a GPU of compute capability 8\.0"
    with pytest.raises(environment.EnvironmentFailure, match=needs):
        environment.prepare(engine, lock, tmp_path / "install.log", tmp_path / "cache")
    assert not (tmp_path / "install.log").exists()  # said before anything is fetched


def test_another_nvcc_is_another_environment(tmp_path, monkeypatch):
    engine = validated(recipe(workload("greedy")), "here").engine
    lock = tmp_path / "engine.lock"
    lock.write_text(f"jinja2==3.1.6 --hash=sha256:{'0' * 64}\n")
    nvcc = tmp_path / "nvcc"
    monkeypatch.setattr(open_jet, "which", lambda command: str(nvcc))
    places = []
    for release in ("12.8, V12.8.93", "13.0, V13.0.88", "12.8, V12.8.93"):
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}'\n")
        nvcc.chmod(0o755)
        places.append(environment.place_of(engine, lock, tmp_path / "cache"))
    assert places[0] == places[2] != places[1]


def climb(**changes) -> dict:
    lengths = {"kind": "ladder", "prompts": [], "text": prompt("long"), "thinking": False, **changes}
    return workload("ladder", **{"lengths": [64, 256, 1024, 6000, 8000], "repeats": 1, **lengths})


def test_a_ladder_without_a_tokenizer_climbs_by_what_the_server_counted(measured):
    run, records = measured(climb())
    assert [(r.case, r.status) for r in records] == [
        *(("64", "ok"), ("256", "ok"), ("1024", "ok")),
        ("6000", "context_overflow"),
    ]
    near = [pytest.approx(256, rel=0.1), pytest.approx(1024, rel=0.02)]  # nearer with each that was counted
    assert [r.prompt_tokens for r in records[1:3]] == near
    assert {r.cached_tokens for r in records[:3]} <= {r.cached_tokens for r in records[:1]}, "salted heads"
    held = {r["metric"]: r["value"] for r in results.compute(run.path)["metrics"] if r["workload"] == "ladder"}
    assert held["verified_tokens"] == records[2].prompt_tokens
    assert held["failed_tokens"] == 6000


def telling_of_xid_31(monkeypatch, workload, case):
    """The driver reports an Xid while a case of a workload is asked, as the sampler would write it."""
    asked = asker.Asker._ask

    def failing(self, of, job, step, warmup):
        record = asked(self, of, job, step, warmup)
        if (of.id, job.case) == (workload, case):
            xid = {"kind": "xid", "at": run_folder.now(), "t_ns": 1, "xid": 31, "gpu": None, "text": "MMU Fault"}
            with open(self.boot.guard_file, "a") as file:
                file.write(json.dumps(xid) + "\n")
        return record

    monkeypatch.setattr(asker.Asker, "_ask", failing)


def test_an_xid_in_a_rung_is_that_rungs_row_and_ends_the_ladder(measured, monkeypatch):
    telling_of_xid_31(monkeypatch, "ladder", "256")
    run, records = measured(workload("greedy", thinking=False, repeats=1), climb(repeats=2))
    assert [(r.case, r.repeat, r.xids) for r in records if r.workload == "ladder"] == [
        *(("64", 0, []), ("256", 0, [31])),
        ("64", 1, []),
    ]
    assert jobs.missing(run) == [], "the run is complete"
    failed = [r for r in results.compute(run.path)["metrics"] if r["metric"] == "failed_tokens"]
    assert "Xid 31" in failed[0]["note"] and failed[0]["value"] == records[3].prompt_tokens


def test_an_xid_outside_of_a_ladder_stops_the_run_and_keeps_its_rows(measured, monkeypatch):
    telling_of_xid_31(monkeypatch, "greedy", "count")
    with pytest.raises(guard.GuardStop, match="Xid 31 of a GPU during greedy: MMU Fault"):
        measured(workload("greedy", thinking=False, repeats=1), climb())


def test_long_prompts_that_a_recipe_calls_risky_climb_as_a_ladder_does(measured, monkeypatch):
    telling_of_xid_31(monkeypatch, "long", "hello")
    last = workload("long", thinking=False, risky=True)
    run, records = measured(last, workload("greedy", thinking=False, repeats=1))
    assert [r.workload for r in records] == ["greedy", "greedy", "long"]
    assert jobs.missing(run) == []
