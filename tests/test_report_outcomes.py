"""Every way a run can end has a page: why it ended, what to do next, and whatever was measured."""

import pytest
from folders import CASES, chat, folder, head, soup, table

from llmrepro import catalog
from llmrepro import run as runs

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize(
    ("outcome", "status", "said"),
    [
        (
            "failed",
            {"reason": "the port is taken", "next_step": "run again", "log_tail": ["line one", "line two"]},
            "The run failed in the stage measure. 15 of 34 planned requests were made.",
        ),
        (
            "stopped",
            {"reason": "interrupted by a person", "stopped_by": "person", "next_step": "go on with resume='x'"},
            "The run was stopped in the stage measure, by a person. 15 of 34 planned requests were made.",
        ),
    ],
)
def test_a_run_that_ended_early_says_why_and_shows_what_there_is(tmp_path, outcome, status, said):
    run = folder(tmp_path, chat(), outcome=outcome, result=False, **status)
    page = soup(run)
    assert said in head(page)
    assert f"Why: {status['reason']}" in head(page)
    assert f"Next: {status['next_step']}" in head(page)
    for line in status.get("log_tail", []):
        assert line in page.find("div", class_="verdict").pre.get_text().split("\n")
    assert "good" not in page.find("div", class_="verdict")["class"]
    assert len(table(page, "Five chat prompts, greedy: each prompt")) == 1 + len(CASES)
    assert not (run / "result.json").exists()


def test_a_run_whose_process_vanished_is_interrupted(tmp_path):
    page = soup(folder(tmp_path, chat(), outcome="running", result=False))
    assert "The run was interrupted in the stage measure." in head(page)
    assert "Next: go on with `llmrepro run --resume " in head(page)


def test_a_run_that_goes_on_says_so(tmp_path):
    path = folder(tmp_path, chat(), outcome="running", result=False)
    held = runs.Run(path)
    assert "The run is still going on" in head(soup(path))
    held.close()


def test_a_machine_that_lacks_something_gets_what_is_published(tmp_path):
    page = soup(folder(tmp_path, outcome="lacking", reason="needs 999 GiB of memory; this machine has 16"))
    assert "Nothing was measured here" in head(page)
    recipe = catalog.load(catalog.DEFAULT)
    claims = len(recipe.claims) + len(recipe.comparisons)
    assert f"{claims} claims as published; this machine tests none of them." in head(page)
    assert "Why: needs 999 GiB of memory" in head(page)
    assert len(table(page, "Claims as published")) == 1 + len(recipe.claims)
    assert len(table(page, "Claims across two measurements, as published")) == 1 + len(recipe.comparisons)
    assert not page.find("th", string="Found here")
    assert "not evaluated" not in page.get_text()
    assert "1.5 GiB of memory" in dict(table(page, "Pins"))["needs"]
    assert not page.find_all("img")
    assert [h["id"] for h in page.find_all("h2")] == ["claims", "conditions", "machine", "repeat"]


def test_a_run_that_failed_before_it_looked_at_the_machine_has_a_page(tmp_path):
    path = folder(tmp_path, outcome="failed", result=False, reason="the disk is full")
    (path / "machine.json").unlink()
    page = soup(path)
    assert "Why: the disk is full" in head(page)
    assert "All 10 claims are not evaluated." in head(page)
