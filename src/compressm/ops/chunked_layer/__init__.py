"""A layer of many states and few channels on a GPU: chunks of time as matrix products, one state a chunk."""
