"""A click model with the interface of scikit-learn's estimators, trained and scored on frames
without files.

`ClickModel.fit` does what the commands do: it writes the frame to a temporary directory, drafts a
recipe as `stratarec init` does (or uses the given one), prepares, trains, and exports. The fitted
model is the export; all other files are removed. scikit-learn itself is not needed.
"""

from __future__ import annotations

import copy
import os
import shutil
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.cli.init.draft import content_of
from stratarec.cli.init.numbers import typed
from stratarec.data.columns.converter import BadRows, Converter
from stratarec.data.columns.frames import FRAME
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import LabelRule, Schema
from stratarec.data.splits import SPLITS
from stratarec.data.user_history import Events, read_events
from stratarec.errors import ConfigError, DataError, DatasetError, ExportError, StorageError
from stratarec.estimator.frame_log import (
    FitArguments,
    FrameLog,
    check_rows,
    encode_labels,
    is_array,
    label_column,
    read_labels,
    read_rows,
    read_weights,
    split_log,
)
from stratarec.io.atomic import check_output, file_hash, rename_directory, storage_errors, working_directory
from stratarec.io.scratch import temporary_directory
from stratarec.io.sealed import Model, read_sealed, write_sealed
from stratarec.models.metrics import evaluate_logits
from stratarec.recipe import Recipe, leaves, read_content, with_values
from stratarec.serving.scorer import Scorer
from stratarec.training.export.export import export
from stratarec.training.resolve import choose_defaults
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer

_STATE, _EXPORT, _FORMAT = "estimator.json", "export", 2
_EVENTS = "events.parquet"
_ADVICE = "save the model again"


class _State(Model):
    """State of a saved model, in addition to its export."""

    format: Literal[2]
    classes: tuple[str | int | float | bool, str | int | float | bool]
    columns: tuple[str, ...]
    given: dict[str, Any] | None
    """Recipe that was passed to the constructor."""
    events: str
    """Hash of the file with the events of users; empty for a model without histories."""
    settings: dict[str, Any]
    recipe: dict[str, Any]
    result: dict[str, Any]


