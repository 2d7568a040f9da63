"""What the command line says of a run that ended."""

from claims import claim
from folders import chat, folder, prefill

from llmrepro import cli, findings


def a_speed(recipe: dict) -> None:
    speed = claim(value={"point": 200.0}, id="speed")
    recipe["claims"] = [recipe["claims"][0], speed.model_dump(mode="json", exclude_unset=True)]


def test_a_verdict_is_told_with_its_ratio_to_what_was_published(tmp_path, capsys):
    path = folder(tmp_path, [*chat(), *prefill()], change=a_speed, parameters={"repeats": 3})
    (path / "report.html").write_text("")
    assert cli._end(path, 0) == 0
    lines = capsys.readouterr().out.splitlines()
    fact, speed = findings.read(path).judged[:2]
    word = speed["word"].replace("_", " ")
    assert 0.4 < speed["ratio"] < 0.7
    assert f"  {word:<16} speed: {speed['ratio']:.2f}× of what was published" in lines
    assert f"  {'reproduced':<16} {fact['claim']}" in lines  # a fact has no ratio


def test_a_comparison_is_told_with_the_ratio_found_here():
    assert cli._times({"claim": "a", "here": 1.296, "ratios": []}) == ": 1.30× here"
    assert cli._times({"claim": "a", "here": None, "ratios": []}) == ""
