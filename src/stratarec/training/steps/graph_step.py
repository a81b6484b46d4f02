"""A training step with the network on a device, as one function; on an NVIDIA GPU, as one CUDA
graph.

    forward          rows of the batch are pooled; logits and loss
    backward         gradients of rows and weights
    update network   fused optimizer
    update rows      row optimizer

The host packs the inputs of a step (slots of the looked-up rows, dense features, labels, learning
rates) into one buffer, starts one copy and replays the graph. If rows are in GPU memory, that
happens while earlier batches train. The host reads the loss of a step after it has queued the next
one. The device decides whether a step changes anything (`_alive`): after a loss that is not finite
no step does, so the error that the host raises one step later still describes unchanged weights.

A graph repeats its operations with the same addresses, sizes and numbers. So nothing in `_train`
may depend on the batch except the contents of the buffers. Networks that queue other operations for
each batch run the same function without a graph. The first batch of a shape does, too: the last
batch of an epoch is often smaller.

Steps that need a number of the device wait for it: if rows are in host memory, their gradients;
with `clip_rows`, the norm of all gradients; with an optimizer of torch that cannot be told on the
device to do nothing, the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from stratarec.batch.batch import Batch
from stratarec.data.loading.loader import Loader
from stratarec.embedding import Handle
from stratarec.embedding.engine import Engine
from stratarec.embedding.lookup_engine import StagedBatch
from stratarec.embedding.packed_batch import BatchBuffer
from stratarec.embedding.rings import Ring, sequence_room
from stratarec.embedding.slots.memory import Tensors
from stratarec.kernels.row_index import RowIndex
from stratarec.kernels.runtime.accelerator import driver_of
from stratarec.models.base import CTRModel, autocast
from stratarec.models.dense_optimizers import DENSE_OPTIMIZERS
from stratarec.models.layers import Dropout
from stratarec.models.request import Request
from stratarec.progress import timed
from stratarec.recipe.train_section import TrainConfig
from stratarec.training.steps.loss import Targets
from stratarec.training.steps.step import Item, StepResult, TrainPipeline

# Layers that draw random numbers on the host, or that change a state at each call, warm-up
# included.
_CHANGING = (Dropout, nn.modules.batchnorm._BatchNorm)
_WARM_UP = 3
_MOST_GRAPHS = 8
_LOSSES = 4


def can_be_captured(network: nn.Module) -> bool:
    """Whether a network queues the same kernels for all batches of a shape."""
    return bool(network.captured) and not any(isinstance(layer, _CHANGING) for layer in network.modules())


@dataclass(frozen=True)
class StepInputs:
    """A batch on the device of the network.

    Parameters
    ----------
    request : Request
        Its lists are on the device. A graph does not read its other tensors, which are on the host.
    buffer : BatchBuffer
        Contains the following tensors and, if rows are on the device, the staged bags of each table
        group.
    numbers : Tensor
        ``[5]`` float32: learning rate, step size and inverse square root of the second bias
        correction of rows; learning rate of the network; share of the weights in their average.
    dense : Tensor
        ``[B, F_dense]`` float32.
    targets : Targets
        Labels and weights of the samples.
    rows : tuple of Tensor
        Looked-up rows, if they are not pooled in the step.
    """

    request: Request
    buffer: BatchBuffer
    numbers: Tensor
    dense: Tensor
    targets: Targets
    rows: tuple[Tensor, ...]

    @classmethod
    def of(cls, buffer: BatchBuffer, request: Request, rows: tuple[Tensor, ...]) -> StepInputs:
        """Return the batch in `buffer`, whose tensors are in the order of `GraphStep.tensors`."""
        targets = len(Targets._fields)
        tensors: Any = buffer.tensors
        numbers, dense, *others = tensors
        parts = others[targets:]
        lists = [
            None if parts[at] is None else RowIndex(*parts[at : at + 3]) for at in range(0, len(parts), 3)
        ]
        request = replace(request, lists=tuple(lists))
        return cls(request, buffer, numbers, dense, Targets(*others[:targets]), rows)

    @property
    def form(self) -> Any:
        """Shape of the batch; batches of equal form can use one graph."""
        rows = tuple(part.shape for part in self.rows)
        return self.buffer.layout, self.request.shared, self.request.features.batch_size, rows

    def take(self, other: StepInputs) -> None:
        """Copy a batch of equal form into the memory of this one."""
        self.buffer.take(other.buffer)
        for mine, part in zip(self.rows, other.rows, strict=True):
            mine.copy_(part)


def copied(inputs: StepInputs) -> StepInputs:
    """Return a copy of a batch in new memory."""
    return StepInputs.of(
        inputs.buffer.copied(), inputs.request, tuple(part.clone() for part in inputs.rows)
    )


class Outcome(NamedTuple):
    """Loss of a batch, and the gradients of its looked-up rows unless these are updated already."""

    loss: Tensor
    gradients: Sequence[Tensor] = ()


Work = Callable[[StepInputs], Outcome]
"""Function of a batch that a graph can repeat."""


class GraphStep:
    """Trains batches of a model whose network is on a device.

    Parameters
    ----------
    pipeline : TrainPipeline
        Model, loss, optimizers and their settings.
    """

    def __init__(self, pipeline: TrainPipeline) -> None:
        self._pipeline = pipeline
        self._model = pipeline.model
        self._optimizer = pipeline.optimizer
        self._network = pipeline.model.network
        self._config = pipeline.config
        engine = pipeline.model.embeddings.engine
        assert isinstance(engine, Engine)
        self._engine: Engine = engine
        self._clips_rows = self._config.clip_rows
        self._refuses = DENSE_OPTIMIZERS[self._config.dense.kind].skips
        self._is_queued = engine.queued and self._refuses and not self._clips_rows
        self._device = self._model.device
        driver = driver_of(self._device)
        self._driver = driver
        self._ring = Ring(driver, (driver.current(),))
        self._weights = [weight for weight in self._network.parameters() if weight.requires_grad]
        self._alive = torch.ones(1, dtype=torch.int32, device=self._device)
        self._refused = torch.zeros((), device=self._device)
        self._loss = torch.zeros((), device=self._device)
        self._losses = driver.pinned(4 * _LOSSES).view(torch.float32)
        self._results: list[StepResult | None] = [None] * _LOSSES
        self._queued = 0
        self._captures = self._device.type == "cuda" and can_be_captured(self._network)
        self._graphs: dict[Any, _Graph | None] = {}

    def train(
        self, step: int, batch: Batch, request: Request | None = None, handle: Handle | None = None
    ) -> StepResult:
        """Train one batch as `TrainPipeline.train` does."""
        pipeline, engine, seconds = self._pipeline, self._engine, self._engine.seconds
        pipeline.draw(step)
        request = request or self._model.request(batch)
        if handle is None:
            tensors = self.tensors(step, batch, request) if self.packs_all else ()
            handle = engine.stage_now(request.features, tensors)
        assert isinstance(handle, StagedBatch)
        rows: tuple[Tensor, ...] = ()
        counts: tuple[int, ...] = ()
        with timed(seconds, "forward"):
            if self._is_queued:
                engine.begin(handle)
            else:
                with timed(seconds, "look up"):
                    rows = engine.look_up(handle)
                    counts = tuple(map(len, rows))
                    rows = self._with_room(tuple(map(engine.level0.to_network, rows)))
        try:
            with timed(seconds, "forward"):
                buffer = self._buffer(step, batch, request, handle)
                inputs = StepInputs.of(
                    buffer if self._is_queued else buffer.without_groups(), request, rows
                )
            outcome = self._run(inputs, self._train if self._is_queued else self._differentiate)
            if self._is_queued:
                # The device changes rows from now on: an interrupt before the step is counted
                # leaves them incomplete.
                with engine.health.changing("an optimizer step"):
                    engine.end(handle)
                self._set_rates(pipeline.rate(step))
                return self._result(step, batch.size)
            if buffer is not handle.packed:
                buffer.release()
            return StepResult(self._finish(step, handle, outcome, counts), batch.size)
        except BaseException:
            handle.release()
            raise

    # Packing

    @property
    def packs_all(self) -> bool:
        """Whether `tensors` are in the buffer of the batch's slots, because rows are trained in the
        device's memory.
        """
        return self._engine.queued

    def tensors(self, step: int, batch: Batch, request: Request) -> list[Tensor | None]:
        """Return the tensors that the device needs in a step in addition to the batch's ids."""
        parts = [self._numbers(step, step), batch.dense, *self._pipeline.objective.targets(batch)]
        for index in request.lists:
            parts += index or (None, None, None)
        return parts

    def _numbers(self, step: int, rows_step: int) -> Tensor:
        """Return `StepInputs.numbers` on the host; `rows_step` is the row optimizer's count."""
        pipeline = self._pipeline
        share = pipeline.average.share(pipeline.earlier + step)
        numbers = (*self._engine.row_numbers(rows_step)[0], pipeline.rate(step), share)
        return torch.tensor(numbers, dtype=torch.float32)

    def _buffer(self, step: int, batch: Batch, request: Request, handle: StagedBatch) -> BatchBuffer:
        """Return the buffer of a batch, whose copy to the device has begun."""
        if not self.packs_all:
            buffer = BatchBuffer.pack(self._ring, (), self.tensors(step, batch, request))
            buffer.arrive()
            return buffer
        packed = handle.packed
        assert isinstance(packed, BatchBuffer)
        packed.arrive()
        # A batch is packed with the numbers that are expected for its step. A factor on the
        # learning rate that was set meanwhile, or another number of steps of the rows, needs
        # another copy.
        numbers = self._numbers(step, self._engine.step)
        sent = packed.host_tensors[0]
        on_device = packed.tensors[0]
        if not torch.equal(numbers, cast("Tensor", sent)):
            cast("Tensor", on_device).copy_(self._engine.transfers.up(numbers))
        return packed

    @staticmethod
    def _with_room(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Add rows of zeros to rows of sequences in host memory, as memories of a device do."""
        pooled, *sequences = rows
        pads = [
            nn.functional.pad(part, (0, 0, 0, sequence_room(len(part)) - len(part))) for part in sequences
        ]
        return pooled, *pads

    # Queueing

    def _run(self, inputs: StepInputs, work: Work) -> Outcome:
        """Queue `work` for a batch, in a graph if its form was seen before; return its result."""
        form = inputs.form if self._captures else None
        if form is None or (form not in self._graphs and len(self._graphs) == _MOST_GRAPHS):
            return work(inputs)
        if form not in self._graphs:
            self._graphs[form] = None
            return work(inputs)
        graph = self._graphs[form]
        if graph is None or graph.has_moved():
            try:
                graph = self._graphs[form] = self._captured(inputs, work)
            except RuntimeError as error:
                # Too little memory, or an operation that a graph cannot contain.
                self._captures = False
                self._graphs.clear()
                torch.cuda.empty_cache()
                one_by_one = "a graph of the step, so the host queues its operations one by one"
                if isinstance(error, torch.OutOfMemoryError):
                    change = "lower train.batch_size or memory.hbm"
                    self._pipeline.say(f"{self._device} has too little memory for {one_by_one}: {change}")
                else:
                    reason = str(error).strip().partition("\n")[0]
                    self._pipeline.say(f"{self._device} cannot record {one_by_one}: {reason}")
                return work(inputs)
        with timed(self._engine.seconds, "replay"), self._engine.health.changing("an optimizer step"):
            graph.replay(inputs)
        return graph.outcome

    def _captured(self, inputs: StepInputs, work: Work) -> _Graph:
        alive = self._alive.clone()
        # Warm-up and capture change nothing.
        self._alive.zero_()
        try:
            return _Graph(inputs, work, self._weights, next(filter(None, self._graphs.values()), None))
        finally:
            self._alive.copy_(alive)

    # The step

    def _train(self, inputs: StepInputs) -> Outcome:
        """Queue a step, and return its loss. Nothing waits for the device."""
        engine, seconds = self._engine, self._engine.seconds
        with timed(seconds, "forward"), timed(seconds, "look up"):
            rows = engine.pool_staged(inputs.buffer.staged, inputs.request.features.batch_size)
        loss, gradients = self._differentiate(replace(inputs, rows=rows))
        with engine.health.changing("an optimizer step"):
            self._alive *= torch.isfinite(loss).to(torch.int32)
            with timed(seconds, "update network"):
                self._update_network(inputs.numbers)
            with timed(seconds, "backward"), timed(seconds, "update rows"):
                engine.queue_updates(inputs.buffer.staged, gradients, inputs.numbers, self._alive)
        self._loss.copy_(loss)
        return Outcome(loss)

    def _differentiate(self, inputs: StepInputs) -> Outcome:
        """Compute the loss, and the gradients of weights and of looked-up rows."""
        model = self._model
        network = self._network
        size = len(inputs.dense)
        seconds = self._engine.seconds
        leaves = [part.detach().requires_grad_() for part in inputs.rows]
        with timed(seconds, "forward"):
            output = model.embeddings.named(inputs.request.features, *leaves)
            vectors = model.arrange(output, inputs.request, size, network.sequence_keys)
            with autocast(self._config.precision, self._device, cached=False):
                logits = network(inputs.dense, *vectors)
            loss = self._pipeline.objective.of_targets(logits, inputs.targets)
        with timed(seconds, "backward"):
            for weight in self._weights:
                weight.grad = None
            torch.autograd.backward(loss, inputs=[*leaves, *self._weights])
        # Kernels of rows read contiguous float32. Under autocast gradients are bfloat16.
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.float() for leaf in leaves]
        return Outcome(loss.detach(), [gradient.contiguous() for gradient in gradients])

    def _update_network(self, numbers: Tensor) -> None:
        """Apply the fused optimizer, which reads learning rate and `_alive` on the device."""
        optimizer: Any = self._optimizer
        self._refused.copy_((1 - self._alive).view(()))
        optimizer.found_inf = self._refused
        optimizer.grad_scale = None
        if self._config.clip_norm:
            nn.utils.clip_grads_with_norm_(self._weights, self._config.clip_norm, self._pipeline.norm())
        for group in optimizer.param_groups:
            group["lr"] = numbers[3]
            group["capturable"] = self._device.type == "cuda"
        optimizer.step()
        self._pipeline.average.update(numbers[4] * self._alive.view(()))

    def _set_rates(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    # Results

    def _result(self, step: int, samples: int) -> StepResult:
        """Start to copy the loss of a queued step to the host."""
        place = self._queued % _LOSSES
        self._queued += 1
        earlier = self._results[place]
        if earlier is not None:
            _ = earlier.loss  # its number is overwritten
        self._losses[place].copy_(self._loss, non_blocking=True)
        done = self._driver.current().record_event()

        def read() -> float:
            done.synchronize()
            return self._pipeline.finite(float(self._losses[place]), step)

        result = self._results[place] = StepResult(read, samples)
        return result

    def _finish(self, step: int, handle: StagedBatch, outcome: Outcome, counts: Sequence[int]) -> float:
        """Wait for loss and gradients of rows, update network and rows, and return the loss."""
        pipeline, engine, transfers = self._pipeline, self._engine, self._engine.transfers
        with timed(engine.seconds, "backward"):
            on_host = transfers.down(outcome.loss)
            # Without the room behind the rows of sequence features.
            gradients = [part[:count] for part, count in zip(outcome.gradients, counts, strict=True)]
            rows = [*map(engine.level0.from_network, gradients)]
            norm = transfers.down(pipeline.norm()) if self._clips_rows else None
            transfers.wait()
            value = pipeline.finite(float(on_host), step)
        with timed(engine.seconds, "update network"):
            scale = pipeline.clip(handle, rows, norm)
            pipeline.update_network(step)
        # The host updates rows while the device updates the network.
        with timed(engine.seconds, "backward"), timed(engine.seconds, "update rows"):
            engine.update_rows(handle, rows, scale)
        return value


class DevicePipeline(TrainPipeline):
    """`TrainPipeline` with the network or rows on a device, in one process."""

    def __init__(
        self, model: CTRModel, optimizer: torch.optim.Optimizer, config: TrainConfig, loader: Loader
    ) -> None:
        super().__init__(model, optimizer, config, loader)
        self._graph_step = GraphStep(self)

    def train(
        self, step: int, batch: Batch, request: Request | None = None, handle: Handle | None = None
    ) -> StepResult:
        """Train one batch by `GraphStep.train`."""
        return self._graph_step.train(step, batch, request, handle)

    def tensors_of_items(self) -> Callable[[Item], Tensors] | None:
        step, steps = self._graph_step, count(self.model.embeddings.engine.step)
        return (lambda item: step.tensors(next(steps), *item)) if step.packs_all else None


def build_pipeline(
    model: CTRModel,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    loader: Loader,
    *,
    wait_for_kernels: Callable[[], None] = lambda: None,
) -> TrainPipeline:
    """Return the pipeline of one process. Parameters are those of `TrainPipeline`."""
    if model.on_device:
        return DevicePipeline(model, optimizer, config, loader)
    return TrainPipeline(model, optimizer, config, loader, wait_for_kernels=wait_for_kernels)


class _Graph:
    """CUDA graph of a function of a batch, with the buffers that it reads.

    Parameters
    ----------
    inputs : StepInputs
        A batch of the form for which the graph is captured.
    work : callable
        Function of a `StepInputs`, which is captured.
    weights : sequence of Tensor
        Weights whose memory the graph reads.
    other : _Graph or None
        Another graph, whose memory pool this graph shares: replays never overlap.
    """

    def __init__(
        self, inputs: StepInputs, work: Work, weights: Sequence[Tensor], other: _Graph | None
    ) -> None:
        self._weights = weights
        self._addresses = [weight.data_ptr() for weight in weights]
        self.inputs = copied(inputs)
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                work(self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._pool: Any = torch.cuda.graph_pool_handle() if other is None else other._pool
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as the prefetcher's, use the device meanwhile.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            self.outcome = work(self.inputs)
        self._gradients = [weight.grad for weight in weights]

    def has_moved(self) -> bool:
        """Whether weights are no longer in the memory that the graph reads."""
        return [weight.data_ptr() for weight in self._weights] != self._addresses

    def replay(self, inputs: StepInputs) -> None:
        """Queue the graph for a batch of the same form."""
        self.inputs.take(inputs)
        self._graph.replay()
        # A batch without a graph has replaced them.
        for weight, gradient in zip(self._weights, self._gradients, strict=True):
            weight.grad = gradient
