"""What was sampled beside requests: read as it was written, and made into rows and flags that say no more."""

import pytest
from folders import boot, failure, folder
from sampled import START_NS, asked, gpu, guard, host, ns, started, write

from llmrepro import guard_log, results, sample_rows, samples
from llmrepro.run_folder import RunError

OPEN_JET = "qwen3.8-27b/open-jet--cmp-170hx"


def needs_gpus(count):
    return lambda recipe: recipe["needs"].update(gpus=count)


def computed(tmp_path, records, rows, boots=None, *, guards=(), **more) -> dict:
    path = folder(tmp_path, records, boots or [started()], result=False, **more)
    if rows:
        write(path, rows)
    for n, lines, watch in guards:
        guard(path, n, *lines, **watch)
    return results.compute(path)


def row(result, metric):
    (found,) = [r for r in result["metrics"] if r["metric"] == metric]
    return found


def has(result, metric) -> bool:
    return any(r["metric"] == metric for r in result["metrics"])


# reading


def test_every_cell_is_read_as_it_stands_and_a_blank_one_is_unknown(tmp_path):
    write(tmp_path, [host(0, temperature_c=-3.5), gpu(0, throttle="sw_thermal+power_cap"), host(1, 2)])
    found = samples.read(tmp_path)
    assert {n: list(by_device) for n, by_device in found.items()} == {1: ["host", "gpu0"], 2: ["host"]}
    (one,) = found[1]["host"]
    assert (one.t_ns, one.busy, one.server_gib, one.temperature_c, one.power_w) == (START_NS, 1.5, 0.4, -3.5, None)
    assert found[1]["gpu0"][0].throttle == ("sw thermal", "power cap")
    assert one.throttle == ()


def test_a_torn_last_line_is_forgiven_and_no_other(tmp_path):
    write(tmp_path, [host(0), host(1)], torn="5002000000000,1,ho")
    assert len(samples.read(tmp_path)[1]["host"]) == 2
    path = tmp_path / "telemetry.csv"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(RunError, match=r"telemetry.csv, line 4: 3 cells, and 22 were needed"):
        samples.read(tmp_path)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"power_w": "much"}, "column power_w: 'much' cannot be"),
        ({"power_w": "nan"}, "column power_w: 'nan' cannot be"),
        ({"server_gib": -1}, "column server_gib: '-1' cannot be"),
        ({"boot": "one"}, "boot 'one': no numbers"),
    ],
)
def test_a_cell_that_is_no_quantity_is_named_with_its_line(tmp_path, cells, said):
    write(tmp_path, [host(0), {**host(1), **cells}])
    with pytest.raises(RunError, match=f"telemetry.csv, line 3: .*{said}"):
        samples.read(tmp_path)


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "telemetry.csv").write_text("time,watts\n1,2\n")
    with pytest.raises(RunError, match="line 1: its head is 'time,watts', and t_ns, boot and device were needed"):
        samples.read(tmp_path)
    (tmp_path / "boots").mkdir()
    (tmp_path / "boots/1.guard.jsonl").write_text('{"kind": "stop"}\n')
    with pytest.raises(RunError, match="1.guard.jsonl is not as the guard writes it"):
        guard_log.of_boots(tmp_path, [1])


def test_of_several_watch_lines_the_last_says_how_xids_were_watched(tmp_path):
    (tmp_path / "boots").mkdir()
    again = {"kind": "watch", "at": "", "t_ns": 1, "limits": {}, "gpus": [0], "xids": "unknown: NVML closed"}
    guard(tmp_path, 1, again)
    assert guard_log.of_boots(tmp_path, [1, 2])[1].unwatched == "NVML closed"


# over samples


def test_requests_at_once_are_one_span_and_samples_between_requests_are_in_none():
    spans = samples.in_flight([asked(0, took_s=3), asked(1, took_s=1), asked(5, took_s=1)])
    assert spans == [(ns(0), ns(3)), (ns(5), ns(6))]
    taken = [samples.Sample(ns(s), 1, "host") for s in range(8)]
    assert [(s.t_ns - START_NS) / 1e9 for s in samples.during(taken, spans)] == [0, 1, 2, 3, 5, 6]
    assert samples.in_flight([failure("512", t_send_ns=ns(0)), asked(1, status="skipped")]) == []


