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


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["--speculative-config.model", "evil"],
            "is a part of --speculative-config; give --speculative-config as",
        ),
        (["--speculative_config", '{"model": "/evil"}'], "drafts with '/evil', which the recipe does not pin"),
        (["--speculative_config={}"], None),
        (["--speculative-config", '{"model": "{draft}", "revision": "x"}'], "may not set 'revision'"),
        (["--speculative-config"], "--speculative-config needs a value after it"),
        (["--speculative-config", "[" * 1500], "--speculative-config needs a JSON object"),
        (["-sc", "{}"], "-sc would load, serve or write something"),
        (["-sc.model", "/evil"], "-sc would load, serve or write something"),
        (["-s", "{}"], "-s would load, serve or write something"),
        (["--speculative-c", "{}"], "can be read as short for --speculative-config, write it in full"),
        (["--model_draft", "evil"], "--model-draft drafts with 'evil'"),
        (["--model-draft", "{draft}"], None),
        (["evil/model"], "stands where a flag is due"),
        (["--ctx-size", "8", "evil/model"], "--ctx-size has a value already"),
        (["--ctx-size=8", "evil/model"], "--ctx-size has a value already"),
        (["--cudagraph-capture-sizes", "1", "2", "4"], None),
        (["--cudagraph-capture-sizes", "1", "evil"], "--cudagraph-capture-sizes has a value already"),
        (["--enforce-eager", "evil"], "stands where a flag is due"),
        (["--", "evil"], "-- can be read as short for"),
        (["--n-gpu-layers", "-1"], None),
        (["-O3"], None),
        (["-O.backend=x"], "is a short flag and more in one word"),
        (["-c", '{"backend": "x"}'], "give the long form of a flag that takes an object"),
        (["--compilation-config", '{"backend": "x.y"}'], "--compilation-config may not set 'backend'"),
        (["--compilation-config", '{"cache-dir": "/x"}'], "--compilation-config may not set 'cache_dir'"),
        (["--compilation-config.debug_dump_path", "x"], "is a part of --compilation-config"),
        (["--compilation-config", '{"pass_config": {"dump": "/x"}}'], "pass_config takes plain values"),
        (["--compilation-config", '{"mode": 3, "pass_config": {"eliminate_noops": true}}'], None),
        (["--compilation-config", "3"], None),
        (["--lookup-cache-dynamic", "/x"], "--lookup-cache-dynamic would load, serve or write"),
        (["--lora_scaled", "/x"], "--lora-scaled would load, serve or write"),
        (["--fim-qwen-1.5b-default"], "would load, serve or write"),
        (["--gpt-oss-20b-default"], "would load, serve or write"),
        (["--vision-gemma-4b-default"], "would load, serve or write"),
        (["--grammar", "root ::= [a]"], None),
        (["--ctx-size", "9" * 400], "has a number of more than 18 digits"),
    ],
)
def test_no_argument_names_a_model_or_code_that_is_not_pinned(data, args, said):
    data["servers"][0]["args"] = args
    if said is None:
        assert validated(data, "here").servers[0].args == args
    else:
        assert said in refusal(data)


@pytest.mark.parametrize("text", ["x\ntouch /tmp/P\n#", "x\r", "\x1b[2J", "\x7f", "\x9b2J", "\u2028", "\u202e"])
@pytest.mark.parametrize(
    "change",
    [
        lambda d, text: d.update(title=text),
        lambda d, text: d["engine"].update(fixes=[{"name": "cu13-nvcc", "lock": f"a{text}"}]),
        lambda d, text: d["engine"].update(unstated={"x": text}),
        lambda d, text: d["claims"][0].update(locator=text),
        lambda d, text: d["servers"][0]["args"].append(f"--grammar={text}"),
        lambda d, text: d["servers"][0].update(env={"GGML_X": text}),
        lambda d, text: d.update(conditions={"noted": {"host": text}}),
        lambda d, text: d.update(out_of_scope=["x", text]),
    ],
)
def test_every_text_of_a_recipe_is_one_line(data, change, text):
    change(data, text)
    assert "has the control character" in refusal(data)


def test_a_refusal_repeats_no_control_character_of_a_key(data):
    data["x\n\x1b[2J"] = 1
    assert "\x1b" not in refusal(data)


ATTENTION = {"full_layers": 4, "kv_heads": 2, "head_dim": 64, "locator": "here"}


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("attention", "kv_heads", 10**300),
        ("attention", "full_layers", 10**200),
        ("attention", "full_layers", 0),
        ("attention", "head_dim", 10**7),
        ("parameters", "total_b", 1e-300),
        ("parameters", "active_b", 1e300),
        ("parameters", "active_b", 2.0),
        ("memory", "bandwidth_gb_s", 1e308),
        ("memory", "bandwidth_gb_s", 5e-324),
    ],
)
def test_sizes_that_no_model_or_machine_has_are_refused(data, part, key, value):
    parts = {
        "attention": ATTENTION,
        "parameters": {"total_b": 1.0, "locator": "here"},
        "memory": {"bandwidth_gb_s": 100.0, "kind": "nominal", "locator": "here"},
    }
    data["memory"] = parts["memory"]
    data["model"]["shape"] = {"attention": parts["attention"], "parameters": parts["parameters"]}
    validated(data, "here")
    data["memory"], data["model"] = copy.deepcopy(data["memory"]), copy.deepcopy(data["model"])
    (data["memory"] if part == "memory" else data["model"]["shape"][part])[key] = value
    assert part in refusal(data)


@pytest.mark.parametrize(
    ("metric", "change", "said"),
    [
        ("decode_tps", {"value": {"point": -1.0}}, "value.point"),
        ("decode_tps", {"value": {"point": 0.0}}, "decode_tps, in tok/s, is above nought"),
        ("ttft_s", {"value": {"range": [0.0, 1.0]}}, "ttft_s, in s, is above nought"),
        ("decode_tps", {"value": {"about": 1e-320}}, "a number is nought or 1e-09 to 1e+15 in size"),
        ("decode_tps", {"value": {"at_most": 1e308}}, "a number is nought or 1e-09 to 1e+15 in size"),
        ("decode_tps", {"value": {"words": " "}}, "value.words"),
        ("outcome", {"value": {"completed_to": -5}}, "value.completed_to"),
        ("output_tokens", {"value": {"exact": -1}}, "output_tokens is never below nought"),
        ("decode_tps", {"n": -3}, ".n: "),
        ("decode_tps", {"n": 0}, ".n: "),
        ("decode_tps", {"spread": [3.0, 2.0]}, "a spread goes from low to high"),
        ("decode_tps", {"samples": [1.0, 0.0]}, "samples.1"),
        ("decode_tps", {"conditions": {"noted": {"threads": 10**400}}}, "a number is nought or"),
    ],
)
def test_a_claim_that_contradicts_itself_is_refused(data, metric, change, said):
    claim = {"id": "c", "metric": metric, "unit": terms.METRICS[metric].unit, "value": {"point": 9.0}}
    data["claims"] = [{**claim, "evidence": "stated", "locator": "here", **change}]
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
