"""The study of small models runs the command line with what each variant says, and tells seeds apart."""

import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from compressm.experiments import results
from compressm.experiments.catalogue import find_recipe
from compressm.experiments.outcomes import Job, joined
from compressm.experiments.results import TASKS, jobs
from compressm.experiments.trainings import Training
from compressm.reports import canvas, result_charts, result_strips
from compressm.reports.pictures import draw
from compressm.reports.tables import grids
from compressm.runs.measurement import Measurement
from compressm.training import Plan, train
from tests.training.tiny import digits, recipe


def recipe_of(task, name, steps=None):
    (job,) = jobs(task, Path("folder"), [name], range(1), steps)
    training = job.training
    uncut = ("compression=null",) if "--baseline" in training.options else ()
    order = training.options[training.options.index("--order") + 1]
    return find_recipe(training.recipe, (*training.settings, *uncut, f"model.order={order}"))


def test_variants_of_smnist_are_the_recipe_cut_in_their_ways():
    plain = find_recipe("smnist")
    whole, few = recipe_of("smnist", "whole"), recipe_of("smnist", "small-13")
    assert (whole.compression, whole.model, few.model.order) == (None, plain.model, 13)
    ours, paper, gentle = (recipe_of("smnist", name) for name in ("tau-04", "paper-04", "to-13"))
    assert (ours.training.steps, ours.training.evaluate_every, ours.training.precision) == (200_000, 5_000, "tf32")
    assert (ours.compression.tau, ours.compression.gramian, ours.compression.fold) == (0.04, "measured", True)
    assert (paper.compression.gramian, paper.compression.fold, paper.compression.moments) == (
        *("white_noise", False, "slice"),
    )
    assert Plan.of(ours).cuts == list(range(5_000, 150_001, 5_000))
    assert Plan.of(paper).cuts[-1] == 195_000
    assert (gentle.compression.rho, gentle.compression.at_least, gentle.compression.gate) == (0.9, 13, 1.0)
    assert Plan.of(gentle).cuts[:2] == [2_000, 4_000]
    assert Plan.of(recipe_of("smnist", "to-13", 400)).cuts[:2] == [4, 8]


def test_four_cuts_of_scifar_lead_to_57_states():
    recipe, order = recipe_of("scifar", "to-57"), 384
    assert [order := int(recipe.compression.rho * order + 0.5) for _ in range(4)][-1] == 57
    assert len(Plan.of(recipe).cuts) == 4


def test_a_penalty_and_a_teacher_are_tried_once():
    everything = jobs("smnist", Path("folder"), TASKS["smnist"].variants, range(3, 5))
    once = [job for job in everything if "Σσ penalty" in job.variant or job.variant == "28 states, taught"]
    assert [job.seed for job in once] == [3, 3, 3]
    penalised, taught = recipe_of("smnist", "penalty-28"), recipe_of("smnist", "taught-28")
    assert (penalised.model.order, penalised.truncation.orders, penalised.regulariser.every) == (256, (28,), 20)
    lighter = recipe_of("smnist", "penalty-0.0001")
    assert (penalised.regulariser.beta, lighter.regulariser.beta, lighter.truncation.orders) == (0.1, 1e-4, (28,))
    assert (taught.model.order, taught.training.steps, taught.compression) == (28, 200_000, None)
    (whole,) = jobs("smnist", Path("folder"), ["whole"], range(1))
    assert Path(taught.distillation.teacher) == whole.training.folder.absolute()
    alone, after = results.Asked("smnist", Path("f.json"), everything, [], frozenset()).stages
    assert [job.variant for job in after] == ["28 states, taught"]
    assert len(alone) == len(everything) - 1


def test_what_is_kept_differs_alone_and_ends_at_32():
    found = [recipe_of("smnist-selection", name) for name in ("largest", "random", "smallest")]
    assert [recipe.compression.select for recipe in found] == ["largest", "random", "smallest"]
    assert all(Plan.of(recipe).cuts == [5_000, 10_000, 15_000, 20_000] for recipe in found)
    order = 256
    assert [order := int(found[0].compression.rho * order + 0.5) for _ in range(4)][-1] == 32
    assert Plan.of(recipe_of("smnist-selection", "largest", 400)).cuts == [10, 20, 30, 40]
    assert Plan.of(recipe_of("smnist-selection", "largest", 30)).cuts == [1, 2, 3, 4]


