"""Mamba (Gu and Dao 2023), a selective layer; after a cut every channel may have its own states, by stored maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import ClassVar, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from compressm.layers.base import SSMLayer, keeps_arguments, require_batch, require_sizes, require_switches, wide
from compressm.layers.discretisation import random_log_steps
from compressm.layers.parameters import Ordered, refuse_to_train_, replace_data
from compressm.layers.streaming import EagerStepper, SelectiveStepper, Stepper
from compressm.ops import SequenceError
from compressm.ops.block.pooling import valid_rows
from compressm.ops.dispatch import compiled_kernels_serve, is_watched, kernels_serve, require_lengths, require_path
from compressm.ops.selective import ScanPath, selective_scan, selective_step
from compressm.ops.selective.conv_and_gate import causal_conv, sum_of_shifts
from compressm.ops.selective.mixer import compiled_mixer

# Tensors that only a layer with maps has; A_imag only with complex rates.
OF_MAPS = ("B_map", "C_map", "orders", "A_imag")


class MapForm(NamedTuple):
    """The form of a layer: the entries of B and of C that maps read (None without maps), and if rates are complex."""

    projected: int | None = None
    complex: bool = False

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]]) -> MapForm:
        """The form of a layer whose tensors have these shapes."""
        B_map = shapes.get("B_map")
        return cls() if B_map is None or len(B_map) < 3 else cls(B_map[-1], len(B_map) == 4)

    def shapes(self, *, inner: int, dt_rank: int, order: int) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors that depend on order and form."""
        shapes: dict[str, tuple[int, ...]] = {"A_log": (inner, order)}
        rows = order if self.projected is None else self.projected
        shapes["x_proj.weight"] = (dt_rank + 2 * rows, inner)
        if self.projected is None:
            return shapes
        pair = (2,) if self.complex else ()
        shapes["B_map"] = (inner, *pair, order, self.projected)
        shapes["C_map"] = (inner, *pair, self.projected, order)
        shapes["orders"] = (inner,)
        return shapes | {"A_imag": (inner, order)} if self.complex else shapes


