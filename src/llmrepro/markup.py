"""HTML from values: everything is escaped but what this module made itself, so hostile text stays text."""

import html
import re
from collections.abc import Iterable, Sequence

ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]")
# What HTML forbids or what could reorder the line around it: control characters, surrogates, non-characters,
# direction overrides.
UNSHOWABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef"
    "\ufffe\uffff\U000e0000-\U000e007f]"
)
VOID = {"br", "img"}


class Html(str):
    """Text that is HTML already: only `tag` and `join` make it."""


def escaped(value: object) -> Html:
    """A value as HTML; what is HTML already stays as it is."""
    return value if isinstance(value, Html) else Html(html.escape(showable(value)))


def showable(value: object) -> str:
    """A value as text without terminal colours, what cannot be shown replaced by a mark."""
    text = ANSI.sub("", str(value)).replace("\r\n", "\n").replace("\r", "\n")
    return UNSHOWABLE.sub("\ufffd", text)


def tag(name: str, *children: object, **attributes: object) -> Html:
    """An element. Attribute `class_` is `class`, `_` in a name is `-`; an attribute of None is left out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{said}>" + ("" if name in VOID else f"{join(children)}</{name}>"))


def join(parts: Iterable[object], between: str = "") -> Html:
    return Html(escaped(between).join(escaped(p) for p in parts if p is not None))


def table(
    caption: str,
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    words: Iterable[int] = (),
    ids: Sequence[str] | None = None,
) -> Html:
    """A table in a box of its own that scrolls sideways. The first cell of a row names it; columns whose
    index is in `words` read left to right as text, the others hold numbers. `ids` are the rows' anchors.
    """
    left = {0, *words}
    columns = [tag("th", cell, scope="col", class_=None if i in left else "number") for i, cell in enumerate(head)]
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            *(tag("td", cell, class_=None if i in left else "number") for i, cell in enumerate(row[1:], 1)),
            id=ids[place] if ids else None,
        )
        for place, row in enumerate(rows)
    ]
    return tag(
        "div",
        tag("table", tag("caption", caption), tag("thead", tag("tr", *columns)), tag("tbody", *body)),
        class_="scroll",
        role="region",
        tabindex="0",
        aria_label=caption,
    )


def facts(caption: str, pairs: Iterable[tuple[object, object]]) -> Html:
    """A table of two columns, name and value, without a head."""
    rows = [tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in pairs]
    return tag(
        "div",
        tag("table", tag("caption", caption), tag("tbody", *rows), class_="facts"),
        class_="scroll",
        role="region",
        tabindex="0",
        aria_label=caption,
    )


def folded(summary: object, *children: object, id: str | None = None) -> Html:
    return tag("details", tag("summary", summary), *children, id=id)


def code(text: object) -> Html:
    """A block of text that keeps its lines; long ones scroll in their own box."""
    return tag("pre", tag("code", text), tabindex="0")


def short_hash(value: str) -> Html:
    """The first twelve digits of a long hash, the whole of it in the title."""
    return tag("code", f"{value[:12]}…", title=value)


def is_hash(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{40,64}", value) is not None
