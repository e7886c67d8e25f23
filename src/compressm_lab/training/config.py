"""Recipes of runs as frozen dataclasses with the keys of a recipe file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, final

from compressm.compression import Automatic, CompressionError, Measured, Rollback
from compressm.compression.policies import GATE
from compressm.deploy import named_orders
from compressm.families.choices import RoundTo, as_allowed_orders
from compressm_lab.baselines import ALPHA, TEMPERATURE, HankelNuclearNorm
from compressm_lab.training.model_config import Config, ConfigError, ModelConfig, has_poles

Precision = Literal["float32", "tf32", "bfloat16"]
GramianName = Literal["white_noise", "measured", "modal"]

_MOST_STEPS = 10**9


class _TaskName:
    """A validator that takes the name of a task in the place of its name and options."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        def spread(task: object) -> object:
            return {"name": task} if isinstance(task, str) else task

        return core_schema.no_info_before_validator_function(spread, handler(source))


@final
@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """AdamW and its schedule; `ssm_factor` multiplies the rate of poles, steps and B, which have no weight decay.

    schedule "cosine" warms up from `lowest_rate` for the share `warmup` of all steps and falls back to it.
    class_weights: of the loss in training, one a class in the order of labels; balanced: one over its frequency.
    floor: the loss of a class is −log(p + floor) of its probability p, with 1e-8 as in the paper's own code.
    """

    steps: int
    batch: int
    learning_rate: float
    ssm_factor: float = 1.0
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: float = 0.1
    lowest_rate: float = 1e-7
    clip: float | None = None
    class_weights: Literal["balanced"] | tuple[float, ...] | None = None
    precision: Precision = "float32"
    evaluate_every: int | None = None
    evaluation_batch: int = 500
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    floor: float | None = None

    def __post_init__(self) -> None:
        self._share("floor")
        self._at_least(
            1, "steps", "batch", "evaluate_every", "checkpoint_every", "evaluation_batch", "keep_checkpoints"
        )
        self._at_most(_MOST_STEPS, "steps", "batch", "evaluation_batch", "keep_checkpoints")
        self._at_least(0, "learning_rate", "ssm_factor", "weight_decay", "lowest_rate", "clip")
        if self.schedule == "cosine" and self.lowest_rate > self.learning_rate > 0:
            raise ConfigError(
                f"lowest_rate is {self.lowest_rate}, expected at most learning_rate, {self.learning_rate}"
            )
        if self.clip == 0:
            raise ConfigError("clip is 0, with which no weight moves: expected a norm above 0, or null for no clipping")
        if isinstance(self.class_weights, tuple) and not all(0 < one < math.inf for one in self.class_weights):
            raise ConfigError(f"class_weights is {list(self.class_weights)}, expected finite numbers above 0")
        self._share("warmup")

    def rate(self, step: int) -> float:
        """The learning rate of a gradient step, counted from 1."""
        if self.schedule == "constant":
            return self.learning_rate
        rise = math.floor(self.warmup * self.steps + 1e-9)
        low, high = self.lowest_rate, self.learning_rate
        if step <= rise:
            return low + (high - low) * step / rise
        gone = (step - rise) / max(1, self.steps - rise)
        return low + (high - low) * (1 + math.cos(math.pi * gone)) / 2


@final
@dataclass(frozen=True, kw_only=True)
class AutomaticConfig(Config):
    """The options of `Automatic`, by default its own."""

    every: int | None = None
    settled: float = Automatic.settled
    begin_by: float = Automatic.begin_by
    recover: float = Automatic.recover
    share: float = Automatic.share

    def __post_init__(self) -> None:
        self._at_least(1, "every")
        self._share("settled", "begin_by", "recover", "share")


