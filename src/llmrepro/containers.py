"""Engines in container images, run by podman or docker: what is here, pulling, one server's command and its end.

A container is no child of who starts it: docker's daemon makes it, podman leaves a monitor behind that lives on.
So each gets a name that nothing else has before it starts, and the supervisor takes it away by that name.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from llmrepro import numa
from llmrepro.install import Container

RUNTIMES = ("podman", "docker")  # in the order in which they are looked for
CHOICE = "LLMREPRO_CONTAINER"
FACTS = "container.json"  # in the environment's folder
ANSWER_S = 60.0  # a daemon that takes longer to say its version does not answer
STOP_S = 10  # between TERM and KILL when a container is taken away
MODELS, DRAFT, SLOTS = "/models", "/draft", "/slots"  # where a container finds what it is given
# How a user's own podman or docker finds its storage, settings and daemon. They reach that program only: a
# container gets none but the variables that its command names.
VARIABLES = (
    "XDG_RUNTIME_DIR",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "DBUS_SESSION_BUS_ADDRESS",
    "CONTAINERS_CONF",
    "CONTAINERS_STORAGE_CONF",
    "DOCKER_HOST",
    "DOCKER_CONTEXT",
    "DOCKER_CONFIG",
)
INFO = {
    "podman": ["info", "--format", "{{.Version.Version}} {{.Host.ServiceIsRemote}}"],
    "docker": ["version", "--format", "{{.Server.Version}}"],
}


class ContainerFailure(RuntimeError):
    """Why no container can be run here, and `next_step`."""

    def __init__(self, found: str, next_step: str):
        self.found, self.next_step = found, next_step
        super().__init__(f"{found}; {next_step}")


class Runtime(NamedTuple):
    name: str  # podman or docker
    path: str
    version: str | None  # of what runs the containers: docker's daemon, not its client; None: not asked


class Mount(NamedTuple):
    source: Path
    target: str
    writable: bool = False


class Start(NamedTuple):
    """One container's command, up to the image and `entrypoint`'s first words: the server's arguments follow."""

    argv: list[str]
    env: dict[str, str]  # for podman or docker itself
    cleanup: list[list[str]]  # commands that end it and leave nothing; may be run twice, and before it is there
    cidfile: Path
    bound: bool  # to the NUMA node that was asked for, by its own options


def find() -> Runtime:
    """podman, else docker, or the one that LLMREPRO_CONTAINER names; asked whether it works. Raises
    ContainerFailure."""
    wanted = os.environ.get(CHOICE)
    if wanted and wanted not in RUNTIMES:
        raise ContainerFailure(f"{CHOICE} is {wanted!r}", "set it to podman or docker, or unset it")
    here = [name for name in ([wanted] if wanted else RUNTIMES) if shutil.which(name)]
    if not here:
        missing = (
            f"{CHOICE} asks for {wanted}, which" if wanted else "the engine is a container image, and neither "
        )
        missing += " is not installed here" if wanted else "podman nor docker is installed here"
        raise ContainerFailure(missing, "install podman (it needs no daemon and no root), then run again")
    path = shutil.which(here[0])
    said = _asked([path, "--version"])  # what is called docker may be podman
    name = "podman" if "podman" in said.stdout.lower() else here[0]
    found = _asked([path, *INFO[name]])
    words = found.stdout.split()
    if found.returncode != 0 or not words:
        raise _not_working(name, found.stderr.strip() or found.stdout.strip())
    _is_local(name, path, words)
    return Runtime(name, path, words[0])


def _asked(argv: list[str]) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=ANSWER_S, stdin=subprocess.DEVNULL
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return subprocess.CompletedProcess(argv, 1, "", str(error))


def _not_working(name: str, said: str) -> ContainerFailure:
    last = said.splitlines()[-1][:300] if said else "it says nothing"
    other = "docker" if name == "podman" else "podman"
    instead = f", or take the other with {CHOICE}={other}" if shutil.which(other) else ""
    if re.search(r"permission denied", said, re.IGNORECASE) and name == "docker":
        return ContainerFailure(
            f"you may not use docker's daemon here: {last}",
            "join its group (sudo usermod -aG docker $USER, then log in again), or install podman, which has none"
            + instead,
        )
    if name == "docker":
        return ContainerFailure(
            f"docker is installed, and its daemon does not answer: {last}",
            f"start it (sudo systemctl start docker){instead or ', or install podman, which needs none'}",
        )
    return ContainerFailure(
        f"podman is installed and does not work: {last}",
        f"mend what `podman info` names (a user needs ranges in /etc/subuid and /etc/subgid){instead}",
    )


def _is_local(name: str, path: str, words: list[str]) -> None:
    """Raises ContainerFailure for a runtime on another machine: it would measure that one, with its files."""
    if name == "podman":
        where = "a remote service" if words[-1] == "true" else ""
    else:
        told = _asked([path, "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"])
        where = told.stdout.strip()
        where = "" if told.returncode != 0 or where.startswith("unix://") else where
    if where:
        raise ContainerFailure(
            f"{name} here starts containers on another machine ({where})",
            "unset DOCKER_HOST, DOCKER_CONTEXT and CONTAINER_HOST, so that it starts them on this one",
        )


