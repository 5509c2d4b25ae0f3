"""Workloads by name."""

from __future__ import annotations

import pytest

from benchmarks.workloads.registry import definition_named, workload_named, workload_names
from tests.benchmarks.workloads.samples import NAMES


def test_every_workload_is_listed_and_knows_its_name() -> None:
    assert set(NAMES) <= set(workload_names())
    for name in NAMES:
        assert definition_named(name).name == name


def test_an_unknown_name_gets_the_list() -> None:
    with pytest.raises(
        ValueError, match=r"unknown workload 'trivia': choose one of agnews, aime, debian, finer, formula, hotpotqa"
    ):
        workload_named("trivia")


def test_sizes_that_are_given_replace_the_usual_ones() -> None:
    workload = workload_named("aime", train=3)
    assert (workload.size.train, workload.size.val, workload.size.test) == (3, 15, 30)
