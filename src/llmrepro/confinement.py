"""A function of this kit, called in a process of its own that has only so much time and memory.

A folder of somebody else's can be made so that reading it never ends or fills the memory: then that process ends,
and the caller has a sentence.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from llmrepro.recipe import RecipeError
from llmrepro.run_folder import RunError

LIMIT_S, LIMIT_GIB = 600.0, 4.0
SAID = 300  # characters of an error


def call(function: Callable[..., Any], *args: str) -> Any:
    """What a function of a module of this kit returns for texts; it must be JSON.

    Raises RunError, a sentence without its subject, where it raised, took longer than LIMIT_S or more memory than
    LIMIT_GIB, or died.
    """
    named = (str(LIMIT_GIB), function.__module__, function.__name__)
    command = [sys.executable, "-P", "-m", __name__, *named, *args]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, env=os.environ | _QUIET
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"takes more than {LIMIT_S:g} s to read") from None
    if done.returncode:
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"code {done.returncode}"
        raise RunError(f"cannot be read: the process that read it ended with {how}")
    told = json.loads(done.stdout)
    if "fault" in told:
        raise RunError(told["fault"])
    return told["found"]


_QUIET = {"MPLBACKEND": "agg", "PYTHONWARNINGS": "ignore"}


def sentence(error: Exception) -> str:
    """What was raised while a folder was read, without its subject."""
    if isinstance(error, MemoryError):
        return "takes more memory to read than it may have"
    said = " ".join(str(error).split()) or "no more is told"
    if not isinstance(error, (RunError, RecipeError)):
        said = f"{type(error).__name__}: {said}"
    return f"cannot be read: {said[:SAID]}{'…' if len(said) > SAID else ''}"


def _main(limit_gib: str, module: str, name: str, *args: str) -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no part of the answer
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(float(limit_gib) * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    try:
        told = {"found": getattr(importlib.import_module(module), name)(*args)}
    except Exception as error:  # of which a folder that was changed by hand can raise any
        told = {"fault": sentence(error)}
    with os.fdopen(answer, "w", encoding="utf-8") as out:
        json.dump(told, out)


if __name__ == "__main__":
    _main(*sys.argv[1:])
