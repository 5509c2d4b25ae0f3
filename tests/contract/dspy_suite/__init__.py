"""dspy's own GEPA tests, with `AsyncGEPA` in the place of `dspy.GEPA`."""
