"""Ops around the recurrence in a block: norms, gates, residuals, encoders and pooling."""
