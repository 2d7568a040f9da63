"""The rules by which a stranger's recipe is trusted with little, one test a rule. Each is tried through the door
that a recipe comes in by: `llmrepro run`, `runs.create`, a real tool, a real boot.

Rules that are proved where their code is tested, and so not here again:
git speaks https only, takes `--` before what a recipe says, leaves submodules out, runs no hook or filter and
gets no token: test_checkouts. A patch or a script leads out of no checkout: test_patch_package,
test_preparation. Single files come from known forges, and redirects lead nowhere else: test_git_files. Prompts
out of somebody's Python are read and never run: test_literals. A container is published on loopback, its weights
are read-only and no word of a recipe becomes an option of podman or docker: test_containers. No proxy catches
loopback: test_client. Scripts that prepare or convert weights get no token: test_conversion. The user's hub
token goes to the hub alone: test_hub. A key of somebody's server is in no file: test_server_url. Report, study
page, notebook card and the page of imported numbers show hostile text as text: test_report, test_study_page,
test_notebooks, test_import.
"""

import contextlib
import csv
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import hostile
import pytest
from bs4 import BeautifulSoup
from click.testing import CliRunner
from folders import chat, folder
from hostile import Stranger, put
from repositories import commit
from test_environment import MAKEFILE, sources  # noqa: F401, a fixture
from test_report import PRINTABLE

from llmrepro import (
    boot,
    catalog,
    cells,
    charts,
    cli,
    comparison,
    engines,
    environment,
    imported,
    run_folder,
    stages,
)
from llmrepro import run as runs
from llmrepro.comparison import StudyParameters
from llmrepro.environment import EnvironmentFailure
from llmrepro.parameters import checked
from llmrepro.recipe import RecipeError, Server
from llmrepro.run_folder import RunError

SECRETS = {
    "HF_TOKEN": "hf_s3cret",
    "HUGGING_FACE_HUB_TOKEN": "hf_s3cret",
    "AWS_SECRET_ACCESS_KEY": "s3cret",
    "OPENAI_API_KEY": "s3cret",
    "LLMREPRO_SERVER_KEY": "s3cret",
    "HTTPS_PROXY": "http://user:s3cret@127.0.0.1:9",
    "http_proxy": "http://user:s3cret@127.0.0.1:9",
    "SSH_AUTH_SOCK": "/s3cret",
    "PYTHONSTARTUP": "/s3cret",
    "LLAMA_ARG_HOST": "0.0.0.0",
}


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    made = Stranger(tmp_path / "stranger")
    monkeypatch.setenv("LLMREPRO_CACHE", str(made.cache))
    return made


