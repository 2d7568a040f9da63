"""What a machine lacks of what a recipe needs, in sentences that say what there is."""

import os

import pytest

from llmrepro import catalog, requirements
from llmrepro.recipe import Needs

CPU = {"architecture": "x86_64"}
UNKNOWN = "libnvidia-ml.so.1 is not here"


def gpu(name="NVIDIA H200", gib=140.4, capability="9.0", index=0) -> dict:
    return {"index": index, "name": name, "memory_gib": gib, "compute_capability": capability}


SMALL = gpu("NVIDIA GeForce RTX 3060", 12.0, "8.6")
LARGE = gpu(index=1)


def lacks(tmp_path, cards, other=(), **needs) -> list[str]:
    facts = {"cpu": CPU, "memory": {"total_gib": 64.0}, "disk_free_gib": 100.0, "gpus": cards}
    facts |= {"other_gpus": list(other)} | ({"gpus_unknown": UNKNOWN} if cards is None else {})
    return requirements.lacks(Needs(**needs), facts, tmp_path)


@pytest.mark.parametrize(
    ("cards", "needs", "said"),
    [
        ([], {"vram_gib": 60}, "needs a GPU with 60 GiB; this machine has none"),
        (
            [SMALL],
            {"vram_gib": 60},
            "needs a GPU with 60 GiB; this machine has NVIDIA GeForce RTX 3060 with 12 GiB (8.6)",
        ),
        (
            [SMALL],
            {"vram_gib": 8, "compute_capability": "10.0"},
            "needs a GPU with 8 GiB and compute capability 10.0 or newer; this machine has NVIDIA GeForce "
            "RTX 3060 with 12 GiB (8.6)",
        ),
        (None, {"vram_gib": 60}, f"needs a GPU with 60 GiB; whether there is a GPU is not known: {UNKNOWN}"),
        (
            [LARGE],
            {"vram_gib": 80, "gpus": 2},
            "needs 2 GPUs with 80 GiB each; this machine has NVIDIA H200 with 140.4 GiB (9.0)",
        ),
        ([], {"gpus": 1}, "needs a GPU; this machine has none"),
        (
            [SMALL, LARGE],
            {"vram_gib": 60},
            "needs a GPU with 60 GiB; NVIDIA H200 with 140.4 GiB (9.0) would do, and an engine takes NVIDIA "
            "GeForce RTX 3060 with 12 GiB (8.6) first: set CUDA_VISIBLE_DEVICES=1",
        ),
    ],
)
def test_a_gpu_that_is_missing_is_told_beside_what_there_is(tmp_path, cards, needs, said):
    assert lacks(tmp_path, cards, **needs) == [said]


@pytest.mark.parametrize(
    ("cards", "needs"),
    [
        ([LARGE], {"vram_gib": 80, "compute_capability": "8.0"}),
        ([LARGE, LARGE], {"vram_gib": 80, "gpus": 2}),
        ([LARGE, SMALL], {"vram_gib": 80}),  # the first will do
        ([gpu(capability="10.0")], {"compute_capability": "9.0"}),  # of numbers, not of letters
        ([gpu(gib=None, capability=None)], {"vram_gib": 60, "compute_capability": "8.0"}),  # unknown is not short
        (None, {}),
        ([], {}),
    ],
)
def test_a_gpu_that_will_do_is_not_missing(tmp_path, cards, needs):
    assert lacks(tmp_path, cards, **needs) == []


def test_gpus_that_nvml_does_not_know_are_told_with_those_that_lack(tmp_path):
    for cards in ([], None):
        (sentence,) = lacks(tmp_path, cards, other=["AMD GPU 1002:744c"], vram_gib=24)
        assert sentence.endswith("; there is AMD GPU 1002:744c, which NVML does not know")


