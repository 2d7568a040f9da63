"""Hit rates come from the engine's counters and are held against its answers; a cold start is a proven one."""

from folders import record

from llmrepro import cache_use


def boot(queries, hits, **changes):
    before = {"prefix_queries_tokens": 1000.0, "prefix_hits_tokens": 900.0}
    after = {"prefix_queries_tokens": 1000.0 + queries, "prefix_hits_tokens": 900.0 + hits}
    return {"server": "default", "counters": {"prefix": {"before": before, "after": after}}, **changes}


def answer(prompt, cached, **changes):
    return record(workload="prefix", prompt=prompt, cached_tokens=cached, **changes)


def test_the_hit_rate_is_the_difference_of_the_counters_over_all_boots():
    started = {1: boot(100, 40), 2: boot(300, 60), 3: boot(100, 100, server="other")}
    assert cache_use.hit_rate(started, "default", "prefix") == (0.25, 2)
    assert cache_use.hit_rate(started, "default", "chat") == (None, 0)


def test_a_boot_that_died_before_its_second_reading_counts_nothing():
    half = boot(100, 40)
    half["counters"]["prefix"]["after"] = {}
    assert cache_use.hit_rate({1: half}, "default", "prefix") == (None, 0)
    assert cache_use.flags({1: half}, [answer(100, 0)]) == []


def test_counters_that_the_answers_bear_out_are_no_flag_and_others_are():
    asked = [answer(60, 0, warmup=True), answer(40, 40)]
    assert cache_use.flags({1: boot(100, 40)}, asked) == []
    assert cache_use.flags({1: boot(100, 60)}, asked) == [
        "boot 1: of the prompt tokens of prefix the engine counted 60.0% as cached, answers 40.0%"
    ]


def test_an_answer_that_tells_no_count_is_not_taken_for_zero():
    assert cache_use.flags({1: boot(100, 60)}, [answer(60, None), answer(40, 40)]) == []


def test_boots_are_numbered_shortly():
    assert [cache_use.numbered(n) for n in ([3], [6, 3], [1, 2, 3, 4, 7])] == [
        "boot 3",
        "boots 3, 6",
        "boots 1 to 4, 7",
    ]


def test_a_start_that_was_not_cold_or_not_warm_is_told():
    def started(state, share):
        boot = {"server": "s", "case": "first", "page_cache": state, "weights_cached_share": share}
        return {4: boot, 6: boot}

    assert cache_use.flags(started("evicted", 0.0), []) == cache_use.flags(started("warm", 1.0), []) == []
    (said,) = cache_use.flags(started("evicted", 0.35), [])
    assert said.startswith("boots 4, 6: up to 35% of the weights could not be put out of the page cache")
    (said,) = cache_use.flags(started("warm", 0.35), [])
    assert said == "boots 4, 6: no more than 35% of the weights fitted into the page cache"
    assert "cannot be known here" in cache_use.flags(started("evicted", None), [])[0]
