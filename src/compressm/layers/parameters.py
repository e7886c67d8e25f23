"""Parameters that change their shapes: new data in place, and DistributedDataParallel wrappers that must be renewed."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def replace_data(parameter: nn.Parameter, data: Tensor) -> None:
    """Replace a parameter's data in place; the shape may change. Hooks and attributes stay, the old gradient goes."""
    parameter.grad = None
    # An earlier loss that is still referenced holds a gradient accumulator of the old shape, which makes the next
    # backward fail ("invalid gradient ... expected shape"); a change of dtype makes torch forget it.
    other = torch.float16 if parameter.dtype != torch.float16 else torch.float32
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = data


# The last entry is raised; a package that can renew wrappers adds its own error.
_errors: list[type[RuntimeError]] = [RuntimeError]


def refuses_with(error: type[RuntimeError]) -> None:
    """Set the error that outdated wrappers raise."""
    _errors.append(error)


def refuse_to_train_(changed: Iterable[nn.Module], but: Iterable[nn.Module] = ()) -> None:
    """Make every wrapper around one of the `changed` modules refuse to train, except the wrappers in `but`.

    Wrappers are found among all living objects, because a module does not know its wrapper.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    modules, spared = set(changed), set(but)
    # Not isinstance, which asks proxies of other packages for their class, nor issubclass, which asks an abstract base
    # of the wrapper; nor a loop. This takes a third of their 0.15 s for 300 000 objects.
    kinds = {id(kind) for kind in _with_subclasses(DistributedDataParallel)}
    things = gc.get_objects()
    living = list(compress(things, map(kinds.__contains__, map(id, map(type, things)))))
    for wrapper in living:
        # A wrapper whose constructor failed has no modules.
        held = set(wrapper.modules()) if "_modules" in vars(wrapper) else set()
        if wrapper not in spared and not refuses(wrapper) and modules & held:
            wrapper.register_forward_pre_hook(_refuse)


def _with_subclasses(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _with_subclasses(derived)


def refuses(wrapper: nn.Module) -> bool:
    """True if the wrapper refuses to train."""
    return _refuse in wrapper._forward_pre_hooks.values()


def trust_(wrapper: nn.Module) -> None:
    """Let a renewed wrapper train again."""
    for key in [key for key, hook in wrapper._forward_pre_hooks.items() if hook is _refuse]:
        del wrapper._forward_pre_hooks[key]


def _refuse(wrapper: nn.Module, args: object) -> None:
    if torch.is_grad_enabled():
        raise _errors[-1](
            "this DistributedDataParallel was made before a cut, or before a state_dict of other orders was loaded,"
            " and would not average gradients: call compressm.rewrap_(model) on every process,"
            " or pass the wrapper to the compressor or to load_checkpoint"
        )
