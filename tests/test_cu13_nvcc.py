"""cu13-nvcc: the compiler of NVIDIA's wheels compiles and links, or the pins that would are named. No GPU."""

import os
import subprocess
from pathlib import Path

import pytest

from llmrepro import environment, fixes
from llmrepro.environment import EnvironmentFailure
from llmrepro.fixes import FixFailure, cu13_nvcc
from llmrepro.install import Engine, Fix

FIX = Fix(name="cu13-nvcc")
FAMILY = "nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96"


def prepare(folder: Path, lock: str) -> environment.Environment:
    engine = Engine.model_validate(
        {
            "name": "llama-cpp",
            "version": "1",
            "install": {"kind": "wheel", "pins": {"nvidia-cuda-nvcc": "13"}},
            "fixes": [{"name": "cu13-nvcc"}],
        }
    )
    lock = Path(__file__).parent / "data/cu13-nvcc" / lock
    return environment.prepare(engine, lock, folder / "install.log", folder / "cache")


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """NVIDIA's wheels of CUDA 13.0 as PyPI has them, with the fix."""
    return prepare(tmp_path_factory.mktemp("cu13"), "family.lock")


def run(found, argv, folder, **variables):
    """As the engine is started: nothing but what the environment exports, over a PATH without any CUDA."""
    env = {"PATH": "/usr/bin:/bin", **variables}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)


def variables(found) -> dict[str, str]:
    return fixes.exported(found.exports, found.path, {"PATH": "/usr/bin:/bin"})


@pytest.mark.registry
def test_the_symptom_the_compiler_is_there_and_nothing_finds_it(built, tmp_path):
    imported = run(built, [built.python, "-c", "import nvidia.cuda_nvcc"], tmp_path)
    assert "ModuleNotFoundError: No module named 'nvidia.cuda_nvcc'" in imported.stderr
    wheel = next(built.path.glob("lib/python3*/site-packages/nvidia/cu13"))
    assert (wheel / "bin/nvcc").exists()
    (tmp_path / "x.c").write_text("int main() { return 0; }\n")
    link = ["gcc", "x.c", f"-L{wheel}/lib", "-lcudart"]  # what FlashInfer does, with CUDA_HOME set to the wheel
    assert "cannot find -lcudart" in run(built, link, tmp_path).stderr


@pytest.mark.registry
def test_a_cu_compiles_and_links_where_the_engine_will_run(built, tmp_path):
    told = variables(built)
    assert told["CUDA_HOME"] == f"{built.path}/cuda"
    (tmp_path / "x.cu").write_text(cu13_nvcc.PROBE)
    done = run(built, ["sh", "-c", "command -v nvcc && nvcc -c x.cu -o x.o && nvcc x.o -o x"], tmp_path, **told)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{built.path}/cuda/bin/nvcc"
    shared = run(built, ["sh", "-c", "g++ x.o -L$CUDA_HOME/lib64 -lcudart -o y"], tmp_path, **told)
    assert shared.returncode == 0, shared.stderr
    assert run(built, ["./x"], tmp_path).returncode >= 0  # it runs: without a GPU it says so


@pytest.mark.registry
def test_its_evidence_says_what_was_found_and_what_was_done(built):
    (told,) = built.fixes
    assert (told["name"], told["needed"], told["applied"]) == ("cu13-nvcc", True, True)
    evidence = told["evidence"]
    assert evidence["wheels"]["nvidia-cuda-nvcc"] == "13.0.88"
    assert evidence["nvcc"].endswith("nvidia/cu13/bin/nvcc")
    assert evidence["headers_release"] == evidence["release"] == "13.0"
    assert not evidence["importable"]
    assert not evidence["unversioned_cudart"]
    assert {"libcudart.so", "libcudart.so.13", "libcudart_static.a"} <= set(evidence["libraries"])


@pytest.mark.registry
def test_its_links_stay_inside_and_lead_somewhere_after_the_move(built):
    links = [p for p in (built.path / "cuda").rglob("*") if p.is_symlink()]
    assert len(links) > 10
    assert all(not os.readlink(p).startswith("/") and p.resolve(strict=True) for p in links)
    assert all(p.resolve().is_relative_to(built.path) for p in links)
    assert not cu13_nvcc.detect(built.path, FIX).needed


@pytest.mark.registry
def test_flashinfers_kernels_are_kept_beside_this_environment(built):
    assert variables(built)["FLASHINFER_WORKSPACE_BASE"] == f"{built.path}.cache"


