"""The small model up to its whole context and beyond, in both engines: minutes, so that CI leaves it out."""

import subprocess
import sys
from pathlib import Path

import pytest

from llmrepro import run_folder
from llmrepro.client import Record

CONTEXT = 8192
LADDERS = "[ladder, ladder-chat]"


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("recipe", ["smollm2-135m/llama-cpp--cpu", "smollm2-135m/vllm--cpu"])
def test_it_holds_up_to_its_context_and_fails_beyond(recipe, tmp_path):
    command = Path(sys.executable).with_name("llmrepro")
    asked = [command, "run", recipe, "--runs-dir", tmp_path, "--workloads", LADDERS]
    subprocess.run(asked, check=True, timeout=1500)
    (path,) = (p.parent for p in tmp_path.rglob("status.json"))
    assert run_folder.status(path)["outcome"] == "completed"
    records = [Record.model_validate(r) for r in run_folder.read_lines(path / "records.jsonl")]
    for name in ("ladder", "ladder-chat"):
        asked = [r for r in records if r.workload == name and not r.warmup]
        assert [(r.status, r.prompt_tokens) for r in asked[:-1]] == [("ok", int(r.case)) for r in asked[:-1]]
        assert (asked[-1].case, asked[-1].status) == (str(CONTEXT), "context_overflow")
        assert {r.output_tokens for r in asked[:-1]} == {24}
    result = run_folder.read_json(path / "result.json")
    held = {
        (r["workload"], r["metric"]): r["value"] for r in result["metrics"] if r["metric"].endswith("ed_tokens")
    }
    assert held["ladder", "verified_tokens"] == held["ladder-chat", "verified_tokens"] == 8160
    page = (path / "report.html").read_text()
    assert "verified up to 8,160 tokens" in page and 'id="figure-ladder-ladder"' in page
