"""The same embedding tables on the same ranks, sharded by this library and by TorchRec.

Every contender has its own copy of all tables and runs whole steps of the embedding part: ids to
their owners, rows back, gradients to the owners, row-wise Adagrad. No contender prepares batches
ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.contenders import EPS, RATE, Shape
from benchmarks.registry import import_peer
from benchmarks.torchrec_tables import to_torchrec
from stratarec.batch.jagged import KeyedJagged
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharded_engine import ShardedCollection
from stratarec.distributed.sharding import Place, Sharding, TableLoad, plan_sharding
from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig

# Smaller tables cost less as copies: their gradients are fewer bytes than the rows of a batch.
_COPIED_ROWS = 1_000

Gradients = Mapping[str, Tensor]
"""Gradient ``[B, D]`` of the pooled output of each feature."""


def tables_of(shape: Shape) -> list[EmbeddingBagConfig]:
    """Return one table for each feature."""
    return [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=rows, embedding_dim=shape.width, feature_names=(f"f{i}",)
        )
        for i, rows in enumerate(shape.sizes)
    ]


def batch_of(shape: Shape, seed: int) -> KeyedJagged:
    """Return the batch of one rank, with one int64 id per bag."""
    ids, _ = shape.bags(seed)
    keys = tuple(f"f{i}" for i in range(len(shape.sizes)))
    return KeyedJagged(keys=keys, values=ids, offsets=None, batch_size=shape.batch)


def loads_of(shape: Shape, ranks: int) -> list[TableLoad]:
    """Return the lookups of a batch of all ranks in each table, estimated from one batch."""
    ids, samples = batch_of(shape, 0).values.view(len(shape.sizes), -1), shape.batch * ranks
    return [
        TableLoad(
            name=table.name,
            width=shape.width,
            bytes=table.num_embeddings * 4 * (shape.width + 1),
            lookups=samples,
            bags=samples,
            distinct=float(len(each.unique())),
        )
        for table, each in zip(tables_of(shape), ids, strict=True)
    ]


class Ours:
    """Sharded collection of this library: `deduplicated` as `stratarec train` plans it, or pooled
    by owners.
    """

    def __init__(self, shape: Shape, mesh: Mesh, deduplicated: bool) -> None:
        tables = tables_of(shape)
        places = plan_sharding(loads_of(shape, mesh.ranks), mesh.ranks).places
        if not deduplicated:
            whole = plan_sharding(loads_of(shape, mesh.ranks), mesh.ranks, "table").places
            places = {name: Place(first=place.first) for name, place in whole.items()}
        self.places = places
        self.mesh = mesh
        self.collection = ShardedCollection(
            Sharding(tables, places, mesh.ranks),
            mesh,
            optimizer=RowOptimizerConfig(learning_rate=RATE, eps=EPS),
        )

    def gradient(self, gradients: Gradients) -> Tensor:
        """Concatenate gradients in the order of the output."""
        return torch.cat([gradients[key] for key in self.collection.pooled_keys], dim=1)

    def step(self, batch: KeyedJagged, gradient: Tensor) -> Tensor:
        pooled: Tensor = self.collection(batch).pooled
        pooled.backward(gradient)
        return pooled

    def outputs(self, pooled: Tensor) -> dict[str, Tensor]:
        """Split the output by feature."""
        parts = pooled.detach().split(self.collection.dims, dim=1)  # type: ignore[no-untyped-call]
        return dict(zip(self.collection.pooled_keys, parts, strict=True))

    def weights(self) -> dict[str, Tensor]:
        """Return all rows of all tables, on every rank."""
        return {
            table.name: self.collection.table(table.name)["weight"].clone()
            for table in self.collection.tables
        }

    def close(self) -> None:
        self.collection.close()


class Theirs:
    """TorchRec's `ShardedEmbeddingBagCollection` with FBGEMM's fused exact row-wise Adagrad.

    Parameters
    ----------
    kinds : mapping
        Sharding of each table: ``row``, ``copied`` (a copy on every rank, gradients averaged by
        DDP), or its rank.
    """

    def __init__(self, shape: Shape, kinds: Mapping[str, str | int], ranks: int, local: int) -> None:
        sharding = import_peer("torchrec.distributed.sharding_plan")
        sharders = import_peer("torchrec.distributed.embeddingbag")
        types = import_peer("torchrec.distributed.types")
        kernels = import_peer("fbgemm_gpu.split_embedding_configs")
        comms = import_peer("torchrec.distributed.comm_ops")
        self._keyed = import_peer("torchrec.sparse.jagged_tensor").KeyedJaggedTensor
        comms.set_gradient_division(False)  # gradients are sums over ranks, as ours
        fused = {"optimizer": kernels.EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": RATE, "eps": EPS}
        sharder = sharders.EmbeddingBagCollectionSharder(fused_params=fused)
        modules = import_peer("torchrec.modules.embedding_modules")
        tables = [to_torchrec(table) for table in tables_of(shape)]
        whole = modules.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        layouts = {
            "row": lambda: sharding.row_wise(compute_kernel="fused"),
            "copied": sharding.data_parallel,
        }
        places = {
            name: layouts[kind]()
            if isinstance(kind, str)
            else sharding.table_wise(rank=kind, compute_kernel="fused")
            for name, kind in kinds.items()
        }
        plan = sharding.construct_module_sharding_plan(
            whole, places, sharder=sharder, local_size=local, world_size=ranks, device_type="cpu"
        )
        env = types.ShardingEnv.from_process_group(dist.group.WORLD)
        self.collection = sharder.shard(whole, plan, env, device=torch.device("cpu"))
        self._order: list[str] = []
        self._copied = {f"f{name[1:]}" for name, kind in kinds.items() if kind == "copied"}
        self._ranks, self._dense = ranks, self._optimizer_of_copies()

    def _optimizer_of_copies(self) -> torch.optim.Optimizer | None:
        rowwise = import_peer("torchrec.optim.rowwise_adagrad").RowWiseAdagrad
        copies = [
            weight
            for name, weight in self.collection.named_parameters()
            if f"f{name.split('.')[1][1:]}" in self._copied
        ]
        return rowwise(copies, lr=RATE, eps=EPS) if copies else None

    def converted(self, batch: KeyedJagged) -> Any:
        """Convert a batch to TorchRec's `KeyedJaggedTensor`."""
        lengths = torch.ones(len(batch.values), dtype=torch.int32)
        return self._keyed(keys=list(batch.keys), values=batch.values, lengths=lengths)

    def learn_order(self, batch: KeyedJagged) -> None:
        """Record the order of the features in the output, which depends on the sharding."""
        with torch.no_grad():
            self._order = list(self.collection(self.converted(batch)).wait().keys())

    def gradient(self, gradients: Gradients) -> Tensor:
        """Concatenate gradients in the order of `learn_order`; scale those of copies, which DDP
        averages.
        """
        scale = {key: self._ranks if key in self._copied else 1 for key in self._order}
        return torch.cat([gradients[key] * scale[key] for key in self._order], dim=1)

    def step(self, batch: KeyedJagged, gradient: Tensor) -> Tensor:
        if self._dense is not None:
            self._dense.zero_grad(set_to_none=False)
        pooled: Tensor = self.collection(self.converted(batch)).wait().values()
        pooled.backward(gradient)
        if self._dense is not None:
            self._dense.step()
        return pooled

    def outputs(self, pooled: Tensor) -> dict[str, Tensor]:
        """Split the output by feature."""
        parts = pooled.detach().chunk(len(self._order), dim=1)  # type: ignore[no-untyped-call]
        return dict(zip(self._order, parts, strict=True))

    def shards(self) -> dict[str, list[tuple[int, Tensor]]]:
        """Return this rank's shards of each table, as number of the first row and writable rows."""
        shards_of = {}
        for key, value in self.collection.state_dict().items():
            shards = value.local_shards() if hasattr(value, "local_shards") else None
            shards_of[key.split(".")[1]] = (
                [(0, value)]
                if shards is None
                else [(shard.metadata.shard_offsets[0], shard.tensor) for shard in shards]
            )
        return shards_of

    def close(self) -> None:
        """Do nothing, because there are no resources to release."""


