"""Jobs of tests in a process with a lazy device: the same trainings on the device and on the
CPU.
"""

from __future__ import annotations

import gc
import json
import pydoc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import forked
import lazy_device
import numpy as np
import torch
from models.test_deduplicated import ROWS, batch, schema

import stratarec
from recipes import assert_same_model, interrupt, last, prepared, tiny
from stratarec.batch.batch import Batch
from stratarec.cli.checks.gpu import Sizes, verify
from stratarec.embedding import RowOptimizerConfig
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import Interrupted, StrataError
from stratarec.kernels.runtime import accelerator
from stratarec.kernels.runtime.accelerator import open_device
from stratarec.models import CTRModel, build_model
from stratarec.models import request as request_module  # noqa: F401  # for `run` and `test_gpu.py`
from stratarec.models.calibration import LogitMap
from stratarec.models.history import HistoryConfig
from stratarec.models.registry import score_of
from stratarec.models.tower_config import TowersConfig
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.recipe.train_section import AverageConfig, DenseOptimizerConfig, TrainConfig
from stratarec.training.evaluate import score_split
from stratarec.training.forecast import device_rates
from stratarec.training.run.open_run import open_run
from stratarec.training.run.run_directory import read_result
from stratarec.training.steps.graph_step import build_pipeline
from stratarec.training.steps.loss import Objective
from stratarec.training.steps.step import TrainPipeline
from stratarec.training.torch_setup import build_optimizer, record, torch_settings
from stratarec.training.trainer import Trainer

ACCELERATOR = "stratarec.kernels.runtime.accelerator."
KINDS = ("dlrm", "dcnv2", "lr", "fm", "wide_deep", "deepfm", "finalmlp", "din", "ensemble")
TOWERS = (("item", "history"), ("os", "tags"))
CASES: dict[str, dict[str, Any]] = {
    **{kind: {"kind": kind} for kind in KINDS},
    "grouped windows, attention": {"kind": "dlrm", "pooling": "target_attention", "grouped": True},
    "grouped windows, transformer": {"kind": "dcnv2", "pooling": "transformer", "grouped": True},
    "segments under a dlrm": {"kind": "dlrm", "grouped": True},
    "segments side by side": {"kind": "dlrm", "grouped": True, "model": {"interaction": "cat"}},
    "segments under a deepfm": {"kind": "deepfm", "grouped": True},
    "dropout and normalization": {"kind": "dcnv2", "model": {"dropout": 0.3, "batch_norm": True}},
    "rows clipped, average": {
        "kind": "dlrm", "train": {"clip_norm": 0.1, "clip_rows": True, "average": AverageConfig(decay=0.9)},
    },
    "network clipped, adagrad": {
        "kind": "dcnv2", "train": {"clip_norm": 0.1, "dense": DenseOptimizerConfig(kind="adagrad", learning_rate=0.01)},
    },
    "rows in a cache": {"kind": "dlrm", "tiers": True},
    "all rows change": {"kind": "dlrm", "rows": RowOptimizerConfig(kind="adam", rows="all")},
    "classes weigh": {"kind": "dlrm", "train": {"class_weight": {"label": 3.0}}},
    "towers": {"kind": "dlrm", "model": {"towers": TowersConfig(plan=TOWERS, compression=2)}},
}  # fmt: skip


_LEAST = {"embedding_dim": 8, "dropout": 0.1, "cross_layers": 1, "low_rank": 4}


def small(config: Any) -> Any:
    """Return a copy of a model configuration with small sizes."""
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    least = {name: min(value, given[name]) for name, value in _LEAST.items() if given.get(name)}
    return replace(
        config, **least, **{name: (8,) for name, value in given.items() if name.endswith("_mlp") and value}
    )


def _shipped() -> dict[str, dict[str, Any]]:
    """Return small models and training settings of all shipped recipes, without duplicates."""
    results = {}
    for path in sorted((Path(stratarec.__file__).parent / "recipes").glob("*.yaml")):
        recipe = Recipe.load(path)
        model, train = small(recipe.model), recipe.train
        grouped = "session: " in path.read_text()
        results[f"{model}, {train.clip_rows}, {train.embedding.rows}, {grouped}"] = {
            "name": f"recipe {path.stem}",
            "kind": model.kind,
            "shipped": model,
            "grouped": grouped,
            "train": {
                name: getattr(train, name) for name in ("clip_norm", "clip_rows", "average", "dense")
            },
            "rows": train.embedding,
        }
    return {case["name"]: case for case in results.values()}


