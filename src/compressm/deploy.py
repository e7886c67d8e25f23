"""Runtimes and the orders that they take: presets for `round_to`, a check of a model, and measured step times."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

import torch
from torch import nn

from compressm.adapters import Adapter, find
from compressm.adapters.base import require_call
from compressm.adapters.mamba import refused_in
from compressm.compression.cutting import filled_up
from compressm.compression.distributed import unwrapped
from compressm.compression.surgery import write_cuts_
from compressm.errors import AdapterError, CompressionError, did_you_mean
from compressm.families.choices import AllowedOrders, Multiples, OneOf, PowersOfTwo, powers_of_two, require_count
from compressm.families.observing import random_state, set_random_state
from compressm.layers import SSMLayer

__all__ = [
    "CANDLE",
    "FLA",
    "LLAMA_CPP_CPU",
    "LLAMA_CPP_CUDA",
    "LLAMA_CPP_METAL",
    "LLAMA_CPP_VULKAN",
    "MAMBA_SSM",
    "MLX",
    "RUNTIMES",
    "SGLANG",
    "TRANSFORMERS",
    "VLLM",
    "Check",
    "LayerVerdict",
    "Rule",
    "Runtime",
    "Verdict",
    "check",
    "named_orders",
    "step_times",
    "table",
]

# Mixers with norms of B and C (FalconMamba, Jamba) have the scan of Mamba-1, but not every program has the norms.
MAMBA_1, NORMED, MAMBA_2 = "Mamba-1", "normed Mamba-1", "Mamba-2"
RECURRENCES = (MAMBA_1, NORMED, MAMBA_2)
_PLAIN = (MAMBA_1, MAMBA_2)


class Verdict(Enum):
    """A runtime's treatment of a layer."""

    FINE = "fine"
    SLOW = "slow"
    WRONG = "silently wrong"
    REFUSED = "refused"


@final
@dataclass(frozen=True)
class Rule:
    """The orders of one kind of layer that a runtime takes, what it does with others, and where that is written.

    Orders above `limit` are refused. Inner widths that are no multiple of `width` are treated like other orders. What
    was read in the source and not run is not `tried`.
    """

    recurrence: str
    orders: AllowedOrders
    otherwise: Verdict
    why: str
    source: str
    limit: int | None = None
    width: int = 1
    tried: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.recurrence, str) or not self.recurrence:
            raise CompressionError(f"Rule: recurrence is {self.recurrence!r:.50}, expected text such as 'Mamba-1'")
        if not isinstance(self.orders, AllowedOrders):
            raise CompressionError(
                f"Rule: orders is {self.orders!r:.50}, expected Multiples(4), OneOf((16, 32)) or powers_of_two"
            )
        if not isinstance(self.otherwise, Verdict):
            raise CompressionError(
                f"Rule: otherwise is {self.otherwise!r:.50}, expected one of {', '.join(map(str, Verdict))}"
            )
        require_count("Rule: width", self.width)
        if self.limit is not None:
            require_count("Rule: limit", self.limit)

    def verdict(self, order: int) -> Verdict:
        """The runtime's treatment of a layer of this order."""
        if self.limit is not None and order > self.limit:
            return Verdict.REFUSED
        return Verdict.FINE if self.orders.allows(order) else self.otherwise


@final
@dataclass(frozen=True, repr=False)
class Runtime(AllowedOrders):
    """A program that runs models, by the orders that it takes: for `round_to` and `check`.

    No runtime here takes layers of different orders; `unequal` says what happens.
    """

    name: str
    rules: tuple[Rule, ...]
    unequal: str = "it reads one order for all layers from the config"

    one_for_all = True

    def __post_init__(self) -> None:
        rules = self.rules if isinstance(self.rules, tuple) else ()
        if not isinstance(self.name, str) or not rules or not all(isinstance(rule, Rule) for rule in rules):
            raise CompressionError(
                f"Runtime: name is {self.name!r:.50} and rules {self.rules!r:.100}, expected text and a tuple of"
                " Rule(...)"
            )

    def __repr__(self) -> str:
        return self.name

    def rule(self, recurrence: str) -> Rule | None:
        """The rule for this kind of layer; None if the runtime has no such layer."""
        return next((rule for rule in self.rules if rule.recurrence == recurrence), None)

    def of(self, recurrence: str) -> AllowedOrders:
        rule = self.rule(recurrence)
        if rule is None:
            runs = " and ".join(rule.recurrence for rule in self.rules)
            raise CompressionError(f"{self.name} runs {runs} and no {recurrence or 'such'} layer; leave round_to out")
        if rule.orders == _NONE:
            raise CompressionError(f"{self.name} has no good order for {recurrence}: {rule.why}")
        return rule.orders

    def next(self, order: int) -> int | None:
        raise CompressionError(
            f"the orders of {self.name} depend on the kind of layer: use it in compress_ or Compressor, or"
            f" {' or '.join(f'round_to=runtime.of({rule.recurrence!r})' for rule in self.rules)}"
        )


