"""Telemetry and drafted tokens as they are drawn and told: nothing that was not seen, and all that was."""

import csv
import os
import re
import subprocess
import sys

import pytest
from folders import chat, failure, folder, soup, table, text, two_servers
from sampled import asked, gpu, guard, host, ns, started, write

from llmrepro import charts

pytestmark = pytest.mark.filterwarnings("error")
XID = {"kind": "xid", "at": "", "t_ns": ns(72), "xid": 31, "gpu": 0, "text": "<b>MMU</b> Fault"}
STOP = {"kind": "stop", "at": "", "t_ns": ns(80), "reason": "GPU 0 was at 81 °C, and the recipe allows 80"}


def needs_gpu(recipe):
    recipe["needs"]["gpus"] = 1


def figure(path, out=None, name="telemetry"):
    return {f.name: f for f in charts.draw(path, out)}.get(name)


def rows(drawn, kind):
    with open(drawn.csv, newline="") as file:
        return [r for r in csv.DictReader(file) if r["kind"] == kind]


def sampled(tmp_path, telemetry, boots=None, records=None, **more):
    path = folder(tmp_path, records or [asked(10), asked(12, repeat=1)], boots or [started()], **more)
    write(path, telemetry)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two boots of a minute on a GPU; a request of the second fails, its GPU throttles, the guard stops it."""
    telemetry = [
        row
        for n, begin in ((1, 0), (2, 60))
        for s in range(begin, begin + 20)
        for row in (
            host(s, n, steal_share=0.03),
            gpu(s, n, power_w=60.0 if s < begin + 5 else 176.0, throttle="power_cap" if n == 2 else ""),
        )
    ]
    records = [
        asked(10, took_s=8),
        asked(70, boot=2, took_s=4, repeat=1),
        failure("512", boot=2, workload="prefill", t_send_ns=ns(76)),
    ]
    boots = [started(), started(60, replicate=1)]
    path = sampled(tmp_path_factory.mktemp("gpu"), telemetry, boots, records, change=needs_gpu)
    guard(path, 1, xids="unknown: NVML gives no events")
    guard(path, 2, XID, STOP)
    return path


def test_the_strip_has_every_sample_under_the_boots_and_what_they_were_asked(run):
    drawn = figure(run)
    boots = [(r["boot"], float(r["start_s"]), float(r["end_s"]), float(r["ready_s"])) for r in rows(drawn, "boot")]
    assert boots == [("1", 0.0, 19.0, 0.6), ("2", 60.0, 80.0, 60.6)]
    lanes = [(r["boot"], r["what"], float(r["start_s"]), float(r["end_s"])) for r in rows(drawn, "workload")]
    assert lanes == [("1", "chat", 10.0, pytest.approx(18.0)), ("2", "chat", 70.0, pytest.approx(74.0))]
    (lost,) = rows(drawn, "failure")
    assert (lost["what"], lost["status"], float(lost["start_s"])) == ("prefill", "engine_died", 76.0)
    taken = rows(drawn, "sample")
    assert len(taken) == 80
    assert [(r["start_s"], r["power_w"], r["held_back"]) for r in taken if r["device"] == "gpu0"][24:26] == [
        ("64.0", "60.0", "power cap"),
        ("65.0", "176.0", "power cap"),
    ]
    assert [(r["what"], float(r["start_s"])) for r in (*rows(drawn, "xid"), *rows(drawn, "stop"))] == [
        ("Xid 31", 72.0),
        ("guard", 80.0),
    ]


def test_its_words_say_the_data_and_n(run):
    drawn = figure(run)
    for said in (
        "2 boots over 80 s; chat in 2 boots; prefill in 1 boot, 1 request failed",
        "boot 2: stopped by the guard at 80 s",
        "CPUs busy: server 1.2 CPUs, all 1.5 CPUs",
        "CPU time taken by the hypervisor: 3 %",
        "GPU 0, power: mean 147, at most 176 W, limit 180 W",
        "GPU 0, temperature: core 70 °C, memory 78 °C; GPU 0, SM clock: 1,200 MHz; clocks held back in 20 samples",
    ):
        assert said in drawn.alt
    assert drawn.caption.startswith("n = 40 samples of 2 boots, about one a second.")
    assert "✕: a request that failed. ★: an error that the GPU's driver reported. ▼: the guard" in drawn.caption
    assert "cut out" not in drawn.caption and "slice" not in drawn.caption


def test_the_same_folder_gives_the_same_bytes_in_another_process(run, tmp_path):
    here = figure(run, tmp_path / "here")
    code = (
        "import sys; from pathlib import Path; from llmrepro import charts\n"
        "charts.draw(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "TZ": "Asia/Tokyo",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    subprocess.run([sys.executable, "-c", code, run, tmp_path / "there"], check=True, env=environment)
    for file in (here.svg, here.csv, here.txt):
        assert (tmp_path / "there" / file.name).read_bytes() == file.read_bytes(), file.name


def test_rows_without_data_are_left_out_and_without_a_sample_there_is_no_strip(tmp_path):
    bare = dict.fromkeys(("server_gib", "page_cache_gib"))
    path = sampled(tmp_path / "cpu", [*(host(s, **bare) for s in range(15)), gpu(3)])
    drawn = figure(path)
    assert "CPUs busy" in drawn.alt
    for absent in ("Memory", "hypervisor", "GPU", "Temperature"):
        assert absent not in drawn.alt, "the recipe uses no GPU, and nothing else was told"
    assert figure(folder(tmp_path / "none", chat())) is None


def test_a_run_that_was_ended_while_its_server_started_has_a_page(tmp_path):
    path = folder(tmp_path, outcome="stopped", stopped_by="person", reason="interrupted by a person", result=False)
    write(path, [host(1)])
    assert "interrupted by a person" in text(soup(path))


def test_long_gaps_are_cut_and_so_is_one_of_a_clock_that_began_anew(tmp_path):
    begins = {1: 0, 2: 40, 3: 5000, 4: -4000}  # the machine was started anew before the last
    telemetry = [host(begin + s, n) for n, begin in begins.items() for s in range(20)]
    boots = [started(begin, replicate=n - 1) for n, begin in begins.items()]
    drawn = figure(sampled(tmp_path, telemetry, boots))
    places = [(float(r["start_s"]), float(r["end_s"])) for r in rows(drawn, "boot")]
    assert places[:2] == [(0.0, 19.0), (40.0, 59.0)], "a short gap stays"
    assert [round(end - start, 3) for start, end in places] == [19.0] * 4
    assert 59 < places[2][0] < 62 and places[2][1] < places[3][0] < 84
    assert "Dotted: 2 gaps between boots cut out, each over a minute or of unknown length." in drawn.caption


def test_a_long_run_is_thinned_and_keeps_its_extremes_and_its_gaps(tmp_path):
    from llmrepro import findings
    from llmrepro.charts import telemetry, timeline

    peaks = {3002: 0.1, 3005: 1.9}  # in one slice, the boot's end between them
    samples = [host(s, 1 if s < 3004 else 2, busy=peaks.get(s, 1.0)) for s in range(6000)]
    path = sampled(tmp_path, samples, [started(), started(3004, replicate=1)])
    found = findings.read(path)
    time = timeline.of(found)
    points = list(telemetry._points(found, time, telemetry.HOST_PANELS[0], "busy"))
    kept = telemetry._thin(points, time.end_s)
    assert len(kept) <= telemetry.MOST_POINTS + 10
    assert {y for _, y in kept if y == y} == {0.1, 1.0, 1.9}
    values = [y for _, y in kept]
    (broken,) = [place for place, y in enumerate(values) if y != y]
    assert kept[broken][0] == 3004.0 and values.index(0.1) < broken < values.index(1.9)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_the_page_has_a_row_per_boot_and_says_how_xids_were_watched(run):
    page = soup(run)
    head, first, second = table(page, "Each boot, as it was sampled")
    told = dict(zip(head, first, strict=True))
    assert (told["CPUs busy"], told["by the server"], told["its memory, GiB"]) == ("1.5", "1.2", "0.4")
    assert (told["GPU power, W"], told["memory, °C"]) == ("176", "78")
    assert told["Xids"] == "unknown NVML gives no events"
    assert second[-1] == "31 (GPU 0) watched through NVML"
    assert page.find(id="figure-telemetry").find_parent(id="charts") is None
    anchors = [h["id"] for h in page.find_all("h2")]
    assert anchors.index("charts") < anchors.index("telemetry")
    flags = text(page.find("ul", class_="flags"))
    assert "<b>MMU</b> Fault" in flags and "could not be watched: NVML gives no events" in flags
    assert {"power.busy_w", "temperature.core_c", "guard.stop_s"} <= {text(dt.code) for dt in page.find_all("dt")}


def test_energy_stands_with_its_counter_and_columns_without_a_value_are_left_out(tmp_path):
    telemetry = [host(s, energy_j=30.0 * s) for s in range(30)]
    page = soup(sampled(tmp_path, telemetry, records=[asked(10, took_s=12, tokens=120)]))
    head, only = table(page, "Each boot, as it was sampled")
    assert dict(zip(head, only, strict=True))["Energy, J/tok"] == "chat 3 by the CPU package's counter (RAPL)"
    assert not [h for h in head if "GPU" in h or "°C" in h or h == "Xids"]
    (energy,) = [r for r in table(page, "Whole workloads") if r[0].startswith("energy per output token")]
    assert energy[1].startswith("3 J/tok") and "RAPL" in energy[1]


# drafted tokens


def counted(rates, drafts=400.0, *, by_position=True):
    """Counters before and after a workload: a draft's token at each position was accepted at these rates."""
    before = {"spec_drafts": 7.0, "spec_draft_tokens": 21.0, "spec_accepted_tokens": 9.0}
    grown = {"spec_drafts": drafts, "spec_draft_tokens": drafts * len(rates)}
    grown |= {"spec_accepted_tokens": sum(drafts * rate for rate in rates)}
    after = {name: before[name] + value for name, value in grown.items()}
    if by_position:
        before |= {f"spec_accepted_by_position.{i}": 3.0 for i in range(len(rates))}
        after |= {f"spec_accepted_by_position.{i}": 3.0 + drafts * rate for i, rate in enumerate(rates)}
    return {"before": before, "after": after}


