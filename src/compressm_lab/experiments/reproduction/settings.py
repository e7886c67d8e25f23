"""The paper's tasks as settings of recipes: at full size, and at one that a CPU trains in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from compressm_lab.experiments.reproduction.arms import ORDER, Arm

COMPRESSED, BASELINE = "CompreSSM", "baseline"
UNCUT = "τ = 0"


@dataclass(frozen=True)
class Setting:
    """A task of the paper: its recipe, the order it starts from, and its tolerances; `when` are the paper's cuts.

    `extra` is what differs from the recipe in all of its runs. With the nuclear norm in its loss, weighed by `beta` and
    found at every `interval`-th step, it is cut once to `finals`: what the paper's tolerances lead to.
    """

    task: str
    recipe: str
    order: int
    steps: int
    taus: tuple[float, ...]
    when: str
    extra: tuple[str, ...] = ()
    folder: str = ""
    beta: float = 0.1
    interval: int = 20
    finals: tuple[int, ...] = ()

    @property
    def place(self) -> str:
        return self.folder or self.recipe

    def arm(
        self,
        method: str,
        column: str,
        name: str,
        *settings: str,
        label: str = "",
        beside: Arm | None = None,
        teacher: Arm | None = None,
        truncated: int | None = None,
    ) -> Arm:
        """With the settings on top of those of the task; the label is the column of what shrinks, else the method."""
        label = label or (column if method == COMPRESSED else method)
        chosen = (*self.extra, f"label={label!r}", *settings)
        return Arm(self.task, method, column, self.recipe, f"{self.place}/{name}", chosen, beside, teacher, truncated)

    def compressed(self, tau: float) -> Arm:
        """By the paper's rule, at the steps of the paper."""
        cuts = f"compression={{tau: {tau}, when: {self.when}}}"
        return self.arm(COMPRESSED, f"τ = {tau:g}", f"tau-{tau:g}", f"model.order={self.order}", cuts)

    def whole(self) -> Arm:
        """Never cut, with the order of the start."""
        return self.uncut(self.order, UNCUT)

    def uncut(self, order: int, column: str) -> Arm:
        """Never cut, with an order of its own."""
        return self.arm(BASELINE, column, f"n-{order}", f"model.order={order}", "compression=null")

    def beside(self, arm: Arm) -> Arm:
        """Never cut, with the order that the arm ends with."""
        settings = (f"model.order={ORDER}", "compression=null")
        return self.arm(BASELINE, arm.column, f"n-{ORDER}", *settings, beside=arm)

    def scaled(self, step: float) -> int:
        """A step of sMNIST's 200 000, in this training."""
        return max(1, round(step * self.steps / 200_000))


_TAUS = (0.15, 0.1, 0.07, 0.05, 0.03, 0.02)
_FINE = (0.04, 0.02, 0.01, 0.005, 0.002, 0.001)
_WARMUP = "{warmup_cuts: 4}"

SMNIST = Setting("sMNIST", "smnist", 256, 200_000, _FINE, "{every: 5000}", finals=(13, 28, 47, 76, 148, 191))
CIFAR10 = Setting("CIFAR10", "scifar", 384, 180_000, _TAUS, _WARMUP)
LISTOPS = Setting("ListOps", "listops", 256, 80_000, _TAUS, _WARMUP)
AAN = Setting("AAN", "aan", 256, 100_000, _TAUS, _WARMUP)
IMDB = Setting("IMDB", "imdb", 192, 50_000, _TAUS, "{every: 1000, first: 2000, last: 3000}")
PATHFINDER = Setting("Pathfinder", "pathfinder", 256, 500_000, _TAUS, _WARMUP)
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
# The digits in the place of sMNIST, and two layers of them in the place of the deep models. With the paper's beta, 0.1,
# so few steps learn nothing.
QUICK = Setting(
    *("sMNIST", "digits", 64, _STEPS, _FINE[:3], "{every: 30}", _SMALL), beta=0.001, interval=5, finals=(8, 16, 32)
)
QUICK_DEEP = Setting(
    "CIFAR10",
    "digits",
    64,
    _STEPS,
    (0.15, 0.05),
    _WARMUP,
    (*_SMALL, "name=digits-deep", "model.depth=2"),
    folder="digits-deep",
)
QUICK_MAMBA = Setting("IMDB, Mamba", "digits-mamba", 32, _STEPS, (0.001,), _WARMUP, _SMALL)
