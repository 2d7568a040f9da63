"""Inference engines, one module each. `Engine` says what such a module provides; adding one is adding a file."""

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from llmrepro import numa
from llmrepro.install import Install
from llmrepro.recipe import Server


class Launch(NamedTuple):
    """How one boot of a server is started."""

    argv: list[str]
    env: dict[str, str]  # what the engine needs beyond the kit's minimal environment
    adaptations: list[str]  # what was translated, a sentence each; [] when nothing was
    cleanup: Sequence[list[str]] = ()  # what takes away that which the command starts elsewhere: a container
    cidfile: Path | None = None  # where a container's id will stand
    bound: bool = False  # the command binds the server to its NUMA node itself


class Engine(Protocol):
    """What a module in this folder provides, as plain functions.

    More it has only where the engine tells or can do such a thing; without them nothing is told, and what needs
    them is skipped with that reason:
    `tokenize(text)` → endpoint and body that answer with a list of token ids under "tokens";
    `impossible(workload)` → why a workload cannot be asked of it, a sentence, or None;
    `sequences(args)` → how many requests a server started so works on at once, or None: as many as come;
    `adapted(workload)` → what of its requests the engine gets otherwise than the recipe says, a sentence each;
    `toolchain(install)` → {name: version} of what this machine builds it with, or EngineError without that;
    `flags(environment, install)` → the options that an installed build's own --help lists;
    `counters(get)` → running totals since the start, as far as they are told: "prefix_queries_tokens",
    "prefix_hits_tokens"; "generation_tokens", "engine_steps"; of speculation "spec_drafts" (steps that checked a
    draft), "spec_draft_tokens", "spec_accepted_tokens", "spec_accepted_by_position.<i>" (absent is 0);
    `versions(get)` → the names of the version of a server that the kit did not start, its own first; [] untold;
    `settings(args, effective)` → (name, asked for in the server's arguments, found) for what can be read back;
    `speculation(args)` → what the arguments ask of speculative decoding, where the server does not tell;
    `request_log(text)` → what the log's part of one request says of the prompt cache, or None;
    `cache_layout(args, effective)` → what is known of how it keeps its KV cache: kv_dtype ("f16/q8_0": of keys, of
    values), block_tokens, in_flight_tokens (what a window keeps besides), conv_dtype, ssm_dtype, draft_tokens (for
    each of which a linear layer keeps one more state), speculative, context_tokens, kv_bytes, kv_blocks (if set);
    `slot_arguments(folder)` → arguments for a server whose prompt cache can be saved in `folder`;
    `slot(action, file)` → endpoint and body that "save" or "restore" it, `file` a name in that folder.
    """

    def build(self, source: Path, environment: Path, install: Install) -> list[list[str]]:
        """Commands that build sources into `environment`, in order: an unpacked sdist, run in it; or checkouts,
        run in `source`, the folder that they lie in. Asked before anything lies there. Raises EngineError when
        this engine is not built so."""

    def programs(self, install: Install) -> list[str]:
        """Files below the environment that must exist once it is complete."""

    def launch(
        self,
        environment: Path,
        install: Install,
        server: Server,
        weights: Path,
        *,
        alias: str,
        port: int,
        api_key: str,
        threads: int,
        draft: Path | None = None,
    ) -> Launch:
        """The command of one boot; {threads} and {draft} in its arguments are filled in. Raises EngineError when
        an argument cannot be used with this build. Where none is installed its arguments stay as written."""

    def request(self, body: dict, *, cache: str) -> dict:
        """The body as this engine wants it: what makes it count tokens, `cache` "off" or "on"."""

    def observe(self, get, log: str) -> dict:
        """What a live server and its log tell: `effective` settings, `phases` [(name, start_s, end_s)],
        `metrics` {metric id: value}; `log_window` where the log tells rolling figures, which are none of them.
        `get(path)` answers parsed JSON, a text that is none, or None."""


class EngineError(RuntimeError):
    """The engine cannot do what the recipe asks; the text says what and what would."""


def filled(texts: Iterable[str], threads: int, draft: Path | None) -> list[str]:
    """Arguments or values with {threads} and {draft} filled in. Raises EngineError without a drafter."""
    texts = list(texts)
    if draft is None and any("{draft}" in text for text in texts):
        raise EngineError(
            "an argument names {draft}, and the recipe's model has no `draft`; add it or leave it out"
        )
    return [text.replace("{threads}", str(threads)).replace("{draft}", str(draft)) for text in texts]


def placed(launch: Launch, server: Server, *, here: bool = True) -> list[str]:
    """The command of a launch, bound to the server's NUMA node where it has one. Raises NumaError when that cannot
    be done here; with `here` false nothing is looked at: how it would be."""
    if server.numa_node is None or launch.bound:
        return launch.argv
    return [*(numa.checked if here else numa.prefix)(server.numa_node), *launch.argv]


def load(name: str) -> Engine:
    """The module of an engine by the name recipes use."""
    return importlib.import_module(f"llmrepro.engines.{name.replace('-', '_')}")
