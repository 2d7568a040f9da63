"""Weights in another format, for an engine that cannot read the published file: made once, checked, cached."""

import hashlib
from pathlib import Path

from llmrepro import derivation, hashes
from llmrepro.environment import Environment
from llmrepro.model import Conversion
from llmrepro.progress import Progress
from llmrepro.run_folder import sha256_of

SCRIPT = Path(__file__).with_name("_gguf_to_safetensors.py")
SECONDS = 40  # what it takes on a slow core, for the meter


def convert(
    source: Path, wanted: Conversion, environment: Environment, log: Path, cache: Path | None = None
) -> Path:
    """The folder of the converted weights: from the cache when it is whole, else made in the engine's environment.

    It is keyed by the file, the conversion and the environment that does it. `log` gets the tool's output. Raises
    WeightsFailure.
    """
    decides = [hashes.sha256_of(source, cache), wanted.model_dump(), environment.key, sha256_of(SCRIPT)]

    def make(folder: Path, held: int) -> None:
        argv = [str(environment.python), "-I", str(SCRIPT), str(source), str(folder), wanted.dtype]
        with Progress("convert weights", SECONDS) as bar:
            doing = "the weights could not be converted"
            derivation.tool(argv, log, held, lambda s: bar.to(min(SECONDS, s)), doing)
            bar.to(SECONDS)

    return derivation.made("converted", decides, make, cache)[0]


def digest(folder: Path) -> str:
    """One sha256 for all safetensors of a folder: of the file where there is one, else over their sha256s."""
    found = [hashes.sha256_of(path) for path in sorted(folder.glob("*.safetensors"))]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()
