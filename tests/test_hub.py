"""What the hub gives arrives whole or not at all, and what it refuses is said with what to do."""

import random
from pathlib import Path

import httpx2
import pytest
from hub_server import Hub, serving, sha256
from huggingface_hub import constants

from llmrepro import hub
from llmrepro.hub import HubFailure

LARGE = random.Random(1).randbytes(3_000_001)
SMALL = b'{"num_hidden_layers": 2}'
TOKEN = "hf_" + "s3cret" * 5


@pytest.fixture
def site(monkeypatch, tmp_path):
    with serving(monkeypatch, tmp_path) as made:
        made.add("toy/model", {"model.gguf": LARGE, "config.json": SMALL})
        yield made


def look(revision=None, *names) -> hub.Snapshot:
    return hub.look(list(names) or ["toy/model"], revision)[1]


def download(part: Path, path: str = "model.gguf", snapshot=None) -> str:
    snapshot = snapshot or look()
    return hub.download(snapshot, snapshot.files[path], part)


def token(monkeypatch, site: Hub, allowed: bool) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    site.tokens.add(TOKEN)
    site.allowed |= {TOKEN} if allowed else set()


def test_a_snapshot_tells_commit_sizes_and_hashes(site):
    snapshot = look()
    assert snapshot.commit == list(site.commits["toy/model"])[-1]
    assert snapshot.files["model.gguf"].sha256 == sha256(LARGE)
    assert snapshot.files["model.gguf"].bytes == len(LARGE)
    assert snapshot.files["config.json"].sha256 is None
    assert site.asked[-1].path.endswith("/api/models/toy/model?blobs=true")


@pytest.mark.parametrize(("path", "content"), [("model.gguf", LARGE), ("config.json", SMALL)])
def test_a_file_arrives_whole_with_its_sha256(site, tmp_path, path, content):
    assert download(tmp_path / "part", path) == sha256(content)
    assert (tmp_path / "part").read_bytes() == content


def test_what_an_earlier_process_fetched_is_not_sent_again(site, tmp_path):
    (tmp_path / "part").write_bytes(LARGE[:2_000_000])
    assert download(tmp_path / "part") == sha256(LARGE)
    assert site.sent() == len(LARGE) - 2_000_000
    asked = site.asked[-1]
    assert (asked.status, asked.headers["range"]) == (206, "bytes=2000000-")
    assert asked.headers["accept-encoding"] == "identity"


def test_a_whole_part_is_only_checked(site, tmp_path):
    (tmp_path / "part").write_bytes(LARGE)
    assert download(tmp_path / "part") == sha256(LARGE)
    assert site.sent() == 0


def test_cut_connections_are_gone_on_with_byte_for_byte(site, tmp_path):
    site.cuts = [1_000_000, 1, 500_000, 0]
    assert download(tmp_path / "part") == sha256(LARGE)
    assert site.sent() == len(LARGE)
    assert [a.headers.get("range") for a in site.asked if a.host == "store"] == [
        None,
        "bytes=1000000-",
        "bytes=1000001-",
        "bytes=1500001-",
        "bytes=1500001-",
    ]


def test_a_connection_that_never_brings_a_byte_ends_in_a_sentence_and_the_part_stays(site, tmp_path):
    site.cuts = [1_000_000] + [0] * hub.TRIES
    with pytest.raises(
        HubFailure, match=r"stopped at 1,000,000 of 3,000,001 bytes \(.*6 times\).*goes on from there"
    ):
        download(tmp_path / "part")
    assert (tmp_path / "part").stat().st_size == 1_000_000
    assert download(tmp_path / "part") == sha256(LARGE)
    assert site.sent() == len(LARGE)


@pytest.mark.parametrize("status", [429, 500, 503, 403])
def test_a_store_that_is_busy_or_whose_address_ran_out_is_asked_anew_through_the_hub(site, tmp_path, status):
    site.faults = [status, status]
    assert download(tmp_path / "part") == sha256(LARGE)
    assert sum("/resolve/" in a.path for a in site.asked) == 3


def test_a_store_without_ranges_sends_the_whole_again_and_the_part_begins_anew(site, tmp_path):
    site.ranges = False
    (tmp_path / "part").write_bytes(b"x" * 1000)
    assert download(tmp_path / "part") == sha256(LARGE)
    assert (tmp_path / "part").read_bytes() == LARGE


def test_a_store_that_answers_with_another_range_is_not_believed(site, tmp_path):
    site.shift = 1
    (tmp_path / "part").write_bytes(LARGE[:2_000_000])
    assert download(tmp_path / "part") == sha256(LARGE)
    assert (tmp_path / "part").read_bytes() == LARGE


def test_a_part_that_is_too_long_begins_anew(site, tmp_path):
    (tmp_path / "part").write_bytes(LARGE + b"more")
    assert download(tmp_path / "part") == sha256(LARGE)


def test_a_changed_byte_is_noticed_and_nothing_is_kept(site, tmp_path):
    site.change = 2_999_999
    with pytest.raises(
        HubFailure, match=f"{sha256(LARGE)} was wanted: it was changed on its way.*nothing was kept"
    ):
        download(tmp_path / "part")
    assert not (tmp_path / "part").exists()


def test_a_part_with_a_wrong_byte_is_fetched_once_more_from_the_start(site, tmp_path):
    (tmp_path / "part").write_bytes(b"!" + LARGE[1:2_000_000])
    assert download(tmp_path / "part") == sha256(LARGE)
    assert site.sent() == len(LARGE) - 2_000_000 + len(LARGE)


