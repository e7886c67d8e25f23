"""The trainings of the paper's tables: tolerances, models of the orders they lead to, and other ways to get there."""

from __future__ import annotations

from collections.abc import Iterable

from compressm.experiments.reproduction.arms import ORDER, Arm
from compressm.experiments.reproduction.settings import UNCUT, Setting

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
    """Trained whole with the nuclear norm in its loss, and cut once, after training, to the order of every τ."""
    whole = (f"model.order={setting.order}", "compression=null")
    return (
        *(
            setting.arm(NUCLEAR, arm.column, f"nuclear-{ORDER}", *whole, beside=arm, awaits="baselines")
            for arm in map(setting.compressed, setting.taus)
        ),
        setting.arm(NUCLEAR, UNCUT, "nuclear", *whole, awaits="baselines"),
    )


def distillation(setting: Setting) -> tuple[Arm, ...]:
    """Students of the order of every τ, taught by the model that is never cut."""
    student = (f"model.order={ORDER}", "compression=null")
    return tuple(
        setting.arm(DISTILLATION, arm.column, f"student-{ORDER}", *student, beside=arm, awaits="baselines")
        for arm in map(setting.compressed, setting.taus)
    )


def pragmatic(setting: Setting) -> tuple[Arm, ...]:
    """A tenth of the states at a time until accuracy falls by 1 % (app:pragmatic), beside the smallest τ."""
    cuts, settle = setting.scaled(5_000), setting.scaled(2_000)
    rule = f"compression={{rho: 0.9, gate: 1.0, when: {{every: {cuts}}}, rollback: {{drop: 0.01, settle: {settle}}}}}"
    arm = setting.arm(PRAGMATIC, "ρ = 0.9", "pragmatic", f"model.order={setting.order}", rule)
    return (arm, setting.compressed(setting.taus[-1]), setting.whole())
