"""Capacity and roofline of a run and of a recipe alone: in the charts and on the page, with their sources."""

import csv
import json

import pytest
from bs4 import BeautifulSoup
from folders import boot, chat, folder, soup, table, text
from test_capacity import SCOUT, SMOLLM

from llmrepro import ceilings, charts, checkpoint, engines, findings, sizing
from llmrepro.report import capacity
from llmrepro.shape import Attention

READ = 96_576_768  # bytes of SmolLM2's tensors in Q4_1


def told(config=SMOLLM, read=READ) -> dict:
    shape = checkpoint.of_config(config, "the weights").model_dump(exclude_none=True)
    return {"shape": {**shape, "read": {"bytes_per_token": read, "locator": "their tensors"}}}


def served(tmp_path, *, tps=100.0, weights=None, change=None):
    """A run with its weights' shape, and a machine that reads 24.4 GB/s past 32 MiB of L3."""
    one = boot(effective={"context_tokens": 8192, "kv_dtype": "f16/f16"}, metrics={"kv_bytes_per_token": 23040})
    path = folder(tmp_path, chat(tps=tps), [one], change=change)
    machine = json.loads((path / "machine.json").read_text())
    machine["memory"]["bandwidth_gb_s"], machine["cpu"]["l3_mib"] = 24.4, 32.0
    (path / "machine.json").write_text(json.dumps(machine))
    facts = json.loads((path / "weights.json").read_text())
    (path / "weights.json").write_text(json.dumps({**facts, **(weights or told())}))
    return path


def scout(recipe: dict) -> None:
    """The default recipe made to publish what study 1 does of Llama-4-Scout on vLLM."""
    recipe["model"]["shape"] = {
        "attention": {
            "full_layers": 12,
            "windowed_layers": 36,
            "window_tokens": 8192,
            "window": "chunked",
            "kv_heads": 8,
            "head_dim": 128,
            "locator": "its config",
        },
        "parameters": {"total_b": 109.0, "active_b": 17.0, "bits_per_weight": 4.5, "locator": "its card"},
    }
    recipe["model"]["files"] = [
        {**f, "path": f["path"].replace(".gguf", ".txt")} for f in recipe["model"]["files"]
    ]
    recipe["engine"] = {**recipe["engine"], "name": "vllm"}
    recipe["servers"] = [{"id": "default", "args": ["--max-model-len", "110000", "--dtype", "bfloat16"]}]
    recipe["memory"] = {"bandwidth_gb_s": 1792, "kind": "nominal", "llc_mib": 128, "locator": "its data sheet"}
    recipe["workloads"] = [w for w in recipe["workloads"] if w["id"] == "chat"]
    recipe["comparisons"] = []
    said = {"evidence": "measured", "locator": "S0"}
    recipe["claims"] = [
        {"id": "kv", "metric": "memory.kv_gib", "value": {"point": 20.19}, "unit": "GiB", **said},
        {"id": "context", "metric": "kv_tokens", "value": {"about": 110256}, "unit": "tok", **said},
        {"id": "decode", "metric": "decode_tps", "value": {"range": [30, 60]}, "unit": "tok/s", **said},
    ]


def published(tmp_path, change=scout):
    return folder(tmp_path, change=change, parameters={"mode": "published"})


def drawn(path, name):
    return next((f for f in charts.draw(path) if f.name == name), None)


def rows(figure):
    return list(csv.DictReader(figure.csv.open()))


def page(path):
    """The section's tables."""
    (section,) = capacity.sections(findings.read(path))
    return BeautifulSoup(section.body, "html.parser")


def test_a_run_shows_what_the_engine_printed_beside_the_arithmetic(tmp_path):
    found = table(page(served(tmp_path)), "KV cache")
    assert ["KV cache per token, f16 (B)", "23,040", "23,040", "23,040"] in found
    assert ["tokens in blocks of 256, uniform", "8,192", "–", "–"] in found


def test_the_report_has_the_section_and_both_charts(tmp_path):
    shown = soup(served(tmp_path))
    assert "upper bound" in text(shown.find(id="capacity").find_parent())
    for name in ("kv-cache", "roofline"):
        assert shown.find(id=f"figure-{name}").img["alt"].startswith("Chart of ")


def test_without_a_shape_and_without_a_bandwidth_nothing_is_made_up(tmp_path):
    path = folder(tmp_path, chat(), [boot()])
    assert drawn(path, "kv-cache") is None and drawn(path, "roofline") is None
    assert sizing.rooms(findings.read(path)) == []


