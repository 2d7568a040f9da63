"""A publication's own prompts: asked where they can be had and are the right ones; else ours, and it is said."""

import hashlib

import pytest
from publication import forge

from llmrepro import parameters, prompts, run_folder, stages
from llmrepro import run as runs
from llmrepro.run_folder import RunError

SCRIPT = b'''
ASKED = [("a", "How many plums?"), ("b", "How many pears?")]
def long_one(path):
    """Reads a file."""
    return "Read:\\n" + open(path).read() + "\\nSay what it is."
'''
NOVEL = "Zoë went ashore. " * 40


@pytest.fixture
def served(monkeypatch):
    with forge(monkeypatch) as made:
        made.files |= {"bench/ask.py": SCRIPT, "novel.txt": NOVEL.encode()}
        yield made


@pytest.fixture
def new_run(tmp_path):
    made = []

    def new(sources, **given):
        overrides = {f"workloads.{where}.source": source for where, source in sources.items()}
        values = {"runs_dir": str(tmp_path / "runs"), "overrides": overrides, **given}
        made.append(runs.create(parameters.checked(values)))
        return made[-1]

    yield new
    for run in made:
        run.close()


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def literal(served, address, **more):
    return {"pieces": [served.source("bench/ask.py", literal=address)], **more}


def test_a_published_text_is_asked_and_kept_with_its_hash(served, new_run, tmp_path):
    plums = literal(served, "ASKED[0][1]", sha256=sha256("How many plums?"), prompt_tokens=5)
    run = new_run({"chat.prompts.code_runs": plums, "chat.warmup": literal(served, "ASKED[1][1]")})
    ours = prompts.asked(run.path)
    assert prompts.published(run.recipe) == {"chat/code_runs": sha256("How many plums?"), "chat/warmup": None}
    assert prompts.fetch(run, tmp_path) == []
    theirs = {"chat/code_runs": sha256("How many plums?"), "chat/warmup": sha256("How many pears?")}
    assert prompts.asked(run.path) == ours | theirs
    assert run_folder.read_json(run.path / "published_prompts.json") == theirs
    texts = prompts.texts(run.path)
    assert texts["chat/code_runs"] == "How many plums?"
    assert texts["chat/warmup"] == "How many pears?" != texts["prefill/warmup"]
    assert {name: sha256(text) for name, text in texts.items()} == prompts.asked(run.path)
    assert [path for path, _ in served.seen] == ["bench/ask.py"], "a file of two prompts is fetched once"


def test_pieces_are_joined_with_nothing_between(served, new_run, tmp_path):
    pieces = [
        served.source("bench/ask.py", literal="long_one()[0]"),
        served.source("novel.txt", slice=[1, 16]),
        served.source("bench/ask.py", literal="long_one()[1]"),
    ]
    run = new_run({"prefill.text": {"pieces": pieces}})
    assert prompts.fetch(run, tmp_path) == []
    assert prompts.texts(run.path)["prefill/harbour"] == "Read:\noë went ashore.\nSay what it is."


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"sha256": "0" * 64}, "has sha256 [0-9a-f]{64}, the recipe says 0000"),
        ({"literal": "GONE"}, "bench/ask.py of https://github.com/a/b: GONE is never assigned .*`literal`"),
        ({"path": "gone.py"}, "gone.py answered 404"),
        ({"path": "latin.txt", "literal": None}, "latin.txt of .* is not UTF-8"),
        ({"path": "half.py", "literal": "HALF"}, "half a character"),
        ({"path": "novel.txt", "literal": None, "slice": [0, 9999]}, "680 characters, and 0 to 9,999 .*`slice`"),
        ({"path": "novel.txt", "literal": None, "slice": [5, 5]}, "and 5 to 5 of them are wanted"),
        ({"repo": "https://example.org/a/b"}, "are fetched from github.com"),
    ],
)
def test_what_is_not_the_published_text_leaves_ours_and_says_why(served, new_run, tmp_path, source, said):
    served.files |= {"latin.txt": b"caf\xe9", "half.py": b"HALF = '\\ud800'"}
    of = {"sha256": source.pop("sha256")} if "sha256" in source else {}
    piece = {**served.source("bench/ask.py", literal="ASKED[0][1]"), **source}
    run = new_run({"chat.prompts.code_runs": {"pieces": [piece], **of}})
    ours, texts = prompts.asked(run.path), prompts.texts(run.path)
    (sentence,) = prompts.fetch(run, tmp_path)
    assert sentence.startswith("a text of ours is asked for chat/code_runs: ")
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(sentence)
    assert (prompts.asked(run.path), prompts.texts(run.path)) == (ours, texts)
    assert run_folder.read_json(run.path / "published_prompts.json") == {}


