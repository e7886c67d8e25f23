"""What README and pages say of results on sMNIST and sCIFAR is what the files have."""

from statistics import fmean, stdev

import pytest

from compressm_lab.experiments.kept import Kept
from compressm_lab.runs.paper import read_paper
from tests.docs.measured import result, rows, says, tenths, whole


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
    orders, mine = ([smnist(f"τ = {tau}{way}", "order") for tau in (0.02, 0.04)] for way in (", paper's way", ""))
    assert says("docs/results.md", *whole(*mine, *orders))
    wide = [choice(f"τ = {tau}, paper's way, phases up to 2π", "order") for tau in (0.02, 0.04)]
    best = [choice(f"τ = {tau}, paper's way, phases up to 2π") for tau in (0.02, 0.04)]
    assert says("docs/results.md", "28", "13", *whole(*orders, *wide), *tenths(*best))
    assert best[1] < smnist("gently to 13")
    assert best[0] > max(float(row["best"]) for row in rows("results-smnist", variant="gently to 28"))


def test_penalties_and_a_teacher_do_on_smnist_what_the_page_says():
    light = "Σσ penalty of 0.0001, then cut to 28"
    assert smnist("Σσ penalty, then cut to 28") == pytest.approx(20, abs=5)
    assert smnist(light) > smnist("gently to 28")
    assert smnist(light) > max(float(row["best"]) for row in rows("results-smnist", variant="gently to 28"))
    alike = rows("results-smnist", variant="gently to 28", together=12)
    ratio = smnist(light, "steps_s") / fmean(float(row["steps_s"]) for row in alike)
    assert says("docs/results.md", "0.0001", *tenths(ratio))
    assert smnist("28 states, taught") == pytest.approx(smnist("28 states"), abs=0.5)


def test_a_rate_that_falls_meets_the_aims_on_smnist():
    def falling(variant):
        assert len(rows("results-smnist-falling", variant=variant)) == 5, "five seeds of each"
        return smnist(variant, name="results-smnist-falling")

    few, fewer = falling("gently to 28"), falling("gently to 13")
    assert (few >= 97.2, fewer >= 96.8) == (True, True)
    from_the_start = [falling(f"{order} states") for order in (28, 13)]
    assert says("docs/results.md", "28", "13", *tenths(few - 96.9, fewer - 95.9, *from_the_start))
    assert fewer > 96.9
    assert falling("256 states") - fewer < 0.5
    assert few - falling("28 states") == pytest.approx(1 / 3, abs=0.1)
    assert fewer - falling("13 states") == pytest.approx(1, abs=0.1)
    plain = [smnist(f"gently to {order}") for order in (28, 13)]
    assert says("README.md", "256", "28", "28", *tenths(falling("256 states"), few, from_the_start[0]))
    assert says("README.md", "13", "13", *tenths(fewer, from_the_start[1]))
    assert says("README.md", "28", "13", "96.9", "95.9", *tenths(*plain))


def test_choices_do_on_smnist_what_the_page_says():
    def falling(variant):
        return choice(variant, name="results-smnist-falling")

    def both(way):
        return [choice(f"gently to {order}, falling, {way}") for order in (28, 13)]

    ours, small = [falling(f"gently to {order}") for order in (28, 13)], falling("28 states")
    columns = ("256 states", "28 states", "gently to 28", "gently to 13")
    for name in ("results-smnist", "results-smnist-falling"):
        assert says("docs/smnist_choices.md", *tenths(*(choice(one, name=name) for one in columns)))
    before, constant = choice("28 states", name="results-smnist"), choice("28 states, constant 4e-3")
    assert says("docs/smnist_choices.md", *tenths(small - before, before, small, constant - before))
    late, large = both("cuts from a quarter on"), falling("256 states")
    assert says("docs/smnist_choices.md", "28", "256", *tenths(late[0], large))
    assert late[0] > large
    assert abs(late[1] - ours[1]) < 0.1
    undropped = both("no dropout")
    assert says("docs/smnist_choices.md", "13", "28", *tenths(*undropped))
    white, paper = both("Gramians of white noise"), both("cut in the paper's way")
    assert says("docs/smnist_choices.md", *tenths(*white, *paper, *ours))
    wide = [f"τ = {tau}, paper's way, phases up to 2π" for tau in (0.02, 0.04)]
    narrow = [choice(f"τ = {tau}, paper's way", "order", "results-smnist") for tau in (0.02, 0.04)]
    theirs, gently = (choice(name, name="results-smnist") for name in ("τ = 0.02, paper's way", "gently to 28"))
    numbers = (*tenths(*map(choice, wide), 96.9, 95.9, theirs, gently), *whole(*narrow, narrow[0]), "28")
    assert says("docs/smnist_choices.md", *numbers)
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
    assert says("docs/smnist_choices.md", *tenths(min(five), max(five), few), "32")
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
    assert says("docs/smnist_choices.md", *tenths(*smallest))
    assert [row["machine"] for row in rows("results-smnist-selection", variant=names[2])][2] != "NVIDIA H200"


