"""DSPy modules that read stale work: replaceable, and optimizable like any other program."""
