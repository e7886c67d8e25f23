"""What a run is made of: frozen values, checked when they are made, equal to what a recipe file holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, final

Precision = Literal["float32", "tf32", "bfloat16"]


class ConfigError(ValueError):
    """A recipe that cannot be run."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Unknown keys are errors wherever one is read from a file."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    def _at_least(self, low: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= low):
                finite = "" if math.isfinite(value) else "a finite number, "
                raise ConfigError(f"{name} is {value}, expected {finite}at least {low}")

    def _share(self, *names: str, above: bool = False, up_to_one: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            if not ((value > 0 if above else value >= 0) and (value <= 1 if up_to_one else value < 1)):
                low, high = "above 0" if above else "at least 0", "at most 1" if up_to_one else "below 1"
                raise ConfigError(f"{name} is {value}, expected a number {low} and {high}")


class _LayerName:
    """Lets pydantic refuse the name of a layer where it stands in a recipe."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import PydanticCustomError, core_schema

        def checked(name: object) -> object:
            try:
                _layers().layer_class(name)
            except ConfigError as error:
                raise PydanticCustomError("layer", "{said}", {"said": str(error)}) from error
            return name

        return core_schema.no_info_plain_validator_function(checked)


@final
@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """A `SequenceClassifier`; its inputs and classes are those of the task.

    layer: LRU, S5, S4D, Mamba, or a class of your own, "package.module:Name", that is built as (width, order=n).
    dropout_form: "batch" is one mask for the whole batch, as in the paper's own code, "element" one for every element.
    pooling: "steps" keeps every step, for tasks that ask at each of them.
    """

    depth: int
    width: int
    order: int
    layer: Annotated[str, _LayerName()] = "LRU"
    layer_options: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.1
    dropout_form: Literal["element", "batch"] = "batch"
    norm: Literal["batch", "running", "layer", "rms", "none"] = "batch"
    norm_options: dict[str, Any] = field(default_factory=dict)
    pooling: Literal["mean", "last", "steps"] = "mean"

    def __post_init__(self) -> None:
        self._at_least(1, "depth", "width", "order")
        self._share("dropout")
        try:
            _layers().layer_class(self.layer)
        except ConfigError as error:
            raise ConfigError(f"layer is {self.layer!r}: {error}") from error


@final
@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """AdamW and its schedule; `ssm_factor` multiplies the rate of poles, steps and B, which have no weight decay.

    schedule "cosine" warms up from `lowest_rate` for the share `warmup` of all steps and falls back to it.
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
    precision: Precision = "float32"
    evaluate_every: int | None = None
    evaluation_batch: int = 500
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        self._at_least(
            1, "steps", "batch", "evaluate_every", "checkpoint_every", "evaluation_batch", "keep_checkpoints"
        )
        self._at_least(0, "learning_rate", "ssm_factor", "weight_decay", "lowest_rate", "clip")
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
class WhenConfig(Config):
    """Steps of cuts: `warmup_cuts` in the warm-up, `every` k-th from `first` to `last`, or the `steps` themselves."""

    warmup_cuts: int | None = None
    every: int | None = None
    first: int | None = None
    last: int | None = None
    steps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("warmup_cuts", "every", "steps") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"when has {' and '.join(given) or 'nothing'}, expected one of warmup_cuts, every, steps")
        if self.every is None and (self.first, self.last) != (None, None):
            raise ConfigError("when: first and last go with every")
        self._at_least(1, "warmup_cuts", "every", "first", "last")
        if self.steps is not None and min(self.steps, default=0) < 1:
            raise ConfigError(f"when: steps is {list(self.steps)!r:.80}, expected at least one step, counted from 1")


@final
@dataclass(frozen=True, kw_only=True)
class RollbackConfig(Config):
    """The paper's pragmatic variant: undo a cut after which validation accuracy stays more than `drop` below."""

    drop: float = 0.01
    settle: int | None = None  # default: 1 % of all steps

    def __post_init__(self) -> None:
        self._share("drop")
        self._at_least(1, "settle")


# What each kind of cut can be told.
_SELECTIVE = {"baked": ("two_sided", "refit"), "per-channel": ("surrogate", "two_sided"), "shared-index": ("refit",)}


@final
@dataclass(frozen=True, kw_only=True)
class SelectiveConfig(Config):
    """How Mamba layers are cut: the kind, with options that only some kinds have; None is the default of the kind."""

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
        """Those that were given."""
        given = {"two_sided": self.two_sided, "refit": self.refit, "surrogate": self.surrogate}
        return {name: value for name, value in given.items() if value is not None}


_POLICIES = ("tau", "rho", "order", "bound", "total_states", "fewer")


@final
@dataclass(frozen=True, kw_only=True)
class CompressionConfig(Config):
    """The options of `Compressor`; the policy is the one of `_POLICIES` that is given.

    fewer: so many states less at every cut.
    """

    when: WhenConfig
    tau: float | None = None
    rho: float | None = None
    order: int | None = None
    bound: float | None = None
    total_states: int | None = None
    fewer: int | None = None
    gramian: Literal["white_noise", "measured", "modal"] = "white_noise"
    calibration_batches: int = 4
    fold: bool = True
    moments: Literal["transport", "restart", "slice"] = "transport"
    select: Literal["largest", "smallest", "random"] = "largest"
    gate: float = 0.95
    round_to: int = 1
    at_least: int = 1
    rollback: RollbackConfig | None = None
    selective: SelectiveConfig | None = None

    def __post_init__(self) -> None:
        given = [name for name in _POLICIES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"compression has {' and '.join(given) or 'no policy'}, expected one of {', '.join(_POLICIES)}"
            )
        self._share("tau")
        self._share("rho", above=True, up_to_one=True)
        self._share("gate", above=True, up_to_one=True)
        self._at_least(1, "order", "total_states", "fewer", "round_to", "at_least", "calibration_batches")
        self._at_least(0, "bound")
        if self.bound is not None and self.gramian == "measured":
            raise ConfigError(
                f"bound is {self.bound} with gramian measured, which has no error bound: expected gramian white_noise,"
                " or another policy, such as tau"
            )