def require_maps(given: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Require finite real tensors of the `wanted` shapes, and orders within the number of states."""
    for name, value in given.items():
        if not isinstance(value, Tensor) or tuple(value.shape) != wanted[name]:
            got = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise SequenceError(f"{name} is {got}, expected a tensor of shape {wanted[name]}")
        if value.is_complex() or not bool(torch.isfinite(value).all()):
            raise SequenceError(
                f"{name} is {value.dtype} with complex or non-finite entries, expected finite real numbers"
            )
    require_channel_orders(given["orders"], *wanted["A_log"])


def require_channel_orders(orders: Tensor, inner: int, most: int) -> None:
    """Require one order from 0 to `most` for each of the `inner` channels."""
    if tuple(orders.shape) != (inner,):
        raise SequenceError(f"orders have shape {tuple(orders.shape)}, expected ({inner},), one per channel")
    if orders.dtype not in (torch.int32, torch.int64):
        raise SequenceError(f"orders are {orders.dtype}, expected torch.int64 or torch.int32")
    low, high = torch.stack(orders.aminmax()).tolist()
    if low < 0 or high > most:
        raise SequenceError(f"orders run from {low} to {high}, expected 0 to {most}")


def mapped(rows: Tensor, x: Tensor) -> Tensor:
    """M x for M of shape (channels, …, n) and x of shape (batch, length, n): (batch, length, channels, …).

    It is computed in float32 at least, even under autocast: entries of about 100 may nearly cancel, and bfloat16 would
    lose the result.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        product = linear(x.to(wide), rows.flatten(0, -2).to(wide))
    return product.unflatten(-1, rows.shape[:-1]).to(x.dtype)


_SHORTEST_STEP = 1e-4


@final
@keeps_arguments
class Mamba(SSMLayer):
    """h[t] = exp(Δ[t] a) h[t−1] + Δ[t] B[t] u[t], y[t] = (C[t] h[t] + D u[t]) silu(z[t]) for every inner channel.

    in_proj gives v and z from the input, u = silu(conv1d(v)), x_proj gives B, C and, through dt_proj, Δ from u, and
    out_proj reads y; a = −exp(A_log). Names and initial values are the authors'. The order counts real states per
    channel. A stream carries the last inputs of the convolution and the states in one tensor, in float32 at least:
    (batch, inner, conv_width − 1 + n).

    After `keep_maps_` every channel has its own states, and rates may be complex.
    """

    STATE_AXES: ClassVar[Mapping[str, int]] = {"A_log": 1, "A_imag": 1, "B_map": -2, "C_map": -1}

    # Set only if every channel has its own states; otherwise None.
    B_map: Tensor | None
    C_map: Tensor | None
    orders: Tensor | None
    A_imag: nn.Parameter | None

    def __init__(
        self,
        width: int,
        order: int = 16,
        *,
        expand: int = 2,
        conv_width: int = 4,
        dt_rank: int | None = None,
        conv_bias: bool = True,
        bias: bool = False,
        step_min: float = 1e-3,
        step_max: float = 1e-1,
        path: ScanPath | None = None,
    ) -> None:
        super().__init__(width, order)
        dt_rank = math.ceil(width / 16) if dt_rank is None else dt_rank
        require_sizes(expand=expand, conv_width=conv_width, dt_rank=dt_rank)
        require_switches(conv_bias=conv_bias, bias=bias)
        require_path(path, *ScanPath)
        self.inner, self.conv_width, self.dt_rank, self.path = expand * width, conv_width, dt_rank, path
        rates = torch.arange(1, order + 1, dtype=torch.get_default_dtype())
        self.A_log = _without_decay(nn.Parameter(torch.log(rates).repeat(self.inner, 1)))
        self.D = _without_decay(nn.Parameter(torch.ones(self.inner)))
        self.in_proj = nn.Linear(width, 2 * self.inner, bias=bias)
        self.conv1d = nn.Conv1d(self.inner, self.inner, conv_width, groups=self.inner, bias=conv_bias)
        self.x_proj = RowsAsStored(self.inner, dt_rank + 2 * order, bias=False)
        self.dt_proj = _step_projection(dt_rank, random_log_steps(self.inner, step_min, step_max))
        self.out_proj = nn.Linear(self.inner, width, bias=bias)
        for name in ("B_map", "C_map", "orders"):
            self.register_buffer(name, None)
        self.register_parameter("A_imag", None)

    @property
    def order(self) -> int:
        """The largest number of states of any channel: real states, or complex ones if rates are complex."""
        return self.A_log.shape[1]

    @property
    def projected(self) -> int:
        """The number of entries of B, and of C, that x_proj gives."""
        return (self.x_proj.weight.shape[0] - self.dt_rank) // 2

    @property
    def form(self) -> MapForm:
        """The layer's form: if channels have their own states, and if these are complex."""
        return MapForm() if self.B_map is None else MapForm(self.projected, self.A_imag is not None)

    def shape_at(self, name: str, order: int) -> tuple[int, ...]:
        shapes = self._shapes(self.form, order)
        return shapes[name] if name in shapes else tuple(attrgetter(name)(self).shape)

    def shapes_at(self, order: int, like: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        rest = {name: tuple(value.shape) for name, value in self.tensors().items() if name not in OF_MAPS}
        return rest | self._shapes(MapForm.of(like), order)

    def require_values(self, tensors: Mapping[str, Tensor]) -> None:
        orders, rates = tensors.get("orders"), tensors.get("A_log")
        if orders is not None and rates is not None and rates.ndim == 2 and not orders.is_meta:
            require_channel_orders(orders, self.inner, rates.shape[1])

    def _form_in(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]] | None:
        order = self.order_at("A_log", shapes.get("A_log", ()))
        wanted = {} if order is None else self._shapes(MapForm.of(shapes), order)
        is_whole = all(tuple(shapes.get(name, ())) == shape for name, shape in wanted.items())
        return wanted if wanted and is_whole else None

    def keep_maps_(
        self,
        B_map: Float[Tensor, "inner *pair n projected"],
        C_map: Float[Tensor, "inner *pair projected n"],
        orders: Int[Tensor, " inner"],
        A_log: Float[Tensor, "inner n"],
        A_imag: Float[Tensor, "inner n"] | None = None,
    ) -> None:
        """Give channel i the rates −exp(A_log[i]) + i A_imag[i], B_map[i] B[t] as its B and C[t] C_map[i] as its C.

        x_proj gives B[t] and C[t] as before. Channel i uses the first orders[i] of the n states. With A_imag maps are
        pairs (re, im), and y = Re(C h). Maps are not trained; A_log stays the same parameter.
        """
        given = {"B_map": B_map, "C_map": C_map, "orders": orders, "A_log": A_log}
        given |= {} if A_imag is None else {"A_imag": A_imag}
        order = A_log.shape[-1] if isinstance(A_log, Tensor) and A_log.ndim else 0
        wanted = self._shapes(MapForm(self.projected, A_imag is not None), max(order, 1))
        require_maps(given, wanted)
        self._reshape_(wanted)
        for name, value in given.items():
            held = getattr(self, name)
            data = value.detach().to(held.device, held.dtype, copy=True, memory_format=torch.contiguous_format)
            if isinstance(held, nn.Parameter):
                replace_data(held, data)
            else:
                setattr(self, name, data)

    def dynamics(self) -> Iterator[nn.Parameter]:
        """The rates and the bias of the steps."""
        yield self.A_log
        if self.A_imag is not None:
            yield self.A_imag
        yield self.dt_proj.bias

    def rates(self) -> Float[Tensor, "*pair inner n"]:
        """a = −exp(A_log) + i A_imag, in float32 or better; pairs (re, im) if there is an imaginary part."""
        dtype = wide(self.A_log.dtype)
        decay = -torch.exp(self.A_log.to(dtype))
        return decay if self.A_imag is None else torch.stack([decay, self.A_imag.to(dtype)])

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        state: Float[Tensor, "batch inner kept"] | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        *,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "batch length width"], Float[Tensor, "batch inner kept"] | None]:
        self._check_sequence(x, state, lengths)
        if lengths is not None:
            lengths = lengths.to(x.device)
            x = valid_rows(x, lengths)
        if state is None and lengths is None and self._is_one_function(x):
            return self._at_once(x, keep_state)
        y, state = self._mix(self.in_proj(x), state, lengths, keep_state)
        return self.out_proj(y), state

    def _is_one_function(self, x: Tensor) -> bool:
        """True if kernels compute the whole layer at once: the common form, its own projections, no hooks on them."""
        parts = (self.in_proj, self.conv1d, self.x_proj, self.dt_proj, self.out_proj)
        kinds = (nn.Linear, nn.Conv1d, RowsAsStored, nn.Linear, nn.Linear)
        own = all(type(part) is kind and not is_watched(part) for part, kind in zip(parts, kinds, strict=True))
        if not own or self.B_map is not None or self.path is not None or x.shape[1] < self.conv_width:
            return False
        # The compiled function keeps what gradients need.
        return (torch.is_grad_enabled() and compiled_kernels_serve(x)) or kernels_serve(x)

    def _at_once(self, x: Tensor, keep_state: bool) -> tuple[Tensor, Tensor | None]:
        ends = (self.in_proj.weight, self.in_proj.bias, self.conv1d.weight, self.conv1d.bias, self.x_proj.weight)
        inside = (self.dt_proj.weight, self.dt_proj.bias, self.A_log, self.D)
        weights = (*ends, *inside, self.out_proj.weight, self.out_proj.bias)
        if torch.compiler.is_compiling():
            out, state = compiled_mixer(x, weights, keep_state=keep_state)
        else:
            from compressm.ops.selective.mixer_triton import MixerWeights, mix

            out, state = mix(x, MixerWeights(*weights), keep_state=keep_state)
        if state is None:
            return out, None
        before, h = state
        return out, torch.cat([before.mT.to(h.dtype), h], dim=-1)

    def step(
        self, x: Float[Tensor, "batch width"], state: Float[Tensor, "batch inner kept"]
    ) -> tuple[Float[Tensor, "batch width"], Float[Tensor, "batch inner kept"]]:
        self._check_step(x, state)
        before, h = self._split(state)
        v, z = self.in_proj(x).chunk(2, dim=-1)
        u = self._convolved(v[:, None], before)
        delta, B, C = self.selected(u)
        y, h = selective_step(
            *(u[:, 0], delta[:, 0], self.rates(), B[:, 0], C[:, 0], self.D, z),
            state=h,
            delta_bias=self.dt_proj.bias,
            softplus=True,
            orders=self.orders,
        )
        return self.out_proj(y), self._joined(v[:, None], before, h, None)

    def stepper(self, dtype: torch.dtype, *, gain: float = 1.0, scaled: bool = False) -> Stepper:
        parts = (self.in_proj, self.conv1d, self.x_proj, self.dt_proj, self.out_proj)
        # Somebody's own, such as LoRA's, compute more than their weights say.
        if any(type(part) not in (nn.Linear, nn.Conv1d, RowsAsStored) for part in parts):
            return EagerStepper(self, gain=gain)
        return SelectiveStepper(self, dtype, gain=gain)

    def initial_state(self, batch: int) -> Float[Tensor, "batch inner kept"]:
        require_batch(batch)
        kept = self.conv_width - 1 + self.order * (1 if self.A_imag is None else 2)
        return self.A_log.new_zeros(batch, self.inner, kept, dtype=wide(self.A_log.dtype))

    def selected(self, u: Float[Tensor, "batch length inner"]) -> tuple[Tensor, Tensor, Tensor]:
        """Δ (before its bias and softplus), B and C that the input of the recurrence selects."""
        dt, B, C = self.x_proj(u).split([self.dt_rank, self.projected, self.projected], dim=-1)
        # The scan adds the bias in float32: in bfloat16 a bias of −4.6 gives a step that is 1 % off.
        delta = linear(dt, self.dt_proj.weight)
        if self.B_map is None or self.C_map is None:
            return delta, B, C
        return delta, mapped(self.B_map, B), mapped(self.C_map.mT, C)

    def _mix(
        self, vz: Tensor, state: Tensor | None, lengths: Tensor | None, keep_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        v, z = vz.chunk(2, dim=-1)
        before, h = (None, None) if state is None else self._split(state)
        u = self._convolved(v, before)
        delta, B, C = self.selected(u)
        y, h = selective_scan(
            *(u, delta, self.rates(), B, C, self.D, z, h, lengths),
            delta_bias=self.dt_proj.bias,
            softplus=True,
            orders=self.orders,
            keep_state=keep_state,
            path=self.path,
        )
        return y, None if h is None else self._joined(v, before, h, lengths)

    def _convolved(
        self, v: Float[Tensor, "batch length inner"], before: Float[Tensor, "batch inner past"] | None
    ) -> Float[Tensor, "batch length inner"]:
        """u = silu(conv1d(v)), where `before` holds the inputs before v."""
        if torch.compiler.is_compiling():
            return sum_of_shifts(v, self.conv1d.weight, self.conv1d.bias, None if before is None else before.mT)
        if not kernels_serve(v):
            before = v.new_zeros(v.shape[0], self.inner, self.conv_width - 1) if before is None else before.to(v.dtype)
            return silu(self.conv1d(torch.cat([before, v.mT], dim=-1))).mT
        return causal_conv(v, self.conv1d.weight, self.conv1d.bias, None if before is None else before.mT)

    def _split(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The last inputs of the convolution, and the states in the layout of the scan."""
        before, h = state.split([self.conv_width - 1, state.shape[-1] - self.conv_width + 1], dim=-1)
        return before, h if self.A_imag is None else h.unflatten(-1, (2, -1)).movedim(-2, 1)

    def _joined(
        self, v: Tensor, before: Tensor | None, h: Tensor, lengths: Tensor | None
    ) -> Float[Tensor, "batch inner kept"]:
        """The last inputs of the convolution before each sequence's end, and the states."""
        past = self.conv_width - 1
        first = v.new_zeros(v.shape[0], self.inner, past) if before is None else before.to(v.dtype)
        if lengths is None:
            last = torch.cat([first, v[:, max(0, v.shape[1] - past) :].mT], dim=-1)
            last = last[..., last.shape[-1] - past :]
        else:
            steps = lengths[:, None] + torch.arange(past, device=lengths.device)
            last = torch.cat([first, v.mT], dim=-1).gather(-1, steps[:, None].expand(-1, self.inner, -1))
        h = h if self.A_imag is None else h.movedim(1, -2).flatten(-2)
        return torch.cat([last.to(h.dtype), h], dim=-1)

    def _check_sequence(self, x: Tensor, state: Tensor | None, lengths: Tensor | None) -> None:
        self._check(x, state, axes="batch length")
        self._check_kind(x, (torch.bfloat16, torch.float16, torch.float32))
        require_lengths(lengths, *x.shape[:2])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Mamba:
        """Convert all tensors, for `to`, `half` and others; maps stay in float32 at least, see `mapped`."""
        maps = {name: held for name in ("B_map", "C_map") if (held := getattr(self, name)) is not None}
        super()._apply(fn, recurse)
        for name, held in maps.items():
            now = getattr(self, name)
            if now.dtype != wide(now.dtype):
                setattr(self, name, held.to(now.device, wide(now.dtype)))
        return self

    def _shapes(self, form: MapForm, order: int) -> dict[str, tuple[int, ...]]:
        return form.shapes(inner=self.inner, dt_rank=self.dt_rank, order=order)

    def _reshape_(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Resize tensors to these shapes, drop those of `OF_MAPS` without a shape; old values are lost."""
        if self.form != MapForm.of(shapes):
            refuse_to_train_([self])
        for name in OF_MAPS:
            held, shape = getattr(self, name), shapes.get(name)
            if shape is None:
                setattr(self, name, None)
            elif held is None:
                setattr(self, name, self._empty(name, shape))
            elif name != "A_imag" and held.shape != shape:
                setattr(self, name, held.new_empty(shape))
        self._resize_({name: shapes[name] for name in ("A_log", "A_imag", "x_proj.weight") if name in shapes})

    def _empty(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name == "A_imag":
            return _without_decay(nn.Parameter(self.A_log.new_empty(shape), requires_grad=self.A_log.requires_grad))
        dtype = torch.int64 if name == "orders" else wide(self.A_log.dtype)
        return self.A_log.new_empty(shape, dtype=dtype)

    def extra_repr(self) -> str:
        sizes = f"inner={self.inner}, conv_width={self.conv_width}, dt_rank={self.dt_rank}"
        if self.B_map is None:
            return f"{super().extra_repr()}, {sizes}"
        kind = "real" if self.A_imag is None else "complex"
        return f"{super().extra_repr()}, {sizes}, own {kind} states a channel from {self.projected} of x_proj"


@final
class RowsAsStored(Ordered, nn.Linear):
    """A linear map whose `out_features` follow its weight: a cut or a checkpoint changes the number of rows."""

    STATE_AXES: ClassVar[Mapping[str, int]] = {"weight": 0}

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @out_features.setter
    def out_features(self, count: int) -> None:
        """Ignore the value that torch's constructor sets before there is a weight."""


def _step_projection(rank: int, log_steps: Float[Tensor, " inner"]) -> nn.Linear:
    """A projection whose softplus(bias) gives the steps; the part from the input is small at the start."""
    projection = nn.Linear(rank, len(log_steps))
    nn.init.uniform_(projection.weight, -(rank**-0.5), rank**-0.5)
    steps = torch.exp(log_steps).clamp_min(_SHORTEST_STEP)
    projection.bias = _without_decay(nn.Parameter(steps + torch.log(-torch.expm1(-steps))))
    return projection


def _without_decay(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter for optimizers, as the authors do, to exclude it from weight decay."""
    vars(parameter)["_no_weight_decay"] = True
    return parameter
