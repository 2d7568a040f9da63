"""All that a run folder tells, read once: what the charts and the report are made from."""

from pathlib import Path

from llmrepro import credentials, guard_log, prompts, results, samples
from llmrepro.client import Record
from llmrepro.measurements import Findings
from llmrepro.parameters import Parameters
from llmrepro.run import boots, load_recipe
from llmrepro.run_folder import read_json, read_json_if_there, read_lines, status


def read(path: Path) -> Findings:
    """Everything of a run folder. Raises RunError naming the file that is missing or broken."""
    freeze = path / "engine-freeze.txt"
    given = read_json(path / "parameters.json")  # of an older or newer kit: what this one does not know is left
    texts = read_json_if_there(path / "prompts.json")
    kept = {sha256: credentials.without(text) for sha256, text in texts.items()}
    started = boots(path)
    return Findings(
        recipe=load_recipe(path),
        status=status(path, page=False),
        parameters=Parameters.model_validate({n: v for n, v in given.items() if n in Parameters.model_fields}),
        machine=read_json_if_there(path / "machine.json"),
        boots=started,
        records=[Record.model_validate(r) for r in read_lines(path / "records.jsonl")],
        result=results.compute(path),
        prompts=kept,
        freeze=freeze.read_text(encoding="utf-8") if freeze.exists() else "",
        texts={name: kept[sha256] for name, sha256 in prompts.asked(path).items() if sha256 in kept},
        commands=_text(path / "commands.txt"),
        weights=read_json_if_there(path / "weights.json"),
        samples=samples.read(path),
        guarded=guard_log.of_boots(path, started),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