def test_scifar_is_as_accurate_and_as_fast_as_the_page_says():
    (large,), (small,), (few,) = (
        *(rows("results-scifar", variant=name) for name in ("384 states", "57 states", "four cuts to 57")),
    )
    assert {row["steps"] for row in (large, small, few)} == {40_000}
    share = 100 * few["seconds"] / large["seconds"]
    assert says("docs/results.md", "57", "384", *tenths(few["best"] - small["best"], large["best"] - few["best"]))
    steps, more = few["steps_s"] / large["steps_s"], few["seconds"] / small["seconds"] - 1
    assert says("docs/results.md", "384", *whole(share, 100 * steps, 100 * more))
    assert says("docs/results.md", *tenths(84.4 - few["best"], 86.5 - large["best"], 78.2 - small["best"]))
    assert says("README.md", *whole(share), "384", "57", "57", *tenths(few["best"], large["best"], small["best"]))


def test_the_readme_says_what_the_demo_reached():
    def demo(model, column):
        return fmean(row[column] for row in rows("demo", model=model))

    large, few, small = (demo(model, "accuracy") for model in ("large", "compressed", "small"))
    share = 100 * demo("compressed", "seconds") / demo("large", "seconds")
    assert says("README.md", "128", "4", "4", *tenths(large, few, small), *whole(share))
    assert demo("white noise", "accuracy") < small
    bounds = [float(bound) for row in rows("demo", model="white noise") for bound in row["bounds"].split(", ")]
    assert min(bounds) > 100, "far above 1"


def in_its_setting(folder, column="best"):
    """The values of all seeds in the paper's own setting, the best first."""
    found = [float(row[column]) for row in Kept.read().rows if row["variant"] == f"smnist-paper/{folder}"]
    return sorted(found, reverse=True)


def test_the_papers_setting_leads_to_its_orders_and_to_the_accuracies_that_the_page_says():
    taus, stated = ("0.01", "0.02", "0.04"), read_paper("results")

    def top(folder):
        return fmean(in_its_setting(folder)[:3])

    def paper(method, tau, quantity="accuracy"):
        return stated.value("sMNIST", method, "τ = 0" if tau == "0" else f"τ = {tau}", quantity).centre

    orders = [fmean(in_its_setting(f"tau-{tau}", "order")) for tau in taus]
    assert says("docs/results.md", *taus, *tenths(*orders, *(paper("CompreSSM", tau, "order") for tau in taus)))
    cut = [paper("CompreSSM", tau) - top(f"tau-{tau}") for tau in taus]
    whole_one = paper("baseline", "0") - top("n-256")
    small = [paper("baseline", tau) - top(f"n-{n}") for tau, n in (("0.02", 28), ("0.04", 13))]
    spread = [in_its_setting(f"n-{n}")[0] - in_its_setting(f"n-{n}")[-1] for n in (28, 13)]
    assert min(*cut, whole_one, *small) > 0
    assert says("docs/results.md", *tenths(*cut, whole_one, *small, *spread))
    ours = [top("ours-28"), top("ours-13")]
    beside = [paper("CompreSSM", "0.02") - ours[0], ours[1] - paper("CompreSSM", "0.04")]
    above = [ours[0] - top("tau-0.02"), ours[1] - top("tau-0.04")]
    assert says("docs/results.md", *tenths(*ours, *beside, *above), "28", "13")
    assert min(*beside, *above) > 0


