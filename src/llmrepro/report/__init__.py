"""One HTML file that shows a run: offline, without a script, rendered from the run folder alone."""

import os
from importlib import resources
from pathlib import Path

import nbformat
from nbconvert.exporters import HTMLExporter

from llmrepro import charts, findings
from llmrepro.markup import Html, join, showable
from llmrepro.report import appendix, headline, sections
from llmrepro.report.sections import Section

LANGUAGE = "en"


def write(run_path: Path) -> Path:
    """Write `<run>/report.html` and return its path; any state of a run has a page. Draws the charts anew.

    The same folder gives the same bytes. Raises RunError when a file of the run is missing or broken.
    """
    found = findings.read(run_path)
    figures = join([Html(figure.html()) for figure in charts.draw(run_path)])
    page = render(
        notebook(
            f"{showable(found.recipe.title)} · llmrepro",
            headline.head(found),
            [*sections.sections(found, figures), *appendix.sections(found)],
            appendix.foot(found),
        )
    )
    target = run_path / "report.html"
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
    with resources.as_file(resources.files(__name__) / "templates") as folder:
        exporter = HTMLExporter(
            template_name="report",
            extra_template_basedirs=[str(folder)],
            language_code=LANGUAGE,
            exclude_input=True,
            exclude_anchor_links=True,
        )
        return exporter.from_notebook_node(page)[0]
