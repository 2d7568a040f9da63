"""A page as HTML: sections in the order in which they are shown, by nbconvert and the template of this kit."""

import llmrepro.lean  # noqa: F401 - before anything that imports nbformat

# isort: split
import os
from importlib import resources
from pathlib import Path

import nbformat
from nbconvert.exporters import HTMLExporter

from llmrepro import privacy
from llmrepro.markup import Html, showable
from llmrepro.report.sections import Section

LANGUAGE = "en"


def write(target: Path, title: str, head: Html, parts: list[Section], foot: Html, *, public: bool = False) -> Path:
    """Write a page whole; `title` is what it is about. Returns its path. A `public` one lies beside `target`, and
    tells nothing of this machine or its user."""
    page = render(notebook(f"{showable(title)} · llmrepro", head, parts, foot))
    if public:
        page = privacy.public(page, target.parent)
        target = target.with_name(privacy.SHARED)
    part = target.with_name(f".{target.name}.part")
    part.write_text(page, encoding="utf-8")
    os.replace(part, target)
    return target


def notebook(title: str, head: Html, parts: list[Section], foot: Html) -> nbformat.NotebookNode:
    """The page as a notebook: a Markdown cell opens each section, the next cell's output is its content."""
    new = nbformat.v4
    cells = [_shown(head, "head")]
    for part in parts:
        text = new.new_markdown_cell(
            part.text, id=f"{part.anchor}-text", metadata={"anchor": part.anchor, "title": part.title}
        )
        cells += [text, _shown(part.body, part.anchor)]
    return new.new_notebook(cells=[*cells, _shown(foot, "foot")], metadata={"title": title})


def _shown(body: Html, name: str) -> nbformat.NotebookNode:
    output = nbformat.v4.new_output("display_data", data={"text/html": str(body)})
    return nbformat.v4.new_code_cell("", id=name, outputs=[output])


def render(page: nbformat.NotebookNode) -> str:
    """The notebook as HTML, by nbconvert and the template of this kit."""
    with resources.as_file(resources.files("llmrepro.report") / "templates") as folder:
        exporter = HTMLExporter(
            template_name="report",
            extra_template_basedirs=[str(folder)],
            language_code=LANGUAGE,
            exclude_input=True,
            exclude_anchor_links=True,
        )
        return exporter.from_notebook_node(page)[0]
