"""The cells of compare.ipynb, one function each: the stages of a study's run, whose arms are ordinary runs.

`start` makes it; `card`, `machine`, `prepare`, `measure`, `results`, `charts` and `report` each take it.
"""

from typing import Any

from IPython.display import display

from llmrepro import charts as charts_
from llmrepro import (
    comparison,
    credentials,
    environment,
    jobs,
    locks,
    occupancy,
    privacy,
    run_folder,
    stages,
    study_results,
)
from llmrepro import machine as machine_
from llmrepro import report as report_
from llmrepro import results as results_
from llmrepro.cells import assigned_in_parameter_cells, table
from llmrepro.comparison import StudyParameters, StudyRun
from llmrepro.differences import Setup, line
from llmrepro.notation import plural
from llmrepro.parameters import checked
from llmrepro.run import Run
from llmrepro.study import of_arm


def start(values: dict[str, Any]) -> StudyRun:
    """A study's run from a notebook's globals: the parameters among them, checked. Raises RunError or RecipeError.

    A name that papermill injected and no parameter has is refused: papermill itself only warns.
    """
    known = {name: values[name] for name in StudyParameters.model_fields if name in values}
    injected = {name: values.get(name) for name in assigned_in_parameter_cells()}
    return comparison.create(checked(known | injected, StudyParameters))


def card(compared: StudyRun) -> None:
    """What is compared, what the arms differ in by their recipes, and what it costs, before anything is done."""
    with compared.stage("card"):
        study, params = compared.study, compared.parameters
        recipes = {arm.id: of_arm(compared.arms[arm.id].recipe, arm) for arm in study.arms}
        table(
            study.title,
            [
                ("question", study.question),
                ("published by", study.source.publication if study.source else "no publication is named"),
                *((f"arm {arm}", _engine(recipe)) for arm, recipe in recipes.items()),
                ("differ in", line({arm: Setup(recipe) for arm, recipe in recipes.items()}, study.differs_in)),
                ("claims", str(len(study.comparisons))),
                ("plan", _plan(compared)),
                *(("out of scope", text) for text in study.out_of_scope),
                ("mode, profile", f"{params.mode}, {params.profile}"),
                ("run folder", str(compared.path)),
            ],
        )


def _engine(recipe) -> str:
    pins = ", ".join(f"{n} {v}" for n, v in recipe.engine.install.pins.items())
    return f"{recipe.id}: {recipe.engine.name} ({recipe.engine.install.kind}: {pins})"


def _plan(compared: StudyRun) -> str:
    if compared.parameters.runs:
        return "nothing is measured: these runs are compared as they are"
    todo = {arm: jobs.missing(run) for arm, run in compared.arms.items()}
    recipes = {arm: run.recipe for arm, run in compared.arms.items()}
    seconds = sum(jobs.estimate_s(recipes[arm], mine) for arm, mine in todo.items())
    requests = sum(jobs.requests(recipes[arm], mine) for arm, mine in todo.items())
    minutes = sum(run.recipe.needs.minutes for run in compared.arms.values())
    return (
        f"{plural(compared.study.boots, 'boot')} of every server, the arms in turns; "
        f"{plural(requests, 'request')} to go, about {seconds / 60:.0f} minutes on two slow "
        f"cores; installing, the first time, within {minutes:g} minutes more"
    )


def machine(compared: StudyRun) -> None:
    """What this machine is, and what each arm needs that it lacks."""
    environment.look_again()
    with compared.stage("machine"):
        if compared.parameters.runs:
            return
        known = compared.path / "machine.json"
        earlier = run_folder.read_json_if_there(known)
        facts = machine_.describe(machine_.cache_dir())
        rows, on_cpu = [], False
        for run in compared.arms.values():
            run.write_json("machine.json", facts)
        looked_at = [part for run in compared.arms.values() for part in stages.looks_at(run)]
        with locks.held(looked_at, compared.path) as waited:
            if waited:
                facts = machine_.describe(machine_.cache_dir())
            for arm, run in compared.arms.items():
                with run.stage("machine"):
                    run.write_json("machine.json", facts)
                    lacking = stages.lacks(run)
                    on_cpu |= not lacking and not run.recipe.needs.gpu_count
                    rows.append((f"arm {arm}", "; ".join(lacking) or "can run here"))
            if on_cpu:
                facts["memory"] |= machine_.measured_bandwidth(earlier)
        for one in (compared, *compared.arms.values()):
            one.write_json("machine.json", facts)
        table("This machine", [*machine_.told(facts), *rows])


