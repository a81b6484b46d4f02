"""Convert a network to ONNX in memory, for ONNX Runtime.

`torch.onnx.export` takes 11 s and 300 MiB when a process first calls it, because it imports torch's
compiler and optimizes the graph, which ONNX Runtime does again. Here, the network computes once,
and a node is recorded for each function of torch that it calls. Values of functions of weights
alone become constants. A second computation with another batch size and other lengths of histories
shows which sizes are variable.

The conversion knows the functions that the models of `zoo/` use. `OnnxNetwork` compares the graph's
logits with torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stratarec.kernels.interaction import dot_interaction, reference
from stratarec.models.base import Network

_OPSET, _IR_VERSION = 20, 10
_TYPES = {torch.float32: 1, torch.int64: 7, torch.bool: 9}
"""Number of each type in ONNX."""
_END = 1 << 62
"""End of a slice up to the end of an axis."""

Shape: TypeAlias = "tuple[int | None, ...]"
"""Sizes of a tensor; None for a variable size."""


class Unsupported(Exception):
    """The network uses a function that the conversion does not know."""


def to_onnx(network: Network, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bytes:
    """Return an ONNX model that computes logits.

    Parameters
    ----------
    one, other : mapping of str to Tensor
        Two examples of the arguments of `Network.padded`, with different variable sizes. All
        variable sizes of `other` are different.

    Raises
    ------
    Unsupported
        If the network uses a function of torch that the conversion does not know.
    """
    try:
        return _to_onnx(network, one, other)
    except Unsupported:
        raise
    except Exception as error:  # A network of another package may do anything with the recorded tensors.
        raise Unsupported(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def _to_onnx(network: Network, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bytes:
    from onnx import helper, numpy_helper

    with torch.no_grad(), _ShapeRecorder() as shapes:
        network.padded(*one.values())
    recorder = _NodeRecorder(one, other, shapes.shapes)
    with torch.no_grad(), recorder:
        logits = network.padded(*other.values())
    graph = helper.make_graph(
        [
            helper.make_node(kind, inputs, outputs, **attributes)
            for kind, inputs, outputs, attributes in recorder.nodes
        ],
        "network",
        [
            helper.make_tensor_value_info(name, _TYPES[part.dtype], recorder.shape(part))
            for name, part in other.items()
        ],
        [
            helper.make_tensor_value_info(
                recorder.value(logits), _TYPES[logits.dtype], recorder.shape(logits)
            )
        ],
        [numpy_helper.from_array(array, name) for name, array in recorder.constants.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION
    )
    return bytes(model.SerializeToString())


class _ShapeRecorder(TorchFunctionMode):
    """Records the shapes of the results of torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is dot_interaction:
            with self:
                return reference.dot_interaction(*args)
        result = func(*args, **(kwargs or {}))
        tensors = list(_tensors(result))
        self.shapes += [tensor.shape for tensor in tensors]
        if tensors:
            self.record(func, args, kwargs or {}, result, tensors)
        return result

    def record(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        tensors: Sequence[Tensor],
    ) -> None:
        """Record a call of `func`, whose result consists of `tensors`."""


