"""S4 (Gu et al. 2022): one system per channel, diagonal plus low rank (DPLR), sampled by the bilinear rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.layers.base import LTILayer, keeps_arguments, require_batch, wide
from compressm.layers.discretisation import Bilinear, random_log_steps, times
from compressm.layers.initialisation import legs_modes
from compressm.layers.streaming import BankStepper, LowRankStepper, Stepper
from compressm.ops import lti_bank
from compressm.ops.block.norm import Link
from compressm.ops.dispatch import can_read
from compressm.ops.lti.dense import dense_bank


@final
@keeps_arguments
class S4(LTILayer):
    """h' = a h − 2 p Re(pᴴ h) + B u, y = 2 Re(C h) + D u for every channel, a = −exp(log_A_real) + i A_imag.

    Each of the n modes stands for a conjugate pair: h and h̄ together have A = diag(a, ā) − (p, p̄)(p, p̄)ᴴ, which is
    stable for every p. It starts as HiPPO-LegS of size 2n. With p = 0 it is S4D with an input matrix: a cut gives that.
    """

    STATE_AXES: ClassVar[Mapping[str, int]] = {
        "log_A_real": 1,
        "A_imag": 1,
        "p_re": 1,
        "p_im": 1,
        "B_re": 1,
        "B_im": 1,
        "C_re": 1,
        "C_im": 1,
    }

    def __init__(self, width: int, order: int, *, step_min: float = 1e-3, step_max: float = 1e-1) -> None:
        super().__init__(width, order)
        self.log_step = nn.Parameter(random_log_steps(width, step_min, step_max))
        poles, vectors = legs_modes(order)
        dtype = torch.get_default_dtype()
        root = torch.sqrt(2 * torch.arange(2 * order, dtype=torch.float64) + 1)
        B = vectors.mH @ root.to(vectors.dtype)
        p = B / math.sqrt(2)

        def shared(values: Tensor) -> nn.Parameter:
            return nn.Parameter(values.to(dtype).repeat(width, 1))

        self.log_A_real, self.A_imag = shared(torch.log(-poles[0])), shared(poles[1])
        self.p_re, self.p_im, self.B_re, self.B_im = (shared(part) for part in (p.real, p.imag, B.real, B.imag))
        self.C_re, self.C_im = (nn.Parameter(torch.randn(width, order) / math.sqrt(2)) for _ in range(2))
        self.D = nn.Parameter(torch.randn(width))

    def _modes(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The steps, and a, p, B and C as real pairs, all in float64."""
        a = torch.stack([-torch.exp(self.log_A_real.double()), self.A_imag.double()])
        pairs = ((self.p_re, self.p_im), (self.B_re, self.B_im), (self.C_re, self.C_im))
        p, B, C = (torch.stack([re.double(), im.double()]) for re, im in pairs)
        return torch.exp(self.log_step.double())[:, None], a, p, B, C

    def _resolvent(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(I − ΔA/2)⁻¹ h = d h − left Re(rightᴴ h), by Sherman and Morrison: d, left and right as pairs; and Δ."""
        step, a, p, _, _ = self._modes()
        x, y = 1 - step * a[0] / 2, step * a[1] / 2
        d = torch.stack([x, y]) / (x * x + y * y)
        conjugate = torch.stack([d[0], -d[1]])
        size = 1 + step * (d[0] * (p * p).sum(0)).sum(-1, keepdim=True)
        return d, step / size * times(d, p), times(conjugate, p), step

    def discrete(self) -> tuple[Float[Tensor, "width n2 n2"], Float[Tensor, "width n2"], Float[Tensor, "width n2"]]:
        """A, B and C of z[t] = A z[t−1] + B u[t], y[t] = C z[t] + D u[t] for z = (Re h, Im h), in float64."""
        d, left, right, step = self._resolvent()
        re, im = torch.diag_embed(d[0]), torch.diag_embed(d[1])
        turned = torch.cat([torch.cat([re, -im], -1), torch.cat([im, re], -1)], -2)
        left, right, B, C = (torch.cat([*pair], -1) for pair in (left, right, *self._modes()[3:]))
        inverse = turned - left[..., :, None] * right[..., None, :]
        B = step * (inverse @ B[..., None])[..., 0]
        sign = torch.cat([torch.ones_like(re[..., 0]), -torch.ones_like(re[..., 0])], -1)
        return 2 * inverse - torch.eye(inverse.shape[-1], dtype=B.dtype, device=B.device), B, 2 * sign * C

    def diagonal(
        self, dtype: torch.dtype | None = None
    ) -> tuple[Float[Tensor, "2 width n"], Float[Tensor, "2 width n"], Float[Tensor, "2 width n"]]:
        """(log λ, B, C) of the modes without p: what the layer computes if p = 0."""
        step, a, _, B, C = self._modes()
        log_poles, scale = Bilinear()(a, step.expand_as(a[0]))
        dtype = self.D.dtype if dtype is None else dtype
        return log_poles, times(scale, B).to(dtype), (2 * C).to(dtype)

    def is_diagonal(self) -> bool:
        """True if p = 0."""
        return not (bool(self.p_re.detach().any()) or bool(self.p_im.detach().any()))

    def _mix(
        self,
        x: Tensor,
        state: Tensor | None,
        lengths: Tensor | None,
        keep_state: bool,
        D: Tensor | None,
        drive: Link | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        self._check(x, state, axes="batch length")
        # A GPU would have to wait for the value.
        if x.device.type == "cpu" and can_read(self.p_re) and self.is_diagonal():
            log_poles, B, C = self.diagonal()
            # The gradient of p is zero there, but DistributedDataParallel waits for one.
            C = C + 0 * torch.stack([self.p_re, self.p_im]).to(C.dtype)
            return lti_bank(x, log_poles, B, C, state, lengths, D=D, keep_state=keep_state)
        A, B, C = self.discrete()
        z = None if state is None else state.movedim(1, -2).flatten(-2)
        y, last = dense_bank(x, A, B, C[:, None], z, lengths, keep_state=keep_state)
        y = y[..., 0]
        y = y if D is None else torch.addcmul(y, D.to(y.dtype), x)
        return y, None if last is None else last.unflatten(-1, (2, self.order)).movedim(-2, 1)

    def step(
        self, x: Float[Tensor, "batch width"], state: Float[Tensor, "batch 2 width n"]
    ) -> tuple[Float[Tensor, "batch width"], Float[Tensor, "batch 2 width n"]]:
        return self._stepped(x, state, self._advance)

    def _advance(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        decay, left, right, drive, own, C = (part.to(x.dtype) for part in self._moves())
        h = state.movedim(1, 0)
        read = (right[:, None] * h).sum((0, -1)) + own * x
        h = times(decay[:, None], h) + drive[:, None] * x[..., None] - left[:, None] * read[..., None]
        return (C[:, None] * h).sum((0, -1)), h.movedim(0, 1)

    def _moves(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """decay, left, right, drive, own and C of h ← decay h + drive x − left (Re(rightᴴ h) + own x), y = Re(C h).

        C has −Im in its second part, so that it is a product of real numbers.
        """
        # A = 2 R − I and B = Δ R B with the same R = (I − ΔA/2)⁻¹. Subtracting h from 2 R h in single precision would
        # cost a rounding of h in every step.
        (d, left, right, step), (_, _, _, B, C) = self._resolvent(), self._modes()
        half = step * B / 2
        decay = torch.stack([2 * d[0] - 1, 2 * d[1]])
        own = (right * half).sum((0, -1))
        return decay, 2 * left, right, 2 * times(d, half), own, torch.stack([2 * C[0], -2 * C[1]])

    def stepper(self, dtype: torch.dtype, *, gain: float = 1.0, scaled: bool = False) -> Stepper:
        log_poles, B, C = self.diagonal(torch.float64)
        # Steps of a bank divide states by B.
        if self.is_diagonal() and bool(B.any(0).all()):
            return BankStepper(log_poles, B, C, self.D, dtype, gain=gain, scaled=scaled)
        decay, left, right, drive, own, C = self._moves()
        moves = (torch.complex(*decay), torch.complex(*left), torch.complex(*right), torch.complex(*drive))
        return LowRankStepper(moves, own, torch.complex(C[0], -C[1]), self.D, dtype, gain=gain)

    def initial_state(self, batch: int) -> Float[Tensor, "batch 2 width n"]:
        require_batch(batch)
        return self.log_A_real.new_zeros(batch, 2, self.width, self.order, dtype=wide(self.log_A_real.dtype))
