"""A recipe is refused in sentences that name the key's path and what would be right."""

import copy
import hashlib
import json

import pytest
from packaging.utils import canonicalize_name

from llmrepro import catalog, terms
from llmrepro.recipe import RecipeError, json_schema, prompts, validated


@pytest.fixture
def data():
    return json.loads((catalog.home() / catalog.DEFAULT / "recipe.json").read_text())


def refusal(data) -> str:
    with pytest.raises(RecipeError) as refused:
        validated(data, "here")
    return str(refused.value)


@pytest.mark.parametrize("name", catalog.ids())
def test_every_recipe_of_the_kit_loads_with_its_prompts_and_its_lock(name):
    recipe = catalog.load(name)
    assert recipe.id == name
    lock = (catalog.home() / name / "engine.lock").read_text()
    wanted = [w for w in (catalog.home() / name / "engine.in").read_text().splitlines() if w and w[0] not in "#-"]
    assert wanted
    assert all(f"\n{canonicalize_name(line.partition('=')[0])}==" in lock for line in wanted)
    assert "--hash=sha256:" in lock
    if recipe.engine.install.kind == "wheel":
        pins = recipe.engine.install.pins.items()
        assert all(f"\n{canonicalize_name(package)}=={version}" in lock for package, version in pins)


def test_the_default_recipe_stands_first():
    assert catalog.ids()[0] == catalog.DEFAULT == "smollm2-135m/llama-cpp--cpu"


