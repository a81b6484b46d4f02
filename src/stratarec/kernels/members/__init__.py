"""The networks of an ensemble in training, as one operation: from vectors and numbers to the logits
of all members.

Between the matrix products are only two kinds of kernels, one before the first product and one
after each hidden layer. As torch's operations, with their gradients, a step of 256 samples and 8
members took twice as long.

Shapes: B samples, K members, N numbers, F vectors of sparse features, D width of a member's vector,
Q bins of a number, H outputs of a hidden layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.kernels.members import cpu
from stratarec.kernels.members.cpu import MOST_DEVIATIONS
from stratarec.kernels.runtime.team import team_of
from stratarec.kernels.runtime.threads import team_threads
from stratarec.kernels.simd.vector import LANES

__all__ = ["MOST_DEVIATIONS", "Group", "Layout", "Mask", "member_logits"]


class Mask(NamedTuple):
    """Random bits, and the limits below which they drop an element.

    Parameters
    ----------
    bits : Tensor
        int16. Whatever has bits below the limit is dropped.
    limit : ndarray
        ``[K]`` int16 limits of the members.
    scale : ndarray
        ``[K]`` float32 factors of elements that are not dropped.
    """

    bits: Tensor
    limit: NDArray[np.int16]
    scale: NDArray[np.float32]


class Group(NamedTuple):
    """Members ``first:last``; each uses the first ``widths[l]`` outputs of hidden layer l."""

    first: int
    last: int
    widths: tuple[int, ...]


class Layout:
    """Sizes of an ensemble's network, and where the outputs of its hidden layers are in memory.

    Parameters
    ----------
    width : int
        D.
    groups : sequence of Group
        Groups that together have all members, in their order.
    dropped : sequence of int
        Members that drop fields.
    """

    def __init__(self, width: int, groups: Sequence[Group], dropped: Sequence[int]) -> None:
        self.width = width
        self.groups = groups
        self.members = groups[-1].last
        self.masks = np.full(self.members, -1, np.int64)
        """``[K]`` number of the mask that drops a member's fields, -1 for none."""
        self.masks[list(dropped)] = np.arange(len(dropped))
        counts = [group.last - group.first for group in groups]
        self.widths = [
            np.repeat(widths, counts) for widths in zip(*(group.widths for group in groups), strict=True)
        ]
        """For each hidden layer, ``[K]`` number of outputs that a member uses."""
        self.starts = [np.cumsum(widths) - widths for widths in self.widths]
        """For each hidden layer, ``[K]`` first output of a member: it has the floats from there on,
        times B.
        """
        # Few values, because each is compiled: the largest power of two that divides D.
        self.field_lanes = min(width & -width, LANES)
        self.lanes = [1 if (widths % LANES).any() else LANES for widths in self.widths]
        self.undropped = np.zeros(self.members, np.int16), np.ones(self.members, np.float32)

    def split(self, place: int, values: Tensor, samples: int) -> list[Tensor]:
        """Return the outputs of hidden layer `place`: views ``[members, B, outputs]``, by group."""
        views, begin = [], 0
        for group in self.groups:
            size = (group.last - group.first, samples, group.widths[place])
            end = begin + math.prod(size)
            views.append(values[begin:end].view(size))
            begin = end
        return views


def member_logits(
    layout: Layout,
    fields: Mask,
    hidden: Sequence[Mask],
    edges: Tensor,
    dense: Tensor,
    vectors: Tensor,
    *weights: Tensor,
) -> Tensor:
    """Return the logits of all members, ``[B, K]``, without the bias that follows the last layer.

    Parameters
    ----------
    layout : Layout
        Sizes of members, features and layers.
    fields : Mask
        Bits ``[M, B, N + F]``, one matrix for each of the M members that drop fields; a single
        limit and factor.
    hidden : sequence of Mask
        Bits ``[B, H]`` for each hidden layer, which all members share; empty without dropout.
    edges : Tensor
        ``[N, Q + 1]`` ascending edges of the bins of numbers.
    dense : Tensor
        ``[B, N]`` float32 numbers, which get no gradient.
    vectors : Tensor
        ``[B, F, K * (D + 1)]`` float32: each member's vector, followed by its first-order weight.
    *weights : Tensor
        Of numbers: bins ``[N, Q, K * D]``, biases ``[N, 1, K * D]`` and first-order weights ``[N,
        K]``. Then of each layer, of which the last one has a single output: ``[K, inputs,
        outputs]`` and ``[K, 1, outputs]``.
    """
    logits: Tensor = _Members.apply(layout, fields, hidden, edges, dense, vectors, *weights)  # type: ignore[no-untyped-call]
    return logits


