"""What kills, cuts and growing sizes do to runs, sweeps and servers."""
