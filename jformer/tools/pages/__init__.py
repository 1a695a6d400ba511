"""HTML pages in one file each: the attention explorer, the report of a run, the gallery, and their plots."""