@final
@dataclass(frozen=True, kw_only=True)
class WhenConfig(Config):
    """Steps of cuts: `warmup_cuts` in the warm-up, every `every` steps from `first` to `last`, or listed in `steps`.

    automatic: `Automatic` finds them during training, with these options or, if it is true, with its own.
    """

    warmup_cuts: int | None = None
    every: int | None = None
    first: int | None = None
    last: int | None = None
    steps: tuple[int, ...] | None = None
    automatic: bool | AutomaticConfig | None = None  # runs of earlier versions have no such key

    def __post_init__(self) -> None:
        ways = ("warmup_cuts", "every", "steps", "automatic")
        given = [name for name in ways if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"when has {' and '.join(given) or 'nothing'}, expected one of {', '.join(ways)}")
        if self.automatic is False:
            raise ConfigError("when: automatic is false: leave it out, and say when in another way")
        if self.every is None and (self.first, self.last) != (None, None):
            raise ConfigError("when: first and last go with every")
        self._at_least(1, "warmup_cuts", "every", "first", "last")
        if self.steps is not None and min(self.steps, default=0) < 1:
            raise ConfigError(f"when: steps is {list(self.steps)!r:.80}, expected at least one step, counted from 1")
        if twice := [step for step, times in Counter(self.steps or ()).items() if times > 1]:
            raise ConfigError(f"when: steps has {twice[0]} more than once, expected every step once")


class _WhenWord:
    """A validator that reads the word automatic as {automatic: true}."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        def spelled(given: object) -> object:
            return {"automatic": True} if given == "automatic" else given

        return core_schema.no_info_before_validator_function(spelled, handler(source))


@final
@dataclass(frozen=True, kw_only=True)
class RollbackConfig(Config):
    """The paper's pragmatic variant: undo a cut after which validation accuracy stays more than `drop` below."""

    drop: float = Rollback.drop
    settle: int | None = None  # default: 1 % of all steps

    def __post_init__(self) -> None:
        self._share("drop")
        self._at_least(1, "settle")


# The options of each kind of cut.
_SELECTIVE = {"baked": ("two_sided", "refit"), "per-channel": ("surrogate", "two_sided"), "shared-index": ("refit",)}


@final
@dataclass(frozen=True, kw_only=True)
class SelectiveConfig(Config):
    """Options of cuts of Mamba layers; None is the default of the `kind`, and some options are only for some kinds."""

    kind: Literal["baked", "per-channel", "shared-index"] = "baked"
    two_sided: bool | None = None
    refit: bool | None = None
    surrogate: Literal["mean", "second_moment", "measured"] | None = None

    def __post_init__(self) -> None:
        known = _SELECTIVE[self.kind]
        if strange := [name for name in self.options if name not in known]:
            raise ConfigError(f"{self.kind} has no {' and no '.join(strange)}, expected {' or '.join(known)}")

    @property
    def options(self) -> dict[str, bool | str]:
        """The options that are set."""
        return {name: value for name, value in vars(self).items() if name != "kind" and value is not None}


POLICIES = ("tau", "rho", "order", "bound", "total_states", "state_bytes", "parameters", "fewer", "loss_tolerance")


