"""A checkout is a public repository at one commit: over https only, proved, and nothing of the user is run."""

import subprocess

import pytest
from repositories import commit, git, repository, url

from llmrepro import checkouts
from llmrepro.checkouts import CheckoutFailure


@pytest.fixture
def local(monkeypatch):
    """Repositories on this disk, over git's own transport for them: the one rule that a test must change."""
    monkeypatch.setattr(checkouts, "PROTOCOL", "file")


def test_it_is_that_commit_and_no_other_and_has_no_history(tmp_path, local):
    origin, first = repository(tmp_path / "origin", a="1\n")
    second = commit(origin, a="2\n")
    for wanted, text in ((first, "1\n"), (second, "2\n")):
        checkouts.fetch(url(origin), wanted, tmp_path / wanted)
        assert (tmp_path / wanted / "a").read_text() == text
        assert git(tmp_path / wanted, "rev-list", "--all", "--count", "HEAD") == "1"


def test_only_https_is_spoken(tmp_path, monkeypatch):
    origin, first = repository(tmp_path / "origin", a="1\n")
    for address in (url(origin), str(origin), f"ext::git-upload-pack {origin}", "ssh://127.0.0.1:9/x"):
        with pytest.raises(CheckoutFailure, match="transport '(file|ext|ssh)' not allowed"):
            checkouts.fetch(address, first, tmp_path / "there")
    with pytest.raises(CheckoutFailure, match="cannot be had at .*127.0.0.1"):  # https is tried
        checkouts.fetch("https://127.0.0.1:9/x", first, tmp_path / "there")


def test_a_commit_that_the_repository_has_not_is_named_with_what_to_do(tmp_path, local):
    origin, _ = repository(tmp_path / "origin", a="1\n")
    with pytest.raises(CheckoutFailure, match=f"cannot be had at {'1' * 40} .*not our ref") as refused:
        checkouts.fetch(url(origin), "1" * 40, tmp_path / "there")
    assert "still has that commit" in refused.value.next_step


def test_a_repository_that_is_not_there_is_named(tmp_path, local):
    with pytest.raises(CheckoutFailure, match="origin cannot be had at .*does not appear to be a git repository"):
        checkouts.fetch(url(tmp_path / "origin"), "1" * 40, tmp_path / "there")


def test_a_tags_object_is_no_commit(tmp_path, local):
    origin, first = repository(tmp_path / "origin", a="1\n")
    git(origin, "tag", "--annotate", "--message=x", "v1")
    tag = git(origin, "rev-parse", "v1")
    assert tag != first
    with pytest.raises(CheckoutFailure, match=f"gave {first} for {tag}"):
        checkouts.fetch(url(origin), tag, tmp_path / "there")


def test_submodules_are_left_out(tmp_path, local):
    inner, _ = repository(tmp_path / "inner", secret="x\n")
    origin, _ = repository(tmp_path / "origin", a="1\n")
    git(origin, "submodule", "--quiet", "add", url(inner), "sub")
    with_sub = commit(origin, b="2\n")
    checkouts.fetch(url(origin), with_sub, tmp_path / "there")
    assert (tmp_path / "there/b").exists()
    assert list((tmp_path / "there/sub").iterdir()) == []


def test_no_hook_filter_or_credential_helper_of_the_users_is_run(tmp_path, local, monkeypatch):
    ran = tmp_path / "ran"
    hooks = tmp_path / "template/hooks"
    hooks.mkdir(parents=True)
    for name in ("post-checkout", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {ran}\n")
        (hooks / name).chmod(0o755)
    (tmp_path / ".gitconfig").write_text(
        f"[core]\n\thooksPath = {hooks}\n[init]\n\ttemplateDir = {hooks.parent}\n"
        f'[credential]\n\thelper = !touch {ran}\n[filter "x"]\n\tsmudge = touch {ran}; cat\n'
    )
    origin, first = repository(tmp_path / "origin", **{"a": "1\n", ".gitattributes": "* filter=x\n"})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(hooks.parent))
    subprocess.run(["git", "clone", "--quiet", url(origin), str(tmp_path / "as-a-user-does")], check=True)
    assert ran.exists(), "the trap itself does not work"
    ran.unlink()
    checkouts.fetch(url(origin), first, tmp_path / "there")
    assert (tmp_path / "there/a").read_text() == "1\n"
    assert not ran.exists()


def test_git_inherits_no_token_and_asks_nobody(tmp_path, local, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("GIT_ASKPASS", "/bin/false")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    origin, first = repository(tmp_path / "origin", a="1\n")
    seen = []

    def run(argv, env):
        seen.append(env)
        subprocess.run(argv, env=env, check=True)

    checkouts.fetch(url(origin), first, tmp_path / "there", run)
    for env in seen:
        assert not {"HF_TOKEN", "GIT_ASKPASS", "HOME"} & set(env)
        assert env["GIT_TERMINAL_PROMPT"] == "0"
        assert env["HTTPS_PROXY"] == "http://127.0.0.1:9"  # else nothing is reached from behind one


def test_what_could_be_an_option_is_none(tmp_path, local):
    with pytest.raises(CheckoutFailure):
        checkouts.fetch(f"--upload-pack=touch {tmp_path / 'ran'};", "1" * 40, tmp_path / "there")
    assert not (tmp_path / "ran").exists()


def test_without_git_its_name_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CheckoutFailure, match="the command git is missing"):
        checkouts.fetch("https://example.org/x", "1" * 40, tmp_path / "there")
