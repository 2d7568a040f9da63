"""Numbers from elsewhere: read whole or not at all, under every definition they allow, labelled everywhere."""

import csv
import itertools
import json
import os
import random
import shutil
from pathlib import Path

import folders
import pytest
from click.testing import CliRunner
from folders import chat, folder, soup, table, text

from llmrepro import catalog, cli, imported, metrics, receipt_file, receipt_results, receipts, run_folder, terms
from llmrepro.charts import averages
from llmrepro.run_folder import RunError

DATA = Path(__file__).parent / "data" / "receipts" / "two-suites.csv"
HEAD = "suite,case,rep,prompt_tokens,completion_tokens,ttft_s,total_s,max_tokens\n"
ROW = "a,p,0,30,101,0.2,1.2,256\n"


def written(tmp_path, content, name="numbers.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return imported.create(DATA, runs_dir=str(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def page(path):
    return soup(path)


def test_one_suite_is_told_under_every_statistic(path):
    speeds = imported.read(path).of_suite("decode_tps.published_2026_10", "greedy")
    assert speeds["mean_of_means"] == pytest.approx((100 + 20) / 2)
    assert speeds["token_weighted"] == pytest.approx((101 + 201) / (101 / 100 + 201 / 20))
    assert speeds["harmonic"] == pytest.approx(2 / (1 / 100 + 1 / 20))
    assert speeds["median"] == pytest.approx(60)
    (first, side_by_side), _ = imported.summary(imported.read(path))
    assert (first, side_by_side) == ("greedy", "60.000 / 27.306 / 33.333 / 60.000")


def test_the_definitions_that_two_moments_allow_are_computed(path):
    rows = {(r["metric"], r["case"]): r for r in imported.read(path).result["metrics"] if r["case"] is not None}
    assert rows["decode_tps.published_2026_10", "2000"]["value"] == pytest.approx(40 / 0.8)
    assert rows["ttft_s", "2000"]["value"] == pytest.approx(2.0)
    assert rows["e2e_tps", "2000"]["value"] == pytest.approx((41 / 2.4 + 41 / 3.2) / 2)
    assert rows["prefill_tps.published_2026_10", "2000"]["value"] == pytest.approx((2000 / 1.6 + 2000 / 2.4) / 2)
    assert rows["prompt_tokens", "2000"]["value"] == 2000
    assert {r["label"] for r in rows.values()} == {"imported"}


def test_what_they_do_not_allow_is_untold_each_with_its_reason_once(path):
    untold = imported.read(path).result["untold"]
    reasons = [why for _, why in untold]
    assert len(set(reasons)) == len(reasons)
    named = {metric: why for metrics_, why in untold for metric in metrics_}
    assert "how many tokens the first event held" in named["decode_tps"]
    assert (
        named["decode_tps.server"]
        == named["prefill_tps.server"]
        == "times by the server's own clock are not in the file"
    )
    told = {r["metric"] for r in imported.read(path).result["metrics"]}
    assert not told & set(named)
    of_requests = {m for m, known in terms.METRICS.items() if known.of == "request"}
    assert told | set(named) >= of_requests, "a metric of requests is neither told nor untold"


def test_a_cached_share_in_the_file_allows_a_prefill_speed(tmp_path):
    rows = "suite,case,prompt_tokens,cached_tokens,output_tokens,ttft_s,total_s\na,p,1000,400,20,2,4\n"
    found = imported.read(imported.create(written(tmp_path, rows), runs_dir=str(tmp_path)))
    values = {r["metric"]: r["value"] for r in found.result["metrics"]}
    assert (values["prefill_tps"], values["prefix_hit_rate"]) == (300, 0.4)
    assert "prefill_tps" not in {m for names, _ in found.result["untold"] for m in names}


def test_a_cold_first_request_is_flagged_and_a_usual_one_is_not(path):
    (flag,) = imported.read(path).result["flags"]
    assert flag.startswith("greedy: the first token of plum repeat 0 (line 2): 0.6 s came late")
    assert "the median of 6 like requests" in flag and "cold path" in flag
    assert "With it the mean is 0.267 s, without 0.200 s" in flag


def test_noise_alone_is_no_outlier(tmp_path):
    draw = random.Random(4)
    rows = "".join(f"a,p{n % 10},{n // 10},30,50,{draw.gauss(0.2, 0.01):.4f},2,64\n" for n in range(200))
    assert (
        imported.read(imported.create(written(tmp_path, HEAD + rows), runs_dir=str(tmp_path))).result["flags"]
        == []
    )


def test_prompts_of_other_lengths_are_no_outliers(tmp_path):
    rows = "".join(f"a,{n},0,{n},50,{n / 1000},{n},64\n" for n in (300, 400, 500, 600, 700, 9000))
    assert (
        imported.read(imported.create(written(tmp_path, HEAD + rows), runs_dir=str(tmp_path))).result["flags"]
        == []
    )


# ---- labelled -------------------------------------------------------------------------------------------------


def test_the_label_stands_on_status_head_tables_and_charts(path, page):
    assert run_folder.status(path)["outcome"] == "imported"
    assert "imported" in text(page.h1) and "that somebody else measured" in text(page.main)
    captions = [text(t.caption) for t in page.find_all("table")]
    assert [c for c in captions if "imported" not in c and not c.startswith("sha256")] == []
    (figure,) = page.find_all("figure")
    assert "imported" in figure.img["alt"] and "imported" in text(figure.figcaption)
    drawn = list(csv.DictReader((path / "figures" / "averages.csv").open()))
    assert {row["label"] for row in drawn} == {"imported"}
    assert "reproduced" not in text(page.main)


def test_nothing_says_that_it_was_measured_here(page):
    said = text(page.main)
    for phrase in ("was measured here", "measured here"):
        place = said.find(phrase)
        while place >= 0:
            before = said[:place]
            assert before.endswith(
                ("not ", "None ", "none ", "nothing ", "Nothing was ", "None was ", "nothing was ", "was not ")
            )
            place = said.find(phrase, place + 1)
    assert "Found here" not in said and "Measured here" not in said


def test_the_headline_names_its_definition_and_its_statistics(page):
    tile = text(page.find(class_="tiles").li)
    assert "decode_tps.published_2026_10" in tile and "decode speed, (N-1) to the stream's end" in tile
    places = [tile.index(terms.STATISTICS[s]) for s in ("mean_of_means", "token_weighted", "harmonic", "median")]
    assert places == sorted(places)


def test_no_point_of_the_chart_is_cut_or_hidden(path):
    found = imported.read(path)
    (axes,) = averages.averages(found, "averages").figure.axes
    points = [(x, y) for line in axes.lines for x, y in line.get_xydata()]
    assert max(x for x, _ in points) < 0.97 * axes.get_xlim()[1]
    assert min(axes.get_ylim()) < min(y for _, y in points) and max(y for _, y in points) < max(axes.get_ylim())
    long = sorted(y for x, y in points if y > 0.5 and x == pytest.approx(50))
    assert len(long) == 5 and min(b - a for a, b in itertools.pairwise(long)) > 0.1, "equal, yet all seen"


def test_the_page_has_the_statistics_side_by_side(page):
    head, greedy, long = table(page, "Decode speed of each suite (imported)")
    assert head[1:5] == [
        "mean of the prompts' means, tok/s",
        "token-weighted mean, tok/s",
        "harmonic mean of the prompts, tok/s",
        "median of the prompts, tok/s",
    ]
    assert greedy[1:] == ["60.000", "27.306", "33.333", "60.000", "120%"]
    assert long[1:5] == ["50.000"] * 4


def test_a_measured_run_shows_the_same_table_of_its_own_requests(tmp_path):
    made = soup(folder(tmp_path, chat()))
    head, *rows = table(made, "Decode speed of each suite, measured here")
    assert len(rows) == 2 and len(head) == 6
    whole = table(made, "Whole workloads")
    assert not [r for r in whole if "harmonic" in " ".join(r)], "told once, in its own table"


def test_an_imported_folder_is_no_run_to_compare_or_to_go_on_with(path):
    for arguments in (["compare", str(path)], ["run", "--resume", str(path)]):
        done = CliRunner().invoke(cli.main, arguments)
        assert done.exit_code == 1 and "is no run folder" in done.output


def test_the_same_folder_gives_the_same_result_and_page(path, tmp_path):
    copied = Path(shutil.copytree(path, tmp_path / "copy"))
    assert imported.compute(copied) == json.loads((path / "result.json").read_text())
    before = (path / "report.html").read_bytes()
    soup(copied)
    assert (copied / "report.html").read_bytes() == before


# ---- with a recipe --------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path):
    home = catalog.path_of(catalog.DEFAULT).parent
    shutil.copytree(home.parent, tmp_path / "model")
    place = tmp_path / "model" / home.name / "recipe.json"
    data = json.loads(place.read_text())
    data.pop("$schema")
    claim = {
        "server": "default",
        "workload": "chat",
        "unit": "tok/s",
        "evidence": "measured",
        "locator": "table 1",
    }
    speed = {**claim, "metric": "decode_tps.published_2026_10"}
    data["claims"] = [
        {**speed, "id": "mean", "statistic": "mean_of_means", "value": {"point": 50.0}},
        {**speed, "id": "plain", "case": "code_runs", "value": {"range": [90.0, 110.0]}},
        {**speed, "id": "elsewhere", "server": "mmap", "case": "code_runs", "value": {"point": 1.0}},
        {**speed, "id": "exact-clock", "metric": "decode_tps", "case": "code_runs", "value": {"point": 1.0}},
    ]
    data["comparisons"] = []
    place.write_text(json.dumps(data))
    return str(place)


ROWS = HEAD + "".join(
    f"talk,{case},0,30,101,0.2,{1.2 if case == 'code_runs' else 2.2},256\n" for case in folders.CASES
)


def test_claims_stand_beside_the_numbers_with_their_ratio_and_are_never_judged(tmp_path, recipe):
    file = written(tmp_path, ROWS)
    made = imported.create(file, recipe, "default", runs_dir=str(tmp_path))  # the cases say which workload it is
    found = {v["claim"]: v for v in imported.read(made).result["verdicts"]}
    assert set(found) == {"mean", "plain"}, "only those that the file has a value for"
    assert {v["word"] for v in found.values()} == {"not_evaluated"} and {v["here"] for v in found.values()} == {
        None
    }
    assert found["mean"]["imported"] == pytest.approx(60)  # one of 100 tok/s, four of 50
    assert found["mean"]["reason"] == "imported, not measured here; 1.2 times the published value"
    assert found["plain"]["reason"] == "imported, not measured here; it lies within the published range"
    page = soup(made)
    rows = table(page, "Claims beside the imported values (imported, not measured here)")
    assert rows[0][3] == "Imported" and [r[1] for r in rows[1:]] == ["– not evaluated"] * 2
    assert "2 more claims of the recipe: nothing in the file is about it." in text(page.main)


def test_no_ratio_where_other_prompts_were_asked_whatever_the_suite_is_called(tmp_path, recipe):
    rows = HEAD + "chat,code_runs,0,30,101,0.2,1.2,256\nchat,mine,0,40,201,0.2,10.2,256\n"
    made = imported.create(written(tmp_path, rows), recipe, "default", runs_dir=str(tmp_path))
    found = {v["claim"]: v for v in imported.read(made).result["verdicts"]}
    assert "times the published" not in found["mean"]["reason"]
    assert "; no ratio: its prompts are code_runs, mine, the recipe's" in found["mean"]["reason"]
    assert found["plain"]["reason"].endswith("it lies within the published range"), "that prompt is the recipe's"


def test_the_page_is_called_after_the_file_and_its_recipe_stands_beside(tmp_path, recipe):
    page = soup(imported.create(written(tmp_path, ROWS), recipe, "default", runs_dir=str(tmp_path)))
    assert text(page.h1) == "numbers.csv (imported)"
    assert text(page.find(class_="question")).startswith(f"Held beside: {catalog.load(recipe).title}")


@pytest.mark.parametrize(
    ("server", "suites", "said"),
    [
        (None, {}, "has several servers; say with --server"),
        ("defalt", {}, "has no server 'defalt'; did you mean 'default'?"),
        ("default", {"tallk": "chat"}, "the file has no suite 'tallk'; did you mean 'talk'?"),
        ("default", {"talk": "chatt"}, "has no workload 'chatt'; did you mean 'chat'?"),
    ],
)
def test_a_wrong_server_or_suite_is_refused(tmp_path, recipe, server, suites, said):
    with pytest.raises(RunError, match=said.replace("?", r"\?")):
        imported.create(written(tmp_path, ROWS), recipe, server, suites, str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_a_recipe_that_is_about_something_else_is_refused(tmp_path, recipe):
    with pytest.raises(RunError, match="no suite of the file has the name or the cases"):
        imported.create(written(tmp_path, HEAD + ROW), recipe, "default", runs_dir=str(tmp_path / "runs"))


# ---- files ----------------------------------------------------------------------------------------------------


def test_json_lines_and_other_names_and_units_give_the_same_rows(tmp_path):
    rows = receipts.read(DATA).rows
    same = written(
        tmp_path,
        "".join(
            json.dumps(
                {
                    "Workload": r.suite,
                    "prompt-id": r.case,
                    "round": r.repeat,
                    "input_tokens": r.prompt_tokens,
                    "output_tokens": r.output_tokens,
                    "TTFT ms": round(r.ttft_s * 1000, 3),
                    "latency_ms": round(r.total_s * 1000, 3),
                    "max_new_tokens": r.max_tokens,
                }
            )
            + "\n"
            for r in rows
        ),
        "numbers.jsonl",
    )
    again = receipts.read(same).rows
    without = {"line", "extra"}
    assert [r.model_dump(exclude=without) for r in again] == [r.model_dump(exclude=without) for r in rows]


def test_other_columns_are_kept(path):
    assert [r.extra for r in imported.read(path).rows[:2]] == [{"note": "first of all"}, {"note": ""}]
    assert imported.read(path).told["extra_columns"] == ["note"]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: b"\xef\xbb\xbf" + t.encode(),  # as Excel saves it
        lambda t: t.replace("\n", "\r\n").encode(),
        lambda t: t.replace(",", ";").encode(),
        lambda t: t.replace(",", "\t").encode(),
        lambda t: t.rstrip("\n").encode(),
        lambda t: (t + "\n\n").encode(),
    ],
)
def test_the_ways_in_which_tables_are_saved_make_no_difference(tmp_path, change):
    assert (
        receipts.read(written(tmp_path, change(HEAD + ROW))).rows
        == receipts.read(written(tmp_path, HEAD + ROW)).rows
    )


