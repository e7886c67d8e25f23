"""What the pages on Mamba say is what its result files have."""

from statistics import fmean

import pytest

from tests.docs.measured import result, rows, says, tenths, whole


def imdb(variant, column):
    found = [float(row[column]) for row in rows("imdb_mamba", variant=variant)]
    assert len(found) == 2, "two seeds of each"
    return fmean(found)


def test_gradient_steps_of_a_selective_layer_that_is_cut_take_a_quarter_of_the_time():
    """With as many states at the end as in the paper; what else training takes is said on the page."""
    large, few = (imdb(variant, "steps_s") for variant in ("128 states", "baked to 12 at once"))
    assert large / few >= 4
    steps = [1e3 * imdb(variant, "step_s") for variant in ("128 states", "baked to 12 at once")]
    assert says("docs/mamba.md", "128", "12", *tenths(*steps))
    parts = ("steps_s", "recording_s", "cuts_s")
    all_in = [sum(imdb(variant, part) for part in parts) for variant in ("128 states", "baked to 12 at once")]
    assert says("docs/mamba.md", "3000", *tenths(all_in[0] / all_in[1]))
    longer = {row["variant"]: sum(row[part] for part in parts) for row in result("imdb_mamba-24000").rows}
    times = longer["128 states"] / longer["baked to 12 at once"]
    assert times >= 4, "as in the paper, with everything counted"
    assert says("docs/mamba.md", "24000", "12", *tenths(times))
    both = {row["order"]: row["both_s"] for row in result("selective-cuda").rows}
    assert (both[128] <= 30e-3, both[12] <= 3.5e-3) == (True, True)
    shares = [row["both_s"] / row["floor_both_s"] for row in result("selective-cuda").rows]
    assert says("docs/mamba.md", *whole(min(shares), max(shares)))


def test_orders_of_channels_by_readings_of_the_papers_rule_are_as_the_page_says():
    def mean(way):
        return [fmean(row["mean"] for row in rows("mamba_orders", way=way, steps=steps)) for steps in (0, 150)]

    ours, finer = mean("double precision"), mean("τ = 0.0001")
    assert all(b - a == pytest.approx(1.2, abs=0.25) for a, b in zip(ours, finer, strict=True))
    assert all(b < a for a, b in zip(ours, mean("energy σ²"), strict=True))
    same = ("one order for all channels", "softplus of the mean", "E[exp(Δ a)] and E[Δ B]")
    for way in (*same, "root mean squares of B and C"):
        assert all(abs(b - a) < 0.5 for a, b in zip(ours, mean(way), strict=True)), way
    assert min(mean("single precision, eigenvalues")) > 12
    assert min(mean("single precision, singular values")) > 24
    assert says("docs/mamba.md", "16")
    assert mean("numerical rank, double precision") == pytest.approx([16, 16], abs=1)


def test_few_states_from_the_start_are_as_good_on_imdb():
    assert abs(imdb("128 states", "best") - imdb("16 states", "best")) < 1
    assert says("README.md", "128", "16")


def test_a_selective_layer_as_small_as_the_papers_way_leaves_it_is_as_good_and_faster():
    paper, few = "paper: means, τ = 0.001", "baked to 4 at once"
    assert all(abs(imdb(way, "best") - imdb(paper, "best")) < 0.25 for way in (few, "baked to 4"))
    step = imdb(few, "step_s")
    assert says("docs/mamba.md", *tenths(1e3 * step), "128")
    assert step / imdb("128 states", "step_s") == pytest.approx(1 / 5, abs=0.02)
    theirs = rows("imdb_mamba", variant=paper)
    assert says("docs/mamba.md", *tenths(*(1e3 * row["step_s"] for row in theirs)))
    extra = sorted(row["cuts_s"] + row["recording_s"] for row in theirs)
    assert says("docs/mamba.md", *whole(*extra), *whole(*(row["steps_s"] for row in theirs)))
    first, second = rows("imdb_mamba", variant=few)
    assert (second["seed"], first["recording_s"] > 10 * second["recording_s"]) == (1, True)
    parts = ("steps_s", "recording_s", "cuts_s")
    times = sum(imdb("128 states", part) for part in parts) / sum(second[part] for part in parts)
    assert says("docs/mamba.md", f"{second['cuts_s']:.2f}", *tenths(second["recording_s"], times))


def test_cuts_of_trained_selective_layers_are_as_the_page_says():
    copies, digits = sorted({row["setting"] for row in result("selective_cuts").rows})

    def found(setting, way, rank, column="error"):
        return [row[column] for row in rows("selective_cuts", setting=setting, way=way, rank=rank)]

    def ratio(setting, rank):
        return fmean(found(setting, "baked, refitted", rank)) / fmean(found(setting, "baked", rank))

    off = sorted(100 * (1 - ratio(setting, rank)) for setting in (copies, digits) for rank in (16, 8, 4))
    assert says("docs/mamba_cuts.md", *whole(off[0], off[-1]))
    half = [100 * fmean(found(setting, "baked", 16)) for setting in (copies, digits)]
    assert says("docs/mamba_cuts.md", *whole(*half), "8")
    assert all(round(100 * fmean(found(setting, "baked", 8))) == 8 for setting in (copies, digits))

    def falls(setting, rank):
        before, after = (found(setting, "baked", rank, column) for column in ("full_accuracy", "accuracy"))
        return [100 * (one - other) for one, other in zip(before, after, strict=True)]

    mean = [fmean(falls(copies, rank)) for rank in (16, 8, 4)]
    assert says("docs/mamba_cuts.md", *whole(*mean, max(falls(copies, 8)), fmean(falls(digits, 4))))
    states = [100 * fmean(found(setting, "states", rank)) for setting in (copies, digits) for rank in (16, 8, 4)]
    assert says("docs/mamba_cuts.md", *whole(min(states), max(states)))
    later = rows("selective_cuts", setting=digits, way="baked")
    below = sorted(100 * (row["full_later"] - row["accuracy_later"]) for row in later)
    assert says("docs/mamba_cuts.md", *whole(below[0], below[-1]))
    assert sum(row["accuracy_later"] < row["accuracy"] for row in later if row["rank"] == 16) == 2
    for setting, smaller in ((copies, True), (digits, False)):  # with Gramians of measured states
        pairs = [[fmean(found(setting, way, rank)) for way in ("baked, measured", "baked")] for rank in (16, 8, 4)]
        assert all((one < other) == smaller for one, other in pairs)
