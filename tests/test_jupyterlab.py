"""The notebook as a person runs it: JupyterLab in a real browser."""

import nbformat
import pytest
from browser import jupyterlab

pytestmark = [pytest.mark.browser, pytest.mark.engine]


def notebook(path, *cells: str) -> None:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells], metadata=kernel), path
    )


def test_run_all_runs_every_cell_and_the_output_is_saved(tmp_path):
    notebook(tmp_path / "sum.ipynb", "a = 40", "print('sum', a + 2)")
    with jupyterlab(tmp_path) as lab, lab.open("sum.ipynb") as page:
        page.run_all()
        page.wait_done(timeout_s=60)
        assert page.outputs(1).strip() == "sum 42"
        page.screenshot(tmp_path / "sum.png")
    first, last = page.saved_code_cells()
    assert (first["execution_count"], last["execution_count"]) == (1, 2)
    assert last["outputs"][0]["text"] == ["sum 42\n"]
    assert (tmp_path / "sum.png").stat().st_size > 10_000


def test_stop_interrupts_the_running_cell_and_the_rest_is_not_run(tmp_path):
    notebook(
        tmp_path / "long.ipynb",
        "import time\nprint('started')\ntry:\n    time.sleep(600)\nfinally:\n    print('tidied up')",
        "print('never')",
    )
    with jupyterlab(tmp_path) as lab, lab.open("long.ipynb") as page:
        page.run_all()
        page.wait_for_output(0, "started", timeout_s=60)
        page.stop()
        assert "tidied up" in page.outputs(0)
        assert "KeyboardInterrupt" in page.outputs(0)
    first, last = page.saved_code_cells()
    assert first["outputs"][-1]["ename"] == "KeyboardInterrupt"
    assert last["execution_count"] is None and last["outputs"] == []
