"""Data in the memory of the device where it fits there, and otherwise batch by batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from compressm.compression import (
    Baked,
    Budget,
    Compressor,
    EnergyTolerance,
    ErrorBound,
    Gramian,
    HankelTracker,
    KeepFraction,
    Largest,
    Measured,
    Modal,
    PerChannel,
    Random,
    Restart,
    Rollback,
    SelectiveMethod,
    SharedIndex,
    Slice,
    Smallest,
    TargetOrder,
    Transport,
    WhiteNoise,
)
from compressm.compression.policies import FewerStates, Policy
from compressm.errors import did_you_mean
from compressm.families.choices import Selection
from compressm.layers import SSMLayer
from compressm.models import (
    BatchNorm,
    EveryStep,
    LastStep,
    LayerNorm,
    MeanPooling,
    NoNorm,
    OneMask,
    PerElement,
    RMSNorm,
    RunningNorm,
    SequenceClassifier,
)
from compressm_lab.data.dataset import Form
from compressm_lab.data.task import Batch, Order, Split, Task, TaskKind
from compressm_lab.training.config import (
    CompressionConfig,
    ConfigError,
    ModelConfig,
    Recipe,
    SelectiveConfig,
    TrainingConfig,
    TruncationConfig,
    WhenConfig,
)
from compressm_lab.training.layers import layer_class, needs_data
from compressm_lab.training.plan import cut_steps, settle_steps

_SHARE = 0.5  # of what is free on a GPU: the rest is for model, gradients and activations


def placed(task: Task, device: torch.device) -> Task:
    """On the device, or as it was where a GPU has no room for it."""
    if device.type == "cuda" and not fits(task, torch.cuda.mem_get_info(device)[0]):
        return task
    return task.to(device)


def fits(task: Task, free: int) -> bool:
    """Whether so many free bytes leave room beside all splits."""
    return sum(split.bytes for split in (task.train, task.validation, task.test)) <= _SHARE * free


def batch_on(device: torch.device, task: Task, split: Split, indices: Tensor) -> Batch:
    """The examples, on the device; nothing is copied where they are there already."""
    home = split.inputs.device
    batch = task.batch(split, indices.to(home))
    if home == device:
        return batch
    return Batch(*(None if part is None else part.to(device, non_blocking=True) for part in batch))  # type: ignore[arg-type]


DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Within it, float32 products run in TF32 if that is what `precision` says, and exactly otherwise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def build_optimizer(model: nn.Module, config: TrainingConfig, device: torch.device) -> AdamW:
    """Two groups: what has the factor and no weight decay, and the rest; on a GPU ready for a CUDA graph.

    Parameters that are marked with `_no_weight_decay`, such as D of Mamba, are a third.
    """
    cuda = device.type == "cuda"
    slow = {id(parameter) for parameter in dynamics(model)}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in slow]
    groups = []
    for factor, decay, members in (
        (config.ssm_factor, 0.0, [p for p in model.parameters() if id(p) in slow]),
        (1.0, 0.0, [p for p in rest if getattr(p, "_no_weight_decay", False)]),
        (1.0, config.weight_decay, [p for p in rest if not getattr(p, "_no_weight_decay", False)]),
    ):
        rate = config.rate(1) * factor
        groups.append(
            {
                "params": largest_first(members),
                "lr": torch.tensor(rate, device=device) if cuda else rate,
                "weight_decay": decay,
                "factor": factor,
            }
        )
    return AdamW([group for group in groups if group["params"]], fused=True, capturable=cuda)


def largest_first(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The order in which torch's fused kernels are fastest.

    They take some thirty tensors a launch and 65536 elements a block: so one launch has all the large tensors and the
    others take no time; in the order of the model each launch waits for a large one.
    """
    return sorted(parameters, key=Tensor.numel, reverse=True)


def dynamics(model: nn.Module) -> Iterator[nn.Parameter]:
    """Poles, steps and the like of every SSM layer."""
    for module in model.modules():
        if isinstance(module, SSMLayer):
            yield from module.dynamics()


