"""S4 against the HiPPO matrix that it starts as, and against its definition in complex numbers."""

import pytest
import torch

import compressm as cs
from compressm.layers import S4, S4D, Bilinear
from compressm.layers.initialisation import legs_matrix


def make(width=3, order=5, **options):
    torch.manual_seed(0)
    return S4(width, order, **options).double()


def diagonal(layer):
    """The layer with p = 0."""
    for name in ("p_re", "p_im"):
        torch.nn.init.zeros_(layer.get_parameter(name))
    return layer


def by_hand(layer, u):
    """Outputs for one sequence from the pairs (h, h̄), with full complex matrices and a solver."""
    p = {name: value.detach() for name, value in layer.named_parameters()}
    y = layer.D.detach() * u
    for channel in range(layer.width):
        a = torch.complex(-p["log_A_real"][channel].exp(), p["A_imag"][channel])
        low, B, C = (torch.complex(p[f"{name}_re"][channel], p[f"{name}_im"][channel]) for name in ("p", "B", "C"))
        a, low, B, C = (torch.cat([part, part.conj()]) for part in (a, low, B, C))
        A = torch.diag(a) - torch.outer(low, low.conj())
        identity, step = torch.eye(len(a), dtype=A.dtype), p["log_step"][channel].exp()
        h = torch.zeros_like(a)
        for t in range(len(u)):
            right = (identity + step / 2 * A) @ h + step * B * u[t, channel]
            h = torch.linalg.solve(identity - step / 2 * A, right)
            y[t, channel] += (C @ h).real
    return y


@pytest.mark.parametrize("change", [lambda layer: layer, diagonal], ids=["low rank", "diagonal"])
def test_a_layer_computes_its_diagonal_plus_low_rank_system(change):
    layer, u = change(make()), torch.randn(150, 3, dtype=torch.float64)
    torch.testing.assert_close(layer(u[None])[0][0], by_hand(layer, u), rtol=1e-9, atol=1e-11)


def test_it_starts_as_the_hippo_matrix():
    """With C = c V it answers as h' = A h + b u, y = c h with A of HiPPO-LegS and bᵢ = √(2i + 1), in real numbers."""
    layer, n = make(width=1, order=5, step_min=0.009, step_max=0.011), 10
    A, step = legs_matrix(n), layer.log_step.detach().exp()
    b = torch.sqrt(2 * torch.arange(n, dtype=torch.float64) + 1)
    identity = torch.eye(n, dtype=torch.float64)
    system = layer.discrete()
    got = torch.linalg.eigvals(system[0][0].detach())
    wanted = torch.linalg.eigvals(torch.linalg.solve(identity - step / 2 * A, identity + step / 2 * A))
    # Characteristic polynomials: eigenvalues themselves are ill-conditioned.
    z = torch.polar(torch.full((7,), 1.5, dtype=torch.float64), torch.arange(7, dtype=torch.float64))
    torch.testing.assert_close((z[:, None] - got).prod(-1), (z[:, None] - wanted).prod(-1), rtol=1e-5, atol=1e-12)
    # What the input does: Markov parameters of every readout, by their Gram matrix.
    h, g, rows, own = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64), [], []
    for t in range(30):
        drive = 1.0 if t == 0 else 0.0
        h = torch.linalg.solve(identity - step / 2 * A, (identity + step / 2 * A) @ h + step * b * drive)
        g = system[0][0].detach() @ g + system[1][0].detach() * drive
        rows.append(h)
        own.append(2**0.5 * g)  # (Re h, Im h) of half of the pairs has half of the energy
    rows, own = torch.stack(rows), torch.stack(own)
    torch.testing.assert_close(own @ own.mT, rows @ rows.mT, rtol=1e-5, atol=1e-9)


def test_every_p_is_stable():
    for seed in range(5):
        layer = make(order=6)
        g = torch.Generator().manual_seed(seed)
        for name in ("p_re", "p_im"):
            layer.get_parameter(name).data = 100 * torch.randn(3, 6, generator=g, dtype=torch.float64)
        assert torch.linalg.eigvals(layer.discrete()[0]).abs().max() < 1


def test_without_p_it_is_s4d_with_an_input_matrix():
    layer, x = diagonal(make()), torch.randn(2, 70, 3, dtype=torch.float64)
    other = S4D(3, 5, discretisation=Bilinear()).double()
    for name in ("log_A_real", "A_imag", "log_step", "D"):
        other.get_parameter(name).data = layer.get_parameter(name).data
    product = torch.complex(layer.B_re, layer.B_im) * torch.complex(layer.C_re, layer.C_im)
    other.C_re.data, other.C_im.data = product.real.detach(), product.imag.detach()
    torch.testing.assert_close(layer(x)[0], other(x)[0])


def test_the_gradient_of_p_is_zero_where_p_is():
    """Matrices are used wherever the values of p are not read; a compiled layer trains so."""
    layer, x = diagonal(make()), torch.randn(2, 30, 3, dtype=torch.float64)
    parameters = {name: value.detach() for name, value in layer.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(layer, parameters, (x,))[0].square().sum()

    found = torch.func.grad(loss)(parameters)
    assert not found["p_re"].any()
    assert not found["p_im"].any()
    layer(x)[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        if not name.startswith("p_"):
            torch.testing.assert_close(parameter.grad, found[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("moments", [cs.Transport(), cs.Restart(), cs.Slice()], ids=repr)
def test_a_cut_layer_gives_every_parameter_a_gradient_and_keeps_p_zero(moments):
    """DistributedDataParallel stops a training in which a parameter has no gradient."""
    layer, x = make(order=8), torch.randn(2, 30, 3, dtype=torch.float64)
    optimizer = torch.optim.AdamW(layer.parameters(), 1e-2)
    compressor = cs.Compressor(layer, optimizer, when=[2], keep=cs.TargetOrder(4), moments=moments)
    for step in range(1, 6):
        optimizer.zero_grad()
        layer(x)[0].square().sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())
        optimizer.step()
        compressor.step(step)
    assert layer.order == 4
    assert layer.is_diagonal()
