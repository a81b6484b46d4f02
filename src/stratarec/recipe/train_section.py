"""The ``train:`` section of a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias

from stratarec.config.choices import OneOf
from stratarec.config.validate import check_choice, check_directory, check_finite, check_ranges, check_seed
from stratarec.data.dataset.row_group import Unit
from stratarec.embedding.optimizers import RowOptimizerConfig, ScheduleConfig
from stratarec.errors import ConfigError
from stratarec.io.remote import check_store_url
from stratarec.models.dense_optimizers import DENSE_OPTIMIZERS
from stratarec.models.losses import LOSSES, AnyLossConfig, CrossEntropyConfig
from stratarec.models.metrics import MetricName

# More threads fail to start or make the machine unusable.
_MOST_THREADS = 1024
# With a larger weight, the loss of negatives is lost to float32 rounding when it is added to the
# loss of positives.
_MOST_CLASS_WEIGHT = 1e9
# Each traced step takes about 5 kB.
_MOST_TRACED = 10_000


CurveKind = Literal["tensorboard", "wandb", "mlflow"]
CalibrationKind = Literal["none", "shift", "platt", "isotonic"]
DenseOptimizerKind: TypeAlias = Annotated[str, OneOf(lambda: DENSE_OPTIMIZERS)]


@dataclass(frozen=True, kw_only=True)
class DenseOptimizerConfig:
    """Optimizer of the network."""

    kind: DenseOptimizerKind = "adam"
    learning_rate: float = 1e-3
    """Step size before the schedule."""
    weight_decay: float = 0.0
    """L2 penalty on all weights of the network, added to their gradients; for AdamW decoupled
    (Loshchilov and Hutter 2019)."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Factor on the learning rate over steps."""

    def __post_init__(self) -> None:
        check_choice(self.kind, "train.dense.kind", DENSE_OPTIMIZERS)
        check_ranges(self, "train.dense.", learning_rate="[0, inf)", weight_decay="[0, inf)")


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingConfig:
    """Choice of the best checkpoint by a validation metric, and early stopping. The best checkpoint
    is tested.
    """

    patience: int = 0
    """Stop after this many evaluations in a row without improvement; 0 never stops early."""
    metric: MetricName = "log_loss"
    """Metric to improve, of the first label if there are several. Log loss depends on calibration,
    AUC does not.
    """

    def __post_init__(self) -> None:
        check_ranges(self, "train.early_stopping.", patience="[0, inf)")


@dataclass(frozen=True, kw_only=True)
class PlateauConfig:
    """Lower learning rates when validation no longer improves."""

    patience: int = 0
    """Lower all learning rates, also of rows, after this many evaluations without improvement in a
    row; 0 for never.
    """
    factor: float = 0.1
    """Factor that multiplies all rates at each reduction."""
    min_factor: float = 1e-3
    """Smallest product of all reductions."""
    metric: MetricName = "log_loss"
    """Metric to improve, of the first label if there are several."""

    def __post_init__(self) -> None:
        check_ranges(self, "train.plateau.", patience="[0, inf)", factor="(0, 1)", min_factor="(0, 1)")


