"""The embedding collection: an `nn.Module` that replaces TorchRec's `EmbeddingBagCollection`.

This module contains only the `nn.Module` and autograd; `Engine` reads and changes rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor, nn

from stratarec.batch.jagged import JaggedTensor, KeyedJagged
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.engine import Engine
from stratarec.embedding.lookup_engine import AnyHandle, Handle, LookupEngine, StagedBatch
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.tiers import TierConfig
from stratarec.errors import ConfigError
from stratarec.progress import timed


@dataclass(frozen=True, kw_only=True)
class Embeddings:
    """Result of a lookup.

    Parameters
    ----------
    pooled : Tensor
        ``[B, sum of dims]`` float32: the pooled features, concatenated in the order of
        `pooled_keys`.
    pooled_keys : tuple of str
        Names of the pooled features: in the order of the tables, and in a table in the order of its
        `feature_names`.
    dims : tuple of int
        Width of each pooled feature.
    sequences : mapping of str to JaggedTensor
        Rows of each unpooled feature: values ``[N, D]``, offsets ``[B + 1]``.
    """

    pooled: Tensor
    pooled_keys: tuple[str, ...]
    dims: tuple[int, ...]
    sequences: Mapping[str, JaggedTensor]

    def __getitem__(self, key: str) -> Tensor:
        """Return a ``[B, D]`` view of the pooled feature `key`."""
        if key not in self.pooled_keys:
            raise ConfigError(f"no pooled feature {key!r}; there are {', '.join(self.pooled_keys)}")
        place = self.pooled_keys.index(key)
        first = sum(self.dims[:place])
        return self.pooled[:, first : first + self.dims[place]]


class LookedUp(Generic[AnyHandle]):
    """Rows of a staged batch, looked up for a training loop that updates them itself.

    The loop passes the object to `EmbeddingCollection.forward` in place of the batch, and
    `gradients` to `LookupEngine.update_rows` after the backward pass.

    Parameters
    ----------
    engine : LookupEngine
        Engine that staged the batch.
    handle : handle
        The batch.
    """

    def __init__(self, engine: LookupEngine[AnyHandle], handle: AnyHandle) -> None:
        self.handle = handle
        self._level0 = engine.level0
        with timed(engine.seconds, "look up"):
            rows = engine.look_up(handle)
        self.outputs = tuple(self._level0.to_network(part).requires_grad_() for part in rows)
        """Outputs of `LookupEngine.look_up`, as leaves of the autograd graph."""

    @property
    def features(self) -> KeyedJagged:
        """Features of the batch."""
        return self.handle.features

    def release(self) -> None:
        """Release the rows: there will be no update of them."""
        self.handle.release()

    def release_unused(self) -> None:
        """Do nothing, because the batch was looked up."""

    @property
    def gradients(self) -> list[Tensor]:
        """Gradients of `outputs` after a backward pass, as for `LookupEngine.update_rows`."""
        grads = (torch.zeros_like(part) if part.grad is None else part.grad for part in self.outputs)
        return [self._level0.from_network(grad.float().contiguous()) for grad in grads]


class EmbeddingCollection(nn.Module, Generic[AnyHandle]):
    """Embedding tables that train themselves: the module that models use, with any engine.

    It has the methods that a model and a custom training loop need. Memory use, the factor on the
    learning rate and other details are available from `engine`.

    Parameters
    ----------
    engine : LookupEngine
        Stages, looks up and trains batches.
    """

    def __init__(self, engine: LookupEngine[AnyHandle]) -> None:
        super().__init__()
        self.engine = engine
        # Autograd runs the backward pass of a function only if one of its inputs requires a
        # gradient.
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def tables(self) -> tuple[EmbeddingBagConfig, ...]:
        """Configurations of the tables, in the order in which they were passed."""
        return self.engine.configs

    @property
    def pooled_keys(self) -> tuple[str, ...]:
        """Pooled features, in the order of the output."""
        return self.engine.pooled_keys

    @property
    def dims(self) -> tuple[int, ...]:
        """Width of each pooled feature."""
        return self.engine.dims

    @property
    def step(self) -> int:
        """Number of steps of the row optimizer so far."""
        return self.engine.step

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next backward pass."""
        return self.engine.step_clock.learning_rate

    def stage(self, features: KeyedJagged) -> AnyHandle:
        """Bring the rows of a batch into level 0; pass the returned handle to `forward` once, in
        order.

        Parameters
        ----------
        features : KeyedJagged
            Ids of the batch; all features of the tables, and possibly others.

        Raises
        ------
        ConfigError, TrainingError, StorageError
            The batch is then ignored, and rows are unchanged unless the message says otherwise.

        Examples
        --------
        >>> handle = collection.stage(features)
        >>> collection(handle)["item"].sum().backward()
        """
        return self.engine.stage(features)

    def forward(self, features: KeyedJagged | AnyHandle | LookedUp[AnyHandle]) -> Embeddings:
        """Look up every feature of the collection.

        Parameters
        ----------
        features : KeyedJagged, handle or LookedUp
            Ids of the batch, which may also contain other features, in any order; or the handle
            that `stage` returned for them. A backward pass updates the rows, except those of a
            `LookedUp`.

        Examples
        --------
        >>> with torch.no_grad():  # reads rows and trains none
        ...     embeddings = collection(features)
        >>> embeddings.pooled.shape, embeddings["item"].shape
        (torch.Size([2, 8]), torch.Size([2, 8]))
        """
        if isinstance(features, LookedUp):
            return self.named(features.features, *features.outputs)
        training, engine = torch.is_grad_enabled(), self.engine
        if not isinstance(features, KeyedJagged):
            handle, features = features, features.features
        elif training:
            handle = engine.stage_now(features)
        else:
            return self.named(features, *map(engine.level0.to_network, engine.read(features)))
        inputs = (self._anchor, features.weights, handle, engine)
        outputs = FusedLookup.apply(*inputs)  # type: ignore[no-untyped-call]
        # Without gradients, no backward pass releases the rows.
        if not training:
            handle.release()
        return self.named(features, *outputs)

    def named(self, features: KeyedJagged, pooled: Tensor, *rows: Tensor) -> Embeddings:
        """Name the outputs of `LookupEngine.look_up`.

        Parameters
        ----------
        features : KeyedJagged
            Batch that was looked up.
        pooled : Tensor
            ``[B, sum of dims]`` pooled output.
        *rows : Tensor
            Rows of each sequence feature, in `LookupEngine.row_order`.
        """
        engine = self.engine
        values, size, sequences = dict(zip(engine.row_order, rows, strict=True)), features.batch_size, {}
        for key in engine.sequence_keys:
            place = features.keys.index(key)
            # Offsets of the feature start at 0, because its rows are a separate tensor.
            offsets = features.bag_offsets()[place * size : (place + 1) * size + 1]
            sequences[key] = JaggedTensor(values=values[key], offsets=offsets - offsets[0])
        return Embeddings(
            pooled=pooled, pooled_keys=engine.pooled_keys, dims=engine.dims, sequences=sequences
        )

    def table(self, name: str) -> dict[str, Tensor]:
        """Return ``weight`` ``[R, D]`` and optimizer state of the table `name`.

        If `RowOptimizerConfig.rows` is ``all``, ``clock`` is the number of steps that each row has
        taken. For a table that is completely in level 0 these are views: writing them changes the
        model. For other tables they are copies, which take as much memory as the complete table in
        float32; use `rows` to read a part.

        Examples
        --------
        >>> collection.table("item")["weight"].shape
        torch.Size([1000, 8])
        """
        return self.engine.tables_of(name).table(name)

    def rows(self, name: str, first: int, last: int) -> dict[str, Tensor]:
        """Return ``weight`` and optimizer state of rows ``first:last`` of the table `name`, in
        DRAM, all steps applied.

        Examples
        --------
        >>> collection.rows("item", 3, 5)["weight"].shape
        torch.Size([2, 8])
        """
        return {
            part: rows.cpu() for part, rows in self.engine.tables_of(name).part(name, first, last).items()
        }

    def save(self, directory: Path, previous: Path | None = None) -> dict[str, Any]:
        """Write all tables into the new directory `directory`; return the JSON manifest for `load`.

        Parameters
        ----------
        directory : Path
            New directory, which must not exist.
        previous : Path, optional
            Directory of the last save or load of this collection. Only rows that changed since then
            are written, and the files of `previous` are linked.

        Raises
        ------
        StorageError
            If a file cannot be written; `previous` is unchanged.
        TrainingError
            If a batch is staged and not looked up, or rows are incomplete.

        Examples
        --------
        >>> from pathlib import Path
        >>> manifest = collection.save(Path("tables"))
        """
        return self.engine.save(directory, previous)

    def load(self, directory: Path, manifest: Mapping[str, Any]) -> str:
        """Load all tables that `save` wrote. Tiers, caches and codecs may differ. Earlier handles
        become invalid.

        Parameters
        ----------
        directory : Path
            Directory that `save` wrote.
        manifest : mapping
            Result of `save`.

        Returns
        -------
        str
            Reason why further training may give other bits than the saved run would have given;
            empty if there is none.

        Raises
        ------
        CheckpointError
            If a file is missing or damaged, or the tables differ.

        Examples
        --------
        >>> from pathlib import Path
        >>> manifest = collection.save(Path("saved"))
        >>> other = TieredEmbeddingBagCollection([table], optimizer=RowOptimizerConfig(kind="sgd"))
        >>> other.load(Path("saved"), manifest)
        ''
        >>> torch.equal(other.table("item")["weight"], collection.table("item")["weight"])
        True
        """
        return self.engine.load(directory, manifest)

    def close(self) -> None:
        """Release the files and threads of stores; any further use of the collection is an error.

        Examples
        --------
        >>> other = TieredEmbeddingBagCollection([table])
        >>> other.close()
        """
        self.engine.close()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if not self.engine.resident:
            raise ConfigError(
                "state_dict requires that all tables are completely in level 0; call save and load"
            )
        for name, view in self.engine.named_views():
            destination[prefix + name] = view
        destination[prefix + "step"] = torch.tensor(self.step)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        expected = dict(self.engine.named_views())
        for name, view in expected.items():
            value = state_dict.get(prefix + name)
            if value is None:
                missing_keys.append(prefix + name)
            elif value.shape != view.shape:
                error_msgs.append(f"{prefix + name} is {tuple(value.shape)}, expected {tuple(view.shape)}")
            else:
                view.copy_(value)
        if prefix + "step" in state_dict:
            clock = self.engine.step_clock
            clock.load_position(int(state_dict[prefix + "step"]), clock.earlier, clock.changes)
        else:
            missing_keys.append(prefix + "step")
        valid_keys = {prefix + name for name in (*expected, "step")}
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in valid_keys]

    def extra_repr(self) -> str:
        rows = sum(table.num_embeddings for table in self.tables)
        return f"{len(self.tables)} tables, {rows:,} rows, {self.engine.optimizer.kind}, {self.engine.health.state}"


