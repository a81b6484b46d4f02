"""Best members of an ensemble: each member at the step at which its validation loss was lowest,
with a weight.

All members are trained in every step, but they overfit at different times. After each evaluation,
`BestMembers` copies the weights of every member that has a lower log loss than at all earlier
evaluations. It then chooses how much each member counts in the mean of logits. The best members are
the model of a checkpoint: they are in the files of network and tables, so readers of a run need not
know about members. The weights from which training continues are in the optimizer's file.

Greedy selection (Caruana et al., ICML 2004) does not give better weights in the mean. For equally
good ones it needs many random subsets of the samples (`docs/log.md`).

The copies need as much memory as network and tables. Where members share layers, or not all rows
are float32 in DRAM, there are no copies: a checkpoint has all networks at its step, and only their
weights and those of trees are chosen.

Shapes: N validation samples, K members.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.config.units import format_bytes
from stratarec.models import CTRModel
from stratarec.models.metrics import Samples
from stratarec.models.zoo.ensemble import EnsembleScore
from stratarec.recipe.train_section import TrainConfig
from stratarec.training.evaluate import ScoredSamples

_STEPS, _NETWORK, _TABLE = "steps", "network/", "table/"
_WEIGHTS = f"{_NETWORK}score.out.weights"

Doubles = NDArray[np.float64]


class BestMembers:
    """Weights of the members of an ensemble, and copies of each member at its best step.

    Parameters
    ----------
    model : CTRModel
        An ensemble.
    apart : bool
        Whether members can be copied separately. Otherwise all networks are used at the same step.
    """

    def __init__(self, model: CTRModel, *, apart: bool = True) -> None:
        assert isinstance(model.network.score, EnsembleScore)
        self.apart = apart
        self._model = model
        self._score = model.network.score
        self._stored: dict[str, Tensor] = {}
        self._steps = torch.zeros(len(self._score.out.weights), dtype=torch.int64)
        self._logits = np.empty((0, 0), dtype=np.float32)
        self._losses = np.empty(0)

    @contextmanager
    def separate(self) -> Iterator[None]:
        """Make the model return the separate logits of its members, ``[B, K]``, inside the context.

        Trees do not change, so `combine` knows their logits after the first evaluation, and the
        model returns zeros.
        """
        self._score.separate = True
        self._model.network.skips_trees = bool(len(self._losses))
        try:
            yield
        finally:
            self._score.separate = self._model.network.skips_trees = False

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Make the model use the best members inside the context."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's weights with the stored copy. Does nothing before the first
        evaluation.

        The first call puts the best members into the model, the next call puts the current weights
        back.
        """
        for name, tensor in self._current().items() if self._stored else ():
            current = tensor.clone()
            tensor.copy_(self._stored[name])
            self._stored[name].copy_(current)

    @property
    def is_unscored(self) -> bool:
        """Whether best members were restored from a checkpoint, and `rescore` must be called with
        their logits.
        """
        return bool(self._stored) and not len(self._losses)

    def rescore(self, samples: ScoredSamples) -> None:
        """Set the logits of the best members on the validation split."""
        self._logits = np.array(samples.logit, order="C")
        self._losses = _losses(samples)

    @torch.no_grad()
    def combine(
        self, samples: ScoredSamples, step: int, *, closing: bool
    ) -> tuple[ScoredSamples, list[dict[str, float]]]:
        """Copy the members that are better at `step` than before, and compute new weights of all
        best members.

        Parameters
        ----------
        samples : ScoredSamples
            Validation split, scored inside `separate` by the current members.
        closing : bool
            Whether this evaluation takes place only because the run ends. A run that is resumed
            beyond that end must not depend on the evaluation, so members are copied only if there
            are no best members yet.

        Returns
        -------
        ScoredSamples
            The samples, scored by the weighted mean of the best members.
        list
            Step, log loss and weight of each best member.
        """
        current, is_first, networks = self._current(), not self._stored, self._score.members
        if is_first:
            self._stored = {name: tensor.clone() for name, tensor in current.items()}
            self._logits = np.array(samples.logit, order="C")
            self._losses = np.full(self._logits.shape[1], np.inf)
        samples.logit[:, networks:] = self._logits[:, networks:]
        losses = _losses(samples)
        # If no sample has a label, no step is better than another, and the members of the last step
        # are used.
        is_better = ((losses < self._losses) | (not _labels_and_weights(samples)[1].any())) & (
            is_first or not closing
        )
        if not self.apart:
            is_better[:networks] = True
        chosen = torch.from_numpy(is_better[:networks])
        for name, tensor in current.items():
            new, stored = self._by_member(name, tensor), self._by_member(name, self._stored[name])
            if new is not None and stored is not None:
                stored[chosen] = new[chosen]
        self._logits[:, is_better], self._losses[is_better] = samples.logit[:, is_better], losses[is_better]
        self._steps[: len(chosen)][chosen] = step
        weights = self._weights(samples._replace(logit=self._logits))
        self._stored[_WEIGHTS].copy_(torch.from_numpy(weights))
        table = [
            {"step": at, "log_loss": float(loss), "weight": float(weight)}
            for at, loss, weight in zip(self._steps.tolist(), self._losses, weights, strict=True)
        ]
        mean = (self._logits * weights).sum(axis=1)
        return samples._replace(logit=mean), table

    @torch.no_grad()
    def reweight(self, samples: ScoredSamples) -> None:
        """Choose new weights of the model's members by samples scored inside `separate`."""
        self._score.out.weights.copy_(torch.from_numpy(self._weights(samples)))

    def _weights(self, samples: ScoredSamples) -> NDArray[np.float32]:
        """Return the members' weights for separate logits; 0 for tree members that have no tree."""
        members, trees = samples.logit.shape[1], self._score.trees
        used = np.ones(members, np.bool_)
        if trees is not None:
            used[self._score.members :] = trees.counts > 0
        label, weight = _labels_and_weights(samples)
        users = np.unique(samples.user[weight > 0]).size if len(samples.user) else np.count_nonzero(weight)
        per_user = np.count_nonzero(weight) / max(users, 1)
        weights = np.zeros(members, np.float32)
        weights[used] = select_weights(
            samples.logit[:, used],
            label,
            weight,
            trees=int(used[self._score.members :].sum()),
            per_user=per_user,
        )
        return weights

    @property
    def stored(self) -> dict[str, Tensor]:
        """Steps of the best members, and the weights that were last swapped out of the model.

        Empty before the first evaluation.
        """
        return {_STEPS: self._steps, **self._stored} if self._stored else {}

    @property
    def current(self) -> dict[str, Tensor]:
        """Steps of the best members, and the weights that the model has now."""
        return {_STEPS: self._steps, **self._current()}

    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Restore from a checkpoint. Before the call the model has the best members, afterwards the
        current weights.

        `weights` is what the property `stored` returned when the checkpoint was written.
        """
        current = self._current()
        self._steps = weights[_STEPS].clone()
        # Copied, because tensors of a file may have any address, and the results of matrix products
        # depend on alignment.
        self._stored = {name: weights[name].clone().to(tensor.device) for name, tensor in current.items()}
        self.swap()

    def reset(self) -> None:
        """Forget the best members."""
        self._stored = {}
        self._losses = np.empty(0)

    def _current(self) -> dict[str, Tensor]:
        """Return, by name, the tensors that are divided among members, and the weights of the
        members' mean.
        """
        network, embeddings = self._model.network.state_dict(), self._model.embeddings
        if not self.apart:
            return {_WEIGHTS: network[_WEIGHTS.removeprefix(_NETWORK)]}
        state = {_NETWORK + name: tensor for name, tensor in network.items()}
        state = {
            name: tensor
            for name, tensor in state.items()
            if self._by_member(name, tensor) is not None or name == _WEIGHTS
        }
        return state | {
            _TABLE + table.name: embeddings.table(table.name)["weight"] for table in embeddings.tables
        }

    def _by_member(self, name: str, tensor: Tensor) -> Tensor | None:
        if name.startswith(_TABLE):
            return tensor.view(len(tensor), self._score.members, -1).movedim(1, 0)
        return self._score.by_member(name.removeprefix(f"{_NETWORK}score."), tensor)


def _labels_and_weights(samples: ScoredSamples) -> tuple[NDArray[np.float32], Doubles]:
    """Return the labels and the weights of samples. Both are 0 if a label is not known."""
    weight = samples.weight if len(samples.weight) else np.ones(len(samples.label))
    return np.nan_to_num(samples.label), np.where(np.isnan(samples.label), 0.0, weight)


def _losses(samples: ScoredSamples) -> Doubles:
    """Return the log loss of each member; 0 if no sample has a weight."""
    label, weight = _labels_and_weights(samples)
    if not weight.any():
        return np.zeros(samples.logit.shape[1])
    return np.array([Samples(label, logit, weight=weight).log_loss for logit in samples.logit.T])


# Strength of the preference for the mean, as a number of users, or of samples if the log has no
# users.
_PRIOR = 3.0
_MOST_STEPS = 100


def select_weights(
    logits: NDArray[np.float32],
    label: NDArray[np.float32],
    weight: Doubles,
    *,
    trees: int = 0,
    per_user: float = 1.0,
) -> NDArray[np.float32]:
    """Return the positive weights w ``[K]`` of members, with a sum of 1, that minimize the
    following sum:

        (log loss of the weighted mean of logits, summed over samples)
        + 3 * per_user * (w log(w / m), summed over members)

    m is 1 / K, or, if the last members are trees, half for all networks and half for all trees. The
    second term is the divergence of w from m. It decides between members with the same log loss.
    The minimum is computed by Newton's method on the simplex. The weights are m if all labels have
    the same class.

    Parameters
    ----------
    logits : array
        ``[N, K]`` logits of the members.
    label : array
        ``[N]`` labels.
    weight : array
        ``[N]`` weights of samples.
    trees : int
        Number of the last members that are trees.
    per_user : float
        Average number of samples of a user. All samples of a user count as one.
    """
    has_label = weight > 0
    columns, truth, scale = logits[has_label].astype(np.float64), label[has_label], weight[has_label]
    networks = logits.shape[1] - trees
    mean = np.full(logits.shape[1], 1 / networks)
    if trees:
        mean[:networks], mean[networks:] = 0.5 / networks, 0.5 / trees
    if not len(truth) or truth.min() == truth.max():
        return mean.astype(np.float32)
    scale, prior = scale / scale.mean(), _PRIOR * per_user

    def value(at: Doubles) -> float:
        logit = columns @ at
        return float(scale @ (np.logaddexp(0, logit) - truth * logit) + prior * at @ np.log(at / mean))

    weights = mean
    for _ in range(_MOST_STEPS):
        rate = 1 / (1 + np.exp(-np.clip(columns @ weights, -80, 80)))
        gradient = (scale * (rate - truth)) @ columns + prior * (np.log(weights / mean) + 1)
        curvature = (columns.T * (scale * rate * (1 - rate))) @ columns + np.diag(prior / weights)
        along, ones = np.linalg.solve(curvature, np.stack([gradient, np.ones_like(gradient)], axis=1)).T
        step = ones * (along.sum() / ones.sum()) - along  # keeps the sum of weights
        slope = float(gradient @ step)
        if slope > -1e-9:
            break
        size = min(1.0, 0.9 / float((-step / weights).max()))  # keeps them positive
        while size > 1e-9 and value(weights + size * step) > value(weights) + 1e-4 * size * slope:
            size /= 2
        weights = weights + size * step
    # Rounded, because the last bits of matrix products depend on memory addresses, which differ in
    # a resumed run.
    rounded = np.round(weights / mean, 3)
    shares: NDArray[np.float32] = (rounded / rounded.sum()).astype(np.float32)
    return shares


def describe(model: CTRModel, members: BestMembers | None) -> str:
    """Return how the members of an ensemble are combined, as text; empty for other models."""
    if not isinstance(model.network.score, EnsembleScore):
        return ""
    if members is None:
        return "all members are used at the same step with equal weights, because several ranks train the model"
    if not members.apart:
        return (
            "all networks of the ensemble are used at the same step, because they share layers or not all "
            "rows are float32 in DRAM; validation chooses how much each counts"
        )
    size = format_bytes(sum(tensor.nbytes for tensor in members.current.values()))
    return f"each member is used at its best step by validation; the copies take {size}"


def best_members(model: CTRModel, config: TrainConfig, ranks: int) -> BestMembers | None:
    """Return a `BestMembers` for a model, or None if the model is no ensemble or several ranks
    train it.

    Members are not copied separately if they share layers, which pool sequences or project rows, or
    if a memory other than DRAM stores their rows.
    """
    network, engine = model.network, model.embeddings.engine
    if not isinstance(network.score, EnsembleScore) or ranks > 1:
        return None
    apart = all(name.startswith("score.") for name, _ in network.named_parameters())
    return BestMembers(model, apart=apart and engine.resident)
