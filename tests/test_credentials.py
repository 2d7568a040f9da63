"""No credential gets onto a page, whatever let it into the folder; a page for others names no host, user, path."""

import getpass
import json
import os
import re
import shutil
import socket
from base64 import b64decode
from pathlib import Path

import pytest
from click.testing import CliRunner
from folders import chat, folder, prefill

from llmrepro import (
    catalog,
    cells,
    cli,
    collection,
    credentials,
    imported,
    privacy,
    report,
    results,
    run_folder,
    study_results,
    verification,
)
from llmrepro import run as runs
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


@pytest.mark.parametrize("kind", TOKENS)
def test_a_token_is_found_behind_a_line_end_that_json_writes_and_behind_a_colour(kind):
    token = TOKENS[kind].replace("\\n", "\n")
    said = token if kind not in ("a bearer token", "a password in an address") else written(kind)
    for text in (
        json.dumps(f"x\n{said}"),
        json.dumps(json.dumps(f"x\n{said}")),
        f"\x1b[32m{said}",
        f"\x1b[0m{said}",
    ):
        assert credentials.kinds(text) == [kind], text


LINES = ["-----BEGIN OPENSSH PRIVATE KEY-----\n", *["b3BlbnNzaC1rZXktdjEAAA" * 3 + "\n"] * 4, "YWJj==\n"]
END = "-----END OPENSSH PRIVATE KEY-----\n"


def test_a_private_key_goes_whole_however_it_is_written_and_takes_nothing_with_it():
    for text in ("".join([*LINES, END]), json.dumps("".join([*LINES, END])), json.dumps([*LINES, END], indent=1)):
        assert "b3Blb" not in credentials.without(text) and "YWJj" not in credentials.without(text), text
    assert json.loads(credentials.without(json.dumps(["a", *LINES, END, "b"]))) == [
        *("a", "[a private key was here]\n", "b")
    ]
    assert "b3Blb" not in credentials.without("".join(LINES[:4])), "cut off before its end"
    spoken_of = [{"text": "`-----BEGIN PRIVATE KEY-----` opens one"}, {"text": "-----END PRIVATE KEY-----"}]
    records = "\n".join(map(json.dumps, spoken_of))
    assert credentials.without(records) == records, "two records are no key"


@pytest.mark.parametrize(
    "text",
    [
        "https://__token__:****@example.org/simple",  # as uv and pip write it
        "a bearer of_extraordinarily_long_names_it_is",
        "/dev/disk-by-id and sk-learn-contrib-and-much-more-of-it-all",
        "authorization by a basic understanding",
        "git clone ssh://git@github.com/a/b, http://127.0.0.1:8080/v1",
    ],
)
def test_what_only_resembles_one_is_left(text):
    assert credentials.without(text) == text


