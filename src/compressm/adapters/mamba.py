"""Adapters that read S6 mixers (Mamba) as selective systems, with the authors' names, and refused mixers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from compressm.adapters.base import (
    Adapter,
    Basis,
    Growth,
    Module,
    adapter_for,
    adapts,
    counted_steps,
    finite_doubles,
    parameter_of,
)
from compressm.control.selective import ChannelMaps, Norms, SelectiveSystem, require_negative_rates
from compressm.errors import AdapterError, unmerged
from compressm.layers import Mamba
from compressm.layers.mamba import OF_MAPS

PROJECTION, RATES = "x_proj.weight", "A_log"
# The imaginary part of rates, in modules that can have complex ones.
IMAGINARY = "A_imag"

_READ = (RATES, PROJECTION, "dt_proj.weight", "dt_proj.bias")
_BESIDE = ("D", *(f"{name}.{part}" for name in ("in_proj", "conv1d", "out_proj") for part in ("weight", "bias")))


class SelectiveAdapter(Adapter[Module, SelectiveSystem]):
    """An adapter of modules with x_proj (its rows give Δ, B and C), dt_proj, A_log and nothing else before the scan.

    u[t] is the input of x_proj: (batch, length, channels). A subclass says which steps are padding, and which
    attributes change with the order.
    """

    SYSTEM = SelectiveSystem
    STORES = frozenset({Basis.AVERAGED, Basis.SELECTED})
    RECURRENCE = "Mamba-1"
    JOINS: ClassVar[Mapping[str, str]] = {IMAGINARY: RATES}
    # Parameters and buffers that a module may have beside those of every mixer.
    BESIDE: ClassVar[frozenset[str]] = frozenset()
    # The names of the weights of the norms of B and of C, for modules that have such norms and train their weights.
    NORMED: ClassVar[tuple[str, str] | None] = None

    @abstractmethod
    def counted(
        self, module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Bool[Tensor, "batch length"] | None:
        """A mask of the steps that are not padding, for a call with these arguments; None if no step is padding."""

    def inputs(
        self, module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Float[Tensor, "batch length channels"] | None:
        """u of a call with these arguments, if a fused kernel may run in place of the part that is `observed`."""
        return None

    def attributes(self, module: Module, order: int) -> dict[str, Any]:
        rank = module.get_parameter("dt_proj.weight").shape[1]
        return {"x_proj.out_features": rank + 2 * order}

    def maps(self, module: Module) -> ChannelMaps | None:
        """The module's channel maps, or None if its channels do not have their own states."""
        return None

    def norms(self, module: Module) -> Norms | None:
        """The module's norms behind x_proj, with weights in float64; None without norms."""
        return None

    def factors(self, system: SelectiveSystem) -> dict[str, Tensor]:
        """Factors of parameters beside x_proj, A_log and the weights of norms, with which a module stores a system."""
        return {}

    def observed(self, module: Module) -> nn.Module:
        """The part of the module whose input is u."""
        return module.get_submodule("x_proj")

    def order(self, module: Module) -> int:
        return parameter_of(module, RATES).shape[-1]

    def growth(self, module: Module) -> dict[str, Growth]:
        """Rows of B and of C in x_proj, after those of the steps, and rates; an idle state has the rate −1."""
        if self.maps(module) is not None:
            raise AdapterError(
                f"an earlier PerChannel cut gave every channel of this {type(module).__name__} its own states, to which"
                " none can be added"
            )
        rank = parameter_of(module, "dt_proj.weight").shape[1]
        return {PROJECTION: Growth(axis=0, first=rank, blocks=2), RATES: Growth(axis=1)}

    def inner_width(self, module: Module) -> int:
        return parameter_of(module, RATES).shape[0]

    def state_growth(self, module: Module) -> Growth:
        """States after the last inputs of the convolution."""
        return Growth(axis=-1, first=parameter_of(module, "conv1d.weight").shape[-1] - 1)

    def state_bytes(self, module: Module, order: int) -> int:
        """The last inputs of the convolution, and the states of every channel."""
        channels, _, window = parameter_of(module, "conv1d.weight").shape
        parts = 1 if getattr(module, IMAGINARY, None) is None else 2
        wide = torch.promote_types(parameter_of(module, RATES).dtype, torch.float32)
        return channels * (window - 1 + parts * order) * wide.itemsize

    def read(self, module: Module) -> SelectiveSystem:
        """The system, in float64; a module with other parameters is refused, and the error names them."""
        if not isinstance(module, nn.Module):
            raise AdapterError(f"read takes an nn.Module, got {type(module).__name__}")
        self._require_known(module)
        A_log, projection, step_out, step_bias = finite_doubles(module, _READ)
        maps = self.maps(module)
        rows = A_log.shape[-1] if maps is None else maps.B.shape[-1]
        rank = _rank(module, rows, A_log, projection, step_out, step_bias)
        step_in, W_B, W_C = projection[:rank], projection[rank : rank + rows], projection[rank + rows :]
        rates = -torch.exp(A_log)
        require_negative_rates(rates.detach())
        if maps is not None and maps.B.is_complex():
            rates = torch.complex(rates, *finite_doubles(module, [IMAGINARY]))
        return SelectiveSystem(rates, step_in, step_out, step_bias, W_B, W_C, maps, self.norms(module))

    def encode(self, module: Module, system: SelectiveSystem) -> dict[str, Tensor]:
        """Parameter values in float64, by name, that make the module compute the given system; Δ stays as it is."""
        if not isinstance(system, SelectiveSystem):
            raise AdapterError(f"encode takes a SelectiveSystem, as read gives it, got a {type(system).__name__}")
        require_negative_rates(system.rates.detach().real)
        rates = {RATES: torch.log(-system.rates.real)}
        if system.maps is None:
            scaled = {name: parameter_of(module, name).double() * by for name, by in self.factors(system).items()}
            weights = {}
            if self.NORMED is not None and system.norms is not None:
                weights = dict(zip(self.NORMED, (system.norms.B, system.norms.C), strict=True))
            return {PROJECTION: torch.cat([system.step_in, system.W_B, system.W_C]), **rates, **weights, **scaled}
        return {**rates, IMAGINARY: system.rates.imag} if system.rates.is_complex() else rates

    def _require_known(self, module: Module) -> None:
        """Refuse unknown parameters: a cut would ignore their effect before the scan, such as a norm of B."""
        names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        missing, unknown = sorted(set(_READ) - names), sorted(names - {*_READ, *_BESIDE} - self.OPTIONAL - self.BESIDE)
        if missing or unknown:
            said = [f"has no {', '.join(missing)}"] if missing else []
            said += [f"has {', '.join(unknown)}, unknown to {self}"] if unknown else []
            raise AdapterError(
                f"{type(module).__name__} {' and '.join(said)}: expected the parameters of a Mamba mixer,"
                f" {', '.join((*_READ, *_BESIDE))}{unmerged(unknown)}"
            )