@final
@dataclass(frozen=True, kw_only=True)
class CompressionConfig(Config):
    """The options of `Compressor`; exactly one of `POLICIES` is given.

    when: steps; the word automatic stands for {automatic: true}. fewer: states to drop at every cut. loss_tolerance:
    the share by which cuts may raise the loss (`LossTolerance`), on `loss_batches` batches, by default 4, of the size
    training.evaluation_batch from the validation split, the same ones at every cut and for every seed.
    """

    when: Annotated[WhenConfig, _WhenWord()]
    tau: float | None = None
    rho: float | None = None
    order: int | None = None
    bound: float | None = None
    total_states: int | None = None
    state_bytes: int | None = None
    parameters: int | None = None
    fewer: int | None = None
    loss_tolerance: float | None = None  # runs of earlier versions have neither this nor the next key
    loss_batches: int | None = None
    gramian: GramianName = "white_noise"
    calibration_batches: int = Measured.batches
    fold: bool = True
    moments: Literal["transport", "restart", "slice"] = "transport"
    select: Literal["largest", "smallest", "random"] = "largest"
    gate: float = GATE
    round_to: int | tuple[int, ...] | str = 1
    at_least: int = 1
    uniform: bool | None = None
    rollback: RollbackConfig | None = None
    selective: SelectiveConfig | None = None

    def __post_init__(self) -> None:
        given = [name for name in POLICIES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"compression has {' and '.join(given) or 'no policy'}, expected one of {', '.join(POLICIES)}"
            )
        self._share("tau")
        self._share("rho", "gate", above=True, up_to_one=True)
        budgets = ("total_states", "state_bytes", "parameters")
        self._at_least(1, "order", *budgets, "fewer", "at_least", "calibration_batches", "loss_batches")
        self._at_least(0, "loss_tolerance")
        if self.loss_batches is not None and self.loss_tolerance is None:
            raise ConfigError(f"loss_batches is {self.loss_batches} without loss_tolerance, which alone uses it")
        try:
            as_allowed_orders(self.allowed_orders)
        except CompressionError as error:
            raise ConfigError(str(error)) from None
        self._at_least(0, "bound")
        if self.bound is not None and self.gramian == "measured":
            raise ConfigError(
                f"bound is {self.bound} with gramian measured, which has no error bound: expected gramian white_noise,"
                " or another policy, such as tau"
            )

    @property
    def allowed_orders(self) -> RoundTo:
        """The value of `round_to` for a compressor; a word is powers-of-two, or the name of a runtime."""
        return named_orders(self.round_to) if isinstance(self.round_to, str) else self.round_to

    def refusals(self, depth: int) -> Iterator[str]:
        """Policies with which no layer, or no model of this depth, can be cut."""
        if self.rho == 1:
            yield f"compression: rho is {self.rho}, with which nothing is ever cut: expected a number below 1"
        if self.total_states is not None and self.total_states < depth:
            yield f"compression: total_states is {self.total_states} for {depth} layers, expected at least one for each"
        shared = [name for name in ("total_states", "state_bytes", "parameters") if getattr(self, name) is not None]
        if shared and self.selective is not None and self.selective.kind == "per-channel":
            yield (
                f"compression: {shared[0]} is {getattr(self, shared[0])} with selective per-channel, which gives every"
                " channel its own order: expected another policy, such as tau"
            )


@final
@dataclass(frozen=True, kw_only=True)
class SpectraConfig(Config):
    """Records of Hankel singular values, one every `every` steps; `changes` adds max |eig δH| since the last one."""

    every: int
    changes: bool = False

    def __post_init__(self) -> None:
        self._at_least(1, "every")


@final
@dataclass(frozen=True, kw_only=True)
class RegulariserConfig(Config):
    """alpha · loss + beta · penalty of the linear layers; the penalty's gradient is computed every `every` steps.

    hold: add the gradient at every step until it is computed again; otherwise add it once, times `every`. floor, fold
    and over are for hankel-nuclear-norm: the share of σ₁ below which σ count for less, whether modes are folded, and
    whether the σ of a layer are added up or averaged.
    """

    kind: Literal["hankel-nuclear-norm", "hankel-majoriser", "modal-l1"]
    beta: float
    alpha: float = 1.0
    every: int = 1
    hold: bool = True
    floor: float = HankelNuclearNorm.floor
    fold: bool = HankelNuclearNorm.fold
    over: Literal["sum", "mean"] | None = None  # runs of earlier versions have no such key; None is the sum

    def __post_init__(self) -> None:
        self._at_least(0, "alpha", "beta")
        self._at_least(1, "every")
        if not 1e-6 <= self.floor < 1:
            raise ConfigError(f"floor is {self.floor}, expected at least 1e-06 and below 1")
        for name in ("floor", "fold"):
            value = getattr(self, name)
            if self.kind != "hankel-nuclear-norm" and value != getattr(HankelNuclearNorm, name):
                raise ConfigError(f"{name} is {value} with {self.kind}, expected of hankel-nuclear-norm only")
        if self.over is not None and self.kind != "hankel-nuclear-norm":
            raise ConfigError(f"over is {self.over} with {self.kind}, expected of hankel-nuclear-norm only")


