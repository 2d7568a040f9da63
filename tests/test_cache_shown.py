"""Prompt cache and restarts in the result, in the charts and on the page: what they were and what they are not."""

import csv

import pytest
from folders import boot, chat, folder, record, soup, table, text

from llmrepro import charts, results

FULL = {"profile": "full", "repeats": 2}
TIMES = {
    "uncached": (2.0, 0),
    "new_tail": (0.1, 514),
    "new_tail_2": (0.11, 514),
    "changed_head": (2.1, 0),
    "original_again": (0.12, 514),
    "newest_after_fill": (0.1, 514),
    "oldest_after_fill": (1.9, 0),
}


def asked(case, repeat=0, ttft_s=0.1, cached=0, **changes):
    fields = {"workload": "prefix", "server": "small-cache", "prompt": 527, "cached_tokens": cached, "n": 4}
    return record(case, repeat, ttft_s=ttft_s, **{**fields, **changes})


def prefix() -> list:
    """Two rounds over the cases, with what llama.cpp logs of each request."""
    return [
        asked(
            case,
            repeat,
            ttft_s + repeat / 100,
            cached,
            engine_log={
                "f_sim": cached / 527,
                "f_keep": 0.966 if cached else 0.0,
                "evicted": 0 if cached else repeat,
            },
        )
        for repeat in (0, 1)
        for case, (ttft_s, cached) in TIMES.items()
    ]


def counted() -> dict:
    before = {"prefix_queries_tokens": 11.0, "prefix_hits_tokens": 0.0}
    after = {"prefix_queries_tokens": 11.0 + 14 * 527, "prefix_hits_tokens": 8.0 * 514}
    return boot("small-cache", counters={"prefix": {"before": before, "after": after}})


STATES = {"first": ("evicted", 0.0, 3.0), "restarted": ("warm", 1.0, 1.0), "restored": ("warm", 1.0, 1.2)}


def started(case, repeat=0, share=None, server="mmap") -> dict:
    state, found, ready_s = STATES[case]
    labels = {"workload": "restart", "case": case, "repeat": repeat, "page_cache": state}
    startup = {"startup.first_completion_s": ready_s + repeat / 10}
    share = found if share is None else share
    return boot(server, **labels, weights_cached_share=share, startup=startup, phases=[])


def restart(repeat=0) -> list:
    n = 3 * repeat
    where = {"workload": "restart", "server": "mmap"}
    return [
        asked("first", repeat, 2.0, 0, boot=n + 1, **where),
        asked("second", repeat, 0.02, 526, boot=n + 1, **where),
        asked("restarted", repeat, 2.1, 0, boot=n + 2, **where),
        asked("restored", repeat, 0.03, 526, boot=n + 3, **where),
    ]


def rounds() -> list[dict]:
    return [started(case, repeat) for repeat in (0, 1) for case in STATES]


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("prefix"), prefix(), [counted()], parameters=FULL)


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("restart"), [*restart(0), *restart(1)], rounds(), parameters=FULL)


def rows(path, metric, **where):
    found = results.compute(path)["metrics"]
    return [r for r in found if r["metric"] == metric and all(r[k] == v for k, v in where.items())]


def figure(path, tmp_path, name):
    found = [f for f in charts.draw(path, tmp_path) if f.name == name]
    return found[0] if found else None


def test_the_hit_rate_is_the_engines_over_the_workload_and_the_answers_per_case(cached):
    (whole,) = rows(cached, "prefix_hit_rate", case=None)
    assert whole["value"] == pytest.approx(8 * 514 / (14 * 527))
    assert whole["note"] == "by the engine's counters"
    per_case = {r["case"]: r["value"] for r in rows(cached, "prefix_hit_rate") if r["case"]}
    assert per_case == {case: pytest.approx(hit / 527) for case, (_, hit) in TIMES.items()}
    assert not rows(cached, "prefill_tps"), "what was cached was not computed: its speed would be none"


def test_an_engine_without_counters_has_no_hit_rate_and_says_so(tmp_path):
    path = folder(tmp_path, prefix(), [boot("small-cache")], parameters=FULL)
    (whole,) = rows(path, "prefix_hit_rate", case=None)
    assert (whole["value"], whole["note"]) == (None, "the engine counts no prompt tokens")
    assert "the engine counts no prompt tokens" in text(soup(path))


