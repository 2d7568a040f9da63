"""A machine that runs cells of matrices which other machines plan: a Dask worker that declares its hardware.

Whoever reaches the scheduler's port runs code here, as Dask is made. So without certificates everything stays on
loopback. One cell at a time, as a matrix here runs it; its folder is returned whole.
"""

import asyncio
import contextlib
import hashlib
import ipaddress
import json
import logging
import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from llmrepro import __version__, catalog, cell, earlier_runs, folder_archive, machine
from llmrepro import run as runs
from llmrepro.parameters import Parameters, resolved
from llmrepro.recipe import Recipe
from llmrepro.run_folder import RunError

ATTEMPTS = 2  # of a cell whose worker is lost
SENT_S = 30.0  # for a folder to be fetched from a worker that ends
RUNS = "LLMREPRO_WORKER_RUNS"  # where this worker's run folders go, for the tasks that come
_signals: dict[str, list[int]] = defaultdict(list)  # that came for a cell, by its key


class Tls(NamedTuple):
    """Files of a certificate authority, a certificate and its key; all three or none."""

    ca_file: str | None = None
    cert: str | None = None
    key: str | None = None

    @property
    def given(self) -> bool:
        return any(self)


def located(address: str, tls: Tls) -> str:
    """An address with its protocol, which follows from whether there are certificates."""
    return address if "//" in address else f"{'tls' if tls.given else 'tcp'}://{address}"


def security(address: str, tls: Tls) -> Any:
    """What connections to a scheduler are made with. Raises RunError for one on another machine without TLS, and
    for certificates that cannot be used."""
    from distributed import Security

    if tls.given and not all(tls):
        raise RunError("TLS takes three files: --tls-ca-file, --tls-cert and --tls-key; give the others too")
    for path in filter(None, tls):
        if not Path(path).is_file():
            raise RunError(f"{path} is no file; --tls-ca-file, --tls-cert and --tls-key each take one")
    if tls.given:
        if not located(address, tls).startswith("tls://"):
            raise RunError(
                f"{address} is not encrypted, and certificates were given; write tls:// before its host"
            )
        ca, cert, key = tls
        sides = {
            f"tls_{side}_{what}": path
            for side in ("client", "worker")
            for what, path in (("cert", cert), ("key", key))
        }
        return Security(tls_ca_file=ca, require_encryption=True, **sides)
    host = urlsplit(located(address, tls)).hostname or ""
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


def quiet(level: int) -> None:
    """Have Dask log only what is as bad as that; its clients, of which a task has one, only what is critical."""
    logging.getLogger("distributed").setLevel(level)
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)


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


def stop(keys: list[str], times: int) -> None:
    """Stop cells in order, by as many signals as came for them until now: that which runs on this worker, and any
    other as soon as it would begin here. Told again it adds nothing."""
    for key in keys:
        _signals[key] += [signal.SIGTERM] * (times - len(_signals[key]))


def run_cell(key: str, parameters: dict, wanted: dict[str, str], deadline_s: float | None) -> dict | None:
    """One cell on this worker: {folder, name, code, seconds, why}, `folder` as `folder_archive` packs it. None for
    one that was stopped before it began.

    One that nobody waits for any more, because its matrix or its scheduler is gone, is stopped in order. Raises
    RunError for another version of anything that is pinned, and for a cell that has lost its workers twice.
    """
    from distributed import Reschedule, Status, Variable, get_client, get_worker

    here = get_worker()
    if here.status != Status.running:  # it ends: the cell goes elsewhere
        raise Reschedule
    if _signals[key]:
        return None
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

    def look() -> None:
        if not _signals[key] and not _awaited(here, key):
            print(f"nobody waits for {key} any more: it is stopped; what there is of it is in {path}", flush=True)
            _signals[key].append(signal.SIGTERM)

    end = cell.run(path, deadline_s=deadline_s, signals=_signals[key], on_tick=look)
    return {"folder": folder_archive.pack(path), "name": path.name, **end._asdict()}


def _awaited(here: Any, key: str) -> bool:
    """Whether a scheduler still wants what a task that runs on the worker `here` returns."""
    from distributed import Status

    task = here.state.tasks.get(key)
    return here.status in (Status.running, Status.paused) and task is not None and task.state != "cancelled"


def serve(address: str, tls: Tls, runs_dir: str | None, more: dict[str, float]) -> None:
    """Work for the scheduler at an address until a signal comes or it is gone. Raises RunError.

    `more` resources are declared beside those of this machine, or in their place.
    """
    secure = security(address, tls)
    quiet(logging.ERROR)
    os.environ[RUNS] = str(runs.base_of(runs_dir))
    resources = {**declared(machine.describe(machine.cache_dir())), **more}
    print("declares " + json.dumps(resources), flush=True)
    asyncio.run(_serve(located(address, tls), secure, resources))


async def _serve(address: str, secure: Any, resources: dict[str, float]) -> None:
    from distributed import Status, Worker

    over = asyncio.Event()
    working: Any = None

    def told(number: int) -> None:
        over.set()
        if working is not None:
            working.status = Status.paused  # what waits here begins no more; once this is closed it goes elsewhere
            for task in working.state.executing:
                _signals[task.key].append(number)

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
                dashboard_address="127.0.0.1:0",  # of its pages without encryption, which it opens in any case
                local_directory=place,
                memory_limit=0,
                dashboard=False,
                death_timeout=60,
            )
        except (OSError, TimeoutError) as error:
            raise RunError(f"no scheduler answers at {address} ({error}); start one there first") from None
        if over.is_set():  # the signal came while it connected
            told(signal.SIGTERM)
        print(f"works for {address}; Ctrl-C ends it", flush=True)
        ends = [asyncio.ensure_future(working.finished()), asyncio.ensure_future(over.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await _until(lambda: not working.state.executing or working.status == Status.closed)
        with contextlib.suppress(TimeoutError):  # what the cell that was stopped has is fetched
            await asyncio.wait_for(_until(lambda: not working.data or working.status == Status.closed), SENT_S)
        await working.close()


async def _until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.1)
