"""The layers that all model families share."""
