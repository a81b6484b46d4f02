"""Comparison of a data set with a recipe, and with the data set that a model was trained on.

A recipe's data section and the data set at its path can change independently. The recipe's settings
are compared field by field with the settings of the data set. These fields may differ:

- ``path``, and the ``paths`` of the logs if these have the same content or do not exist;
- ``on_bad_row``, which decides whether bad rows are refused, and does not change the good rows;
- ``shard_samples``, which limits the memory of `prepare` and changes only how samples are divided
  into files;
- ``keep_rows``, because training does not read row numbers;
- ``vocabulary.base``, if it names the same data set or one that does not exist.

A model depends on a data set's *inputs*: features, the values of vocabularies in order of id, and
moments, up to rounding. Evaluation, prediction and export require equal inputs. Resuming training
requires the same fingerprint, which covers all contents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stratarec.config.validate import Difference, first_difference
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.sources import open_source
from stratarec.data.sources.base import LIMITS
from stratarec.errors import ConfigError, DataError, DatasetError

_FREE = ("on_bad_row", "shard_samples", "keep_rows")
# Relative tolerance, because sums of the same numbers in another order differ in their last digits.
_TOLERANCE = 1e-6


def settings(config: PrepareConfig) -> dict[str, Any]:
    """Return the data section of a recipe as JSON, without the paths of the data set, the logs and
    the base.
    """
    content: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    del content["path"]
    del content["vocabulary"]["base"]
    for name in ("paths", *LIMITS):
        content["source"].pop(name, None)
    return content


def check_prepared(config: PrepareConfig, dataset: Dataset) -> str:
    """Check that a data set was prepared with the settings and logs of the recipe.

    Returns
    -------
    str
        A message about what could not be compared; empty if everything was compared.

    Raises
    ------
    ConfigError
        If a setting or a log differs. The message names the field and both values.
    """
    prepared = dataset.about.origin
    difference = settings_difference(settings(config), prepared.settings, _FREE)
    if difference is not None:
        raise ConfigError(
            f"data.{difference.field} is {difference.want!r} in the recipe, but {dataset.path} was "
            "prepared with "
            f"{difference.have!r}: prepare it again with --overwrite or at another data.path, "
            "or set the field to that"
        )
    return "; ".join(filter(None, (_compare_base(config, dataset), _compare_logs(config, dataset))))


def _compare_base(config: PrepareConfig, dataset: Dataset) -> str:
    """Raise `ConfigError` if the base differs; return a message if it could not be compared."""
    path, base = config.vocabulary.base, dataset.about.origin.base
    if bool(path) == (base is not None):
        if not path:
            return ""
        try:
            fingerprint = Dataset.open(path, verify="used").fingerprint
        except DatasetError as error:
            return f"cannot compare data.vocabulary.base with the base of {dataset.path}: {error}"
        if fingerprint == base:
            return ""
    other = "no base" if base is None else "another data set"
    raise ConfigError(
        f"data.vocabulary.base is {path!r} in the recipe, but {dataset.path} was prepared on {other}: "
        "prepare it again with --overwrite, or at another data.path"
    )


def _compare_logs(config: PrepareConfig, dataset: Dataset) -> str:
    """Raise `ConfigError` if the content of the logs differs; return a message if it could not be
    compared.
    """
    prepared = dataset.about.origin
    paths = list(getattr(config.source, "paths", ()))
    if paths == list(dataset.about.paths):
        return ""
    try:
        source = json.loads(
            json.dumps(
                open_source(config.source, on_bad_row=config.on_bad_row, split=config.split).fingerprint()
            )
        )
    except DataError as error:
        return f"cannot compare the recipe's logs with those that {dataset.path} was prepared from: {error}"
    if source != prepared.source:
        raise ConfigError(
            f"data.source.paths is {paths!r} in the recipe, but {dataset.path} was prepared from logs with "
            "other "
            f"content ({list(dataset.about.paths)!r}): prepare it again with "
            "--overwrite, or at another data.path"
        )
    return ""


def settings_difference(
    want: Mapping[str, Any], have: Mapping[str, Any], free: tuple[str, ...] = ()
) -> Difference | None:
    """Return the first difference between settings outside the fields `free`. The source's kind is
    compared first.
    """
    kinds = [{"source.kind": settings["source"]["kind"]} for settings in (want, have)]
    compared = [{key: settings[key] for key in settings if key not in free} for settings in (want, have)]
    return first_difference(kinds[0], kinds[1]) or first_difference(compared[0], compared[1])


def input_difference(dataset: Dataset, trained_on: Mapping[str, Any]) -> str:
    """Return why a model that was trained on the inputs `trained_on` cannot use `dataset`; empty if
    it can.
    """
    for name, entry in dataset.inputs()["vocabularies"].items():
        theirs = trained_on["vocabularies"].get(name, entry)
        if theirs != entry:
            counts = [
                f"{v['values']:,} values and {v['tail_buckets']} tail buckets" for v in (entry, theirs)
            ]
            alike = counts[0] == counts[1]
            detail = "other values, or the same in another order" if alike else " instead of ".join(counts)
            if {**theirs, "first_rows": entry["first_rows"]} == entry:
                return (
                    f"vocabulary {name!r} had {entry['first_rows']:,} rows in the first of its base data "
                    f"sets, and in the run {theirs['first_rows']:,}, so new rows would "
                    "start with other weights"
                )
            return f"vocabulary {name!r} has {detail}, so ids mean other values than in training"
    return feature_difference(dataset, trained_on)


def feature_difference(dataset: Dataset, trained_on: Mapping[str, Any]) -> str:
    """Return the first difference as `input_difference` does, but without comparing the values of
    vocabularies.
    """
    mine = dataset.inputs()
    if len(mine["dense"]) == len(trained_on["dense"]):
        mine["dense"] = list(map(_same_figures, mine["dense"], trained_on["dense"]))
    now, then = (
        {part: inputs[part] for part in inputs if part != "vocabularies"} for inputs in (mine, trained_on)
    )
    difference = first_difference(now, then)
    return (
        ""
        if difference is None
        else f"{difference.field} is {difference.want!r}, and was {difference.have!r} in training"
    )


def _same_figures(mine: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """Return `mine`, but with the mean and deviation of `trained` where the difference is only
    rounding.

    Both describe the same dense input: in this data set, and in the data set of the training.
    """
    margin = _TOLERANCE * trained.get("deviation", 0.0)
    close = {
        key: trained[key]
        for key in ("mean", "deviation")
        if key in mine and key in trained and abs(mine[key] - trained[key]) <= margin
    }
    return {**mine, **close}