def prepare(compared: StudyRun) -> None:
    """Every arm's environment and weights, built or found, each checked; not of arms that cannot run here."""
    with compared.stage("prepare"):
        if not compared.parameters.runs:
            for arm, run in compared.arms.items():
                print(f"arm {arm}", flush=True)
                stages.prepare(run)


def measure(compared: StudyRun) -> None:
    """Every boot and request that is still missing, the arms in turns: A B A B.

    An arm that fails loses its further turns and the others go on; then ArmFailure is raised.
    """
    with compared.stage("measure"):
        if compared.parameters.runs:
            return
        live = {arm: run for arm, run in compared.arms.items() if not stages.lacks(run)}
        boots = compared.study.boots
        names = {id(run): arm for arm, run in live.items()}

        def turn(run: Run, boot: int) -> None:
            if any(job.replicate == boot for job in jobs.missing(run)):
                print(f"boot {boot + 1} of {boots} · {names[id(run)]}")
                stages.measure(run, boot)

        parts = [part for run in live.values() for part in occupancy.of(run)]
        try:
            with locks.held(parts, compared.path):  # over all turns: nobody slips in between two boots
                comparison.take_turns(live, boots, turn)
        except BaseException as error:
            _end_with(compared, error)
            raise


def _end_with(compared: StudyRun, error: BaseException) -> None:
    """The arms that were between their turns when the study's measuring ended: they did not end of themselves."""
    for run in compared.arms.values():
        if run_folder.read_json(run.path / "status.json")["outcome"] == "running":
            run.set_status(
                "stopped",
                "measure",
                stopped_by="study",
                reason=f"the study that it belongs to ended: {str(error) or 'interrupted by a person'}",
                next_step=run_folder.go_on(compared.path),
            )
            run.close()


def results(compared: StudyRun) -> None:
    """Metrics side by side, what the arms differ in, verdicts and the break-even, written to result.json."""
    with compared.stage("results"):
        if not compared.parameters.runs:
            for run in compared.arms.values():
                with run.stage("results"):
                    run.write_json("result.json", results_.compute(run.path))
        result = study_results.compute(compared.path)
        compared.write_json("result.json", result)
        nothing = not compared.parameters.runs and all(map(stages.lacks, compared.arms.values()))
        table("Claims", [("differ in", result["line"]), *stages.verdicts(result, nothing)])


def charts(compared: StudyRun) -> None:
    """The figures of the comparison, as SVG, PNG, CSV and alt text."""
    with compared.stage("charts"):
        for figure in charts_.draw_study(compared.path):
            display({"text/html": figure.html(), "text/plain": figure.alt}, raw=True)


def report(compared: StudyRun) -> None:
    """report.html of the study and of every arm, and the run's end: completed, or what is missing of which arm."""
    with compared.stage("report"):
        credentials.blank(compared.path)
        finish(compared)
        compared.write_json("result.json", study_results.compute(compared.path))  # it tells how the arms ended
        path = report_.write(compared.path)
    compared.close()
    table("Report", [("open", str(path))])


def finish(compared: StudyRun) -> None:
    """The status of the study's run and its arms' once the stages are over; see `stages.finish`."""
    for page in (privacy.OWN, privacy.SHARED):
        (compared.path / page).unlink(missing_ok=True)
    if compared.parameters.runs:
        compared.set_status("completed", "report")
        return
    ends = {}
    for arm, run in compared.arms.items():
        with run.stage("report"):
            stages.finish(run)
            run.write_json("result.json", results_.compute(run.path))  # a verdict tells how the arm ended
        ends[arm] = run_folder.status(run.path, page=False)
    for outcome, stage in (("stopped", "measure"), ("lacking", "report")):
        ended = {arm: end for arm, end in ends.items() if end["outcome"] == outcome}
        if ended:
            said = (
                _lacking({arm: compared.arms[arm] for arm in ended})
                if outcome == "lacking"
                else [f"{arm}: {end['reason']}" for arm, end in ended.items()]
            )
            more = (
                {
                    "stopped_by": "person",
                    "next_step": f"run the cell measure again, or {run_folder.go_on(compared.path)}",
                }
                if outcome == "stopped"
                else {}
            )
            compared.set_status(outcome, stage, reason="; ".join(said), **more)
            return
    compared.set_status("completed", "report")


def _lacking(arms: dict[str, Run]) -> list[str]:
    """What is missing, each thing once, with the arms that need it."""
    needed: dict[str, list[str]] = {}
    for arm, run in arms.items():
        for sentence in stages.lacks(run):
            needed.setdefault(sentence, []).append(arm)
    return [f"{' and '.join(names)}: {sentence}" for sentence, names in needed.items()]
