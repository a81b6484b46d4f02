"""Whether a data set is what a recipe asks for, and whether it is what a model was trained on.

A recipe's data section and the data set at its path are two things: either can be changed without the other. What a
recipe asks for is compared field by field with what the data set was prepared by. These fields may differ:

- ``path``, and the ``paths`` of the logs as long as they name logs of the same content, or logs that are not here;
- ``on_bad_row``, which decides whether there is a data set at all, not what the good rows become;
- ``shard_samples``, which bounds the memory of `prepare` and deals the same samples to other files;
- ``keep_rows``, which training does not read;
- ``vocabulary.base``, as long as it leads to the same data set, or to one that is not here.

What a model can read are a data set's *inputs*: features, the values of vocabularies in order of id, and moments, up to
rounding. Evaluation, prediction and export ask for equal inputs; going on with training asks for the same fingerprint,
which is of all contents.
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
# Sums of the same numbers in another order differ in their last digits.
_TOLERANCE = 1e-6


def settings(config: PrepareConfig) -> dict[str, Any]:
    """A data section as JSON, the paths of the data set, of the logs and of the base left out."""
    content: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    del content["path"]
    del content["vocabulary"]["base"]
    for name in ("paths", *LIMITS):
        content["source"].pop(name, None)
    if content["source"].get("last_window") == "cut":  # data sets without are as they were before
        del content["source"]["last_window"]
    for feature in content["source"].get("schema", {}).get("sparse", ()):
        if not feature["weights"]:  # likewise, and left out of what is written, too
            del feature["weights"]
    return content


def check_prepared(config: PrepareConfig, dataset: Dataset) -> str:
    """Refuse a data set that was prepared by other settings, or from other logs, than a recipe says.

    Returns
    -------
    str
        What could not be compared, for the user to know; empty where nothing is left open.

    Raises
    ------
    ConfigError
        Naming the field, what the recipe says and what the data set was prepared by.
    """
    prepared = dataset.about.origin
    difference = settings_difference(settings(config), prepared.settings, _FREE)
    if difference is not None:
        raise ConfigError(
            f"data.{difference.field} is {difference.want!r} in the recipe, but {dataset.path} was prepared with "
            f"{difference.have!r}: prepare it again with --overwrite or at another data.path, or set the field to that"
        )
    return "; ".join(filter(None, (_compare_base(config, dataset), _compare_logs(config, dataset))))


def _compare_base(config: PrepareConfig, dataset: Dataset) -> str:
    """What could not be compared of the base; refused where it is another one."""
    path, known = config.vocabulary.base, dataset.about.origin.base
    if bool(path) == (known is not None):
        if not path:
            return ""
        try:
            found = Dataset.open(path, verify="used").fingerprint
        except DatasetError as error:
            return f"cannot compare data.vocabulary.base with what {dataset.path} was prepared on: {error}"
        if found == known:
            return ""
    other = "no base" if known is None else "another data set"
    raise ConfigError(
        f"data.vocabulary.base is {path!r} in the recipe, but {dataset.path} was prepared on {other}: prepare it again "
        "with --overwrite, or at another data.path"
    )


def _compare_logs(config: PrepareConfig, dataset: Dataset) -> str:
    """What could not be compared of the logs; refused where they are of other content."""
    prepared = dataset.about.origin
    paths = list(getattr(config.source, "paths", ()))
    if paths == list(dataset.about.paths):
        return ""
    try:
        source = json.loads(
            json.dumps(open_source(config.source, on_bad_row=config.on_bad_row, split=config.split).fingerprint())
        )
    except DataError as error:
        return f"cannot compare the recipe's logs with those that {dataset.path} was prepared from: {error}"
    if source != prepared.source:
        raise ConfigError(
            f"data.source.paths is {paths!r} in the recipe, but {dataset.path} was prepared from logs of other content "
            f"({list(dataset.about.paths)!r}): prepare it again with --overwrite, or at another data.path"
        )
    return ""


def settings_difference(
    want: Mapping[str, Any], have: Mapping[str, Any], free: tuple[str, ...] = ()
) -> Difference | None:
    """Where settings first differ; the kind of the source before anything else."""
    kinds = [{"source.kind": each["source"]["kind"]} for each in (want, have)]
    bare = [{key: value for key, value in each.items() if key not in free} for each in (want, have)]
    return first_difference(kinds[0], kinds[1]) or first_difference(bare[0], bare[1])


def input_difference(dataset: Dataset, trained_on: Mapping[str, Any]) -> str:
    """Why a model with the inputs `trained_on` cannot read `dataset`; empty when it can. See `Dataset.inputs`."""
    for name, entry in dataset.inputs()["vocabularies"].items():
        theirs = trained_on["vocabularies"].get(name, entry)
        if theirs != entry:
            counts = [f"{each['values']:,} values and {each['tail_buckets']} tail buckets" for each in (entry, theirs)]
            alike = counts[0] == counts[1]
            detail = "other values, or the same in another order" if alike else " instead of ".join(counts)
            if {**theirs, "first_rows": entry["first_rows"]} == entry:
                began = (
                    f"goes on from {entry['first_rows']:,} first rows, that of the run from {theirs['first_rows']:,}"
                )
                return f"vocabulary {name!r} {began}, so that rows begin with other weights"
            return f"vocabulary {name!r} has {detail}, so that ids mean other values than in training"
    return feature_difference(dataset, trained_on)


def feature_difference(dataset: Dataset, trained_on: Mapping[str, Any]) -> str:
    """As `input_difference`, of all but the values of vocabularies."""
    mine = dataset.inputs()
    if len(mine["dense"]) == len(trained_on["dense"]):
        mine["dense"] = list(map(_same_figures, mine["dense"], trained_on["dense"]))
    wanted, known = ({part: each[part] for part in each if part != "vocabularies"} for each in (mine, trained_on))
    found = first_difference(wanted, known)
    return "" if found is None else f"{found.field} is {found.want!r}, and was {found.have!r} in training"


def _same_figures(mine: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """A dense input with the figures of `known` where they differ by rounding alone."""
    margin = _TOLERANCE * known.get("deviation", 0.0)
    close = {
        key: known[key]
        for key in ("mean", "deviation")
        if key in mine and key in known and abs(mine[key] - known[key]) <= margin
    }
    return {**mine, **close}