def test_the_committed_schema_is_the_models_own():
    assert json.loads((catalog.home() / "schema.json").read_text()) == json_schema()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(titel="x"), "titel: unknown key; did you mean 'title'?"),
        (lambda d: d.pop("title"), "title: is needed and absent"),
        (
            lambda d: d["engine"].update(name="lama-cpp"),
            "engine.name: no engine is called 'lama-cpp'; did you mean 'llama-cpp'?",
        ),
        (lambda d: d["engine"].update(fixes=[{"name": "cu14"}]), "engine.fixes.0.name: no fix is called 'cu14'"),
        (
            lambda d: d["engine"]["install"].update(knd="wheel"),
            "engine.install.knd: unknown key; did you mean 'kind'?",
        ),
        (lambda d: d["workloads"][0].update(kind="chatt"), "workloads.0.kind: "),
        (lambda d: d["workloads"][0].update(repeats="5"), "workloads.0.repeats: Input should be a valid integer"),
        (
            lambda d: d["workloads"][0].update(on=["defualt"]),
            "no server is called 'defualt'; did you mean 'default'?",
        ),
        (
            lambda d: d["claims"][0].update(metric="decode_tp"),
            "claims.0.metric: no metric is called 'decode_tp'; did you mean 'decode_tps'?",
        ),
        (lambda d: d["claims"][1].update(unit="GB"), "model.bytes is in 'B', not 'GB'"),
        (
            lambda d: d["claims"][2].update(value={"exact": "30"}),
            "model.layers is a whole number, found '30'; mind",
        ),
        (lambda d: d["claims"][0].update(value={"exact": 7}), "model.sha256 is a text, found 7"),
        (
            lambda d: d["claims"][-1].update(metric="decode_tps", unit="tok/s"),
            "decode_tps is measured and never exact",
        ),
        (lambda d: d["claims"][0].update(value={}), "claims.0.value: needs exactly one of exact, point, range"),
        (lambda d: d["claims"][0].update(value={"exact": 1, "about": 2}), "needs exactly one of"),
        (lambda d: d["claims"][-1].update(case="story"), "no case is called 'story'; did you mean 'story_"),
        (lambda d: d["servers"].append(d["servers"][0]), "two servers have the id 'default'"),
        (lambda d: d["model"]["files"][0].update(sha256="abc"), "model.files.0.sha256: "),
        (
            lambda d: d["workloads"][0].update(warmup=d["workloads"][0]["prompts"][0]),
            "must not be a measured prompt",
        ),
    ],
)
def test_a_fault_is_named_with_its_path_and_what_would_be_right(data, change, said):
    change(data)
    assert said in refusal(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["servers"][0]["args"].extend(["--host", "0.0.0.0"]), "--host is set by the kit"),
        (lambda d: d["servers"][0]["args"].append("--port=1"), "--port is set by the kit"),
        (lambda d: d["servers"][0]["args"].extend(["--api-key", "x"]), "--api-key is set by the kit"),
        (lambda d: d["servers"][0]["args"].extend(["-hf", "a/b"]), "-hf would load, serve or write something"),
        (lambda d: d["servers"][0]["args"].append("--log-file=/x"), "--log-file would load, serve or write"),
        (
            lambda d: d["servers"][0]["args"].append("--middlewar"),
            "--middlewar can be read as short for --middleware",
        ),
        (lambda d: d["servers"][0]["args"].append("--served_model_name"), "--served-model-name is set by the kit"),
        (lambda d: d["servers"][0]["args"].append("--load_format=pt"), "--load-format would load, serve or write"),
        (lambda d: d["servers"][0].update(env={"LLAMA_ARG_MODEL": "/x"}), "LLAMA_ARG_MODEL may not be set"),
        (lambda d: d["servers"][0].update(env={"GGML_BACKEND_PATH": "/x"}), "GGML_BACKEND_PATH may not be set"),
        (lambda d: d["servers"][0].update(env={"OMP_TOOL_LIBRARIES": "/x"}), "OMP_TOOL_LIBRARIES may not be set"),
        (lambda d: d["servers"][0].update(env={"LD_PRELOAD": "/x.so"}), "LD_PRELOAD may not be set by a recipe"),
        (lambda d: d["servers"][0].update(env={"LLAMA_API_KEY": "x"}), "LLAMA_API_KEY may not be set by a recipe"),
        (lambda d: d["model"]["files"][0].update(path="../x.gguf"), "must be a relative path that stays inside"),
        (lambda d: d["model"]["files"][0].update(path="x.pt"), "a pickle can run code"),
        (lambda d: d["workloads"][0]["prompts"][0].update(file="/etc/passwd"), "must be a relative path"),
        (lambda d: d["engine"]["install"].update(build={"GGML_X": "$(shell id)"}), "plain words only"),
        (lambda d: d["engine"]["install"].update(pins={"x": "1 --upload-pack=sh"}), "engine.install.pins"),
        (lambda d: d["source"].update(url="http://example.org"), "source.url"),
        (lambda d: d["source"].update(url="javascript:alert(1)"), "source.url"),
        (lambda d: d.update(id="../../etc/x"), "id: "),
    ],
)
def test_what_a_recipe_may_not_ask_is_refused(data, change, said):
    change(data)
    assert said in refusal(data)


def test_every_fault_of_a_recipe_is_told_at_once(data):
    data["titel"] = "x"
    data["engine"]["name"] = "x"
    del data["question"]
    assert len(refusal(data).splitlines()) == 4  # the file, then a line each


def test_an_unknown_recipe_is_refused_with_the_nearest_id():
    with pytest.raises(RecipeError, match="did you mean 'smollm2-135m/llama-cpp--cpu'"):
        catalog.load("smollm2-135m/llamacpp--cpu")


def test_a_recipe_from_elsewhere_is_given_by_its_path(tmp_path, data):
    (tmp_path / "recipe.json").write_text(json.dumps(data))
    with pytest.raises(RecipeError, match="lies neither in"):
        catalog.load(str(tmp_path))  # its prompts are not beside it
    for prompt in prompts(validated(data, "")):
        (tmp_path / "prompts").mkdir(exist_ok=True)
        text = catalog.prompt_text(prompt, catalog.home() / catalog.DEFAULT)
        (tmp_path / prompt.file).write_text(text + "\n")
    assert catalog.load(str(tmp_path / "recipe.json")).id == catalog.DEFAULT


