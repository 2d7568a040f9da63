"""A recipe: what is measured, on what, how, and what was claimed; bad ones are refused in sentences."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from llmrepro import arguments, terms
from llmrepro.claim import Between, Claim, Comparison, Conditions, Side
from llmrepro.install import Engine
from llmrepro.model import Model
from llmrepro.parts import Argument, HttpsUrl, Name, Part, RecipeId, Value, Variable, sentences, unique
from llmrepro.shape import Memory
from llmrepro.workload import Prompt, Workload

COMMANDS = r"^[A-Za-z0-9][A-Za-z0-9.+_-]*(\|[A-Za-z0-9][A-Za-z0-9.+_-]*)*$"


class RecipeError(ValueError):
    """A recipe that cannot be used; the text names each key's path and what would be right."""


class Source(Part):
    publication: str = Field(description="Who published it, and where it can be found again.")
    url: HttpsUrl | None = None
    date: str | None = Field(None, pattern=r"^\d{4}-\d{2}-\d{2}$")


class Needs(Part):
    """What a machine must have for the recipe to run live. It decides `lacking`, nothing else."""

    architectures: list[Literal["x86_64", "aarch64"]] = []
    memory_gib: float = Field(0, ge=0, le=1e6)
    disk_gib: float = Field(0, ge=0, le=1e6)
    vram_gib: float = Field(0, ge=0, le=1e6, description="Of each GPU.")
    compute_capability: str | None = Field(None, pattern=r"^\d+\.\d+$", description="At least.")
    gpus: int = Field(0, ge=0, le=64, description="How many; 0: one where memory or capability is asked of it.")
    commands: list[Annotated[str, Field(pattern=COMMANDS)]] = Field(
        [], description="One each, or alternatives: podman|docker."
    )
    minutes: float = Field(5, gt=0, le=1e5, description="Expected minutes of the quick profile, to be said first.")

    @property
    def gpu_count(self) -> int:
        return max(self.gpus, int(self.vram_gib > 0 or self.compute_capability is not None))


class Server(Part):
    id: Name
    args: list[Argument] = Field(
        [], description="As the engine's own server names them; {threads} and {draft} are filled in."
    )
    env: dict[Variable, Value] = {}
    numa_node: int | None = Field(None, ge=0, le=63, description="Bound to its CPUs and memory, with numactl.")
    boots: int = Field(1, ge=1, le=100)

    @model_validator(mode="after")
    def _arguments_are_flags_with_values(self):
        arguments.check(self.args)
        return self


class Safety(Part):
    core_c: float | None = Field(None, ge=-100, le=200)
    memory_c: float | None = Field(None, ge=-100, le=200)


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
    between: list[Between] = Field([], description="How far starts lie apart; the first that fits a claim counts.")
    out_of_scope: list[str] = Field([], description="What was published and is not measured here.")
    safety: Safety = Safety()
    memory: Memory | None = Field(None, description="What the published machine decoded from.")

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
