"""What recipes and studies are made of: names, hashes, paths, and the arguments and variables they may set."""

import re
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from llmrepro import terms

# They break a line, hide or turn around what stands on it, or are obeyed by a terminal.
CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b\u2060-\u2064\ufeff\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]"
)
# A file of the machine, an address, or the way out of a folder: at the start, or behind what separates values.
ELSEWHERE = re.compile(r"(^|[=,:;])(/|~|\.{1,2}/|[A-Za-z][A-Za-z0-9+.-]*://|file:)|(^|/)\.\.(/|$)")
LEAST, MOST = 1e-9, 1e15  # sizes of numbers that are claimed or stated; nought is one as well


def _one_line(text: str) -> None:
    found = CONTROL.search(text)
    if found:
        raise ValueError(
            f"{text[:60]!r} has the control character {found[0]!r}; a text is one line without any; leave it out"
        )


def sized(value):
    """The value. Raises ValueError for a number that no measurement has."""
    if isinstance(value, int | float) and value and not LEAST <= abs(value) <= MOST:
        raise ValueError(f"a number is nought or {LEAST:g} to {MOST:g} in size; check its unit")
    return value


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


def flag_of(word: str) -> str:
    """A flag by the name that is compared: vLLM takes --max_model_len for --max-model-len, and --x.y for a part of
    --x."""
    name = word.partition("=")[0].partition(".")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _allowed_argument(value: str) -> str:
    name = flag_of(value)
    if name.startswith("--"):
        longer = sorted(n for n in KIT_ARGUMENTS | OTHER_ARGUMENTS | IN_FULL if n.startswith(name) and n != name)
        if longer and name not in NOT_SHORT and name not in IN_FULL:  # vLLM takes a beginning that one option has
            next_step = "write it in full" if longer[0] in IN_FULL else "which a recipe may not set; leave it out"
            raise ValueError(f"{name} can be read as short for {longer[0]}, {next_step}")
    return _pinned_argument(name, value)


def _pinned_argument(name: str, value: str) -> str:
    """An argument that names nothing beyond the recipe. A build may be newer than any list of options, so that
    names that speak of files, addresses or code are refused, known or not."""
    if re.search(r"\d{19}", value):
        raise ValueError(f"{value[:40]!r} has a number of more than 18 digits, which no setting needs; shorten it")
    if name in OTHER_ARGUMENTS or PRESETS.fullmatch(value.partition("=")[0].replace("_", "-")):
        raise ValueError(f"{name} would load, serve or write something that the recipe does not pin; leave it out")
    if name in KIT_ARGUMENTS:
        raise ValueError(
            f"{name} is set by the kit on every boot (loopback, a free port, a fresh key); leave it out"
        )
    if value.startswith("-") and _names_more(name) and name not in IN_FULL:
        raise ValueError(
            f"{name} names a file, an address, a model or code by its sound, which no recipe may; leave it out"
        )
    if found := ELSEWHERE.search(value.partition("=")[2] if value.startswith("--") else value):
        raise ValueError(
            f"{value[:60]!r} names {found[0]!r}, a file or an address; of files only {{draft}} is given, and the "
            "weights, which the kit names itself; leave it out"
        )
    return value


def _names_more(name: str) -> bool:
    if name in PLAIN_ARGUMENTS:
        return False
    return bool(OUTSIDE.search(name.lstrip("-"))) or bool(re.search(r"-(config|json)s?$", name))


