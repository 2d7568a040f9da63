"""patch-package: pinned patches go into one package of the environment, proved, and nowhere else."""

import difflib
import shutil
import subprocess
from hashlib import sha256

import pytest
from repositories import commit, repository, url
from wheels import write_wheel

from llmrepro import checkouts, environment, fixes
from llmrepro.environment import EnvironmentFailure
from llmrepro.fixes import FixFailure, patch_package
from llmrepro.install import Engine, Fix

KERNEL = "def speed():\n    # greet -- x\n    return 'slow'\n\n\ndef other():\n    return 1\n"
FAST = KERNEL.replace("slow", "fast")


def diff(path: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(True),
        after.splitlines(True),
        f"a/{path}" if before else "/dev/null",
        f"b/{path}" if after else "/dev/null",
    )
    return "".join(lines)


def fix(*patches: str) -> Fix:
    named = [{"file": f"{i}.patch", "sha256": sha256(text.encode()).hexdigest()} for i, text in enumerate(patches)]
    return Fix.model_validate({"name": "patch-package", "package": "toy", "patches": named})


@pytest.fixture
def place(tmp_path):
    package = tmp_path / "environment/lib/python3.11/site-packages/toy"
    (package / "sub").mkdir(parents=True)
    (package / "sub/kernel.py").write_text(KERNEL)
    (tmp_path / "environment/lib/python3.11/site-packages/neighbour.py").write_text("x = 1\n")
    return tmp_path / "environment"


def brought(place, *patches: str) -> Fix:
    """A fix whose patches lie in the environment, as `fixes.repair` has put them there."""
    shutil.rmtree(place / "patches", ignore_errors=True)
    (place / "patches/toy").mkdir(parents=True)
    for number, text in enumerate(patches):
        (place / f"patches/toy/{number:03}-{number}.patch").write_text(text)
    return fix(*patches)


def kernel(place):
    return place / "lib/python3.11/site-packages/toy/sub/kernel.py"


def test_a_patch_is_needed_then_applied_then_contained(place):
    made = brought(place, diff("sub/kernel.py", KERNEL, FAST))
    assert patch_package.detect(place, made).needed
    assert kernel(place).read_text() == KERNEL  # looking changes nothing
    told = patch_package.apply(place, made)
    assert kernel(place).read_text() == FAST
    assert told["files"] == {
        "sub/kernel.py": {
            "before": sha256(KERNEL.encode()).hexdigest(),
            "after": sha256(FAST.encode()).hexdigest(),
        }
    }
    assert patch_package.verify(place, made)
    again = patch_package.detect(place, made)
    assert not again.needed
    assert "contains every change already" in again.why
    assert [p.name for p in kernel(place).parent.iterdir()] == ["kernel.py"]  # no .orig, no .rej


def test_old_bytecode_of_a_changed_file_goes(place):
    cache = kernel(place).parent / "__pycache__"
    cache.mkdir()
    (cache / "kernel.cpython-311.pyc").write_bytes(b"old")
    (cache / "kernel_other.cpython-311.pyc").write_bytes(b"another module's")
    patch_package.apply(place, brought(place, diff("sub/kernel.py", KERNEL, FAST)))
    assert [p.name for p in cache.iterdir()] == ["kernel_other.cpython-311.pyc"]


def test_a_file_can_be_added_and_taken_away(place):
    made = brought(place, diff("new.py", "", "x = 1\n"), diff("sub/kernel.py", KERNEL, ""))
    told = patch_package.apply(place, made)
    assert (kernel(place).parents[1] / "new.py").read_text() == "x = 1\n"
    assert not kernel(place).exists()
    assert told["files"]["new.py"]["before"] is None
    assert told["files"]["sub/kernel.py"]["after"] is None
    assert patch_package.verify(place, made)


def test_two_patches_of_one_place_are_applied_in_order_and_proved(place):
    faster = FAST.replace("fast", "faster")
    made = brought(place, diff("sub/kernel.py", KERNEL, FAST), diff("sub/kernel.py", FAST, faster))
    patch_package.apply(place, made)
    assert kernel(place).read_text() == faster
    assert patch_package.verify(place, made)


def test_a_removed_line_that_looks_like_a_header_is_none(place):
    made = brought(place, diff("sub/kernel.py", KERNEL.replace("# greet", "--"), KERNEL))
    kernel(place).write_text(KERNEL.replace("# greet", "--"))
    assert list(patch_package.apply(place, made)["files"]) == ["sub/kernel.py"]
    sql = "x\n-- a/../../neighbour.py\n++ b/../../neighbour.py\n"
    made = brought(place, diff("q.sql", sql, "x\n"))
    (kernel(place).parents[1] / "q.sql").write_text(sql)
    assert list(patch_package.apply(place, made)["files"]) == ["q.sql"]