SHIPPED = _shipped()
CASES |= SHIPPED


def built(case: dict[str, Any], rows_on: str = "cpu") -> tuple[CTRModel, TrainConfig]:
    """Build the model of a case, with its rows in the memory of `rows_on`, and its training
    settings.
    """
    tiers = TierConfig(device=rows_on)
    if "shipped" in case:
        model = build_model(case["shipped"], schema(), ROWS, seed=3, optimizer=case["rows"], tiers=tiers)
        return model, TrainConfig(**case["train"])
    sizes = {} if case["kind"] == "lr" else {"embedding_dim": 8}
    config: Any = score_of(case["kind"]).config(**sizes, **case.get("model", {}))
    pooling = case.get("pooling", "target_attention" if case["kind"] == "din" else "mean")
    config = replace(config, history=HistoryConfig(pooling=pooling))
    config = small(config) if case.get("small") else config
    rows = case.get("rows", RowOptimizerConfig(kind="adagrad", learning_rate=0.05))
    tiers = replace(
        tiers, tables={"item": TableTier(home="dram", cache_rows=64)} if case.get("tiers") else {}
    )
    model = build_model(config, schema(), ROWS, seed=3, optimizer=rows, tiers=tiers)
    return model, TrainConfig(**case.get("train", {}))


def pipeline_of(case: dict[str, Any], device: str, rows_on: str = "cpu") -> TrainPipeline:
    """Return the pipeline of the model of a case, on a device."""
    model, train = built(case, rows_on)
    model.place(open_device(device))
    model.train()
    nothing: Any = None
    return build_pipeline(model, build_optimizer(train.dense, model.network), train, nothing)


def batch_of(case: dict[str, Any], step: int) -> Batch:
    """Return the batch of a step."""
    given = batch(seed=step)
    return given if case.get("grouped") else given.expanded(("item", "os", "tags", "history"))


def losses(case: dict[str, Any], device: str, steps: int, rows_on: str = "cpu") -> list[float]:
    """Return the loss of each step, and the mean of the scores after the last step."""
    pipeline, results = pipeline_of(case, device, rows_on), []
    with torch_settings(threads=1):
        for step in range(steps):
            lazy_device.WAITS.clear()
            results.append(pipeline.train(step, batch_of(case, step)).loss)
            if device != "cpu":
                assert lazy_device.WAITS in ([], ["event"]), lazy_device.WAITS
        pipeline.model.eval()
        with torch.no_grad(), pipeline.average.shown():
            results.append(float(pipeline.model(batch_of(case, 0)).mean().cpu()))
    pipeline.model.embeddings.close()
    return results


def compare(names: Sequence[str], steps: int) -> None:
    """Print, as JSON, the losses of each case on the CPU and on the device; models are small for
    many steps.
    """
    cases = {name: {**CASES[name], "small": steps > 40} for name in names}
    print(
        json.dumps(
            {
                name: [losses(case, device, steps) for device in ("cpu", "lazy")]
                for name, case in cases.items()
            }
        )
    )


