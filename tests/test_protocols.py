"""Rounds whose requests are one another's history: what a case needs before it, and prompts cut to the token."""

import pytest

from llmrepro import protocols
from llmrepro.protocols import MeasureFailure
from llmrepro.workload import Workload

PROMPT = {"id": "a", "file": "prompts/a.txt", "sha256": "0" * 64}


def workload(kind, **changes):
    prompts = [{**PROMPT, "id": f"tail_{n}", "sha256": f"{n}" * 64} for n in range(1, 4)]
    fields = {"id": kind, "kind": kind, "on": ["default"], "max_tokens": 4, "cache": "on", "prompts": prompts}
    own = {"head_tokens": 64, "text": PROMPT, "warmup": {**PROMPT, "id": "warmup", "sha256": "f" * 64}}
    return Workload.model_validate({**fields, **own, **changes})


def words(text):
    return len(text.split())


TEXT = " ".join(f"word{i}" for i in range(500))


def test_salted_prompts_have_the_length_asked_for():
    for wanted in (8, 100, 499):
        assert words(protocols.salted(TEXT, wanted, "1", words)) == wanted
    assert protocols.salted(TEXT, 50, "1", words) != protocols.salted(TEXT, 50, "2", words)
    with pytest.raises(
        MeasureFailure, match="of 50 tokens is wanted and the workload's text has 5; give it a longer text"
    ):
        protocols.salted("too short", 50, "1", words)


def test_a_salt_stands_at_the_very_head_and_follows_from_its_labels_alone():
    one, other = (protocols.salt("run", "default", 0, "prefix", repeat, 0) for repeat in (0, 1))
    assert one == protocols.salt("run", "default", 0, "prefix", 0, 0) != other
    assert one.isdigit() and len(one) == 8
    assert protocols.salted(TEXT, 50, one, words).startswith(one)


def test_a_line_of_its_own_stands_before_a_prompt_and_takes_the_same_tokens_each_time():
    one, other = (protocols.with_own_line("How many plums?", protocols.salt("run", n)) for n in (0, 1))
    assert one != other and len(one) == len(other)
    assert one.endswith("]\nHow many plums?") and one.splitlines()[0] != other.splitlines()[0]


def test_a_changed_head_differs_in_its_first_character_only():
    for first in "0123456789":
        head = f"{first}1234567: a note.\nOnce"
        changed = protocols.changed(head)
        assert changed[0] != head[0] and changed[0].isdigit() and changed[1:] == head[1:]


@pytest.mark.parametrize(
    "made",
    [workload("prefix"), workload("prefix", fill=3), workload("restart"), workload("restart", restore=True)],
)
def test_every_case_of_a_workload_is_a_step_of_its_round(made):
    steps = [s.case for s in protocols.steps(made)]
    assert [s for s in steps if s in made.cases] == made.cases
    assert {s for s in steps if s not in made.cases} == {f"fill_{n}" for n in range(1, made.fill + 1)}


def test_a_prefix_case_needs_all_that_the_round_asked_before_it():
    made = workload("prefix", fill=2)
    assert [s.case for s in protocols.needed(made, "uncached")] == ["uncached"]
    assert [s.case for s in protocols.needed(made, "changed_head")] == made.cases[:4]
    whole = protocols.needed(made, "oldest_after_fill")
    assert [s.case for s in whole[5:]] == ["fill_1", "fill_2", "newest_after_fill", "oldest_after_fill"]
    by = {s.case: s for s in whole}
    assert (
        by["oldest_after_fill"].head == by["uncached"].head and by["oldest_after_fill"].tail == by["uncached"].tail
    )
    assert by["newest_after_fill"].head == by["fill_2"].head != by["fill_1"].head
    assert [s.case for s in whole if s.changed] == ["changed_head"]
    assert by["changed_head"].tail == by["new_tail"].tail  # only the character differs


def test_a_restart_case_needs_what_its_own_server_was_asked():
    made = workload("restart", restore=True)
    needs = {case: [s.case for s in protocols.needed(made, case)] for case in made.cases}
    assert needs == {
        "first": ["first"],
        "second": ["first", "second"],
        "restarted": ["restarted"],
        "restored": ["restored"],
    }
    steps = {s.case: s for s in protocols.steps(made)}
    assert [c for c, s in steps.items() if s.fresh] == ["first", "restarted", "restored"]
    assert [c for c, s in steps.items() if s.evicted] == ["first"]
    assert (steps["second"].slot, steps["restored"].slot) == ("save", "restore")


def test_other_rounds_need_nothing_before_a_case():
    made = workload("prefill", lengths=[128, 256], prompts=[], cache="off", head_tokens=None)
    assert [s.case for s in protocols.needed(made, "256")] == ["256"]


def test_requests_that_fill_the_cache_are_in_the_estimate():
    few, many = (workload("prefix", fill=n) for n in (1, 5))
    more = protocols.seconds(many, "newest_after_fill") - protocols.seconds(few, "newest_after_fill")
    assert more == pytest.approx(4 * (64 / protocols.SLOW_PREFILL_TPS + 4 / protocols.SLOW_DECODE_TPS))
    assert protocols.seconds(many, "uncached") == protocols.seconds(few, "uncached")


@pytest.mark.parametrize(
    "text",
    ["港には三つの部分があり、それぞれを別の人が建てた。" * 60, "x" * 3000, "a b c " * 600, "word\n\n" * 500],
)
def test_a_text_of_any_script_is_cut_and_not_replaced_by_padding(text):
    asked = 0

    def count(whole: str) -> int:  # a token of three characters, whatever they are
        nonlocal asked
        asked += 1
        return -(-len(whole) // 3)

    prompt = protocols.salted(text, 400, "12345678", count)
    assert count(prompt) == 400
    own = prompt.removeprefix(protocols.head("12345678")).rstrip(" a")
    assert text.startswith(own.rstrip()) and len(own) > 0.9 * (len(prompt) - 20)
    assert asked < 80
