"""What drafts came to: by the streams and pages of real engines, in the result, on the page, and in a real run."""

import json
from pathlib import Path

import pytest
from folders import boot, chat, folder, record, soup, table, text
from test_prefix import new_run, result_of  # noqa: F401

from llmrepro import facts, metrics, own_claims, results, speculation, sse, stream, workloads
from llmrepro.catalog import DEFAULT, load
from llmrepro.client import Record
from llmrepro.engines import _prometheus, _vllm_settings, llama_cpp
from llmrepro.recipe import Recipe
from llmrepro.run import boots
from llmrepro.run_folder import read_lines

DATA = Path(__file__).parent / "data"
FULL = {"profile": "full", "repeats": 2}
PROMPTS = ("copy_list", "rename_variable", "list_to_json", "story_clocks", "plan_move")
NGRAM = "ngram-simple size_n=4 size_m=4 min_hits=1"


def page(name: str) -> dict:
    return llama_cpp.counters({"/metrics": (DATA / "llama-cpp" / name).read_text()}.get)


def answered(path: Path) -> Record:
    """The record of a stream that a real server sent."""
    reader = sse.Reader()
    payloads = reader.feed(path.read_bytes()) + reader.close()
    answer = stream.read([(i, payload) for i, payload in enumerate(payloads)], 0)
    counts = stream.count(answer)
    told = {"timings": answer.timings, "draft_checks": stream.draft_checks(answer.seen)}
    return record(n=counts.output_tokens, **told)


# --- of one request


def test_a_real_llama_cpp_stream_and_the_counters_after_it_tell_the_same():
    asked, counted = answered(DATA / "llama-cpp/chat-ngram.sse"), page("metrics-ngram.prom")
    assert metrics.drafts(asked) == (19, 11) == (counted["spec_draft_tokens"], counted["spec_accepted_tokens"])
    assert metrics.acceptance(asked) == pytest.approx(11 / 19)
    assert metrics.draft_checks(asked) == counted["spec_drafts"] == 5
    assert metrics.acceptance_length(asked) == pytest.approx(1 + 11 / 5)
    assert metrics.tokens_per_step(asked) == pytest.approx(32 / counted["engine_steps"])
    by_position = [counted[f"spec_accepted_by_position.{i}"] for i in range(4)]
    assert by_position == [3, 3, 3, 2] and sum(by_position) == counted["spec_accepted_tokens"]


def test_a_real_vllm_stream_tells_its_steps_with_its_metrics():
    asked = answered(DATA / "vllm/streams/text-speculation.sse")
    assert metrics.acceptance(asked) == pytest.approx(42 / 45)
    assert metrics.acceptance_length(asked) == pytest.approx(3.625)
    # 18 steps: one ends the prompt, 16 check a draft, one has none
    assert metrics.tokens_per_step(asked) == pytest.approx(60 / 18)


@pytest.mark.parametrize(
    ("told", "checks"),
    [
        ([(1, None), (2, 4), (3, 4), (4, 8)], 2),
        ([(1, None), (2, 4), (4, 8)], None),  # a step may hide in an event of two tokens
        ([(1, None), (None, None), (3, 4)], None),  # the count does not run along
        ([(1, None), (2, None)], None),  # nothing was drafted: llama.cpp then tells nothing
    ],
)
def test_steps_are_counted_where_every_one_of_them_shows(told, checks):
    seen = [stream.Seen(0.0, ("text",), 1, None, None, tokens, drafted) for tokens, drafted in told]
    assert stream.draft_checks(seen) == checks


def test_an_answer_that_does_not_tell_of_drafts_has_no_rate_and_not_nought():
    asked = record(timings={"predicted_n": 48})
    assert metrics.drafts(asked) == (None, None)
    assert metrics.acceptance(asked) is metrics.acceptance_length(asked) is metrics.tokens_per_step(asked) is None


# --- what a server does


