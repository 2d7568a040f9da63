"""A stranger's recipe: a valid one whose engine is the truth server, and what it tries, by the rule that it tries.

Each attempt is a dotted path into recipe.json and the value that is put there: in the file, or by an override.
"""

import copy
import json
from pathlib import Path
from typing import Any

from kill_rig import COMMIT, Rig

HASH = "0" * 64
IMAGE = f"ghcr.io/ggml-org/llama.cpp@sha256:{HASH}"
ARGS, ENV, REPO = "servers.0.args", "servers.0.env", "engine.install.checkouts.0.repo"


def _args(*attempts: str) -> list[tuple[str, Any]]:
    return [(ARGS, attempt.split("|")) for attempt in attempts]


def _env(*attempts: str) -> list[tuple[str, Any]]:
    return [(ENV, dict([(*attempt.split("=", 1), "x")[:2]])) for attempt in attempts]


def _weights(path: str) -> dict:
    return {
        "source": "huggingface",
        "repo": "a/b",
        "revision": COMMIT,
        "format": "gguf",
        "files": [{"path": path}],
    }


def _container(**changes) -> dict:
    return {"kind": "container", "container": {"image": IMAGE, **changes}}


ADDRESS = [
    *_args("--host|0.0.0.0", "--host=0.0.0.0", "--hos=0.0.0.0", "--ho|::", "--ctx-size|8|--host|::"),
    *_args("--port|1", "--port=1", "--por|1", "--uds|x", "--reuse-port", "--grpc-port|1", "--grpc_port=1"),
    *_args("--data-parallel-rpc-port|1", "-dpp|1", "--master-addr|x", "--a-new-host|x", "--a-new-address=x"),
    *_args("--api-key|x", "--api_key=x", "--api-ke|x", "--api-key-file|x", "--allowed-origins|[]", "--nnodes|2"),
    *_args("--alias|x", "-a|x", "--served_model_name|x", "-h", "--help=all", "--usage", "--version"),
    *_env("LLAMA_API_KEY", "LLAMA_ARG_HOST", "LLAMA_ARG_API_KEY", "LLAMA_SERVER_ROUTER_PORT", "VLLM_API_KEY"),
    *_env("VLLM_HOST_IP", "VLLM_PORT", "VLLM_DP_MASTER_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_SERVER_DEV_MODE"),
]
FILES = [
    *_args("--grammar-file|x", "--chat-template|/etc/passwd", "--chat-template|~/x", "--chat-template=../x"),
    *_args("--x|a/../../b", "--x|./b", "--x=/etc/passwd", "--x|a=/etc/passwd", "--x|1,/etc/passwd", "--x|file:x"),
    *_args(
        "--x|https://example.org", "--x|s3://bucket", "--log-prompts-dir|x", "--log-file|x", "--slot-save-path|x"
    ),
    *_args(
        "--mm-encoder-fp8-scale-save-path|x", "--config|x.yaml", "--conf|x", "--video-ffmpeg-dir|x", "--tools|x"
    ),
    *_env("GGML_X=/etc/passwd", "GGML_X=a/b", "GGML_X=~", "GGML_X=..", "TORCH_LOGS_OUT", "TRITON_DUMP_DIR"),
    *_env("CUDA_COREDUMP_FILE", "VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE", "LLAMA_CACHE", "TORCH_HOME"),
    *[(f"workloads.0.prompts.0.{key}", p) for key in ("file",) for p in ("/etc/passwd", "../x", "a/../../x")],
    *[("model.files.0.path", path) for path in ("../x.gguf", "/x.gguf", "a/../../x.gguf")],
    ("engine.fixes", [{"name": "cu13-nvcc", "lock": "../x.lock"}]),
    ("engine.fixes", [{"name": "patch-package", "package": "vllm", "patches": [{"file": "/x", "sha256": HASH}]}]),
]
CODE = [
    *_args("--mcp-servers-json|{}", "--mcp-servers-config|x", "--agent", "--middleware|x.y", "--middlewar|x.y"),
    *_args("--logits-processors|x", "--logits_processors=x", "--worker-cls|x.Y", "--tool-parser-plugin|x"),
    *_args("--model-loader-extra-config|{}", "--additional-config|{}", "--kernel_config.x|y", "--hf-overrides|{}"),
    *_args("--hf-overrides.architectures|x", '--compilation-config|{"backend": "x.y"}', "-O.backend=x", "--trust"),
    *_args("--trust-remote", "--trust_remote_cod", '-cc|{"backend": "x"}', "--distributed-executor-backend|x.Y"),
    *_env("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSTARTUP", "PATH", "BASH_ENV", "IFS", "HOME"),
    *_env(
        "VLLM_PLUGINS", "VLLM_ALLOW_INSECURE_SERIALIZATION=1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1", "CUDA_HOME"
    ),
    *_env("TRITON_CACHE_MANAGER=x:Y", "TRITON_REMOTE_CACHE_BACKEND=x:Y", "FLASHINFER_NVCC", "OMP_TOOL_LIBRARIES"),
    *_env("FLASHINFER_EXTRA_CFLAGS", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "GGML_BACKEND_PATH", "HF_TOKEN"),
    *_env("HTTPS_PROXY", "http_proxy", "HF_ENDPOINT", "HF_HUB_OFFLINE=0", "ggml_x", "GGML_X\x1b[2J"),
]
OTHER_MODELS = [
    *_args("evil/model", "--ctx-size|8|evil/model", "--enforce-eager|evil", "--|evil", "-m|x", "--model=x"),
    *_args("-hf|a/b", "--hf-repo|a/b", "--hf_repo=a/b", "-mu|x", "--model-url|x", "--lora|x", "--lora-modules|x"),
    *_args("--tokenizer|x", "--spec-model|x", "-md|x", "--model-draft|x", '--speculative-config|{"model": "x"}'),
    *_args("--speculative-config.model|x", "-mm|x", "--mmproj|x", "--fim-qwen-1.5b-default", "--load-format|pt"),
    ("model.repo", "../x"),
    ("model.repo", "-x"),
    ("model.repo", "a/b/c"),
    ("model.repo", "https://example.org/x"),
    ("model.revision", "--upload-pack=sh"),
    ("model.revision", "main; id"),
]
PICKLES = [
    *(
        ("model.files.0.path", f"x.{suffix}")
        for suffix in "bin|pt|pth|ckpt|pkl|pickle|npy|py|so|BIN|gguf.bin|gguf\u200b|[b]in|js?n".split("|")  # noqa: SIM905
    ),
    ("model.files", [{"path": "*"}]),
    ("model.files", [{"path": "x.*"}]),
    ("model.format", "pickle"),
    ("model.draft", _weights("draft.pt")),
    ("model.overlay", _weights("modeling_evil.py")),
    ("model.overlay", _weights("adapter_model.bin")),
]
GIT = [
    *(
        (REPO, repo)
        for repo in (
            *("http://example.org/x", "git://example.org/x", "ssh://example.org/x", "git@example.org:x/y"),
            *("file:///x", "/x", "ext::sh -c id", "--upload-pack=touch x", "HTTPS://example.org/x", "https://"),
            *("https://github.com@example.org/x", "https://user:secret@example.org/x", "https://example.org/x y"),
            *("https://g\u0456thub.com/x", "https://example.org/x\n", "https:///x", "https://-x/\u202e"),
        )
    ),
    *(
        ("engine.install.checkouts.0.commit", commit)
        for commit in ("main", "v1.0", "1" * 39, "1" * 41, "A" * 40, f"{COMMIT}\n", "--help", f" {COMMIT}")
    ),
    *(("engine.install.checkouts.0.name", name) for name in ("../x", "/x", "-x", ".git", "a b", "")),
    ("model.prepare", {"repo": "http://example.org/x", "commit": COMMIT, "scripts": ["x.py"]}),
    ("model.prepare", {"repo": "https://example.org/x", "commit": "main", "scripts": ["x.py"]}),
    ("model.prepare", {"repo": "https://example.org/x", "commit": COMMIT, "scripts": ["../x.py"]}),
]
BUILD = [
    ("engine.install.build", dict([pair]))
    for pair in (
        *(("GGML_X", value) for value in ("$(shell id)", "a b", "a;b", "`id`", "/x", "../x", "", "ON\n")),
        *(("ARCH", value) for value in ("$(shell id)", "sm_80 X=1", "native", "sm_80\n", "SM_80", "sm_")),
        *(("CMAKE_CXX_COMPILER", "sh"), ("CMAKE_TOOLCHAIN_FILE", "x"), ("CMAKE_PROJECT_INCLUDE", "x")),
        *(("LLAMA_USE_PREBUILT_UI", "ON"), ("LLAMA_LLGUIDANCE", "ON"), ("CC", "sh"), ("SHELL", "x"), ("-DX", "1")),
        *(("ggml_x", "ON"), ("GGML_X=1 CC", "sh"), ("MAKEFLAGS", "x")),
    )
]
PACKAGES = [
    ("engine.install", {"kind": "wheel", **install})
    for install in (
        *({"pins": pins} for pins in ({"x": "1 --index-url=x"}, {"-r x": "1"}, {"x @ https://e": "1"}, {"x": ""})),
        *({"pins": {"x": "1"}, "indexes": [url]} for url in ("http://example.org", "https://a:b@e.org", "/x")),
        *({"pins": {"x": "1"}, "python": python} for python in ("3.11; id", "../python", "--system", "/bin/sh")),
        *({"pins": {"x": "1"}, "wheel_url": "https://example.org"}, {"pins": {}}),
    )
]
CONTAINER = [
    *(
        ("engine.install", _container(**changes))
        for changes in (
            *({"image": image} for image in ("evil:latest", "a/b", f"a/b@sha256:{'0' * 63}", "--privileged")),
            *({"shm_size": size} for size in ("16g --privileged", "-1g", "99999999g")),
            *({"cap_add": [name]} for name in ("SYS_ADMIN", "ALL", "SYS_PTRACE")),
            *({"port": port} for port in (0, 70000, "1:1")),
            *({name: True} for name in ("privileged", "network", "volumes", "devices", "pid", "user", "mounts")),
            {"gpus": "all --privileged"},
        )
    )
]
PAGES = [
    *(
        ("source", {"publication": "x", "url": url})
        for url in ("javascript:alert(1)", "http://example.org", "data:text/html,x", 'https://e.org/" onclick="x')
    ),
    *(
        ("title", f"a{character}b")
        for character in "\n\r\t\0\x07\x1b\x7f\x9b\u2028\u202e\u2066\u200f\u061c\U000e0041"
    ),
    ("needs.commands", ["rm -rf x"]),
    ("needs.commands", ["../x"]),
    ("id", "../../etc/x"),
    ("id", "a/..\\x"),
    ("servers.0.id", "<b>"),
    ("workloads.0.id", "../x"),
    ("workloads.0.prompts.0.id", "=1+1"),
]


def put(recipe: dict, path: str, value: Any) -> dict:
    """A copy of a recipe with `value` at a dotted path."""
    changed = copy.deepcopy(recipe)
    *above, last = path.split(".")
    node = changed
    for key in above:
        node = node[int(key) if isinstance(node, list) else key]
    node[int(last) if isinstance(node, list) else last] = value
    return changed


class Stranger(Rig):
    """The recipe in a folder that is none of the kit's; its engine is there already, in a cache of its own."""

    @property
    def file(self) -> Path:
        return self.recipe / "recipe.json"

    def change(self, path: str, value: Any) -> None:
        self.file.write_text(json.dumps(put(json.loads(self.file.read_text()), path, value)))
