"""A study's result.json: its arms side by side, what they differ in, its claims, when the slower start pays."""

from itertools import combinations
from pathlib import Path
from statistics import fmean

from llmrepro import (
    break_even,
    comparison,
    conditions,
    contrast,
    credentials,
    differences,
    pairing,
    ratios,
    results,
    terms,
)
from llmrepro.claim import Side
from llmrepro.differences import Setup
from llmrepro.notation import plural
from llmrepro.pairing import Measured, NoPairs
from llmrepro.run_folder import read_json_if_there, sha256_of, status
from llmrepro.study import Arm, Study, of_arm
from llmrepro.workload import Workload

START = "startup.first_completion_s"


def compute(path: Path) -> dict:
    """The content of a study's result.json, from its folder alone. The same files always give the same result.

    `arms` {arm, recipe, engine, servers, contenders {server: label}, outcome, reason, requests}; `line`, text;
    `differences` {name, values by arm}; `untold` names; `metrics` rows {metric, unit, workload, case, statistic,
    values: [{arm, server, value, low, high, n, boots, note}], ratio, see _ratio}; `comparisons`, see
    contrast.Compared; `break_even`, see _break_evens; `flags`, sentences; `inputs`, the sha256 of what was read.
    """
    study = comparison.load_study(path)
    folders = comparison.arm_folders(path)
    own = {arm.id: _Arm(arm, folders[arm.id]) for arm in study.arms}
    setups = {name: arm.setup for name, arm in own.items()}
    return {
        "study": study.id,
        "arms": [arm.told() for arm in own.values()],
        "line": differences.line(setups, study.differs_in),
        "differences": [d._asdict() for d in differences.between(setups)],
        "untold": differences.untold(setups),
        "metrics": _side_by_side(own),
        "comparisons": [_judged(c, own).model_dump() for c in study.comparisons],
        "break_even": _break_evens(own),
        "flags": [f"{name}: {flag}" for name, arm in own.items() for flag in arm.result["flags"]]
        + _turns(study, own)
        + credentials.flags(path),
        "held": [f"{name}: {held}" for name, arm in own.items() for held in arm.result["held"]],
        "inputs": {n: sha256_of(path / n) for n in ("study.json", credentials.FILE) if (path / n).exists()}
        | {f"arms/{n}/{f}": digest for n, arm in own.items() for f, digest in arm.result["inputs"].items()},
    }


class _Arm:
    """One arm, read once: its run's result, and of its boots and records those of the servers it is about."""

    def __init__(self, arm: Arm, path: Path):
        self.id, self.path = arm.id, path
        self.result, self.here = results.compute(path), results.here(path)
        self.status = status(path, page=False)
        whole = results.measured(path)
        recipe = of_arm(whole.recipe, arm)
        self.servers = [s.id for s in recipe.servers]
        boots = {n: b for n, b in whole.boots.items() if b["server"] in self.servers}
        records = [r for r in whole.records if r.server in self.servers]
        self.measured = Measured(recipe, boots, records, arm.id, self._absent(bool(records)) or whole.absent)
        facts = read_json_if_there(path / "machine.json")
        self.setup = Setup(recipe, list(boots.values()), facts)
        self.asked_at = {n: min(r.started_at for r in records if r.boot == n) for n in {r.boot for r in records}}

    def _absent(self, some: bool) -> str | None:
        """Why there is nothing of this arm, or None."""
        if some:
            return None
        return f"{self.status['outcome']}: {self.status.get('reason') or 'nothing was measured'}"

    def told(self) -> dict:
        recipe = self.measured.recipe
        return {
            "arm": self.id,
            "recipe": recipe.id,
            "engine": f"{recipe.engine.name} {recipe.engine.version}",
            "servers": self.servers,
            "contenders": {server: label for label, server in self.contenders()},
            "outcome": self.status["outcome"],
            "reason": self.status.get("reason"),
            "requests": self.result["requests"],
        }

    def contenders(self) -> list[tuple[str, str]]:
        """(label, server) of every server that was started, the label short where there is one."""
        started = {b["server"] for b in self.measured.boots.values()}
        there = [s for s in self.servers if s in started]
        return [(f"{self.id} · {s}" if len(self.servers) > 1 else self.id, s) for s in there]

    def conditions(self, side: Side) -> list[conditions.Condition]:
        found = [conditions.Condition(**c) for c in self.result["conditions"]]
        return [c._replace(name=f"{self.id}: {c.name}") for c in conditions.concerning(found, side)]


def _judged(claim, arms: dict[str, _Arm]) -> contrast.Compared:
    a, b = arms[claim.a.arm], arms[claim.b.arm]
    bound = a.conditions(claim.a) + (
        b.conditions(claim.b) if b is not a or claim.b.server != claim.a.server else []
    )
    here = [arm.here for arm in ([a] if a is b else [a, b])]
    shared = {n: here[0].get(n) if len({str(h.get(n)) for h in here}) == 1 else _both(n, here) for n in here[0]}
    return contrast.compare(
        claim, a.measured, b.measured, list(dict.fromkeys(bound)) + conditions.stated(claim.conditions, shared)
    )


def _both(name: str, here: list[dict]) -> str | None:
    """A fact that the two arms do not share, told of both; unknown where one of them does not know it."""
    values = [h.get(name) for h in here]
    return None if None in values else " and ".join(map(str, values))


