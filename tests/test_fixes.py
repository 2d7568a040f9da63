"""A fix is a build step: named in a recipe, explained on a page, proved before the environment counts."""

import inspect
import json
from hashlib import sha256
from pathlib import Path

import pytest
from publication import forge
from wheels import write_wheel

from llmrepro import catalog, environment, fixes, terms
from llmrepro.environment import EnvironmentFailure
from llmrepro.fixes import Finding, FixFailure, FixModule
from llmrepro.install import Engine, Fix
from llmrepro.recipe import RecipeError, validated

PATCH = "--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
SHA256 = sha256(PATCH.encode()).hexdigest()
SOURCE = {"repo": "https://github.com/someone/something", "commit": "0" * 40, "path": "patches/m.patch"}


@pytest.mark.parametrize("name", terms.fixes())
def test_every_fix_does_the_four_things_and_has_its_page(name):
    module = fixes.load(name)
    for step in ("detect", "apply", "verify", "exports"):
        wanted = [p for p in inspect.signature(getattr(FixModule, step)).parameters if p != "self"]
        assert list(inspect.signature(getattr(module, step)).parameters) == wanted
    page = (catalog.home().parent / "appendix/fixes" / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {name}: ")
    for part in ("Symptom", "Cause", "What the kit does", "How it is verified", "What it leaves alone", "Sources"):
        assert f"\n## {part}\n" in page
    assert "https://github.com/" in page.partition("## Sources")[2]


def test_there_is_no_page_without_its_fix():
    pages = (catalog.home().parent / "appendix/fixes").glob("*.md")
    assert sorted(p.stem for p in pages) == terms.fixes() == ["cu13-nvcc", "patch-package"]


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        ({"name": "patch-package"}, "patch-package needs `package` and at least one of `patches`"),
        ({"name": "patch-package", "package": "vllm"}, "patch-package needs `package` and at least one of"),
        ({"name": "cu13-nvcc", "package": "vllm"}, "cu13-nvcc takes no `package` and no `patches`"),
        ({"name": "cu13-nvc"}, "no fix is called 'cu13-nvc'; did you mean 'cu13-nvcc'?"),
        ({"name": "cu13-nvcc", "pakage": "x"}, "unknown key; did you mean 'package'?"),
        ({"name": "patch-package", "package": "..", "patches": []}, "does not have the form"),
        ({"name": "patch-package", "package": "vllm", "patches": [{"sha256": SHA256}]}, "needs either `file`"),
        (
            {"name": "patch-package", "package": "x", "patches": [{"file": "../x.patch", "sha256": SHA256}]},
            "must be a relative path that stays inside",
        ),
        (
            {
                "name": "patch-package",
                "package": "x",
                "patches": [{"source": {**SOURCE, "commit": "main"}, "sha256": SHA256}],
            },
            "source.commit: does not have the form",
        ),
    ],
)
def test_a_fix_that_makes_no_sense_is_refused_in_the_recipe(fix, said):
    data = json.loads((catalog.home() / catalog.DEFAULT / "recipe.json").read_text())
    data["engine"]["fixes"] = [fix]
    with pytest.raises(RecipeError) as refused:
        validated(data, "here")
    assert said in str(refused.value)
    assert "engine.fixes.0" in str(refused.value)


def test_exports_follow_the_environment_to_where_it_lies_and_keep_the_path():
    told = fixes.exported(
        {"CUDA_HOME": "{environment}/cuda", "PATH": "{environment}/cuda/bin:{PATH}"}, Path("/e"), {"PATH": "/bin"}
    )
    assert told == {"CUDA_HOME": "/e/cuda", "PATH": "/e/cuda/bin:/bin"}


@pytest.fixture
def publication(monkeypatch):
    """A forge that serves one patch."""
    with forge(monkeypatch) as made:
        made.files["m.patch"] = PATCH.encode()
        yield made


def bring(tmp_path, **patch):
    named = {"name": "patch-package", "package": "toy", "patches": [{"sha256": SHA256, **patch}]}
    fix = Fix.model_validate(named)
    fixes.bring(fix, tmp_path, tmp_path / "cache", tmp_path / "environment")
    (brought,) = fixes.patch_files(tmp_path / "environment", fix)
    return brought.read_text()


