"""Which text of a prompt a run asks: the publication's own where it can be had, else ours, and which it was.

A run folder keeps the texts in prompts.json, {sha256: text}, and in published_prompts.json,
{"<workload>/<prompt>": sha256}, those prompts whose publication's own text is asked. Of all others ours is.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from llmrepro import git_files, literals, machine
from llmrepro.git_files import GitFileFailure
from llmrepro.literals import LiteralFailure
from llmrepro.progress import Progress
from llmrepro.recipe import Recipe
from llmrepro.run import Run, load_recipe
from llmrepro.run_folder import RunError, read_json, read_lines
from llmrepro.workload import Piece, Prompt, PromptSource, Workload

PUBLISHED = "published_prompts.json"


class PromptFailure(ValueError):
    """A publication's text that cannot be had, or is not the one that was meant; the sentence says why."""


def key(workload: Workload, prompt: Prompt) -> str:
    return f"{workload.id}/{prompt.id}"


def every(recipe: Recipe) -> Iterator[tuple[str, Prompt]]:
    """All prompts of a recipe with their keys: those that are asked, warm-ups, and the texts that are cut."""
    for workload in recipe.workloads:
        for prompt in (*workload.prompts, workload.warmup, *([workload.text] if workload.text else [])):
            yield key(workload, prompt), prompt


def published(recipe: Recipe) -> dict[str, str | None]:
    """{"workload/prompt": sha256} of the prompts that a publication has its own text of; None: not published."""
    return {name: p.source.sha256 for name, p in every(recipe) if p.source is not None}


def asked(path: Path) -> dict[str, str]:
    """{"workload/prompt": sha256} of the text that the run in a folder asks, for every prompt of its recipe."""
    theirs = _theirs(path)
    return {name: theirs.get(name, prompt.sha256) for name, prompt in every(load_recipe(path))}


def texts(path: Path) -> dict[str, str]:
    """{"workload/prompt": text} that the run in a folder asks. Raises RunError when one was changed."""
    kept = read_json(path / "prompts.json")
    for sha256, text in kept.items():
        if _sha256(str(text)) != sha256:
            raise RunError(f"{path}/prompts.json was changed: a text has not the sha256 {sha256}; start a new run")
    missing = sorted(name for name, sha256 in asked(path).items() if sha256 not in kept)
    if missing:
        raise RunError(f"{path}/prompts.json was changed: the text of {missing[0]} is gone; start a new run")
    return {name: kept[sha256] for name, sha256 in asked(path).items()}


def fetch(run: Run, cache: Path | None = None) -> list[str]:
    """Bring the publication's own texts into a run folder; a sentence for each reason why ours are asked instead.

    A run that has records keeps what they were asked with. Raises RunError when the folder's own texts are broken.
    """
    wanted = {name: p.source for name, p in every(run.recipe) if p.source is not None}
    if read_lines(run.path / "records.jsonl"):
        ours = [name for name in wanted if name not in _theirs(run.path)]
        return (
            [f"{_ours(ours)}: this run began with {'it' if len(ours) == 1 else 'them'}, and goes on as it began"]
            if ours
            else []
        )
    if not wanted:
        return []
    files: dict[tuple, str | PromptFailure] = {}
    found: dict[str, str] = {}
    reasons: dict[str, list[str]] = {}
    with Progress("fetch the publication's prompts", len(wanted)) as bar:
        for n, (name, source) in enumerate(wanted.items(), 1):
            try:
                found[name] = _published_text(source, files, cache or machine.cache_dir())
            except PromptFailure as failure:
                reasons.setdefault(str(failure), []).append(name)
            bar.to(n)
    own = read_json(run.path / "prompts.json")
    run.write_json("prompts.json", {**own, **{_sha256(text): text for text in found.values()}})
    run.write_json(PUBLISHED, {name: _sha256(text) for name, text in found.items()})
    return [f"{_ours(names)}: {reason}" for reason, names in reasons.items()]


def _ours(names: list[str]) -> str:
    one = len(names) == 1
    return f"{'a text' if one else 'texts'} of ours {'is' if one else 'are'} asked for {', '.join(names)}"


def _theirs(path: Path) -> dict[str, str]:
    return read_json(path / PUBLISHED) if (path / PUBLISHED).is_file() else {}


def _published_text(source: PromptSource, files: dict[tuple, str | PromptFailure], cache: Path) -> str:
    """The text of a source, its pieces joined. `files` keeps what was fetched, or why it was not."""
    text = "".join(_piece(piece, files, cache) for piece in source.pieces)
    try:
        found = _sha256(text)
    except UnicodeEncodeError:
        raise PromptFailure("the publication's text holds half a character, which no server takes") from None
    if source.sha256 is not None and found != source.sha256:
        where = " and ".join(dict.fromkeys(p.path for p in source.pieces))
        raise PromptFailure(
            f"the text of {where} has sha256 {found}, the recipe says {source.sha256}; mend the recipe's "
            "`source`, or find out who changed the text"
        )
    return text


def _piece(piece: Piece, files: dict[tuple, str | PromptFailure], cache: Path) -> str:
    where = (piece.repo, piece.commit, piece.path)
    if where not in files:
        try:
            files[where] = git_files.fetch(piece, cache).decode()
        except GitFileFailure as failure:
            files[where] = PromptFailure(str(failure))
        except UnicodeDecodeError as error:
            files[where] = PromptFailure(
                f"{piece.path} of {piece.repo} is not UTF-8 ({error.reason}), so it is no prompt"
            )
    content = files[where]
    if isinstance(content, PromptFailure):
        raise content
    if piece.literal is not None:
        try:
            content = literals.read(content, piece.literal)
        except LiteralFailure as failure:
            raise PromptFailure(f"{piece.path} of {piece.repo}: {failure}; mend the recipe's `literal`") from None
    if piece.slice is None:
        return content
    begin, end = piece.slice
    if not 0 <= begin < end <= len(content):
        raise PromptFailure(
            f"{piece.path} of {piece.repo} has {len(content):,} characters, and {begin:,} to {end:,} of them are "
            "wanted; mend the recipe's `slice`"
        )
    return content[begin:end]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