def test_a_page_without_a_roofline_says_why(tmp_path):
    def nothing_read(recipe):
        scout(recipe)
        recipe["model"]["shape"]["parameters"].pop("bits_per_weight")

    def no_speed(recipe):
        scout(recipe)
        recipe["claims"] = [c for c in recipe["claims"] if c["metric"] != "decode_tps"]

    for change, why in (
        (nothing_read, "No roofline: how many bytes of weights a token reads is not stated."),
        (no_speed, "No roofline: no decode speed of a request is published"),
    ):
        path = published(tmp_path / change.__name__, change)
        assert why in text(page(path)) and drawn(path, "roofline") is None
    assert "No roofline" not in text(page(published(tmp_path / "whole")))
    bare = page(folder(tmp_path / "bare", chat(), [boot()]))
    assert "Measured rates have no bandwidth to be held against: none was measured." in text(bare)


def test_a_chart_of_the_cache_tells_its_lines_apart_and_explains_them(tmp_path):
    path = published(tmp_path)
    (room,) = sizing.rooms(findings.read(path))
    lines = {entry.get_label(): entry.get_linestyle() for entry in charts.capacity._entries([], room)}
    two = ["computed, hybrid, 2,048 tokens in flight", "computed, hybrid, 16,384 tokens in flight"]
    assert len({lines[name] for name in (*two, "computed, uniform")}) == 3
    caption = drawn(path, "kv-cache").caption
    assert "Uniform: every layer keeps every token. Hybrid: full layers keep every token, windowed ones" in caption


def test_a_measured_rate_is_held_against_this_machines_bandwidth(tmp_path):
    found = ceilings.rates(findings.read(served(tmp_path)))
    assert {r.here for r in found} == {True} and len(found) == 5
    assert found[0].bytes_per_token == READ + 23040 * (55 + 24)
    assert found[0].bound_tps == pytest.approx(24.4e9 / found[0].bytes_per_token)
    assert found[0].finding is None


@pytest.mark.parametrize("read,finding", [(READ, "bars"), (60_000_000, "warning")])
def test_a_rate_above_the_roofline_is_said_on_the_page(tmp_path, read, finding):
    path = served(tmp_path, tps=1000.0, weights=told(read=read))
    assert {r.finding for r in ceilings.rates(findings.read(path))} == {finding}
    assert "above the bandwidth roofline" in text(page(path).find("ul", class_="flags"))


def test_a_recipe_alone_shows_its_publications_capacity(tmp_path):
    found = table(page(published(tmp_path)), "KV cache")
    assert ["KV cache per token, bfloat16 (B)", "196,608", "–", "–"] in found
    assert ["memory of the cache (GiB)", "–", "–", "20.19"] in found
    assert ["tokens in blocks of 16, uniform", "110,256", "–", "110,256"] in found
    assert ["tokens in blocks of 16 of one sequence, hybrid", "367,328 to 410,336", "–", "–"] in found
    assert ["sequences of 110,000 tokens, hybrid", "2.40 to 3.13", "–", "–"] in found


def test_what_was_assumed_is_said(tmp_path):
    said = text(page(published(tmp_path)))
    assert "Assumed, for nothing tells it: between 2,048 and 16,384 tokens are in flight." in said


def test_a_published_concurrency_says_how_the_engine_counted(tmp_path):
    def change(recipe):
        scout(recipe)
        one = {
            "id": "x",
            "metric": "kv_concurrency",
            "value": {"point": 1.0},
            "evidence": "measured",
            "locator": "S0",
        }
        recipe["claims"].append(one)

    assert "A concurrency of 1.00, as published, is that of uniform accounting." in text(
        page(published(tmp_path, change))
    )


def test_published_rates_are_held_against_the_published_machine_alone(tmp_path):
    path = published(tmp_path)
    found = ceilings.rates(findings.read(path))
    assert [(r.here, r.tps) for r in found] == [(False, 30), (False, 60)]
    assert found[0].bytes_per_token == 17e9 * 4.5 / 8
    assert found[0].bound_tps == pytest.approx(1792 / (17 * 4.5 / 8))
    figure = drawn(path, "roofline")
    assert {r["from"] for r in rows(figure)} == {"published machine", "published"}
    assert "0 rates measured here" in figure.caption and "its data sheet" in figure.caption