_ANY, _NONE = Multiples(1), OneOf(())
_TILES = "tiles of states are padded to a power of two: 20 states take the time of 32"
_ALL = "any order runs"


def _llama_cpp(device: str, *rules: Rule) -> Runtime:
    return Runtime(f"llama.cpp ({device})", rules, "the conversion to GGUF says nothing, and loading the file fails")


def _any_order(source: str, *tried: str) -> tuple[Rule, ...]:
    return tuple(Rule(kind, _ANY, Verdict.FINE, _ALL, source, tried=kind in tried) for kind in RECURRENCES)


def _padded_tiles(source: str, kinds: tuple[str, ...]) -> tuple[Rule, ...]:
    good = PowersOfTwo(at_most=256)
    return tuple(Rule(kind, good, Verdict.SLOW, _TILES, source, limit=256) for kind in kinds)


TRANSFORMERS = Runtime(
    "transformers",
    _any_order("transformers 5.22.2, models/mamba/modeling_mamba.py, falcon_mamba, jamba and mamba2", MAMBA_1, NORMED),
    "from_pretrained stops with AmbiguousGlobalPerLayerAttributeError",
)
LLAMA_CPP_CPU = _llama_cpp("CPU", *_any_order("llama.cpp, ggml/src/ggml-cpu/ops.cpp", MAMBA_1))
LLAMA_CPP_METAL = _llama_cpp("Metal", *_any_order("llama.cpp, ggml/src/ggml-metal"))
_CUDA = "llama.cpp of llama-cpp-python 0.3.36, ggml/src/ggml-cuda/ggml-cuda.cu and ssm-scan.cu"
LLAMA_CPP_CUDA = _llama_cpp(
    "CUDA",
    *(
        Rule(kind, OneOf((16,)), Verdict.SLOW, "the scan of other orders runs on the CPU", _CUDA, width=128)
        for kind in (MAMBA_1, NORMED)
    ),
    Rule(MAMBA_2, OneOf((96, 128, 256)), Verdict.SLOW, "the scan of other orders runs on the CPU", _CUDA),
)
_VULKAN = "llama.cpp, ggml/src/ggml-vulkan/ggml-vulkan.cpp"
LLAMA_CPP_VULKAN = _llama_cpp(
    "Vulkan",
    *(Rule(kind, _NONE, Verdict.SLOW, "the scan of Mamba-1 runs on the CPU", _VULKAN) for kind in (MAMBA_1, NORMED)),
    Rule(MAMBA_2, OneOf((128, 256)), Verdict.SLOW, "the scan of other orders runs on the CPU", _VULKAN),
)
CANDLE = Runtime(
    "candle",
    (
        Rule(
            MAMBA_1,
            OneOf((16,)),
            Verdict.REFUSED,
            "D_STATE is a constant, so tensors of other shapes do not load",
            "candle, candle-transformers/src/models/mamba.rs",
        ),
    ),
    "D_STATE is a constant for all layers",
)
VLLM = Runtime(
    "vLLM",
    _padded_tiles(
        "vLLM, csrc/mamba/mamba_ssm/selective_scan_fwd.cu and model_executor/layers/mamba/ops/mamba_ssm.py", RECURRENCES
    ),
)
MAMBA_SSM = Runtime("mamba_ssm", _padded_tiles("mamba_ssm, csrc/selective_scan/selective_scan.cpp", _PLAIN))
SGLANG = Runtime("SGLang", _padded_tiles("SGLang, python/sglang/srt/layers/attention/mamba/ops/mamba_ssm.py", _PLAIN))
MLX = Runtime(
    "MLX",
    (
        Rule(MAMBA_1, _ANY, Verdict.FINE, _ALL, "mlx-lm, mlx_lm/models/mamba.py"),
        Rule(NORMED, _ANY, Verdict.FINE, _ALL, "mlx-lm, mlx_lm/models/mamba.py and jamba.py"),
        Rule(
            MAMBA_2,
            Multiples(32),
            Verdict.WRONG,
            "the Metal kernel of a step gives each of 32 threads order / 32 states, rounded down, and drops the rest",
            "mlx-lm, mlx_lm/models/ssm.py",
        ),
    ),
)
FLA = Runtime(
    "flash-linear-attention",
    (
        Rule(
            MAMBA_2,
            Multiples(64, at_most=256),
            Verdict.SLOW,
            "kernels work on tiles of 64 key dimensions",
            "flash-linear-attention, fla/ops",
            limit=256,
        ),
    ),
)

