"""All that a study's run folder tells, read once: what its charts and its page are made from."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmrepro import comparison, findings, quotations, study_results
from llmrepro.client import Record
from llmrepro.comparison import StudyParameters
from llmrepro.findings import Findings
from llmrepro.quotations import Row
from llmrepro.recipe import Recipe, Server
from llmrepro.run_folder import read_json, read_json_if_there, status
from llmrepro.study import Study
from llmrepro.workload import Workload


@dataclass(frozen=True)
class StudyFindings:
    """A study's run in memory; `arms` by id, in the study's order."""

    study: Study
    parameters: StudyParameters
    status: dict
    machine: dict
    arms: dict[str, Findings]
    result: dict  # computed anew: a page shows what the records say

    @property
    def published_only(self) -> bool:
        """Whether the page shows a publication and no measurement: no arm was asked, nor could be."""
        return self.status["outcome"] == "lacking" and not any(arm.records for arm in self.arms.values())

    @property
    def recipes(self) -> dict[str, Recipe]:
        """The recipe of each arm."""
        return {arm: one.recipe for arm, one in self.arms.items()}

    @property
    def quoted(self) -> list[Row]:
        """What was published of the arms, side by side."""
        return quotations.rows(self.study, self.recipes)

    @property
    def asked(self) -> int:
        """Requests that count, of all arms."""
        return sum(len(arm.asked) for arm in self.arms.values())


def read(path: Path) -> StudyFindings:
    """Everything of a study's run folder. Raises RunError naming the file that is missing or broken."""
    given = read_json(path / "parameters.json")
    known = {n: v for n, v in given.items() if n in StudyParameters.model_fields}
    return StudyFindings(
        study=comparison.load_study(path),
        parameters=StudyParameters.model_validate(known),
        status=status(path, page=False),
        machine=read_json_if_there(path / "machine.json"),
        arms={arm: findings.read(folder) for arm, folder in comparison.arm_folders(path).items()},
        result=study_results.compute(path),
    )


def merged(found: StudyFindings) -> Findings:
    """The arms as if they were servers of one recipe, so that a chart of several servers shows them side by side.

    Servers have their labels (the arm, or arm · server), boots are numbered in the order in which they were
    asked, and workloads that ask the same have one id.
    """
    parts = [
        (
            arm,
            {
                s: label
                for told in found.result["arms"]
                if told["arm"] == arm
                for s, label in told["contenders"].items()
            },
        )
        for arm in found.arms
    ]
    workloads, ids = _workloads(found)
    boots, records, rows = {}, [], []
    for arm, number, boot in _in_order(found):
        labels = dict(parts)[arm]
        if boot["server"] not in labels:
            continue
        new = len(boots) + 1
        boots[new] = {**boot, "server": labels[boot["server"]]}
        records += [
            r.model_copy(
                update={
                    "boot": new,
                    "server": labels[r.server],
                    "workload": ids.get((arm, r.workload), r.workload),
                }
            )
            for r in found.arms[arm].records
            if r.boot == number
        ]
    for arm, labels in parts:
        rows += [
            {**row, "server": labels[row["server"]], "workload": ids.get((arm, row["workload"]), row["workload"])}
            for row in found.arms[arm].result["metrics"]
            if row["server"] in labels
        ]
    first = next(iter(found.arms.values()))
    servers = [
        Server.model_construct(id=label, args=[], env={}, boots=1) for _, ls in parts for label in ls.values()
    ]
    return Findings(
        recipe=first.recipe.model_copy(update={"id": found.study.id, "servers": servers, "workloads": workloads}),
        parameters=first.parameters,
        status=found.status,
        machine=found.machine,
        boots=boots,
        records=records,
        result={"metrics": rows},
        prompts=first.prompts,
        freeze="",
    )


def _in_order(found: StudyFindings) -> Iterator[tuple[str, int, dict]]:
    """(arm, boot number there, boot) by the time of its first request."""
    first: dict[tuple[str, int], Record] = {}
    for arm, one in found.arms.items():
        for record in one.records:
            first.setdefault((arm, record.boot), record)
    there = [(arm, n, boot) for arm, one in found.arms.items() for n, boot in one.boots.items()]
    yield from sorted(there, key=lambda b: first[b[0], b[1]].started_at if (b[0], b[1]) in first else "9")


def _workloads(found: StudyFindings) -> tuple[list[Workload], dict[tuple[str, str], str]]:
    """The workloads that two arms or servers were asked alike, and (arm, id there) → the one id."""
    alike: dict[tuple, list[tuple[str, Workload]]] = {}
    for arm, one in found.arms.items():
        for workload in one.recipe.workloads:
            if any(r.workload == workload.id for r in one.asked):
                alike.setdefault(study_results.question(workload), []).append((arm, workload))
    shown, ids = [], {}
    for same in alike.values():
        if len(same) > 1:
            shown.append(same[0][1])
            ids |= {(arm, w.id): same[0][1].id for arm, w in same}
    return shown, ids
