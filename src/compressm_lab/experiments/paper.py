"""The paper's tasks as settings of recipes, and the arms that its tables and figures train on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compressm_lab.experiments.recipes import ORDER, TEACHER, TOTAL, Arm
from compressm_lab.runs.paper import BASELINE, UNCUT

COMPRESSED = "CompreSSM"
# Beside the paper's: its inputs and its orders by our own cuts, and baselines at the mean order of our compressed runs.
OUR_WAY, OUR_ORDER = "our way", "baseline, our mean order"
NUCLEAR, DISTILLATION, PRAGMATIC = "Hankel nuclear norm", "distillation", "pragmatic"
RANDOM, BAKED = "random states", "one projection"
PAPER_WAY = "fold: false, moments: slice"  # of `compression`; Gramians for white noise are the default


@dataclass(frozen=True)
class Setting:
    """A task of the paper: its recipe, the order it starts from, its tolerances, and the steps of the paper's cuts.

    `extra` are settings of all its runs, `finals` the orders that the paper's tolerances lead to: baselines and
    students have them, and models with the nuclear norm in their loss, computed at every `interval`-th step, are cut to
    them. Our own cuts remove a tenth of the states at each of the steps `gentle`; without these steps all of `cuts`
    keep the same share. `seeds` is the most seeds of each training, None for all that are asked for.
    """

    task: str
    recipe: str
    order: int
    steps: int
    taus: tuple[float, ...]
    when: str
    extra: tuple[str, ...] = ()
    folder: str = ""
    interval: int = 20
    finals: tuple[int, ...] = ()
    gentle: str = ""
    cuts: int = 4
    seeds: int | None = None

    def arm(self, method: str, column: str, name: str, *settings: str, label: str = "", **options: Any) -> Arm:
        """Make an arm with settings on top of the task's; its label is the column if it shrinks, else the method."""
        label = label or (column if method == COMPRESSED else method)
        chosen = (*self.extra, f"label={label!r}", *settings)
        folder = f"{self.folder or self.recipe}/{name}"
        return Arm(self.task, method, column, self.recipe, folder, chosen, seeds=self.seeds, **options)

    def compressed(self, tau: float) -> Arm:
        """Make the arm that is cut by the paper's rule and in its way, at the paper's steps."""
        cuts = f"compression={{tau: {tau}, when: {self.when}, {PAPER_WAY}}}"
        return self.arm(COMPRESSED, f"τ = {tau:g}", f"tau-{tau:g}", f"model.order={self.order}", cuts)

    def whole(self) -> Arm:
        """Make the arm that is never cut and has the order of the start."""
        return self.uncut(self.order, UNCUT)

    def uncut(self, order: int, column: str) -> Arm:
        """Make an arm that is never cut, of any order."""
        return self.arm(BASELINE, column, f"n-{order}", f"model.order={order}", "compression=null")

    def beside(self, arm: Arm) -> Arm:
        """Make an arm that is never cut and has the final order of `arm`."""
        settings = (f"model.order={ORDER}", "compression=null")
        # The same training as the paper's baseline, where the orders are equal.
        return self.arm(OUR_ORDER, arm.column, f"n-{ORDER}", *settings, label=BASELINE, beside=arm)

    def ours(self, tau: float, final: int) -> Arm:
        """Make the arm that is cut in our own way to the order that τ leads the paper to."""
        share = 0.9 if self.gentle else (final / self.order) ** (1 / self.cuts)
        rule = f"rho: {share:.6f}, at_least: {final}, gate: 1.0, gramian: measured, when: {self.gentle or self.when}"
        settings = (f"model.order={self.order}", f"compression={{{rule}}}")
        return self.arm(OUR_WAY, f"τ = {tau:g}", f"ours-{final}", *settings, label=f"our way to {final}")

    def scaled(self, step: float) -> int:
        """Scale a step of sMNIST's 200 000 to this training."""
        return max(1, round(step * self.steps / 200_000))


_TAUS = (0.15, 0.1, 0.07, 0.05, 0.03, 0.02)
_FINE = (0.04, 0.02, 0.01, 0.005, 0.002, 0.001)
_WARMUP = "{warmup_cuts: 4}"

