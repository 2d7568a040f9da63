"""Charts: what is drawn is what was measured, the same folder gives the same bytes, and words say it too."""

import csv
import os
import shutil
import subprocess
import sys

import matplotlib as mpl
import pytest
from bs4 import BeautifulSoup
from folders import CASES, LENGTHS, boot, chat, failure, folder, prefill, record, two_servers

from llmrepro import charts, metrics, results

pytestmark = pytest.mark.filterwarnings("error")


def drawn(path, out=None):
    return {figure.name: figure for figure in charts.draw(path, out)}


def rows(figure, kind):
    with open(figure.csv, newline="") as file:
        return [r for r in csv.DictReader(file) if r.get("kind", r.get("clock")) == kind]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("whole"), [*chat(), *prefill()])


def test_a_whole_run_has_three_charts_each_as_four_files(run):
    figures = drawn(run)
    assert list(figures) == ["decode-per-prompt", "ttft-by-length", "startup"]
    for name, figure in figures.items():
        assert (figure.svg, figure.csv) == (run / f"figures/{name}.svg", run / f"figures/{name}.csv")
        assert figure.svg.read_bytes().startswith(b"<?xml")
        assert figure.png.read_bytes().startswith(b"\x89PNG")
        assert figure.txt.read_text() == f"{figure.alt}\n"
    assert sorted(f.name for f in (run / "figures").iterdir()) == sorted(
        f"{name}.{kind}" for name in figures for kind in charts.FORMATS
    )


def test_they_can_be_drawn_elsewhere_and_the_run_folder_stays_as_it_is(run, tmp_path):
    shutil.rmtree(run / "figures", ignore_errors=True)
    figures = drawn(run, tmp_path / "figures" / "study")
    assert figures["startup"].svg == tmp_path / "figures" / "study" / "startup.svg"
    assert not (run / "figures").exists()


def test_decode_csv_holds_every_sample_and_the_means_of_the_result(run):
    figure = drawn(run)["decode-per-prompt"]
    assert [float(r["decode_tps"]) for r in rows(figure, "sample")] == [metrics.decode_tps(r) for r in chat()]
    found = {
        r["case"]: (float(r["decode_tps"]), float(r["low"]), float(r["high"]), int(r["n"]))
        for r in rows(figure, "mean")
    }
    means = [
        r
        for r in results.compute(run)["metrics"]
        if r["metric"] == "decode_tps" and r["statistic"] in ("mean", "mean_of_means")
    ]
    assert found == {r["case"] or "all prompts": (r["value"], r["low"], r["high"], r["n"]) for r in means}
    assert len(found) == len(CASES) + 1


def test_ttft_csv_holds_every_sample_and_a_line_whose_slope_is_the_prefill_speed(run):
    figure = drawn(run)["ttft-by-length"]
    assert [(int(r["prompt_tokens"]), float(r["ttft_s"])) for r in rows(figure, "sample")] == [
        (r.prompt_tokens, metrics.ttft_s(r)) for r in prefill()
    ]
    (x1, y1), (x2, y2) = [(int(r["prompt_tokens"]), float(r["ttft_s"])) for r in rows(figure, "line")]
    (slope,) = [r for r in results.compute(run)["metrics"] if r["metric"] == "prefill_tps.slope"]
    assert (x2 - x1) / (y2 - y1) == pytest.approx(slope["value"])
    assert (x1, x2) == (min(LENGTHS), max(LENGTHS))
    assert f"prefill {slope['value']:.1f} tok/s" in figure.alt


def test_startup_csv_holds_the_marks_of_the_client_and_the_phases_of_the_engine(run):
    figure = drawn(run)["startup"]
    assert [float(r["end_s"]) for r in rows(figure, "client")] == sorted(boot()["startup"].values())
    assert [(r["what"], float(r["start_s"]), float(r["end_s"])) for r in rows(figure, "engine")] == [
        tuple(p) for p in boot()["phases"]
    ]
    assert "its own clock, which starts when its process first logs" in figure.caption


