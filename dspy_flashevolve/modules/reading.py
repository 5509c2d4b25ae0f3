"""Reading replies of language models: what a reply itself closes counts, and nothing is repaired.

dspy's JSON adapter closes what was cut, so that half a sentence becomes a text; it cuts a reply to its first braces,
which may be those of a thought; and its time grows with the square of a reply's length (``json_repair``). Here it is
linear, and a field may be written as JSON, as a section of dspy's chat form, or in XML tags, whatever was asked for.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Coroutine, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin
from xml.sax.saxutils import unescape

import dspy
from dspy.adapters.base import Adapter
from dspy.adapters.utils import apply_output_field_defaults
from dspy.utils.exceptions import AdapterParseError
from pydantic import BaseModel, ValidationError

from dspy_flashevolve.engine.texts import logger_named

logger = logger_named(__name__)

T = TypeVar("T")

ATTEMPTS = 2
"""A reply that cannot be read is asked for once more, as gepa asks for a reflection that raised."""
MOST_CHARACTERS = 200_000
"""Characters of a reply, without its thoughts, that are read: some 50,000 tokens, more than LMs are asked for in one
reply. A longer one repeats itself, and would be read on the event loop, where everything else waits for it."""
MOST_MISSES = 20
"""Brackets at which no JSON begins, after which no further one of a reply is tried: each try may read all of it. A
reply that was cut off has up to three of them, its object, its list and its last item. Not tuned."""
DEEPEST = 4
"""Lists and objects inside each other in which items are looked for; ``{"edits": [{...}]}`` has three."""


async def asked(predictor: Any, inputs: Mapping[str, Any], is_sync: bool, adapter: Adapter | None = None) -> Any:
    """Ask a predictor, whose texts and lists of models are read by :func:`text_in` and :func:`items_in`.

    Args:
        is_sync: call it, and await nothing; see :func:`result_of`.
        adapter: writes the prompt, and reads fields of other kinds. Default: the configured one.
    """
    with dspy.context(adapter=_reading(adapter or dspy.settings.adapter or dspy.ChatAdapter())):
        return predictor(**inputs) if is_sync else await predictor.acall(**inputs)


def past_cache(attempt: int) -> dict[str, Any]:
    """Return what makes a second attempt pass dspy's cache, which would answer with the same reply."""
    return {"config": {"rollout_id": attempt}} if attempt else {}


def result_of(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that awaits nothing, in any thread, so that a module and its awaitable twin are one function."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError(f"{coroutine!r} waits for something.")


def _reading(adapter: Adapter) -> Adapter:
    reader = copy.copy(adapter)
    reader.__class__ = _reading_kind(type(adapter))  # settings and callbacks stay, and so does how it asks
    return reader


@cache
def _reading_kind(kind: Any) -> type[Adapter]:
    class Reading(kind):
        def parse(self, signature: Any, completion: str) -> dict[str, Any]:
            answer, problem = without_thoughts(completion), ""
            if len(answer) > MOST_CHARACTERS:
                problem = f"The reply has {len(answer):,} characters, of which at most {MOST_CHARACTERS:,} are read."
                logger.warning("%s It begins with %.100r", problem, answer)
            fields = {} if problem else _fields_in(answer, signature)
            complete = apply_output_field_defaults(signature, fields) if fields else {}
            if complete.keys() == signature.output_fields.keys():
                return complete
            if fields is None or not (problem or kind.__module__.startswith("dspy.")):
                return super().parse(signature, answer)  # other fields, or a form that only this adapter knows
            response = answer[:MOST_CHARACTERS]
            raise AdapterParseError(kind.__name__, signature, response, problem, cast("Any", fields))

        def _make_json_adapter_fallback(self) -> Adapter:
            return _reading(super()._make_json_adapter_fallback())

    del Reading.format  # dspy wraps it for each class anew, and would tell callbacks of every call twice
    Reading.__name__ = kind.__name__
    return Reading


def _fields_in(answer: str, signature: Any) -> dict[str, Any] | None:
    """The output fields that are closed in an answer; None where one is neither a text nor a list of models."""
    kinds = {name: field.annotation for name, field in signature.output_fields.items()}
    fields: dict[str, Any] = {}
    for name, kind in kinds.items():
        model = get_args(kind)[0] if get_origin(kind) is list else None
        if kind is str:
            fields[name] = text_in(answer, name)
        elif hasattr(model, "model_fields"):
            is_empty = "[]" in _sections(answer).get(name, "") or any(one.get(name) == [] for one in _objects(answer))
            fields[name] = items_in(answer, model) or ([] if is_empty else None)
        else:
            return None
    return {name: value for name, value in fields.items() if value is not None}


_THOUGHTS = re.compile(r"(?:\s*<think>.*?</think>)+", re.DOTALL)
_END_OF_THOUGHTS = re.compile(r"</think>(?=[ \t]*(?:[\n{\[]|\Z))")


def without_thoughts(reply: str) -> str:
    """Return what a reply says after its thoughts; nothing where these do not end.

    Some chat templates write the tag that opens the thoughts into the prompt, so that the reply has only the one that
    closes them. Tags that an answer itself names stay.

    >>> [without_thoughts(reply) for reply in ("<think>{}</think> Yes.", "Hm.\\n</think>\\nYes.", "<think>Hm. Yes")]
    ['Yes.', 'Yes.', '']
    """
    thoughts = _THOUGHTS.match(reply)
    answer = (reply[thoughts.end() :] if thoughts is not None else reply).strip()
    end = _END_OF_THOUGHTS.search(answer)
    if end is not None and "<think>" not in answer[: end.start()]:
        answer = answer[end.end() :].strip()
    return "" if answer.startswith("<think>") else answer


_HEADER = re.compile(r"^[ \t]*\[\[\s*##\s*(\w+)\s*##\s*\]\]", re.MULTILINE)
_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)
_FENCED = re.compile(r"\A```([\w-]*)\n(.*?)\n?```\Z", re.DOTALL)


