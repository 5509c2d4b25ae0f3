"""An engine for evolution loops whose stages overlap.

It imports neither dspy nor gepa and knows no algorithm: what a candidate is, how it is run and how it
is judged come from the layers above. Parts, from the bottom up: ``errors``, ``item``, ``events``;
``queues``, ``slots``, ``budget``, ``admission``, ``staleness``, ``stages``; ``rollouts``, ``pipeline``.
"""
