"""A study: recipes held against each other, and the claims made across them."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError, model_validator

from llmrepro import terms
from llmrepro.claim import Comparison
from llmrepro.parts import Name, Part, RecipeId, sentences, unique
from llmrepro.recipe import Recipe, RecipeError, Source, check_side


class Arm(Part):
    """One of what is compared: a recipe, or some of its servers."""

    id: Name
    recipe: str = Field(min_length=1, description="id, or the path of a recipe.json from the study's folder.")
    servers: list[Name] | None = Field(None, min_length=1, description="None: every server of the recipe.")
    workloads: list[Name] | None = Field(None, min_length=1, description="None: those of the run's profile.")


class Study(Part):
    schema_: str | None = Field(None, alias="$schema")
    id: RecipeId
    title: str
    question: str
    source: Source | None = None
    arms: list[Arm] = Field(min_length=2)
    boots: int = Field(3, ge=1, le=100, description="Of every server; the arms take turns, boot by boot.")
    repeats: int | None = Field(None, ge=1, description="Rounds of every workload in a boot; None: the recipes'.")
    comparisons: list[Comparison] = []
    differs_in: list[str] = Field([], description="What the arms differ in that the kit cannot see.")
    out_of_scope: list[str] = Field([], description="What is not measured here.")

    @model_validator(mode="after")
    def _names_resolve(self):
        arms = unique("arm", [a.id for a in self.arms])
        unique("claim", [c.id for c in self.comparisons])
        for c in self.comparisons:
            for which, side in (("a", c.a), ("b", c.b)):
                if side.arm is None:
                    raise ValueError(f"claim {c.id!r}: side `{which}` names no arm; give one of {', '.join(arms)}")
                if side.arm not in arms:
                    raise ValueError(
                        f"claim {c.id!r}: no arm is called {side.arm!r}; {terms.nearest(side.arm, arms)}"
                    )
        return self


def of_arm(recipe: Recipe, arm: Arm) -> Recipe:
    """A recipe with those of its servers that an arm is about."""
    servers = [s for s in recipe.servers if arm.servers is None or s.id in arm.servers]
    return recipe.model_copy(update={"servers": servers})


def check(study: Study, recipes: Mapping[str, Recipe], where: str) -> None:
    """Hold a study against the recipes of its arms (by arm id). Raises RecipeError naming what they have not."""
    faults = []
    for arm in study.arms:
        recipe = recipes[arm.id]
        for kind, wanted, there in (
            ("server", arm.servers, recipe.servers),
            ("workload", arm.workloads, recipe.workloads),
        ):
            known = [one.id for one in there]
            faults += [
                f"arm {arm.id!r}: {recipe.id} has no {kind} {name!r}; {terms.nearest(name, known)}"
                for name in wanted or []
                if name not in known
            ]
    for c in study.comparisons:
        for side in (c.a, c.b):
            try:
                check_side(side, recipes[side.arm], f"claim {c.id!r}")
            except ValueError as error:
                faults.append(str(error))
            left_out = next(a.servers for a in study.arms if a.id == side.arm)
            if side.server is not None and left_out is not None and side.server not in left_out:
                faults.append(
                    f"claim {c.id!r}: arm {side.arm!r} leaves the server {side.server!r} out; add it there"
                )
    if faults:
        raise RecipeError(f"{where}:\n" + "\n".join(f"  {f}" for f in faults))


def validated(data: Any, where: str) -> Study:
    """A Study from parsed JSON, its recipes not looked at. Raises RecipeError."""
    try:
        return Study.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise RecipeError(f"{where}:\n" + sentences(error, json_schema())) from None


def json_schema() -> dict:
    """The JSON Schema that editors complete from (recipes/study.schema.json)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Study.model_json_schema(by_alias=True)}
