"""What recipes and studies are made of: names, hashes, paths, and the arguments and variables they may set."""

import re
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from llmrepro import terms


def _known(kind: str, names):
    def check(value: str) -> str:
        known = names() if callable(names) else names
        if value not in known:
            raise ValueError(f"no {kind} is called {value!r}; {terms.nearest(value, known)}")
        return value

    return AfterValidator(check)


def _relative(value: str) -> str:
    if PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts:
        raise ValueError(f"{value!r} must be a relative path that stays inside; write it without / or ..")
    return value


def _allowed_argument(value: str) -> str:
    name = value.partition("=")[0]
    if name.startswith("--"):  # vLLM takes --max_model_len for --max-model-len, and --x.y for a part of --x
        name = name.replace("_", "-").partition(".")[0]
        longer = sorted(n for n in KIT_ARGUMENTS | OTHER_ARGUMENTS if n.startswith(name) and n != name)
        if longer and name not in NOT_SHORT:  # vLLM takes any beginning that only one option has
            raise ValueError(
                f"{name} can be read as short for {longer[0]}, which a recipe may not set; leave it out"
            )
    if name in OTHER_ARGUMENTS:
        raise ValueError(f"{name} would load, serve or write something that the recipe does not pin; leave it out")
    if name in KIT_ARGUMENTS:
        raise ValueError(
            f"{name} is set by the kit on every boot (loopback, a free port, a fresh key); leave it out"
        )
    return value


KIT_ARGUMENTS = frozenset(
    "--host --port --api-key --api-key-file --uds -m --model -a --alias --served-model-name "  # noqa: SIM905
    "-h --help --usage --version".split()
)
NOT_SHORT = {  # options themselves, of one engine or another
    *("--chat-template", "--config", "--model", "--lora", "--mmproj", "--api-key", "--kv", "--reasoning-parser"),
    "--draft",
}
# What would serve another model than the pinned one, open another door, or read and write elsewhere.
OTHER_ARGUMENTS = frozenset(
    "-hf -hfr -hff --hf-repo --hf-file --hf-token -mu --model-url -dr --docker-repo --models-dir --models-preset "  # noqa: SIM905
    "--ssl-key-file --ssl-cert-file --path --api-prefix --log-file --tools --rpc --props --slot-save-path "
    "-hfd -hfrd --hf-repo-draft --spec-draft-hf "
    "--config --lora --control-vector --chat-template-file --media-path --mmproj --mmproj-url "
    # vLLM's
    "--tokenizer --hf-config-path --download-dir --load-format --model-loader-extra-config "
    "--model-class-overrides --lora-modules --allowed-local-media-path --worker-cls --worker-extension-cls "
    "--logits-processors "
    "--middleware --tool-parser-plugin --reasoning-parser-plugin --io-processor-plugin --log-config-file "
    "--root-path --ssl-keyfile --ssl-certfile --ssl-ca-certs --allow-credentials --allowed-origins --headless "
    "--data-parallel-address --data-parallel-rpc-port --master-addr --node-rank --kv-transfer-config "
    "--scheduler-cls --distributed-executor-backend --otlp-traces-endpoint --tool-server "
    # open-jet's
    "--lib --draft-vocab".split()
)
ENVIRONMENT_ALLOWED = re.compile(
    r"(LLAMA|GGML|VLLM|OMP|KMP|MKL|OPENBLAS|CUDA|PYTORCH|TORCH|FLASHINFER|TRITON)_"
    r"[A-Z0-9_]+|DO_NOT_TRACK"
)
# Names that make an engine load code, read or write files, or take its arguments from elsewhere.
REFUSED_PARTS = re.compile(r"^LLAMA_ARG_|PATH$|LIBRAR|FILE$|PLUGIN|INJECTION|_DIR$")
REFUSED_VARIABLES = {
    "LLAMA_API_KEY",
    "LLAMA_ARG_HOST",
    "LLAMA_ARG_PORT",
    "VLLM_API_KEY",
    "VLLM_CACHE_ROOT",
    "VLLM_PORT",
    "VLLM_HOST_IP",
    "VLLM_USAGE_STATS_SERVER",
    "VLLM_USE_MODELSCOPE",
    "TORCH_TRACE",
}


def _allowed_variable(name: str) -> str:
    if name in REFUSED_VARIABLES or REFUSED_PARTS.search(name) or not ENVIRONMENT_ALLOWED.fullmatch(name):
        raise ValueError(
            f"{name} may not be set by a recipe; only an engine's own variables may, "
            "and never its host, port or key"
        )
    return name


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
RecipeId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*/[a-z0-9][a-z0-9._-]*$", max_length=120)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
RelativePath = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_relative)]
HttpsUrl = Annotated[str, Field(pattern=r"^https://[^\s\"'<>]+$", max_length=500)]
Version = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+!_-]*$", max_length=80)]
EngineName = Annotated[str, _known("engine", terms.engines)]
FixName = Annotated[str, _known("fix", terms.fixes)]
ConditionName = Annotated[str, _known("condition", terms.CONDITIONS)]
MetricName = Annotated[str, _known("metric", terms.METRICS)]
Argument = Annotated[str, Field(max_length=2000), AfterValidator(_allowed_argument)]
Variable = Annotated[str, AfterValidator(_allowed_variable)]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Scalar = str | int | float | bool


class Part(BaseModel):
    """A part of a recipe: unknown keys are refused, values are not guessed from other types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class GitFile(Part):
    """One file of a public repository at one commit."""

    repo: HttpsUrl
    commit: Commit
    path: RelativePath


def unique(kind: str, ids: list[str]) -> list[str]:
    """The ids. Raises ValueError when two are equal."""
    twice = {i for i in ids if ids.count(i) > 1}
    if twice:
        raise ValueError(f"two {kind}s have the id {sorted(twice)[0]!r}; give each its own")
    return ids


def sentences(error: ValidationError, schema: dict) -> str:
    """What is wrong, a line each: the key's path, and what would be right by the JSON `schema` of the model."""
    return "\n".join(f"  {_sentence(e, schema)}" for e in error.errors())


def _sentence(error, schema: dict) -> str:
    where = ".".join(str(part) for part in error["loc"]) or f"the {schema['title'].lower()}"
    if error["type"] == "extra_forbidden":
        known = _keys_at(error["loc"][:-1], schema)
        return f"{where}: unknown key; {terms.nearest(str(error['loc'][-1]), known)}"
    if error["type"] == "missing":
        return f"{where}: is needed and absent"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        message = f"does not have the form {error['ctx']['pattern']}"
    given = error.get("input")
    found = "" if error["type"] == "value_error" or isinstance(given, dict | list) else f" (found {given!r})"
    return f"{where}: {message}{found}"


def _keys_at(loc, schema: dict) -> list[str]:
    """Keys that the schema knows at an error's place, so that the nearest one can be named."""
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
