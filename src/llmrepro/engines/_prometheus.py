"""An engine's /metrics page: Prometheus' text format, read by prometheus-client's own parser."""

from collections.abc import Iterator
from math import isfinite

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def totals(text: str, names: dict[str, str]) -> dict[str, float]:
    """Ours by the engine's name: each counter summed over its label sets, such as several engines' of one
    server. A counter that the page does not offer is left out."""
    found: dict[str, float] = {}
    for sample in samples(text):
        ours = names.get(sample.name)
        if ours is not None:
            found[ours] = found.get(ours, 0.0) + sample.value
    return found


def by_label(text: str, name: str, label: str) -> dict[str, float]:
    """Values of one counter by one of its labels, summed over all others."""
    found: dict[str, float] = {}
    for sample in samples(text):
        if sample.name == name and label in sample.labels:
            found[sample.labels[label]] = found.get(sample.labels[label], 0.0) + sample.value
    return found


def labels(text: str, name: str) -> dict[str, str]:
    """The labels of the first sample of that name: how a server tells words in a format of numbers."""
    return next((dict(sample.labels) for sample in samples(text) if sample.name == name), {})


def samples(text: str) -> Iterator[Sample]:
    """Every sample up to the first line that is none; a page cut short still tells what came before. What is no
    count, not a number or below zero, is not told."""
    try:
        for family in text_string_to_metric_families(text):
            yield from (s for s in family.samples if isfinite(s.value) and s.value >= 0)
    except ValueError:
        return