def test_repeats_are_counted_where_no_column_has_them(tmp_path):
    rows = "suite,case,output_tokens,ttft_s,total_s\na,p,9,0.1,1\na,q,9,0.1,1\na,p,9,0.1,1\n"
    assert [(r.case, r.repeat) for r in receipts.read(written(tmp_path, rows)).rows] == [
        ("p", 0),
        ("q", 0),
        ("p", 1),
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("a,p,0,30,101,-0.2,1.2,256", "line 3: ttft_s is '-0.2', no time after the request was sent"),
        ("a,p,0,30,101,0,1.2,256", "line 3: ttft_s is '0', no time"),
        ("a,p,0,30,101,1.3,1.2,256", "line 3: total_s is '1.2', less than ttft_s, '1.3'"),
        ("a,p,0,30,101,nan,1.2,256", "line 3: ttft_s is 'nan', no number"),
        ("a,p,0,30,101,1e999,1.2,256", "line 3: ttft_s is '1e999', no number"),
        ("a,p,0,30,101,,1.2,256", "line 3: ttft_s is empty"),
        ("a,p,0,30,,0.2,1.2,256", "line 3: completion_tokens is empty"),
        ("a,p,0,30,0,0.2,1.2,256", "line 3: completion_tokens is '0', not a whole number from 1 on"),
        ("a,p,0,30,10.5,0.2,1.2,256", "line 3: completion_tokens is '10.5', not a whole number"),
        ("a,p,0,30,1_000,0.2,1.2,2560", "line 3: completion_tokens is '1_000', no number"),
        (
            ",p,x,0,101,nan,1.2,50",
            "line 3: suite is '', not a name of 1 to 200 characters; rep is 'x', no number; ttft_s is 'nan', no "
            "number; prompt_tokens is 0; leave it empty where it is not known; 101 output tokens, more than "
            "max_tokens, 50\n",
        ),
        ("a,p,0,30,300,0.2,1.2,256", "line 3: 300 output tokens, more than max_tokens, 256"),
        ("a,p,0,0,101,0.2,1.2,256", "line 3: prompt_tokens is 0; leave it empty"),
        (",p,0,30,101,0.2,1.2,256", "line 3: suite is '', not a name"),
        ("first,p,0,30,101,0.2,1.2,256", "line 3: repeat 0 of first · p stands in line 2 already"),
        ("a,p,0,30,101,0.2,1.2", "line 3: 7 cells where the head has 8 columns"),
        ('a,"p,0,30,101,0.2,1.2,256', "line 3: no whole row"),
    ],
)
def test_a_bad_row_is_named_with_its_line_and_nothing_is_imported(tmp_path, row, said):
    file = written(tmp_path, HEAD + "first,p,0,30,101,0.2,1.2,256\n" + row + "\n")
    with pytest.raises(RunError) as found:
        imported.create(file, runs_dir=str(tmp_path / "runs"))
    assert said in f"{found.value}\n" and "nothing was imported" in str(found.value)
    assert not (tmp_path / "runs").exists()


