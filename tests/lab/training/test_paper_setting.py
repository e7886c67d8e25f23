"""Training in the paper's setting against an independent implementation of it."""

import numpy as np
import pytest
import torch

from compressm_lab.data import Batch, TaskKind, make
from compressm_lab.experiments.recipes import find_recipe
from compressm_lab.training.building import build_compressor, build_model, build_optimizer, set_rate
from compressm_lab.training.steps import task_objective
from tests.lab.training import paper_oracle as oracle
from tests.lab.training.tiny import copies

STEPS, CUT, RATE, TAU = 10, 5, 0.1, 0.3
DEPTH, WIDTH, ORDER, BATCH, LENGTH = 2, 6, 8, 4, 12
SETTINGS = (f"model.depth={DEPTH}", f"model.width={WIDTH}", f"model.order={ORDER}", f"training.batch={BATCH}")
# A warm-up of two steps, and half of the fall.
SETTINGS += (f"training.steps={2 * STEPS}", f"compression.tau={TAU}", f"compression.when={{steps: [{CUT}]}}")
RECIPE = find_recipe("scifar-paper", SETTINGS)


def batches():
    """Inputs with a channel t / L and three others, and classes."""
    draws = np.random.default_rng(7)
    time = np.broadcast_to(np.arange(LENGTH)[None, :, None] / LENGTH, (BATCH, LENGTH, 1))
    for _ in range(STEPS):
        inputs = np.concatenate([time, draws.normal(size=(BATCH, LENGTH, 3))], axis=-1)
        yield inputs, draws.integers(10, size=BATCH)


def masks_of(seed):
    """The masks that blocks draw after this seed: for each two of (1, length, width), for the whole batch."""
    torch.manual_seed(seed)
    drawn = [torch.empty(2, 1, LENGTH, WIDTH, dtype=torch.bool).bernoulli_(1 - RATE) for _ in range(DEPTH)]
    return [mask[:, 0].numpy().astype(float) for mask in drawn]


def arrays(named):
    return {name: value.detach().numpy().copy() for name, value in named}


class Ours:
    """The model, the optimizer and the loss of the recipe, in float64."""

    def __init__(self):
        torch.manual_seed(3)
        self.model = build_model(RECIPE.model, make("scifar", time=True).form).double().train()
        self.optimizer = build_optimizer(self.model, RECIPE.training, torch.device("cpu"))
        self.objective = task_objective(TaskKind.CLASSIFY, floor=RECIPE.training.floor)
        self.compressor = build_compressor(RECIPE, self.model, self.optimizer, copies(), lambda: 0.0, lambda model: 0.0)

    def step(self, step, inputs, targets):
        """Make a step; returns the loss and the gradients before it."""
        set_rate(self.optimizer, RECIPE.training.rate(step))
        torch.manual_seed(step)
        self.optimizer.zero_grad()
        loss = self.objective(self.model, Batch(torch.tensor(inputs), torch.tensor(targets), None)).loss
        loss.backward()
        gradients = arrays((name, parameter.grad) for name, parameter in self.model.named_parameters())
        self.optimizer.step()
        return loss.item(), gradients

    @property
    def weights(self):
        return arrays(self.model.named_parameters())


class Theirs:
    """The same by the oracle, from the same weights."""

    def __init__(self, weights):
        self.weights = weights
        self.averages = [(np.zeros(WIDTH), np.ones(WIDTH)) for _ in range(DEPTH)]
        training = RECIPE.training
        self.optimizer = oracle.AdamW(weights, training.ssm_factor, training.weight_decay)

    def step(self, step, inputs, targets):
        given = (self.weights, self.averages, inputs, targets, masks_of(step), RATE, step == 1)
        loss, gradients, self.averages = oracle.loss_and_gradients(*given)
        self.weights = self.optimizer.update(self.weights, gradients, oracle.rate_at(step, 2 * STEPS))
        return loss, gradients


def assert_equal(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("first", [True, False])
def test_the_gradients_of_the_oracle_are_those_of_finite_differences(first):
    weights = Ours().weights
    inputs, targets = next(batches())
    draws = np.random.default_rng(1)
    averages = [(draws.normal(size=WIDTH), 1 + draws.random(WIDTH)) for _ in range(DEPTH)]
    rest = (averages, inputs, targets, masks_of(1), RATE, first)
    _, gradients, _ = oracle.loss_and_gradients(weights, *rest)
    for name, value in weights.items():
        direction = draws.normal(size=value.shape)
        beside = [weights | {name: value + h * direction} for h in (1e-5, -1e-5)]
        above, below = (oracle.loss_and_gradients(moved, *rest)[0] for moved in beside)
        assert (above - below) / 2e-5 == pytest.approx((gradients[name] * direction).sum(), rel=1e-6, abs=1e-10), name


def test_ten_steps_in_the_papers_setting_are_those_of_the_oracle():
    ours = Ours()
    theirs = Theirs(ours.weights)
    for step, (inputs, targets) in enumerate(batches(), start=1):
        (loss, gradients), (expected, wanted) = (side.step(step, inputs, targets) for side in (ours, theirs))
        assert loss == pytest.approx(expected, rel=1e-10)
        assert_equal(gradients, wanted, 1e-10)
    assert_equal(ours.weights, theirs.weights, 1e-9)
    for block, (mean, variance) in zip(ours.model.blocks, theirs.averages, strict=True):
        np.testing.assert_allclose(block.norm.running_mean.numpy(), mean, rtol=1e-9)
        np.testing.assert_allclose(block.norm.running_var.numpy(), variance, rtol=1e-9)


def in_coordinates_of(own, found, B, C):
    """The same system with its modes in the order, and of the lengths, that the stored parameters `own` have.

    Truncation leaves both free: of the lengths s in B/s and C s the paper says nothing.
    """
    poles, scaled, _ = oracle.matrices(own)
    place = np.abs(found[None] - poles[:, None]).argmin(1)
    assert sorted(place) == list(range(len(found)))
    found, B, C = found[place], B[place], C[:, place]
    length = (B.conj() * scaled).sum(1) / (np.abs(B) ** 2).sum(1)
    return found, length[:, None] * B, C / length


def test_a_cut_in_the_papers_setting_and_the_steps_after_it_are_those_of_the_oracle():
    ours = Ours()
    theirs = Theirs(ours.weights)
    orders = []
    for step, (inputs, targets) in enumerate(batches(), start=1):
        (loss, gradients), (expected, wanted) = (side.step(step, inputs, targets) for side in (ours, theirs))
        assert loss == pytest.approx(expected, rel=1e-8)
        assert_equal(gradients, wanted, 1e-7)
        cuts = ours.compressor.step(step)
        assert bool(cuts) == (step == CUT)
        for block in range(DEPTH) if cuts else ():
            own = oracle.of_block(theirs.weights, block)
            sigma, _, _ = oracle.balanced(own)
            order = oracle.kept_rank(sigma, TAU)
            assert cuts[block].error_bound == pytest.approx(2 * sigma[order:].sum(), rel=1e-6)
            stored = oracle.of_block(ours.weights, block)
            cut = oracle.stored(*in_coordinates_of(stored, *oracle.truncated(own, order)))
            assert_equal({name: stored[name] for name in cut}, cut, 1e-7)
            theirs.weights |= {f"blocks.{block}.{name}": value for name, value in cut.items()}
            theirs.optimizer.slice_(block, order)
            orders.append(order)
    assert orders == [block.ssm.order for block in ours.model.blocks]
    assert all(1 < order < ORDER for order in orders)
    assert_equal(ours.weights, theirs.weights, 1e-6)