KIT_ARGUMENTS = frozenset(
    "--host --port --api-key --api-key-file --uds -m --model -a --alias --served-model-name "  # noqa: SIM905
    "-h --help --usage --version".split()
)
NOT_SHORT = {  # options themselves, of one engine or another
    *("--chat-template", "--config", "--model", "--lora", "--mmproj", "--api-key", "--kv", "--reasoning-parser"),
    *("--draft", "--grammar", "--json-schema"),
}
IN_FULL = {
    "--trust-remote-code",
    "--speculative-config",
    "--compilation-config",
    "--spec-draft-model",
    "--model-draft",
}
OUTSIDE = re.compile(  # a word of an option's name
    r"(?:^|-)(path|dir|directory|folder|file|url|uri|repo|host|port|addr|address|ip|mcp|agent|plugin|cls|class|script"
    r"|command|secret|key|root|model|ray|nnodes)s?(?:-|$)|(?:^|-)(?:hf|auth|access)-token$"
)
PLAIN_ARGUMENTS = {  # that sound so and name nothing
    *("--no-host", "--max-model-len", "--model-impl", "--language-model-only", "--attention-config"),
    *("--pooler-config", "--override-generation-config", "--reasoning-config", "--eplb-config"),
}
PRESETS = re.compile(r"--(fim|gpt-oss|embd|vision)\b.*-default")  # of llama.cpp, which each fetch a model
# What would serve another model than the pinned one, open another door, or read and write elsewhere.
OTHER_ARGUMENTS = frozenset(
    "-hf -hfr -hff --hf-repo --hf-file --hf-token -mu --model-url -dr --docker-repo --models-dir --models-preset "  # noqa: SIM905
    "--ssl-key-file --ssl-cert-file --path --api-prefix --log-file --tools --rpc --props --slot-save-path "
    "-hfd -hfrd --hf-repo-draft --spec-draft-hf -mm -mmu "
    "-lcd --lookup-cache-dynamic -lcs --lookup-cache-static --grammar-file -jf --json-schema-file "
    "-hfv -hfrv -hffv --hf-repo-v --hf-file-v -mv --model-vocoder --lora-scaled --control-vector-scaled "
    "--models-autoload "
    "--config --lora --control-vector --chat-template-file --media-path --mmproj --mmproj-url "
    # vLLM's
    "--tokenizer --hf-config-path --download-dir --load-format --model-loader-extra-config "
    "--model-class-overrides --lora-modules --allowed-local-media-path --worker-cls --worker-extension-cls "
    "--logits-processors "
    "--middleware --tool-parser-plugin --reasoning-parser-plugin --io-processor-plugin --log-config-file "
    "--root-path --ssl-keyfile --ssl-certfile --ssl-ca-certs --allow-credentials --allowed-origins --headless "
    "--data-parallel-address --data-parallel-rpc-port --master-addr --node-rank --kv-transfer-config "
    "-s -sc -dpa -dpp --generation-config --hf-overrides --ec-transfer-config --profiler-config "  # -s: of -sc
    "--structured-outputs-config --kv-events-config --weight-transfer-config --logging-config "
    "--scheduler-cls --distributed-executor-backend --otlp-traces-endpoint --tool-server "
    "--data-parallel-backend -dpb -dpm --data-parallel-external-lb --data-parallel-hybrid-lb "
    # open-jet's
    "--lib --draft-vocab".split()
)
ENVIRONMENT_ALLOWED = re.compile(
    r"(LLAMA|GGML|VLLM|OMP|KMP|MKL|OPENBLAS|CUDA|PYTORCH|TORCH|FLASHINFER|TRITON)_"
    r"[A-Z0-9_]+|DO_NOT_TRACK"
)
# Names that make an engine load or compile code, unpickle, read or write files, listen elsewhere, or take its
# arguments from elsewhere.
REFUSED_PARTS = re.compile(
    r"^LLAMA_ARG_|PATH(_|$)|LIBRAR|FILE(_|$)|PLUGIN|INJECTION|DIR(ECTORY)?$|HOME$|ROOT$|BASE$|FOLDER|_CACHE$|REPOSITORY"
    r"|DEST$|_OUT$|_(HOST|IP|PORT|ADDR|URL|URI|KEY|TOKEN)(_|$)|NVCC|FLAGS$|MANAGER|REMOTE|SERIALIZATION|WEIGHTS_ONLY"
    r"|DEV_MODE|RUNTIME_LORA|RESOLVER|CONNECTOR|AUTOLOAD"
)
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


def _plain_value(value: str) -> str:
    _one_line(value)
    if "/" in value or ELSEWHERE.search(value):
        raise ValueError(f"{value[:60]!r} names a file, an address or a folder, which no variable of a recipe may")
    return value


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
RecipeId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*/[a-z0-9][a-z0-9._-]*$", max_length=120)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
RelativePath = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_relative)]
# ASCII, and nobody before an @: what is read as the host is the host, and no password is written down.
HttpsUrl = Annotated[
    str, Field(pattern=r"^https://[A-Za-z0-9.-]+(:\d{1,5})?([/?#][!#-&(-;=?-~]*)?$", max_length=500)
]
Version = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+!_-]*$", max_length=80)]
EngineName = Annotated[str, _known("engine", terms.engines)]
FixName = Annotated[str, _known("fix", terms.fixes)]
ConditionName = Annotated[str, _known("condition", terms.CONDITIONS)]
MetricName = Annotated[str, _known("metric", terms.METRICS)]
Argument = Annotated[str, Field(max_length=2000), AfterValidator(_allowed_argument)]
Value = Annotated[str, Field(max_length=2000), AfterValidator(_plain_value)]
Variable = Annotated[str, AfterValidator(_allowed_variable)]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Scalar = Annotated[str | int | float | bool, AfterValidator(sized)]
Figure = Annotated[float, Field(ge=0), AfterValidator(sized)]
Positive = Annotated[float, Field(ge=LEAST, le=MOST)]


class Part(BaseModel):
    """A part of a recipe: unknown keys are refused, values are not guessed from other types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _texts_are_lines(cls, value):
        """Of every field, so that none is forgotten: what a recipe says is printed where people paste from."""
        for one in _texts(value):
            _one_line(one)
        return value


def _texts(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(one)


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
    return "\n".join(f"  {CONTROL.sub('?', _sentence(e, schema))}" for e in error.errors())


def _sentence(error, schema: dict) -> str:
    where = ".".join(map(str, error["loc"])) or f"the {schema['title'].lower()}"
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
