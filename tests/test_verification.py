"""Every number of a folder can be made again from its records, and what was changed is told by its file."""

import contextlib
import csv
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import studies
from click.testing import CliRunner
from folders import MACHINE, chat, folder, prefill

from llmrepro import (
    cli,
    comparison,
    confinement,
    deviations,
    imported,
    report,
    results,
    run_folder,
    study_results,
    verification,
)
from llmrepro import run as runs
from llmrepro.run_folder import read_json

RECEIPTS = Path(__file__).parent / "data" / "receipts" / "two-suites.csv"
COMMITTED = Path(__file__).parents[1] / "figures/smollm2-135m/run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = folder(tmp_path_factory.mktemp("finished"), chat(rounds=1))
    report.write(path)
    return path


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def here(monkeypatch):
    """Without a process of its own, whose start takes longer than what it does."""
    monkeypatch.setattr(confinement, "call", lambda function, *args: function(*args))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old), old
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def told(path: Path) -> dict[str, str]:
    """What was found of each file, where something was."""
    found = verification.verify(path)
    assert found.whole == all(one.only_told for one in found.findings)
    return {one.file: one.sentence for one in found.findings}


def files(path: Path) -> dict[str, tuple]:
    return {p.name: (p.lstat().st_mtime_ns, p.lstat().st_size) for p in sorted(path.rglob("*"))}


def test_a_folder_as_the_kit_wrote_it_is_whole_and_nothing_in_it_is_written(run, here):
    before = files(run)
    assert verification.verify(run) == verification.Verified(run, ())
    assert files(run) == before


def test_the_command_says_which_are_whole_and_exits_so(finished):
    """With the process of its own that reads a folder."""
    asked = CliRunner().invoke(cli.main, ["verify", str(finished), str(finished.parent)])
    whole, not_whole, why = asked.output.splitlines()
    assert (whole, not_whole) == (f"whole     {finished}", f"not whole {finished.parent}")
    assert why.startswith("  the folder is no run folder")
    assert asked.exit_code == 1


def test_a_records_time_that_was_edited_is_told_with_what_it_changed(run, here):
    lines = (run / "records.jsonl").read_text().splitlines(keepends=True)
    record = json.loads(lines[3])
    record["events"] = [[t * 0.99, *rest] for t, *rest in record["events"]]
    lines[3] = json.dumps(record) + "\n"
    (run / "records.jsonl").write_text("".join(lines))
    found = told(run)
    assert "was changed after result.json was computed from it" in found["records.jsonl"]
    assert "is not of the files as they are now: metrics › " in found["result.json"]
    assert "is not what the records give: line " in found["figures/decode-per-prompt.csv"]
    assert "is not the page of this folder" in found["report.html"]


def test_a_line_that_was_removed_is_told(run, here):
    lines = (run / "records.jsonl").read_text().splitlines(keepends=True)
    (run / "records.jsonl").write_text("".join(lines[:-1]))
    assert "was changed after" in told(run)["records.jsonl"]


def test_a_file_that_is_gone_is_told(run, here):
    (run / "weights.json").unlink()
    assert told(run)["weights.json"] == "is missing, and result.json was computed from it"


def test_a_file_that_is_new_is_told(run, here):
    shutil.copyfile(run / "boots/1.json", run / "boots/2.json")
    found = told(run)
    assert found["boots/2.json"] == "is new: result.json was computed without it"
    assert "is not of the files as they are now" in found["result.json"]


def test_a_verdict_that_was_edited_is_named_by_its_claim(run, here):
    result = read_json(run / "result.json")
    verdict = result["verdicts"][0]
    was, verdict["word"] = verdict["word"], "reproduced" if verdict["word"] != "reproduced" else "not_reproduced"
    (run / "result.json").write_text(json.dumps(result))
    found = told(run)
    assert list(found) == ["result.json"]
    assert (
        f"verdicts › {verdict['claim']} › word is {verdict['word']!r} there and {was!r} by the records"
        in (found["result.json"])
    )


def test_a_verdict_that_was_taken_out_is_told(run, here):
    result = read_json(run / "result.json")
    gone = result["verdicts"].pop(0)["claim"]
    (run / "result.json").write_text(json.dumps(result))
    assert f"verdicts › {gone} is missing there" in told(run)["result.json"]


def test_the_last_digit_of_another_processor_is_no_difference(run, here):
    result = read_json(run / "result.json")
    row = next(r for r in result["metrics"] if r["metric"] == "decode_tps")
    row["value"] *= 1 + 1e-14
    (run / "result.json").write_text(json.dumps(result))
    assert told(run) == {}


