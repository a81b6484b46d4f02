"""The moving average of a network's weights: trained are the weights, evaluated and kept for use is their average.

    weights    what steps change; in a checkpoint beside the optimizer's state, where the average takes their place
    average    what evaluations, the test, predictions and exports see

The average has more effect the noisier the steps are: Polyak and Juditsky 1992; Izmailov et al. 2018, arXiv 1803.05407.
Rows of tables are not averaged. In checkpoints the network's file has the average, so whoever opens a run need know
nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from stratarec.recipe.train_section import AverageConfig
from stratarec.training import checkpoint

# The average of the first steps forgets the initial weights as fast as that of few values may.
_START = 10


class Averaging:
    """The average of one network.

    Parameters
    ----------
    network : nn.Module
        Whose weights, and statistics of batch normalization, are averaged.
    config : AverageConfig
    """

    def __init__(self, network: nn.Module, config: AverageConfig) -> None:
        self._network, self._decay = network, config.decay
        self._average: dict[str, Tensor] = {}

    def update(self, step: int) -> None:
        """Take in the weights after a step: average += (1 - decay) (weights - average)."""
        if not self._decay:
            return
        weights = self._weights
        if not self._average:
            self._average = {name: weight.clone() for name, weight in weights.items()}
        decay = min(self._decay, step / (step + _START))
        torch._foreach_lerp_([self._average[name] for name in weights], list(weights.values()), 1 - decay)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the network have the average for a while."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def swap(self) -> None:
        """Give the network the average and keep its weights, or the other way round; nothing before the first step."""
        for name, tensor in self._network.state_dict(keep_vars=True).items() if self._average else ():
            tensor.data, self._average[name] = self._average[name], tensor.data

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has beside the average: the weights, while the network has the average."""
        return {checkpoint.WEIGHTS + name: weight for name, weight in self._average.items()}

    def restore(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Go on where a checkpoint was that some steps were trained before, and whose average the network now has.

        Parameters
        ----------
        path : Path
            Of the file that `tensors` are of.

        Raises
        ------
        CheckpointError
            When `tensors` has other weights than the network.
        """
        if self._decay:
            names = [name for name in tensors if name.startswith(checkpoint.WEIGHTS)]
            found = {name.removeprefix(checkpoint.WEIGHTS): tensors[name] for name in names}
            checkpoint.check_tensors(path, found, self._weights)
            # Memory of torch's own: what a file gave may lie at any address, and matrix products heed that.
            self._average = {name: weight.clone().to(self._weights[name].device) for name, weight in found.items()}
            self.swap()

    @property
    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self._network.state_dict().items()}