def keep_rates_on_(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """A checkpoint brings them back on the CPU, where a CUDA graph would hold their value of the moment for ever."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].to(device)


def set_rate(optimizer: torch.optim.Optimizer, rate: float | Tensor) -> None:
    """Each group's is `rate` times its factor; a tensor is set in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].copy_(rate * group["factor"])
        else:
            group["lr"] = float(rate) * group["factor"]


_NORMS = {"batch": BatchNorm, "running": RunningNorm, "layer": LayerNorm, "rms": RMSNorm, "none": NoNorm}
_POOLINGS = {"mean": MeanPooling(), "last": LastStep(), "steps": EveryStep()}
_DROPOUTS = {"element": PerElement, "batch": OneMask}
_SELECTIVE: dict[str, type[SelectiveMethod]] = {
    "baked": Baked,
    "per-channel": PerChannel,
    "shared-index": SharedIndex,
}
_MOMENTS = {"transport": Transport(), "restart": Restart(), "slice": Slice()}
# The options of a recipe that does not compress, of which no policy is asked.
_UNCUT = CompressionConfig(rho=1.0, when=WhenConfig(steps=(1,)))
_CALIBRATION_SEED = 2**31 - 1


def build_model(config: ModelConfig, task: Task | Form) -> SequenceClassifier:
    """As torch's random numbers initialise it; of a task only its sizes are asked for."""
    layer = layer_class(config.layer)
    _require_options("layer_options", layer, config.layer_options)
    _require_options("norm_options", _NORMS[config.norm], config.norm_options)
    try:
        return SequenceClassifier(
            layer,
            depth=config.depth,
            width=config.width,
            order=config.order,
            classes=task.classes,
            inputs=task.channels,
            vocabulary=task.vocabulary,
            towers=task.towers,
            norm=_NORMS[config.norm](**config.norm_options),
            dropout=_DROPOUTS[config.dropout_form](config.dropout),
            pooling=_POOLINGS[config.pooling],
            layer_options=config.layer_options,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model: {error}") from error


def _require_options(key: str, kind: type, options: Mapping[str, Any]) -> None:
    known = [name for name in inspect.signature(kind).parameters if name not in ("width", "order")]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"model.{key}: {kind.__name__} has no option {option!r}; its options:"
                f" {', '.join(known) or 'none'}{did_you_mean(option, known)}"
            )


def build_compressor(
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    task: Task,
    evaluate: Callable[[], float],
) -> Compressor | None:
    """None where the recipe does not compress; `evaluate` is what a guard asks: the validation's `Score.value`."""
    config = recipe.compression
    if config is None:
        return None
    settle = settle_steps(recipe)
    drop = config.rollback.drop if config.rollback else 0.0
    return Compressor(
        model,
        optimizer,
        when=cut_steps(recipe),
        keep=_policy(config),
        calibrate=_calibration(recipe, task, config.calibration_batches) if _needs_data(recipe, config) else None,
        gramian=_gramian(config),
        selective=build_method(config.selective),
        fold=config.fold,
        select=_selection(config, recipe.seed),
        gate=config.gate,
        round_to=config.round_to,
        at_least=config.at_least,
        moments=_MOMENTS[config.moments],
        guard=None if settle is None else _guard(evaluate, drop, settle, task.kind),
    )


def build_tracker(recipe: Recipe, model: nn.Module, task: Task) -> HankelTracker | None:
    """None where the recipe records no spectra; when it is asked, the plan says.

    Linear layers have the spectra of white noise, selective ones those that cuts go by.
    """
    if recipe.spectra is None:
        return None
    config = recipe.compression or _UNCUT
    selective = needs_data(recipe.model.layer)
    return HankelTracker(
        model,
        every=1,
        fold=config.fold,
        changes=recipe.spectra.changes,
        calibrate=_calibration(recipe, task, config.calibration_batches) if selective else None,
        gramian=_gramian(config) if selective else None,
        selective=build_method(config.selective),
    )


def build_method(config: SelectiveConfig | None) -> SelectiveMethod:
    """How selective layers are cut."""
    return Baked() if config is None else _SELECTIVE[config.kind](**config.options)


def _needs_data(recipe: Recipe, config: CompressionConfig | TruncationConfig) -> bool:
    """Selective layers are cut by what their inputs choose, whatever the Gramian is."""
    return config.gramian == "measured" or needs_data(recipe.model.layer)


def build_truncation(recipe: Recipe, config: TruncationConfig, task: Task) -> dict[str, Any]:
    """The options of `compress_`, but for the order."""
    data = _needs_data(recipe, config)
    return {
        "gramian": _gramian(config),
        "calibrate": _calibration(recipe, task, config.calibration_batches) if data else None,
        "fold": config.fold,
    }


def _gramian(config: CompressionConfig | TruncationConfig) -> Gramian:
    measured = Measured(batches=config.calibration_batches)
    return {"white_noise": WhiteNoise(), "measured": measured, "modal": Modal()}[config.gramian]


def _guard(evaluate: Callable[[], float], drop: float, settle: int, kind: TaskKind) -> Rollback:
    loss = kind is TaskKind.REGRESS
    name = f"validation {'loss' if loss else 'accuracy'}"
    return Rollback(evaluate, drop=drop, settle=settle, measures=name, lower_is_better=loss)


def _policy(config: CompressionConfig) -> Policy:
    if config.tau is not None:
        return EnergyTolerance(config.tau)
    if config.rho is not None:
        return KeepFraction(config.rho)
    if config.order is not None:
        return TargetOrder(config.order)
    if config.bound is not None:
        return ErrorBound(config.bound)
    if config.fewer is not None:
        return FewerStates(config.fewer)
    assert config.total_states is not None
    return Budget(config.total_states)


def _selection(config: CompressionConfig, seed: int) -> Selection:
    return {"largest": Largest(), "smallest": Smallest(), "random": Random(seed)}[config.select]


def _calibration(recipe: Recipe, task: Task, batches: int) -> Callable[[nn.Module], None]:
    """Runs the model on training examples that are the same for every seed and every cut."""
    size = min(recipe.training.batch, len(task.train))
    order = Order(len(task.train), size, _CALIBRATION_SEED)
    rows = [order.at(step) for step in range(1, batches + 1)]

    def run(model: Any) -> None:
        for row in rows:
            batch = batch_on(next(model.parameters()).device, task, task.train, row)
            model(batch.inputs, batch.lengths)

    return run
