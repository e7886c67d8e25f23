"""Time our scan for h[t] = λ h[t−1] + x[t] with complex λ beside other people's, each in the layout it likes best.

A peer gets its inputs prepared outside the clock, λ repeated at every step where it wants that. Packages are imported
only here and only when asked for; none is a dependency. Those on PyPI that were looked at:

- complex λ: accelerated-scan (`accelerated_scan.complex`, Triton, GPU only), assoc-scan and s5-pytorch (trees of
  PyTorch operations), philtorch (compiled; its wheels on PyPI are for CPUs).
- real λ: fla-core (`fla.ops.hgrn`, Triton, GPU only) and mambapy (`pscan`, PyTorch; its gradient lacks the conjugate
  that complex λ needs). They run here on two real channels a mode: with λ = |λ| e^{iθ}, h[t] e^{−iθt} obeys the same
  recurrence with |λ|. The rotation before and after is theirs to pay; θ gets no gradient.
- left out: mamba-ssm, lrnnx, fpscan, torchlpc, flashfftconv and `accelerated_scan.warp` need nvcc to install;
  torch-discounted-cumsum does too and has one real λ; pscan and torch-scan are about other things; hax is for JAX.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from compressm.ops import linear_recurrence
from compressm_lab.bench.timing import Progress, capture, median_seconds, silent, threads_for
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.training.building import DTYPES

PeerScan = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """Inputs x of shape (batch, length, n), complex, and (log |λ|, arg λ) of shape (2, n)."""

    x: Tensor
    log_poles: Tensor

    @cached_property
    def poles(self) -> Tensor:
        """The poles λ, complex64 from float64."""
        return torch.exp(torch.complex(*self.log_poles.double())).to(torch.complex64)


@dataclass(frozen=True)
class Peer(ABC):
    """One way to compute the recurrence, in a layout of its own.

    `load` imports the package and returns its scan, from (poles, inputs) to every h; `longest` is the longest sequence
    it gets through.
    """

    name: str
    load: Callable[[], PeerScan]
    gpu_only: bool = False
    longest: int | None = None
    precisions: ClassVar[tuple[str, ...]] = ("float32",)

    def scan(self, problem: Problem) -> PeerScan:
        """The scan of this problem; raises ImportError where the package is not here."""
        return self.load()

    def poles(self, problem: Problem) -> Tensor:
        """The poles at every step, in its layout: the gradient is taken of them and of x."""
        return self.pack(problem.poles.expand_as(problem.x))

    @abstractmethod
    def pack(self, z: Tensor) -> Tensor:
        """Bring a complex tensor (batch, length, n) into its layout."""

    @abstractmethod
    def unpack(self, own: Tensor) -> Tensor:
        """The inverse of `pack`."""


def _our_scan() -> PeerScan:
    return lambda log_poles, x: linear_recurrence(x, log_poles)[0]


@final
@dataclass(frozen=True)
class Ours(Peer):
    """Our own `compressm.ops.linear_recurrence`: pairs, and λ as its logarithm."""

    name: str = "compressm"
    load: Callable[[], PeerScan] = _our_scan
    precisions: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")

    def poles(self, problem: Problem) -> Tensor:
        return problem.log_poles

    def pack(self, z: Tensor) -> Tensor:
        return torch.stack([z.real, z.imag], dim=2)

    def unpack(self, own: Tensor) -> Tensor:
        return torch.complex(*own.float().unbind(2))


@final
@dataclass(frozen=True)
class ComplexPeer(Peer):
    """A scan of (batch, length, n), or (batch, n, length) where `time_last`; λ once where `constant`."""

    time_last: bool = False
    constant: bool = False

    def poles(self, problem: Problem) -> Tensor:
        return problem.poles if self.constant else super().poles(problem)

    def pack(self, z: Tensor) -> Tensor:
        return (z.mT if self.time_last else z).contiguous()

    def unpack(self, own: Tensor) -> Tensor:
        return own.mT if self.time_last else own


@final
@dataclass(frozen=True)
class PairPeer(Peer):
    """A scan of (2, batch, n, length): real and imaginary parts as two real channels."""

    gpu_only: bool = True
    precisions: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")

    def pack(self, z: Tensor) -> Tensor:
        return torch.stack([z.real.mT, z.imag.mT])

    def unpack(self, own: Tensor) -> Tensor:
        return torch.complex(*own.float().mT)


@final
@dataclass(frozen=True)
class RotatedPeer(Peer):
    """A scan with real λ: (log |λ|, z) of shape (batch, length, n, 2), where z[t] = e^{−iθt} x[t]."""

    def scan(self, problem: Problem) -> PeerScan:
        real_scan = self.load()
        steps = torch.arange(problem.x.shape[1], dtype=torch.float64, device=problem.x.device)[:, None]
        angles = steps * problem.log_poles[1].double()
        turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

        def scan(log_modulus: Tensor, x: Tensor) -> Tensor:
            real = torch.view_as_real(x * turns.conj())
            return torch.view_as_complex(real_scan(log_modulus, real).contiguous()) * turns

        return scan

    def poles(self, problem: Problem) -> Tensor:
        return problem.log_poles[0][:, None].expand(*problem.x.shape, 2).contiguous()

    def pack(self, z: Tensor) -> Tensor:
        return z.contiguous()

    def unpack(self, own: Tensor) -> Tensor:
        return own


def _loop_peer() -> PeerScan:
    def scan(poles: Tensor, x: Tensor) -> Tensor:
        h, history = torch.zeros_like(x[:, 0]), []
        for step in x.unbind(1):
            h = poles * h + step
            history.append(h)
        return torch.stack(history, dim=1)

    return scan


def _torch_tree() -> PeerScan:
    from torch._higher_order_ops.associative_scan import associative_scan

    def then(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return second[0] * first[0], second[0] * first[1] + second[1]

    return lambda poles, x: associative_scan(then, (poles, x), 1, combine_mode="generic")[1]


def _torch_compiled() -> PeerScan:
    import torch._dynamo
    from torch._higher_order_ops.associative_scan import associative_scan

    def then(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (a, b, x, y), (c, d, u, v) = first, second
        return c * a - d * b, c * b + d * a, c * x - d * y + u, c * y + d * x + v

    def scan(poles: Tensor, x: Tensor) -> Tensor:
        h: Any = associative_scan(then, (poles[0], poles[1], x[0], x[1]), 2, combine_mode="pointwise")
        return torch.stack(h[2:])

    # Every shape anew: kept ones would count against the limit of recompilations, and past it the scan is not compiled.
    torch._dynamo.reset()
    return torch.compile(scan, dynamic=False)


def _s5() -> PeerScan:
    from s5.jax_compat import associative_scan
    from s5.s5_model import binary_operator

    return lambda poles, x: associative_scan(binary_operator, (poles, x), axis=1)[1]


def _philtorch() -> PeerScan:
    from philtorch.lti import linear_recurrence as recurrence

    def scan(poles: Tensor, x: Tensor) -> Tensor:
        start = torch.zeros((), dtype=x.dtype, device=x.device)
        return recurrence(poles.repeat(len(x)), start, x.flatten(0, 1)).view_as(x)

    return scan


def _mambapy() -> PeerScan:
    pscan = import_module("mambapy.pscan").pscan
    return lambda log_modulus, x: pscan(torch.exp(log_modulus), x)


def _hgrn(name: str) -> PeerScan:
    kernel = getattr(import_module("fla.ops").hgrn, name)
    return lambda log_modulus, x: kernel(x.flatten(2), log_modulus.flatten(2))[0].view_as(x)


PEERS: tuple[Peer, ...] = (
    Ours(),
    ComplexPeer("PyTorch loop", _loop_peer, constant=True),
    ComplexPeer("torch scan, eager", _torch_tree),
    PairPeer("torch scan, compiled", _torch_compiled, longest=4096),  # 16384 compile for more than two minutes
    ComplexPeer(
        "accelerated-scan", lambda: import_module("accelerated_scan.complex").scan, time_last=True, gpu_only=True
    ),
    ComplexPeer("assoc-scan", lambda: import_module("assoc_scan").AssocScan()),
    ComplexPeer("s5-pytorch", _s5),
    ComplexPeer("philtorch", _philtorch, time_last=True, constant=True),
    RotatedPeer("mambapy", _mambapy),
    RotatedPeer("fla-core, chunks", partial(_hgrn, "chunk_hgrn"), gpu_only=True),
    RotatedPeer("fla-core, recurrent", partial(_hgrn, "fused_recurrent_hgrn"), gpu_only=True),
)


# (batch, length, n): sMNIST small and whole, sCIFAR, and a long sequence.
SHAPES = ((50, 784, 16), (50, 784, 256), (50, 1024, 384), (8, 16384, 64))
_LONGEST_S = 3.0  # for one time, after one repeat: a loop over 16384 steps takes a second
_NOTE = 160


@dataclass(frozen=True)
class Truth:
    """Every h, and the gradient of Re Σ w̄ h with respect to x, by a loop in complex128."""

    weight: Tensor
    h: Tensor
    gradient: Tensor


def measure_peers(
    shapes: Iterable[tuple[int, int, int]] = SHAPES,
    *,
    device: str = "cpu",
    peers: Sequence[Peer] = PEERS,
    repeats: int = 9,
    progress: Progress = silent,
) -> Measurement:
    """Time each peer at each shape in every precision it has; on the CPU with one thread."""
    where = torch.device(device)
    precisions = ("float32", "bfloat16") if where.type == "cuda" else ("float32",)
    chosen = [(precision, peer) for precision in precisions for peer in peers if precision in peer.precisions]
    rows: list[Row] = []
    with threads_for(where):
        for batch, length, n in shapes:
            problem = random_problem(batch, length, n, where)
            truth = solve(problem)
            for precision, peer in chosen:
                progress(f"batch {batch}, length {length}, n = {n}, {precision}: {peer.name}")
                rows.append(_row(peer, problem, truth, precision, repeats))
        return Measurement("peers", "The recurrence beside other scans", repeats, rows)


def random_problem(batch: int, length: int, n: int, device: torch.device) -> Problem:
    """Random inputs, and the poles of an LRU at initialisation: |λ| in [0.9, 0.999], every phase."""
    generator = torch.Generator().manual_seed(0)
    modulus = 0.9 + 0.099 * torch.rand(n, generator=generator)
    log_poles = torch.stack([torch.log(modulus), 6.28 * torch.rand(n, generator=generator)])
    x = torch.randn(batch, length, n, generator=generator, dtype=torch.complex64)
    return Problem(x.to(device), log_poles.to(device))


def solve(problem: Problem) -> Truth:
    """Solve a problem with random w; the gradient g[t] = w[t] + λ̄ g[t+1] is the same loop backwards."""
    poles = torch.exp(torch.complex(*problem.log_poles.double()))
    weight = problem.x.roll(1, dims=1)
    gradient = _loop(poles.conj(), weight.flip(1)).flip(1)
    return Truth(weight, _loop(poles, problem.x), gradient)


def _loop(poles: Tensor, x: Tensor) -> Tensor:
    h = x.to(torch.complex128)
    for t in range(1, h.shape[1]):
        h[:, t] += poles * h[:, t - 1]
    return h


def _row(peer: Peer, problem: Problem, truth: Truth, precision: str, repeats: int) -> Row:
    batch, length, n = problem.x.shape
    device = problem.x.device.type
    row: Row = {
        "peer": peer.name,
        "precision": precision,
        "device": device,
        "batch": batch,
        "length": length,
        "order": n,
    }
    if peer.gpu_only and device == "cpu":
        return row | {"note": "needs a GPU"}
    if peer.longest is not None and length > peer.longest:
        return row | {"note": f"left out beyond length {peer.longest}: it compiles for minutes"}
    try:
        return row | _measured(peer, problem, truth, precision, repeats)
    except ModuleNotFoundError as error:
        return row | {"note": f"not installed: {error.name}"}
    # A foreign scan can fail in any way, and then its reason is the result; ours may not.
    except Exception as error:
        if isinstance(peer, Ours):
            raise
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return row | {"note": f"{type(error).__name__}: {first}"[:_NOTE]}


def _measured(peer: Peer, problem: Problem, truth: Truth, precision: str, repeats: int) -> Row:
    device, dtype = problem.x.device, DTYPES[precision]
    x, weight, poles = peer.pack(problem.x), peer.pack(truth.weight), peer.poles(problem)
    if dtype != torch.float32:
        x, weight = x.to(dtype), weight.to(dtype)
        poles = poles if isinstance(peer, Ours) else poles.to(dtype)
    x, poles = x.requires_grad_(), poles.detach().clone().requires_grad_()
    scan = peer.scan(problem)

    def forward() -> Tensor:
        with torch.no_grad():
            return scan(poles, x)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(scan(poles, x), (x, poles), weight)

    row: Row = {
        "error": _difference(peer.unpack(forward()), truth.h),
        "gradient_error": _difference(peer.unpack(both()[0]), truth.gradient),
    }
    for name, work in (("forward_s", forward), ("both_s", both)):
        row[name], row["timed"] = _seconds(work, device, repeats)
    return row


def _seconds(work: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, str]:
    """Time a CUDA graph where one can be recorded, so that kernels are compared and not the Python around them."""
    timed = "eager"
    if device.type == "cuda":
        try:
            work, timed = capture(work), "graph"
        except RuntimeError:  # something in it waits for the device
            torch.cuda.synchronize()
    return median_seconds(work, repeats=repeats, device=device, within=_LONGEST_S), timed


def _difference(got: Tensor, expected: Tensor) -> float:
    """The largest error, relative to the largest expected value."""
    return float((got.to(expected.dtype) - expected).abs().max() / expected.abs().max())