def test_a_rate_that_falls_is_all_that_differs():
    plain, falling = recipe_of("smnist", "to-28"), recipe_of("smnist-falling", "to-28")
    assert (falling.compression, falling.model) == (plain.compression, plain.model)
    assert falling.training.rate(4_000) == pytest.approx(4e-3)
    assert falling.training.rate(200_000) < 1e-6
    both = [jobs(task, Path("f"), ["whole"], range(1))[0].training.folder for task in ("smnist", "smnist-falling")]
    assert both[0] != both[1]


def test_choices_differ_in_what_their_names_say():
    late = recipe_of("smnist-choices", "late-falling-28")
    assert Plan.of(late).cuts[:2] == [50_000, 52_000]
    plain = recipe_of("smnist-falling", "to-28")
    assert late.training == plain.training
    white, paper = (recipe_of("smnist-choices", name) for name in ("white-28", "paper-to-28"))
    assert (white.training, white.compression.gramian, white.compression.fold) == (plain.training, "white_noise", True)
    assert (paper.training, paper.compression.fold, paper.compression.moments) == (plain.training, False, "slice")
    assert Plan.of(paper).cuts == Plan.of(plain).cuts
    circle = recipe_of("smnist-choices", "circle-02")
    assert circle.compression == recipe_of("smnist", "paper-02").compression
    assert circle.model.layer_options["max_phase"] == pytest.approx(6.2832, abs=1e-4)
    undropped, constant = (recipe_of("smnist-choices", name) for name in ("undropped", "constant-28"))
    assert (undropped.model.dropout, undropped.compression, undropped.training) == (0.0, None, plain.training)
    assert (constant.training.schedule, constant.training.learning_rate) == ("constant", 4e-3)
    assert (constant.compression, constant.model.order) == (None, 28)


@pytest.mark.parametrize("task", TASKS)
def test_labels_and_folders_are_one_for_each(task):
    wanted = jobs(task, Path("f"), TASKS[task].variants, range(2))
    once = sum(variant.once for variant in TASKS[task].variants.values())
    assert len({job.training.folder for job in wanted}) == len(wanted) == 2 * len(TASKS[task].variants) - once
    assert len({(job.variant, job.seed) for job in wanted}) == len(wanted)


