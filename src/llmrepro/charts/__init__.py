"""Figures of a run, drawn from its folder alone: each as SVG, PNG, the CSV that was drawn, and alt text."""

import base64
import csv
import importlib.util
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib as mpl
from matplotlib import font_manager

from llmrepro import findings, imported, notation, sizing, study_findings
from llmrepro.charts import (
    acceptance,
    averages,
    break_even,
    capacity,
    claims,
    ladder,
    prefix,
    quotations,
    ratios,
    restart,
    roofline,
    starts,
    startup,
    telemetry,
)
from llmrepro.charts.drawings import Drawing
from llmrepro.findings import Findings
from llmrepro.imported import Imported
from llmrepro.markup import escaped, showable
from llmrepro.study_findings import StudyFindings
from llmrepro.workload import CASES, Workload

PNG_DPI = 192  # twice what a screen shows
NAMES = (
    "claims-",
    "ratios",
    "published-",
    "decode-per-prompt",
    "ttft-by-length",
    "ttft-by-cache",
    "ladder",
    "cold-start",
    "startup",
    "break-even",
    "averages",
    "kv-cache",
    "roofline",
    "acceptance",
    "telemetry",
)
FORMATS = ("svg", "png", "csv", "txt")


@dataclass(frozen=True)
class Figure:
    """A drawn chart and its files. `alt` says in words what the data are; `caption` how to read them."""

    name: str
    title: str
    caption: str
    alt: str
    svg: Path
    png: Path
    csv: Path
    txt: Path

    def html(self) -> str:
        """A <figure> that holds everything itself: the SVG as a data: URI, alt text and caption."""
        data = base64.b64encode(self.svg.read_bytes()).decode()
        return (
            f'<figure id="figure-{escaped(self.name)}"><img src="data:image/svg+xml;base64,{data}" '
            f'alt="{escaped(self.alt)}"><figcaption><strong>{escaped(self.title)}.</strong> '
            f"{escaped(self.caption)}</figcaption></figure>"
        )


def draw(run_path: Path, out: Path | None = None) -> list[Figure]:
    """Draw every chart that the run has data for into `out`, by default `<run>/figures/`.

    The same folder gives the same SVG and CSV bytes. A chart without data is not drawn, and its files from an
    earlier drawing are removed. Raises RunError when a file of the run is missing or broken.
    """
    if imported.there(run_path):
        receipts = imported.read(run_path)
        return _draw(lambda: _imported_drawings(receipts), run_path / "figures" if out is None else out)
    found = findings.read(run_path)
    return _draw(lambda: _drawings(found), run_path / "figures" if out is None else out)


def draw_study(run_path: Path, out: Path | None = None) -> list[Figure]:
    """The same for a study's run: its arms side by side."""
    found = study_findings.read(run_path)
    return _draw(lambda: _study_drawings(found), run_path / "figures" if out is None else out)


def _draw(drawings: Callable[[], list[Drawing]], folder: Path) -> list[Figure]:
    folder.mkdir(parents=True, exist_ok=True)
    with _style():
        figures = [_write(drawing, folder) for drawing in drawings()]
    for old in (f for kind in FORMATS for f in folder.glob(f"*.{kind}")):
        if old.stem.startswith(NAMES) and old.stem not in {f.name for f in figures}:
            old.unlink()
    return figures


def _drawings(found: Findings) -> list[Drawing]:
    """Every chart that there are data for, in the order in which they are shown."""
    drawn: list[Drawing | None] = [ratios.ratios(found), *claims.published(found), *_of_requests(found)]
    restarts = [w for w in found.recipe.workloads if w.kind == "restart"]
    drawn += [restart.cold_start(found, w, _named("cold-start", w, restarts)) for w in restarts]
    rooms = sizing.rooms(found)
    for place, room in enumerate(rooms, 1):
        drawn.append(capacity.kv_cache(found, room, "kv-cache" if len(rooms) == 1 else f"kv-cache-{place}"))
    drawn += [roofline.decode_roofline(found), acceptance.acceptance(found), startup.startup(found)]
    return [d for d in (*drawn, telemetry.telemetry(found)) if d is not None]


def _imported_drawings(found: Imported) -> list[Drawing]:
    drawn = averages.averages(found, "averages")
    return [drawn] if drawn is not None else []


