"""Run folders for the tests of results, charts and report, made of records as the client makes them."""

import contextlib
import json
import shutil
from pathlib import Path

from bs4 import BeautifulSoup

from llmrepro import catalog, report, results
from llmrepro import run as runs
from llmrepro.client import Event, Record
from llmrepro.parameters import checked

CASES = ("code_runs", "explain_hash", "plan_move", "story_clocks", "story_orchard")
TOKENS = {"code_runs": 55, "explain_hash": 52, "plan_move": 59, "story_clocks": 50, "story_orchard": 45}
LENGTHS = (128, 256, 512)


def record(case="code_runs", repeat=0, *, tps=100.0, ttft_s=0.2, n=48, prompt=None, **changes):
    """An answer of n tokens, one per event, at an exact speed after an exact TTFT; `changes` are fields."""
    events = [Event(ttft_s + i / tps, "text", 4, 1) for i in range(n)]
    fields = {
        "server": "default",
        "boot": 1,
        "workload": "chat",
        "case": case,
        "repeat": repeat,
        "warmup": False,
        "prompt_sha256": "0" * 64,
        "endpoint": "/v1/chat/completions",
        "request": {},
        "started_at": "2026-01-02T03:04:05.678+00:00",
        "t_send_ns": 0,
        "status": "ok",
        "http_status": 200,
        "events": events,
        "t_done_s": events[-1].t_s,
        "text": f"An answer to {case}.",
        "finish_reason": "length",
        "prompt_tokens": prompt if prompt is not None else TOKENS.get(case, 40),
        "cached_tokens": 0,
        "output_tokens": n,
        "output_tokens_source": "ids",
        "text_sha256": "0" * 64,
        "timings": {"predicted_n": n, "predicted_ms": (n - 1) / tps * 1e3},
    }
    return Record(**{**fields, **changes})


def failure(case: str, repeat=0, **changes) -> Record:
    """A request in which the server died."""
    gone = {
        "status": "engine_died",
        "error": "killed by signal 9",
        "events": [],
        "t_done_s": None,
        "text": "",
        "finish_reason": None,
        "prompt_tokens": None,
        "output_tokens": None,
        "timings": None,
    }
    return record(case, repeat, **{**gone, **changes})


def chat(server="default", boot=1, rounds=3, tps=100.0) -> list[Record]:
    """Rounds over the five prompts; every speed differs from every other."""
    return [
        record(case, r, server=server, boot=boot, tps=tps + 10 * r + place)
        for r in range(rounds)
        for place, case in enumerate(CASES)
    ]


def prefill(server="default", boot=1, rounds=3, tps=200.0) -> list[Record]:
    """Rounds over the lengths: 50 ms and the prompt's tokens at `tps`, a little more each round."""
    return [
        record(
            str(n),
            r,
            workload="prefill",
            server=server,
            boot=boot,
            n=4,
            prompt=n,
            ttft_s=0.05 + n / tps * (1 + 0.01 * r),
        )
        for r in range(rounds)
        for n in LENGTHS
    ]


def boot(server="default", replicate=0, scale=1.0, **changes) -> dict:
    """boots/<n>.json of a server that got ready."""
    told = {
        "server": server,
        "replicate": replicate,
        "threads": 1,
        "adaptations": [],
        "command": ["/data/someone/env/bin/python", "--model", "/data/someone/weights.gguf", "--threads", "1"],
        "startup": {
            "startup.port_s": 0.1 * scale,
            "startup.models_s": 0.4 * scale,
            "startup.health_s": 0.41 * scale,
            "startup.first_completion_s": 0.6 * scale,
        },
        "effective": {"context_tokens": 8192, "load_mode": "mmap"},
        "phases": [["read metadata", 0.0, 0.2 * scale], ["load tensors", 0.2 * scale, 0.3 * scale]],
        "metrics": {"kv_bytes_per_token": 23040},
        "machine": {
            "load_before": 0.5,
            "load_after": 1.0,
            "steal_share": 0.001,
            "other_cpus": 0.02,
            "seconds": 12.0,
        },
    }
    return {**told, **changes}


MACHINE = {
    "cpu": {"model": "A processor", "architecture": "x86_64", "physical_cores": 2},
    "memory": {"total_gib": 16.0},
    "gpus": None,
    "load_1min": 0.5,
    "llmrepro": "0.1.0",
}


WEIGHTS = {"model.bytes": 98362432, "model.layers": 30, "model.context_tokens": 8192}


def fill(run: runs.Run, records=(), boots=None, *, outcome="completed", machine=MACHINE, **status) -> None:
    """What measuring writes to the folder of a run. Records alone are those of one boot; without records and
    boots it is the folder of a machine that measured nothing.
    """
    run.write_json("machine.json", machine)
    if records or boots:
        facts = {"model.sha256": run.recipe.model.files[0].sha256, **WEIGHTS}
        run.write_json("weights.json", {"path": "/data/someone/weights.gguf", "facts": facts})
        pins = run.recipe.engine.install.pins.items()
        run.write_text("engine-freeze.txt", "".join(f"{name}=={version}\n" for name, version in pins))
    for number, told in enumerate(boots or ([boot()] if records else []), 1):
        run.write_json(f"boots/{number}.json", told)
    for one in records:
        run.append(one)
    run.set_status(outcome, "report" if outcome in ("completed", "lacking") else "measure", **status)


def folder(tmp_path: Path, records=(), boots=None, *, parameters=None, change=None, result=True, **more) -> Path:
    """A run folder of the default recipe, or of what `change` makes of it; `more` goes to `fill`."""
    given = {"runs_dir": str(tmp_path / "runs"), **(parameters or {})}
    if change is not None:
        given |= {"recipe": str(_changed(tmp_path, change)), "trust": True}
    with contextlib.closing(runs.create(checked(given))) as run:
        fill(run, records, boots, **more)
        if result:
            run.write_json("result.json", results.compute(run.path))
        return run.path


def two_servers(recipe: dict) -> None:
    """The default recipe with two servers of two boots each."""
    first = recipe["servers"][0]
    recipe["servers"] = [{**first, "id": "mmap", "boots": 2}, {**first, "id": "mlock", "boots": 2}]
    for workload in recipe["workloads"]:
        workload["on"] = ["mmap", "mlock"]
    recipe["comparisons"] = []  # of servers that are gone
    for claim in recipe["claims"]:
        if "server" in claim:
            claim["server"] = "mmap"


def _changed(tmp_path: Path, change) -> Path:
    home = catalog.path_of(catalog.DEFAULT).parent
    shutil.copytree(home.parent, tmp_path / "model")  # its prompts lie beside the recipe or above it
    path = tmp_path / "model" / home.name / "recipe.json"
    data = json.loads(path.read_text())
    data.pop("$schema", None)
    change(data)
    path.write_text(json.dumps(data))
    return path


def soup(path: Path) -> BeautifulSoup:
    """The report of a run folder, made and parsed."""
    return BeautifulSoup(report.write(path).read_text(encoding="utf-8"), "html.parser")


def text(node) -> str:
    """What a reader sees of it, with single spaces."""
    return " ".join(node.get_text(" ").split())


def head(page) -> str:
    """What stands before the first section."""
    return text(page.main).split(text(page.h2))[0]


def table(page, caption: str) -> list[list[str]]:
    """The one table whose caption begins so, its head first."""
    (found,) = [t for t in page.find_all("table") if t.caption.get_text().startswith(caption)]
    return [[text(cell) for cell in row.find_all(["th", "td"])] for row in found.find_all("tr")]
