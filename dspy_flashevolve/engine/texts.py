"""Texts as requests, files, terminals and logs can hold them."""

from __future__ import annotations

import logging
import re

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def without_surrogates(text: str) -> str:
    r"""Return a text with "?" for each half of a surrogate pair. JSON can spell one (\ud800); UTF-8 has none, so that
    a prompt with such a text could not be sent.

    >>> without_surrogates("cut \ud83d")
    'cut ?'
    """
    return text.encode("utf-8", "replace").decode()


def printable(text: str) -> str:
    r"""Replace the characters of a text that a terminal obeys: a model or an exception may have written any.

    >>> printable("\x1b[31mred\n")
    '\ufffd[31mred\n'
    """
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def logger_named(name: str) -> logging.Logger:
    """Return the logger of a module. What it logs is :func:`printable`."""
    logger = logging.getLogger(name)
    logger.addFilter(_make_printable)
    return logger


def _make_printable(record: logging.LogRecord) -> bool:
    try:
        message = record.getMessage()
    except Exception:  # whatever the text of an exception raises: logging tells of it
        return True
    if (shown := printable(message)) != message:
        record.msg, record.args = shown, None
    return True
