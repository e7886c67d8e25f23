"""Bad input is refused by a named error whose message holds the offending value and what is allowed.

The tests' shape checker would refuse most of it first, so one plain Python process, without it, runs the whole table.
"""

import numpy as np
import pytest
import torch

from compressm.control import balanced_truncation, error_bounds, galerkin_projection, shared_projection
from tests import unhooked
from tests.control.test_system import real_system

PREAMBLE = """
import numpy
import torch
from torch import eye, inf, nan, ones, tensor, zeros
from compressm.control import *

torch.set_default_dtype(torch.float64)

def diagonal(poles=(0.5, 0.5, 0.5), p=2, q=2, B=None, C=None, bank=()):
    poles = poles if isinstance(poles, torch.Tensor) else tensor(poles).expand(*bank, len(poles))
    n = poles.shape[-1]
    B = ones(*bank, n, p) if B is None else B
    return DiagonalSystem(poles, B, ones(*bank, q, n) if C is None else C)

def from_logs(*log_poles):
    return DiagonalSystem.from_log_poles(tensor(log_poles), ones(len(log_poles), 1), ones(1, len(log_poles)))

def dense(A):
    return DenseSystem(A, ones(2, 1), ones(1, 2))

def averaged(A=0.5 * ones(4, 2), B=ones(4, 2, 1), C=ones(4, 1, 2), **options):
    return mean_dynamics(A, B, C, **options)

def selective(rates=(-1.0, -2.0), step=0.1, B=ones(2), **options):
    step = tensor(step) if isinstance(step, float) else step
    return mean_selective_system(tensor(rates), step, B, ones(2), **options)

def truncated(order=None, bank=(), **options):
    return balanced_truncation(diagonal(bank=bank), order, **options)

def bank(*shape):
    return diagonal(bank=shape)

rates = tensor([-1.0, -2.0])
hermitian = tensor([[1, 0.5j], [-0.5j, 1]])
indefinite = torch.diag(tensor([1.0, 1.0, -0.25]))
"""

UNSTABLE = {
    "a pole of modulus 1": ("diagonal((0.5, 1.0))", "modulus is 1,", "< 1"),
    "a complex pole outside the circle": ("diagonal((0.5, 0.75 + 1j))", "1.25", "< 1"),
    "a pole one ulp outside": ("diagonal((0.5, 1 + 2**-52))", "modulus is 1,", "< 1"),
    "a pole whose square overflows": ("diagonal((0.5, 1e200))", "modulus is 1e+200", "< 1"),
    "a complex pole whose square overflows": ("diagonal((0.5, 3e200 + 4e200j))", "modulus is 5e+200", "1 poles"),
    "two poles outside": ("diagonal((0.5, -3.0, 2.0))", "3", "2 poles", "< 1"),
    "a log pole of 0": ("from_logs(-1.0, 0.0)", "modulus is 1,", "< 1"),
    "a log pole of 0.1": ("from_logs(-1.0, 0.1)", "1.10517", "< 1"),
    "a log pole of 1e-18": ("from_logs(-1.0, 1e-18)", "modulus is 1,", "< 1"),
    "a complex log pole of real part 0.5": ("from_logs(-1.0, 0.5 + 2j)", "1.64872", "< 1"),
    "a dense rotation by 1.2": ("dense(tensor([[0, 1.2], [-1.2, 0]]))", "1.2", "< 1"),
    "a dense identity": ("dense(eye(2))", "A is 1,", "< 1"),
    "a second-moment system with a pole at 1": (
        "second_moment_system(tensor([0.5, 1]), eye(2), eye(2))",
        "modulus is 1,",
        "< 1",
    ),
    "a Lyapunov equation of radius 1": ("solve_lyapunov(eye(2), eye(2))", "A is 1,", "< 1"),
    "a Lyapunov equation of radius 2": ("solve_lyapunov(2 * eye(2), eye(2))", "A is 2,", "< 1"),
    "a mean step of 0": ("selective(step=0.0)", "mean_step is 0,", "> 0"),
    "a mean step of -0.5": ("selective(step=-0.5)", "mean_step is -0.5,", "> 0"),
    "a largest radius of 0": ("averaged(largest_radius=0)", "is 0,", "between 0 and 1"),
    "a largest radius of 1": ("averaged(largest_radius=1.0)", "1.0", "between 0 and 1"),
    "a largest radius of -2": ("averaged(largest_radius=-2)", "-2", "between 0 and 1"),
    "a largest radius of NaN": ("averaged(largest_radius=nan)", "nan", "between 0 and 1"),
    "a selective largest radius of -0.5": ("selective(largest_radius=-0.5)", "-0.5", "between 0 and 1"),
    "a selective largest radius of 1": ("selective(largest_radius=1.0)", "1.0", "between 0 and 1"),
    "a growing selective rate": ("selective((-1.0, 0.25))", "0.25", "< 0"),
    "a rate of 0": ("second_moment_gramians(tensor([-1.0, 0.0]), eye(2), eye(2))", "largest 0", "< 0"),
    "a complex rate": ("second_moment_gramians(tensor([-1.0, -2 + 0j]), eye(2), eye(2))", "complex128", "real"),
    "a rate of 2 to project": ("galerkin_projection(tensor([-1.0, 2]), eye(2), eye(2), 1)", "largest 2", "< 0"),
    "a rate of 2 to share": (
        "shared_projection(tensor([[-1, 2.0]]), eye(2)[None], eye(2)[None], 1)",
        "largest 2",
        "< 0",
    ),
}

