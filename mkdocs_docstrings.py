"""Docstrings as the documentation shows them; mkdocs.yml names this file."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Readable(griffe.Extension):
    """Rewrites docstrings before they are parsed: "Example:" begins examples, :class:`X` is code, docs/x.md a link."""

    def on_object(self, *, obj: griffe.Object, loader: Any, **kwargs: Any) -> None:
        """Rewrite the docstring of an object; see ``griffe.Extension``."""
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r":\w+:`[~.]*([^`]+)`", r"`\1`", text)
            obj.docstring.value = re.sub(r"docs/((?:guide/)?[\w-]+)\.md", r"[\1](\1.md)", text)