def _rank(module: nn.Module, rows: int, A_log: Tensor, projection: Tensor, step_out: Tensor, step_bias: Tensor) -> int:
    """The rank of Δ, if all shapes agree; B and C have `rows` rows each."""
    shapes = {"A_log": A_log, "x_proj.weight": projection, "dt_proj.weight": step_out, "dt_proj.bias": step_bias}
    if A_log.ndim == 2 and step_out.ndim == 2:
        (channels, order), rank = A_log.shape, step_out.shape[1]
        expected = ((channels, order), (rank + 2 * rows, channels), (channels, rank), (channels,))
        if tuple(tuple(value.shape) for value in shapes.values()) == expected:
            return rank
    found = ", ".join(f"{name} {tuple(value.shape)}" for name, value in shapes.items())
    raise AdapterError(
        f"{type(module).__name__} has {found}, expected (channels, n), (rank + 2 · {rows}, channels), (channels, rank)"
        " and (channels,)"
    )


@adapts(Mamba)
@final
class MambaAdapter(SelectiveAdapter[Mamba]):
    """The adapter of `Mamba`: steps at and after `lengths` are padding; channels may have their own, complex states."""

    STORES = SelectiveAdapter.STORES | {Basis.BY_CHANNEL}
    OPTIONAL = frozenset(OF_MAPS)

    def attributes(self, module: Mamba, order: int) -> dict[str, Any]:
        return {}

    def maps(self, module: Mamba) -> ChannelMaps | None:
        if module.B_map is None or module.C_map is None or module.orders is None:
            return None
        B, C = module.B_map.double(), module.C_map.double()
        if B.ndim == 4:
            B, C = torch.complex(B[:, 0], B[:, 1]), torch.complex(C[:, 0], C[:, 1])
        return ChannelMaps(B, C, module.orders)

    def buffers(self, module: Mamba, system: SelectiveSystem) -> dict[str, Tensor]:
        if system.maps is None:
            return {}
        B, C = system.maps.B, system.maps.C
        if system.rates.is_complex():
            B, C = torch.stack([B.real, B.imag], dim=1), torch.stack([C.real, C.imag], dim=1)
        wide = torch.promote_types(module.A_log.dtype, torch.float32)
        # In the layout that a file restores: another layout rounds products differently and would change a resumed run.
        B, C = (part.to(wide).contiguous() for part in (B, C))
        return {"B_map": B, "C_map": C, "orders": system.maps.orders}

    def counted(
        self, module: Mamba, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Bool[Tensor, "batch length"] | None:
        return counted_steps(module, args[0] if args else kwargs["x"], args, kwargs)


# Mixers of transformers that are refused, and why.
_HEADS = "has a projection and rates for each of its heads"
_GATED = "erases by the delta rule, with a gate for every key dimension and one size for keys and values"
_WIDTH = "has as many states as channels: fewer states are fewer channels"
REFUSED = {
    "ZambaMambaMixer": _HEADS,
    **dict.fromkeys(("KimiLinearDeltaAttention", "BailingHybridDeltaAttention", "Glm5NextTextLinearAttention"), _GATED),
    "MiniMaxLightningAttention": "has one size for keys, queries and values",
    "RecurrentGemmaRecurrentBlock": _WIDTH,
}
# Layers of other packages that are refused, and why.
REFUSED_ELSEWHERE = {
    "fla.layers": {
        "MultiScaleRetention": "rotates queries and keys, with frequencies that follow from the number of states",
        "RWKV7Attention": "has as many keys as channels: its kernels and its constructor know no other number",
        "Mamba3": "rotates B and C by the input, and normalises them over the states",
        "HGRN2Attention": "has as many gates as channels: for fewer states its constructor makes more heads",
        "GatedDeltaNet2": "has a gate for every key dimension, which no projection of the keys preserves; not read yet",
    },
    "mamba_ssm": {"Mamba3": "rotates B and C by the input, and normalises them over the states"},
}
_UNKNOWN = "is not known"
_SUPPORTED = (
    "expected MambaMixer, the mixer of MambaModel and MambaForCausalLM, a mixer of Mamba-2 or a gated delta net"
)


def refused_in(model: nn.Module) -> str:
    """The end of an error, from a colon on, about mixers of the model that are refused; empty if there are none."""
    names: dict[type[nn.Module], list[str]] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{place}.") for places in names.values() for place in places)
        if not inside and _mixes(module) and adapter_for(module) is None:
            names.setdefault(type(module), []).append(name or "the model")
    said = [f"{_listed(places)} {_refusal(kind)} ({kind.__name__})" for kind, places in names.items()]
    return f": {', '.join(said)}; {_SUPPORTED}" if said else ""


def _mixes(module: nn.Module) -> bool:
    """True for mixers of packages that are known; most have A_log, also those that may be added later."""
    kind = type(module)
    known = (*REFUSED_ELSEWHERE, "transformers")
    return kind.__module__.startswith(known) and (_refusal(kind) != _UNKNOWN or "A_log" in module._parameters)


def _refusal(kind: type[nn.Module]) -> str:
    """The reason why a class of mixers is refused."""
    tables = (table for owner, table in REFUSED_ELSEWHERE.items() if kind.__module__.startswith(owner))
    return next(tables, REFUSED).get(kind.__name__, _UNKNOWN)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
