"""Verdicts and relations as the report shows them, and the few values that have a look of their own."""

from llmrepro.markup import Html, is_hash, short_hash, tag

LONG = 30  # characters of a word that would push what stands right of it out of sight
# Sign, words, look: a word is told by its text and its sign, the colour only repeats it.
WORDS = {
    "reproduced": ("✓", "reproduced", "good"),
    "not_reproduced": ("✗", "not reproduced", "bad"),
    "inconclusive": ("≈", "inconclusive", "open"),
    "not_comparable": ("≠", "not comparable", "open"),
    "not_evaluated": ("–", "not evaluated", "none"),
}
RELATIONS = {
    "equal": ("=", "equal", "good"),
    "differs": ("≠", "differs", "bad"),
    "unknown_here": ("?", "unknown here", "open"),
    "unstated_there": ("–", "not stated", "none"),
}


def word(name: str) -> Html:
    sign, words, look = WORDS[name]
    return tag("span", tag("span", f"{sign} ", aria_hidden="true"), words, class_=f"word {look}")


def relation(name: str) -> Html:
    sign, words, look = RELATIONS[name]
    return tag("span", tag("span", f"{sign} ", aria_hidden="true"), words, class_=f"word {look}")


def value(text: str, value: object) -> Html:
    if is_hash(value):
        return short_hash(value)
    long = any(len(word) > LONG for word in text.split())
    return tag("span", text, class_="whole" if len(text) < 24 else "breaks" if long else None)
