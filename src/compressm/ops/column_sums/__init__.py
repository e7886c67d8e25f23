"""Sums over the rows of a matrix on the GPU: the end of every reduction in two stages."""
