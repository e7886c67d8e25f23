import sys
from types import SimpleNamespace

import pytest
import torch

from compressm_lab.bench import peers
from compressm_lab.bench.peers import (
    PEERS,
    ComplexPeer,
    Ours,
    PairPeer,
    RotatedPeer,
    measure_peers,
    random_problem,
    solve,
)

SHAPE = (2, 37, 3)
HERE = {"compressm", "PyTorch loop", "torch scan, eager"}


def test_what_runs_here_is_right_and_timed_and_what_does_not_says_why():
    lines = []
    result = measure_peers([SHAPE], repeats=1, progress=lines.append)
    assert len(lines) == len(result.rows) == len(PEERS)
    for row in result.rows:
        if "note" in row:
            assert row["peer"] not in HERE
            assert row["note"] == "needs a GPU" or row["note"].startswith("not installed: ")
        else:
            assert max(row["error"], row["gradient_error"]) < 1e-5
            assert min(row["forward_s"], row["both_s"]) > 0


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_layout_is_read_back_as_it_was_packed(peer):
    z = random_problem(*SHAPE, torch.device("cpu")).x
    torch.testing.assert_close(peer.unpack(peer.pack(z)), z)


def loop(poles, x, dim):
    """The recurrence with λ at every step along `dim`, in any numbers."""
    h, history = torch.zeros_like(x.select(dim, 0)), []
    for t in range(x.shape[dim]):
        h = poles.select(dim, t) * h + x.select(dim, t)
        history.append(h)
    return torch.stack(history, dim)


def complex_pairs(poles, x):
    h = loop(torch.complex(*poles), torch.complex(*x), 2)
    return torch.stack([h.real, h.imag])


@pytest.mark.parametrize(
    "peer",
    [
        ComplexPeer("time last", lambda: lambda poles, x: loop(poles, x, 2), time_last=True),
        PairPeer("pairs", lambda: complex_pairs, gpu_only=False),
        RotatedPeer("real", lambda: lambda log, x: loop(torch.exp(log), x, 1)),
    ],
    ids=lambda peer: peer.name,
)
def test_a_plain_scan_in_every_layout_computes_the_recurrence(peer):
    (row,) = measure_peers([SHAPE], peers=[peer], repeats=1).rows
    assert max(row["error"], row["gradient_error"]) < 1e-5, row


def test_a_peer_that_fails_leaves_its_reason_and_a_wrong_one_its_error():
    def broken(poles, x):
        raise ValueError("lengths must be a power of 2\nand more")

    failing = ComplexPeer("failing", lambda: broken)
    wrong = ComplexPeer("wrong", lambda: lambda poles, x: 2 * loop(poles, x, 1))
    first, second = measure_peers([SHAPE], peers=[failing, wrong], repeats=1).rows
    assert first["note"] == "ValueError: lengths must be a power of 2"
    assert "forward_s" not in first
    assert second["error"] == pytest.approx(1, rel=1e-3)


def test_our_own_failure_is_not_swallowed(monkeypatch):
    monkeypatch.setattr(peers, "median_seconds", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure_peers([SHAPE], peers=[Ours()], repeats=1)


def test_the_truth_is_that_of_autograd():
    problem = random_problem(*SHAPE, torch.device("cpu"))
    truth = solve(problem)
    x = problem.x.to(torch.complex128).requires_grad_()
    poles = torch.exp(torch.complex(*problem.log_poles.double()))
    h = loop(poles.expand_as(x), x, 1)
    (gradient,) = torch.autograd.grad(h, x, truth.weight.to(h.dtype))
    torch.testing.assert_close(truth.h, h)
    torch.testing.assert_close(truth.gradient, gradient)


def test_packages_are_called_as_they_want_to_be(monkeypatch):
    """With stand-ins that have the signatures of the real ones."""
    hgrn = SimpleNamespace(chunk_hgrn=lambda x, g: (loop(torch.exp(g), x, 1), None))
    stand_ins = {
        "accelerated_scan.complex": {"scan": lambda forget, inputs: loop(forget, inputs, 2)},
        "assoc_scan": {"AssocScan": lambda: lambda gates, inputs: loop(gates, inputs, 1)},
        "mambapy.pscan": {"pscan": lambda A, X: loop(A, X, 1)},
        "philtorch.lti": {"linear_recurrence": lambda a, init, x: loop(a[:, None].expand_as(x), x + 0 * init, 1)},
        "fla.ops": {"hgrn": hgrn},
    }
    for module, names in stand_ins.items():
        monkeypatch.setitem(sys.modules, module.split(".")[0], SimpleNamespace(__path__=[]))
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**names))
    called = {"accelerated-scan", "assoc-scan", "mambapy", "philtorch", "fla-core, chunks"}
    for peer in (peer for peer in PEERS if peer.name in called):
        problem = random_problem(*SHAPE, torch.device("cpu"))
        h = peer.scan(problem)(peer.poles(problem), peer.pack(problem.x))
        torch.testing.assert_close(peer.unpack(h), solve(problem).h.to(torch.complex64), rtol=1e-4, atol=1e-4)
