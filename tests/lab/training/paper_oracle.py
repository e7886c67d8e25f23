"""The paper's setting once more, in NumPy and float64: the model, its gradients by hand, AdamW, and one cut.

It is written from the paper's equations and shares no code with the package. What only the authors' code says is marked
"code". Arrays have the axes (batch, time, channel); states of the recurrence are complex. The gradient of a loss with
respect to a complex z = a + ib is written as ∂L/∂a + i ∂L/∂b, so for w = c z it is conj(c) times that of w.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg

EPS = 1e-5  # of the norm
NEWEST = 0.01  # the weight of a batch in the running averages of the norm: momentum 0.99 (code)
FLOOR = 1e-8  # added to probabilities before the logarithm (code)


def forward(weights, averages, inputs, masks, rate, first):
    """Logits, the averages of all norms after the batch, and all that the gradients need.

    `masks[k]` are the two dropout masks of block k, of shape (time, channel): one for the whole batch (code).
    """
    x = inputs @ weights["encoder.linear.weight"].T + weights["encoder.linear.bias"]
    moved, kept = [], []
    for block, (mask, before) in enumerate(zip(masks, averages, strict=True)):
        own = of_block(weights, block)
        u, after, norm = running_norm(x, before, first)
        y, recurrence = lru(own, u)
        z = gelu(y) * mask[0] / (1 - rate)
        value, gate = np.split(z @ own["gate.weight"].T + own["gate.bias"], 2, axis=-1)
        opening = 1 / (1 + np.exp(-gate))
        x = x + value * opening * mask[1] / (1 - rate)
        moved.append(after)
        kept.append((norm, recurrence, y, z, value, opening))
    features = x.mean(1)
    return features @ weights["head.weight"].T + weights["head.bias"], moved, (features, x.shape[1], kept)


def of_block(weights, block):
    """The parameters of one block, by their names in it."""
    begin = f"blocks.{block}."
    return {name.removeprefix(begin): value for name, value in weights.items() if name.startswith(begin)}


def running_norm(x, before, first):
    """u = (x − M) / √(V + ε), where the batch has moved the averages M and V (code).

    The first batch replaces the averages; a later one moves them by `NEWEST`.
    """
    share = 1.0 if first else NEWEST
    mean = x.mean((0, 1))
    variance = ((x - mean) ** 2).mean((0, 1))
    M = before[0] + share * (mean - before[0])
    V = before[1] + share * (variance - before[1])
    return (x - M) / np.sqrt(V + EPS), (M, V), (x, mean, M, V, share)


def running_norm_backward(du, saved):
    """The gradient of x: directly, and through the share that the batch has in M and V."""
    x, mean, M, V, share = saved
    count, inverse = x.shape[0] * x.shape[1], 1 / np.sqrt(V + EPS)
    dM = -(du * inverse).sum((0, 1))
    dV = (du * (x - M)).sum((0, 1)) * -0.5 * inverse**3
    # ∂mean/∂x = 1/N and ∂variance/∂x = 2 (x − mean)/N: deviations from the mean add up to 0.
    return du * inverse + share * (dM + 2 * dV * (x - mean)) / count


def poles(own):
    """λ = exp(−exp(ν) + i exp(θ)), stable for any ν (Orvieto et al. 2023)."""
    return np.exp(-np.exp(own["ssm.nu_log"]) + 1j * np.exp(own["ssm.theta_log"]))


def lru(own, u):
    """h[t] = λ h[t−1] + exp(γ) B u[t] and y[t] = Re(C h[t]) + D u[t]."""
    A, B, C = matrices(own)
    states = np.zeros((u.shape[0], u.shape[1] + 1, len(A)), complex)
    for t in range(u.shape[1]):
        states[:, t + 1] = A * states[:, t] + u[:, t] @ B.T
    return (states[:, 1:] @ C.T).real + own["ssm.D"] * u, (u, states)


def matrices(own):
    """The diagonal of A, then B with its gains, then C."""
    B = own["ssm.B_re"] + 1j * own["ssm.B_im"]
    return poles(own), np.exp(own["ssm.gamma_log"])[:, None] * B, own["ssm.C_re"] + 1j * own["ssm.C_im"]


def lru_backward(own, dy, saved):
    """The gradients of u and of every parameter of the recurrence."""
    u, states = saved
    A, B, C = matrices(own)
    # dh[t] = Cᴴ dy[t] + conj(λ) dh[t+1], from the last step to the first.
    dh = dy @ C.conj()
    for t in reversed(range(u.shape[1] - 1)):
        dh[:, t] += A.conj() * dh[:, t + 1]
    dA = (states[:, :-1].conj() * dh).sum((0, 1))
    dB = np.einsum("btn,bth->nh", dh, u)
    dC = np.einsum("bth,btn->hn", dy, states[:, 1:].conj())
    gain = np.exp(own["ssm.gamma_log"])
    found = {
        # ∂λ/∂ν = −exp(ν) λ and ∂λ/∂θ = i exp(θ) λ.
        "ssm.nu_log": (dA.conj() * -np.exp(own["ssm.nu_log"]) * A).real,
        "ssm.theta_log": (dA.conj() * 1j * np.exp(own["ssm.theta_log"]) * A).real,
        "ssm.gamma_log": (dB.conj() * B).real.sum(1),
        "ssm.B_re": gain[:, None] * dB.real,
        "ssm.B_im": gain[:, None] * dB.imag,
        "ssm.C_re": dC.real,
        "ssm.C_im": dC.imag,
        "ssm.D": (dy * u).sum((0, 1)),
    }
    return (dh @ B.conj()).real + own["ssm.D"] * dy, found


_ROOT = np.sqrt(2 / np.pi)


def gelu(y):
    """The approximation by tanh (code): y/2 (1 + tanh √(2/π) (y + 0.044715 y³))."""
    return 0.5 * y * (1 + np.tanh(_ROOT * (y + 0.044715 * y**3)))


def gelu_slope(y):
    """The derivative of `gelu`."""
    t = np.tanh(_ROOT * (y + 0.044715 * y**3))
    return 0.5 * (1 + t) + 0.5 * y * (1 - t**2) * _ROOT * (1 + 3 * 0.044715 * y**2)


def loss_of(logits, targets):
    """The mean of −log(p + 10⁻⁸) over the batch (code), with its gradient."""
    rows = np.arange(len(targets))
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    right = p[rows, targets]
    # ∂p_c/∂z_j = p_c (δ_cj − p_j).
    dlogits = (right / (right + FLOOR))[:, None] * p
    dlogits[rows, targets] -= right / (right + FLOOR)
    return -np.log(right + FLOOR).mean(), dlogits / len(targets)


def loss_and_gradients(weights, averages, inputs, targets, masks, rate, first):
    """The loss, the gradient of every parameter by its name, and the averages of the norms after the batch."""
    logits, moved, (features, length, kept) = forward(weights, averages, inputs, masks, rate, first)
    loss, dlogits = loss_of(logits, targets)
    found = {"head.weight": dlogits.T @ features, "head.bias": dlogits.sum(0)}
    dx = np.repeat((dlogits @ weights["head.weight"])[:, None] / length, length, axis=1)
    for block in reversed(range(len(kept))):
        own, mask = of_block(weights, block), masks[block]
        norm, recurrence, y, z, value, opening = kept[block]
        gated = dx * mask[1] / (1 - rate)
        both = np.concatenate([gated * opening, gated * value * opening * (1 - opening)], axis=-1)
        dy = (both @ own["gate.weight"]) * mask[0] / (1 - rate) * gelu_slope(y)
        du, inside = lru_backward(own, dy, recurrence)
        inside |= {"gate.weight": np.einsum("btg,bth->gh", both, z), "gate.bias": both.sum((0, 1))}
        found |= {f"blocks.{block}.{name}": value for name, value in inside.items()}
        dx = dx + running_norm_backward(du, norm)
    found["encoder.linear.weight"] = np.einsum("bth,bti->hi", dx, inputs)
    found["encoder.linear.bias"] = dx.sum((0, 1))
    return loss, found, moved


def rate_at(step, steps, highest=1e-3, lowest=1e-7):
    """A rise from 10⁻⁷ to 10⁻³ in the first tenth of all steps, then a cosine back to 10⁻⁷ (app:hyperparams)."""
    rise = steps / 10
    if step <= rise:
        return lowest + (highest - lowest) * step / rise
    return lowest + (highest - lowest) * (1 + np.cos(np.pi * (step - rise) / (steps - rise))) / 2


DYNAMICS = ("nu_log", "theta_log", "gamma_log", "B_re", "B_im")  # with the factor, without decay (code)


class AdamW:
    """θ ← θ − η (m̂ / (√v̂ + ε) + w θ); the dynamics have the rate α η and w = 0."""

    def __init__(self, weights, factor, decay):
        self.factor, self.decay, self.step = factor, decay, 0
        self.means = {name: np.zeros_like(value) for name, value in weights.items()}
        self.squares = {name: np.zeros_like(value) for name, value in weights.items()}

    def update(self, weights, gradients, rate):
        """The parameters after one more step."""
        self.step += 1
        moved = {}
        for name, value in weights.items():
            slow = name.endswith(DYNAMICS)
            self.means[name] = 0.9 * self.means[name] + 0.1 * gradients[name]
            self.squares[name] = 0.999 * self.squares[name] + 0.001 * gradients[name] ** 2
            mean = self.means[name] / (1 - 0.9**self.step)
            square = self.squares[name] / (1 - 0.999**self.step)
            direction = mean / (np.sqrt(square) + 1e-8) + (0 if slow else self.decay) * value
            moved[name] = value - rate * (self.factor if slow else 1) * direction
        return moved

    def slice_(self, block, order):
        """Keep the first rows of every moment of the recurrence, or the first columns of C's (code)."""
        for moments in (self.means, self.squares):
            for name in (f"blocks.{block}.ssm.{own}" for own in (*DYNAMICS, "C_re", "C_im")):
                moments[name] = moments[name][:, :order] if "C_" in name else moments[name][:order]


