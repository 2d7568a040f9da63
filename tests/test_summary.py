"""What is told of many runs: a row for each whatever is wrong with it, a page, two files and an exit code."""

import csv
import json
import os
import shutil
from pathlib import Path

import pandas
import pytest
from browser import browser_page
from bs4 import BeautifulSoup
from click.testing import CliRunner
from folders import chat, folder, prefill

from llmrepro import catalog, cell, cli, matrix, report, results, summary
from llmrepro.report import index
from llmrepro.summary import Row


@pytest.fixture
def run(tmp_path):
    """A run folder below a folder of runs, with its result and page."""
    made = folder(tmp_path / "made", [*chat(), *prefill()])
    place = tmp_path / "runs" / catalog.DEFAULT / "2026-01-02T03-04-05Z"
    place.parent.mkdir(parents=True)
    made.rename(place)
    (place / "result.json").write_text(json.dumps(results.compute(place)))
    (place / "report.html").write_text("<p>")
    return place


def runs_of(run: Path) -> Path:
    return run.parents[2]


def test_a_row_tells_the_run(run):
    row = summary.of_folder(run, runs_of(run))
    assert (row.recipe, row.outcome, row.did) == (catalog.DEFAULT, "completed", "there before")
    assert row.words["reproduced"] >= 1 and sum(row.words.values()) == len(row.verdicts)
    assert row.report == f"{catalog.DEFAULT}/{run.name}/report.html" and not row.failed


HOSTILE = "<script>alert(1)</script>\n=1+1 \x1b[2J \u202e"


@pytest.mark.parametrize("name", ["status.json", "result.json", "recipe.json", "machine.json"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "5",
        '{"outcome": 5}',
        '{"verdicts": 5, "comparisons": [3], "cpu": [], "gpus": 4, "engine": []}',
        None,
    ],
)
def test_whatever_is_wrong_with_a_folder_it_has_a_row_and_the_page_is_made(run, name, text, tmp_path):
    (run / name).unlink() if text is None else (run / name).write_text(text)
    row = summary.of_folder(run, runs_of(run))
    assert row.outcome and row.folder
    if name == "status.json":
        assert row.failed and row.reason
    rows = [row]
    summary.write(runs_of(run), rows, summary.exit_code(rows))
    page = index.write(runs_of(run) / "index.html", rows, [], "", "llmrepro matrix")
    assert BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser").table is not None


def set_in(path: Path, *keys, value) -> None:
    """One value of a JSON file, replaced."""
    told = json.loads(path.read_text())
    inner = told
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("name", "keys", "value"),
    [
        ("status.json", ["at"], 5),
        ("status.json", ["at"], ["2026"]),
        ("status.json", ["reason"], {"a": 1}),
        ("status.json", ["next_step"], float("nan")),
        ("recipe.json", ["id"], ["a/b"]),
        ("recipe.json", ["title"], None),
        ("recipe.json", ["engine", "version"], float("inf")),
        ("machine.json", ["cpu", "model"], ["AMD"]),
        ("machine.json", ["gpus"], [{"name": {"a": 1}}]),
        ("result.json", ["verdicts", 0, "word"], "surely"),
        ("result.json", ["verdicts", 0, "word"], ["reproduced"]),
        ("result.json", ["verdicts", 0, "claim"], 7),
        ("result.json", ["verdicts", 0, "ratio"], float("nan")),
        ("result.json", ["verdicts", 0, "ratio"], 10**400),
        ("result.json", ["verdicts", 0, "ratio"], "1.0"),
    ],
)
def test_a_value_of_another_kind_makes_a_run_unreadable_and_spoils_nothing_else(run, name, keys, value):
    whole = run.with_name("2026-01-01T03-04-05Z")
    shutil.copytree(run, whole)
    set_in(run / name, *keys, value=value)
    found = sorted((summary.of_folder(path, runs_of(run)) for path in (run, whole)), key=lambda row: row.folder)
    assert [row.outcome for row in found] == ["completed", "unreadable"]
    assert found[1].recipe == catalog.DEFAULT and "restore it, or run again" in found[1].reason
    assert len(summary.there(runs_of(run), [])) == 2
    summary.write(runs_of(run), found, 12)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    json.loads((runs_of(run) / "summary.json").read_text(), parse_constant=refuse)
    index.write(runs_of(run) / "index.html", found, found, "", "llmrepro matrix")


def test_a_folder_whose_name_is_no_text_has_its_row_and_its_link(run):
    odd = run.with_name(os.fsdecode(b"2027-\xff"))
    run.rename(odd)
    (row,) = summary.there(runs_of(odd), [])
    summary.write(runs_of(odd), [row], 0)
    assert json.loads((runs_of(odd) / "summary.json").read_text())["rows"][0]["folder"] == row.folder
    page = index.write(runs_of(odd) / "index.html", [row], [], "", "llmrepro matrix")
    assert f"{catalog.DEFAULT}/2027-%FF/report.html" in page.read_text()


def test_a_comparison_tells_its_own_ratio(run):
    compared = {"claim": "sooner", "word": "reproduced", "here": 0.5, "ratios": []}
    set_in(run / "result.json", "comparisons", value=[compared])
    assert summary.of_folder(run, runs_of(run)).verdicts[-1]["ratio"] == 0.5


