"""The tasks that the benchmarks run: simulated house rules, and IFEval on a real server."""