def test_gpus_that_a_variable_hides_are_not_told_as_missing_from_the_machine(tmp_path):
    facts = {"cpu": CPU, "memory": {"total_gib": 64.0}, "disk_free_gib": 100.0, "gpus": [], "other_gpus": None}
    (sentence,) = requirements.lacks(Needs(vram_gib=24), {**facts, "cuda_visible_devices": ""}, tmp_path)
    assert sentence == "needs a GPU with 24 GiB; this machine has none that CUDA_VISIBLE_DEVICES='' leaves"


def test_memory_disk_and_cpu_that_are_missing_are_told(tmp_path):
    told = lacks(tmp_path, [], architectures=["aarch64"], memory_gib=100, disk_gib=110)
    assert told == [
        "needs a CPU of aarch64; this one is x86_64",
        "needs 100 GiB of memory; this machine has 64",
        f"needs 110 GiB of free disk; {tmp_path} has 100",
    ]


@pytest.fixture
def path(monkeypatch, tmp_path):
    """A PATH with these commands and no other."""

    def make(*names):
        for name in names:
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return make


def test_of_alternatives_one_command_is_enough(path, tmp_path):
    path("docker")
    assert lacks(tmp_path, [], commands=["podman|docker"]) == []
    (missing,) = lacks(tmp_path, [], commands=["podman|buildah", "docker"])
    assert missing == "needs the command 'podman' or 'buildah'; install the package that brings it"
    assert requirements.told(Needs(commands=["podman|docker", "numactl"], minutes=3)) == (
        "the commands podman or docker, numactl, about 3 minutes"
    )


def test_nvcc_is_found_off_the_path_where_cuda_says(path, tmp_path, monkeypatch):
    path()
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "bin/nvcc").write_text("")
    (home / "bin/nvcc").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert requirements.which("nvcc") == str(home / "bin/nvcc")
    assert os.access(requirements.which("nvcc"), os.X_OK)
    assert requirements.which("gcc") is None


def kind(kind: str, commands: list[str]):
    recipe = catalog.load(catalog.DEFAULT)
    install = recipe.engine.install.model_copy(update={"kind": kind})
    engine = recipe.engine.model_copy(update={"install": install})
    needs = recipe.needs.model_copy(update={"commands": commands})
    return recipe.model_copy(update={"engine": engine, "needs": needs})


def test_what_a_kind_of_install_takes_is_needed_too():
    assert requirements.of(kind("wheel", [])).commands == []
    assert requirements.of(kind("git", ["make"])).commands == ["make", "git"]
    assert requirements.of(kind("git", ["git"])).commands == ["git"]
    assert requirements.of(kind("container", [])).commands == ["podman|docker"]
    assert requirements.of(kind("container", ["podman"])).commands == ["podman"]  # narrower than asked


def test_weights_that_find_no_free_memory_are_told_with_what_to_do():
    recipe = catalog.load(catalog.DEFAULT)
    file = recipe.model.files[0].model_copy(update={"bytes": 8 * 2**30})

    def lacking(free_gib, files=(file,), **needs) -> str | None:
        model = recipe.model.model_copy(update={"files": [*files]})
        one = recipe.model_copy(update={"model": model, "needs": Needs(**needs)})
        return requirements.lacks_room(one, {"memory": {"total_gib": 16.0, "available_gib": free_gib}})

    said = "needs 8 GiB of free memory for the weights, and 7.5 GiB are free now; end other programs"
    assert lacking(7.5) == said and lacking(8.0) is None
    assert lacking(7.5, [file.model_copy(update={"bytes": None})]) is None, "its size is not pinned"
    assert lacking(7.5, vram_gib=16) is None, "a GPU has its own"
    assert lacking(7.5, memory_gib=100) is None, "no program's end would do"
    assert lacking(None) is None, "unknown is not short"


def test_free_memory_is_among_what_a_live_run_lacks():
    facts = {"cpu": CPU, "memory": {"total_gib": 64.0, "available_gib": 0.05}, "disk_free_gib": 100.0, "gpus": []}
    (sentence,) = requirements.missing(catalog.load(catalog.DEFAULT), facts, "the disk")
    assert sentence.endswith("and 0.05 GiB are free now; end other programs")
