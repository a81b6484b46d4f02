"""The networks of an ensemble in training, as one operation: from vectors and numbers to the logits of all members.

Between the matrix products are only two kinds of kernels, one before the first product and one after each hidden layer.
As torch's operations, with their gradients, a step of 256 samples and 8 members took twice as long.

Shapes: B samples, K members, N numbers, F vectors of sparse features, D width of a member's vector, Q bins of a number,
H outputs of a hidden layer.
"""

from __future__ import annotations

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
from stratarec.kernels.simd.vector import LANES, blocks

__all__ = ["MOST_DEVIATIONS", "Group", "Mask", "MemberNetworks", "member_logits"]


class Mask(NamedTuple):
    """Random bits, and which of them drop something.

    Parameters
    ----------
    bits : Tensor
        int16. Whatever has bits below the limit is dropped.
    limit : ndarray
        ``[K]`` int16 limits of the members.
    scale : ndarray
        ``[K]`` float32 factors of what is not dropped.
    """

    bits: Tensor
    limit: NDArray[np.int16]
    scale: NDArray[np.float32]


class Group(NamedTuple):
    """Members ``first:last``, of which each uses the first ``widths[l]`` outputs of hidden layer l."""

    first: int
    last: int
    widths: tuple[int, ...]


class MemberNetworks(NamedTuple):
    """What an ensemble's network consists of, except for its weights.

    Parameters
    ----------
    edges : Tensor
        ``[N, Q + 1]`` ascending edges of the bins of numbers.
    width : int
        D.
    groups : sequence of Group
        Groups that together have all members.
    dropped : sequence of int
        Members that drop fields.
    """

    edges: Tensor
    width: int
    groups: Sequence[Group]
    dropped: Sequence[int]


def member_logits(
    networks: MemberNetworks, fields: Mask, hidden: Sequence[Mask], dense: Tensor, vectors: Tensor, *weights: Tensor
) -> Tensor:  # fmt: skip
    """Return the logits of all members, ``[B, K]``, without the bias that follows the last layer.

    Parameters
    ----------
    networks : MemberNetworks
    fields : Mask
        Bits ``[M, B, N + F]``, one matrix for each of the M members that drop fields.
    hidden : sequence of Mask
        Bits ``[B, H]`` for each hidden layer, which all members share; empty without dropout.
    dense : Tensor
        ``[B, N]`` float32 numbers, which get no gradient.
    vectors : Tensor
        ``[B, F, K * (D + 1)]`` float32: each member's vector, followed by its first-order weight.
    *weights : Tensor
        Of numbers: bins ``[N, Q, K * D]``, biases ``[N, 1, K * D]`` and first-order weights ``[N, K]``. Then of each
        layer, of which the last one has a single output: ``[K, inputs, outputs]`` and ``[K, 1, outputs]``.
    """
    logits: Tensor = _Members.apply(networks, fields, hidden, dense, vectors, *weights)  # type: ignore[no-untyped-call]
    return logits


