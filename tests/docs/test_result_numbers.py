"""What README and pages say of results on sMNIST and sCIFAR is what the files have."""

from statistics import fmean, stdev

import pytest

from tests.docs.measured import page, result, rows


def smnist(variant, column="best", name="results-smnist"):
    return fmean(float(row[column]) for row in rows(name, variant=variant))


def choice(variant, column="best", name="results-smnist-choices"):
    """With seed 0."""
    (row,) = rows(name, variant=variant, seed=0)
    return float(row[column])


def test_small_models_compare_on_smnist_as_the_page_says():
    assert smnist("gently to 28") - smnist("28 states") == pytest.approx(1, abs=0.25)
    assert smnist("gently to 13") - smnist("13 states") == pytest.approx(2, abs=0.25)
    for tau, paper, other in ((0.02, 96.9, 28), (0.04, 95.9, 13)):
        ours, theirs = f"τ = {tau}", f"τ = {tau}, paper's way"
        assert 0 < smnist(theirs) - smnist(ours) < 1
        assert max(smnist(ours), smnist(theirs)) < paper
        assert smnist(theirs, "order") < other
    assert (smnist("256 states") < 97.3, smnist("28 states") < 96.0, smnist("13 states") > 92.6) == (True, True, True)
    text = page("docs/results.md")
    orders, mine = ([smnist(f"τ = {tau}{way}", "order") for tau in (0.02, 0.04)] for way in (", paper's way", ""))
    assert (
        f"{mine[0]:.0f} and {mine[1]:.0f} states where the paper's way has {orders[0]:.0f} and {orders[1]:.0f}" in text
    )
    assert f"28 and 13 where its way gives {orders[0]:.0f} and {orders[1]:.0f} here" in text
    wide = [choice(f"τ = {tau}, paper's way, phases up to 2π", "order") for tau in (0.02, 0.04)]
    best = [choice(f"τ = {tau}, paper's way, phases up to 2π") for tau in (0.02, 0.04)]
    said = (
        f"its way ends with {wide[0]:.0f} and {wide[1]:.0f} states with the one seed that was trained, at {best[0]:.1f}"
    )
    assert f"{said}, **more than gentle cuts to 28 reach at this rate**, and at {best[1]:.1f}" in text
    assert best[1] < smnist("gently to 13")
    assert best[0] > max(float(row["best"]) for row in rows("results-smnist", variant="gently to 28"))


def test_penalties_and_a_teacher_do_on_smnist_what_the_page_says():
    light = "Σσ penalty of 0.0001, then cut to 28"
    assert smnist("Σσ penalty, then cut to 28") == pytest.approx(20, abs=5)
    assert smnist(light) > smnist("gently to 28")
    assert smnist(light) > max(float(row["best"]) for row in rows("results-smnist", variant="gently to 28"))
    alike = rows("results-smnist", variant="gently to 28", together=12)
    ratio = smnist(light, "steps_s") / fmean(float(row["steps_s"]) for row in alike)
    text = page("docs/results.md")
    assert f"its gradient steps take {ratio:.1f} times as long" in text
    assert smnist("28 states, taught") == pytest.approx(smnist("28 states"), abs=0.5)


def test_a_rate_that_falls_meets_the_aims_on_smnist():
    def falling(variant):
        assert len(rows("results-smnist-falling", variant=variant)) == 5, "five seeds of each"
        return smnist(variant, name="results-smnist-falling")

    few, fewer = falling("gently to 28"), falling("gently to 13")
    assert (few >= 97.2, fewer >= 96.8) == (True, True)
    text = page("docs/results.md")
    assert f"above the paper's compressed models by {few - 96.9:.1f} and {fewer - 95.9:.1f} points" in text
    assert f"from the start reach {falling('28 states'):.1f} and {falling('13 states'):.1f} too" in text
    assert fewer > 96.9
    assert falling("256 states") - fewer < 0.5
    assert few - falling("28 states") == pytest.approx(1 / 3, abs=0.1)
    assert fewer - falling("13 states") == pytest.approx(1, abs=0.1)
    readme = page("README.md")
    said = f"with 28 states {few:.1f} % and with 13 states {fewer:.1f} %, where 256 reach {falling('256 states'):.1f} %"
    assert said in readme
    assert f"from the start {falling('28 states'):.1f} and {falling('13 states'):.1f}." in readme
    plain = [smnist(f"gently to {order}") for order in (28, 13)]
    assert f"with that rate we have {plain[0]:.1f} and {plain[1]:.1f}" in readme


