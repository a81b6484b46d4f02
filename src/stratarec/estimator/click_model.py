"""A click model with the interface of scikit-learn's estimators: a frame in, probabilities out, no file to write.

`ClickModel.fit` does what the commands do, one after the other: it writes the frame to a temporary directory, drafts a
recipe as `stratarec init` does (or takes the one that it is given), prepares, trains, and exports. What is fitted is
the export; everything else is removed. scikit-learn itself is not needed.
"""

from __future__ import annotations

import copy
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.cli.init.draft import content_of
from stratarec.data.columns.frames import read_columns
from stratarec.data.prepare.prepare import prepare
from stratarec.errors import ConfigError, DataError, ExportError, StorageError
from stratarec.estimator.frame_log import (
    FrameLog,
    Given,
    check_rows,
    encoded,
    is_array,
    read_labels,
    read_weights,
    split_log,
)
from stratarec.estimator.histories import EVENTS, Histories
from stratarec.io.atomic import check_output, file_hash, storage_error, sync, sync_tree, working_directory
from stratarec.io.scratch import ScratchDirectory
from stratarec.io.sealed import Model, read_sealed, write_sealed
from stratarec.models.metrics import evaluate_logits
from stratarec.recipe import Recipe, leaves, read_content, with_values
from stratarec.serving.scorer import Scorer
from stratarec.training.export.export import export
from stratarec.training.resolve import choose_defaults
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

_STATE, _EXPORT, _FORMAT = "estimator.json", "export", 2
_ADVICE = "save the model again"


class _State(Model):
    """What a saved model is beside its export."""

    format: Literal[2]
    classes: tuple[str | int | float | bool, str | int | float | bool]
    columns: tuple[str, ...]
    given: dict[str, Any] | None
    """The recipe that `fit` was given."""
    events: str
    """Hash of the file of events; empty without histories."""
    settings: dict[str, Any]
    recipe: dict[str, Any]
    result: dict[str, Any]


