"""Parts of a run, built from its recipe: placed data, model, optimizer, compressor and tracker."""

from __future__ import annotations

import inspect
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from compressm import compression, models
from compressm.adapters import find
from compressm.compression import Compressor, HankelTracker, SelectiveMethod, save_model
from compressm.compression.policies import FewerStates, Policy
from compressm.errors import SavingError, did_you_mean
from compressm.families import family_of
from compressm.layers import SSMLayer
from compressm_lab.data.dataset import Form
from compressm_lab.data.task import Batch, Order, Split, Task, TaskKind, seeded
from compressm_lab.training import config as recipes
from compressm_lab.training.config import Recipe, TrainingConfig
from compressm_lab.training.model_config import ConfigError, ModelConfig, layer_class, model_factory
from compressm_lab.training.plan import automatic, cut_steps, settle_steps

# The share of free GPU memory that data may take: the rest is for model, gradients and activations.
_SHARE = 0.5
DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}
# Options of recipes, as objects of the library.
_NORMS = {
    "batch": models.BatchNorm,
    "running": models.RunningNorm,
    "layer": models.LayerNorm,
    "rms": models.RMSNorm,
    "none": models.NoNorm,
}
_POOLINGS = {"mean": models.MeanPooling(), "last": models.LastStep(), "steps": models.EveryStep()}
# The question of each kind of task, and the poolings that answer it.
_ASKED = {
    TaskKind.CLASSIFY: ("one class a sequence", ("mean", "last")),
    TaskKind.LABEL_STEPS: ("one class a step", ("steps",)),
    TaskKind.REGRESS: ("outputs at every step", ("steps",)),
    TaskKind.PREDICT: ("outputs of a sequence", ("mean", "last")),
}
_DROPOUTS = {"element": models.PerElement, "batch": models.OneMask}
_SELECTIVE: dict[str, type[SelectiveMethod]] = {
    "baked": compression.Baked,
    "per-channel": compression.PerChannel,
    "shared-index": compression.SharedIndex,
}
_MOMENTS = {"transport": compression.Transport(), "restart": compression.Restart(), "slice": compression.Slice()}
_POLICIES: dict[str, Callable[[Any], Policy]] = {
    "tau": compression.EnergyTolerance,
    "rho": compression.KeepFraction,
    "order": compression.TargetOrder,
    "bound": compression.ErrorBound,
    "fewer": FewerStates,
    "total_states": compression.Budget,
    "state_bytes": lambda limit: compression.Budget(state_bytes=limit),
    "parameters": lambda limit: compression.Budget(parameters=limit),
}
_CALIBRATION_SEED = 2**31 - 1
_LOSS_BATCHES = 4  # batches of validation data on which trial cuts are judged


def placed(task: Task, device: torch.device) -> Task:
    """The task on `device`, unless it does not fit into GPU memory."""
    if device.type == "cuda" and not fits(task, torch.cuda.mem_get_info(device)[0]):
        return task
    return task.to(device)


def fits(task: Task, free: int) -> bool:
    """Tell if all splits fit into the share of `free` bytes that data may take."""
    return sum(split.bytes for split in (task.train, task.validation, task.test)) <= _SHARE * free


def batch_on(device: torch.device, task: Task, split: Split, indices: Tensor) -> Batch:
    """A batch of these examples on `device`; nothing is copied if the split is already there."""
    home = split.inputs.device
    batch = task.batch(split, indices.to(home))
    if home == device:
        return batch
    return Batch(*(None if part is None else part.to(device, non_blocking=True) for part in batch))  # type: ignore[arg-type]


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """A context in which float32 products run in TF32 if `precision` is "tf32", and exactly otherwise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def build_optimizer(model: nn.Module, config: TrainingConfig, device: torch.device) -> AdamW:
    """AdamW with up to three groups: dynamics, parameters marked `_no_weight_decay` as D of Mamba, and the rest.

    Dynamics have `ssm_factor` times the rate and no weight decay. On a GPU the optimizer is ready for a CUDA graph.
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
        lr = torch.tensor(rate, device=device) if cuda else rate
        if members:
            groups.append({"params": largest_first(members), "lr": lr, "weight_decay": decay, "factor": factor})
    return AdamW(groups, fused=True, capturable=cuda)


