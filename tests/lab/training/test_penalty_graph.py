"""What can be recorded of a penalty, and that a recording adds what plain evaluations add."""

import pytest
import torch

from compressm.compression.distributed import Processes
from compressm.control import DiagonalSystem, NonFiniteError, nuclear_norm
from compressm.control.nuclear_norm import mean_by_products
from compressm.control.validation import values_unread
from compressm.layers import LRU, S4D, S5, LinOSS
from compressm.models import SequenceClassifier
from compressm_lab.baselines import HankelMajoriser, HankelNuclearNorm, ModalL1
from compressm_lab.training import RegulariserConfig, penalty
from compressm_lab.training.clock import Clock
from compressm_lab.training.penalty import HeldPenalty, Recording, Unrecordable, require_no_waiting
from tests.lab.training.test_penalty import HNN, run
from tests.lab.training.tiny import CUTS, check_same_run, recipe

PENALTIES = [HankelNuclearNorm(), HankelNuclearNorm(fold=False), HankelMajoriser(), ModalL1()]


class Stand(Recording):
    """In the place of a CUDA graph: a replay is a call."""

    made = 0

    def __init__(self, work, read, written):
        Stand.made += 1
        self._tensors = [*read, *written.values()]
        self._places = self._look()
        require_no_waiting(work)
        self.replay = work


@pytest.fixture(autouse=True)
def products(monkeypatch):
    """The route of a GPU."""
    monkeypatch.setattr(nuclear_norm, "geometric_mean", mean_by_products)


@pytest.fixture
def recorded(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(penalty, "Recording", Stand)
    monkeypatch.setattr(HeldPenalty, "_recordable", property(lambda self: self._record))
    Stand.made = 0


def classifier(layer=LRU, depth=1, order=6):
    torch.manual_seed(0)
    return SequenceClassifier(layer, depth=depth, width=3, order=order, inputs=1, classes=2)


def held(model, penalty, device="cpu", **options):
    config = RegulariserConfig(kind="modal-l1", beta=0.5)
    return HeldPenalty(model, penalty, config, Clock(torch.device(device)), Processes(), **options)


def evaluation(model, penalty):
    def work():
        with values_unread():
            return torch.autograd.grad(penalty(model), list(model.parameters()), allow_unused=True)

    return work


@pytest.mark.parametrize("layer", [LRU, S5, S4D, LinOSS])
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_the_host_waits_for_nothing_on_the_way_from_parameters_to_gradients(layer, penalty):
    seen = require_no_waiting(evaluation(classifier(layer, depth=2), penalty))
    assert seen.launched
    assert not seen.waited


@pytest.mark.parametrize(("depth", "most"), [(1, 245), (6, 445)])
def test_an_evaluation_is_few_operations(depth, most):
    """Each is a launch: 363 and 703 before they were counted."""
    seen = require_no_waiting(evaluation(classifier(depth=depth), HankelNuclearNorm()))
    assert sum(seen.launched.values()) <= most


@pytest.mark.parametrize(
    ("look", "name"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool((x > 0).any()), "_local_scalar_dense"),
        (lambda x: x[x > 0], "index"),
        (lambda x: torch.linalg.eigvals(x), "linalg_eig"),
        (lambda x: torch.linalg.eigh(x + x.mT), "_linalg_eigh"),
    ],
)
def test_work_that_looks_at_values_is_refused_by_name(look, name):
    with pytest.raises(Unrecordable, match=name):
        require_no_waiting(lambda: look(torch.eye(3)))


def test_values_are_taken_for_granted_only_where_that_was_said():
    poles, B = torch.tensor([torch.nan, 2.0]), torch.ones(2, 1)
    with values_unread():
        DiagonalSystem(poles, B, B.mT)
    with pytest.raises(NonFiniteError):
        DiagonalSystem(poles, B, B.mT)