LOGS = {
    "ngram-simple": ("size_n=12, size_m=48, min_hits=1", "ngram-simple size_n=12 size_m=48 min_hits=1"),
    "ngram-map-k": (
        "size_key=12, size_value=48, key_only=1, min_hits=1",
        "ngram-map-k size_key=12 size_value=48 key_only=1 min_hits=1",
    ),
    "ngram-mod": ("n_match=24, n_max=64, n_min=48", "ngram-mod n_match=24 n_max=64 n_min=48"),
    "draft-mtp": ("n_max=3, n_min=0, p_min=0.00, n_embd=576, backend_sampling=1", "draft-mtp k=3"),
}


def logged(kind: str) -> str:
    head = "0.00.363.673 I spec common_specu:"
    return f"{head} adding speculative implementation '{kind}'\n{head} - {LOGS[kind][0]}\n"


@pytest.mark.parametrize("kind", LOGS)
def test_llama_cpp_says_in_its_log_how_it_drafts(kind):
    props = {"default_generation_settings": {"params": {"speculative.types": "none"}}}  # which it says always
    assert llama_cpp.observe({"/props": props}.get, logged(kind))["effective"]["speculation"] == LOGS[kind][1]


def test_several_kinds_of_drafts_are_told_and_none_is_one_of_them():
    def told(log):
        return llama_cpp.observe({}.get, log)["effective"].get("speculation")

    assert told(logged("ngram-mod") + logged("draft-mtp")) == f"{LOGS['ngram-mod'][1]} + draft-mtp k=3"
    none = "0.00.360.822 I spec common_specu: no implementations specified for speculative decoding\n"
    assert (told(none), told("")) == ("none", None)


def test_arguments_stand_in_for_a_log_that_does_not_tell():
    sizes = ["--spec-ngram-simple-size-n", "4", "--spec-ngram-mod-n-max", "8"]
    assert llama_cpp.speculation(["--spec-type", "ngram-simple", *sizes]) == "ngram-simple size_n=4"
    assert llama_cpp.speculation(["--spec-type", "draft-mtp", "--spec-draft-n-max", "3"]) == "draft-mtp k=3"
    assert llama_cpp.speculation(sizes) == "none"


def test_a_server_that_drafts_otherwise_than_asked_is_not_as_asked():
    asked = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4"]
    told = llama_cpp.settings(asked, {"speculation": NGRAM})
    assert told == [("speculation", "ngram-simple", "ngram-simple")]
    assert llama_cpp.settings(asked, {"speculation": "none"}) == [("speculation", "ngram-simple", "none")]
    assert llama_cpp.settings([], {"speculation": "none"}) == []


def test_vllm_tells_which_ngrams_it_looks_up(tmp_path):
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    log = (
        f"(APIServer pid=1) INFO 11-30 20:26:18 [a.py:286] non-default args: {{'speculative_config': {config}}}\n"
        "(EngineCore pid=2) INFO 11-30 20:26:24 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
        "model='/w', speculative_config=SpeculativeConfig(method='ngram', model=None, num_spec_tokens=4), x=1\n"
    )
    effective = _vllm_settings.effective("", log, {})
    assert (effective["speculation"], effective["draft_tokens"]) == ("ngram", 4)
    path = folder(tmp_path, boots=[boot(effective=effective)], result=False)
    assert facts.read(path).servers["default"]["speculation"] == "ngram k=4 lookup=2..4"


# --- in a result


def asked(case, repeat=0, server="ngram", drafts=None, checks=None, **changes):
    """An answer of 48 tokens; `drafts` is (drafted, accepted)."""
    told = {"predicted_n": 48, "predicted_ms": 470.0}
    if drafts:
        told |= {"draft_n": drafts[0], "draft_n_accepted": drafts[1]}
    fields = {"workload": "speculation", "server": server, "timings": told, "draft_checks": checks}
    return record(case, repeat, boot=1 if server == "default" else 2, **{**fields, **changes})


DRAFTS = {"copy_list": ((90, 30), 24), "rename_variable": ((10, 10), 3)}


