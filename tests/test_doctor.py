"""doctor looks and tells: what is needed, what is here, what is repaired and adapted, and what can be mended."""

import json
import shutil

import pytest
from click.testing import CliRunner
from nvml import Card, Library

from llmrepro import catalog, cli, containers, doctor, environment, fixes, gpus, requirements
from llmrepro.fixes import Finding, FixFailure


@pytest.fixture
def recipe(tmp_path):
    """The default recipe elsewhere, to be changed."""
    shutil.copytree(catalog.home() / "smollm2-135m/prompts", tmp_path / "prompts")
    folder = tmp_path / "recipe"
    shutil.copytree(catalog.home() / catalog.DEFAULT, folder)
    return folder


def changed(folder, change) -> str:
    data = json.loads((folder / "recipe.json").read_text())
    change(data)
    (folder / "recipe.json").write_text(json.dumps(data))
    return str(folder)


def examine(folder, tmp_path):
    found = doctor.examine(str(folder), tmp_path / "cache")
    return {check.what: check for check in found}


def test_a_recipe_that_was_never_run_is_fine_and_nothing_is_made(recipe, tmp_path):
    found = examine(recipe, tmp_path)
    assert "1.5 GiB of memory" in found["needs"].found
    assert found["here"].found == "this machine has that; the recipe runs live"
    assert found["environment"].found.startswith("not installed yet: built by `llmrepro run")
    assert not any(check.next_step for check in found.values())
    assert not (tmp_path / "cache").exists()


def test_every_recipe_of_the_kit_can_be_examined(tmp_path):
    for name in catalog.ids():
        found = examine(name, tmp_path)
        assert found["recipe"].found == "read, with the texts of its prompts"
        if "lock" in found:
            assert found["lock"].found == "read: pins and hashes only"
        else:  # a publication's own Python need not be here
            assert "and none is installed here" in found["lock, Python"].found


def test_a_recipe_that_cannot_be_read_is_a_fault_with_its_keys(recipe, tmp_path):
    found = examine(changed(recipe, lambda d: d.update(titel="x")), tmp_path)
    assert "titel: unknown key" in found["recipe"].found
    assert "mend the file" in found["recipe"].next_step


def test_a_lock_that_holds_more_than_pins_is_a_fault(recipe, tmp_path):
    (recipe / "engine.lock").write_text("-e .\n")
    found = examine(recipe, tmp_path)
    assert "only `name==version` with hashes is installed" in found["lock, Python"].found
    assert "uv pip compile" in found["lock, Python"].next_step


def test_a_python_that_is_not_here_is_a_fault(recipe, tmp_path):
    found = examine(changed(recipe, lambda d: d["engine"]["install"].update(python="3.99")), tmp_path)
    assert found["lock, Python"].found == "this engine needs Python 3.99 and none is installed here"
    assert found["lock, Python"].next_step.startswith("install it")
    assert "needs Python 3.99" in found["here"].found
    assert "runs live" not in found["here"].found


@pytest.mark.parametrize("missing", ["Python", "lock", "environment"])
def test_fixes_and_where_weights_come_from_are_told_whatever_is_missing(recipe, tmp_path, missing):
    def change(data):
        data["engine"]["fixes"] = [{"name": "cu13-nvcc"}]
        if missing == "Python":
            data["engine"]["install"]["python"] = "3.99"

    if missing == "lock":
        (recipe / "engine.lock").unlink()
    found = examine(changed(recipe, change), tmp_path)
    assert ("environment" in found) == (missing == "environment")
    assert found["fix"].found == "cu13-nvcc: not installed yet, made with the environment"
    model = catalog.load(str(recipe)).model
    assert found["weights"].found.startswith(f"the model: {model.repo} at {model.revision}, from ")


def test_a_full_disk_can_be_mended(recipe, tmp_path):
    found = examine(changed(recipe, lambda d: d["needs"].update(disk_gib=1e6)), tmp_path)
    assert "needs 1e+06 GiB of free disk" in found["disk"].found
    assert found["disk"].next_step
    assert "runs live" not in found["here"].found


