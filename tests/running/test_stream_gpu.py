"""A stream on a GPU: one recorded graph a token, the same numbers, recorded anew when the model has changed."""

import pytest
import torch

import compressm as cs
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba, SequenceError
from compressm.models import LayerNorm, RMSNorm, SequenceClassifier
from compressm.running import Stream

from .test_stream import BATCH, VOCABULARY, WIDTH, language_model, streamed, tokens
from .test_stream_and_cuts import HALF, redundant

pytestmark = pytest.mark.gpu
LAYERS = (LRU, S5, S4, S4D, LinOSS, Mamba)


def check_close(one, other, tolerance=1e-3):
    torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=tolerance * float(other.abs().max()))


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm()], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_recorded_stream_gives_what_forward_gives(layer, norm, record):
    model, x = language_model(layer, torch.float32, norm=norm).cuda(), tokens().cuda()
    stream = Stream(model, BATCH, record=record)
    check_close(streamed(stream, x), model(x)[0].detach())
    assert (stream._program._graph is not None) == record
    for mine, theirs in zip(stream.state, model(x)[1], strict=True):
        check_close(mine, theirs.detach())


def test_a_mamba_in_half_precision_is_streamed():
    model, x = language_model(Mamba, torch.bfloat16).cuda(), tokens().cuda()
    y = streamed(Stream(model, BATCH), x)
    assert y.dtype == torch.bfloat16
    check_close(y, model(x)[0].detach(), 0.03)


def test_a_classifier_on_a_gpu_streams_its_running_answer():
    torch.manual_seed(0)
    sizes = {"depth": 1, "width": WIDTH, "order": 4, "classes": 3, "inputs": 2}
    model, x = SequenceClassifier(S5, **sizes).cuda().eval(), torch.randn(BATCH, 20, 2, device="cuda")
    stream = Stream(model, BATCH)
    check_close(streamed(stream, x)[:, -1], model(x).detach())
    assert stream.state.steps.tolist() == [20] * BATCH


@pytest.mark.parametrize("layer", [LRU, S4D])
def test_a_recorded_stream_follows_a_cut_and_an_optimizer(layer):
    model, x = redundant(layer).float().cuda(), tokens().cuda()
    logits, stream = model(x)[0].detach(), Stream(model, BATCH)
    streamed(stream, x[:, :HALF])
    cs.compress_(model, keep=cs.TargetOrder(4))
    check_close(streamed(stream, x[:, HALF:]), logits[:, HALF:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x)[0].square().mean().backward()
    optimizer.step()
    stream.reset()
    check_close(streamed(stream, x), model(x)[0].detach())


def test_rows_are_reset_and_outputs_are_kept_between_replays():
    model, x = language_model(dtype=torch.float32).cuda(), tokens().cuda()
    stream = Stream(model, BATCH)
    first = stream(x[:, 0])
    kept = first.clone()
    stream(x[:, 1])
    assert torch.equal(first, kept)
    stream.reset([1])
    check_close(stream(x[:, 0])[1], first[1])


def test_tokens_may_come_from_the_host_and_are_checked_there():
    model, x = language_model(dtype=torch.float32).cuda(), tokens()
    stream = Stream(model, BATCH)
    check_close(streamed(stream, x), model(x.cuda())[0].detach())
    with pytest.raises(SequenceError, match="tokens run from"):
        stream(torch.full((BATCH,), VOCABULARY))


def test_a_stream_can_be_part_of_somebody_elses_graph():
    model, x = language_model(dtype=torch.float32).cuda(), tokens().cuda()
    stream = Stream(model, BATCH)
    expected = streamed(stream, x)
    stream.reset()
    token, graph = x[:, 0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = stream(token)
    stream.reset()
    for t in range(3):
        token.copy_(x[:, t])
        graph.replay()
        check_close(y, expected[:, t])
