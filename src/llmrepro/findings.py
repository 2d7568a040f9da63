"""All that a run folder tells, read once: what the charts and the report are made from."""

from dataclasses import dataclass
from pathlib import Path

from llmrepro import results, workloads
from llmrepro.client import Record
from llmrepro.parameters import Parameters
from llmrepro.recipe import Recipe
from llmrepro.run import boots, load_recipe
from llmrepro.run_folder import read_json, read_lines, status


@dataclass(frozen=True)
class Findings:
    """A run folder in memory. What the run did not get to is empty: no boots, no records, `machine` {}."""

    recipe: Recipe
    parameters: Parameters
    status: dict
    machine: dict
    boots: dict[int, dict]
    records: list[Record]  # warm-ups included, in the order of records.jsonl
    result: dict  # computed anew: a page shows what the records say, whatever result.json says
    prompts: dict[str, str]  # texts by sha256
    freeze: str

    @property
    def asked(self) -> list[Record]:
        """The requests that count: not the warm-ups."""
        return [r for r in self.records if not r.warmup]

    @property
    def servers(self) -> list[str]:
        """Ids of the servers that were started, in the recipe's order."""
        started = {boot["server"] for boot in self.boots.values()}
        return [s.id for s in self.recipe.servers if s.id in started]

    @property
    def judged(self) -> list[dict]:
        """The verdicts of the claims that this run could decide: those against a published value, then those
        across two measurements."""
        return [v for v in self._verdicts if v["claim"] not in self.out_of_profile]

    @property
    def out_of_profile(self) -> set[str]:
        """Ids of the claims about servers or workloads that this run leaves out, by its profile or its choice."""
        planned = {(j.server, j.workload) for j in workloads.plan(self.recipe, self.parameters)}
        about = [(c.id, [c]) for c in self.recipe.claims]
        about += [(c.id, [c.a, c.b]) for c in self.recipe.comparisons]
        return {
            claim
            for claim, sides in about
            if not all(
                any(x.server in (None, server) and x.workload in (None, workload) for server, workload in planned)
                for x in sides
            )
        }

    @property
    def _verdicts(self) -> list[dict]:
        return [*self.result["verdicts"], *self.result["comparisons"]]

    def rows(self, metric: str, **where) -> list[dict]:
        """Rows of result.json of one metric, with these values of server, workload, case or statistic."""
        return [
            r for r in self.result["metrics"] if r["metric"] == metric and all(r[k] == v for k, v in where.items())
        ]


def read(path: Path) -> Findings:
    """Everything of a run folder. Raises RunError naming the file that is missing or broken."""
    freeze = path / "engine-freeze.txt"
    given = read_json(path / "parameters.json")  # of an older or newer kit: what this one does not know is left
    return Findings(
        recipe=load_recipe(path),
        status=status(path, page=False),
        parameters=Parameters.model_validate({n: v for n, v in given.items() if n in Parameters.model_fields}),
        machine=_if_there(path / "machine.json"),
        boots=boots(path),
        records=[Record.model_validate(r) for r in read_lines(path / "records.jsonl")],
        result=results.compute(path),
        prompts=_if_there(path / "prompts.json"),
        freeze=freeze.read_text(encoding="utf-8") if freeze.exists() else "",
    )


def _if_there(path: Path) -> dict:
    return read_json(path) if path.exists() else {}