def balanced(shape: Shape, ranks: int) -> dict[str, int]:
    """Return a rank for each table, from this library's plan for whole tables."""
    places = plan_sharding(loads_of(shape, ranks), ranks, "table").places
    return {name: place.first for name, place in places.items()}


def peer_kinds(shape: Shape, ranks: int) -> dict[str, dict[str, str | int]]:
    """Return TorchRec's contenders: whole tables, row-wise, large tables row-wise, and small tables
    copied.
    """
    whole = balanced(shape, ranks)
    ordered = sorted(range(len(shape.sizes)), key=lambda i: shape.sizes[i])
    large = {f"t{i}" for i in ordered[-4:]}
    small = {f"t{i}" for i in ordered if shape.sizes[i] <= _COPIED_ROWS}
    return {
        "table_wise": dict(whole),
        "row_wise": dict.fromkeys(whole, "row"),
        "mixed": {name: "row" if name in large else rank for name, rank in whole.items()},
        "copied": {name: "copied" if name in small else rank for name, rank in whole.items()},
    }


Contender = Ours | Theirs
Make = Callable[[Shape], Contender]


def contenders(mesh: Mesh, local: int, shape: Shape) -> dict[str, Make]:
    """Return the factory of each contender; all ranks must call them in this order."""
    factories: dict[str, Make] = {
        "ours": lambda shape_of_tables: Ours(shape_of_tables, mesh, deduplicated=True),
        "ours_without_dedup": lambda shape_of_tables: Ours(shape_of_tables, mesh, deduplicated=False),
    }
    for name in peer_kinds(shape, mesh.ranks):

        def make(shape_of_tables: Shape, name: str = name) -> Theirs:
            return Theirs(shape_of_tables, peer_kinds(shape_of_tables, mesh.ranks)[name], mesh.ranks, local)

        factories[f"torchrec_{name}"] = make
    return factories


