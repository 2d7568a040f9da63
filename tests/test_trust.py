"""The trust rules, each with what a hostile recipe tries against it (`hostile.ATTACKS`).

A recipe chooses code that runs as its user, so installing one is trusting its sources; these rules are what holds
beyond that. What a rule does when it is carried out is tested where it is done: `--` before what git gets and no
submodules in test_checkouts, a container's command in test_containers, loopback, a key of its own for every boot
and a server's environment in test_server, nothing kept that its hash does not fit in test_hub_weights and
test_weights, answers and names on pages in test_report, test_notebooks and test_import.
"""

import copy
import json
import os
import shutil
import subprocess
import sys

import hostile
import pytest

from llmrepro import catalog, machine, parameters, run_folder
from llmrepro import run as runs
from llmrepro.parameters import Parameters
from llmrepro.recipe import RecipeError, validated

EVERY = [(rule, place, value) for rule, attacks in hostile.ATTACKS.items() for place, value in attacks]


def hostile_recipe(place: str, value: object) -> dict:
    """The default recipe with one attack in it."""
    path = catalog.home() / catalog.DEFAULT / "recipe.json"
    data = copy.deepcopy(json.loads(path.read_text(encoding="utf-8")))
    node = data
    *keys, last = place.split(".")
    for key in keys:
        if isinstance(node, list):
            node = node[int(key)] if key.isdecimal() else next(one for one in node if one["id"] == key)
        else:
            node = node.setdefault(key, {})
    node[int(last) if isinstance(node, list) else last] = value
    return data


@pytest.mark.parametrize(("rule", "place", "value"), EVERY)
def test_a_hostile_recipe_is_refused(rule, place, value):
    with pytest.raises(RecipeError) as refused:
        validated(hostile_recipe(place, value), "here")
    assert "\x1b" not in str(refused.value) and "\u202e" not in str(refused.value)


@pytest.mark.parametrize(("rule", "place", "value"), EVERY)
def test_no_override_gets_past_a_rule(rule, place, value):
    committed = catalog.load(catalog.DEFAULT)
    with pytest.raises(run_folder.RunError):
        parameters.resolved(committed, Parameters(overrides={place: value}))


def test_the_recipe_that_is_attacked_is_whole_without_the_attack():
    for place, value in [(hostile.ARGS, hostile.OPTIONS), hostile.checkout(hostile.REPO, hostile.COMMIT)]:
        validated(hostile_recipe(place, value), "here")
    validated(hostile_recipe(*hostile.container()), "here")
    validated(hostile_recipe(*hostile.built(GGML_NATIVE="ON")), "here")


@pytest.fixture
def elsewhere(tmp_path):
    """A copy of the default recipe, which is not of this kit."""
    shutil.copytree(catalog.home() / catalog.DEFAULT, tmp_path / "recipe")
    for prompts in (catalog.home() / catalog.DEFAULT).parent.glob("prompts"):
        shutil.copytree(prompts, tmp_path / "prompts")
    return tmp_path / "recipe"


def llmrepro(*words: str, cwd) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-m", "llmrepro", *map(str, words)]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", [["run"], ["matrix"], ["run", "--server-url", "http://127.0.0.1:9"]])
def test_a_recipe_from_elsewhere_shows_what_it_would_run_and_installs_nothing_without_trust(
    elsewhere, tmp_path, monkeypatch, command
):
    monkeypatch.setenv("LLMREPRO_CACHE", str(tmp_path / "cache"))
    if "--server-url" in command:  # nothing is installed: no trust is needed, and nobody answers
        said = llmrepro(
            *command, elsewhere, "--runs-dir", tmp_path / "runs", "--workloads", "[chat]", cwd=tmp_path
        )
        assert "--trust" not in said.stdout + said.stderr
    else:
        said = llmrepro(*command, elsewhere, "--runs-dir", tmp_path / "runs", cwd=tmp_path)
        assert said.returncode == (12 if command == ["matrix"] else 1), said
        text = said.stdout + said.stderr
        recipe = catalog.load(catalog.DEFAULT)
        pins = [f"{name} {version}" for name, version in recipe.engine.install.pins.items()]
        for shown in (*pins, f"{elsewhere}/engine.lock", recipe.model.repo, "--dry-run", "--trust"):
            assert shown in text, shown
        assert not list((tmp_path / "runs").glob("*/*/*"))
    assert not (tmp_path / "cache" / "environments").exists()


def test_every_command_is_shown_without_trust_and_none_is_run(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setenv("LLMREPRO_CACHE", str(tmp_path / "cache"))
    said = llmrepro("run", elsewhere, "--dry-run", cwd=tmp_path)
    assert said.returncode == 0 and "--require-hashes" in said.stdout, said
    assert not (tmp_path / "cache").exists() and not (tmp_path / "runs").exists()


def test_a_link_into_the_kits_recipes_makes_no_recipe_one_of_the_kits(elsewhere, tmp_path):
    with pytest.raises(run_folder.RunError, match="trust"):
        runs.create(Parameters(recipe=f"{catalog.home()}/../{os.path.relpath(elsewhere, catalog.home().parent)}"))


def test_an_engine_gets_none_of_the_users_secrets(monkeypatch):
    given = {
        "HF_TOKEN": "a",
        "GITHUB_TOKEN": "b",
        "AWS_SECRET_ACCESS_KEY": "c",
        "OPENAI_API_KEY": "d",
        "LD_PRELOAD": "e",
    }
    given |= {"PYTHONPATH": "f", "HTTP_PROXY": "g", "SSH_AUTH_SOCK": "h", "LLMREPRO_SERVER_KEY": "i"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert not set(machine.minimal_environment()) & set(given)
