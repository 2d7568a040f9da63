"""The cells of a notebook, one function each. A later stage reads what an earlier one wrote to the run folder.

`start` makes the run; `card`, `machine`, `prepare`, `measure`, `results`, `charts` and `report` each take it.
"""

from typing import Any

from IPython.display import display

from llmrepro import catalog, conversion, environment, run_folder, weights, workloads
from llmrepro import charts as charts_
from llmrepro import machine as machine_
from llmrepro import report as report_
from llmrepro import results as results_
from llmrepro import run as runs
from llmrepro.cells import assigned_in_parameter_cells, table
from llmrepro.parameters import Parameters, checked
from llmrepro.run import Run
from llmrepro.run_folder import RunError


def start(values: dict[str, Any]) -> Run:
    """A run from a notebook's globals: the parameters among them, checked. Raises RunError or RecipeError.

    A name that papermill injected and no parameter has is refused: papermill itself only warns.
    """
    injected = assigned_in_parameter_cells()
    known = {name: values[name] for name in Parameters.model_fields if name in values}
    params = checked(known | {name: values.get(name) for name in injected})
    return runs.create(params)


def card(run: Run) -> None:
    """What is asked, by whom it was published, what it costs; said before anything is installed."""
    with run.stage("card"):
        recipe, params = run.recipe, run.parameters
        jobs = workloads.missing(run)
        boots = workloads.starts(recipe, jobs)
        pins = ", ".join(f"{n} {v}" for n, v in recipe.engine.install.pins.items())
        source = recipe.source
        table(
            recipe.title,
            [
                ("question", recipe.question),
                ("published by", source.publication if source else "no publication is named"),
                ("engine", f"{recipe.engine.name} ({recipe.engine.install.kind}: {pins})"),
                (
                    "model",
                    f"{recipe.model.repo} {recipe.model.revision}, {recipe.model.format}, "
                    f"{sum(f.bytes for f in recipe.model.files) / 1e6:.0f} MB",
                ),
                (
                    "plan",
                    f"{boots} boot{'s' * (boots > 1)}, {len(jobs)} requests to go; about "
                    f"{workloads.estimate_s(recipe, jobs):.0f} s on two slow cores, after installing",
                ),
                ("cost", f"about {recipe.needs.minutes:g} minutes in all, {recipe.needs.disk_gib:g} GiB of disk"),
                ("mode, profile", f"{params.mode}, {params.profile}"),
                ("run folder", str(run.path)),
            ],
        )


def machine(run: Run) -> None:
    """What this machine is, and what the recipe needs that it lacks."""
    with run.stage("machine"):
        facts = machine_.describe(machine_.cache_dir())
        run.write_json("machine.json", facts)
        lacking = lacks(run)
        table(
            "This machine",
            [
                (
                    "processor",
                    f"{facts['cpu']['model']} · {facts['cpu']['physical_cores']} cores, "
                    f"{machine_.threads()} for the engine",
                ),
                ("memory", f"{facts['memory']['available_gib']:g} of {facts['memory']['total_gib']:g} GiB free"),
                ("disk", f"{facts['disk_free_gib']:g} GiB free"),
                ("system", f"{facts['os']['name']}, load {facts['load_1min']:g}"),
                ("this recipe", "; ".join(lacking) or "can run here"),
            ],
        )


def lacks(run: Run) -> list[str]:
    """Why this run is not live, a sentence each: what the machine lacks, or that live was not asked for."""
    if run.parameters.mode == "published":
        return ["published mode was asked for"]
    cache = machine_.cache_dir()
    return machine_.lacks(run.recipe.needs, run_folder.read_json(run.path / "machine.json"), cache)


def prepare(run: Run) -> None:
    """The engine's environment and the weights, built or found, each checked. Nothing when the run is not live."""
    with run.stage("prepare"):
        recipe, params = run.recipe, run.parameters
        missing = lacks(run)
        if missing and params.mode == "live":
            raise RunError(
                f"mode is live, and this machine {'; '.join(missing)}; take mode='auto' to see what is published"
            )
        if missing:
            return
        folder = catalog.path_of(params.recipe).parent
        env = environment.prepare(recipe.engine, folder / "engine.lock", run.path / "install.log")
        run.write_text("engine-freeze.txt", env.freeze)
        path = weights.fetch(recipe.model, params.weights_path)
        facts = weights.facts(path)
        if recipe.model.convert is not None:
            path = conversion.convert(path, recipe.model.convert, env, run.path / "install.log")
            facts["model.converted_sha256"] = conversion.digest(path)
        run.write_json("weights.json", {"path": machine_.shortened(path), "facts": facts})
        told = {"path": machine_.shortened(env.path), "key": env.key, "seconds": env.seconds}
        run.write_json("environment.json", {**told, "fixes": env.fixes, "exports": env.exports})
        table(
            "Ready",
            [
                ("environment", f"{env.key}, " + (f"built in {env.seconds:g} s" if env.seconds else "reused")),
                *((f"fix {fix['name']}", fix["why"]) for fix in env.fixes),
                ("installed", ", ".join(env.freeze.split("\n")).strip(", ")),
                (
                    "weights",
                    f"{recipe.model.files[0].path.rpartition('/')[2]}, {facts['model.bytes'] / 1e6:.0f} MB, "
                    f"sha256 {facts['model.sha256'][:16]}…"
                    + (f", as {recipe.model.convert.dtype}" if recipe.model.convert else ""),
                ),
            ],
        )


def measure(run: Run, only: int | None = None) -> None:
    """Every boot and every request that is still missing; with `only`, of each server's boot of that number."""
    with run.stage("measure"):
        if lacks(run):
            return
        made, files = (run_folder.read_json(run.path / n) for n in ("environment.json", "weights.json"))
        where = [machine_.expanded(told["path"]) for told in (made, files)]
        workloads.measure(run, *where, only, made.get("exports"))


def results(run: Run) -> None:
    """Metrics, conditions and verdicts from the records, written to result.json."""
    with run.stage("results"):
        result = results_.compute(run.path)
        run.write_json("result.json", result)
        table("Verdicts", verdicts(result))


def verdicts(result: dict) -> list[tuple[str, str]]:
    """(claim, word and reason) of every claim of a result, and before them what to know first."""
    judged = [*result.get("verdicts", []), *result["comparisons"]]
    return [
        *(("mind", flag) for flag in result["flags"]),
        *((v["claim"], f"{v['word'].replace('_', ' ')}: {v['reason']}") for v in judged),
    ]


def charts(run: Run) -> None:
    """The figures of the run, as SVG, PNG, CSV and alt text."""
    with run.stage("charts"):
        for figure in charts_.draw(run.path):
            display({"text/html": figure.html(), "text/plain": figure.alt}, raw=True)


def report(run: Run) -> None:
    """report.html, and the run's end: completed, or lacking with what is missing."""
    with run.stage("report"):
        finish(run)
        path = report_.write(run.path)
    run.close()
    table("Report", [("open", str(path))])


def finish(run: Run) -> None:
    """The status of a run whose stages are over: completed, lacking, or stopped with what was not asked."""
    missing = lacks(run)
    left = [] if missing else workloads.missing(run)
    if missing:
        run.set_status("lacking", "report", reason="; ".join(missing))
    elif left:
        run.set_status(
            "stopped",
            "measure",
            stopped_by="person",
            reason=f"{len(left)} requests were not asked",
            next_step=f"run the cell measure again, or `llmrepro run --resume {run.path}`",
        )
    else:
        run.set_status("completed", "report")