@final
@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Config):
    """(1 − alpha) cross-entropy + alpha T² KL to the answers of a teacher: the folder of a run or of a saved model.

    cache: run the teacher on every training example once, before the first step, instead of at every step.
    """

    teacher: str
    temperature: float = TEMPERATURE
    alpha: float = ALPHA
    cache: bool = True

    def __post_init__(self) -> None:
        self._share("alpha", up_to_one=True)
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"temperature is {self.temperature}, expected a number above 0")


@final
@dataclass(frozen=True, kw_only=True)
class TruncationConfig(Config):
    """Orders to which copies of the final model are cut once, and evaluated."""

    orders: tuple[int, ...]
    gramian: GramianName = "white_noise"
    calibration_batches: int = Measured.batches
    fold: bool = True

    def __post_init__(self) -> None:
        self._at_least(1, "calibration_batches")
        if min(self.orders, default=0) < 1 or len(set(self.orders)) < len(self.orders):
            raise ConfigError(f"orders is {list(self.orders)!r:.80}, expected integers of at least 1, each once")


@final
@dataclass(frozen=True, kw_only=True)
class Recipe(Config):
    """One run; runs that differ only in their seed share name and label."""

    name: str
    task: Annotated[dict[str, Any], _TaskName()]
    model: ModelConfig
    training: TrainingConfig
    compression: CompressionConfig | None = None
    spectra: SpectraConfig | None = None
    regulariser: RegulariserConfig | None = None
    distillation: DistillationConfig | None = None
    truncation: TruncationConfig | None = None
    description: str = ""
    label: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.task, str):
            object.__setattr__(self, "task", {"name": self.task})
        if not isinstance(self.task.get("name"), str):
            raise ConfigError(f"task is {self.task!r:.100}, expected its name and options, as in {{name: smnist}}")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed is {self.seed}, expected an integer from 0 to 2**31 - 1")
        for refusal in self._refusals():
            raise ConfigError(refusal)
        if not self.label:
            parts = {"compressed": self.compression, "regularised": self.regulariser, "distilled": self.distillation}
            given = [label for label, part in parts.items() if part is not None]
            object.__setattr__(self, "label", " and ".join(given) or "baseline")

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON and YAML."""
        return asdict(self)

    def _refusals(self) -> Iterator[str]:
        """Parts that the layer of the model, its order or its depth does not allow."""
        compression, truncation, layer = self.compression, self.truncation, self.model.layer
        if compression is not None:
            yield from compression.refusals(self.model.depth)
        selective, own = self.model.selective, self.model.factory is not None
        modal = f"gramian is modal with layer {layer}, whose input chooses its poles: leave it out"
        if selective and compression is not None and compression.bound is not None:
            yield (
                f"compression: bound is {compression.bound} with layer {layer}, whose cuts have no error bound:"
                " expected another policy, such as tau"
            )
        if selective and compression is not None and compression.gramian == "modal":
            yield f"compression: {modal}"
        if not (selective or own) and compression is not None and compression.selective is not None:
            yield f"compression: selective is for layer Mamba, and layer is {layer}: leave it out"
        if self.regulariser is not None and not own and not has_poles(layer):
            yield (
                f"regulariser: {self.regulariser.kind} is for layers with fixed poles, and layer is {layer}:"
                " expected LRU, S5, S4D or LinOSS"
            )
        if truncation is not None and max(truncation.orders) >= self.model.order:
            yield f"truncation: orders has {max(truncation.orders)}, expected less than order, {self.model.order}"
        if selective and truncation is not None and truncation.gramian == "modal":
            yield f"truncation: {modal}"