class _NodeRecorder(_ShapeRecorder):
    """Records a node for each call with a value that depends on the graph's inputs.

    Parameters
    ----------
    one, other : mapping of str to Tensor
        See `to_onnx`.
    shapes : sequence of Size
        Shapes of all results in the computation with `one`.
    """

    def __init__(
        self, one: Mapping[str, Tensor], other: Mapping[str, Tensor], shapes: Sequence[torch.Size]
    ) -> None:
        super().__init__()
        self.nodes: list[tuple[str, list[str], list[str], dict[str, Any]]] = []
        self.constants: dict[str, Any] = {}
        self._inputs = other
        self._earlier = shapes
        self._names = {id(tensor): name for name, tensor in other.items()}
        self._shapes = {id(other[name]): _common(one[name].shape, other[name].shape) for name in other}
        # Names are stored by `id`, which another tensor may get once a tensor is deleted.
        self._kept: list[Any] = []

    def record(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        tensors: Sequence[Tensor],
    ) -> None:
        earlier = self._earlier[len(self.shapes) - len(tensors) : len(self.shapes)]
        shapes = [_common(before, tensor.shape) for before, tensor in zip(earlier, tensors, strict=True)]
        if any(id(tensor) in self._shapes for tensor in _tensors((args, kwargs))):
            name = func.__name__.strip("_")
            if name not in _OPERATIONS:
                raise Unsupported(f"torch's function {name}")
            self._shapes |= {id(tensor): shape for tensor, shape in zip(tensors, shapes, strict=True)}
            names = _OPERATIONS[name](self, result, *args, **kwargs)
        elif None not in shapes[0]:
            return  # a constant
        elif func is torch.arange:
            names = self._range(args[0])
            self._shapes[id(result)] = shapes[0]
        else:
            raise Unsupported(f"torch's function {func.__name__} with a variable size")
        self._kept += [args, result]
        names = [names] if isinstance(result, Tensor) else names
        self._names |= {id(tensor): name for tensor, name in zip(tensors, names, strict=True)}

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output, and return its name."""
        return self.outputs(kind, *inputs, outputs=1, **attributes)[0]

    def outputs(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        """Add a node with several outputs, and return their names."""
        names = [f"{kind}_{len(self.nodes)}_{number}" for number in range(outputs)]
        self.nodes.append((kind, list(inputs), names, attributes))
        return names

    def shape(self, tensor: Tensor) -> Shape:
        """Return the shape of a tensor."""
        return self._shapes.get(id(tensor), tuple(tensor.shape))

    def value(self, value: Any, dtype: torch.dtype | None = None) -> str:
        """Return the name of a tensor or number, which is converted to `dtype`."""
        if id(value) in self._shapes:
            name = self._names[id(value)]
            is_same = dtype is None or dtype == value.dtype
            return name if is_same else self.node("Cast", name, to=_TYPES[dtype])  # type: ignore[index]
        value = torch.as_tensor(value, dtype=dtype)
        if id(value) not in self._names:
            self._names[id(value)] = name = f"constant_{len(self.constants)}"
            self.constants[name] = value.detach().contiguous().cpu().numpy()
            self._kept.append(value)
        return self._names[id(value)]

    def integers(self, *values: int) -> str:
        """Return the name of a constant vector of integers."""
        return self.value(torch.tensor(values, dtype=torch.int64))

    def reshape(self, name: str, old_shape: Shape, shape: Shape) -> str:
        """Reshape `name` from `old_shape` to `shape`."""
        if old_shape == shape:
            return name
        # 0 is the size of the same axis before, and -1 is the remaining size.
        same = [
            axis < len(old_shape) and size is None and old_shape[axis] is None
            for axis, size in enumerate(shape)
        ]
        if shape.count(None) == 1:
            same = [False] * len(shape)
        sizes = [
            0 if is_same else -1 if size is None else size
            for is_same, size in zip(same, shape, strict=True)
        ]
        if sizes.count(-1) > 1:
            raise Unsupported("reshaping several variable sizes")
        return self.node("Reshape", name, self.integers(*sizes))

    def _range(self, size: int) -> str:
        """Return the numbers up to a variable size, which is read from the shape of an input."""
        inputs = self._inputs.items()
        name, axis = next(
            (name, axis) for name, part in inputs for axis, s in enumerate(part.shape) if s == size
        )
        count = self.node("Gather", self.node("Shape", name), self.value(axis, torch.int64))
        return self.node("Range", self.value(0, torch.int64), count, self.value(1, torch.int64))


def _common(one: Sequence[int], other: Sequence[int]) -> Shape:
    return tuple(size if size == before else None for before, size in zip(one, other, strict=True))


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples, lists and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def _elementwise(kind: str) -> Callable[..., str]:
    def emit(graph: _NodeRecorder, result: Tensor, *operands: Any, **_: Any) -> str:
        return graph.node(kind, *(graph.value(operand, result.dtype) for operand in operands))

    return emit


def _comparison(kind: str) -> Callable[..., str]:
    def emit(graph: _NodeRecorder, _: Tensor, left: Any, right: Any) -> str:
        dtype = torch.result_type(left, right)
        return graph.node(kind, graph.value(left, dtype), graph.value(right, dtype))

    return emit


def _reshaped(graph: _NodeRecorder, result: Tensor, tensor: Tensor, *_: Any, **__: Any) -> str:
    return graph.reshape(graph.value(tensor), graph.shape(tensor), graph.shape(result))


def _converted(graph: _NodeRecorder, result: Tensor, tensor: Tensor, *_: Any, **__: Any) -> str:
    return graph.value(tensor, result.dtype)


def _linear(
    graph: _NodeRecorder, _: Tensor, tensor: Tensor, weight: Tensor, bias: Tensor | None = None
) -> str:
    if tensor.ndim == 2:
        parts = [] if bias is None else [graph.value(bias)]
        return graph.node("Gemm", graph.value(tensor), graph.value(weight), *parts, transB=1)
    product = graph.node("MatMul", graph.value(tensor), graph.value(weight.t()))
    return product if bias is None else graph.node("Add", product, graph.value(bias))


def _matmul(graph: _NodeRecorder, _: Tensor, left: Tensor, right: Tensor) -> str:
    return graph.node("MatMul", graph.value(left), graph.value(right))


def _baddbmm(graph: _NodeRecorder, result: Tensor, bias: Tensor, left: Tensor, right: Tensor) -> str:
    return graph.node("Add", _matmul(graph, result, left, right), graph.value(bias))


def _addcmul(graph: _NodeRecorder, result: Tensor, tensor: Tensor, left: Tensor, right: Tensor) -> str:
    product = graph.node("Mul", graph.value(left, result.dtype), graph.value(right, result.dtype))
    return graph.node("Add", graph.value(tensor, result.dtype), product)


def _square(graph: _NodeRecorder, _: Tensor, tensor: Tensor) -> str:
    return graph.node("Mul", graph.value(tensor), graph.value(tensor))


def _clamp(graph: _NodeRecorder, result: Tensor, tensor: Tensor, min: Any = None, max: Any = None) -> str:
    bounds = ["" if bound is None else graph.value(bound, result.dtype) for bound in (min, max)]
    return graph.node("Clip", graph.value(tensor), *bounds)


def _where(graph: _NodeRecorder, result: Tensor, condition: Tensor, left: Any, right: Any) -> str:
    values = [graph.value(operand, result.dtype) for operand in (left, right)]
    return graph.node("Where", graph.value(condition), *values)


def _cat(graph: _NodeRecorder, result: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> str:
    return graph.node("Concat", *(graph.value(tensor, result.dtype) for tensor in tensors), axis=dim)


def _stack(graph: _NodeRecorder, result: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> str:
    axis = dim % result.ndim
    shape = tuple(1 if place == axis else size for place, size in enumerate(graph.shape(result)))
    parts = [
        graph.reshape(graph.value(tensor, result.dtype), graph.shape(tensor), shape) for tensor in tensors
    ]
    return graph.node("Concat", *parts, axis=axis)


def _split(
    graph: _NodeRecorder, result: Sequence[Tensor], tensor: Tensor, _: Any, dim: int = 0
) -> list[str]:
    sizes = [part.shape[dim] for part in result]
    axis = dim % tensor.ndim
    return graph.outputs(
        "Split", graph.value(tensor), graph.integers(*sizes), outputs=len(sizes), axis=axis
    )


def _transpose(graph: _NodeRecorder, _: Tensor, tensor: Tensor, first: int = 0, second: int = 1) -> str:
    order = list(range(tensor.ndim))
    order[first], order[second] = order[second], order[first]
    return graph.node("Transpose", graph.value(tensor), perm=order)


def _permute(graph: _NodeRecorder, _: Tensor, tensor: Tensor, *order: Any) -> str:
    flat = order[0] if len(order) == 1 else order
    return graph.node("Transpose", graph.value(tensor), perm=[axis % tensor.ndim for axis in flat])


def _sum(graph: _NodeRecorder, result: Tensor, tensor: Tensor, dim: Any, keepdim: bool = False) -> str:
    axes = graph.integers(*([dim] if isinstance(dim, int) else dim))
    return graph.node("ReduceSum", graph.value(tensor, result.dtype), axes, keepdims=int(keepdim))


def _softmax(graph: _NodeRecorder, _: Tensor, tensor: Tensor, dim: int, *__: Any, **___: Any) -> str:
    return graph.node("Softmax", graph.value(tensor), axis=dim)


def _layer_norm(
    graph: _NodeRecorder,
    _: Tensor,
    tensor: Tensor,
    shape: Sequence[int],
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> str:
    values = (graph.value(value) for value in (tensor, weight, bias))
    return graph.node("LayerNormalization", *values, axis=-len(shape), epsilon=eps)


def _batch_norm(
    graph: _NodeRecorder,
    _: Tensor,
    tensor: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    bias: Tensor,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> str:
    values = (graph.value(value) for value in (tensor, weight, bias, mean, variance))
    return graph.node("BatchNormalization", *values, epsilon=eps)


def _einsum(graph: _NodeRecorder, _: Tensor, equation: str, *operands: Tensor) -> str:
    return graph.node("Einsum", *map(graph.value, operands), equation=equation)


def _attention(
    graph: _NodeRecorder,
    _: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> str:
    order = [*range(key.ndim - 2), key.ndim - 1, key.ndim - 2]
    products = graph.node(
        "MatMul", graph.value(query), graph.node("Transpose", graph.value(key), perm=order)
    )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = graph.node("Mul", products, graph.value(scale, torch.float32))
    if attn_mask is not None:
        scores = graph.node("Where", graph.value(attn_mask), scores, graph.value(-math.inf, torch.float32))
    return graph.node("MatMul", graph.node("Softmax", scores, axis=-1), graph.value(value))


def _getitem(graph: _NodeRecorder, result: Tensor, tensor: Tensor, index: Any) -> str:
    parts = [*index] if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        place = next(place for place, part in enumerate(parts) if part is Ellipsis)
        missing = tensor.ndim - sum(part is not None and part is not Ellipsis for part in parts)
        parts[place : place + 1] = [slice(None)] * missing
    name, shape = graph.value(tensor), list(graph.shape(tensor))
    chosen: list[tuple[int, Any]] = []
    for axis, part in enumerate(part for part in parts if part is not None):
        if isinstance(part, slice | int):
            size = tensor.shape[axis]
            first, last, step = (
                part if isinstance(part, slice) else slice(part, part + 1 or None)
            ).indices(size)
            if (first, last, step) != (0, size, 1):
                bounds = map(graph.integers, (first, _END if last == size else last, axis, step))
                name = graph.node("Slice", name, *bounds)
                count = len(range(first, last, step))
                shape[axis] = None if shape[axis] is None and isinstance(part, slice) else count
        else:
            chosen.append((axis, torch.as_tensor(part)))
    if not chosen:
        return graph.reshape(name, tuple(shape), graph.shape(result))
    if len(chosen) == 2 and chosen[0][0] + 1 == chosen[1][0]:
        # Two adjacent axes are joined, so that one index selects from both. They are moved to the
        # front, where an index selects contiguous numbers: for 1,000 rows and 351 of 729 products
        # this saves a fifth of DLRM's time.
        (axis, first_index), (_, second_index) = chosen
        other_axes = [place for place in range(tensor.ndim) if place not in (axis, axis + 1)]
        name = graph.node("Transpose", name, perm=[axis, axis + 1, *other_axes])
        front, others = (shape[axis], shape[axis + 1]), [shape[place] for place in other_axes]
        joined = (tensor.shape[axis] * tensor.shape[axis + 1], *others)
        name = graph.reshape(name, (*front, *others), joined)
        joined_index = graph.value(first_index * tensor.shape[axis + 1] + second_index, torch.int64)
        name = graph.node("Gather", name, joined_index, axis=0)
        return graph.node(
            "Transpose", name, perm=[*range(1, axis + 1), 0, *range(axis + 1, tensor.ndim - 1)]
        )
    if len(chosen) > 1 or len(parts) > tensor.ndim:
        raise Unsupported("indexing by several tensors")
    axis, item = chosen[0]
    return graph.node("Gather", name, graph.value(item, torch.int64), axis=axis)


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unsqueeze", "squeeze", "unflatten"), _reshaped),
    **dict.fromkeys(("to", "float", "contiguous", "clone"), _converted),
    **{name: _elementwise(kind) for name, kind in (
        ("add", "Add"), ("mul", "Mul"), ("sub", "Sub"), ("div", "Div"), ("truediv", "Div"), ("relu", "Relu"),
        ("sigmoid", "Sigmoid"), ("tanh", "Tanh"), ("or", "Or"), ("and", "And"), ("gelu", "Gelu"), ("neg", "Neg"),
    )},
    **{name: _comparison(kind) for name, kind in (
        ("ge", "GreaterOrEqual"), ("gt", "Greater"), ("le", "LessOrEqual"), ("lt", "Less"), ("eq", "Equal"),
    )},
    "addcmul": _addcmul, "baddbmm": _baddbmm, "batch_norm": _batch_norm, "bmm": _matmul, "cat": _cat, "chunk": _split,
    "clamp": _clamp, "clamp_min": _clamp, "einsum": _einsum, "getitem": _getitem, "layer_norm": _layer_norm,
    "linear": _linear, "matmul": _matmul, "permute": _permute, "scaled_dot_product_attention": _attention,
    "softmax": _softmax, "split": _split, "square": _square, "stack": _stack, "sum": _sum, "t": _transpose,
    "transpose": _transpose, "where": _where,
}  # fmt: skip
