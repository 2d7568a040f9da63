"""Stands for podman, or docker where it is called that, in the tests of containers; it isolates nothing.

What it does as the real ones do: `run` makes a container of an image that is there, writes its cidfile and
leaves it to a monitor in a session of its own, which opens the published port at once, starts the server with the
named variables only, and with --rm puts the container away once the server has ended. `run` passes signals on
and ends with the server's code. A container whose monitor was killed cannot be removed any more. Options that it
does not know are an error. podman's monitor is forked by `run`, docker's by a daemon (`docker daemon`).
"""

import argparse
import contextlib
import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve()
DOCKER = HERE.name == "docker"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
STATE = HERE.parent / f"{HERE.name}-state"  # images.json, NAME.json of each container, NAME.exit, calls


def fail(text: str, code: int = 125) -> int:
    print(f"{'docker' if DOCKER else 'Error'}: {text}", file=sys.stderr)
    return code


def images() -> dict:
    try:
        return json.loads((STATE / "images.json").read_text())  # image to {id, programs: {path: argv}}
    except FileNotFoundError:
        return {}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name in ("name", "cidfile", "publish", "shm-size", "entrypoint", "pull", "log-driver", "network", "tmpfs"):
        parser.add_argument(f"--{name}")
    for name in ("mount", "cap-add", "security-opt", "env", "device"):
        parser.add_argument(f"--{name}", action="append", default=[])
    for name in ("rm", "read-only", "no-healthcheck"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--stop-timeout", type=int, default=10)
    for name in ("gpus", "cpuset-cpus", "cpuset-mems"):
        parser.add_argument(f"--{name}")
    first = next(i for i, word in enumerate(argv) if not word.startswith("-"))
    try:
        options, unknown = parser.parse_known_args(argv[:first])
    except argparse.ArgumentError as error:
        return fail(str(error))
    if unknown:
        return fail(f"unknown flag: {unknown[0]}")
    image, *words = argv[first:]
    if image not in images():
        return fail(f"{image}: image not known")
    name = options.name or secrets.token_hex(4)
    if options.cidfile and Path(options.cidfile).exists():
        return fail("container id file exists. Ensure another container is not using it or delete it")
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until it is made and started
    time.sleep(float(os.environ.get("LLAMA_TEST_CREATE_S", "0")))
    program = images()[image]["programs"].get(options.entrypoint)
    if program is None:
        return fail(f'exec: "{options.entrypoint}": executable file not found in $PATH', 127)
    cid = hashlib.sha256(secrets.token_bytes(8)).hexdigest()
    container = {
        "id": cid,
        "name": name,
        "argv": [*program, *words],
        "env": {"PATH": "/usr/bin:/bin", **{n: os.environ[n] for n in options.env if n in os.environ}},
        "publish": options.publish,
        "stop_s": options.stop_timeout,
        "remove": options.rm,
        "client": os.getpid(),
        "output": f"/proc/{os.getpid()}/fd/1",  # where the attached `run` would print it
    }
    write(STATE / f"{name}.json", container)
    if options.cidfile:
        Path(options.cidfile).write_text(cid)
    if DOCKER:
        with socket.socket(socket.AF_UNIX) as daemon:
            daemon.connect(str(STATE / "socket"))
            daemon.sendall(name.encode())
            daemon.recv(1)
    else:
        detach(name)
    for number in SIGNALS:
        signal.signal(number, lambda n, _frame: send(name, n))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    ended = STATE / f"{name}.exit"
    while not ended.exists():
        time.sleep(0.02)
    code = int(ended.read_text())
    ended.unlink()
    return code


def write(path: Path, value) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value) if not isinstance(value, str) else value)
    part.replace(path)


def read(name: str) -> dict | None:
    try:
        return json.loads((STATE / f"{name}.json").read_text())
    except FileNotFoundError:
        return None


def send(name: str, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, KeyError, TypeError):
        os.kill(read(name)["server"], number)


