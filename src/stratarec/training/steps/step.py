"""The parts of a training step, from a batch on disk to new weights.

    part             what happens                                     thread
    load             the loader yields the next batch                 loader
                     list the ids that the batch looks up             reader
    stage ahead      send ids to the ranks that hold their rows       prefetcher
                     fetch the rows into level 0                      prefetcher
    look up          pool the rows of the batch                       training
    forward          logits and loss                                  training
    backward         gradients of the network and of looked-up rows   training
    update rows      the row optimizer                                training
    update network   the network's optimizer, average of weights      training

The first two parts run ahead of the others, up to a barrier (`Cadence`). `TrainPipeline` has a
method for each part; `TrainPipeline.train` calls those of the training thread. With the network on
a device, the parts of the training thread are one function: `build_pipeline` returns a subclass
(`graph_step`). With several processes, a subclass combines gradients (`training/distributed.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import KeyedJagged
from stratarec.data.loading.loader import Loader, LoaderConfig, run_ahead
from stratarec.distributed.collectives import never
from stratarec.embedding import Handle, Prefetcher
from stratarec.embedding.collection import LookedUp
from stratarec.embedding.engine import Engine
from stratarec.embedding.lookup_engine import LookupEngine
from stratarec.embedding.slots.memory import Tensors
from stratarec.errors import ConfigError, TrainingError
from stratarec.models import CTRModel
from stratarec.models.base import autocast
from stratarec.models.layers import dropouts, seed_dropout
from stratarec.models.request import Request
from stratarec.progress import timed, traced
from stratarec.recipe.train_section import AverageConfig, TrainConfig
from stratarec.training.steps.cadence import Observation
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
        Number of samples of all processes.
    """

    def __init__(self, loss: float | Callable[[], float], samples: int) -> None:
        self._loss = loss
        self.samples = samples

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
    """Adds the losses of steps to a run's state. The loss of a step that is queued on a device is
    read one step later.

    Parameters
    ----------
    state : TrainingState
        State to which losses are added.
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
        """Read all losses, which waits for the device; `TrainingError` unless all are finite."""
        while self._unread:
            self._read_first()

    def _read_first(self) -> None:
        step, result = self._unread.popleft()
        self.state.add_loss(step, result.loss)


class TrainPipeline:
    """A training step, with one method for each of its parts.

    Parameters
    ----------
    model : CTRModel
        Network, and engine with its rows.
    optimizer : torch.optim.Optimizer
        Optimizer of the network. Rows have an optimizer of their own (`LookupEngine.update_rows`).
    config : TrainConfig
        Loss, gradient clipping and other settings of a step.
    loader : Loader
        Loader of the training batches.
    wait_for_kernels : callable
        Called before each update of rows in DRAM; returns when another process has compiled their
        kernels.
    """

    def __init__(
        self,
        model: CTRModel,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        loader: Loader,
        *,
        wait_for_kernels: Callable[[], None] = lambda: None,
    ) -> None:
        config.dense.schedule.require_steps()
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.loader = loader
        self.engine: LookupEngine[Any] = model.embeddings.engine
        if config.clip_rows and not isinstance(self.engine, Engine):
            raise ConfigError(
                "train.clip_rows needs the gradients of all rows in one process, but these tables are "
                "sharded across "
                "ranks: set it to false (train.clip_norm then only clips the "
                "network), or train in one process"
            )
        labels = model.network.labels
        self.seconds = self.engine.seconds
        self.objective = Objective(config.loss_factors(labels), config.class_weights(labels), config.loss)
        self.average = WeightAverage(model.network, config.average)
        self._dropouts = dropouts(model.network)
        self._weights: list[nn.Parameter] = [
            weight for group in optimizer.param_groups for weight in group["params"]
        ]
        self._rate_factor = 1.0
        self._wait_for_kernels = wait_for_kernels
        self.earlier = 0
        """Number of steps before this run or period. Random numbers and averages count them;
        schedules do not.
        """
        self.say: Callable[[str], None] = lambda text: None
        """Called with a line if steps on a device could have a graph but must run without."""

    # Ahead of training

    def load(self, epoch: int, first: int = 0) -> Iterator[Item]:
        """Yield batches of an epoch from number `first` on, with requests; a thread reads ahead."""
        return run_ahead(lambda: self._loaded(epoch, first), self.loader.config.prefetch_batches)

    def _loaded(self, epoch: int, first: int) -> Iterator[Item]:
        batches = self.loader.batches(epoch, first)
        while True:
            with timed(self.seconds, "read"):
                batch = next(batches, None)
                item = None if batch is None else (batch, self.request(batch))
            if item is None:
                return
            yield item

    @traced("request")
    def request(self, batch: Batch) -> Request:
        """Return the request of a batch: the ids that it looks up."""
        return self.model.request(batch)

    def exchange(self, request: Request, stopped: Callable[[], bool]) -> KeyedJagged:
        """Return the ids of all processes that are looked up in this process's tables.

        Raises `WaitAbandoned` if `stopped` returns true while this process waits for others.
        """
        return request.features

    def stage_ahead(
        self,
        items: Iterator[Item],
        barrier: Callable[[int], bool] = lambda place: False,
        *,
        depth: int | None = None,
    ) -> Prefetcher[Item]:
        """Return a context manager that yields ``(item, handle)``: ids are exchanged, and rows
        fetched into level 0.

        Another thread works ahead of training, but not beyond a barrier.

        Parameters
        ----------
        barrier : callable
            Returns whether the i-th item must be trained before later items are staged.
        depth : int
            Number of items that are staged ahead; by default the lookahead of the tables.
        """
        depth = self.engine.lookahead if depth is None else depth
        return Prefetcher(
            self.engine,
            items,
            lambda item, stopped: self.exchange(item[1], stopped),
            depth=depth,
            pause_after=barrier,
            tensors=self.tensors_of_items(),
        )

    def tensors_of_items(self) -> Callable[[Item], Tensors] | None:
        """Return a function from an item to the tensors that are sent to the device with its ids.

        It is called with every item from now on, in order. None if steps send no such tensors.
        """
        return None

    # A step

    def train(
        self, step: int, batch: Batch, request: Request | None = None, handle: Handle | None = None
    ) -> StepResult:
        """Train one batch. If `request` and `handle` are None, they are computed in this step.

        Raises
        ------
        TrainingError
            If the loss is not finite. Nothing is changed then. A device reports the loss of a step
            later, when `StepResult.loss` is read.
        """
        self.draw(step)
        with timed(self.seconds, "forward"):
            rows, request = self.look_up(batch, request, handle)
            loss = self.forward(batch, request, rows)
            value = self.finite(loss.item(), step)
        with timed(self.seconds, "backward"):
            gradients = self.backward(loss, rows)
        with timed(self.seconds, "update network"):
            scale = self.clip(rows.handle, gradients)
        self._wait_for_kernels()
        with timed(self.seconds, "backward"), timed(self.seconds, "update rows"):
            self.engine.update_rows(rows.handle, gradients, scale)
        with timed(self.seconds, "update network"):
            self.update_network(step)
        return StepResult(value, batch.size)

    def draw(self, step: int, rank: int = 0) -> None:
        """Seed the random numbers of the network for a step on one rank."""
        seed_dropout(self._dropouts, self.config.seed, self.earlier + step, rank)

    def look_up(
        self, batch: Batch, request: Request | None, handle: Handle | None
    ) -> tuple[LookedUp[Any], Request]:
        """Look up the rows of a batch, and return them with the request of the batch."""
        request = request or self.request(batch)
        return LookedUp(
            self.engine, handle or self.engine.stage_now(self.exchange(request, never))
        ), request

    @traced("forward")
    def forward(self, batch: Batch, request: Request, rows: LookedUp[Any]) -> Tensor:
        """Return the scalar loss of a batch."""
        with autocast(self.config.precision, self.model.device):
            logits = self.model(batch, request, rows)
        return self.loss(logits, batch)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the scalar loss of a batch with these logits."""
        return self.objective.mean(logits, batch)

    def finite(self, loss: float, step: int) -> float:
        """Return the loss of a step; `TrainingError` if it is not finite."""
        if not math.isfinite(loss):
            refuse_loss(loss, step)
        return loss

    @traced("backward")
    def backward(self, loss: Tensor, rows: LookedUp[Any]) -> list[Tensor]:
        """Compute all gradients of a batch, and return those of the looked-up rows."""
        for weight in self._weights:
            weight.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        return rows.gradients

    def clip(self, handle: Any, gradients: Sequence[Tensor], norm: Tensor | None = None) -> float:
        """Scale the network's gradients down so that their norm is at most `train.clip_norm`;
        return the factor for gradients of rows.

        With `train.clip_rows`, the limit is for the norm of all gradients together. Without, the
        factor is 1.

        Parameters
        ----------
        handle, gradients
            As for `LookupEngine.update_rows`; only `train.clip_rows` needs the gradients.
        norm : Tensor
            Norm of the network's gradients, if it is already computed.
        """
        limit, weights = self.config.clip_norm, self._weights
        if not limit:
            return 1.0
        norm = self.norm() if norm is None else norm
        if not self.config.clip_rows:
            nn.utils.clip_grads_with_norm_(weights, limit, norm)
            return 1.0
        assert isinstance(self.engine, Engine)
        norm = torch.hypot(
            norm, torch.tensor(self.engine.gradient_norm(handle, gradients), dtype=norm.dtype)
        )
        nn.utils.clip_grads_with_norm_(weights, limit, self.engine.transfers.up(norm))
        # The formula of `clip_grads_with_norm_`.
        return min(limit / (norm.item() + 1e-6), 1.0)

    def norm(self) -> Tensor:
        """Return the norm of the network's gradients, over all processes."""
        return gradient_norm(self._weights)

    @property
    def rate_factor(self) -> float:
        """Factor on all learning rates, used from the next step on."""
        return self._rate_factor

    @rate_factor.setter
    def rate_factor(self, factor: float) -> None:
        self._rate_factor = self.engine.step_clock.rate_factor = factor

    def rate(self, step: int) -> float:
        """Return the network's learning rate at `step`, a float32 number as on a device."""
        dense = self.config.dense
        return float(np.float32(dense.learning_rate * dense.schedule.factor(step) * self.rate_factor))

    @traced("update")
    def update_network(self, step: int) -> None:
        """Update the network at the learning rate of `step`."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        self.optimizer.step()
        self.average.update(self.average.share(self.earlier + step))

    def agree(self, observation: Observation) -> Observation:
        """Return an observation of clock and stop signal that is equal in all processes."""
        return observation

    def figures(self) -> list[dict[str, float]]:
        """Return the `RankFigures` of each process; an empty list for a single process."""
        return []


def gradient_norm(weights: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of the gradients of these weights."""
    return nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])


