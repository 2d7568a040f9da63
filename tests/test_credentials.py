"""No credential gets onto a page, whatever let it into the folder; a page for others names no host, user, path."""

import getpass
import json
import re
import shutil
import socket
from pathlib import Path

import pytest
from folders import chat, folder, prefill

from llmrepro import catalog, cli, credentials, privacy, report, results, run_folder, verification
from llmrepro.parameters import checked
from llmrepro.run_folder import RunError

# Each of the shape that its issuer gives it, and none of them real.
TOKENS = {
    "a Hugging Face token": "hf_" + "aB3" * 12,
    "a GitHub token": "ghp_" + "aB3d" * 9,
    "a GitLab token": "glpat-" + "aB3d" * 6,
    "an API key": "sk-proj-" + "aB3d" * 12,
    "an AWS key": "AKIA" + "ABCD1234" * 2,
    "a Google key": "AIza" + "aB3d5" * 7,
    "a Slack token": "xoxb-" + "1234567890-aB",
    "an npm token": "npm_" + "aB3d" * 9,
    "a PyPI token": "pypi-AgE" + "aB3d5" * 12,
    "a JSON web token": "eyJ" + "a" * 20 + ".eyJ" + "b" * 30 + "." + "c" * 30,
    "a private key": "-----BEGIN RSA PRIVATE KEY-----\\nMIIE\\n-----END RSA PRIVATE KEY-----",
    "a bearer token": "aB3d" * 8,
    "a password in an address": "me:hunter2",
}


def written(kind: str) -> str:
    around = {
        "a bearer token": "Authorization: Bearer {}",
        "a password in an address": "https://{}@example.org/simple",
    }
    return around.get(kind, "it said {} and went on").format(TOKENS[kind])


@pytest.fixture
def run(tmp_path):
    path = folder(tmp_path, [*chat(), *prefill()])
    (path / "boots").mkdir(exist_ok=True)
    return path


@pytest.mark.parametrize("kind", TOKENS)
def test_a_token_is_known_by_its_shape_wherever_it_stands(run, kind):
    for name in ("install.log", "boots/1.log", "reproduce.ipynb"):
        (run / name).write_text(json.dumps({"cell": written(kind)}) if name.endswith("ipynb") else written(kind))
    assert credentials.blank(run)
    for name in ("install.log", "boots/1.log", "reproduce.ipynb"):
        text = (run / name).read_text()
        assert TOKENS[kind] not in text and f"[{kind} was here]" in text, name
    json.loads((run / "reproduce.ipynb").read_text())
    assert {(f.file, f.kind) for f in credentials.told(run)} == {
        (name, kind) for name in ("install.log", "boots/1.log", "reproduce.ipynb")
    }
    assert not credentials.blank(run), "once"


def test_what_a_variable_holds_is_found_whatever_it_looks_like(run, monkeypatch):
    monkeypatch.setenv("MY_SERVICE_PASSWORD", 'Correct "horse" \\ battery')
    monkeypatch.setenv("SOME_KEY", "short")
    monkeypatch.setenv("SSH_KEY", str(run))  # a path, which stands in many files and is no secret
    (run / "boots/1.log").write_text('raw Correct "horse" \\ battery, short')
    (run / "commands.json").write_text(json.dumps({"argv": 'Correct "horse" \\ battery', "at": str(run)}))
    credentials.blank(run)
    assert (run / "boots/1.log").read_text() == "raw [the value of MY_SERVICE_PASSWORD was here], short"
    assert json.loads((run / "commands.json").read_text()) == {
        "argv": "[the value of MY_SERVICE_PASSWORD was here]",
        "at": str(run),
    }


def test_what_looks_like_none_is_left_as_it_is():
    home = catalog.home().parent
    for path in [
        *home.glob("figures/**/*.html"),
        *home.glob("recipes/**/*.json"),
        *home.glob("figures/**/*.jsonl"),
    ]:
        assert credentials.kinds(path.read_text(encoding="utf-8")) == [], path


