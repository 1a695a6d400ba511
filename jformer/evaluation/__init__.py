"""How good a run is, and whether another is better."""