SMNIST = Setting(
    *("sMNIST", "smnist-paper", 256, 200_000, _FINE, "{every: 5000, last: 195000}"),
    finals=(13, 28, 47, 76, 148, 191),
    gentle="{every: 2000, last: 150000}",
)
CIFAR10 = Setting("CIFAR10", "scifar-paper", 384, 180_000, _TAUS, _WARMUP, finals=(57, 93, 126, 161, 214, 327))
LISTOPS = Setting("ListOps", "listops-paper", 256, 80_000, _TAUS, _WARMUP, finals=(57, 82, 110, 135, 168, 214))
AAN = Setting("AAN", "aan-paper", 256, 100_000, _TAUS, _WARMUP, finals=(54, 84, 111, 137, 170, 203))
IMDB = Setting(
    *("IMDB", "imdb-paper", 192, 50_000, _TAUS, "{every: 1000, first: 2000, last: 3000}"),
    finals=(95, 120, 137, 150, 165, 192),
    cuts=2,
)
PATHFINDER = Setting("Pathfinder", "pathfinder-paper", 256, 500_000, _TAUS, _WARMUP, finals=(35, 51, 66, 81, 105, 130))
MAMBA_IMDB = Setting("IMDB, Mamba", "imdb-mamba", 128, 3_000, (0.001,), _WARMUP)
MAMBA_CIFAR = Setting("CIFAR10, Mamba", "scifar-mamba", 128, 10_000, (0.001,), _WARMUP)

_STEPS = 300
_SMALL = (
    f"training.steps={_STEPS}",
    "training.evaluate_every=30",
    "training.checkpoint_every=150",
    # Cuts lie at no multiple of anything, and pictures show a state up to the snapshot before its cut.
    "spectra={every: 2}",
)
# The digits in the place of sMNIST, and two layers of them in the place of the deep models.
QUICK = Setting(
    *("sMNIST", "digits", 64, _STEPS, _FINE[:3], "{every: 30, last: 270}", _SMALL),
    interval=5,
    finals=(8, 16, 32),
    gentle="{every: 10, last: 240}",
)
_DEEP = (*_SMALL, "name=digits-deep", "model.depth=2")
QUICK_DEEP = Setting(
    *("CIFAR10", "digits", 64, _STEPS, (0.15, 0.05), _WARMUP, _DEEP), folder="digits-deep", finals=(10, 27)
)
QUICK_MAMBA = Setting("IMDB, Mamba", "digits-mamba", 32, _STEPS, (0.001,), _WARMUP, _SMALL)


# Tables: tolerances, models of the orders they lead to, and other ways to get there.


def tolerances(setting: Setting) -> tuple[Arm, ...]:
    """Arms that shrink by every τ, beside each the paper's baseline, our way and our baseline; and the uncut one."""
    found: list[Arm] = []
    for tau, final in zip(setting.taus, setting.finals, strict=True):
        arm = setting.compressed(tau)
        ours = [setting.ours(tau, final)] if final < setting.order else []
        found += [arm, setting.uncut(final, arm.column), *ours, setting.beside(arm)]
    return (*found, setting.whole())


def nuclear_norm(setting: Setting) -> tuple[Arm, ...]:
    """A training with the nuclear norm in its loss (app:hnn_det), whole, and cut once to the order of every τ.

    β is 0.1, as in the paper, on the mean of the Hankel values: no code of its authors sums them.
    """
    settings = (
        *(f"model.order={setting.order}", "compression=null"),
        f"regulariser={{kind: hankel-nuclear-norm, beta: 0.1, over: mean, every: {setting.interval}, fold: false}}",
        f"truncation={{orders: {sorted(setting.finals, reverse=True)}, fold: false}}",
    )
    columns = {f"τ = {tau:g}": order for tau, order in zip(setting.taus, setting.finals, strict=True)}
    return tuple(
        setting.arm(NUCLEAR, column, "nuclear", *settings, truncated=order)
        for column, order in (*columns.items(), (UNCUT, None))
    )