def both(**changes) -> list[Record]:
    """Two rounds asked of a server without drafts and of one with them; three prompts let nothing be drafted."""
    plain = [asked(case, r, "default", tps=100.0) for r in (0, 1) for case in PROMPTS]
    drafting = [asked(c, r, "ngram", *DRAFTS.get(c, ()), tps=80.0, **changes) for r in (0, 1) for c in PROMPTS]
    return [*plain, *drafting]


def counted(server, accepted, drafted, checks, tokens, steps, speculation=None):
    names = ("spec_accepted_tokens", "spec_draft_tokens", "spec_drafts", "generation_tokens", "engine_steps")
    grown = dict(zip(names, (accepted, drafted, checks, tokens, steps), strict=True))
    told = {"before": dict.fromkeys(names, 7.0), "after": {n: 7.0 + v for n, v in grown.items()}}
    effective = {"speculation": speculation or ("none" if server == "default" else NGRAM)}
    return boot(server, counters={"speculation": told}, effective=effective)


def two_boots() -> list[dict]:
    return [counted("default", 0, 0, 0, 480, 480), counted("ngram", 80, 200, 54, 480, 400)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("drafts"), both(), two_boots(), parameters=FULL)


def rows(path, metric):
    found = [r for r in results.compute(path)["metrics"] if r["metric"] == metric]
    return {(r["server"], r["case"]): r["value"] for r in found}


def test_a_share_of_several_answers_is_made_of_their_tokens(tmp_path):
    """30 of 90 and 10 of 10 are 40 of 100 drafted tokens accepted, and not two thirds."""
    records = [asked("copy_list", drafts=(90, 30), checks=24), asked("copy_list", 1, drafts=(10, 10), checks=3)]
    path = folder(tmp_path, records, [boot("default"), boot("ngram")], parameters=FULL)
    assert rows(path, "acceptance")["ngram", "copy_list"] == pytest.approx(0.4)
    assert rows(path, "acceptance")["ngram", None] == pytest.approx(0.4), "no counters: by the answers"
    assert rows(path, "acceptance_length")["ngram", "copy_list"] == pytest.approx(1 + 40 / 27)
    assert rows(path, "tokens_per_step")["ngram", "copy_list"] == pytest.approx(96 / (18 + 38))


def test_of_a_workload_the_engines_counters_tell(run):
    assert rows(run, "acceptance")["ngram", None] == pytest.approx(80 / 200)
    assert rows(run, "acceptance_length")["ngram", None] == pytest.approx(1 + 80 / 54)
    per_step = rows(run, "tokens_per_step")
    assert (per_step["default", None], per_step["ngram", None]) == (1.0, 1.2)
    assert ("default", None) not in rows(run, "acceptance"), "nothing drafted is no share of nought"
    assert ("ngram", "story_clocks") not in per_step, "what an answer does not tell has no row"


def test_a_workload_without_drafts_has_no_rows_of_them(tmp_path):
    told = counted("default", 0, 0, 0, 480, 480)
    told["counters"] = {"chat": told["counters"]["speculation"]}
    path = folder(tmp_path, chat(), [told])
    assert not rows(path, "acceptance") and not rows(path, "tokens_per_step")


def test_a_boot_that_died_before_its_second_reading_counts_nothing(tmp_path):
    half = two_boots()
    half[1]["counters"]["speculation"]["after"] = {}
    assert speculation.counted(half[1:], "speculation") == speculation.Sums()
    assert speculation.flags(dict(enumerate(half, 1)), both()) == []


def test_a_position_that_was_not_counted_yet_was_at_nought():
    """llama.cpp shows a position's counter only from the first draft on that has it."""
    first, second = (page(name) for name in ("metrics.prom", "metrics-ngram.prom"))
    assert not [name for name in first if speculation.PLACE.fullmatch(name)]
    earlier = {name: min(value, second.get(name, value)) for name, value in first.items()}  # of one server's life
    read = {"before": earlier, "after": second}
    told = speculation.counted([boot(counters={"chat": read})], "chat")
    assert told.by_position == (3, 3, 3, 2) and told.shares == [0.6, 0.6, 0.6, 0.4]


