"""Reduction of layers with a matrix state, S[t] = α[t] S[t−1] + k[t] v[t]ᵀ and o[t] = S[t]ᵀ q[t], by second moments.

P = E[S Sᵀ], summed over values and over the heads that share a basis, and Q = E[q qᵀ]. The reduced layer has the state
Ŝ = Wᵀ S, the key k̂ = Wᵀ k and the query q̂ = Tᵀ q, with Wᵀ T = I. A scalar decay α commutes with every W, so the only
error is qᵀ (I − T Wᵀ) S at the read-out. Its mean square is tr(Q (I − T Wᵀ) P (I − T Wᵀ)ᵀ) if q and S are uncorrelated.

Gates diag(α) decay every key dimension by itself. Only selections commute with them; `galerkin` averages them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import SupportsIndex, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compressm.control import validation
from compressm.control.balancing import GramianPair, balance, hankel_values
from compressm.control.factors import psd_factor
from compressm.control.linear_algebra import coarse_scale, largest_part, power_of_two
from compressm.control.projection import kept_states, symmetric_subspace, unit_trace
from compressm.control.validation import ControlError, ShapeError, UnstableSystemError

# Steps whose decays to one another are formed at once, fewer if every key dimension has its own, and the least log
# decay: exp(−800) is 0 in float64.
_CHUNK, _CHUNK_OF_GATES, _LEAST_LOG = 64, 16, -800.0


@dataclass(frozen=True)
class MemoryBasis:
    """W and T with Wᵀ T = I, and the values σ of all n states, falling.

    `states` are the indices of kept states if the basis is a selection. `mixing` averages diagonal gates: α̂ = mixing α.
    """

    W: Float[Tensor, "*bank n r"]
    T: Float[Tensor, "*bank n r"]
    sigma: Float[Tensor, "*bank n"]
    states: Int[Tensor, "*bank r"] | None = None
    mixing: Float[Tensor, "*bank r n"] | None = None


def balanced(
    P: Float[Tensor, "*bank n n"],
    Q: Float[Tensor, "*bank n n"],
    order: SupportsIndex,
    *,
    states: Int[Tensor, " r"] | None = None,
) -> MemoryBasis:
    """The best W and T for uncorrelated q and S: the mean square error is Σ_{i>r} σᵢ² (Eckart and Young 1936).

    Lqᵀ Lp = U Σ Vᵀ with P = Lp Lpᵀ and Q = Lq Lqᵀ; T = Lp V Σ^−½ and W = Lq U Σ^−½. `states` names the directions to
    keep; by default the first ones. Directions whose σ is rounding noise get zero columns.
    """
    P, Q, kept = _checked(P, Q, order, states)
    bank, n = P.shape[:-2], P.shape[-1]
    pair = GramianPair.of(P.reshape(-1, n, n), Q.reshape(-1, n, n))
    result = balance(pair, kept.expand(len(pair.P), -1))
    left, right = (part.reshape(*bank, n, len(kept)) for part in (result.left, result.right))
    return MemoryBasis(left, right, result.sigma.reshape(*bank, n))


def orthogonal(
    P: Float[Tensor, "*bank n n"],
    Q: Float[Tensor, "*bank n n"],
    order: SupportsIndex,
    *,
    states: Int[Tensor, " r"] | None = None,
) -> MemoryBasis:
    """W = T with orthonormal columns, the leading eigenvectors of P + Q, both at unit trace.

    The delta rule stays one: it erases I − β k kᵀ, and I − β k̂ k̂ᵀ with ‖k̂‖ ≤ ‖k‖. `states` names the eigenvectors to
    keep; by default the first ones. σ are those of `balanced`.
    """
    P, Q, kept = _checked(P, Q, order, states)
    for name, matrix in (("P", P), ("Q", Q)):
        psd_factor(matrix, name)
    _, vectors = torch.linalg.eigh(unit_trace(_scaled(P)[0]) + unit_trace(_scaled(Q)[0]))
    V = vectors.flip(-1)[..., kept]
    return MemoryBasis(V, V.clone(), memory_values(P, Q))


def galerkin(
    P: Float[Tensor, "*bank n n"],
    Q: Float[Tensor, "*bank n n"],
    gates: Float[Tensor, "*bank n"],
    order: SupportsIndex,
    *,
    states: Int[Tensor, " r"] | None = None,
) -> MemoryBasis:
    """The symmetric projection for diagonal gates, whose averages `gates` become diagonal in the new basis.

    With s = (Qᵢᵢ/Pᵢᵢ)^¼, U are orthonormal vectors that span the leading eigenvectors of s P s and s⁻¹ Q s⁻¹, both at
    unit trace, and diagonalise Uᵀ diag(gates) U. Then W = s U, T = s⁻¹ U and α̂ = (U∘U)ᵀ α, a convex combination of the
    gates: no gate grows.
    """
    P, Q, kept = _checked(P, Q, order, states)
    gates = _checked_gates(gates, P)
    for name, matrix in (("P", P), ("Q", Q)):
        psd_factor(matrix, name)
    scale, V = symmetric_subspace(_scaled(P)[0], _scaled(Q)[0], kept)
    _, Y = torch.linalg.eigh(V.mT @ (gates[..., :, None] * V))
    U = (V @ Y).flip(-1)  # slow gates first
    return MemoryBasis(
        U * scale[..., :, None], U / scale[..., :, None], memory_values(P, Q), mixing=U.square().mT.contiguous()
    )


def selected(
    P: Float[Tensor, "*bank n n"],
    Q: Float[Tensor, "*bank n n"],
    order: SupportsIndex,
    *,
    read_out: bool = False,
    states: Int[Tensor, " r"] | None = None,
) -> MemoryBasis:
    """A selection of states: W picks rows of the identity.

    By default the largest Pᵢᵢ Qᵢᵢ stay, and T = W; `states` names places in this ranking. With `read_out` states are
    taken greedily, each the one that lowers the error most, and T = P_{:,I} P_{II}⁻¹ estimates the dropped states from
    the kept ones I. This T is the best one for any Q.
    """
    if not isinstance(read_out, bool):
        raise ControlError(f"read_out is {read_out!r:.100}, expected True or False")
    P, Q, kept = _checked(P, Q, order, states)
    for name, matrix in (("P", P), ("Q", Q)):
        psd_factor(matrix, name)
    (small_P, size_P), (small_Q, size_Q) = _scaled(P), _scaled(Q)
    squares = (_diagonal(small_P) * _diagonal(small_Q)).clamp_min(0)
    sigma = torch.sqrt(squares.sort(dim=-1, descending=True).values) * torch.sqrt(size_P) * torch.sqrt(size_Q)
    if read_out and states is None:
        chosen = _greedy(small_P, small_Q, len(kept))
    else:
        chosen = squares.argsort(dim=-1, descending=True, stable=True)[..., kept]
    chosen = chosen.sort(dim=-1).values
    W = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)[chosen].mT
    return MemoryBasis(W, _regression(small_P, chosen, W) if read_out else W.clone(), sigma, chosen)


def memory_values(P: Float[Tensor, "*bank n n"], Q: Float[Tensor, "*bank n n"]) -> Float[Tensor, "*bank n"]:
    """σ, the roots of the eigenvalues of P Q, falling; Σσᵢ² is the mean square of the output if q ⊥ S."""
    P, Q, _ = _checked(P, Q, 1, None)
    pair = GramianPair.of(P.reshape(-1, *P.shape[-2:]), Q.reshape(-1, *Q.shape[-2:]))
    return (hankel_values(pair) * pair.sigma_scale).reshape(P.shape[:-1])


def error_estimates(sigma: Float[Tensor, "*bank n"]) -> Float[Tensor, "*bank n+1"]:
    """estimates[r] = √(Σ_{i>r} σᵢ²), the error of `balanced` to r states: exact if q ⊥ S, else an estimate."""
    validation.require_finite("sigma", validation.require_tensor("sigma", sigma, "n"))
    size = power_of_two(sigma.amax(-1, keepdim=True))
    tails = (sigma / size).square().flip(-1).cumsum(-1).flip(-1)
    return torch.sqrt(torch.cat([tails, torch.zeros_like(tails[..., :1])], dim=-1)) * size


def mean_square_error(
    P: Float[Tensor, "*bank n n"], Q: Float[Tensor, "*bank n n"], basis: MemoryBasis
) -> Float[Tensor, "*bank"]:
    """tr(Q (I − T Wᵀ) P (I − T Wᵀ)ᵀ), the mean square error of any basis if q ⊥ S."""
    P, Q, _ = _checked(P, Q, 1, None)
    (small_P, size_P), (small_Q, size_Q) = _scaled(P), _scaled(Q)
    Lp, Lq = psd_factor(small_P, "P"), psd_factor(small_Q, "Q")
    lost = Lq.mT @ (Lp - basis.T @ (basis.W.mT @ Lp))
    return lost.square().sum((-2, -1)) * size_P[..., 0] * size_Q[..., 0]


def state_moment(
    keys: Float[Tensor, "*bank length n"],
    values: Float[Tensor, "*bank heads length p"],
    log_decay: Float[Tensor, "*bank heads length"],
    counted: Bool[Tensor, "*bank length"] | None = None,
    log_gates: Float[Tensor, "*bank length n"] | None = None,
) -> tuple[Float[Tensor, "*bank n n"], Float[Tensor, "*bank"]]:
    """Σ_t S[t] S[t]ᵀ / scale² over all heads and all steps that are `counted`, and the scale, a power of two.

    No state is stored. In a chunk from a zero state it is Kᵀ (G ∘ V Vᵀ) K, with decays D_ts = exp(Σ_{s<u≤t} log α_u),
    G_ss' = D_ms g_m for s ≤ s' = m, and g_m = Σ_{t≥m} D_tm² over counted steps t. The state before the chunk adds
    products with Σ_s D_s g_s k_s v_sᵀ. With gates it goes step by step.
    """
    keys, values, log_decay, weights, log_gates = _checked_steps(keys, values, log_decay, counted, log_gates)
    sizes = [coarse_scale(part.abs().flatten(-2).amax(-1)) for part in (keys, values.flatten(-3, -2))]
    keys, values = keys / sizes[0][..., None, None], values / sizes[1][..., None, None, None]
    n, p = keys.shape[-1], values.shape[-1]
    total = keys.new_zeros(*keys.shape[:-2], n, n)
    state = keys.new_zeros(*values.shape[:-2], n, p)
    if log_gates is not None:
        total = _gated_moment(
            keys, values, torch.exp(log_decay[..., None] + log_gates[..., None, :, :]), weights, state
        )
        return total, sizes[0] * sizes[1]
    for start in range(0, keys.shape[-2], _CHUNK):
        part = slice(start, start + _CHUNK)
        added, state = _chunk_moment(
            keys[..., part, :], values[..., part, :], log_decay[..., part], weights[..., part], state
        )
        total = total + added
    return (total + total.mT) / 2, sizes[0] * sizes[1]


def delta_values(
    keys: Float[Tensor, "*bank length n"],
    values: Float[Tensor, "*bank heads length p"],
    log_decay: Float[Tensor, "*bank heads length"],
    strength: Float[Tensor, "*bank heads length"],
    log_gates: Float[Tensor, "*bank length n"] | None = None,
) -> Float[Tensor, "*bank heads length p"]:
    """The values u that a delta rule writes: u[t] = β[t] (v[t] − (α[t] S[t−1])ᵀ k[t]).

    S[t] = (I − β[t] k[t] k[t]ᵀ) α[t] S[t−1] + β[t] k[t] v[t]ᵀ is then S[t] = α[t] S[t−1] + k[t] u[t]ᵀ, a decay alone;
    with gates α is diag(gates) α. In a chunk, (I + β (K Kᵀ ∘ D below its diagonal)) U = β (V − K S before the chunk);
    all steps are solved at once.
    """
    state = keys.new_zeros(*values.shape[:-2], keys.shape[-1], values.shape[-1])
    found = []
    for part, decays in chunks(log_decay, log_gates):
        k, v, beta = keys[..., None, part, :], values[..., part, :], strength[..., part, None]
        target = beta * (v - decays.read(k, state))
        system = (beta * decays.products(k, k)).tril(-1)
        u = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
        state = decays.state_after(state, k, u)
        found.append(u)
    return torch.cat(found, dim=-2)


class Decays(ABC):
    """The decay between the steps of a chunk, and of the state before it."""

    @abstractmethod
    def products(self, q: Float[Tensor, "*bank length n"], k: Float[Tensor, "*bank length n"]) -> Tensor:
        """The products of the query of each step t and the key of each step s ≤ t, decayed."""

    @abstractmethod
    def read(self, q: Float[Tensor, "*bank length n"], state: Float[Tensor, "*bank n p"]) -> Tensor:
        """Read the state before the chunk by the queries."""

    @abstractmethod
    def state_after(self, state: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The state at the end of the chunk."""


