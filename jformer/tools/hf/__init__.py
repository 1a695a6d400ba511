"""Import models of Hugging Face Transformers as runs, and export runs as such models: weights, options, tokenizers.

Each family is a table of names and a few rules (`families.HfFamily`) in a file of its own; `convert` imports,
`write_model` exports. Neither needs torch or transformers, and pickle is never read. "Theirs" is Transformers.
"""