# By the names that the command line takes.
RUNTIMES = {
    "transformers": TRANSFORMERS,
    "llama-cpp-cpu": LLAMA_CPP_CPU,
    "llama-cpp-metal": LLAMA_CPP_METAL,
    "llama-cpp-cuda": LLAMA_CPP_CUDA,
    "llama-cpp-vulkan": LLAMA_CPP_VULKAN,
    "candle": CANDLE,
    "vllm": VLLM,
    "mamba-ssm": MAMBA_SSM,
    "sglang": SGLANG,
    "mlx": MLX,
    "fla": FLA,
}


def named_orders(word: str) -> AllowedOrders:
    """The orders that a word in a recipe or on the command line means: powers-of-two, or the name of a runtime."""
    known = {"powers-of-two": powers_of_two, **RUNTIMES}
    if word not in known:
        raise CompressionError(
            f"round_to is {word!r:.100}, expected an integer, orders such as 16,32, or one of {', '.join(known)}"
            f"{did_you_mean(word, known)}"
        )
    return known[word]


def table() -> str:
    """All presets as a table in Markdown, with what happens to other orders and the source of each fact."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, runtime in RUNTIMES.items():
        for rule in runtime.rules:
            orders = "none" if rule.orders == _NONE else str(rule.orders)
            others = "–" if rule.orders == _ANY else f"{rule.otherwise.value}: {rule.why}"
            others += "" if rule.limit is None else f"; refused above {rule.limit}"
            others += "" if rule.width == 1 else f"; so does that of inner widths that are no multiple of {rule.width}"
            said = (f"`{name.replace('-', '_').upper()}`", orders, others, "run" if rule.tried else "read", rule.source)
            rows.setdefault(said, []).append(rule.recurrence)
    head = ["| preset | layer | orders | other orders | known from | source |", "|---|---|---|---|---|---|"]
    return "\n".join(head + [f"| {' | '.join((row[0], ', '.join(kinds), *row[1:]))} |" for row, kinds in rows.items()])


@final
@dataclass(frozen=True)
class LayerVerdict:
    """A runtime's treatment of one layer, the reason, and the cure."""

    layer: str
    order: str
    verdict: Verdict
    why: str = ""
    cure: str = ""


@final
@dataclass(frozen=True)
class Check:
    """A runtime's treatment of the layers of a model; a table when printed."""

    runtime: Runtime
    verdicts: tuple[LayerVerdict, ...]

    @property
    def fine(self) -> bool:
        """True if nothing is slow, wrong or refused."""
        return all(one.verdict is Verdict.FINE for one in self.verdicts)

    def __str__(self) -> str:
        head = ("layer", "order", self.runtime.name, "why", "what to do")
        rows = [head, *((one.layer, one.order, one.verdict.value, one.why, one.cure) for one in self.verdicts)]
        widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def check(model: nn.Module, runtime: Runtime) -> Check:
    """Tell whether a runtime would run the layers of this model, run them slowly or wrongly, or refuse them."""
    if not isinstance(runtime, Runtime):
        raise CompressionError(f"runtime is {runtime!r:.100}, expected one such as deploy.LLAMA_CPP_CUDA")
    inner = unwrapped(model)
    if not (found := find(inner)):
        raise CompressionError(
            f"{type(inner).__name__} has no SSM layer that an adapter reads{refused_in(inner)}; see compressm.adapters"
        )
    orders = {name: adapter.order(module) for name, (module, adapter) in found.items()}
    verdicts = [_judged(runtime, name, *found[name], order) for name, order in orders.items()]
    if runtime.one_for_all and len(set(orders.values())) > 1:
        listed = ", ".join(map(str, sorted(set(orders.values()))))
        cure = f"pad_orders_(model), or cut with uniform=True: {max(orders.values())} states in every layer"
        verdicts.append(LayerVerdict("all layers", listed, Verdict.REFUSED, runtime.unequal, cure))
    return Check(runtime, tuple(verdicts))


