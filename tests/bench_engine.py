"""The kit's decode speed beside llama-bench's own, on one build, model and thread count, taken in turns.

Run as `python tests/bench_engine.py [pairs]`. Builds llama.cpp first where it is not cached (about 15 minutes on
two cores). llama-bench decodes from the depth that the prompt leaves, so both read the same cache.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from llmrepro import bench as benches
from llmrepro import catalog, engines, environment, machine, metrics, parameters, preparation, prompts, server
from llmrepro import run as runs
from llmrepro.progress import Progress

RECIPE = "smollm2-135m/llama-cpp-native--cpu"
TOKENS = 128


def llama_bench(env: Path, model: Path, threads: int, depth: int) -> float:
    """Decode tok/s of one run of llama-bench from `depth` tokens on."""
    shown = subprocess.run(
        [
            env / "bin/llama-bench",
            "-m",
            model,
            "-t",
            str(threads),
            "-p",
            "0",
            "-n",
            str(TOKENS),
            "-d",
            str(depth),
            "-r",
            "1",
            "-o",
            "json",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(shown.stdout)[0]["avg_ts"]


def main(pairs: int) -> None:
    params = parameters.checked(
        {
            "recipe": RECIPE,
            "runs_dir": tempfile.mkdtemp(prefix="llmrepro-bench-"),
            "overrides": {"workloads.chat.max_tokens": TOKENS},
        }
    )
    run = runs.create(params)
    recipe = run.recipe
    env = environment.prepare(recipe.engine, catalog.home() / RECIPE / "engine.lock", run.path / "install.log")
    model = preparation.ready(recipe.model, env, run.path / "install.log").path
    chat, engine = recipe.workloads[0], engines.load(recipe.engine.name)
    bench = benches.Bench(run, recipe, engine, env.path, model, prompts.texts(run.path), Progress("bench", 1), {})
    threads = machine.threads()
    asked = benches.question(bench, chat, bench.texts[prompts.key(chat, chat.prompts[0])])

    def command(port: int, api_key: str) -> server.Command:
        launch = engine.launch(
            env.path,
            recipe.engine.install,
            recipe.servers[0],
            model,
            alias=recipe.id,
            port=port,
            api_key=api_key,
            threads=threads,
        )
        return server.Command(launch.argv, launch.env)

    ratios, kit, own = [], [], []
    with server.boot(command, folder=run.path, number=1, ready=asked) as boot:
        depth = benches.ask_one(boot, asked).prompt_tokens
        for _ in range(pairs):
            own.append(llama_bench(env.path, model, threads, depth))
            kit.append(metrics.decode_tps(benches.ask_one(boot, asked)))
            ratios.append(kit[-1] / own[-1])
    run.close()
    print(
        f"decode, {TOKENS} tokens after {depth}, {threads} thread{'s' * (threads > 1)}, {pairs} pairs in turn: "
        f"kit {median(kit):.1f}, llama-bench {median(own):.1f} tok/s; "
        f"ratio median {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), wanted at least 0.95"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
