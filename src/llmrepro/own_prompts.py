"""Prompts of the user's own, in place of the recipe's: from a file that a parameter names."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from llmrepro.recipe import Recipe
from llmrepro.run_folder import RunError
from llmrepro.workload import Prompt, Workload

WORKLOAD = "own-prompts"
MOST_BYTES = 64 << 20
MOST_PROMPTS = 1000


def texts(path: str) -> dict[str, str]:
    """{id: text} of a prompts file: of a .jsonl file a prompt per line, {"text", "id"?}; any other file is one
    text, "text". Raises RunError."""
    file = Path(path).expanduser()
    try:
        if not file.is_file():  # a device has no end, and a pipe may have no writer
            raise RunError(f"prompts_file: {file} is no file; give the path of one")
        with open(file, "rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise RunError(f"prompts_file: {file} is longer than {MOST_BYTES >> 20} MiB; give a shorter one")
        content = content.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"prompts_file: {file} cannot be read as UTF-8 text: {error}; give another path") from None
    found = _lines(file, content) if suite(path) else {"text": content.strip("\n")}
    empty = next((name for name, text in found.items() if not text.strip()), None)
    if empty is not None or not found:
        raise RunError(f"prompts_file: {file} holds no text{f' for {empty!r}' if found else ''}; give it one")
    return found


def _lines(file: Path, content: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict) or not isinstance(told.get("text"), str) or not _whole(told["text"]):
            raise RunError(
                f'prompts_file: line {number} of {file} is no {{"text": "…"}} of whole characters; write one JSON '
                "object per line"
            )
        name = str(told.get("id") or f"prompt_{number}")
        if name in found:
            raise RunError(f"prompts_file: {file} has two prompts {name!r}; give each an id of its own")
        found[name] = told["text"]
    if len(found) > MOST_PROMPTS:
        raise RunError(f"prompts_file: {file} has {len(found):,} prompts, at most {MOST_PROMPTS:,} are asked")
    return found


def _whole(text: str) -> bool:
    """Whether it can be written down: JSON can say half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def by_hash(path: str | None) -> dict[str, str]:
    """{sha256: text} of a prompts file; {} without one."""
    return {} if path is None else {sha256(text): text for text in texts(path).values()}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _prompt(name: str, text: str) -> Prompt:
    try:
        return Prompt.model_validate({"id": name, "file": f"prompts_file/{name}", "sha256": sha256(text)})
    except ValidationError:
        raise RunError(
            f"prompts_file: {name!r} is no id of a prompt; use letters, digits, dots, dashes and underscores"
        ) from None


def suite(path: str) -> list[str]:
    """The workload that asks a prompts file; none where ladders are cut from it."""
    return [WORKLOAD] if Path(path).suffix.lower() == ".jsonl" else []


def asked(recipe: Recipe, path: str, chooses: Callable[[Workload], bool]) -> bool:
    """Whether anything of a prompts file is asked, of the workloads that `chooses` picks; a suite may be left out
    on purpose, by its name."""
    return bool(suite(path)) or any(w.kind == "ladder" and chooses(w) for w in recipe.workloads)


def applied(recipe: Recipe, path: str) -> Recipe:
    """The recipe with the file's prompts: those of a .jsonl file are a suite `own-prompts`, asked as its first
    chat workload asks; any other text is what its ladders are cut from. Raises RunError."""
    own = [_prompt(name, text) for name, text in texts(path).items()]
    if not suite(path):
        if not any(w.kind == "ladder" for w in recipe.workloads):
            raise RunError(
                f"prompts_file: {recipe.id} has no ladder to cut the text for; give a .jsonl of prompts"
            )
        changed = [w.model_copy(update={"text": own[0]}) if w.kind == "ladder" else w for w in recipe.workloads]
        return recipe.model_copy(update={"workloads": changed})
    chat = next((w for w in recipe.workloads if w.kind == "chat"), None)
    if chat is None:
        raise RunError(
            f"prompts_file: {recipe.id} has no chat workload to ask prompts as; give a text for its ladder"
        )
    changes = {"id": WORKLOAD, "title": "Your own prompts", "prompts": own, "profiles": ["quick", "full"]}
    added = chat.model_copy(update={**changes, "risky": False})
    return recipe.model_copy(update={"workloads": [*recipe.workloads, added]})