class ClickModel:
    """Classifier for clicks, or any label with two classes, with the interface of scikit-learn's
    estimators.

    Parameters
    ----------
    recipe : path, mapping or Recipe, optional
        Recipe to train by; its log and splits are ignored. By default a recipe is drafted from the
        frame, as ``stratarec init`` does.
    **settings
        Fields of the recipe that override its values. A name has ``__`` in place of the dot:
        ``train__epochs=3``, ``model__kind="deepfm"``, ``memory__precision="int8"``.

    Attributes
    ----------
    classes_ : array
        ``[2]``, the two values of the label. The second class is the positive one.
    recipe_ : dict
        The complete recipe that was trained.
    result_ : dict
        Result of the training: validation metrics, seconds, bytes.
    n_features_in_, feature_names_in_
        Number and names of the columns of the frame, without the label.

    Notes
    -----
    If the recipe has histories (``kind: history``), a frame to score needs the columns of users and
    times. Each row then gets its user's history from the training log. Instead, the frame may have
    a column of lists for each history, as for `Scorer`. `evaluate` and `score` also add earlier
    positive rows of the frame to the histories.

    Examples
    --------
    >>> import polars as pl
    >>> from stratarec import ClickModel
    >>> log, tomorrow = pl.read_csv("clicks.csv"), pl.read_csv("tomorrow.csv")
    >>> model = ClickModel("clicks.yaml", train__epochs=2).fit(log, label="clicked")
    >>> model
    ClickModel(recipe='clicks.yaml', train__epochs=2)
    """

    # The recipe as it was passed in; `recipe_` is the complete one.
    _recipe_argument: dict[str, Any] | None = None
    _histories: Histories | None = None

    def __init__(
        self, recipe: str | Path | Mapping[str, Any] | Recipe | None = None, **settings: Any
    ) -> None:
        self.recipe = recipe
        self._settings = settings

    # The methods that scikit-learn needs to copy a model, search over its settings, or put it into
    # a pipeline.

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments of the constructor.

        Examples
        --------
        >>> model.get_params()
        {'recipe': 'clicks.yaml', 'train__epochs': 2}
        """
        return {"recipe": self.recipe, **self._settings}

    def set_params(self, **params: Any) -> ClickModel:
        """Change arguments of the constructor and return the model. Unknown names are refused by
        `fit`.

        Examples
        --------
        >>> ClickModel("clicks.yaml").set_params(train__batch_size=256)
        ClickModel(recipe='clicks.yaml', train__batch_size=256)
        """
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
        params = {name: value for name, value in self.get_params().items() if value is not None}
        return f"ClickModel({', '.join(f'{name}={value!r}' for name, value in params.items())})"

    def fit(
        self,
        frame: Any,
        y: Any = None,
        *,
        label: str | None = None,
        valid: Any = None,
        sample_weight: Any = None,
    ) -> ClickModel:
        """Train on a frame, and return the model.

        Parameters
        ----------
        frame : DataFrame, mapping of columns, 2-d array, or path
            A DataFrame of Polars or pandas, a pyarrow table, or a mapping of lists, arrays or
            series, with raw values. For logs larger than memory, pass a path or a list of paths;
            logs are read in parts.
        y : array, optional
            ``[N]`` labels with two distinct values, if the label is not a column of `frame`.
        label : str, optional
            Column of `frame` with the label. If neither `y` nor `label` is given, the column is
            guessed as by ``init``.
        valid : as `frame`, or (frame, y), optional
            Validation samples, which decide when training stops. By default a tenth of `frame`: the
            last in time if it has times, else random rows of each class. The model is then trained
            on them, too; it is not trained on samples that are passed here, unless ``train__refit``
            is true.
        sample_weight : array, optional
            ``[N]`` weights, at least 0, of the loss of each sample.

        Raises
        ------
        ConfigError, DataError
            If the frame or a setting is wrong. The message names the column and row, or the field.

        Examples
        --------
        >>> features = log.drop("clicked")
        >>> ClickModel("clicks.yaml", train__max_steps=5).fit(features, log["clicked"]).classes_
        array([0, 1])
        """
        arguments = FitArguments(frame, y, label or "", sample_weight)
        with temporary_directory() as folder:
            log = arguments.write(folder / "train.parquet")
            chosen = None
            if valid is not None:
                features, labels = valid if isinstance(valid, tuple) else (valid, None)
                chosen = FitArguments(features, labels, log.label, None).write(
                    folder / "valid.parquet", like=log
                )
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
        defaults = choose_defaults(recipe, leaves(content), dataset)
        # Rows that the caller names for validation are not trained, and a small frame has none.
        if "train.refit" not in settings and (
            valid is not None or not any(map(dataset.samples, SPLITS[1:]))
        ):
            defaults["train.refit"] = False
        recipe = recipe.with_fields(defaults)
        result = Trainer(recipe, dataset).train()
        with open_run(recipe.run) as trained:
            export(trained, folder / _EXPORT)
        events = dataset.events()
        self._histories = None if events is None else Histories(events, dataset.schema)
        self._take(folder / _EXPORT, recipe.to_dict(), result)
        self.classes_ = np.array([0, 1]) if log.classes is None else log.classes
        self._name(log.columns or dataset.schema.scored_columns)

    def _content(self, log: FrameLog) -> dict[str, Any]:
        """Return the recipe for the files of a log, with splits, as plain data."""
        self._recipe_argument = None if self.recipe is None else _plain(self.recipe)
        if self._recipe_argument is None:
            content = content_of(log.paths, log.label)
            schema = content["data"]["source"]["schema"]
            for part in ("dense", "sparse"):
                schema[part] = [
                    feature for feature in schema.get(part, ()) if feature["name"] != log.weight
                ]
            if log.is_frame and content["data"]["split"]["by"] == "fraction" and schema.get("user"):
                # Without times, validation rows are drawn at random from all users, not only from
                # new users.
                user = schema.pop("user")
                # Without `of`, the draft divides users among splits, so it has no feature of them.
                if not content["data"]["split"].pop("of", ""):
                    schema["sparse"].append({"name": user})
        else:
            content = copy.deepcopy(self._recipe_argument)
            source = content.get("data", {}).get("source", {})
            if not isinstance(source.get("schema"), Mapping):
                raise ConfigError(
                    "the recipe has no data.source.schema; add one that names the label and the features"
                )
            schema = dict(source["schema"])
            # The label was passed as y, or is another column than the recipe's.
            if log.label and log.label != label_column(schema):
                schema.pop("labels", None)
                schema["label"] = log.label
            source = {"kind": "parquet"} if log.is_frame else source
            content["data"]["source"] = {**source, "paths": list(log.paths), "schema": schema}
        if log.weight:
            schema["weight"] = log.weight
        return content

    def _take(self, folder: Path, recipe: dict[str, Any], result: dict[str, Any]) -> None:
        """Copy the export in `folder` to a directory that is deleted together with the model, and
        open it.
        """
        scratch = temporary_directory()
        # The directory is deleted with the scorer, whose tables are mapped from its files. Copies
        # of a model share the scorer and the directory.
        try:
            shutil.copytree(folder, scratch.path / _EXPORT)
            self._scorer = Scorer.open(scratch.path / _EXPORT)
            self._export = scratch.path / _EXPORT
        except BaseException:
            scratch.close()
            raise
        weakref.finalize(self._scorer, scratch.close)
        self.recipe_ = recipe
        self.result_ = result

    def _name(self, columns: tuple[str, ...]) -> None:
        self.feature_names_in_ = np.array(columns, dtype=object)
        self.n_features_in_ = len(columns)

    def predict_proba(self, frame: Any) -> NDArray[np.float64]:
        """Return ``[N, 2]`` probabilities of `classes_`. ``stratarec predict`` and `Scorer` give
        the same probabilities.

        Parameters
        ----------
        frame : DataFrame, mapping of columns, 2-d array, or path
            As for `fit`. Files are read whole, with the source settings of the recipe; labels are
            not needed.

        Raises
        ------
        DataError
            If a column is missing or a value does not fit the type of its column. The message names
            the column.

        Examples
        --------
        >>> model.predict_proba(tomorrow.head(2)).round(2)
        array([[0.75, 0.25],
               [0.74, 0.26]])
        """
        return self._probabilities(self._read(frame), None)

    def _read(self, frame: Any) -> dict[str, pl.Series]:
        """Return the columns of a frame or of files."""
        self._check_fitted()
        columns = read_rows(frame, lambda: Recipe.from_dict(self.recipe_).data.source)
        if len(columns) != self.n_features_in_ and is_array(frame):
            raise DataError(
                f"X has {len(columns)} features, but ClickModel is expecting "
                f"{self.n_features_in_} features as input"
            )
        return columns

    def _probabilities(
        self, columns: Mapping[str, pl.Series], truth: NDArray[np.bool_] | None
    ) -> NDArray[np.float64]:
        """Score rows. `truth` flags positive rows, which are then part of the histories of later
        rows.
        """
        histories = {} if self._histories is None else self._histories.columns(columns, truth)
        positive = self._scorer.score({**columns, **histories}).astype(np.float64)
        return np.stack([1 - positive, positive], axis=1)

    def predict(self, frame: Any) -> NDArray[Any]:
        """Return the more likely class of each row, ``[N]``.

        Examples
        --------
        >>> model.predict(tomorrow.head(2))
        array([0, 0])
        """
        likely = self.predict_proba(frame)[:, 1] >= 0.5
        classes: NDArray[Any] = self.classes_[likely.astype(np.int64)]
        return classes

    def score(self, frame: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the accuracy, as scikit-learn's classifiers do; for AUC and other metrics see
        `evaluate`.

        Labels are `y`, or the label column of `frame`.

        Examples
        --------
        >>> round(model.score(tomorrow), 1)
        0.8
        """
        columns = self._read(frame)
        truth = self._truth(columns, y)
        likely = self._probabilities(columns, truth)[:, 1] >= 0.5
        weight = None if sample_weight is None else read_weights(sample_weight)
        return float(np.average(truth == likely, weights=weight))

    def evaluate(self, frame: Any, y: Any = None, sample_weight: Any = None) -> dict[str, Any]:
        """Return the metrics of ``stratarec evaluate``: AUC, log loss, normalized entropy,
        calibration, and more.

        Labels are `y`, or the label column of `frame`.

        Examples
        --------
        >>> metrics = model.evaluate(tomorrow)
        >>> metrics["samples"], metrics["auc"] > 0.5
        (390, True)
        """
        columns, weight = self._read(frame), None if sample_weight is None else read_weights(sample_weight)
        truth = self._truth(columns, y)
        positive = np.clip(self._probabilities(columns, truth)[:, 1], 1e-12, 1 - 1e-12)
        return evaluate_logits(
            truth.astype(np.float64), np.log(positive / (1 - positive)), weight=weight
        ).to_dict()

    def _truth(self, columns: Mapping[str, pl.Series], y: Any) -> NDArray[np.bool_]:
        """Return ``[N]`` flags: whether the label of a row is the second, positive class."""
        if y is None:
            name = self._scorer.labels[0]
            labels = columns.get(name)
            if labels is None:
                raise DataError(
                    f"the frame has no column {name!r}, which is the label; pass the labels as y"
                )
        else:
            labels = read_labels(y)
        is_text = labels.dtype == pl.String
        rule = self._scorer.manifest.columns.label_rules[0]
        if isinstance(rule, LabelRule):
            numbers = 1 + np.arange(len(labels), dtype=np.int64)
            converter = Converter(FRAME, numbers, BadRows(None), from_text=is_text)
            converted = converter.convert(labels.alias(rule.column).to_frame(), Schema(label=rule))
            return converted[rule.column].to_numpy().astype(bool)
        if is_text and self.classes_.dtype.kind in "bif":  # as in a text file
            labels, _ = typed(labels)
        return encode_labels(labels, self.classes_).to_numpy().astype(bool)

    def _check_fitted(self) -> None:
        if hasattr(self, "classes_"):
            return
        message = "this ClickModel is not fitted: call fit first"
        if "sklearn" in sys.modules:  # its tools catch its own error
            from sklearn.exceptions import NotFittedError

            raise NotFittedError(message)
        raise ConfigError(message)

    def save(self, path: str | Path) -> Path:
        """Write the model to a new directory, completely or not at all, and return the directory.

        The directory contains only data and no code: an export, as ``stratarec export`` writes it,
        and the parameters of this estimator.

        Raises
        ------
        StorageError
            If `path` exists, or cannot be written.

        Examples
        --------
        >>> model.save("model")
        PosixPath('model')
        """
        self._check_fitted()
        path = Path(path)
        if os.path.lexists(path):
            raise StorageError(f"cannot write {path}: it exists; name another directory")
        check_output(path)
        settings = {name: value for name, value in self._settings.items() if _is_plain(value)}
        state = {
            "format": _FORMAT, "classes": self.classes_.tolist(), "columns": list(self.feature_names_in_),
            "given": self._recipe_argument, "settings": settings, "recipe": self.recipe_, "result": self.result_,
            "events": "",
        }  # fmt: skip
        with storage_errors(path), working_directory(path, (_EXPORT, _STATE, _EVENTS)) as temporary:
            shutil.copytree(self._export, temporary / _EXPORT)
            if self._histories is not None:
                self._histories.write(temporary)
                state["events"] = file_hash(temporary / _EVENTS)
            write_sealed(temporary / _STATE, state)
            rename_directory(temporary, path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> ClickModel:
        """Read a model that `save` wrote. All files are checked, and no code in them is run.

        Raises
        ------
        ExportError
            If a file is missing, damaged, or of another kind.

        Examples
        --------
        >>> saved = model.save("saved")
        >>> ClickModel.load(saved).score(tomorrow) == model.score(tomorrow)
        True
        """
        path = Path(path)
        state = read_sealed(path / _STATE, _State, _ADVICE, ExportError)
        model = cls(state.given)
        model._recipe_argument = state.given
        model._settings = state.settings
        model._take(path / _EXPORT, state.recipe, state.result)
        if state.events:
            model._histories = Histories.read(path, state.events, state.recipe)
        model.classes_ = np.array(state.classes)
        model._name(state.columns)
        return model

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, for copies and worker processes. It includes the bytes of the
        export's files.
        """
        state = {name: value for name, value in vars(self).items() if name not in ("_scorer", "_export")}
        if hasattr(self, "_export"):
            files = (path for path in sorted(self._export.rglob("*")) if path.is_file())
            state["_files"] = {
                path.relative_to(self._export).as_posix(): path.read_bytes() for path in files
            }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        files = state.pop("_files", None)
        vars(self).update(state)
        if files is not None:
            with temporary_directory() as folder:
                for place, content in files.items():
                    target = folder / _EXPORT / place
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content)
                self._take(folder / _EXPORT, self.recipe_, self.result_)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | tuple | dict)


def _plain(recipe: Any) -> dict[str, Any]:
    """Return the content of a recipe as plain data; changing it does not change the recipe."""
    content = recipe.to_dict() if isinstance(recipe, Recipe) else recipe
    content = read_content(content) if isinstance(content, str | Path) else content
    if not isinstance(content, Mapping):
        raise ConfigError(f"recipe is a {type(recipe).__name__}, expected a path, a mapping or a Recipe")
    return with_values(content, {})


class Histories:
    """The last positive rows of each user in a training log, which form the histories of later
    rows.

    Parameters
    ----------
    events : DataFrame
        User, time and the features of the histories, as in `Dataset.events`.
    schema : Schema
        Schema of the log, with histories.
    """

    def __init__(self, events: pl.DataFrame, schema: Schema) -> None:
        self._events = events
        self._schema = schema

    def columns(
        self, columns: Mapping[str, pl.Series], positive: NDArray[np.bool_] | None = None
    ) -> dict[str, pl.Series]:
        """Return a column of lists for each history; empty if the frame already has these columns.

        Parameters
        ----------
        columns : mapping of str to Series
            The columns of the frame.
        positive : array, optional
            ``[N]`` flags of the positive rows of the frame, which are added to the histories of
            later rows.
        """
        schema = self._schema
        if any(feature.name in columns for feature in schema.histories):
            return {}
        needed = {feature.of for feature in schema.histories} if positive is not None else set()
        names = [schema.user, schema.time, *needed]
        for name in names:
            if name not in columns:
                raise DataError(
                    f"{FRAME}: no column {name!r}, from which histories are built; add it, or a column of "
                    f"lists for each of {', '.join(feature.name for feature in schema.histories)}"
                )
        raw = pl.DataFrame([columns[name].alias(name) for name in dict.fromkeys(names)])
        sparse = tuple(feature for feature in schema.sparse if feature.name in needed)
        rows = Converter(FRAME, 1 + np.arange(len(raw), dtype=np.int64), BadRows(None)).convert(
            raw, schema.reduced(sparse)
        )
        logs = [self._events.with_columns(pl.lit(1, pl.UInt8).alias(schema.label_column))]
        if positive is not None:
            logs.append(rows.with_columns(pl.Series(schema.label_column, positive.astype(np.uint8))))
        return Events(logs, schema).histories(rows)

    def write(self, folder: Path) -> None:
        """Write the events into a directory."""
        self._events.write_parquet(folder / _EVENTS)

    @classmethod
    def read(cls, folder: Path, expected: str, recipe: Mapping[str, Any]) -> Histories:
        """Read what `write` wrote. Raises `ExportError` if its hash is not `expected` or it is
        damaged.
        """
        path, schema = folder / _EVENTS, getattr(Recipe.from_dict(recipe).data.source, "schema", None)
        try:
            if schema is None or file_hash(path) != expected:
                raise ExportError(f"{path} is damaged: its hash does not match; save the model again")
            return cls(read_events(path, schema), schema)
        except (OSError, DatasetError) as error:
            raise ExportError(f"{path} cannot be read: {error}; save the model again") from error