def test_every_bad_row_is_named(tmp_path):
    with pytest.raises(RunError) as found:
        receipts.read(written(tmp_path, HEAD + "a,p,0,30,101,-1,1.2,256\n" + ROW + "a,q,0,30,101,9,1.2,256\n"))
    assert "line 2:" in str(found.value) and "line 4:" in str(found.value) and "line 3:" not in str(found.value)
    with pytest.raises(RunError, match="and 980 more"):
        receipts.read(written(tmp_path, HEAD + "a,p,0,30,101,-1,1.2,256\n" * 1000))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf \n", "is empty"),
        (HEAD.encode(), "holds no request"),
        (
            b"suite,case,ttft,total\na,p,1,2\n",
            "line 1: no column for output_tokens, ttft_s, total_s. Found: suite, case, ttft, total",
        ),
        (
            b"Bench,benchmark,prompt-id,ttft\na,b,p,1\na,b,q,1\n",
            "line 1: no column for output_tokens, ttft_s, total_s. Found: Bench, benchmark, prompt-id, ttft. "
            "Taken of these: benchmark as suite, prompt-id as case. Needed besides: output_tokens or completion_",
        ),
        (b"suite,case,output_tokens,ttft_s,ttft_ms,total_s\n", "line 1: the columns 'ttft_s' and 'ttft_ms' both"),
        (b"suite,case,output_tokens,ttft_s,ttft_ms,total_s\na,p,9,1,1000,2\n", "line 1: the columns"),
        (b"suite,suite,output_tokens,ttft_s,total_s\na,p,9,1,2\n", "two columns are called 'suite'"),
        ((HEAD + ROW).encode("utf-16"), "is UTF-16"),
        (HEAD.encode() + b"a,caf\xe9,0,30,101,0.2,1.2,256\n", "line 2: not UTF-8"),
        (b"\x89PNG\x00\x00", "is no text"),
        (b'[{"suite": "a"}]', "is one JSON array"),
        (
            b'{"suite": "a", "case": "p", "output_tokens": 9, "ttft_s": 0.1, "total_s": 1}\n{"suite": "a", "ca',
            "line 2: no whole JSON object",
        ),
        (
            b'{"suite": "a", "case": "p", "output_tokens": 9, "ttft_s": NaN, "total_s": 1}\n',
            "NaN is no number in JSON",
        ),
        (
            b'{"suite": "a", "case": "p", "output_tokens": true, "ttft_s": 0.1, "total_s": 1}\n',
            "output_tokens is True, no number",
        ),
        (
            b'{"suite": "a", "case": ["p"], "output_tokens": 9, "ttft_s": 0.1, "total_s": 1}\n',
            "case is ['p'], not a name",
        ),
        (
            b'{"suite": "a", "case": "p", "output_tokens": 9, "ttft_s": 0.1, "total_s": 1}\n7\n',
            "line 2: no JSON object",
        ),
        (
            b'{"suite": "a", "case": "p", "output_tokens": 9, "ttft_s": 0.1, "total_s": 1}\n{"suite": "a"}\n',
            "line 2: no column for case",
        ),
        (b'{"suite": ' + b"[" * 100000, "line 1: no whole JSON object"),
    ],
)
def test_a_file_that_is_none_is_refused_in_a_sentence(tmp_path, content, said):
    with pytest.raises(RunError) as found:
        receipts.read(written(tmp_path, content))
    assert said in str(found.value) and str(found.value).count("no column for") <= 1