def test_a_start_made_for_a_case_is_no_start_of_the_servers_ordinary_ones(restarted):
    found = rows(restarted, "startup.first_completion_s")
    assert {(r["workload"], r["case"]): r["value"] for r in found} == {
        ("restart", "first"): pytest.approx(3.05),
        ("restart", "restarted"): pytest.approx(1.05),
        ("restart", "restored"): pytest.approx(1.25),
    }


def test_rounds_over_several_boots_are_rounds_of_one(restarted):
    said = {c["claim"]: c for c in results.compute(restarted)["comparisons"]}
    assert said["restart-cold"]["here"] == pytest.approx(2.1 / 2.0)
    assert "2 rounds of one boot" in said["restart-cold"]["reason"]


def test_what_was_skipped_is_told_and_has_not_failed(tmp_path):
    skipped = asked("restored", workload="restart", server="mmap", status="skipped", error="it cannot", events=[])
    path = folder(tmp_path, [*restart()[:3], skipped], [started(c) for c in STATES], parameters=FULL)
    flags = results.compute(path)["flags"]
    assert flags == ["restored of restart (mmap) was not asked: it cannot"]
    assert "– skipped" in text(soup(path))


def test_the_page_shows_each_case_and_says_what_f_sim_is_not(cached):
    page = soup(cached)
    shown = table(page, "One long head, several tails, one changed character")
    head = [h.replace("of them ", "") for h in shown[0]]
    line = dict(zip(head, next(r for r in shown if r[0].startswith("new_tail ")), strict=True))
    assert (line["cached"], line["cached share"], line["f_sim"], line["f_keep"]) == (
        "514",
        "97.5%",
        "0.9753",
        "0.966",
    )
    assert {r[head.index("prompts evicted")] for r in shown[1:] if r[0].startswith("uncached")} == {"0 to 1"}
    assert "Neither is a hit rate" in text(page)
    assert "of them from the cache during prefix 4,112" in text(page)


def test_the_page_says_what_each_start_was_made_for(restarted):
    shown = table(soup(restarted), "Seconds from the start of the process")
    made = [(r[0], r[2], r[3]) for r in shown[1:]]
    assert made[:3] == [
        ("boot 1", "restart · first", "0%"),
        ("boot 2", "restart · restarted", "100%"),
        ("boot 3", "restart · restored", "100%"),
    ]
    assert [m[:2] for m in made[6:]] == [
        ("mean", "restart · first"),
        ("mean", "restart · restarted"),
        ("mean", "restart · restored"),
    ]


def test_the_chart_has_every_request_and_the_share_beside_it(cached, tmp_path):
    drawn = figure(cached, tmp_path, "ttft-by-cache-prefix")
    with open(drawn.csv, newline="") as file:
        data = list(csv.DictReader(file))
    samples = [(r["case"], float(r["ttft_s"])) for r in data if r["kind"] == "sample"]
    assert sorted(samples) == sorted((case, t + n / 100) for case, (t, _) in TIMES.items() for n in (0, 1))
    assert "new tail: mean 0.105 s, 97.5% cached" in drawn.alt
    assert "uncached: mean 2.005 s, 0% cached" in drawn.alt
    assert drawn.caption.startswith("n = 14 requests of 1 boot.")


def test_cold_and_warm_starts_are_drawn_apart_from_the_ordinary_ones(restarted, tmp_path):
    drawn = figure(restarted, tmp_path, "cold-start")
    assert "mmap, out of the page cache: mean 3.05 s; mmap, in the page cache: mean 1.15 s" in drawn.alt
    assert "at most 0.0% of the weights" in drawn.caption and "Left out" not in drawn.caption
    assert figure(restarted, tmp_path, "startup") is None


def test_a_start_that_was_not_cold_is_not_drawn_as_one(tmp_path):
    kept = [started("first", share=0.98), started("first", 1), started("restarted")]
    path = folder(tmp_path, restart(), kept, parameters=FULL)
    drawn = figure(path, tmp_path / "figures", "cold-start")
    assert "out of the page cache: mean 3.1 s" in drawn.alt
    assert "Left out: 1 boot not shown to be in the state it was made for." in drawn.caption
    path = folder(tmp_path / "none", restart(), [kept[0], kept[2]], parameters=FULL)
    assert figure(path, tmp_path / "figures", "cold-start") is None
    assert any("could not be put out of the page cache" in f for f in results.compute(path)["flags"])


def test_claims_of_workloads_that_the_profile_leaves_out_are_counted_apart(tmp_path):
    page = text(soup(folder(tmp_path, chat(), parameters={"repeats": 3})))
    assert "7 more were not asked, by this run" in page
