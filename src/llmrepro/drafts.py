"""What became of drafted tokens, by the engine's own counters before and after each workload of a boot."""

from collections.abc import Mapping
from typing import NamedTuple

POSITION = "spec_accepted_by_position."


class Drafts(NamedTuple):
    """Drafts of a workload in one boot, warm-ups included. `by_position` counts how often the first, second, …
    token of a draft was accepted, () where the engine does not tell."""

    server: str
    workload: str
    boot: int
    drafts: float
    drafted: float | None
    accepted: float
    by_position: tuple[float, ...]

    @property
    def shares(self) -> list[float]:
        """Of the drafts the share in which the token at each position was accepted."""
        return [count / self.drafts for count in self.by_position]


def of_boots(boots: Mapping[int, dict]) -> list[Drafts]:
    """Of every boot and workload in which tokens were accepted, in their order."""
    found = []
    for n, boot in boots.items():
        for workload, read in (boot.get("counters") or {}).items():
            before, after = read.get("before") or {}, read.get("after") or {}
            grown = {name: value - before.get(name, 0) for name, value in after.items()}
            drafts, accepted = grown.get("spec_drafts"), grown.get("spec_accepted_tokens")
            if drafts and accepted and drafts > 0 and accepted > 0:
                positions = sorted(int(k.removeprefix(POSITION)) for k in grown if k.startswith(POSITION))
                by_position = tuple(grown[f"{POSITION}{i}"] for i in positions)
                drafted = grown.get("spec_draft_tokens")
                found.append(Drafts(boot["server"], workload, n, drafts, drafted, accepted, by_position))
    return found


def together(told: list[Drafts]) -> Drafts:
    """Those of several boots of one server and workload as one, each draft counted once; `boot` is the first."""
    whole = all(len(d.by_position) == len(told[0].by_position) for d in told)
    return told[0]._replace(
        drafts=sum(d.drafts for d in told),
        drafted=None if any(d.drafted is None for d in told) else sum(d.drafted for d in told),
        accepted=sum(d.accepted for d in told),
        by_position=tuple(map(sum, zip(*(d.by_position for d in told), strict=True))) if whole else (),
    )


def grouped(told: list[Drafts]) -> dict[tuple[str, str], list[Drafts]]:
    """By workload and server, in their order."""
    found: dict[tuple[str, str], list[Drafts]] = {}
    for d in told:
        found.setdefault((d.workload, d.server), []).append(d)
    return found