NON_FINITE = {
    "NaN in poles": ("diagonal((0.5, nan))", "poles[1] is nan"),
    "infinity in poles": ("diagonal((0.5, -inf))", "poles[1] is -inf"),
    "NaN in an imaginary part": ("diagonal((0.5, complex(0, nan)))", "poles[1]", "nan"),
    "NaN in B": ("diagonal(B=nan * ones(3, 2))", "B[0, 0] is nan", "6 entries"),
    "infinity in C": ("diagonal(C=inf * ones(2, 3))", "C[0, 0] is inf"),
    "NaN in A": ("dense(tensor([[0, nan], [0, 0]]))", "A[0, 1] is nan"),
    "NaN in log poles": ("from_logs(-1.0, nan)", "log_poles[1] is nan"),
    "infinity in log poles": ("from_logs(-1.0, inf)", "log_poles[1] is inf"),
    "a phase of NaN at the pole 0": ("from_logs(-1.0, complex(-inf, nan))", "log_poles[1]", "nan"),
    "NaN in P": ("truncated(1, P=nan * ones(3, 3))", "P[0, 0] is nan"),
    "infinity in P": ("hankel_singular_values(diagonal(), P=inf * ones(3, 3))", "P[0, 0] is inf"),
    "NaN in an input covariance": ("controllability_gramian(diagonal(), nan * ones(2, 2))", "[0, 0] is nan"),
    "NaN in states": ("measured_gramian(tensor([[1, 2], [3, nan]]))", "states[1, 1] is nan"),
    "infinity in a state that counts": (
        "measured_gramian(tensor([[inf, 2], [3, nan]]), tensor([True, False]))",
        "states[0, 0] is inf",
        "1 entries",
    ),
    "NaN in sampled A": ("averaged(A=nan * ones(4, 2))", "A[0, 0] is nan"),
    "NaN in sampled B": ("averaged(B=nan * ones(4, 2, 1))", "B[0, 0, 0] is nan"),
    "infinity in sampled C": ("averaged(C=inf * ones(4, 1, 2))", "C[0, 0, 0] is inf"),
    "NaN in a mean step": ("selective(step=nan)", "nan"),
    "NaN in rates": ("second_moment_gramians(tensor([-1, nan]), eye(2), eye(2))", "rates[1] is nan"),
    "NaN in a moment": ("second_moment_gramians(rates, eye(2), nan * eye(2))", "moment_C[0, 0] is nan"),
    "NaN in a spectrum": ("error_bounds(tensor([1, nan]))", "[1.0, nan]", ">= 0"),
    "a negative singular value": ("error_bounds(tensor([1, -0.25]))", "-0.25", ">= 0"),
    "an empty spectrum": ("error_bounds(tensor([]))", "[]", "at least one"),
    "infinity in shares": ("bottom_shares(tensor([inf, 1]))", "inf", "finite"),
    "NaN in a rank": ("numerical_rank(tensor([1, nan]))", "nan"),
    "NaN in a trajectory": ("trajectories([ones(2), tensor([1, nan])])", "spectra[1][1] is nan"),
}