def distillation(setting: Setting) -> tuple[Arm, ...]:
    """Students of the paper's order at every τ, taught by the model of their seed that is never cut (app:kd)."""
    lessons = f"distillation={{teacher: {TEACHER}, temperature: 2.0, alpha: 0.5}}"
    teacher = setting.whole()
    return tuple(
        setting.arm(
            *(DISTILLATION, f"τ = {tau:g}", f"student-{final}", f"model.order={final}", "compression=null", lessons),
            teacher=teacher,
        )
        for tau, final in zip(setting.taus, setting.finals, strict=True)
    )


def pragmatic(setting: Setting) -> tuple[Arm, ...]:
    """A tenth of the states at a time until accuracy falls by 1 % (app:pragmatic), beside the smallest τ."""
    cuts, settle = setting.scaled(5_000), setting.scaled(2_000)
    guard = f"rollback: {{drop: 0.01, settle: {settle}}}"
    rule = f"compression={{rho: 0.9, gate: 1.0, when: {{every: {cuts}}}, {guard}, {PAPER_WAY}}}"
    arm = setting.arm(PRAGMATIC, "ρ = 0.9", "pragmatic", f"model.order={setting.order}", rule)
    return (arm, setting.compressed(setting.taus[-1]), setting.whole())


# Trainings whose spectra or times are shown.


def every_step(setting: Setting, order: int, steps: int) -> tuple[Arm, ...]:
    """A small layer at every one of the first steps, with the bound on what each may change (fig:hankel_analysis)."""
    length = (f"training.steps={steps}", f"training.evaluate_every={max(1, steps // 5)}")
    chosen = (f"model.order={order}", "compression=null", "spectra={every: 1, changes: true}", *length)
    return (setting.arm(BASELINE, f"n = {order}", f"every-step-{order}", *chosen, label=f"n = {order}, every step"),)


def timer(setting: Setting, fewer: int, last: int) -> tuple[Arm, ...]:
    """An arm that drops `fewer` states at equal intervals until `last` are left (app:time)."""
    every = setting.scaled(5_000)
    cuts = (setting.order - last) // fewer
    rule = f"compression={{fewer: {fewer}, gate: 1.0, when: {{every: {every}, last: {every * cuts}}}, {PAPER_WAY}}}"
    chosen = (f"model.order={setting.order}", rule, f"training.evaluate_every={every}", "spectra=null")
    return (setting.arm(COMPRESSED, f"{fewer} fewer every {every}", "timer", *chosen),)


def sizes(setting: Setting, orders: tuple[int, ...]) -> tuple[Arm, ...]:
    """Models that are never cut, from the first step to the last (app:stab, app:mamba)."""
    return tuple(setting.uncut(order, f"n = {order}") for order in orders)


def mamba_cuts(setting: Setting) -> tuple[Arm, ...]:
    """Cuts of Mamba: the paper's, every channel by its mean system; as many random states; and our one projection."""
    (tau,) = setting.taus
    column, rule = f"τ = {tau:g}", f"tau: {tau}, when: {setting.when}"
    mean = "selective: {kind: per-channel, surrogate: mean}"
    ways = (
        (COMPRESSED, "mean", mean),
        (RANDOM, "random", f"{mean}, select: random"),
        (BAKED, "baked", "selective: {kind: baked}"),
    )
    order = f"model.order={setting.order}"
    return tuple(
        setting.arm(method, column, f"{name}-{tau:g}", order, f"compression={{{rule}, {way}}}")
        for method, name, way in ways
    )


# Ablations (app:ablations), and ours: all but one take 256 states to 32 on sMNIST.

SHRINK = 8  # 256 to 32
CUTS = (1, 2, 4, 8, 16)
WINDOW = 20_000
WINDOWS = (0, 25_000, 50_000, 100_000, 150_000)


def references(setting: Setting) -> tuple[Arm, ...]:
    """Arms that are never cut, of the order before all cuts and after."""
    small = setting.order // SHRINK
    return (setting.uncut(small, f"n = {small}"), setting.uncut(setting.order, f"n = {setting.order}"))