def refuse_loss(value: float, step: int) -> NoReturn:
    """Raise `TrainingError` for a loss that is not finite."""
    raise TrainingError(
        f"the loss is {value} at step {step}; lower train.dense.learning_rate or "
        "train.embedding.learning_rate. The last checkpoint is unchanged."
    )


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


# In the first steps the decay is smaller, step / (step + _START), so that the initial weights are
# forgotten quickly.
_START = 10


class WeightAverage:
    """Exponential moving average of a network's weights.

    Steps train the weights, and everything else (evaluation, prediction, export) uses the average.
    The noisier the steps, the more an average helps (Polyak and Juditsky 1992; Izmailov et al.
    2018, arXiv 1803.05407). Statistics of batch normalization are averaged, too; rows of tables are
    not. In a checkpoint, the network's file contains the average, so readers of a run need not know
    about it.

    Parameters
    ----------
    network : nn.Module
        Network whose weights are averaged.
    config : AverageConfig
        Decay of the average; with 0 there is no average.
    """

    def __init__(self, network: nn.Module, config: AverageConfig) -> None:
        self._network = network
        self._decay = config.decay
        self.hidden: dict[str, Tensor] = {}
        """The average; while the network itself has the average, the weights. Empty before the
        first step.
        """

    @property
    def enabled(self) -> bool:
        """Whether the recipe asks for an average."""
        return self._decay > 0

    @property
    def weights(self) -> dict[str, Tensor]:
        """Tensors that the network has now, by name."""
        return {name: tensor.detach() for name, tensor in self._network.state_dict().items()}

    def share(self, step: int) -> float:
        """Return the weights' share in the average after `step` (1 - decay) as a float32 number."""
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
        """Copy the trees of the network, which were fitted again, into a restored average."""
        trees = {name: weight for name, weight in self.weights.items() if ".trees." in name}
        self.hidden |= {name: weight.clone() for name, weight in trees.items() if name in self.hidden}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Use the average as the network's weights inside the context."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def swap(self) -> None:
        """Exchange the network's weights with the stored copy. Does nothing before the first step.

        The first call puts the average into the network, the next call puts the current weights
        back.
        """
        for name, tensor in self._network.state_dict(keep_vars=True).items() if self.hidden else ():
            tensor.data, self.hidden[name] = self.hidden[name], tensor.data

    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Restore from a checkpoint: `weights` are its weights, and the network must already have
        its average.
        """
        # Copied, because tensors of a file may have any address, and the results of matrix products
        # depend on alignment.
        self.hidden = {
            name: weight.clone().to(self.weights[name].device) for name, weight in weights.items()
        }
        self.swap()
