"""The notebook of each recipe: the template with two of its cells filled in, the title and the parameters.

`make notebooks` writes them, `run` executes them. The title cell is Markdown whose recipe text is written with
character references, so that no renderer makes Markdown, HTML, a link or mathematics of it.
"""

import llmrepro.lean  # noqa: F401 - before anything that imports nbformat

# isort: split
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from llmrepro import catalog, jobs
from llmrepro.markup import showable
from llmrepro.model import Weights, WeightsFile
from llmrepro.notation import plural
from llmrepro.parameters import Parameters
from llmrepro.recipe import Recipe, Server
from llmrepro.workload import Workload

HEAD = 12  # digits of a hash that are shown
# What Markdown, HTML, a table or mathematics is made of, and what makes a link of a bare address.
MARKUP = re.compile(r'["#$&*<>@[\\\]_`|~]|:(?=//)|(?<=www)\.', re.IGNORECASE)
MATHEMATICS = re.compile(r"&#(36|92);")  # $ and \: MathJax looks for them when the page is made already
RECIPE_LINE = re.compile(r'^(recipe: str = )"[^"\n]*"', re.MULTILINE)


def template() -> Path:
    return catalog.home().parent / "notebooks" / "reproduce.ipynb"


def path_of(recipe_id: str) -> Path:
    """Where a recipe's notebook lies, whether it does or not."""
    return template().parent / f"{recipe_id}.ipynb"


def text(recipe: Recipe) -> str:
    """A recipe's notebook as its file holds it; the same recipe and template give the same bytes.

    Raises ValueError when the template cannot be read or lacks one of the two cells.
    """
    notebook = nbformat.read(template(), as_version=4)
    title, parameters = (_cell(notebook, name) for name in ("title", "parameters"))
    _, _, said = title.source.partition("\n")  # below the template's own heading
    title.source = _card(recipe, said.strip())
    parameters.source, found = RECIPE_LINE.subn(rf'\g<1>"{recipe.id}"', parameters.source)
    if found != 1:
        raise ValueError(f'{template()}: the parameters cell has no line `recipe: str = "…"`; write it again')
    for cell in notebook.cells:
        if cell.cell_type == "code":  # the template may have been run in place
            cell.outputs, cell.execution_count = [], None
    return nbformat.writes(notebook) + "\n"


def write() -> list[tuple[str, Path]]:
    """Make the notebook of every recipe of this repository. Returns what became of each: "new", "changed",
    "unchanged", or "no recipe" for one that no recipe has any more, which is left where it is.

    Raises RecipeError or another ValueError, before anything is written.
    """
    made = {path_of(name): text(catalog.load(name)) for name in catalog.ids()}
    done = []
    for path, new in made.items():
        old = path.read_text(encoding="utf-8") if path.exists() else None
        if new != old:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(new, encoding="utf-8")
        done.append(("new" if old is None else "unchanged" if new == old else "changed", path))
    return done + [("no recipe", path) for path in there() if path not in made]


def there() -> list[Path]:
    """The notebooks that lie where recipes have theirs."""
    return sorted(p for p in template().parent.glob("*/*.ipynb") if not p.parent.name.startswith("."))


def to_execute(name: str) -> tuple[Path, str | None]:
    """The notebook that runs the recipe of an id or path, and a sentence when it is not the recipe's own.

    A recipe from elsewhere has none of its own and is run by the template. So is one whose notebook is missing
    or says something else than recipe and template now make of it: who edits a recipe is not held up. What
    opening and running a notebook leaves in it, outputs and metadata, makes no difference.
    """
    folder = catalog.path_of(name).parent
    if not folder.is_relative_to(catalog.home()):
        return template(), None
    own = path_of(str(folder.relative_to(catalog.home())))
    where = own.relative_to(template().parents[1])
    instead = f"running {template().name} instead; `make notebooks` writes it again"
    if not own.exists():
        return template(), f"{where} is missing: {instead}"
    try:
        same = _sources(own.read_text(encoding="utf-8")) == _sources(text(catalog.load(name)))
    except Exception:  # whatever is wrong with either file, the notebook is not the recipe's
        same = False
    return (own, None) if same else (template(), f"{where} is not what the recipe makes now: {instead}")


def _sources(notebook: str) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in nbformat.reads(notebook, as_version=4).cells]


def _cell(notebook: NotebookNode, name: str) -> NotebookNode:
    found = [cell for cell in notebook.cells if cell.get("id") == name]
    if len(found) != 1:
        raise ValueError(f"{template()}: {len(found)} cells have the id {name!r}, and one must; restore it")
    return found[0]