SHAPE = {
    "poles without an axis": ("DiagonalSystem(tensor(0.5), ones(1, 1), ones(1, 1))", "poles", "()", "(*bank, n)"),
    "B without channels": ("diagonal(B=ones(3))", "B", "(3,)", "n, p"),
    "C without channels": ("diagonal(C=ones(3))", "C", "(3,)", "q, n"),
    "poles as a list": ("DiagonalSystem([0.5], ones(1, 1), ones(1, 1))", "poles", "list", "tensor"),
    "log poles as a list": ("DiagonalSystem.from_log_poles([-1.0], ones(1, 1), ones(1, 1))", "log_poles", "list"),
    "B of another order": ("diagonal(B=ones(4, 2))", "B has shape (4, 2)", "3 in poles"),
    "C of another order": ("diagonal(C=ones(2, 4))", "C has shape (2, 4)", "3 in poles"),
    "an A that is not square": ("dense(zeros(2, 3))", "A has shape (2, 3)"),
    "banks that disagree": ("diagonal(0.5 * ones(4, 3), B=ones(5, 3, 1), C=ones(4, 1, 3))", "poles (4,)", "B (5,)"),
    "an empty bank": ("diagonal(ones(0, 3), B=ones(0, 3, 1), C=ones(0, 1, 3))", "(0, 3)", ">= 1"),
    "no states": ("DiagonalSystem(ones(0), ones(0, 1), ones(1, 0))", "(0,)", ">= 1"),
    "no inputs": ("diagonal(p=0)", "(3, 0)", ">= 1"),
    "P of another order": ("truncated(1, P=eye(2))", "(2, 2)", "(3, 3)"),
    "P without the bank": ("truncated(1, bank=(2,), P=eye(3))", "(3, 3)", "(2, 3, 3)"),
    "P as a list": ("truncated(1, P=[[1.0]])", "P", "list", "tensor"),
    "kept states of another bank": ("truncated(states=zeros(3, 1).int(), bank=(2,))", "(3, 1)", "(2, 'r')"),
    "an input covariance of another width": ("controllability_gramian(diagonal(), eye(3))", "(3, 3)", "(2, 2)"),
    "a Lyapunov equation of two orders": ("solve_lyapunov(eye(2) / 2, eye(3))", "(3, 3)", "(2, 2)"),
    "inputs of another width": ("diagonal().simulate(ones(4, 3))", "3 channels", "expected 2"),
    "an initial state of another order": ("diagonal().simulate(ones(4, 2), ones(1))", "(1,)", "3"),
    "an initial state as a list": ("diagonal().states(ones(4, 2), [0.0] * 3)", "initial_state", "list", "tensor"),
    "an initial state of another batch": (
        "diagonal().simulate(ones(5, 4, 2), ones(6, 3))",
        "inputs (5,)",
        "initial_state (6,)",
    ),
    "inputs of another bank": ("bank(2).simulate(ones(3, 4, 2))", "bank (2,)", "inputs (3,)", "agree"),
    "an initial state of another bank": ("bank(2).states(ones(4, 2), ones(3, 3))", "bank (2,)", "initial_state (3,)"),
    "inputs as a list": ("diagonal().simulate([[1.0, 2.0]])", "inputs", "list", "tensor"),
    "an impulse response of no length": ("diagonal().impulse_response(0)", "0", "at least 1"),
    "an impulse response of length 2.5": ("diagonal().impulse_response(2.5)", "2.5", "integer"),
    "an impulse response of length True": ("diagonal().impulse_response(True)", "True", "integer"),
    "a frequency without an axis": ("diagonal().frequency_response(tensor(0.5))", "omega", "()", "(*bank, f)"),
    "a frequency that is a number": ("diagonal().frequency_response(0.5)", "omega", "float", "tensor"),
    "frequencies of another bank": ("bank(2).frequency_response(ones(3, 4))", "(3, 4)", "(2, 'f')"),
    "dense frequencies of a bank": ("dense(zeros(2, 2)).frequency_response(ones(3, 4))", "(3, 4)", "('f',)"),
    "a member of a single system": ("diagonal()[0]", "no bank"),
    "a slice of a bank that is empty": ("bank(4)[4:]", "slice(4, None, None)", "(4,)", "at least 1"),
    "a mask of a bank that is empty": ("bank(2)[tensor([False, False])]", "False", "(2,)", "at least 1"),
    "folding a dense system": ("fold(dense(zeros(2, 2)))", "DiagonalSystem", "DenseSystem", "diagonalise"),
    "pairs of a dense system": ("conjugate_pairs(dense(zeros(2, 2)))", "DenseSystem", "diagonalise"),
    "the real form of a dense system": ("real_form(dense(zeros(2, 2)))", "DenseSystem", "diagonalise"),
    "a spectrum as a list": ("error_bounds([1.0, 0.5])", "sigma", "list", "tensor"),
    "shares of a list": ("bottom_shares([1.0, 0.5])", "sigma", "list", "tensor"),
    "the rank of a list": ("numerical_rank([1.0, 0.5])", "sigma", "list", "tensor"),
    "a mask as a list": ("measured_gramian(ones(2, 3), [True, False])", "mask", "list", "tensor"),
    "systems of other inputs in H2": ("h2_error(diagonal(p=2), diagonal(p=3))", "inputs", "2 and 3"),
    "systems of other outputs in H-infinity": ("h_infinity_error(diagonal(q=2), diagonal(q=3))", "outputs", "2 and 3"),
    "systems of other banks in H2": ("h2_error(diagonal(bank=(5,)), diagonal())", "bank", "5"),
    "snapshots of other banks": ("hankel_change(diagonal(bank=(5,)), diagonal())", "bank", "(5,)", "()"),
    "no trajectory": ("trajectories([])", "no spectra", "at least one"),
    "a trajectory of nothing": ("trajectories([ones(0)])", "spectra[0]", "(0,)", ">= 1"),
    "a trajectory of banks": ("trajectories([ones(2, 3)])", "spectra[0]", "(2, 3)", "expected (n,)"),
    "a trajectory of lists": ("trajectories([[1.0]])", "spectra[0]", "list", "tensor"),
    "a scalar spectrum": ("error_bounds(tensor(1.0))", "()", "(*bank, n)"),
    "samples that disagree": ("averaged(A=0.5 * ones(5, 2))", "5", "4"),
    "a sampled A of too few axes": ("averaged(A=ones(2))", "(2,)", "samples, n"),
    "a sampled A that is not square": ("averaged(A=zeros(4, 2, 3))", "(4, 2, 3)", "n, n"),
    "a sampled A as a list": ("averaged(A=[0.5])", "A", "list", "tensor"),
    "no samples to average": ("averaged(zeros(0, 2), zeros(0, 2, 1), zeros(0, 1, 2))", "(0, 2", ">= 1"),
    "samples of C that disagree": ("averaged(C=ones(3, 1, 2))", "C has shape (3, 1, 2)", "(4, 2, 1)", "samples"),
    "samples of C for a dense A that disagree": ("averaged(A=zeros(4, 2, 2), C=ones(3, 1, 2))", "(3, 1, 2)", "samples"),
    "a mean step that is a number": (
        "mean_selective_system(rates, 0.1, ones(2), ones(2))",
        "mean_step",
        "float",
        "(*bank)",
    ),
    "a mean step of another bank": ("selective(step=ones(3))", "mean_step has shape (3,)", "expected ()"),
    "a mean C of another bank": (
        "mean_selective_system(rates, tensor(0.1), ones(2), ones(4, 2))",
        "mean_C",
        "(4, 2)",
        "(2,)",
    ),
    "a mean B of another order": ("selective(B=ones(3))", "(3", "2"),
    "second moments of a scalar pole": (
        "second_moment_system(tensor(0.5), eye(1), eye(1))",
        "poles",
        "()",
        "(*bank, n)",
    ),
    "a moment of another order": ("second_moment_gramians(rates, eye(3), eye(2))", "moment_B", "(3, 3)", "(2, 2)"),
    "shared rates of one channel only": ("shared_projection(rates, eye(2), eye(2), 1)", "(2,)", "channels"),
    "shared Gramians without channels": ("shared_projection(rates[None], eye(2), eye(2), 1)", "(2, 2)", "(1, 2, 2)"),
    "an accumulator without samples": ("StateCovariance().gramian()", "no states", "at least one"),
    "an accumulator of padding": ("measured_gramian(ones(2, 3), zeros(2).bool())", "no states", "at least one"),
    "a bank member of padding": ("measured_gramian(ones(2, 1, 3), tensor([[True], [False]]))", "at least one"),
    "states without samples": ("StateCovariance().add(ones(0, 3))", "(0, 3)", ">= 1"),
    "states of one axis": ("StateCovariance().add(ones(3))", "(3,)", "samples, n"),
    "states of another order": ("StateCovariance().add(ones(4, 3)).add(ones(4, 2))", "(2,)", "(3,)"),
    "accumulators of two orders": (
        "StateCovariance().add(ones(4, 3)).merge(StateCovariance().add(ones(4, 2)))",
        "(2,)",
        "(3,)",
    ),
    "a mask of another length": ("measured_gramian(ones(2, 3), ones(4).bool())", "(4,)", "(2,)"),
}