class _Members(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, networks: MemberNetworks, field_mask: Mask, hidden: Sequence[Mask], dense: Tensor, vectors: Tensor,
        *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        team, samples, depth = team_of(team_threads()), vectors.shape[0], len(weights) // 2 - 2
        fields, inputs = _fields(networks, field_mask, dense, vectors, weights)
        logits = torch.empty(samples, weights[3].shape[0])
        flat_logits, last = _flat(logits), weights[-2]
        cpu.kernels(blocks(networks.width)[0]).fill(team, fields, _flat(inputs), flat_logits)
        layers = []
        for group in networks.groups:
            members = slice(group.first, group.last)
            before = inputs[members]
            for place, width in enumerate(group.widths):
                part = (members, slice(before.shape[2]), slice(width))
                values = torch.bmm(before, weights[3 + 2 * place][part])
                after = _flat(last[members, :width] if place == depth - 1 else last[:0])
                of_layer = _hidden(networks, group, place, samples, hidden)
                layer = _Layer(place, part, before, values, _flat(values), after, of_layer)
                bias = _flat(weights[4 + 2 * place][members, :, :width])
                kernel = cpu.kernels(1 if width % LANES else LANES).activate
                kernel(team, layer.hidden, layer.flat, bias, layer.after, flat_logits)
                layers.append(layer)
                before = values
        ctx.save_for_backward(*weights)
        ctx.width, ctx.fields, ctx.inputs, ctx.shape, ctx.layers = networks.width, fields, inputs, vectors.shape, layers
        return logits.add_(weights[-1].view(1, -1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        team, weights, of_logits = team_of(team_threads()), ctx.saved_tensors, _flat(gradient)
        # Zeros, because members that use a part of the outputs leave the other weights without gradients.
        gradients = [torch.zeros_like(weight) for weight in weights[3:-1]]
        of_inputs, own = torch.empty_like(ctx.inputs), torch.empty(0)
        for layer in reversed(ctx.layers):
            members, _, outputs = layer.part
            is_last = len(layer.after)
            own = torch.empty_like(layer.values) if is_last else own
            bias, of_last = np.empty((len(own), outputs.stop), np.float32), np.empty(len(layer.after), np.float32)
            cpu.run_differentiate(
                team, layer.hidden, layer.flat, layer.after, of_logits, _flat(own), bias.reshape(-1), of_last
            )
            gradients[2 * layer.place + 1].numpy()[members, 0, outputs] = bias
            if is_last:
                gradients[-1].numpy()[members, outputs, 0] = of_last.reshape(bias.shape)
            torch.bmm(layer.before.transpose(1, 2), own, out=gradients[2 * layer.place][layer.part])
            out = {} if layer.place else {"out": of_inputs[members]}
            own = torch.bmm(own, weights[3 + 2 * layer.place][layer.part].transpose(1, 2), **out)
        of_vectors, of_numbers = torch.empty(ctx.shape), [torch.empty_like(weight) for weight in weights[:3]]
        of_fields = tuple(map(_flat, (of_vectors, *of_numbers)))
        kernel = cpu.kernels(blocks(ctx.width)[0]).spread
        kernel(team, ctx.fields, _flat(ctx.inputs), _flat(of_inputs), of_logits, of_fields)
        return None, None, None, None, of_vectors, *of_numbers, *gradients, gradient.sum(0).view_as(weights[-1])


class _Layer(NamedTuple):
    """A hidden layer of a group of members in one batch."""

    place: int
    """Number of the layer."""
    part: tuple[slice, slice, slice]
    """Part of the layer's weights that the group uses."""
    before: Tensor
    values: Tensor
    """Inputs and outputs of the layer."""
    flat: NDArray[np.float32]
    """`values`, flat."""
    after: NDArray[np.float32]
    """Weights of the layer after it, if that is the last one, otherwise empty."""
    hidden: tuple[Any, ...]
    """Fields of `cpu.Hidden`."""


def _fields(
    networks: MemberNetworks, mask: Mask, dense: Tensor, vectors: Tensor, weights: Sequence[Tensor]
) -> tuple[tuple[Any, ...], Tensor]:  # fmt: skip
    """Return the fields of `cpu.Fields`, and the tensor ``[K, B, (N + F) * D]`` for the inputs of members."""
    (samples, numbers), members, features = dense.shape, len(weights[3]), vectors.shape[1]
    bins, width = networks.edges.shape[1] - 1, networks.width
    chosen = np.full(members, -1, np.int64)
    chosen[list(networks.dropped)] = np.arange(len(networks.dropped))
    fields = (
        samples, members, numbers, features, width, bins, _flat(vectors), _flat(dense), _flat(networks.edges),
        *map(_flat, weights[:3]), np.empty(numbers * (bins + 1) * members * width, np.float32),
        np.empty(samples * numbers, np.int64), np.empty(samples * numbers, np.float32), chosen,
        _flat(mask.bits), int(mask.limit[0]), mask.scale[0],
    )  # fmt: skip
    return fields, torch.empty(members, samples, (numbers + features) * width)


_NO_BITS = torch.empty(0, 0, dtype=torch.int16)


def _hidden(networks: MemberNetworks, group: Group, place: int, samples: int, masks: Sequence[Mask]) -> tuple[Any, ...]:
    """Return the fields of `cpu.Hidden` for hidden layer `place` of a group."""
    members = networks.groups[-1].last
    if masks:
        bits, limit, scale = masks[place]
    else:
        bits, limit, scale = _NO_BITS, np.zeros(members, np.int16), np.ones(members, np.float32)
    count = group.last - group.first
    return samples, group.widths[place], group.first, count, members, _flat(bits), bits.shape[1], limit, scale


def _flat(tensor: Tensor) -> NDArray[Any]:
    """Return the elements of a tensor as an array, which is a view if the tensor is contiguous."""
    array: NDArray[Any] = tensor.detach().numpy().reshape(-1)
    return array
