"""Numbers in README and docs are those of the committed result files, and those meet their targets."""

import importlib.util
from pathlib import Path
from statistics import fmean, stdev

import pytest

from compressm.experiments.smnist_settings import VARIANTS
from compressm.reports.setting_tables import REFERENCE
from compressm.runs.measurement import Measurement

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text().split())


def result(name):
    return Measurement.read(ROOT / "benchmarks" / "results" / f"{name}.json")


def rows(name, **wanted):
    return [row for row in result(name).rows if all(row[key] == value for key, value in wanted.items())]


def milliseconds(name, column, **wanted):
    (row,) = rows(name, **wanted)
    return 1e3 * float(row[column])


def step(task, order, precision):
    return milliseconds("step-cuda", "step_s", task=task, order=order, precision=precision)


def cut(name, task, run="warm"):
    wanted = {"gramian": "white noise", "moments": "Transport", "ranks": "equal", "run": run, "task": task}
    return milliseconds(name, "total_s", **wanted)


def accuracy(way):
    return fmean(row["accuracy"] for row in rows("one_shot", setting="two blocks, 64 steps", way=way, rank=16))


def script():
    spec = importlib.util.spec_from_file_location("fill_tables", ROOT / "benchmarks" / "fill_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_the_measured_ones(page):
    text = page.read_text()
    assert script().filled(text) == text


def test_figures_in_the_readme_are_the_measured_ones():
    assert f"takes {step('scifar', 384, 'bfloat16'):.1f} ms with 384 states and" in README
    assert f"and {step('scifar', 57, 'bfloat16'):.1f} ms with 57" in README
    assert f"384 to 161 states takes {cut('cut-cuda', 'scifar'):.0f} ms up to the first step" in README
    assert f"from 256 to 28 states in {cut('cut-cpu', 'smnist'):.0f} ms" in README
    before = fmean(row["full_accuracy"] for row in rows("one_shot", setting="two blocks, 64 steps"))
    assert f"{before:.3f} before, {accuracy('paper'):.3f} the paper's way, **{accuracy('measured'):.3f} with" in README


def test_the_gpu_figure_of_a_reduction_is_the_measured_one():
    wanted = {"order": 384, "rank": 161, "width": 512, "system": "initial"}
    assert (
        f"go to 161 in {milliseconds('reduction-cuda', 'reduction_s', **wanted):.0f} ms"
        in (ROOT / "docs" / "speed.md").read_text()
    )


def seeds(variant, order=28):
    return [(row["before"] + row["last"]) / 2 for row in rows("smnist_settings", variant=variant, order=order)]


def test_figures_of_the_smnist_page_are_the_measured_ones():
    page = " ".join((ROOT / "docs" / "smnist.md").read_text().split())
    recipe, turn, half, running = map(seeds, ("recipe", "phases up to 2π", "phases up to π", "2π, running norm"))
    wide, wide_turn = seeds("recipe", 256), seeds("phases up to 2π", 256)
    above = [fmean(values) - REFERENCE[order] for values, order in ((wide, 256), (recipe, 28))]
    others = [seeds(name) for name in VARIANTS if name != "phases up to π"]
    for sentence in (
        f"Its means are {above[0]:.1f} and {above[1]:.1f} points above",
        f"reaches {fmean(running):.1f} % with 28 states, {REFERENCE[28] - fmean(running):.1f} points less",
        f"and {max(running):.1f} % with its best seed",
        f"{fmean(recipe):.1f} % up to π/10, {fmean(turn):.1f} % up to 2π, {fmean(half):.1f} % up to π,",
        f"{fmean(wide):.1f} % and {fmean(wide_turn):.1f} % up to 2π, where the best seed has {max(wide_turn):.1f} %",
        f"up to 2π: {fmean(seeds('2π, no dropout')):.1f} % without it",
        f"{fmean(seeds('2π, running norm, no dropout')):.1f} % without and {fmean(running):.1f} % with it",
        f"{fmean(seeds('2π, dropout by element')):.1f} %, one for the batch {fmean(turn):.1f} %",
        f"averages give {fmean(running):.1f} % up to 2π, where batch norm gives {fmean(turn):.1f} %",
        f"{fmean(seeds('running norm')):.1f} % with the recipe's phases, where it gives {fmean(recipe):.1f} %",
        f"gives {fmean(seeds('2π, slow norm without affine')):.1f} % up to 2π",
        f"TF32 products give {fmean(seeds('tf32', 256)):.1f} % and {fmean(seeds('tf32')):.1f} %, float32 gives",
        f"float32 gives {fmean(wide):.1f} % and {fmean(recipe):.1f} %",
        f"up to {max(max(values) - min(values) for values in others):.1f} points apart",
        f"from {min(half):.1f} % to {max(half):.1f} %",
    ):
        assert sentence in page


def test_smnist_settings_differ_as_the_page_says():
    assert all(len(seeds(name, order)) == 3 for name, (_, orders) in VARIANTS.items() for order in orders)
    recipe, turn, running = map(seeds, ("recipe", "phases up to 2π", "2π, running norm"))
    assert min(recipe) > max(turn + seeds("phases up to π"))
    assert min(seeds("2π, no dropout")) > max(turn)
    overlapping = [
        (running, turn),
        (running, seeds("2π, running norm, no dropout")),
        (seeds("running norm"), recipe),
        (seeds("2π, slow norm without affine"), turn),
        (seeds("phases up to 2π", 256), seeds("recipe", 256)),
    ]
    assert all(max(one) > min(other) and max(other) > min(one) for one, other in overlapping)


def test_smnist_without_compression_is_as_good_as_the_papers_own_code():
    assert all(fmean(seeds("recipe", order)) >= reference - 1 for order, reference in REFERENCE.items())


def test_steps_that_met_their_targets_still_do():
    assert step("smnist", 256, "tf32") <= 0.20
    assert step("smnist", 13, "float32") <= 0.15
    assert step("scifar", 384, "bfloat16") <= 8
    assert step("scifar", 57, "bfloat16") <= 5


def test_cuts_take_no_longer_than_they_may():
    assert cut("cut-cuda", "scifar") <= 500
    assert cut("cut-cpu", "smnist") <= 150
    assert result("cut-cpu").environment.threads == 1


def test_a_penalty_costs_less_than_a_step_at_the_sizes_of_the_paper():
    """There it made a step 16 times as long."""
    (recipe,) = rows("regulariser-cpu", order=256, max_phase=0.314)
    assert recipe["ratio"] < 2
    assert all(row["ratio_every"] < 2 for row in result("regulariser-cpu").rows)
    assert result("regulariser-cpu").environment.threads == 1
    (on_gpu, *_) = rows("regulariser-cuda", order=256, max_phase=0.314)
    assert on_gpu["norm_s"] <= 3e-3
    assert all(row["ratio_every"] < 2 for row in result("regulariser-cuda").rows)


def imdb(variant, column):
    found = [float(row[column]) for row in rows("imdb_mamba", variant=variant)]
    assert len(found) == 2, "two seeds of each"
    return fmean(found)


def test_gradient_steps_of_a_selective_layer_that_is_cut_take_a_quarter_of_the_time():
    """With as many states at the end as in the paper; what else training takes is said on the page."""
    whole, few = (imdb(variant, "steps_s") for variant in ("128 states", "baked to 12 at once"))
    assert whole / few >= 4
    steps = [1e3 * imdb(variant, "step_s") for variant in ("128 states", "baked to 12 at once")]
    page = " ".join((ROOT / "docs" / "mamba.md").read_text().split())
    assert f"takes {steps[0]:.1f} ms with 128 states and {steps[1]:.1f} ms with 12" in page
    parts = ("steps_s", "recording_s", "cuts_s")
    all_in = [sum(imdb(variant, part) for part in parts) for variant in ("128 states", "baked to 12 at once")]
    assert f"these 3000 are {all_in[0] / all_in[1]:.1f} times as fast" in page
    longer = {row["variant"]: sum(row[part] for part in parts) for row in result("imdb_mamba-24000").rows}
    times = longer["128 states"] / longer["baked to 12 at once"]
    assert times >= 4, "as in the paper, with everything counted"
    assert f"`--steps 24000 --size 12 --only whole --only once`) {times:.1f} times:" in page
    both = {row["order"]: row["both_s"] for row in result("selective-cuda").rows}
    assert (both[128] <= 30e-3, both[12] <= 3.5e-3) == (True, True)
    shares = [row["both_s"] / row["floor_both_s"] for row in result("selective-cuda").rows]
    assert f"together take {min(shares):.0f} to {max(shares):.0f} times that" in page


def test_a_selective_layer_as_small_as_the_papers_way_leaves_it_is_as_good_and_faster():
    page = " ".join((ROOT / "docs" / "mamba.md").read_text().split())
    paper, few = "paper: means, τ = 0.001", "baked to 4 at once"
    assert all(abs(imdb(way, "best") - imdb(paper, "best")) < 0.25 for way in (few, "baked to 4"))
    step = imdb(few, "step_s")
    assert f"a step takes {1e3 * step:.1f} ms, a fifth of 128 states." in page
    assert step / imdb("128 states", "step_s") == pytest.approx(1 / 5, abs=0.02)
    theirs = rows("imdb_mamba", variant=paper)
    said = [1e3 * row["step_s"] for row in theirs]
    assert f"a step takes {said[0]:.1f} ms with the first and {said[1]:.1f} ms with the second" in page
    extra = sorted(row["cuts_s"] + row["recording_s"] for row in theirs)
    assert f"{extra[0]:.0f} to {extra[1]:.0f} s in both seeds" in page
    assert f"its gradient steps alone take {theirs[0]['steps_s']:.0f} and {theirs[1]['steps_s']:.0f} s" in page
    first, second = rows("imdb_mamba", variant=few)
    assert (second["seed"], first["recording_s"] > 10 * second["recording_s"]) == (1, True)
    assert f"the cut took {second['cuts_s']:.2f} s and recording {second['recording_s']:.1f} s" in page
    parts = ("steps_s", "recording_s", "cuts_s")
    whole = sum(imdb("128 states", part) for part in parts)
    assert f"{whole / sum(second[part] for part in parts):.1f} times as fast as 128 states" in page


def test_cuts_of_trained_selective_layers_are_as_the_page_says():
    page = " ".join((ROOT / "docs" / "mamba_cuts.md").read_text().split())
    copies, digits = sorted({row["setting"] for row in result("selective_cuts").rows})

    def found(setting, way, rank, column="error"):
        return [row[column] for row in rows("selective_cuts", setting=setting, way=way, rank=rank)]

    def ratio(setting, rank):
        return fmean(found(setting, "baked, refitted", rank)) / fmean(found(setting, "baked", rank))

    off = sorted(100 * (1 - ratio(setting, rank)) for setting in (copies, digits) for rank in (16, 8, 4))
    assert f"takes off {off[0]:.0f} to {off[-1]:.0f} % of that" in page
    half = [100 * fmean(found(setting, "baked", 16)) for setting in (copies, digits)]
    assert f"{half[0]:.0f} and {half[1]:.0f} % at half, 8 % at a quarter" in page
    assert all(round(100 * fmean(found(setting, "baked", 8))) == 8 for setting in (copies, digits))

    def falls(setting, rank):
        before, after = (found(setting, "baked", rank, column) for column in ("full_accuracy", "accuracy"))
        return [100 * (one - other) for one, other in zip(before, after, strict=True)]

    mean = [fmean(falls(copies, rank)) for rank in (16, 8, 4)]
    said = f"falls in the mean by {mean[0]:.0f} points at half of the states, by {mean[1]:.0f} at a quarter,"
    assert f"{said} where one seed lost {max(falls(copies, 8)):.0f}, and by {mean[2]:.0f} at an eighth" in page
    assert f"on digits by {fmean(falls(digits, 4)):.0f} at an eighth" in page
    states = [100 * fmean(found(setting, "states", rank)) for setting in (copies, digits) for rank in (16, 8, 4)]
    assert f"change {min(states):.0f} to {max(states):.0f} %" in page
    later = rows("selective_cuts", setting=digits, way="baked", rank=16)
    below = sorted(100 * (row["full_later"] - row["accuracy_later"]) for row in later)
    assert f"by {below[0]:.0f} to {below[-1]:.0f} points" in page
    assert sum(row["accuracy_later"] < row["accuracy"] for row in later) == 2
    for setting, smaller in ((copies, True), (digits, False)):  # with Gramians of measured states
        pairs = [[fmean(found(setting, way, rank)) for way in ("baked, measured", "baked")] for rank in (16, 8, 4)]
        assert all((one < other) == smaller for one, other in pairs)


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
    page = " ".join((ROOT / "docs" / "results.md").read_text().split())
    orders, mine = ([smnist(f"τ = {tau}{way}", "order") for tau in (0.02, 0.04)] for way in (", paper's way", ""))
    assert (
        f"{mine[0]:.0f} and {mine[1]:.0f} states where the paper's way has {orders[0]:.0f} and {orders[1]:.0f}" in page
    )
    assert f"28 and 13 where its way gives {orders[0]:.0f} and {orders[1]:.0f} here" in page
    wide = [choice(f"τ = {tau}, paper's way, phases up to 2π", "order") for tau in (0.02, 0.04)]
    best = [choice(f"τ = {tau}, paper's way, phases up to 2π") for tau in (0.02, 0.04)]
    said = (
        f"its way ends with {wide[0]:.0f} and {wide[1]:.0f} states with the one seed that was trained, at {best[0]:.1f}"
    )
    assert f"{said} and {best[1]:.1f}, **more than gentle cuts to 28 reach" in page
    assert best[0] > max(float(row["best"]) for row in rows("results-smnist", variant="gently to 28"))


def test_penalties_and_a_teacher_do_on_smnist_what_the_page_says():
    light = "Σσ penalty of 0.0001, then cut to 28"
    assert smnist("Σσ penalty, then cut to 28") == pytest.approx(20, abs=5)
    assert smnist(light) > smnist("gently to 28")
    assert smnist(light) > max(float(row["best"]) for row in rows("results-smnist", variant="gently to 28"))
    alike = rows("results-smnist", variant="gently to 28", together=12)
    ratio = smnist(light, "steps_s") / fmean(float(row["steps_s"]) for row in alike)
    page = " ".join((ROOT / "docs" / "results.md").read_text().split())
    assert f"its gradient steps take {ratio:.1f} times as long" in page
    assert smnist("28 states, taught") == pytest.approx(smnist("28 states"), abs=0.5)


def test_a_rate_that_falls_meets_the_aims_on_smnist():
    def falling(variant):
        assert len(rows("results-smnist-falling", variant=variant)) == 5, "five seeds of each"
        return smnist(variant, name="results-smnist-falling")

    few, fewer = falling("gently to 28"), falling("gently to 13")
    assert (few >= 97.2, fewer >= 96.8) == (True, True)
    page = " ".join((ROOT / "docs" / "results.md").read_text().split())
    assert f"above the paper's compressed models by {few - 96.9:.1f} and {fewer - 95.9:.1f} points" in page
    assert f"from the start reach {falling('28 states'):.1f} and {falling('13 states'):.1f} too" in page
    assert fewer > 96.9
    assert falling("256 states") - fewer < 0.5
    assert few - falling("28 states") == pytest.approx(1 / 3, abs=0.1)
    assert fewer - falling("13 states") == pytest.approx(1, abs=0.1)
    readme = " ".join((ROOT / "README.md").read_text().split())
    said = f"with 28 states {few:.1f} % and with 13 states {fewer:.1f} %, where 256 reach {falling('256 states'):.1f} %"
    assert said in readme
    assert f"from the start {falling('28 states'):.1f} and {falling('13 states'):.1f}." in readme
    plain = [smnist(f"gently to {order}") for order in (28, 13)]
    assert f"with that rate we have {plain[0]:.1f} and {plain[1]:.1f}" in readme


def test_choices_do_on_smnist_what_the_page_says():
    page = " ".join((ROOT / "docs" / "smnist_choices.md").read_text().split())

    def falling(variant):
        return choice(variant, name="results-smnist-falling")

    def both(way):
        return [choice(f"gently to {order}, falling, {way}") for order in (28, 13)]

    ours, small = [falling(f"gently to {order}") for order in (28, 13)], falling("28 states")
    columns = ("256 states", "28 states", "gently to 28", "gently to 13")
    for label, name in (("constant 4e-4, the paper's", "results-smnist"), ("falling", "results-smnist-falling")):
        assert " | ".join([f"| {label}", *(f"{choice(one, name=name):.1f}" for one in columns)]) in page
    before, constant = choice("28 states", name="results-smnist"), choice("28 states, constant 4e-3")
    assert f"Of the {small - before:.1f} points" in page
    assert (
        f"from {before:.1f} to {small:.1f}, a constant 4e-3 in the place of 4e-4 has {constant - before:.1f};" in page
    )
    late, whole = both("cuts from a quarter on"), falling("256 states")
    assert f"28 states reach {late[0]:.1f}, more than 256 that are never cut ({whole:.1f} with this seed)" in page
    assert late[0] > whole
    assert abs(late[1] - ours[1]) < 0.1
    undropped = both("no dropout")
    assert f"**Without dropout** 13 states have {undropped[1]:.1f} and 28 have {undropped[0]:.1f}" in page
    white, paper = both("Gramians of white noise"), both("cut in the paper's way")
    said = f"{white[0]:.1f} and {white[1]:.1f}, and in the paper's way (no folding, moments sliced) {paper[0]:.1f} and "
    assert said + f"{paper[1]:.1f}, against {ours[0]:.1f} and {ours[1]:.1f}." in page
    wide = [f"τ = {tau}, paper's way, phases up to 2π" for tau in (0.02, 0.04)]
    assert f"Accuracy is {choice(wide[0]):.1f} and {choice(wide[1]):.1f}; the paper has 96.9 and 95.9." in page
    narrow = [choice(f"τ = {tau}, paper's way", "order", "results-smnist") for tau in (0.02, 0.04)]
    assert f"and {narrow[0]:.0f} and {narrow[1]:.0f} with this seed" in page
    theirs, gently = (choice(name, name="results-smnist") for name in ("τ = 0.02, paper's way", "gently to 28"))
    said = f"{theirs:.1f} with {narrow[0]:.0f}, and than gentle cuts to 28 at the same rate, {gently:.1f}."
    assert said in page
    assert choice("256 states, phases up to 2π") == pytest.approx(choice("256 states", name="results-smnist"), abs=0.1)


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
    page = " ".join((ROOT / "docs" / "smnist_choices.md").read_text().split())
    low, middle, high = sorted(smallest)
    assert f"{low:.1f} and {middle:.1f} with two seeds and {high:.1f} with the third" in page
    assert [row["machine"] for row in rows("results-smnist-selection", variant=names[2])][2] != "NVIDIA H200"


def test_scifar_is_as_accurate_and_as_fast_as_the_page_says():
    (whole,), (small,), (few,) = (
        *(rows("results-scifar", variant=name) for name in ("384 states", "57 states", "four cuts to 57")),
    )
    assert {row["steps"] for row in (whole, small, few)} == {40_000}
    page = " ".join((ROOT / "docs" / "results.md").read_text().split())
    share = f"{100 * few['seconds'] / whole['seconds']:.0f} % of the time of 384"
    assert f"{few['best'] - small['best']:.1f} points better than with 57 from the start" in page
    assert f"{whole['best'] - few['best']:.1f} below the one that keeps 384" in page
    assert share in page
    steps, more = few["steps_s"] / whole["steps_s"], few["seconds"] / small["seconds"] - 1
    assert f"gradient steps alone {100 * steps:.0f} % too, and {100 * more:.0f} % more than 57 states from the" in page
    said = f"The cut model is {84.4 - few['best']:.1f} points below its, with less than a quarter of the steps"
    assert f"{said}, the whole one {86.5 - whole['best']:.1f} and the small one {78.2 - small['best']:.1f}" in page
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"57 in the warm-up {few['best']:.1f} %, in {share} states, which reach {whole['best']:.1f} %" in readme
    assert f"with 57 from the start {small['best']:.1f} %" in readme


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_results_name_a_machine_and_a_clean_commit(path):
    environment = Measurement.read(path).environment
    assert environment.processor
    assert len(environment.commit) == 12


@pytest.mark.parametrize(
    "name",
    [
        *(
            "reduction-cuda",
            "step-cuda",
            "cut-cuda",
            "growth-cuda",
            "smnist_settings",
            "imdb_mamba",
            "imdb_mamba-24000",
        ),
        *("results-smnist", "results-smnist-falling", "results-smnist-choices", "results-smnist-selection"),
        "results-scifar",
    ],
)
def test_results_of_a_gpu_name_it(name):
    assert "H200" in result(name).environment.accelerator


def test_reductions_take_no_longer_than_they_may():
    def reduction(order, rank, column="reduction_s"):
        return milliseconds("reduction-cpu", column, order=order, rank=rank, width=8, system="initial")

    assert result("reduction-cpu").environment.threads == 1
    assert reduction(256, 64) <= 40
    assert reduction(512, 128) <= 250
    assert reduction(256, 64, "hankel_s") <= 15
    for order in (256, 512, 1024):
        assert reduction(order, order // 4, "speedup") >= 4e3
    assert milliseconds("reduction-cuda", "reduction_s", order=384, rank=161, width=512, system="initial") <= 350


def test_the_cost_rule_picks_a_path_that_was_measured_fastest_or_nearly():
    for row in result("scan-cpu").rows:
        times = {name.removesuffix("_s").upper(): float(row[name]) for name in row if name.endswith("_s")}
        assert times[row["chosen"]] <= 1.25 * min(times.values()), row