def test_energy_is_linear_between_samples():
    taken = [samples.Sample(ns(s), 1, "gpu0", energy_j=100.0 * s**2) for s in range(5)]
    assert samples.energy_j(taken, ns(1.5), ns(3)) == pytest.approx(900 - 250)
    assert samples.energy_j(taken, ns(1), ns(2)) == pytest.approx(300)


@pytest.mark.parametrize(
    ("at_s", "joules"),
    [
        ([0, 1, 2, 3], [0, 100, 200, 300]),  # ends before
        ([2, 3, 4, 5], [0, 100, 200, 300]),  # begins after
        ([0, 1, 4, 5], [500, 600, 0, 100]),  # reset
        ([0, 1, 4, 5], [500, 500, 500, 500]),  # stands still
        ([0, 1, 8, 9], [0, 100, 800, 900]),  # the moment lies in a hole
        ([0, 1, 4, 5], [None] * 4),
    ],
)
def test_energy_is_unknown_where_the_counter_does_not_reach_or_cannot_be_believed(at_s, joules):
    taken = [samples.Sample(ns(s), 1, "gpu0", energy_j=j) for s, j in zip(at_s, joules, strict=True)]
    assert samples.energy_j(taken, ns(1.5), ns(4.5)) is None


# rows


def test_power_is_the_mean_while_a_request_was_in_flight_and_warm_ups_are_none(tmp_path):
    records = [asked(0, took_s=2, warmup=True, case="warmup"), asked(4, took_s=2), asked(8, took_s=2, repeat=1)]
    power = {s: 60.0 for s in range(12)} | {4: 170.0, 5: 175.0, 6: 180.0, 8: 178.0, 9: 178.0, 10: 178.0}
    result = computed(
        tmp_path,
        records,
        [gpu(s, power_w=w) for s, w in power.items()],
        change=needs_gpus(1),
        machine={"gpus": []},
    )
    found = row(result, "power.busy_w")
    assert found["value"] == pytest.approx((170 + 175 + 180 + 3 * 178) / 6)
    assert (found["n"], found["boots"], found["unit"], found["server"]) == (6, 1, "W", "default")
    assert (found["low"], found["high"]) == (None, None), "samples of one boot follow each other: no interval"


def test_power_of_several_gpus_is_their_sum_and_none_where_one_does_not_tell(tmp_path):
    rows = [gpu(s, index=i, power_w=100.0 * (i + 1)) for s in range(3) for i in range(3)]
    result = computed(tmp_path / "a", [asked(0, took_s=2)], rows, change=needs_gpus(2))
    assert row(result, "power.busy_w")["value"] == pytest.approx(300), "an engine takes the first two"
    untold = [r | {"power_w": None} if r["device"] == "gpu1" else r for r in rows]
    assert not has(computed(tmp_path / "b", [asked(0, took_s=2)], untold, change=needs_gpus(2)), "power.busy_w")
    assert not has(computed(tmp_path / "c", [asked(0, took_s=2)], rows), "power.busy_w"), "the recipe uses none"


def test_temperatures_are_peaks_of_boots_and_of_what_the_recipe_computes_on(tmp_path):
    boots = [started(), started(100, replicate=1)]
    records = [asked(0), asked(100, boot=2)]
    rows = [host(0, temperature_c=90.0), gpu(0), gpu(1, temperature_c=76.0), gpu(100, 2, temperature_c=74.0)]
    result = computed(tmp_path / "gpu", records, rows, boots, change=needs_gpus(1))
    found = row(result, "temperature.core_c")
    assert (found["value"], found["greatest"], found["boots"], found["n"]) == (75.0, 76.0, 2, 3)
    assert found["note"] == "of the GPU, mean of 2 boots, each its peak"
    assert row(result, "temperature.memory_c")["value"] == 78.0
    of_cpu = row(computed(tmp_path / "cpu", records, rows, boots), "temperature.core_c")
    assert (of_cpu["value"], of_cpu["note"]) == (90.0, "of the CPU's package, its peak")


def test_device_memory_is_the_peak_of_each_gpu_summed_and_of_no_gpu_untold(tmp_path):
    rows = [gpu(0, memory_gib=1.0), gpu(1, memory_gib=40.0), gpu(0, device="gpu1", memory_gib=5.0)]
    result = computed(tmp_path / "two", [asked(0)], rows, change=needs_gpus(2))
    found = row(result, "memory.device_gib")
    assert (found["value"], found["note"]) == (45.0, "peak, whoever takes it")
    blind = [*rows[:2], gpu(0, device="gpu1", memory_gib="")]
    assert not has(computed(tmp_path / "blind", [asked(0)], blind, change=needs_gpus(2)), "memory.device_gib")
    assert not has(computed(tmp_path / "cpu", [asked(0)], rows), "memory.device_gib")


