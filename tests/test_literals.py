"""Texts are read out of Python files by their address, and nothing of the file is ever run."""

import pytest

from llmrepro import literals
from llmrepro.literals import LiteralFailure

SOURCE = '''
"""A module in the shape of a benchmark script; every text is ours."""
import sys
raise SystemExit("this file was run")

PAIRS = [
    ("plum", "Name three plums."),  # a comment
    ("pear", "Name " "two " + ("pears" + ".")),
    (f"{sys}", "Beside what is computed."),
]
WORDS = (
    "one two "
    "three "
) * 3
TRIPLED: str = 2 * ("ab" + "c")
NAMED = {"first": ["a", "b"], "second": ("c",)}
ODD = "a backslash \\d, a line\\nand \\u00e9 and 日本"
NUMBER = 3
TWICE = "a"
TWICE = "b"
GROWN = ["a"]
GROWN += ["b"]
SPREAD = ["a", *WORDS]
MADE = "a".upper()
HUGE = "ab" * 99999999999
DECLARED: str

def ask(path, size="a default"):
    """The docstring."""
    text = "whole" if size != "small" else "none"
    while len(text) < 5:
        text += "\\n" + text
    def inner():
        "an inner one"
    return f"Here: {text['not this']}" + "Begin:\\n\\n" + text + "\\n\\nEnd " "it."

def bare(): return 1
def again(): return "a"
def again(): return "b"
class Holder:
    HELD = "a"
    def method(self): return "b"
'''


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("PAIRS[0][1]", "Name three plums."),
        ("PAIRS[1][1]", "Name two pears."),
        ("PAIRS[2][1]", "Beside what is computed."),
        ("WORDS", "one two three one two three one two three "),
        ("TRIPLED", "abcabc"),
        ("NAMED[0][1]", "b"),
        ("NAMED[1][0]", "c"),
        ("ODD", "a backslash \\d, a line\nand é and 日本"),
        ("ask()[0]", "whole"),
        ("ask()[1]", "small"),
        ("ask()[2]", "none"),
        ("ask()[3]", "\n"),
        ("ask()[4]", "an inner one"),
        ("ask()[5]", "Begin:\n\n"),
        ("ask()[6]", "\n\nEnd it."),
    ],
)
def test_an_address_leads_to_its_text(address, text):
    assert literals.read(SOURCE, address) == text


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("PAIRS", r"PAIRS is computed in line \d+, and only literals are read"),
        ("PAIRS[2][0]", "is computed in line"),
        ("PAIRS[3][1]", r"there is no entry \[3\], only 3"),
        ("PAIRS[0][1][0]", "of something that is no tuple, list or dict"),
        ("WORDS[0]", "of something that is no tuple, list or dict"),
        ("NUMBER", "is no text"),
        ("TWICE", "TWICE is 2 times assigned"),
        ("GROWN[0]", "GROWN is 2 times assigned"),
        ("SPREAD[0]", "entries cannot be counted"),
        ("MADE", "is computed in line"),
        ("HUGE", "would have 199,999,999,998 characters, which is no prompt"),
        ("DECLARED", "is not plainly assigned"),
        ("HELD", "HELD is never assigned at the top"),
        ("ask()[7]", r"ask has 7 text constants, none is \[7\]"),
        ("bare()[0]", "has 0 text constants"),
        ("ask()", r"write ask\(\)\[0\]"),
        ("again()[0]", "defined 2 times"),
        ("method()[0]", "defined nowhere"),
        ("ask().x", "no address of a literal"),
    ],
)
def test_an_address_that_leads_to_no_text_is_refused_in_a_sentence(address, said):
    with pytest.raises(LiteralFailure, match=said):
        literals.read(SOURCE, address)


@pytest.mark.parametrize("source", ["def (", "A = '\0'", "A = " + "(" * 500 + "'a'" + ")" * 500])
def test_a_file_that_is_no_python_is_refused_in_a_sentence(source):
    with pytest.raises(LiteralFailure, match="A cannot be read: the file is no Python"):
        literals.read(source, "A")


def test_a_mark_of_the_encoding_and_doubtful_escapes_are_no_matter(recwarn):
    assert literals.read("\ufeffA = 'a\\d'", "A") == "a\\d"
    assert not recwarn.list