def image_id(runtime: Runtime, image: str) -> str | None:
    """The id of an image by its digest; None when it is not here."""
    found = _asked([runtime.path, "image", "inspect", "--format", "{{.Id}}", image])
    return found.stdout.strip() or None if found.returncode == 0 else None


def prepare(runtime: Runtime, container: Container, folder: Path, pull: Callable[[list[str]], str | None]) -> dict:
    """The image here, pulled if it was not, and `folder`/container.json, which says so and is returned.

    `pull(argv)` runs a command: None when it went well, else what it said. Raises ContainerFailure.
    """
    found = image_id(runtime, container.image)
    if found is None:
        said = pull([runtime.path, "pull", container.image])
        if said is not None:
            raise pull_failure(runtime, container.image, said)
        found = image_id(runtime, container.image)
    if found is None:
        raise ContainerFailure(
            f"{runtime.name} pulled {container.image} and does not have it", f"look with `{runtime.name} images`"
        )
    told = {**runtime._asdict(), "image": container.image, "image_id": found}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FACTS).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return told


# What podman and docker write when a pull fails, what that means, and what to do; the first that fits counts.
_PULL = [
    (
        r"no space left on device|disk quota exceeded",
        "there is not enough disk space for {image}",
        "free some where {name} keeps its images (`{name} system df`; `{name} image prune`), then run again",
    ),
    (
        r"toomanyrequests|rate limit",
        "the registry of {image} answers no more for now",
        "wait, or log in with `{name} login`, then run again",
    ),
    (
        r"manifest unknown|name unknown|not found|requested access|unauthorized|denied: |authentication required",
        "its registry does not have {image}, or not for you",
        "check the digest in the recipe; a registry that deletes old images may have lost it: then pin another",
    ),
    (
        r"no such host|dial tcp|i/o timeout|unreachable|connection re|tls handshake|proxyconnect|name resolution"
        r"|context deadline|EOF",
        "the registry of {image} could not be reached",
        "check the network and the proxy, then run again",
    ),
    (
        r"permission denied|operation not permitted|insufficient (UIDs|UID)|lchown",
        "{name} may not store {image} here",
        "mend what the log says (a user needs ranges in /etc/subuid and /etc/subgid), then run again",
    ),
]


def pull_failure(runtime: Runtime, image: str, said: str) -> ContainerFailure:
    """Why an image could not be pulled, by what `podman pull` or `docker pull` said."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1][:300] if lines else "it said nothing"
    for pattern, found, next_step in _PULL:
        if re.search(pattern, said, re.IGNORECASE):
            names = {"name": runtime.name, "image": image}
            return ContainerFailure(f"{found.format(**names)}: {last}", next_step.format(**names))
    return ContainerFailure(f"{runtime.name} could not pull {image}: {last}", "read the log, then run again")


def facts(environment: Path) -> dict | None:
    """What `prepare` wrote into an environment; None when it was not prepared."""
    try:
        return json.loads((environment / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def runtime_of(environment: Path) -> Runtime:
    """The runtime that has an environment's image; for one not prepared the first that is installed, or podman."""
    told = facts(environment)
    if told is not None:
        return Runtime(told["name"], told["path"], told["version"])
    wanted = os.environ.get(CHOICE)
    name = wanted if wanted in RUNTIMES else next((name for name in RUNTIMES if shutil.which(name)), RUNTIMES[0])
    return Runtime(name, shutil.which(name) or name, None)


def start(
    environment: Path,
    container: Container,
    entrypoint: list[str],
    *,
    port: int,
    variables: Iterable[str],
    mounts: list[Mount],
    numa_node: int | None = None,
    read_only: bool = False,
) -> Start:
    """A new container that serves loopback's `port`. It gets `variables` by name, out of the environment that
    its command is started with. `read_only`: the server writes nowhere but in /tmp and what is mounted writable.

    docker's daemon starts a container outside of what numactl binds, so there the node is among the options.
    For an environment that was not prepared it is the command as it would be, where it can be.
    Raises NumaError for a node that is not here, ContainerFailure for a path that cannot be mounted.
    """
    runtime = runtime_of(environment)
    by_option = runtime.name == "docker" and numa_node is not None
    name = f"llmrepro-{secrets.token_hex(8)}"
    cidfile = Path(tempfile.gettempdir()) / f"{name}.cid"
    program, *words = entrypoint
    options = [
        *("--rm", "--pull=never", f"--name={name}", f"--cidfile={cidfile}"),
        f"--publish=127.0.0.1:{port}:{container.port}",
        *(_mounted(mount) for mount in mounts),
        *([f"--shm-size={container.shm_size}"] if container.shm_size else []),
        *(f"--cap-add={capability}" for capability in container.cap_add),
        "--security-opt=no-new-privileges",
        *(["--security-opt=label=disable"] if _selinux() else []),  # else nothing mounted could be read
        *(["--read-only", "--tmpfs=/tmp"] if read_only else []),
        *(_gpus(runtime) if container.gpus else []),
        *(_node(numa_node, facts(environment) is not None) if by_option else []),
        *(f"--env={variable}" for variable in variables),
        # attached, the log comes out of this command; a second one, and health checks, would be measured too
        *("--log-driver=none", "--no-healthcheck", f"--stop-timeout={STOP_S}"),
        f"--entrypoint={program}",
    ]
    if runtime.name == "podman":
        remove = [[runtime.path, "rm", "--force", "--volumes", "--ignore", name]]
    else:  # its `rm --force` kills at once; of one that is not there both say so, and all is well
        stop = [runtime.path, "stop", "-t", str(STOP_S), name]
        remove = [stop, [runtime.path, "rm", "--force", "--volumes", name]]
    return Start(
        [runtime.path, "run", *options, container.image, *words],
        client_environment(),
        [*remove, [shutil.which("rm") or "rm", "-f", "--", str(cidfile)]],
        cidfile,
        by_option,
    )


