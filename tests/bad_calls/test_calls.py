"""Every bad call of `calls.txt` is refused by a named error that says what came and what is allowed.

A line is an expression, an arrow, and parts of the message. What the call was given is as it was afterwards.
"""

import re
from pathlib import Path

import pytest

import compressm
from tests import unhooked
from tests.bad_calls.things import PREAMBLE

TABLE = Path(__file__).with_name("calls.txt")
NAMED = {"ControlError", "SequenceError", "CompressionError", "AdapterError", "SavingError", "ExportError"}
# Python's own words for arguments that are missing or too many.
OF_PYTHON = re.compile(r"got an unexpected keyword argument|missing \d+ required|takes .* positional arguments? but")


def rows(table):
    lines = [line for line in table.read_text(encoding="utf-8").splitlines() if "  ->  " in line]
    return {call: parts.split(" … ") for call, _, parts in (line.partition("  ->  ") for line in lines)}


CALLS = rows(TABLE)


@pytest.fixture(scope="module")
def outcomes():
    return unhooked.outcomes(PREAMBLE, {call: f"watched(lambda: {call})" for call in CALLS})


@pytest.mark.parametrize("call", CALLS)
def test_a_bad_call_is_refused_by_name_and_changes_nothing(call, outcomes):
    kinds, message = outcomes[call]
    assert kinds, f"{call} was accepted"
    of_python = kinds[0] == "TypeError" and OF_PYTHON.search(message)
    assert of_python or NAMED & set(kinds), f"{call}: {kinds[0]}: {message}"
    plain = " ".join(message.split())
    assert all(part in plain for part in CALLS[call]), f"{call}: {CALLS[call]} not in {plain!r}"


# Nothing but an argument too many could be wrong with these, or they are results and base classes, not made by users.
WITHOUT_ARGUMENTS = {
    *("Largest", "Modal", "PAPER", "Restart", "Slice", "Smallest", "Transport", "WhiteNoise", "__version__"),
    "powers_of_two",
    *(
        "ZOH",
        "Bilinear",
        "Inv",
        "Legs",
        "Lin",
        "IM",
        "IMEX",
        "DampedIMEX",
        "EveryStep",
        "LastStep",
        "MeanPooling",
        "NoNorm",
    ),
}
NOT_MADE = {
    *("HankelChange", "Projection", "RealTruncation", "Trajectories", "Truncation", "LinearSystem", "Adapter", "Basis"),
    *("ClassifierState", "Dropout", "Encoder", "Norm", "Pooling", "ResidualBlock", "Discretisation", "Initialisation"),
    *("Scheme", "DenseAdapter"),
    *("LTILayer", "SSMLayer", "Finding", "MambaMixerAdapter", "SSMAdapter", "SelectiveAdapter"),
    *("Mamba2MixerAdapter", "MemoryAdapter"),
}
PACKAGES = ("adapters", "compression", "control", "deploy", "layers", "models")


def test_every_public_name_is_called_badly():
    text = TABLE.read_text(encoding="utf-8")
    names = set(compressm.__all__) - set(PACKAGES)
    for package in (compressm.adapters, compressm.control, compressm.layers, compressm.models):
        names |= {name for name in package.__all__ if not name.endswith("Error")}
    helpers = {"Compressor": "compressor(", "compress_": "once(", "Cut": "cut(", "LanguageModel": "writer("}
    helpers |= {"Schedule": "when=Schedule)", "TryingPolicy": "keep=TryingPolicy)"}
    wanted = names - WITHOUT_ARGUMENTS - NOT_MADE
    assert not [
        name for name in sorted(wanted) if not re.search(rf"\b{re.escape(helpers.get(name, name + '('))}", text)
    ]
    assert len(CALLS) >= 700
