"""Checks of the project itself: its size, its tests, its random numbers."""