ORDER = {
    "order 0": ("truncated(0)", "order 0", "1..3"),
    "order -1": ("truncated(-1)", "order -1", "1..3"),
    "order n + 1": ("truncated(4)", "order 4", "1..3"),
    "order True": ("truncated(True)", "True", "integer from 1 to 3"),
    "order 2.0": ("truncated(2.0)", "2.0", "integer from 1 to 3"),
    "order '2'": ("truncated('2')", "'2'", "integer from 1 to 3"),
    "order 2.0 of NumPy": ("truncated(numpy.float64(2))", "2.0", "integer from 1 to 3"),
    "order 2.0 in a tensor": ("truncated(tensor(2.0))", "2.", "integer from 1 to 3"),
    "order True in a tensor": ("truncated(tensor(True))", "True", "integer from 1 to 3"),
    "order 4 of NumPy": ("truncated(numpy.int64(4))", "order 4", "1..3"),
    "neither order nor states": ("truncated()", "neither", "integer from 1 to 3"),
    "order True beside states": ("truncated(True, states=[0])", "True", "integer"),
    "real order n + 1": ("real_balanced_truncation(diagonal((0.5, 0.5j)), 3)", "order 3", "1..2"),
    "Galerkin order 0": ("galerkin_projection(rates, eye(2), eye(2), 0)", "order 0", "1..2"),
    "shared order 3": ("shared_projection(rates[None], eye(2)[None], eye(2)[None], 3)", "order 3", "1..2"),
    "two-sided order True": (
        "shared_projection(rates[None], eye(2)[None], eye(2)[None], True, two_sided=True)",
        "True",
        "integer from 1 to 2",
    ),
    "a state beyond the last": ("truncated(states=[0, 3])", "[0, 3]", "0..2"),
    "a negative state": ("truncated(states=[0, -1])", "[0, -1]", "0..2"),
    "a state named twice": ("truncated(states=[1, 2, 1])", "[1, 2, 1]", "twice"),
    "more states than order": ("truncated(1, states=[0, 2])", "2 states", "1"),
    "more states than there are": ("truncated(states=[0, 1, 2, 0])", "4 states", "1 to 3"),
    "no state named": ("truncated(states=zeros(0).int())", "0 states", "1 to 3"),
    "boolean states": ("truncated(states=[True, False, True])", "bool", "integer", "0 to 2"),
    "float states": ("truncated(states=[0.0, 1.0])", "float64", "integer", "0 to 2"),
    "a set of states": ("truncated(states={0, 1})", "{0, 1}", "integer", "0 to 2"),
    "states as a word": ("truncated(states='ab')", "'ab'", "integer", "0 to 2"),
    "ragged states": ("truncated(states=[[0], [0, 1]])", "[[0], [0, 1]]", "integer", "0 to 2"),
    "a spectrum that rises": ("error_bounds(tensor([2.0, 1, 1.5]))", "sigma[2] is 1.5 after 1", "falling"),
    "a member's spectrum that rises": ("error_bounds(tensor([[2.0, 1], [1, 2]]))", "sigma[1, 1] is 2", "falling"),
    "one bare state": ("truncated(states=2)", "()", "integer"),
}