class ClickModel:
    """A model of the probability of a click (or any label of two classes), drafted, prepared and trained by `fit`.

    Parameters
    ----------
    recipe : path, mapping or Recipe, optional
        What `fit` goes by but for the log's place and its splits; by default a recipe that is drafted from the frame,
        as ``stratarec init`` drafts one. After `fit` it is `recipe_`.
    **settings
        Fields of the recipe, ``__`` in place of the dot: ``train__epochs=3``, ``model__kind="deepfm"``,
        ``memory__precision="int8"``. They go before what the recipe says.

    Attributes
    ----------
    classes_ : array
        ``[2]``, the two values of the label; `predict_proba` gives the probability of the second in its last column.
    recipe_ : dict
        The whole recipe that the model was trained by.
    result_ : dict
        What ``train`` tells: validation metrics, seconds, bytes.
    n_features_in_, feature_names_in_
        Columns of the frame, but for the label.

    Notes
    -----
    Histories (``kind: history``) are those of the training log: a frame to score needs the columns of users and times,
    or a column of lists for each history, as `Scorer` asks for. `evaluate` and `score` add earlier positive rows of the
    frame, as ``stratarec evaluate`` does.
    """

    # What `fit` was given as recipe.
    _given: dict[str, Any] | None = None
    _histories: Histories | None = None

    def __init__(self, recipe: str | Path | Mapping[str, Any] | Recipe | None = None, **settings: Any) -> None:
        self.recipe = recipe
        self._settings = settings

    # What scikit-learn asks of whoever it copies, searches over, or puts behind others.

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments that the model was made with."""
        return {"recipe": self.recipe, **self._settings}

    def set_params(self, **params: Any) -> ClickModel:
        """Other arguments; returns the model. `fit` refuses what is no field of a recipe."""
        for name, value in params.items():
            if name == "recipe":
                self.recipe = value
            else:
                self._settings = {**self._settings, name: value}
        return self

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(multi_class=False, poor_score=True),
            input_tags=InputTags(allow_nan=True, string=True, categorical=True),
        )

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "classes_")

    def __repr__(self) -> str:
        given = {name: value for name, value in self.get_params().items() if value is not None}
        return f"ClickModel({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def fit(
        self,
        frame: Any,
        y: Any = None,
        *,
        label: str | None = None,
        valid: Any = None,
        sample_weight: Any = None,
    ) -> ClickModel:
        """Train on a frame; returns the model.

        Parameters
        ----------
        frame : DataFrame, mapping of columns, 2-d array, or path
            Of Polars or pandas, a pyarrow table, or a mapping of lists, arrays or series; values as the log has them. A
            path, or a list of them, is read as ``stratarec init`` reads logs, in pieces: for what memory does not hold.
        y : array, optional
            ``[N]`` labels, of two values; or `label`.
        label : str, optional
            The column of `frame` that is the label; by default, where `y` is none, the one that ``init`` guesses.
        valid : as `frame`, or (frame, y), optional
            What chooses when training ends; by default a tenth, by time where there is one, whole users where there
            are some.
        sample_weight : array, optional
            ``[N]``, 0 or more.

        Raises
        ------
        ConfigError, DataError
            Naming what is wrong with the frame, or the setting.
        """
        given = Given(frame, y, label or "", sample_weight)
        with _scratch("fit") as folder:
            log = given.written(folder / "train.parquet")
            chosen = None
            if valid is not None:
                features, labels = valid if isinstance(valid, tuple) else (valid, None)
                chosen = Given(features, labels, log.label, None).written(folder / "valid.parquet", like=log)
            self._fit(folder, log, chosen)
        return self

    def _fit(self, folder: Path, log: FrameLog, valid: FrameLog | None) -> None:
        content = self._content(log)
        split_log(content["data"], log, valid)
        settings = {name.replace("__", "."): value for name, value in self._settings.items()}
        places = {"name": "fit", "data.path": str(folder / "data"), "train.run": str(folder / "run")}
        content = with_values(content, {"train.report": False, **settings, **places})
        recipe = Recipe.from_dict(content)
        config = recipe.data
        for part, of in ((log, "the frame"), (valid, "valid")):
            if part is not None:
                check_rows(part, of, config)
        dataset = prepare(config)
        recipe = recipe.with_fields(choose_defaults(recipe, leaves(content), dataset))
        result = Trainer(recipe, dataset).train()
        with open_run(recipe.run) as trained:
            export(trained, folder / _EXPORT)
        events = dataset.events()
        self._histories = None if events is None else Histories(events, dataset.schema)
        self._take(folder / _EXPORT, recipe.to_dict(), result)
        self.classes_ = np.array([0, 1]) if log.classes is None else log.classes
        self._name(log.columns or dataset.schema.names)

    def _content(self, log: FrameLog) -> dict[str, Any]:
        """The recipe for the files of a log, as plain data; how they are split is as `init` drafts it."""
        self._given = None if self.recipe is None else _plain(self.recipe)
        if self._given is None:
            content = content_of(log.paths, log.label)
            schema = content["data"]["source"]["schema"]
            for part in ("dense", "sparse"):
                schema[part] = [each for each in schema.get(part, ()) if each["name"] != log.weight]
            if log.own and content["data"]["split"]["by"] == "fraction" and schema.get("user"):
                # Rows of a frame without times are drawn from users who come again, and not from new ones alone.
                schema["sparse"].append({"name": schema.pop("user")})
        else:
            content = copy.deepcopy(self._given)
            source = content.get("data", {}).get("source", {})
            if not isinstance(source.get("schema"), Mapping):
                raise ConfigError("the recipe has no data.source.schema, expected one that says what columns are")
            schema = dict(source["schema"])
            source = {"kind": "parquet"} if log.own else source
            content["data"]["source"] = {**source, "paths": list(log.paths), "schema": schema}
        if log.weight:
            schema["weight"] = log.weight
        return content

    def _take(self, folder: Path, recipe: dict[str, Any], result: dict[str, Any]) -> None:
        """Keep a copy of an export for as long as the model is there."""
        scratch = _scratch("model")
        # Goes with the scorer, whose tables lie in its files: copies of a model share both.
        try:
            shutil.copytree(folder, scratch.path / _EXPORT)
            self._scorer, self._own = Scorer.open(scratch.path / _EXPORT), scratch.path / _EXPORT
        except BaseException:
            scratch.close()
            raise
        weakref.finalize(self._scorer, scratch.close)
        self.recipe_, self.result_ = recipe, result

    def _name(self, columns: tuple[str, ...]) -> None:
        self.feature_names_in_, self.n_features_in_ = np.array(columns, dtype=object), len(columns)

    def predict_proba(self, frame: Any) -> NDArray[np.float64]:
        """``[N, 2]`` probabilities of `classes_`, those of ``stratarec predict`` and `Scorer`.

        Raises
        ------
        DataError
            Naming a column that lacks, or a value that is none of its kind.
        """
        return self._probabilities(frame, None)

    def _probabilities(self, frame: Any, truth: NDArray[np.bool_] | None) -> NDArray[np.float64]:
        """Score rows; positive rows by `truth` are in the histories of later ones."""
        self._check_fitted()
        columns = read_columns(frame)
        if len(columns) != self.n_features_in_ and is_array(frame):
            raise DataError(
                f"X has {len(columns)} features, but ClickModel is expecting {self.n_features_in_} features as input"
            )
        if self._histories is not None:
            columns |= self._histories.columns(columns, truth)
        positive = self._scorer.score(columns).astype(np.float64)
        return np.stack([1 - positive, positive], axis=1)

    def predict(self, frame: Any) -> NDArray[Any]:
        """``[N]`` the likelier of `classes_`."""
        likely = self.predict_proba(frame)[:, 1] >= 0.5
        found: NDArray[Any] = self.classes_[likely.astype(np.int64)]
        return found

    def score(self, frame: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Share of rows whose likelier class is theirs, which is what scikit-learn's classifiers score; see
        `evaluate` for AUC and the rest. Labels are `y`, or the column of `frame` that `fit` took."""
        truth = self._truth(frame, y)
        likely = self._probabilities(frame, truth)[:, 1] >= 0.5
        weight = None if sample_weight is None else read_weights(sample_weight)
        return float(np.average(truth == likely, weights=weight))

    def evaluate(self, frame: Any, y: Any = None, sample_weight: Any = None) -> dict[str, Any]:
        """What ``stratarec evaluate`` tells: AUC, log loss, normalized entropy, calibration, and more."""
        truth, weight = self._truth(frame, y), None if sample_weight is None else read_weights(sample_weight)
        positive = np.clip(self._probabilities(frame, truth)[:, 1], 1e-12, 1 - 1e-12)
        return evaluate_logits(truth.astype(np.float64), np.log(positive / (1 - positive)), weight=weight).to_dict()

    def _truth(self, frame: Any, y: Any) -> NDArray[np.bool_]:
        """``[N]``, whether a row's label is the second class."""
        self._check_fitted()
        if y is None:
            name = self._scorer.labels[0]
            labels = read_columns(frame).get(name)
            if labels is None:
                raise DataError(f"the frame has no column {name!r}, which is the label; give labels as y")
        else:
            labels = read_labels(y)
        rule = self._scorer.manifest.columns.label_rules[0]
        if not isinstance(rule, str):
            return (labels.cast(pl.Float64) >= rule.at_least).to_numpy()
        return encoded(labels, self.classes_).to_numpy().astype(bool)

    def _check_fitted(self) -> None:
        if hasattr(self, "classes_"):
            return
        message = "this ClickModel is not fitted: call fit first"
        if "sklearn" in sys.modules:  # its tools catch its own error
            from sklearn.exceptions import NotFittedError

            raise NotFittedError(message)
        raise ConfigError(message)

    def save(self, path: str | Path) -> Path:
        """Write the model into a new directory, whole or not at all; returns it. What is in it is data, no code: the
        export that ``stratarec export`` writes, and what `fit` found beside it.

        Raises
        ------
        StorageError
            When `path` is there already, or cannot be written.
        """
        self._check_fitted()
        path = Path(path)
        if os.path.lexists(path):
            raise StorageError(f"cannot write {path}: it exists; name another directory")
        check_output(path)
        settings = {name: value for name, value in self._settings.items() if _is_plain(value)}
        state = {
            "format": _FORMAT, "classes": self.classes_.tolist(), "columns": list(self.feature_names_in_),
            "given": self._given, "settings": settings, "recipe": self.recipe_, "result": self.result_, "events": "",
        }  # fmt: skip
        try:
            with working_directory(path, (_EXPORT, _STATE, EVENTS)) as temporary:
                shutil.copytree(self._own, temporary / _EXPORT)
                if self._histories is not None:
                    self._histories.write(temporary)
                    state["events"] = file_hash(temporary / EVENTS)
                write_sealed(temporary / _STATE, state)
                sync_tree(temporary)
                temporary.rename(path)
                sync(path.parent)
        except OSError as error:
            raise error if isinstance(error, StorageError) else storage_error(path, error) from error
        return path

    @classmethod
    def load(cls, path: str | Path) -> ClickModel:
        """A model that `save` wrote; nothing in it is run, all of it is checked.

        Raises
        ------
        ExportError
            Where a file is missing, damaged, or not what it should be.
        """
        path = Path(path)
        state = read_sealed(path / _STATE, _State, _ADVICE, ExportError)
        model = cls(state.given)
        model._given = state.given
        model._settings = state.settings
        model._take(path / _EXPORT, state.recipe, state.result)
        if state.events:
            model._histories = Histories.read(path, state.events, state.recipe)
        model.classes_ = np.array(state.classes)
        model._name(state.columns)
        return model

    def __getstate__(self) -> dict[str, Any]:
        """For copies and for worker processes: an export travels as its files' bytes."""
        state = {name: value for name, value in vars(self).items() if name not in ("_scorer", "_own")}
        if hasattr(self, "_own"):
            files = (each for each in sorted(self._own.rglob("*")) if each.is_file())
            state["_files"] = {each.relative_to(self._own).as_posix(): each.read_bytes() for each in files}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        files = state.pop("_files", None)
        vars(self).update(state)
        if files is not None:
            with _scratch("unpacked") as folder:
                for place, content in files.items():
                    target = folder / _EXPORT / place
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content)
                self._take(folder / _EXPORT, self.recipe_, self.result_)


def _scratch(what: str) -> ScratchDirectory:
    """A folder below ``TMPDIR``; that of a process that was killed goes with the next one's."""
    return ScratchDirectory(Path(tempfile.gettempdir()), f"stratarec-{what}-")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | tuple | dict)


def _plain(recipe: Any) -> dict[str, Any]:
    """A recipe's content, as plain data that may be changed."""
    content = recipe.to_dict() if isinstance(recipe, Recipe) else recipe
    content = read_content(content) if isinstance(content, str | Path) else content
    if not isinstance(content, Mapping):
        raise ConfigError(f"recipe is a {type(recipe).__name__}, expected a path, a mapping or a Recipe")
    return with_values(content, {})
