"""What an executed notebook says of its cells, made true after an end that papermill did not see."""

import llmrepro.lean  # noqa: F401 - before anything that imports nbformat

# isort: split
import contextlib
import os
from pathlib import Path

import nbformat
from nbformat import NotebookNode


def repair(output: Path, why: str) -> None:
    """Make an executed notebook say what really ran: `completed` only where the kernel answered.

    A cell that had begun and has no answer is `failed`, with `why` as its output when it shows no error; a
    cell that had not begun is `pending`. A file that was being written, and is half of a notebook, goes aside.
    """
    if not output.is_file():
        return
    try:
        notebook = nbformat.read(output, as_version=4)
    except ValueError:  # nbformat's own are of that kind
        os.replace(output, output.with_name(f"{output.name}.torn"))
        return
    stopped = False
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source.strip() and not ended(cell):
            stopped = True
        state = cell.metadata.get("papermill")
        if not stopped or not state:
            continue
        if cell.cell_type == "code" and began(cell):
            state.update(status="failed", exception=True)
            if not any(shown.output_type == "error" for shown in cell.outputs):
                shown = nbformat.v4.new_output("error", ename="Stopped", evalue=why, traceback=[why])
                cell.outputs.append(shown)
        else:
            state.update(status="pending", exception=None, start_time=None, end_time=None, duration=None)
    notebook.metadata.setdefault("papermill", {})["exception"] = True
    part = output.with_name(f".{output.name}.part")
    with contextlib.suppress(OSError):  # a full disk: it claims no more than what was saved until then
        nbformat.write(notebook, part)
        os.replace(part, output)


def began(cell: NotebookNode) -> bool:
    return "iopub.execute_input" in cell.metadata.get("execution", {})


def ended(cell: NotebookNode) -> bool:
    return "shell.execute_reply" in cell.metadata.get("execution", {})
