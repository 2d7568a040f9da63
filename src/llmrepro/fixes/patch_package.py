"""patch-package: apply patch files, pinned by their sha256 or their commit, to one installed package.

What a publication ran was not always what an index has: a backport, a changed kernel. The patches lie in the
environment, are tried before they are applied, and are proved by taking them back on a copy.
"""

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from llmrepro.contents import site_packages
from llmrepro.fixes import Finding, FixFailure, patch_files
from llmrepro.install import Fix

# Unified diffs only, no .orig files, never a question, and never turned round because it looks applied.
PATCH = ["patch", "-p1", "--unified", "--force", "--get=0", "--no-backup-if-mismatch", "--reject-file=-"]


class Change(NamedTuple):
    path: str  # below the package, posix
    deleted: bool


def detect(place: Path, fix: Fix) -> Finding:
    package = _package(place, fix)
    patches = {_name(file): _sha256(file) for file in patch_files(place, fix)}
    evidence = {"package": fix.package, "patches": patches}
    if _taken_back(place, package, fix) is None:
        return Finding(False, f"{fix.package} contains every change already", evidence)
    return Finding(True, f"{fix.package} lacks a change of the patches", evidence)


def apply(place: Path, fix: Fix) -> dict[str, Any]:
    package = _package(place, fix)
    changed: dict[str, dict[str, str | None]] = {}
    said = []
    for file in patch_files(place, fix):
        for path, _ in _changes(package, file):
            changed.setdefault(path, {"before": _sha256(package / path)})
        if _tried(package, file, "--reverse") is None:
            said.append("contained already")
            continue
        refused = _tried(package, file, "--forward")
        if refused is not None:
            raise FixFailure(
                f"patch {_name(file)} does not apply to {fix.package}: {refused}",
                "pin the version of the package that the patch was made for, or the patch of this version",
            )
        said.append(_patch(package, file, "--forward").stdout.strip())
    for path, hashes in changed.items():
        hashes["after"] = _sha256(package / path)
        _without_bytecode(package / path)
    return {"files": changed, "said": said}


def verify(place: Path, fix: Fix) -> dict[str, Any]:
    package = _package(place, fix)
    for file in patch_files(place, fix):
        for path, deleted in _changes(package, file):
            if (package / path).exists() == deleted:
                wrong = "is still there" if deleted else "is not there"
                raise FixFailure(f"{path} {wrong} after patch {_name(file)}", "report this with the patch file")
    failed = _taken_back(place, package, fix)
    if failed is not None:
        raise FixFailure(
            f"{fix.package} does not hold what its patches say: {failed}",
            "look whether two of the patches change one place, and give them in the order in which they were made",
        )
    return {"taken_back_on_a_copy": True}


def exports(place: Path) -> dict[str, str]:
    return {}


def _package(place: Path, fix: Fix) -> Path:
    package = site_packages(place) / fix.package
    if not package.is_dir():
        raise FixFailure(
            f"there is no package {fix.package} in this environment",
            "name the folder in site-packages, which is what `import` takes",
        )
    if shutil.which("patch") is None:
        raise FixFailure(
            "the command patch is missing", "install it (Debian and Ubuntu: apt-get install patch), then run again"
        )
    return package


def _name(file: Path) -> str:
    """What a patch is called where it comes from."""
    return file.name.partition("-")[2]


def _patch(folder: Path, file: Path, *options: str) -> subprocess.CompletedProcess:
    argv = [*PATCH, *options, "-d", str(folder), "-i", str(file)]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)


def _tried(folder: Path, file: Path, way: str) -> str | None:
    """None when a patch would apply that way, else what patch says against it. Changes nothing."""
    done = _patch(folder, file, way, "--dry-run")
    return None if done.returncode == 0 else (done.stdout + done.stderr).strip()[-600:]


def _taken_back(place: Path, package: Path, fix: Fix) -> str | None:
    """None when every patch, last first, can be taken back from a copy of the files they name, else why not."""
    with tempfile.TemporaryDirectory(prefix="llmrepro-patch-") as folder:
        copy = Path(folder)
        files = patch_files(place, fix)
        for path in {path for file in files for path, _ in _changes(package, file)}:
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            if (package / path).is_file():
                shutil.copyfile(package / path, copy / path)
        for file in reversed(files):
            failed = _tried(copy, file, "--reverse")
            if failed is not None:
                return f"{_name(file)}: {failed}"
            _patch(copy, file, "--reverse")
    return None


def _changes(package: Path, file: Path) -> list[Change]:
    """The files that a patch changes. Raises FixFailure for one that is no plain diff of files of the package."""
    text = file.read_text(encoding="utf-8", errors="surrogateescape")
    found = list(_headers(text, _name(file)))
    if not found:
        raise FixFailure(f"patch {_name(file)} changes no file", "give a unified diff, as `git diff` writes it")
    for path, _ in found:
        inside = (package / path).resolve().is_relative_to(package.resolve())
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or not inside:
            raise FixFailure(
                f"patch {_name(file)} would change {path}, which is outside {package.name}",
                "do not use it before you know why",
            )
    return found


def _headers(text: str, name: str):
    """A Change per file of a unified diff. Lines inside hunks are counted off: a removed `-- x` is no header."""
    left = right = 0
    old = None
    for line in text.splitlines():
        if left > 0 or right > 0:
            left -= line[:1] in {" ", "-", ""}
            right -= line[:1] in {" ", "+", ""}
            continue
        hunk = re.match(r"@@ -\d{1,9}(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@", line)
        if hunk:
            left, right = (1 if count is None else int(count) for count in hunk.groups())
        elif re.match(
            r"(rename|copy) (from|to) |GIT binary|(new|deleted) file mode 1[26]|\*\*\* |Index:|Prereq:", line
        ):
            raise FixFailure(
                f"patch {name} holds {line[:80]!r}",
                "give a unified diff of text files: no renames, links, binaries",
            )
        elif line.startswith("--- "):
            old = line[4:].split("\t")[0].strip()
        elif line.startswith("+++ ") and old is not None:
            new = line[4:].split("\t")[0].strip()
            for path in {old, new} - {"/dev/null"}:
                if not re.fullmatch(r"[^/\"]+/.+", path) or path.startswith("/"):
                    raise FixFailure(f"patch {name} names {path}", "its paths must be of the form a/module.py")
            # -p1 takes the first part of a path away; patch goes by either name
            if "/dev/null" not in (old, new) and old.partition("/")[2] != new.partition("/")[2]:
                raise FixFailure(f"patch {name} changes {old} into {new}", "give a diff without renames")
            yield Change((new if old == "/dev/null" else old).partition("/")[2], deleted=new == "/dev/null")
            old = None


def _without_bytecode(file: Path) -> None:
    for old in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        old.unlink()


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