PRECISION = {
    "single beside double": ("diagonal(B=ones(3, 2).to(torch.complex64))", "B torch.complex64", "poles torch.float64"),
    "double beside single": ("dense(zeros(2, 2).float())", "A torch.float32", "B torch.float64"),
    "integer poles": ("diagonal(zeros(3).int())", "poles", "int32", "float64"),
    "half poles": ("diagonal(0.5 * ones(3).half())", "poles", "float16", "float32"),
    "bfloat16 B": ("diagonal(B=ones(3, 2).bfloat16())", "B", "bfloat16", "float32"),
    "boolean C": ("diagonal(C=ones(2, 3).bool())", "C", "bool", "float32"),
    "half P": ("truncated(1, P=eye(3).half())", "P", "float16", "float32"),
    "integer rates": ("galerkin_projection(rates.int(), eye(2), eye(2), 1)", "rates", "int32", "float64"),
    "integer sampled A": ("averaged(A=zeros(4, 2).int())", "A", "int32", "float64"),
    "half sampled B": ("averaged(B=ones(4, 2, 1).half())", "B", "float16", "float32"),
    "half poles with second moments": ("second_moment_system(ones(2).half() / 2, eye(2), eye(2))", "float16"),
    "pairs of a real system": ("conjugate_pairs(diagonal())", "float64", "real"),
    "the real form of a real system": ("real_form(diagonal())", "float64", "real"),
    "real balancing of a real system": ("real_balanced_truncation(diagonal(), 1)", "float64", "real"),
    "a system in single precision": ("diagonal().to(torch.float32)", "torch.float32", "only a device"),
    "complex frequencies": ("diagonal().frequency_response(ones(3) * 1j)", "omega", "complex128", "real"),
    "a complex trajectory": ("trajectories([ones(2), ones(2) * 1j])", "spectra[1]", "complex128", "real"),
    "a complex spectrum": ("error_bounds(ones(2) * 1j)", "sigma", "complex128", "real"),
    "a complex mean step": ("selective(step=tensor(0.1j))", "mean_step", "complex128", "real"),
    "Galerkin with complex P": ("galerkin_projection(rates, hermitian, eye(2), 1)", "P", "complex128", "real"),
    "Galerkin with complex Q": ("galerkin_projection(rates, eye(2), hermitian, 1)", "Q", "complex128", "real"),
    "a complex moment": ("second_moment_gramians(rates, eye(2), hermitian)", "moment_C", "complex128", "real"),
    "a mask of numbers": ("measured_gramian(ones(2, 3), ones(2))", "mask", "float64", "bool"),
}