def test_boots_are_added_draft_by_draft_those_with_nothing_accepted_too():
    boots = [speculation.Sums(40, 80, 40, 90, 50, (30, 10)), speculation.Sums(0, 80, 40, 50, 50)]
    told = speculation.together([*boots, speculation.Sums(20, 80, 20, 40, 20, (20,))])
    assert told == (60, 240, 100, 180, 120, (50, 10)) and told.shares == [0.5, 0.1]
    assert speculation.together([*boots, speculation.Sums(5, 10, 5, 9, 9)]).by_position == (), "one does not tell"
    assert speculation.together([*boots, speculation.Sums(5, None, 5, 9, 9)]).values()["tokens_per_step"]
    assert "acceptance" not in speculation.together([*boots, speculation.Sums(5, None, 5)]).values()


def test_counters_that_the_answers_bear_out_are_no_flag_and_others_are():
    started = dict(enumerate(two_boots(), 1))
    assert speculation.flags(started, both()) == []
    started[2]["counters"]["speculation"]["after"]["spec_accepted_tokens"] += 3
    (said,) = speculation.flags(started, both())
    assert said.startswith("boot 2: of the drafts of speculation the engine counted 83 of 200 tokens as accepted")
    assert said.endswith("its answers 80 of 200")
    broken = [*both(), asked("copy_list", 2, status="timeout")]
    assert speculation.flags(started, broken) == [], "what a broken answer drafted is not known"


def test_servers_with_drafts_and_without_are_not_one_configuration(run):
    seen = facts.read(run)
    assert {s: told["speculation"] for s, told in seen.servers.items()} == {"default": "none", "ngram": NGRAM}
    assert seen.shared["speculation"] == f"none and {NGRAM}"


def test_claims_of_ones_own_are_bound_to_what_their_server_drafts(run):
    written, _ = own_claims.of(run, load(DEFAULT))
    bound = {
        c["server"]: c["conditions"]["deciding"] for c in written["claims"] if c.get("workload") == "speculation"
    }
    assert bound == {"default": {"speculation": "none"}, "ngram": {"speculation": NGRAM}}
    assert "speculation" not in written["conditions"]["deciding"]
    as_written = json.loads(load(DEFAULT).model_dump_json(by_alias=True))
    Recipe.model_validate(as_written | {"claims": written["claims"], "comparisons": []})


# --- with and without


def compared(records, told=None, change=None):
    workload = next(w for w in load(DEFAULT).workloads if w.id == "speculation")
    if change:
        workload = workload.model_copy(update=change)
    return speculation.with_and_without(workload, told or {"default": "none", "ngram": NGRAM}, records)


def test_each_prompt_stands_beside_itself_without_drafts():
    (found,) = compared(both())
    assert (found["without"], found["with"], found["speculation"]) == ("default", "ngram", NGRAM)
    first, *_, last = found["cases"]
    assert first["case"] == "copy_list" and first["ratio"] == pytest.approx(0.8)
    assert first["acceptance"] == pytest.approx(1 / 3) and first["tokens_per_step"] == pytest.approx(48 / 18)
    assert (first["same"], first["answers"]) == (2, 2)
    assert last["acceptance"] is last["tokens_per_step"] is None and last["ratio"] == pytest.approx(0.8)


def test_a_greedy_answer_that_differs_is_counted_and_a_sampled_one_is_not():
    other = [
        r.model_copy(update={"text_sha256": "1" * 64}) if r.repeat and r.server == "ngram" else r for r in both()
    ]
    assert [c["same"] for c in compared(other)[0]["cases"]] == [1] * 5
    workload = next(w for w in load(DEFAULT).workloads if w.id == "speculation")
    sampled = {"sampling": workload.sampling.model_copy(update={"temperature": 0.8})}
    assert {c["same"] for c in compared(both(), change=sampled)[0]["cases"]} == {None}


