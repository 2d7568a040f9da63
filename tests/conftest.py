import os

import pytest
from browser import chromium

from llmrepro import catalog, environment, preparation


@pytest.fixture(scope="session", autouse=True)
def own_locks(tmp_path_factory):
    """What the tests run waits for nothing that is measured on this machine, and nothing waits for them."""
    os.environ["LLMREPRO_LOCKS"] = str(tmp_path_factory.mktemp("locks"))


@pytest.fixture(autouse=True)
def which_pythons():
    """A test may say that another Python is here than before."""
    environment.look_again()


def pytest_runtest_setup(item):
    """Without Chromium a browser test is skipped and says so; in CI that would hide it, so there it fails."""
    if item.get_closest_marker("browser") and not chromium():
        reason = "no Chromium on the path: install Debian's package chromium to run this test"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """The default recipe's environment and weights."""
    recipe = catalog.load(catalog.DEFAULT)
    log = tmp_path_factory.mktemp("install") / "install.log"
    env = environment.prepare(recipe.engine, catalog.home() / catalog.DEFAULT / "engine.lock", log)
    return env, preparation.ready(recipe.model, env, log).path
