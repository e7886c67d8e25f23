"""All cuts or none: identity of what stays, and what is left when something goes wrong."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from compressm.compression import surgery
from compressm.compression.optimizer import Transport
from compressm.compression.surgery import PreparedCut, apply_cuts, prepare_cut, require_plain_parameters
from compressm.errors import CompressionError
from compressm.layers import LRU, S4D, S5
from tests.compression.trained import change_of, loss_of


def trained_model(optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    model = nn.ModuleList([LRU(3, 8), S5(3, 8), S4D(3, 8)])
    optimizer = optimizer(model.parameters(), lr=1e-3)
    step(model, optimizer)
    return model, optimizer


def loss(model):
    return sum(loss_of(layer) for layer in model)


def step(model, optimizer):
    model.zero_grad()
    loss(model).backward()
    optimizer.step()


def prepared(model, optimizer, order=4):
    return [prepare_cut(str(k), change_of(layer, order), optimizer, Transport()) for k, layer in enumerate(model)]


def picture(model, optimizer):
    """Everything, bit for bit: values, gradients, state, and which objects they are."""
    return {
        "objects": [(id(p), p.data_ptr(), id(p.grad)) for p in model.parameters()],
        "values": [p.detach().clone() for p in model.parameters()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "state": copy.deepcopy(optimizer.state_dict()),
        "entries": [{key: id(value) for key, value in optimizer.state[p].items()} for p in model.parameters()],
    }


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_several_layers_are_cut_at_once_and_training_goes_on():
    model, optimizer = trained_model()
    parameters = list(model.parameters())
    model[0].nu_log._no_weight_decay = True
    seen = []
    model[0].nu_log.register_hook(lambda gradient: seen.append(gradient.shape[0]))
    apply_cuts(prepared(model, optimizer), optimizer)
    assert [layer.order for layer in model] == [4, 4, 4]
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    assert model[0].nu_log._no_weight_decay
    before = [p.detach().clone() for p in parameters]
    step(model, optimizer)
    assert all((p != value).any() for p, value in zip(parameters, before, strict=True))
    assert seen == [4]


def test_a_loss_of_before_does_not_break_the_next_backward():
    model, optimizer = trained_model()
    held = loss(model)
    held.backward()
    apply_cuts(prepared(model, optimizer), optimizer)
    step(model, optimizer)
    assert held.isfinite()
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_gradients_of_cut_parameters_are_dropped_and_others_stay():
    model, optimizer = trained_model()
    apply_cuts(prepared(model, optimizer), optimizer)
    for layer in model:
        for name, parameter in layer.named_parameters():
            assert (parameter.grad is None) == (name in layer.STATE_AXES)


def test_without_an_optimizer_values_alone_are_written():
    model, _ = trained_model()
    apply_cuts(prepared(model, None))
    assert [layer.order for layer in model] == [4, 4, 4]


class BrokenError(RuntimeError):
    pass


@pytest.mark.parametrize("call", range(0, 18, 3))
def test_a_failure_while_writing_values_leaves_everything_as_it_was(call, monkeypatch):
    model, optimizer = trained_model()
    cuts, before = prepared(model, optimizer), picture(model, optimizer)
    calls, replace_data = [], surgery.replace_data

    def fails(parameter, data):
        calls.append(parameter)
        if len(calls) == call + 1:
            raise BrokenError
        replace_data(parameter, data)

    monkeypatch.setattr(surgery, "replace_data", fails)
    with pytest.raises(BrokenError):
        apply_cuts(cuts, optimizer)
    assert len(calls) > call
    assert same(picture(model, optimizer), before)
    monkeypatch.undo()
    step(model, optimizer)
    apply_cuts(prepared(model, optimizer), optimizer)
    assert model[2].order == 4


class Refusing(dict):
    """An optimizer's dictionary that cannot be written to, the first time."""

    refused = False

    def update(self, *entries):
        if not self.refused:
            self.refused = True
            super().update(dict(list(dict(*entries).items())[:1]))
            raise BrokenError
        super().update(*entries)


def test_a_failure_while_writing_states_leaves_everything_as_it_was():
    model, optimizer = trained_model()
    optimizer.state[model[1].B_im] = Refusing(optimizer.state[model[1].B_im])
    cuts, before = prepared(model, optimizer), picture(model, optimizer)
    with pytest.raises(BrokenError):
        apply_cuts(cuts, optimizer)
    assert same(picture(model, optimizer), before)


def with_value(name, value):
    def change(cuts):
        return PreparedCut(
            cuts[2].name, cuts[2].module, {**cuts[2].values, name: value(cuts[2].values)}, cuts[2].states
        )

    return change