def test_a_small_file_is_checked_by_its_git_id(site, tmp_path):
    snapshot = look()
    wrong = snapshot.files["config.json"]._replace(git_sha1="0" * 40)
    with pytest.raises(HubFailure, match="git blob id"):
        hub.download(snapshot, wrong, tmp_path / "part")
    assert not (tmp_path / "part").exists()


def test_another_size_than_the_listing_tells_is_refused(site, tmp_path):
    snapshot = look()
    shorter = snapshot.files["model.gguf"]._replace(bytes=1_000_000)
    with pytest.raises(HubFailure, match="more than the 1,000,000 bytes that .* tells of it; nothing was kept"):
        hub.download(snapshot, shorter, tmp_path / "part")


def test_a_mirror_that_tells_no_hashes_is_told_so(site, tmp_path):
    site.hashes = False
    with pytest.raises(HubFailure, match="neither size nor hash of model.gguf.*unset HF_ENDPOINT"):
        download(tmp_path / "part")


# ---- whom the token is sent to ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["environment", "file"])
def test_the_token_goes_to_the_hub_and_never_to_the_store(site, tmp_path, monkeypatch, where):
    token(monkeypatch, site, allowed=True)
    if where == "file":
        monkeypatch.delenv("HF_TOKEN")
        Path(constants.HF_TOKEN_PATH).parent.mkdir()
        Path(constants.HF_TOKEN_PATH).write_text(TOKEN)
    site.gated.add("toy/model")
    assert download(tmp_path / "part") == sha256(LARGE)
    assert download(tmp_path / "small", "config.json")
    sent = {(a.host, a.headers.get("authorization")) for a in site.asked}
    assert sent == {("hub", f"Bearer {TOKEN}"), ("store", None)}


def test_a_redirect_from_https_to_http_is_not_followed(monkeypatch):
    answer = httpx2.Response(302, headers={"Location": "http://127.0.0.1/x"})
    client = httpx2.Client(transport=httpx2.MockTransport(lambda request: answer))
    monkeypatch.setattr(hub, "get_session", lambda: client)
    refused = pytest.raises(HubFailure, match="from https to http; not followed")
    with refused, hub._opened("https://127.0.0.1/x", {}):
        pass


# ---- what is not given ---------------------------------------------------------------------------------------


def test_other_names_are_tried_only_when_the_first_is_not_there(site):
    site.add("toy/other", {"model.gguf": b"another"})
    assert hub.look(["toy/model", "toy/other"], None)[0] == "toy/model"
    site.commits["toy/now"] = site.commits.pop("toy/model")
    name, snapshot = hub.look(["toy/model", "toy/now", "toy/other"], None)
    assert (name, snapshot.repo) == ("toy/now", "toy/now")


def test_a_renamed_repository_is_followed_and_its_name_now_is_told(site, tmp_path):
    site.commits["toy/now"] = site.commits.pop("toy/model")
    site.renamed["toy/model"] = "toy/now"
    name, snapshot = hub.look(["toy/model"], None)
    assert (name, snapshot.repo) == ("toy/model", "toy/now")
    assert download(tmp_path / "part", snapshot=snapshot) == sha256(LARGE)


@pytest.mark.parametrize("known", [False, True])
def test_a_repository_that_is_gone_is_said_with_all_its_names(site, monkeypatch, known):
    if known:
        token(monkeypatch, site, allowed=False)
    with pytest.raises(HubFailure) as refused:
        look(None, "toy/gone", "toy/gone-too")
    assert "none of toy/gone, toy/gone-too is on" in str(refused.value)
    assert "weights_path" in str(refused.value)
    assert ("no token was found" in str(refused.value)) is not known


def test_a_revision_that_is_gone_is_said(site):
    with pytest.raises(HubFailure, match="toy/model has no revision " + "a" * 40):
        look("a" * 40)


@pytest.mark.parametrize("known", [False, True])
def test_a_gated_repository_says_where_to_ask_for_access(site, tmp_path, monkeypatch, known):
    site.gated.add("toy/model")
    if known:
        token(monkeypatch, site, allowed=False)
    with pytest.raises(HubFailure) as refused:
        download(tmp_path / "part")
    said = "the token that was sent has no access" if known else "no token was found"
    assert f"toy/model is gated and {said}: ask for access at {site.url}/toy/model" in str(refused.value)
    assert TOKEN not in str(refused.value)


def test_a_token_that_is_not_valid_is_said_and_not_shown(site, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(HubFailure, match="refuses the token for toy/model.*Invalid credentials") as refused:
        look()
    assert TOKEN not in str(refused.value)


def test_no_network_and_offline_are_said(site, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubFailure, match="HF_HUB_OFFLINE forbids asking the hub"):
        look()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubFailure, match=r"could not be asked for toy/model \(no connection\); check the network"):
        look()


def test_an_endpoint_that_is_no_hub_is_said_without_its_password(site, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", site.url.replace("//", "//name:word@") + "/nowhere")
    with pytest.raises(HubFailure) as refused:
        look()
    assert "word" not in str(refused.value)
    monkeypatch.setenv("HF_ENDPOINT", "huggingface.co")
    with pytest.raises(HubFailure, match="that is no https address"):
        look()


def test_a_file_that_is_no_longer_given_out_is_said(site, tmp_path):
    snapshot = look()
    del site.commits["toy/model"][snapshot.commit]["model.gguf"]
    with pytest.raises(HubFailure, match="toy/model no longer gives out model.gguf"):
        download(tmp_path / "part", snapshot=snapshot)


def test_no_sentence_shows_a_signed_address(site, tmp_path):
    site.faults = [503] * hub.TRIES
    with pytest.raises(HubFailure, match="localhost answers 503") as refused:
        download(tmp_path / "part")
    assert "signed-secret" not in str(refused.value)