def test_measured_and_published_rates_share_no_look_and_no_line(tmp_path):
    def change(recipe):
        recipe["memory"] = {"bandwidth_gb_s": 614.4, "kind": "nominal", "locator": "x"}
        said = {"evidence": "measured", "locator": "x", "unit": "tok/s"}
        recipe["claims"].append({"id": "there", "metric": "decode_tps", "value": {"point": 300.0}, **said})

    path = served(tmp_path, change=change)
    found = {r.here: r for r in ceilings.rates(findings.read(path))}
    assert found[True].bound_tps < 260 < 6000 < found[False].bound_tps
    assert {r["from"] for r in rows(drawn(path, "roofline"))} == {
        "measured here",
        "published machine",
        "published",
    }
    assert charts.sources.HERE["color"] != charts.sources.PUBLISHED["color"]
    assert charts.sources.HERE["marker"] != charts.sources.PUBLISHED["marker"]


def test_a_speculative_rate_is_drawn_and_never_found_above(tmp_path):
    def change(recipe):
        scout(recipe)
        config = json.dumps({"method": "dflash", "num_speculative_tokens": 7})
        recipe["servers"][0]["args"] += ["--speculative-config", config]
        said = {"evidence": "measured", "locator": "x", "unit": "tok/s"}
        recipe["claims"].append({"id": "fast", "metric": "decode_tps", "value": {"point": 900.0}, **said})

    path = published(tmp_path, change)
    assert {r.finding for r in ceilings.rates(findings.read(path))} == {None}
    assert {r["kind"] for r in rows(drawn(path, "roofline"))} == {"bandwidth", "speculative rate"}
    assert "steps" in drawn(path, "roofline").caption


def test_the_chart_marks_where_each_way_of_counting_meets_the_memory(tmp_path):
    figure = drawn(published(tmp_path), "kv-cache")
    assert [(r["kind"], int(r["tokens"])) for r in rows(figure)] == [
        ("computed", 110_256),
        ("computed", 367_328),
        ("computed", 410_336),
        ("published", 110_256),
    ]
    assert "110,256 tokens in 20.19 GiB" in figure.alt


def test_weights_that_are_not_as_the_recipe_states_are_said(tmp_path):
    def change(recipe):
        recipe["model"]["shape"] = {
            "attention": {"full_layers": 12, "kv_heads": 3, "head_dim": 64, "locator": "wrong"}
        }

    path = served(tmp_path, change=change)
    assert "full_layers is 12 in the recipe, 30 in these weights" in text(page(path).find("ul", class_="flags"))
    assert "KV cache per token, f16 (B) 23,040" in text(page(path))


def test_a_set_number_of_blocks_is_the_memory(tmp_path):
    layout = {"kv_blocks": 13, "kv_bytes": 2**30}
    shape = checkpoint.of_config(SCOUT)
    found = sizing._memory(layout, {}, {"memory.kv_gib": ()}, shape, sizing.Cache())
    assert found.value == 13 * 16 * 196_608


@pytest.mark.parametrize(
    "engine,args,told,expected",
    [
        ("llama-cpp", "-c 8192 -ctk q8_0 --ubatch-size 256", {}, ("q8_0/f16", 256, 8192, False)),
        (
            "llama-cpp",
            "--ctx-size 8192 --spec-type draft-mtp",
            {"kv_dtype": "f16/f16"},
            ("f16/f16", 512, 8192, True),
        ),
        ("vllm", "--max-model-len 64K --kv-cache-dtype fp8", {}, ("fp8_e4m3", None, 65536, False)),
        ("vllm", "--max-num-batched-tokens 2048", {"kv_dtype": "bfloat16"}, ("bfloat16", 4096, None, False)),
    ],
)
def test_an_engine_tells_how_it_keeps_its_cache(engine, args, told, expected):
    found = engines.load(engine).cache_layout(args.split(), told)
    keys = ("kv_dtype", "in_flight_tokens", "context_tokens", "speculative")
    assert tuple(found.get(key) for key in keys) == expected


@pytest.mark.parametrize("wrong", [{"windowed_layers": 3}, {"window_tokens": 8, "window": "chunked"}])
def test_a_window_is_stated_whole_or_not_at_all(wrong):
    with pytest.raises(ValueError, match="belong to `windowed_layers`"):
        Attention(full_layers=1, kv_heads=1, head_dim=64, locator="x", **wrong)