@pytest.fixture
def secrets(monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def llmrepro(*words) -> tuple[int, str]:
    done = CliRunner().invoke(cli.main, [str(word) for word in words])
    return done.exit_code, done.output


def refused(stranger: Stranger, attempts: list) -> None:
    """Each attempt is refused before a folder is made, though trust is given: in the recipe, and as an override.
    The refusal names the place and holds nothing that a terminal obeys."""
    plain, held = json.loads(stranger.file.read_text()), []
    for path, value in attempts:
        recipe, overrides = stranger.file.read_text(), {}
        for way in ("recipe", "override"):
            stranger.file.write_text(json.dumps(put(plain, path, value)) if way == "recipe" else recipe)
            overrides = {path: value} if way == "override" else {}
            try:
                runs.create(checked({**stranger.parameters(), "overrides": overrides})).close()
                held.append((way, path, value))
            except (RecipeError, RunError) as error:
                said = str(error)
                assert f"  {path.split('.')[0]}" in said or "holds a password" in said, (path, value, said)
                assert said.replace("\n", "").isprintable(), (path, value, said)
    assert held == []
    assert not stranger.runs.exists()


def test_the_recipe_is_a_good_one_without_what_it_tries(stranger):
    runs.create(checked(stranger.parameters())).close()


def test_host_port_and_key_are_the_kits_in_every_spelling(stranger):
    refused(stranger, hostile.ADDRESS)


def test_no_argument_variable_or_path_names_a_file_of_the_machine(stranger):
    refused(stranger, hostile.FILES)


def test_no_argument_or_variable_loads_code(stranger):
    refused(stranger, hostile.CODE)


def test_no_model_is_served_but_the_one_that_is_pinned(stranger):
    refused(stranger, hostile.OTHER_MODELS)


def test_no_weights_are_a_pickle_or_code(stranger):
    refused(stranger, hostile.PICKLES)


def test_git_is_asked_over_https_for_whole_commits_alone(stranger):
    refused(stranger, hostile.GIT)


def test_build_variables_are_plain_words_that_name_no_program(stranger):
    refused(stranger, hostile.BUILD)


def test_packages_are_pinned_and_come_over_https(stranger):
    refused(stranger, hostile.PACKAGES)


def test_a_containers_options_are_typed(stranger):
    refused(stranger, hostile.CONTAINER)


def test_a_recipes_words_are_lines_of_text_and_its_links_https(stranger):
    refused(stranger, hostile.PAGES)


def test_arguments_that_tune_pass(stranger):
    for words in (
        ["--ctx-size", "8192", "-ngl", "99", "--no-host", "--override-tensor", r"\.ffn_.*_exps=CPU", "-O3"],
        [
            "--max-model-len",
            "8",
            "--model-impl",
            "vllm",
            "--language-model-only",
            "--rope-scaling",
            '{"factor": 2}',
        ],
        [
            "--attention-config",
            '{"backend": "FLASH_ATTN"}',
            "--tokenizer-mode",
            "auto",
            "--max-num-batched-tokens",
            "8",
        ],
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}', "--chat-template", "chatml"],
    ):
        stranger.change(hostile.ARGS, words)
        assert catalog.load(str(stranger.recipe)).servers[0].args == words


def test_a_strangers_recipe_is_shown_with_sources_hashes_and_commands_and_installs_nothing(stranger):
    before = sorted(stranger.folder.rglob("*"))
    code, said = llmrepro("run", stranger.recipe, "--runs-dir", stranger.runs, "--weights-path", stranger.weights)
    assert code == 1
    lock = run_folder.sha256_of(stranger.recipe / "engine.lock")
    for shown in (
        f"https://example.org/llama.cpp at {hostile.COMMIT}",
        f"engine.lock (sha256 {lock}, 1 package)",
        f"a/b {hostile.COMMIT} of huggingface",
        "with --dry-run every command",
        "then give --trust",
    ):
        assert shown in said
    code, said = llmrepro("run", stranger.recipe, "--dry-run")
    assert code == 0, said
    for shown in (f"-- https://example.org/llama.cpp {hostile.COMMIT}", "--require-hashes", "--host 127.0.0.1"):
        assert shown in said.replace("\\\n   ", "")
    assert sorted(stranger.folder.rglob("*")) == before


def test_every_hash_that_is_not_there_is_said(stranger):
    (stranger.recipe / "engine.lock").unlink()
    stranger.change("model.files", [{"path": "a.gguf"}, {"path": "b.gguf", "sha256": hostile.HASH}])
    code, said = llmrepro("run", stranger.recipe)
    assert code == 1
    assert "engine.lock is missing" in said
    assert "1 of 2 files without a sha256" in said


@pytest.mark.parametrize(
    ("overrides", "waits"),
    [
        ({"engine.install.pins": {"evil": "1"}}, True),
        ({"engine.install.indexes": ["https://example.org/simple"]}, True),
        ({"model.repo": "evil-weights"}, True),
        ({"model.files.0.sha256": hostile.HASH}, True),
        ({"workloads.chat.max_tokens": 8, "servers.default.boots": 2}, False),
    ],
)
def test_trust_is_asked_of_the_resolved_recipe_the_kits_own_too(tmp_path, overrides, waits):
    asked = checked({"overrides": overrides, "runs_dir": str(tmp_path / "runs")})
    if not waits:
        return runs.create(asked).close()
    with pytest.raises(RunError, match="overrides change what is installed.*(?s:.)*then give --trust"):
        runs.create(asked)
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_calls_itself_trusted_is_not(stranger, tmp_path, monkeypatch):
    with contextlib.closing(runs.create(checked(stranger.parameters()))) as run:
        again = checked({"resume": str(run.path)})
    runs.create(again).close()  # it was trusted here
    lock = stranger.recipe / "engine.lock"
    was = lock.read_text()
    lock.write_text(was.replace("jinja2", "evil"))
    with pytest.raises(RunError, match="a lock of .* has changed"):  # not with this one
        runs.create(again)
    lock.write_text(was)
    monkeypatch.setenv("LLMREPRO_CACHE", str(tmp_path / "another machine"))
    with pytest.raises(RunError, match="then give --trust"):
        runs.create(again)
    runs.create(again.model_copy(update={"trust": True})).close()
    runs.create(again).close()