def speculated(tmp_path, *counters, servers=("mmap", "mlock")):
    boots = [started(server=s, counters={"chat": c}) for s, c in zip(servers, counters, strict=False)]
    return folder(tmp_path, chat("mmap"), boots, change=two_servers)


def test_the_share_accepted_at_each_position_is_drawn_for_each_server(tmp_path):
    path = speculated(tmp_path, counted([0.75, 0.5, 0.25]), counted([0.5], 100.0))
    drawn = figure(path, name="acceptance")
    shares = [(r["server"], r["position"], float(r["accepted_share"])) for r in rows(drawn, "boot")]
    assert shares == [("mmap", "1", 0.75), ("mmap", "2", 0.5), ("mmap", "3", 0.25), ("mlock", "1", 0.5)]
    assert "chat on mmap: 75%, 50%, 25% of 400 drafts at positions 1 to 3; chat on mlock: 50% of 100" in drawn.alt
    assert drawn.caption.startswith("n = 500 drafts of 2 boots, by the engine's own counters, warm-ups included.")
    shown = table(soup(path), "Drafted tokens, and those accepted at each position")
    assert shown[1:] == [
        ["chat", "mmap", "400", "1,200", "600", "50.0%", "1.5", "75%", "50%", "25%"],
        ["chat", "mlock", "100", "100", "50", "50.0%", "0.5", "50%", "–", "–"],
    ]


def test_boots_of_a_server_are_weighed_by_their_drafts(tmp_path):
    path = speculated(tmp_path, counted([0.5], 100.0), counted([0.9], 300.0), servers=("mmap", "mmap"))
    (together,) = rows(figure(path, name="acceptance"), "all boots")
    assert float(together["accepted_share"]) == pytest.approx(0.8)


def test_where_no_position_is_told_the_mean_per_draft_stands_in_its_place(tmp_path):
    path = speculated(tmp_path, counted([0.6, 0.4], by_position=False))
    drawn = figure(path, name="acceptance")
    assert "chat: 1 accepted tokens per draft, 400 drafts" in drawn.alt
    assert "the engine does not tell: their mean per draft" in drawn.caption
    assert not re.search(r"position \d", text(soup(path)))


def test_without_an_accepted_token_there_is_no_chart(tmp_path):
    assert figure(speculated(tmp_path / "none", counted([0.0])), name="acceptance") is None
    died = {"before": counted([0.5])["before"], "after": {}}
    assert figure(speculated(tmp_path / "died", died), name="acceptance") is None
