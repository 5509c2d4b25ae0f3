"""The tasks that the benchmarks run: simulated house rules, IFEval on a real server, and those of `registry`."""
