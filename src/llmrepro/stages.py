"""The cells of a notebook, one function each. A later stage reads what an earlier one wrote to the run folder.

`start` makes the run; `card`, `machine`, `prepare`, `measure`, `results`, `charts` and `report` each take it.
"""

import html
from typing import Any

from IPython.display import display

from llmrepro import (
    catalog,
    checkpoint,
    commands,
    credentials,
    environment,
    guard_log,
    jobs,
    locks,
    occupancy,
    preparation,
    privacy,
    prompts,
    requirements,
    run_folder,
    running_server,
    workloads,
)
from llmrepro import charts as charts_
from llmrepro import machine as machine_
from llmrepro import report as report_
from llmrepro import results as results_
from llmrepro import run as runs
from llmrepro.cells import assigned_in_parameter_cells, table
from llmrepro.locks import Part
from llmrepro.notation import plural
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
        todo = jobs.missing(run)
        boots = jobs.starts(recipe, todo)
        pins = ", ".join(f"{n} {v}" for n, v in recipe.engine.install.pins.items())
        source = recipe.source
        sizes = [f.bytes for f in recipe.model.files]
        size = None if None in sizes else sum(sizes)
        table(
            recipe.title,
            [
                ("question", recipe.question),
                ("published by", source.publication if source else "no publication is named"),
                ("engine", f"{recipe.engine.name} ({recipe.engine.install.kind}: {pins})"),
                (
                    "model",
                    f"{recipe.model.repo} {recipe.model.revision or 'main, as it is now'}, {recipe.model.format}, "
                    + (f"{size / 1e6:.0f} MB" if size else "of a size that is not pinned"),
                ),
                (
                    "plan",
                    f"{boots} boot{'s' * (boots > 1)}, {jobs.requests(recipe, todo)} requests to go; about "
                    f"{jobs.estimate_s(recipe, todo):.0f} s on two slow cores, after installing",
                ),
                *(
                    [("server", f"{params.server_url}, already running: nothing is installed, started or ended")]
                    if params.server_url
                    else []
                ),
                ("cost", f"about {recipe.needs.minutes:g} minutes in all, {recipe.needs.disk_gib:g} GiB of disk"),
                ("mode, profile", f"{params.mode}, {params.profile}"),
                ("run folder", str(run.path)),
            ],
        )


def machine(run: Run) -> None:
    """What this machine is, and what the recipe needs that it lacks."""
    environment.look_again()
    with run.stage("machine"):
        known = run.path / "machine.json"
        earlier = run_folder.read_json_if_there(known)
        facts = machine_.describe(machine_.cache_dir())
        url = run.parameters.server_url
        if url is not None and not running_server.is_here(url):
            run.write_json("machine.json", running_server.elsewhere(url, facts))
            table("This machine, which asks", [*machine_.told(facts), ("the server's machine", "not known here")])
            return
        other = machine_.differing(earlier, facts) if earlier else []
        if other and (run.path / "records.jsonl").exists():
            raise RunError(
                f"resume: the {' and '.join(other)} of this machine {'are' if len(other) > 1 else 'is'} not what "
                f"{run.path} was begun with, so its records cannot be mixed with new ones; start a new run"
            )
        run.write_json("machine.json", facts)
        with locks.held(looks_at(run), run.path) as waited:
            if waited:  # until now others may have had the memory
                facts = machine_.describe(machine_.cache_dir())
                run.write_json("machine.json", facts)
            lacking = lacks(run)
            if not lacking and not run.recipe.needs.gpu_count:  # the roofline of what the CPU will do here
                facts["memory"] |= machine_.measured_bandwidth(earlier)
                run.write_json("machine.json", facts)
        this = ("this recipe", "; ".join(lacking) or "can run here")
        table("This machine", [*machine_.told(facts), this])


def looks_at(run: Run) -> list[Part]:
    """What looking at the machine occupies before a run on its CPU: that, since its bandwidth is measured and its
    free memory decides. Nothing where the run lacks what no wait brings."""
    facts = run_folder.read_json(run.path / "machine.json")
    lacking = set(lacks(run)) - {requirements.lacks_room(run.recipe, facts)}
    return [] if lacking or run.recipe.needs.gpu_count else occupancy.of(run)


def lacks(run: Run) -> list[str]:
    """Why this run is not live, a sentence each: what the machine lacks, or that live was not asked for."""
    if run.parameters.server_url is not None:  # whatever it needs, it runs
        return []
    facts = run_folder.read_json(run.path / "machine.json")
    found = requirements.missing(run.recipe, facts, requirements.DISK)
    return [*(["published mode was asked for"] if run.parameters.mode == "published" else []), *found]


