"""A study's charts and page: the arms side by side, and above every comparison what they differ in."""

import csv
import json
import shutil

import pytest
from browser import browser_page
from bs4 import BeautifulSoup
from folders import CASES, LENGTHS, chat, head, prefill, table, text
from folders import folder as run_folder_of
from studies import both, claim, folder
from test_report import ATTACK, PRINTABLE, assert_harmless

from llmrepro import charts, metrics, report, study_results

pytestmark = pytest.mark.filterwarnings("error")
CLAIMS = [
    claim(title="llama.cpp decodes faster"),
    claim("each", title="Every prompt", each_case=True),
    claim("bound", order=None, ratio={"point": 1.8}, conditions={"deciding": {"cpu_model": "Another"}}),
]


def soup(path) -> BeautifulSoup:
    return BeautifulSoup(report.write(path).read_text(encoding="utf-8"), "html.parser")


def rows(figure, **where):
    with open(figure.csv, newline="") as file:
        return [r for r in csv.DictReader(file) if all(r[k] == v for k, v in where.items())]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    more = {"out_of_scope": ["How good the answers are."], "differs_in": ["their compilers"]}
    return folder(tmp_path_factory.mktemp("study"), CLAIMS, both(), changes=more)


@pytest.fixture(scope="module")
def page(run):
    return soup(run)


@pytest.fixture(scope="module")
def figures(run):
    return {f.name: f for f in charts.draw_study(run)}


def test_the_charts_show_every_sample_of_both_arms(figures):
    assert list(figures) == ["decode-per-prompt", "ttft-by-length", "startup", "break-even"]
    for arm, told in both().items():
        chat = [r for r in told["records"] if r.workload == "chat"]
        shown = rows(figures["decode-per-prompt"], kind="sample", server=arm)
        assert sorted(float(r["decode_tps"]) for r in shown) == sorted(metrics.decode_tps(r) for r in chat)
        assert len(rows(figures["ttft-by-length"], kind="sample", server=arm)) == 3 * 3 * len(LENGTHS)
        starts = rows(figures["startup"], clock="client", server=arm, what="first token")
        assert [float(r["end_s"]) for r in starts] == [
            b["startup"]["startup.first_completion_s"] for b in told["boots"]
        ]
        assert {r["what"] for r in rows(figures["startup"], clock="engine", server=arm)} == {
            "read metadata",
            "load tensors",
        }


def test_the_alt_text_tells_both_arms(figures):
    for arm in ("llama-cpp", "vllm"):
        assert f"{CASES[0]} on {arm}: mean" in figures["decode-per-prompt"].alt
        assert f"fitted line of {arm}: prefill" in figures["ttft-by-length"].alt
        assert f"{arm}: " in figures["startup"].alt
    assert "llama-cpp costs less of any day" in figures["break-even"].alt


def test_who_is_ahead_in_both_gets_no_break_even_line(figures):
    assert rows(figures["break-even"], kind="break-even") == []
    assert "The line is the break-even" not in figures["break-even"].caption


def test_the_break_even_line_is_the_one_of_the_result(tmp_path):
    path = folder(tmp_path, [], both((50.0, 51.0, 53.0), (100.0, 104.0, 102.0)))
    figure = {f.name: f for f in charts.draw_study(path)}["break-even"]
    (told,) = study_results.compute(path)["break_even"]
    (drawn,) = rows(figure, kind="break-even")
    assert float(drawn["requests_per_restart"]) == told["requests"]["mean"]
    assert (float(drawn["low"]), float(drawn["high"])) == (told["requests"]["low"], told["requests"]["high"])
    assert "it pays from" in figure.alt
    assert len(rows(figure, kind="boot")) == 6


def test_what_is_not_decided_is_not_drawn(tmp_path):
    path = folder(tmp_path, [], both((50.0, 100.0, 53.0), (100.0, 50.0, 55.0)))
    assert study_results.compute(path)["break_even"][0]["found"] == "open"
    assert "break-even" not in {f.name for f in charts.draw_study(path)}
    assert "Not decided:" in text(soup(path))