def small_recall(family, **wanted):
    return rows("recall-small", family=family, **wanted)


def test_large_models_that_are_cut_recall_more_than_small_ones_as_the_page_says():
    def mean(arm, column="accuracy", rate=0.016):
        return fmean(float(row[column]) for row in small_recall("Mamba-2", arm=arm, rank=16, rate=rate))

    small = [mean("from scratch", rate=rate) for rate in (0.002, 0.008)]
    ways = [mean(arm) for arm in ("Mapped", "Fitted")]
    assert says("docs/memory_results.md", "64", "16", *(f"{value:.3f}" for value in (*ways, *small)))
    after = [mean(arm, "accuracy_cut") for arm in ("Mapped", "GHOST", "random")]
    errors = {arm: mean(arm, "error") for arm in ("Mapped", "Fitted", "GHOST")}
    ratios = [errors["GHOST"] / errors[arm] for arm in ("Mapped", "Fitted")]
    assert says("docs/memory_results.md", *(f"{value:.3f}" for value in after), *tenths(*ratios))
    for seed in range(3):
        (best,) = small_recall("Mamba-2", arm="from scratch", rate=0.008, seed=seed)
        assert all(row["accuracy"] > best["accuracy"] for row in small_recall("Mamba-2", order=64, rank=16, seed=seed))


def test_the_same_holds_for_a_gated_delta_net_whose_cuts_differ_little_at_the_end():
    def mean(arm, column="accuracy", rank=16):
        return fmean(float(row[column]) for row in small_recall("Gated DeltaNet", arm=arm, rank=rank, rate=0.004))

    arms = ("Mapped", "Fitted", "GHOST", "random")
    ends = [mean("uncut", rank=64), mean("from scratch"), *(mean(arm) for arm in arms)]
    after = [mean("Mapped", "accuracy_before"), *(mean(arm, "accuracy_cut") for arm in arms)]
    ratios = [mean("GHOST", "error") / mean(arm, "error") for arm in ("Mapped", "Fitted")]
    assert says("docs/memory_results.md", *(f"{value:.3f}" for value in (*ends, *after)), *tenths(*ratios))
    every = small_recall("Gated DeltaNet", rank=16)
    best = max(row["accuracy"] for row in every if row["arm"] == "from scratch")
    assert all(row["accuracy"] > best + 0.7 for row in every if row["order"] == 64)
    rates = {row["rate"] for row in every if row["arm"] == "from scratch"}
    scratch = [
        fmean(row["validation"] for row in every if (row["order"], row["rate"]) == (16, rate)) for rate in sorted(rates)
    ]
    assert len(scratch) == 4
    assert max(scratch) == scratch[1]  # 0.004


def test_with_more_steps_the_small_gated_delta_net_learns_most_of_it():
    found = [row for row in rows("recall-small-1500", rank=16) if row["rate"] == 0.002]
    scratch = [row["accuracy"] for row in found if row["order"] == 16]
    cut = [fmean(row["accuracy"] for row in found if row["arm"] == arm) for arm in ("random", "RRQR")]
    assert says("docs/memory_results.md", *(f"{value:.3f}" for value in (fmean(scratch), *cut)), "1500")
    assert says("docs/memory_results.md", f"{max(scratch):.2f}", f"{min(scratch):.2f}")


def recalled(family, arm, rank, column="accuracy"):
    """The mean of the three seeds at the rate that is best on validation, which is one for all sizes of a family."""
    rate = {"Mamba-2": 0.008, "Gated DeltaNet": 0.001}[family]
    found = rows("recall", family=family, arm=arm, rank=rank, rate=rate)
    assert len(found) == 3
    return fmean(float(row[column]) for row in found)


@pytest.mark.parametrize("family", ["Mamba-2", "Gated DeltaNet"])
def test_sizes_of_the_recall_study_have_the_rate_that_is_best_on_validation(family):
    for rank in (64, 32, 16):
        own = [row for row in rows("recall", family=family, rank=rank) if row["arm"] in ("uncut", "from scratch")]
        rates = {row["rate"] for row in own}
        means = {rate: fmean(row["validation"] for row in own if row["rate"] == rate) for rate in rates}
        assert max(means, key=means.__getitem__) == {"Mamba-2": 0.008, "Gated DeltaNet": 0.001}[family]
        assert len(own) == 12