@contextmanager
def damaged(patch: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes, each named by its path, within the context."""
    before = []
    for path, other in patch.items():
        owner, name = pydoc.locate(path.rpartition(".")[0]), path.rpartition(".")[2]
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, other)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


_WAIT, _MEAN = lazy_device.Stream.wait_event, Objective.of_targets
_LOSS = "stratarec.training.steps.loss.Objective.of_targets"
FAULTS: dict[str, dict[str, Any]] = {
    "the network does not wait for what goes up": {
        "lazy_device.Stream.wait_event": lambda stream, event: stream.is_main or _WAIT(stream, event)
    },
    "what comes down does not wait for the network": {
        "lazy_device.Stream.wait_event": lambda stream, event: (
            _WAIT(stream, event) if stream.is_main else None
        )
    },
    "the host does not wait": {ACCELERATOR + "DeviceTransfers.wait": lambda self: None},
    "buffers of copies are taken again too early": {
        ACCELERATOR + "_Pinned.busy": lambda self, tensor, copy: None
    },
    "batches are used before they arrive": {"stratarec.embedding.rings.Place.wait": lambda self: None},
    "the host reads a number": {
        _LOSS: lambda self, logits, batch: _MEAN(self, logits * float(logits.abs().max() < 1e9), batch)
    },
    "the host takes an array": {
        _LOSS: lambda self, logits, batch: _MEAN(
            self, logits + torch.from_numpy(logits.detach().numpy()), batch
        )
    },
}


def find() -> None:
    """Print, as JSON, by which schedule each fault is detected first, or null; under "" is no
    fault.
    """
    case = CASES["fm"]
    expected, actual = losses(case, "cpu", 3), dict[str, str | None]()
    for name, patch in {"": {}, **FAULTS}.items():
        actual[name] = None
        for schedule in lazy_device.SCHEDULES:
            lazy_device.follow(schedule)
            accelerator._OPEN.clear()  # drops the buffers of the previous run
            try:
                with damaged(patch):
                    same = losses(case, "lazy", 3) == expected
            except (AssertionError, StrataError, RuntimeError, TypeError):
                same = False
            for stream in lazy_device._STREAMS:
                stream.drain()
            if not same:
                actual[name] = schedule
                break
    print(json.dumps(actual))


def whole(root: str) -> None:
    """Compare runs on the CPU, on the device, and alternating between both, and scores on both
    devices.
    """
    home = Path(root)
    record(open_device("lazy"), {})

    def trained(name: str, device: str, at: int = 0, *, resume: bool = False) -> Recipe:
        config = tiny(
            home, run=str(home / name), device=device, max_steps=9, eval_every=5, average={"decay": 0.9}
        )
        config["model"] = {
            "kind": "dcnv2",
            "embedding_dim": 4,
            "deep_mlp": [8],
            "dropout": 0.1,
            "batch_norm": True,
        }
        recipe = Recipe.from_dict(config)
        trainer = Trainer(recipe, prepared(recipe.data))
        if at:
            interrupt(trainer, at)
        with suppress(Interrupted):
            trainer.train(resume=resume)
        return recipe

    for name in ("cpu", "lazy"):
        trained(name, name)
    trained("both", "cpu", 3)
    trained("both", "lazy", 6, resume=True)
    trained("both", "cpu", resume=True)
    same = {name: last(home / name) for name in ("cpu", "lazy", "both")}
    for name in ("lazy", "both"):
        assert_same_model(same["cpu"], same[name])
    scores = []
    line = LogitMap(knots=(0.0,), values=(0.1,), slopes=(1.2, 1.2))

    def calibrated(path: Path) -> Any:
        result = read_result(path)
        assert result is not None
        return result.model_copy(update={"calibration": (line,)})

    for device in ("cpu", None):
        with (
            mock.patch("stratarec.training.run.open_run.read_result", calibrated),
            open_run(home / "lazy", device=device) as opened,
        ):
            assert opened.model.device.type == (device or "lazy")
            scores.append(
                score_split(
                    opened.model, opened.dataset, "test", precision="float32", progress=SilentProgress()
                )
            )
    np.testing.assert_array_equal(*(part.logit for part in scores))
    print(json.dumps(len(scores[0].logit)))


_UPDATE = TrainPipeline.update_network
_PIN = lazy_device.Driver.__base__.pinned
_TAKEN = accelerator._Pinned._allocate
_FAILING: set[str] = set()


def _failing_update(pipeline: TrainPipeline, step: int) -> None:
    """Fail from the sixth step on, as `_FAILING` selects."""
    if step == 5:
        lazy_device.Chip.broken = "chip" in _FAILING
        lazy_device.Chip.limit = lazy_device.Chip.held * ("memory" in _FAILING)
        if "pinned" in _FAILING:
            # torch refuses it here
            accelerator._Pinned._allocate = lambda self, size: _PIN(self._driver, size)
    _UPDATE(pipeline, step)


def failures(root: str) -> None:
    """Print, as JSON, the reports of runs whose device fails; each run resumes on the CPU with
    bitwise equal results.

    A run without pinned memory does not fail.
    """
    home, errors = Path(root), {}
    record(open_device("lazy"), {})

    class Said(SilentProgress):
        def say(self, text: str) -> None:
            errors[name] = errors.get(name, []) + [text] * ("pinned" in text)

    def trained(name: str, device: str, *, resume: bool = False) -> None:
        cadence = {"every_steps": 2, "keep": 2}
        config = tiny(
            home, run=str(home / name), device=device, max_steps=9, eval_every=5, checkpoint=cadence
        )
        config["model"] = {"kind": "dcnv2", "embedding_dim": 4, "deep_mlp": [8]}
        recipe = Recipe.from_dict(config)
        Trainer(recipe, prepared(recipe.data), Said()).train(resume=resume)

    name = "whole"
    trained(name, "cpu")
    for name in ("chip", "memory", "pinned"):
        _FAILING.add(name)
        with damaged({"stratarec.training.steps.step.TrainPipeline.update_network": _failing_update}):
            try:
                trained(name, "lazy")
            except StrataError as error:
                errors.setdefault(name, []).append(str(error))
        _mended()
        trained(name, "cpu", resume=True)
        assert_same_model(last(home / "whole"), last(home / name))
    print(json.dumps(errors))


def _mended() -> None:
    """Repair the device."""
    _FAILING.clear()
    lazy_device.Chip.broken = lazy_device.Chip.short = False
    lazy_device.Chip.limit = 0
    accelerator._Pinned._allocate = _TAKEN  # type: ignore[method-assign]
    accelerator._OPEN.clear()
    for stream in lazy_device._STREAMS:
        stream.forget()


def _limited(size: int) -> None:
    """Limit the free memory of the device to `size` bytes."""
    lazy_device.Chip.limit = 0
    lazy_device.Chip.short = False
    gc.collect()
    for stream in lazy_device._STREAMS:
        stream.drain()
    lazy_device.Chip.limit = lazy_device.Chip.held + size


def small_memory(root: str) -> None:
    """Print, as JSON, the messages about a batch, and about one sample, that exceed the memory of
    the device.
    """
    home, errors, chip = Path(root), [], lazy_device.Chip
    record(open_device("lazy"), {})

    def trained(samples: int) -> int:
        """Return the peak memory of the tensors of a training."""
        recipe = Recipe.from_dict(
            tiny(home, run=str(home / f"run{samples}"), device="lazy", max_steps=3, batch_size=samples)
        )
        chip.most = chip.held
        before = chip.held
        # Evaluations use batches of 8,192 samples, whose activations exceed those of these
        # trainings.
        with damaged({"stratarec.training.evaluate.BATCH": 32}):
            Trainer(recipe, prepared(recipe.data)).train(overwrite=True)
        return chip.most - before

    room = trained(128)
    for samples, size in ((512, room), (4, 4 << 10)):
        _limited(size)
        try:
            trained(samples)
        except StrataError as error:
            errors.append(str(error))
        if samples > 4:
            _limited(room)
            trained(int(errors[-1].rpartition("batch_size to ")[2].partition(",")[0]))
    print(json.dumps(errors))


def verified() -> None:
    """Print, as JSON, the findings of a doctor for the device, and for a device with wrong results.

    Plans of steps on the device use the measured figures.
    """
    results, figures = [], dict[str, float]()
    for patch, most in (({}, None), ({"lazy_device.run": _damaged_run}, 1)):
        with damaged(patch):
            findings = list(islice(verify(open_device("lazy"), Sizes(2, 32, 1 << 16, models=1)), most))
            results.append([each for each, _ in findings if each.change])
            figures |= {name: figure for _, more in findings for name, figure in more.items()}
    record(open_device("lazy"), figures)
    assert device_rates("lazy").up_bytes == figures["up_bytes"]
    print(json.dumps(results))


_RUN = lazy_device.run


def _damaged_run(func: Any, args: Any, options: dict[str, Any]) -> Any:
    """Run an operation with slightly wrong sums."""
    result = _RUN(func, args, options)
    return result * 0.999 if func is torch.ops.aten.segment_reduce.default else result


def run(code: str, schedule: str = "random1", **options: Any) -> Any:
    """Return the JSON that `code` prints in a process with a lazy device."""
    head = (
        f"import sys; sys.path[:] = {sys.path!r}\nimport lazy_device\nlazy_device.install({schedule!r})\n"
    )
    # Segments of samples are used however few ids they save.
    head += "import device_jobs\ndevice_jobs.request_module._LEAST_SAVED = float('-inf')\n"
    done = forked.python(head + code, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
