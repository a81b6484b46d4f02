"""The stages of a training step, from a batch on disk to new weights.

    stage      what happens                                           thread
    read       the loader yields the next batch                       loader
    request    list the ids that the batch looks up                   reader
    exchange   send ids to the ranks that hold their rows             prefetcher
    prepare    bring the rows into level 0                            prefetcher
    forward    logits and loss                                        training
    backward   gradients; rows of tables are updated                  training
    update     gradients of the network are reduced and applied       training

The first four stages run ahead of the last three, up to a barrier (`Cadence`). `Stages` has a method for each stage. If
the network is on a device, the last three are one function: `build_stages` returns a subclass (`graph_step`). For
several processes, an `Exchange` and a `Reduction` are passed in (for one process both are `SingleProcess`), and a
subclass overrides the methods that differ.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import KeyedJagged
from stratarec.data.loading.loader import Loader, LoaderConfig, run_ahead
from stratarec.embedding import Handle, Prefetcher
from stratarec.embedding.engine import Engine
from stratarec.embedding.slots.memory import Tensors
from stratarec.errors import ConfigError, TrainingError
from stratarec.models import CTRModel
from stratarec.models.base import autocast
from stratarec.models.layers import dropouts, seed_dropout
from stratarec.models.request import Request
from stratarec.progress import timed, traced
from stratarec.recipe.train_section import AverageConfig, TrainConfig
from stratarec.training.steps.loss import Objective
from stratarec.training.steps.state import TrainingState

Item = tuple[Batch, Request]


class StepResult:
    """Loss and global sample count of one training step.

    Parameters
    ----------
    loss : float or callable
        A function returns the loss of a step that is queued on a device; it waits for the step.
    samples : int
    """

    def __init__(self, loss: float | Callable[[], float], samples: int) -> None:
        self._loss, self.samples = loss, samples

    @property
    def is_known(self) -> bool:
        """Whether `loss` does not wait."""
        return not callable(self._loss)

    @property
    def loss(self) -> float:
        """Loss of the step.

        Raises
        ------
        TrainingError
            If it is not finite. Neither this step nor a later one has changed anything.
        """
        if callable(self._loss):
            self._loss = self._loss()
        return self._loss


class Losses:
    """Adds the losses of steps to a run's state. The loss of a step that is queued on a device is read one step later.

    Parameters
    ----------
    state : TrainingState
    """

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self._unread: deque[tuple[int, StepResult]] = deque()

    def count(self, result: StepResult) -> None:
        """Count a step; `TrainingError` if an earlier loss is not finite."""
        self._unread.append((self.state.step, result))
        self.state.count_step(result.samples)
        while len(self._unread) > 1 or (self._unread and result.is_known):
            self._read_first()

    def read(self) -> None:
        """Read all losses, which waits for the device; `TrainingError` if one of them is not finite."""
        while self._unread:
            self._read_first()

    def _read_first(self) -> None:
        step, result = self._unread.popleft()
        self.state.add_loss(step, result.loss)


class Exchange(Protocol):
    """Sends the ids of a batch to the processes that store their rows."""

    def features(self, request: Request, stopped: Callable[[], bool]) -> KeyedJagged:
        """Return the ids of all processes that are looked up in this process's tables.

        Raises `Stopped` if `stopped` returns true while this process waits for others.
        """


class Reduction(Protocol):
    """Combines the gradients of several processes."""

    def reduce(self, weights: Sequence[nn.Parameter]) -> None:
        """Replace the gradient of each weight by its combination over all processes. Called between backward and
        update.
        """

    def norm(self, weights: Sequence[nn.Parameter]) -> Tensor:
        """Return the norm of the combined gradients of all weights in all processes."""


class SingleProcess:
    """`Exchange` and `Reduction` of a single process, which has all rows and gradients."""

    def features(self, request: Request, stopped: Callable[[], bool]) -> KeyedJagged:
        return request.features

    def reduce(self, weights: Sequence[nn.Parameter]) -> None:
        """Leave the gradients as they are."""

    def norm(self, weights: Sequence[nn.Parameter]) -> Tensor:
        return gradient_norm(weights)


class Stages:
    """The stages of a training step, with one method for each.

    Parameters
    ----------
    model : CTRModel
    optimizer : torch.optim.Optimizer
        Optimizer of the network. Tables are updated in `backward`, without this optimizer.
    config : TrainConfig
    schedule : Loader
        Loader of the training batches.
    exchange : Exchange
    reduction : Reduction
    """

    def __init__(
        self,
        model: CTRModel,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        schedule: Loader,
        *,
        exchange: Exchange | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        config.dense.schedule.require_steps()
        self.model, self.optimizer, self.config, self._schedule = model, optimizer, config, schedule
        self._exchange, self._reduction = exchange or SingleProcess(), reduction or SingleProcess()
        labels = model.network.labels
        self.seconds = model.embeddings.engine.seconds
        self.objective = Objective(config.loss_factors(labels), config.class_weights(labels), config.loss)
        self.average = WeightAverage(model.network, config.average)
        self._dropouts = dropouts(model.network)
        self._rate_factor = 1.0
        self.earlier = 0
        """Number of steps before this run or period. Random numbers and averages count them; schedules do not."""
        self._holding = _holding(model) if config.clip_rows else None

    @property
    def refusal(self) -> str:
        """Why steps on a device run without a graph, although they could have one; otherwise empty."""
        return ""

    @property
    def epoch_steps(self) -> int:
        """Number of steps in an epoch."""
        return len(self._schedule)

    def read(self, epoch: int, first: int) -> Iterator[Batch]:
        """Yield the batches of an epoch, beginning with number `first`."""
        return self._schedule.batches(epoch, first)

    @traced("request")
    def request(self, batch: Batch) -> Request:
        """Return the request of a batch: the ids that it looks up."""
        return self.model.request(batch)

    @traced("exchange")
    def exchange(self, request: Request, stopped: Callable[[], bool]) -> KeyedJagged:
        """Return the ids of all processes that are looked up in this process's tables."""
        return self._exchange.features(request, stopped)

    def prepare(self, items: Iterator[Item], *, depth: int, barrier: Callable[[int], bool]) -> Prefetcher[Item]:
        """Return a `Prefetcher` that exchanges the ids of each item and fetches their rows into level 0.

        It works `depth` items ahead of training, but not beyond a barrier.
        """
        engine = self.model.embeddings.engine

        def features(item: Item, stopped: Callable[[], bool]) -> KeyedJagged:
            return self.exchange(item[1], stopped)

        return Prefetcher(engine, items, features, depth=depth, pause_after=barrier, tensors=self.tensors_of_items())

    def tensors_of_items(self) -> Callable[[Item], Tensors] | None:
        """Return a function that is called with each item from now on, and returns the tensors that its ids take along.

        None if steps do not need that.
        """
        return None

    @property
    def rate_factor(self) -> float:
        """Factor on all learning rates, used from the next step on."""
        return self._rate_factor

    @rate_factor.setter
    def rate_factor(self, factor: float) -> None:
        self._rate_factor = self.model.embeddings.engine.step_clock.rate_factor = factor

    def draw(self, step: int, rank: int = 0) -> None:
        """Seed the random numbers of the network for a step on one rank."""
        seed_dropout(self._dropouts, self.config.seed, self.earlier + step, rank)

    @traced("forward")
    def forward(self, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Tensor:
        """Return the scalar loss of a batch."""
        with autocast(self.config.precision, self.model.device):
            logits = self.model(batch, request, prepared)
        return self.loss(logits, batch)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the scalar loss of a batch with these logits."""
        return self.objective.mean(logits, batch)

    @traced("backward")
    def backward(self, loss: Tensor) -> None:
        """Compute all gradients, and update the rows unless the engine keeps their gradients for a later update."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]

    def rate(self, step: int) -> float:
        """Return the learning rate of the network at `step`. It is a float32 number, as in the memory of a device."""
        dense = self.config.dense
        return float(np.float32(dense.learning_rate * dense.schedule.factor(step) * self.rate_factor))

    def norm(self) -> Tensor:
        """Return the norm of the network's gradients, over all processes."""
        return self._reduction.norm(self._weights)

    @property
    def _weights(self) -> list[nn.Parameter]:
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    @traced("update")
    def update(self, step: int, norm: Tensor | None = None) -> float:
        """Update the network at the learning rate of `step`, and return the factor by which row gradients are clipped.

        Parameters
        ----------
        norm : Tensor
            Norm of the network's gradients, if it is already computed.
        """
        weights = self._weights
        self._reduction.reduce(weights)
        scale = 1.0
        if self.config.clip_norm:
            scale = self._clip(weights, self.config.clip_norm, self.norm() if norm is None else norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        self.optimizer.step()
        self.average.update(self.average.share(self.earlier + step))
        return scale

    def _clip(self, weights: Sequence[nn.Parameter], limit: float, norm: Tensor) -> float:
        """Scale the network's gradients down so that their norm is at most `limit`, and return the factor for row
        gradients.

        `norm` is the norm of the network's gradients. If rows are clipped, too, the limit is for the norm of all
        gradients together.
        """
        if self._holding is None:
            nn.utils.clip_grads_with_norm_(weights, limit, norm)
            return 1.0
        norm = torch.hypot(norm, torch.tensor(self._holding.gradient_norm(), dtype=norm.dtype))
        nn.utils.clip_grads_with_norm_(weights, limit, self.model.embeddings.engine.transfers.up(norm))
        # The formula of `clip_grads_with_norm_`.
        return min(limit / (norm.item() + 1e-6), 1.0)

    def figures(self) -> list[dict[str, float]]:
        """Return the `RankFigures` of each process, if there are several; otherwise an empty list."""
        return []

    def train(
        self, step: int, batch: Batch, request: Request | None = None, prepared: Handle | None = None
    ) -> StepResult:
        """Train one batch: run `forward`, `backward` and `update`.

        Raises
        ------
        TrainingError
            If the loss is not finite. Nothing is changed then. A device reports the loss of a step later, when
            `StepResult.loss` is read.
        """
        self.draw(step)
        with timed(self.seconds, "forward"):
            loss = self.forward(batch, request, prepared)
            value = self.finite(loss.item(), step)
        with timed(self.seconds, "backward"):
            self.backward(loss)
        with timed(self.seconds, "update network"):
            scale = self.update(step)
        if self._holding is not None:
            with timed(self.seconds, "backward"), timed(self.seconds, "update rows"):
                self._holding.apply(scale)
        return StepResult(value, batch.size)

    def finite(self, loss: float, step: int) -> float:
        """Return the loss of a step; `TrainingError` if it is not finite."""
        if not math.isfinite(loss):
            refuse_loss(loss, step)
        return loss


def _holding(model: CTRModel) -> Engine:
    """Make a model's engine keep the gradients of rows until they are scaled and applied, and return the engine."""
    engine = model.embeddings.engine
    if not isinstance(engine, Engine):
        raise ConfigError(
            "train.clip_rows needs the gradients of all rows in one process, but these tables are shared among ranks: "
            "set it to false (train.clip_norm then only clips the network), or train in one process"
        )
    engine.hold_updates()
    return engine


def gradient_norm(weights: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of the gradients of these weights."""
    return nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])


def refuse_loss(value: float, step: int) -> NoReturn:
    """Raise `TrainingError` for a loss that is not finite."""
    raise TrainingError(
        f"the loss is {value} at step {step}; lower train.dense.learning_rate or "
        "train.embedding.learning_rate. The last checkpoint is unchanged."
    )


class Pipeline:
    """Runs the stages before `forward` ahead of training.

    Parameters
    ----------
    stages : Stages
    ahead : int
        Number of batches that are read and requested ahead.
    """

    def __init__(self, stages: Stages, ahead: int) -> None:
        self.stages, self._ahead = stages, ahead
        engine = stages.model.embeddings.engine
        # Number of batches prepared ahead of training.
        self.depth = engine.lookahead
        self.epoch_steps = stages.epoch_steps

    def items(self, epoch: int, first: int = 0) -> Iterator[Item]:
        """Yield the batches of an epoch with their requests. Another thread reads them ahead."""
        return run_ahead(lambda: self._requested(epoch, first), self._ahead)

    def _requested(self, epoch: int, first: int) -> Iterator[Item]:
        stages = self.stages
        batches = stages.read(epoch, first)
        while True:
            with timed(stages.seconds, "read"):
                batch = next(batches, None)
                item = None if batch is None else (batch, stages.request(batch))
            if item is None:
                return
            yield item

    def prepared(self, epoch: int, first: int, barrier: Callable[[int], bool]) -> Prefetcher[Item]:
        """Return a `Prefetcher` for the rest of an epoch: a context manager that yields pairs ``(item, prepared)``.

        Parameters
        ----------
        barrier : callable
            Returns whether the i-th item must be trained before later items are prepared.
        """
        return self.stages.prepare(self.items(epoch, first), depth=self.depth, barrier=barrier)


def loader_config(config: TrainConfig) -> LoaderConfig:
    """Return the loader options for training."""
    return LoaderConfig(
        batch_size=config.batch_size,
        seed=config.seed,
        shuffle_row_groups=config.shuffle_row_groups,
        parallel_readers=config.portions,
        unit=config.shuffle,
        expand=not config.deduplicate,
    )


# In the first steps the decay is smaller, step / (step + _START), so that the initial weights are forgotten quickly.
_START = 10


class WeightAverage:
    """Exponential moving average of a network's weights.

    Steps train the weights, and everything else (evaluation, prediction, export) uses the average. The noisier the
    steps, the more an average helps (Polyak and Juditsky 1992; Izmailov et al. 2018, arXiv 1803.05407). Statistics of
    batch normalization are averaged, too; rows of tables are not. In a checkpoint, the network's file contains the
    average, so readers of a run need not know about it.

    Parameters
    ----------
    network : nn.Module
    config : AverageConfig
    """

    def __init__(self, network: nn.Module, config: AverageConfig) -> None:
        self._network, self._decay = network, config.decay
        self.hidden: dict[str, Tensor] = {}
        """The average; while the network itself has the average, the weights. Empty before the first step."""

    @property
    def enabled(self) -> bool:
        """Whether the recipe asks for an average."""
        return self._decay > 0

    @property
    def weights(self) -> dict[str, Tensor]:
        """Tensors that the network has now, by name."""
        return {name: tensor.detach() for name, tensor in self._network.state_dict().items()}

    def share(self, step: int) -> float:
        """Return the share of the weights after `step` in the average: 1 - decay, as a float32 number."""
        return float(np.float32(1 - min(self._decay, step / (step + _START)))) if self._decay else 0.0

    def update(self, share: float | Tensor) -> None:
        """Add the weights after a step to the average: average += share (weights - average).

        `share` may be a number on the weights' device, so that a CUDA graph reads it there.
        """
        if not self._decay:
            return
        weights = self.weights
        if not self.hidden:
            self.hidden = {name: weight.clone() for name, weight in weights.items()}
        averages = [self.hidden[name] for name in weights]
        if isinstance(share, Tensor):
            for average, weight in zip(averages, weights.values(), strict=True):
                average.lerp_(weight, share.to(average.dtype))
        else:
            torch._foreach_lerp_(averages, list(weights.values()), share)

    def take_trees(self) -> None:
        """Replace the trees of a restored average by those of the network, which were fitted again."""
        trees = {name: weight for name, weight in self.weights.items() if ".trees." in name}
        self.hidden |= {name: weight.clone() for name, weight in trees.items() if name in self.hidden}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Make the network use the average inside the context."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def swap(self) -> None:
        """Exchange the network's weights with the stored copy. Does nothing before the first step.

        The first call puts the average into the network, the next call puts the current weights back.
        """
        for name, tensor in self._network.state_dict(keep_vars=True).items() if self.hidden else ():
            tensor.data, self.hidden[name] = self.hidden[name], tensor.data

    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Restore from a checkpoint: `weights` are its weights, and the network must already have its average."""
        # Copied, because tensors of a file may have any address, and the results of matrix products depend on
        # alignment.
        self.hidden = {name: weight.clone().to(self.weights[name].device) for name, weight in weights.items()}
        self.swap()