@dataclass(frozen=True, kw_only=True)
class AverageConfig:
    """Average of the network's weights over steps. Evaluations, the test and exports use the
    average.
    """

    decay: float = 0.0
    """Share of the old average that is kept in each step, such as 0.999; in the first steps it is
    smaller. 0 for no average. Rows of tables are not averaged."""

    def __post_init__(self) -> None:
        check_ranges(self, "train.average.", decay="[0, 1)")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoint schedule and number of checkpoints to keep."""

    every_steps: int = 0
    """Write a checkpoint every N steps; 0 for no checkpoints by steps."""
    every_minutes: float = 10.0
    """Write a checkpoint every N minutes; 0 for no checkpoints by time."""
    keep: int = 2
    """Number of recent checkpoints to keep. The best checkpoint is kept in addition."""

    def __post_init__(self) -> None:
        check_ranges(
            self, "train.checkpoint.", every_steps="[0, inf)", every_minutes="[0, inf)", keep="[1, inf)"
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of training: steps, optimizers, device, checkpoints, evaluation and loss."""

    run: str = ""
    """Directory of the run; if empty, ``runs/`` followed by the name of the recipe."""
    batch_size: int = 4096
    """Samples per step."""
    epochs: int = 1
    """Passes over the training split."""
    max_steps: int = 0
    """Stop after this many steps; 0 for no limit."""
    precision: Literal["float32", "bf16"] = "float32"
    """``bf16`` runs the network's matrix products in bfloat16 (autocast); embeddings stay float32.
    It is faster on GPUs and on processors with AVX-512 BF16 or AMX. On other processors it is many
    times slower, and `train` warns."""
    device: str = "cpu"
    """Device of the network: ``cpu``, or a torch device such as ``cuda``, ``cuda:1`` or ``xpu``.
    With ``cuda`` rows are trained in GPU memory, unless ``memory.hbm`` is 0; with others they stay
    in host memory."""
    threads: int = 0
    """Threads of torch and of the kernels. 0 uses the cores that CPU affinity and quota allow,
    divided among the ranks of a machine. Threads sleep while they wait if other processes use the
    cores."""
    seed: int = 0
    """Seed of initial weights and of the order of batches."""
    tree_seconds: float = 600.0
    """Limit of the time in which LightGBM fits the trees of an ensemble. A run that reaches it says
    so, because another run may have other trees."""
    dense: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    """Optimizer of the network."""
    embedding: RowOptimizerConfig = field(default_factory=RowOptimizerConfig)
    """Row optimizer of the tables."""
    clip_norm: float = 0.0
    """Scale the network's gradient down to this norm where it is larger; 0 for no clipping."""
    clip_rows: bool = False
    """Whether `clip_norm` also applies to rows: the norm then includes the summed gradients of the
    batch's rows, which are scaled too. Weight decay is added afterwards and is not part of the
    norm."""
    eval_every: int = 0
    """Evaluate on the validation split every N steps; 0 to evaluate at the end of each epoch."""
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    """Choice of the best checkpoint, which is tested, and early stopping."""
    plateau: PlateauConfig = field(default_factory=PlateauConfig)
    """Lower learning rates when validation no longer improves."""
    average: AverageConfig = field(default_factory=AverageConfig)
    """Average of the network's weights over steps."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoint schedule."""
    mirror: str = ""
    """Directory in an object store, such as ``s3://bucket/runs/clicks``, to which every checkpoint
    is copied. Training does not wait for it. With ``--resume``, a run continues from there on
    another machine. Empty for no copy."""
    log_every: int = 50
    """Number of steps between two points of the loss curve."""
    curves: tuple[CurveKind, ...] = ("tensorboard",)
    """Destinations of training and validation curves: ``tensorboard`` (in the run's directory),
    ``wandb`` or ``mlflow``. The last two need the extra of the same name and are configured by
    their environment variables."""
    trace: str = ""
    """Range of steps to trace, such as 100-120 (counted from 0). ``trace.json`` in the run then
    shows what each thread did when; open it at ui.perfetto.dev. Empty for no trace."""
    report: bool = True
    """Write ``report.html`` when the run ends, which takes about a second. It cannot be written
    later.
    """
    shuffle_row_groups: int = 8
    """Number of row groups that are in memory and shuffled together."""
    portions: int = 1
    """Number of equal parts into which the row groups of an epoch are divided; every batch has
    samples of each part. With N portions, each of N ranks reads an N-th of the data; with one
    portion, each rank reads all of it. The order of samples depends on seed, epoch and portions,
    but not on the number of ranks."""
    shuffle: Unit = "auto"
    """Unit of shuffling. ``sample`` shuffles single samples and ``session`` whole sessions. ``run``
    shuffles segments: adjacent samples of a session that share the values of deduplication groups
    and histories. ``auto`` is ``run`` if the data set has deduplication groups, else ``sample``."""
    loss: AnyLossConfig = field(default_factory=CrossEntropyConfig)
    """Loss of a sample that training minimizes. Only with ``cross_entropy`` is a score the
    logarithm of odds: a run with another loss always calibrates its scores on the validation split,
    which needs 20 samples of each class."""
    loss_weights: Mapping[str, float] = field(default_factory=dict)
    """Label -> factor on its loss, for models with several labels; 1 by default."""
    class_weight: Literal["balanced"] | Mapping[str, float] = field(default_factory=dict)
    """Label -> weight of a positive sample relative to a negative one; ``balanced`` gives the two
    classes of the training split equal total weight, for every label. Scores are corrected to the
    true rate: the logarithm of the weight is subtracted from the logit, and the remaining shift is
    fitted on the validation split, unless `calibration` is set."""
    calibration: Literal["auto", "none", "platt", "isotonic"] = "auto"
    """Correction of probabilities, fitted on the validation split at the end of the run: ``platt``
    is a linear function of the logit, ``isotonic`` any non-decreasing function. ``auto`` uses them
    only where they lower the validation log loss by more than three standard errors, ``isotonic``
    with at least 10,000 samples. The final test, predictions and exports use it."""
    refit: bool = False
    """Train the model on the samples of validation and test, too, after the final test: one more
    pass from the tested checkpoint. If this had seen the training samples more than once, the pass
    has all samples and a tenth of the learning rates, else these samples only. Boosted trees are
    fitted again, to all samples, and the weights of an ensemble's members are chosen again by
    validation and test samples. If the tested model needs a calibration, these weights stay, and
    the calibration is fitted again to validation and test samples. This model is used by `predict`,
    `export` and `continue`. All figures in the result and the report are of the tested model, which
    has not seen these samples."""
    deduplicate: bool = True
    """Look up and compute each distinct value of a deduplication group once per batch, if a batch
    has enough repeated ids to make that faster. If false, repeated values are expanded when batches
    are read."""

    def __post_init__(self) -> None:
        check_finite(self, "train.")
        counts = ("batch_size", "epochs", "log_every", "shuffle_row_groups", "portions")
        check_ranges(self, "train.", **dict.fromkeys(counts, "[1, inf)"), threads=f"[0, {_MOST_THREADS}]")
        check_ranges(self, "train.", max_steps="[0, inf)", clip_norm="[0, inf)", eval_every="[0, inf)")
        check_ranges(self, "train.", tree_seconds="[0, inf)")
        if self.clip_rows and not self.clip_norm:
            raise ConfigError(
                "train.clip_rows is true, but train.clip_norm is 0: set it to the "
                "norm to scale gradients to"
            )
        if self.calibration == "none" and not self.has_log_odds:
            raise ConfigError(
                f"train.calibration is none, but scores of train.loss {self.loss.kind} are no "
                "probabilities without one: set it to auto, or train.loss.kind to cross_entropy"
            )
        if self.portions > self.batch_size:
            raise ConfigError(
                f"train.portions is {self.portions}, expected at most train.batch_size, which is "
                f"{self.batch_size}: every batch has samples of each"
            )
        check_seed(self.seed, "train.seed")
        for label, factor in self.loss_weights.items():
            if factor < 0:
                raise ConfigError(f"train.loss_weights.{label} is {factor}, expected 0 or more")
        for label, factor in () if isinstance(self.class_weight, str) else self.class_weight.items():
            if not 0 < factor <= _MOST_CLASS_WEIGHT:
                raise ConfigError(
                    f"train.class_weight.{label} is {factor}, expected more than 0 and at "
                    f"most {_MOST_CLASS_WEIGHT:g}"
                )
        if self.run:
            check_directory(self.run, "train.run")
        if self.mirror:
            check_store_url(self.mirror, "train.mirror")
        if self.trace and not self.traced_steps:
            raise ConfigError(
                f"train.trace is {self.trace!r}, expected a first and a last step, at most {_MOST_TRACED} "
                "in all, such as 100-120"
            )

    def steps(self, epoch_steps: int) -> int:
        """Return the number of steps of a run that does not stop early; an epoch has `epoch_steps`
        steps.
        """
        steps = epoch_steps * self.epochs
        return min(steps, self.max_steps) if self.max_steps else steps

    @property
    def traced_steps(self) -> range:
        """Steps that `trace` names, counted from 0; empty if it names none, or too many."""
        match = re.fullmatch(r"([0-9]{1,15})-([0-9]{1,15})", self.trace)
        steps = range(int(match[1]), int(match[2]) + 1) if match else range(0)
        return steps if len(steps) <= _MOST_TRACED else range(0)

    def of_run(self, steps: int, odds: Mapping[str, float]) -> TrainConfig:
        """Return a copy for a run of `steps` steps, with complete schedules. Balanced class weights
        become numbers.

        `odds` has the number of positive samples per negative sample, for each label.
        """
        dense = replace(self.dense, schedule=self.dense.schedule.of_run(steps))
        rows = replace(self.embedding, schedule=self.embedding.schedule.of_run(steps))
        balanced = self.class_weight == "balanced"
        weight = {label: 1 / ratio for label, ratio in odds.items()} if balanced else self.class_weight
        return replace(self, dense=dense, embedding=rows, class_weight=weight)

    def for_pass(self, steps: int) -> TrainConfig:
        """Return a copy for `steps` more steps. Schedules decay over them as they did over the run,
        without warm-up.
        """

        def schedule(of: ScheduleConfig) -> ScheduleConfig:
            return replace(of, warmup_steps=0, total_steps=0 if of.kind == "constant" else steps)

        dense = replace(self.dense, schedule=schedule(self.dense.schedule))
        rows = replace(self.embedding, schedule=schedule(self.embedding.schedule))
        return replace(self, dense=dense, embedding=rows)

    @property
    def has_log_odds(self) -> bool:
        """Whether logits are log-odds of a positive label. If not, only calibrated scores are
        probabilities.
        """
        return LOSSES[self.loss.kind].log_odds

    @property
    def fitted(self) -> tuple[CalibrationKind, ...]:
        """Kinds of calibration to try on the validation split, the simplest first. With class
        weights, it is a shift.

        A later kind is used only if it is better by more than chance.
        """
        if self.calibration in ("platt", "isotonic"):
            return (self.calibration,)
        if not self.has_log_odds:
            return ("platt", "isotonic")
        simplest: CalibrationKind = "shift" if self.class_weight else "none"
        return (simplest,) if self.calibration == "none" else (simplest, "platt", "isotonic")

    def loss_factors(self, labels: Sequence[str]) -> tuple[float, ...]:
        """Return the factor on each label's loss. `ConfigError` if a label does not exist, or all
        factors are 0.
        """
        other = next((name for name in self.loss_weights if name not in labels), None)
        if other is not None:
            raise ConfigError(f"train.loss_weights.{other}: no such label; there are {', '.join(labels)}")
        factors = tuple(float(self.loss_weights.get(label, 1.0)) for label in labels)
        if not any(factors):
            raise ConfigError(
                "train.loss_weights: every label has a factor of 0, expected at least one above 0"
            )
        return factors

    def class_weights(self, labels: Sequence[str]) -> tuple[float, ...]:
        """Return the weight of a positive sample relative to a negative one, for each label of a
        resolved recipe.
        """
        if isinstance(self.class_weight, str):
            raise ConfigError(
                f"train.class_weight is {self.class_weight}; the recipe of a run must have "
                "numbers. Train the run again"
            )
        return tuple(float(self.class_weight.get(label, 1.0)) for label in labels)

    def check_labels(self, labels: Sequence[str]) -> None:
        """Raise `ConfigError` if a setting names a label that does not exist."""
        self.loss_factors(labels)
        named = () if isinstance(self.class_weight, str) else self.class_weight
        other = next((name for name in named if name not in labels), None)
        if other is not None:
            raise ConfigError(f"train.class_weight.{other}: no such label; there are {', '.join(labels)}")
