"""How fast training, decoding and data are, compared with peers."""
