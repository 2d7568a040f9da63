"""cu13-nvcc: make the CUDA 13 compiler that pip installed one that engines find, and that compiles and links.

NVIDIA's cu13 wheels bring nvcc as plain files: no importable module, and libraries without their unversioned
names. This makes a toolkit folder of links in the environment and starts the engine with CUDA_HOME and PATH set
to it. Needs no root and no GPU, and nothing outside the environment is touched.
"""

import os
import re
import shutil
import subprocess
import tempfile
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from llmrepro.contents import site_packages
from llmrepro.fixes import Finding, FixFailure
from llmrepro.install import Fix

TOOLKIT = "cuda"  # below the environment
# The compiler family that belongs to a CUDA release, as PyPI has it.
FAMILIES = {
    "13.0": {
        "nvidia-cuda-nvcc": "13.0.88",
        "nvidia-cuda-crt": "13.0.88",
        "nvidia-nvvm": "13.0.88",
        "nvidia-cuda-runtime": "13.0.96",
        "nvidia-cuda-cccl": "13.0.85",
    }
}
PARTS = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
# cuda_fp16.h includes headers of cccl, where a compiler of another release is refused; a plain kernel is not.
PROBE = """#include <cuda_fp16.h>
__global__ void twice(__half *x) { *x = __hadd(*x, *x); }
int main() { twice<<<1, 1>>>(nullptr); return cudaDeviceSynchronize(); }
"""


def detect(place: Path, fix: Fix) -> Finding:
    wheels = _wheels(place)
    files = _files(wheels)
    listed = {str(path) for wheel in wheels.values() for path in wheel.files or ()}
    evidence = {
        "wheels": {name: wheels[name].version for name in PARTS if name in wheels},
        "nvcc": _below(place, files.get("nvcc")),
        "headers_release": _headers_release(files.get("cuda_runtime_api.h")),
        "unversioned_cudart": any(path.endswith("/libcudart.so") for path in listed),
        "importable": "nvidia/cuda_nvcc/__init__.py" in listed,
    }
    if (place / TOOLKIT / "bin/nvcc").exists():
        return Finding(False, "the toolkit folder is there already", evidence)
    if evidence["nvcc"] is None:
        return Finding(True, "no installed wheel brings nvcc", evidence)
    return Finding(
        True,
        f"nvcc is only at {evidence['nvcc']}: no CUDA_HOME, no PATH and no `import nvidia.cuda_nvcc` leads there",
        evidence,
    )


def apply(place: Path, fix: Fix) -> dict[str, Any]:
    wheels = _wheels(place)
    files = _files(wheels)
    for name, wheel in (
        ("nvcc", "nvidia-cuda-nvcc"),
        ("cuda_runtime_api.h", "nvidia-cuda-runtime"),
        ("cicc", "nvidia-nvvm"),
        ("host_config.h", "nvidia-cuda-crt"),
    ):
        if name not in files:
            raise FixFailure(f"no installed wheel brings {name}, which {wheel} has", _pins(_headers(files)))
    toolkit = place / TOOLKIT
    for folder in ("bin", "lib64"):  # real ones: a linked bin/ resolves back into the wheel
        (toolkit / folder).mkdir(parents=True)
    for program in sorted(files["nvcc"].parent.iterdir()):
        _link(toolkit / "bin" / program.name, program)
    _link(toolkit / "include", files["cuda_runtime_api.h"].parent)
    _link(toolkit / "nvvm", files["cicc"].parents[1])
    (toolkit / "lib").symlink_to("lib64")
    return {"toolkit": TOOLKIT, "libraries": _link_libraries(toolkit / "lib64", wheels)}


def verify(place: Path, fix: Fix) -> dict[str, Any]:
    toolkit = place / TOOLKIT
    wheels = _wheels(place)
    headers = _headers_release(toolkit / "include/cuda_runtime_api.h")
    shown = _run(toolkit, [f"{toolkit}/bin/nvcc", "--version"], toolkit)
    release = re.search(r"release (\d+\.\d+)", shown)
    release = release and release[1]
    if release is None or release != headers:
        raise FixFailure(
            f"nvcc is of CUDA {release or 'unknown'} and the headers are of CUDA {headers or 'unknown'}: "
            "compiling fails with 'CUDA compiler and CUDA toolkit headers are incompatible'",
            _pins(headers),
        )
    family = {name: wheels[name].version if name in wheels else None for name in PARTS[:3]}
    if len(set(family.values())) > 1:
        told = ", ".join(f"{name} {version}" for name, version in family.items())
        raise FixFailure(f"the compiler's parts are of different versions: {told}", _pins(headers))
    return {"release": release, "compiled_and_linked": _compile_and_link(toolkit, headers)}


