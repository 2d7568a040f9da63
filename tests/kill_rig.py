"""A recipe whose engine is the truth server as a llama-server, in an environment that is complete: so that every
stage of a run, `llmrepro run` included, is what it is for a real engine, and takes seconds."""

import hashlib
import json
from pathlib import Path

import gguf
import llama_truth
from test_notebook import left_below

from llmrepro import catalog, contents, environment, machine, stages
from llmrepro.run import Run
from llmrepro.run_folder import sha256_of

COMMIT = "1" * 40
TEXTS = {
    "hello": "Say hello to the person who sits beside you",
    "count": "Count the boats in the harbour and say which has the oldest sail",
    "plan": "Plan a walk from the station to the old harbour and back before noon",
    "warm": "Name a tree",
    "long": "The harbour lies quiet and every boat has its own name and its own colour. " * 4,
}
CONTEXT = 128
SIGN_OF_LIFE = 4  # tokens


def _prompt(name: str) -> dict:
    return {"id": name, "file": f"{name}.txt", "sha256": hashlib.sha256(TEXTS[name].strip().encode()).hexdigest()}


def _workload(name: str, kind: str, **more) -> dict:
    told = {"on": ["default"], "warmup": _prompt("warm"), "max_tokens": 20, "ignore_eos": True, "repeats": 2}
    return {"id": name, "kind": kind, **told, **more}


def _recipe(sha256: str) -> dict:
    asked = [_prompt(name) for name in ("hello", "count", "plan")]
    claim = {"server": "default", "evidence": "measured", "locator": "here"}
    return {
        "id": "truth/llama-cpp--here",
        "title": "The truth server as a llama-server",
        "question": "Do its rows survive?",
        "needs": {"minutes": 1},
        "engine": {
            "name": "llama-cpp",
            "version": "1",
            "install": {
                "kind": "git",
                "checkouts": [{"name": "llama.cpp", "repo": "https://example.org/llama.cpp", "commit": COMMIT}],
            },
        },
        "model": {
            "source": "huggingface",
            "repo": "a/b",
            "revision": COMMIT,
            "files": [{"path": "m.gguf", "sha256": sha256}],
            "format": "gguf",
        },
        "servers": [{"id": "default", "args": ["--ctx-size", str(CONTEXT), "--parallel", "4"]}],
        "workloads": [
            _workload("chat", "chat", prompts=asked),
            _workload("ladder", "ladder", text=_prompt("long"), lengths=[32, 64, 96, 160, 200]),
            _workload("concurrency", "concurrency", prompts=asked[:2], streams=[1, 2, 4]),
        ],
        "claims": [
            claim
            | {"id": "counts", "workload": "chat", "case": "hello", "metric": "output_tokens"}
            | {"unit": "tok", "value": {"exact": 20}},
            claim
            | {"id": "together", "workload": "concurrency", "case": "4", "metric": "output_tokens"}
            | {"unit": "tok", "value": {"exact": 20}},
            claim
            | {"id": "fails", "workload": "ladder", "case": "160", "metric": "outcome"}
            | {"value": {"failed_at": 160}},
            claim
            | {"id": "holds", "workload": "ladder", "case": "96", "metric": "outcome"}
            | {"value": {"completed_to": 96}},
        ],
    }