def test_a_patch_for_another_version_is_refused_and_changes_nothing(place):
    made = brought(place, diff("sub/kernel.py", KERNEL.replace("slow", "medium"), FAST))
    with pytest.raises(FixFailure, match=r"(?s)0\.patch does not apply to toy: .*FAILED") as refused:
        patch_package.apply(place, made)
    assert "pin the version of the package" in refused.value.next_step
    assert kernel(place).read_text() == KERNEL


def test_what_was_not_applied_is_not_verified(place):
    with pytest.raises(FixFailure, match="does not hold what its patches say"):
        patch_package.verify(place, brought(place, diff("sub/kernel.py", KERNEL, FAST)))
    with pytest.raises(FixFailure, match=r"new\.py is not there"):
        patch_package.verify(place, brought(place, diff("new.py", "", "x = 1\n")))


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("--- a/../neighbour.py\n+++ b/../neighbour.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n", "outside toy"),
        ("--- a//etc/passwd\n+++ b//etc/passwd\n@@ -1 +1 @@\n-x\n+y\n", "outside toy"),
        ("--- /etc/passwd\n+++ /etc/passwd\n@@ -1 +1 @@\n-x\n+y\n", "names /etc/passwd"),
        ("--- a/link/kernel.py\n+++ b/link/kernel.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n", "outside toy"),
        ("--- a/sub/kernel.py\n+++ b/../neighbour.py\n@@ -1 +1 @@\n-x\n+y\n", "changes a/sub/kernel.py into"),
        ("diff --git a/x b/y\nrename from x\nrename to y\n", "holds 'rename from x'"),
        ("diff --git a/x b/x\nnew file mode 120000\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+/etc\n", "120000"),
        ("Index: ../neighbour.py\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-x\n+y\n", "holds 'Index: "),
        ("1c\n!touch /tmp/x\n.\n", "changes no file"),
    ],
)
def test_a_patch_that_would_reach_elsewhere_is_refused(place, patch, said):
    (kernel(place).parents[1] / "link").symlink_to("..")
    for step in (patch_package.detect, patch_package.apply, patch_package.verify):
        with pytest.raises(FixFailure, match=said):
            step(place, brought(place, patch))
    assert (place / "lib/python3.11/site-packages/neighbour.py").read_text() == "x = 1\n"


def test_a_package_that_is_not_there_is_named(place):
    made = brought(place, diff("x.py", "", "x\n")).model_copy(update={"package": "toys"})
    with pytest.raises(FixFailure, match="there is no package toys in this environment"):
        patch_package.detect(place, made)


def test_without_the_command_patch_its_package_is_named(place, monkeypatch):
    monkeypatch.setenv("PATH", str(place))
    with pytest.raises(FixFailure, match="the command patch is missing") as refused:
        patch_package.detect(place, brought(place, diff("sub/kernel.py", KERNEL, FAST)))
    assert "apt-get install patch" in refused.value.next_step


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    for name in ("UV_CACHE_DIR", "UV_NO_CACHE", "UV_LINK_MODE"):
        monkeypatch.delenv(name, raising=False)
    lock = tmp_path / "engine.lock"
    lock.write_text(write_wheel(tmp_path / "wheels", "toy", {"toy/__init__.py": "", "toy/kernel.py": KERNEL}))
    return lock


def prepare(lock, *patches: str) -> environment.Environment:
    for i, text in enumerate(patches):
        (lock.parent / f"{i}.patch").write_text(text)
    engine = Engine.model_validate(
        {
            "name": "llama-cpp",
            "version": "1",
            "install": {"kind": "wheel", "pins": {"toy": "1.0"}},
            "fixes": [fix(*patches).model_dump()] if patches else [],
        }
    )
    return environment.prepare(engine, lock, lock.parent / "install.log", lock.parent / "cache")


