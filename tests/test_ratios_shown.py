"""The chart of ratios: every claim of which there is one, with its interval, its word and what is called equal."""

import csv

import pytest
from claims import claim
from folders import chat, folder, prefill, soup, table

from llmrepro import charts, findings
from llmrepro.charts import ratios

pytestmark = pytest.mark.filterwarnings("error")


def speeds(recipe: dict) -> None:
    """Three published speeds, of which one is near what is found, one far off, and one of another machine."""
    said = {"case": "code_runs", "locator": "page 1"}
    claims = [
        claim(value={"point": 110.0}, id="near", title="Near", **said),
        claim(value={"point": 300.0}, id="far", title="Far", **said),
        claim(value={"at_least": 10.0}, id="least", title="Least", **said),
    ]
    recipe["claims"] = [recipe["claims"][0], *(c.model_dump(mode="json", exclude_unset=True) for c in claims)]
    recipe["comparisons"] = []


@pytest.fixture
def run(tmp_path):
    return folder(tmp_path, [*chat(), *prefill()], change=speeds, parameters={"repeats": 3})


def test_it_holds_the_ratios_of_the_result_and_no_fact(run):
    (figure,) = [f for f in charts.draw(run) if f.name == ratios.NAME]
    with figure.csv.open() as file:
        rows = list(csv.DictReader(file))
    judged = {v["claim"]: v for v in findings.read(run).result["verdicts"] if v["ratio"] is not None}
    assert [row["claim"] for row in rows] == list(judged) and "near" in judged and "far" in judged
    for row in rows:
        told = judged[row["claim"]]
        assert float(row["ratio"]) == told["ratio"] and row["word"] == told["word"]
        assert (row["low"], row["high"]) == tuple("" if x is None else str(x) for x in (told["low"], told["high"]))
    assert "Near: " in figure.alt and "not reproduced" in figure.alt and f"{len(rows)} claims" in figure.caption


def test_words_differ_in_shape_and_in_colour():
    assert len({look["marker"] for look in ratios.LOOKS.values()}) == len(ratios.LOOKS)
    assert len({look["color"] for look in ratios.LOOKS.values()}) == len(ratios.LOOKS)


def test_points_intervals_and_the_stretch_of_equality_are_where_they_are_said(run):
    with charts._style():
        drawing = ratios.ratios(findings.read(run))
    axes = drawing.figure.axes[0]
    points = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "None"]
    assert points == [row["ratio"] for row in drawing.data]
    stretches = [(p.get_x(), p.get_x() + p.get_width()) for p in axes.patches]
    wanted = [(row["equal_from"], row["equal_to"]) for row in drawing.data if row["equal_from"] is not None]
    assert stretches == [pytest.approx(ends) for ends in wanted] and wanted


def test_without_a_ratio_there_is_no_chart(tmp_path):
    path = folder(tmp_path, [*chat(), *prefill()])
    assert ratios.NAME not in {f.name for f in charts.draw(path)}


def test_the_table_of_claims_has_the_ratio_with_its_interval(run):
    page = soup(run)
    header, *rows = table(page, "Claims against")
    shown = {row[0].split()[0]: row[header.index("Ratio")] for row in rows}
    assert shown["Near"].startswith(("0.9", "1.0", "1.1", "0.8")) and " to " in shown["Near"]
    assert [row[header.index("Ratio")] for row in rows if "sha256" in row[0]] == ["–"]
