"""The recipes and studies there are: found by id in this repository, or by path elsewhere, with their prompts."""

import hashlib
import json
from pathlib import Path

from llmrepro import recipe as recipes
from llmrepro import study as studies_
from llmrepro import terms
from llmrepro.recipe import Recipe, RecipeError
from llmrepro.study import Arm, Study
from llmrepro.workload import Prompt

DEFAULT = "smollm2-135m/llama-cpp--cpu"
DEFAULT_STUDY = "smollm2-135m/two-engines"


def home() -> Path:
    """The recipes folder: beside the package's checkout, found from the package and never from the cwd."""
    return Path(__file__).resolve().parents[2] / "recipes"


def ids() -> list[str]:
    """Ids of this repository's recipes, the default first."""
    found = sorted(str(p.parent.relative_to(home())) for p in home().glob("*/*/recipe.json"))
    return sorted(found, key=lambda i: i != DEFAULT)


def path_of(name: str) -> Path:
    """The recipe.json of an id of this repository, or of a path to another one. Raises RecipeError."""
    if name in ids():
        return home() / name / "recipe.json"
    path = Path(name).expanduser()
    path = path / "recipe.json" if path.is_dir() else path
    if path.suffix == ".json" and path.is_file():
        return path.resolve()
    if Path(name).expanduser().is_dir():
        raise RecipeError(f"{Path(name).expanduser()} holds no recipe.json; give the folder or file of a recipe")
    if name in studies():
        raise RecipeError(f"{name} is a study, which compares recipes: `llmrepro compare {name}` measures it")
    raise RecipeError(
        f"no recipe is called {name!r}; {terms.nearest(name, ids())}. "
        "A recipe from elsewhere is given as the path of its recipe.json"
    )


def load(name: str) -> Recipe:
    """The recipe of an id or path. Raises RecipeError with every fault it has, each with its key's path."""
    path = path_of(name)
    recipe = recipes.validated(_parsed(path), str(path))
    if path.is_relative_to(home()) and recipe.id != str(path.parent.relative_to(home())):
        raise RecipeError(
            f"{path}: id is {recipe.id!r} but the folder says "
            f"{str(path.parent.relative_to(home()))!r}; make them equal"
        )
    for prompt in recipes.prompts(recipe):
        prompt_text(prompt, path.parent)
    return recipe


def studies() -> list[str]:
    """Ids of this repository's studies: the JSON files beside the recipes' folders."""
    return sorted(str(p.relative_to(home()).with_suffix("")) for p in home().glob("*/*.json"))


def study_path(name: str) -> Path:
    """The file of a study's id, or of a path to another one. Raises RecipeError."""
    if name in studies():
        return home() / f"{name}.json"
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return path.resolve()
    raise RecipeError(
        f"no study is called {name!r}; {terms.nearest(name, studies())}. A study from elsewhere is given as the "
        "path of its JSON file"
    )


def load_study(name: str) -> Study:
    """The study of an id or path, held against its arms' recipes. Raises RecipeError with every fault."""
    path = study_path(name)
    study = studies_.validated(_parsed(path), str(path))
    if path.is_relative_to(home()) and study.id != str(path.relative_to(home()).with_suffix("")):
        raise RecipeError(f"{path}: id is {study.id!r} but the file is called otherwise; make them equal")
    studies_.check(study, {arm.id: load(recipe_of(arm, path)) for arm in study.arms}, str(path))
    return study


def recipe_of(arm: Arm, study: Path) -> str:
    """What `load` takes for an arm's recipe: its id, or its path, which a study gives from its own folder."""
    return arm.recipe if arm.recipe in ids() else str(study.parent / arm.recipe)


def _parsed(path: Path):
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_unique, parse_constant=_number)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 ({error.reason}); save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: not JSON: {error}; mend the file at that place") from None


def _unique(pairs: list[tuple]) -> dict:
    """A JSON object whose keys are all different: of two, a reader would not see which one counts."""
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"the key {twice[0]!r} stands twice in one object")
    return dict(pairs)


def _number(word: str):
    raise ValueError(f"{word} is no number in JSON")


def prompt_text(prompt: Prompt, folder: Path) -> str:
    """The text of a prompt kept beside its recipe or in its model's folder, UTF-8, without the last newline.

    Raises RecipeError when the file is missing or its sha256 is another.
    """
    path = next((p for p in (folder / prompt.file, folder.parent / prompt.file) if p.is_file()), None)
    if path is None:
        raise RecipeError(
            f"prompt {prompt.id!r}: {prompt.file} lies neither in {folder} nor in the model's folder "
            "above it; restore it or mend the recipe's `file`"
        )
    try:
        text = path.read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"prompt {prompt.id!r}: {path} is not UTF-8 ({error.reason}); save it as UTF-8"
        ) from None
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != prompt.sha256:
        raise RecipeError(
            f"prompt {prompt.id!r}: {path} has sha256 {found}, the recipe says {prompt.sha256}; "
            "restore the text, or write the new hash into the recipe if the change is meant"
        )
    return text