def test_a_boot_that_went_on_for_a_stopped_one_is_no_replication(tmp_path):
    boots = [started(), started(100)]
    rows = [gpu(0, temperature_c=60.0), gpu(100, 2, temperature_c=75.0)]
    records = [asked(0), asked(100, boot=2, repeat=1)]
    found = row(computed(tmp_path, records, rows, boots, change=needs_gpus(1)), "temperature.core_c")
    assert (found["value"], found["boots"]) == (75.0, 1)


def test_energy_per_token_is_exact_prefill_and_pauses_included(tmp_path):
    records = [asked(2.5, took_s=4, tokens=50), asked(8.5, took_s=4, tokens=30, repeat=1)]
    rows = [gpu(s) for s in range(15)]  # 175 W
    found = row(computed(tmp_path, records, rows, change=needs_gpus(1)), "energy_j_per_token")
    assert found["value"] == pytest.approx(175 * 10 / 80)
    assert (found["unit"], found["workload"], found["n"], found["note"]) == (
        "J/tok",
        "chat",
        2,
        "by the GPU's counter",
    )


def test_without_a_gpu_energy_is_the_cpus_and_says_so(tmp_path):
    records = [asked(1, took_s=10, tokens=100)]
    rows = [r for s in range(15) for r in (host(s, energy_j=30.0 * s), gpu(s))]
    found = row(computed(tmp_path, records, rows), "energy_j_per_token")
    assert found["value"] == pytest.approx(3.0)
    assert found["note"] == "by the CPU package's counter (RAPL)"


@pytest.mark.parametrize(
    "records",
    [
        [asked(1, took_s=9)],  # too short for a counter that is read once a second
        [asked(1, took_s=11), failure("512", t_send_ns=ns(12.5), workload="chat")],
        [asked(1, took_s=11, output_tokens=None)],
        [asked(1, took_s=11, status="stream_error")],
        [asked(1, took_s=20)],  # telemetry ended before it did
    ],
)
def test_energy_is_not_told_where_a_part_of_it_is_unknown(tmp_path, records):
    assert not has(
        computed(tmp_path, records, [host(s, energy_j=30.0 * s) for s in range(15)]), "energy_j_per_token"
    )


HOT = {"kind": "stop", "at": "", "t_ns": ns(65), "reason": "GPU 0 was at 81 °C, and the recipe allows 80"}
FULL = {"kind": "stop", "at": "", "t_ns": ns(65), "reason": "0.10 GiB were free on the run folder's disk"}


def test_a_guards_stop_is_timed_from_the_first_request_that_counts(tmp_path):
    records = [asked(0, warmup=True, case="warmup"), asked(5)]
    rows = [gpu(64, temperature_c=81.0)]
    result = computed(tmp_path, records, rows, change=needs_gpus(1), guards=[(1, [HOT], {"core_c": 80})])
    found = row(result, "guard.stop_s")
    assert (found["value"], found["note"], found["gate"]) == (60.0, HOT["reason"], None)
    assert any(f == f"boot 1: the guard stopped the server: {HOT['reason']}" for f in result["flags"])
    assert "boots/1.guard.jsonl" in result["inputs"] and "telemetry.csv" in result["inputs"]
    assert not has(computed(tmp_path / "on", records, rows, guards=[(1, [], {})]), "guard.stop_s")


# claims


def claims_of(tmp_path, rows, guards=()) -> dict:
    """The verdicts of a publication's recipe, of a run that only has what is sampled."""
    limit = {"index": 0, "name": "NVIDIA CMP 170HX", "power_limit_w": 180.0}
    told = started(server="d4", effective={"speculation": "mtp d=4"}, machine={"gpus": [limit]})
    records = [asked(5, took_s=10, server="d4", workload="greedy")]
    parameters = {"recipe": OPEN_JET, "mode": "live"}
    path = folder(tmp_path, records, [told], result=False, parameters=parameters, machine={"gpus": [limit]})
    write(path, rows)
    for lines in guards:
        guard(path, 1, *lines, core_c=80)
    return {v["claim"]: v for v in results.compute(path)["verdicts"]}