def test_one_reason_for_several_prompts_is_said_once(served, new_run, tmp_path):
    del served.files["bench/ask.py"]
    source = literal(served, "ASKED[0][1]")
    run = new_run({"chat.prompts.code_runs": source, "chat.prompts.plan_move": source})
    (sentence,) = prompts.fetch(run, tmp_path)
    assert sentence.startswith("texts of ours are asked for chat/code_runs, chat/plan_move: ")
    assert len(served.seen) == 1


def test_a_run_with_records_keeps_the_texts_that_it_began_with(served, new_run, tmp_path):
    script = served.files.pop("bench/ask.py")
    run = new_run({"chat.prompts.code_runs": literal(served, "ASKED[0][1]")})
    ours = prompts.asked(run.path)
    prompts.fetch(run, tmp_path)
    served.files["bench/ask.py"] = script
    (run.path / "records.jsonl").write_text('{"case": "code_runs"}\n')
    assert prompts.fetch(run, tmp_path) == [
        "a text of ours is asked for chat/code_runs: this run began with it, and goes on as it began"
    ]
    assert prompts.asked(run.path) == ours
    (run.path / "records.jsonl").unlink()
    assert prompts.fetch(run, tmp_path) == []
    assert prompts.asked(run.path) != ours
    (run.path / "records.jsonl").write_text('{"case": "code_runs"}\n')
    del served.files["bench/ask.py"]
    assert prompts.fetch(run, tmp_path / "another cache") == []
    assert prompts.asked(run.path) != ours


def test_a_recipe_without_a_publications_prompts_fetches_nothing(served, new_run):
    run = new_run({})
    assert prompts.fetch(run) == []
    assert not (run.path / "published_prompts.json").exists()
    assert prompts.published(run.recipe) == {}


@pytest.mark.parametrize("mode", ["published", "live"])
def test_prepare_fetches_in_a_live_run_only_and_says_what_it_did_not_get(
    served, new_run, monkeypatch, capsys, tmp_path, mode
):
    monkeypatch.setenv("LLMREPRO_CACHE", str(tmp_path / "cache"))

    def installing(*_):
        raise RuntimeError("installing began")

    monkeypatch.setattr(stages.environment, "prepare", installing)
    run = new_run({"chat.prompts.code_runs": literal(served, "GONE")}, mode=mode)
    stages.machine(run)
    if mode == "live":
        with pytest.raises(RuntimeError, match="installing began"):
            stages.prepare(run)
    else:
        stages.prepare(run)
    said = capsys.readouterr().out
    assert ("a text of ours is asked for chat/code_runs: " in said) == bool(served.seen) == (mode == "live")


def test_texts_that_were_changed_or_lost_in_the_folder_are_not_asked(served, new_run, tmp_path):
    run = new_run({"chat.prompts.code_runs": literal(served, "ASKED[0][1]")})
    prompts.fetch(run, tmp_path)
    kept = run_folder.read_json(run.path / "prompts.json")
    run.write_json("prompts.json", {**kept, sha256("How many plums?"): "How many peaches?"})
    with pytest.raises(RunError, match="a text has not the sha256"):
        prompts.texts(run.path)
    run.write_json("prompts.json", {k: v for k, v in kept.items() if k != sha256("How many plums?")})
    with pytest.raises(RunError, match="the text of chat/code_runs is gone"):
        prompts.texts(run.path)
