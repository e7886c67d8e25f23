"""1 − λᵢ λ̄ⱼ, the denominators of every closed-form Gramian, without cancellation.

The plain difference loses log₁₀ 1/(1 − |λ|) digits, six at |λ| = 1 − 1e-6. The forms below, from poles or from their
logarithms, keep all digits.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Inexact
from torch import Tensor

# Dekker's splitting constant for 53-bit numbers, 2²⁷ + 1.
_SPLIT = 134217729.0


def decay(poles: Inexact[Tensor, "*bank n"], log_poles: Inexact[Tensor, "*bank n"] | None) -> Float[Tensor, "*bank n"]:
    """1 − |λ|², accurate to the last bit of the given poles (or their logarithms)."""
    if log_poles is not None:
        return -torch.expm1(2 * _real(log_poles))
    re, im = _real(poles), _imag(poles)
    plain = 1 - re * re - im * im
    # The correction has no gradient: the derivative of the plain formula is already exact.
    return plain + (_one_minus_squares(re.detach(), im.detach()) - plain.detach())


def one_minus_products(
    poles: Inexact[Tensor, "*bank n"], log_poles: Inexact[Tensor, "*bank n"] | None
) -> Inexact[Tensor, "*bank n n"]:
    """denominators[i, j] = 1 − λᵢ λ̄ⱼ with a relative error of a few units in the last place."""
    re, im = _denominators(poles, log_poles)
    return re if im is None else torch.complex(re, im)


def reciprocal_products(
    poles: Inexact[Tensor, "*bank n"],
    log_poles: Inexact[Tensor, "*bank n"] | None,
    known: Float[Tensor, "*bank n"] | None = None,
) -> tuple[Inexact[Tensor, "*bank n n"], Inexact[Tensor, "*bank n n"]]:
    """1/(1 − λᵢ λ̄ⱼ) and its conjugate, in real arithmetic, which is several times as fast as complex division.

    `known` is 1 − |λ|², if the caller has it.
    """
    re, im = _denominators(poles, log_poles, known)
    if im is None:
        return 1 / re, 1 / re
    square = re * re + im * im
    re, im = re / square, im / square
    return torch.complex(re, -im), torch.complex(re, im)


def _denominators(poles: Tensor, log_poles: Tensor | None, known: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The real and imaginary parts of 1 − λᵢ λ̄ⱼ; the imaginary part is None for real poles."""
    if log_poles is not None:
        return _from_logarithms(log_poles)
    # 1 − λᵢλ̄ⱼ = (1 − |λⱼ|²) − (λᵢ − λⱼ) λ̄ⱼ, and |1 − λᵢλ̄ⱼ|² = |λᵢ − λⱼ|² + (1 − |λᵢ|²)(1 − |λⱼ|²): each term is
    # at most twice the result, so nothing cancels.
    own = (decay(poles, None) if known is None else known)[..., None, :]
    if not poles.is_complex():
        columns = poles[..., None, :]
        return own - (poles[..., :, None] - columns) * columns, None
    re, im = poles.real.contiguous(), poles.imag.contiguous()
    x, y = re[..., None, :], im[..., None, :]
    dx, dy = re[..., :, None] - x, im[..., :, None] - y
    return own - (dx * x + dy * y), dx * y - dy * x


def _from_logarithms(log_poles: Tensor) -> tuple[Tensor, Tensor | None]:
    """−expm1(log λᵢ + conj log λⱼ); expm1 of the real parts takes n instead of n² exponentials."""
    shrink = torch.expm1(_real(log_poles))
    rows, columns = shrink[..., :, None], shrink[..., None, :]
    modulus = rows + columns + rows * columns  # |λᵢ||λⱼ| − 1; all terms have one sign while |λᵢ| ≤ 1
    if not log_poles.is_complex():
        return -modulus, None
    phase = log_poles.imag.contiguous() / 2
    sine = torch.sin(phase[..., :, None] - phase[..., None, :])
    versine = 2 * sine * sine
    # The sine needs a small relative error, the cosine only a small absolute one: outer products will do.
    cos, sin = torch.cos(phase), torch.sin(phase)
    cosine = cos[..., :, None] * cos[..., None, :] + sin[..., :, None] * sin[..., None, :]
    return versine - modulus * (1 - versine), -2 * (1 + modulus) * sine * cosine


def _one_minus_squares(x: Float[Tensor, "*bank n"], y: Float[Tensor, "*bank n"]) -> Float[Tensor, "*bank n"]:
    """1 − x² − y² in doubled precision: products and sums are computed with their rounding errors (Dekker 1971)."""
    (xx, xx_error), (yy, yy_error) = _exact_square(x), _exact_square(y)
    first, first_error = _exact_sum(torch.ones_like(x), -xx)
    second, second_error = _exact_sum(first, -yy)
    return second + (first_error + second_error - xx_error - yy_error)


def _exact_square(x: Tensor) -> tuple[Tensor, Tensor]:
    scaled = _SPLIT * x
    high = scaled - (scaled - x)
    low = x - high
    product = x * x
    return product, ((high * high - product) + 2 * high * low) + low * low


def _exact_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = a + b
    virtual = total - a
    return total, (a - (total - virtual)) + (b - virtual)


def _real(tensor: Tensor) -> Tensor:
    return tensor.real if tensor.is_complex() else tensor


def _imag(tensor: Tensor) -> Tensor:
    return tensor.imag if tensor.is_complex() else torch.zeros_like(tensor)
