"""How full a vLLM server is, read from its ``/metrics``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import anyio

from dspy_flashevolve.engine.endpoints import Endpoints

READ_SECONDS = 5.0
MOST_FAILURES = 10
"""A server that has answered before is given up after so many failures in a row."""
_SAMPLE = re.compile(r"^vllm:(\w+)(?:\{.*\})? ([^\s]+)", re.MULTILINE)

logger = logging.getLogger(__name__)


def gauges_in(text: str) -> tuple[float, float, float] | None:
    """Requests waiting, requests running and the share of the KV cache in use; None where the text does not say.

    Several engines behind one address are added up; of their caches the fullest counts.

    >>> gauges_in('vllm:num_requests_waiting{engine="0"} 3.0\\nvllm:num_requests_running{engine="0"} 8\\n')
    (3.0, 8.0, 0.0)
    >>> gauges_in("<html>not found</html>") is None
    True
    """
    samples: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text):
        try:
            samples.setdefault(name, []).append(float(value))
        except ValueError:
            return None
    if "num_requests_waiting" not in samples or "num_requests_running" not in samples:
        return None
    cache = samples.get("kv_cache_usage_perc") or samples.get("gpu_cache_usage_perc") or [0.0]
    return sum(samples["num_requests_waiting"]), sum(samples["num_requests_running"]), max(cache)


def metrics_url(api_base: str) -> str | None:
    """Where a server that serves ``api_base`` would tell; None for what is no http address.

    >>> metrics_url("http://localhost:8000/v1"), metrics_url("openai")
    ('http://localhost:8000/metrics', None)
    """
    parts = urlsplit(api_base)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        return None
    path = re.sub(r"/v1$", "", parts.path.rstrip("/"))
    return f"{parts.scheme}://{parts.netloc}{path}/metrics"


async def watch(url: str, report: Callable[[float, float, float], None], every_seconds: float = 1.0) -> None:
    """Ask a server how full it is, as long as it answers like vLLM, or until this is cancelled. Raises nothing.

    Args:
        url: of ``/metrics``.
        report: called with requests waiting, requests running and the share of the KV cache in use.
        every_seconds: between two questions.
    """
    import httpx  # takes a moment to import, and only endpoints with an address need it

    failures, answered = 0, False
    try:
        async with httpx.AsyncClient(timeout=READ_SECONDS) as client:
            while failures < (MOST_FAILURES if answered else 1):
                try:
                    reply = await client.get(url)
                    gauges = gauges_in(reply.text) if reply.status_code == 200 else None
                except (httpx.HTTPError, httpx.InvalidURL, UnicodeError):
                    gauges = None
                failures = failures + 1 if gauges is None else 0
                if gauges is not None:
                    answered = True
                    report(*gauges)
                await anyio.sleep(every_seconds)
    except Exception as error:  # a proxy or a certificate that httpx cannot use is no reason to end a run
        logger.debug("No gauges from %s: %s", url, error)


def watchers(endpoints: Endpoints) -> list[Callable[[], Coroutine[Any, Any, None]]]:
    """What reads the gauges of all endpoints that have an address, to be run beside the run."""
    urls = {name: metrics_url(name.partition(" #")[0]) for name in endpoints.names}
    return [partial(watch, url, endpoints.endpoint(name).gauge) for name, url in urls.items() if url is not None]
