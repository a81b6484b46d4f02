"""CUDA graph of a network in training.

In steps of small batches a GPU mostly waits for the host, which queues the kernels of a network one by one: at batch
1,024 an H200 worked 0.5 of 6.4 ms. A CUDA graph queues the same kernels at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stratarec.models.history import History
from stratarec.models.layers import Dropout
from stratarec.models.request import Runs

# Layers that draw random numbers on the host, or that change a state at each call, warm-up included.
_CHANGING = (Dropout, nn.modules.batchnorm._BatchNorm)
_WARM_UP = 3


class NetworkGraph:
    """Calls a network; in training on an NVIDIA GPU as a CUDA graph where its kernels do not depend on the batch.

    The first batch of a shape runs without a graph, and the graph is captured at the second: the last batch of an epoch
    is often smaller. Histories and shared vectors have other sizes in each batch, so they never have a graph. Neither
    have models without `Score.captured`.
    """

    def __init__(self) -> None:
        self._form: Any = None
        self._graph: _Graph | None = None
        self._captured = False

    def __call__(
        self, network: nn.Module, dense: Tensor, pooled: Tensor, histories: Sequence[History], runs: Runs | None
    ) -> Tensor:
        """Return the logits of a batch, as `Network.forward` does."""
        if histories or runs is not None or not self.applies(network, pooled):
            return network(dense, pooled, histories, runs)  # type: ignore[no-any-return]
        form = network, dense.shape, pooled.shape, torch.is_autocast_enabled("cuda")
        if form != self._form:
            self._form, self._graph, self._captured = form, None, _can_be_captured(network)
        elif self._captured and (self._graph is None or self._graph.has_moved()):
            self._graph = _Graph(network, dense, pooled)
        if self._graph is None:
            return network(dense, pooled)  # type: ignore[no-any-return]
        return _Replay.apply(self._graph, dense, pooled, *self._graph.weights)  # type: ignore[no-any-return, no-untyped-call]

    def applies(self, network: nn.Module, pooled: Tensor) -> bool:
        """Whether this is a training step of a network on an NVIDIA GPU."""
        return pooled.is_cuda and pooled.requires_grad and network.training and torch.is_grad_enabled()


def _can_be_captured(network: nn.Module) -> bool:
    """Whether a network queues the same kernels for all batches of a shape."""
    return bool(network.captured) and not any(isinstance(layer, _CHANGING) for layer in network.modules())


class _Graph:
    """Graphs of the forward and the backward pass of a network, with the tensors that they read and write."""

    def __init__(self, network: nn.Module, dense: Tensor, pooled: Tensor) -> None:
        self.weights = [weight for weight in network.parameters() if weight.requires_grad]
        self._addresses = [weight.data_ptr() for weight in self.weights]
        self.dense, self.pooled = dense.clone(), pooled.detach().clone()
        leaf = self.pooled.view_as(self.pooled).requires_grad_()
        inputs = (leaf, *self.weights)
        # With its cache, autocast would leave the casts of weights out of the graph.
        cast = torch.autocast(
            "cuda", torch.get_autocast_dtype("cuda"), enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False
        )
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), cast:
            for _ in range(_WARM_UP):
                logits = network(self.dense, leaf)
                torch.autograd.grad(logits, inputs, torch.zeros_like(logits), allow_unused=True)
                del logits
        torch.cuda.current_stream().wait_stream(side)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads, such as the prefetcher's, use the device meanwhile.
        options: Any = {"pool": torch.cuda.graph_pool_handle(), "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self.forward, **options), cast:
            logits = network(self.dense, leaf)
        self.logits, self.gradient = logits.detach(), torch.zeros_like(logits)
        with torch.cuda.graph(self.backward, **options):
            self.gradients = torch.autograd.grad(logits, inputs, self.gradient, allow_unused=True)

    def has_moved(self) -> bool:
        """Whether weights are no longer in the memory that the graph reads."""
        return [weight.data_ptr() for weight in self.weights] != self._addresses


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _Graph, dense: Tensor, pooled: Tensor, *weights: Tensor) -> Tensor:
        graph.dense.copy_(dense)
        graph.pooled.copy_(pooled)
        graph.forward.replay()
        ctx.graph = graph
        logits: Tensor = graph.logits.detach()
        return logits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        graph = ctx.graph
        graph.gradient.copy_(gradient)
        graph.backward.replay()
        return None, None, *(part if part is None else part.detach() for part in graph.gradients)
