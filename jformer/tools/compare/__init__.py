"""Compare runs: their metrics, how their configs differ, and whether differences are significant."""