@final
class ScalarDecays(Decays):
    """One decay for all key dimensions: a product with D_ts = exp(Σ_{s<u≤t} log α_u)."""

    def __init__(self, log_decay: Float[Tensor, "*bank length"]) -> None:
        self.between, self.since = decays(log_decay)

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.between

    def read(self, q: Tensor, state: Tensor) -> Tensor:
        return self.since[..., None] * (q @ state)

    def state_after(self, state: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.since[..., -1:, None] * state + (k * self.between[..., -1, :, None]).mT @ v


@final
class GatedDecays(Decays):
    """A decay for every key dimension, D_tsn: sums over n of three factors."""

    def __init__(self, logs: Float[Tensor, "*bank length n"]) -> None:
        between, since = decays(logs.mT)
        self.between, self.since = between.movedim(-3, -1), since.mT

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        return (q[..., :, None, :] * k[..., None, :, :] * self.between).sum(-1)

    def read(self, q: Tensor, state: Tensor) -> Tensor:
        return (q * self.since) @ state

    def state_after(self, state: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.since[..., -1, :, None] * state + (k * self.between[..., -1, :, :]).mT @ v


def chunks(
    log_decay: Float[Tensor, "*bank heads length"], log_gates: Float[Tensor, "*bank length n"] | None = None
) -> Iterator[tuple[slice, Decays]]:
    """The steps in chunks, each with its decays."""
    size = _CHUNK if log_gates is None else _CHUNK_OF_GATES
    for start in range(0, log_decay.shape[-1], size):
        part = slice(start, start + size)
        scalar = log_decay[..., part]
        if log_gates is None:
            yield part, ScalarDecays(scalar)
        else:
            yield part, GatedDecays(scalar[..., None] + log_gates[..., None, part, :])


def decays(
    log_decay: Float[Tensor, "*bank length"],
) -> tuple[Float[Tensor, "*bank length length"], Float[Tensor, "*bank length"]]:
    """D_ts = exp(Σ_{s<u≤t} log α_u) for s ≤ t, else 0, and exp(Σ_{u≤t} log α_u)."""
    logs = log_decay.clamp_min(_LEAST_LOG).cumsum(-1)
    later = torch.ones(logs.shape[-1], logs.shape[-1], dtype=torch.bool, device=logs.device).triu(1)
    between = (logs[..., :, None] - logs[..., None, :]).masked_fill(later, -torch.inf)
    return torch.exp(between), torch.exp(logs)


def _chunk_moment(
    keys: Tensor, values: Tensor, log_decay: Tensor, weights: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum over one chunk that starts from `state`, and the state at its end."""
    D, since_start = decays(log_decay)
    rest = (D.square() * weights[..., None, :, None]).sum(-2)
    G = D * rest[..., :, None]
    pairs = (G + G.tril(-1).mT) * (values @ values.mT)
    inner = keys.mT @ pairs.sum(-3) @ keys
    wide = keys[..., None, :, :]  # one for all heads
    crossed = ((wide * (since_start * rest)[..., None]).mT @ values @ state.mT).sum(-3)
    started = (since_start.square() * weights[..., None, :]).sum(-1)[..., None, None]
    outer = (started * (state @ state.mT)).sum(-3)
    end = since_start[..., -1:, None] * state + (wide * D[..., -1, :, None]).mT @ values
    return inner + crossed + crossed.mT + outer, end


def _gated_moment(keys: Tensor, values: Tensor, decay: Tensor, weights: Tensor, state: Tensor) -> Tensor:
    """The sum over all steps with decays (*bank, heads, length, n), one step after the other."""
    total = torch.zeros_like(state[..., 0, :, :1] * state[..., 0, :, :1].mT)
    for t in range(keys.shape[-2]):
        state = decay[..., t, :, None] * state + keys[..., None, t, :, None] * values[..., t, None, :]
        total = total + weights[..., t, None, None] * (state @ state.mT).sum(-3)
    return total


def _checked_steps(
    keys: Tensor, values: Tensor, log_decay: Tensor, counted: Tensor | None, log_gates: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The steps in float64, zeros in place of padding, and weights 1 for counted steps."""
    for name, tensor, axes in (
        ("keys", keys, "length n"),
        ("values", values, "heads length p"),
        ("log_decay", log_decay, "heads length"),
    ):
        validation.require_real(name, validation.require_tensor(name, tensor, axes))
    validation.require_one_device(keys=keys, values=values, log_decay=log_decay)
    bank, length = keys.shape[:-2], keys.shape[-2]
    shapes = (values.shape[:-3], values.shape[-2], log_decay.shape)
    if shapes != (bank, length, values.shape[:-1]):
        raise ShapeError(
            f"keys have shape {tuple(keys.shape)}, values {tuple(values.shape)} and log_decay"
            f" {tuple(log_decay.shape)}, expected (*bank, length, n), (*bank, heads, length, p), (*bank, heads, length)"
        )
    if counted is None:
        counted = torch.ones(*bank, length, dtype=torch.bool, device=keys.device)
    if counted.shape != (*bank, length) or counted.dtype != torch.bool:
        raise ShapeError(f"counted is {counted.dtype} {tuple(counted.shape)}, expected bool {(*bank, length)}")
    # Padding may hold anything.
    keys = torch.where(counted[..., None], keys, 0).double()
    values = torch.where(counted[..., None, :, None], values, 0).double()
    log_decay = torch.where(counted[..., None, :], log_decay, 0).double()
    logs = {"log_decay": log_decay}
    if log_gates is not None:
        if log_gates.shape != keys.shape:
            raise ShapeError(f"log_gates have shape {tuple(log_gates.shape)}, expected {tuple(keys.shape)}, as keys")
        logs["log_gates"] = log_gates = torch.where(counted[..., None], log_gates, 0).double()
    for name, tensor in (("keys", keys), ("values", values)):
        validation.require_finite(name, tensor)
    for name, tensor in logs.items():
        if not bool((tensor <= 0).all()):
            raise UnstableSystemError(f"the largest {name} is {tensor.max().item():.6g}, expected at most 0")
    return keys, values, log_decay, counted.double(), log_gates


def _checked(
    P: Tensor, Q: Tensor, order: SupportsIndex, states: Tensor | None
) -> tuple[Tensor, Tensor, Int[Tensor, " r"]]:
    """Both moments, real and in float64, and the directions to keep."""
    validation.require_tensor("P", P, "n n")
    P, Q = (
        validation.require_gramian(name, validation.require_real(name, matrix), P.shape[:-2], P.shape[-1], P.device)
        for name, matrix in (("P", P), ("Q", validation.require_tensor("Q", Q, "n n")))
    )
    return P, Q, kept_states(order, states, P[..., 0])


def _checked_gates(gates: Tensor, P: Tensor) -> Tensor:
    validation.require_finite("gates", validation.require_real("gates", validation.require_tensor("gates", gates, "n")))
    if gates.shape != P.shape[:-1]:
        raise ShapeError(f"gates have shape {tuple(gates.shape)}, expected {tuple(P.shape[:-1])}")
    if not bool(((gates >= 0) & (gates <= 1)).all()):
        low, high = gates.min().item(), gates.max().item()
        raise UnstableSystemError(f"gates are from {low:.6g} to {high:.6g}, expected averages from 0 to 1")
    return gates.double()


def _scaled(moment: Tensor) -> tuple[Tensor, Float[Tensor, "*bank 1"]]:
    """The moment divided by a power of four, and the power: products of two moments stay in the range of float64."""
    size = power_of_two(largest_part(moment), step=2)
    return moment / size[..., None, None], size[..., None]


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)


def _greedy(P: Tensor, Q: Tensor, order: int) -> Int[Tensor, "*bank r"]:
    """States that lower tr(Q R) most, one after the other; R is what the states so far leave of P."""
    rest, free = P, torch.ones_like(_diagonal(P), dtype=torch.bool)
    noise = P.shape[-1] * torch.finfo(P.dtype).eps * _diagonal(P)
    chosen = []
    for _ in range(order):
        own = _diagonal(rest)
        gain = ((rest @ Q) * rest).sum(-1) / torch.where(own > noise, own, torch.inf)
        pick = gain.masked_fill(~free, -torch.inf).argmax(-1, keepdim=True)
        chosen.append(pick)
        column = rest.gather(-1, pick[..., None, :].expand(*rest.shape[:-1], 1))
        pivot = own.gather(-1, pick)[..., None]
        usable = pivot > noise.gather(-1, pick)[..., None]
        rest = torch.where(usable, rest - column * column.mT / torch.where(usable, pivot, 1), rest)
        free = free.scatter(-1, pick, False)
    return torch.cat(chosen, dim=-1)


def _regression(P: Tensor, chosen: Int[Tensor, "*bank r"], W: Float[Tensor, "*bank n r"]) -> Tensor:
    """T = P_{:,I} P_{II}⁻¹; P_{II} is singular if kept states are linearly dependent. Kept states give themselves."""
    columns = P @ W
    T = columns @ torch.linalg.pinv(W.mT @ columns, hermitian=True, rtol=1e-12)
    is_kept = W.sum(-1, keepdim=True) > 0
    return torch.where(is_kept, W, T)
