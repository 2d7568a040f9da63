"""What an engine is made of: packages, sources at a commit or an image, how they are built, and the repairs."""

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from llmrepro.parts import (
    Commit,
    EngineName,
    FixName,
    GitFile,
    HttpsUrl,
    Name,
    Part,
    RelativePath,
    Sha256,
    Version,
    unique,
)

# Of CMake's own none that names a program or a file of commands; of llama.cpp's none that fetches unpinned files.
BUILD_VARIABLES = {
    r"(?!LLAMA_(USE_PREBUILT_UI|LLGUIDANCE)$)(GGML|LLAMA|BUILD)_[A-Z0-9_]+": r"[A-Za-z0-9._-]+",
    r"CMAKE_(BUILD_TYPE|CUDA_ARCHITECTURES|INTERPROCEDURAL_OPTIMIZATION)": r"[A-Za-z0-9._-]+",
    r"ARCH": r"sm_\d{2,3}[a-z]?",
}
# name@sha256:…, so that the same words always mean the same image; a registry's host may stand before the name.
IMAGE = r"^[a-z0-9][a-z0-9.-]*(:\d+)?(/[a-z0-9][a-z0-9._-]*)+@sha256:[0-9a-f]{64}$"


class Checkout(Part):
    """One public repository at one commit, fetched over https without submodules."""

    name: Name = Field(description="The folder that it is checked out in.")
    repo: HttpsUrl
    commit: Commit


class Container(Part):
    """A server in a container of podman or docker: loopback only, the weights mounted read-only."""

    image: Annotated[str, Field(pattern=IMAGE, max_length=300)]
    port: int = Field(8080, ge=1, le=65535, description="What the server listens on inside.")
    shm_size: str | None = Field(None, pattern=r"^[1-9]\d{0,4}[mg]$")
    cap_add: list[Literal["SYS_NICE", "IPC_LOCK"]] = []
    gpus: bool = Field(False, description="Every GPU of the machine is given to it.")


class Install(Part):
    kind: Literal["wheel", "sdist", "git", "container"]
    pins: dict[Name, Version] = Field({}, description="Package name to exact version.")
    sha256: Sha256 | None = Field(None, description="Of the sdist; wheels are hashed in engine.lock.")
    indexes: list[HttpsUrl] = []
    python: str | None = Field(None, pattern=r"^3\.\d+$", description="None: the notebook's own.")
    build: dict[str, str] = Field({}, description="CMake and make variables.")
    checkouts: list[Checkout] = Field([], description="For git: the engine's own first, then what it needs.")
    container: Container | None = None
    resolved_as_of: str | None = Field(
        None, pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z$", description="What engine.lock was made from."
    )

    @model_validator(mode="after")
    def _checked(self):
        if self.kind in ("wheel", "sdist") and not self.pins:
            raise ValueError(f"a {self.kind} needs `pins`")
        if self.kind == "sdist" and (self.sha256 is None or len(self.pins) != 1):
            raise ValueError("an sdist needs exactly one pin and its sha256")
        if (self.kind == "git") != bool(self.checkouts):
            raise ValueError("`checkouts` belong to the kind git, which needs at least one")
        unique("checkout", [c.name for c in self.checkouts])
        if (self.kind == "container") != (self.container is not None):
            raise ValueError("`container` belongs to the kind container, which needs it")
        for name, value in self.build.items():
            if not any(re.fullmatch(n, name) and re.fullmatch(v, value) for n, v in BUILD_VARIABLES.items()):
                raise ValueError(
                    f"build variable {name}={value!r} is not of the form GGML_X=ON or ARCH=sm_80, plain words only"
                )
        return self


class Patch(Part):
    """A unified diff whose paths are of the form a/module.py, b/module.py below the package's folder."""

    file: RelativePath | None = Field(None, description="A patch file of ours, in the recipe's folder.")
    source: GitFile | None = Field(
        None,
        description="A publication's own: fetched at run time, never committed. folder/*.patch is all of them.",
    )
    sha256: Sha256 | None = Field(None, description="Only a `source` may lack it: its commit pins it.")

    @model_validator(mode="after")
    def _is_somewhere(self):
        if (self.file is None) == (self.source is None):
            raise ValueError("needs either `file` (a patch of ours) or `source` (a publication's)")
        if self.file is not None and self.sha256 is None:
            raise ValueError("a patch of ours needs its sha256")
        path = self.source.path if self.source is not None else ""
        if "*" in path and (
            path.rpartition("/")[2] != "*.patch" or path.count("*") > 1 or self.sha256 is not None
        ):
            raise ValueError(
                "a `*` stands in a source's path as the last part *.patch only, without a sha256: all of them"
            )
        return self


class Fix(Part):
    """A repair that is a build step of the engine's environment."""

    name: FixName
    package: Name | None = Field(None, description="For patch-package: the import name of what is patched.")
    patches: list[Patch] = Field([], description="For patch-package: applied in this order.")
    lock: RelativePath | None = Field(
        None,
        description="Hashed packages, beside engine.lock, that take the place of its own before the fix is made.",
    )

    @model_validator(mode="after")
    def _fits_name(self):
        if self.name == "patch-package" and (self.package is None or not self.patches):
            raise ValueError("patch-package needs `package` and at least one of `patches`")
        if self.name != "patch-package" and (self.package is not None or self.patches):
            raise ValueError(f"{self.name} takes no `package` and no `patches`; leave them out")
        return self


class Engine(Part):
    name: EngineName
    version: Version = Field(description="What the kit installs; what was published stands among the conditions.")
    install: Install
    fixes: list[Fix] = []
    unstated: dict[Name, str] = Field(
        {}, description="What the publication leaves out: its name, and the kit's own choice with its reason."
    )