def test_the_page_tells_what_was_blanked_and_the_result_is_of_the_files_as_they_are(run):
    lines = (run / "records.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    record["text"] = written("a GitHub token")
    (run / "records.jsonl").write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")
    with_it = run_folder.Folder(run)
    with_it.write_json("result.json", results.compute(run))
    with_it.close()
    page = cli._report(run).read_text(encoding="utf-8")
    assert TOKENS["a GitHub token"] not in page
    assert "a GitHub token stood in records.jsonl and was blanked" in page
    assert json.loads((run / "result.json").read_text()) == json.loads(json.dumps(results.compute(run)))
    assert verification.verify(run).whole, verification.verify(run).findings
    assert cli._report(run).read_text(encoding="utf-8") == page


def test_a_link_out_of_the_folder_is_not_followed(run, tmp_path):
    outside = tmp_path / "outside.txt"
    outside.write_text(written("a GitHub token"))
    (run / "link.log").symlink_to(outside)
    assert not credentials.blank(run) and TOKENS["a GitHub token"] in outside.read_text()


@pytest.mark.parametrize("kind", ["a Hugging Face token", "a password in an address"])
def test_a_parameter_that_holds_one_is_refused_and_not_repeated(kind):
    with pytest.raises(RunError) as refused:
        checked({"overrides": {"servers.default.args": ["--x", written(kind)]}})
    assert kind in str(refused.value) and TOKENS[kind] not in str(refused.value)


HOME = "/" + "home"  # in one word it would be taken for the path of whoever wrote it
PATHS = [
    f"{HOME}/grace/run 1/x.log",
    f"/{'root'}/.cache/llmrepro/a.gguf",
    "/mnt/fast/models/a.gguf",
    "/srv/x/y.json",
]
KEPT = ["/usr/lib/python3/x.py", "/v1/chat/completions", "/proc/cpuinfo", "12 tok/s", "https://example.org/a/b"]


def test_a_page_for_others_names_no_host_user_or_path(run, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "bigbox")
    monkeypatch.setattr(socket, "getfqdn", lambda: "bigbox.example.net")
    monkeypatch.setattr(getpass, "getuser", lambda: "grace")
    status = json.loads((run / "status.json").read_text())
    more = f"file://{HOME}/grace/z hopper@bigbox2 {run}"
    said = f"grace on bigbox.example.net, bigbox: {' '.join([*PATHS, *KEPT])} {more}"
    (run / "status.json").write_text(
        json.dumps({**status, "outcome": "failed", "reason": said, "log_tail": [said]})
    )
    own = report.write(run).read_text(encoding="utf-8")
    assert "grace" in own and "/mnt/fast" in own
    page = report.write(run, public=True)
    assert page.name == privacy.SHARED and (run / "report.html").read_text(encoding="utf-8") == own
    shared = page.read_text(encoding="utf-8")
    for hidden in (
        "grace",
        "bigbox",
        "hopper",
        HOME,
        "/" + "root",
        "/mnt",
        "/srv",
        str(run),
        str(Path.home() / ""),
    ):
        assert hidden not in shared, hidden
    for kept in KEPT:
        assert kept in shared, kept
    pictures = re.compile(r"base64,[A-Za-z0-9+/=]+")
    assert pictures.findall(shared) == pictures.findall(own), "pictures are as they were"


def test_a_user_called_root_or_test_does_not_blank_the_page(run, monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "test")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu")
    text = f"a test of the gpu by test@gpu below {HOME}/test"
    assert privacy.public(text, run) == "a test of the gpu by [user and host] below [path]"


def test_public_pages_of_a_study_lead_to_public_pages(tmp_path):
    there = catalog.home().parent / "figures/smollm2-135m/two-engines/run"
    shutil.copytree(there, tmp_path / "study")
    page = report.write(tmp_path / "study", public=True).read_text(encoding="utf-8")
    links = re.findall(r'href="(arms/[^"#]*)', page)
    assert links and all(link.endswith("/report-public.html") for link in links)
    assert all((tmp_path / "study" / link).exists() for link in links)
