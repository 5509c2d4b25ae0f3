"""Running DSPy programs: the only dspy code below the optimizers."""
