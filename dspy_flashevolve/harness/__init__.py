"""Evolving the code around an LM: a sandbox for candidate code, an archive, and the stages of Meta-Harness."""
