"""The cells of a notebook, one function each. A later stage reads what an earlier one wrote to the run folder.

`start` makes the run; `card`, `machine`, `prepare`, `measure`, `results`, `charts` and `report` each take it.
"""

import ast
import html
from itertools import dropwhile, takewhile
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from llmrepro import catalog, environment, run_folder, weights, workloads
from llmrepro import charts as charts_
from llmrepro import machine as machine_
from llmrepro import report as report_
from llmrepro import results as results_
from llmrepro import run as runs
from llmrepro.parameters import Parameters, checked
from llmrepro.run import Run
from llmrepro.run_folder import RunError


def start(values: dict[str, Any]) -> Run:
    """A run from a notebook's globals: the parameters among them, checked. Raises RunError or RecipeError.

    A name that papermill injected and no parameter has is refused: papermill itself only warns.
    """
    injected = _assigned_in_parameter_cells()
    known = {name: values[name] for name in Parameters.model_fields if name in values}
    params = checked(known | {name: values.get(name) for name in injected})
    return runs.create(params)


def card(run: Run) -> None:
    """What is asked, by whom it was published, what it costs; said before anything is installed."""
    with run.stage("card"):
        recipe, params = run.recipe, run.parameters
        jobs = workloads.missing(run)
        boots = len({(j.server, j.replicate) for j in jobs})
        pins = ", ".join(f"{n} {v}" for n, v in recipe.engine.install.pins.items())
        source = recipe.source
        _table(
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
        _table(
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
        run.write_json("weights.json", {"path": machine_.shortened(path), "facts": weights.facts(path)})
        run.write_json(
            "environment.json", {"path": machine_.shortened(env.path), "key": env.key, "seconds": env.seconds}
        )
        _table(
            "Ready",
            [
                ("environment", f"{env.key}, " + (f"built in {env.seconds:g} s" if env.seconds else "reused")),
                ("installed", ", ".join(env.freeze.split("\n")).strip(", ")),
                (
                    "weights",
                    f"{path.name}, {path.stat().st_size / 1e6:.0f} MB, sha256 "
                    f"{run_folder.read_json(run.path / 'weights.json')['facts']['model.sha256'][:16]}…",
                ),
            ],
        )


def measure(run: Run) -> None:
    """Every boot and every request that is still missing."""
    with run.stage("measure"):
        if lacks(run):
            return
        where = [
            machine_.expanded(run_folder.read_json(run.path / name)["path"])
            for name in ("environment.json", "weights.json")
        ]
        workloads.measure(run, *where)


def results(run: Run) -> None:
    """Metrics, conditions and verdicts from the records, written to result.json."""
    with run.stage("results"):
        result = results_.compute(run.path)
        run.write_json("result.json", result)
        _table(
            "Verdicts", [(v["claim"], f"{v['word'].replace('_', ' ')}: {v['reason']}") for v in result["verdicts"]]
        )


def charts(run: Run) -> None:
    """The figures of the run, as SVG, PNG, CSV and alt text."""
    with run.stage("charts"):
        for figure in charts_.draw(run.path):
            display({"text/html": figure.html(), "text/plain": figure.alt}, raw=True)


def report(run: Run) -> None:
    """report.html, and the run's end: completed, or lacking with what is missing."""
    with run.stage("report"):
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
        path = report_.write(run.path)
    run.close()
    _table("Report", [("open", str(path))])


def _assigned_in_parameter_cells() -> set[str]:
    """Names assigned by the parameters cell last run and by the one papermill put after it: both begin
    `# Parameters`. Older ones do not count: a typo that was mended is forgotten."""
    shell = get_ipython()
    earlier = reversed(shell.user_ns.get("In", [])[:-1] if shell else [])
    cells = takewhile(_is_parameters, dropwhile(lambda source: not _is_parameters(source), earlier))
    found: set[str] = set()
    for node in (n for source in cells for n in ast.parse(source).body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {t.id for t in targets if isinstance(t, ast.Name)}
    return found


def _is_parameters(source: str) -> bool:
    return source.startswith("# Parameters")


def _table(title: str, rows: list[tuple[str, str]]) -> None:
    """Show label and value pairs; everything is escaped, for a recipe's text runs nowhere."""
    body = "".join(
        f"<tr><th scope='row' style='text-align:left;vertical-align:top'>{html.escape(k)}</th>"
        f"<td style='text-align:left'>{html.escape(v)}</td></tr>"
        for k, v in rows
    )
    width = max((len(k) for k, _ in rows), default=0)
    plain = "\n".join([title, *(f"  {k:<{width}}  {v}" for k, v in rows)])
    display(
        {
            "text/html": f"<table><caption style='text-align:left;font-weight:bold'>{html.escape(title)}"
            f"</caption><tbody>{body}</tbody></table>",
            "text/plain": plain,
        },
        raw=True,
    )
