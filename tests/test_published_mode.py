"""Where a machine lacks what a published study needs, its notebook ends well and shows what was published."""

import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from folders import table, text
from nvml import Card, Library
from test_report import assert_harmless

from llmrepro import catalog, compare_stages, jobs, parameters, quotations, requirements, stages
from llmrepro import machine as machine_
from llmrepro.claim import Claim
from llmrepro.engines import vllm
from llmrepro.run_folder import read_json

RECIPES = [name for name in catalog.ids() if not name.startswith("smollm2")]
STUDY = "qwen3.8-27b/dflash2-and-open-jet"
NOTEBOOKS = catalog.home().parent / "notebooks"
BEFORE_CHARTS = ("card", "machine", "prepare", "measure", "results")
# Every way in which a page of a publication may say the word.
SAID = (
    "Nothing was measured here",
    "nothing was measured here",
    "none was measured here",
    "no figure below was measured here",
    "Not measured here.",
    "0 rates measured here",
    "measured by its authors",
    "(measured: CPU Q6_K against GPU NVFP4",  # a publication's title
    "across two measurements",
    "Two measurements are comparable",
    "To measure it,",
)


def by_papermill(notebook: Path, folder: Path, **parameters: str) -> Path:
    """The run folder of a notebook that papermill ran."""
    given = [word for name, value in parameters.items() for word in ("-p", name, value)]
    done = subprocess.run(
        [
            Path(sys.executable).with_name("papermill"),
            *("--log-level", "ERROR", "--no-progress-bar"),
            notebook,
            folder / "out.ipynb",
            *("-p", "runs_dir", folder / "runs", *given),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").glob("*/*/*")
    return run


@pytest.fixture(scope="module", autouse=True)
def nothing_is_installed(tmp_path_factory):
    """What is shown depends on the engines that are: a flag that the installed one has no more is translated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMREPRO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=RECIPES)
def run(request, tmp_path_factory):
    """A published study's recipe, its notebook run in published mode."""
    folder = tmp_path_factory.mktemp("published")
    return request.param, by_papermill(NOTEBOOKS / f"{request.param}.ipynb", folder, mode="published")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The run folder of a study whose two arms cannot run."""
    folder = tmp_path_factory.mktemp("study")
    return by_papermill(NOTEBOOKS / "compare.ipynb", folder, study=STUDY, mode="published")


def page_of(run: Path) -> BeautifulSoup:
    return BeautifulSoup((run / "report.html").read_text(encoding="utf-8"), "html.parser")


def assert_only_published(page):
    """No verdict, and nothing labelled as measured on this machine."""
    said = text(page)
    assert not re.search(r"\breproduced\b|not evaluated|inconclusive", said)
    for allowed in SAID:
        said = said.replace(allowed, "")
    assert not re.findall(r".{30}\bmeasured?\w*\b.{30}", said)


def assert_private(text: str):
    here = [catalog.home().parent, Path.home(), sys.prefix, machine_.cache_dir()]
    assert not [str(folder) for folder in here if f"{folder}/" in text or f"{folder} " in text]


@pytest.mark.engine
def test_it_ends_lacking_and_says_what_is_missing(run):
    name, path = run
    status = read_json(path / "status.json")
    assert status["outcome"] == "lacking"
    assert status["reason"].startswith("published mode was asked for")
    facts = read_json(path / "machine.json")
    missing = requirements.missing(catalog.load(name), facts, "the disk of the kit's cache")
    assert status["reason"] == "; ".join(["published mode was asked for", *missing])
    result = read_json(path / "result.json")
    told = [*result["verdicts"], *result["comparisons"]]
    assert {v["word"] for v in told} == {"not_evaluated"}
    assert {v["reason"] for v in told} == {f"lacking: {status['reason']}"}
    assert not result["metrics"]


@pytest.mark.engine
def test_its_page_shows_every_claim_and_nothing_as_measured(run):
    name, path = run
    recipe, page = catalog.load(name), page_of(path)
    assert_harmless(page)
    assert_only_published(page)
    assert_private((path / "report.html").read_text())
    ids = [node["id"] for node in page.find_all(id=True)]
    assert len(ids) == len(set(ids))
    claims = [*recipe.claims, *recipe.comparisons]
    assert {f"claim-{c.id}" for c in claims} <= set(ids)
    assert f"{len(claims)} claims as published; this machine tests none of them." in text(page)
    shown = [h["id"] for h in page.find_all("h2")]
    assert shown[:4] == ["charts", "claims", "commands", "conditions"]
    assert "capacity" in shown
    for figure in page.find_all("figure", id=re.compile("^figure-claims-")):
        assert "published" in figure.img["alt"]
        assert "Nothing was measured here: every point is published." in text(figure)


@pytest.mark.engine
def test_its_page_gives_each_published_figure_as_it_was_published(run):
    name, path = run
    rows = table(page_of(path), "Claims as published")
    place = rows[0].index("Published")
    for claim, row in zip(catalog.load(name).claims, rows[1:], strict=True):
        value = claim.value.published
        for figure in value if isinstance(value, tuple) else (value,):
            wanted = figure if isinstance(figure, str) else f"{figure:,.12g}"
            assert " ".join(wanted.split()) in row[place]


@pytest.mark.engine
def test_it_tells_the_commands_that_a_live_run_executes(run):
    name, path = run
    told = (path / "commands.txt").read_text()
    assert_private(told)
    shown = text(page_of(path).find(id="commands").find_next("pre"))
    assert shown == " ".join(told.split())
    words = shlex.split(told, comments=True)
    recipe = catalog.load(name)
    asked = {j.server for j in jobs.plan(recipe, parameters.checked({}))}  # by the quick profile
    for server in (s for s in recipe.servers if s.id in asked):
        first = server.args[0]
        wanted = [w for w in server.args if "{" not in w and w != vllm.REMOTE_CODE]  # which is left out, and said
        assert first in words
        assert set(wanted) <= set(words)


@pytest.mark.engine
def test_its_charts_hold_the_published_numbers(run):
    name, path = run
    speeds = [c for c in catalog.load(name).claims if c.metric.startswith(("decode_tps", "log_window.generation"))]
    drawn = "".join(f.read_text() for f in sorted((path / "figures").glob("claims-*.csv")))
    assert speeds
    assert [c.id for c in speeds if f"{c.id}," not in drawn] == []


@pytest.mark.parametrize("mode", ["auto", "published"])
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_missing_is_why_auto_is_not_live(monkeypatch, tmp_path, capsys, name, mode):
    machine(monkeypatch, 4, [])
    monkeypatch.setattr(requirements, "which", lambda _: None)
    monkeypatch.setattr(requirements, "lacks_python", lambda wanted: f"needs Python {wanted}")
    run = stages.start({"recipe": name, "mode": mode, "runs_dir": str(tmp_path)})
    for stage in BEFORE_CHARTS:
        getattr(stages, stage)(run)
    stages.finish(run)
    status = read_json(run.path / "status.json")
    assert status["outcome"] == "lacking"
    needs = requirements.of(catalog.load(name))
    assert ("published mode was asked for" in status["reason"]) == (mode == "published")
    assert f"needs {needs.memory_gib:g} GiB of memory; this machine has 4" in status["reason"]
    assert ("needs a GPU with" in status["reason"]) == bool(needs.gpu_count)
    assert ("this machine has none" in status["reason"]) == bool(needs.gpu_count)
    for command in needs.commands:
        assert f"needs the command {command!r}" in status["reason"]
    assert f"needs Python {catalog.load(name).engine.install.python}" in status["reason"]
    assert not re.search(r"reproduced|not evaluated", capsys.readouterr().out)


@pytest.mark.parametrize("name", RECIPES)
def test_a_machine_that_has_the_needs_goes_live(monkeypatch, tmp_path, name):
    machine(monkeypatch, 1000, [Card("NVIDIA RTX PRO 6000", memory_bytes=96 * 2**30, capability=(12, 0))])
    monkeypatch.setattr(machine_, "measured_bandwidth", lambda *_: {})
    monkeypatch.setattr(requirements, "which", lambda command: f"/usr/bin/{command}")
    monkeypatch.setattr(requirements, "lacks_python", lambda wanted: None)
    asked = []

    def prepared(engine, lock, log):
        asked.append(engine.name)
        raise RuntimeError("far enough")

    monkeypatch.setattr(stages.environment, "prepare", prepared)
    monkeypatch.setattr(stages.prompts, "fetch", lambda run: [])
    for mode, lacking in (("auto", []), ("live", []), ("published", ["published mode was asked for"])):
        run = stages.start({"recipe": name, "mode": mode, "runs_dir": str(tmp_path)})
        stages.machine(run)
        assert stages.lacks(run) == lacking
        if lacking:
            stages.prepare(run)
        else:
            with pytest.raises(RuntimeError, match="far enough"):
                stages.prepare(run)
        run.close()
    assert asked == [catalog.load(name).engine.name] * 2


def machine(monkeypatch, gib: int, cards: list[Card]) -> None:
    """A machine of this one's processor with so much memory and disk, and with these GPUs."""
    Library(monkeypatch, cards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told = machine_.describe(machine_.cache_dir())
    told["memory"] |= {"total_gib": gib, "available_gib": gib}
    told["cpu"]["architecture"] = "x86_64"
    monkeypatch.setattr(machine_, "describe", lambda *_: {**told, "disk_free_gib": gib})


@pytest.mark.engine
def test_a_study_without_its_machines_ends_lacking_and_names_what_each_arm_needs(study):
    status = read_json(study / "status.json")
    assert status["outcome"] == "lacking"
    assert "vllm and open-jet: published mode was asked for" in status["reason"]
    for arm in ("vllm", "open-jet"):
        own = read_json(study / "arms" / arm / "status.json")
        assert own["outcome"] == "lacking"
        recipe = catalog.load(read_json(study / "arms" / arm / "recipe.json")["id"])
        found = read_json(study / "arms" / arm / "machine.json")
        for sentence in requirements.missing(recipe, found, "the disk of the kit's cache"):
            assert re.search(rf"{arm}[\w -]*: {re.escape(sentence)}", status["reason"])
    result = read_json(study / "result.json")
    assert {c["word"] for c in result["comparisons"]} == {"not_evaluated"}
    assert all(c["reason"].startswith("vllm: lacking: ") for c in result["comparisons"])


@pytest.mark.engine
def test_a_studys_page_shows_the_publications_comparison_with_its_caveats(study):
    told, page = catalog.load_study(STUDY), page_of(study)
    assert_only_published(page)
    assert_private((study / "report.html").read_text())
    assert [h["id"] for h in page.find_all("h2")] == [
        *("caveats", "claims", "charts", "published", "commands", "differences", "scope", "arms", "repeat")
    ]
    caveats = [text(li) for li in page.find(id="caveats").find_next("ul").find_all("li")]
    assert caveats == told.differs_in
    for words in ("not two engines", "One card", "58 and 59 output tokens", "Two definitions of TTFT"):
        assert any(words in caveat for caveat in caveats)
    for section in ("charts", "published"):  # wherever one arm stands beside the other
        line = page.find(id=section).find_next("p", class_="line")
        assert "two configurations are compared, not two engines" in text(line)
    rows = {row[0]: row for row in table(page, "Claims across the arms, as published")[1:]}
    assert len(rows) == len(told.comparisons)
    assert {f"claim-{c.id}" for c in told.comparisons} <= {n["id"] for n in page.find_all(id=True)}
    ratio = next(row for title, row in rows.items() if title.startswith("vLLM decodes 1.93 times"))
    assert ratio[1:3] == ["vllm / open-jet: 1.93 times", "1.93 times 181.8 / 94.1 tok/s"]
    assert "181.8 / 94.1 tok/s" in ratio[3]
    for one in told.out_of_scope:
        assert one in text(page)
    for arm in ("vllm", "open-jet"):
        assert page.find("a", href=f"arms/{arm}/report.html")
        assert (study / "arms" / arm / "report.html").exists()
        assert page.find("summary", string=f"The commands of {arm}")


@pytest.mark.engine
def test_a_studys_table_sets_the_published_values_of_the_arms_side_by_side(study):
    page = page_of(study)
    decode = {row[0].partition(" decode")[0]: row[1:] for row in table(page, "Decode speed (tok/s)")}
    assert decode["Prime checker, code"] == [
        "317.52 n = 3, 316.67 to 318.27",
        "128.5 n = 3, 128.24 to 128.71",
        "2.47 times",
    ]
    assert decode["48000 characters of source"] == ["–", "75.39 n = 3, 73.46 to 79.07", "–"]
    ttft = {row[0]: row[1:] for row in table(page, "Time to the first token (s)")}
    assert ttft["8000 characters of source"] == ["1.6515 n = 3", "2.0662 n = 3", "0.80 times"]
    prefill = table(page, "Prefill speed (tok/s)")
    assert [row[3] for row in prefill[1:]] == ["1.25 times", "–", "–", "–", "–"]
    start = table(page, "Start-up (s)")[1]
    assert start[1].startswith("427") and "(a few seconds)" in start[2]
    far = " ".join(word for row in table(page, "How far a prompt may go") for word in row)
    assert "fails at 9,472" in far and "completes to 18,976" in far
    assert "Left out here, since they were made in other conditions: 7 of open-jet." in text(page)
    for link in page.find(id="published").find_all_next("a", href=re.compile("#claim-")):
        folder, _, anchor = link["href"].partition("#")
        assert f'id="{anchor}"' in (study / folder).read_text()


@pytest.mark.engine
def test_a_studys_charts_have_both_arms_of_every_case(study):
    with open(study / "figures/published-decode-speed.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24  # 9 prompts, the two means and the shortest of the long ones
    for case in {row["case"] for row in rows}:
        assert {row["arm"] for row in rows if row["case"] == case} == {"vllm", "open-jet"}
    prime = {row["arm"]: row for row in rows if row["case"] == "code_prime"}
    assert (prime["vllm"]["published_low"], prime["open-jet"]["published_low"]) == ("317.52", "128.5")
    alt = (study / "figures/published-decode-speed.txt").read_text()
    assert "vllm 317.52 tok/s, open-jet 128.5 tok/s, 2.47 times" in alt
    assert {f.stem for f in (study / "figures").glob("*.svg")} == {
        "published-decode-speed",
        "published-prefill-speed",
        "published-time-to-the-first-token",
    }


def test_only_values_of_one_definition_have_a_ratio():
    study = catalog.load_study("llama-4-scout/cpu-and-gpu")
    recipes = {arm.id: catalog.load(arm.recipe) for arm in study.arms}
    rows = quotations.rows(study, recipes)
    assert {r.group for r in rows} >= {"Decode speed", "Prefill speed"}
    assert all(len(r.claims) == 1 for r in rows)  # averages of a log never share a row with an engine's timings
    assert [quotations.behind(c, rows) for c in study.comparisons] == [[], [], []]


def test_words_and_ranges_are_no_single_number():
    said = {"id": "x", "metric": "startup.health_s", "unit": "s", "evidence": "stated", "locator": "here"}
    forms = {"words": "a few seconds", "range": (1.0, 2.0), "about": 3.0, "point": 4.0}
    claims = {form: Claim(**said, value={form: value}) for form, value in forms.items()}
    numbers = {"words": None, "range": None, "about": 3.0, "point": 4.0}
    assert {form: quotations.number(c) for form, c in claims.items()} == numbers
    assert {form: quotations.ends(c) for form, c in claims.items()} == {
        "words": None,
        "range": (1.0, 2.0),
        "about": (3.0, 3.0),
        "point": (4.0, 4.0),
    }


def test_a_studys_cells_say_how_many_claims_there_are_and_print_no_verdicts(tmp_path, capsys):
    compared = compare_stages.start({"study": STUDY, "mode": "published", "runs_dir": str(tmp_path)})
    for stage in BEFORE_CHARTS:
        getattr(compare_stages, stage)(compared)
    said = capsys.readouterr().out
    assert "9 claims" in said and "Nothing was measured here." in said
    assert "not evaluated" not in said
    assert "mk_server.py -c 65536 -d 4" in said and "vllm serve" in said
    compare_stages.finish(compared)
    for arm in compared.arms.values():
        verdicts = read_json(arm.path / "result.json")["verdicts"]
        assert all(v["reason"].startswith("lacking: ") for v in verdicts), "each arm's own result tells its end"
    compared.close()