def _judged(runtime: Runtime, name: str, module: nn.Module, adapter: Adapter[Any, Any], order: int) -> LayerVerdict:
    said, kind, rule = name or "the model", type(module).__name__, runtime.rule(adapter.RECURRENCE)
    if rule is None:
        why = f"{runtime.name} has no {adapter.RECURRENCE if adapter.RECURRENCE in RECURRENCES else kind} layers"
        cure = "export the model's step instead" if isinstance(module, SSMLayer) else "use another runtime"
        return LayerVerdict(said, str(order), Verdict.REFUSED, why, cure)
    added = sorted(entry for entry in adapter.OPTIONAL if getattr(module, entry, None) is not None)
    if added:
        why = f"it has {', '.join(added)} from a PerChannel cut, which only {kind} reads"
        return LayerVerdict(said, str(order), Verdict.REFUSED, why, "cut the original with selective=Baked()")
    verdict, width = rule.verdict(order), adapter.inner_width(module)
    if width is not None and width % rule.width:
        why = f"its inner width {width} is no multiple of {rule.width}"
        return LayerVerdict(said, str(order), max(rule.otherwise, verdict, key=_BAD.index), why, "use another runtime")
    if verdict is Verdict.FINE:
        return LayerVerdict(said, str(order), verdict)
    why = f"more than {rule.limit} states are refused" if verdict is Verdict.REFUSED and rule.limit else rule.why
    return LayerVerdict(said, str(order), verdict, why, _cure(rule.orders, order))


_BAD = list(Verdict)


def _cure(allowed: AllowedOrders, order: int) -> str:
    above = allowed.next(order)
    below = next((smaller for smaller in range(order - 1, 0, -1) if allowed.allows(smaller)), None)
    cures = [] if above is None else [f"pad_orders_(model, {above})"]
    cures += [] if below is None else [f"compress_(model, keep=TargetOrder({below}), ...)"]
    return " or ".join(cures) or "use another runtime"


def step_times(
    model: nn.Module, run: Callable[[nn.Module], object], orders: Iterable[int], *, repeats: int = 20
) -> dict[int, float]:
    """The milliseconds of `run(model)` by the order of all layers, measured here on copies; for `Budget(measure=)`.

    `run` makes one step, or whatever is to be fast. The time is the median of `repeats` calls, after two that warm up.
    Random numbers are as before afterwards.
    """
    if not isinstance(orders, Iterable):
        raise CompressionError(f"orders are {orders!r:.100}, expected orders to measure, such as (16, 32, 64)")
    sizes = [require_count("orders: an order", order) for order in orders]
    if not sizes:
        raise CompressionError("orders are empty, expected orders to measure, such as (16, 32, 64)")
    require_count("repeats", repeats)
    try:
        require_call("run", run, "model")
    except AdapterError as error:
        raise CompressionError(str(error)) from None
    random = random_state()
    try:
        return {order: _milliseconds(_at_order(unwrapped(model), order), run, repeats) for order in sorted(set(sizes))}
    finally:
        set_random_state(random)


def _at_order(model: nn.Module, order: int) -> nn.Module:
    """A copy whose layers have this order: their first states, or zero states beside theirs."""
    other = copy.deepcopy(model)
    if not (found := find(other)):
        raise CompressionError(f"{type(model).__name__} has no SSM layer that an adapter reads; see compressm.adapters")
    wanted = {name: order for name, (module, adapter) in found.items() if adapter.order(module) != order}
    write_cuts_(filled_up({}, found, wanted), None, ExitStack(), models=(other,))
    return other


@torch.no_grad()
def _milliseconds(model: nn.Module, run: Callable[[nn.Module], object], repeats: int) -> float:
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    times = []
    for k in range(2 + repeats):
        start = time.perf_counter()
        run(model)
        if on_gpu:
            torch.cuda.synchronize()
        times += [time.perf_counter() - start] if k >= 2 else []
    return 1000 * statistics.median(times)