def test_another_version_of_the_kit_is_not_taken_for_a_change_by_hand(tmp_path, here):
    path = folder(tmp_path, chat(rounds=1), machine={**MACHINE, "llmrepro": "0.0.9"})
    edit(path / "result.json", '"word": "', '"word": "not_')
    edit(report.write(path), "Rendered by llmrepro 0.1.0", "Rendered by llmrepro 0.0.9")
    found = told(path)
    assert "by this version, llmrepro 0.1.0, than by 0.0.9" in found["result.json"]
    assert "rendered otherwise by this version, llmrepro 0.1.0, than by 0.0.9" in found["report.html"]
    assert "changed" not in " ".join(found.values())


def test_a_table_of_a_chart_that_was_edited_is_told_with_its_line(run, here):
    path = run / "figures/decode-per-prompt.csv"
    with path.open(newline="") as file:
        number = next(cell for cell in list(csv.reader(file))[2] if "." in cell)
    edit(path, number, "999.5")
    found = told(run)
    assert list(found) == ["figures/decode-per-prompt.csv"]
    assert "is not what the records give: line 3 says '999.5'" in found["figures/decode-per-prompt.csv"]


def test_a_chart_of_other_records_is_told(run, here):
    shutil.copyfile(run / "figures/startup.svg", run / "figures/roofline.svg")
    edit(run / "figures/startup.svg", "<path", "<path ")
    found = told(run)
    assert found["figures/roofline.svg"] == "is no chart that the records give"
    assert "drawn otherwise" in found["figures/startup.svg"]


def test_a_page_that_was_edited_is_told_with_what_of_it(run, here):
    page = (run / "report.html").read_text(encoding="utf-8")
    edit(run / "report.html", "<main", "<script>alert(1)</script><main")
    found = told(run)
    assert list(found) == ["report.html"]
    assert "is not the page of this folder: it says '" in found["report.html"]
    assert "alert(1)" in found["report.html"]
    other_picture, other_html = page.replace("base64,", "base64,AAAA", 1), page.replace("<main", "<main id='x'", 1)
    assert deviations.of_pages(page, page) == ""
    assert deviations.of_pages(other_picture, page).endswith("and its pictures are not")
    assert deviations.of_pages(other_html, page).endswith("and its HTML is not")


def test_a_prompt_that_was_edited_is_told_by_its_own_sha256(run, here):
    kept = read_json(run / "prompts.json")
    first = next(iter(kept))
    (run / "prompts.json").write_text(json.dumps({**kept, first: kept[first] + "!"}))
    assert told(run)["prompts.json"].startswith(f"was changed: a text has not the sha256 {first[:12]}")


def test_an_interrupted_run_is_whole_wherever_it_was_copied_to(tmp_path, here):
    path = folder(tmp_path, chat(rounds=1), outcome="running", result=False)
    report.write(path)
    moved = shutil.copytree(path, tmp_path / "elsewhere")
    for place in (path, moved):
        found = verification.verify(place)
        assert found.whole
        assert {one.file for one in found.findings} == {"status.json", "result.json"}
    edit(moved / "report.html", "without a word", "with a word")
    assert "report.html" in told(moved)


def test_a_run_that_failed_after_its_results_is_whole(tmp_path, here):
    path = folder(tmp_path, prefill(rounds=1))  # of the claims some have no value, and the reason tells the end
    with contextlib.closing(runs.Run(path)) as one:
        one.set_status("failed", "charts", reason="the disk is full")
    assert "was computed before the run ended as failed" in told(path)["result.json"]
    assert verification.verify(path).whole


def test_a_folder_that_is_written_is_left(run):
    held = run_folder.Folder(run)
    try:
        assert told(run) == {"": "is still being written; verify it when its run has ended"}
    finally:
        held.close()
    assert told(run.parent)[""].startswith("is no run folder")


def test_a_study_is_verified_with_its_arms(tmp_path, here):
    path = studies.folder(tmp_path, [studies.claim()], studies.both(fast=(100.0,), slow=(50.0,)))
    for arm in comparison.arm_folders(path).values():
        (arm / "result.json").write_text(json.dumps(results.compute(arm)))
    (path / "result.json").write_text(json.dumps(study_results.compute(path)))
    report.write(path)
    assert told(path) == {}
    edit(path / "arms/vllm/records.jsonl", '"prompt_tokens":', '"prompt_tokens": 1')
    edit(path / "study.json", "Which is faster?", "Which is slower?")
    found = told(path)
    assert "was changed after" in found["arms/vllm/records.jsonl"]
    assert "was changed after" in found["study.json"]
    assert {"report.html", "arms/vllm/report.html", "arms/vllm/result.json"} <= set(found)
    assert not [file for file in found if file.startswith("arms/llama-cpp")]