def gradients_of(shape: Shape, seed: int) -> dict[str, Tensor]:
    """Draw gradients for the output of one rank."""
    draws = torch.Generator().manual_seed(seed)
    return {
        f"f{i}": 1e-3 * torch.randn(shape.batch, shape.width, generator=draws)
        for i in range(len(shape.sizes))
    }


def gate(mesh: Mesh, makes: Mapping[str, Make], shape: Shape, steps: int = 5) -> None:
    """Check that all contenders with equal weights agree in outputs and weights over some steps."""
    built = {name: make(shape) for name, make in makes.items()}
    ours = built["ours"]
    assert isinstance(ours, Ours)
    for peer in built.values():
        if isinstance(peer, Theirs):
            peer.learn_order(batch_of(shape, 0))
            _each_shard(peer, ours.weights(), lambda shard, wanted: shard.copy_(wanted))
    for step in range(steps):
        batch = batch_of(shape, 1000 * mesh.rank + step)
        gradients = gradients_of(shape, 1000 * mesh.rank + step)
        outputs = {
            name: each.outputs(each.step(batch, each.gradient(gradients))) for name, each in built.items()
        }
        for name, output in outputs.items():
            for key, wanted in outputs["ours"].items():
                torch.testing.assert_close(
                    output[key], wanted, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
                )
    final = ours.weights()
    for each in built.values():
        if isinstance(each, Theirs):
            _each_shard(
                each,
                final,
                lambda shard, wanted: torch.testing.assert_close(shard, wanted, rtol=1e-5, atol=1e-6),
            )
        each.close()


def _each_shard(
    peer: Theirs, weights: Mapping[str, Tensor], work: Callable[[Tensor, Tensor], object]
) -> None:
    with torch.no_grad():
        for name, shards in peer.shards().items():
            for first, rows in shards:
                work(rows, weights[name][first : first + len(rows)])
