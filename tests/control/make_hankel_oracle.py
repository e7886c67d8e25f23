"""Write hankel_oracle.npz: systems in float64 with their Hankel singular values computed in 800-bit arithmetic.

    python tests/control/make_hankel_oracle.py

Needs python-flint (development extra). The float64 numbers of a case are taken as exact; Gramians are formed by the
closed form and σ² as eigenvalues of P Q, all in 800 bits, so that nothing of the package's arithmetic enters.
"""

from pathlib import Path

import flint
import numpy as np

from compressm.control import DiagonalSystem
from tests.systems import lru_at_initialisation, lru_trained_like

HERE = Path(__file__).parent


def exact(array):
    """A NumPy array as a flint matrix, every float64 taken exactly."""
    array = np.atleast_2d(array)
    return flint.acb_mat([[flint.acb(float(z.real), float(z.imag)) for z in row] for row in array.astype(complex)])


def hankel_values(poles, B, C):
    """√spec(P Q), falling, rounded to float64 at the very end; `poles` is a list of flint numbers."""
    n = len(poles)
    one = flint.acb(1)
    BB, CC = B * B.transpose().conjugate(), C.transpose().conjugate() * C
    P = flint.acb_mat([[BB[i, j] / (one - poles[i] * poles[j].conjugate()) for j in range(n)] for i in range(n)])
    Q = flint.acb_mat([[CC[i, j] / (one - poles[i].conjugate() * poles[j]) for j in range(n)] for i in range(n)])
    squares = (P * Q).eig(algorithm="approx")
    return np.array(sorted((float(abs(z).sqrt()) for z in squares), reverse=True))


def slow_modes():
    """|λ| = 1 − 1e-8 beside ordinary modes, two of them 1e-7 apart."""
    poles = np.array([1 - 1e-8, (1 - 2e-8) * np.exp(1e-7j), 0.5j, -0.9, 0.99 * np.exp(2j), 0.0])
    rng = np.random.default_rng(0)
    B, C = (rng.normal(size=(6, 4)) + 1j * rng.normal(size=(6, 4)) for _ in range(2))
    return {"poles": poles, "B": B, "C": C.T}


def narrow(seed, n, p, q):
    """Random poles and gains with one input or output: nothing about it is graded."""
    rng = np.random.default_rng(seed)
    poles = 0.95 * np.sqrt(rng.uniform(size=n)) * np.exp(2j * np.pi * rng.uniform(size=n))
    B, C = (rng.normal(size=(n, k)) + 1j * rng.normal(size=(n, k)) for k in (p, q))
    return {"poles": poles, "B": B, "C": C.T}


def lru(system: DiagonalSystem):
    return {"log_poles": system.log_poles.numpy(), "B": system.B.numpy(), "C": system.C.numpy()}


CASES = {
    "init_64_8": lru(lru_at_initialisation(64, 8)),
    "init_64_1": lru(lru_at_initialisation(64, 1)),
    "init_48_16": lru(lru_at_initialisation(48, 16, seed=1)),
    "trained_64_8": lru(lru_trained_like(64, 8)),
    "trained_64_1": lru(lru_trained_like(64, 1)),
    "slow": slow_modes(),
    "narrow_5": narrow(1, 5, 3, 1),
    "narrow_12": narrow(2, 12, 1, 4),
    "narrow_24": narrow(3, 24, 2, 1),
}


def main() -> None:
    flint.ctx.prec = 800
    stored = {}
    for name, case in CASES.items():
        given = exact(case.get("poles", case.get("log_poles")))
        poles = [given[0, j] if "poles" in case else given[0, j].exp() for j in range(given.ncols())]
        sigma = hankel_values(poles, exact(case["B"]), exact(case["C"]))
        stored |= {f"{name}/{key}": value for key, value in (case | {"sigma": sigma}).items()}
        print(f"{name}: sigma_1 = {sigma[0]:.6g}, sigma_n / sigma_1 = {sigma[-1] / sigma[0]:.3g}")
    np.savez_compressed(HERE / "hankel_oracle.npz", **stored)


if __name__ == "__main__":
    main()
