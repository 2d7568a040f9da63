"""What an engine is given of a recipe's model: its files fetched, converted or prepared, overlaid; its drafter."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrepro import checkouts, conversion, derivation, machine, weights, weights_store
from llmrepro.environment import Environment
from llmrepro.model import Model, Preparation, Weights
from llmrepro.progress import Progress
from llmrepro.weights import Held, Plan, WeightsFailure
from llmrepro.weights_store import Piece

FAILED = "the weights could not be prepared"
STEPS = 1  # raise it when `_prepared` changes what it makes


@dataclass(frozen=True)
class Ready:
    """`told` is the run folder's weights.json: path, facts by metric id, repo and revision as found, files
    [{path, sha256, bytes}] as fetched; `served_sha256` and `prepared` when the engine is given others, `draft` and
    `overlay` with the same of theirs."""

    path: Path
    draft: Path | None
    told: dict[str, Any]


def ready(
    model: Model,
    environment: Environment,
    log: Path,
    own: str | None = None,
    before: dict[str, Any] | None = None,
    cache: Path | None = None,
) -> Ready:
    """Everything of a model, whole and checked; what is to be had is asked, and room for it looked for, before
    anything is fetched.

    `own` is a person's own copy: served as it is, neither prepared nor overlaid. `before` is `told` of the run
    that is gone on with: where the recipe pins no revision, that run's is kept to. `log` gets the tools' output.
    Raises WeightsFailure.
    """
    cache, before = cache or machine.cache_dir(), before or {}
    wanted: dict[str, Weights | None] = {
        "model": None if own else model,
        "overlay": None if own else model.overlay,
    }
    wanted["draft"] = model.draft
    plans = {
        name: weights.plan(_as_before(one, before if name == "model" else before.get(name)), cache)
        for name, one in wanted.items()
        if one is not None
    }
    _room(plans, model, environment, cache)
    held = {name: weights.complete(plan) for name, plan in plans.items()}
    base = weights.own(own, model, cache) if own else held["model"]
    told = {**_told(base), "facts": weights.facts(base)}
    path = base.path
    if model.convert is not None:
        path = conversion.convert(path, model.convert, environment, log, cache)
        told["facts"]["model.converted_sha256"] = conversion.digest(path)
    pieces = base.pieces
    if model.prepare is not None and not own:
        pieces = _prepared(base, model.prepare, environment, log, cache)
        told["prepared"] = model.prepare.model_dump()
    if "overlay" in held:
        over = {p.path: p for p in held["overlay"].pieces}
        pieces = [*(p for p in pieces if p.path not in over), *over.values()]
        told["overlay"] = _told(held["overlay"])
    if pieces is not base.pieces:
        path = weights_store.given(model.format, pieces, cache)
        told["served_sha256"] = Held(model.format, path, pieces).sha256
    draft = held["draft"].path if "draft" in held else None
    if draft is not None:
        told["draft"] = {"path": machine.shortened(draft), **_told(held["draft"])}
    return Ready(path, draft, {"path": machine.shortened(path), **told})


def described(told: dict[str, Any], model: Model) -> list[tuple[str, str]]:
    """weights.json in words, (name, what) a line: which repository was taken, at what commit, how large."""
    facts = told["facts"]
    found = [f for f in told["files"] if f["path"].endswith(f".{model.format}")] or told["files"]
    more = f" and {len(told['files']) - 1} more files" if len(told["files"]) > 1 else ""
    as_ = f", as {model.convert.dtype}" if model.convert else ""
    name = found[0]["path"].rpartition("/")[2]
    lines = [
        (
            "weights",
            f"{name}{more}, {facts['model.bytes'] / 1e6:.0f} MB, sha256 {facts['model.sha256'][:16]}…{as_}",
        )
    ]
    for what, one, wanted in (
        ("weights", told, model),
        ("overlay", told.get("overlay"), model.overlay),
        ("drafter", told.get("draft"), model.draft),
    ):
        if one and one["repo"] and wanted and wanted.source == "huggingface":
            instead = f", in place of {wanted.repo}" if one["repo"] != wanted.repo else ""
            pinned = "" if wanted.revision else ", which was its main when it was fetched"
            lines.append((f"{what} from", f"{one['repo']}{instead}, commit {one['revision']}{pinned}"))
    if told["repo"] is None and (model.prepare or model.overlay):
        lines.append(("weights from", "your own copy, as it is: neither prepared nor overlaid"))
    return lines


def _as_before(wanted: Weights, before: dict[str, Any] | None) -> Weights:
    if wanted.revision is not None or not (before or {}).get("revision"):
        return wanted
    return wanted.model_copy(update={"revision": before["revision"]})


def _told(held: Held) -> dict[str, Any]:
    files = [{"path": p.path, "sha256": p.sha256, "bytes": p.bytes} for p in held.pieces]
    return {"repo": held.repo, "revision": held.revision, "sha256": held.sha256, "files": files}


def _room(plans: dict[str, Plan], model: Model, environment: Environment, cache: Path) -> None:
    """Raises WeightsFailure when what is still to fetch, and the copy that is prepared, has no room."""
    fetched, copied = sum(plan.missing_bytes for plan in plans.values()), 0
    if model.prepare is not None and "model" in plans:
        files = plans["model"].files
        decides = _decides({f.path: f.sha256 for f in files}, model.prepare, environment)
        if not derivation.place_of("prepared", decides, cache).exists():
            copied = sum(f.bytes or 0 for f in files)
    free = shutil.disk_usage(next(p for p in (cache, *cache.parents) if p.exists())).free
    if fetched + copied > free:
        copy = f" and {copied / 1e9:.2f} GB for the copy that is prepared" if copied else ""
        raise WeightsFailure(
            f"the weights need {fetched / 1e9:.2f} GB still to fetch{copy}, and {cache} has {free / 1e9:.2f} GB "
            f"free: nothing was fetched; {weights_store.ELSEWHERE}"
        )


def _decides(files: dict[str, str | None], wanted: Preparation, environment: Environment) -> list[Any]:
    return [sorted(files.items()), wanted.model_dump(), environment.key, STEPS]


def _prepared(base: Held, wanted: Preparation, environment: Environment, log: Path, cache: Path) -> list[Piece]:
    """The files that a publication's scripts make of a copy of a checkpoint's folder.

    They rewrite in place, so the copy shares no file with the cache's own. It is keyed by the files, the scripts'
    commit and names, and the environment that runs them.
    """

    def make(folder: Path, held: int) -> None:
        scripts = folder.with_suffix(".scripts")
        shutil.rmtree(scripts, ignore_errors=True)
        steps = len(wanted.scripts) + 2
        try:
            with Progress(f"prepare {base.repo}", steps) as bar:
                bar.to(0, "fetch the scripts")
                checkouts.fetch(wanted.repo, wanted.commit, scripts)
                for piece in base.pieces:
                    bar.to(1, f"copy {piece.path}")
                    (folder / piece.path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(piece.place, folder / piece.path)
                for number, script in enumerate(wanted.scripts, 2):
                    argv = [
                        str(environment.python),
                        "-s",
                        "-B",
                        str(_script(scripts, script, wanted)),
                        str(folder),
                    ]

                    def waiting(seconds: float, number: int = number, script: str = script) -> None:
                        bar.to(number, f"{script} · {seconds:.0f} s")

                    derivation.tool(argv, log, held, waiting, f"{FAILED}: {script}", cwd=scripts)
                bar.to(steps)
        except checkouts.CheckoutFailure as failure:
            raise WeightsFailure(f"{FAILED}: {failure}; {failure.next_step}") from None
        finally:
            shutil.rmtree(scripts, ignore_errors=True)

    decides = _decides({p.path: p.sha256 for p in base.pieces}, wanted, environment)
    folder, files = derivation.made("prepared", decides, make, cache)
    return [Piece(path, folder / path, sha256, (folder / path).stat().st_size) for path, sha256 in files.items()]


def _script(folder: Path, script: str, wanted: Preparation) -> Path:
    file = folder / script
    if not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
        raise WeightsFailure(
            f"{FAILED}: {wanted.repo} holds no {script} at {wanted.commit}; mend `prepare` of the recipe's model"
        )
    return file
