"""What a run folder tells, in memory: the recipe, how it ended, its boots, records and results."""

from dataclasses import dataclass, field

from llmrepro import jobs
from llmrepro.client import Record
from llmrepro.guard_log import Guarded
from llmrepro.parameters import Parameters
from llmrepro.recipe import Recipe
from llmrepro.sample_rows import Beside, beside
from llmrepro.samples import Samples


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
    weights: dict = field(default_factory=dict)  # weights.json
    texts: dict[str, str] = field(default_factory=dict)  # what is asked by "workload/prompt", without its own line
    commands: str = ""  # what a live run executes, as it was written down when this one was prepared
    samples: dict[int, Samples] = field(default_factory=dict)  # what was sampled beside each boot
    guarded: dict[int, Guarded] = field(default_factory=dict)

    @property
    def published_only(self) -> bool:
        """Whether the page shows a publication and no measurement: nothing was asked, nor could be."""
        return self.status["outcome"] == "lacking" and not self.records

    @property
    def asked(self) -> list[Record]:
        """The requests that count: not the warm-ups."""
        return [r for r in self.records if not r.warmup]

    @property
    def beside(self) -> Beside:
        """The boots with their records and what was sampled meanwhile."""
        return beside(self.recipe, self.boots, self.records, self.samples, self.guarded)

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
        planned = {(j.server, j.workload) for j in jobs.plan(self.recipe, self.parameters)}
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