def client_environment() -> dict[str, str]:
    """What podman or docker gets of the user's environment beyond the kit's minimal one."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def help_command(environment: Path, container: Container, entrypoint: list[str]) -> list[str]:
    """A command that shows what the image's own server says of its options."""
    runtime, (program, *words) = runtime_of(environment), entrypoint
    options = ["--rm", "--pull=never", "--network=none", "--log-driver=none", "--no-healthcheck"]
    return [runtime.path, "run", *options, f"--entrypoint={program}", container.image, *words, "--help"]


def _mounted(mount: Mount) -> str:
    if re.search(r'[,"\n]', f"{mount.source}{mount.target}"):
        raise ContainerFailure(
            f"{mount.source} cannot be given to a container: its name holds a comma, a quote or a line break",
            "rename it, or put it elsewhere",
        )
    access = "" if mount.writable else ",readonly"
    return f"--mount=type=bind,source={mount.source},target={mount.target}{access}"


def _gpus(runtime: Runtime) -> list[str]:
    return ["--device=nvidia.com/gpu=all"] if runtime.name == "podman" else ["--gpus=all"]


def _node(node: int, prepared: bool) -> list[str]:
    cpus = numa.cpus(node) if prepared else f"<CPUs of node {node}>"
    return [f"--cpuset-cpus={cpus}", f"--cpuset-mems={node}"]


def _selinux() -> bool:
    return Path("/sys/fs/selinux/enforce").exists()


def models(weights: Path, target: str = MODELS) -> tuple[list[Mount], str]:
    """What of the weights is mounted, read-only, and their path inside.

    Of a file that file alone and the other parts of a split GGUF, not the folder, which may hold anything. Links
    are followed here, since the files they name would be missing inside.
    """
    if not weights.is_dir():
        files = [weights, *(part for part in _parts(weights) if part != weights)]
        return [Mount(f.resolve(), f"{target}/{f.name}") for f in sorted(files)], f"{target}/{weights.name}"
    root = weights.resolve()
    files = sorted(f for f in weights.rglob("*") if f.is_file())
    if all(f.resolve().is_relative_to(root) for f in files):
        return [Mount(root, target)], target
    return [Mount(f.resolve(), f"{target}/{f.relative_to(weights)}") for f in files], target


def checkpoints(weights: Path, draft: Path | None) -> tuple[list[Mount], str, Path | None]:
    """What of the weights and of a draft model is mounted, and their paths inside; see models."""
    mounts, model = models(weights)
    if draft is None:
        return mounts, model, None
    more, inside = models(draft, DRAFT)
    return mounts + more, model, Path(inside)


def _parts(weights: Path) -> list[Path]:
    """The files that belong to a part of a split GGUF, `name-00001-of-00003.gguf`."""
    split = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", weights.name)
    if split is None:
        return []
    whole = re.compile(rf"{re.escape(split[1])}\d{{5}}{re.escape(split[2])}")
    return [f for f in weights.parent.iterdir() if whole.fullmatch(f.name)] if weights.parent.is_dir() else []


def _groups(pid: int) -> str:
    """The control groups of a process; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


def main_pid(cidfile: Path) -> int | None:
    """The process that a container runs, by the control group that podman and docker name after its id.

    None when it is not running, or where control groups tell nothing.
    """
    try:
        cid = cidfile.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    if not re.fullmatch(r"[0-9a-f]{64}", cid):
        return None
    inside = {}
    for process in psutil.process_iter(["ppid", "create_time"]):
        if re.search(rf"(?<!conmon-){cid}", _groups(process.pid)):  # podman's monitor has a group of its own
            inside[process.pid] = process.info
    roots = [pid for pid, info in inside.items() if info["ppid"] not in inside]
    return min(roots, key=lambda pid: inside[pid]["create_time"] or 0, default=None)
