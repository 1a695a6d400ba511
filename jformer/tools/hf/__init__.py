"""Models of Hugging Face Transformers: their weights, options and tokenizers as ours, and ours as theirs.

A family is a table and a few rules (`families.Family`) in a file of its own; `convert` does the rest. Neither torch nor
transformers is needed, and pickle is never read.
"""