def many(n):
    return HEAD + "".join(f"a,p{i % 50},{i // 50},30,101,0.2,{1.2 + i % 7 / 10},256\n" for i in range(n))


def test_a_hundred_thousand_rows_are_imported(tmp_path):
    path = imported.create(written(tmp_path, many(100_000)), runs_dir=str(tmp_path))
    result = json.loads((path / "result.json").read_text())
    assert result["requests"] == {"a": {"ok": 100_000}}
    (mean,) = [
        r for r in result["metrics"] if (r["metric"], r["case"], r["statistic"]) == ("ttft_s", None, "median")
    ]
    assert (mean["value"], mean["n"]) == (0.2, 100_000)


def test_a_page_shows_some_thousands_and_says_where_the_others_are(tmp_path):
    page = soup(imported.create(written(tmp_path, many(4_000)), runs_dir=str(tmp_path)))
    assert len(table(page, "Requests in the order of the file (imported)")) == 1 + 3_000
    assert "1,000 more are in receipts.jsonl" in text(page.main)


def test_half_a_folder_is_not_left_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(imported, "compute", full)
    with pytest.raises(OSError, match="No space"):
        imported.create(DATA, runs_dir=str(tmp_path))
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_hostile_names_stay_text(tmp_path):
    rows = HEAD + '"<script>alert(1)</script>","../../x",0,30,101,0.2,1.2,256\n'
    path = imported.create(written(tmp_path, rows, "<b>.csv"), runs_dir=str(tmp_path / "runs"))
    assert path.is_relative_to(tmp_path / "runs" / "imported")
    page = soup(path)
    assert page.find("script") is None and "<script>alert(1)</script>" in text(page.main)


