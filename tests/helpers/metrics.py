"""Reads a page of Prometheus metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Series = dict[tuple[str, ...], float]


def series(text: str) -> Series:
    """Every sample of a page by its name and its label values, in the order of their names."""
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[(sample.name, *(value for _, value in sorted(sample.labels.items())))] = sample.value
    return found
