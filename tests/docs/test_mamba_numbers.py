"""What the pages on Mamba say is what its result files have."""

from statistics import fmean

import pytest

from tests.docs.measured import page, result, rows


def imdb(variant, column):
    found = [float(row[column]) for row in rows("imdb_mamba", variant=variant)]
    assert len(found) == 2, "two seeds of each"
    return fmean(found)


def test_gradient_steps_of_a_selective_layer_that_is_cut_take_a_quarter_of_the_time():
    """With as many states at the end as in the paper; what else training takes is said on the page."""
    whole, few = (imdb(variant, "steps_s") for variant in ("128 states", "baked to 12 at once"))
    assert whole / few >= 4
    steps = [1e3 * imdb(variant, "step_s") for variant in ("128 states", "baked to 12 at once")]
    text = page("docs/mamba.md")
    assert f"takes {steps[0]:.1f} ms with 128 states and {steps[1]:.1f} ms with 12" in text
    parts = ("steps_s", "recording_s", "cuts_s")
    all_in = [sum(imdb(variant, part) for part in parts) for variant in ("128 states", "baked to 12 at once")]
    assert f"these 3000 are {all_in[0] / all_in[1]:.1f} times as fast" in text
    longer = {row["variant"]: sum(row[part] for part in parts) for row in result("imdb_mamba-24000").rows}
    times = longer["128 states"] / longer["baked to 12 at once"]
    assert times >= 4, "as in the paper, with everything counted"
    assert f"`--steps 24000 --size 12 --only whole --only once`) {times:.1f} times:" in text
    both = {row["order"]: row["both_s"] for row in result("selective-cuda").rows}
    assert (both[128] <= 30e-3, both[12] <= 3.5e-3) == (True, True)
    shares = [row["both_s"] / row["floor_both_s"] for row in result("selective-cuda").rows]
    assert f"together take {min(shares):.0f} to {max(shares):.0f} times that" in text


def test_a_selective_layer_as_small_as_the_papers_way_leaves_it_is_as_good_and_faster():
    text = page("docs/mamba.md")
    paper, few = "paper: means, τ = 0.001", "baked to 4 at once"
    assert all(abs(imdb(way, "best") - imdb(paper, "best")) < 0.25 for way in (few, "baked to 4"))
    step = imdb(few, "step_s")
    assert f"a step takes {1e3 * step:.1f} ms, a fifth of 128 states." in text
    assert step / imdb("128 states", "step_s") == pytest.approx(1 / 5, abs=0.02)
    theirs = rows("imdb_mamba", variant=paper)
    said = [1e3 * row["step_s"] for row in theirs]
    assert f"a step takes {said[0]:.1f} ms with the first and {said[1]:.1f} ms with the second" in text
    extra = sorted(row["cuts_s"] + row["recording_s"] for row in theirs)
    assert f"{extra[0]:.0f} to {extra[1]:.0f} s in both seeds" in text
    assert f"its gradient steps alone take {theirs[0]['steps_s']:.0f} and {theirs[1]['steps_s']:.0f} s" in text
    first, second = rows("imdb_mamba", variant=few)
    assert (second["seed"], first["recording_s"] > 10 * second["recording_s"]) == (1, True)
    assert f"the cut took {second['cuts_s']:.2f} s and recording {second['recording_s']:.1f} s" in text
    parts = ("steps_s", "recording_s", "cuts_s")
    whole = sum(imdb("128 states", part) for part in parts)
    assert f"{whole / sum(second[part] for part in parts):.1f} times as fast as 128 states" in text


def test_cuts_of_trained_selective_layers_are_as_the_page_says():
    text = page("docs/mamba_cuts.md")
    copies, digits = sorted({row["setting"] for row in result("selective_cuts").rows})

    def found(setting, way, rank, column="error"):
        return [row[column] for row in rows("selective_cuts", setting=setting, way=way, rank=rank)]

    def ratio(setting, rank):
        return fmean(found(setting, "baked, refitted", rank)) / fmean(found(setting, "baked", rank))

    off = sorted(100 * (1 - ratio(setting, rank)) for setting in (copies, digits) for rank in (16, 8, 4))
    assert f"takes off {off[0]:.0f} to {off[-1]:.0f} % of that" in text
    half = [100 * fmean(found(setting, "baked", 16)) for setting in (copies, digits)]
    assert f"{half[0]:.0f} and {half[1]:.0f} % at half, 8 % at a quarter" in text
    assert all(round(100 * fmean(found(setting, "baked", 8))) == 8 for setting in (copies, digits))

    def falls(setting, rank):
        before, after = (found(setting, "baked", rank, column) for column in ("full_accuracy", "accuracy"))
        return [100 * (one - other) for one, other in zip(before, after, strict=True)]

    mean = [fmean(falls(copies, rank)) for rank in (16, 8, 4)]
    said = f"falls in the mean by {mean[0]:.0f} points at half of the states, by {mean[1]:.0f} at a quarter,"
    assert f"{said} where one seed lost {max(falls(copies, 8)):.0f}, and by {mean[2]:.0f} at an eighth" in text
    assert f"on digits by {fmean(falls(digits, 4)):.0f} at an eighth" in text
    states = [100 * fmean(found(setting, "states", rank)) for setting in (copies, digits) for rank in (16, 8, 4)]
    assert f"change {min(states):.0f} to {max(states):.0f} %" in text
    later = rows("selective_cuts", setting=digits, way="baked")
    below = sorted(100 * (row["full_later"] - row["accuracy_later"]) for row in later)
    assert f"by {below[0]:.0f} to {below[-1]:.0f} points" in text
    assert sum(row["accuracy_later"] < row["accuracy"] for row in later if row["rank"] == 16) == 2
    for setting, smaller in ((copies, True), (digits, False)):  # with Gramians of measured states
        pairs = [[fmean(found(setting, way, rank)) for way in ("baked, measured", "baked")] for rank in (16, 8, 4)]
        assert all((one < other) == smaller for one, other in pairs)
