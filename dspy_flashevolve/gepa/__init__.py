"""GEPA as stages, over gepa's own state, selectors, samplers, acceptance, merge, stoppers and trackers."""
