"""Numbers from elsewhere as a run folder, read again under every definition that they allow.

The folder holds receipts.jsonl (the requests), imported.json (which file they came from, and under which names),
recipe.attached.json where a recipe's claims are held beside them, result.json, status.json and the page. It has
no recipe.json and no records.jsonl, so nothing that reads a run takes it for one: `reproduced` is only ever said
of what was measured here.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrepro import catalog, credentials, notation, pairing, receipt_results, receipts, terms
from llmrepro.receipt_results import LABEL, NOT_HERE, PER_SUITE
from llmrepro.receipts import Receipt
from llmrepro.recipe import Recipe
from llmrepro.run import load_recipe, new_folder
from llmrepro.run_folder import Folder, RunError, now, read_json, read_lines, sha256_of, status

TOLD, ROWS, ATTACHED = "imported.json", "receipts.jsonl", "recipe.attached.json"
INPUTS = (TOLD, ROWS, ATTACHED, credentials.FILE)


@dataclass(frozen=True)
class Imported:
    """A folder of imported numbers in memory. `recipe` is the one attached; `told` is imported.json."""

    told: dict
    rows: list[Receipt]
    recipe: Recipe | None
    result: dict
    status: dict

    @property
    def title(self) -> str:
        return f"{self.told['file']} ({LABEL})"

    def of_suite(self, metric: str, workload: str) -> dict[str, float]:
        """A suite's value of a metric by statistic."""
        return {
            r["statistic"]: r["value"]
            for r in self.result["metrics"]
            if (r["metric"], r["workload"], r["case"]) == (metric, workload, None)
        }


def there(path: Path) -> bool:
    """Whether a folder holds imported numbers."""
    return (path / TOLD).is_file()


def create(
    file: Path,
    recipe: str | None = None,
    server: str | None = None,
    suites: Mapping[str, str] | None = None,
    runs_dir: str | None = None,
) -> Path:
    """A new folder `<runs_dir>/imported/<file's name>/<UTC time>/` of a file's rows, without its page.

    `recipe` is one whose claims are held beside them, `server` the one that was asked, `suites` says which suite
    is which of its workloads where their names differ. Raises RunError or RecipeError before anything is written.
    """
    found = receipts.read(file)
    attached = catalog.load(recipe) if recipe else None
    if attached is None and (server or suites):
        raise RunError("a server or a suite's workload belongs to a recipe; name one with --recipe")
    told = {
        "file": file.name,
        "sha256": sha256_of(file),
        "imported_at": now(),
        "columns": found.columns,
        "extra_columns": found.extra,
        "recipe": attached.id if attached else None,
        "server": _server(attached, server) if attached else None,
        "suites": _suites(attached, found.rows, suites or {}),
    }
    path = new_folder(runs_dir, f"{LABEL}/{_slug(file.stem)}")
    folder = Folder(path)
    try:
        folder.write_text(ROWS, "".join(f"{row.model_dump_json()}\n" for row in found.rows))
        if attached is not None:
            text = attached.model_dump_json(by_alias=True, exclude_unset=True, indent=1)
            folder.write_text(ATTACHED, f"{text}\n")
        folder.write_json(TOLD, told)
        folder.write_json("result.json", compute(path))
        folder.set_status(LABEL, "results", reason=f"{len(found.rows):,} requests of {file.name}: {NOT_HERE}")
    except BaseException:  # half a folder would look like numbers
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        folder.close()
    return path


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "receipts"


def _server(recipe: Recipe, name: str | None) -> str | None:
    known = [s.id for s in recipe.servers]
    if name is not None and name not in known:
        raise RunError(f"{recipe.id} has no server {name!r}; {terms.nearest(name, known)}")
    if name is None and len(known) > 1:
        raise RunError(
            f"{recipe.id} has several servers; say with --server which one was asked: {', '.join(known)}"
        )
    return name or known[0]


def _suites(recipe: Recipe | None, rows: list[Receipt], given: Mapping[str, str]) -> dict[str, str]:
    """The workload of each suite: as given, else by its name, else the only one that has all its cases. A suite
    that is none of the recipe's keeps its name."""
    names = list(dict.fromkeys(row.suite for row in rows))
    if recipe is None:
        return {name: name for name in names}
    known = [w.id for w in recipe.workloads]
    for suite, workload in given.items():
        if suite not in names:
            raise RunError(f"the file has no suite {suite!r}; {terms.nearest(suite, names)}")
        if workload not in known:
            raise RunError(f"{recipe.id} has no workload {workload!r}; {terms.nearest(workload, known)}")
    found = {name: given.get(name) or (name if name in known else None) for name in names}
    for name in (n for n in names if found[n] is None):
        cases = {row.case for row in rows if row.suite == name}
        alike = [w.id for w in recipe.workloads if w.id not in found.values() and cases <= set(w.cases)]
        found[name] = alike[0] if len(alike) == 1 else name
    if len(set(found.values())) < len(found):
        raise RunError(f"two suites would be one workload: {', '.join(found.values())}; map each to its own")
    if not set(found.values()) & set(known):
        raise RunError(
            f"no suite of the file has the name or the cases of a workload of {recipe.id}: the file has "
            f"{', '.join(names)}, the recipe {', '.join(known)}; say which is which with --map suite=workload, or "
            "leave --recipe out"
        )
    return found


def read(path: Path) -> Imported:
    """Everything of a folder of imported numbers. Raises RunError naming the file that is missing or broken."""
    return Imported(
        told=read_json(path / TOLD),
        rows=_rows(path),
        recipe=_attached(path),
        result=compute(path),
        status=status(path, page=False),
    )


def _rows(path: Path) -> list[Receipt]:
    if not (path / ROWS).is_file():
        raise RunError(f"{path / ROWS} is missing; import the file again")
    return [Receipt.model_validate(row) for row in read_lines(path / ROWS)]


def _attached(path: Path) -> Recipe | None:
    return load_recipe(path, ATTACHED) if (path / ATTACHED).is_file() else None


def compute(path: Path) -> dict:
    """The content of result.json, from the folder alone; the same files always give the same result."""
    result = receipt_results.compute(read_json(path / TOLD), _attached(path), _rows(path))
    inputs = {name: sha256_of(path / name) for name in INPUTS if (path / name).exists()}
    return {**result, "flags": [*result["flags"], *credentials.flags(path)], "inputs": inputs}


def summary(found: Imported) -> list[tuple[str, str]]:
    """(suite, its decode speed by each statistic, side by side) of every suite."""
    told: list[tuple[str, str]] = []
    for suite, workload in found.told["suites"].items():
        speeds = found.of_suite(PER_SUITE[0], workload)
        if speeds:
            order = [s for s in pairing.of_suite(PER_SUITE[0]) if s in speeds]
            told.append((suite, " / ".join(notation.beside([speeds[s] for s in order]))))
    return told
