"""AdamW with the groups that SSM layers want, and learning rates as a function of the step alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from compressm.layers import SSMLayer
from compressm.training.config import TrainingConfig


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
