"""One rank of the benchmark `towers`, started by torchrun on emulated hosts: run the gate, then all
contenders.

A contender makes whole training steps as `stratarec train` does: a thread exchanges ids ahead, then
rows, the network, gradients and updates follow. Contenders alternate, and each trains several steps
at a time. The first step is not timed. Neither are the last ones, whose ids are exchanged during
the timed steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.__main__ import give_everyone_good_memory
from benchmarks.contenders import Shape
from benchmarks.exchange_ranks import wire_bytes
from stratarec.distributed.sharding import TableLoad
from stratarec.training.torch_setup import build_optimizer

DENSE = 13
_WARM, _AHEAD = 1, 1


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to train the same tables on the same batches."""

    name: str
    exchange: str = "flat"
    wire: str = "fp32"
    compression: float = 1.0
    deduplicate: bool = True
    """Whether the flat exchange sends distinct rows where they need fewer bytes, as the plan of a
    run chooses.
    """


def plan(features: int) -> tuple[tuple[str, ...], ...]:
    """Return two towers, each with one half of the features in their order."""
    names = [f"f{place}" for place in range(features)]
    return tuple(names[: features // 2]), tuple(names[features // 2 :])


def loads_of(shape: Shape, ranks: int) -> list[TableLoad]:
    """Return the load of each table by a batch of all ranks, counted in one batch."""
    (ids, offsets), samples, loads = shape.bags(0), shape.batch * ranks, []
    for place, rows in enumerate(shape.sizes):
        asked = ids[offsets[place * shape.batch] : offsets[(place + 1) * shape.batch]]
        loads.append(
            TableLoad(
                name=f"f{place}",
                width=shape.width,
                bytes=rows * 4 * (shape.width + 1),
                lookups=len(asked) * ranks,
                bags=samples,
                distinct=float(len(asked.unique())),
            )
        )
    return loads


class TimedReduction:
    """Reduction of a run that measures its time."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.seconds = 0.0

    def reduce(self, weights: Sequence[nn.Parameter]) -> None:
        began = time.perf_counter()
        self._inner.reduce(weights)
        self.seconds += time.perf_counter() - began


class Bench:
    """A contender, its tables and its network."""

    def __init__(
        self, contender: Contender, mesh: Any, shape: Shape, model: dict[str, Any], dense_wire: str
    ) -> None:
        from stratarec.data.schema import DenseFeature, Schema, SparseFeature
        from stratarec.distributed.config import DistributedConfig
        from stratarec.distributed.sharded_engine import ShardedCollection
        from stratarec.distributed.sharding import Place, Sharding, join_plans, plan_sharding
        from stratarec.distributed.towers import DisaggregatedModel
        from stratarec.embedding import RowOptimizerConfig
        from stratarec.embedding.tiers import TierConfig
        from stratarec.models import DLRMConfig, TowersConfig, build_model
        from stratarec.recipe.train_section import TrainConfig
        from stratarec.training.distributed import GradientReducer, RankPipeline

        self.contender, by_towers = contender, contender.exchange == "sptt"
        modules = contender.compression > 1
        self.mesh = mesh if by_towers else replace(mesh, inside=None, between=None)
        features = len(shape.sizes)
        towers = (
            TowersConfig(plan=plan(features), compression=contender.compression)
            if by_towers or modules
            else None
        )
        schema = Schema(
            dense=tuple(DenseFeature(name=f"d{place}") for place in range(DENSE)),
            sparse=tuple(SparseFeature(name=f"f{place}") for place in range(features)),
        )
        loads = loads_of(shape, mesh.ranks)
        if by_towers:
            halves = (loads[: features // 2], loads[features // 2 :])
            local = mesh.inside.ranks
            places = join_plans(
                [plan_sharding(half, local) for half in halves], [load.name for load in loads]
            ).places
        else:
            places = plan_sharding(loads, mesh.ranks, "auto" if contender.deduplicate else "table").places
            if not contender.deduplicate:
                places = {name: Place(first=place.first) for name, place in places.items()}
        wire: Any = contender.wire
        config = DistributedConfig(wire=wire, gradient_wire=wire, dense_wire=dense_wire)  # type: ignore[arg-type]
        given = self.mesh

        def collection(tables: Any) -> ShardedCollection:
            return ShardedCollection(
                Sharding(tables, places, given.ranks),
                given,
                optimizer=RowOptimizerConfig(learning_rate=0.01),
                seed=1,
                tiers=TierConfig(lookahead=_AHEAD),
                config=config,
            )

        self.model = build_model(
            DLRMConfig(embedding_dim=shape.width, towers=towers, **model),
            schema,
            {f"f{place}": rows for place, rows in enumerate(shape.sizes)},
            seed=1,
            collection=collection,
        )
        if by_towers:
            self.model = DisaggregatedModel(self.model, mesh, config, 1)
        self.reduction = TimedReduction(GradientReducer(self.mesh, self.model.network, dense_wire))
        train = TrainConfig(batch_size=shape.batch * mesh.ranks)
        self.pipeline = RankPipeline(
            self.mesh,
            self.model,
            build_optimizer(train.dense, self.model.network),
            train,
            None,
            reduction=self.reduction,
        )
        self._batches = [self._batch(shape, 1000 * self.mesh.place + number) for number in range(4)]
        self.step = 0

    def _batch(self, shape: Shape, seed: int) -> Any:
        from stratarec.batch.batch import Batch
        from stratarec.batch.jagged import KeyedJagged

        ids, offsets = shape.bags(seed)
        draws = torch.Generator().manual_seed(seed)
        keys = tuple(f"f{place}" for place in range(len(shape.sizes)))
        sparse = KeyedJagged(
            keys=keys, values=ids.int(), offsets=None if shape.ids == 1 else offsets, batch_size=shape.batch
        )
        label = (torch.rand(shape.batch, generator=draws) < 0.25).float()
        return Batch(label=label, dense=torch.randn(shape.batch, DENSE, generator=draws), sparse=sparse)

    def _items(self) -> Iterator[tuple[Any, Any]]:
        for number in range(self.step, 10**9):
            batch = self._batches[number % len(self._batches)]
            yield batch, self.pipeline.request(batch)

    def stretch(self, steps: int) -> dict[str, float]:
        """Return means of a step (seconds, processor seconds, parts, bytes on the wire) and the
        last loss.
        """
        items, means = islice(self._items(), _WARM + steps + _AHEAD), {}
        with self.pipeline.stage_ahead(items, depth=_AHEAD) as ahead:
            for number, (item, handle) in enumerate(ahead):
                if number in (_WARM, _WARM + steps):
                    self.mesh.files.agree(None)
                    now = self._now()
                    means = (
                        now
                        if number == _WARM
                        else {name: (now[name] - means[name]) / steps for name in now}
                    )
                loss = self.pipeline.train(self.step, *item, handle).loss
                self.step += 1
        return {**means, "loss": loss}

    def _now(self) -> dict[str, float]:
        mesh, reduced = self.mesh, self.reduction.seconds
        inside, between = (
            0.0 if part is None else part.rows.wait_seconds for part in (mesh.inside, mesh.between)
        )
        return {
            "step": time.perf_counter(),
            "processor": time.process_time(),
            "dense": reduced,
            "rows": mesh.rows.wait_seconds,  # includes most of `dense`
            "inside": inside,
            "between": between,
            "wire_bytes": float(wire_bytes()),
        }

    def close(self) -> None:
        """Release the tables."""
        self.model.embeddings.close()


def gate(mesh: Any, shape: Shape, model: dict[str, Any]) -> None:
    """Raise `TrainingError` if SPTT without modules has other losses than the flat exchange."""
    from stratarec.errors import TrainingError

    small = replace(shape, sizes=[min(rows, 1000) for rows in shape.sizes], batch=64)
    losses = {}
    for contender in (Contender(name="flat", deduplicate=False), Contender(name="sptt", exchange="sptt")):
        bench = Bench(contender, mesh, small, model, "fp32")
        losses[contender.name] = bench.stretch(4)["loss"]
        bench.close()
    if abs(losses["flat"] - losses["sptt"]) > 1e-6 * abs(losses["flat"]):
        raise TrainingError(f"losses of the flat exchange and of SPTT without modules differ: {losses}")


def figures(measurements: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return a row for each contender, with medians over rounds."""
    rows = []
    for name, rounds in measurements.items():
        middle = {part: median(each[part] for each in rounds) for part in rounds[0]}
        steps = sorted(each["step"] for each in rounds)
        exchange = (
            middle["rows"] - min(middle["dense"], middle["rows"]) + middle["inside"] + middle["between"]
        )
        rows.append(
            {
                "contender": name,
                "step_ms": 1e3 * middle["step"],
                "low_ms": 1e3 * steps[len(steps) // 4],
                "high_ms": 1e3 * steps[(3 * len(steps)) // 4],
                "processor_ms": 1e3 * middle["processor"],
                "compute_ms": 1e3 * (middle["step"] - exchange - middle["dense"]),
                "dense_ms": 1e3 * middle["dense"],
                "inside_ms": 1e3 * middle["inside"],
                "exchange_ms": 1e3 * (exchange - middle["inside"]),
                "wire_mb_a_step": middle["wire_bytes"] / 1e6,
            }
        )
    return rows


def merged(mesh: Any, mine: dict[str, float]) -> dict[str, float]:
    """Merge the measurements of all ranks.

    Bytes are added over hosts (the first rank of each host reports them) and processor seconds over
    ranks. The slowest step and the medians of its parts are returned.
    """
    names = list(mine)
    reports = int(os.environ["LOCAL_RANK"]) == 0
    given = [mine[name] if reports or name != "wire_bytes" else 0.0 for name in names]
    columns = dict(zip(names, zip(*mesh.files.gather_floats(given), strict=True), strict=True))
    how: dict[str, Any] = {"wire_bytes": sum, "processor": sum, "step": max}
    return {name: how.get(name, median)(values) for name, values in columns.items()}


def measured(mesh: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure all contenders of a model, alternately."""
    shape, model = Shape(**settings["shape"]), settings["model"]
    gate(mesh, shape, model)
    contenders = [Contender(**each) for each in settings["contenders"]]
    benches = [Bench(each, mesh, shape, model, settings["dense_wire"]) for each in contenders]
    measurements: dict[str, list[dict[str, float]]] = {each.name: [] for each in contenders}
    for round_ in range(settings["rounds"]):
        for bench in benches if round_ % 2 else benches[::-1]:
            mine = bench.stretch(settings["steps"])
            measurements[bench.contender.name].append(merged(mesh, mine))
    parameters = {b.contender.name: sum(w.numel() for w in b.model.network.parameters()) for b in benches}
    for bench in benches:
        bench.close()
    return {
        "rows": figures(measurements),
        "parameters": parameters,
        "contenders": [asdict(each) for each in contenders],
    }


def main(measure: Callable[[Any, dict[str, Any]], Any], towers: int = 0) -> int:
    """Run `measure` as one rank. The first rank writes the result to the file ``out`` of the
    settings.
    """
    settings = json.loads(sys.argv[1])
    from stratarec.distributed.config import DistributedConfig
    from stratarec.distributed.mesh import joined

    with joined(DistributedConfig(timeout=120.0), towers=towers) as mesh:
        result = measure(mesh, settings)
        if mesh.is_first:
            Path(settings["out"]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    give_everyone_good_memory()
    sys.exit(main(measured, towers=2))
