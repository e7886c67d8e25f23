"""Streams: a model that reads one step a call, with constants computed once and its state kept in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial, reduce
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from compressm.compression.distributed import unwrapped
from compressm.compression.sharding import require_whole
from compressm.errors import warn_caller
from compressm.layers import SequenceError, SSMLayer, check_finite
from compressm.layers.base import StateHolder, StateMap, hold_states_, require_batch, require_switches, wide
from compressm.layers.parameters import form_changes
from compressm.layers.streaming import Stepper
from compressm.models import Block, Blocks, ClassifierState, LanguageModel, MixerBlock, SequenceClassifier
from compressm.models.block import ResidualBlock
from compressm.models.checks import require_tensor, require_within
from compressm.models.encoder import EmbeddingEncoder, LinearEncoder
from compressm.models.normalisation import (
    PaddedBatchNorm,
    PaddedRunningNorm,
    StepNorm,
    StepRMSNorm,
    Unchanged,
    averages_of,
)

Map: TypeAlias = Callable[[Tensor], Tensor]
Streamed: TypeAlias = LanguageModel | SequenceClassifier | Blocks | ResidualBlock | SSMLayer

_KINDS = "a LanguageModel, a SequenceClassifier, Blocks, a Block, a MixerBlock or an SSM layer"
_ONE_STATE = (SSMLayer, ResidualBlock)  # their state is one tensor, not a tuple
_SMALL = 2**20  # numbers in a matrix that is worth a transposed copy: a product with one row is faster by 15 %
_WARM_UP = 3  # steps before a recording: in them libraries allocate and kernels compile


@final
class Stream(StateHolder):
    """The model as a stream of `batch` sequences: a call reads one step and gives what `model.step` would give.

    It computes in evaluation mode, without gradients, hooks or autocast, in float32 at least. Constants, such as poles
    and products with norms, are computed once, and again when parameters have changed. On a GPU a call replays one
    CUDA graph, unless `record` is False; tokens that are there already are not checked.

    A cut carries the states of living streams over to the smaller layers. If anything else changes the order of a
    layer, such as a rollback, the layer's states restart at zeros, with a warning.

    Cuts, loaded checkpoints and in-place writes, such as an optimizer's, are noticed at the next call. What torch does
    not count as a write (a training step that a CUDA graph replays, `parameter.data`, `model.to`, replaced modules)
    needs a call of `refresh`.
    """

    def __init__(self, model: nn.Module, batch: int = 1, *, record: bool = True) -> None:
        require_batch(batch)
        require_switches(record=record)
        inner = unwrapped(model) if isinstance(model, nn.Module) else model
        if not isinstance(inner, Streamed):
            raise SequenceError(f"model is a {type(model).__name__}, expected {_KINDS}")
        require_whole("the model of a stream", inner)
        self.model, self.batch, self.record = inner, batch, record
        self._take_(_Program(inner, batch, record))

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse copies and pickles: constants, memory and CUDA graph belong to the model here."""
        raise SequenceError(
            "a Stream cannot be copied or pickled: make another by Stream(model, batch), and go on by"
            " load_state(stream.state)"
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Read one step, (batch,) tokens or (batch, inputs) numbers, and give its output."""
        program = self._program if self._program.is_current() else self._followed()
        if type(x) is not Tensor or (x.shape, x.dtype, x.device) != program.reads:
            x = program.checked(x)
        y = program(x)
        # Outside inference mode, so that the caller may write into the copy.
        return y.clone() if program.wide is program.dtype else y.to(program.dtype)

    @property
    def state(self) -> Any:
        """A copy of the state, as `model.step` and `model.forward` give and take it."""
        program = self._followed()
        states = tuple(state.to(dtype) for state, (_, dtype) in zip(program.states(), program.kinds, strict=True))
        if program.pooled is not None and program.steps is not None:
            return ClassifierState(states, program.pooled.to(wide(program.dtype), copy=True), program.steps.clone())
        return states[0] if isinstance(self.model, _ONE_STATE) else states

    def load_state(self, state: Any) -> None:
        """Go on from a state that `model.step`, `model.forward` or another stream gave for as many sequences."""
        program = self._followed()
        if program.pooled is not None and not isinstance(state, ClassifierState):
            raise SequenceError(f"state is a {type(state).__name__}, expected that of initial_state or the last step")
        parts = state.layers if isinstance(state, ClassifierState) else state
        parts = [parts] if isinstance(self.model, _ONE_STATE) else parts
        if not isinstance(parts, Sequence) or len(parts) != len(program.layers):
            got = f"{len(parts)} tensors" if isinstance(parts, Sequence) else f"a {type(parts).__name__}"
            raise SequenceError(f"state is {got}, expected one tensor for each of {len(program.layers)} blocks")
        for layer, part in zip(program.layers, parts, strict=True):
            layer._check_state(part, self.batch)
        if isinstance(state, ClassifierState):
            program.load_pooling_(state.pooled, state.steps)
        program.write_(parts)

    def reset(self, rows: int | slice | Sequence[int] | Tensor | None = None) -> None:
        """Begin all sequences anew, or those at the given places of the batch."""
        program, places = self._followed(), torch.arange(self.batch, device="cpu")
        try:
            # Of a list torch would round numbers that are not whole.
            given = rows if rows is None or isinstance(rows, slice) else torch.as_tensor(rows, device="cpu")
            places = places[given].reshape(-1)
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            raise SequenceError(f"rows are {rows!r:.80}, expected places from 0 to {self.batch - 1}") from error
        with program.inference:
            for part in (*(stepper.state for stepper in program.steppers), program.pooled, program.steps):
                if part is not None:
                    part[places.to(part.device)] = 0

    def refresh(self) -> None:
        """Compute the constants from the present parameters; the states stay."""
        program = _Program(self.model, self.batch, self.record)
        kept = [self._kept(place, shape) for place, (shape, _) in enumerate(program.kinds)]
        program.write_(kept)
        program.repeat_(self._program, self._carried)
        if self._program.pooled is not None and self._program.steps is not None:
            program.load_pooling_(self._program.pooled.to(program.device), self._program.steps.to(program.device))
        self._take_(program)
        names = {id(module): name or "the layer" for name, module in self.model.named_modules()}
        if lost := [names[id(layer)] for layer, state in zip(program.layers, kept, strict=True) if state is None]:
            warn_caller(
                f"the order of {', '.join(lost)} changed, and not by a cut that carries states over: the stream goes on"
                " with zeros there; call reset() to begin anew everywhere"
            )

    def carry_(self, layer: nn.Module, through: StateMap | None) -> Callable[[], None]:
        before = dict(self._carried)
        for place, held in enumerate(self._program.layers):
            if held is layer:
                state = self._kept(place, held.initial_state(self.batch).shape)
                self._carried[place] = None if state is None or through is None else through(state)
        return partial(setattr, self, "_carried", before)

    def _kept(self, place: int, shape: torch.Size) -> Tensor | None:
        """A layer's state, if it has this shape: the one that a cut has moved, or else the present one."""
        steppers = self._program.steppers
        if place >= len(steppers) or (place in self._carried and self._carried[place] is None):
            return None
        # If a cut was taken back before the next step, the state before it fits again.
        found = (self._carried.get(place), steppers[place].read())
        return next((state for state in found if state is not None and state.shape == shape), None)

    def _followed(self) -> _Program:
        if not self._program.is_current():
            self.refresh()
        return self._program

    def _take_(self, program: _Program) -> None:
        self._program = program
        # States that cuts have moved since, by the place of their layer; None if they are lost.
        self._carried: dict[int, Tensor | None] = {}
        for layer in program.layers:
            hold_states_(layer, self)


@final
class _Program:
    """The constants of a model, the memory of its stream, and the operations of one step."""

    def __init__(self, model: Streamed, batch: int, record: bool) -> None:
        parameters = list(model.parameters())
        devices = {parameter.device for parameter in parameters}
        if len(devices) != 1 or parameters[0].is_meta:
            raise SequenceError(f"the parameters are on {sorted(map(str, devices))}, expected one device with values")
        self.batch, self.dtype, (self.device,) = batch, parameters[0].dtype, devices
        self.wide = reduce(torch.promote_types, {parameter.dtype for parameter in parameters}, torch.float32)
        self._form = form_changes()
        self._watched = [tensor for tensor in (*parameters, *model.buffers()) if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._watched]
        self.layers: list[SSMLayer] = []
        self.steppers: list[Stepper] = []
        self.pooled: Tensor | None = None
        self.steps: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        # In this mode, which its tensors need from then on, an operation takes 0.3 µs less.
        self.inference = torch.inference_mode()
        with self.inference, torch.autocast(self.device.type, enabled=False):
            self._build(model)
            self._allocate()
            states = [layer.initial_state(batch) for layer in self.layers]
        self.kinds = [(state.shape, state.dtype) for state in states]
        self._records = record and self.device.type == "cuda" and all(stepper.records for stepper in self.steppers)

    def is_current(self) -> bool:
        """True if no parameter has been written since, as far as torch counts: 2 of 47 µs at 50 parameters."""
        return self._form == form_changes() and self._versions == [tensor._version for tensor in self._watched]

    def __call__(self, x: Tensor) -> Tensor:
        """Make a step; the result is overwritten by the next one."""
        if torch.is_autocast_enabled(self.device.type):
            with torch.autocast(self.device.type, enabled=False):
                return self(x)
        with self.inference:
            if self._records and not torch.cuda.is_current_stream_capturing():
                return self._replay(x)
            return self._step(x)

    def _step(self, x: Tensor) -> Tensor:
        try:
            x = self._encode(x)
        except IndexError:
            self._require_tokens(x)
            raise
        if self._poles is not None:
            self._modes.mul_(self._poles)
        for block in self._blocks:
            x = block(x)
        return self._decode(x)

    def _replay(self, x: Tensor) -> Tensor:
        """Make a step by a recorded graph; the first time it is recorded."""
        if self._graph is None:
            self._graph = self._recorded(x)
        self._input.copy_(x)
        self._graph.replay()
        return self._output

    def _recorded(self, x: Tensor) -> torch.cuda.CUDAGraph:
        """Record a step, after some to warm up that leave the state as it was."""
        with torch.cuda.device(self.device):
            self._input = x.clone()
            kept = [(part, part.clone()) for part in (self.buffer, self.steps) if part is not None]
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UP):
                    self._step(self._input)
            torch.cuda.current_stream().wait_stream(aside)
            for part, value in kept:
                part.copy_(value)
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as those that load data, may use the GPU meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._output = self._step(self._input)
            return graph

    def states(self) -> list[Tensor]:
        """The states of all layers, as their own `step` takes them."""
        return [stepper.read() for stepper in self.steppers]

    def write_(self, states: Sequence[Tensor | None]) -> None:
        """Take the states of all layers; where there is none, it stays as it is."""
        with self.inference:
            for stepper, state in zip(self.steppers, states, strict=True):
                if state is not None:
                    stepper.write_(state.to(self.device))

    def repeat_(self, earlier: _Program, moved: Collection[int]) -> None:
        """Take states bit for bit where an earlier program has the same coordinates, except `moved` ones."""
        with self.inference:
            for place, (now, then) in enumerate(zip(self.steppers, earlier.steppers, strict=False)):
                if place in moved or now.basis is None or then.basis is None or now.basis.device != then.basis.device:
                    continue
                if torch.equal(now.basis, then.basis):
                    now.state.copy_(then.state)

    def load_pooling_(self, pooled: Tensor, steps: Tensor) -> None:
        """Take what a classifier has pooled."""
        assert self.pooled is not None
        assert self.steps is not None
        require_tensor("pooled", pooled, tuple(self.pooled.shape), self.pooled)
        require_tensor("steps", steps, (self.batch,), self.steps)
        with self.inference:
            self.pooled.copy_(pooled)
            self.steps.copy_(steps)

    def checked(self, x: object) -> Tensor:
        """The input as a step reads it, from the host too; a wrong shape, dtype or device is refused."""
        shape, dtype, device = self.reads
        if not isinstance(x, Tensor) or x.shape != shape:
            got = tuple(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise SequenceError(f"x is {got}, expected a tensor of shape {tuple(shape)}, one step of each sequence")
        is_whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        if not is_whole if dtype == torch.int64 else x.dtype != dtype:
            said = "integers" if dtype == torch.int64 else f"{dtype}, the dtype of the parameters"
            raise SequenceError(f"x has dtype {x.dtype}, expected {said}")
        if x.device != device:
            if x.device.type != "cpu":
                raise SequenceError(f"x is on {x.device}, expected {device}, the device of the parameters, or the CPU")
            self._require_tokens(x)
        return x.to(device, dtype)

    def _require_tokens(self, x: Tensor) -> None:
        """Refuse tokens outside the vocabulary."""
        if isinstance(self._encoder, EmbeddingEncoder):
            require_within("tokens", x, 0, self._encoder.embedding.num_embeddings - 1)

    def _build(self, model: Streamed) -> None:
        """Make the operations of one step."""
        self._encoder = model.encoder if isinstance(model, LanguageModel | SequenceClassifier) else None
        self._blocks: list[Map] = []
        self._decode: Map = _same
        if isinstance(model, SSMLayer):
            self._encode = self._reading(model.width, copy=False)
            self._blocks.append(self._stepper(model).step)
            return
        blocks = model if isinstance(model, Blocks) else [model] if isinstance(model, ResidualBlock) else model.blocks
        self._blocks += [self._block(block) for block in blocks]
        if not self._blocks:
            raise SequenceError(f"the {type(model).__name__} has no blocks, expected at least one")
        self._encode = self._encoding(self._encoder)
        if isinstance(model, LanguageModel):
            norm, head = self._norm(model.norm), model.encoder.embedding if model.head is None else model.head
            weight = head.weight.detach().to(self.wide).mT
            weight = weight.contiguous() if weight.numel() <= _SMALL else weight
            self._decode = lambda x: torch.mm(norm(x), weight)
        elif isinstance(model, SequenceClassifier):
            self._decode = self._answering(model)

    def _stepper(self, layer: SSMLayer, *, gain: float = 1.0, scaled: bool = False) -> Stepper:
        check_finite(layer)
        stepper = layer.stepper(self.wide, gain=gain, scaled=scaled)
        self.layers.append(layer)
        self.steppers.append(stepper)
        return stepper

    def _block(self, block: ResidualBlock) -> Map:
        """The block as an operation that writes its output over its input."""
        if isinstance(block, Block):
            return self._gated(block)
        if not isinstance(block, MixerBlock):
            raise SequenceError(f"a block is a {type(block).__name__}, expected a Block or a MixerBlock")
        stepper = self._stepper(block.ssm, scaled=True)
        norm, step = self._norm(block.norm, stepper.scale), stepper.step
        return lambda x: x.add_(step(norm(x)))

    def _gated(self, block: Block) -> Map:
        """x + v ⊙ sigmoid(g) with (v, g) = W gelu(y) + b; gelu(y) = (s + s erf s) / √2 for s = y / √2.

        On one core torch's GELU takes 6.5 µs for a vector of 128, as long as all else up to the gate.
        """
        exact = block.gelu == "exact"
        half = math.sqrt(0.5) if exact else 1.0
        stepper = self._stepper(block.ssm, gain=half, scaled=True)
        norm, step, addmm = self._norm(block.norm, stepper.scale), stepper.step, torch.addmm
        weight = (half * block.gate.weight.double()).to(self.wide).mT.contiguous()
        bias = block.gate.bias.detach().to(self.wide).repeat(self.batch, 1)  # one to expand takes 0.2 µs
        product = torch.empty_like(bias)
        value, gate = product.chunk(2, dim=1)

        def run(x: Tensor) -> Tensor:
            s = step(norm(x))
            s = s.addcmul_(s, s.erf()) if exact else gelu(s, approximate="tanh")
            addmm(bias, s, weight, out=product)
            return x.addcmul_(value, gate.sigmoid_())

        return run

    def _norm(self, module: nn.Module, scale: Tensor | None = None) -> Map:
        """scale ⊙ norm(x) in evaluation mode; with a scale it is a tensor of its own."""
        if isinstance(module, Unchanged):
            return _same if scale is None else partial(torch.mul, scale)
        if isinstance(module, PaddedBatchNorm | PaddedRunningNorm):
            mean, variance = averages_of(module)
            deviation = torch.sqrt(variance.double() + module.eps)
            factor = self._product(1 / deviation, module.weight, scale)
            centre = self._product(-mean / deviation, module.weight, scale)
            shift = centre if module.bias is None else centre + self._product(module.bias, scale)
            return lambda x: torch.addcmul(shift, x, factor)
        if not isinstance(module, StepNorm | StepRMSNorm):
            raise SequenceError(f"a norm is a {type(module).__name__}, expected one of those in compressm.models")
        shape, eps = list(module.normalized_shape), 1e-5 if module.eps is None else module.eps
        one = torch.ones(shape, device=self.device)
        weight = self._product(one, module.weight, scale)
        if isinstance(module, StepNorm):
            bias = self._product(0 * one if module.bias is None else module.bias, scale)
            return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
        if self.device.type == "cuda":
            return lambda x: torch.rms_norm(x, shape, weight, eps)
        # √H x / √(Σ x² + H ε): four operations, where torch makes ten on a CPU.
        width = math.prod(shape)
        factor, least = (
            math.sqrt(width) * weight,
            torch.tensor(math.sqrt(width * eps), dtype=self.wide, device=self.device),
        )
        return lambda x: (x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), least)).mul_(factor)

    def _product(self, first: Tensor, *others: Tensor | None) -> Tensor:
        """The product of the tensors that there are."""
        present = (other.double() for other in others if other is not None)
        return reduce(torch.mul, present, first.double()).to(self.wide)

    def _encoding(self, encoder: nn.Module | None) -> Map:
        if encoder is None:
            return self._reading(self.layers[0].width, copy=True)  # blocks write over their input
        if isinstance(encoder, EmbeddingEncoder):
            self.reads = (torch.Size([self.batch]), torch.int64, self.device)
            return partial(torch.index_select, encoder.embedding.weight.detach().to(self.wide), 0)
        if not isinstance(encoder, LinearEncoder):
            raise SequenceError(f"the encoder is a {type(encoder).__name__}, expected the model's own")
        weight, bias = (part.detach().to(self.wide) for part in (encoder.linear.weight, encoder.linear.bias))
        read, transposed = self._reading(weight.shape[1], copy=False), weight.mT
        return lambda x: torch.addmm(bias, read(x), transposed)

    def _reading(self, width: int, *, copy: bool) -> Map:
        """Read (batch, width) numbers."""
        self.reads, wide = (torch.Size([self.batch, width]), self.dtype, self.device), self.wide
        if wide is self.dtype:
            return torch.clone if copy else _same
        return lambda x: x.to(wide)

    def _answering(self, model: SequenceClassifier) -> Map:
        """The logits of all that a classifier has read so far."""
        model.initial_state(1)  # refuses two towers
        if not isinstance(model.head, nn.Linear):
            raise SequenceError(f"the head is a {type(model.head).__name__}, expected a Linear")
        weight, bias = (part.detach().to(self.wide) for part in (model.head.weight, model.head.bias))
        transposed, update = weight.mT, model.pooling.update
        self.steps = torch.zeros(self.batch, dtype=torch.int64, device=self.device)

        def answer(x: Tensor) -> Tensor:
            assert self.pooled is not None
            assert self.steps is not None
            self.pooled.copy_(update(self.pooled, x, self.steps.add_(1)))
            return torch.addmm(bias, self.pooled, transposed)

        return answer

    def _allocate(self) -> None:
        """Give all states one buffer: first those with fixed poles, which are multiplied by them at once."""
        turned = [stepper for stepper in self.steppers if stepper.poles is not None]
        ordered = turned + [stepper for stepper in self.steppers if stepper.poles is None]
        sizes = [self.batch * stepper.size for stepper in ordered]
        pooled = 0 if self.steps is None else self.batch * self.layers[0].width
        self.buffer = torch.zeros(sum(sizes) + pooled, dtype=self.wide, device=self.device)
        *parts, rest = self.buffer.split([*sizes, pooled])
        for stepper, part in zip(ordered, parts, strict=True):
            stepper.bind_(part.view(self.batch, stepper.size))
        self.pooled = None if self.steps is None else rest.view(self.batch, -1)
        poles = [stepper.poles.expand(self.batch, -1).flatten() for stepper in turned if stepper.poles is not None]
        self._poles = torch.cat(poles) if poles else None
        self._modes = torch.view_as_complex(self.buffer[: sum(sizes[: len(turned)])].view(-1, 2))


def _same(x: Tensor) -> Tensor:
    return x