def test_a_variable_that_holds_a_word_of_the_kit_or_a_number_spoils_no_folder(run, monkeypatch):
    machine = json.loads((run / "machine.json").read_text())
    (run / "machine.json").write_text(json.dumps({**machine, "disk_free_gib": 98765432.5}))
    monkeypatch.setenv("DATABASE_PASSWORD", "llama.cpp")
    monkeypatch.setenv("OTHER_SECRET", "completed")
    monkeypatch.setenv("PIN_TOKEN", "98765432")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert not credentials.blank(run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    monkeypatch.setenv("PGPASSWORD", "as <secret> as it gets")
    assert (
        credentials.without("&lt;b&gt; as &lt;secret&gt; as it gets")
        == "&lt;b&gt; [the value of PGPASSWORD was here]"
    )


def test_where_this_process_writes_to_it_goes_on_writing(run):
    said = run / "matrix.log"
    before = os.dup(1)
    try:
        with open(said, "ab") as file:
            os.dup2(file.fileno(), 1)
        os.write(1, written("a GitHub token").encode())
        assert credentials.blank(run)
        os.write(1, b"\nand went on")
    finally:
        os.dup2(before, 1)
        os.close(before)
    assert said.read_text() == "it said [a GitHub token was here] and went on\nand went on"


def test_what_a_stage_says_and_shows_holds_none(run, capsys):
    class Failed(RuntimeError):
        log_tail = ("fine", written("a bearer token"))

    with pytest.raises(Failed) as raised, run_folder.Folder(run).stage("measure"):
        raise Failed(f"it died: {written('a GitLab token')}") from ValueError(written("an npm token"))
    status = json.loads((run / "status.json").read_text())
    assert status["log_tail"] == ["fine", "Authorization: Bearer [a bearer token was here]"]
    assert str(raised.value.__cause__) == "it said [an npm token was here] and went on"
    assert str(raised.value) == status["reason"] == "it died: it said [a GitLab token was here] and went on"
    cells.table("Verdicts", [("mind", written("a Slack token"))])
    assert "[a Slack token was here]" in capsys.readouterr().out


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
    assert_result_is_of(run, results.compute)
    assert cli._report(run).read_text(encoding="utf-8") == page
    (run / "install.log").write_text(written("a Slack token"))
    assert "a Slack token stood in install.log" in cli._report(run, public=True).read_text(encoding="utf-8")
    assert verification.verify(run).whole, verification.verify(run).findings


def assert_result_is_of(path, compute):
    """The folder's result.json is what its files give as they are now, their hashes included."""
    assert json.loads((path / "result.json").read_text()) == json.loads(json.dumps(compute(path)))


def test_of_a_study_every_arm_and_its_own_notebook_are_looked_through_and_stay_whole(tmp_path):
    study = tmp_path / "study"
    shutil.copytree(catalog.home().parent / "figures/smollm2-135m/two-engines/run", study)
    arm = next((study / "arms").iterdir())
    with_it = json.loads((arm / "machine.json").read_text()) | {"load_1min": 0.5}
    with_it["os"]["name"] = f"Linux {written('a GitLab token')}"
    (arm / "machine.json").write_text(json.dumps(with_it))
    (study / "compare.ipynb").write_text(json.dumps({"cell": written("an npm token")}))
    page = cli._report(study).read_text(encoding="utf-8")
    assert "an npm token stood in compare.ipynb" in page
    assert f"{arm.name}: a GitLab token stood in machine.json" in page
    assert not (study / "arms" / credentials.FILE).exists()
    assert_result_is_of(study, study_results.compute)
    assert_result_is_of(arm, results.compute)


def test_imported_numbers_are_looked_through_too(tmp_path):
    file = Path(__file__).parent / "data/receipts/two-suites.csv"
    path = imported.create(file, runs_dir=str(tmp_path))
    rows = (path / imported.TOLD).read_text().replace(file.name, TOKENS["a GitHub token"])
    (path / imported.TOLD).write_text(rows)
    page = cli._report(path).read_text(encoding="utf-8")
    assert "a GitHub token stood in imported.json" in page and TOKENS["a GitHub token"] not in page
    assert_result_is_of(path, imported.compute)


def test_a_folder_from_elsewhere_is_looked_through_before_its_page_is_made(run, tmp_path):
    text = (run / "machine.json").read_text().replace("A processor", TOKENS["a Hugging Face token"])
    (run / "machine.json").write_text(text)
    with run_folder.contextlib.closing(run_folder.Folder(run)) as whole:
        whole.write_json("result.json", results.compute(run))
    (taken,) = collection.collect([run], tmp_path / "here")
    page = (taken.path / "report.html").read_text(encoding="utf-8")
    assert TOKENS["a Hugging Face token"] not in page and "a Hugging Face token stood in machine.json" in page
    assert_result_is_of(taken.path, results.compute)


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


def test_a_prompt_or_a_recipe_that_holds_one_is_refused_before_anything_is_written(tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"id": "mine", "text": written("an npm token")}) + "\n")
    given = {"runs_dir": str(tmp_path / "runs"), "prompts_file": str(own), "workloads": ["own-prompts"]}
    with pytest.raises(RunError, match="its prompt 'mine' holds an npm token") as refused:
        runs.create(checked(given))
    assert TOKENS["an npm token"] not in str(refused.value)

    def change(recipe):
        recipe["question"] = written("an API key")

    with pytest.raises(RunError, match=r"its recipe.json holds an API key"):
        folder(tmp_path, change=change)
    assert not (tmp_path / "runs").exists()


def test_a_command_line_that_is_no_yaml_is_not_repeated_with_its_credential():
    asked = ["run", "--overrides", f"{{a: {TOKENS['a GitHub token']}"]
    said = CliRunner().invoke(cli.main, asked).output
    assert "[a GitHub token was here]" in said and TOKENS["a GitHub token"] not in said