def test_an_import_is_verified(tmp_path, here):
    path = imported.create(RECEIPTS, runs_dir=str(tmp_path / "runs"))
    report.write(path)
    assert told(path) == {}
    edit(path / "receipts.jsonl", '"output_tokens":101', '"output_tokens":102')
    found = told(path)
    assert "was changed after" in found["receipts.jsonl"]
    assert "metrics › " in found["result.json"]


def test_the_committed_run_has_the_records_that_its_result_was_computed_from(here):
    assert not [file for file in told(COMMITTED) if file not in ("result.json", "report.html")]


OPENED: list[str] = []


def _noted(event: str, args: tuple) -> None:
    if event == "open":
        OPENED.append(str(args[0]))


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A folder beside the run in which nothing may be opened."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "records.jsonl").write_text("a secret\n")
    sys.addaudithook(_noted)
    OPENED.clear()
    yield place
    assert not [path for path in OPENED if path.startswith(str(place))]


@pytest.mark.parametrize("name", ["records.jsonl", "boots/1.json", "boots", "result.json", "figures"])
def test_a_link_is_told_and_not_followed(run, outside, here, name):
    target = outside / "records.jsonl" if "." in name else outside
    shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    (run / name).symlink_to(target)
    assert told(run)[name] == "is a link, which is not followed"


def test_names_in_json_that_lead_outside_lead_nowhere(run, outside, here):
    result = read_json(run / "result.json")
    result["inputs"] |= {"../outside/records.jsonl": "0" * 64, str(outside / "records.jsonl"): "0" * 64}
    (run / "result.json").write_text(json.dumps(result))
    weights = read_json(run / "weights.json")
    (run / "weights.json").write_text(json.dumps({**weights, "path": str(outside / "records.jsonl")}))
    assert told(run)["../outside/records.jsonl"] == "is missing, and result.json was computed from it"


@pytest.mark.parametrize("name", ["records.jsonl", "report.html", "boots/2.json", ".lock"])
def test_a_pipe_is_not_waited_for(run, here, name):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    found = told(run)
    assert found.get(name) == (None if name == ".lock" else "is no ordinary file, so it is not opened")


def test_two_gigabytes_of_records_are_not_read(run, here):
    os.truncate(run / "records.jsonl", 2 << 30)
    assert told(run) == {"records.jsonl": "has 2,048.0 MiB, more than the 128.0 that are read"}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("recipe.json", b"{", "recipe.json is broken"),
        ("status.json", b"[" * 100_000, "status.json is broken"),
        ("records.jsonl", b'{"a": 1}\n', "cannot be read: ValidationError"),
        ("records.jsonl", b"\xff\xfe\n", "line 1: not a record"),
        ("boots/1.json", b"[]", "cannot be read"),
        ("machine.json", b'{"cpu": 7}', "cannot be read"),
        ("parameters.json", b"9" * 5000, "parameters.json is broken"),
    ],
)
def test_a_broken_file_is_a_sentence(run, here, name, content, said):
    (run / name).write_bytes(content)
    found = told(run)
    assert said in found[""]
    assert "\n" not in found[""]
    assert "llmrepro-verify-" not in str(found)  # the copy that was read is nobody's concern


@pytest.mark.parametrize("content", [b"[]", b'{"inputs": {"a": []}}', b"[" * 100_000])
def test_a_broken_result_is_told_and_the_records_are_read_all_the_same(run, here, content):
    (run / "result.json").write_bytes(content)
    found = told(run)
    assert "result.json" in found
    assert "" not in found


def test_what_takes_too_long_or_too_much_memory_is_ended(run, monkeypatch):
    monkeypatch.setattr(confinement, "LIMIT_S", 0.2)
    assert told(run) == {"": "takes more than 0.2 s to read"}
    monkeypatch.setattr(confinement, "LIMIT_S", 60.0)
    monkeypatch.setattr(confinement, "LIMIT_GIB", 0.3)
    (run / "records.jsonl").write_bytes(b"[]\n" * 2_500_000)
    assert "takes more memory to read than it may have" in told(run)[""]


def test_what_a_terminal_would_obey_is_not_shown(run, here):
    result = read_json(run / "result.json")
    result["inputs"]["\x1b[2Jgone\n"] = "0" * 64
    (run / "result.json").write_text(json.dumps(result))
    assert not [file for file in told(run) if "\x1b" in file]
