"""Single files of public repositories: fetched once, from known hosts only, with nobody's token."""

import socket

import pytest
from dripping import dripping
from publication import COMMIT, forge

from llmrepro import git_files
from llmrepro.git_files import GitFileFailure
from llmrepro.parts import GitFile


@pytest.fixture
def served(monkeypatch):
    with forge(monkeypatch) as made:
        yield made


def file(path="x.txt", repo="https://github.com/a/b"):
    return GitFile(repo=repo, commit=COMMIT, path=path)


@pytest.mark.parametrize(
    ("repo", "where"),
    [
        ("https://github.com/a/b", "https://raw.githubusercontent.com/a/b/{}/d/x%20y.txt"),
        ("https://github.com/a/b.git", "https://raw.githubusercontent.com/a/b/{}/d/x%20y.txt"),
        ("https://gitlab.com/a/g/b/", "https://gitlab.com/a/g/b/-/raw/{}/d/x%20y.txt"),
        ("https://codeberg.org/a/b", "https://codeberg.org/a/b/raw/commit/{}/d/x%20y.txt"),
    ],
)
def test_each_forge_has_its_own_address_of_a_raw_file(repo, where):
    assert git_files.address(file("d/x y.txt", repo)) == where.format(COMMIT)


@pytest.mark.parametrize(
    ("repo", "said"),
    [
        ("https://example.org/a/b", "are fetched from github.com, gitlab.com, codeberg.org only"),
        ("https://github.com.example.org/a/b", "are fetched from"),
        ("https://github.com/a", "is no address of a repository"),
        ("https://github.com/a/../b", "is no address of a repository"),
    ],
)
def test_other_hosts_and_odd_addresses_are_refused_before_anything_is_asked(repo, said):
    with pytest.raises(GitFileFailure, match=said):
        git_files.address(file(repo=repo))


def test_a_file_is_fetched_once_and_again_when_its_copy_was_changed(served, tmp_path):
    served.files["x.txt"] = "a\r\nünï".encode()
    assert git_files.fetch(file(), tmp_path) == git_files.fetch(file(), tmp_path) == "a\r\nünï".encode()
    assert len(served.seen) == 1
    (kept,) = tmp_path.rglob("content")
    kept.write_bytes(b"changed")
    assert git_files.fetch(file(), tmp_path) == "a\r\nünï".encode()
    assert len(served.seen) == 2


def test_files_of_other_commits_and_paths_are_other_files(served, tmp_path):
    served.files |= {"x.txt": b"one", "y.txt": b"two"}
    assert git_files.fetch(file(), tmp_path) == b"one"
    assert git_files.fetch(file("y.txt"), tmp_path) == b"two"
    with pytest.raises(GitFileFailure, match="answered 404"):
        git_files.fetch(file().model_copy(update={"commit": "d" * 40}), tmp_path)


def test_nothing_of_the_user_is_sent(served, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("GITHUB_TOKEN", "secret")
    served.files["x.txt"] = b"a"
    git_files.fetch(file(), tmp_path)
    ((_, headers),) = served.seen
    assert not {"Authorization", "Cookie"} & set(headers)


def test_a_redirect_is_followed_on_known_hosts_only(served, tmp_path, monkeypatch):
    served.files |= {"x.txt": (301, f"/a/b/{COMMIT}/y.txt"), "y.txt": b"moved"}
    assert git_files.fetch(file(), tmp_path) == b"moved"
    served.files["z.txt"] = (302, served.url.replace("127.0.0.1", "localhost") + f"/a/b/{COMMIT}/y.txt")
    asked = len(served.seen)
    with pytest.raises(GitFileFailure, match="which is another host; nothing was fetched from it"):
        git_files.fetch(file("z.txt"), tmp_path)
    assert len(served.seen) == asked + 1
    served.files["round"] = (302, "round")
    with pytest.raises(GitFileFailure, match="leads on more than 3 times"):
        git_files.fetch(file("round"), tmp_path)


def test_what_is_gone_too_large_or_out_of_reach_is_a_sentence_and_leaves_nothing(served, tmp_path, monkeypatch):
    with pytest.raises(
        GitFileFailure, match="answered 404 Not Found; the repository, the commit or the file is gone"
    ):
        git_files.fetch(file(), tmp_path)
    served.files["x.txt"] = bytes(git_files.MOST_BYTES + 1)
    with pytest.raises(GitFileFailure, match="has more than 16 MiB"):
        git_files.fetch(file(), tmp_path)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        free = f"http://127.0.0.1:{closed.getsockname()[1]}/"
    monkeypatch.setitem(git_files.FORGES, "github.com", free + "{path}")
    with pytest.raises(GitFileFailure, match=r"x.txt could not be fetched \(no connection\); check the network"):
        git_files.fetch(file(), tmp_path)
    assert not list(tmp_path.rglob("content"))


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "],
    ids=["body", "headers"],
)
def test_a_forge_that_drips_is_waited_for_only_so_long(tmp_path, monkeypatch, head):
    monkeypatch.setattr(git_files, "WHOLE_S", 0.5)
    with dripping(head, b" ") as url:
        monkeypatch.setitem(git_files.FORGES, "github.com", url + "/{path}")
        with pytest.raises(GitFileFailure, match="x.txt did not end within 0.5 s; try again on a better line"):
            git_files.fetch(file(), tmp_path)
    assert not list(tmp_path.rglob("content"))


def test_a_file_that_breaks_off_is_not_kept(tmp_path, monkeypatch):
    with dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" ", drops=2) as url:
        monkeypatch.setitem(git_files.FORGES, "github.com", url + "/{path}")
        with pytest.raises(
            GitFileFailure, match=r"x.txt could not be fetched \(the connection broke off\); check"
        ):
            git_files.fetch(file(), tmp_path)
    assert not list(tmp_path.rglob("content"))


def test_a_cache_that_cannot_be_written_is_a_sentence(served, tmp_path):
    served.files["x.txt"] = b"a"
    (tmp_path / "publications").write_text("in the way")
    with pytest.raises(GitFileFailure, match="name another in LLMREPRO_CACHE"):
        git_files.fetch(file(), tmp_path)
