"""Studies: what one cannot be is refused in a sentence that says where and what would do."""

import json

import pytest
from studies import ARMS, LLAMA, claim, study, written

from llmrepro import catalog
from llmrepro import study as studies
from llmrepro.recipe import RecipeError


def refused(tmp_path, *claims, **changes) -> str:
    with pytest.raises(RecipeError) as told:
        catalog.load_study(str(written(tmp_path, *claims, **changes)))
    return str(told.value)


@pytest.mark.parametrize("name", catalog.studies())
def test_every_study_of_the_kit_loads_and_fits_its_recipes(name):
    loaded = catalog.load_study(name)
    assert loaded.id == name
    assert len(loaded.arms) > 1


def test_the_default_study_is_there():
    assert catalog.DEFAULT_STUDY in catalog.studies()


def test_editors_complete_from_the_schema_that_the_models_give():
    schema = catalog.home() / "study.schema.json"
    assert json.loads(schema.read_text()) == studies.json_schema(), "run `make schema`"


def test_a_study_that_fits_loads(tmp_path):
    loaded = catalog.load_study(str(written(tmp_path, claim())))
    assert [a.id for a in loaded.arms] == ["llama-cpp", "vllm"]
    assert loaded.boots == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arm": []}, "arm: unknown key; did you mean 'arms'?"),
        ({"arms": ARMS[:1]}, "arms: List should have at least 2 items"),
        ({"arms": [ARMS[0], ARMS[0]]}, "two arms have the id 'llama-cpp'"),
        ({"boots": 0}, "boots: Input should be greater than or equal to 1 (found 0)"),
        ({"id": "two engines"}, "id: does not have the form"),
        (
            {"arms": [{**ARMS[0], "servers": ["defalt"]}, ARMS[1]]},
            f"arm 'llama-cpp': {LLAMA} has no server 'defalt'; did you mean 'default'?",
        ),
        ({"arms": [{**ARMS[0], "recipe": "smollm2-135m/lama"}, ARMS[1]]}, "no recipe is called"),
    ],
)
def test_a_study_that_cannot_be_is_refused(tmp_path, changes, said):
    assert said in refused(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"a": {"workload": "chat"}}, "claim 'faster': side `a` names no arm; give one of llama-cpp, vllm"),
        ({"a": {"arm": "lama-cpp"}}, "claim 'faster': no arm is called 'lama-cpp'; did you mean 'llama-cpp'?"),
        (
            {"a": {"arm": "llama-cpp", "workload": "chap"}},
            f"claim 'faster': {LLAMA} has no workload 'chap'; did you",
        ),
        ({"a": {"arm": "llama-cpp", "workload": "chat", "case": "x"}}, f"claim 'faster': {LLAMA} has no case 'x'"),
        (
            {"a": {"arm": "vllm", "server": "compiled"}},
            "arm 'vllm' leaves the server 'compiled' out; add it there",
        ),
        ({"a": {"arm": "vllm", "workload": "chat"}}, "`a` and `b` are the same"),
        ({"order": None}, "needs exactly one of order, ratio, at_least, at_most; found none"),
        ({"at_least": 1.0}, "found ['order', 'at_least']"),
        ({"order": None, "ratio": {"peak": 2.0}}, "not 'peak'"),
        ({"metric": "decode_tp"}, "did you mean 'decode_tps'?"),
    ],
)
def test_a_claim_that_cannot_be_is_refused(tmp_path, changes, said):
    assert said in refused(tmp_path, claim(**changes))


def test_two_claims_with_one_id_are_refused(tmp_path):
    assert "two claims have the id 'faster'" in refused(tmp_path, claim(), claim())


def test_an_unknown_study_is_named_with_the_nearest(tmp_path):
    with pytest.raises(RecipeError, match="did you mean 'smollm2-135m/two-engines'"):
        catalog.load_study("smollm2-135m/two-engine")


def test_an_arms_recipe_may_lie_beside_the_study(tmp_path):
    home = catalog.home() / LLAMA
    (tmp_path / "mine").mkdir()
    data = json.loads((home / "recipe.json").read_text()) | {"id": "smollm2-135m/mine"}
    (tmp_path / "mine" / "recipe.json").write_text(json.dumps(data))
    (tmp_path / "prompts").symlink_to(home.parent / "prompts")
    arms = [ARMS[0], {"id": "mine", "recipe": "mine/recipe.json"}]
    path = tmp_path / "study.json"
    path.write_text(json.dumps(study(arms=arms)))
    loaded = catalog.load_study(str(path))
    assert catalog.recipe_of(loaded.arms[1], path) == str(tmp_path / "mine" / "recipe.json")


@pytest.mark.parametrize("ratio", [{"range": [50.0, 20.0]}, {"about": 0.0}, {"range": [0.0, 2.0]}])
def test_a_ratio_that_no_measurement_can_have_is_refused(tmp_path, ratio):
    assert "a ratio is above nought, a range from low to high" in refused(tmp_path, claim(order=None, ratio=ratio))
