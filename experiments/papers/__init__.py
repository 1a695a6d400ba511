"""Questions that papers raise, and runs of the configs, each with a verdict."""
