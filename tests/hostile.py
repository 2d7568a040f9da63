"""What a recipe from elsewhere may try, by the rule that it breaks: each a place in recipe.json and what is there.

The rest of the recipe is the default one, so that nothing but the attack is wrong with it.
"""

from itertools import product

ARGS, ENV = "servers.default.args", "servers.default.env"
INSTALL, FILE = "engine.install", "model.files.0"
COMMIT = "1" * 40
REPO = "https://example.org/engine"
DIGEST = f"registry.example.org/engine@sha256:{'2' * 64}"
OPTIONS = ["--ctx-size", "2048"]


def checkout(repo: str, commit: str, name: str = "engine", **more) -> tuple[str, dict]:
    return INSTALL, {"kind": "git", "checkouts": [{"name": name, "repo": repo, "commit": commit, **more}]}


def container(**more) -> tuple[str, dict]:
    return INSTALL, {"kind": "container", "container": {"image": DIGEST, **more}}


def built(**variables: str) -> tuple[str, dict]:
    return f"{INSTALL}.build", variables


ATTACKS: dict[str, list[tuple[str, object]]] = {
    "git is fetched over https, at a whole commit": [
        *(checkout(repo, COMMIT) for repo in ("http://example.org/x", "git://example.org/x", "git@example.org:x")),
        *(checkout(repo, COMMIT) for repo in ("file:///etc", "ext::sh -c id", "/tmp/x", "-oProxyCommand=id")),
        *(checkout(REPO, commit) for commit in ("main", "v1.0", "1" * 39, "g" * 40, "HEAD", "1" * 41)),
    ],
    "nothing is an option of git": [
        checkout("--upload-pack=id", COMMIT),
        checkout(f"{REPO} --upload-pack=id", COMMIT),
        checkout(REPO, "--upload-pack=id"),
        checkout(REPO, COMMIT, name="--work-tree=x"),
        checkout(REPO, COMMIT, name="../../x"),
        checkout(REPO, COMMIT, submodules=True),
        (f"{INSTALL}.pins", {"xllamacpp": "1 --index-url=https://example.org"}),
        (f"{INSTALL}.pins", {"--index-url": "1"}),
        (f"{INSTALL}.indexes", ["http://example.org/simple"]),
    ],
    "build variables are words of a pattern": [
        built(ARCH="$(shell id)"),
        built(ARCH="sm_80; id"),
        built(ARCH="native"),
        built(GGML_X="`id`"),
        built(GGML_X="a b"),
        built(GGML_X="../x"),
        built(CMAKE_TOOLCHAIN_FILE="/tmp/x.cmake"),
        built(CC="sh"),
        built(SHELL="x"),
        built(MAKEFLAGS="-f/tmp/x"),
    ],
    "variables are an engine's own": [
        (ENV, {name: "x"})
        for name in (
            *(
                "LD_PRELOAD",
                "LD_LIBRARY_PATH",
                "PATH",
                "PYTHONPATH",
                "PYTHONSTARTUP",
                "BASH_ENV",
                "HOME",
                "GIT_SSH",
            ),
            *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "HTTP_PROXY", "SSL_CERT_FILE"),
            *("LLAMA_ARG_HOST", "LLAMA_ARG_PORT", "LLAMA_ARG_MODEL", "LLAMA_API_KEY", "VLLM_API_KEY", "VLLM_PORT"),
            *("VLLM_PLUGINS", "CUDA_INJECTION64_PATH", "OMP_TOOL_LIBRARIES", "GGML_BACKEND_PATH", "TORCH_TRACE"),
            *("ld_preload", "VLLM_X;id", "VLLM_X=1", ""),
        )
    ],
    "host, port and key are the kit's": [
        (ARGS, words)
        for words in (
            *(["--host", "0.0.0.0"], ["--host=0.0.0.0"], ["--hos=0.0.0.0"], ["--port", "80"], ["--po", "80"]),
            *(["--api-key", "x"], ["--api_key", "x"], ["--api-key-file", "/tmp/x"], ["--uds", "/tmp/x"]),
            *(["--model", "/tmp/x"], ["-m", "/tmp/x"], ["--alias", "x"], ["--served_model_name", "x"]),
        )
    ],
    "no argument names a file, a model or code that is not pinned": [
        (ARGS, words)
        for words in (
            *(["/etc/passwd"], ["--chat-template-file", "/etc/passwd"], ["--mmproj=/tmp/x"], ["--lora", "/tmp/x"]),
            *(
                ["-hf", "a/b"],
                ["--model-url", "https://example.org"],
                ["--slot-save-path", "/tmp"],
                ["--rpc", "x:1"],
            ),
            *(["--log-file", "/tmp/x"], ["--path", "/"], ["--tokenizer", "a/b"], ["--load-format", "pt"]),
            *(["--worker-cls", "os.system"], ["--middleware", "x.y"], ["--tool-parser-plugin", "/tmp/x.py"]),
            *(["--logits-processors", "x:y"], ["--config", "/tmp/x.yaml"], ["--media-path", "/"]),
            *(["--spec-draft-model", "/tmp/x.gguf"], ["--speculative-config", '{"model": "a/b"}']),
            *(["--compilation-config", '{"backend": "os.system"}'], ["--allowed-local-media-path", "/"]),
        )
    ],
    "a container gets what is typed": [
        container(image="registry.example.org/engine:latest"),
        container(image=f"--privileged@sha256:{'2' * 64}"),
        *(
            container(**{name: value})
            for name, value in (("privileged", True), ("volumes", ["/:/host"]), ("user", "0"))
        ),
        *(container(**{name: value}) for name, value in (("network", "host"), ("devices", ["/dev/mem"]))),
        *(container(cap_add=[name]) for name in ("SYS_ADMIN", "ALL", "SYS_PTRACE")),
        *(container(shm_size=size) for size in ("1g --privileged", "1t", "0m")),
        container(port=0),
    ],
    "a recipe names no path of this machine": [
        ("model.source", "local"),
        ("model.repo", "/srv/models"),
        ("model.repo", "../x"),
        *((f"{FILE}.path", path) for path in ("/etc/passwd.gguf", "../../x.gguf", "a/../../x.gguf")),
        *(
            ("workloads.chat.prompts.0.file", path)
            for path in ("/etc/passwd", "../recipe.json", "prompts/../../x")
        ),
        (
            "engine.fixes",
            [{"name": "patch-package", "package": "x", "patches": [{"file": "/x", "sha256": "3" * 64}]}],
        ),
        ("engine.fixes", [{"name": "cu13-nvcc", "lock": "../x.lock"}]),
    ],
    "weights are no pickle": [
        (f"{FILE}.path", f"model.{suffix}")
        for suffix in ("bin", "pt", "pth", "ckpt", "pkl", "pickle", "h5", "npy", "py", "so", "PT", "gguf.py")
    ],
    "links are https": [
        ("source", {"publication": "x", "url": url})
        for url in ("http://example.org", "javascript:alert(1)", "data:text/html,x", 'https://x" onload="x', "//x")
    ],
    "every text is one line that a terminal does not obey": [
        (place, f"a{mark}b")
        for place, mark in product(
            ("title", "question", "servers.default.args"), ("\n", "\r", "\x1b[2J", "\u202e", "\x00")
        )
        if place != "servers.default.args"
    ],
}
