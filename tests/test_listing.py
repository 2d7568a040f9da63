"""`llmrepro list`: every recipe and study, what runs here, and why the others do not."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from llmrepro import catalog, cli, environment, gpus, listing, machine, requirements

INTERPRETER = environment.interpreter


@pytest.fixture
def here(monkeypatch):
    """A machine with so much memory and disk, these GPUs, and every command."""
    real = machine.describe

    def make(memory_gib, found, disk_gib=1000.0):
        def describe(folder, bandwidth=False):
            facts = {**real(folder), "disk_free_gib": disk_gib, "gpus": found.gpus, "gpus_unknown": found.unknown}
            facts["memory"] |= {"total_gib": memory_gib}
            facts["cpu"] |= {"architecture": "x86_64"}
            return facts

        monkeypatch.setattr(machine, "describe", describe)
        monkeypatch.setattr(requirements, "which", lambda command: f"/usr/bin/{command}")
        monkeypatch.setattr(environment, "interpreter", lambda wanted: Path(f"/usr/bin/python{wanted}"))

    return make


def listed() -> dict[str, list[str]]:
    """The entry of every name: its first line without the name, then the others."""
    done = CliRunner().invoke(cli.main, ["list"])
    assert done.exit_code == 0, done.output
    found: dict[str, list[str]] = {}
    name = ""
    for line in done.output.splitlines():
        assert len(line) <= 100
        if line.startswith(" "):
            found[name].append(line.strip())
        else:
            *said, name = line.split()
            found[name] = [" ".join(said)]
    return found


CARD = {"index": 0, "name": "A card", "memory_gib": 96.0, "compute_capability": "12.0"}


def test_everything_runs_on_a_machine_that_has_everything(here):
    here(1000.0, gpus.Found([CARD]))
    found = listed()
    assert set(found) == {*catalog.ids(), *catalog.studies()}
    assert {entry[0] for entry in found.values()} == {"runs here"}
    assert not any(line.startswith("- ") for entry in found.values() for line in entry)


def test_what_runs_here_comes_first_and_the_default_before_all(here):
    here(8.0, gpus.Found([]))
    found = listed()
    assert next(iter(found)) == catalog.DEFAULT
    words = [entry[0] for entry in found.values()]
    assert words == sorted(words, key=lambda w: w != "runs here")
    assert set(words) == {"runs here", "not here"}


def test_a_recipe_that_does_not_run_says_why(here):
    here(23.5, gpus.Found([]), disk_gib=48.2)
    for name in catalog.ids():
        needs = catalog.load(name).needs
        entry = " ".join(listed()[name])
        assert ("this machine has none" in entry) == (needs.gpu_count > 0)
        assert ("this machine has 23.5" in entry) == (needs.memory_gib > 23.5)
        assert entry.startswith("not here") == (needs.gpu_count > 0 or needs.memory_gib > 23.5)


def test_a_study_runs_only_where_all_its_arms_do_and_names_the_arm_that_does_not(here):
    here(1000.0, gpus.Found(None, "nobody can tell"))
    found = listed()
    for name in catalog.studies():
        study, path = catalog.load_study(name), catalog.study_path(name)
        blind = [a.id for a in study.arms if catalog.load(catalog.recipe_of(a, path)).needs.gpu_count]
        assert (found[name][0] == "runs here") == (not blind)
        reasons = [line for line in found[name] if line.startswith("- ")]
        named = [arm for r in reasons for arm in r.removeprefix("- ").partition(":")[0].split(" and ")]
        assert sorted(named) == sorted(blind)
        assert all("needs a GPU" in r for r in reasons)


def test_a_study_tells_all_that_its_arms_lack_and_each_thing_once(here, monkeypatch, tmp_path):
    here(8.0, gpus.Found([]), disk_gib=5.0)
    journal = without_python(monkeypatch, tmp_path)
    monkeypatch.setattr(requirements, "which", lambda command: None)
    told = listed()
    asked = journal.read_text().splitlines()
    assert len(asked) == len(set(asked))  # which takes its time
    for name in catalog.studies():
        study, path = catalog.load_study(name), catalog.study_path(name)
        said = " ".join(told[name])
        folder = machine.cache_dir()
        facts = machine.describe(folder)
        for arm in study.arms:
            recipe = catalog.load(catalog.recipe_of(arm, path))
            for sentence in requirements.missing(recipe, facts, folder):
                assert said.count(f": {sentence}") == 1
        pythons = {catalog.load(catalog.recipe_of(a, path)).engine.install.python for a in study.arms} - {None}
        assert all(f"needs Python {python} and none is installed here" in said for python in pythons)


def test_a_recipe_whose_python_is_missing_does_not_run_here(here, monkeypatch, tmp_path):
    here(1000.0, gpus.Found([CARD]))
    without_python(monkeypatch, tmp_path)
    found = listed()
    for name in catalog.ids():
        python = catalog.load(name).engine.install.python
        assert (found[name][0] == "not here") == (python is not None)
        assert (f"needs Python {python}" in " ".join(found[name])) == (python is not None)


def without_python(monkeypatch, folder: Path) -> Path:
    """A machine with no Python but the kit's own; the file in which uv's stand-in writes what it was asked for."""
    journal, stand_in = folder / "asked", folder / "uv"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {journal}\nexit 2\n')
    stand_in.chmod(0o755)
    monkeypatch.setattr(environment, "interpreter", INTERPRETER)
    monkeypatch.setattr(environment.uv, "find_uv_bin", lambda: str(stand_in))
    return journal


def test_of_many_reasons_the_first_is_told_and_where_the_others_are():
    reasons = ["needs " + "x" * 200, "needs " + "y" * 200, "needs z"]
    assert listing._short(reasons, catalog.DEFAULT) == [
        reasons[0],
        f"2 more, told by `llmrepro doctor {catalog.DEFAULT}`",
    ]
    assert listing._short(reasons[1:2], catalog.DEFAULT) == reasons[1:2]
    assert listing._short(["a", "b"], catalog.DEFAULT) == ["a", "b"]
