"""The trainings of the paper's Mamba study (app:mamba)."""

from __future__ import annotations

from compressm_lab.experiments.reproduction.arms import Arm
from compressm_lab.experiments.reproduction.settings import COMPRESSED, Setting

RANDOM, BAKED = "random states", "one projection"
_MEAN = "selective: {kind: per-channel, surrogate: mean}"


def sizes(setting: Setting, orders: tuple[int, ...]) -> tuple[Arm, ...]:
    """Never cut."""
    return tuple(setting.uncut(order, f"n = {order}") for order in orders)


def reduced(setting: Setting) -> tuple[Arm, ...]:
    """The paper's way, every channel by its mean system; as many of its Hankel states, drawn at random; and ours."""
    (tau,) = setting.taus
    column, rule = f"τ = {tau:g}", f"tau: {tau}, when: {setting.when}"
    order = f"model.order={setting.order}"
    mean = setting.arm(COMPRESSED, column, f"mean-{tau:g}", order, f"compression={{{rule}, {_MEAN}}}")
    return (
        mean,
        setting.arm(RANDOM, column, f"random-{tau:g}", order, f"compression={{{rule}, {_MEAN}, select: random}}"),
        setting.arm(BAKED, column, f"baked-{tau:g}", order, f"compression={{{rule}, selective: {{kind: baked}}}}"),
    )