def balanced(own):
    """Hankel singular values σ, and T and T⁻¹ of the balanced realisation (sec:algorithm, steps 2, 3 and 5).

    P and Q solve the Lyapunov equations. With P = L Lᴴ and Lᴴ Q L = V Σ² Vᴴ, T = L V Σ^{-1/2}.
    """
    A, B, C = matrices(own)
    P = scipy.linalg.solve_discrete_lyapunov(np.diag(A), B @ B.conj().T)
    Q = scipy.linalg.solve_discrete_lyapunov(np.diag(A).conj(), C.conj().T @ C)
    L = np.linalg.cholesky(P)
    squares, V = np.linalg.eigh(L.conj().T @ Q @ L)
    sigma, V = np.sqrt(squares[::-1]), V[:, ::-1]
    T = L @ V / np.sqrt(sigma)
    return sigma, T, np.linalg.inv(T)


def kept_rank(sigma, tau):
    """The least r whose r largest values have the share 1 − τ of all (sec:algorithm, step 4)."""
    return int(np.argmax(np.cumsum(sigma) >= (1 - tau) * sigma.sum())) + 1


def truncated(own, order):
    """The poles, B and C of the first `order` balanced states, after their A was made diagonal (steps 6 to 8)."""
    A, B, C = matrices(own)
    _, T, inverse = balanced(own)
    reduced = (inverse * A) @ T
    found, X = np.linalg.eig(reduced[:order, :order])
    return found, np.linalg.solve(X, (inverse @ B)[:order]), (C @ T)[:, :order] @ X


def stored(found, B, C):
    """The parameters of a recurrence with these poles, B and C; gains are √(1 − |λ|²), as at the start."""
    phase = np.angle(found) % (2 * np.pi)
    gain = np.sqrt(1 - np.abs(found) ** 2)
    B = B / gain[:, None]
    return {
        "ssm.nu_log": np.log(-np.log(np.abs(found))),
        "ssm.theta_log": np.log(phase),
        "ssm.gamma_log": np.log(gain),
        "ssm.B_re": B.real,
        "ssm.B_im": B.imag,
        "ssm.C_re": C.real,
        "ssm.C_im": C.imag,
    }
