"""The trainings of the ablations (app:ablations), and ours: all but one take 256 states to 32 on sMNIST."""

from __future__ import annotations

from compressm_lab.experiments.reproduction.arms import TOTAL, Arm
from compressm_lab.experiments.reproduction.settings import COMPRESSED, Setting

SHRINK = 8  # 256 to 32
CUTS = (1, 2, 4, 8, 16)
WINDOW = 20_000
WINDOWS = (0, 25_000, 50_000, 100_000, 150_000)


def references(setting: Setting) -> tuple[Arm, ...]:
    """Never cut, at both ends of the way."""
    small = setting.order // SHRINK
    return (setting.uncut(small, f"n = {small}"), setting.uncut(setting.order, f"n = {setting.order}"))


def selections(setting: Setting) -> tuple[Arm, ...]:
    """Four cuts that keep the largest values, random ones or the smallest."""
    return (
        _four(setting, "largest kept", "folded"),
        _four(setting, "random kept", "random", select="random"),
        _four(setting, "smallest kept", "smallest", select="smallest"),
    )


def numbers(setting: Setting) -> tuple[Arm, ...]:
    """R cuts in the first tenth of training, each to the same share: n ρ^R = n/8."""
    return tuple(_cuts(setting, count) for count in CUTS)


def windows(setting: Setting) -> tuple[Arm, ...]:
    """Four cuts, 5000 steps apart, early or late."""
    return tuple(_window(setting, begin) for begin in WINDOWS)


def folds(setting: Setting) -> tuple[Arm, ...]:
    """Conjugate modes folded or not; and all that the paper does, with moments cut to the first rows."""
    return (
        _four(setting, "folded", "folded"),
        _four(setting, "unfolded", "unfolded", fold="false"),
        _four(setting, "as in the paper", "paper", fold="false", moments="slice"),
    )


def gramians(setting: Setting) -> tuple[Arm, ...]:
    """For white noise, or for what the data do."""
    return (_four(setting, "white noise", "folded"), _four(setting, "measured", "measured", gramian="measured"))


def moments(setting: Setting) -> tuple[Arm, ...]:
    """What an optimizer has learned: carried over, forgotten, or its first rows kept."""
    return (
        _four(setting, "transport", "folded"),
        _four(setting, "restart", "restart", moments="restart"),
        _four(setting, "slice", "slice", moments="slice"),
    )


def policies(setting: Setting) -> tuple[Arm, ...]:
    """One cut at the end of the warm-up: τ for every layer, or as many states in all, shared out by the bound."""
    step = setting.steps // 10
    when = f"when: {{steps: [{step}]}}"
    order = f"model.order={setting.order}"
    tolerance = setting.arm(COMPRESSED, "EnergyTolerance", "once-tau", order, f"compression={{tau: 0.05, {when}}}")
    rule = f"compression={{total_states: {TOTAL}, gate: 1.0, {when}}}"
    return (
        tolerance,
        setting.arm(COMPRESSED, "Budget", f"once-budget-{TOTAL}", order, rule, beside=tolerance),
        setting.whole(),
    )


def _four(setting: Setting, column: str, name: str, **options: str) -> Arm:
    steps = [setting.scaled(5_000 * k) for k in range(1, 5)]
    return _arm(setting, column, f"four-{name}", steps, **options)


def _cuts(setting: Setting, count: int) -> Arm:
    steps = [setting.scaled(WINDOW * k / count) for k in range(1, count + 1)]
    column = "1 cut" if count == 1 else f"{count} cuts"
    # Four of them are what other ablations train too.
    return _arm(setting, column, "four-folded" if count == 4 else f"cuts-{count}", steps)


def _window(setting: Setting, begin: int) -> Arm:
    steps = [setting.scaled(begin + 5_000 * k) for k in range(1, 5)]
    column = f"steps {setting.scaled(begin) if begin else 0} to {setting.scaled(begin + WINDOW)}"
    return _arm(setting, column, "four-folded" if begin == 0 else f"window-{begin}", steps)


def _arm(setting: Setting, column: str, name: str, steps: list[int], **options: str) -> Arm:
    """Cuts to the same share of what is there each time; arms that share their runs share their label too."""
    rule = [f"rho: {SHRINK ** (-1 / len(steps)):.6f}", "gate: 1.0", f"when: {{steps: {steps}}}"]
    rule += [f"{key}: {value}" for key, value in options.items()]
    settings = (f"model.order={setting.order}", f"compression={{{', '.join(rule)}}}")
    return setting.arm(COMPRESSED, column, name, *settings, label=name.replace("-", " "))
