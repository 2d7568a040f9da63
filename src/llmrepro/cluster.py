"""Cells of a matrix on other machines: sent by a Dask scheduler to workers that declare the hardware they need."""

import contextlib
import signal
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from llmrepro import __version__, catalog, cell, folder_archive, worker
from llmrepro import run as runs
from llmrepro.matrix import Cell, Stopped
from llmrepro.parameters import resolved
from llmrepro.recipe import RecipeError
from llmrepro.run_folder import RunError

WORKERS_S = 60.0  # for the first worker to be there
POLL_S = 0.2
LEFT_OUT = {"runs_dir", "resume"}


def run(
    cells: Iterable[Cell],
    signals: list[int],
    address: str,
    tls: worker.Tls,
    *,
    cell_deadline_s: float | None = None,
    on_begin: Callable[[Cell], None] = lambda _cell: None,
    on_end: Callable[[Cell], None] = lambda _cell: None,
    on_tick: Callable[[Cell], None] = lambda _cell: None,
) -> Stopped | None:
    """Do what is to be done of each cell on the workers of a scheduler, one at a time on each.

    `on_end` gets each as it then is, its folder here. When a signal comes what runs is stopped in order, and comes
    back as well. Raises RunError where there is no scheduler, no worker, or one of another version.
    """
    client = _connected(address, tls)
    with contextlib.closing(client):
        declared = _workers(client, address)
        running: dict[Any, Cell] = {}
        for one in cells:
            if not one.does:
                on_end(one)
                continue
            on_begin(one)
            try:
                running[_sent(client, one, declared, cell_deadline_s)] = one
            except (RecipeError, RunError) as error:
                on_end(replace(one, act="refuse", why=str(error)))
        told = False
        while running:
            for future in [f for f in running if f.done()]:
                one = running.pop(future)
                if not (told and future.cancelled()):  # else it was not reached
                    on_end(_done(future, one, address))
            if signals and not told:
                told = True
                _stop(client, running)
            for one in list(running.values())[:1]:
                on_tick(one)
            time.sleep(POLL_S)
    return Stopped(128 + signals[0], f"stopped by {signal.Signals(signals[0]).name}") if signals else None


def _connected(address: str, tls: worker.Tls) -> Any:
    try:
        from distributed import Client
    except ImportError:
        raise RunError(
            "other machines need Dask: pip install 'llmrepro[distributed]' in this environment"
        ) from None
    try:
        return Client(address, security=worker.security(address, tls), timeout=30, set_as_default=False)
    except OSError as error:
        raise RunError(
            f"no scheduler answers at {address} ({error}); start one: dask scheduler --host 127.0.0.1"
        ) from None


def _workers(client: Any, address: str) -> list[dict[str, float]]:
    """What each worker declares. Raises RunError where there is none, or where one is of another version."""
    try:
        client.wait_for_workers(1, timeout=WORKERS_S)
    except TimeoutError:
        raise RunError(
            f"no worker came to {address} in {WORKERS_S:g} s; start one: llmrepro worker {address}"
        ) from None
    for where, there in client.run(worker.version).items():
        if there != __version__:
            raise RunError(
                f"the worker {where} has llmrepro {there}, and this machine {__version__}; make them the same"
            )
    return [w["resources"] for w in client.scheduler_info(n_workers=-1)["workers"].values()]


def _sent(client: Any, one: Cell, declared: list[dict[str, float]], deadline_s: float | None) -> Any:
    """The future of a cell. One that no worker has the hardware for goes to any of them, which shows what is
    published and says what lacks."""
    from distributed import Variable

    recipe = resolved(catalog.load(one.name), one.parameters)
    fits = [
        asked
        for asked in (worker.needed(recipe, name) for name in recipe.needs.architectures or [None])
        if any(all(has.get(name, 0) >= amount for name, amount in asked.items()) for has in declared)
    ]
    key = f"{recipe.id}-{uuid.uuid4().hex}"
    Variable(f"llmrepro-{key}", client=client).set(0)
    return client.submit(
        worker.run_cell,
        key,
        one.parameters.model_dump(exclude=LEFT_OUT),
        worker.pinned(recipe, catalog.path_of(one.name).parent),
        deadline_s,
        key=key,
        resources=fits[0] if fits else None,
        pure=False,
    )


def _done(future: Any, one: Cell, address: str) -> Cell:
    """A cell whose future is over: its folder here, or why there is none."""
    if future.status != "finished":
        error = future.exception() if future.status == "error" else None
        lost = f"the scheduler at {address} was lost, or the cell was taken back"
        return replace(one, act="refuse", why=f"{error or lost}")
    came = future.result()
    try:
        target = runs.base_of(one.parameters.runs_dir) / one.recipe / came["name"]
        target.parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 100):
            if not target.exists():
                break
            target = target.with_name(f"{came['name']}-{number}")
        folder_archive.unpack(came["folder"], target)
    except (RunError, OSError) as error:
        return replace(one, act="refuse", why=str(error))
    return replace(one, folder=target, end=cell.End(came["code"], came["seconds"], came["why"]))


def _stop(client: Any, running: dict[Any, Cell]) -> None:
    """Stop the cells that run, and take those back that wait."""
    with contextlib.suppress(OSError, TimeoutError):
        where = {key: place for place, stacks in client.call_stack(list(running)).items() for key in stacks}
        client.cancel([future for future in running if future.key not in where])
        client.run(worker.stop, workers=list(where.values()))