def test_choices_do_on_smnist_what_the_page_says():
    text = page("docs/smnist_choices.md")

    def falling(variant):
        return choice(variant, name="results-smnist-falling")

    def both(way):
        return [choice(f"gently to {order}, falling, {way}") for order in (28, 13)]

    ours, small = [falling(f"gently to {order}") for order in (28, 13)], falling("28 states")
    columns = ("256 states", "28 states", "gently to 28", "gently to 13")
    for label, name in (("constant 4e-4, the paper's", "results-smnist"), ("falling", "results-smnist-falling")):
        assert " | ".join([f"| {label}", *(f"{choice(one, name=name):.1f}" for one in columns)]) in text
    before, constant = choice("28 states", name="results-smnist"), choice("28 states, constant 4e-3")
    assert f"Of the {small - before:.1f} points" in text
    assert (
        f"from {before:.1f} to {small:.1f}, a constant 4e-3 in the place of 4e-4 has {constant - before:.1f};" in text
    )
    late, whole = both("cuts from a quarter on"), falling("256 states")
    assert f"28 states reach {late[0]:.1f}, more than 256 that are never cut ({whole:.1f} with this seed)" in text
    assert late[0] > whole
    assert abs(late[1] - ours[1]) < 0.1
    undropped = both("no dropout")
    assert f"**Without dropout** 13 states have {undropped[1]:.1f} and 28 have {undropped[0]:.1f}" in text
    white, paper = both("Gramians of white noise"), both("cut in the paper's way")
    said = f"{white[0]:.1f} and {white[1]:.1f}, and in the paper's way (no folding, moments sliced) {paper[0]:.1f} and "
    assert said + f"{paper[1]:.1f}, against {ours[0]:.1f} and {ours[1]:.1f}." in text
    wide = [f"τ = {tau}, paper's way, phases up to 2π" for tau in (0.02, 0.04)]
    assert f"Accuracy is {choice(wide[0]):.1f} and {choice(wide[1]):.1f}; the paper has 96.9 and 95.9." in text
    narrow = [choice(f"τ = {tau}, paper's way", "order", "results-smnist") for tau in (0.02, 0.04)]
    assert f"and {narrow[0]:.0f} and {narrow[1]:.0f} with this seed" in text
    theirs, gently = (choice(name, name="results-smnist") for name in ("τ = 0.02, paper's way", "gently to 28"))
    said = f"{theirs:.1f} with {narrow[0]:.0f}, and than gentle cuts to 28 at the same rate, {gently:.1f}."
    assert said in text
    assert choice("256 states, phases up to 2π") == pytest.approx(choice("256 states", name="results-smnist"), abs=0.1)


def test_seeds_differ_as_much_as_the_page_says():
    spreads = {}
    for name in ("results-smnist", "results-smnist-falling", "results-smnist-selection"):
        for variant in {row["variant"] for row in result(name).rows}:
            best = [float(row["best"]) for row in rows(name, variant=variant)]
            if len(best) > 1 and min(best) > 90:
                spreads[name, variant] = stdev(best)
    few = spreads.pop(("results-smnist-selection", "32 states"))
    five = [spread for (name, _), spread in spreads.items() if name != "results-smnist-selection"]
    said = f"standard deviations of {min(five):.1f} to {max(five):.1f} points, 32 states from the start even {few:.1f}"
    assert said in page("docs/smnist_choices.md")
    assert {row["together"] for row in result("results-smnist").rows} == {10, 12}  # as the page of results says


def test_what_is_kept_matters_on_smnist_as_the_page_says():
    def kept(variant):
        return [float(row["best"]) for row in rows("results-smnist-selection", variant=variant)]

    names = ("largest σ kept", "random states kept", "smallest σ kept", "32 states")
    largest, chance, smallest, start = map(kept, names)
    assert {len(found) for found in (largest, chance, smallest, start)} == {3}
    assert all(one > other for one, *others in zip(largest, chance, smallest, strict=True) for other in others)
    assert stdev(largest) < min(map(stdev, (chance, smallest, start)))
    assert sum(found > min(largest) - 0.1 for found in start) == 1
    assert fmean(chance) == pytest.approx(fmean(start), abs=0.2)
    text = page("docs/smnist_choices.md")
    low, middle, high = sorted(smallest)
    assert f"{low:.1f} and {middle:.1f} with two seeds and {high:.1f} with the third" in text
    assert [row["machine"] for row in rows("results-smnist-selection", variant=names[2])][2] != "NVIDIA H200"


def test_scifar_is_as_accurate_and_as_fast_as_the_page_says():
    (whole,), (small,), (few,) = (
        *(rows("results-scifar", variant=name) for name in ("384 states", "57 states", "four cuts to 57")),
    )
    assert {row["steps"] for row in (whole, small, few)} == {40_000}
    text = page("docs/results.md")
    share = f"{100 * few['seconds'] / whole['seconds']:.0f} % of the time of 384"
    assert f"{few['best'] - small['best']:.1f} points better than with 57 from the start" in text
    assert f"{whole['best'] - few['best']:.1f} below the one that keeps 384" in text
    assert share in text
    steps, more = few["steps_s"] / whole["steps_s"], few["seconds"] / small["seconds"] - 1
    assert f"gradient steps alone {100 * steps:.0f} % too, and {100 * more:.0f} % more than 57 states from the" in text
    said = f"The cut model is {84.4 - few['best']:.1f} points below its, with less than a quarter of the steps"
    assert f"{said}, the whole one {86.5 - whole['best']:.1f} and the small one {78.2 - small['best']:.1f}" in text
    readme = page("README.md")
    assert f"57 in the warm-up {few['best']:.1f} %, in {share} states, which reach {whole['best']:.1f} %" in readme
    assert f"with 57 from the start {small['best']:.1f} %" in readme
