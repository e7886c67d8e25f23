"""A running stream follows the model: through cuts with its states, through other changes with new constants."""

import copy
import pickle
import warnings

import pytest
import torch

import compressm as cs
from compressm.compression import load_checkpoint, save_checkpoint, surgery
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba, SequenceError
from compressm.layers.base import state_holders
from compressm.models import BatchNorm, LanguageModel, SequenceClassifier
from compressm.running import Stream

from .test_stream import BATCH, VOCABULARY, WIDTH, check_close, language_model, streamed, tokens

LINEAR = (LRU, S5, S4, S4D, LinOSS)
HALF = 10


def redundant(layer, order=8):
    """A model with twice the states that it needs."""
    model = language_model(layer, order=order)
    with torch.no_grad():
        for block in model.blocks:
            if layer is Mamba:
                rank, rows = block.ssm.dt_rank, block.ssm.x_proj.weight
                rows[rank + order // 2 : rank + order] = rows[rank + order // 2 + order :] = 0
            else:
                for name, value in block.ssm.named_parameters():
                    if name.startswith(("C_", "p_")):
                        value[..., order // 2 :] = 0
                    if name.startswith("p_"):
                        value *= 0.1  # HiPPO's own real poles take a mode each
    return model


def calibrate(model):
    generator = torch.Generator().manual_seed(3)
    model(torch.randint(VOCABULARY, (4, 100), generator=generator))


@pytest.mark.parametrize(
    ("layer", "method"),
    [*((layer, None) for layer in LINEAR), (Mamba, cs.SharedIndex()), (Mamba, cs.PerChannel()), (Mamba, cs.Baked())],
    ids=str,
)
def test_a_cut_without_error_changes_nothing_in_a_running_stream(layer, method):
    model, x = redundant(layer), tokens()
    logits = model(x)[0]
    stream = Stream(model, BATCH)
    streamed(stream, x[:, :HALF])
    options = {} if method is None else {"calibrate": calibrate, "selective": method}
    cs.compress_(model, keep=cs.TargetOrder(4), **options)
    assert {block.ssm.order for block in model.blocks} == {4}
    rest = streamed(stream, x[:, HALF:])
    tolerance = 1e-8 if layer is not Mamba or isinstance(method, cs.SharedIndex) else 1e-3
    torch.testing.assert_close(rest, logits[:, HALF:], rtol=0, atol=tolerance)


@pytest.mark.parametrize("layer", [*LINEAR, Mamba])
def test_states_carried_through_a_cut_are_better_than_zeros(layer):
    model, x = language_model(layer, order=9), tokens(40)
    whole = model(x)[0]
    stream = Stream(model, BATCH)
    streamed(stream, x[:, :30])
    cs.compress_(model, keep=cs.TargetOrder(6), calibrate=calibrate)
    carried = streamed(stream, x[:, 30:33]) - whole[:, 30:33]
    begun = streamed(Stream(model, BATCH), x[:, 30:33]) - whole[:, 30:33]
    assert carried.norm() < 0.7 * begun.norm()


def test_states_of_cuts_in_a_row_and_unequal_orders_are_carried():
    model, x = language_model(order=9), tokens()
    streams = [Stream(model, BATCH), Stream(model, BATCH)]
    for stream in streams:
        streamed(stream, x[:, :HALF])
    for first, second in ((9, 7), (6, 4)):
        cs.compress_(model, keep=cs.TargetOrder(first), overrides={"blocks.1.ssm": cs.TargetOrder(second)})
        assert [state.shape[-1] for state in streams[0].state] == [first, second]  # the other one takes both at once
    rest = streamed(streams[0], x[:, HALF:])
    torch.testing.assert_close(streamed(streams[1], x[:, HALF:]), rest, rtol=0, atol=1e-10)
    streams[0].reset()
    assert (streamed(streams[0], x[:, HALF:]) - rest).abs().max() > 1e-3


def test_a_stream_follows_a_compressor_and_a_copy_that_follows():
    model, x = redundant(S5), tokens()
    average, logits = copy.deepcopy(model), model(x)[0]
    streams = [Stream(model, BATCH), Stream(average, BATCH)]
    compressor = cs.Compressor(model, when=[1], keep=cs.TargetOrder(4), gate=1.0, follow=[average])
    for stream in streams:
        streamed(stream, x[:, :HALF])
    assert len(compressor.step(1)) == 2
    for stream in streams:
        torch.testing.assert_close(streamed(stream, x[:, HALF:]), logits[:, HALF:], rtol=0, atol=1e-8)


def test_a_classifier_keeps_what_it_has_pooled_through_a_cut():
    torch.manual_seed(0)
    sizes = {"depth": 1, "width": WIDTH, "order": 6, "classes": 3, "vocabulary": VOCABULARY}
    model, x = SequenceClassifier(LRU, **sizes).double().eval(), tokens()
    with torch.no_grad():
        model.blocks[0].ssm.C_re[:, 3:] = model.blocks[0].ssm.C_im[:, 3:] = 0
    whole, stream = model(x), Stream(model, BATCH)
    streamed(stream, x[:, :HALF])
    cs.compress_(model, keep=cs.TargetOrder(3))
    torch.testing.assert_close(streamed(stream, x[:, HALF:])[:, -1], whole, rtol=0, atol=1e-8)


def test_a_cut_that_fails_leaves_streams_as_they_were(monkeypatch):
    model, x = language_model(), tokens()
    stream, logits = Stream(model, BATCH), model(x)[0]
    streamed(stream, x[:, :HALF])

    class BrokenError(Exception):
        pass

    def fail(*args):
        raise BrokenError

    monkeypatch.setattr(surgery, "renew_shared_", fail)  # when all values have been written
    with pytest.raises(BrokenError):
        cs.compress_(model, keep=cs.TargetOrder(3))
    assert model.blocks[0].ssm.order == 7
    check_close(streamed(stream, x[:, HALF:]), logits[:, HALF:])


def test_another_order_that_is_loaded_restarts_the_states_with_a_warning():
    model, other, x = language_model(order=7), language_model(order=5, depth=2), tokens()
    with torch.no_grad():
        other.blocks[1] = copy.deepcopy(model.blocks[1])
    stream = Stream(model, BATCH)
    streamed(stream, x[:, :HALF])
    kept = stream.state[1]
    model.load_state_dict(other.state_dict())
    with pytest.warns(UserWarning, match=r"the order of blocks.0.ssm changed, and not by a cut"):
        state = stream.state
    assert not state[0].any()
    check_close(state[1], kept)
    stream.reset()
    check_close(streamed(stream, x), other(x)[0])


def test_a_rollback_and_a_checkpoint_are_followed(tmp_path):
    model, x = redundant(LRU), tokens()
    logits, path = model(x)[0], tmp_path / "checkpoint.pt"
    save_checkpoint(path, model=model)
    stream = Stream(model, BATCH)
    streamed(stream, x[:, :HALF])
    cs.compress_(model, keep=cs.TargetOrder(4))
    load_checkpoint(path, model=model)
    # Nothing was read in between: the state from before the cut is the right one.
    check_close(streamed(stream, x[:, HALF:]), logits[:, HALF:])
    cs.compress_(model, keep=cs.TargetOrder(4))
    stream(x[:, 0])
    load_checkpoint(path, model=model)
    with pytest.warns(UserWarning, match=r"the order of blocks.0.ssm, blocks.1.ssm changed"):
        stream(x[:, 0])


def test_a_cut_after_a_rollback_does_not_take_states_of_another_basis_for_its_own():
    model, x = language_model(), tokens()
    before = copy.deepcopy(model.state_dict())
    stream = Stream(model, BATCH)
    cs.compress_(model, keep=cs.TargetOrder(4))
    streamed(stream, x[:, :HALF])
    model.load_state_dict(before)
    cs.compress_(model, keep=cs.TargetOrder(4))
    with pytest.warns(UserWarning, match="the stream goes on with zeros"):
        assert not stream.state[0].any()


def test_steps_of_an_optimizer_are_noticed_and_the_states_stay():
    model, x = language_model(), tokens()
    stream = Stream(model, BATCH)
    streamed(stream, x[:, :HALF])
    state = stream.state
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x)[0].square().mean().backward()
    optimizer.step()
    for t in range(HALF, HALF + 3):
        y, state = model.step(x[:, t], state)
        check_close(stream(x[:, t]), y.detach())


@pytest.mark.parametrize("write", ["buffer", "embedding", "gate"])
def test_any_tensor_that_is_written_counts(write):
    model, x = language_model(norm=BatchNorm()), tokens()
    stream = Stream(model, BATCH)
    chosen = {
        "buffer": model.blocks[1].norm.running_mean,
        "embedding": model.encoder.embedding.weight,
        "gate": model.blocks[1].gate.bias,
    }
    with torch.no_grad():
        chosen[write] += 1
    check_close(streamed(stream, x), model(x)[0])


def test_refresh_takes_what_nobody_counts():
    model, x = language_model(), tokens()
    stream = Stream(model, BATCH)
    model.blocks[0].gate.weight.data.mul_(2)
    stream.refresh()
    check_close(streamed(stream, x), model(x)[0])
    stream.reset()
    model.float()
    stream.refresh()
    check_close(streamed(stream, x), model(x)[0], torch.float32)


def test_streams_die_with_their_last_reference():
    model = LanguageModel(LRU, vocabulary=VOCABULARY, depth=1, width=WIDTH, order=2)
    stream = Stream(model)
    assert state_holders(model.blocks[0].ssm) == [stream]
    del stream
    assert state_holders(model.blocks[0].ssm) == []


def test_cuts_of_other_models_leave_a_stream_alone():
    model, other, x = language_model(), language_model(), tokens()
    stream = Stream(model, BATCH)
    streamed(stream, x[:, :HALF])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cs.compress_(other, keep=cs.TargetOrder(3))
        check_close(streamed(stream, x[:, HALF:]), model(x)[0][:, HALF:])


@pytest.mark.parametrize("layer", [LRU, S5, S4, S4D, LinOSS, Mamba])
def test_states_are_bit_for_bit_as_before_a_cut_that_was_taken_back(layer, monkeypatch):
    """A stream of S4D divides its states by B, and was off by a rounding."""
    model = language_model(layer, dtype=torch.float32)
    stream = Stream(model, BATCH)
    streamed(stream, tokens())
    before = stream.state
    calibrated = {"calibrate": calibrate} if layer is Mamba else {}

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("compressm.compression.compressor.end_work_", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cs.compress_(model, keep=cs.TargetOrder(3), **calibrated)
    assert all(torch.equal(now, then) for now, then in zip(stream.state, before, strict=True))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stream_that_is_copied_or_pickled_says_how_to_go_on(copied):
    model = language_model()
    stream = Stream(model, BATCH)
    streamed(stream, tokens())
    with pytest.raises(SequenceError, match=r"make another by Stream\(model, batch\).*load_state"):
        copied(stream)
    other = Stream(copy.deepcopy(model), BATCH)
    other.load_state(stream.state)
    assert torch.equal(streamed(other, tokens()), streamed(stream, tokens()))
