"""Score runs and compare them."""
