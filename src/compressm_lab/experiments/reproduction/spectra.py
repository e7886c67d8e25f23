"""The trainings that are looked at through their spectra or their clock."""

from __future__ import annotations

from compressm_lab.experiments.reproduction.arms import Arm
from compressm_lab.experiments.reproduction.settings import BASELINE, COMPRESSED, Setting


def every_step(setting: Setting, order: int, steps: int) -> tuple[Arm, ...]:
    """A small layer at every one of the first steps, with the bound on what each may change (fig:hankel_analysis)."""
    length = (f"training.steps={steps}", f"training.evaluate_every={max(1, steps // 5)}")
    chosen = (f"model.order={order}", "compression=null", "spectra={every: 1, changes: true}", *length)
    return (setting.arm(BASELINE, f"n = {order}", f"every-step-{order}", *chosen, label=f"n = {order}, every step"),)


def whole_training(setting: Setting, order: int) -> tuple[Arm, ...]:
    """A layer that is never cut, from the first step to the last (app:stab)."""
    return (setting.uncut(order, f"n = {order}"),)


def timer(setting: Setting, fewer: int, last: int) -> tuple[Arm, ...]:
    """So many states fewer at equal intervals until `last` are left (app:time)."""
    every = setting.scaled(5_000)
    cuts = (setting.order - last) // fewer
    rule = f"compression={{fewer: {fewer}, gate: 1.0, when: {{every: {every}, last: {every * cuts}}}}}"
    chosen = (f"model.order={setting.order}", rule, f"training.evaluate_every={every}", "spectra=null")
    return (setting.arm(COMPRESSED, f"{fewer} fewer every {every}", "timer", *chosen),)