class Rig:
    """The recipe in a folder of its own, its engine in a cache of its own, or in that of others and told apart by
    its number. `only` names the workloads to keep, `repeats` their rounds."""

    def __init__(
        self,
        folder: Path,
        cache: Path | None = None,
        number: int = 0,
        only: tuple[str, ...] = (),
        repeats: int = 2,
    ):
        self.folder = folder
        self.recipe, self.journal = folder / "recipe", folder / "journal.jsonl"
        self.cache = cache or folder / "cache"
        self.runs, self.weights, self.locks = folder / "runs", folder / "m.gguf", folder
        self.recipe.mkdir(parents=True)
        for name, text in TEXTS.items():
            (self.recipe / f"{name}.txt").write_text(text.strip() + "\n")
        _write_weights(self.weights)
        recipe = _recipe(sha256_of(self.weights))
        if only:
            recipe["workloads"] = [w | {"repeats": repeats} for w in recipe["workloads"] if w["id"] in only]
            recipe["claims"] = [c for c in recipe["claims"] if c["workload"] in only]
        if number:
            recipe["id"] += f"-{number}"
        (self.recipe / "recipe.json").write_text(json.dumps(recipe))
        lock = self.recipe / "engine.lock"
        lock.write_text(f"jinja2==3.1.6 --hash=sha256:{number:064}\n")
        engine = catalog.load(str(self.recipe)).engine
        place = environment.place_of(engine, lock, self.cache)
        llama_truth.install(place, self.journal)
        (place / "lib").mkdir()
        told = {"key": place.name, "freeze": "", "fixes": [], "files": contents.digest(contents.files(place))}
        (place / ".complete").write_text(json.dumps({**told, "seconds": 1.0}))

    def parameters(self) -> dict:
        return {
            "recipe": str(self.recipe),
            "trust": True,
            "runs_dir": str(self.runs),
            "weights_path": str(self.weights),
        }

    def prepare(self, run: Run) -> None:
        stages.prepare(run)

    def command(self) -> list[str]:
        """The words of `llmrepro` that run it."""
        words = [
            w
            for name in ("runs_dir", "weights_path")
            for w in (f"--{name.replace('_', '-')}", self.parameters()[name])
        ]
        return ["run", str(self.recipe), "--trust", *words]

    def told(self, what: str) -> list[dict]:
        """What the server told of its starts ("up"), of requests that came ("begun") and were answered ("ended");
        those for a sign of life are left out."""
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        found = [line for line in map(json.loads, lines) if line["what"] == what]
        return [line for line in found if line.get("max_tokens") != SIGN_OF_LIFE]

    def requests(self) -> int:
        """How many have come."""
        return len(self.told("begun"))

    def server(self) -> int | None:
        """The pid of the last server that was started."""
        return next((line["pid"] for line in self.told("up")[-1:]), None)


class RealRig:
    """The default recipe with as little to ask as there is of each kind, its own engine and weights."""

    def __init__(self, folder: Path, environment: Path, weights: Path):
        self.folder, self.runs, self.locks, self.cache = folder, folder / "runs", folder, machine.cache_dir()
        self.environment, self.weights = environment, weights
        folder.mkdir()

    def prepare(self, run: Run) -> None:
        """What the stage writes, which takes seconds to find again what is there."""
        run.write_json("environment.json", {"path": str(self.environment)})
        run.write_json("weights.json", {"path": str(self.weights), "facts": {}})

    def parameters(self) -> dict:
        slots = {"servers.default.args": [*catalog.load(catalog.DEFAULT).servers[0].args, "--parallel", "4"]}
        overrides = {
            **slots,
            "workloads.concurrency.on": ["default"],
            **{f"workloads.{name}.max_tokens": 8 for name in ("chat", "ladder", "concurrency")},
            "workloads.ladder.lengths": [32, 64],
            "workloads.concurrency.streams": [1, 2],
        }
        asked = ["chat", "concurrency", "ladder"]
        return {"runs_dir": str(self.runs), "repeats": 1, "workloads": asked, "overrides": overrides}

    def requests(self) -> int:
        """How many were answered."""
        return sum(path.read_bytes().count(b"\n") for path in self.runs.glob("*/*/*/records.jsonl"))

    def server(self) -> int | None:
        """The pid of the server that runs."""
        found = [p for p in left_below(self.runs) if "_llama_cpp_launcher" in " ".join(p.cmdline())]
        return next((p.pid for p in found), None)


def _write_weights(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(CONTEXT)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
