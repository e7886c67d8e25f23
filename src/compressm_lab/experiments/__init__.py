"""Experiments: arms × seeds of trainings, the paper's tables and figures, and result files of our own."""
