"""Devices, where arrays lie on them, and the processes that share them."""
