"""A new run that begins with the weights of an earlier one: `train --from`.

The earlier run's vocabularies are the beginnings of those of the new run's data set: they are the same, or one data
set was prepared with the other as `data.vocabulary.base`, directly or by way of others. Rows keep their numbers and
their values; those that the earlier run never trained have their initial ones, as new rows do. Network and optimizer
state are taken over; steps, schedules, the order of samples and random numbers are those of a new run. The bias
correction of Adam goes on, because its moments do. Before the first step there is a checkpoint of step 0: from then on
the run resumes without the earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stratarec.config.difference import first_difference
from stratarec.data.dataset.compatibility import feature_difference
from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.mesh import Mesh
from stratarec.embedding import RowOptimizerConfig
from stratarec.errors import CheckpointError, ConfigError
from stratarec.models import CTRModel
from stratarec.recipe.train_section import TrainConfig
from stratarec.training import checkpoint
from stratarec.training.run.open_run import hold_chosen, require_run
from stratarec.training.run.run_directory import read_recipe


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The checkpoint of an earlier run, found to be one that a new run can begin with."""

    path: Path
    rows: RowOptimizerConfig
    """Of the earlier run: how its rows take the steps that they missed."""

    def into(self, model: CTRModel, optimizer: torch.optim.Optimizer) -> None:
        """Give weights and optimizer state to a model that was not trained."""
        loaded = checkpoint.load(self.path)
        loaded.begin(model, self.rows)
        checkpoint.restore_optimizer(self.path, optimizer, loaded.optimizer)


@contextmanager
def beginning(
    earlier: str | Path, run: Path, identity: Mapping[str, Any], dataset: Dataset, mesh: Mesh
) -> Iterator[Beginning]:  # fmt: skip
    """What the new `run` of that identity, on `dataset`, begins with; held while it is read.

    Raises
    ------
    CheckpointError
        Where `earlier` is no run, has no checkpoint, or is of another model, other features or a data set that is no
        base of `dataset`: names the field.
    """
    earlier = Path(earlier)
    if earlier.resolve() == run.resolve():
        raise ConfigError(f"--from names {earlier}, the very run that is to begin: name another train.run")
    require_run(earlier)
    with ExitStack() as stack:
        recipe = read_recipe(earlier)
        found = hold_chosen(earlier, recipe, stack)
        mesh.check_same({"--from": str(found)})
        known, train = checkpoint.read_state(found)["identity"], recipe.train
        _check_model(earlier, identity, known["model"], train)
        difference = feature_difference(dataset, known["inputs"])
        if difference:
            raise CheckpointError(f"{dataset.path} does not go on from {earlier}: {difference}; {_ADVICE}")
        for name, entry in known["inputs"]["vocabularies"].items():
            _check_begins(dataset, name, earlier, entry)
        yield Beginning(path=found, rows=train.embedding)


_ADVICE = "prepare the data with the data set of that run as data.vocabulary.base"


def _check_model(earlier: Path, identity: Mapping[str, Any], model: Mapping[str, Any], train: TrainConfig) -> None:
    """Refuse weights that the new model has not, and optimizer state of another kind."""
    found = first_difference(identity["model"], model, "model")
    for part, kind in (("dense", train.dense.kind), ("embedding", train.embedding.kind)):
        want = {"kind": identity["train"][part]["kind"]}
        found = found or first_difference(want, {"kind": kind}, f"train.{part}")
    if found is not None:
        raise CheckpointError(
            f"a run cannot begin with {earlier}: {found.field} is {found.have!r} there and {found.want!r} here"
        )


def _check_begins(dataset: Dataset, name: str, earlier: Path, known: Mapping[str, Any]) -> None:
    """Refuse a `dataset` whose vocabulary does not begin with the values of the one that was `known`."""
    info, values, tail = dataset.vocabularies[name], int(known["values"]), int(known["tail_buckets"])
    if tail != info.tail_buckets or values > info.values or not _begins(dataset, name, values, known["digest"]):
        raise CheckpointError(
            f"{dataset.path} does not go on from {earlier}: vocabulary {name!r} has {info.values:,} values and "
            f"{info.tail_buckets} tail buckets, and does not begin with the {values:,} values and {tail} tail "
            f"buckets of that run; {_ADVICE}"
        )


def _begins(dataset: Dataset, name: str, values: int, digest: str) -> bool:
    if values == dataset.vocabularies[name].values:
        return dataset.vocabularies[name].digest == digest
    return dataset.vocabulary(name).digest_of(values) == digest
