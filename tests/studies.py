"""Studies' run folders for the tests of comparisons, made of records as the client makes them."""

import json
from pathlib import Path

from folders import MACHINE, boot, chat, fill, prefill

from llmrepro import comparison
from llmrepro.comparison import StudyParameters
from llmrepro.parameters import checked

LLAMA, VLLM = "smollm2-135m/llama-cpp--cpu", "smollm2-135m/vllm--cpu"
ARMS = [
    {"id": "llama-cpp", "recipe": LLAMA, "servers": ["default"]},
    {"id": "vllm", "recipe": VLLM, "servers": ["eager"]},
]


def claim(id="faster", **changes) -> dict:
    """That llama.cpp decodes faster than vLLM; `changes` are fields, None leaves one out."""
    fields = {
        "id": id,
        "metric": "decode_tps",
        "a": {"arm": "llama-cpp", "workload": "chat"},
        "b": {"arm": "vllm", "workload": "chat"},
        "order": "above",
        "evidence": "stated",
        "locator": "page 1",
    }
    return {k: v for k, v in {**fields, **changes}.items() if v is not None}


def study(*claims, **changes) -> dict:
    fields = {
        "id": "smollm2-135m/tested",
        "title": "Two engines",
        "question": "Which is faster?",
        "arms": ARMS,
        "boots": 3,
        "comparisons": list(claims),
    }
    return {**fields, **changes}


def written(tmp_path: Path, *claims, **changes) -> Path:
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "study.json"
    path.write_text(json.dumps(study(*claims, **changes)))
    return path


def measured(server, speeds, *, prefill_tps=200.0, start_s=0.6, rounds=3):
    """(records, boots) of a server with a boot per speed; the boots' starts are a little apart."""
    records, boots = [], []
    for n, tps in enumerate(speeds, 1):
        records += chat(server, n, rounds=rounds, tps=tps)
        records += prefill(server, n, rounds=rounds, tps=prefill_tps * (1 + n / 100))
        boots.append(boot(server, n - 1, start_s / 0.6 * (1 + n / 100)))
    return records, boots


def folder(tmp_path, claims, arms: dict, *, outcome="completed", changes=None, status=None, **parameters) -> Path:
    """A study's run folder; `arms` are keyword arguments of `folders.fill` by arm."""
    path = written(tmp_path, *claims, **(changes or {}))
    given = {"study": str(path), "runs_dir": str(tmp_path / "runs"), "trust": True, **parameters}
    made = comparison.create(checked(given, StudyParameters))
    made.write_json("machine.json", MACHINE)
    for arm, told in arms.items():
        fill(made.arms[arm], **told)
    made.set_status(outcome, "report" if outcome in ("completed", "lacking") else "measure", **(status or {}))
    made.close()
    return made.path


def both(fast=(100.0, 104.0, 102.0), slow=(50.0, 51.0, 53.0), **changes) -> dict:
    """Both arms measured: llama.cpp fast, vLLM slow."""
    one, two = measured("default", fast), measured("eager", slow, start_s=6.0)
    return {
        "llama-cpp": {"records": one[0], "boots": one[1]},
        "vllm": {"records": two[0], "boots": two[1]},
        **changes,
    }