HOME = "/" + "home"  # in one word it would be taken for the path of whoever wrote it
PATHS = [
    f"{HOME}/grace/run 1/x.log",
    f"/{'root'}/.cache/llmrepro/a.gguf",
    "/mnt/fast/models/a.gguf",
    "/srv/x/y.json",
]
SPACED = [
    f"'{HOME}/grace/my runs/hopper 1/x'",
    "cc -I/opt/hopper/include",
    "~/hopper/x.gguf",
    "/models/hopper/x.gguf",
]
MORE = [
    "/run/media/grace/disk/x",
    "http://hopper:8080/v1",
    "http://10.1.2.3/v1",
    "https://hopper.lan/",
    "/data/x@y/z",
]
KEPT = [
    *("/usr/lib/python3/x.py", "/v1/chat/completions", "/proc/cpuinfo", "12 tok/s", "https://example.org/a/b"),
    *(
        "…/receipts/180w/vllm.jsonl",
        "vllm-openai@sha256:520292db",
        "{cache}/weights/x",
        "http://127.0.0.1:8080/v1",
    ),
    *("http://localhost:8080/x", "git+https://example.org/llama.cpp@b1", f"llama.cpp@{'0a' * 20}"),
]


def test_a_page_for_others_names_no_host_user_or_path(run, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "bigbox")
    monkeypatch.setattr(socket, "getfqdn", lambda: "bigbox.example.net")
    monkeypatch.setattr(getpass, "getuser", lambda: "grace")
    status = json.loads((run / "status.json").read_text())
    more = f"file://{HOME}/grace/z hopper@bigbox2 {run}"
    said = f"grace on bigbox.example.net, bigbox: {' '.join([*PATHS, *SPACED, *MORE, *KEPT])} {more}"
    (run / "status.json").write_text(
        json.dumps({**status, "outcome": "failed", "reason": said, "log_tail": [said]})
    )
    own = report.write(run).read_text(encoding="utf-8")
    assert "grace" in own and "/mnt/fast" in own
    page = report.write(run, public=True)
    assert page.name == privacy.SHARED and (run / "report.html").read_text(encoding="utf-8") == own
    shared = page.read_text(encoding="utf-8")
    hidden = ["grace", "bigbox", "hopper", HOME, "/" + "root", "/mnt", "/srv", "10.1.2.3", "/data"]
    assert [text for text in (*hidden, str(run), f"{Path.home()}/") if text in shared] == []
    for kept in KEPT:
        assert kept in shared, kept
    pictures = re.compile(r"base64,[A-Za-z0-9+/=]+")
    assert pictures.findall(shared) == pictures.findall(own), "pictures are as they were"
    drawn = " ".join(b64decode(one.partition(",")[2]).decode() for one in pictures.findall(shared))
    assert drawn and [text for text in (*hidden, str(run), f"{Path.home()}/") if text in drawn] == []


def test_the_host_of_a_running_server_is_not_named(tmp_path, monkeypatch):
    path = folder(tmp_path, parameters={"server_url": "https://bench.example.com:8443"}, outcome="lacking")
    assert "bench.example.com" in report.write(path).read_text(encoding="utf-8")
    assert "bench.example.com" not in report.write(path, public=True).read_text(encoding="utf-8")


def test_a_user_called_root_or_test_does_not_blank_the_page(run, monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "test")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu")
    text = f"a test of the gpu by test@gpu below {HOME}/test"
    assert privacy.public(text, run) == "a test of the gpu by [user and host] below [path]"
    monkeypatch.setattr(getpass, "getuser", lambda: "vllm")
    text = "smollm2-135m/vllm--cpu: vllm 0.32.0 of vllm@gpu, http://gpu:8000"
    assert (
        privacy.public(text, run) == "smollm2-135m/vllm--cpu: vllm 0.32.0 of [user and host], http://[host]:8000"
    )


def test_public_pages_of_a_study_lead_to_public_pages(tmp_path):
    there = catalog.home().parent / "figures/smollm2-135m/two-engines/run"
    shutil.copytree(there, tmp_path / "study")
    page = report.write(tmp_path / "study", public=True).read_text(encoding="utf-8")
    links = re.findall(r'href="(arms/[^"#]*)', page)
    assert links and all(link.endswith("/report-public.html") for link in links)
    assert all((tmp_path / "study" / link).exists() for link in links)