def _card(recipe: Recipe, said: str) -> str:
    """The title cell: what is asked and who published it, the template's own words, and a table of the pins."""
    source = recipe.source
    by = "no publication is named" if source is None else _prose(source.publication)
    if source is not None and source.url is not None:  # https, or the recipe would have been refused
        by = f'<a href="{_references(source.url)}">{by}</a>'
    if source is not None and source.date is not None:
        by += f", {source.date}"
    rows = [f"| {name} | {value} |" for name, value in _pins(recipe)]
    return "\n".join(
        [
            f"# {_prose(recipe.title)}",
            "",
            f"**Question:** {_prose(recipe.question)}  ",
            f"**Published:** {by}",
            "",
            said,
            "",
            f"| recipe | {_code(recipe.id)} |",
            "|:--|:--|",
            *rows,
        ]
    )


def _pins(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Rows of the table: each a name and its value, as Markdown."""
    engine, install, needs = recipe.engine, recipe.engine.install, recipe.needs
    pins = ", ".join(_code(f"{name} {version}") for name, version in install.pins.items())
    python = f", on Python {_prose(install.python)}" if install.python else ""
    indexes = f", from PyPI and {', '.join(map(_code, install.indexes))}" if install.indexes else ""
    yield "engine", f"{_prose(engine.name)} {_code(engine.version)}"
    yield "install", f"{install.kind} {pins}{indexes}{python}"
    for checkout in install.checkouts:
        yield "checkout", f"{_code(checkout.repo)} at {_code(checkout.commit)}"
    if install.container is not None:
        yield "image", _code(install.container.image)
    for name, choice in engine.unstated.items():
        yield f"not stated: {_prose(name)}", _prose(choice)
    if engine.fixes:
        yield "fixes", ", ".join(_code(fix.name) for fix in engine.fixes)
    for name, weights in (
        ("weights", recipe.model),
        ("draft", recipe.model.draft),
        ("overlay", recipe.model.overlay),
    ):
        if weights is not None:
            yield name, _weights(weights)
    if recipe.model.convert is not None:
        yield "converted", f"to {recipe.model.convert.format}, {recipe.model.convert.dtype}"
    if recipe.model.prepare is not None:
        prepared = recipe.model.prepare
        scripts = ", ".join(map(_code, prepared.scripts))
        yield "prepared", f"with {scripts} of {_code(prepared.repo)} at {_code(prepared.commit)}"
    for server in recipe.servers:
        yield f"server {_code(server.id)}", _server(server)
    for workload in recipe.workloads:
        yield f"workload {_code(workload.id)}", _workload(recipe, workload)
    claims = Counter(claim.evidence for claim in (*recipe.claims, *recipe.comparisons))
    kinds = ", ".join(f"{count} {evidence}" for evidence, count in claims.items())
    yield "claims", f"{claims.total()}" + (f" ({kinds})" if kinds else "")
    yield "expected", f"about {needs.minutes:g} minutes and {needs.disk_gib:g} GiB of disk"


def _weights(weights: Weights) -> str:
    at = _code(weights.revision) if weights.revision else "at a revision that was not published"
    files = "; ".join(map(_file, weights.files))
    return f"{_code(weights.repo)} {at} ({weights.source}), {weights.format}: {files}"


def _file(file: WeightsFile) -> str:
    size = f", {file.bytes / 1e6:,.0f} MB" if file.bytes else ""
    return f"{_code(file.path)}{size}" + (f", sha256 {_code(file.sha256[:HEAD] + '…')}" if file.sha256 else "")


def _server(server: Server) -> str:
    words = [*(f"{name}={value}" for name, value in server.env.items()), *server.args]
    boots = f", {server.boots} boots" if server.boots > 1 else ""
    return (_code(" ".join(words)) if words else "no arguments") + boots


def _workload(recipe: Recipe, workload: Workload) -> str:
    """Its title, and the measured requests of a whole run, warm-ups not counted."""
    title = f"{_prose(workload.title)}: " if workload.title else ""
    profile, *more = workload.profiles or ["quick"]
    asked = [job for job in jobs.plan(recipe, Parameters(profile=profile)) if job.workload == workload.id]
    requests = plural(jobs.requests(recipe, asked), "request")
    return f"{title}{requests}" + ("" if more else f", with profile {profile} only")


def _prose(value: object) -> str:
    """Text that every renderer shows as it stands, on one line."""
    return MATHEMATICS.sub(r"<code>\g<0></code>", _references(value))  # MathJax leaves code alone


def _code(value: object) -> str:
    return f"<code>{_references(value)}</code>"


def _references(value: object) -> str:
    """Text on one line in which every character that could be markup is a character reference."""
    return MARKUP.sub(lambda found: f"&#{ord(found[0])};", " ".join(showable(value).split()))
