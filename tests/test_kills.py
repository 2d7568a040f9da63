"""Whatever is killed, and whenever: the rows are there, the folder tells the truth, nothing runs on, and the run
is gone on with to the end that it would have had."""

import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from kill_rig import RealRig, Rig
from test_notebook import left_below
from test_supervisor import soon
from victims import always, begin, commands, guarded, measures, reports, tears, twice

from llmrepro import catalog, jobs, run_folder
from llmrepro import run as runs
from llmrepro.client import Record

SEED = int(os.environ.get("LLMREPRO_SEED", time.time_ns() % 10**6))
REQUESTS = 3 + 27  # three warm-ups among them
LATE_S = 1.5  # a kill after the last request comes within that time
IN_FLIGHT_S = 0.25  # and else within that after a request came


class Scene:
    """One run, and what becomes of it when something of it is killed once so many requests have come."""

    def __init__(self, rig: Rig | RealRig, what, victim: str, dice: random.Random, requests: int):
        self.rig, self.what, self.victim = rig, what, victim
        self.rig.cut = dice.randrange(10**6)
        self.after = dice.randint(victim == "server", requests)
        self.wait_s = dice.uniform(0, IN_FLIGHT_S if 0 < self.after < requests else LATE_S)
        self.process = begin(what, self.rig)

    def __repr__(self) -> str:
        when = f"after {self.after} requests and {self.wait_s:.3f} s"
        return f"{self.what.__name__}: {self.victim} killed {when}, seed {SEED}"

    @property
    def path(self) -> Path:
        (found,) = self.rig.runs.glob("*/*/*")
        return found

    def kill(self) -> None:
        if self.victim == "itself":
            return self.process.join(60)
        assert soon(lambda: list(self.rig.runs.glob("*/*/*/status.json")), 60), self
        assert soon(lambda: self.rig.requests() >= self.after and self.pid() is not None, 60), self
        time.sleep(self.wait_s)
        if (pid := self.pid()) is not None:  # else it was at its end
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pid(self) -> int | None:
        if self.victim == "server":
            return self.rig.server()
        if self.victim == "kernel":
            with suppress(psutil.NoSuchProcess):
                below = psutil.Process(self.process.pid).children()
                return next((p.pid for p in below if "ipykernel_launcher" in " ".join(p.cmdline())), None)
        return self.process.pid

    def over(self) -> int:
        """Wait until nothing of it runs any more; the exit code of what was begun."""
        self.process.join(60)
        assert self.process.exitcode is not None, self
        assert soon(lambda: not left_below(self.rig.folder), 10), (self, left_below(self.rig.folder))
        return self.process.exitcode

    def go_on(self) -> None:
        """Resume it. What was torn of the telemetry is forgiven, as what was torn of the records is."""
        with open(self.path / "telemetry.csv", "a") as file:
            file.write("1234567,1,ho")
        again = commands if (self.what, self.victim) == (commands, "kit") else measures
        self.process = begin(again, self.rig, resume=str(self.path))

    def records(self) -> list[Record]:
        return [Record.model_validate(r) for r in run_folder.read_lines(self.path / "records.jsonl")]

    def said(self) -> str:
        return f"{self}\n{(self.rig.folder / 'out.log').read_text()[-3000:]}"


def groups(begun: list[dict], ended: list[dict]) -> list[list[dict]]:
    """Requests that came, each with its `answer` or None; those together that were under way together."""
    answers = {(e["prompt_sha256"], e["recv_ns"]): e for e in ended}
    found: list[list[dict]] = []
    until_ns = 0.0
    for request in sorted(begun, key=lambda b: b["recv_ns"]):
        answer = answers.get((request["prompt_sha256"], request["recv_ns"]))
        if not found or request["recv_ns"] > until_ns:
            found.append([])
        found[-1].append({**request, "answer": answer})
        until_ns = max(until_ns, answer["at_ns"] if answer else float("inf"))
    return found


