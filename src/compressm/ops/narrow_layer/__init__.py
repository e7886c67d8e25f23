"""A layer of few channels on a GPU: chunks of time as small matrix products, no state but one a chunk in memory."""