def test_a_study_shows_all_of_its_strangers_before_any_is_trusted(stranger, tmp_path):
    other = Stranger(tmp_path / "other")
    other.change("engine.install.checkouts.0.repo", "https://example.org/other")
    arms = [{"id": name, "recipe": str(one.recipe)} for name, one in (("a", stranger), ("b", other))]
    study = tmp_path / "study.json"
    study.write_text(json.dumps({"id": "a/b", "title": "x", "question": "x", "arms": arms}))
    given = {"study": str(study), "runs_dir": str(tmp_path / "runs")}
    with pytest.raises(RunError, match=r"example.org/llama.cpp at .*\n.*example.org/other at .*\n.*give --trust"):
        comparison.create(checked(given, StudyParameters))
    assert not (tmp_path / "runs").exists()


def test_no_comment_of_a_lock_hides_options_from_who_checks_it(stranger):
    lock = stranger.recipe / "engine.lock"
    engine = catalog.load(str(stranger.recipe)).engine
    pin = lock.read_text()
    for hidden in ("--extra-index-url https://example.org", "--no-binary :all:", "-r other.txt", "-e ."):
        for text in (
            f"# x \\\n{hidden}\n{pin}",
            f"  # \\\n# \\\n{hidden}\n{pin}",
            f"{pin}{hidden}\n",
            f"# x\r{hidden}\n",
        ):
            lock.write_bytes(text.encode())
            with pytest.raises(
                EnvironmentFailure, match="a comment that goes on|only `name==version` with hashes"
            ):
                environment.place_of(engine, lock, stranger.cache)


TRAP = "#!/bin/sh\ntouch {ran}\nexit 1\n"


def trapped(folder: Path, ran: Path) -> None:
    """A folder that runs code in whoever looks for modules or a Python where it is started."""
    for name in ("psutil", "pandas", "llmrepro", "pip", "IPython", "torch"):
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'w')\nraise SystemExit({name!r})\n")
    for name in ("python", "python3"):
        program = folder / ".venv/bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(TRAP.format(ran=ran))
        program.chmod(0o755)
    (folder / ".venv/pyvenv.cfg").write_text("home = /usr/bin\n")
    (folder / "matplotlibrc").write_text("text.usetex: True\n")


def test_looking_at_a_recipe_in_its_own_folder_runs_nothing_that_lies_there(stranger, tmp_path, monkeypatch):
    trapped(stranger.recipe, tmp_path / "ran")
    stranger.change("engine.install.python", f"3.{sys.version_info.minor}")
    monkeypatch.chdir(stranger.recipe)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    for words in (("run", ".", "--dry-run"), ("doctor", ".")):
        llmrepro(*words)
        assert not (tmp_path / "ran").exists(), words


KERNEL = """
import nbformat, sys
from pathlib import Path
from llmrepro import execution
cells = [nbformat.v4.new_code_cell(source) for source in sys.argv[2:]]
notebook = Path(sys.argv[1])
nbformat.write(nbformat.v4.new_notebook(cells=cells), notebook)
sys.exit(execution.execute(notebook, notebook.with_name("out.ipynb"), {}).code)
"""


