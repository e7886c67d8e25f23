"""From a plan on the disk to what a report shows."""

from __future__ import annotations

from compressm_lab.experiments.reproduction.plan import Plan
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.paper import Compared, Exhibit, paper_labels, read_paper
from compressm_lab.runs.run import Run, read_run

QUICK = (
    "Quick: scikit-learn's 8 × 8 digits in the place of every data set, {steps} steps, orders from {order} down. It "
    "shows that every part works, not what the paper claims."
)


def exhibit(plan: Plan, *, quick: bool) -> Exhibit:
    """All runs that are there, finished or not."""
    wanted = plan.experiment
    cells = []
    for arm, resolved in plan.resolved():
        runs: tuple[Run, ...] = ()
        if resolved is not None:
            folders = [RunDirectory(plan.folder(resolved, seed)) for seed in range(plan.seeds)]
            runs = tuple(read_run(folder) for folder in folders if (folder.path / "status.json").is_file())
        teachers = (plan.finished_run(arm.teacher, seed) for seed in range(plan.seeds)) if arm.teacher else ()
        before = tuple(teacher for teacher in teachers if teacher is not None)
        missing = "" if runs else "not trained yet"
        cells.append(Compared(arm.task, arm.method, arm.column, runs, missing, arm.truncated, before))
    paper = read_paper(wanted.label) if wanted.label in paper_labels() else None
    return Exhibit(
        wanted.label,
        wanted.title,
        wanted.picture,
        wanted.quantity,
        tuple(cells),
        paper,
        _quick(plan) if quick else "",
        wanted.head,
    )


def _quick(plan: Plan) -> str:
    recipes = [arm.read(0) for arm in plan.experiment.arms if arm.known]
    steps = max((recipe.training.steps for recipe in recipes), default=0)
    order = max((recipe.model.order for recipe in recipes), default=0)
    return QUICK.format(steps=steps, order=order)
