"""Parameters whose shapes change: new data in place, and DistributedDataParallel that waits to be renewed."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def replace_data(parameter: nn.Parameter, data: Tensor) -> None:
    """The parameter stays the same object with its hooks and attributes; its gradient, of the old data, is dropped."""
    parameter.grad = None
    # A loss of before that is still referenced holds a gradient accumulator of the old shape, with which the next
    # backward fails ("invalid gradient ... expected shape"); a change of dtype makes torch forget it.
    other = torch.float16 if parameter.dtype != torch.float16 else torch.float32
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = data


# What is raised; whoever can make wrappers anew has an error of its own for it.
_errors: list[type[RuntimeError]] = [RuntimeError]


def refuses_with(error: type[RuntimeError]) -> None:
    """Let wrappers refuse with this error."""
    _errors.append(error)


def refuse_to_train_(changed: Iterable[nn.Module], but: Iterable[nn.Module] = ()) -> None:
    """After parameters of these modules have changed their shapes: every wrapper around one of them, but for those.

    They are found among all living objects: a module does not know what stands around it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    modules, spared = set(changed), set(but)
    # Not isinstance, which asks proxies of other packages for their class, nor issubclass, which asks an abstract base
    # of the wrapper; nor a loop: of the 0.15 s that these take for 300 000 objects, a third is left.
    kinds = {id(kind) for kind in _with_subclasses(DistributedDataParallel)}
    things = gc.get_objects()
    living = list(compress(things, map(kinds.__contains__, map(id, map(type, things)))))
    for wrapper in living:
        # One whose constructor has failed has no modules.
        held = set(wrapper.modules()) if "_modules" in vars(wrapper) else set()
        if wrapper not in spared and not refuses(wrapper) and modules & held:
            wrapper.register_forward_pre_hook(_refuse)


def _with_subclasses(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _with_subclasses(derived)


def refuses(wrapper: nn.Module) -> bool:
    """Whether it would not train now."""
    return _refuse in wrapper._forward_pre_hooks.values()


def trust_(wrapper: nn.Module) -> None:
    """It has been made anew."""
    for key in [key for key, hook in wrapper._forward_pre_hooks.items() if hook is _refuse]:
        del wrapper._forward_pre_hooks[key]


def _refuse(wrapper: nn.Module, args: object) -> None:
    if torch.is_grad_enabled():
        raise _errors[-1](
            "this DistributedDataParallel was made before a cut, or before the state_dict of other orders was loaded,"
            " and would not average gradients: call compressm.rewrap_(model) on every process after that,"
            " or give the wrapper to the compressor or to load_checkpoint"
        )