class TieredEmbeddingBagCollection(EmbeddingCollection[StagedBatch]):
    """Embedding tables that train themselves: the backward pass applies a fused row optimizer in
    place.

    Dimensions: F features, B samples, L ids in a bag, D width. Bag (f, b) of table t gives ::

        pooled[b, f] = sum over l of weights[f, b, l] * table_t[ids[f, b, l]]

    or for mean pooling this sum divided by L.

    A sequence feature gives ``table_t[ids[f, b, l]]`` for every l. With two features over three
    samples::

        feature    sample 0    sample 1    sample 2
        "color"    [4]         []          [4, 1]        -> [3, D]; sample 1 is zeros
        "shape"    [0, 2]      [2]         [2]           -> [3, D]

    Tables are not `nn.Parameter`: dense optimizers do not see them. Each backward pass is one
    optimizer step: the gradients of a row, over all features that share its table, are summed in
    ascending order of lookup position and applied once. Two forward passes before two backward
    passes are two steps. Results have the same bits with any number of threads. If each step
    changes all rows (`RowOptimizerConfig.rows`), the changes of rows that a batch lacks are delayed
    until these rows are read.

    Parameters
    ----------
    tables : sequence of EmbeddingBagConfig
        Tables of equal width share memory and kernel calls.
    optimizer : RowOptimizerConfig
        Row optimizer, with its learning-rate schedule over the steps of this module.
    seed : int
        Initial weights are a function of (seed, table name, row).
    tiers : TierConfig
        Tables whose home is outside level 0; by default none.
    device : str or torch.device
        Device in whose memory rows are trained: ``cpu``, or a GPU such as ``cuda``; by default the
        device of `tiers`. On a GPU, outputs and their gradients are there too. Ids are always on
        the CPU.

    Raises
    ------
    ConfigError
        For repeated names, and a device that is not available; in forward for a missing feature, an
        id outside its table, or arrays that are not a jagged batch.
    TrainingError
        In forward, if a batch needs more slots than a table's cache has, if a handle is used twice
        or out of order, after `close`, and after an error that left rows incomplete.

    Notes
    -----
    With gradients enabled, a batch is *staged* (its rows are brought into level 0), looked up, and
    released by its backward pass. ``collection(features)`` stages and looks up at once;
    ``collection(collection.stage(features))`` is the same in two steps, and `Prefetcher` does the
    first step ahead of time on another thread. Without gradients, rows are read in place and
    nothing changes.

    Examples
    --------
    >>> import torch
    >>> from stratarec import EmbeddingBagConfig, KeyedJagged, RowOptimizerConfig
    >>> from stratarec import TieredEmbeddingBagCollection
    >>> table = EmbeddingBagConfig(
    ...     name="item", num_embeddings=1000, embedding_dim=8, feature_names=("item",)
    ... )
    >>> collection = TieredEmbeddingBagCollection([table], optimizer=RowOptimizerConfig(kind="sgd"))
    >>> items = torch.tensor([3, 7])
    >>> features = KeyedJagged(keys=("item",), values=items, offsets=None, batch_size=2)
    >>> collection(features)["item"].sum().backward()  # trains rows 3 and 7
    >>> collection.step, collection.learning_rate
    (1, 0.02)
    >>> collection.tables == (table,), collection.pooled_keys, collection.dims
    (True, ('item',), (8,))
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        *,
        optimizer: RowOptimizerConfig | None = None,
        seed: int = 0,
        tiers: TierConfig | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        tiers = tiers or TierConfig()
        tiers = tiers if device is None else replace(tiers, device=str(device))
        super().__init__(Engine(tables, optimizer or RowOptimizerConfig(), seed, tiers))


class FusedLookup(torch.autograd.Function):
    """Autograd function: pools, then updates tables; gradients are for per-sample weights only."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, weights: Tensor | None, handle: Handle, engine: LookupEngine[Any]
    ) -> tuple[Tensor, ...]:
        ctx.handle = handle
        ctx.engine = engine
        ctx.set_materialize_grads(True)
        with timed(engine.seconds, "look up"):
            return tuple(map(engine.level0.to_network, engine.look_up(handle)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, pooled: Tensor, *rows: Tensor) -> tuple[Tensor | None, ...]:
        handle: Handle = ctx.handle
        weights = handle.features.weights
        # It takes a pass over all ids, so it is computed only if needed. No other input needs a
        # gradient: rows are trained in place, and the anchor is constant.
        gradient = torch.zeros_like(weights) if weights is not None and ctx.needs_input_grad[1] else None
        # Kernels read contiguous float32. Under autocast gradients are bfloat16, and the gradient
        # of a sum has strides of 0.
        engine = ctx.engine
        gradients = [engine.level0.from_network(part.float().contiguous()) for part in (pooled, *rows)]
        with timed(engine.seconds, "update rows"):
            engine.update_rows(handle, gradients, weights=gradient)
        return None, gradient, None, None
