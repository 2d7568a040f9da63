"""Whole suites under several statistics, side by side: measured here or imported."""

from collections.abc import Iterable

from llmrepro import pairing, terms
from llmrepro.markup import Html, join, table, tag
from llmrepro.notation import beside

TITLE = "The same requests under other statistics"
TEXT = "One set of requests has as many headline numbers as there are ways to average."


def other_statistics(caption: str, rows: Iterable[dict], titles: dict[str, str]) -> Html | None:
    """The decode speeds of whole suites, a row for each with all its statistics; None where there is none.

    `rows` are those of a result, `titles` the workloads' by id.
    """
    order = pairing.of_suite("decode_tps")
    suites: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["case"] is None and row["metric"].startswith("decode_tps") and row["statistic"] in order:
            suites.setdefault((row["workload"], row["server"], row["metric"]), {})[row["statistic"]] = row
    whole = {key: found for key, found in suites.items() if len(found) == len(order)}
    if not whole:
        return None
    several = len({server for _, server, _ in whole}) > 1
    body = []
    for (workload, server, metric), found in whole.items():
        values = [found[s]["value"] for s in order]
        name = join([titles.get(workload, workload), f" · {server}" if several else ""])
        apart = f"{max(values) / min(values) - 1:.0%}"
        body.append((join([name, tag("small", tag("code", metric))]), *beside(values), apart))
    head = ["Suite", *(f"{terms.STATISTICS[s]}, tok/s" for s in order), "Greatest over least"]
    return table(caption, head, body)
