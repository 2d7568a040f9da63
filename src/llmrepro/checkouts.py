"""Public repositories at one commit, by git: over https, without history or submodules, and nothing is run of them
or of the user's configuration."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

PROTOCOL = "https"  # the only transport that git may use, redirects included
# What git inherits: how to find programs, the network and its certificates. No configuration, keys or tokens.
PASSED = [
    *("PATH", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
]
SETTINGS = {
    "core.hooksPath": "/dev/null",
    "credential.helper": "",
    "submodule.recurse": "false",
    "gc.auto": "0",  # nothing goes on behind a command that has ended
    "maintenance.auto": "false",
}


class CheckoutFailure(RuntimeError):
    """A repository that cannot be had at its commit; the text says which and why, `next_step` what to do."""

    def __init__(self, message: str, next_step: str):
        self.next_step = next_step
        super().__init__(message)


def environment() -> dict[str, str]:
    """All that git is started with beside what PASSED names: it asks nobody and reads no configuration."""
    return {
        "GIT_ALLOW_PROTOCOL": PROTOCOL,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }


def commands(repo: str, commit: str, folder: Path | str) -> list[list[str]]:
    """What brings `repo` at `commit` (40 hex digits) into the new folder `folder`, in order."""
    set_ = [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
    git = ["git", *set_, "-C", str(folder)]
    return [
        ["git", "init", "--quiet", "--template=", "--", str(folder)],
        [*git, "fetch", "--quiet", "--depth", "1", "--no-tags", "--no-recurse-submodules", "--", repo, commit],
        [*git, "checkout", "--quiet", "--detach", commit, "--"],
    ]


def fetch(
    repo: str, commit: str, folder: Path, run: Callable[[list[str], dict[str, str]], object] | None = None
) -> None:
    """Check `repo` out at `commit` in `folder`, which is made, and make sure that it is that commit.

    `run(argv, env)` runs one command with that whole environment and raises when it fails; without it that is
    done here. Raises CheckoutFailure, or what `run` raises.
    """
    whole = {**{name: os.environ[name] for name in PASSED if name in os.environ}, **environment()}
    try:
        for argv in commands(repo, commit, folder):
            (run or _output)(argv, whole)
        found = _output(["git", "-C", str(folder), "rev-parse", "--verify", "HEAD"], whole).strip()
    except FileNotFoundError:
        raise CheckoutFailure("the command git is missing", "install it, then run again") from None
    except subprocess.CalledProcessError as error:
        raise failure(repo, commit, error.stderr) from None
    if found != commit:
        raise CheckoutFailure(
            f"{repo} gave {found} for {commit}", "give a commit in the recipe, not the object of an annotated tag"
        )


def failure(repo: str, commit: str, said: str) -> CheckoutFailure:
    """The failure of a fetch, with the first thing that git said of it."""
    words = [line for line in said.splitlines() if line.startswith(("fatal:", "error:"))]
    return CheckoutFailure(
        f"{repo} cannot be had at {commit} ({words[0] if words else 'git does not say why'})",
        "check the network, that the repository is public and still has that commit, then run again",
    )


def _output(argv: list[str], env: dict[str, str]) -> str:
    return subprocess.run(
        argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=True
    ).stdout