def prepare(run: Run) -> None:
    """The engine's environment and the weights, built or found, each checked. Nothing when the run is not live."""
    with run.stage("prepare"):
        recipe, params = run.recipe, run.parameters
        missing = lacks(run)
        if missing and params.mode == "live":
            raise RunError(
                f"mode is live, and this machine {'; '.join(missing)}; take mode='auto' to see what is published"
            )
        if params.server_url is None:
            run.write_text("commands.txt", _commands(run))
        if missing:
            text = (run.path / "commands.txt").read_text(encoding="utf-8")
            display({"text/html": f"<pre>{html.escape(text)}</pre>", "text/plain": text}, raw=True)
            return
        for sentence in prompts.fetch(run):
            print(sentence, flush=True)
        if params.server_url is not None:
            found = workloads.identity(params.server_url, recipe)
            answered = [("address", params.server_url), ("model", found.model)]
            version = next(iter(found.versions), "it does not tell its version")
            table("A server that already runs", [*answered, (f"{recipe.engine.name}", version)])
            return
        folder = catalog.path_of(params.recipe).parent
        env = environment.prepare(recipe.engine, folder / "engine.lock", run.path / "install.log")
        run.write_text("engine-freeze.txt", env.freeze)
        known = run.path / "weights.json"
        earlier = run_folder.read_json(known) if known.exists() else None
        ready = preparation.ready(recipe.model, env, run.path / "install.log", params.weights_path, earlier)
        run.write_json("weights.json", {**ready.told, **checkpoint.told(ready.path)})
        told = {"path": machine_.shortened(env.path), "key": env.key, "seconds": env.seconds}
        run.write_json("environment.json", {**told, "fixes": env.fixes, "exports": env.exports})
        table(
            "Ready",
            [
                ("environment", f"{env.key}, " + (f"built in {env.seconds:g} s" if env.seconds else "reused")),
                *((f"fix {fix['name']}", fix["why"]) for fix in env.fixes),
                ("installed", ", ".join(env.freeze.split("\n")).strip(", ")),
                *preparation.described(ready.told, recipe.model),
            ],
        )


def _commands(run: Run) -> str:
    """What a live run executes, as it is shown on pages for others; or why that cannot be told."""
    folder = catalog.path_of(run.parameters.recipe).parent
    return "\n".join(commands.lines(commands.of(run.recipe, run.parameters, folder), private=True)) + "\n"


def measure(run: Run, only: int | None = None) -> None:
    """Every boot and every request that is still missing; with `only`, of each server's boot of that number."""
    with run.stage("measure"):
        if lacks(run):
            return
        with locks.held(occupancy.of(run), run.path):
            _measure(run, only)


def _measure(run: Run, only: int | None) -> None:
    if run.parameters.server_url is not None:
        workloads.measure(run, None, None, only)
        return
    made, files = (run_folder.read_json(run.path / n) for n in ("environment.json", "weights.json"))
    where = [machine_.expanded(told["path"]) for told in (made, files)]
    draft = machine_.expanded(files["draft"]["path"]) if "draft" in files else None
    workloads.measure(run, *where, only, made.get("exports"), draft)


def results(run: Run) -> None:
    """Metrics, conditions and verdicts from the records, written to result.json."""
    with run.stage("results"):
        result = results_.compute(run.path)
        run.write_json("result.json", result)
        table("Verdicts", verdicts(result, nothing=bool(lacks(run))))


def verdicts(result: dict, nothing: bool = False) -> list[tuple[str, str]]:
    """(claim, word and reason) of every claim of a result, and before them what to know first.

    With `nothing` measured how many claims there are: none of them was held against anything.
    """
    judged = [*result.get("verdicts", []), *result["comparisons"]]
    if nothing:
        return [(plural(len(judged), "claim"), "as published: the report shows them. Nothing was measured here.")]
    return [
        *(("mind", flag) for flag in result["flags"]),
        *(("holds", held) for held in result.get("held", [])),
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
        credentials.blank(run.path)
        finish(run)
        run.write_json("result.json", results_.compute(run.path))  # a verdict tells how the run ended
        path = report_.write(run.path)
    run.close()
    table("Report", [("open", str(path))])


def finish(run: Run) -> None:
    """The status of a run whose stages are over: completed, lacking, or stopped with what was not asked. Pages of
    an earlier sitting, which tell of another end, are taken away."""
    for page in (privacy.OWN, privacy.SHARED):
        (run.path / page).unlink(missing_ok=True)
    missing = lacks(run)
    left = [] if missing else jobs.missing(run)
    if missing:
        run.set_status("lacking", "report", reason="; ".join(missing))
    elif left:
        stop, on = (
            guard_log.latest(run.path).stop,
            f"run the cell measure again, or `llmrepro run --resume {run.path}`",
        )
        run.set_status(
            "stopped",
            "measure",
            stopped_by="guard" if stop else "person",
            reason=stop.reason if stop else f"{len(left)} requests were not asked",
            next_step=f"{stop.next_step}; then {on}" if stop else on,
        )
    else:
        run.set_status("completed", "report")
