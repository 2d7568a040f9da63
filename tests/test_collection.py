"""Folders from other machines are taken once, safely, and made anew; what is wrong with one stops no other."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import studies
from bs4 import BeautifulSoup
from folders import MACHINE, chat, folder

from llmrepro import (
    catalog,
    collection,
    comparison,
    confinement,
    imported,
    report,
    results,
    run_folder,
    study_results,
)
from llmrepro.collection import collect
from llmrepro.run_folder import read_json

RECEIPTS = Path(__file__).parent / "data" / "receipts" / "two-suites.csv"
COMMITTED = Path(__file__).parents[1] / "figures/smollm2-135m/run"
HARDWARE = {**MACHINE, "cpu": {**MACHINE["cpu"], "model": "AMD EPYC 9175F 16-Core Processor"}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = folder(tmp_path_factory.mktemp("finished"), chat(rounds=1), machine=HARDWARE)
    report.write(path)
    return path


@pytest.fixture
def there(finished, tmp_path):
    """A folder as it was copied from another machine, below one that somebody was given."""
    return shutil.copytree(finished, tmp_path / "usb" / "from-lab" / finished.name)


@pytest.fixture
def here(monkeypatch):
    """Without a process of its own, whose start takes longer than what it does."""
    monkeypatch.setattr(confinement, "call", lambda function, *args: function(*args))


@pytest.fixture
def mine(tmp_path):
    return tmp_path / "mine"


def age(path: Path, seconds: float) -> None:
    """Let everything in a folder have been written that long ago."""
    for one in [path, *path.rglob("*")]:
        then = one.stat().st_mtime - seconds
        os.utime(one, (then, then))


def told(found: collection.Collected) -> dict[str, str]:
    return {one.file: one.sentence for one in found.findings}


def copies(mine: Path) -> list[Path]:
    return sorted(path.parent for path in (mine / "collected").rglob("collected.json"))


def test_a_folder_is_copied_by_hardware_recipe_and_time_and_made_anew(there, mine, tmp_path):
    """With the process of its own that reads it."""
    (there / "report.html").write_text("<script>fetch('https://elsewhere.example')</script>")
    (there / "notes.sh").write_text("rm -rf /")
    (found,) = collect([tmp_path / "usb"], mine)
    assert (found.source, found.whole, found.findings) == (there, True, ())
    place = mine / "collected/amd-epyc-9175f-16-core-2-cores" / catalog.DEFAULT / there.name
    assert found.path == place
    assert (place / "records.jsonl").read_bytes() == (there / "records.jsonl").read_bytes()
    assert read_json(place / "result.json") == read_json(there / "result.json")
    page = (place / "report.html").read_text()
    assert "elsewhere.example" not in page
    assert BeautifulSoup(page, "html.parser").find("script") is None
    assert not (place / "notes.sh").exists()
    assert run_folder.status(place)["outcome"] == "completed"
    assert [p.name for p in (mine / "collected").iterdir()] == ["amd-epyc-9175f-16-core-2-cores"]


def test_the_same_folder_is_copied_once_wherever_it_lies(there, mine, tmp_path, here):
    again = shutil.copytree(there, tmp_path / "mail" / "renamed")
    first, second = collect([there, again], mine)
    assert first.path == second.path
    assert second.source == again
    assert collect([there], mine)[0].path == first.path
    assert copies(mine) == [first.path]


def test_two_that_differ_never_replace_each_other_and_it_is_told(there, mine, tmp_path, here):
    (first,) = collect([there], mine)
    kept = (first.path / "records.jsonl").read_bytes()
    (there / "records.jsonl").write_bytes(kept.replace(b'"finish_reason":"length"', b'"finish_reason":"stop"', 1))
    (second,) = collect([there], mine)
    assert second.path == first.path.with_name(f"{first.path.name}-2")
    assert (first.path / "records.jsonl").read_bytes() == kept
    assert "was changed after result.json was computed" in told(second)["records.jsonl"]
    assert f"as {first.path.name}, collected before, and differs in records.jsonl" in told(second)[""]
    assert not second.whole
    assert [one.path for one in collect([there], mine)] == [second.path]


def test_a_verdict_that_was_edited_elsewhere_is_told_and_not_taken_over(there, mine, here):
    result = read_json(there / "result.json")
    was = result["verdicts"][0]["word"]
    result["verdicts"][0]["word"] = "reproduced" if was != "reproduced" else "not_reproduced"
    (there / "result.json").write_text(json.dumps(result))
    (found,) = collect([there], mine)
    assert not found.whole
    assert "verdicts › " in told(found)["result.json"]
    assert read_json(found.path / "result.json")["verdicts"][0]["word"] == was


def test_what_is_still_written_is_left(there, mine, here):
    status = read_json(there / "status.json")
    with contextlib.closing(run_folder.Folder(there)):
        (held,) = collect([there], mine)
    assert "is still being written" in told(held)[""]
    (there / "status.json").write_text(json.dumps({**status, "outcome": "running", "stage": "measure"}))
    (running,) = collect([there], mine)
    assert "says that it is running" in told(running)[""]
    assert {held.path, running.path} == {None}
    assert copies(mine) == []
    age(there, 3600)
    (found,) = collect([there], mine)
    assert run_folder.status(found.path)["outcome"] == "interrupted"
    assert "it was interrupted" in told(found)["status.json"]


def test_what_cannot_be_read_is_told_and_the_others_are_taken(there, mine, tmp_path, here):
    for name, file, content in (
        ("broken-recipe", "recipe.json", "{"),
        ("broken-record", "records.jsonl", "{}\n"),
        ("deep", "status.json", "[" * 100_000),
        ("of-another-name", "recipe.json", '{"id": "../../up"}'),
    ):
        shutil.copytree(there, tmp_path / "usb" / name)
        (tmp_path / "usb" / name / file).write_text(content)
    found = {one.source.name: one for one in collect([tmp_path / "usb", tmp_path / "nowhere"], mine)}
    assert {name for name, one in found.items() if one.path} == {there.name}
    for name in ("broken-recipe", "broken-record", "deep", "of-another-name"):
        assert "cannot be read" in told(found[name])[""] or "is broken" in told(found[name])[""]
    assert told(found["nowhere"]) == {"": "is no folder"}
    assert [p for p in (mine / "collected").iterdir() if p.name.startswith(".")] == []
    assert copies(mine) == [found[there.name].path]


def test_links_lead_nowhere(there, mine, tmp_path, here):
    outside = shutil.copytree(there, tmp_path / "outside")
    (tmp_path / "usb" / "linked").symlink_to(outside)
    (there / "boots/1.json").unlink()
    (there / "boots/1.json").symlink_to(outside / "boots/1.json")
    (found,) = collect([tmp_path / "usb"], mine)
    assert told(found) == {"boots/1.json": "is a link, which is not followed"}
    assert found.path is None


def test_a_folder_without_a_run_says_so_and_a_large_one_is_not_walked_for_ever(tmp_path, mine, monkeypatch):
    place = tmp_path / "empty"
    place.mkdir()
    assert "holds no run folder" in told(collect([place], mine)[0])[""]
    for n in range(5):
        (place / f"{n}").write_text("")
    monkeypatch.setattr(collection, "MOST_LOOKED_AT", 3)
    assert "more than 3 files" in told(collect([place], mine)[0])[""]
    deep = place
    for _ in range(40):
        deep /= "d"
    deep.mkdir(parents=True)
    shutil.copyfile(COMMITTED / "recipe.json", deep / "recipe.json")
    monkeypatch.setattr(collection, "MOST_LOOKED_AT", 100)
    assert "holds no run folder" in told(collect([place], mine)[0])[""]


def test_what_was_collected_is_not_collected_again(there, mine, tmp_path, here):
    collect([there], mine)
    assert [one.source for one in collect([mine, there], mine) if one.path] == [there]


def test_a_study_is_taken_with_its_arms(tmp_path, mine, here):
    path = studies.folder(tmp_path, [studies.claim()], studies.both(fast=(100.0,), slow=(50.0,)))
    for arm in comparison.arm_folders(path).values():
        (arm / "result.json").write_text(json.dumps(results.compute(arm)))
    (path / "result.json").write_text(json.dumps(study_results.compute(path)))
    (found,) = collect([tmp_path / "runs"], mine)
    assert found.whole
    assert found.path == mine / "collected/a-2-cores/smollm2-135m/tested" / path.name
    assert (found.path / "arms/vllm/report.html").exists()


def test_an_import_is_taken(tmp_path, mine, here):
    path = imported.create(RECEIPTS, runs_dir=str(tmp_path / "runs"))
    (found,) = collect([tmp_path / "runs"], mine)
    assert found.whole
    assert found.path == mine / "collected/unknown-machine/imported/two-suites" / path.name


def test_the_committed_run_is_taken_by_the_time_of_its_first_request(mine, here):
    (found,) = collect([COMMITTED], mine)
    assert found.path == mine / "collected/amd-epyc-2-cores" / catalog.DEFAULT / "2026-11-30T16-17-10Z"
    assert set(told(found)) <= {"result.json"}


def test_a_copy_that_was_half_made_is_made_again(there, mine, here, monkeypatch):
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(collection, "_tell", lambda path, files, done=None: _interrupted(path, files, done))
        collect([there], mine)
    assert len(copies(mine)) == 1
    (found,) = collect([there], mine)
    assert copies(mine) == [found.path]
    assert found.whole


_TELL = collection._tell


def _interrupted(path, files, done):
    if done is not None:
        raise KeyboardInterrupt
    _TELL(path, files)