@final
@dataclass(frozen=True, kw_only=True)
class SpectraConfig(Config):
    """Hankel singular values `every` so many steps; `changes` adds max |eig δH| since the record before."""

    every: int
    changes: bool = False

    def __post_init__(self) -> None:
        self._at_least(1, "every")


@final
@dataclass(frozen=True, kw_only=True)
class RegulariserConfig(Config):
    """alpha · loss + beta · penalty of the linear layers; the gradient of the penalty is found `every` so many steps.

    hold: it is added at every step until it is found again; otherwise once, with `every` times its weight. floor and
    fold are for hankel-nuclear-norm: the share of σ₁ below which σ count for less, and whether modes are folded.
    """

    kind: Literal["hankel-nuclear-norm", "hankel-majoriser", "modal-l1"]
    beta: float
    alpha: float = 1.0
    every: int = 1
    hold: bool = True
    floor: float = 1e-4
    fold: bool = True

    def __post_init__(self) -> None:
        self._at_least(0, "alpha", "beta")
        self._at_least(1, "every")
        if not 1e-6 <= self.floor < 1:
            raise ConfigError(f"floor is {self.floor}, expected at least 1e-06 and below 1")
        for name, usual in (("floor", 1e-4), ("fold", True)):
            if self.kind != "hankel-nuclear-norm" and getattr(self, name) != usual:
                raise ConfigError(
                    f"{name} is {getattr(self, name)} with {self.kind}, expected of hankel-nuclear-norm only"
                )


@final
@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Config):
    """(1 − alpha) cross-entropy + alpha T² KL to the answers of a teacher: the folder of a run or of a saved model.

    cache: the teacher is asked about every training example once, before the first step, instead of at every step.
    """

    teacher: str
    temperature: float = 2.0
    alpha: float = 0.5
    cache: bool = True

    def __post_init__(self) -> None:
        self._share("alpha", up_to_one=True)
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"temperature is {self.temperature}, expected a number above 0")


@final
@dataclass(frozen=True, kw_only=True)
class TruncationConfig(Config):
    """After the last step copies of the model are cut once to each of `orders`, and evaluated."""

    orders: tuple[int, ...]
    gramian: Literal["white_noise", "measured", "modal"] = "white_noise"
    calibration_batches: int = 4
    fold: bool = True

    def __post_init__(self) -> None:
        self._at_least(1, "calibration_batches")
        if min(self.orders, default=0) < 1 or len(set(self.orders)) < len(self.orders):
            raise ConfigError(f"orders is {list(self.orders)!r:.80}, expected integers of at least 1, each once")


@final
@dataclass(frozen=True, kw_only=True)
class Recipe(Config):
    """One run. Runs with the same name and label and other seeds belong together."""

    name: str
    task: dict[str, Any]
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
        if not isinstance(self.task.get("name"), str):
            raise ConfigError(f"task is {self.task!r:.100}, expected its name and options, as in {{name: smnist}}")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed is {self.seed}, expected an integer from 0 to 2**31 - 1")
        if self.compression is not None:
            _require_selective(self.compression, self.model.layer)
        _require_comparable(self)
        if not self.label:
            parts = {"compressed": self.compression, "regularised": self.regulariser, "distilled": self.distillation}
            given = [label for label, part in parts.items() if part is not None]
            object.__setattr__(self, "label", " and ".join(given) or "baseline")

    def as_dict(self) -> dict[str, Any]:
        """For JSON and YAML."""
        return asdict(self)


def _layers() -> ModuleType:
    """Layers by name: loaded when a recipe is made, since they bring in torch and need the errors here."""
    from compressm_lab.training import layers

    return layers


def _require_selective(compression: CompressionConfig, layer: str) -> None:
    """What the input chooses has no error bound, and what it does not choose is not cut by averages over data."""
    selective = _layers().needs_data(layer)
    if selective and compression.bound is not None:
        raise ConfigError(
            f"compression: bound is {compression.bound} with layer {layer}, whose cuts have no error bound: expected"
            " another policy, such as tau"
        )
    if selective and compression.gramian == "modal":
        raise ConfigError(f"compression: {_modal(layer)}")
    if not selective and compression.selective is not None:
        raise ConfigError(f"compression: selective is for layer Mamba, and layer is {layer}: leave it out")


def _require_comparable(recipe: Recipe) -> None:
    """What the other methods need of the model."""
    model, truncation = recipe.model, recipe.truncation
    selective = _layers().needs_data(model.layer)
    if recipe.regulariser is not None and selective:
        raise ConfigError(
            f"regulariser: {recipe.regulariser.kind} is for layers that are linear systems, and layer is {model.layer}:"
            " expected LRU, S5 or S4D"
        )
    if truncation is not None and max(truncation.orders) >= model.order:
        raise ConfigError(f"truncation: orders has {max(truncation.orders)}, expected less than order, {model.order}")
    if truncation is not None and truncation.gramian == "modal" and selective:
        raise ConfigError(f"truncation: {_modal(model.layer)}")


def _modal(layer: str) -> str:
    return f"gramian is modal with layer {layer}, whose input chooses its poles: leave it out"
