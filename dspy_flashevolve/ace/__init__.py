"""ACE on the engine: a playbook of bullets that grows by small operations (arXiv 2510.04618). It knows no dspy."""