def test_a_changed_prompt_is_refused_with_both_hashes(tmp_path, data):
    for prompt in prompts(validated(data, "")):
        (tmp_path / "prompts").mkdir(exist_ok=True)
        (tmp_path / prompt.file).write_text("something else\n")
    (tmp_path / "recipe.json").write_text(json.dumps(data))
    found = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(RecipeError, match=f"has sha256 {found}, the recipe says"):
        catalog.load(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"id": "a/b", "id": "c/d"}', "the key 'id' stands twice in one object"),
        (b'{"n": NaN}', "NaN is no number in JSON"),
        (b"\xff\xfe{}", "save it as UTF-8"),
        (b"[" * 100000, "not JSON"),
        (b"[]", "the recipe: "),
    ],
)
def test_what_is_no_plain_json_is_refused(tmp_path, content, said):
    (tmp_path / "recipe.json").write_bytes(content)
    with pytest.raises(RecipeError, match=said):
        catalog.load(str(tmp_path))


def test_a_byte_order_mark_does_no_harm(tmp_path):
    (tmp_path / "recipe.json").write_bytes(b"\xef\xbb\xbf{}")
    with pytest.raises(RecipeError, match="id: is needed and absent"):
        catalog.load(str(tmp_path))


def test_a_folder_without_a_recipe_is_told(tmp_path):
    with pytest.raises(RecipeError, match=r"holds no recipe\.json"):
        catalog.load(str(tmp_path))


def test_a_prompt_that_is_not_utf8_is_named(tmp_path, data):
    for prompt in prompts(validated(data, "")):
        (tmp_path / "prompts").mkdir(exist_ok=True)
        (tmp_path / prompt.file).write_bytes("naïve".encode("latin-1"))
    (tmp_path / "recipe.json").write_text(json.dumps(data))
    with pytest.raises(RecipeError, match="is not UTF-8 .*; save it as UTF-8"):
        catalog.load(str(tmp_path))


def test_a_broken_file_is_refused_at_its_place(tmp_path):
    (tmp_path / "recipe.json").write_text('{"id": ')
    with pytest.raises(RecipeError, match="not JSON: .*line 1"):
        catalog.load(str(tmp_path))


@pytest.mark.parametrize(
    ("workload", "change", "said"),
    [
        (
            "prefix",
            {"prompts": []},
            "needs `text` and `head_tokens` for its head, and as tails at least 3 of `prompts`",
        ),
        ("restart", {"head_tokens": None}, "needs `text` and `head_tokens` for its head, and as tails at least 1"),
        ("prefix", {"cache": "off"}, 'is about the prompt cache; it needs `cache`: "on"'),
        ("prefix", {"restore": True}, "`fill` belongs to a prefix workload, `restore` to a restart workload"),
        ("restart", {"fill": 3}, "`fill` belongs to a prefix workload, `restore` to a restart workload"),
    ],
)
def test_a_workload_about_the_caches_says_what_it_needs(data, workload, change, said):
    next(w for w in data["workloads"] if w["id"] == workload).update(change)
    assert said in refusal(data)


def test_the_cases_of_a_cache_workload_follow_from_what_it_does(data):
    made = {w.id: w for w in validated(data, "here").workloads}
    assert made["prefix"].cases[-2:] == ["newest_after_fill", "oldest_after_fill"]
    assert made["restart"].cases == ["first", "second", "restarted", "restored"]
    for workload in data["workloads"]:
        workload.pop("fill", None), workload.pop("restore", None)
    data["comparisons"] = []
    made = {w.id: w for w in validated(data, "here").workloads}
    assert made["prefix"].cases[-1] == "original_again"
    assert made["restart"].cases == ["first", "second", "restarted"]


def test_a_sdist_needs_its_hash(data):
    changed = copy.deepcopy(data)
    changed["engine"]["install"] = {"kind": "sdist", "pins": {"x": "1"}}
    assert "an sdist needs exactly one pin and its sha256" in refusal(changed)


def test_every_metric_says_its_unit_and_which_way_is_better():
    assert all(m.better in {"higher", "lower", None} and m.title for m in terms.METRICS.values())
    assert terms.engines() == ["llama-cpp", "open-jet", "vllm"]
