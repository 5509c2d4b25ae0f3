"""Reading what models write: operations and tags."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.ace.operations import MOST_CHARACTERS, MOST_OPERATIONS, parse_operations, parse_tags
from dspy_flashevolve.ace.playbook import Add, Remove
from dspy_flashevolve.observe.statistics import Problem
from tests.ace.test_playbook import JSON

LIST = [
    {"type": "ADD", "section": "other", "content": "Mind units."},
    {"type": "remove", "id": "[OTH-1]"},
    {"operation": "ADD", "section": "other", "text": "y"},
    {"op": "DELETE", "bullet_id": "oth-3"},
]
READ = [Add("other", "Mind units."), Remove("oth-1"), Add("other", "y"), Remove("oth-3")]


@pytest.mark.parametrize(
    "reply",
    [
        LIST,
        {"operations": LIST},
        json.dumps(LIST),
        f"Sure! Here:\n```json\n{json.dumps({'reasoning': 'r', 'operations': LIST}, indent=2)}\n```\nDone [1].",
        "\n".join(json.dumps(operation) for operation in LIST),
        json.dumps(LIST)[:-1],
    ],
)
def test_operations_are_read_in_every_form_that_models_write(reply: object) -> None:
    assert parse_operations(reply) == (READ, [])


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        ({"type": "SHOUT"}, "unknown operation"),
        ({}, "unknown operation"),
        ({"type": "ADD", "section": "other"}, "no content"),
        ({"type": "ADD", "section": "other", "content": 7}, "no content"),
        ({"type": "UPDATE", "id": "oth-1", "content": "x"}, "unknown operation"),
        ({"type": "REMOVE", "id": 7}, "no id"),
        ({"type": "REMOVE", "ids": ["oth-1", "oth-2"]}, "no id"),
    ],
)
def test_what_is_wrong_with_one_operation_is_told_and_the_others_are_read(item: object, kind: str) -> None:
    operations, problems = parse_operations([LIST[0], item, LIST[3]])
    assert operations == [READ[0], READ[3]]
    assert [problem.kind for problem in problems] == [kind]


def test_a_reply_without_end_is_read_up_to_a_bound() -> None:
    operations, problems = parse_operations([LIST[0]] * (MOST_OPERATIONS + 5))
    assert (len(operations), [problem.kind for problem in problems]) == (MOST_OPERATIONS, ["too many operations"])


@pytest.mark.long
@given(st.one_of(JSON, st.text(), JSON.map(str), JSON.map(json.dumps)))
def test_no_reply_makes_the_readers_raise(reply: object) -> None:
    operations, problems = parse_operations(reply)
    assert all(isinstance(operation, Add | Remove) for operation in operations)
    assert all(isinstance(problem, Problem) for problem in problems)
    tags, problems = parse_tags(reply)
    assert all(tag in ("helpful", "harmful", "neutral") for _, tag in tags)
    assert all(isinstance(problem, Problem) for problem in problems)


@pytest.mark.parametrize("depth", range(1, 9))
def test_operations_that_lie_too_deep_are_a_problem_and_not_lost_unsaid(depth: int) -> None:
    operations, problems = parse_operations("[" * depth + '{"type": "REMOVE", "id": "oth-1"}' + "]" * depth)
    assert len(operations) + len(problems) == 1
    assert bool(operations) == (depth < 4)


@pytest.mark.parametrize(
    "reply",
    ["{1: 'drop', 2: 'admit'}", "[{'type': 'ADD'}, {1: 2}]", "{None: ['x']}", "{('a', 'b'): [1]}", "{1: [{2: 3}]}",
     {1: [2]}, {"ADD": [None, 3, ["x"]]}, {b"ADD": [1]}],
)  # fmt: skip
def test_keys_and_values_of_any_kind_are_problems_and_no_more(reply: object) -> None:
    operations, problems = parse_operations(reply)
    assert not operations
    assert problems
    parse_tags(reply)


@pytest.mark.parametrize("reply", ["[" * 50_000, "{" * 50_000, '{"a":' * 50_000, "[[" * 3000 + "]" * 6000])
def test_nesting_without_end_ends(reply: str) -> None:
    parse_operations(reply)
    parse_tags(reply)


@pytest.mark.parametrize(
    "reply",
    [
        {"oth-1": "helpful", "oth-2": "HARMFUL"},
        '{"[oth-1]": "helpful", "oth-2": "harmful"}',
        [{"id": "oth-1", "tag": "helpful"}, {"id": "oth-2", "tag": "harmful"}],
        'Tags: [{"id": "oth-1", "tag": "helpful"}, {"id": "oth-2", "tag": "harmful"}].',
        {"bullet_tags": [{"id": "oth-1", "tag": "helpful"}, {"id": "oth-2", "tag": "harmful"}]},
        '{"oth-1": "helpful", "oth-2": "harmful", "oth-1 ": "harmful"}',
    ],
)
def test_tags_are_read_in_every_form_that_models_write(reply: object) -> None:
    assert parse_tags(reply) == ([("oth-1", "helpful"), ("oth-2", "harmful")], [])


def test_a_very_long_reply_is_cut_and_a_python_literal_is_a_problem() -> None:
    item = '{"type": "REMOVE", "id": "oth-1"}'
    operations, _ = parse_operations(item + " " * MOST_CHARACTERS + item)
    assert operations == [Remove("oth-1")]
    operations, problems = parse_operations("[{'type': 'REMOVE', 'id': 'oth-1'}]")
    assert (operations, [problem.kind for problem in problems]) == ([], ["unreadable reply"])