@pytest.mark.parametrize(("memory_gib", "code"), [(1.0, 1), (1e6, 0)])
def test_a_missing_command_ends_with_1_only_where_the_hardware_is_there(recipe, memory_gib, code, monkeypatch):
    path = changed(recipe, lambda d: d["needs"].update(memory_gib=memory_gib, commands=["no-such-command"]))
    done = CliRunner().invoke(cli.main, ["doctor", path])
    assert done.exit_code == code
    assert "needs the command 'no-such-command'; install the package" in done.output
    told = " ".join(CliRunner().invoke(cli.main, ["doctor", "--help"]).output.split())
    assert "processor, memory or GPU that a recipe needs is no fault" in told


def test_a_command_that_is_missing_can_be_mended(recipe, tmp_path):
    found = examine(changed(recipe, lambda d: d["needs"].update(commands=["no-such-command"])), tmp_path)
    assert "needs the command 'no-such-command'" in found["command"].found
    assert found["command"].next_step


def test_what_a_machine_lacks_is_told_and_is_no_fault(recipe, tmp_path):
    def change(data):
        data["needs"].update(memory_gib=1e6, commands=["no-such-command"])
        data["engine"]["install"]["python"] = "3.99"

    found = examine(changed(recipe, change), tmp_path)
    assert "needs 1e+06 GiB of memory" in found["here"].found
    assert "3.99" in found["lock, Python"].found  # told all the same
    assert not any(check.next_step for check in found.values())


@pytest.fixture
def installed(recipe, tmp_path, monkeypatch):
    """The recipe's environment, as far as doctor looks: its python answers --help like a newer llama.cpp."""

    def make(change=lambda data: None):
        changed(recipe, change)
        loaded = catalog.load(str(recipe))
        place = environment.place_of(loaded.engine, recipe / "engine.lock", tmp_path / "cache")
        (place / "bin").mkdir(parents=True)
        known = {a for server in loaded.servers[1:] for a in server.args if a.startswith("--")}
        (place / "bin/python").write_text(f"#!/bin/sh\necho '--ctx-size --load-mode {' '.join(known)}'\n")
        (place / "bin/python").chmod(0o755)
        monkeypatch.setattr(
            environment, "complete", lambda place, engine: environment.Environment(place, "key", "", 0.0)
        )
        return place

    return make


def first_server(*args):
    return lambda data: data["servers"][0].update(args=list(args))


def test_what_the_engine_adapter_will_translate_is_told(installed, recipe, tmp_path):
    place = installed(first_server("--mlock"))
    found = examine(recipe, tmp_path)
    assert found["environment"].found == f"{place}, complete and unchanged"
    assert found["server default"].found == "--mlock is --load-mode mmap+mlock in this build"
    assert not any(check.next_step for check in found.values())


def test_an_argument_that_this_build_has_not_is_a_fault(installed, recipe, tmp_path):
    installed(first_server("--gone-since-long"))
    found = examine(recipe, tmp_path)["server default"]
    assert "has no argument '--gone-since-long'" in found.found
    assert found.next_step


def test_an_environment_that_was_changed_is_told(installed, recipe, tmp_path, monkeypatch):
    place = installed()
    monkeypatch.setattr(environment, "complete", lambda place, engine: None)
    found = examine(recipe, tmp_path)["environment"]
    assert found.found.startswith(f"{place} was changed or is not whole: built anew by `llmrepro run")
    assert not found.next_step  # the next run mends it by itself


class StandIn:
    def __init__(self, finding):
        self.finding = finding

    def detect(self, place, fix):
        if isinstance(self.finding, Exception):
            raise self.finding
        return self.finding


@pytest.mark.parametrize(
    ("finding", "said", "next_step"),
    [
        (Finding(False, "the toolkit folder is there already", {}), "cu13-nvcc: in place: the toolkit", ""),
        (
            Finding(True, "no PATH leads there", {}),
            "cu13-nvcc: needed: no PATH leads there",
            "the next run builds",
        ),
        (FixFailure("patch is missing", "install it"), "cu13-nvcc: patch is missing", "install it"),
    ],
)
def test_a_fix_is_looked_for_in_the_environment(
    installed, recipe, tmp_path, monkeypatch, finding, said, next_step
):
    installed(lambda d: d["engine"].update(fixes=[{"name": "cu13-nvcc"}]))
    monkeypatch.setattr(fixes, "load", lambda name: StandIn(finding))
    found = examine(recipe, tmp_path)["fix"]
    assert found.found.startswith(said)
    assert next_step in found.next_step
    assert bool(found.next_step) == bool(next_step)


