"""Cells of a matrix on other machines: sent by a Dask scheduler to workers that declare the hardware they need."""

import contextlib
import logging
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from llmrepro import __version__, catalog, cell, folder_archive, worker
from llmrepro import run as runs
from llmrepro.matrix import Cell, Stopped
from llmrepro.parameters import resolved
from llmrepro.recipe import RecipeError
from llmrepro.run_folder import RunError

WORKERS_S = 60.0  # for the first worker to be there, and for one with a cell's hardware to be there again
POLL_S, LOOK_S = 0.2, 2.0
LEAVES = 3  # signals after which nothing is waited for
LEFT_OUT = {"runs_dir", "resume"}


@dataclass
class _Sent:
    """A cell on its way, what it asks of a worker, and when there last was one that has it (monotonic, s)."""

    cell: Cell
    asked: dict[str, float]
    served: float


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
    back as well; after the third nothing is waited for. A cell whose workers are gone waits a minute for another.
    Raises RunError where there is no scheduler, no worker, or one of another version.
    """
    address = worker.located(address, tls)
    client = _connected(address, tls)
    with contextlib.closing(client):
        declared = _workers(client, address)
        sent: dict[Any, _Sent] = {}
        for one in cells:
            if not one.does:
                on_end(one)
                continue
            on_begin(one)
            try:
                future, asked = _send(client, one, declared, cell_deadline_s)
                sent[future] = _Sent(one, asked, time.monotonic())
            except (RecipeError, RunError, OSError, TimeoutError) as error:
                on_end(replace(one, act="refuse", why=str(error)))
        looked, told = time.monotonic(), 0
        while sent and len(signals) < LEAVES:
            for future in [f for f in sent if f.done()]:
                done = _done(client, future, sent.pop(future).cell, address)
                if done is not None:  # else it was not reached
                    on_end(done)
            if time.monotonic() - looked > LOOK_S or len(signals) > told:
                looked, told = time.monotonic(), len(signals)
                if told:
                    _stop(client, [future.key for future in sent], told)
                for future, why in _deserted(client, sent, 0.0 if signals else WORKERS_S).items():
                    future.cancel()
                    left = sent.pop(future).cell
                    if not signals:
                        on_end(replace(left, act="refuse", why=why))
            for waiting in list(sent.values())[:1]:
                on_tick(waiting.cell)
            time.sleep(POLL_S)
    return Stopped(128 + signals[0], f"stopped by {signal.Signals(signals[0]).name}") if signals else None


def _connected(address: str, tls: worker.Tls) -> Any:
    try:
        from distributed import Client
    except ImportError:
        raise RunError(
            "other machines need Dask: pip install 'llmrepro[distributed]' in this environment"
        ) from None
    worker.quiet(logging.CRITICAL)  # what goes wrong is told in sentences
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
    for where, there in client.run(worker.version, on_error="return").items():
        if isinstance(there, Exception):
            raise RunError(
                f"the worker {where} cannot tell its llmrepro ({there}); start it with `llmrepro worker`"
            )
        if there != __version__:
            raise RunError(
                f"the worker {where} has llmrepro {there}, and this machine {__version__}; make them the same"
            )
    return _declared(client)


def _declared(client: Any) -> list[dict[str, float]]:
    return [w["resources"] for w in client.scheduler_info(n_workers=-1).get("workers", {}).values()]


def _fits(asked: dict[str, float], has: dict[str, float]) -> bool:
    return all(has.get(name, 0) >= amount for name, amount in asked.items())


def _send(
    client: Any, one: Cell, declared: list[dict[str, float]], deadline_s: float | None
) -> tuple[Any, dict[str, float]]:
    """The future of a cell, and what it asks of a worker. One that no worker has the hardware for asks for
    nothing: whichever gets it shows what is published and says what lacks."""
    from distributed import Variable

    recipe = resolved(catalog.load(one.name), one.parameters)
    fits = [
        asked
        for asked in (worker.needed(recipe, name) for name in recipe.needs.architectures or [None])
        if any(_fits(asked, has) for has in declared)
    ]
    asked = fits[0] if fits else {}
    key = f"{recipe.id}-{uuid.uuid4().hex}"
    Variable(f"llmrepro-{key}", client=client).set(0)
    future = client.submit(
        worker.run_cell,
        key,
        one.parameters.model_dump(exclude=LEFT_OUT),
        worker.pinned(recipe, catalog.path_of(one.name).parent),
        deadline_s,
        key=key,
        resources=asked or None,
        pure=False,
    )
    return future, asked


def _done(client: Any, future: Any, one: Cell, address: str) -> Cell | None:
    """A cell whose future is over: its folder here, or why there is none. None for one that never began."""
    from distributed import Variable

    if future.status == "cancelled":  # as all are when the connection is lost
        why = f"the scheduler at {address} was lost; what came back before is kept, start it and the matrix again"
        return replace(one, act="refuse", why=why)
    try:
        came = future.result()
    except Exception as error:  # the task's own, or of its way here
        return replace(one, act="refuse", why=str(error))
    finally:
        future.release()  # a worker that ends waits until its folder was fetched
        with contextlib.suppress(OSError, TimeoutError):
            Variable(f"llmrepro-{future.key}", client=client).delete()
    if came is None:
        return None
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
    return replace(one, act="new", folder=target, end=cell.End(came["code"], came["seconds"], came["why"]))


def _deserted(client: Any, sent: dict[Any, _Sent], patience_s: float) -> dict[Any, str]:
    """The cells for which there has been no worker with their hardware for too long, each with the sentence of it:
    a scheduler keeps them for ever."""
    try:
        declared = _declared(client)
    except (OSError, TimeoutError):  # the scheduler is lost, which their futures tell
        return {}
    now, found = time.monotonic(), {}
    for future, one in sent.items():
        if any(_fits(one.asked, has) for has in declared):
            one.served = now
        elif now - one.served > patience_s:
            wanted = ", ".join(f"{name}={amount:g}" for name, amount in one.asked.items()) or "any worker"
            there = "; ".join(", ".join(f"{n}={a:g}" for n, a in has.items()) for has in declared)
            found[future] = (
                f"its worker was lost, and for {patience_s:g} s none has declared what it asks for, {wanted} "
                f"(there: {there or 'none'}); start one, and `llmrepro matrix` again"
            )
    return found


def _stop(client: Any, keys: list[str], times: int) -> None:
    """Have every worker stop these cells, also one that came just now. In a thread: one that hangs answers nobody,
    and the next signal must be seen."""

    def tell() -> None:
        with contextlib.suppress(Exception):  # the client is closed meanwhile, or the scheduler lost
            client.run(worker.stop, keys, times, on_error="ignore")

    threading.Thread(target=tell, daemon=True, name="stop").start()
