"""Converted weights: made once by the engine's Python, checked file by file, made again when changed."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmrepro import conversion
from llmrepro.environment import Environment
from llmrepro.model import Conversion
from llmrepro.weights import WeightsFailure

WANTED = Conversion(format="safetensors", dtype="bfloat16")
MAKES = """#!/bin/sh
echo "$@" >> {calls}
mkdir -p "$4"
echo "weights of $5" > "$4/model.safetensors"
echo '{{}}' > "$4/config.json"
env > {seen}
"""


@pytest.fixture
def place(tmp_path) -> Path:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    return tmp_path


def engine(place: Path, script: str, key: str = "k1") -> Environment:
    """An environment whose `python` is a script: what it is called with is `-I SCRIPT SOURCE FOLDER DTYPE`."""
    python = place / "env" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(script.format(calls=place / "calls", seen=place / "seen"))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return Environment(place / "env", key, "", 0.0)


def convert(place: Path, environment: Environment, wanted: Conversion = WANTED) -> Path:
    return conversion.convert(place / "model.gguf", wanted, environment, place / "install.log", place / "cache")


def calls(place: Path) -> int:
    return len((place / "calls").read_text().splitlines())


def test_it_is_made_once(place):
    one = convert(place, engine(place, MAKES))
    assert (one / "model.safetensors").read_text() == "weights of bfloat16\n"
    assert convert(place, engine(place, MAKES)) == one
    assert calls(place) == 1


@pytest.mark.parametrize("change", ["changed", "gone", "added"])
def test_what_somebody_changed_is_made_again(place, change):
    one = convert(place, engine(place, MAKES))
    if change == "changed":
        (one / "model.safetensors").write_text("others")
    elif change == "gone":
        (one / "config.json").unlink()
    else:
        (one / "another.safetensors").write_text("more")
    assert convert(place, engine(place, MAKES)) == one
    assert calls(place) == 2
    assert sorted(p.name for p in one.iterdir()) == [".complete", "config.json", "model.safetensors"]
    assert (one / "model.safetensors").read_text() == "weights of bfloat16\n"


def test_another_file_type_or_environment_is_another_conversion(place):
    one = convert(place, engine(place, MAKES))
    as_float = convert(place, engine(place, MAKES), Conversion(format="safetensors", dtype="float32"))
    by_another = convert(place, engine(place, MAKES, key="k2"))
    (place / "model.gguf").write_bytes(b"GGUF of another")
    assert len({one, as_float, by_another, convert(place, engine(place, MAKES))}) == 4


def test_a_failure_says_its_last_words_and_leaves_nothing(place):
    with pytest.raises(WeightsFailure, match=r"ended with 3.*tensor 7 is missing.*install\.log"):
        convert(
            place, engine(place, "#!/bin/sh\nmkdir -p $4; echo half > $4/x\necho tensor 7 is missing\nexit 3\n")
        )
    assert [p.suffix for p in (place / "cache" / "converted").iterdir()] == [".lock"]


def test_two_runs_at_once_convert_once_and_neither_takes_the_others_away(place):
    slow = MAKES.replace("#!/bin/sh\n", "#!/bin/sh\nsleep 1\n")
    environment = engine(place, slow)
    with ThreadPoolExecutor() as pool:
        one, two = pool.map(lambda _: convert(place, environment), range(2))
    assert one == two
    assert calls(place) == 1
    assert (one / "model.safetensors").exists()


def test_what_a_killed_conversion_left_is_taken_away(place):
    environment = engine(place, MAKES)
    left = convert(place, environment).with_suffix(".part")
    left.mkdir()
    (left / "model.safetensors").write_text("half")
    (left.with_suffix("") / ".complete").unlink()
    assert convert(place, environment) == left.with_suffix("")
    assert not left.exists()


def test_a_cache_that_cannot_be_made_is_a_sentence(place):
    (place / "cache").write_text("a file")
    with pytest.raises(WeightsFailure, match="name another cache in LLMREPRO_CACHE"):
        convert(place, engine(place, MAKES))


def test_it_gets_none_of_the_users_tokens_and_may_not_download(place, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    convert(place, engine(place, MAKES))
    seen = (place / "seen").read_text()
    assert "secret" not in seen
    assert "HF_HUB_OFFLINE=1" in seen
    assert os.environ["HF_TOKEN"] == "secret"


def test_a_digest_of_one_file_is_its_own_sha256(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    one = conversion.digest(tmp_path)
    assert one == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    (tmp_path / "model-2.safetensors").write_bytes(b"")
    assert conversion.digest(tmp_path) != one
