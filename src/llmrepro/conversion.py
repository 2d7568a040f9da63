"""Weights in another format, for an engine that cannot read the published file: made once, checked, cached."""

import hashlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

from llmrepro import machine
from llmrepro.environment import Environment, locked
from llmrepro.model import Conversion
from llmrepro.progress import Progress
from llmrepro.run_folder import sha256_of
from llmrepro.weights import WeightsFailure

SCRIPT = Path(__file__).with_name("_gguf_to_safetensors.py")
SECONDS = 40  # what it takes on a slow core, for the meter


def convert(
    source: Path, wanted: Conversion, environment: Environment, log: Path, cache: Path | None = None
) -> Path:
    """The folder of the converted weights: from the cache when it is whole, else made in the engine's environment.

    It is keyed by the file, the conversion and the environment that does it. Every file's sha256 is in its
    `.complete`, and compared each time. `log` gets the tool's output. Two runs convert once: the tool inherits the
    lock, so that not even one whose run was killed is worked beside. Raises WeightsFailure.
    """
    decides = [sha256_of(source), wanted.model_dump(), environment.key, sha256_of(SCRIPT)]
    key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
    place = (cache or machine.cache_dir()) / "converted" / key
    made = place.with_suffix(".part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.with_suffix(".lock")) as held:
            if _whole(place):
                return place
            shutil.rmtree(made, ignore_errors=True)
            try:
                argv = [str(environment.python), "-I", str(SCRIPT), str(source), str(made), wanted.dtype]
                _run(argv, log, held)
                for path in made.iterdir():
                    path.chmod(0o644)
                (made / ".complete").write_text(json.dumps(_files(made)), encoding="utf-8")
                shutil.rmtree(place, ignore_errors=True)
                os.replace(made, place)
            finally:
                shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise WeightsFailure(
            f"the weights could not be converted: {error}; make room, or name another cache in LLMREPRO_CACHE"
        ) from None
    return place


def digest(folder: Path) -> str:
    """One sha256 for all safetensors of a folder: of the file where there is one, else over their sha256s."""
    found = [sha256_of(path) for path in sorted(folder.glob("*.safetensors"))]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()


def _files(folder: Path) -> dict[str, str]:
    return {p.name: sha256_of(p) for p in sorted(folder.iterdir()) if p.name != ".complete"}


def _whole(folder: Path) -> bool:
    try:
        return json.loads((folder / ".complete").read_text(encoding="utf-8")) == _files(folder)
    except (OSError, ValueError):
        return False


def _run(argv: list[str], log: Path, held: int) -> None:
    start = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out, Progress("convert weights", SECONDS) as bar:
        out.write(f"$ {' '.join(argv)}\n".encode())
        out.flush()
        process = subprocess.Popen(
            argv,
            env={**machine.minimal_environment(), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[held],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                bar.to(min(SECONDS, time.monotonic() - start))
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        bar.to(SECONDS)
    if process.returncode != 0:
        tail = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
        raise WeightsFailure(
            f"the weights could not be converted (ended with {process.returncode}): {tail}; the whole is in {log}"
        )