def with_state(name, key, value):
    def change(cuts):
        state = {**cuts[2].states[name], key: value(cuts[2].states[name][key])}
        return PreparedCut(cuts[2].name, cuts[2].module, cuts[2].values, {**cuts[2].states, name: state})

    return change


def without_key(cuts):
    states = {name: {k: v for k, v in state.items() if k != "exp_avg"} for name, state in cuts[2].states.items()}
    return PreparedCut(cuts[2].name, cuts[2].module, cuts[2].values, states)


WRONG = {
    "a value that is not finite": (
        with_value("A_imag", lambda v: v["A_imag"] * math.nan),
        CompressionError,
        "2: A_imag",
    ),
    "another order": (with_value("A_imag", lambda v: v["A_imag"][:, :3]), CompressionError, "2: .*A_imag 3"),
    "no such parameter": (with_value("E", lambda v: v["A_imag"]), CompressionError, "2: .*no parameter 'E'"),
    "a state of the old order": (
        with_state("C_re", "exp_avg", lambda v: torch.zeros(3, 8)),
        CompressionError,
        r"'exp_avg' of 2\.C_re would become \(3, 8\).*expected \(3, 4\)",
    ),
    "a state in another precision": (
        with_state("C_re", "exp_avg", lambda v: v.double()),
        CompressionError,
        "float64.*float32",
    ),
    "a state that is not finite": (
        with_state("C_re", "exp_avg_sq", lambda v: v * math.inf),
        CompressionError,
        "not finite",
    ),
    "a number for a tensor": (with_state("C_re", "step", lambda v: 3), CompressionError, "would become 3"),
    "another state than there is": (without_key, CompressionError, "changed since"),
    "one layer twice": (lambda cuts: cuts[0], CompressionError, r"0\.nu_log and 0\.nu_log are one parameter"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_one_layer_stops_all(case):
    change, error, said = WRONG[case]
    model, optimizer = trained_model()
    cuts, before = prepared(model, optimizer), picture(model, optimizer)
    with pytest.raises(error, match=said):
        apply_cuts([*cuts[:2], change(cuts)], optimizer)
    assert same(picture(model, optimizer), before)


def test_a_layer_twice_and_a_parameter_of_two_layers_are_refused():
    model, optimizer = trained_model()
    cut = prepared(model, optimizer)[0]
    with pytest.raises(CompressionError, match=r"0\.nu_log and other\.nu_log are one parameter"):
        apply_cuts([cut, PreparedCut("other", cut.module, cut.values, cut.states)], optimizer)


def test_an_optimizer_forgotten_is_noticed():
    model, optimizer = trained_model()
    with pytest.raises(CompressionError, match="prepared with an optimizer"):
        apply_cuts(prepared(model, optimizer))
    stranger = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    with pytest.raises(CompressionError, match="does not hold"):
        apply_cuts(prepared(model, optimizer), stranger)


def test_a_state_that_came_in_between_is_noticed():
    model, _ = trained_model()
    late = torch.optim.AdamW(model.parameters())
    cuts = prepared(model, late)
    assert all(not cut.states for cut in cuts)
    before = [layer.order for layer in model]
    step(model, late)
    with pytest.raises(CompressionError, match="changed since"):
        apply_cuts(cuts, late)
    assert [layer.order for layer in model] == before


class Packed(torch.Tensor):
    """As quantised weights are."""


def test_parameters_that_hold_no_plain_tensor_are_refused():
    layer = LRU(3, 8)
    layer.C_re = nn.Parameter(layer.C_re.detach().as_subclass(Packed))
    with pytest.raises(CompressionError, match=r"blocks\.0\.C_re holds a Packed"):
        require_plain_parameters("blocks.0", layer)
    managed = LRU(3, 8)
    managed._is_fsdp_managed_module = True
    with pytest.raises(CompressionError, match=r"blocks\.0 is sharded by FSDP"):
        require_plain_parameters("blocks.0", managed)


def test_sharded_parameters_are_refused(tmp_path):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        model = fully_shard(nn.Sequential(LRU(3, 8)), mesh=mesh)
        with pytest.raises(CompressionError, match=r"0 is sharded by FSDP|0\.nu_log is a DTensor"):
            require_plain_parameters("0", model[0])
        layer = LRU(3, 8)
        layer.C_re = nn.Parameter(distribute_tensor(layer.C_re.detach(), mesh))
        with pytest.raises(CompressionError, match=r"ssm\.C_re is a DTensor"):
            require_plain_parameters("ssm", layer)
    finally:
        dist.destroy_process_group()