def test_hostile_words_stay_words_on_the_page_and_in_a_spreadsheet(run):
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "outcome": "failed", "reason": f"={HOSTILE}"}))
    row = summary.of_folder(run, runs_of(run))
    rows = [row, Row(f"=cmd()/{HOSTILE}", "refused", "", reason=HOSTILE)]
    summary.write(runs_of(run), rows, 12)
    text = index.write(runs_of(run) / "index.html", rows, [], HOSTILE, HOSTILE).read_text(encoding="utf-8")
    assert "<script" not in text and "\x1b" not in text and "\u202e" not in text
    sheet = list(csv.DictReader((runs_of(run) / "summary.csv").open(encoding="utf-8")))
    assert not [v for line in sheet for v in line.values() if v[:1] in ("=", "+", "-", "@")]
    assert sheet[0]["reason"].startswith("'=<script>alert(1)</script>")


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([], 0),
        ([Row("a/b", "measured", "completed", words={"reproduced": 2, "inconclusive": 1})], 0),
        ([Row("a/b", "measured", "lacking", words={"not_evaluated": 2})], 10),
        (
            [Row("a/b", "measured", "lacking"), Row("a/c", "measured", "completed", words={"not_reproduced": 1})],
            11,
        ),
        ([Row("a/b", "measured", "failed"), Row("a/c", "measured", "completed", words={"not_reproduced": 1})], 12),
        *(
            ([Row("a/b", "measured", outcome)], 12)
            for outcome in ("stopped", "interrupted", "unreadable", "running")
        ),
        ([Row("a/b", "refused", "")], 12),
        ([Row("a/b", "collected", "completed", whole=False)], 12),
    ],
)
def test_a_scheduler_can_tell_apart_what_came_of_it(rows, code):
    assert summary.exit_code(rows) == code


def test_the_files_have_what_a_scheduler_reads(run):
    rows = [
        summary.of_folder(run, runs_of(run), "measured"),
        summary.not_reached(matrix.Cell("a", "a/b", "new"), "a signal"),
    ]
    summary.write(runs_of(run), rows, 0, "a signal")
    told = json.loads((runs_of(run) / "summary.json").read_text())
    assert set(told) == {"made", "llmrepro", "exit_code", "stopped", "rows"}
    assert set(told["rows"][0]) == {
        *("recipe", "did", "outcome", "reason", "next_step", "title", "engine", "machine", "ended", "seconds"),
        *("exit_code", "words", "verdicts", "folder", "report", "whole", "findings"),
    }
    sheet = pandas.read_csv(runs_of(run) / "summary.csv")
    assert (
        list(sheet["recipe"]) == [catalog.DEFAULT, "a/b"] and sheet["reproduced"][0] == rows[0].words["reproduced"]
    )


def test_the_newest_run_of_each_recipe_and_machine_is_shown_beside_those_of_the_matrix(run):
    older = run.with_name("2026-01-01T03-04-05Z")
    shutil.copytree(run, older)
    other = run.with_name("2025-01-01T03-04-05Z")
    shutil.copytree(run, other)
    facts = json.loads((other / "machine.json").read_text())
    (other / "machine.json").write_text(json.dumps({**facts, "cpu": {**facts["cpu"], "model": "another"}}))
    found = summary.there(runs_of(run), [])
    assert sorted(row.folder.rpartition("/")[2] for row in found) == [other.name, run.name]
    mine = summary.of_folder(run, runs_of(run), "measured")
    assert [row.folder.rpartition("/")[2] for row in summary.there(runs_of(run), [mine])] == [other.name]


def test_the_last_words_of_a_run_that_refused_to_begin_are_told(run):
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "outcome": "interrupted"}))
    (run / cell.SAID).write_text("begun\nError: the recipe has changed since; start a new run\n")
    done = matrix.Cell("a", catalog.DEFAULT, "go on", folder=run, end=cell.End(1, 2.0, ""))
    assert "the recipe has changed since" in summary.of_cell(done, runs_of(run)).reason


def test_folders_from_elsewhere_are_verified_and_shown_with_what_is_wrong_with_them(run, tmp_path):
    report.write(run)
    spoiled = tmp_path / "stick" / "run"
    shutil.copytree(run, spoiled)
    result = json.loads((spoiled / "result.json").read_text())
    result["verdicts"][0]["word"] = "not_reproduced"
    (spoiled / "result.json").write_text(json.dumps(result))
    (tmp_path / "stick" / "cut").mkdir()
    (tmp_path / "stick" / "cut" / "status.json").write_text("{")
    (tmp_path / "stick" / "cut" / "recipe.json").write_text("{")
    here = tmp_path / "here"
    said = CliRunner().invoke(cli.main, ["matrix", "--collect", str(tmp_path / "stick"), "--runs-dir", str(here)])
    assert said.exit_code == 12, said.output
    rows = json.loads((here / "summary.json").read_text())["rows"]
    assert {row["did"] for row in rows} == {"collected"} and not any(row["whole"] for row in rows)
    text = (here / "index.html").read_text(encoding="utf-8")
    assert "not whole" in text and "result.json is not what its records give" in text
    (one,) = [row for row in rows if row["folder"]]
    assert one["words"].get("not_reproduced", 0) == 0, "the records decide, not what came"
    assert (here / one["report"]).exists()


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_a_narrow_screen_and_loads_nothing(run, width):
    rows = [summary.of_folder(run, runs_of(run), "measured"), Row("a/b", "refused", "", reason="x" * 300)]
    path = index.write(runs_of(run) / "index.html", rows, [], "", "llmrepro matrix")
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text and "default-src 'none'" in text
    with browser_page(offline=True, width=width) as page:
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert page.get_by_role("link", name=catalog.DEFAULT).count() == 1