def test_the_same_folder_gives_the_same_bytes_in_another_process(run, tmp_path):
    here = drawn(run, tmp_path / "here")
    code = (
        "import sys; from pathlib import Path; from llmrepro import charts\n"
        "charts.draw(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    subprocess.run(
        [sys.executable, "-c", code, run, tmp_path / "there"],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    for figure in here.values():
        for file in (figure.svg, figure.csv, figure.txt):
            assert (tmp_path / "there" / file.name).read_bytes() == file.read_bytes(), file.name


def test_alt_text_says_the_data_and_the_caption_says_n(run):
    figures = drawn(run)
    for case in CASES:
        assert f"{case}: mean 11" in figures["decode-per-prompt"].alt
    assert "3 requests from 100 to 120" in figures["decode-per-prompt"].alt
    for length in LENGTHS:
        assert f"{length} tokens: 3 requests, mean" in figures["ttft-by-length"].alt
    assert "port open 0.100 s" in figures["startup"].alt
    assert figures["decode-per-prompt"].caption.startswith("n = 15 requests in 3 rounds of 1 boot.")
    assert figures["ttft-by-length"].caption.startswith("n = 9 requests of 1 boot")
    assert figures["startup"].caption.startswith("n = 1 boot.")


def test_a_failure_is_drawn_at_its_length_and_is_in_no_fit(tmp_path):
    lost = failure("512", 2, workload="prefill")
    whole = [r for r in prefill() if (r.case, r.repeat) != ("512", 2)]
    figure = drawn(folder(tmp_path, [*whole, lost]))["ttft-by-length"]
    assert [(r["prompt_tokens"], r["ttft_s"], r["status"]) for r in rows(figure, "failure")] == [
        ("512", "", "engine_died")
    ]
    assert len(rows(figure, "sample")) == 8
    assert "failed: 512 tokens (engine_died)" in figure.alt
    assert "✕" in figure.caption


def test_failed_chat_requests_are_counted_in_the_caption(tmp_path):
    figure = drawn(folder(tmp_path, [*chat(), failure("code_runs", 3)]))["decode-per-prompt"]
    assert "1 request failed and has no speed." in figure.caption
    assert len(rows(figure, "sample")) == 15


def test_only_failures_make_a_chart_without_a_line(tmp_path):
    figure = drawn(folder(tmp_path, [failure("512", workload="prefill")]))["ttft-by-length"]
    assert rows(figure, "line") == []
    assert "No line" in figure.caption


def test_servers_and_boots_are_told_apart(tmp_path):
    records = [
        r
        for n, server in enumerate(("mmap", "mmap", "mlock", "mlock"), 1)
        for r in (*chat(server, n, tps=100 + n), *prefill(server, n, tps=200 + n))
    ]
    boots = [boot(server, n % 2, 1 + n / 10) for n, server in enumerate(("mmap", "mmap", "mlock", "mlock"))]
    figures = drawn(folder(tmp_path, records, boots, change=two_servers))
    assert {r["server"] for r in rows(figures["decode-per-prompt"], "mean")} == {"mmap", "mlock"}
    assert len(rows(figures["decode-per-prompt"], "sample")) == 60
    assert "all prompts on mlock: mean" in figures["decode-per-prompt"].alt
    assert "fitted line of mmap: prefill" in figures["ttft-by-length"].alt
    assert "boot 4 (mlock):" in figures["startup"].alt


def test_a_chart_without_data_is_not_drawn_and_an_old_one_is_taken_away(tmp_path):
    assert drawn(folder(tmp_path / "none")) == {}
    run = folder(tmp_path / "some", chat(), boots=[boot()])
    (run / "figures").mkdir()
    for name in ("ttft-by-length.svg", "mine.svg"):
        (run / "figures" / name).write_text("of another day")
    assert list(drawn(run)) == ["decode-per-prompt", "startup"]
    assert not (run / "figures" / "ttft-by-length.svg").exists()
    assert (run / "figures" / "mine.svg").exists()


def test_one_request_has_a_mean_and_no_interval(tmp_path):
    figure = drawn(folder(tmp_path, [record()]))["decode-per-prompt"]
    (mean,) = rows(figure, "mean")
    assert (mean["low"], mean["high"], mean["n"]) == ("", "", "1")
    assert "code_runs: mean 100, 1 request" in figure.alt


def test_the_notebook_that_draws_keeps_its_own_settings(run):
    from matplotlib import pyplot

    with mpl.rc_context({"font.family": ["serif"], "axes.titlesize": 33, "axes.grid": False}):
        before = dict(mpl.rcParams)
        drawn(run)
        assert dict(mpl.rcParams) == before
    assert pyplot.get_fignums() == []


def test_japanese_labels_have_glyphs(tmp_path):
    from matplotlib.figure import Figure

    with charts._style():
        figure = Figure()
        figure.text(0.5, 0.5, "デコード速度 再現")  # a missing glyph is a warning, here an error
        figure.savefig(tmp_path / "words.svg")


def test_html_holds_the_picture_itself_and_escapes_the_words(run):
    figure = drawn(run)["startup"]
    hostile = charts.Figure(
        figure.name,
        "<b>t</b>",
        "<script>c</script>",
        'a" onload="x',
        figure.svg,
        figure.png,
        figure.csv,
        figure.txt,
    )
    page = BeautifulSoup(hostile.html(), "html.parser")
    assert page.figure.img["src"].startswith("data:image/svg+xml;base64,")
    assert page.figure.img["alt"] == 'a" onload="x'
    assert page.figure.figcaption.get_text() == "<b>t</b>. <script>c</script>"
    assert [t.name for t in page.find_all(True)] == ["figure", "img", "figcaption", "strong"]
