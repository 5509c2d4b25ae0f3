"""The journal of one compile: opened before any LM call, refused where the directory holds something else."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dspy_flashevolve.engine.journal import Journal
from dspy_flashevolve.engine.redaction import Redaction
from dspy_flashevolve.gepa.run_journal import RunJournal
from dspy_flashevolve.programs.fingerprints import check_same, fingerprints_of, secrets_of, settings_of, versions
from dspy_flashevolve.programs.records import RolloutRecords


def begin_journal(
    optimizer: Any, adapter: Any, seed_candidate: Mapping[str, str], data: tuple[Any, Any], lms: Sequence[Any]
) -> RunJournal | None:
    """The journal of the optimizer's run directory, begun or gone on with; None without a ``log_dir``.

    Args:
        adapter: dspy's, of the student.
        seed_candidate: component -> text.
        data: gepa's loaders of the training and the validation set.
        lms: those that the run calls; their keys are secrets.

    Raises:
        RunDirectoryError: the directory cannot be written, is in use, or holds another run.
    """
    if optimizer.log_dir is None:
        return None
    student = adapter.student
    journal = Journal(optimizer.log_dir, Redaction(secrets_of(optimizer, lms)))
    try:
        now = fingerprints_of(student, seed_candidate, *data, optimizer.metric_fn)
        check_same(journal, now, versions())
        journal.append(
            "sessions",
            id=journal.session,
            began_at=time.time(),
            pid=os.getpid(),
            settings={**settings_of(optimizer), "versions": versions()},
            fingerprints=now,
        )
        return RunJournal(journal, RolloutRecords(student, code=bool(adapter._flex_paths)))
    except BaseException:
        journal.close()
        raise
