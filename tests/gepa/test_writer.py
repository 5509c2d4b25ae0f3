"""What the pool's writer owns is called in its thread; the loop reads what is replaced as a whole."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection
from typing import Any

import pytest

from dspy_flashevolve import Workflow
from dspy_flashevolve.gepa.credit import Credit
from dspy_flashevolve.gepa.published import SpeculativeCandidates
from dspy_flashevolve.gepa.reports import Reports
from tests.contract.surface import compiled


def writers_of(kind: type, monkeypatch: pytest.MonkeyPatch, but: Collection[str] = ()) -> set[str]:
    """Names of the threads in which the public methods of a class are called from now on."""
    names: set[str] = set()
    for name, method in vars(kind).items():
        if inspect.isfunction(method) and not name.startswith("_") and name not in but:

            def watched(self: Any, *args: Any, _method: Any = method, **kwargs: Any) -> Any:
                names.add(threading.current_thread().name.rpartition("_")[0])
                return _method(self, *args, **kwargs)

            monkeypatch.setattr(kind, name, watched)
    return names


@pytest.mark.parametrize(
    ("kind", "elsewhere"),
    [(Credit, {"record_score", "records"}), (Reports, set()), (SpeculativeCandidates, set())],
    ids=["credit", "reports", "speculative candidates"],
)
def test_what_the_writer_owns_is_called_in_its_thread_alone(
    kind: type, elsewhere: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop reads what they replace as a whole: Credit.outlook, SpeculativeCandidates.entries and .fallen."""
    threads = writers_of(kind, monkeypatch, elsewhere)
    workflow = Workflow(validate=0.5)
    details = compiled(130, 2, num_threads=16, workflow=workflow, gepa_kwargs={"callbacks": []}).detailed_results
    assert len(details.candidates) > 2
    assert threads == {"flashevolve-pool"}
