"""Numbers in README and docs are those of the committed result files, and those meet their targets."""

import importlib.util
from statistics import fmean

import pytest

from compressm_lab.reports.study_tables import REFERENCE
from compressm_lab.runs.measurement import Measurement
from smnist_settings import VARIANTS
from tests.docs.measured import ROOT, result, rows, says, tenths, whole


def milliseconds(name, column, **wanted):
    (row,) = rows(name, **wanted)
    return 1e3 * float(row[column])


def step(task, order, precision):
    return milliseconds("step-cuda", "step_s", task=task, order=order, precision=precision)


def loop(model, order, way):
    return milliseconds("loop-cuda", "step_s", model=model, order=order, way=way)


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


def test_a_cut_pays_in_loops_that_are_captured_or_compiled_with_graphs():
    ways = ("captured", "reduce_overhead")
    assert says("docs/speed.md", *tenths(*(loop("scifar", order, way) for order in (57, 384) for way in ways)))
    for way in ways:
        assert loop("scifar", 57, way) < 0.72 * loop("scifar", 384, way)
        assert loop("mamba", 16, way) == pytest.approx(0.25 * loop("mamba", 128, way), rel=0.08)
    plain = tenths(*(loop("smnist", order, "plain_reduce_overhead") for order in (13, 256)))
    captured = [f"{loop('smnist', order, 'captured'):.2g}" for order in (13, 256)]
    assert says("docs/speed.md", *plain, *captured)


def test_fewer_kernels_make_the_steps_of_smnist_as_short_as_the_page_says():
    def short(order):
        return milliseconds("step-smnist-cuda", "step_s", order=order)

    found = [f"{short(order):.3f}" for order in (256, 13)]
    assert says("docs/speed.md", *found, *(f"{step('smnist', order, 'tf32'):.3f}" for order in (256, 13)), "256", "13")
    assert short(256) < 0.15
    assert short(13) < 0.1
    ways = [
        milliseconds("loop-smnist-cuda", "step_s", order=n, way=way) for way in ("captured", "eager") for n in (13, 256)
    ]
    assert says("docs/speed.md", *(f"{found:.2f}" for found in ways[:2]), *tenths(*ways[2:]))


def test_on_a_cpu_an_eager_loop_is_faster_than_plain_pytorch_and_faster_after_a_cut():
    def on_cpu(model, order, way="eager"):
        return milliseconds("loop-cpu", "step_s", model=model, order=order, way=way)

    sizes = {"smnist": (256, 13), "mamba": (64, 16)}
    shares = [on_cpu(model, few) / on_cpu(model, many) for model, (many, few) in sizes.items()]
    plain = {m: [on_cpu(m, n, "plain") / on_cpu(m, n) for n in sizes[m]] for m in sizes}
    module = [on_cpu("mamba", n, "transformers") / on_cpu("mamba", n) for n in sizes["mamba"]]
    many = f"{plain['smnist'][0]:.0f}"
    numbers = (*tenths(*plain["mamba"], plain["smnist"][1], *module), many)
    assert says("docs/speed.md", *(f"{share:.2f}" for share in shares), *numbers)
    for model, orders in sizes.items():
        assert all(on_cpu(model, order, "compiled") > 0.95 * on_cpu(model, order) for order in orders)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_the_measured_ones(page):
    text = page.read_text()
    assert script().filled(text) == text


def test_figures_in_the_readme_are_the_measured_ones():
    steps = [step("scifar", order, "bfloat16") for order in (384, 57)]
    assert says("README.md", "384", "57", *tenths(*steps))
    cuts = [cut("cut-cuda", "scifar"), cut("cut-cpu", "smnist")]
    assert says("README.md", "384", "161", *whole(*cuts), "256", "28")
    before = fmean(row["full_accuracy"] for row in rows("one_shot", setting="two blocks, 64 steps"))
    assert says("README.md", *(f"{found:.3f}" for found in (before, accuracy("paper"), accuracy("measured"))))


def test_the_gpu_figure_of_a_reduction_is_the_measured_one():
    wanted = {"order": 384, "rank": 161, "width": 512, "system": "initial"}
    assert says("docs/speed.md", "161", *whole(milliseconds("reduction-cuda", "reduction_s", **wanted)))


def token(column, **wanted):
    return milliseconds("stream-cpu", column, **wanted)


def test_streams_on_one_core_keep_their_promises():
    gains = []
    for batch in (1, 8):
        large, small = ({"layer": "LRU", "order": order, "batch": batch} for order in (256, 28))
        assert token("step_s", **small) > 10 * token("stream_s", **small)
        gains.append(token("stream_s", **large) / token("stream_s", **small))
    assert gains[1] >= 1.8
    assert says("docs/speed.md", *tenths(gains[1], gains[0]))


def seeds(variant, order=28):
    return [(row["before"] + row["last"]) / 2 for row in rows("smnist_settings", variant=variant, order=order)]


def test_figures_of_the_smnist_page_are_the_measured_ones():
    recipe, turn, half, running = map(seeds, ("recipe", "phases up to 2π", "phases up to π", "2π, running norm"))
    wide, wide_turn = seeds("recipe", 256), seeds("phases up to 2π", 256)
    above = [fmean(values) - REFERENCE[order] for values, order in ((wide, 256), (recipe, 28))]
    others = [seeds(name) for name in VARIANTS if name != "phases up to π"]
    still, plain = seeds("2π, running norm, no dropout"), seeds("2π, no dropout")
    for numbers in (
        above,
        (fmean(running), REFERENCE[28] - fmean(running), max(running)),
        (*map(fmean, (recipe, turn, half)), *map(fmean, (wide, wide_turn)), max(wide_turn)),
        (fmean(plain), fmean(still), fmean(running)),
        (fmean(seeds("2π, dropout by element")), fmean(turn)),
        (*map(fmean, (running, turn, seeds("running norm"), recipe)), fmean(seeds("2π, slow norm without affine"))),
        (fmean(seeds("tf32", 256)), fmean(seeds("tf32")), fmean(wide), fmean(recipe)),
        (max(max(values) - min(values) for values in others), min(half), max(half)),
    ):
        assert says("docs/smnist.md", *tenths(*numbers)), numbers


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


def test_every_killed_training_resumes_bit_for_bit():
    killed = result("kills").rows
    trainings = {row["training"]: row["guard"] for row in killed}
    assert len(trainings) == 100
    assert sum(guard != "none" for guard in trainings.values()) == 80
    assert {"cut", "snapshot", "checkpoint", "steps", "model"} <= {row["phase"] for row in killed}
    assert [row for row in killed if row["differs"]] == []


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


@pytest.mark.parametrize(
    ("numbers", "found"), [(("1.5", "20"), True), (("1.5", "1.5"), False), (("20", "7"), False), (("2",), False)]
)
def test_numbers_are_looked_for_in_one_paragraph_whatever_its_words(tmp_path, numbers, found):
    page = tmp_path / "page.md"
    page.write_text("It takes 1.5 s\nwith 20 states.\n\n- 7 in the next item\n| 3 | 4 |\n| 5 | 6 |\n")
    assert says(page, *numbers) == found
    assert says(page, "3", "4")
    assert not says(page, "4", "5")
