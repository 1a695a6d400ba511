"""Generated corpora for experiments, named by data.source=experiments.sources.NAME:open_split."""
