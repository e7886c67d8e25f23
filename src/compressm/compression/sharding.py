"""Models sharded by `fully_shard` (FSDP2): parameters and moments are gathered for a cut, and sharded again in place.

torch has no call that resizes a sharded parameter, so this uses what it keeps of each: a cut needs room for the whole
parameters of the model, and for the moments of its SSM layers, in every process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
from torch import Tensor, nn

from compressm.adapters import find
from compressm.adapters.base import read_with
from compressm.compression.several import parts_of, tensors_in
from compressm.control.validation import values_unread
from compressm.errors import CompressionError

# Models whose parameters are gathered at present.
_GATHERED: WeakSet[nn.Module] = WeakSet()
# The forward passes of sharded modules; only their graphs hold them.
_PASSES: WeakSet[_Pass] = WeakSet()


def is_sharded(model: nn.Module) -> bool:
    """True if `fully_shard` was called on the model or on a part of it."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


def require_whole(said: str, model: nn.Module, error: type[Exception] = CompressionError) -> None:
    """Refuse a sharded model where only a whole one can be used."""
    if is_sharded(model):
        raise error(
            f"{said} is sharded by fully_shard: expected a whole model, such as a copy that was made before sharding"
            " and has loaded the full state dict"
        )


def is_gathered(model: nn.Module) -> bool:
    """True inside `gathered` of this model, if it is sharded."""
    return model in _GATHERED


