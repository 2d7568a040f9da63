"""Headless Chromium for the tests, and JupyterLab as a person uses it: open, Run All, Stop, look::

with jupyterlab(folder) as lab, lab.open("reproduce.ipynb") as page:
    page.run_all()
    page.wait_done(timeout_s=300)
    page.screenshot(folder / "done.png")
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

IDLE = re.compile(r"\| Idle$")
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    # Every cell stays in the page, so that a cell out of sight can be read too.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}


def chromium() -> str | None:
    """The path of the machine's Chromium; Playwright's own browser is never downloaded."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextlib.contextmanager
def browser_page(*, offline: bool = False, width: int = 1400, height: int = 900, **context_options):
    """A Playwright page in a Chromium of its own. `context_options` go to `new_context` (color_scheme, …).

    `offline=True` cuts the page's network: only file:// and what is already loaded can be shown.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chrome = playwright.chromium.launch(
            executable_path=chromium(),
            headless=True,
            args=[
                "--no-sandbox",  # as root, in a container, Chromium starts no other way
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ],
        )
        try:
            context = chrome.new_context(
                viewport={"width": width, "height": height}, locale="en-US", offline=offline, **context_options
            )
            yield context.new_page()
        finally:
            chrome.close()


@contextlib.contextmanager
def jupyterlab(folder: Path, *, environment: dict[str, str] | None = None) -> Iterator["Lab"]:
    """A JupyterLab of this Python on `folder`, with a home and settings of its own; ended afterwards.

    `environment` is laid over this process's environment (for the kernels too).
    """
    with tempfile.TemporaryDirectory(prefix="lab-", ignore_cleanup_errors=True) as home:
        config = Path(home)
        for name, value in SETTINGS.items():
            file = config / "settings" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(value))
        port, token, log = _free_port(), secrets.token_hex(16), config / "lab.log"
        with log.open("wb") as output:
            server = subprocess.Popen(
                [
                    *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"),
                    *(f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}"),
                    *(
                        f"--IdentityProvider.token={token}",
                        "--LabApp.news_url=",
                        "--LabApp.extension_manager=readonly",
                    ),
                    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
                ],
                env={
                    **os.environ,
                    "HOME": home,
                    "JUPYTER_CONFIG_DIR": f"{home}/config",
                    "JUPYTER_DATA_DIR": f"{home}/data",
                    "JUPYTER_RUNTIME_DIR": f"{home}/runtime",
                    "JUPYTERLAB_SETTINGS_DIR": f"{home}/settings",
                    "JUPYTERLAB_WORKSPACES_DIR": f"{home}/workspaces",
                    **(environment or {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            lab = Lab(Path(folder), f"http://127.0.0.1:{port}", token, server.pid)
            _wait_until_up(lab, server, log)
            yield lab
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab: the folder it shows, its address, its process."""

    folder: Path
    address: str
    token: str
    pid: int

    @contextlib.contextmanager
    def open(self, notebook: str, *, kernel_timeout_s: float = 120) -> Iterator["NotebookPage"]:
        """The notebook in a browser, its kernel started. `notebook` is its path below `folder`."""
        with browser_page() as page:
            page.goto(f"{self.address}/lab/tree/{notebook}?token={self.token}&reset")
            panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)").first
            panel.locator(".jp-Notebook").wait_for(timeout=90_000)
            # The status bar: the notebook's own idle mark shows before a kernel exists, and Run All would
            # then open a dialog.
            page.get_by_role("button", name=IDLE).wait_for(timeout=kernel_timeout_s * 1000)
            yield NotebookPage(self.folder / notebook, page, panel)


@dataclass(frozen=True)
class NotebookPage:
    """One open notebook. `page` and `panel` are Playwright's, for what is not covered here."""

    path: Path
    page: object
    panel: object

    def run_all(self) -> None:
        """Run > Run All Cells. Returns once the first cell is taken up."""
        before = self.prompts()
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name=re.compile(r"^Run All Cells")).click()
        self._wait(lambda: self.prompts() != before, 30, "no cell started")

    def prompts(self) -> list[str]:
        """What the brackets of each code cell hold: "" not run, "*" running or waiting, else a number."""
        shown = self.panel.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()
        return [text.strip().removesuffix(":").strip("[]").strip() for text in shown]

    def outputs(self, cell: int) -> str:
        """The text shown under the code cell with this number, from 0; a traceback included."""
        return self.panel.locator(".jp-CodeCell").nth(cell).locator(".jp-OutputArea").first.inner_text()

    def wait_for_output(self, cell: int, text: str, *, timeout_s: float) -> None:
        self._wait(lambda: text in self.outputs(cell), timeout_s, f"cell {cell} did not show {text!r}")

    def wait_done(self, *, timeout_s: float) -> None:
        """Until no cell runs or waits: all ran, or one failed or was stopped. Then saves the notebook."""
        self._wait(lambda: "*" not in self.prompts(), timeout_s, "cells are still running")
        self.save()

    def stop(self, *, timeout_s: float = 30) -> None:
        """The Stop button. Returns once no cell runs or waits; saves the notebook."""
        self.panel.get_by_role("button", name=re.compile("^Interrupt")).first.click()
        self.wait_done(timeout_s=timeout_s)

    def save(self) -> None:
        """File > Save, until the file on disk has the numbers that the page shows."""
        shown = [int(prompt) if prompt.isdigit() else None for prompt in self.prompts()]
        self.page.keyboard.press("Control+s")
        self._wait(lambda: [cell["execution_count"] for cell in self.saved_code_cells()] == shown, 30, "not saved")

    def saved_code_cells(self) -> list[dict]:
        """The code cells of the notebook file as it is on disk."""
        cells = json.loads(self.path.read_text(encoding="utf-8"))["cells"]
        return [cell for cell in cells if cell["cell_type"] == "code"]

    def screenshot(self, path: Path) -> None:
        self.page.screenshot(path=str(path))

    def _wait(self, until, timeout_s: float, otherwise: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not until():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{otherwise} after {timeout_s:g} s; prompts: {self.prompts()}")
            self.page.wait_for_timeout(100)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_up(lab: Lab, server: subprocess.Popen, log: Path) -> None:
    request = urllib.request.Request(f"{lab.address}/api/status", headers={"Authorization": f"token {lab.token}"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline_s = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError):
            direct.open(request, timeout=5).close()
            return
        if server.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"JupyterLab did not come up:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.2)
