"""The page over many runs: recipes, how each ended, their verdicts, and a link to each page."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from llmrepro import __version__, run_folder
from llmrepro.markup import Html, code, join, table, tag
from llmrepro.notation import NOTHING, number, plural
from llmrepro.report import page
from llmrepro.report.sections import Section
from llmrepro.report.words import WORDS, word
from llmrepro.summary import Row

# Sign, words, look, as of verdicts; what is not here is told by the row's `did`.
OUTCOMES = {
    "completed": ("✓", "completed", "good"),
    "lacking": ("–", "shown as published", "none"),
    "imported": ("–", "imported", "none"),
    "failed": ("✗", "failed", "bad"),
    "stopped": ("■", "stopped", "open"),
    "interrupted": ("✗", "interrupted", "bad"),
    "running": ("…", "running", "open"),
    "unreadable": ("✗", "not readable", "bad"),
}
NO_RUN = {"refused": ("✗", "refused", "bad"), "not reached": ("–", "not reached", "none")}
BAD_ENDS = ("failed", "stopped", "interrupted", "unreadable")


def write(target: Path, rows: list[Row], earlier: list[Row], stopped: str, command: str) -> Path:
    """Write the page of a matrix's rows, and of what lies beside them, to `target`; links lead out from there."""
    return page.write(target, "Matrix", _head(rows, stopped), list(_sections(rows, earlier, command)), _foot())


def _head(rows: list[Row], stopped: str) -> Html:
    look = "bad" if any(row.failed for row in rows) or stopped else "good"
    if look == "good" and any("not_reproduced" in row.words for row in rows):
        look = "bad"
    elif look == "good" and not any(row.outcome == "completed" for row in rows):
        look = "none"
    return join(
        [
            tag("p", f"llmrepro matrix · {run_folder.now()[:16].replace('T', ' ')} UTC", class_="from quiet"),
            tag("h1", "Every recipe, and whether it holds"),
            tag(
                "div",
                tag("p", ends(rows), class_="outcome"),
                tag("p", verdicts(rows), class_="said"),
                tag("p", tag("strong", "Ended early: "), stopped) if stopped else None,
                class_=f"verdict {look}",
            ),
        ]
    )


def ends(rows: list[Row]) -> str:
    """How many runs ended in which way, in a sentence."""
    found = Counter(outcome(row)[1] for row in rows)
    return (
        f"{plural(len(rows), 'run')}: {', '.join(f'{n} {name}' for name, n in found.items())}."
        if rows
        else ("No run is here.")
    )


def verdicts(rows: list[Row]) -> str:
    """What was found of the claims of all runs that measured, in a sentence."""
    words = Counter()
    for row in rows:
        if row.outcome == "completed":
            words.update(row.words)
    judged = {name: n for name, n in words.items() if name != "not_evaluated"}
    if not judged:
        return "No claim was tested."
    told = ", ".join(f"{judged[name]:,} {WORDS[name][1]}" for name in WORDS if name in judged)
    return f"{plural(sum(judged.values()), 'claim')} tested: {told}."


def _sections(rows: list[Row], earlier: list[Row], command: str) -> Iterator[Section]:
    if rows:
        yield Section(
            "runs", "Runs", "Each name leads to the run's own page.", _table("Runs of this matrix", rows)
        )
    wrong = [row for row in rows if row.failed]
    if wrong:
        yield Section("wrong", "What went wrong", "", join(map(_trouble, wrong)))
    lacking = [row for row in rows if row.outcome == "lacking"]
    if lacking:
        said = [tag("li", tag("code", row.recipe), f": {row.reason}") for row in lacking]
        text = "Not run here; their pages show what is published, and the commands that would run."
        yield Section("lacking", "What lacks", text, tag("ul", *said))
    here = [row for row in earlier if row.did != "collected"]
    if here:
        text = "The newest run of each other recipe and machine in this folder; the matrix left them as they are."
        yield Section("earlier", "Also here", text, _table("Other runs", here))
    elsewhere = [row for row in earlier if row.did == "collected"]
    if elsewhere:
        text = "Copied from other machines and verified: result and page are made here from their records."
        yield Section("elsewhere", "From other machines", text, _table("Collected runs", elsewhere))
    if command:
        yield Section(
            "repeat", "How to repeat it", "In a checkout of llmrepro, after `make setup`:", code(command)
        )


def _table(caption: str, rows: list[Row]) -> Html:
    head = ("recipe", "outcome", "verdicts", "machine", "ended", "minutes")
    cells = [
        (
            _name(row),
            _said(row),
            _words(row),
            row.machine or NOTHING,
            tag("span", row.ended[:16].replace("T", " "), class_="whole"),
            _minutes(row),
        )
        for row in rows
    ]
    return table(caption, head, cells, words=(1, 2, 3, 4))


def _name(row: Row) -> Html:
    named = tag("a", row.recipe, href=quote(row.report, errors="surrogateescape")) if row.report else row.recipe
    return join([named, *(tag("small", text) for text in (row.title, row.engine) if text)])


def outcome(row: Row) -> tuple[str, str, str]:
    return NO_RUN.get(row.did) or OUTCOMES[row.outcome]


def _said(row: Row) -> Html:
    sign, words, look = outcome(row)
    did = row.did if row.did in ("skipped", "gone on with", "collected") else ""
    changed = "" if row.whole is not False else "not whole: " + "; ".join(row.findings)
    return join(
        [
            tag("span", tag("span", f"{sign} ", aria_hidden="true"), words, class_=f"word {look}"),
            *(tag("small", text) for text in (did, changed) if text),
        ]
    )


def _words(row: Row) -> Html | str:
    if row.outcome == "lacking":
        return f"{plural(sum(row.words.values()), 'claim')} as published"
    shown = [
        tag("span", f"{row.words[name]:,} × ", word(name), class_="whole") for name in WORDS if row.words.get(name)
    ]
    return join(shown, " ") if shown else NOTHING


def _minutes(row: Row) -> str:
    return NOTHING if row.seconds is None else number(round(row.seconds / 60, 1))


def _trouble(row: Row) -> Html:
    lines = [row.reason, f"Next: {row.next_step}" if row.next_step else ""]
    return join([tag("h3", tag("code", row.recipe)), *(tag("p", line) for line in lines if line)])


def _foot() -> Html:
    return tag("footer", f"Made by llmrepro {__version__} from the folders of the runs: each has its records.")