class _Pass:
    """A forward pass of a module, called by torch before the backward pass goes through the module's outputs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = ref(module)
        self.is_open = True

    def __call__(self, _: Any) -> None:
        self.is_open = False


def note_passes_(model: nn.Module, owner: object) -> None:
    """Note the forward passes of sharded modules with SSM layers, as long as the owner lives.

    torch keeps the same of a forward pass whether a backward pass follows or not.
    """
    if not is_sharded(model):
        return
    inside = {id(p) for module, _ in find(model).values() for p in module.parameters()}
    begun: Any = torch.compiler.disable(_begun)  # type: ignore[no-untyped-call]
    for module, state in _states(model):
        if any(id(part.sharded_param) in inside for part in _parts(state)):
            finalize(owner, module.register_forward_hook(begun).remove).atexit = False


def _begun(module: nn.Module, _: Any, output: Any) -> None:
    nodes = {tensor.grad_fn for tensor in tensors_in(output, depth=8) if tensor.grad_fn is not None}
    # Calibration runs the model without FSDP.
    if nodes and getattr(module, "_is_fsdp_managed_module", False):
        one = _Pass(module)
        _PASSES.add(one)
        for node in nodes:
            node.register_prehook(one)


def require_no_open_pass(model: nn.Module) -> None:
    """Refuse a cut of a sharded model between a forward pass and its backward pass, in which torch would crash."""
    waiting = {one.module() for one in list(_PASSES) if one.is_open}
    for name, module in model.named_modules():
        if module in waiting:
            raise CompressionError(
                f"{name or 'the model'} is sharded by fully_shard, and a forward pass of it waits for its backward"
                " pass, in which torch would crash after a cut: expected a cut after backward() and the optimizer's"
                " step; run passes without a backward pass in torch.no_grad(), or delete what they gave"
            )


def orders_by_shapes(model: nn.Module) -> dict[str, int]:
    """The orders of the layers of a sharded model; nothing is sent."""
    orders = {}
    for name, (module, adapter) in find(model).items():
        zeros = {key: torch.zeros(p.shape, dtype=p.dtype) for key, p in module.named_parameters()}
        with values_unread():
            orders[name] = int(read_with(adapter, module, zeros).order)
    return orders


@contextmanager
def gathered(model: nn.Module, optimizer: Any | None = None) -> Iterator[None]:
    """Plain parameters and moments inside the block, sharded as before after it, with the shapes they have then.

    The optimizer keeps its groups. Parameters of other shapes than before are new objects in model and optimizer. All
    processes must enter it. Of a model that is not sharded nothing changes.
    """
    if is_gathered(model) or not is_sharded(model):
        yield
        return
    shards = _shards_of(model)
    with ExitStack() as stack:
        stack.callback(_GATHERED.discard, model)
        _GATHERED.add(model)
        _without_hooks_(model, stack)
        inside = {id(p) for module, _ in find(model).values() for p in module.parameters()}
        stack.callback(_shard_, shards, optimizer)
        for shard in shards:
            shard.gather_()
            if optimizer is not None:
                _replace_(optimizer, shard.sharded, shard.plain)
                if id(shard.sharded) in inside:
                    _gather_moments_(optimizer, shard.plain)
        yield


def require_no_new_parameters(model: nn.Module, added: list[str]) -> None:
    """Refuse a cut that adds parameters to a sharded model: FSDP would not know them."""
    if added and is_gathered(model):
        raise CompressionError(
            f"the cut adds {', '.join(added[:4])}, but the model is sharded by fully_shard, which shards no parameters"
            " that come later: expected a form that adds none, such as selective=Baked(), or a cut before sharding"
        )


class _Shard:
    """A parameter that FSDP2 shards: `sharded` in the model and the optimizer, `plain` while it is gathered."""

    def __init__(self, name: str, inside: Any) -> None:
        self._name, self._inside = name, inside
        self.sharded: nn.Parameter = inside.sharded_param
        self.plain = self.sharded
        self._version = 0
        self._require()

    def _require(self) -> None:
        said = None
        if getattr(self._inside, "offload_to_cpu", False):
            said = "offloads parameters to the CPU"
        elif self._inside.is_dtensor or self._inside.mesh_info.mesh.ndim != 1:
            said = "shards over more than one axis of a mesh, or beside tensor parallelism"
        elif self._inside.fsdp_placement.dim != 0:
            said = f"shards it along axis {self._inside.fsdp_placement.dim}, which must divide evenly"
        if said is not None:
            raise CompressionError(
                f"fully_shard of {self._name} {said}: expected one axis, axis 0 of the parameter, and no offloading; or"
                " cut the model before it is sharded"
            )

    def gather_(self) -> None:
        """Put the whole parameter into the model."""
        whole = _whole(self.sharded)
        self.plain = nn.Parameter(whole, requires_grad=self.sharded.requires_grad)
        vars(self.plain).update(vars(self.sharded))
        self._inside._setattr_on_modules(self.plain)
        self._version, self._place = self.plain._version, self.plain.data_ptr()

    def shard_(self) -> nn.Parameter:
        """Put the sharded parameter back; if it was written, as a new one of the present shape."""
        plain, inside = self.plain, self._inside
        if plain is self.sharded:
            return plain
        written = plain._version != self._version or plain.data_ptr() != self._place
        if plain.shape == self.sharded.shape and not written:
            inside._setattr_on_modules(self.sharded)
            return self.sharded
        whole = nn.Parameter(plain.detach().contiguous(), requires_grad=plain.requires_grad)
        placement = inside.fsdp_placement
        inside._init_sharded_param(whole, inside.device, lambda _: placement, inside.mesh_info)
        if inside.post_forward_mesh_info:
            inside._init_sharded_post_forward_param_metadata(whole)
        inside._init_extensions()
        inside.all_gather_outputs, inside.unsharded_accumulated_grad = [], None
        if hasattr(inside, "_unsharded_param"):
            del inside._unsharded_param
        vars(inside.sharded_param).update(vars(plain))
        new: nn.Parameter = inside.sharded_param
        return new


def _whole(value: Tensor) -> Tensor:
    """A tensor of its own with all parts of a DTensor."""
    whole: Tensor = value.detach().full_tensor()  # type: ignore[attr-defined]
    return whole.clone(memory_format=torch.contiguous_format)


def _shards_of(model: nn.Module) -> list[_Shard]:
    """The sharded parameters; all parts of the model are sharded again first, as after a backward pass."""
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    shards = []
    for module, state in _states(model):
        module.reshard()
        parts = _parts(state)
        shards += [_Shard(names.get(id(one.sharded_param), one._module_info.param_name), one) for one in parts]
    return shards


def _parts(state: Any) -> list[Any]:
    """What torch keeps of each parameter."""
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups  # torch before 2.13
    return [inside for group in groups if group is not None for inside in group.fsdp_params]


def _states(model: nn.Module) -> list[tuple[Any, Any]]:
    """The modules that `fully_shard` was called on, with what torch keeps of them."""
    kind = sys.modules["torch.distributed.fsdp"].FSDPModule
    modules: list[Any] = [module for module in model.modules() if isinstance(module, kind)]
    found = [(module, module._get_fsdp_state()) for module in modules]
    for module, state in found:
        if len(state._modules) != 1:
            raise CompressionError(
                f"fully_shard got {len(state._modules)} modules at once, {type(module).__name__} one of them; expected"
                " a call for each"
            )
    return found


def _without_hooks_(model: nn.Module, stack: ExitStack) -> None:
    """Let modules run without FSDP until the stack is closed."""
    for module, state in _states(model):
        before, after = state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id
        hook, keyword = module._forward_pre_hooks.pop(before), module._forward_pre_hooks_with_kwargs.pop(before)
        stack.callback(_put_first_, module, before, hook, keyword)
        stack.callback(module._forward_hooks.__setitem__, after, module._forward_hooks.pop(after))
    for part in model.modules():
        if getattr(part, "_is_fsdp_managed_module", False):
            stack.callback(setattr, part, "_is_fsdp_managed_module", True)
            part._is_fsdp_managed_module = False  # type: ignore[assignment]


def _put_first_(module: Any, number: int, hook: Any, keyword: Any) -> None:
    module._forward_pre_hooks[number] = hook
    module._forward_pre_hooks.move_to_end(number, last=False)
    module._forward_pre_hooks_with_kwargs[number] = keyword


def _replace_(optimizer: Any, old: nn.Parameter, new: nn.Parameter) -> None:
    """Give the optimizer a parameter for another, with its state."""
    if old is new:
        return
    for part in parts_of(optimizer):
        for group in part.param_groups:
            group["params"][:] = [new if member is old else member for member in group["params"]]
        if old in part.state:
            part.state[new] = part.state.pop(old)


def _gather_moments_(optimizer: Any, plain: nn.Parameter) -> None:
    for part in parts_of(optimizer):
        if plain in part.state:
            held = part.state[plain]
            held.update({key: _whole(value) for key, value in held.items() if hasattr(value, "full_tensor")})


def _shard_(shards: list[_Shard], optimizer: Any | None) -> None:
    """Shard all parameters again, and the moments of those that are gathered."""
    for shard in shards:
        plain, new = shard.plain, shard.shard_()
        if optimizer is None:
            continue
        _replace_(optimizer, plain, new)
        for part in parts_of(optimizer):
            held = part.state.get(new, {})
            held.update({key: _sharded(value, new) for key, value in held.items() if _is_like(value, new)})


def _is_like(value: Any, parameter: nn.Parameter) -> bool:
    """True for a gathered moment of the parameter."""
    return isinstance(value, Tensor) and not hasattr(value, "full_tensor") and value.shape == parameter.shape


def _sharded(value: Tensor, like: Any) -> Tensor:
    """This process's part of a tensor that all processes have; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
