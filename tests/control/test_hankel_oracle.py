"""Against 800-bit arithmetic (tests/control/make_hankel_oracle.py), SciPy and pyMOR."""

from pathlib import Path

import numpy as np
import pytest
import torch

from compressm.control import DiagonalSystem, balanced_truncation, h2_norm, hankel_singular_values, real_form
from tests.systems import lru_at_initialisation, lru_trained_like

ORACLE = np.load(Path(__file__).parent / "hankel_oracle.npz")
CASES = sorted({name.split("/")[0] for name in ORACLE})


def stored(case):
    arrays = {name.split("/")[1]: torch.from_numpy(ORACLE[name]) for name in ORACLE if name.startswith(f"{case}/")}
    build = DiagonalSystem.from_log_poles if "log_poles" in arrays else DiagonalSystem
    return build(arrays.get("log_poles", arrays.get("poles")), arrays["B"], arrays["C"]), arrays["sigma"]


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("narrow")])
def test_hankel_singular_values_are_within_1e_14_of_multi_precision(case):
    system, expected = stored(case)
    assert (hankel_singular_values(system) - expected).abs().max() <= 1e-14 * expected[0]


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("narrow")])
def test_on_any_system_they_are_within_1e_12_of_multi_precision(case):
    system, expected = stored(case)
    assert (hankel_singular_values(system) - expected).abs().max() <= 1e-12 * expected[0]


@pytest.mark.parametrize("case", CASES)
def test_the_spectrum_of_a_truncation_is_within_1e_12_of_multi_precision(case):
    system, expected = stored(case)
    for order in (1, system.order // 2, system.order):
        assert (balanced_truncation(system, order).sigma - expected).abs().max() <= 1e-12 * expected[0]


def test_the_cases_span_spectra_down_to_1e_9():
    assert len(CASES) == 9
    assert min(ORACLE[f"{case}/sigma"][-1] / ORACLE[f"{case}/sigma"][0] for case in CASES) < 1e-8


@pytest.fixture(scope="module")
def pymor():
    pytest.importorskip("pymor", reason="pyMOR is in the development extra")
    from pymor.core.logger import set_log_levels
    from pymor.models.iosys import LTIModel

    set_log_levels({"pymor": "ERROR"})

    def model(system):
        real = real_form(system)
        A, B, C = (tensor.numpy() for tensor in (real.A, real.B, real.C))
        return LTIModel.from_matrices(A, B, C, sampling_time=1)

    return model


@pytest.mark.parametrize("make", [lru_at_initialisation, lru_trained_like])
def test_spectra_norms_and_reductions_agree_with_pymor(pymor, make):
    from pymor.reductors.bt import BTReductor

    system = make(20, 3, seed=4)
    real, model = real_form(system), pymor(system)
    sigma = hankel_singular_values(real).numpy()
    np.testing.assert_allclose(sigma, model.hsv()[: len(sigma)], atol=1e-8 * sigma[0])
    assert h2_norm(real).item() == pytest.approx(model.h2_norm(), rel=1e-7)
    theirs = BTReductor(model).reduce(10)
    ours = balanced_truncation(real, 10).system
    omega = np.linspace(0.1, 3, 5)
    for w in omega:
        expected = theirs.transfer_function.eval_tf(np.exp(1j * w)) * np.exp(1j * w)  # pyMOR's output is one step later
        got = ours.frequency_response(torch.tensor([w], dtype=torch.float64))[0].numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8 * abs(expected).max())