class _Members(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layout: Layout,
        field_mask: Mask,
        hidden: Sequence[Mask],
        edges: Tensor,
        dense: Tensor,
        vectors: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        team, samples, flat = team_of(team_threads()), len(dense), [_flat(weight) for weight in weights]
        fields = _fields(layout, field_mask, edges, dense, vectors, flat)
        inputs = torch.empty(layout.members, samples, (dense.shape[1] + vectors.shape[1]) * layout.width)
        logits = np.empty((samples, layout.members), np.float32)
        cpu.kernels(layout.field_lanes).fill(team, fields, _flat(inputs), logits.reshape(-1))
        before = [inputs[group.first : group.last] for group in layout.groups]
        layers = []
        for place, widths in enumerate(layout.widths):
            values = torch.empty(samples * int(widths.sum()))
            after = layout.split(place, values, samples)
            for part, out, weight in zip(
                before, after, _parts(layout, place, weights[3 + 2 * place]), strict=True
            ):
                torch.bmm(part, weight, out=out)
            is_last = place == len(layout.widths) - 1
            layer = _Layer(
                before,
                after,
                values.numpy(),
                flat[-2] if is_last else flat[-2][:0],
                (
                    samples,
                    weights[3 + 2 * place].shape[2],
                    layout.members,
                    widths,
                    layout.starts[place],
                    *_drops(layout, hidden, place),
                ),
            )
            kernel = cpu.kernels(layout.lanes[place]).activate
            kernel(
                team, layer.hidden, layer.values, flat[4 + 2 * place], layer.following, logits.reshape(-1)
            )
            layers.append(layer)
            before = after
        ctx.save_for_backward(*weights)
        ctx.layout = layout
        ctx.fields = fields
        ctx.inputs = inputs
        ctx.shape = vectors.shape
        ctx.layers = layers
        logits += flat[-1]
        return torch.from_numpy(logits)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        team = team_of(team_threads())
        weights = ctx.saved_tensors
        layout = ctx.layout
        of_logits = _flat(gradient)
        # Zeros, because members that use a part of the outputs leave the other weights without
        # gradients.
        gradients = [torch.zeros_like(weight) for weight in weights[3:-1]]
        of_inputs = torch.empty_like(ctx.inputs)
        of_values = torch.empty(ctx.layers[-1].values.shape)
        for place in reversed(range(len(ctx.layers))):
            layer, (of_weight, of_bias) = ctx.layers[place], gradients[2 * place : 2 * place + 2]
            of_following = _flat(gradients[-1]) if len(layer.following) else layer.following
            cpu.run_differentiate(
                team,
                layer.hidden,
                layer.values,
                layer.following,
                of_logits,
                of_values.numpy(),
                _flat(of_bias),
                of_following,
            )
            products = layout.split(place, of_values, len(gradient))
            if place:
                of_values = torch.empty(ctx.layers[place - 1].values.shape)
                of_before = layout.split(place - 1, of_values, len(gradient))
            else:
                of_before = [of_inputs[group.first : group.last] for group in layout.groups]
            of_weights = _parts(layout, place, of_weight)
            weight_parts = _parts(layout, place, weights[3 + 2 * place])
            parts = (layer.before, products, of_before, weight_parts, of_weights)
            for before, product, out, weight, of_part in zip(*parts, strict=True):
                torch.bmm(before.transpose(1, 2), product, out=of_part)
                torch.bmm(product, weight.transpose(1, 2), out=out)
        of_vectors = torch.empty(ctx.shape)
        of_numbers = [torch.empty_like(weight) for weight in weights[:3]]
        of_fields = tuple(map(_flat, (of_vectors, *of_numbers)))
        kernel = cpu.kernels(layout.field_lanes).spread
        kernel(team, ctx.fields, _flat(ctx.inputs), _flat(of_inputs), of_logits, of_fields)
        of_last = gradient.sum(0).view_as(weights[-1])
        return None, None, None, None, None, of_vectors, *of_numbers, *gradients, of_last


class _Layer(NamedTuple):
    """A hidden layer in one batch: inputs, outputs and kernel arguments of each group."""

    before: list[Tensor]
    after: list[Tensor]
    values: NDArray[np.float32]
    """All outputs."""
    following: NDArray[np.float32]
    """Weights of the last layer, if it follows, otherwise empty."""
    hidden: tuple[Any, ...]
    """Fields of `cpu.Hidden`."""


def _parts(layout: Layout, place: int, weight: Tensor) -> list[Tensor]:
    """Return the part of the weight of hidden layer `place`, or its gradient, of each group."""
    parts = []
    for group in layout.groups:
        inputs = group.widths[place - 1] if place else weight.shape[1]
        parts.append(weight[group.first : group.last, :inputs, : group.widths[place]])
    return parts


def _fields(
    layout: Layout,
    mask: Mask,
    edges: Tensor,
    dense: Tensor,
    vectors: Tensor,
    flat: Sequence[NDArray[np.float32]],
) -> tuple[Any, ...]:
    """Return the fields of `cpu.Fields`."""
    (samples, numbers), members, bins = dense.shape, layout.members, edges.shape[1] - 1
    return (
        samples,
        members,
        numbers,
        vectors.shape[1],
        layout.width,
        bins,
        _flat(vectors),
        _flat(dense),
        _flat(edges),
        *flat[:3],
        np.empty(numbers * (bins + 1) * members * layout.width, np.float32),
        np.empty(samples * numbers, np.int64),
        np.empty(samples * numbers, np.float32),
        layout.masks,
        _flat(mask.bits),
        int(mask.limit[0]),
        mask.scale[0],
    )


_NO_BITS = np.empty(0, np.int16)


def _drops(layout: Layout, masks: Sequence[Mask], place: int) -> tuple[Any, ...]:
    """Return the fields of `cpu.Hidden` for dropping outputs of hidden layer `place`."""
    if not masks:
        return _NO_BITS, *layout.undropped
    return _flat(masks[place].bits), masks[place].limit, masks[place].scale


def _flat(tensor: Tensor) -> NDArray[Any]:
    """Return the elements of a tensor as an array, which is a view if the tensor is contiguous."""
    array: NDArray[Any] = tensor.detach().numpy().reshape(-1)
    return array