def test_the_same_folder_gives_the_same_bytes(run, tmp_path, figures):
    again = {f.name: f for f in charts.draw_study(run, tmp_path / "again")}
    for name, figure in figures.items():
        assert again[name].svg.read_bytes() == figure.svg.read_bytes()
    first = report.write(run).read_bytes()
    assert report.write(run).read_bytes() == first


def test_it_is_one_file_that_loads_nothing_and_leads_to_the_arms_pages(page, run):
    links = [a for a in page.find_all("a") if a["href"].startswith("arms/")]
    assert [a["href"] for a in links] == ["arms/llama-cpp/report.html", "arms/vllm/report.html"]
    assert all((run / a["href"]).exists() for a in links)
    for a in links:
        a["href"] = "#"
    assert_harmless(page)
    assert page.title.string == "Two engines · llmrepro"


def test_a_line_above_every_comparison_names_what_differs_beyond_the_engine(page):
    lines = page.find_all("p", class_="line")
    assert len({text(p) for p in lines}) == 1
    assert "2 configurations, not 2 engines" in text(lines[0])
    assert "weights Q4_1 (gguf) against BF16 (safetensors, converted)" in text(lines[0])
    assert "their compilers" in text(lines[0])
    for anchor in ("claims", "values", "charts"):
        after = page.find("h2", id=anchor).find_next("p", class_="line")
        assert after.find_next(["table", "figure"]).find_previous("h2")["id"] == anchor


def test_the_verdict_comes_first_and_the_claims_say_both_sides(page):
    assert "The comparison is complete." in head(page)
    assert "Of 3 claims: 2 reproduced, 1 not comparable." in head(page)
    shown = table(page, "Claims of this study")
    assert shown[0] == ["Claim", "Verdict", "Claimed of a / b", "a / b here", "Why"]
    assert [r[1] for r in shown[1:]] == ["✓ reproduced", "✓ reproduced", "≠ not comparable"]
    assert shown[1][3].startswith("1.80 1.69 to 1.91")
    assert "a: llama-cpp, chat · b: vllm, chat" in shown[1][0]
    assert [r[0] for r in table(page, "Every prompt: decode speed of each case")[1:]] == list(CASES)


def test_the_metrics_stand_side_by_side(page):
    shown = table(page, "Start-up and whole workloads")
    assert shown[0] == ["Metric", "Of", "llama-cpp", "vllm", "llama-cpp / vllm"]
    by = {(r[0], r[1]): r[2:] for r in shown[1:]}
    decode = by["decode speed, tok/s decode_tps", "Five chat prompts, greedy · mean of the prompts' means"]
    assert [cell.split()[0] for cell in decode] == ["114.0", "63.3", "1.80"]
    assert decode[2] == "1.80 1.69 to 1.91", "the ratio that the claim is judged by"
    assert {r[2] for r in table(page, "Each prompt, length and case")[1:]} == {*CASES, *map(str, LENGTHS)}


def test_scope_arms_and_the_command_are_told(page):
    assert "How good the answers are." in text(page)
    assert [r[0] for r in table(page, "The arms of this study")[1:]] == ["llama-cpp", "vllm"]
    assert dict((r[0], r[1:]) for r in table(page, "Known of every arm")[1:])["engine"] == [
        "llama-cpp 2026.10.11549",
        "vllm 0.32.0",
    ]
    assert page.find("h2", id="repeat").find_next("pre").get_text().startswith("llmrepro compare /")