def exports(place: Path) -> dict[str, str]:
    return {
        "CUDA_HOME": f"{{environment}}/{TOOLKIT}",
        "PATH": f"{{environment}}/{TOOLKIT}/bin:{{PATH}}",
        # FlashInfer keeps compiled kernels in .cache/flashinfer below this, by default in the home folder. Beside
        # the environment, those that another compiler made are neither used nor touched.
        "FLASHINFER_WORKSPACE_BASE": "{environment}.cache",
    }


def _wheels(place: Path) -> dict[str, Distribution]:
    found = distributions(path=[str(site_packages(place))])
    return {re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d for d in found}


def _files(wheels: dict[str, Distribution]) -> dict[str, Path]:
    """Where the files are that a toolkit is made of, by the wheels' own lists; importing tells nothing."""
    wanted = {
        "nvcc": "bin/nvcc",
        "cuda_runtime_api.h": "include/cuda_runtime_api.h",
        "cicc": "nvvm/bin/cicc",
        "host_config.h": "include/crt/host_config.h",
    }
    return {
        name: Path(wheel.locate_file(path))
        for wheel_name, wheel in wheels.items()
        if wheel_name in PARTS
        for path in wheel.files or ()
        for name, end in wanted.items()
        if str(path).endswith(f"/{end}")
    }


def _link_libraries(folder: Path, wheels: dict[str, Distribution]) -> list[str]:
    """Every library of NVIDIA's wheels, and libX.so beside libX.so.13: linkers look for the unversioned name."""
    made = []
    for name, wheel in sorted(wheels.items()):
        for path in wheel.files or () if name.startswith("nvidia-") else ():
            if path.parent.name in {"lib", "lib64"} and re.search(r"\.(a|so)(\.\d+)*$", path.name):
                plain = re.sub(r"(\.so)(\.\d+)+$", r"\1", path.name)
                for link in {path.name, plain}:
                    if not (folder / link).is_symlink():
                        _link(folder / link, Path(wheel.locate_file(path)))
                        made.append(link)
    return sorted(made)


def _link(link: Path, target: Path) -> None:
    link.symlink_to(os.path.relpath(target, link.parent))


def _headers(files: dict[str, Path]) -> str | None:
    return _headers_release(files.get("cuda_runtime_api.h"))


def _headers_release(header: Path | None) -> str | None:
    """ "13.0" from `#define CUDART_VERSION 13000`."""
    if header is None or not header.is_file():
        return None
    stated = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"))
    return stated and f"{int(stated[1]) // 1000}.{int(stated[1]) % 1000 // 10}"


def _compile_and_link(toolkit: Path, headers: str) -> list[str]:
    """Compile PROBE, link it against the static runtime as nvcc does and the shared one as FlashInfer does."""
    with tempfile.TemporaryDirectory(prefix="llmrepro-nvcc-") as folder:
        (Path(folder) / "probe.cu").write_text(PROBE)
        lines = [
            [f"{toolkit}/bin/nvcc", "-Xcompiler", "-fPIC", "-c", "probe.cu", "-o", "probe.o"],
            [f"{toolkit}/bin/nvcc", "probe.o", "-o", "static"],
            ["g++", "-shared", "probe.o", f"-L{toolkit}/lib64", "-lcudart", "-o", "shared.so"],
        ]
        for line in lines:
            try:
                _run(toolkit, line, Path(folder))
            except FixFailure as failure:
                raise FixFailure(str(failure), _pins(headers)) from None
    return [" ".join(line).replace(str(toolkit), TOOLKIT) for line in lines]


def _run(toolkit: Path, argv: list[str], cwd: Path) -> str:
    """Run in an emptied environment: another CUDA on PATH must not help."""
    host = shutil.which("g++")
    if host is None:
        raise FixFailure(
            "nvcc needs a host compiler and g++ is not here",
            "install it (Debian and Ubuntu: apt-get install g++), then run again",
        )
    env = {
        "PATH": f"{toolkit}/bin:{Path(host).parent}:/usr/bin:/bin",
        "CUDA_HOME": str(toolkit),
        "TMPDIR": tempfile.gettempdir(),
        "LC_ALL": "C",
    }
    done = subprocess.run(
        argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-600:]
        raise FixFailure(
            f"{Path(argv[0]).name} {' '.join(argv[1:])} ended with {done.returncode}: {said}",
            "read what it says; a compiler that is too new for this nvcc is refused there by name",
        )
    return done.stdout


def _pins(headers: str | None) -> str:
    release = headers if headers in FAMILIES else None
    if release is None:
        return (
            f"pin {', '.join(PARTS)} of one CUDA release in engine.in, the one that torch was built for "
            "(`torch.version.cuda`), and make the lock again"
        )
    pins = " ".join(f"{name}=={version}" for name, version in FAMILIES[release].items())
    return f"pin the family of CUDA {release} in engine.in and make the lock again: {pins}"


def _below(place: Path, path: Path | None) -> str | None:
    return path and str(path.relative_to(place))
