"""Training gives the numbers that are stored: losses, accuracies, cuts, restored orders and Hankel spectra.

The library trains in float32 alone, so that other kernels give other roundings: on one machine AVX-512, AVX2 and no
wide vectors at all differed by 3e-7 in losses and 2e-6 in measured errors after these 14 to 18 steps. The runs
therefore have a process of their own with one thread, in which torch and MKL are told to use the same code on every
processor; what is left is far below the tolerance of 1e-6. `tests.regression.compare` compares two checkouts bit for
bit, by the fastest kernels of a machine.
"""

import json

from tests.regression.compare import differences
from tests.regression.pin import PINNED
from tests.regression.trainings import ANY_PROCESSOR, ROOT, leaves, train_all

STORED = json.loads(PINNED.read_text())
TOLERANCE = 1e-6


def test_training_gives_the_stored_numbers(tmp_path):
    """All recipes in one test, which is one process: loading torch takes longer than training."""
    found, stored = dict(leaves(train_all(ROOT, tmp_path, **ANY_PROCESSOR))), dict(leaves(STORED))
    assert found.keys() == stored.keys()
    assert {path: (found[path], stored[path]) for path in stored if not close(path, found[path], stored)} == {}


def close(path, value, stored):
    """Whether numbers agree to 1e-6, a singular value to 1e-6 of the largest; anything else has to be the same."""
    wanted = stored[path]
    if not isinstance(wanted, float):
        return value == wanted
    head, sigma, _ = path.rpartition(".sigma.")
    return abs(value - wanted) <= TOLERANCE * abs(stored[f"{head}.sigma.0"] if sigma else wanted)


def test_the_stored_runs_are_cut_and_restored_as_their_recipes_say():
    cuts = {name: [(row["step"], row.get("order"), row.get("rank")) for row in STORED[name]["cuts"]] for name in STORED}
    assert cuts["lru-measured"] == [(4, 16, 9), (4, 16, 9), (8, 9, 7), (8, 9, 7), (12, 7, 6), (12, 7, 6)]
    assert cuts["mamba-baked"] == [(4, 8, 5), (4, 8, 5), (8, 5, 3), (8, 5, 3)]
    assert cuts["s5-rollback"] == [(7, 12, 6), (12, 6, 3), (14, None, None)]
    assert STORED["s5-rollback"]["orders"] == STORED["s5-rollback"]["cuts"][-1]["orders"] == {"blocks.0.ssm": 6}


def test_a_difference_in_the_last_bit_is_found():
    one, other = ({"weights": "ab", "losses": {"train": [0.5, x]}} for x in (0.1, 0.1 + 2**-56))
    assert differences(one, one) == []
    assert differences(one, other) == [
        "losses.train.1: 0x1.999999999999ap-4 (0.1) and 0x1.999999999999bp-4 (0.10000000000000002)"
    ]
    assert differences(one, {"losses": one["losses"]}) == ["weights: 'ab' and nothing"]
