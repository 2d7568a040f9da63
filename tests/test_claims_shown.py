"""Claims in charts and on pages: nothing that was not published is drawn, and what differs is told apart."""

import csv
from types import SimpleNamespace

import pytest
from folders import chat, folder, soup, table, text

from llmrepro import catalog, charts, findings, quotations
from llmrepro.charts import claims as of_claims
from llmrepro.charts import quotations as of_arms

pytestmark = pytest.mark.filterwarnings("error")
SAID = {"evidence": "measured", "server": "default", "workload": "chat", "case": "code_runs"}
SAID |= {"metric": "decode_tps", "unit": "tok/s"}


def publication(recipe: dict) -> None:
    """The default recipe made to publish four decode speeds of a card at 180 W, one of them at 250 W."""
    recipe["conditions"] = {"deciding": {"gpu_power_limit_w": 180, "gpu_memory_gib": None}}
    at_250 = {"deciding": {"gpu_power_limit_w": 250}}
    recipe["claims"] = [
        {"id": "point", "value": {"point": 193.91}, "spread": [193.82, 193.98], "locator": "page 1", **SAID},
        {"id": "range", "value": {"range": [30, 60]}, "locator": "page 1", **SAID},
        {"id": "hot", "value": {"point": 250.0}, "conditions": at_250, "locator": "page 1", **SAID},
        {"id": "read", "value": {"at_least": 10}, "locator": "page 1; the number is this kit's reading", **SAID},
    ]
    recipe["comparisons"] = []


def other_definition(recipe: dict) -> None:
    publication(recipe)
    recipe["claims"][0]["metric"] = "decode_tps.published_2026_08"


def only_ranges(recipe: dict) -> None:
    publication(recipe)
    recipe["claims"] = [recipe["claims"][1], {**recipe["claims"][1], "id": "range-2"}]


def published(tmp_path, change=publication):
    return folder(tmp_path, change=change, parameters={"mode": "published"}, outcome="lacking")


def drawing(path):
    with charts._style():
        (one,) = of_claims.published(findings.read(path))
    return one


def markers(figure) -> list[tuple]:
    """(marker, x) of every point that is drawn."""
    lines = figure.axes[0].lines
    return [(line.get_marker(), x) for line in lines if line.get_linestyle() == "None" for x in line.get_xdata()]


def bars(figure) -> list[tuple]:
    return [(b.get_x(), b.get_x() + b.get_width()) for b in figure.axes[0].patches]


def legend(figure) -> list[str]:
    return [entry.get_text() for one in figure.legends for entry in one.get_texts()]


def test_the_data_of_a_chart_are_numbers_as_they_were_published(tmp_path):
    figure = next(f for f in charts.draw(published(tmp_path)) if f.name == "claims-decode_tps")
    with open(figure.csv, newline="") as file:
        rows = {row["claim"]: row for row in csv.DictReader(file)}
    assert (rows["point"]["spread_low"], rows["point"]["spread_high"]) == ("193.82", "193.98")
    assert (rows["range"]["spread_low"], rows["range"]["published_high"]) == ("", "60.0")
    assert {claim for claim, row in rows.items() if row["other_conditions"] == "True"} == {"hot"}


def test_a_range_is_a_bar_and_another_condition_another_marker(tmp_path):
    figure = drawing(published(tmp_path)).figure
    assert markers(figure) == [("D", 193.91), ("s", 250.0), ("D", 10.0)]
    assert bars(figure) == [(30.0, 60.0)]
    assert legend(figure) == ["published", "published range", "published, in other conditions"]


def test_a_legend_has_only_what_is_drawn(tmp_path):
    figure = drawing(published(tmp_path, only_ranges)).figure
    assert (markers(figure), legend(figure)) == ([], ["published range"])


def test_rows_of_another_definition_are_marked_and_said(tmp_path):
    one = drawing(published(tmp_path / "two", other_definition))
    assert one.caption.endswith(
        "Not one definition: [a] decode speed, (N-1) from the first event to the stream's end; [b] decode speed."
    )
    assert [row["title"][:3] for row in one.data] == ["[a]", "[b]", "[b]", "[b]"]
    same = drawing(published(tmp_path / "one"))
    assert "definition" not in same.caption and same.data[0]["title"] == "Point"


def test_the_table_tells_the_usual_conditions_once_and_others_with_their_claim(tmp_path):
    page = soup(published(tmp_path))
    line = next(text(p) for p in page.find_all("p") if text(p).startswith("All in these conditions unless said"))
    assert "enforced power limit 180 W" in line and "GPU's memory" not in line and "None" not in line
    behind = {row[0].split()[0]: row[-2] for row in table(page, "Claims as published")[1:]}
    assert behind["hot"] == "enforced power limit 250 W" and "W" not in behind["range"]


@pytest.mark.parametrize("records", [[], chat()], ids=["published", "measured"])
def test_a_threshold_that_this_kit_reads_into_words_is_said_to_be_ours(tmp_path, records):
    path = folder(tmp_path, records, change=publication) if records else published(tmp_path)
    rows = table(soup(path), "Claims against this run" if records else "Claims as published")
    assert [row[0].split()[0] for row in rows[1:] if "(threshold ours)" in " ".join(row)] == ["read"]


def test_why_a_verdicts_interval_is_the_wider_one_is_said_where_there_is_one(tmp_path):
    said = "it also counts how far starts lie apart"
    assert said in text(soup(folder(tmp_path / "run", chat(), change=publication)).main)
    assert said not in text(soup(published(tmp_path / "publication")).main)


def test_a_studys_ranges_are_bars_that_tell_their_arms_apart():
    study = catalog.load_study("llama-4-scout/cpu-and-gpu")
    recipes = {arm.id: catalog.load(arm.recipe) for arm in study.arms}
    found = SimpleNamespace(study=study, arms=recipes, quoted=quotations.rows(study, recipes))
    with charts._style():
        drawn = {one.name: one for one in of_arms.side_by_side(found)}
    one = drawn["published-decode-speed"]
    assert bars(one.figure) == [(16.3, 17.5), (30.0, 60.0)]
    assert [b.get_fill() for b in one.figure.axes[0].patches] == [True, False]
    ranges = {r["published_low"] for r in one.data if r["published_low"] != r["published_high"]}
    assert len(markers(one.figure)) == len(one.data) - len(ranges)
    assert legend(one.figure) == ["cpu, published range", "gpu, published", "gpu, published range"]
    assert "Not one definition: [a] decode speed; [b] output tokens per second" in one.caption
