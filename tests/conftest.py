import os

import pytest
from browser import chromium


def pytest_runtest_setup(item):
    """Without Chromium a browser test is skipped and says so; in CI that would hide it, so there it fails."""
    if item.get_closest_marker("browser") and not chromium():
        reason = "no Chromium on the path: install Debian's package chromium to run this test"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
