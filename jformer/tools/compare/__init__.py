"""Compare runs: their figures, the differences of their configs, and whether differences are significant."""
