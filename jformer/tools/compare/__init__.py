"""Runs side by side: their figures, what their configs differ in, and whether a difference is one."""
