"""The published studies' recipes hold every claim of their publications, with the figures as published."""

import csv
import functools
import re
import subprocess

import pytest
from packaging.utils import canonicalize_name

from llmrepro import catalog
from llmrepro import recipe as recipes

load = functools.cache(catalog.load)
DATA = catalog.home().parent / "tests/data"
DFLASH, OPEN_JET = "qwen3.8-27b/vllm-dflash2--cmp-170hx", "qwen3.8-27b/open-jet--cmp-170hx"
CPU, GPU = "llama-4-scout/llama-cpp--epyc-9175f", "llama-4-scout/vllm--rtx-pro-6000"
# The tables of the 2026-10 publication and its record at 180 W: decode tok/s, in brackets TTFT s.
TABLE = """
greedy   code_prime       35 317.52 (0.315) 128.5  (0.128) 123.1  51.76
greedy   hashmap          32 193.91 (0.207) 105.93 (0.128) 106.92 51.04
greedy   flask_fastapi    34 165.82 (0.203) 99.41  (0.131) 102.01 50.58
greedy   story_robot      23 120.28 (0.233) 68.16  (0.132) 68.26  50.44
greedy   story_lighthouse 37 111.23 (0.209) 68.59  (0.129) 69.26  50.5
thinking intervals        77 199.95 (0.370) 89.01  (0.173) 93.69  -
thinking bash_largest     82 147.35 (0.213) 75.9   (0.174) 77.31  -
thinking c_ringbuf        81 130.76 (0.206) 65.38  (0.175) 65.58  -
thinking mutex_sem        77 147.2  (0.209) 72.24  (0.175) 71.86  -
long     chars8000      3163 109.42 (1.6515) 77.20 (2.0662) 81.79 48.74
long     chars24000     9472 -      -       76.74  (6.358) 79.23  47.27
long     chars48000    18976 -      -       75.39  (13.55) 71.22  45.06
"""


