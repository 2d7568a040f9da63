"""A machine that runs cells of matrices which other machines plan: a Dask worker that declares its hardware.

Whoever reaches the scheduler's port runs code here, as Dask is made. So without certificates everything stays on
loopback. One cell at a time, as a matrix here runs it; its folder is returned whole.
"""

import asyncio
import contextlib
import hashlib
import ipaddress
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from llmrepro import __version__, catalog, cell, earlier_runs, folder_archive, machine
from llmrepro import run as runs
from llmrepro.parameters import Parameters, resolved
from llmrepro.recipe import Recipe
from llmrepro.run_folder import RunError

ATTEMPTS = 2  # of a cell whose worker is lost
RUNS = "LLMREPRO_WORKER_RUNS"  # where this worker's run folders go, for the tasks that come
_signals: list[int] = []  # that came for the cell that runs now


class Tls(NamedTuple):
    """Files of a certificate authority, a certificate and its key; all three or none."""

    ca_file: str | None = None
    cert: str | None = None
    key: str | None = None

    @property
    def given(self) -> bool:
        return any(self)


def security(address: str, tls: Tls) -> Any:
    """What connections to a scheduler are made with. Raises RunError for one on another machine without TLS."""
    from distributed import Security

    if tls.given and not all(tls):
        raise RunError("TLS takes three files: --tls-ca-file, --tls-cert and --tls-key; give the others too")
    if tls.given:
        ca, cert, key = tls
        sides = {
            f"tls_{side}_{what}": path
            for side in ("client", "worker")
            for what, path in (("cert", cert), ("key", key))
        }
        return Security(tls_ca_file=ca, require_encryption=True, **sides)
    host = urlsplit(address if "//" in address else f"tcp://{address}").hostname or ""
    if not (host == "localhost" or _is_loopback(host)):
        raise RunError(
            f"{address} is not on this machine, and whoever reaches a scheduler's port runs code as its workers' "
            "users; give certificates with --tls-ca-file, --tls-cert and --tls-key, or stay on 127.0.0.1"
        )
    return None


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def declared(facts: dict) -> dict[str, float]:
    """What `machine.describe` found, as resources that cells ask for."""
    gpus = facts["gpus"] or []
    least = [gpu["memory_gib"] for gpu in gpus if gpu["memory_gib"]]
    capabilities = [_number(gpu["compute_capability"]) for gpu in gpus if gpu["compute_capability"]]
    return {
        f"CPU_{facts['cpu']['architecture']}": 1,
        "MEMORY_GIB": facts["memory"]["total_gib"],
        "DISK_GIB": facts["disk_free_gib"],
        "GPUS": len(gpus),
        "VRAM_GIB": min(least, default=0),
        "COMPUTE_CAPABILITY": min(capabilities, default=0),
    }


def needed(recipe: Recipe, architecture: str | None) -> dict[str, float]:
    """What a recipe's cell asks of a worker, by the names of `declared`; `architecture` is one of those that it
    can have."""
    needs = recipe.needs
    asked = {
        "MEMORY_GIB": needs.memory_gib,
        "DISK_GIB": needs.disk_gib,
        "GPUS": needs.gpu_count,
        "VRAM_GIB": needs.vram_gib if needs.gpu_count else 0,
        "COMPUTE_CAPABILITY": _number(needs.compute_capability) if needs.gpu_count else 0,
    }
    if architecture is not None:
        asked[f"CPU_{architecture}"] = 1
    return {name: amount for name, amount in asked.items() if amount}


def _number(capability: str | None) -> float:
    """8.6 as 86, 12.0 as 120: a number that is larger for what is newer."""
    major, _, minor = (capability or "0.0").partition(".")
    return 10 * int(major) + int(minor or 0)


def pinned(recipe: Recipe, folder: Path) -> dict[str, str]:
    """What must be the same where a cell is planned and where it is run."""
    text = recipe.model_dump_json(by_alias=True, exclude_unset=True)
    return {
        "llmrepro": __version__,
        "the recipe": hashlib.sha256(text.encode()).hexdigest(),
        **earlier_runs.pins(folder),
    }


def version() -> str:
    return __version__


def stop() -> None:
    """Stop the cell that runs on this worker, in order."""
    _signals.append(signal.SIGTERM)


def run_cell(key: str, parameters: dict, wanted: dict[str, str], deadline_s: float | None) -> dict:
    """One cell on this worker: {folder, name, code, seconds, why}, `folder` as `folder_archive` packs it.

    Raises RunError for another version of anything that is pinned, and for a cell that has lost its workers twice.
    """
    from distributed import Variable, get_client

    attempts = Variable(f"llmrepro-{key}", client=get_client())
    before = attempts.get(timeout=30)
    if before >= ATTEMPTS:
        raise RunError(f"its worker was lost {ATTEMPTS} times, so it is not tried again")
    attempts.set(before + 1)
    params = Parameters.model_validate({**parameters, "runs_dir": os.environ.get(RUNS)})
    there = pinned(resolved(catalog.load(params.recipe), params), catalog.path_of(params.recipe).parent)
    if there != wanted:
        name = next(n for n in {**wanted, **there} if wanted.get(n) != there.get(n))
        here, mine = there.get(name), wanted.get(name)
        raise RunError(f"{name} is {here} on a worker and {mine} at the matrix; bring both to one state")
    with contextlib.closing(runs.create(params)) as new:
        path = new.path
    _signals.clear()
    end = cell.run(path, deadline_s=deadline_s, signals=_signals)
    return {"folder": folder_archive.pack(path), "name": path.name, **end._asdict()}


def serve(address: str, tls: Tls, runs_dir: str | None, more: dict[str, float]) -> None:
    """Work for the scheduler at an address until a signal comes or it is gone. Raises RunError.

    `more` resources are declared beside those of this machine, or in their place.
    """
    secure = security(address, tls)
    os.environ[RUNS] = str(runs.base_of(runs_dir))
    resources = {**declared(machine.describe(machine.cache_dir())), **more}
    print("declares " + json.dumps(resources), flush=True)
    asyncio.run(_serve(address, secure, resources))


async def _serve(address: str, secure: Any, resources: dict[str, float]) -> None:
    from distributed import Worker

    over = asyncio.Event()

    def told(number: int) -> None:
        _signals.append(number)
        over.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told, number)
    with tempfile.TemporaryDirectory(prefix="llmrepro-worker-") as place:
        try:
            working = await Worker(
                address,
                nthreads=1,
                resources=resources,
                security=secure,
                host=None if secure else "127.0.0.1",
                local_directory=place,
                memory_limit=0,
                dashboard=False,
                death_timeout=60,
            )
        except (OSError, TimeoutError) as error:
            raise RunError(f"no scheduler answers at {address} ({error}); start one there first") from None
        print(f"works for {address}; Ctrl-C ends it", flush=True)
        ends = [asyncio.ensure_future(working.finished()), asyncio.ensure_future(over.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        while working.state.executing_count:  # the cell that was told to stop comes to its end, and is sent
            await asyncio.sleep(0.2)
        await asyncio.sleep(1.0 if over.is_set() else 0)
        await working.close()
