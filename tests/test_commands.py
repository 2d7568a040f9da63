"""A dry run shows every command that a run executes, as a shell takes it, and executes none of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmrepro import catalog, cli, commands, engines, environment, machine, parameters
from llmrepro.commands import Step
from llmrepro.engines import vllm
from llmrepro.model import PATTERN


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    """A cache in which nothing is installed."""
    monkeypatch.setenv("LLMREPRO_CACHE", str(tmp_path / "cache"))


def of(name: str, **given) -> list[Step]:
    params = parameters.checked({"recipe": name, **given})
    recipe = parameters.resolved(catalog.load(name), params)
    return commands.of(recipe, params, catalog.path_of(name).parent)


def shell(text: str) -> str:
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", catalog.ids())
def test_every_recipes_commands_can_be_copied_and_name_all_that_is_pinned(name, tmp_path):
    recipe = catalog.load(name)
    steps = of(name, profile="full")  # which asks every server there is
    text = "\n".join(commands.lines(steps))
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False).stderr == ""
    install, model = recipe.engine.install, recipe.model
    for weights in filter(None, (model, model.draft, model.overlay)):
        assert all(file.path in text for file in weights.files)
        assert f"{weights.repo} at {weights.revision or 'main, as no revision was published'}, from " in text
    for checkout in install.checkouts:
        assert f"-- {checkout.repo} {checkout.commit}" in text.replace("\\\n   ", "")
    for fix in recipe.engine.fixes:
        assert f"# fix: {fix.name}" in text
    started = [step for step in steps if step.stage == "server"]
    assert [step.why.partition(",")[0] for step in started] == [s.id for s in recipe.servers]
    for step, server in zip(started, recipe.servers, strict=True):
        said = engines.filled(server.args, machine.threads(), commands.DRAFT)
        if vllm.REMOTE_CODE in said:
            assert f"{vllm.REMOTE_CODE} is left out" in step.text
        said = [word.replace("/{", "{") for word in said if word != vllm.REMOTE_CODE]
        at = step.argv.index(said[0])
        assert step.argv[at : at + len(said)] == said
        assert "as written: the engine is not installed here" in step.text
        assert "{weights}" in " ".join(step.argv)
        assert "{port}" in " ".join(step.argv)
    assert not (tmp_path / "cache").exists()


def test_a_command_reads_back_as_the_very_words_that_are_executed():
    words = [
        "run",
        "a b",
        "it's",
        '{"x": 1, "y": [2]}',
        "--flag",
        "{weights}",
        "$HOME",
        "-D",
        "x" * 90,
        "",
        "--",
        "*?",
    ]
    step = Step("server", "why", words, env={"KEY": "{key}", "WORDS": "a b"})
    assert len(commands.lines([step])) > 2
    said = shell(
        'f() { printf \'%s\\0\' "$KEY" "$WORDS" "$@"; }; export -f f; env() { command env "$@"; };\n'
        + "\n".join(commands.lines([Step("server", "why", ["bash", "-c", 'f "$@"', "x", *words], env=step.env)]))
    )
    assert said.split("\0")[:-1] == ["{key}", "a b", *words]


def test_what_is_said_of_a_command_is_never_one(tmp_path):
    said = f"x\ntouch {tmp_path}/made\r\n#"
    steps = [Step("fix", said, text=said), Step("server", said, ["true"])]
    assert shell("\n".join(commands.lines(steps))) == ""
    assert list(tmp_path.iterdir()) == []
    assert shell(f"printf %s {commands._quoted('{1..3}')}") == "{1..3}"


def test_a_command_runs_in_its_folder(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    assert shell("\n".join(commands.lines([Step("build", "why", ["pwd"], cwd=str(folder))]))).strip() == str(
        folder
    )


def test_what_the_kit_does_itself_is_no_command():
    shown = commands.lines([Step("weights", "fetched", text="one\ntwo"), Step("weights", "fetched", text="three")])
    assert shown == ["# weights: fetched", "#   one", "#   two", "#   three"]


def test_pages_tell_no_folder_of_this_machine():
    shown = "\n".join(commands.lines(of("smollm2-135m/llama-cpp-native--cpu"), private=True))
    assert not any(str(p) in shown for p in (machine.cache_dir(), catalog.home().parent, Path.home(), sys.prefix))
    assert "{venv}/bin/uv venv" in shown
    assert "{project}/recipes/smollm2-135m/llama-cpp-native--cpu/engine.lock" in shown
    assert "{cache}/environments/" in shown


def test_pages_tell_no_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    step = Step("server", "why", [f"{machine.cache_dir()}/x", f"{tmp_path}/y"], text=f"{tmp_path}/z")
    shown = "\n".join(commands.lines([step], private=True)).replace(" \\\n   ", "")
    assert shown == "# server: why\n#   ~/z\n{cache}/x ~/y"


def test_only_the_servers_that_are_asked_for_are_started():
    told = {}
    for name, given in (
        ("quick", {}),
        ("full", {"profile": "full"}),
        ("one", {"profile": "full", "servers": ["mmap"]}),
    ):
        told[name] = [step.why for step in of(catalog.DEFAULT, **given) if step.stage == "server"]
    assert told["quick"] == ["default, started 1 time, asked chat, prefill"]
    assert told["one"] == ["mmap, started 15 times, asked restart"]
    # its ladders wait until every other server is done, and so take a boot of their own
    assert told["full"][0] == (
        "default, started 2 times, asked chat, prefill, speculation, prefix; last of all, as it may kill the "
        "engine, ladder, ladder-chat"
    )


def test_own_weights_are_not_fetched_and_a_running_server_needs_nothing(tmp_path):
    steps = of(catalog.DEFAULT, weights_path="/w/mine.gguf")
    assert [step.text for step in steps if step.stage == "weights"] == ["/w/mine.gguf"]
    (only,) = of(catalog.DEFAULT, server_url="http://127.0.0.1:1", servers=["default"])
    assert "nothing is installed, fetched or started" in only.text


def test_weights_are_shown_at_the_hub_that_is_asked_and_without_its_password(monkeypatch):
    name = "llama-4-scout/vllm--rtx-pro-6000"
    model = catalog.load(name).model
    asked_at = f"/{model.repo}/resolve/{model.revision or 'main'}/{model.files[0].path}"
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert f"https://huggingface.co{asked_at}" in "\n".join(commands.lines(of(name)))
    monkeypatch.setenv("HF_ENDPOINT", "https://me:secret@hub.example/")
    shown = "\n".join(commands.lines(of(name)))
    assert f"https://hub.example{asked_at}" in shown
    assert "huggingface.co/" not in shown and "secret" not in shown


def test_a_python_that_is_not_here_is_told_once_and_the_rest_still_shown(tmp_path):
    path = recipe_with(tmp_path, lambda data: data["engine"]["install"].update(python="3.99"))
    steps = of(str(path))
    told = [step for step in steps if "needs Python 3.99 and none is installed here" in step.text]
    assert [(step.stage, step.argv) for step in told] == [("python", [])]
    assert [step.stage for step in steps if step.argv][:2] == ["environment", "packages"]


def test_patterns_are_not_counted_as_files():
    model = catalog.load("llama-4-scout/vllm--rtx-pro-6000").model
    assert all(PATTERN.search(file.path) for file in model.files)
    assert f"files matching {len(model.files)} patterns, size not published" in commands.source("it", model)
    one = model.files[0].model_copy(update={"path": "config.json"})
    mixed = model.model_copy(update={"files": [one, *model.files[:1]]})
    assert "Face, 1 file and files matching 1 pattern, size" in commands.source("it", mixed)


def test_a_folder_of_patches_is_applied_one_after_the_other():
    name = "qwen3.8-27b/vllm-dflash2--cmp-170hx"
    (patch,) = next(fix for fix in catalog.load(name).engine.fixes if fix.name == "patch-package").patches
    (step,) = [s for s in of(name) if s.stage == "fix" and s.argv[:1] == ["patch"]]
    assert step.argv[-2:] == ["-i", "{patch}"]
    assert step.text == f"once for each {{patch}} of {{patches}}/{patch.source.path}, by its name in byte order"


def recipe_with(folder, change):
    """A copy of the default recipe, changed."""
    data = json.loads((catalog.home() / catalog.DEFAULT / "recipe.json").read_text())
    change(data)
    data["id"] = "some/where"
    beside = folder / "recipe"
    (beside / "prompts").mkdir(parents=True)
    for file in (catalog.home() / catalog.DEFAULT).parent.glob("prompts/*"):
        (beside / "prompts" / file.name).write_bytes(file.read_bytes())
    (beside / "engine.lock").write_bytes((catalog.home() / catalog.DEFAULT / "engine.lock").read_bytes())
    (beside / "recipe.json").write_text(json.dumps(data))
    return beside


@pytest.mark.engine
def test_the_arguments_are_held_against_the_build_that_is_installed(tmp_path, prepared, monkeypatch):
    monkeypatch.setenv("LLMREPRO_CACHE", str(prepared[0].path.parent.parent))
    installed = [step for step in of(catalog.DEFAULT) if step.done]
    assert [step.stage for step in installed] == ["python", "environment", "packages"]
    old = recipe_with(tmp_path, lambda data: data["servers"][0]["args"].append("--mlock"))
    first = next(step for step in of(str(old)) if step.stage == "server")
    assert "--mlock is --load-mode mmap+mlock in this build" in first.text
    assert "in the --help of the build that is installed here" in first.text
    (tmp_path / "again").mkdir()
    wrong = recipe_with(tmp_path / "again", lambda data: data["servers"][0]["args"].append("--flash-atn"))
    first = next(step for step in of(str(wrong)) if step.stage == "server")
    assert first.argv == []
    assert "has no argument '--flash-atn'" in first.text


def test_an_argument_that_vllm_has_not_is_found_whatever_its_spelling(monkeypatch, tmp_path):
    recipe = catalog.load("smollm2-135m/vllm--cpu")
    known = frozenset({"--max-model-len", "--compilation-config", "--enforce-eager", "-O"})
    made = environment.Environment(tmp_path, "key", "", 0.0)

    class Engine:
        def flags(self, place, install):
            return known

    def told(*args):
        server = recipe.servers[0].model_copy(update={"args": list(args)})
        return commands._checked(Engine(), recipe, server, made)

    assert "installed here" in told("--max_model_len=5", "--compilation-config.mode", "3", "-O3", "x")
    with pytest.raises(engines.EngineError, match="this build of vllm has no argument --max-modle-len"):
        told("--enforce-eager", "--max-modle-len=5")


def test_the_command_line_shows_it_and_makes_no_folder(tmp_path):
    runs_dir = tmp_path / "runs"
    shown = CliRunner().invoke(cli.main, ["run", "--dry-run", "--runs-dir", str(runs_dir)])
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert lines[0].startswith(f"# {catalog.DEFAULT}: ")
    assert lines[1] == "# It runs here."
    assert any(" pip sync --require-hashes " in line for line in lines if not line.startswith("#"))
    assert not runs_dir.exists()
    assert not (tmp_path / "cache").exists()


def test_the_command_line_says_what_lacks_and_refuses_what_makes_no_sense(tmp_path):
    path = recipe_with(tmp_path, lambda data: data["needs"].update(memory_gib=100000))
    shown = CliRunner().invoke(cli.main, ["run", str(path), "--dry-run"])  # from elsewhere: looking needs no trust
    assert shown.exit_code == 0
    assert "It does not run here, where a run shows what is published: it needs 100000 GiB" in shown.output
    refused = CliRunner().invoke(cli.main, ["run", "--dry-run", "--resume", str(tmp_path)])
    assert refused.exit_code == 1
    assert "leave --resume out" in refused.output