def test_a_recipes_own_page_shows_its_comparisons_among_its_claims(tmp_path):
    def longer(recipe):
        recipe["comparisons"] = [
            {
                "id": "longer",
                "title": "A longer prompt takes longer",
                "metric": "ttft_s",
                "a": {"workload": "prefill", "case": "512"},
                "b": {"workload": "prefill", "case": "128"},
                "order": "above",
                "evidence": "stated",
                "locator": "page 1",
            }
        ]

    path = run_folder_of(tmp_path, [*chat(), *prefill()], change=longer)
    page = soup(path)
    (row,) = table(page, "Claims across two measurements of this run")[1:]
    assert row[1] == "✓ reproduced"
    assert "3 rounds of one boot" in row[4]
    assert page.find(id="claim-longer").find_previous("h2")["id"] == "claims"
    assert "All 11 claims are reproduced." in head(page)
    assert "They are facts" not in head(page)


def test_an_arm_that_is_missing_is_said_first(tmp_path):
    arms = both(vllm={"outcome": "lacking", "reason": "needs 90000 GiB of memory"})
    why = {"reason": "vllm: needs 90000 GiB of memory"}
    path = folder(tmp_path, CLAIMS[:1], arms, outcome="lacking", status=why)
    page = soup(path)
    assert "Not every arm could run here." in head(page)
    assert "vllm: nothing was measured." in head(page)
    assert "Why: vllm: needs 90000 GiB of memory" in head(page)
    assert "good" not in page.find("div", class_="verdict")["class"]
    assert table(page, "Claims of this study")[1][1] == "– not evaluated"


@pytest.mark.parametrize("outcome", ["failed", "stopped", "running"])
def test_a_comparison_that_ended_early_has_a_page(tmp_path, outcome):
    arms = both((100.0,), (50.0,))
    status = {"reason": "vllm: its server died", "next_step": "go on"} if outcome != "running" else {}
    page = soup(folder(tmp_path, CLAIMS[:1], arms, outcome=outcome, status=status))
    word = "interrupted" if outcome == "running" else outcome if outcome == "failed" else "was stopped"
    assert word in head(page)
    assert table(page, "Claims of this study")[1][1] == "≈ inconclusive"


def test_nothing_measured_still_makes_a_page(tmp_path):
    arms = {arm: {"outcome": "lacking", "reason": "published mode was asked for"} for arm in both()}
    page = soup(folder(tmp_path, CLAIMS[:1], arms, outcome="lacking"))
    assert "1 claim across the arms as published; this machine tests none of them." in head(page)
    assert table(page, "Claims across the arms, as published")[1][1] == "llama-cpp above vllm"
    assert "not evaluated" not in text(page)
    assert not page.find_all("img")


def test_hostile_text_stays_text(tmp_path):
    changes = {
        "title": PRINTABLE,
        "question": PRINTABLE,
        "differs_in": [PRINTABLE],
        "out_of_scope": [PRINTABLE],
        "source": {"publication": PRINTABLE},
    }
    path = folder(tmp_path, [claim(title=PRINTABLE, locator=PRINTABLE)], both(), changes=changes, outcome="failed")
    status = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps({**status, "reason": ATTACK, "next_step": ATTACK}))
    page = soup(path)
    for a in page.find_all("a"):
        if a["href"].startswith("arms/"):
            a["href"] = "#"
    assert_harmless(page)
    assert page.h1.get_text() == PRINTABLE


def test_the_page_is_made_from_the_folder_alone(run, tmp_path, monkeypatch):
    before = report.write(run).read_bytes()
    there = tmp_path / "elsewhere"
    shutil.copytree(run, there)
    monkeypatch.setattr("llmrepro.catalog.home", lambda: tmp_path / "nowhere")
    assert report.write(there).read_bytes() == before


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_without_a_network_shows_it_whole(run, scheme, width):
    path = report.write(run)
    with browser_page(offline=True, width=width, color_scheme=scheme) as shown:
        asked, said = [], []
        shown.on("request", lambda request: asked.append(request.url))
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.goto(path.as_uri())
        assert shown.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
        for opened in (False, True):
            shown.evaluate(f"document.querySelectorAll('details').forEach(d => d.open = {str(opened).lower()})")
            assert shown.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    assert said == []
