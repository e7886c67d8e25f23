"""Every table and figure of the paper by its label, and four ablations of our own."""

from __future__ import annotations

from collections.abc import Callable

from compressm.errors import did_you_mean
from compressm_lab.experiments.reproduction import ablations, mamba, spectra, tables
from compressm_lab.experiments.reproduction.arms import Experiment
from compressm_lab.experiments.reproduction.settings import (
    AAN,
    CIFAR10,
    IMDB,
    LISTOPS,
    MAMBA_CIFAR,
    MAMBA_IMDB,
    PATHFINDER,
    QUICK,
    QUICK_DEEP,
    QUICK_MAMBA,
    SMNIST,
    Setting,
)
from compressm_lab.runs.paper import read_paper
from compressm_lab.training.config import ConfigError

SEEDS, MANY, QUICK_SEEDS = 5, 10, 2
_TABLES = (CIFAR10, LISTOPS, AAN, IMDB, PATHFINDER, SMNIST)
_MAMBA = (8, 16, 32, 64, 128)
_QUICK_MAMBA = (4, 16, 32)
_BENCH = {"measures": "reduction"}

Made = Callable[[bool], Experiment]


def _paper(label: str, seeds: int, build: Callable[[bool], tuple], **options: object) -> tuple[str, Made]:
    """With the title that the label has in the data of the paper."""

    def make(quick: bool) -> Experiment:
        wanted = min(seeds, QUICK_SEEDS) if quick else seeds
        return Experiment(label, read_paper(label).title, build(quick), wanted, **options)  # type: ignore[arg-type]

    return label, make


def _ours(label: str, title: str, build: Callable[[bool], tuple]) -> tuple[str, Made]:
    return label, lambda quick: Experiment(label, title, build(quick), QUICK_SEEDS if quick else MANY, "curves")


def _of(quick: bool) -> Setting:
    return QUICK if quick else SMNIST


def _deep(quick: bool) -> Setting:
    return QUICK_DEEP if quick else CIFAR10


def _results(quick: bool) -> tuple:
    return tables.all_tolerances((QUICK, QUICK_DEEP) if quick else _TABLES)


def _sanity(quick: bool) -> tuple:
    return (*ablations.selections(_of(quick)), *ablations.references(_of(quick)))


def _numbers(quick: bool) -> tuple:
    return (*ablations.numbers(_of(quick)), *ablations.references(_of(quick)))


def _windows(quick: bool) -> tuple:
    return (*ablations.windows(_of(quick)), *ablations.references(_of(quick)))


def _nuclear(quick: bool) -> tuple:
    return (*tables.tolerances(_of(quick)), *tables.nuclear_norm(_of(quick)))


def _distillation(quick: bool) -> tuple:
    return (*tables.tolerances(_deep(quick)), *tables.distillation(_deep(quick)))


def _mamba_imdb(quick: bool) -> tuple:
    setting = QUICK_MAMBA if quick else MAMBA_IMDB
    return (*mamba.reduced(setting), *mamba.sizes(setting, _QUICK_MAMBA if quick else _MAMBA))


def _mamba_speed(quick: bool) -> tuple:
    setting, sizes = (QUICK_MAMBA, (4, 32)) if quick else (MAMBA_IMDB, (16, 128))
    return (mamba.reduced(setting)[0], mamba.reduced(setting)[2], *mamba.sizes(setting, sizes))


def _spectra(full: Setting, order: int, small: int = 16) -> Callable[[bool], tuple]:
    return lambda quick: spectra.whole_training(QUICK if quick else full, small if quick else order)


_MADE: dict[str, Made] = dict(
    (
        _paper("results", SEEDS, _results),
        _paper("results-max", SEEDS, _results, quantity="best"),
        _paper("red-perf-all", SEEDS, _results),
        _paper("speedup", SEEDS, lambda quick: tables.tolerances(_deep(quick))),
        _paper("combined", SEEDS, lambda quick: (*_nuclear(quick), *_distillation(quick))),
        _paper("hnn_vs_compressm", MANY, _nuclear),
        _paper("knowledge-distillation", MANY, _distillation),
        _paper("pragmatic", SEEDS, lambda q: (*tables.pragmatic(_of(q)), *tables.pragmatic(_deep(q)))),
        _paper(
            "hankel_analysis",
            1,
            lambda quick: spectra.every_step(_of(quick), 8, 100 if quick else 25_000),
            picture="hankel",
        ),
        _paper("hank_mnist", 1, _spectra(SMNIST, 64), picture="hankel"),
        _paper("hank_imdb", 1, _spectra(IMDB, 64), picture="hankel"),
        _paper("hank_cifar", 1, lambda q: spectra.whole_training(_deep(q), 16 if q else 57), picture="hankel"),
        _paper(
            "hank_listops",
            1,
            lambda q: spectra.whole_training(QUICK_DEEP if q else LISTOPS, 16 if q else 56),
            picture="hankel",
        ),
        _paper("sanity", MANY, _sanity, picture="curves"),
        _paper("sanity_hankel", 1, lambda q: ablations.selections(_of(q)), picture="spectra", head=0.25),
        _paper("num_red", MANY, _numbers, picture="curves"),
        _paper("num_red_hankel", 1, lambda q: ablations.numbers(_of(q))[:4], picture="spectra", head=0.25),
        _paper("red_window", MANY, _windows, picture="curves"),
        _paper("red_window_hankel", 1, lambda q: ablations.windows(_of(q))[:4], picture="spectra"),
        _paper("timer", 1, lambda q: spectra.timer(_of(q), 8, 8), picture="timer"),
        _paper("reduction-complexity", 1, lambda quick: (), **_BENCH),
        _paper(
            "mamba-cifar",
            SEEDS,
            lambda q: mamba.sizes(QUICK_MAMBA if q else MAMBA_CIFAR, _QUICK_MAMBA if q else _MAMBA),
        ),
        _paper("mamba-imdb", SEEDS, _mamba_imdb, picture="seeds"),
        _paper("mamba-speedup", SEEDS, _mamba_speed),
        _ours("fold", "Ours: conjugate modes folded or not", lambda q: ablations.folds(_of(q))),
        _ours("gramian", "Ours: Gramians for white noise or measured", lambda q: ablations.gramians(_of(q))),
        _ours("moments", "Ours: what happens to the optimizer's moments", lambda q: ablations.moments(_of(q))),
        _ours(
            "policy",
            "Ours: a tolerance for every layer, or one budget of as many states",
            lambda q: ablations.policies(QUICK_DEEP if q else LISTOPS),
        ),
    )
)


def experiment_names() -> list[str]:
    """The paper's labels in their order of dependence, then our own."""
    return list(_MADE)


def find_experiment(name: str, *, quick: bool = False) -> Experiment:
    """By its label in the paper; `quick` is a size that a CPU trains in minutes."""
    if name not in _MADE:
        hint = did_you_mean(name, experiment_names())
        raise ConfigError(
            f"{name!r} is not a table or figure; expected LIST or one of {', '.join(experiment_names())}{hint}"
        )
    return _MADE[name](quick)