def test_the_command_says_what_it_made(tmp_path):
    done = CliRunner().invoke(cli.main, ["import", str(DATA), "--runs-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "greedy           60.000 / 27.306 / 33.333 / 60.000" in done.output
    assert (
        "decode speed, (N-1) to the stream's end (decode_tps.published_2026_10), in tok/s as mean" in done.output
    )
    assert "imported: 8 requests of two-suites.csv: imported, not measured here" in done.output
    assert Path(done.output.rsplit("report: ", 1)[1].strip()).is_file()
    wrong = CliRunner().invoke(cli.main, ["import", str(DATA), "--runs-dir", str(tmp_path), "--map", "greedy"])
    assert wrong.exit_code == 1 and "not of the form suite=workload" in wrong.output


def test_definitions_are_those_of_measured_requests():
    assert set(receipt_results.DEFINED) <= set(metrics.DEFINITIONS)


# ---- files that are meant badly -------------------------------------------------------------------------------

OBJECT = '{"suite": "a", "case": "p", "output_tokens": 9, "ttft_s": 0.1, "total_s": 1'


def test_what_is_no_ordinary_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "zero"):
        done = CliRunner().invoke(cli.main, ["import", str(tmp_path / name), "--runs-dir", str(tmp_path / "runs")])
        assert done.exit_code == 1 and "is no ordinary file; save what it gives as one" in done.output


def test_a_file_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(receipt_file, "MOST_BYTES", 1 << 20)
    with pytest.raises(RunError, match="has more than 1 MiB; cut it into several files"):
        receipts.read(written(tmp_path, b" " * (2 << 20)))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (",".join(f"c{i}" for i in range(1_000_000)), "line 1: longer than 1 MiB"),
        (HEAD + ROW + "a,p,1,30,101,0.2,1.2," + "2" * (1 << 20) + "\n", "line 3: longer than 1 MiB"),
        (HEAD.strip() + "".join(f",c{i}" for i in range(200)) + "\n", "line 1: 208 columns, and 200 are the most"),
        (
            OBJECT + "}\n" + "".join(f'{OBJECT}, "repeat": {i}, "c{i}": 0}}\n' for i in range(1, 999)),
            "line 196: 201 columns, and 200 are the most",
        ),
        (OBJECT + ', "ttft_s": 0.2}', "line 1: two values are called 'ttft_s'; give each its own name"),
        (OBJECT + r', "note": "\ud800"}', "line 1: half a character"),
        (OBJECT + r', "\udfff": 1}', "line 1: half a character"),
        (OBJECT.replace('"a"', r'"\ud800"') + "}", "line 1: half a character"),
        (OBJECT + ', "note": ' + "[" * 300 + "]" * 300 + "}", "line 1: more than 20 arrays and objects"),
        (OBJECT.replace("0.1", "1e400") + "}", "ttft_s is '1e400', no number"),
        (OBJECT.replace("9", "9" * 5000) + "}", "no number"),
    ],
)
def test_what_a_run_folder_cannot_hold_is_refused_with_its_line(tmp_path, content, said):
    with pytest.raises(RunError) as found:
        imported.create(written(tmp_path, content), runs_dir=str(tmp_path / "runs"))
    assert said in str(found.value) and len(str(found.value)) < 5_000
    assert not (tmp_path / "runs").exists()


def test_other_columns_of_json_lines_are_kept_as_they_stand_there(tmp_path):
    long = "7" * 5000
    rows = OBJECT + rf', "large": 1e400, "long": {long}, "whole": "\ud83d\ude00", "of": [{{"x": 1}}]}}'
    (row,) = imported.read(imported.create(written(tmp_path, rows), runs_dir=str(tmp_path))).rows
    assert row.extra == {"large": "1e400", "long": long, "whole": "😀", "of": [{"x": 1}]}