def record_of(request: dict, records: list[Record]) -> Record | None:
    """The record of a request that came: the last one with its prompt that was sent before."""
    of_it = [
        r for r in records if r.prompt_sha256 == request["prompt_sha256"] and r.t_send_ns < request["recv_ns"]
    ]
    return max(of_it, key=lambda r: r.t_send_ns, default=None)


def hold_against_the_server(it: Scene, killed: bool) -> None:
    """Every answer of the server is a record, but for those that were under way when the run was `killed`, and no
    record tells of an answer that the server does not know."""
    records = it.records()
    asked = groups(it.rig.told("begun"), it.rig.told("ended"))
    found = {}
    for request in (request for group in asked[: len(asked) - killed] for request in group):
        record = record_of(request, records)
        assert record is not None and id(record) not in found, (it, "lost", request)
        found[id(record)] = request
        if request["answer"] and record.status == "ok":
            assert record.output_tokens == request["answer"]["output_tokens"], it
    for request in (request for group in asked[len(asked) - killed :] for request in group):
        record = record_of(request, records)
        if record is not None and id(record) not in found:
            found[id(record)] = request
    for record in records:
        if record.status in ("ok", "context_overflow"):
            assert found[id(record)]["answer"], (it, "not answered, and it says", record.status)


def answers(it: Scene) -> Counter:
    """How often each request was asked with which end. Of streams that were asked together again, after something
    died, the last time; of a request in which the server died that it was asked again."""
    records = [r for r in it.records() if not r.warmup]
    last = {(r.workload, r.case, r.repeat): r.boot for r in records}
    return Counter(
        (r.workload, r.case, r.repeat, r.stream_number, r.status)
        for r in records
        if last[r.workload, r.case, r.repeat] == r.boot
        or (r.workload != "concurrency" and r.status != "engine_died")
    )


WHOLE = Counter(
    [
        *(("chat", case, n, 0, "ok") for case in ("hello", "count", "plan") for n in (0, 1)),
        *(("ladder", case, n, 0, "ok") for case in ("32", "64", "96") for n in (0, 1)),
        ("ladder", "160", 0, 0, "context_overflow"),
        *(("concurrency", str(m), n, s, "ok") for m in (1, 2, 4) for s in range(m) for n in (0, 1)),
    ]
)
WORDS = {"counts": "reproduced", "together": "reproduced", "fails": "reproduced", "holds": "reproduced"}


def completed(it: Scene) -> dict:
    """The result of a run that has come to its end, its folder whole."""
    assert run_folder.status(it.path)["outcome"] == "completed", it.said()
    assert (it.path / "report.html").exists() and not run_folder.held(it.path), it
    run = runs.Run(it.path)
    assert jobs.missing(run) == [], it
    run.close()
    result = run_folder.read_json(it.path / "result.json")
    assert not [flag for flag in result["flags"] if "by hand" in flag], (it, result["flags"])
    read_back = {c["name"]: c["relation"] for c in result["conditions"] if c["name"].startswith("servers.")}
    assert read_back["servers.default.slots"] == "equal", (it, read_back)
    return result


def words(result: dict) -> dict:
    return {v["claim"]: v["word"] for v in result["verdicts"]}


@pytest.fixture
def killed(tmp_path):
    """Scenes, all at once, each killed at its moment and then over."""
    scenes: list[Scene] = []

    def make(*wanted, on=Rig, requests: int = REQUESTS) -> list[Scene]:
        dice = random.Random(f"{SEED} {[(what.__name__, victim) for what, victim in wanted]}")
        print("seed", SEED)
        for n, (what, victim) in enumerate(wanted):
            scenes.append(Scene(on(tmp_path / str(n)), what, victim, dice, requests))
        with ThreadPoolExecutor() as pool:
            list(pool.map(Scene.kill, scenes))
        for it in scenes:
            it.over()
        return scenes

    yield make
    for it in scenes:
        it.process.kill()
        for process in left_below(it.rig.folder):
            process.kill()


