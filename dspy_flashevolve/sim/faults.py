"""Faults of a provider, drawn for each request: the fault is a pure function of the seed and the request's number.

.. code-block:: text

    answered at once   rate_limit (429), server_error (5xx), unauthorized (401), context_too_long, content_filter (400)
    never answered     hang
    answered badly     truncated_body, malformed_body, empty_choices, slow_drip: after the time of a good answer

A burst of rate limits is bound to the server's clock; every other fault is drawn by the request's number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dspy_flashevolve.sim.words import Choices

DrawnKind = Literal[
    "server_error",
    "hang",
    "truncated_body",
    "malformed_body",
    "empty_choices",
    "slow_drip",
    "unauthorized",
    "context_too_long",
    "content_filter",
]
FaultKind = Literal[DrawnKind, "rate_limit"]
Variant = Literal["json", "html", "empty", ""]
DRAWN_KINDS: tuple[DrawnKind, ...] = get_args(DrawnKind)
BODY_KINDS = ("truncated_body", "malformed_body", "empty_choices", "slow_drip")
"""Faults in the body of an answer: they come after the time that a good reply takes."""
VARIANTS: tuple[Variant, ...] = ("json", "html", "empty")
_HTML = b"<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1></body></html>"


@dataclass(frozen=True)
class Fault:
    """The fault of one request.

    Attributes:
        kind: Which fault.
        status: HTTP status of the answer; 200 where the fault is in the body, and for a hang, which has none.
        variant: Of a malformed body "json" (broken off, but complete for HTTP), "html" or "empty" (`{}`); else "".
        retry_after_seconds: Of a rate limit, what is left of the burst, in model seconds; else 0.
    """

    kind: FaultKind
    status: int = 200
    variant: Variant = ""
    retry_after_seconds: float = 0.0


@dataclass(frozen=True)
class Faults:
    """The probability of each fault for a request, and the times of bursts of rate limits.

    Attributes:
        server_error: A status of `server_error_statuses`, each as likely.
        hang: Never answered, until the client goes away.
        truncated_body: The connection is cut in the middle of the body.
        malformed_body: Status 200 with JSON that breaks off, an HTML page, or `{}`, each as likely.
        empty_choices: Status 200 with `"choices": []`.
        slow_drip: The body comes byte by byte over `drip_seconds`.
        unauthorized: Status 401.
        context_too_long: Status 400 with OpenAI's code "context_length_exceeded".
        content_filter: Status 400 with Azure's code "content_filter".
        burst_every_seconds: Model seconds from the start of one burst of rate limits to the next; the first begins
            after as many. 0 for no bursts.
        burst_seconds: Model seconds of a burst, during which every request is answered 429 with Retry-After.
        drip_seconds: Model seconds of a slow drip.
        server_error_statuses: Statuses from 500 to 599.
        seed: Of the draws.

    Raises:
        ValueError: If a rate is outside [0, 1], the rates add up to more than 1, a time is negative or not finite,
            bursts overlap, or a status is no server error.
    """

    server_error: float = 0.0
    hang: float = 0.0
    truncated_body: float = 0.0
    malformed_body: float = 0.0
    empty_choices: float = 0.0
    slow_drip: float = 0.0
    unauthorized: float = 0.0
    context_too_long: float = 0.0
    content_filter: float = 0.0
    burst_every_seconds: float = 0.0
    burst_seconds: float = 0.0
    drip_seconds: float = 30.0
    server_error_statuses: tuple[int, ...] = (503,)
    seed: int = 0

    def __post_init__(self) -> None:
        for kind, rate in self.rates().items():
            if not 0 <= rate <= 1:
                raise ValueError(f"{kind} must be between 0 and 1, got {rate!r}")
        if (total := math.fsum(self.rates().values())) > 1:
            raise ValueError(f"the rates must add up to at most 1, got {total:g}")
        if not 0 <= self.drip_seconds < math.inf:
            raise ValueError(f"drip_seconds must be at least 0 and finite, got {self.drip_seconds!r}")
        every, seconds = self.burst_every_seconds, self.burst_seconds
        if not (every == seconds == 0 or 0 < seconds < every < math.inf):
            raise ValueError(f"burst_seconds must be less than burst_every_seconds, got {seconds!r} and {every!r}")
        if not self.server_error_statuses or not all(500 <= status <= 599 for status in self.server_error_statuses):
            raise ValueError(f"server_error_statuses must be from 500 to 599, got {self.server_error_statuses!r}")

    def rates(self) -> dict[DrawnKind, float]:
        """Return the probability of each drawn kind of fault."""
        return {kind: getattr(self, kind) for kind in DRAWN_KINDS}

    def at(self, request: int, seconds: float) -> Fault | None:
        """Return the fault of a request; None for none. A burst takes precedence over what is drawn.

        Args:
            request: Its number, from 0, in order of arrival.
            seconds: When it came, in model seconds since the server's start.
        """
        remaining = self.burst_remaining_seconds(seconds)
        return Fault("rate_limit", 429, retry_after_seconds=remaining) if remaining > 0 else self.drawn(request)

    def burst_remaining_seconds(self, seconds: float) -> float:
        """Return the model seconds until the end of the burst at a moment; 0 where there is none."""
        if not self.burst_every_seconds or seconds < self.burst_every_seconds:
            return 0.0
        return max(0.0, self.burst_seconds - seconds % self.burst_every_seconds)

    def drawn(self, request: int) -> Fault | None:
        """Return the fault that is drawn for a request by its number, whenever it comes; None for none."""
        choices = Choices(self.seed, f"fault {request}")
        chance, below = choices.uniform("kind"), 0.0
        for kind, rate in self.rates().items():
            below += rate
            if chance < below:
                status = {"unauthorized": 401, "context_too_long": 400, "content_filter": 400}.get(kind, 200)
                if kind == "server_error":
                    status = self.server_error_statuses[choices.index("status", len(self.server_error_statuses))]
                return Fault(kind, status, VARIANTS[choices.index("variant", 3)] if kind == "malformed_body" else "")
        return None


def error_of(fault: Fault) -> dict[str, Any]:
    """Return the `error` of OpenAI's body for a fault that has a status of its own."""
    kind, code, param, message = {
        "rate_limit": ("rate_limit_error", "rate_limit_exceeded", None, "Rate limit reached: too many requests."),
        "unauthorized": ("authentication_error", "invalid_api_key", None, "Incorrect API key provided."),
        "context_too_long": (
            "invalid_request_error",
            "context_length_exceeded",
            "messages",
            "This model's maximum context length is 8192 tokens. Please reduce the length of the messages.",
        ),
        "content_filter": (
            "invalid_request_error",
            "content_filter",
            "prompt",
            "The response was filtered due to the prompt triggering the content management policy.",
        ),
    }.get(fault.kind, ("server_error", None, None, "The server is overloaded or not ready yet."))
    return {"message": message, "type": kind, "param": param, "code": code}


def malformed(fault: Fault, body: bytes) -> tuple[bytes, str]:
    """Return the malformed body of a fault in place of a good one, and its content type."""
    if fault.variant == "html":
        return _HTML, "text/html"
    return (b"{}" if fault.variant == "empty" else body[: len(body) // 2]), "application/json"