def test_a_replay_writes_where_the_gradient_was_held_and_has_its_bits(recorded):
    model = classifier()
    mine, plain = held(model, HankelNuclearNorm()), held(model, HankelNuclearNorm(), record=False)
    places = None
    for step in range(1, 4):
        mine.ready(step)
        plain.ready(step)
        assert mine.value == plain.value
        assert all(torch.equal(part, plain._held[name]) for name, part in mine._held.items())
        places = places or {name: part.data_ptr() for name, part in mine._held.items()}
        assert {name: part.data_ptr() for name, part in mine._held.items()} == places
        for parameter in model.parameters():
            parameter.data.mul_(0.99)
    assert (mine.recorded, Stand.made, mine.evaluations) == (True, 1, 3)


def test_parameters_that_were_moved_are_recorded_anew(recorded):
    model = classifier()
    mine = held(model, HankelMajoriser())
    mine.ready(1)
    model.blocks[0].ssm.nu_log.data = model.blocks[0].ssm.nu_log.data - 1
    mine.ready(2)
    assert Stand.made == 2
    assert mine.value == pytest.approx(HankelMajoriser()(model).item(), rel=1e-12)


@pytest.mark.parametrize("hold", ["true", "false"])
def test_a_run_with_recordings_is_that_without_before_and_after_cuts(hold, tmp_path, monkeypatch, request):
    found = recipe(CUTS, HNN, f"regulariser.hold={hold}")
    plain = run(found, tmp_path / "plain").path
    request.getfixturevalue("recorded")
    mine = run(found, tmp_path / "run").path
    check_same_run(mine, plain, "metrics", "cuts", "penalties")
    assert Stand.made == 3


def test_a_penalty_that_cannot_be_recorded_goes_on_and_says_why(recorded):
    model = classifier()

    def looks(model):
        value = model.blocks[0].ssm.nu_log.double().square().sum()
        return value if value > 0 else -value

    mine = held(model, looks)
    with pytest.warns(UserWarning, match=r"without a CUDA graph.*waits for _local_scalar_dense \(1 times\)"):
        mine.ready(1)
    mine.ready(2)  # says it once
    assert (mine.recorded, mine.evaluations) == (False, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [LRU, S5, S4D, LinOSS])
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_a_cuda_graph_finds_what_launches_find(layer, penalty):
    model = classifier(layer, depth=2, order=16).cuda()
    mine, plain = held(model, penalty, "cuda"), held(model, penalty, "cuda", record=False)
    for step in range(1, 4):
        mine.ready(step)
        plain.ready(step)
        assert mine.value == pytest.approx(plain.value, rel=1e-9)
        for name, part in plain._held.items():
            torch.testing.assert_close(mine._held[name], part, rtol=1e-5, atol=1e-6 * part.abs().max().item())
        for parameter in model.parameters():
            parameter.data.mul_(0.99)
    assert (mine.recorded, plain.recorded) == (True, False)


@pytest.mark.gpu
def test_a_cuda_graph_is_made_anew_after_a_cut_and_random_numbers_go_on():
    model = classifier(order=16).cuda()
    mine = held(model, HankelNuclearNorm(), "cuda")
    mine.ready(1)
    small = classifier(order=5).cuda()
    for name, parameter in model.named_parameters():
        parameter.data = small.get_parameter(name).data
    mine.renew()
    assert not mine.recorded
    mine.ready(2)
    mine.ready(3)
    assert mine.recorded
    assert mine.value == pytest.approx(HankelNuclearNorm()(small).item(), rel=1e-9)
    assert torch.rand(4, device="cuda").std() > 0


@pytest.mark.gpu
def test_on_a_gpu_a_penalty_that_looks_goes_on_and_says_why():
    model = classifier().cuda()
    mine = held(
        model, lambda model: model.blocks[0].ssm.nu_log.sum() * model.blocks[0].ssm.D.detach().sum().item(), "cuda"
    )
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        mine.ready(1)
    mine.ready(2)
    assert torch.rand(4, device="cuda").std() > 0
