"""Results of studies shown: tables beside the paper, points against orders and times, every seed of choices."""

from contextlib import contextmanager
from dataclasses import replace

from compressm_lab.experiments.rows import joined
from compressm_lab.reports import measurements
from compressm_lab.reports import panels as canvas
from compressm_lab.reports.measurements import draw, grids
from compressm_lab.runs.measurement import Measurement
from tests.lab.experiments.result_rows import row


def test_the_table_has_means_and_spreads_beside_the_paper():
    rows = [row("gently to 13", 0), row("gently to 13", 1, best=96.0), row("τ = 0.04", 0, order=11.0)]
    (table,) = grids(Measurement("results-smnist", "t", 1, rows))
    assert table.rows[0][:7] == ("gently to 13", "256 → 13", "2", "95.5 ± 0.7", "", "94.0", "95.9 at 13")
    assert table.rows[1][1] == "256 → 11"


def test_the_top_three_seeds_by_test_stand_beside_those_of_the_paper():
    rows = [row("256 states", seed, best=best) for seed, best in enumerate((96.0, 97.0, 93.0, 98.0))]
    (table,) = grids(Measurement("results-smnist", "t", 1, rows))
    assert table.rows[0][3:5] == ("96.0 ± 2.2", "97.0")
    assert table.rows[0][6] == "97.3 at 256"
    for found, validation in zip(rows, (97.0, 96.0, 98.0, 90.0), strict=True):
        found["validation"] = validation
    (table,) = grids(Measurement("results-smnist", "t", 1, rows))
    assert table.rows[0][4] == "97.0"  # the first three are best by validation, which does not count
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
    with looked_at(monkeypatch, measurements) as panels:
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
    with looked_at(monkeypatch, measurements) as panels:
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

    monkeypatch.setattr(measurements, "picture", kept)
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
        *("cut gently (1 seed)", "cut with τ (1 seed)", "cut with τ, in the paper's way (1 seed)", "from the start"),
        *("hollow: the paper, its best three seeds", "taught by the whole model (1 seed) (far below: 22 %)"),
    ]


def test_the_caption_says_how_many_trainings_shared_the_device():
    (table,) = grids(Measurement("results-smnist", "t", 1, [row("256 states", 0, together=9)]))
    assert "up to 9 trainings at a time" in table.caption
    (table,) = grids(Measurement("results-smnist", "t", 1, [row("256 states", 0, together=1)]))
    assert "one training at a time" in table.caption
    (table,) = grids(Measurement("results-smnist", "t", 1, [row("256 states", 0, together=1), row("13 states", 0)]))
    assert "how many trainings ran at a time is not known of all" in table.caption


def test_what_another_machine_trained_has_no_part_in_the_times():
    there = Measurement("results-smnist", "t", 1, [row("256 states", 0, seconds=1.0), row("13 states", 0)])
    device = replace(there.environment, accelerator="NVIDIA H200")
    there = replace(there, environment=device)
    here = [row("256 states", 1, seconds=99.0, machine="a CPU"), row("τ = 0.04", 0, machine="a CPU")]
    processor = replace(device, accelerator=None, processor="a CPU")
    found = joined([there, Measurement("results-smnist", "t", 1, here[:1], processor)])
    assert found.environment == device
    (table,) = grids(replace(found, rows=[*found.rows, here[1]]))
    assert [cells[2] for cells in table.rows] == ["2", "1", "1"]
    assert [cells[-1] for cells in table.rows] == ["1 s", "3 s", ""]
    assert "without those of 256 states with seed 1 on a CPU, τ = 0.04 with seed 0 on a CPU" in table.caption
    assert grids(there)[0].caption.count("without") == 0
