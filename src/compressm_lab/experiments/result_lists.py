"""Which trainings stand side by side: whole, small from the start, and cut in several ways.

smnist, with the paper's 200 000 steps: cuts with τ tried through all of training, in the paper's way and in ours, and
gentle cuts that end at exactly 28 and 13 states; beside them, with one seed, penalties on Hankel singular values and a
teacher, which is the whole model. smnist-falling: the same with a learning rate that begins higher and falls.
smnist-choices: what else can be chosen, one choice at a time and with one seed. smnist-selection: four cuts to 32
states that keep the largest Hankel values, the smallest, or random ones. scifar, with as many steps as there is time
for: four cuts in the warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# What the paper's code does: no folding, Gramians of white noise, moments cut like slices.
PAPER = ("compression.fold=false", "compression.moments=slice")
OURS = ("compression.gramian=measured",)


@dataclass(frozen=True)
class Variant:
    """The order at the start, and what differs in its cuts from the recipe; nothing does in one that is never cut.

    training: what differs but for cuts. tries: how often a cut is tried through all of training, where the recipe does
    not say; since, until: from and up to which shares of the steps; at: the shares of the steps at which cuts are, in
    the place of all three. recipe: where it is not that of the task; teacher: the variant whose run of the same seed
    teaches this one; once: trained with the first seed alone.
    """

    label: str
    order: int
    differs: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    tries: int | None = None
    since: float = 0.0
    until: float = 0.75
    at: tuple[float, ...] = ()
    recipe: str | None = None
    teacher: str | None = None
    once: bool = False


@dataclass(frozen=True)
class Task:
    """A recipe, its variants by name, and how long it is trained here; its title is that of table and picture."""

    title: str
    recipe: str
    variants: dict[str, Variant]
    steps: int
    evaluations: int
    settings: tuple[str, ...] = ()


def _tolerance(label: str, tau: float, *differs: str, until: float = 0.75) -> Variant:
    return Variant(label, 256, (f"compression.tau={tau}", *differs), tries=40, until=until)


def _gently(order: int, *way: str) -> Variant:
    """A tenth of the states at a time, until there are so many."""
    rule = ("compression.tau=null", "compression.rho=0.9", f"compression.at_least={order}", "compression.gate=1.0")
    return Variant(f"gently to {order}", 256, (*rule, *way), tries=100)


def _penalised(weight: float | None = None) -> Variant:
    """With the recipe's weight, which is the paper's, or another."""
    given = () if weight is None else (f"regulariser.beta={weight}",)
    label = "Σσ penalty" if weight is None else f"Σσ penalty of {weight:g}"
    cut = ("truncation={orders: [28]}",)
    return Variant(f"{label}, then cut to 28", 256, cut, given, recipe="smnist-hnn", once=True)


def _selected(label: str, select: str) -> Variant:
    """256 → 152 → 91 → 54 → 32 within the first tenth, as in the paper's ablation of what is kept."""
    rule = ("compression.tau=null", "compression.rho=0.594604", "compression.gate=1.0", f"compression.select={select}")
    return Variant(label, 256, rule, at=(0.025, 0.05, 0.075, 0.1))


def _smnist(title: str, variants: dict[str, Variant], *settings: str) -> Task:
    return Task(title, "smnist", variants, 200_000, 40, ("training.precision=tf32", *settings))


def _falling(rate: float) -> tuple[str, ...]:
    """Up to this rate in a fiftieth of the steps, then down along a cosine."""
    return ("training.schedule=cosine", "training.warmup=0.02", f"training.learning_rate={rate}")


def _chosen(variant: Variant, label: str, *training: str, since: float | None = None) -> Variant:
    """The same with another choice, under a name that says so, once."""
    begun = variant.since if since is None else since
    return replace(variant, label=f"{variant.label}, {label}", training=training, since=begun, once=True)


