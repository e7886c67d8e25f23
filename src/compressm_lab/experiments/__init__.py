"""Experiments: arms × seeds → trainings → rows, by one engine; the paper's tables and figures, and the demo."""
