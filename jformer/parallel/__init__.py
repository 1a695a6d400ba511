"""Devices, how arrays are placed on them, and the processes that share them."""
