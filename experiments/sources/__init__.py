"""Corpora that are made up for experiments, as data.source=experiments.sources.NAME:open_split names them."""