def test_an_unknown_variant_is_named(capsys):
    with pytest.raises(SystemExit):
        results.main(["smnist", "--only", "to-14"])
    assert "--only to-14: expected one of whole, small-28" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        results.main(["smnist", "smnist-selection", "--only", "small-28"])
    said = " ".join(capsys.readouterr().err.split())
    assert "--only small-28: expected one of largest, random, smallest, small-32, the variants of smnist-select" in said


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seeds", "0"), "'0' is not an integer of at least 1"),
        (("--processes", "0"), "'0' is not an integer of at least 1"),
        (("--steps", "-5"), "'-5' is not an integer of at least 1"),
        (("--add", "gone.json"), "gone.json: no such file"),
        (("--add", str(RESULTS / "demo.json")), "--add of a result named demo: expected results-smnist"),
    ],
)
def test_bad_options_are_refused_before_anything_is_trained(monkeypatch, capsys, options, said):
    monkeypatch.setattr(results, "train", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(SystemExit) as end:
        results.main(["smnist", "--only", "small-13", *options])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_results_of_another_task_cannot_be_added(monkeypatch, capsys):
    monkeypatch.setattr(results, "train", lambda *_, **__: pytest.fail("trained"))
    falling = str(RESULTS / "results-smnist-falling.json")
    with pytest.raises(SystemExit):
        results.main(["smnist", "smnist-choices", "--add", falling])
    said = " ".join(capsys.readouterr().err.split())
    assert "--add of a result named results-smnist-falling: expected results-smnist or results-smnist-choices" in said


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(recipe("task.name=digits", "training.steps=9"), digits(), folder)
    return folder


def test_several_tasks_are_trained_in_one_pool_and_written_each(tmp_path, monkeypatch, capsys, trained):
    def wanted(task, out, names, seeds, steps):
        """One that is trained of the first; of the second two that are not, one of them a pupil."""
        if task == "smnist-selection":
            return [Job("32 states", 0, Training("smnist", trained))]
        return [Job(name, 0, Training("smnist", out / name)) for name in ("28 states, taught", "256 states")]

    pools = []
    monkeypatch.setattr(results, "jobs", wanted)
    monkeypatch.setattr(results, "train", lambda pool, **options: pools.append([job.variant for job in pool]))
    given = ["smnist-selection", "smnist", "smnist", "--out", str(tmp_path), "--steps", "9"]
    with pytest.raises(SystemExit, match="2 of 3 trainings are not finished: 28 states, taught, seed 0; 256 states"):
        results.main(given)
    assert pools == [["32 states", "256 states"], ["28 states, taught"]]
    found, gone = tmp_path / "results-smnist-selection.json", tmp_path / "results-smnist.json"
    assert [row["variant"] for row in Measurement.read(found).rows] == ["32 states"]
    assert f"no training of smnist was finished: {gone} stays as it is" in capsys.readouterr().out
    assert not gone.exists()
    found.unlink()
    with pytest.raises(SystemExit, match="2 of 3 trainings are not finished"):
        results.main([*given, "--only-collect"])
    assert len(pools) == 2
    assert found.exists()


def test_a_run_that_lost_its_evaluations_is_named(tmp_path, trained):
    copied = shutil.copytree(trained, tmp_path / "copied")
    (copied / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit, match="copied is finished, but has no accuracy on test: move it away"):
        results.collect("smnist", [Job("256 states", 0, Training("smnist", copied))], together=1)


def test_what_was_done_before_keeps_how_many_were_trained_at_a_time():
    earlier = Measurement("results-smnist", "t", 1, [row("256 states", 0, together=10), row("256 states", 1)])
    found = Measurement("results-smnist", "t", 1, [row("256 states", seed, together=3) for seed in range(3)])
    results._keep_company(found, frozenset({("256 states", 0), ("256 states", 1)}), [earlier])
    assert [one["together"] for one in found.rows] == [10, 3, 3]


def test_a_variant_that_is_asked_for_twice_is_trained_once():
    assert len(jobs("smnist", Path("f"), ["small-13", "whole", "small-13"], range(1))) == 2


def row(variant, seed, **values):
    common = {"steps": 9, "initial_order": 256.0, "order": 13.0, "best": 95.0, "last": 94.0}
    times = {"steps_s": 2.0, "seconds": 3.0, "cuts_s": 0.1, "step_s": 0.001, "recording_s": 0.5}
    return {"variant": variant, "seed": seed} | common | times | values


def test_the_table_has_means_and_spreads_beside_the_paper():
    rows = [row("gently to 13", 0), row("gently to 13", 1, best=96.0), row("τ = 0.04", 0, order=11.0)]
    (table,) = grids(Measurement("results-smnist", "t", 1, rows))
    assert table.rows[0][:7] == ("gently to 13", "256 → 13", "2", "95.5 ± 0.7", "", "94.0", "95.9 at 13")
    assert table.rows[1][1] == "256 → 11"


def test_the_best_three_seeds_stand_beside_the_papers_best_three():
    rows = [row("256 states", seed, best=best) for seed, best in enumerate((96.0, 97.0, 93.0, 98.0))]
    (table,) = grids(Measurement("results-smnist", "t", 1, rows))
    assert table.rows[0][3:5] == ("96.0 ± 2.2", "97.0")
    assert table.rows[0][6] == "97.3 at 256"
    for found, validation in zip(rows, (97.0, 96.0, 98.0, 90.0), strict=True):
        found["validation"] = validation
    (table,) = grids(Measurement("results-smnist", "t", 1, rows))
    assert table.rows[0][4] == "95.3"  # of the first three, best by validation
    (table,) = grids(Measurement("results-scifar", "t", 1, [row("four cuts to 57", 0), row("another", 0)]))
    assert [cells[6] for cells in table.rows] == ["84.4 at 57", ""]


@contextmanager
def looked_at(monkeypatch, module):
    """The axes of the picture that the module draws, before they are gone."""
    seen = []

    @contextmanager
    def kept(path, **options):
        with canvas.picture(path, **options) as figure:
            yield figure
            seen.extend(
                {
                    "points": [(x, y) for line in panel.lines for x, y in zip(*line.get_data(), strict=True)],
                    "words": [text.get_text() for text in panel.texts],
                    "ticks": [label.get_text() for label in panel.get_yticklabels()],
                    "axes": (panel.get_xlabel(), panel.get_ylabel()),
                }
                for panel in figure.axes
            )

    monkeypatch.setattr(module, "picture", kept)
    yield seen


def test_times_are_drawn_where_trainings_had_the_machine_to_themselves(tmp_path, monkeypatch):
    alone = [row("384 states", 0, together=1, seconds=9.0, best=85.0), row("57 states", 0, together=1, best=74.0)]
    with looked_at(monkeypatch, result_charts) as panels:
        draw(Measurement("results-scifar", "t", 1, alone), tmp_path / "one.png")
        assert [panel["axes"][0] for panel in panels] == ["states at the end", "whole run, seconds"]
        assert sorted(panels[1]["points"]) == [(3.0, 74.0), (9.0, 85.0)]
        assert panels[1]["words"] == ["384 states", "57 states"]
        panels.clear()
        draw(Measurement("results-scifar", "t", 1, [one | {"together": 2} for one in alone]), tmp_path / "two.png")
        assert len(panels) == 1


def test_choices_stand_under_each_other_with_every_seed(tmp_path, monkeypatch):
    rows = [row("largest σ kept", seed, best=best) for seed, best in enumerate((96.0, 96.5))]
    rows += [row("smallest σ kept", seed, best=best) for seed, best in enumerate((92.0, 29.0))] + [row("32 states", 0)]
    with looked_at(monkeypatch, result_strips) as panels:
        draw(Measurement("results-smnist-selection", "t", 1, rows), tmp_path / "strips.png")
        (panel,) = panels
        assert panel["ticks"] == ["largest σ kept (2 seeds)", "smallest σ kept (2 seeds)", "32 states (1 seed)"]
        seeds, mean = [(96.0, 0), (96.5, 0), (92.0, 1), (95.0, 2)], (96.25, 0)
        assert sorted(panel["points"]) == sorted([*seeds, mean])
        assert panel["words"] == ["← 29.0"]
        panels.clear()
        draw(Measurement("results-smnist-choices", "t", 1, [row("256 states", 0)]), tmp_path / "one.png")
        assert panels[0]["ticks"] == ["256 states"]


def test_the_picture_has_every_variant_with_its_spread_and_the_papers_points(tmp_path, monkeypatch):
    drawn = {}

    @contextmanager
    def kept(path, **options):
        with canvas.picture(path, **options) as figure:
            yield figure
            (panel,) = figure.axes
            drawn["lines"] = [(list(line.get_xdata()), list(line.get_ydata()), line) for line in panel.lines]
            drawn["legend"] = [text.get_text() for text in panel.get_legend().get_texts()]

    monkeypatch.setattr(result_charts, "picture", kept)
    rows = [row("28 states", 0, order=28.0), row("28 states", 1, order=28.0, best=96.0), row("gently to 13", 0)]
    rows += [row("τ = 0.04", 0, order=9.0), row("τ = 0.04, paper's way", 0, order=11.0)]
    rows += [row("28 states, taught", 0, best=22.0)]
    path = draw(Measurement("results-smnist", "t", 1, rows), tmp_path / "results.png")
    assert path.stat().st_size > 10_000
    points = {(x, y) for xs, ys, _ in drawn["lines"] for x, y in zip(xs, ys, strict=True)}
    assert {(28.0, 95.5), (13.0, 95.0), (9.0, 95.0), (11.0, 95.0)} <= points
    hollow = {
        *((x, y) for xs, ys, line in drawn["lines"] if line.get_mfc() == "white" for x, y in zip(xs, ys, strict=True))
    }
    assert hollow == {(27.6, 96.0), (12.7, 95.9)}
    assert min(y for _, y in points) > 90
    assert sorted(drawn["legend"]) == [
        *("cut gently", "cut with τ", "cut with τ, in the paper's way", "from the start"),
        *("hollow: the paper, its best three seeds", "taught by the whole model (far below: 22 %)"),
    ]


def test_the_caption_says_how_many_trainings_shared_the_device():
    (table,) = grids(Measurement("results-smnist", "t", 1, [row("256 states", 0, together=9)]))
    assert "up to 9 trainings at a time" in table.caption
    (table,) = grids(Measurement("results-smnist", "t", 1, [row("256 states", 0)]))
    assert "one training at a time" in table.caption


def test_what_another_machine_trained_has_no_part_in_the_times():
    there = Measurement("results-smnist", "t", 1, [row("256 states", 0, seconds=1.0), row("13 states", 0)])
    device = replace(there.environment, accelerator="NVIDIA H200")
    there = replace(there, environment=device)
    here = [row("256 states", 1, seconds=99.0, machine="a CPU"), row("τ = 0.04", 0, machine="a CPU")]
    processor = replace(device, accelerator=None, processor="a CPU")
    found = joined(Measurement("results-smnist", "t", 1, here[:1], processor), [there])
    assert found.environment == device
    (table,) = grids(replace(found, rows=[*found.rows, here[1]]))
    assert [cells[2] for cells in table.rows] == ["2", "1", "1"]
    assert [cells[-1] for cells in table.rows] == ["1 s", "3 s", ""]
    assert "without those of 256 states with seed 1 on a CPU, τ = 0.04 with seed 0 on a CPU" in table.caption
    assert grids(there)[0].caption.count("without") == 0
