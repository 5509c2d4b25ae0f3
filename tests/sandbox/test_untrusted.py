"""What candidates and proposers send is read without an error, and without time that they choose."""

from __future__ import annotations

import contextlib
import enum
import json
import math
import sys
from collections.abc import Generator
from typing import Any, Literal, get_args

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspy_flashevolve.harness.archive import MOST_REPLY_CHARACTERS, DraftError, drafts_in, sources_in
from dspy_flashevolve.harness.program import typed_fields
from dspy_flashevolve.sandbox.contract import HEADER, MOST_DEPTH, LmRequest, WireError, decode, encode
from dspy_flashevolve.sandbox.sandbox import Role, parse_request
from tests.sandbox.test_hostile import wire_code
from tests.sandbox.worlds import Lab, lab, module

NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
ROLES = get_args(Role)
PART = st.fixed_dictionaries({"type": JSON | st.sampled_from(["text", "image_url"])}, optional={
    "text": JSON, "image_url": JSON | st.fixed_dictionaries({"url": JSON | st.just("data:image/png;base64,x")})
})  # fmt: skip
MESSAGE = JSON | st.fixed_dictionaries(
    {"role": JSON | st.sampled_from(sorted(ROLES)), "content": JSON | st.lists(JSON | PART, max_size=3)}
)
OPTIONS = JSON | st.dictionaries(st.sampled_from(["temperature", "n", "stop", "seed", "max_tokens"]) | st.text(), JSON)
REQUEST = JSON | st.fixed_dictionaries(
    {"messages": JSON | st.lists(MESSAGE, max_size=3)}, optional={"options": OPTIONS}
)
TOKENS = st.sampled_from([
    "```", "```python\n", "\n", " ", "(" * 200, "x.a" * 300, "class A(", "dspy.Module", "):\n",
    "    def forward(self, question):", " pass", "\0", "\ud800", "\r", "# based on: 9", "é",
])  # fmt: skip
REPLY = st.lists(TOKENS | st.text(max_size=20), max_size=12).map("".join)


@pytest.fixture(scope="module")
def box() -> Generator[Lab]:
    if not sys.platform.startswith("linux"):
        pytest.skip("the sandbox needs Linux")
    with lab() as started:
        yield started
        assert started.is_well()


@given(REQUEST)
def test_an_lm_request_is_read_or_refused(request: Any) -> None:
    try:
        read = parse_request(request)
    except WireError:
        return
    assert isinstance(read, LmRequest)
    assert all(message["role"] in ROLES for message in read.messages)
    assert read.replies >= 1


@given(st.dictionaries(st.text(), JSON) | JSON)
def test_what_the_host_accepts_it_can_send_again(message: Any) -> None:
    payload = json.dumps(message).encode()
    try:
        read = decode(payload)
    except WireError:
        assert not isinstance(message, dict)
        return
    assert decode(encode(read)[HEADER.size :]) == read


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "-Infinity", "1" + "0" * 400 + ".5"])
def test_a_number_that_is_not_finite_is_refused(number: str) -> None:
    with pytest.raises(WireError, match="is no JSON number"):
        decode(f'{{"kind":"done","fields":{{}},"memory":{number}}}'.encode())
    assert math.isfinite(decode(b'{"memory": 1e300}')["memory"])


@pytest.mark.parametrize("depth", [MOST_DEPTH + 1, 500, 900, 100_000])
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_a_frame_that_is_too_deep_is_refused(depth: int, begin: str, end: str) -> None:
    nested = begin * (depth - 1) + "0" + end * (depth - 1)
    with pytest.raises(WireError, match=r"in each other|RecursionError"):
        decode(f'{{"memory":{nested}}}'.encode())


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(["kind", "fields", "memory", "lm", "printed", "reason", "message"]),
                       JSON | REQUEST | st.sampled_from(["done", "failed", "died"])))  # fmt: skip
def test_no_frame_of_a_child_harms_the_host(box: Lab, message: dict[str, Any]) -> None:
    frame = json.dumps(message).encode()
    ended = wire_code(f"os.write(wire, ({len(frame)}).to_bytes(4, 'big') + {frame!r})\nos._exit(0)")
    outcome = box.run(module(ended))
    assert outcome.failure is not None or message["kind"] == "done"


@given(REPLY)
def test_a_reply_is_read_whatever_it_holds(reply: str) -> None:
    drafts, problems = drafts_in(sources_in(reply), 2, ["question"], [], "")
    assert drafts or problems or not reply.strip()


@pytest.mark.parametrize("unit", ["```", "``` ", "```\n", "```python\n", " ", "```x\n", "(", "\r\n", "draft: a, ",
                                  "draft:", "draft ", "draft: a\n", "1", "~~~\n", "`x", "a.py"])  # fmt: skip
def test_the_time_to_read_a_reply_grows_with_its_length_only(unit: str) -> None:
    """Blocks were found with a regular expression once, which took a minute for 20,000 spaces."""
    for reply in ("```" + unit * 200_000 + "x", unit * 200_000 + "!", "draft: a" + unit * 200_000 + "!"):
        with contextlib.suppress(DraftError):  # some name drafts that there are not
            assert sum(map(len, sources_in(reply, {"drafts/a.py": "x"}))) <= MOST_REPLY_CHARACTERS
    assert sources_in("```py\r\nx = 1\r\n```\nand\n```PYTHON \ny\n```\n```sh\nls\n```\n") == ["x = 1\r\n", "y\n"]


class Kind(enum.Enum):
    A = "a"


class Model(pydantic.BaseModel):
    n: int


@pytest.mark.parametrize(("value", "kind", "expected"), [
    ("3", int, 3), (" 3 ", int, 3), ("x", str, "x"), (3, str, "3"), ('["a"]', list[str], ["a"]), ("a", Kind, Kind.A),
    ("yes", Literal["yes", "no"], "yes"), ('{"n": 1}', Model, Model(n=1)), ({"n": 1}, Model, Model(n=1)),
    ("null", int | None, None), ("3", str | None, "3"), ("true", bool, True), ([1, 2], tuple[int, int], (1, 2)),
])  # fmt: skip
def test_a_field_is_read_as_its_type(value: Any, kind: Any, expected: Any) -> None:
    assert typed_fields({"n": value}, {"n": kind}) == ({"n": expected}, None)


@pytest.mark.parametrize("unit", ["x{", "[", '{"a":', "\\", '"', "-", "9", "{'a': ["])
@pytest.mark.parametrize("kind", [list[str], dict[str, Any], int, Model, float, Literal["a"], Kind, int | None])
def test_the_time_to_read_a_field_grows_with_its_length_only(unit: str, kind: Any) -> None:
    """They were repaired once, which never ended for some."""
    typed_fields({"n": unit * 50_000}, {"n": kind})
