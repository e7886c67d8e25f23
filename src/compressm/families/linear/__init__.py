"""Linear layers (LRU, S5, S4D): systems that stay the same over time."""
