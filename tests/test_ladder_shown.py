"""Ladders and streams on the page and in their chart: how far it held, where it failed, what is not said."""

import csv
import re

import pytest
from folders import boot, failure, folder, head, record, soup, text

from llmrepro import charts

LADDERS = {
    "workloads": ["ladder"],
    "profile": "full",
    "overrides": {"workloads.ladder.lengths": [512, 1024, 2048, 4096]},
}


def rung(case: str, repeat=0, **changes):
    told = {"workload": "ladder", "n": 24, "prompt": int(case), "ttft_s": int(case) / 200, "tps": 1e5 / int(case)}
    return record(case, repeat, **{**told, "memory": {"server": 0.4, "server_peak": 0.5}, **changes})


def died(case: str, **changes):
    return failure(
        case, workload="ladder", **{"xids": [31], "error": "the server was killed by SIGABRT", **changes}
    )


def section(page, anchor: str) -> str:
    title = page.find(id=anchor)
    found = []
    for node in title.find_all_next():
        if node.name == "h2" and node is not title:
            break
        if node.name in ("p", "tr", "figcaption"):
            found.append(text(node))
    return re.sub(r" ([,.;])", r"\1", " ".join(found))


def test_the_page_says_how_far_it_held_and_where_it_failed_and_what_was_not_asked(tmp_path):
    page = soup(folder(tmp_path, [rung("512"), rung("1024"), died("2048")], parameters=LADDERS))
    said = section(page, "ladders")
    assert "verified up to 1,024 tokens, failed at 2,048 (engine died, Xid 31)." in said
    assert "Longer prompts lie outside the verified range, 4,096 of them not asked." in said
    assert (
        "1,024 tokens ✓ ok 1,024 5.12" in said
        and "2,048 tokens ✗ engine died the server was killed by SIGABRT" in said
    )
    top = head(page)
    assert "The run is complete." in top and "planned requests" not in top
    assert "verified up to 1,024 tokens, failed at 2,048 (engine died, Xid 31)" in top


@pytest.mark.filterwarnings("error")
def test_what_never_failed_has_no_boundary_and_a_failure_at_once_verifies_nothing(tmp_path):
    whole = [rung(n) for n in ("512", "1024", "2048", "4096")]
    said = section(soup(folder(tmp_path / "whole", whole, parameters=LADDERS)), "ladders")
    assert "verified up to 4,096 tokens, nothing failed, so that the boundary lies beyond." in said
    assert "Longer prompts" not in said
    none = folder(tmp_path / "none", [died("512", status="oom", xids=[])], parameters=LADDERS)
    assert "nothing verified, failed at 512 (oom)." in section(soup(none), "ladders")


def test_an_answer_during_which_the_driver_reported_an_xid_is_no_verified_length(tmp_path):
    page = soup(folder(tmp_path, [rung("512"), rung("1024", xids=[13])], parameters=LADDERS))
    said = section(page, "ladders")
    assert "verified up to 512 tokens, failed at 1,024 (Xid 13)." in said
    assert "1,024 tokens ✗ xid" in said


@pytest.mark.filterwarnings("error")
def test_the_chart_has_each_request_at_its_length_and_failures_as_crosses(tmp_path):
    path = folder(tmp_path, [rung("512"), rung("1024"), died("2048")], parameters=LADDERS)
    figure = {f.name: f for f in charts.draw(path)}["ladder-ladder"]
    with open(figure.csv, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["kind"], r["prompt_tokens"], r["ttft_s"], r["ending"]) for r in rows] == [
        ("sample", "512", "2.56", "ok"),
        ("sample", "1024", "5.12", "ok"),
        ("failure", "2048", "", "engine_died"),
    ]
    assert "2,048 tokens: failed (engine_died)" in figure.alt and "verified up to 1,024 tokens" in figure.alt
    assert "n = 2 requests of 1 boot" in figure.caption and "Grey lies beyond" in figure.caption
    again = {f.name: f for f in charts.draw(path, tmp_path / "again")}["ladder-ladder"]
    assert again.svg.read_bytes() == figure.svg.read_bytes()


def test_streams_have_their_throughput_and_a_round_that_lost_one_has_none(tmp_path):
    parameters = {"workloads": ["concurrency"], "overrides": {"workloads.concurrency.streams": [1, 2]}}

    def stream(case, n, repeat=0, **changes):
        sent = {"workload": "concurrency", "server": "four-slots", "stream_number": n, "t_send_ns": n * 10**6}
        return record(case, repeat, **{**sent, "tps": 100.0, "ttft_s": 0.2, **changes})

    whole = [stream("1", 0), stream("2", 0), stream("2", 1), stream("2", 0, repeat=1)]
    lost = failure("2", 1, workload="concurrency", server="four-slots", stream_number=1, status="timeout")
    path = folder(tmp_path, [*whole, lost], [boot("four-slots")], parameters=parameters)
    page = soup(path)
    said = section(page, "values")
    # 48 tokens a stream; the last comes 0.2 + 47 / 100 s after it was sent, and the second is sent 1 ms later
    assert f"{96 / 0.671:.0f}" in said and f"{48 / 0.67:.1f}" in said
    assert "more than once" not in section(page, "flags")