def _side_by_side(arms: dict[str, _Arm]) -> list[dict]:
    """The metrics of all arms, a row each; what only one arm has stands there with the others absent."""
    rows: dict[tuple, dict] = {}
    for arm in arms.values():
        for row in arm.result["metrics"]:
            if row["metric"] == "outcome" or (row["server"] is not None and row["server"] not in arm.servers):
                continue
            key = tuple(row[k] for k in ("metric", "workload", "case", "statistic"))
            shown = rows.setdefault(
                key,
                dict(zip(("metric", "workload", "case", "statistic"), key, strict=True))
                | {"unit": row["unit"], "values": []},
            )
            kept = ("server", "value", "low", "high", "n", "boots", "note")
            shown["values"].append({"arm": arm.id, **{k: row[k] for k in kept}})
    for row in rows.values():
        row["ratio"] = _ratio(row, arms)
    order = list(terms.METRICS)
    return sorted(
        rows.values(), key=lambda r: (r["workload"] is not None, r["case"] is not None, order.index(r["metric"]))
    )


def _ratio(row: dict, arms: dict[str, _Arm]) -> dict | None:
    """{mean, low, high, n}: the first arm's time or speed by the second's over the pairs of boots, where two arms
    have it of the same requests; else None."""
    told = row["values"]
    if len(told) != 2 or len({v["arm"] for v in told}) != 2 or terms.METRICS[row["metric"]].better is None:
        return None
    if row["statistic"] == "pooled":  # made of counts over all requests, which no pair of boots has
        return None
    statistic = row["statistic"] if row["statistic"] in pairing.STATISTICS else "value"
    asked, sides = set(), []
    for v in told:
        run = arms[v["arm"]].measured
        asked |= {question(w) for w in run.recipe.workloads if w.id == row["workload"]}
        try:
            sides.append(pairing.values(run, row["metric"], v["server"], row["workload"], row["case"], statistic))
        except NoPairs:
            return None
    shared = sorted(set(sides[0]) & set(sides[1]))
    if len(asked) > 1 or not shared:
        return None
    try:
        found = ratios.of([tuple(fmean(side[n].values()) for side in sides) for n in shared])
    except ValueError:  # a value of nought
        return None
    return found._asdict()


def _break_evens(arms: dict[str, _Arm]) -> list[dict]:
    """For every two servers that answered the same requests: which of them costs less of a day, and when.

    {a, b, request, boots, starts_s, requests_s} and what break_even.BreakEven has, by labels instead of a and b.
    """
    there = [(arm, label, server) for arm in arms.values() for label, server in arm.contenders()]
    return [found for a, b in combinations(there, 2) if (found := _break_even(a, b)) is not None]


def _break_even(a: tuple[_Arm, str, str], b: tuple[_Arm, str, str]) -> dict | None:
    shared = _same_requests(a, b)
    if shared is None:
        return None
    try:
        values = [
            (
                pairing.values(arm.measured, START, server),
                pairing.values(arm.measured, "t_last_s", server, workload.id),
            )
            for (arm, _, server), workload in zip((a, b), shared, strict=True)
        ]
    except NoPairs:
        return None
    boots = sorted(set.intersection(*(set(v) for pair in values for v in pair)))
    if not boots:
        return None
    (start_a, request_a), (start_b, request_b) = (
        [[fmean(v[n].values()) for n in boots] for v in pair] for pair in values
    )
    try:
        found = break_even.break_even(start_a, start_b, request_a, request_b)
    except ValueError:  # a time of nought, which only a changed folder holds
        return None
    return {
        "a": a[1],
        "b": b[1],
        "request": f"one of {plural(len(shared[0].cases), 'prompt')} with {shared[0].max_tokens} output tokens",
        "found": found.found,
        "slow": a[1] if found.slow == "a" else b[1],
        "start_s": found.start_s._asdict(),
        "saved_s": found.saved_s._asdict(),
        "start_times": found.start_times._asdict(),
        "request_times": found.request_times._asdict(),
        "requests": found.requests and found.requests._asdict(),
        "boots": len(boots),
        "starts_s": {a[1]: start_a, b[1]: start_b},
        "requests_s": {a[1]: request_a, b[1]: request_b},
    }


def _same_requests(a: tuple[_Arm, str, str], b: tuple[_Arm, str, str]) -> tuple[Workload, Workload] | None:
    """The first chat workloads of two servers that ask the same."""
    chats = [
        [w for w in arm.measured.recipe.workloads if w.kind == "chat" and server in w.on]
        for arm, _, server in (a, b)
    ]
    return next(((x, y) for x in chats[0] for y in chats[1] if question(x) == question(y)), None)


def question(workload: Workload) -> str:
    """What a workload asks, as text: two that ask the same can be held against each other, whatever their ids."""
    return workload.model_dump_json(exclude={"id", "title", "on", "profiles", "repeats", "warmup", "protocol"})


def _turns(study: Study, arms: dict[str, _Arm]) -> list[str]:
    """Whether the arms' boots really took turns: otherwise a drift of the machine falls on one of them."""
    order = sorted((at, arm.id) for arm in arms.values() for at in arm.asked_at.values())
    runs = [order[i][1] for i in range(len(order)) if i == 0 or order[i][1] != order[i - 1][1]]
    several = len({arm for _, arm in order}) > 1
    if not several or len(runs) > len(study.arms) or len(order) == len(runs):
        return []
    return [
        "the arms were measured one after the other, not in turns: a drift of the machine falls on one of them"
    ]
