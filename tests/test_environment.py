"""An engine's environment is built once, from its hashed lock, and never trusted half."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import uv
from repositories import commit, git, repository, url
from wheels import write_wheel

from llmrepro import checkouts, commands, environment
from llmrepro.environment import EnvironmentFailure
from llmrepro.install import Engine


def engine(**install):
    return Engine.model_validate(
        {"name": "llama-cpp", "version": "1", "install": {"kind": "wheel", "pins": {"toy": "1.0"}, **install}}
    )


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of one tiny wheel, and a lock that pins it."""
    folder = tmp_path / "wheels"
    lock = tmp_path / "engine.lock"
    lock.write_text(write_wheel(folder, "toy", {"toy.py": "answer = 42\n"}))
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_OFFLINE", "1")
    for name in ("UV_CACHE_DIR", "UV_NO_CACHE", "UV_LINK_MODE"):
        monkeypatch.delenv(name, raising=False)
    return lock


def prepare(tmp_path, lock, **install):
    return environment.prepare(engine(**install), lock, tmp_path / "install.log", tmp_path / "cache")


def test_it_is_isolated_frozen_and_reused(tmp_path, index):
    first = prepare(tmp_path, index)
    assert first.freeze == "toy==1.0\n"
    assert first.seconds > 0
    shown = subprocess.run(
        [first.python, "-c", "import toy, sys; print(toy.answer, sys.prefix)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert shown == ["42", str(first.path)]
    assert subprocess.run([first.python, "-c", "import llmrepro"], capture_output=True, check=False).returncode
    assert "uv" in (tmp_path / "install.log").read_text()
    again = prepare(tmp_path, index)
    assert (again.path, again.seconds) == (first.path, 0.0)


def test_a_kernel_that_forces_colours_changes_nothing(tmp_path, index, monkeypatch):
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert prepare(tmp_path, index).freeze == "toy==1.0\n"
    assert "\x1b" not in (tmp_path / "install.log").read_text()


def test_another_lock_is_another_environment(tmp_path, index):
    first = prepare(tmp_path, index)
    index.write_text(index.read_text() + "# changed\n")
    assert prepare(tmp_path, index).path != first.path


def test_a_changed_environment_is_built_anew(tmp_path, index):
    first = prepare(tmp_path, index)
    site = next(first.path.glob("lib/python*/site-packages"))
    (site / "toy-1.0.dist-info").rename(site / "toy-2.0.dist-info")
    (site / "toy-2.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 2.0\n")
    again = prepare(tmp_path, index)
    assert again.seconds > 0
    assert again.freeze == "toy==1.0\n"


@pytest.mark.parametrize(
    "change",
    [
        lambda site: (site / "toy.py").write_text("answer = 43\n"),
        lambda site: (site / "toy.py").unlink(),
        lambda site: (site / "sitecustomize.py").write_text("print('mine')\n"),
    ],
)
@pytest.mark.parametrize("whose", ["the kit's", "the user's"])
def test_a_file_that_was_changed_or_added_is_noticed_and_mended(tmp_path, index, change, whose, monkeypatch):
    if whose == "the user's":
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    first = prepare(tmp_path, index)
    change(next(first.path.glob("lib/python*/site-packages")))
    again = prepare(tmp_path, index)
    assert again.seconds > 0
    assert subprocess.run([again.python, "-c", "import toy; assert toy.answer == 42"], check=True).returncode == 0


def toy(place):
    return next(place.glob("lib/python*/site-packages/toy.py"))


def test_a_cache_of_uv_that_others_use_is_never_linked_to(tmp_path, index, monkeypatch):
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    assert toy(prepare(tmp_path, index).path).stat().st_nlink == 1
    assert not (tmp_path / "cache" / "uv").exists()


def test_the_kits_own_cache_is_linked_to_and_a_change_in_it_comes_into_no_other_environment(tmp_path, index):
    first = prepare(tmp_path, index)
    assert toy(first.path).stat().st_nlink > 1  # the room is taken once
    toy(first.path).write_text("answer = 43\n")  # the same size: only its time and hash tell
    index.write_text(index.read_text() + "# another environment\n")
    other = prepare(tmp_path, index)
    assert other.path != first.path
    assert toy(other.path).read_text() == "answer = 42\n"
    assert "fetched anew: toy (toy.py)" in (tmp_path / "install.log").read_text()
    assert prepare(tmp_path, index).seconds == 0.0


def test_every_module_is_compiled_before_any_server_starts(tmp_path, index):
    index.write_text(write_wheel(tmp_path / "wheels", "toy", {"toy.py": "def answer(): return 42\n"}))
    found = prepare(tmp_path, index)
    (compiled,) = toy(found.path).parent.glob("__pycache__/toy.*.pyc")
    before = compiled.stat()
    named = subprocess.run(
        [found.python, "-c", "import toy; print(toy.answer.__code__.co_filename)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert named.stdout.strip() == str(toy(found.path))  # where it lies now, not where it was built
    assert compiled.stat().st_mtime_ns == before.st_mtime_ns


def test_a_module_without_source_is_a_change(tmp_path, index):
    first = prepare(tmp_path, index)
    toy(first.path).with_name("sneaked.pyc").write_bytes(b"")
    assert prepare(tmp_path, index).seconds > 0


def uv_that_knows_toy_only_from(tmp_path, monkeypatch, url):
    """The real uv, which finds the wheels only when it is told to look at `url`."""
    stand_in = tmp_path / "uv-stand-in"
    stand_in.write_text(
        f'#!/bin/sh\ncase " $UV_INDEX " in *" {url} "*) unset UV_INDEX ;; *) unset UV_FIND_LINKS ;; esac\n'
        f'exec {uv.find_uv_bin()} "$@"\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr(uv, "find_uv_bin", lambda: str(stand_in))


def test_a_recipes_index_is_asked_when_this_machines_own_have_not_what_the_lock_says(tmp_path, index, monkeypatch):
    url = "https://example.org/whl/cpu"
    uv_that_knows_toy_only_from(tmp_path, monkeypatch, url)
    with pytest.raises(EnvironmentFailure, match="toy"):
        prepare(tmp_path, index)
    assert prepare(tmp_path, index, indexes=[url]).freeze == "toy==1.0\n"
    log = (tmp_path / "install.log").read_text()
    assert f"once more, with the recipe's indexes: {url}" in log
    assert log.count("pip sync") == 3  # one in vain, then both ways


def test_a_machine_that_is_told_to_use_no_index_asks_no_recipes_index(tmp_path, index, monkeypatch):
    url = "https://example.org/whl/cpu"
    uv_that_knows_toy_only_from(tmp_path, monkeypatch, url)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(EnvironmentFailure, match="toy"):
        prepare(tmp_path, index, indexes=[url])
    assert "once more" not in (tmp_path / "install.log").read_text()


def test_whatever_stands_in_its_place_gives_way(tmp_path, index):
    first = prepare(tmp_path, index)
    (first.path / ".complete").write_text("[]")
    assert prepare(tmp_path, index).seconds > 0
    first.path.rename(tmp_path / "moved")
    first.path.symlink_to(tmp_path / "moved")
    first.path.with_suffix(".part").write_text("")
    assert prepare(tmp_path, index).seconds > 0
    assert not first.path.is_symlink()


@pytest.mark.parametrize(
    "line",
    [
        *("--index-url https://example.org/simple", "-e .", "toy", "-r other.txt", "git+https://example.org/x"),
        "evil@file:///x/evil-1-py3-none-any.whl#== --hash=sha256:" + "0" * 64,
        "https://example.org/x.whl#== --hash=sha256:" + "0" * 64,
        "toy==1 --index-url https://example.org/simple",
        "toy==1",
        "--no-binary :all:",
    ],
)
def test_a_lock_holds_pins_and_hashes_only(tmp_path, index, line):
    index.write_text(f"{line}\n{index.read_text()}")
    with pytest.raises(EnvironmentFailure, match="only `name==version` with hashes is installed"):
        prepare(tmp_path, index)


def test_a_wrong_hash_installs_nothing_and_says_so(tmp_path, index):
    index.write_text(f"toy==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(EnvironmentFailure, match="installing failed: uv pip ended with") as failed:
        prepare(tmp_path, index)
    assert any("0" * 64 in line for line in failed.value.log_tail)
    assert not list((tmp_path / "cache" / "environments").glob("*/.complete"))


def test_a_package_that_is_not_to_be_had_is_named(tmp_path, index):
    index.write_text(f"nosuchtoy==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(EnvironmentFailure, match="nosuchtoy"):
        prepare(tmp_path, index)


def test_without_a_lock_nothing_is_installed(tmp_path):
    with pytest.raises(EnvironmentFailure, match="no engine is installed without a hashed lock"):
        prepare(tmp_path, tmp_path / "engine.lock")


def test_a_python_that_is_not_here_is_named(tmp_path, index):
    with pytest.raises(EnvironmentFailure, match=r"needs Python 3\.99 and none is installed here"):
        prepare(tmp_path, index, python="3.99")


def test_an_incomplete_folder_is_never_trusted(tmp_path, index):
    first = prepare(tmp_path, index)
    (first.path / ".complete").unlink()
    assert prepare(tmp_path, index).seconds > 0
    (first.path / ".complete").write_text('{"key": ')
    assert prepare(tmp_path, index).seconds > 0


def test_a_killed_installation_leaves_nothing_that_is_trusted(tmp_path, index):
    """Killed at many moments: afterwards the environment is whole or is built again, never half."""
    script = textwrap.dedent(f"""
        import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
        from pathlib import Path
        from llmrepro import environment
        from test_environment import engine
        environment.prepare(engine(), Path({str(index)!r}), Path({str(tmp_path / "log")!r}),
                            Path({str(tmp_path / "cache")!r}))
        print("whole", flush=True)
        """)
    interrupted = 0
    for delay in (0.35, 0.5, 0.6, 0.7, 0.9):
        child = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        time.sleep(delay)
        os.killpg(child.pid, signal.SIGKILL)
        whole = "whole" in child.communicate()[0]
        marked = list((tmp_path / "cache" / "environments").glob("*/.complete"))
        interrupted += not whole
        if whole:
            assert [json.loads(m.read_text())["freeze"] for m in marked] == ["toy==1.0\n"]
            break
    assert interrupted
    found = prepare(tmp_path, index)
    assert subprocess.run([found.python, "-c", "import toy"], check=True).returncode == 0
    assert not list(found.path.parent.glob("*.part"))


def test_two_that_need_one_environment_build_it_once(tmp_path, index):
    script = textwrap.dedent(f"""
        import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
        from pathlib import Path
        from llmrepro import environment
        from test_environment import engine
        found = environment.prepare(engine(), Path({str(index)!r}), Path({str(tmp_path)!r}) / sys.argv[1],
                                    Path({str(tmp_path / "cache")!r}))
        print("RESULT", found.path, found.seconds > 0)
        """)
    both = [
        subprocess.Popen([sys.executable, "-c", script, name], stdout=subprocess.PIPE, text=True) for name in "ab"
    ]
    told = [process.communicate()[0].splitlines()[-1].split()[1:] for process in both]
    assert told[0][0] == told[1][0]
    assert sorted(built for _, built in told) == ["False", "True"]


def test_a_build_that_cannot_be_made_destroys_nothing(tmp_path, index, monkeypatch):
    """An unwritable uv cache once made a good environment look changed, and it was removed."""
    first = prepare(tmp_path, index)
    monkeypatch.setenv("UV_CACHE_DIR", "/proc/nowhere")
    assert prepare(tmp_path, index).seconds == 0.0
    (first.path / ".complete").write_text("")
    with pytest.raises(EnvironmentFailure):
        prepare(tmp_path, index)
    assert first.python.exists()  # a new one comes first, then the old one goes


def test_a_cache_that_cannot_be_written_is_named(tmp_path, index):
    with pytest.raises(EnvironmentFailure, match="the cache folder cannot be written.*LLMREPRO_CACHE"):
        environment.prepare(engine(), index, tmp_path / "install.log", tmp_path / "engine.lock")


MAKEFILE = """\
libqwen38mk.so: $(LLAMA)/build/bin/libllama.so
\techo "$(ARCH) $(notdir $(NVCC))" > $@
"""
CMAKE = """\
#!/bin/sh
if [ "$1" = --build ]; then mkdir -p "$2/bin" && echo library > "$2/bin/libllama.so"
else test -f "$2/CMakeLists.txt"; fi
"""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """open-jet and llama.cpp as small as they get, with a compiler, a cmake of the lock's and real git and make.

    `prepared()` makes the environment; `engine` is the recipe's, with the addresses of these repositories.
    """

    class Sources:
        own, first = repository(tmp_path / "open-jet", **{"README": "x\n"})
        llama, needed = repository(tmp_path / "llama.cpp", **{"CMakeLists.txt": "x\n"})
        lock = tmp_path / "engine.lock"
        log = tmp_path / "install.log"

        def engine(self, **changes):
            named = {"open-jet": self.pinned, "llama.cpp": self.needed}
            https = [{"name": n, "repo": "https://example.org/x", "commit": c} for n, c in named.items()]
            install = {"kind": "git", "build": {"ARCH": "sm_80"}, "checkouts": https, **changes}
            made = Engine.model_validate({"name": "open-jet", "version": "1", "install": install})
            here = [c.model_copy(update={"repo": url(tmp_path / c.name)}) for c in made.install.checkouts]
            return made.model_copy(update={"install": made.install.model_copy(update={"checkouts": here})})

        def prepared(self, **changes):
            return environment.prepare(self.engine(**changes), self.lock, self.log, tmp_path / "cache")

    found = Sources()
    for folder in ("megakernel/server", "bin"):
        (found.own / folder).mkdir(parents=True)
    (found.own / "megakernel/Makefile").write_text(MAKEFILE)
    found.pinned = commit(found.own, **{"megakernel/server/mk_server.py": "print('hello')\n"})
    commit(found.own, **{"megakernel/Makefile": "all:\n\tfalse\n"})  # what came later is not built
    found.lock.write_text(write_wheel(tmp_path / "wheels", "cmake", {"cmake-1.0.data/scripts/cmake": CMAKE}))
    monkeypatch.setattr(checkouts, "PROTOCOL", "file")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    for name in ("UV_CACHE_DIR", "UV_NO_CACHE", "UV_LINK_MODE"):
        monkeypatch.delenv(name, raising=False)
    nvcc = tmp_path / "toolkit/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{nvcc.parent}:{os.environ['PATH']}")
    return found


def test_sources_are_built_at_their_commits_and_stay_where_the_engine_runs_from(sources):
    found = sources.prepared()
    own = found.path / "source/open-jet/megakernel"
    assert (own / "libqwen38mk.so").read_text() == "sm_80 nvcc\n"
    assert (own / "server/mk_server.py").read_text() == "print('hello')\n"
    assert f"open-jet @ git+{url(sources.own)}@{sources.pinned}\n" in found.freeze
    assert not list(found.path.rglob(".git"))  # to look at it with git would change it
    log = sources.log.read_text()
    words = (" venv", " pip sync", " fetch --quiet", "/cmake -S", " --build", " -C open-jet/")
    order = [log.index(word) for word in words]
    assert order == sorted(order)
    again = sources.prepared()
    assert (again.path, again.seconds) == (found.path, 0.0)


@pytest.mark.parametrize(
    "changed", ["source/open-jet/megakernel/libqwen38mk.so", "source/llama.cpp/CMakeLists.txt"]
)
def test_a_changed_source_or_built_file_is_built_anew(sources, changed):
    first = sources.prepared()
    (first.path / changed).write_text("something else\n")
    again = sources.prepared()
    assert (again.path, again.seconds > 0) == (first.path, True)
    assert (again.path / changed).read_text() != "something else\n"


def test_what_a_dry_run_shows_is_what_is_executed(sources):
    engine, cache = sources.engine(), sources.lock.parent / "cache"
    place = environment.place_of(engine, sources.lock, cache)
    steps = list(commands.installing(engine, sources.lock, place, sources.lock.parent))
    assert not cache.exists()
    sources.prepared()
    log = sources.log.read_text().replace(f"{place}.part", str(place))
    done = [line[2:] for line in log.splitlines() if line.startswith("$ ")]
    assert done == [" ".join(step.argv) for step in steps if step.argv]
    assert len(done) == 2 + 2 * 3 + 3


def test_another_commit_or_build_variable_is_another_environment(sources):
    first = sources.prepared()
    assert sources.prepared(build={"ARCH": "sm_86"}).path != first.path
    sources.pinned = commit(sources.own, **{"megakernel/Makefile": MAKEFILE, "README": "later\n"})
    assert sources.prepared().path != first.path


def test_a_commit_that_is_gone_leaves_no_environment_and_is_named(sources):
    sources.needed = "1" * 40
    with pytest.raises(EnvironmentFailure, match=f"llama.cpp cannot be had at {'1' * 40} .*not our ref") as failed:
        sources.prepared()
    assert "still has that commit" in failed.value.next_step
    assert any("not our ref" in line for line in failed.value.log_tail)
    assert not list(sources.lock.parent.glob("cache/environments/*/.complete"))


def test_only_https_is_fetched_from(sources, monkeypatch):
    monkeypatch.setattr(checkouts, "PROTOCOL", "https")
    with pytest.raises(EnvironmentFailure, match="open-jet cannot be had at .*transport 'file' not allowed"):
        sources.prepared()


def test_a_build_that_fails_is_told_with_its_last_words(sources):
    sources.pinned = git(sources.own, "rev-parse", "HEAD")
    with pytest.raises(EnvironmentFailure, match="installing failed: make -C ended with 2"):
        sources.prepared()


def test_two_checkouts_of_one_name_are_refused(sources):
    one = {"name": "open-jet", "repo": "https://example.org/x", "commit": "1" * 40}
    with pytest.raises(ValueError, match="two checkouts have the id 'open-jet'"):
        sources.engine(checkouts=[one, one])