def _study_drawings(found: StudyFindings) -> list[Drawing]:
    """Arms side by side, in the order in which they are shown; what only one of them was asked is not drawn."""
    if found.published_only:
        return list(quotations.side_by_side(found))
    one = study_findings.merged(found)
    drawn: list[Drawing | None] = list(_of_requests(one))
    drawn.append(starts.starts(one, "startup"))
    pairs = found.result["break_even"]
    for place, told in enumerate(pairs, 1):
        name = "break-even" if len(pairs) == 1 else f"break-even-{place}"
        drawn.append(break_even.break_even(one, told, name))
    return [d for d in drawn if d is not None]


def _of_requests(found: Findings) -> Iterator[Drawing | None]:
    """The charts whose points are requests, of each workload; none where nothing was asked."""
    if not found.asked:
        return
    asked = {r.workload for r in found.asked}  # several of them are a matter of the profile
    from llmrepro.charts import decode, ttft  # pandas and seaborn: seconds that a page of a publication saves

    for draw_one, name, kinds in (
        (decode.decode_per_prompt, "decode-per-prompt", ("chat",)),
        (ttft.ttft_by_length, "ttft-by-length", ("prefill",)),
        (prefix.ttft_by_cache, "ttft-by-cache", tuple(CASES)),
        (ladder.climbed, "ladder", ("ladder",)),
    ):
        mine = [w for w in found.recipe.workloads if w.kind in kinds and (w.kind != "chat" or w.id in asked)]
        yield from (draw_one(found, w, _named(name, w, mine)) for w in mine)


def _named(base: str, workload: Workload, of_its_kind: list[Workload]) -> str:
    return base if len(of_its_kind) == 1 else f"{base}-{workload.id}"


# What this process has drawn: data and words of each SVG, and its bytes. A report shows what was drawn before it.
_drawn: dict[Path, tuple[tuple, bytes]] = {}


def _write(drawing: Drawing, folder: Path) -> Figure:
    files = {kind: folder / f"{drawing.name}.{kind}" for kind in FORMATS}
    said = (_csv(drawing.data), drawing.title, drawing.caption, drawing.alt)
    before, picture = _drawn.get(files["svg"].resolve(), (None, b""))
    if said != before or not all(f.exists() for f in files.values()) or files["svg"].read_bytes() != picture:
        _drawn[files["svg"].resolve()] = (said, _write_pictures(drawing, files))
    _replace(files["csv"], _csv(drawing.data))
    _replace(files["txt"], f"{showable(drawing.alt)}\n".encode())
    return Figure(drawing.name, drawing.title, drawing.caption, drawing.alt, **files)


def _write_pictures(drawing: Drawing, files: dict[str, Path]) -> bytes:
    """The SVG and the PNG; returns the SVG's bytes."""
    vector = _saved(drawing, format="svg", metadata={"Date": None})
    drawing.figure.set_layout_engine("none")  # it is laid out: the other picture is of the same places
    if not (files["png"].exists() and files["svg"].exists() and files["svg"].read_bytes() == vector):
        _replace(files["png"], _saved(drawing, format="png", dpi=PNG_DPI))
    _replace(files["svg"], vector)
    return vector


def _saved(drawing: Drawing, **options) -> bytes:
    buffer = io.BytesIO()
    drawing.figure.savefig(buffer, **options)
    return buffer.getvalue()


def _csv(rows: list[dict]) -> bytes:
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows({name: notation.cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue().encode()


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)


@contextmanager
def _style() -> Iterator[None]:
    """The kit's look while it draws; the notebook's own settings are as before afterwards."""
    settings = {
        "font.family": ["DejaVu Sans", _japanese_font()],
        "font.size": 10,
        "text.color": ".15",
        "axes.labelcolor": ".15",
        "xtick.color": ".15",
        "ytick.color": ".15",
        "axes.axisbelow": True,
        "axes.grid": True,
        "xtick.bottom": False,
        "ytick.left": False,
        "lines.solid_capstyle": "round",
        "patch.edgecolor": "w",
        "patch.force_edgecolor": True,
        "axes.titlesize": 12,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.edgecolor": "#8a8a8a",
        "grid.color": "#e3e3e3",
        "figure.dpi": 96,
        "svg.hashsalt": "llmrepro",
        "svg.fonttype": "path",
        "text.parse_math": False,
    }
    with mpl.rc_context():
        mpl.rcdefaults()  # whatever a matplotlibrc says, one in a stranger's folder too
        mpl.rcParams.update(settings)
        yield


@cache
def _japanese_font() -> str:
    """IPAexGothic, for what DejaVu lacks. Its package is not imported: that would set the global font."""
    (package,) = importlib.util.find_spec("matplotlib_fontja").submodule_search_locations
    path = f"{package}/fonts/ipaexg.ttf"
    font_manager.fontManager.addfont(path)
    return font_manager.FontProperties(fname=path).get_name()
