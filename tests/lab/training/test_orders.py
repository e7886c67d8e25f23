"""Recipes that name allowed orders, one order for all layers, and budgets of bytes and parameters."""

import dataclasses
import json

import pytest

import compressm as cs
from compressm_lab.training import ConfigError, train
from compressm_lab.training.reading import make_recipe
from tests.lab.training.tiny import copies, recipe

LONG = ("training.steps=6", "model.depth=2", "model.order=12", "model.pooling=steps")


def compression(text):
    return recipe(*LONG, f"compression={{{text}, gate: 1.0, when: {{steps: [3]}}}}")


@pytest.mark.parametrize(
    ("text", "orders"),
    [
        ("order: 5, round_to: 4", {8}),
        ("order: 5, round_to: [4, 7]", {7}),
        ("order: 5, round_to: powers-of-two", {8}),
        ("tau: 0.2, uniform: true, round_to: [4, 6, 8, 10]", {4, 6, 8, 10}),
        ("state_bytes: 64, uniform: true", {4}),
        ("parameters: 10000, round_to: [9]", {9}),
    ],
)
def test_a_recipe_trains_to_the_orders_that_it_names(text, orders, tmp_path):
    done = train(compression(text), copies(), tmp_path / "run")
    found = {block.ssm.order for block in cs.load_model(done.path / "model").blocks}
    assert len(found) == 1
    assert found <= orders


def test_a_runtime_is_named_by_its_word():
    assert compression("tau: 0.1, round_to: llama-cpp-cuda").compression.allowed_orders is cs.deploy.LLAMA_CPP_CUDA


def test_a_recipe_with_a_list_of_orders_comes_back_from_its_file():
    made = compression("order: 5, round_to: [4, 7], uniform: false")
    assert make_recipe(json.loads(json.dumps(dataclasses.asdict(made)))) == made


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("order: 5, round_to: 0", "round_to is 0"),
        ("order: 5, round_to: []", r"round_to is \(\)"),
        ("order: 5, round_to: [4, -1]", "an order is -1"),
        ("order: 5, round_to: 2.5", "round_to"),
        ("order: 5, round_to: llama", "round_to is 'llama'.*llama-cpp-cuda"),
        ("order: 5, round_to: null", "round_to"),
        ("order: 5, uniform: maybe", "uniform"),
        ("state_bytes: 0", "state_bytes is 0"),
        ("state_bytes: 8, parameters: 9", "state_bytes and parameters"),
        ("parameters: 9, selective: {kind: per-channel}", "parameters is 9 with selective per-channel"),
    ],
)
def test_other_values_are_refused_by_name(text, said):
    with pytest.raises(ConfigError, match=said):
        compression(text)