def test_a_mamba_2_that_is_cut_recalls_32_pairs_as_the_page_says():
    ends = [recalled("Mamba-2", arm, 16) for arm in ("Mapped", "from scratch", "GHOST", "random", "Fitted")]
    after = [recalled("Mamba-2", arm, 16, "accuracy_cut") for arm in ("Mapped", "Fitted", "GHOST", "random")]
    before = recalled("Mamba-2", "Mapped", 16, "accuracy_before")
    ratio = recalled("Mamba-2", "GHOST", 16, "error") / recalled("Mamba-2", "Mapped", 16, "error")
    numbers = (*ends[:2], ends[2], ends[4], recalled("Mamba-2", "from scratch", 32), *after, before)
    assert f"{ends[2]:.3f}" == f"{ends[3]:.3f}"
    assert says("docs/memory_results.md", *(f"{value:.3f}" for value in numbers), *tenths(ratio))
    scratch = sorted(
        row["accuracy"] for row in rows("recall", family="Mamba-2", arm="from scratch", rank=16, rate=0.008)
    )
    assert says("docs/memory_results.md", f"{ends[0]:.3f}", f"{scratch[0]:.2f}")
    assert scratch[1] > 0.999


def test_a_gated_delta_net_that_is_cut_recalls_32_pairs_as_the_page_says():
    family, ways = "Gated DeltaNet", ("Mapped", "Fitted", "PCA", "GHOST", "RRQR", "random")
    ends = [recalled(family, arm, rank) for rank in (32, 16) for arm in ("GHOST", "Mapped", "from scratch")]
    found = {rank: rows("recall", family=family, arm="Mapped", rank=rank) for rank in (32, 16)}
    numbers = [recalled(family, "uncut", 64), *ends, min(row["accuracy_before"] for row in found[16])]
    assert says("docs/memory_results.md", *(f"{value:.3f}" for value in numbers))
    scratch = rows("recall", family=family, arm="from scratch", rank=32, rate=0.001)
    assert says("docs/memory_results.md", f"{min(row['accuracy'] for row in scratch):.2f}", f"{ends[2]:.3f}")
    for rank in (32, 16):
        means = {way: recalled(family, way, rank) for way in ways}
        assert min(means, key=means.__getitem__) == "random"
        for way in ways:
            last = min(rows("recall", family=family, arm=way, rank=rank), key=lambda row: row["accuracy"])
            assert last["accuracy_before"] == numbers[-1]


def test_a_token_takes_the_share_of_time_on_a_gpu_that_the_page_says():
    def share(family, batch, arm="rows"):
        (cut,) = rows("language_decode", family=family, arm=arm, rank=16, batch=batch)
        (whole,) = rows("language_decode", family=family, arm="rows", rank=128, batch=batch)
        return cut["seconds"] / whole["seconds"]

    found = [share(family, batch) for batch in (256, 32, 1) for family in ("Mamba-2", "Gated DeltaNet")]
    maps = [share(family, 256, "maps") for family in ("Mamba-2", "Gated DeltaNet")]
    assert says("docs/memory_results.md", *(f"{value:.2f}" for value in (*found, *maps)))


def test_a_token_takes_the_share_of_time_and_memory_that_the_page_says():
    def of(column, family, rank, arm="rows", batch=256):
        (row,) = rows("language_decode-cpu", family=family, arm=arm, rank=rank, batch=batch)
        return row[column]

    both = ("Mamba-2", "Gated DeltaNet")
    sizes = {f"{of('state_bytes', family, 128) / of('state_bytes', family, 16):.1f}" for family in both}
    one = [of("seconds", family, 16, batch=1) / of("seconds", family, 128, batch=1) for family in both]
    many = [of("seconds", family, rank) / of("seconds", family, 128) for family in both for rank in (64, 32, 16)]
    maps = [of("seconds", family, 16, "maps") / of("seconds", family, 128) for family in both]
    assert len(sizes) == 1
    assert says("docs/memory_results.md", *sizes, *(f"{share:.2f}" for share in (*one, *many, *maps)))
    assert {row["device"] for row in rows("language_decode-cpu")} == {"cpu"}
