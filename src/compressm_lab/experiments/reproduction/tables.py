"""The trainings of the paper's tables: tolerances, models of the orders they lead to, and other ways to get there."""

from __future__ import annotations

from collections.abc import Iterable

from compressm_lab.experiments.reproduction.arms import ORDER, TEACHER, Arm
from compressm_lab.experiments.reproduction.settings import UNCUT, Setting

NUCLEAR, DISTILLATION, PRAGMATIC = "Hankel nuclear norm", "distillation", "pragmatic"


def tolerances(setting: Setting) -> tuple[Arm, ...]:
    """For every τ a model that shrinks and one of the order it ends with; and the one that is never cut."""
    found: list[Arm] = []
    for tau in setting.taus:
        arm = setting.compressed(tau)
        found += [arm, setting.beside(arm)]
    return (*found, setting.whole())


def all_tolerances(settings: Iterable[Setting]) -> tuple[Arm, ...]:
    """Of several tasks."""
    return tuple(arm for setting in settings for arm in tolerances(setting))


def nuclear_norm(setting: Setting) -> tuple[Arm, ...]:
    """One training with the nuclear norm in its loss (app:hnn_det), whole, then cut once to the order of every τ."""
    settings = (
        *(f"model.order={setting.order}", "compression=null"),
        f"regulariser={{kind: hankel-nuclear-norm, beta: {setting.beta}, every: {setting.interval}}}",
        f"truncation={{orders: {sorted(setting.finals, reverse=True)}}}",
    )
    columns = dict(zip(map(_column, setting.taus), setting.finals, strict=True))
    return tuple(
        setting.arm(NUCLEAR, column, "nuclear", *settings, truncated=order)
        for column, order in (*columns.items(), (UNCUT, None))
    )


def distillation(setting: Setting) -> tuple[Arm, ...]:
    """Students of the order of every τ, taught by the model of their seed that is never cut (app:kd)."""
    lessons = f"distillation={{teacher: {TEACHER}, temperature: 2.0, alpha: 0.5}}"
    student, teacher = (f"model.order={ORDER}", "compression=null", lessons), setting.whole()
    return tuple(
        setting.arm(DISTILLATION, arm.column, f"student-{ORDER}", *student, beside=arm, teacher=teacher)
        for arm in map(setting.compressed, setting.taus)
    )


def pragmatic(setting: Setting) -> tuple[Arm, ...]:
    """A tenth of the states at a time until accuracy falls by 1 % (app:pragmatic), beside the smallest τ."""
    cuts, settle = setting.scaled(5_000), setting.scaled(2_000)
    rule = f"compression={{rho: 0.9, gate: 1.0, when: {{every: {cuts}}}, rollback: {{drop: 0.01, settle: {settle}}}}}"
    arm = setting.arm(PRAGMATIC, "ρ = 0.9", "pragmatic", f"model.order={setting.order}", rule)
    return (arm, setting.compressed(setting.taus[-1]), setting.whole())


def _column(tau: float) -> str:
    return f"τ = {tau:g}"