def largest_first(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Sort parameters by size, the order in which torch's fused kernels are fastest."""
    # They take some thirty tensors a launch and 65536 elements a block: so one launch has all the large tensors and
    # the others take no time; in the order of the model each launch waits for a large one.
    return sorted(parameters, key=Tensor.numel, reverse=True)


def dynamics(model: nn.Module) -> Iterator[nn.Parameter]:
    """Poles, steps and the like of every SSM layer."""
    for module in model.modules():
        if isinstance(module, SSMLayer):
            yield from module.dynamics()


def keep_rates_on_(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move learning rates that a checkpoint brought back on the CPU: a CUDA graph would never see them change there."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].to(device)


def set_rate(optimizer: torch.optim.Optimizer, rate: float | Tensor) -> None:
    """Set every group's learning rate to `rate` times its factor; a tensor is changed in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].copy_(rate * group["factor"])
        else:
            group["lr"] = float(rate) * group["factor"]


def build_model(config: ModelConfig, task: Task | Form) -> nn.Module:
    """A new model with random weights from torch's generator, of the sizes that the task has."""
    require_fit(config, task.kind)
    _require_memory(config)
    if config.factory is not None:
        return _made(config, config.factory, task)
    try:
        return models.SequenceClassifier(
            layer_class(config.layer),
            depth=config.depth,
            width=config.width,
            order=config.order,
            classes=task.classes,
            inputs=task.channels,
            vocabulary=task.vocabulary,
            towers=task.towers,
            norm=_NORMS[config.norm](**config.norm_options),
            dropout=_DROPOUTS[config.dropout_form](config.dropout),
            gelu=config.gelu or "exact",
            pooling=_POOLINGS[config.pooling],
            layer_options=config.layer_options,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model: {error}") from error


def _made(config: ModelConfig, place: str, task: Task | Form) -> nn.Module:
    """The model of a factory; refuse one that cannot be saved, or answers in another shape, before it is trained."""
    build = model_factory(place)
    sizes = {"inputs": task.channels, "depth": config.depth, "width": config.width, "order": config.order}
    sizes |= {name: getattr(task, name) for name in ("vocabulary", "towers", "classes", "length")}
    named = {name: value for name, value in sizes.items() if name in inspect.signature(build).parameters}
    given = config.options or {}
    if both := [name for name in given if name in sizes]:
        raise ConfigError(
            f"model.options has {both[0]}, which the factory takes from the task and the model: leave it out"
        )
    try:
        inspect.signature(build).bind(**named, **given)
    except TypeError as error:
        raise ConfigError(
            f"model.factory: {place}{inspect.signature(build)} cannot be called with {', '.join((*named, *given))}:"
            f" {error}"
        ) from None
    model = build(**named, **given)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.factory: {place} returns {model!r:.80}, expected an nn.Module")
    try:
        with tempfile.TemporaryDirectory() as folder:
            save_model(model, folder)
    except SavingError as error:
        raise ConfigError(f"model.factory: {place} makes a model that cannot be saved: {error}") from error
    if isinstance(task, Task):
        _require_answers(model, place, task)
    return model


@torch.no_grad()
def _require_answers(model: nn.Module, place: str, task: Task) -> None:
    """Refuse a model whose answers to two examples have another shape than the task asks for."""
    batch = batch_on(torch.device("cpu"), task, task.train, torch.arange(min(2, len(task.train))))
    steps = (batch.inputs.shape[-1 if task.channels is None else 1],) if task.kind.asks_steps else ()
    wanted = (len(batch.targets), *steps, task.classes)
    try:
        answers = model.eval()(batch.inputs, batch.lengths)
    except TypeError as error:
        raise ConfigError(
            f"model.factory: the model of {place} is called as model(inputs, lengths): {error}"
        ) from error
    finally:
        model.train()
    if not isinstance(answers, Tensor) or tuple(answers.shape) != wanted:
        came = tuple(answers.shape) if isinstance(answers, Tensor) else f"a {type(answers).__name__}"
        raise ConfigError(f"model.factory: the model of {place} answers with {came}, expected {wanted}")


def _require_memory(config: ModelConfig) -> None:
    """Refuse a model that surely is too large for this machine: torch would be killed without a word."""
    # No layer has fewer numbers than a pair of real ones for each channel and state.
    least = 4 * config.depth * config.width * (2 * config.order + config.width)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
    if least > there:
        sizes = f"depth {config.depth}, width {config.width} and order {config.order}"
        raise ConfigError(
            f"model: {sizes} need at least {least:,} bytes, and this machine has {there:,}: set smaller ones"
        )


def require_fit(config: ModelConfig, kind: TaskKind) -> None:
    """Refuse answers of another shape than the task asks for, and options that layer or norm do not have."""
    if config.factory is not None:  # asked once it is built
        return
    asked, fitting = _ASKED[kind]
    if config.pooling not in fitting:
        raise ConfigError(
            f"model.pooling is {config.pooling}, and the task asks for {asked}: expected {' or '.join(fitting)}"
        )
    _require_options("layer_options", layer_class(config.layer), config.layer_options)
    _require_options("norm_options", _NORMS[config.norm], config.norm_options)


def _require_options(key: str, kind: type, options: Mapping[str, Any]) -> None:
    given = {name: found.default for name, found in inspect.signature(kind).parameters.items()}
    # Of the others a default is an object of Python, which no recipe can hold.
    plain = (int, float, str, list, tuple, dict, type(None), type)
    known = [name for name, usual in given.items() if name not in ("width", "order") and isinstance(usual, plain)]
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
    loss: Callable[[nn.Module], float],
) -> Compressor | None:
    """The compressor of a recipe, None without compression.

    A guard calls `evaluate` for the validation score, and trial cuts call `loss` with a cut copy.
    """
    config = recipe.compression
    if config is None:
        return None
    if config.loss_tolerance is not None:
        policy: Policy = compression.LossTolerance(config.loss_tolerance, loss=loss)
    else:
        (policy,) = (make(given) for name, make in _POLICIES.items() if (given := getattr(config, name)) is not None)
    guard, settle, errors = None, settle_steps(recipe), task.kind.is_regression
    if config.rollback is not None and settle is not None:
        measures = f"validation {'loss' if errors else 'accuracy'}"
        guard = compression.Rollback(
            evaluate, drop=config.rollback.drop, settle=settle, measures=measures, lower_is_better=errors
        )
    selections = {
        "largest": compression.Largest(),
        "smallest": compression.Smallest(),
        "random": compression.Random(recipe.seed),
    }
    return Compressor(
        model,
        optimizer,
        when=automatic(recipe) or cut_steps(recipe),
        keep=policy,
        **build_truncation(recipe, config, task, model),
        selective=build_method(config.selective),
        select=selections[config.select],
        gate=config.gate,
        round_to=config.allowed_orders,
        at_least=config.at_least,
        uniform=config.uniform,
        moments=_MOMENTS[config.moments],
        guard=guard,
    )


def held_out(recipe: Recipe, task: Task) -> Split:
    """The validation examples on which trial cuts are judged, the same ones at every cut and for every seed."""
    config, split = recipe.compression, task.validation
    batches = (None if config is None else config.loss_batches) or _LOSS_BATCHES
    count = min(len(split), batches * recipe.training.evaluation_batch)
    chosen = torch.randperm(len(split), generator=seeded(_CALIBRATION_SEED))[:count].sort().values
    return split.select(chosen.to(split.inputs.device))


def build_tracker(recipe: Recipe, model: nn.Module, task: Task) -> HankelTracker | None:
    """The tracker of a recipe, None without spectra; the plan decides when it records.

    Linear layers have the spectra of white noise, selective ones those that cuts go by.
    """
    if recipe.spectra is None:
        return None
    # A recipe without compression has the defaults, whatever the policy.
    config = recipe.compression or recipes.CompressionConfig(rho=1.0, when=recipes.WhenConfig(steps=(1,)))
    options: dict[str, Any] = {"fold": config.fold}
    if only_with_data(model):
        options = build_truncation(recipe, config, task, model)
    method = build_method(config.selective)
    return HankelTracker(model, every=1, changes=recipe.spectra.changes, selective=method, **options)


def only_with_data(model: nn.Module) -> bool:
    """Tell if a model has layers that can only be cut with data, as selective ones."""
    return any(family_of(adapter).needs_data for _, adapter in find(model).values())


def build_method(config: recipes.SelectiveConfig | None) -> SelectiveMethod:
    """The method that cuts selective layers."""
    return compression.Baked() if config is None else _SELECTIVE[config.kind](**config.options)


def build_truncation(
    recipe: Recipe, config: recipes.CompressionConfig | recipes.TruncationConfig, task: Task, model: nn.Module
) -> dict[str, Any]:
    """Options of a cut that a compressor and `compress_` share: Gramian, calibration and folding."""
    batches = config.calibration_batches
    gramians = {
        "white_noise": compression.WhiteNoise(),
        "measured": compression.Measured(batches=batches),
        "modal": compression.Modal(),
    }
    gramian: compression.Gramian | None = gramians[config.gramian]
    method, selective = build_method(getattr(config, "selective", None)), only_with_data(model)
    if selective and method.measures(gramian) != isinstance(gramian, compression.Measured):
        gramian = None  # the method says itself what is measured
    # Selective layers are cut by what their inputs choose, whatever the Gramian is.
    data = config.gramian == "measured" or selective
    calibrate = _calibration(recipe, task, batches) if data else None
    return {"gramian": gramian, "calibrate": calibrate, "fold": config.fold}


def _calibration(recipe: Recipe, task: Task, batches: int) -> Callable[[nn.Module], None]:
    """A function that runs a model on training examples, the same ones for every seed and every cut."""
    size = min(recipe.training.batch, len(task.train))
    order = Order(len(task.train), size, _CALIBRATION_SEED)
    rows = [order.at(step) for step in range(1, batches + 1)]

    def run(model: Any) -> None:
        for row in rows:
            batch = batch_on(next(model.parameters()).device, task, task.train, row)
            model(batch.inputs, batch.lengths)

    return run