def text_in(answer: str, name: str) -> str | None:
    """Return the last text of a field, without a fence around it; None where the answer does not close it.

    The last section of dspy's chat form has no end. It was cut off where it leaves a fence open.

    >>> text_in('{"rule": "Be brief."}', "rule"), text_in('{"rule": "Be br', "rule")
    ('Be brief.', None)
    >>> text_in('[[ ## rule ## ]]\\nBe brief.\\n', "rule"), text_in("<rule>Be br", "rule")
    ('Be brief.', None)
    """
    text = _sections(answer).get(name)
    if text is not None and len(_FENCE.findall(text)) % 2:
        return None
    for read in (_json_text, _tagged):
        text = read(answer, name) if text is None else text
    fenced = None if text is None else _FENCED.match(text.strip())
    if fenced is None or (_FENCE.search(fenced[2]) and fenced[1] not in ("markdown", "md", "text")):
        return None if text is None else text.strip()  # it begins with one block of code, and ends with another
    return fenced[2].strip()


def _sections(answer: str) -> dict[str, str]:
    pieces = _HEADER.split(answer)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def _tagged(answer: str, name: str) -> str | None:
    _, opened, inner = answer.rpartition(f"<{name}>")
    text, closed, _ = inner.partition(f"</{name}>")
    return unescape(text) if opened and closed else None


def _json_text(answer: str, name: str) -> str | None:
    """The last text of a name in JSON; a list or an object is its own text.

    Small models do not escape quotes. The text of the last field shows to be whole by the answer's end, where its
    object is closed.
    """
    for part in reversed(_objects(answer)):
        if isinstance(text := part.get(name), str | list | dict):
            return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    *_, opened = [None, *re.finditer(rf'"{name}"\s*:\s*"', answer)]
    body = answer.rstrip("`]} \t\r\n")
    text = body[opened.end() :].rstrip(", \t\r\n") if opened is not None and "}" in answer[len(body) :] else ""
    if not text.endswith('"') or re.search(r'",\s*"\w+"\s*:', text):
        return None
    escaped = re.sub(r'(?<!\\)"', r"\"", _with_lone_backslashes(text[:-1]))
    try:
        return json.loads(f'"{escaped}"', strict=False)
    except ValueError:
        return None


def items_in(answer: str, model: Any) -> list[Any]:
    """Return the items that are closed in an answer: of the last list of them, or of all that stand alone.

    Where there is none in JSON, they are read in XML, or by the class method ``in_text`` of the model.

    >>> class Rule(BaseModel):
    ...     text: str
    >>> items_in('{"rules": [{"text": "Be brief."}, {"text": "Be ki', Rule)
    [Rule(text='Be brief.')]
    """
    lists: list[list[Any]] = [[]]
    alone: list[Any] | None = None
    for value in json_values(answer):
        if item := _items(model, [value]):
            alone = [] if alone is None else alone
            alone += item
            lists.append(alone)
        elif items := _items(model, _inside(value)):
            lists.append(items)
    if len(lists) > 1:
        return lists[-1]
    pieces = [piece.partition("</item>") for piece in answer.split("<item>")[1:]]
    rows = [{name: _tagged(inner, name) for name in model.model_fields} for inner, closed, _ in pieces if closed]
    items = _items(model, ({name: text for name, text in row.items() if text is not None} for row in rows))
    return items or (model.in_text(answer) if hasattr(model, "in_text") else [])


def _items(model: type[BaseModel], values: Any) -> list[Any]:
    items: list[Any] = []
    for value in values:
        try:
            items.append(model.model_validate(value))
        except ValidationError:
            continue
    return items


def _inside(value: Any, depth: int = DEEPEST) -> Iterator[dict[str, Any]]:
    """The objects in a JSON value, outermost first."""
    if isinstance(value, dict):
        yield cast("dict[str, Any]", value)
    if depth and isinstance(value, dict | list):
        for part in cast("dict[str, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value):
            yield from _inside(part, depth - 1)


def _objects(answer: str) -> list[dict[str, Any]]:
    return [part for value in json_values(answer) for part in _inside(value)]


_JSON = re.compile(r'\{\s*["}]|\[\s*[\[\]{]')


def json_values(text: str) -> list[Any]:
    """Return the outermost JSON objects, and lists of objects and lists, that are closed in a text."""
    text, decoder, values, at, misses = _with_lone_backslashes(text), json.JSONDecoder(strict=False), list[Any](), 0, 0
    while misses < MOST_MISSES and (opened := _JSON.search(text, at)) is not None:
        try:
            value, at = decoder.raw_decode(text, opened.start())
            values.append(value)
        except (ValueError, RecursionError):
            at, misses = opened.start() + 1, misses + 1
    return values


_BACKSLASH = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})?')


def _with_lone_backslashes(text: str) -> str:
    """Escape backslashes that escape nothing, as models write them in regular expressions."""
    return _BACKSLASH.sub(lambda match: match[0] if len(match[0]) > 1 else r"\\", text)