def test_a_fix_of_an_environment_that_is_not_there_yet_is_told_so(recipe, tmp_path):
    found = examine(changed(recipe, lambda d: d["engine"].update(fixes=[{"name": "cu13-nvcc"}])), tmp_path)
    assert found["fix"].found == "cu13-nvcc: not installed yet, made with the environment"


def container(data):
    image = f"ghcr.io/someone/engine@sha256:{'0' * 64}"
    install = {"kind": "container", "container": {"image": image, "port": 8080}}
    data["engine"] |= {"install": install, "version": "1.0"}


def test_a_container_needs_no_lock_and_something_that_runs_it(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "find", lambda: containers.Runtime("podman", "/usr/bin/podman", "5.4.0"))
    monkeypatch.setattr(requirements, "which", lambda command: f"/usr/bin/{command}")
    (recipe / "engine.lock").unlink()
    found = examine(changed(recipe, container), tmp_path)
    assert found["container"].found == "/usr/bin/podman, podman 5.4.0"
    assert found["environment"].found.startswith("the image ghcr.io/someone/engine@sha256:000")
    assert not any(check.next_step for check in found.values())


def test_a_container_runtime_that_does_not_work_can_be_mended(recipe, tmp_path, monkeypatch):
    def find():
        raise containers.ContainerFailure("docker is installed, and its daemon does not answer", "start it")

    monkeypatch.setattr(containers, "find", find)
    monkeypatch.setattr(requirements, "which", lambda command: f"/usr/bin/{command}")
    found = examine(changed(recipe, container), tmp_path)["container"]
    assert found == ("container", "docker is installed, and its daemon does not answer", "start it")


def checkout(data):
    source = {"name": "engine", "repo": "https://example.org/engine.git", "commit": "0123456789" * 4}
    install = {"kind": "git", "checkouts": [source], "build": {"ARCH": "sm_80"}}
    data["engine"] |= {"install": install, "version": "1.0"}
    data["needs"]["commands"] = ["nvcc"]


def test_what_builds_a_checkout_is_looked_for(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(requirements, "which", {"git": "/usr/bin/git"}.get)
    (recipe / "engine.lock").unlink()
    found = examine(changed(recipe, checkout), tmp_path)
    assert found["git"].found == "/usr/bin/git"
    assert "needs the command 'nvcc'" in found["command"].found
    assert found["command"].next_step
    assert found["environment"].found.startswith("built from https://example.org/engine.git at 0123456789")


def test_the_gpus_are_told_to_who_needs_one(recipe, tmp_path, monkeypatch):
    Library(monkeypatch, [Card(), Card(name="NVIDIA H200")])
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    assert "GPU" not in examine(recipe, tmp_path)
    told = doctor.examine(changed(recipe, lambda d: d["needs"].update(vram_gib=24.0)), tmp_path / "cache")
    assert [c.found.split(",")[0] for c in told if c.what == "GPU"] == ["NVIDIA CMP 170HX", "NVIDIA H200"]
    assert "power limit 180 W (default 250)" in next(c.found for c in told if c.what == "GPU")


def test_the_command_tells_all_recipes_and_ends_with_0_or_1(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("LLMREPRO_CACHE", str(tmp_path / "cache"))
    everything = CliRunner().invoke(cli.main, ["doctor"])
    assert everything.exit_code == 0, everything.output
    assert all(name in everything.output for name in catalog.ids())
    (recipe / "engine.lock").unlink()
    one = CliRunner().invoke(cli.main, ["doctor", str(recipe)])
    assert one.exit_code == 1
    assert "→ next" in one.output
    assert "1 thing to mend; each next step stands above" in one.output
    unknown = CliRunner().invoke(cli.main, ["doctor", "smollm2-135m/llamacpp--cpu"])
    assert unknown.exit_code == 1
    assert "did you mean 'smollm2-135m/llama-cpp--cpu'" in unknown.output
