"""How long an engine's environment takes against plain `uv pip install` of the same lock (`make bench`).

Both start from a warm cache of uv, the kit's its own and plain's the user's, and take turns. Two pairs of numbers,
because plain uv has two answers: without bytecode it is quick to install and the first start of a server compiles;
with `--compile-bytecode` it is what the kit makes, whose servers' first start is measured and must not compile.
The kit's part without bytecode includes what plain uv does not do: asking pip's configuration, checking every file
against its wheel's record, and the list by which a later change is noticed. A lock names every package, so plain
gets `--no-deps`, as the kit's sync does.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import uv

from llmrepro import catalog, environment, package_index

RECIPE = "smollm2-135m/vllm--cpu"


def plain(lock: Path, python: Path, folder: Path, *options: str) -> float:
    env = {**os.environ, **package_index.uv_environment()}
    env.pop("VIRTUAL_ENV", None)
    start = time.monotonic()
    subprocess.run([uv.find_uv_bin(), "venv", "-q", "--python", str(python), str(folder)], check=True, env=env)
    install = [uv.find_uv_bin(), "pip", "install", "-q", "--require-hashes", "--no-deps", *options]
    subprocess.run([*install, "--python", str(folder / "bin/python"), "-r", str(lock)], check=True, env=env)
    took = time.monotonic() - start
    shutil.rmtree(folder)
    return took


def main(pairs: int, recipe_id: str, lock: Path | None) -> None:
    recipe = catalog.load(recipe_id)
    lock = lock or catalog.home() / recipe_id / "engine.lock"
    python = environment.interpreter(recipe.engine.install.python)
    # beside the user's cache: hard links are within one file system
    home = Path(tempfile.mkdtemp(prefix="llmrepro-bench-", dir=Path.home() / ".cache"))
    log = home / "install.log"
    try:

        def kit() -> tuple[float, float]:
            """Seconds in all, and of those without compiling to bytecode."""
            start = time.monotonic()
            made = environment.prepare(recipe.engine, lock, log, home)
            took = time.monotonic() - start
            shutil.rmtree(made.path)
            compiled = re.findall(r"Bytecode compiled \d+ files in (?:(\d+)m )?([\d.]+)(m?)s", log.read_text())
            minutes, number, milli = compiled[-1]
            return took, took - float(minutes or 0) * 60 - float(number) / (1000 if milli else 1)

        kit(), plain(lock, python, home / "plain")  # both caches are warm after this
        bare, full = [], []
        for number in range(1, pairs + 1):
            quick = plain(lock, python, home / "plain")
            took, without = kit()
            compiled = plain(lock, python, home / "plain", "--compile-bytecode")
            bare.append(without / quick)
            full.append(took / compiled)
            print(
                f"pair {number}: plain {quick:.2f} s, with bytecode {compiled:.2f} s; "
                f"kit {took:.2f} s, of that {without:.2f} s without bytecode",
                flush=True,
            )
    finally:
        shutil.rmtree(home)
    for what, ratios in (("with bytecode on both sides", full), ("without bytecode on either side", bare)):
        print(
            f"environment of {recipe_id}, {what}: kit / plain uv, median of {pairs} pairs {median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}), wanted at most 1.3"
        )


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 3,
        sys.argv[2] if len(sys.argv) > 2 else RECIPE,
        Path(sys.argv[3]) if len(sys.argv) > 3 else None,
    )