DEVICE = {
    "B on another device": ("diagonal(B=ones(3, 2, device='meta'))", "poles cpu", "B meta"),
    "A on another device": ("dense(zeros(2, 2, device='meta'))", "A meta", "B cpu"),
    "P on another device": ("truncated(1, P=eye(3, device='meta'))", "meta", "cpu"),
    "systems on two devices": ("h2_error(diagonal(), diagonal().to('meta'))", "cpu", "meta"),
    "snapshots on two devices": ("hankel_change(diagonal(), diagonal().to('meta'))", "cpu", "meta"),
    "inputs on another device": ("diagonal().simulate(ones(4, 2, device='meta'))", "inputs meta", "system cpu"),
    "frequencies on another device": ("diagonal().frequency_response(ones(4, device='meta'))", "omega meta", "cpu"),
    "sampled B on another device": ("averaged(B=ones(4, 2, 1, device='meta'))", "B meta", "cpu"),
}

INDEFINITE = {
    "P that is not Hermitian": ("truncated(1, P=ones(3, 3).triu())", "P", "not Hermitian", "1.0e+00"),
    "P with an eigenvalue below 0": ("truncated(1, P=eye(3) - ones(3, 3))", "P", "eigenvalue", "below 0"),
    "P with a variance of -0.25": ("truncated(1, P=indefinite)", "P", "-0.25", "below 0"),
    "P with a variance of -0.25e-9": ("truncated(1, P=1e-9 * indefinite)", "P", "below 0"),
    "a measured spectrum of indefinite P": ("hankel_singular_values(diagonal(), P=indefinite)", "-0.25", "below 0"),
    "a small member that is not Hermitian": (
        "truncated(1, bank=(2,), P=torch.stack([1e10 * eye(3), ones(3, 3).triu()]))",
        "not Hermitian",
        "1.0e+00",
    ),
    "an indefinite channel that the mean hides": (
        "shared_projection(rates.expand(2, 2), torch.stack([eye(2), torch.diag(tensor([2, -0.5]))]), "
        "eye(2).expand(2, 2, 2), 1)",
        "P",
        "-0.5",
        "below 0",
    ),
    "an indefinite input covariance": ("controllability_gramian(diagonal(), -eye(2))", "input_covariance", "-1"),
    "an indefinite second moment": ("second_moment_system(rates / -4, -eye(2), eye(2))", "moment", "-1", "below 0"),
    "an indefinite moment of B": ("second_moment_gramians(rates, -eye(2), eye(2))", "moment_B", "-1"),
    "Galerkin with indefinite P": ("galerkin_projection(rates, -eye(2), eye(2), 1)", "P", "-1"),
}