_WHOLE, _SMALL = Variant("256 states", 256), Variant("28 states", 28)
_FROM_THE_START = {"whole": _WHOLE, "small-28": _SMALL, "small-13": Variant("13 states", 13)}
_GENTLY = {"to-28": _gently(28, *OURS), "to-13": _gently(13, *OURS)}
_TOLERANCES = {
    "tau-02": _tolerance("τ = 0.02", 0.02, *OURS),
    "tau-04": _tolerance("τ = 0.04", 0.04, *OURS),
    "paper-02": _tolerance("τ = 0.02, paper's way", 0.02, *PAPER, until=0.99),
    "paper-04": _tolerance("τ = 0.04, paper's way", 0.04, *PAPER, until=0.99),
}
_FALLING = _falling(4e-3)
_CIRCLE = "model.layer_options={max_phase: 6.283185307179586}"
_UNDROPPED = "model.dropout=0.0"
_CHOICES = {
    "circle-02": _chosen(_TOLERANCES["paper-02"], "phases up to 2π", _CIRCLE),
    "circle-04": _chosen(_TOLERANCES["paper-04"], "phases up to 2π", _CIRCLE),
    "late-falling-28": _chosen(_GENTLY["to-28"], "falling, cuts from a quarter on", *_FALLING, since=0.25),
    "late-falling-13": _chosen(_GENTLY["to-13"], "falling, cuts from a quarter on", *_FALLING, since=0.25),
    "undropped-28": _chosen(_GENTLY["to-28"], "falling, no dropout", *_FALLING, _UNDROPPED),
    "undropped-13": _chosen(_GENTLY["to-13"], "falling, no dropout", *_FALLING, _UNDROPPED),
    "white-28": _chosen(_gently(28), "falling, Gramians of white noise", *_FALLING),
    "white-13": _chosen(_gently(13), "falling, Gramians of white noise", *_FALLING),
    "paper-to-28": _chosen(_gently(28, *PAPER), "falling, cut in the paper's way", *_FALLING),
    "paper-to-13": _chosen(_gently(13, *PAPER), "falling, cut in the paper's way", *_FALLING),
    "circle": _chosen(_WHOLE, "phases up to 2π", _CIRCLE),
    "constant": _chosen(_WHOLE, "constant 4e-3", "training.learning_rate=4.0e-3"),
    "constant-28": _chosen(_SMALL, "constant 4e-3", "training.learning_rate=4.0e-3"),
    "slower": _chosen(_WHOLE, "falling from 2e-3", *_falling(2e-3)),
    "slower-28": _chosen(_SMALL, "falling from 2e-3", *_falling(2e-3)),
    "faster": _chosen(_WHOLE, "falling from 8e-3", *_falling(8e-3)),
    "faster-28": _chosen(_SMALL, "falling from 8e-3", *_falling(8e-3)),
    "late-28": _chosen(_GENTLY["to-28"], "cuts from the middle on", since=0.5),
    "undropped": _chosen(_WHOLE, "falling, no dropout", *_FALLING, _UNDROPPED),
    "penalty-0.01": _penalised(1e-2),
    "penalty-0.001": _penalised(1e-3),
}
# Runs lie in folders whose names begin with these.
TASKS = {
    "smnist": _smnist(
        "sMNIST with the paper's rate",
        {
            **_FROM_THE_START,
            **_TOLERANCES,
            **_GENTLY,
            "penalty-28": _penalised(),
            "penalty-0.0001": _penalised(1e-4),
            "taught-28": Variant("28 states, taught", 28, recipe="smnist-distillation", teacher="whole", once=True),
        },
    ),
    "smnist-falling": _smnist(
        "sMNIST with a rate that falls", {**_FROM_THE_START, **_TOLERANCES, **_GENTLY}, *_FALLING
    ),
    "smnist-choices": _smnist("sMNIST, one choice at a time", _CHOICES),
    "smnist-selection": _smnist(
        "sMNIST, four cuts to 32 states",
        {
            "largest": _selected("largest σ kept", "largest"),
            "random": _selected("random states kept", "random"),
            "smallest": _selected("smallest σ kept", "smallest"),
            "small-32": Variant("32 states", 32),
        },
    ),
    "scifar": Task(
        "sCIFAR, four cuts in the warm-up",
        "scifar",
        {
            "whole": Variant("384 states", 384),
            "small-57": Variant("57 states", 57),
            "to-57": Variant("four cuts to 57", 384, ("compression.tau=null", "compression.rho=0.6207", *OURS)),
        },
        steps=10_000,
        evaluations=4,
    ),
}
