"""Texts as requests and files can hold them."""

from __future__ import annotations


def without_surrogates(text: str) -> str:
    r"""Return a text with "?" for each half of a surrogate pair. JSON can spell one (\ud800); UTF-8 has none, so that
    a prompt with such a text could not be sent.

    >>> without_surrogates("cut \ud83d")
    'cut ?'
    """
    return text.encode("utf-8", "replace").decode()
