"""How fast training, decoding and data are, beside peers."""
