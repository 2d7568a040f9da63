"""The words that this kit itself writes: the texts in its code and its recipes, which are public.

Such a word tells nothing of a person, and is no password, though a host be called gpu or a key completed.
"""

import re
from functools import cache
from pathlib import Path

KIT = Path(__file__).resolve().parent
QUOTED = re.compile(r'"([^"\n]+)"')


def holds(text: str) -> bool:
    """Whether a text stands there as a whole word or several, whatever its case."""
    return re.search(rf"(?<!\w){re.escape(text.lower())}(?!\w)", _written()) is not None


@cache
def _written() -> str:
    code = [text for path in KIT.rglob("*.py") for text in QUOTED.findall(path.read_text(encoding="utf-8"))]
    recipes = [path.read_text(encoding="utf-8") for path in (KIT.parents[1] / "recipes").rglob("*.json")]
    return "\n".join([*code, *recipes]).lower()