@pytest.mark.engine
def test_a_kernel_imports_nothing_from_where_it_is_started_and_its_words_drive_no_terminal(tmp_path):
    trapped(tmp_path, tmp_path / "ran")
    odd = r'print("\x1b]0;title\x07\x1b[2Jsaid \u202eback")'
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            KERNEL,
            str(tmp_path / "in.ipynb"),
            "import psutil, pandas; psutil.Process",
            odd,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
    assert "said \ufffdback" in done.stdout
    assert not {"\x1b", "\x07", "\u202e"} & set(done.stdout + done.stderr)


def test_charts_are_the_kits_whatever_settings_lie_about(monkeypatch):
    with charts._style():
        monkeypatch.setitem(charts.mpl.rcParams, "text.usetex", True)
        with charts._style():
            assert charts.mpl.rcParams["text.usetex"] is False
            assert charts.mpl.rcParams["text.parse_math"] is False


@pytest.mark.engine
def test_a_server_listens_on_loopback_with_a_key_of_its_own_and_gets_no_token(stranger, secrets):
    changes = {"workloads": ["chat"], "repeats": 1, "overrides": {"servers.default.boots": 2}}
    with contextlib.closing(runs.create(checked({**stranger.parameters(), **changes}))) as run:
        for stage in (stages.machine, stages.prepare, stages.measure):
            stage(run)
    starts = stranger.told("up")
    assert len(starts) == 2
    for start in starts:
        assert start["argv"][start["argv"].index("--host") + 1] == "127.0.0.1"
        told = start["environment"]
        assert not SECRETS.keys() & told.keys()
        assert not {value for value in told.values() if "s3cret" in value}
        assert told.keys() <= {
            *("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"),
            *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LLAMA_API_KEY", "LC_CTYPE"),
            *("PWD", "OLDPWD", "SHLVL", "_"),  # of the shell that starts the stand-in
        }
    keys = [start["environment"]["LLAMA_API_KEY"] for start in starts]
    assert keys[0] != keys[1] and min(map(len, keys)) > 30
    for file in (f for f in run.path.rglob("*") if f.is_file()):
        assert not [key for key in (*keys, "s3cret") if key.encode() in file.read_bytes()], file


@pytest.mark.parametrize("name", ["llama-cpp", "open-jet", "vllm"])
def test_an_engine_that_is_asked_for_its_options_gets_no_token_and_is_asked_elsewhere(name, tmp_path, secrets):
    program = tmp_path / "engine"
    program.write_text(
        f"#!/bin/sh\nenv > {tmp_path}/env\npwd > {tmp_path}/cwd\necho --ctx-size --draft --max-model-len\n"
    )
    program.chmod(0o755)
    options = ("--help",) if name == "llama-cpp" else ()
    assert engines.load(name)._flags((str(program), *options))
    assert "s3cret" not in (tmp_path / "env").read_text()
    assert (tmp_path / "cwd").read_text() == "/\n"