@pytest.mark.parametrize("told", [{"ngram": NGRAM}, {"default": "none"}, {"default": NGRAM, "ngram": NGRAM}])
def test_a_server_whose_speculation_is_not_known_is_held_against_nothing(told):
    assert compared(both(), told) == []


def test_the_page_shows_prompts_with_drafts_and_without(run):
    page_ = soup(run)
    shown = table(page_, "With and without n-gram drafts: three prompts that repeat, two that do not: ngram")
    assert shown[0][4:] == ["drafts accepted", "tokens of a step with a draft", "tokens per step", "Same text"]
    assert shown[1] == ["copy_list", "100", "80", "0.80", "33.3%", "2.25", "2.67", "2 of 2"]
    assert shown[4] == ["story_clocks", "100", "80", "0.80", "–", "–", "–", "2 of 2"]
    said = text(page_)
    (drafts,) = table(page_, "Drafted tokens, and those accepted at each position")[1:]
    assert drafts == ["speculation", "ngram", "54", "200", "80", "40.0%", "1.481"]
    (heading,) = [h for h in page_.find_all("h2") if "peculati" in text(h)]
    assert (
        text(heading) == "Speculative decoding"
        and page_.find(id="figure-acceptance").find_previous("h2") == heading
    )
    assert f"ngram ({NGRAM}) against default" in said
    assert "10 of 10 greedy answers with drafts are word for word one that default gave." in said
    assert "up to the engine's numerics" not in said


def test_the_page_says_why_greedy_answers_may_differ(tmp_path):
    path = folder(tmp_path, both(text_sha256="1" * 64), two_boots(), parameters=FULL)
    said = text(soup(path))
    assert "0 of 10 greedy answers with drafts are word for word one that default gave." in said
    assert "up to the engine's numerics" in said


# --- on a real engine


@pytest.mark.engine
def test_a_list_that_is_copied_is_drafted_from_itself(new_run, prepared):  # noqa: F811
    prompts = [p.model_dump() for w in load(DEFAULT).workloads if w.id == "speculation" for p in w.prompts[:1]]
    run = new_run("ngram", **{"workloads.speculation.max_tokens": 48, "workloads.speculation.prompts": prompts})
    workloads.measure(run, prepared[0].path, prepared[1])
    (got,) = [r for r in map(Record.model_validate, read_lines(run.path / "records.jsonl")) if not r.warmup]
    drafted, accepted = metrics.drafts(got)
    assert 0 < accepted <= drafted and 0 < metrics.acceptance(got) <= 1
    result = result_of(run, prepared)
    assert not [flag for flag in result["flags"] if "drafts" in flag], "the counters agree with the answers"
    (whole,) = [r for r in result["metrics"] if r["metric"] == "tokens_per_step" and r["case"] is None]
    assert whole["value"] > 1
    assert boots(run.path)[1]["effective"]["speculation"] == NGRAM
    assert facts.read(run.path).servers["ngram"]["speculation"] == NGRAM


def test_counters_that_fell_or_say_what_cannot_be_count_nothing():
    before = {"spec_drafts": 10, "spec_draft_tokens": 40, "spec_accepted_tokens": 20}
    grown = {"spec_drafts": 15, "spec_draft_tokens": 60, "spec_accepted_tokens": 30}

    def counted(before, after):
        return speculation.counted([{"counters": {"w": {"before": before, "after": after}}}], "w").values()

    assert counted(before, grown)["acceptance"] == 0.5
    assert counted(grown, before) == {}
    assert counted(before, grown | {"spec_accepted_tokens": 99}) == {}
    odd = {"spec_accepted_by_position.900000000": 5, "spec_accepted_by_position.x": 1}
    assert counted(before, grown | odd)["acceptance"] == 0.5


def test_what_is_no_count_on_a_metrics_page_is_not_told():
    page = "# TYPE a counter\na_total NaN\n# TYPE b counter\nb_total 3\n# TYPE c counter\nc_total -1\n"
    assert _prometheus.totals(page, {"a_total": "a", "b_total": "b", "c_total": "c"}) == {"b": 3}
