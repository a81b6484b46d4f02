"""The ``train:`` section of a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from stratarec.config.validate import check_directory, check_finite, check_seed
from stratarec.data.loading.shuffle_buffer import Unit
from stratarec.embedding import RowOptimizerConfig, ScheduleConfig
from stratarec.errors import ConfigError
from stratarec.models.metrics import MetricName

# Beyond this starting them fails or takes the machine down.
_MOST_THREADS = 1024
# Beyond this the loss of negatives vanishes in float32 when it is added to the loss of positives.
_MOST_CLASS_WEIGHT = 1e9
# Each traced step takes about 5 kB.
_MOST_TRACED = 10_000


CurveKind = Literal["tensorboard", "wandb", "mlflow", "trackio"]


@dataclass(frozen=True, kw_only=True)
class DenseOptimizerConfig:
    """Optimizer of the network."""

    kind: Literal["adam", "adamw", "adagrad", "sgd"] = "adam"
    learning_rate: float = 1e-3
    """Step size before the schedule."""
    weight_decay: float = 0.0
    """L2 on all weights of the network, in the gradient; decoupled for AdamW (Loshchilov and Hutter 2019)."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Factor on the learning rate over steps."""

    def __post_init__(self) -> None:
        check_finite(self, "train.dense.")
        for name in ("learning_rate", "weight_decay"):
            if getattr(self, name) < 0:
                raise ConfigError(f"train.dense.{name} is {getattr(self, name)}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingConfig:
    """Choice of the best checkpoint by validation, and early stopping; the best checkpoint is tested."""

    patience: int = 0
    """Evaluations without a better one before stopping; 0 never stops early."""
    metric: MetricName = "log_loss"
    """Metric to improve, of the first label if there are several. Log loss depends on calibration, AUC does not."""

    def __post_init__(self) -> None:
        if self.patience < 0:
            raise ConfigError(f"train.early_stopping.patience is {self.patience}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class PlateauConfig:
    """Lower learning rates when validation no longer improves."""

    patience: int = 0
    """Evaluations in a row without a better one before all rates fall, those of rows too; 0 never lowers them."""
    factor: float = 0.1
    """Factor on all rates at each reduction."""
    min_factor: float = 1e-3
    """Smallest product of all reductions."""
    metric: MetricName = "log_loss"
    """Metric to improve, of the first label if there are several."""

    def __post_init__(self) -> None:
        check_finite(self, "train.plateau.")
        if self.patience < 0:
            raise ConfigError(f"train.plateau.patience is {self.patience}, expected 0 or more")
        for name in ("factor", "min_factor"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(
                    f"train.plateau.{name} is {getattr(self, name)}, expected more than 0 and less than 1"
                )


@dataclass(frozen=True, kw_only=True)
class AverageConfig:
    """The average of the network's weights over steps, which evaluations, the test and exports use."""

    decay: float = 0.0
    """How much of the average a step keeps, such as 0.999, in the first steps less; 0 for no average. Rows of tables
    are not averaged."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"train.average.decay is {self.decay}, expected 0 or more and less than 1")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoint schedule and number of checkpoints to keep."""

    every_steps: int = 0
    """Write one every so many steps; 0 for never by steps."""
    every_minutes: float = 10.0
    """Write one when the last is so old; 0 for never by time."""
    keep: int = 2
    """How many of the last are kept, besides the best one, which is never removed."""

    def __post_init__(self) -> None:
        check_finite(self, "train.checkpoint.")
        for name, least in (("every_steps", 0), ("every_minutes", 0), ("keep", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"train.checkpoint.{name} is {getattr(self, name)}, expected at least {least}")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Loss that training minimizes. ``softmax`` and ``pairwise`` only use the order within slates: their scores have no
    level, so probabilities need `train.calibration`."""

    kind: Literal["log_loss", "softmax", "pairwise"] = "log_loss"
    """``log_loss``: the cross-entropy of each sample; ``softmax``: of each click among the samples of its slate, such
    as the list that was shown; ``pairwise``: of each click against each sample of its slate without one. Slates without
    a click, and those of clicks alone, count nothing."""
    by: str = ""
    """Key of slates: ``session``, ``user``, or the column that is one of them."""

    def __post_init__(self) -> None:
        if self.kind == "log_loss" and self.by:
            raise ConfigError(f"train.loss.by is {self.by}, but train.loss.kind log_loss has no slates: leave it out")
        if self.kind != "log_loss" and not self.by:
            raise ConfigError(
                f"train.loss.kind is {self.kind}, which needs slates: set train.loss.by, such as by: session"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained."""

    run: str = ""
    """Directory of the run; empty means runs/<name of the recipe>."""
    batch_size: int = 4096
    """Samples a step."""
    epochs: int = 1
    """Passes over the training split."""
    max_steps: int = 0
    """Stop after so many steps; 0 for no limit."""
    precision: Literal["float32", "bf16"] = "float32"
    """``bf16`` runs the network's matrix products in bfloat16 (autocast); embeddings stay float32. It pays on devices
    and on processors with AVX-512 BF16 or AMX; elsewhere it takes many times as long, and `train` says so."""
    device: str = "cpu"
    """Device of the network: ``cpu``, or a torch device such as ``cuda``, ``cuda:1`` or ``xpu``. Rows stay in their
    memories."""
    threads: int = 0
    """Threads of torch and of the kernels. 0 for the cores that affinity and quota allow, divided among the ranks of a
    machine; then the run uses fewer threads while other processes use the cores. It prints the first change, because
    another run may then differ in its last bits."""
    seed: int = 0
    """Seed of initial weights and of the order of batches."""
    dense: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    """Optimizer of the network."""
    embedding: RowOptimizerConfig = field(default_factory=RowOptimizerConfig)
    """Row optimizer of the tables."""
    clip_norm: float = 0.0
    """Scale the network's gradient down to this norm; 0 for none."""
    clip_rows: bool = False
    """Use the joint norm of the network's gradients and of the summed gradients of the batch's rows, and scale both.
    Weight decay is added afterwards and is not part of the norm."""
    eval_every: int = 0
    """Evaluate on the validation split every so many steps; 0 at the end of each epoch."""
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    """Choice of the checkpoint to test, and early stopping."""
    plateau: PlateauConfig = field(default_factory=PlateauConfig)
    """Whether validation may lower learning rates."""
    average: AverageConfig = field(default_factory=AverageConfig)
    """Whether the network is used with an average of its weights."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoint schedule."""
    log_every: int = 50
    """Steps between points of the loss curve."""
    curves: tuple[CurveKind, ...] = ("tensorboard",)
    """Writers of training and validation curves: ``tensorboard`` (in the run), ``wandb``, ``mlflow``, ``trackio`` (each
    needs the extra of its name, and is configured by its own environment variables)."""
    trace: str = ""
    """Steps to trace, such as 100-120 (counted from 0): ``trace.json`` in the run shows when each thread did what; open
    it at ui.perfetto.dev. Empty for no trace."""
    report: bool = True
    """Draw ``report.html`` when the run ends, which takes about a second. A run that ended without has none."""
    shuffle_row_groups: int = 8
    """Row groups that are shuffled together; bounds the loader's memory."""
    portions: int = 1
    """Equal parts that an epoch's order of row groups is cut into; every batch has samples of each. N ranks read an
    N-th of the data each where there are N portions, and all of it where there is one. The order of samples is a
    function of seed, epoch and portions, whatever the number of ranks."""
    shuffle: Unit = "auto"
    """Unit of shuffling: ``run`` keeps neighbouring samples of a session together that share their groups
    and histories, ``session`` all samples of a session, ``sample`` none. ``auto``: runs where the data set has groups,
    else samples."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Loss that training minimizes."""
    loss_weights: Mapping[str, float] = field(default_factory=dict)
    """Label -> factor on its loss, where there are several; by default 1."""
    class_weight: Literal["balanced"] | Mapping[str, float] = field(default_factory=dict)
    """Label -> how many times the loss of a positive sample counts as that of a negative one; ``balanced`` lets the
    two classes of the training split count alike, for every label. Scores are put back to the true rate: by the
    logarithm of that number, and by what validation finds is left, unless `calibration` does that."""
    calibration: Literal["none", "platt", "isotonic"] = "none"
    """Correction of probabilities, fitted on the validation split at the end of the run: ``platt`` is a line of the
    logit, ``isotonic`` any increasing curve. It is in the final test, in predictions and in exports."""
    deduplicate: bool = True
    """Look up and compute each distinct value of a group once a batch, where that spares a batch enough ids to pay;
    false expands batches when they are read."""

    def __post_init__(self) -> None:
        check_finite(self, "train.")
        for name, least in (
            ("batch_size", 1), ("epochs", 1), ("max_steps", 0), ("threads", 0), ("clip_norm", 0), ("eval_every", 0),
            ("log_every", 1), ("shuffle_row_groups", 1), ("portions", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"train.{name} is {getattr(self, name)}, expected at least {least}")
        if self.clip_rows and not self.clip_norm:
            raise ConfigError(
                "train.clip_rows is true, but train.clip_norm is 0: set it to the norm to scale gradients to"
            )
        if self.portions > self.batch_size:
            raise ConfigError(
                f"train.portions is {self.portions}, expected at most train.batch_size, which is {self.batch_size}: "
                "every batch has samples of each"
            )
        if self.loss.by:
            self._check_slates()
        if self.threads > _MOST_THREADS:
            raise ConfigError(f"train.threads is {self.threads}, expected at most {_MOST_THREADS}")
        check_seed(self.seed, "train.seed")
        for label, factor in self.loss_weights.items():
            if factor < 0:
                raise ConfigError(f"train.loss_weights.{label} is {factor}, expected 0 or more")
        for label, factor in () if isinstance(self.class_weight, str) else self.class_weight.items():
            if not 0 < factor <= _MOST_CLASS_WEIGHT:
                raise ConfigError(
                    f"train.class_weight.{label} is {factor}, expected more than 0 and at most {_MOST_CLASS_WEIGHT:g}"
                )
        if self.class_weight and self.loss.kind != "log_loss":
            raise ConfigError(
                f"train.class_weight needs the log loss, but train.loss.kind is {self.loss.kind}: leave one of them out"
            )
        if self.run:
            check_directory(self.run, "train.run")
        if self.trace and not self.traced_steps:
            raise ConfigError(
                f"train.trace is {self.trace!r}, expected a first and a last step, at most {_MOST_TRACED} in all, such "
                "as 100-120"
            )

    def _check_slates(self) -> None:
        """Refuse settings that would divide slates."""
        for name, fits in (("portions", self.portions == 1), ("shuffle", self.shuffle in ("auto", "session"))):
            if not fits:
                raise ConfigError(
                    f"train.{name} is {getattr(self, name)}, but train.loss.kind {self.loss.kind} keeps slates whole: "
                    f"leave train.{name} out"
                )

    def steps(self, epoch_steps: int) -> int:
        """Return the steps of a whole run with `epoch_steps` steps an epoch, unless it stops early."""
        steps = epoch_steps * self.epochs
        return min(steps, self.max_steps) if self.max_steps else steps

    @property
    def traced_steps(self) -> range:
        """Steps to trace."""
        match = re.fullmatch(r"([0-9]{1,15})-([0-9]{1,15})", self.trace)
        steps = range(int(match[1]), int(match[2]) + 1) if match else range(0)
        return steps if len(steps) <= _MOST_TRACED else range(0)

    def of_run(self, steps: int, odds: Mapping[str, float]) -> TrainConfig:
        """Return a copy with schedules for `steps` steps, and balanced class weights from the odds of each label."""
        dense = replace(self.dense, schedule=self.dense.schedule.of_run(steps))
        rows = replace(self.embedding, schedule=self.embedding.schedule.of_run(steps))
        balanced = self.class_weight == "balanced"
        weight = {label: 1 / ratio for label, ratio in odds.items()} if balanced else self.class_weight
        return replace(self, dense=dense, embedding=rows, class_weight=weight)

    @property
    def fitted(self) -> Literal["none", "shift", "platt", "isotonic"]:
        """Kind of calibration fitted on the validation split at the end: with class weights at least a shift."""
        return "shift" if self.calibration == "none" and self.class_weight else self.calibration

    def loss_factors(self, labels: Sequence[str]) -> tuple[float, ...]:
        """Factor on the loss of each label; `ConfigError` for one that there is not, and where all are 0."""
        other = next((name for name in self.loss_weights if name not in labels), None)
        if other is not None:
            raise ConfigError(f"train.loss_weights.{other}: no such label; there are {', '.join(labels)}")
        factors = tuple(float(self.loss_weights.get(label, 1.0)) for label in labels)
        if not any(factors):
            raise ConfigError("train.loss_weights: every label has a factor of 0, so that nothing would be trained")
        return factors

    def class_weights(self, labels: Sequence[str]) -> tuple[float, ...]:
        """Return the weight of a positive sample relative to a negative one, for each label of a resolved recipe."""
        if isinstance(self.class_weight, str):
            raise ConfigError(
                f"train.class_weight is {self.class_weight}; the recipe of a run must have numbers. Train the run again"
            )
        return tuple(float(self.class_weight.get(label, 1.0)) for label in labels)

    def check_labels(self, labels: Sequence[str]) -> None:
        """Refuse a loss that supports fewer labels, and factors and weights of labels that do not exist."""
        if self.loss.by and len(labels) > 1:
            raise ConfigError(
                f"train.loss.kind is {self.loss.kind}, which supports one label; got {', '.join(labels)}. Set it to "
                "log_loss"
            )
        self.loss_factors(labels)
        named = () if isinstance(self.class_weight, str) else self.class_weight
        other = next((name for name in named if name not in labels), None)
        if other is not None:
            raise ConfigError(f"train.class_weight.{other}: no such label; there are {', '.join(labels)}")
