"""Rows of `results` and `imdb_mamba` that nobody trained."""


def row(variant, seed, **values):
    common = {"steps": 9, "initial_order": 256.0, "order": 13.0, "best": 95.0, "last": 94.0}
    times = {"steps_s": 2.0, "seconds": 3.0, "cuts_s": 0.1, "step_s": 0.001, "recording_s": 0.5}
    return {"variant": variant, "seed": seed} | common | times | values