def test_published_power_and_temperatures_are_judged_where_they_were_sampled(tmp_path):
    hot = [gpu(s, temperature_c=77.0, memory_temperature_c=85.0, power_w=176.0) for s in range(20)]
    said = claims_of(tmp_path, hot)
    assert (said["d4-power"]["word"], said["d4-power"]["here"]) == ("reproduced", 176.0)
    assert (said["d4-core-peak"]["word"], said["d4-core-peak"]["here"]) == ("reproduced", 77.0)
    assert (said["d4-memory-peak"]["word"], said["d4-memory-peak"]["here"]) == ("not_reproduced", 85.0)
    assert said["d4-power-250w"]["word"] == "not_comparable", "it was published at another power limit"
    assert said["thermal-stop-250w"]["word"] == "not_evaluated"


def test_a_stop_for_something_else_than_heat_is_held_against_no_claim(tmp_path):
    cool = [gpu(s, temperature_c=70.0) for s in range(66)]
    said = claims_of(tmp_path / "full", cool, [[FULL]])["thermal-stop-250w"]
    assert (said["word"], said["here"]) == ("not_evaluated", 60.0)
    assert said["reason"].startswith("the guard stopped it for something else than heat: 0.10 GiB were free")
    hot = [gpu(s, temperature_c=81.0) for s in range(66)]
    assert claims_of(tmp_path / "hot", hot, [[HOT]])["thermal-stop-250w"]["word"] == "not_comparable"


# flags


def flags(tmp_path, rows, records=None, boots=None, **more) -> list[str]:
    return computed(tmp_path, records or [asked(0, took_s=9)], rows, boots, **more)["flags"]


def test_throttling_is_told_as_a_share_of_the_samples_taken_during_requests(tmp_path):
    words = {0: "power_cap", 1: "power_cap+sw_thermal", 15: "power_cap"}  # the last after the request
    found = flags(tmp_path, [gpu(s, throttle=words.get(s, "")) for s in range(16)], change=needs_gpus(1))
    assert found == [
        "boot 1: the clocks of the GPU were held back in 20% of 10 samples taken during requests "
        "(power cap 20%, sw thermal 10%)"
    ]


def test_telemetry_that_ended_early_or_has_a_hole_or_is_missing_is_told(tmp_path):
    boots = [started(), started(100, replicate=1), started(200, replicate=2), started(300, replicate=3)]
    records = [asked(s, took_s=30, boot=n, repeat=0) for n, s in enumerate((0, 100, 200, 300), 1)]
    rows = [host(s) for s in range(31)]
    rows += [host(100 + s, 2) for s in range(18)]
    rows += [host(200 + s, 3) for s in (*range(10), *range(18, 31))]
    assert flags(tmp_path, rows, records, boots) == [
        "boot 4: no telemetry; the sampler did not start, or ended at once",
        "boot 2: telemetry ended before the requests did, by 13 s; means and peaks are of the time until then",
        "boot 3: no telemetry for 9 s among the requests; means and peaks lack them",
    ]


def test_a_run_beside_which_nobody_sampled_has_no_flags_of_it(tmp_path):
    assert flags(tmp_path, []) == []


def test_xids_are_told_and_that_nobody_could_watch_for_them(tmp_path):
    mmu = {"kind": "xid", "at": "", "t_ns": ns(1), "xid": 31, "gpu": 0, "text": "MMU Fault"}
    rows = [gpu(s) for s in range(10)]
    found = flags(tmp_path / "seen", rows, change=needs_gpus(1), guards=[(1, [mmu, mmu], {})])
    assert found == ["boot 1: the driver reported Xid 31 of GPU 0, 2 times: MMU Fault"]
    blind = [(1, [], {"xids": "unknown: dmesg needs root"})]
    found = flags(tmp_path / "blind", rows, change=needs_gpus(1), guards=blind)
    assert found == ["boot 1: errors of the GPU's driver (Xids) could not be watched: dmesg needs root"]
    without = [(1, [], {"xids": "unknown: there is no GPU", "gpus": ()})]
    assert flags(tmp_path / "cpu", [host(s) for s in range(10)], guards=without) == []


def test_boots_made_for_one_case_are_left_out(tmp_path):
    cold = boot(started_at_ns=ns(0), workload="restart", case="first", repeat=0, page_cache="evicted")
    result = computed(tmp_path, [asked(0)], [host(0, temperature_c=60.0)], [cold])
    assert not has(result, "temperature.core_c")
    assert sample_rows.LEAST_S == 10.0  # as appendix/methods.md says
