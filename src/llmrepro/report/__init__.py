"""One HTML file that shows a run: offline, without a script, rendered from the run folder alone."""

from pathlib import Path

from llmrepro import charts, comparison, findings, imported, study_findings
from llmrepro.markup import Html, join
from llmrepro.report import appendix, capacity, headline, page, receipts, sections, study, telemetry


def write(run_path: Path, *, public: bool = False) -> Path:
    """Write `<run>/report.html` and return its path; any state of a run has a page. Draws the charts anew.

    With `public` it is `report-public.html`, see privacy. For a study's run also every arm's page, which the
    study's links to. The same folder gives the same bytes.

    Raises RunError when a file of the run is missing or broken.
    """
    if (run_path / "study.json").exists():
        return _study(run_path, public)
    if imported.there(run_path):
        return _imported(run_path, public)
    found = findings.read(run_path)
    drawn = {figure.name: Html(figure.html()) for figure in charts.draw(run_path)}
    parts = [
        *sections.sections(found, drawn),
        *telemetry.sections(found, drawn),
        *capacity.sections(found),
        *appendix.sections(found),
    ]
    return page.write(
        run_path / "report.html",
        found.recipe.title,
        headline.head(found),
        parts,
        appendix.foot(found),
        public=public,
    )


def _study(path: Path, public: bool) -> Path:
    for folder in comparison.arm_folders(path).values():
        write(folder, public=public)
    found = study_findings.read(path)
    figures = join([Html(figure.html()) for figure in charts.draw_study(path)])
    parts = list(study.sections(found, figures))
    return page.write(
        path / "report.html", found.study.title, study.head(found), parts, study.foot(found), public=public
    )


def _imported(path: Path, public: bool) -> Path:
    found = imported.read(path)
    figures = join([Html(figure.html()) for figure in charts.draw(path)])
    parts = list(receipts.sections(found, figures))
    return page.write(
        path / "report.html", found.title, receipts.head(found), parts, receipts.foot(found), public=public
    )
