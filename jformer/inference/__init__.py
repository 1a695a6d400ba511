"""Inference with a trained run: text in; answers, scores and exports out."""