OTHER = {
    "OrderChangedError": {
        "snapshots across a cut": ("hankel_change(diagonal(), diagonal((0.5, 0.5)))", "order 3", "2 after", "cut"),
        "a spectrum that grows": ("trajectories([ones(2), ones(3)])", "3 values", "after 2", "fall"),
    },
    "DefectiveSystemError": {
        "a Jordan block": ("diagonalise(dense(tensor([[0.5, 1], [0, 0.5]])))", "condition number", "e+", "< 1e+08")
    },
}

EXPECTED = {
    "UnstableSystemError": UNSTABLE,
    "NonFiniteError": NON_FINITE,
    "ShapeError": SHAPE,
    "OrderError": ORDER,
    "PrecisionError": PRECISION,
    "DeviceError": DEVICE,
    "IndefiniteGramianError": INDEFINITE,
    **OTHER,
}
CASES = {case: (error, *rest) for error, group in EXPECTED.items() for case, rest in group.items()}


@pytest.fixture(scope="module")
def outcomes():
    return unhooked.outcomes(PREAMBLE, {case: expression for case, (_, expression, *_) in CASES.items()})


def test_the_table_holds_each_case_once():
    assert len(CASES) == sum(len(group) for group in EXPECTED.values())


@pytest.mark.parametrize("case", CASES)
def test_bad_input_raises_its_own_error_with_the_value_in_it(case, outcomes):
    error, expression, *fragments = CASES[case]
    kinds, message = outcomes[case]
    assert kinds[:1] == [error], f"{expression}: {kinds[:1]} {message}"
    assert {"ControlError", "ValueError"} <= set(kinds)
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, f"{expression}: {missing} not in {message!r}"


@pytest.mark.parametrize("order", [np.int64(2), np.uint8(2), torch.tensor(2), torch.tensor(2, dtype=torch.int32)])
def test_whole_numbers_of_numpy_and_torch_are_orders(order):
    assert balanced_truncation(real_system(), order).order == 2
    rates, gramian = torch.tensor([-1.0, -2.0, -3.0]).double(), torch.eye(3).double()
    assert galerkin_projection(rates, gramian, gramian, order).rates.shape == (2,)
    for two_sided in (False, True):
        shared = shared_projection(rates[None], gramian[None], gramian[None], order, two_sided=two_sided)
        assert shared.rates.shape == (1, 2)


def test_a_spectrum_may_rise_by_rounding():
    sigma = torch.tensor([1.0, 1e-16, 3e-13], dtype=torch.float64)
    assert error_bounds(sigma)[-2] == 6e-13