def test_what_builds_sources_gets_no_token_and_uv_no_settings_of_a_strangers(
    sources,  # noqa: F811
    secrets,
    tmp_path,
    monkeypatch,
):
    (tmp_path / "uv.toml").write_text("[pip]\nno-verify-hashes = 'this ends uv where it is read'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "a-compiler")
    makefile = sources.own / "megakernel/Makefile"
    sources.pinned = commit(
        sources.own, **{str(makefile.relative_to(sources.own)): f"{MAKEFILE}\tenv > env.txt\n"}
    )
    told = (sources.prepared().path / "source/open-jet/megakernel/env.txt").read_text()
    assert "s3cret" not in told
    assert "CXX=a-compiler\n" in told
    assert not {line.partition("=")[0] for line in told.splitlines()} & SECRETS.keys()


def test_no_code_of_a_checkpoint_is_run(tmp_path):
    args = ["--max-model-len", "8", "--trust_remote_code"]
    install = catalog.load("smollm2-135m/vllm--cpu").engine.install
    asked = {"alias": "a/b", "port": 1, "api_key": "k", "threads": 1}
    launch = engines.load("vllm").launch(tmp_path, install, Server(id="s", args=args), tmp_path, **asked)
    assert not [word for word in launch.argv if "trust" in word]
    assert any("--trust-remote-code is left out" in sentence for sentence in launch.adaptations)
    assert launch.env["HF_HUB_OFFLINE"] == "1"


def test_a_folders_name_writes_no_line_of_its_own_on_the_terminal(stranger):
    there = stranger.recipe.rename(stranger.folder / "kit\n\x1b[2J\u202e$ sh x")
    for words in (
        ("run", there),
        ("run", there, "--dry-run"),
        ("doctor", there / "x.json"),
        ("run", there / "no"),
    ):
        _, said = llmrepro(*words)
        assert not {"\x1b", "\u202e"} & set(said), words
    assert "\n$ sh x" not in llmrepro("run", there)[1]


def test_what_a_server_says_at_its_end_drives_no_terminal(tmp_path):
    odd = "out of memory \x1b]0;x\x07\x1b[2J\u202e"
    (tmp_path / "1.log").write_text(f"{odd}\n")
    (tmp_path / "status.json").write_text(
        json.dumps({"outcome": "failed", "stage": "measure", "reason": odd, "next_step": odd, "log_tail": [odd]})
    )
    status = run_folder.status(tmp_path)
    shown = [*boot.log_tail(tmp_path / "1.log"), status["reason"], status["next_step"], *status["log_tail"]]
    assert {text.strip() for text in shown} == {"out of memory \ufffd"}


def test_tables_of_a_notebook_show_text_as_text(monkeypatch):
    shown = []
    monkeypatch.setattr(cells, "display", lambda data, raw: shown.append(data))
    cells.table("<b>", [("<i>", "<script>x</script>\x1b[2J\u202e")])
    (data,) = shown
    assert "<b>" not in data["text/html"] and "&lt;script&gt;" in data["text/html"]
    assert not {"\x1b", "\u202e"} & set(data["text/html"] + data["text/plain"])


def test_a_chart_holds_hostile_words_as_shapes_and_text(tmp_path):
    def change(recipe):
        recipe["title"] = PRINTABLE
        for workload in recipe["workloads"]:
            workload["title"] = PRINTABLE
        for claim in recipe["claims"]:
            claim.update(title=PRINTABLE, locator=PRINTABLE)

    for figure in charts.draw(folder(tmp_path, chat(), change=change)):
        for node in ElementTree.parse(figure.svg).iter():
            assert node.tag.rpartition("}")[2] not in {"script", "foreignObject", "image", "a", "text", "iframe"}
            for name, value in node.attrib.items():
                assert not name.startswith("on")
                assert not name.endswith("href") or value.startswith("#")
        page = BeautifulSoup(figure.html(), "html.parser")
        assert {tag.name for tag in page.find_all(True)} == {"figure", "img", "figcaption", "strong"}
        assert set(page.img.attrs) == {"src", "alt"}


@pytest.mark.parametrize("name", ["=HYPERLINK(0)", "+1+1", "-1+1", "@SUM(1)", "\uff1d1+1"])
def test_a_spreadsheet_finds_no_formula_in_a_charts_data(tmp_path, name):
    head = "suite,case,repeat,prompt_tokens,completion_tokens,ttft_s,total_s,max_tokens\n"
    (tmp_path / "x.csv").write_text(
        f"{head}{name},{name},0,30,101,0.2,1.2,256\n{name},{name},1,30,101,0.2,1.3,256\n"
    )
    path = imported.create(tmp_path / "x.csv", runs_dir=str(tmp_path / "runs"))
    figures = charts.draw(path)
    found = [cell for f in figures for row in csv.reader(f.csv.read_text().splitlines()) for cell in row]
    assert any(name in cell for cell in found)
    assert not [cell for cell in found if cell.startswith(tuple("=+-@\uff1d")) and not cell.lstrip("-").isdigit()]


def test_a_prompts_files_names_are_names(stranger, tmp_path):
    own = tmp_path / "own.jsonl"
    for name in ("../x", "/etc/passwd", "=1", "a\x1b[2J", "<b>"):
        own.write_text(json.dumps({"id": name, "text": "Say hello"}) + "\n")
        with pytest.raises(RunError, match="is no id of a prompt") as told:
            runs.create(checked({**stranger.parameters(), "prompts_file": str(own)}))
        assert str(told.value).isprintable()
    assert not stranger.runs.exists()