def speed(found) -> str:
    told = subprocess.run(
        [found.python, "-c", "import toy.kernel; print(toy.kernel.speed())"],
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout.strip()


def test_the_engine_runs_what_was_patched_and_other_environments_what_was_not(lock):
    patched = prepare(lock, diff("kernel.py", KERNEL, FAST))
    assert speed(patched) == "fast"
    (told,) = patched.fixes
    assert (told["name"], told["needed"], told["applied"], told["exports"]) == ("patch-package", True, True, {})
    assert told["evidence"]["files"]["kernel.py"]["after"] == sha256(FAST.encode()).hexdigest()
    plain = prepare(lock)
    assert plain.path != patched.path
    assert speed(plain) == "slow"  # the patch reached no cache that environments are made from
    again = prepare(lock, diff("kernel.py", KERNEL, FAST))
    assert (again.path, again.seconds, again.fixes) == (patched.path, 0.0, patched.fixes)
    assert "fetched anew" not in (lock.parent / "install.log").read_text()


def test_a_patch_that_the_package_contains_is_told_as_not_needed(lock):
    found = prepare(lock, diff("kernel.py", KERNEL.replace("slow", "slower"), KERNEL))
    (told,) = found.fixes
    assert (told["needed"], told["applied"]) == (False, False)
    assert told["evidence"]["taken_back_on_a_copy"]


def test_a_patch_that_fails_leaves_no_environment(lock):
    with pytest.raises(EnvironmentFailure, match="the fix patch-package failed: patch 0.patch does not apply"):
        prepare(lock, diff("kernel.py", KERNEL.replace("slow", "medium"), FAST))
    assert not list((lock.parent / "cache/environments").glob("*/.complete"))


@pytest.fixture
def publication(tmp_path, monkeypatch):
    """A publication's repository of patches, and its fix by folder: all of them, in order."""
    monkeypatch.setattr(checkouts, "PROTOCOL", "file")
    origin, _ = repository(tmp_path / "publication", README="x\n")
    (origin / "patches").mkdir()

    def fix_of(path="patches/*.patch", **files: str) -> Fix:
        at = commit(origin, **{f"patches/{name}": text for name, text in files.items()})
        source = {"repo": "https://example.org/x", "commit": at, "path": path}
        made = Fix.model_validate({"name": "patch-package", "package": "toy", "patches": [{"source": source}]})
        here = made.patches[0].source.model_copy(update={"repo": url(origin)})
        return made.model_copy(update={"patches": [made.patches[0].model_copy(update={"source": here})]})

    return fix_of


FASTER = FAST.replace("fast", "faster")
SERIES = {"0002-b.patch": diff("sub/kernel.py", FAST, FASTER), "0001-a.patch": diff("sub/kernel.py", KERNEL, FAST)}


def test_all_patches_of_a_publications_folder_apply_in_the_shells_order(place, tmp_path, publication):
    fix = publication(**SERIES, **{"notes.txt": "no patch\n", ".hidden.patch": "no patch either\n"})
    told = fixes.repair(place, fix, tmp_path, tmp_path / "cache")
    assert kernel(place).read_text() == FASTER
    assert told["applied"]
    assert told["evidence"]["patches"] == {
        name: sha256(SERIES[name].encode()).hexdigest() for name in ("0001-a.patch", "0002-b.patch")
    }
    assert not patch_package.detect(place, fix).needed


def test_one_patch_of_a_publication_is_pinned_by_its_commit(place, tmp_path, publication):
    fix = publication("patches/0001-a.patch", **SERIES)
    fixes.repair(place, fix, tmp_path, tmp_path / "cache")
    assert kernel(place).read_text() == FAST


def test_the_patch_of_a_series_that_does_not_apply_is_named(place, tmp_path, publication):
    fix = publication(**{**SERIES, "0002-b.patch": diff("sub/kernel.py", KERNEL.replace("slow", "x"), FASTER)})
    with pytest.raises(FixFailure, match=r"patch 0002-b\.patch does not apply to toy"):
        fixes.repair(place, fix, tmp_path, tmp_path / "cache")


def test_a_folder_without_patches_is_no_fix(place, tmp_path, publication):
    with pytest.raises(FixFailure, match=r"has no patch patches/\*\.patch at"):
        fixes.repair(place, publication(**{"notes.txt": "x\n"}), tmp_path, tmp_path / "cache")
    with pytest.raises(FixFailure, match=r"has no patch patches/gone\.patch at"):
        fixes.repair(place, publication("patches/gone.patch", **SERIES), tmp_path, tmp_path / "cache")


def test_a_patch_that_is_a_link_out_of_the_repository_is_none(place, tmp_path, publication):
    (tmp_path / "secret.patch").write_text(diff("sub/kernel.py", KERNEL, FAST))
    (tmp_path / "publication/patches/0001.patch").symlink_to(tmp_path / "secret.patch")
    with pytest.raises(FixFailure, match=r"has no patch patches/0001\.patch at"):
        fixes.repair(place, publication(**{"notes.txt": "x\n"}), tmp_path, tmp_path / "cache")


@pytest.mark.parametrize("path", ["pat*/a.patch", "patches/0*.patch", "patches/*.*.patch"])
def test_a_star_means_a_whole_folder_or_nothing(path):
    source = {"repo": "https://example.org/x", "commit": "1" * 40, "path": path}
    with pytest.raises(ValueError, match=r"stands in a source's path as the last part \*\.patch only"):
        Fix.model_validate({"name": "patch-package", "package": "toy", "patches": [{"source": source}]})
    whole = {"source": {**source, "path": "p/*.patch"}, "sha256": "0" * 64}
    with pytest.raises(ValueError, match="without a sha256"):
        Fix.model_validate({"name": "patch-package", "package": "toy", "patches": [whole]})
