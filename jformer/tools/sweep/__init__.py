"""Sweeps: overrides of a config, trials that workers share, a report with intervals.

Exports what an experiment file needs; jformer/tools/sweep/__main__.py is the command.
"""

from jformer.tools.sweep.experiment import Trial
from jformer.tools.sweep.space import chain, product, sample, zipped

__all__ = ["Trial", "chain", "product", "sample", "zipped"]