def test_a_publications_patch_is_fetched_once_and_kept(tmp_path, publication):
    source = publication.source("m.patch")
    assert bring(tmp_path, source=source) == PATCH
    assert bring(tmp_path, source=source) == PATCH
    assert [path for path, _ in publication.seen] == ["m.patch"]


def test_a_patch_of_another_hash_is_refused_each_time(tmp_path, publication):
    for _ in range(2):
        with pytest.raises(FixFailure, match=f"has sha256 {SHA256}, the recipe says {'1' * 64}"):
            bring(tmp_path, source=publication.source("m.patch"), sha256="1" * 64)
    assert not list((tmp_path / "environment").rglob("*.patch"))


def test_a_patch_that_cannot_be_fetched_is_told(tmp_path, publication):
    with pytest.raises(FixFailure, match="a publication's patch: .*gone.patch.*404"):
        bring(tmp_path, source=publication.source("gone.patch"))


def test_a_patch_of_ours_lies_beside_the_recipe(tmp_path):
    with pytest.raises(FixFailure, match="the patch m.patch beside the recipe is missing"):
        bring(tmp_path, file="m.patch")
    (tmp_path / "m.patch").write_text(PATCH + "# changed\n")
    with pytest.raises(FixFailure, match="the recipe says"):
        bring(tmp_path, file="m.patch")
    (tmp_path / "m.patch").write_text(PATCH)
    assert bring(tmp_path, file="m.patch") == PATCH


class StandIn:
    """A fix that writes a file and exports a variable."""

    wrong = None

    def detect(self, place, fix):
        return Finding(True, "it is always needed", {"looked_at": "nothing"})

    def apply(self, place, fix):
        (place / "made").write_text("x")
        return {"wrote": "made"}

    def verify(self, place, fix):
        if self.wrong:
            raise FixFailure(self.wrong, "mend it")
        return {"proved": True}

    def exports(self, place):
        return {"HERE": "{environment}/made"}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    monkeypatch.setattr(fixes, "load", lambda name: StandIn())
    monkeypatch.setattr(StandIn, "wrong", None)
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    (tmp_path / "engine.lock").write_text(write_wheel(tmp_path / "wheels", "toy", {"toy.py": "x = 1\n"}))


def prepare(tmp_path, *fixes_):
    engine = Engine(
        name="llama-cpp",
        version="1",
        install={"kind": "wheel", "pins": {"toy": "1.0"}},
        fixes=[Fix(name=name) for name in fixes_],
    )
    return environment.prepare(engine, tmp_path / "engine.lock", tmp_path / "install.log", tmp_path / "cache")


def test_a_fix_is_made_before_the_environment_counts_and_its_outcome_is_kept(tmp_path, stand_in):
    found = prepare(tmp_path, "cu13-nvcc")
    assert found.fixes == [
        {
            "name": "cu13-nvcc",
            "needed": True,
            "applied": True,
            "why": "it is always needed",
            "evidence": {"looked_at": "nothing", "wrote": "made", "proved": True},
            "exports": {"HERE": "{environment}/made"},
        }
    ]
    assert found.exports == {"HERE": "{environment}/made"}
    assert Path(fixes.exported(found.exports, found.path, {})["HERE"]).read_text() == "x"
    again = prepare(tmp_path, "cu13-nvcc")
    assert (again.seconds, again.fixes) == (0.0, found.fixes)


def test_without_the_fix_it_is_another_environment(tmp_path, stand_in):
    assert prepare(tmp_path, "cu13-nvcc").path != prepare(tmp_path).path
    assert prepare(tmp_path).fixes == []


def test_a_fix_that_does_not_hold_leaves_no_environment(tmp_path, stand_in, monkeypatch):
    monkeypatch.setattr(StandIn, "wrong", "it does not hold")
    with pytest.raises(EnvironmentFailure, match="the fix cu13-nvcc failed: it does not hold; mend it"):
        prepare(tmp_path, "cu13-nvcc")
    assert not list((tmp_path / "cache/environments").glob("*/.complete"))
    assert "it does not hold" in (tmp_path / "install.log").read_text()


def test_what_somebody_did_to_a_fix_is_a_change_of_the_environment(tmp_path, stand_in):
    found = prepare(tmp_path, "cu13-nvcc")
    (found.path / "made").write_text("y")
    assert prepare(tmp_path, "cu13-nvcc").seconds > 0
    assert (found.path / "made").read_text() == "x"