def published() -> list[dict]:
    with open(DATA / "published.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def claimed(source: str) -> dict[str, tuple[str, str, str]]:
    """Every claim of a recipe or study by id: metric, form, value as text."""
    if source in catalog.studies():
        claims, comparisons = [], catalog.load_study(source).comparisons
    else:
        recipe = load(source)
        claims, comparisons = recipe.claims, recipe.comparisons
    found = {c.id: (c.metric, c.value.form, text(c.value.published)) for c in claims}
    for c in comparisons:
        form = next(n for n in ("order", "ratio", "at_least", "at_most") if getattr(c, n) is not None)
        value = getattr(c, form)
        found[c.id] = (c.metric, form, text(value.published if form == "ratio" else value))
    return found


def text(value) -> str:
    return " to ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def value(recipe: recipes.Recipe, claim: str):
    return next(c.value.published for c in recipe.claims if c.id == claim)


@pytest.mark.parametrize("source", sorted({row["source"] for row in published()}))
def test_no_published_claim_is_lost_or_changed(source):
    wanted = {r["id"]: (r["metric"], r["form"], r["value"]) for r in published() if r["source"] == source}
    assert claimed(source) == wanted


def test_every_recipe_of_a_publication_is_in_the_list():
    there = {i for i in (*catalog.ids(), *catalog.studies()) if not i.startswith("smollm2")}
    assert {row["source"] for row in published()} == there


@pytest.mark.parametrize("line", TABLE.strip().splitlines())
def test_the_table_of_speeds_is_as_published(line):
    workload, case, tokens, k7, k7_ttft, d4, d4_ttft, d3, d0 = line.split()
    vllm, open_jet = load(DFLASH), load(OPEN_JET)
    for recipe, claim, told in (
        (vllm, f"{workload}-{case}-decode", k7),
        (vllm, f"{workload}-{case}-ttft", k7_ttft),
        (open_jet, f"d4-{workload}-{case}-decode", d4),
        (open_jet, f"d4-{workload}-{case}-ttft", d4_ttft),
        (open_jet, f"d3-{workload}-{case}-decode", d3),
        (open_jet, f"d0-{workload}-{case}-decode", d0),
    ):
        if told != "-":
            assert value(recipe, claim) == float(told.strip("()")), claim
    assert value(vllm if k7 != "-" else open_jet, f"{workload}-{case}-prompt-tokens") == int(tokens)


def test_the_suites_means_are_what_their_prompts_say():
    """The publication's statistic, the plain mean over prompts, gives its own printed figures."""
    vllm, open_jet = load(DFLASH), load(OPEN_JET)
    for recipe, suite, mean, start in (
        (vllm, "greedy", "greedy-mean-decode", ""),
        (vllm, "thinking", "thinking-mean-decode", ""),
        (open_jet, "greedy", "d4-greedy-mean-decode", "d4-"),
        (open_jet, "thinking", "d4-thinking-mean-decode", "d4-"),
        (open_jet, "thinking", "d3-thinking-mean-decode", "d3-"),
    ):
        cases = next(w.cases for w in recipe.workloads if w.id == suite)
        speeds = [value(recipe, f"{start}{suite}-{case}-decode") for case in cases]
        assert round(sum(speeds) / len(speeds), 1) == value(recipe, mean), mean


def test_what_a_value_is_the_mean_of_gives_that_value():
    for recipe in (load(DFLASH), load(OPEN_JET)):
        for claim in (c for c in recipe.claims if c.samples):
            assert sum(claim.samples) / len(claim.samples) == pytest.approx(claim.value.point, rel=2e-4), claim.id
            assert claim.n in (len(claim.samples), None), claim.id
            if claim.spread:
                assert claim.spread == (min(claim.samples), max(claim.samples)), claim.id


def test_what_differs_from_the_recipe_stands_with_the_claim():
    """Measured at 250 W: not held against a card at 180 W, nor the other way round."""
    claims = {c.id: c for c in load(OPEN_JET).claims}
    at_250 = [c for c in claims.values() if c.conditions.deciding.get("gpu_power_limit_w") == 250]
    assert {"d4-250w-greedy-code_prime-decode", "d0-250w-greedy-code_prime-decode", "thermal-stop-250w"} <= {
        c.id for c in at_250
    }
    assert [c.id for c in claims.values() if "250w" in c.id and c not in at_250] == []


@pytest.mark.parametrize("name", [DFLASH, OPEN_JET, CPU, GPU])
def test_every_claim_says_where_it_is_stated_and_how_it_was_had(name):
    for claim in load(name).claims:
        assert len(claim.locator) > 10 and claim.evidence in ("measured", "stated", "computed"), claim.id


@pytest.mark.parametrize("name", [DFLASH, OPEN_JET])
def test_the_publications_prompts_are_pinned_and_not_committed(name):
    recipe = load(name)
    pinned = [p for w in recipe.workloads if w.id in ("greedy", "thinking") for p in w.prompts]
    assert len(pinned) == 9 and all(p.source.sha256 and p.source.prompt_tokens for p in pinned)
    for prompt in recipes.prompts(recipe):
        if prompt.source is not None and prompt.source.sha256 is not None:
            assert prompt.sha256 != prompt.source.sha256, f"{prompt.id}: our text is the publication's own"


def test_what_a_publication_leaves_out_is_said_with_the_kits_choice():
    assert set(load(CPU).engine.unstated) == {"build", "image"}
    assert "0.14.0rc1" in load(GPU).engine.unstated["release"]
    assert load(CPU).conditions.deciding["engine_version"] is None


@pytest.mark.parametrize(("name", "packages"), [(DFLASH, 202), (GPU, 163), (OPEN_JET, 4)])
def test_a_lock_holds_as_many_packages_as_were_there_on_its_day(name, packages):
    assert len(locked(catalog.home() / name / "engine.lock")) == packages


def test_the_recorded_lock_keeps_the_breakage_that_the_publication_met():
    """A compiler of CUDA 13.4 beside a runtime of 13.0: as recorded; what mends it comes on top."""
    pins = locked(catalog.home() / DFLASH / "engine.lock")
    assert (pins["nvidia-cuda-nvcc"], pins["nvidia-cuda-runtime"]) == ("13.4.92", "13.0.96")


@pytest.mark.registry
@pytest.mark.parametrize("name", [DFLASH, GPU, OPEN_JET])
def test_resolving_again_as_of_its_day_gives_the_committed_lock(name, tmp_path):
    import uv

    install = load(name).engine.install
    made = tmp_path / "engine.lock"
    subprocess.run(
        [
            *(uv.find_uv_bin(), "pip", "compile", "--quiet", "--no-header"),
            *("--exclude-newer", install.resolved_as_of, "--python-version", install.python),
            *(
                "--python-platform",
                "x86_64-manylinux_2_39",
                str(catalog.home() / name / "engine.in"),
                "-o",
                str(made),
            ),
        ],
        check=True,
    )
    assert locked(made) == locked(catalog.home() / name / "engine.lock")


def locked(lock) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", lock.read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}
