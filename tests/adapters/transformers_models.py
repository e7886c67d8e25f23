"""Small models of transformers, and wherever they say the orders of their layers."""

import pytest
import torch

import compressm as cs

transformers = pytest.importorskip("transformers")
from transformers import MambaConfig, MambaForCausalLM  # noqa: E402
from transformers.models.mamba.modeling_mamba import MambaMixer  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

IDS = torch.randint(1, 20, (5, 16), generator=torch.Generator().manual_seed(0))


def make(kind=MambaForCausalLM, seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 20, "hidden_size": 8, "state_size": 6, "num_hidden_layers": 2, "time_step_rank": 2}
    model = kind(MambaConfig(**{**sizes, "eos_token_id": None, **options})).eval()
    for mixer in mixers(model):
        mixer.A_log.data += 0.3 * torch.randn(mixer.A_log.shape)
        mixer.dt_proj.bias.data += 2  # memories of some ten steps
    return model


def mixers(model):
    return [module for module in model.modules() if isinstance(module, MambaMixer)]


def configs(model):
    """Every place in the model that holds a config."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, MambaConfig)]


def runs(model):
    return model(IDS)


THREE = cs.TargetOrder(3)


def cut(model, keep=THREE, **options):
    return cs.compress_(model, keep=keep, calibrate=runs, **options)


def unequal(model, *orders, **options):
    """Another order for each layer."""
    overrides = {f"*layers.{k}.mixer": cs.TargetOrder(order) for k, order in enumerate(orders)}
    cut(model, keep=cs.KeepFraction(1.0), overrides=overrides, gate=1.0, **options)
    return model


def train(model, optimizer):
    """One step."""
    optimizer.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()


def said_orders(model):
    """Wherever the orders of the layers stand."""
    for mixer, layer in zip(mixers(model), model.config.per_layer_config, strict=True):
        rows = mixer.time_step_rank + 2 * mixer.ssm_state_size
        assert mixer.A_log.shape[1] == mixer.ssm_state_size == layer.state_size
        assert mixer.x_proj.weight.shape[0] == mixer.x_proj.out_features == rows
    return [mixer.ssm_state_size for mixer in mixers(model)]


def written(model, **options):
    return model.generate(IDS[:, :4], max_new_tokens=8, do_sample=False, pad_token_id=0, **options)


def same(a, b):
    return torch.equal(a(IDS)[0], b(IDS)[0])


def picture(model):
    """All that a failed or undone cut must leave alone."""
    return [value.clone() for value in model.state_dict().values()], str(model.config.to_dict()), said_orders(model)


def check_same(model, before):
    """Bit for bit."""
    (tensors, *said), (then, *said_then) = picture(model), before
    torch.testing.assert_close(tensors, then, rtol=0, atol=0)
    assert said == said_then
