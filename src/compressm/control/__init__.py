"""Control theory on tensors: systems, Gramians, Hankel singular values, balanced truncation with its error bound.

All functions are pure, compute in float64 and know no `nn`. Axes before the named ones form a bank of systems.
"""

from compressm.control.balancing import bottom_shares, error_bounds, numerical_rank
from compressm.control.folding import RealTruncation, conjugate_pairs, fold, real_balanced_truncation, real_form
from compressm.control.gramians import (
    StateCovariance,
    controllability_gramian,
    measured_gramian,
    observability_gramian,
    solve_lyapunov,
)
from compressm.control.hankel import hankel_singular_values
from compressm.control.norms import h2_error, h2_norm, h_infinity_error, h_infinity_norm
from compressm.control.nuclear_norm import hankel_nuclear_norm, hankel_nuclear_norm_majoriser
from compressm.control.projection import Projection, galerkin_projection, shared_projection
from compressm.control.selective import (
    mean_dynamics,
    mean_selective_system,
    second_moment_gramians,
    second_moment_system,
)
from compressm.control.system import DenseSystem, DiagonalSystem, LinearSystem
from compressm.control.tracking import HankelChange, Trajectories, hankel_change, hankel_hermitian, trajectories
from compressm.control.truncation import Truncation, balanced_truncation, diagonalise, input_output_ratio
from compressm.control.validation import (
    ControlError,
    DefectiveSystemError,
    DeviceError,
    IndefiniteGramianError,
    NonFiniteError,
    OrderChangedError,
    OrderError,
    PrecisionError,
    ShapeError,
    UnstableSystemError,
)

__all__ = [
    "ControlError",
    "DefectiveSystemError",
    "DenseSystem",
    "DeviceError",
    "DiagonalSystem",
    "HankelChange",
    "IndefiniteGramianError",
    "LinearSystem",
    "NonFiniteError",
    "OrderChangedError",
    "OrderError",
    "PrecisionError",
    "Projection",
    "RealTruncation",
    "ShapeError",
    "StateCovariance",
    "Trajectories",
    "Truncation",
    "UnstableSystemError",
    "balanced_truncation",
    "bottom_shares",
    "conjugate_pairs",
    "controllability_gramian",
    "diagonalise",
    "error_bounds",
    "fold",
    "galerkin_projection",
    "h2_error",
    "h2_norm",
    "h_infinity_error",
    "h_infinity_norm",
    "hankel_change",
    "hankel_hermitian",
    "hankel_nuclear_norm",
    "hankel_nuclear_norm_majoriser",
    "hankel_singular_values",
    "input_output_ratio",
    "mean_dynamics",
    "mean_selective_system",
    "measured_gramian",
    "numerical_rank",
    "observability_gramian",
    "real_balanced_truncation",
    "real_form",
    "second_moment_gramians",
    "second_moment_system",
    "shared_projection",
    "solve_lyapunov",
    "trajectories",
]