@pytest.mark.registry
def test_a_compiler_of_another_release_is_refused_with_the_pins_to_use(tmp_path):
    with pytest.raises(
        EnvironmentFailure, match="nvcc is of CUDA 13.4 and the headers are of CUDA 13.0"
    ) as refused:
        prepare(tmp_path, "floating.lock")
    assert FAMILY in refused.value.next_step
    assert not list((tmp_path / "cache/environments").glob("*/.complete"))


def wheels(tmp_path, nvcc="13.0", headers=13000, **versions):
    """An environment that holds what NVIDIA's wheels bring, as far as releases are told. Its nvcc only talks."""
    place = tmp_path / "environment"
    site = place / "lib/python3.11/site-packages"
    brings = {
        "nvidia-cuda-nvcc": {
            "bin/nvcc": "#!/bin/sh\necho 'nvcc: NVIDIA (R) Cuda compiler driver'\n"
            f"echo 'Cuda compilation tools, release {nvcc}, V{nvcc}.88'\n"
        },
        "nvidia-cuda-crt": {"include/crt/host_config.h": ""},
        "nvidia-nvvm": {"nvvm/bin/cicc": ""},
        "nvidia-cuda-runtime": {
            "include/cuda_runtime_api.h": f"#define CUDART_VERSION  {headers}\n",
            "lib/libcudart.so.13": "",
        },
    }
    for name, files in brings.items():
        version = versions.get(name.replace("-", "_"), "13.0.88")
        if version is None:
            continue
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("".join(f"nvidia/cu13/{path},,\n" for path in files))
        for path, text in files.items():
            (site / "nvidia/cu13" / path).parent.mkdir(parents=True, exist_ok=True)
            (site / "nvidia/cu13" / path).write_text(text)
            (site / "nvidia/cu13" / path).chmod(0o755)
    site.mkdir(parents=True, exist_ok=True)
    return place


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"nvidia_cuda_nvcc": None}, "no installed wheel brings nvcc, which nvidia-cuda-nvcc has"),
        ({"nvidia_nvvm": None}, "no installed wheel brings cicc, which nvidia-nvvm has"),
        ({"nvidia_cuda_crt": None}, "no installed wheel brings host_config.h, which nvidia-cuda-crt has"),
    ],
)
def test_a_wheel_that_is_missing_is_named(tmp_path, there, said):
    place = wheels(tmp_path, **there)
    assert cu13_nvcc.detect(place, FIX).needed
    with pytest.raises(FixFailure, match=said) as refused:
        cu13_nvcc.apply(place, FIX)
    assert FAMILY in refused.value.next_step


def test_parts_of_different_versions_are_refused(tmp_path):
    place = wheels(tmp_path, nvidia_nvvm="13.0.48")
    cu13_nvcc.apply(place, FIX)
    with pytest.raises(
        FixFailure, match=r"of different versions: nvidia-cuda-nvcc 13\.0\.88.*nvidia-nvvm 13\.0\.48"
    ):
        cu13_nvcc.verify(place, FIX)


@pytest.mark.parametrize(
    ("nvcc", "headers", "said"),
    [("13.4", 13000, "CUDA 13.4 and the headers are of CUDA 13.0"), ("13.0", 13040, "headers are of CUDA 13.4")],
)
def test_compiler_and_headers_of_different_releases_are_refused(tmp_path, nvcc, headers, said):
    place = wheels(tmp_path, nvcc, headers)
    cu13_nvcc.apply(place, FIX)
    with pytest.raises(FixFailure, match=said) as refused:
        cu13_nvcc.verify(place, FIX)
    assert ("13.0.88" in refused.value.next_step) == (headers == 13000)  # else no family is known to work


def test_a_compiler_that_only_talks_is_not_believed(tmp_path):
    place = wheels(tmp_path)
    cu13_nvcc.apply(place, FIX)
    with pytest.raises(FixFailure, match=r"g\+\+ -shared probe\.o"):  # nvcc said 0, and made nothing
        cu13_nvcc.verify(place, FIX)


def test_without_a_host_compiler_its_package_is_named(tmp_path, monkeypatch):
    place = wheels(tmp_path)
    cu13_nvcc.apply(place, FIX)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FixFailure, match=r"g\+\+ is not here") as refused:
        cu13_nvcc.verify(place, FIX)
    assert "apt-get install g++" in refused.value.next_step
