"""Parameters on disk: checkpoints of a run, and the formats of other libraries."""
