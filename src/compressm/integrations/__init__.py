"""Trainers of other packages: each module is thin, calls `Compressor.step`, and needs its package installed."""
