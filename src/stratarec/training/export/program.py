"""Export a network as a `torch.export` program or as ONNX.

The exported function has the inputs dense ``[B, F]``, pooled ``[B, P * D]``, and for each history rows ``[B, L, D]``
and mask ``[B, L]``. It returns probabilities ``[B]``, or ``[B, T]`` with T labels.

torch unpickles parts of a program's file, so opening a program can run any code that its author put there. StrataRec
writes programs and never opens them. An ONNX file is only data.
"""

from __future__ import annotations

import importlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stratarec.errors import ConfigError
from stratarec.models.base import Network
from stratarec.training.run.open_run import TrainedModel


class _Probability(nn.Module):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, dense: Tensor, pooled: Tensor, *sequences: Tensor) -> Tensor:
        return torch.sigmoid(self.network.padded(dense, pooled, *sequences))


def program_bytes(trained: TrainedModel) -> memoryview:
    """Return the content of ``program.pt2``."""
    # Written to memory first, because torch's writer aborts the process if the disk is full.
    content = io.BytesIO()
    torch.export.save(_program(trained), content)
    return content.getbuffer()


def check_onnx() -> None:
    """Raise `ConfigError` if the libraries that ``--onnx`` needs are not installed."""
    try:
        for name in ("onnx", "onnxscript"):
            importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"--onnx needs onnx and onnxscript ({error}): pip install 'stratarec[onnx]'") from error


def onnx_bytes(trained: TrainedModel) -> bytes:
    """Return the content of ``network.onnx``.

    The inputs are named `dense` and `pooled`, and for each sequence n `rows_<n>` and `mask_<n>`. The output is `score`.
    """
    names = ["dense", "pooled"]
    for number in range(sum(map(len, trained.model.network.event_columns))):
        names += [f"rows_{number}", f"mask_{number}"]
    with _quiet():
        program = torch.onnx.export(
            _program(trained), dynamo=True, input_names=names, output_names=["score"], verbose=False
        )
        assert program is not None
        content = program.model_proto
    # These fields contain paths of this machine and internal names of torch.
    for part in (content, content.graph, *content.graph.node, *content.graph.value_info, *content.graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    return bytes(content.SerializeToString(deterministic=True))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of torch's exporter, because users cannot do anything about them."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _program(trained: TrainedModel) -> torch.export.ExportedProgram:
    network, embeddings = trained.model.network, trained.model.embeddings
    widths = {
        name: table.embedding_dim
        for table in embeddings.tables
        for name in (*table.feature_names, *table.sequence_features)
    }
    batch = torch.export.Dim("batch", min=1)
    pooled = sum(widths[name] for name in embeddings.pooled_keys)
    inputs: list[Tensor] = [
        torch.zeros(3, len(trained.dataset.schema.dense) + network.tree_columns),
        torch.zeros(3, pooled),
    ]
    shapes: list[dict[int, Any]] = [{0: batch}, {0: batch}]
    for number, columns in enumerate(network.event_columns):
        longest = torch.export.Dim(f"length_{number}", min=1)
        for name in columns:
            inputs += [torch.zeros(3, 5, widths[name]), torch.ones(3, 5, dtype=torch.bool)]
            shapes += [{0: batch, 1: longest}, {0: batch, 1: longest}]
    extra = [tuple(shapes[2:])] if len(shapes) > 2 else []
    model = _Probability(network).eval()
    return torch.export.export(model, tuple(inputs), dynamic_shapes=(*shapes[:2], *extra))