def check_of_server(it: Scene, expected: Counter) -> bool:
    """Hold a run whose server was killed against what it would have asked; whether that was not in a rung."""
    assert it.process.exitcode == 0, it.said()
    found = answers(it)
    in_a_rung = any(status == "engine_died" for *_, status in found)
    if in_a_rung:  # that is the rung's row, and the end of its ladder
        found, expected = (Counter({k: n for k, n in c.items() if k[0] != "ladder"}) for c in (found, expected))
    assert found == expected, it
    return not in_a_rung


def test_of_a_server_killed_every_request_is_a_row_and_the_run_goes_on_by_itself(killed):
    for it in killed(*3 * [(measures, "server")]):
        hold_against_the_server(it, killed=False)
        told = words(completed(it))
        whole = check_of_server(it, WHOLE)
        assert told == (WORDS if whole else told | {"counts": "reproduced", "together": "reproduced"}), it


def go_on(scenes: list[Scene], expected: Counter) -> None:
    """Resume runs of which nothing runs any more, once their folders tell the truth of that."""
    for it in scenes:
        told = run_folder.status(it.path)
        assert told["outcome"] in ("completed", "interrupted") and not run_folder.held(it.path), (it, told)
        if told["outcome"] == "completed":
            assert answers(it) == expected and completed(it), it
        it.go_on()
    for it in scenes:
        assert it.over() == 0, it.said()
        assert answers(it) == expected, it


def check_and_go_on(scenes: list[Scene]) -> None:
    for it in scenes:
        hold_against_the_server(it, killed=run_folder.status(it.path)["stage"] == "measure")
    go_on(scenes, WHOLE)
    for it in scenes:
        assert words(completed(it)) == WORDS, it


@pytest.mark.engine
def test_of_a_kernel_killed_no_more_is_lost_than_was_in_flight(killed):
    check_and_go_on(killed(*2 * [(commands, "kernel")]))


def test_of_the_kit_killed_no_more_is_lost_than_was_in_flight(killed):
    check_and_go_on(killed(*4 * [(measures, "kit")], (commands, "kit")))


def test_at_the_worst_moments_too(killed):
    wanted = (tears, reports, twice, always, guarded)
    torn, reported, died, ended, stopped = killed(*((what, "itself") for what in wanted))
    assert run_folder.status(reported.path)["reason"] == "it ended while its report was written"
    assert 0 <= sum(r.case == "4" and not r.warmup for r in torn.records()) < 4
    check_and_go_on([torn, reported])
    together = [r.status for r in died.records() if (r.workload, r.case, r.repeat) == ("concurrency", "4", 0)]
    assert {"ok", "engine_died"} == set(together[:4]) and together[4:] == 4 * ["ok"]
    assert check_of_server(died, WHOLE), "no rung was under way"
    assert words(completed(died)) == WORDS
    told = run_folder.status(ended.path)
    assert told["outcome"] == "failed" and "died 4 times, last during ladder (its warm-up)" in told["reason"]
    assert not [r for r in ended.records() if r.workload == "ladder" and not r.warmup], "no rung was asked"
    told = run_folder.status(stopped.path)
    assert (told["outcome"], told["stopped_by"], told["reason"]) == ("stopped", "guard", "It was hot")


@pytest.mark.engine
def test_rows_of_a_real_engine_survive_a_kill_of_its_server_and_of_the_kit(killed, prepared):
    whole = Counter(
        [
            *(("chat", p.id, 0, 0, "ok") for p in catalog.load(catalog.DEFAULT).workloads[0].prompts),
            *(("ladder", case, 0, 0, "ok") for case in ("32", "64")),
            *(("concurrency", str(m), 0, s, "ok") for m in (1, 2) for s in range(m)),
        ]
    )
    rig = partial(RealRig, environment=prepared[0].path, weights=prepared[1])
    of_server, of_kit = killed((measures, "server"), (measures, "kit"), on=rig, requests=12)
    completed(of_server)
    check_of_server(of_server, whole)
    go_on([of_kit], whole)
    completed(of_kit)
