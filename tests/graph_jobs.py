"""Jobs of `tests/training/test_graph_step.py`: steps with rows in the memory of a GPU, in Triton's
interpreter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import slot_memories
import torch
import triton_interpreter  # noqa: F401  # before Triton
from models import test_deduplicated
from slot_memories import KINDS
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from stratarec.batch.batch import Batch
from stratarec.batch.jagged import KeyedJagged
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.embedding import RowOptimizerConfig, slots
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.engine import Engine
from stratarec.embedding.stores.ssd import SsdRecords
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import StorageError, StrataError, TrainingError
from stratarec.kernels.runtime.accelerator import open_device
from stratarec.models import DLRMConfig, HistoryConfig, build_model, request
from stratarec.models.zoo.config import DCNv2Config, DINConfig
from stratarec.recipe.train_section import AverageConfig, DenseOptimizerConfig, TrainConfig
from stratarec.training.steps import graph_step
from stratarec.training.steps.step import TrainPipeline
from stratarec.training.torch_setup import build_optimizer, torch_settings

ROWS = {"a": 90, "b": 40, "tags": 60}
SCHEMA = Schema(
    dense=tuple(DenseFeature(name=f"n{place}") for place in range(3)),
    sparse=(
        SparseFeature(name="a"),
        SparseFeature(name="b"),
        SparseFeature(name="tags", kind="multi", max_length=4),
    ),
)
SINGLE = Schema(dense=SCHEMA.dense, sparse=SCHEMA.sparse[:2])
SIZE = 12
INT8 = TableTier(cache_rows=32, codec=CodecConfig(kind="int8"))
HOT = TableTier(cache_rows=32, hot_rows=10)
ADAM = DenseOptimizerConfig(kind="adam", learning_rate=0.003)
SGD = DenseOptimizerConfig(kind="sgd", learning_rate=0.1)
# Segments are used however few ids they save.
request._LEAST_SAVED = float("-inf")  # type: ignore[assignment]


def _model(kind: Any, pooling: str, **more: Any) -> Any:
    return kind(embedding_dim=8, history=HistoryConfig(pooling=pooling, attention_mlp=(8,)), **more)  # type: ignore[arg-type]


_DLRM: dict[str, Any] = {"bottom_mlp": (8,), "top_mlp": (8,)}

CASES: dict[str, dict[str, Any]] = {
    "adam": {"schema": SINGLE, "train": {"dense": ADAM}},
    "sgd": {"schema": SINGLE, "train": {"dense": SGD}},
    "caches over int8": {"train": {"dense": ADAM}, "tiers": {"a": INT8, "tags": INT8}},
    "hot rows": {"schema": SINGLE, "train": {"dense": ADAM}, "tiers": {"a": HOT}},
    "clipped, averaged, weighted": {
        "train": {"clip_norm": 0.05, "average": AverageConfig(decay=0.9), "dense": ADAM}, "weighted": True,
    },
    "rows clipped": {"train": {"clip_norm": 0.05, "clip_rows": True, "dense": ADAM}},
    "adagrad": {"train": {"dense": DenseOptimizerConfig(kind="adagrad", learning_rate=0.01)}},
    "segments": {"grouped": True, "model": _model(DLRMConfig, "mean", **_DLRM), "train": {"dense": ADAM}},
    "target attention": {
        "grouped": True, "model": _model(DINConfig, "target_attention", deep_mlp=(8,)), "train": {"dense": ADAM},
        "tiers": {"item": TableTier(cache_rows=64, codec=CodecConfig(kind="int8"))},
    },
    "transformer": {
        "grouped": True, "model": _model(DCNv2Config, "transformer", deep_mlp=(8,)), "train": {"dense": SGD},
    },
    "transformer, own histories": {
        "expanded": True, "model": _model(DCNv2Config, "transformer", deep_mlp=(8,)), "train": {"dense": SGD},
    },
    "rows of histories clipped": {
        "expanded": True, "model": _model(DINConfig, "target_attention", deep_mlp=(8,)),
        "train": {"clip_norm": 0.05, "clip_rows": True, "dense": ADAM},
    },
    "all rows change": {"rows": RowOptimizerConfig(kind="adam", rows="all"), "train": {"dense": ADAM}},
}  # fmt: skip


@contextmanager
def memory(kind: str) -> Iterator[None]:
    """Train rows in a kind of slots."""
    before = slots.MEMORIES["cpu"]
    slots.MEMORIES["cpu"] = KINDS[kind]
    try:
        yield
    finally:
        slots.MEMORIES["cpu"] = before


def pipeline_of(case: dict[str, Any], kind: str, place: str = "cpu") -> TrainPipeline:
    """Return the pipeline of a small DLRM on the device `place`, with rows in a kind of slots."""
    with memory(kind):
        sizes = {**_DLRM, "embedding_dim": 8, "interaction": case.get("interaction", "dot")}
        config = case.get("model", DLRMConfig(pooling="mean", **sizes))
        schema = case.get("schema", SCHEMA)
        rows = {feature.name: ROWS[feature.name] for feature in schema.sparse if "model" not in case}
        if "model" in case:
            schema, rows = test_deduplicated.schema(), test_deduplicated.ROWS
        optimizer = case.get("rows", RowOptimizerConfig(learning_rate=0.05))
        tiers = TierConfig(tables=case.get("tiers", {}), ways=8, log_path=case.get("log"), device=place)
        model = build_model(config, schema, rows, seed=3, optimizer=optimizer, tiers=tiers)
    model.place(open_device(place))
    model.train()
    train, nothing = TrainConfig(**case["train"]), None
    return graph_step.build_pipeline(model, build_optimizer(train.dense, model.network), train, nothing)  # type: ignore[arg-type]


def batch_of(case: dict[str, Any], step: int, size: int = SIZE) -> Batch:
    """Return the batch of a step."""
    if "model" in case:
        grouped = test_deduplicated.number_distinct(
            test_deduplicated.batch(size, seed=step, scattered=step == 3)
        )
        return grouped.expanded(test_deduplicated.KEYS) if case.get("expanded") else grouped
    draws = torch.Generator().manual_seed(step)
    keys = tuple(feature.name for feature in case.get("schema", SCHEMA).sparse)
    lengths = torch.ones(len(keys), size, dtype=torch.int64)
    if "tags" in keys:
        lengths[2] = torch.randint(0, 4, (size,), generator=draws)
    limits = torch.repeat_interleave(torch.tensor([ROWS[key] for key in keys]), lengths.sum(1))
    values = (limits * torch.rand(len(limits), generator=draws) ** 2).long()
    offsets = (
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
        if "tags" in keys
        else None
    )
    sparse = KeyedJagged(keys=keys, values=values, offsets=offsets, batch_size=size)
    label = (torch.rand(size, generator=draws) > 0.5).float()
    weight = torch.rand(size, generator=draws) if case.get("weighted") else None
    return Batch(label=label, dense=torch.randn(size, 3, generator=draws), sparse=sparse, weight=weight)


def state_of(pipeline: TrainPipeline, kind: str) -> list[torch.Tensor]:
    """Return copies of all weights, rows and states of a training."""
    model = pipeline.model
    parts = [*model.network.parameters(), *pipeline.average.hidden.values()]
    with memory(kind):
        for table in model.embeddings.tables:
            parts += model.embeddings.rows(table.name, 0, min(table.num_embeddings, 40)).values()
    parts += [
        value
        for entry in pipeline.optimizer.state.values()
        for value in entry.values()
        if torch.is_tensor(value)
    ]
    return [part.detach().cpu().clone() for part in parts]


def compare(names: tuple[str, ...], steps: int = 4) -> None:
    """Print, as JSON, in which cases losses or states differ from training in host memory, bit for
    bit.
    """
    wrong = []
    with torch_settings(seed=1, threads=1):
        for name in names:
            case = CASES[name]
            kinds = "plain", "device"
            pair = [pipeline_of(case, kind) for kind in kinds]
            assert isinstance(pair[1], graph_step.DevicePipeline)
            # Another size in between, as at the end of an epoch.
            sizes = [SIZE, SIZE, 7, *[SIZE] * steps][:steps]
            losses: list[list[float]] = [[], []]
            for side, series in zip(pair, losses, strict=True):
                results = [side.train(step, batch_of(case, step, size)) for step, size in enumerate(sizes)]
                series.extend(result.loss for result in results)
            states = list(map(state_of, pair, kinds))
            # Products with padded histories add up in blocks of other sizes.
            equal = torch.allclose if "model" in case else torch.equal
            rounding = {"rtol": 1e-4, "atol": 1e-5} if "model" in case else {}
            same = len(states[0]) == len(states[1]) and all(map(partial(equal, **rounding), *states))
            losses = [[round(loss, 5) for loss in series] for series in losses] if rounding else losses
            moved = [
                sum(tables.traffic.rows_in for tables in side.model.embeddings.engine.tables)
                for side in pair
            ]
            assert moved[0] == moved[1]
            assert bool(moved[0]) == ("tiers" in case)
            wrong += [] if same and losses[0] == losses[1] else [f"{name}: {losses}"]
    print(json.dumps(wrong))


class Repeated:
    """A graph that runs its function again, on the memory of the capture."""

    count = 0

    def __init__(self, inputs: Any, work: Any, weights: Any, other: Any) -> None:
        Repeated.count += 1
        self.inputs = graph_step.copied(inputs)
        self._work = work
        work(self.inputs)  # it must change nothing, as a warm-up

    def has_moved(self) -> bool:
        return False

    def replay(self, inputs: Any) -> None:
        self.inputs.take(inputs)
        self.outcome = self._work(self.inputs)


class Full:
    """A graph for which the device has too little memory."""

    def __init__(self, *given: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")


class Refused:
    """A graph with an operation that cannot be recorded."""

    def __init__(self, *given: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")


def repeated(names: tuple[str, ...]) -> None:
    """Print, as JSON, whether steps that a graph repeats have the bits of single operations, and
    the number of graphs; then the same, and what is reported, for a device without memory for a
    graph.
    """
    results = []
    for name in names:
        case, states, sizes = CASES[name], [], (SIZE, SIZE, 7, SIZE, 7)
        said: list[str] = []
        Repeated.count = 0
        for graph in (None, Repeated, Full):
            graph_step._Graph = graph  # type: ignore[misc,assignment]
            with torch_settings(seed=1, threads=1):
                pipeline = pipeline_of(case, "device")
                assert isinstance(pipeline, graph_step.DevicePipeline)
                pipeline._graph_step._captures = graph is not None
                pipeline.say = said.append
                losses = [
                    # Batches with histories are of one form only if they are equal.
                    pipeline.train(
                        number, batch_of(case, number % 2 if "model" in case else number, sizes[number])
                    )
                    for number in range(5)
                ]
                states.append([torch.tensor([each.loss for each in losses]), *state_of(pipeline, "device")])
        same = [all(map(torch.equal, states[0], other)) for other in states[1:]]
        results.append([same, Repeated.count, said])
    print(json.dumps(results))


def bad_loss() -> None:
    """Print, as JSON, the error of a loss that is not finite, and whether it or a later step
    changed anything.
    """
    case = CASES["clipped, averaged, weighted"]
    pipeline = pipeline_of(case, "device")
    with torch_settings(seed=1, threads=1):
        first = pipeline.train(0, batch_of(case, 0)).loss
        before = state_of(pipeline, "device")
        bad = batch_of(case, 1)
        bad.dense[0, 0] = torch.nan
        results = [pipeline.train(1, bad), pipeline.train(2, batch_of(case, 2))]
        try:
            error = str(results[0].loss)
        except TrainingError as caught:
            error = str(caught)
    print(json.dumps([first, error, all(map(torch.equal, before, state_of(pipeline, "device")))]))


def bad_input(root: str) -> None:
    """Print, as JSON, the errors of an id outside its table, of an interrupt after a step is
    queued, and of a full disk below a cache; whether nothing changed by the first and the last; and
    results with more sizes than graphs, and with an operation that no graph can contain.
    """
    case = {**CASES["adam"], "tiers": {"a": TableTier(home="log", cache_rows=32)}, "log": Path(root)}
    errors, sides = [], []

    def refused(pipeline: TrainPipeline, step: int, batch: Batch) -> None:
        try:
            pipeline.train(step, batch)
        except (StrataError, KeyboardInterrupt) as error:
            errors.append(f"{type(error).__name__}: {error}")

    full = StorageError("the disk is full")
    with torch_settings(seed=1, threads=1):
        for is_disturbed in (False, True):
            pipeline = pipeline_of({**case, "log": Path(root) / str(is_disturbed)}, "device")
            for step in range(4):
                batch = batch_of(case, step)
                if is_disturbed and step == 2:
                    batch.sparse.values[3] = 10_000
                    refused(pipeline, step, batch)
                    with mock.patch.object(SsdRecords, "write", side_effect=full) as write:
                        refused(pipeline, step, batch_of(case, step))
                    assert write.called
                    batch = batch_of(case, step)
                pipeline.train(step, batch)
            sides.append(state_of(pipeline, "device"))
        same = all(map(torch.equal, *sides))
        assert isinstance(pipeline, graph_step.DevicePipeline)
        with mock.patch.object(Engine, "end", side_effect=KeyboardInterrupt):
            refused(pipeline, 4, batch_of(case, 4))
        refused(pipeline, 5, batch_of(case, 5))
        losses = []
        said = list[str]()
        graph_step._MOST_GRAPHS = 1
        Repeated.count = 0
        for graph in (None, Repeated, Refused):
            graph_step._Graph = graph  # type: ignore[misc,assignment]
            pipeline = pipeline_of(CASES["adam"], "device")
            assert isinstance(pipeline, graph_step.DevicePipeline)
            pipeline._graph_step._captures = graph is not None
            pipeline.say = said.append
            results = [
                pipeline.train(step, batch_of(CASES["adam"], step, 12 - step // 2)) for step in range(6)
            ]
            losses.append([result.loss for result in results])
    print(json.dumps([errors, same, losses[0] == losses[1] == losses[2], Repeated.count, said]))


WAITING = (
    "_local_scalar_dense", "nonzero", "item", "equal", "masked_select", "_unique2", "is_nonzero", "repeat_interleave",
    "index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_", "scatter_add", "scatter_add_",
)  # fmt: skip
"""Operations of torch that make the host wait for a device; some only with deterministic
algorithms.
"""


class Log(TorchDispatchMode):
    """Lists operations of torch and launches of Triton kernels, with all that a CUDA graph would
    repeat.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Any] = []
        self._made: dict[int, str] = {}
        self._launch = interpreter.GridExecutor.__call__

    def __enter__(self) -> Any:
        log, launch = self, self._launch

        def logged(executor: Any, *given: Any, **named: Any) -> Any:
            grid = executor.grid if not callable(executor.grid) else ""
            log.entries.append(
                (f"launch {executor.fn.__name__}", grid, log.form(given), log.form(sorted(named.items())))
            )
            with torch._C._DisableTorchDispatch():
                return launch(executor, *given, **named)

        interpreter.GridExecutor.__call__ = logged
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        interpreter.GridExecutor.__call__ = self._launch
        super().__exit__(*error)

    def form(self, value: Any) -> Any:
        """Return shape and address of a tensor; memory that the step itself allocates is known by
        its first use.
        """
        if isinstance(value, torch.Tensor):
            address = value.untyped_storage().data_ptr()
            return tuple(value.shape), str(value.dtype), self._made.get(address, address)
        if isinstance(value, tuple | list):
            return tuple(map(self.form, value))
        return value if isinstance(value, int | float | bool | str | None) else str(value)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        entry = (name, self.form(list(args)), self.form(sorted((kwargs or {}).items())))
        result = function(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        for part in result if isinstance(result, tuple | list) else (result,):
            if (
                isinstance(part, torch.Tensor)
                and (address := part.untyped_storage().data_ptr()) not in given
            ):
                self._made[address] = f"made by {name} at {len(self.entries)}"
        self.entries.append(entry)
        return result


def _host_rate(self: Any, numbers: Any, plain: Any = graph_step.GraphStep._update_network) -> None:
    """Use a learning rate of the host, which a graph would freeze."""
    plain(self, numbers * (1.0 + 0.001 * self._queued))


def _waiting(self: Any, inputs: Any, plain: Any = graph_step.GraphStep._differentiate) -> Any:
    """Read the loss on the host."""
    outcome = plain(self, inputs)
    float(outcome.loss)
    return outcome


def _new_buffer(self: Any, inputs: Any, plain: Any = graph_step.GraphStep._differentiate) -> Any:
    """Read a tensor that is created outside the step."""
    return plain(self, replace(inputs, dense=_COPIES[self._queued].copy_(inputs.dense)))


def _host_lists(self: Any, inputs: Any, plain: Any = graph_step.GraphStep._differentiate) -> Any:
    """Read lists that are not in the packed buffer."""
    with torch._C._DisableTorchDispatch():
        lists = tuple(index and index._replace(row=index.row.clone()) for index in inputs.request.lists)
    _LISTS.extend(lists)
    return plain(self, replace(inputs, request=replace(inputs.request, lists=lists)))


_LISTS: list[Any] = []
_COPIES = [torch.zeros(SIZE, 3) for _ in range(9)]
FAULTS: dict[str, dict[str, Any]] = {
    "": {},
    "a number of the host": {"_update_network": _host_rate},
    "the host waits": {"_differentiate": _waiting},
    "another buffer for each batch": {"_differentiate": _new_buffer},
    "lists of the host": {"_differentiate": _host_lists},
}
"""Fault -> methods of `GraphStep` that replace others."""


def captured(name: str, faults: tuple[str, ...]) -> None:
    """Print, as JSON, for each fault how many operations a graph would repeat, which differ between
    two batches, and which wait.

    A graph repeats operations with the shapes, numbers and addresses of its capture. So these must
    be equal for any two batches of a form.
    """
    case, results = CASES[name], []
    for fault in faults:
        with torch_settings(seed=1, threads=1), _patched(FAULTS[fault]):
            pipeline = pipeline_of(case, "device")
            assert isinstance(pipeline, graph_step.DevicePipeline)
            step = pipeline._graph_step
            pipeline.train(0, batch_of(case, 0))
            kept, logs = None, []
            # The second batch is the next one of the first one's form.
            for number in range(1, 30):
                batch = batch_of(case, number)
                request = pipeline.model.request(batch)
                handle = step._engine.stage_now(request.features, step.tensors(number, batch, request))
                step._engine.begin(handle)
                inputs = graph_step.StepInputs.of(step._buffer(number, batch, request, handle), request, ())
                kept = graph_step.copied(inputs) if kept is None else kept
                if inputs.form == kept.form and len(logs) < 2:
                    kept.take(inputs)
                    with Log() as log:
                        step._train(kept)
                    logs.append(log.entries)
                step._engine.end(handle)
                step._queued += 1
                if len(logs) == 2:
                    break
            differing = [pair for pair in zip(*logs, strict=False) if pair[0] != pair[1]]
            waiting = [entry[0] for log in logs for entry in log if entry[0] in WAITING]
            launches = sum(entry[0].startswith("launch") for entry in logs[0])
            results.append(
                [len(logs[0]), launches, len(differing) + abs(len(logs[0]) - len(logs[1])), len(waiting)]
            )
            if not fault and (differing or waiting):
                results.append([str(differing[:3])[:3000], waiting])
    print(json.dumps(results))


@contextmanager
def _patched(methods: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(graph_step.GraphStep, name) for name in methods}
    for name, method in methods.items():
        setattr(graph_step.GraphStep, name, method)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(graph_step.GraphStep, name, method)


assert slot_memories.KINDS
