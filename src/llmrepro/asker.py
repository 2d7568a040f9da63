"""Asks one live server what is missing of a run, step by step, each record written as it ends."""

import time
from pathlib import Path

from llmrepro import bench as benches
from llmrepro import engines, guard, jobs, memory_use, prompts, protocols, running_server, server
from llmrepro.bench import Bench
from llmrepro.client import Record
from llmrepro.jobs import Job
from llmrepro.prompt_lengths import Lengths
from llmrepro.protocols import MeasureFailure, Step
from llmrepro.recipe import Server
from llmrepro.run_folder import now
from llmrepro.workload import CASES, Workload

ANSWERED = {"ok", "early_stop", "context_overflow"}  # the server lived on and said something definite
XIDS_LATE_S = 1.5  # what a rung died of may be told after its server is gone
PROBE_S = 60.0  # for a server that lives to generate four tokens


class Uncounted(MeasureFailure):
    """The server did not count the tokens of a prompt."""


class Asker:
    """Asks one live server. `opener` is the job that this boot was made for, `killer` the one it died in or, with
    `warming`, in the warm-up before it; `over` whether no more is asked of it."""

    def __init__(
        self, bench: Bench, boot: server.Boot | running_server.Running, one: Server, told: dict, opener: Job | None
    ):
        self.bench, self.boot, self.one, self.told, self.opener = bench, boot, one, told, opener
        self.guard = guard.Listener(boot.guard_file)
        self.killer: Job | None = None
        self.warming = self.over = False
        self.asked: set[tuple[str, int, str]] = set()  # (workload, round, step) that this boot was asked
        self.heads: dict[str, str] = {}  # by salt
        self.lengths: dict[str, Lengths] = {}  # by workload

    def ask_all(self, workload: Workload, wanted: list[Job]) -> None:
        """Warm up, then ask what is wanted in order, until the server dies or a case wants one just started; of a
        ladder nothing at or beyond the rung that failed."""
        before, end = None, len(workload.cases)
        for job in wanted:
            if workload.rises and workload.cases.index(job.case) >= end:
                continue
            steps = protocols.needed(workload, job.case)
            reason = self._impossible(job, steps[-1])
            if self.over or (steps[-1].fresh and reason is None and job != self.opener):
                self.over = True
                break
            if reason is not None:
                self.bench.run.append(self._unanswered(job, workload, "skipped", reason))
            else:
                if before is None:
                    before = self._counters()
                    if not self._warm_up(workload):
                        self.killer, self.warming, self.over = job, True, True
                        break
                ask = self._ask_together if workload.kind == "concurrency" else self._ask_steps
                if not ask(workload, job, steps):
                    end = workload.cases.index(job.case)
            self.bench.bar.to(self.bench.bar.done + protocols.seconds(workload, job.case))
        if before:
            after = {} if self.killer else self._counters()
            self.told.setdefault("counters", {})[workload.id] = {"before": before, "after": after}

    def _warm_up(self, workload: Workload) -> bool:
        """Whether the server lived through it: no job is to blame where it did not."""
        asked = benches.warmup(self.bench, workload, self.one.id, self.boot.number)
        record = benches.ask_one(self.boot, asked)
        died = None if record.status in ANSWERED else self._died()
        if died is not None:
            record = record.model_copy(update=self._death(died))
        self.bench.run.append(record)
        if died is None and workload.kind == "ladder":
            self.lengths[workload.id] = Lengths(self._count if hasattr(self.bench.engine, "tokenize") else None)
            text = self.bench.texts[prompts.key(workload, workload.warmup)]
            try:
                self.lengths[workload.id].learn(text, record.prompt_tokens)
            except Uncounted:
                died = self._died()
                if died is None:
                    raise
        if died is not None:
            self.guard.hear(workload, rung=False)
        return died is None

    def _counters(self) -> dict:
        """What the engine counts of its prompt cache and of its drafts; {} where it does not."""
        counters = getattr(self.bench.engine, "counters", None)
        return counters(self._get) or {} if counters else {}

    def _get(self, path: str):
        return benches.call(self.boot, path)

    def _ask_steps(self, workload: Workload, job: Job, steps: list[Step]) -> bool:
        """Ask a case; whether it was answered whole. Steps before it that this boot was not asked come first, as
        warm-ups: they fill the cache, or bring back the state in which an earlier boot ended."""
        for step in steps:
            warmup = step is not steps[-1]
            if warmup and (workload.id, job.repeat, step.case) in self.asked:
                continue
            self.bench.bar.to(
                self.bench.bar.done, f"{self.one.id} · {workload.id} · {step.case} · round {job.repeat + 1}"
            )
            record = self._ask(workload, job, step, warmup)
            died = None if record.status in (*ANSWERED, "skipped") else self._died()
            if died is not None:
                record = record.model_copy(update=self._death(died))
                self.killer, self.over = job, True
            elif step.slot == "save":
                self._slot(job, "save")
            record = record.model_copy(update={"xids": self._xids(workload, record)})
            self.bench.run.append(record)
            self.asked.add((workload.id, job.repeat, step.case))
            if died is not None:
                if record.warmup:  # the case could not be asked, and after enough of that it is given up
                    error = f"in {step.case}, which is asked before it: {died}"
                    self.bench.run.append(self._unanswered(job, workload, "engine_died", error))
                return False
            if step.slot == "restore":  # no longer needed, and gigabytes for a large model
                self._slot_file(job).unlink(missing_ok=True)
        return not jobs.failed(record.status, record.xids)

    def _ask_together(self, workload: Workload, job: Job, _steps: list[Step]) -> bool:
        """Ask as many requests at once as the case has streams, each of a text of its own, sent when every one of
        them is ready to be. True: whatever became of them, the next case is asked."""
        asked = [
            benches.question(
                self.bench,
                workload,
                protocols.with_own_line(
                    self.bench.texts[prompts.key(workload, workload.prompts[n % len(workload.prompts)])],
                    protocols.salt(self.bench.label, self.boot.number, job, n),
                ),
                server=self.one.id,
                boot=self.boot.number,
                case=job.case,
                repeat=job.repeat,
                stream_number=n,
            )
            for n in range(jobs.streams(workload, job.case))
        ]
        records = benches.ask_together(self.boot, asked)
        if any(r.status not in ANSWERED for r in records) and (died := self._died()) is not None:
            death = self._death(died)
            records = [r if r.status in ANSWERED else r.model_copy(update=death) for r in records]
            self.killer, self.over = job, True
        self._xids(workload, *records)
        self.bench.run.append(*records)
        return True

    def _xids(self, workload: Workload, *records: Record) -> list[int]:
        """What the GPU's driver reported since the last request, by number. Raises GuardStop when the run must not
        go on: then these requests are not recorded."""
        if workload.rises and self.bench.recipe.needs.gpu_count and any(r.status != "ok" for r in records):
            time.sleep(XIDS_LATE_S)
        return self.guard.hear(workload)

    def _death(self, died: str) -> dict:
        """What a record says of the server's end."""
        return {"status": self._cause(), "error": died, "killed": self.boot.killed_by_somebody()}

    def _cause(self, otherwise: str = "engine_died") -> str:
        """Of what the server died, as a status, or why it does not do what it did."""
        return "oom" if self.boot.ran_out_of_memory() else otherwise

    def _ask(self, workload: Workload, job: Job, step: Step, warmup: bool) -> Record:
        try:
            if step.slot == "restore" and not self._slot(job, "restore"):
                reason = "the server did not restore the prompt cache that it had saved; its log may say why"
                return self._unanswered(job, workload, "skipped", reason)
            labels = {"case": step.case, "repeat": job.repeat, "warmup": warmup}
            text = self._text(workload, job, step)
            log_bytes = self.boot.log.stat().st_size
            record = benches.ask_one(
                self.boot,
                benches.question(self.bench, workload, text, server=self.one.id, boot=self.boot.number, **labels),
            )
        except Uncounted as failure:
            if self._died() is None and not workload.rises:
                raise
            return self._unanswered(job, workload, self._cause("http_error"), str(failure))
        except MeasureFailure as failure:  # no prompt of this length can be cut
            if not workload.rises:
                raise
            return self._unanswered(job, workload, "skipped", str(failure))
        told = {"engine_log": self._logged(workload, log_bytes)}
        if workload.kind == "ladder":
            if not hasattr(self.bench.engine, "tokenize"):
                self.lengths[workload.id].learn(text, record.prompt_tokens)
            told["memory"] = memory_use.of(self.boot.main_pid) or None
        return record.model_copy(update=told)

    def _logged(self, workload: Workload, since: int) -> dict | None:
        """What the engine logged of a request about its prompt cache."""
        read = getattr(self.bench.engine, "request_log", None)
        if read is None or workload.kind not in CASES:
            return None
        with open(self.boot.log, "rb") as file:
            file.seek(since)
            return read(file.read().decode(errors="replace"))

    def _unanswered(self, job: Job, workload: Workload, status: str, error: str) -> Record:
        return Record(
            server=job.server,
            boot=self.boot.number,
            workload=job.workload,
            case=job.case,
            repeat=job.repeat,
            warmup=False,
            prompt_sha256="",
            endpoint=workload.endpoint,
            request={},
            started_at=now(),
            t_send_ns=time.perf_counter_ns(),
            status=status,
            error=error,
        )

    def _impossible(self, job: Job, step: Step) -> str | None:
        """Why a case cannot be asked, or None."""
        engine, name = self.bench.engine, self.bench.recipe.engine.name
        workload = next(w for w in self.bench.recipe.workloads if w.id == job.workload)
        if self.bench.running and workload.kind == "restart":
            return "this server was running already, and llmrepro neither ends nor starts it"
        reason = engine.impossible(workload) if hasattr(engine, "impossible") else None
        if reason is None and workload.kind == "concurrency" and not self.bench.running:
            reason = _waits(jobs.streams(workload, job.case), _sequences(engine, self.one), name)
        if reason is None and workload.kind in ("prefill", *CASES) and not hasattr(engine, "tokenize"):
            reason = f"{name} counts the tokens of no text, and {workload.id} needs prompts of exact lengths"
        if reason is not None or step.slot != "restore":
            return reason
        if not hasattr(self.bench.engine, "slot"):
            return f"{name} cannot keep its prompt cache over a restart"
        if not self._slot_file(job).is_file():
            return "no prompt cache was saved before the restart; the log of the boot before may say why"
        return None

    def _slot_file(self, job: Job) -> Path:
        name = f"{job.server}-{job.replicate}-{job.workload}-{job.repeat}.bin"
        return self.bench.run.path / benches.SLOTS / name

    def _slot(self, job: Job, action: str) -> bool:
        """Have the server save its prompt cache, or restore it; whether it did."""
        if not hasattr(self.bench.engine, "slot"):
            return False
        path, body = self.bench.engine.slot(action, self._slot_file(job).name)
        return benches.call(self.boot, path, body) is not None

    def _died(self) -> str | None:
        """Why the server is dead, or None: a server lives when it can still generate."""
        for _ in range(20):  # an exit is seen a moment after its last answer
            ended = self.boot.ended()
            if ended is not None:
                return ended
            time.sleep(0.05)
        asked = benches.sign_of_life(self.bench, self.one.id, self.boot.number)
        probe = benches.ask_one(self.boot, asked, timeout_s=PROBE_S)
        return None if probe.status in ANSWERED else f"it no longer generates: {probe.status}, {probe.error}"

    def _text(self, workload: Workload, job: Job, step: Step) -> str:
        """A step's prompt. Heads are salted anew each round, and the same in every boot that the round takes."""
        bench, by_id = self.bench, {p.id: p for p in workload.prompts}
        if workload.kind not in CASES:
            salt = protocols.salt(bench.label, self.boot.number, job)
            if workload.kind == "chat":
                text = bench.texts[prompts.key(workload, by_id[job.case])]
                return protocols.with_own_line(text, salt) if workload.salted else text
            text = bench.texts[prompts.key(workload, workload.text)]
            if workload.kind == "ladder":
                return self.lengths[workload.id].prompt(text, int(job.case), salt)
            return protocols.salted(text, int(job.case), salt, self._count)
        salt = protocols.salt(bench.label, job.server, job.replicate, job.workload, job.repeat, step.head)
        if salt not in self.heads:
            text = bench.texts[prompts.key(workload, workload.text)]
            self.heads[salt] = protocols.salted(text, workload.head_tokens, salt, self._count)
        head = protocols.changed(self.heads[salt]) if step.changed else self.heads[salt]
        return f"{head}\n\n{bench.texts[prompts.key(workload, workload.prompts[step.tail])]}"

    def _count(self, text: str) -> int:
        path, body = self.bench.engine.tokenize(text)
        answer = benches.call(self.boot, path, body)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or (text and not tokens):
            raise Uncounted(
                f"{path} of the server did not count the tokens of a prompt; its log, "
                f"boots/{self.boot.log.name}, may say why"
            )
        return len(tokens)


def _sequences(engine: engines.Engine, one: Server) -> int | None:
    """How many requests the server works on at once, None: as many as come, or nobody knows."""
    return engine.sequences(one.args) if hasattr(engine, "sequences") else None


def _waits(streams: int, at_once: int | None, name: str) -> str | None:
    """Why so many requests at once would only wait in line, or None."""
    if at_once is None or streams <= at_once:
        return None
    return (
        f"{name} works here on {at_once} request{'s' * (at_once > 1)} at a time, so that of {streams} streams "
        f"{streams - at_once} would wait; serve with more where it can"
    )
