"""The picture and the summary of the study of automatic cuts."""

from compressm_lab.reports.automatic_tables import AUTOMATIC, summary_grid
from compressm_lab.reports.measurements import draw_fronts
from compressm_lab.runs.measurement import Measurement

WAYS = {"64 states": (64, 90.0), "automatic, 1 %": (8, 88.0), "gently to 8": (8, 89.0), "8 states": (8, 85.0)}


def measured(name):
    rows = [
        {"variant": way, "seed": seed, "steps": 5, "initial_order": 64, "order": order, "best": best + seed}
        | dict.fromkeys(("last", "steps_s", "seconds", "cuts_s", "step_s"), 1.0)
        for way, (order, best) in WAYS.items()
        for seed in range(2)
    ]
    return Measurement(name, f"{name}: ways", 1, rows)


def test_the_summary_names_the_best_way_with_no_more_states(tmp_path):
    measured(AUTOMATIC[0]).write(tmp_path / f"{AUTOMATIC[0]}.json")
    (line,) = summary_grid(tmp_path).rows
    assert line[0] == AUTOMATIC[0]
    assert line[1:] == (
        "2",
        "90.5 ± 0.7 (64 states)",
        "88.5 ± 0.7",
        "8.0 ± 0.0",
        "89.5 ± 0.7 (gently to 8)",
        "1.0 (gently to 8)",
    )


def test_several_tasks_are_drawn_in_one_picture(tmp_path):
    picture = tmp_path / "fronts.png"
    draw_fronts([measured(name) for name in AUTOMATIC[:4]], picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