Arms = Callable[[Setting], tuple[Arm, ...]]


def _four_cuts(*ways: tuple[str, str, str]) -> Arms:
    """Arms with four cuts each: columns, names, and options of `compression`."""

    def made(setting: Setting) -> tuple[Arm, ...]:
        steps = [setting.scaled(5_000 * k) for k in range(1, 5)]
        return tuple(_arm(setting, column, f"four-{name}", steps, options) for column, name, options in ways)

    return made


# Cuts in the paper's way that keep the largest values, random ones or the smallest.
selections = _four_cuts(
    ("largest kept", "paper", PAPER_WAY),
    ("random kept", "random", f"select: random, {PAPER_WAY}"),
    ("smallest kept", "smallest", f"select: smallest, {PAPER_WAY}"),
)
# Conjugate modes folded or not; and all that the paper does, with moments cut to the first rows.
folds = _four_cuts(
    ("folded", "folded", ""), ("unfolded", "unfolded", "fold: false"), ("as in the paper", "paper", PAPER_WAY)
)
# Gramians for white noise, or for the data.
gramians = _four_cuts(("white noise", "folded", ""), ("measured", "measured", "gramian: measured"))
# The optimizer's moments: carried over, forgotten, or their first rows kept.
moments = _four_cuts(
    ("transport", "folded", ""), ("restart", "restart", "moments: restart"), ("slice", "slice", "moments: slice")
)


def numbers(setting: Setting) -> tuple[Arm, ...]:
    """Arms with R cuts in the first tenth of training, each to the same share, n ρ^R = n/8, down to n/8."""
    steps = {count: [setting.scaled(WINDOW * k / count) for k in range(1, count + 1)] for count in CUTS}
    # Four cuts are trained by other ablations too.
    names = {count: "four-paper" if count == 4 else f"cuts-{count}" for count in CUTS}
    return tuple(_arm(setting, f"{n} cut{'s' if n > 1 else ''}", names[n], steps[n], PAPER_WAY) for n in CUTS)


def windows(setting: Setting) -> tuple[Arm, ...]:
    """Arms with four cuts, 5000 steps apart, early or late."""
    found = []
    for begin in WINDOWS:
        steps = [setting.scaled(begin + 5_000 * k) for k in range(1, 5)]
        column = f"steps {setting.scaled(begin) if begin else 0} to {setting.scaled(begin + WINDOW)}"
        found.append(_arm(setting, column, "four-paper" if begin == 0 else f"window-{begin}", steps, PAPER_WAY))
    return tuple(found)


def policies(setting: Setting) -> tuple[Arm, ...]:
    """One cut at the end of the warm-up: τ for every layer, or as many states in all, shared out by the bound."""
    when, order = f"when: {{steps: [{setting.steps // 10}]}}", f"model.order={setting.order}"
    tolerance = setting.arm(COMPRESSED, "EnergyTolerance", "once-tau", order, f"compression={{tau: 0.05, {when}}}")
    rule = f"compression={{total_states: {TOTAL}, gate: 1.0, {when}}}"
    budget = setting.arm(COMPRESSED, "Budget", f"once-budget-{TOTAL}", order, rule, beside=tolerance)
    return (tolerance, budget, setting.whole())


def _arm(setting: Setting, column: str, name: str, steps: list[int], options: str = "") -> Arm:
    """Make an arm whose cuts all keep the same share; arms that share their runs share their label too."""
    share, least = SHRINK ** (-1 / len(steps)), setting.order // SHRINK
    rule = f"rho: {share:.6f}, at_least: {least}, gate: 1.0, when: {{steps: {steps}}}"
    cuts = f"compression={{{', '.join(filter(None, (rule, options)))}}}"
    # Pictures show how the spectra of these arms move around their cuts; quick settings say it themselves.
    spectra = () if setting.extra else ("spectra={every: 1000}",)
    chosen = (f"model.order={setting.order}", cuts, *spectra)
    return setting.arm(COMPRESSED, column, name, *chosen, label=name.replace("-", " "))
