"""The parameters of a run, checked, and what they make of a recipe."""

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmrepro import catalog, credentials, own_prompts, running_server, terms
from llmrepro import recipe as recipes
from llmrepro.recipe import Recipe
from llmrepro.run_folder import RunError
from llmrepro.workload import Workload


class Parameters(BaseModel):
    """The parameters cell of the notebooks. Types are not guessed: papermill's `-p` turns 007 into 7."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    recipe: str = Field(catalog.DEFAULT, description="id, or path of a recipe.json")
    mode: terms.Mode = Field("auto", description="auto | live | published")
    profile: terms.Profile = Field("quick", description="quick | full")
    repeats: int | None = Field(None, ge=1, le=1000, description="rounds per workload; None: the recipe's")
    servers: list[str] | None = Field(None, description="server ids; None: all of the recipe's")
    workloads: list[str] | None = Field(None, description="workload ids; None: those of the profile")
    resume: str | None = Field(None, description="a run folder to go on with")
    runs_dir: str | None = Field(None, description="folder of the runs; None: runs/ of the project")
    weights_path: str | None = Field(None, description="your own copy of the weights file")
    prompts_file: str | None = Field(None, description="your own prompts (.jsonl), or text for ladders")
    server_url: str | None = Field(None, description="address of a running server: installs nothing")
    trust: bool = Field(False, description="install what a recipe from elsewhere names")
    overrides: dict[str, Any] = Field({}, description="dotted path in the recipe: value")

    def chooses(self, workload: Workload) -> bool:
        """Whether a workload is asked, by its name or by its profile."""
        return self.profile in workload.profiles if self.workloads is None else workload.id in self.workloads


AnyParameters = TypeVar("AnyParameters", bound=BaseModel)
LISTS = " Lists and mappings are written as YAML, [default] or {a.b: 1}; with papermill give them with -y"
WRITTEN = {
    "list_type": LISTS,
    "dict_type": LISTS,
    "string_type": " With papermill use -r for text that looks like a number",
    "int_type": " With papermill use -p, and no quotes",
    "bool_type": " With papermill use -p, and no quotes",
}


def checked(values: dict[str, Any], model: type[AnyParameters] = Parameters) -> AnyParameters:
    """Checked parameters. Raises RunError naming the parameter, what it was, and what would do."""
    unknown = sorted(set(values) - set(model.model_fields))
    if unknown:
        raise RunError(f"no parameter is called {unknown[0]!r}; {terms.nearest(unknown[0], model.model_fields)}")
    for name, value in values.items():
        if held := credentials.kinds(str(value)):
            raise RunError(
                f"parameter {name} holds {held[0]}, and parameters are written into the run folder and its "
                "notebook; leave it out: a server's key is taken from LLMREPRO_SERVER_KEY, the hub's from HF_TOKEN"
            )
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise RunError(
            f"parameter {name}: {first['msg']}, found {first['input']!r}; "
            f"it is: {model.model_fields[name].description}.{WRITTEN.get(first['type'], '')}"
        ) from None


def settled(recipe: Recipe, params: Parameters) -> Parameters:
    """The parameters with what a running server's address decides: one server of the recipe is meant, the first
    where none is named. Raises RunError where it does not go with the others."""
    if params.server_url is None:
        return params
    if params.mode == "published":
        raise RunError("mode published measures nothing, and server_url names what to measure; give one of them")
    if params.weights_path is not None:
        raise RunError("a server that already runs has its weights; leave weights_path or server_url out")
    servers = [recipe.servers[0].id] if params.servers is None else params.servers
    if len(servers) != 1:
        raise RunError(
            f"server_url is one server's address; name in servers the one that it is: {', '.join(servers)}"
        )
    return params.model_copy(update={"server_url": running_server.address(params.server_url), "servers": servers})


def resolved(recipe: Recipe, params: Parameters) -> Recipe:
    """The recipe as it will be run: overrides applied, repeats set. Raises RunError."""
    if params.prompts_file is not None:
        recipe = own_prompts.applied(recipe, params.prompts_file)
    data = json.loads(recipe.model_dump_json(by_alias=True, exclude_unset=True))
    for path, value in params.overrides.items():
        _override(data, path.split("."), value, path)
    try:
        changed = recipes.validated(
            data, f"{recipe.id} with overrides {', '.join(params.overrides)}" if params.overrides else recipe.id
        )
    except recipes.RecipeError as error:
        raise RunError(str(error)) from None
    for kind, wanted, there in (
        ("server", params.servers, changed.servers),
        ("workload", params.workloads, changed.workloads),
    ):
        known = [one.id for one in there]
        for name in wanted or []:
            if name not in known:
                raise RunError(f"{recipe.id} has no {kind} {name!r}; {terms.nearest(name, known)}")
    if params.prompts_file is not None and not own_prompts.asked(changed, params.prompts_file, params.chooses):
        raise RunError(
            f"prompts_file: no ladder of {recipe.id} is asked, and that is what the text would be cut for; name "
            "one in workloads, or take the profile full"
        )
    if params.server_url is not None:  # it is there once, whatever number of starts the recipe asks for
        changed = changed.model_copy(
            update={"servers": [s.model_copy(update={"boots": 1}) for s in changed.servers]}
        )
    if params.repeats is None:
        return changed
    for w in changed.workloads:
        seeds = len(w.sampling.seeds)
        if 0 < seeds < params.repeats and w.id in (params.workloads or [w.id]):
            raise RunError(
                f"repeats {params.repeats}: workload {w.id!r} has {seeds} seeds, one a round; leave repeats out, "
                f"give at most {seeds}, or give more seeds with an override of workloads.{w.id}.sampling.seeds"
            )
    return changed.model_copy(
        update={"workloads": [w.model_copy(update={"repeats": params.repeats}) for w in changed.workloads]}
    )


def _override(node, keys: list[str], value, path: str) -> None:
    for key in keys[:-1]:
        node = _step(node, key, path)
    last = keys[-1]
    if isinstance(node, list):
        node[node.index(_step(node, last, path))] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise RunError(
            f"override {path!r}: nothing lies below {'.'.join(keys[:-1])}; give a path into recipe.json"
        )


def _step(node, key: str, path: str):
    if isinstance(node, list):  # by position, or by the `id` that an entry carries
        found = [n for i, n in enumerate(node) if str(i) == key or (isinstance(n, dict) and n.get("id") == key)]
        known = [n["id"] if isinstance(n, dict) and "id" in n else str(i) for i, n in enumerate(node)]
        if not found:
            raise RunError(f"override {path!r}: no entry {key!r}; {terms.nearest(key, known)}")
        return found[0]
    if isinstance(node, dict):
        if key not in node:
            raise RunError(f"override {path!r}: no key {key!r}; {terms.nearest(key, node)}")
        return node[key]
    raise RunError(f"override {path!r}: nothing lies below {key!r}; give a path into recipe.json")