def detach(name: str) -> None:
    """The monitor: forked twice, in its own session, so that it belongs to nobody here."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            try:
                monitor(name)
            finally:
                os._exit(0)
        os._exit(0)


def monitor(name: str) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    container = read(name)
    listener = None
    try:
        if container["publish"]:
            address, outer, inner = container["publish"].split(":")
            listener = socket.create_server((address, int(outer)))
            threading.Thread(target=forward, args=(listener, int(inner)), daemon=True).start()
        output = os.open(container["output"], os.O_WRONLY | os.O_APPEND)
        with subprocess.Popen(
            container["argv"], env=container["env"], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ) as server:
            write(STATE / f"{name}.json", {**container, "server": server.pid, "monitor": os.getpid()})
            code = server.wait()
    except OSError as error:
        with open(container["output"], "a") as output:
            print(f"Error: cannot listen on the TCP port: {error}", file=output)
        code = 126
    if container["remove"]:
        (STATE / f"{name}.json").unlink()
    write(STATE / f"{name}.exit", str(code if code >= 0 else 128 - code))


def forward(listener: socket.socket, inner: int) -> None:
    """Every connection to the published port goes on to the server's; refused while that does not listen."""

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    while True:
        outside, _ = listener.accept()
        try:
            inside = socket.create_connection(("127.0.0.1", inner))
        except OSError:
            outside.close()
            continue
        for pair in ((outside, inside), (inside, outside)):
            threading.Thread(target=pump, args=pair, daemon=True).start()


def stop(name: str, within_s: float) -> None:
    container = read(name)
    end = time.monotonic() + within_s
    if within_s:
        send(name, signal.SIGTERM)
    while read(name) and time.monotonic() < end:
        time.sleep(0.02)
    send(name, signal.SIGKILL)
    while read(name) and alive(container["monitor"]):
        time.sleep(0.02)


def remove(argv: list[str]) -> int:
    known = {"--force", "--volumes"} | (set() if DOCKER else {"--ignore"})
    *options, name = argv
    if wrong := set(options) - known:
        return fail(f"unknown flag: {wrong}")
    container = read(name)
    if container is None:
        return 0 if "--ignore" in options else fail(f"No such container: {name}", 1)
    while container and "monitor" not in container and alive(container["client"]):  # being started, and locked
        time.sleep(0.02)
        container = read(name)
    if container and "monitor" not in container:  # made and never started
        (STATE / f"{name}.json").unlink()
    elif container and alive(container["monitor"]):
        stop(name, 0 if DOCKER else container["stop_s"])
    elif container and read(name):
        return fail(f"cannot remove container {name} as it could not be stopped: timed out waiting for file", 1)
    print(name)
    return 0


def daemon() -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(STATE / "socket"))
        listener.listen()
        while True:
            asked, _ = listener.accept()
            with asked:
                detach(asked.recv(200).decode())


def main(argv: list[str]) -> int:
    STATE.mkdir(exist_ok=True)
    with open(STATE / "calls", "a") as calls:
        print(json.dumps(argv), file=calls)
    match argv:
        case ["--version"]:
            print("Docker version 28.2.2, build e6534b4" if DOCKER else "podman version 4.9.3")
        case ["info" | "version", "--format", _]:
            told = STATE / "told"  # what a test has it say instead
            if told.exists():
                print(told.read_text(), file=sys.stderr)
                return 1
            print("28.2.2" if DOCKER else f"4.9.3 {str((STATE / 'remote').exists()).lower()}")
        case ["context", "inspect", *_]:
            print("tcp://10.0.0.1:2375" if (STATE / "remote").exists() else "unix:///var/run/docker.sock")
        case ["image", "inspect", "--format", "{{.Id}}", image]:
            if image not in images():
                return fail(f"{image}: image not known")
            print(images()[image]["id"])
        case ["pull", image]:
            said = STATE / "pull"  # what a test has the registry answer
            if said.exists():
                print(f"Trying to pull {image}...", file=sys.stderr)
                return fail(said.read_text())
            write(STATE / "images.json", {image: json.loads((STATE / "registry.json").read_text())[image]})
            print("Copying blob sha256:5f2a\nCopying config sha256:77ab\nWriting manifest")
        case ["run", *rest]:
            return run(rest)
        case ["stop", "-t", seconds, name] if DOCKER:
            if read(name) is None:
                return fail(f"No such container: {name}", 1)
            stop(name, float(seconds))
        case ["rm", *rest]:
            return remove(rest)
        case ["daemon"] if DOCKER:
            return daemon()
        case _:
            return fail(f"unknown command {argv}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
