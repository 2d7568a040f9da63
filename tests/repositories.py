"""Small git repositories on this disk, and git's own transport for them."""

import os
import subprocess
from pathlib import Path


def git(folder, *words, **env):
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    done = subprocess.run(
        ["git", *settings, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **env},
    )
    return done.stdout.strip()


def repository(folder: Path, **files: str) -> tuple[Path, str]:
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    return folder, commit(folder, **files)


def commit(folder, **files: str) -> str:
    for name, text in files.items():
        (folder / name).write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=x")
    return git(folder, "rev-parse", "HEAD")


def url(folder) -> str:
    return f"file://{folder}"
