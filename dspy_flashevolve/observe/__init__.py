"""What a run shows: progress while it runs, statistics when it is over."""
