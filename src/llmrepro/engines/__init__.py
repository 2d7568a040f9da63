"""Inference engines, one module each. `Engine` says what such a module provides; adding one is adding a file."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from llmrepro.install import Install
from llmrepro.recipe import Server


class Launch(NamedTuple):
    """How one boot of a server is started."""

    argv: list[str]
    env: dict[str, str]  # what the engine needs beyond the kit's minimal environment
    adaptations: list[str]  # what was translated, a sentence each; [] when nothing was


class Engine(Protocol):
    """What a module in this folder provides, as plain functions.

    Five more it has only where the engine tells or can do such a thing; without them nothing is told, and what
    needs them is skipped with that reason:
    `counters(get)` → {"prefix_queries_tokens", "prefix_hits_tokens"}, running totals since the start;
    `settings(args, effective)` → (name, asked for in the server's arguments, found) for what can be read back;
    `request_log(text)` → what the log's part of one request says of the prompt cache, or None;
    `slot_arguments(folder)` → arguments for a server whose prompt cache can be saved in `folder`;
    `slot(action, file)` → endpoint and body that "save" or "restore" it, `file` a name in that folder.
    """

    def build(self, source: Path, environment: Path, install: Install) -> list[list[str]]:
        """Commands that build an unpacked sdist into `environment`; run in `source`, in order."""

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
        an argument cannot be used with this build."""

    def request(self, body: dict, *, cache: str) -> dict:
        """The body as this engine wants it: what makes it count tokens, `cache` "off" or "on"."""

    def tokenize(self, text: str) -> tuple[str, dict]:
        """Endpoint and body that answer with a list of token ids under "tokens"."""

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


def load(name: str) -> Engine:
    """The module of an engine by the name recipes use."""
    return importlib.import_module(f"llmrepro.engines.{name.replace('-', '_')}")
