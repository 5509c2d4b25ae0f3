"""Running untrusted code: each run in a process of its own that is locked up, its LM calls made by the host."""
