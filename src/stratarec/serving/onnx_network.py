"""Compute the network of an export by ONNX Runtime, which takes a third of torch's time for one
row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.kernels.runtime.cores import cores
from stratarec.models.base import Network, probabilities
from stratarec.models.history import History
from stratarec.serving.export_manifest import ExportManifest
from stratarec.serving.onnx_graph import Unsupported, to_onnx

# Largest difference between scores of ONNX Runtime and torch. A steep calibration map multiplies
# it.
_TOLERANCE = 1e-6
# Batch size and length of the first history of examples; further histories are longer.
_SIZES = (2, 3), (5, 7), (1, 1)
_MISSING = "onnx and onnxruntime are not installed: pip install 'stratarec[onnx]'"


class OnnxNetwork:
    """The network of an export as sessions of ONNX Runtime, one for each number of threads that is
    used.

    Raises
    ------
    Unsupported
        If ONNX Runtime is not installed, or if ONNX cannot represent the network.
    """

    def __init__(self, network: Network, manifest: ExportManifest) -> None:
        self._runtime = load_runtime(manifest.precision)
        self._lock = Lock()
        self._sessions: dict[int, Any] = {}
        examples = [_example(network, manifest, *sizes) for sizes in _SIZES]
        self.content = to_onnx(network, *examples[:2])
        """The ONNX model."""
        for example in examples:
            self._compare(network, example)

    def __call__(
        self, dense: NDArray[np.float32], pooled: NDArray[np.float32], histories: Sequence[History] = ()
    ) -> NDArray[np.float32]:
        """Return the same logits as the network, up to rounding."""
        inputs = {"dense": dense, "pooled": pooled}
        for number, history in enumerate(histories):
            rows, mask = history.padded()
            inputs |= {f"rows_{number}": rows.cpu().numpy(), f"mask_{number}": mask.cpu().numpy()}
        return self._run(inputs)

    def _run(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        threads = min(torch.get_num_threads(), cores())
        session = self._sessions.get(threads) or self._session(threads)
        logits: NDArray[np.float32] = session.run(None, inputs)[0]
        return logits

    def _session(self, threads: int) -> Any:
        with self._lock:
            if threads not in self._sessions:
                options = self._runtime.SessionOptions()
                options.intra_op_num_threads = threads
                options.inter_op_num_threads = 1
                options.log_severity_level = 3
                # Threads that wait for the next call would take the cores from the lookups.
                options.add_session_config_entry("session.intra_op.allow_spinning", "0")
                self._sessions[threads] = self._runtime.InferenceSession(
                    self.content, options, providers=["CPUExecutionProvider"]
                )
            return self._sessions[threads]

    def _compare(self, network: Network, example: Mapping[str, Tensor]) -> None:
        """Raise `Unsupported` if the scores differ from those of torch."""
        try:
            scores = self._run({name: tensor.cpu().numpy() for name, tensor in example.items()})
        except Exception as error:  # ONNX Runtime has no common base of its errors.
            raise Unsupported(f"ONNX Runtime: {' '.join(str(error).split())[:200]}") from error
        with torch.no_grad():
            expected = network.padded(*(tensor.clone() for tensor in example.values())).cpu().numpy()
        difference = float(np.abs(probabilities(scores) - probabilities(expected)).max(initial=0.0))
        most = _TOLERANCE * max(1.0, 0.0 if network.calibration is None else network.calibration.steepest)
        if scores.shape != expected.shape or not difference <= most:
            raise Unsupported(f"scores of ONNX Runtime differ from those of torch by {difference:.1e}")


def load_runtime(precision: str) -> Any:
    """Return the module `onnxruntime`; `Unsupported` if a library does not load, or cannot compute
    in `precision`.
    """
    if precision != "float32":
        raise Unsupported(f"the network's precision is {precision}, expected float32")
    try:
        import onnx  # noqa: F401
        import onnxruntime
    except ModuleNotFoundError as error:
        raise Unsupported(_MISSING) from error
    except Exception as error:  # such as OSError for a shared library, AttributeError for another NumPy
        raise Unsupported(f"ONNX Runtime does not load: {' '.join(str(error).split())[:200]}") from error
    return onnxruntime


def _example(network: Network, manifest: ExportManifest, batch: int, length: int) -> dict[str, Tensor]:
    """Return random inputs of the network, by their names in the graph."""
    generator = torch.Generator().manual_seed(batch)
    widths = {entry.feature: manifest.tables[entry.table].width for entry in manifest.pooled}
    widths |= {entry.feature: manifest.tables[entry.table].width for entry in manifest.sequences}

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    columns = sum(widths[entry.feature] for entry in manifest.pooled)
    inputs = {
        "dense": draw(batch, len(manifest.columns.dense) + network.tree_columns),
        "pooled": 0.1 * draw(batch, columns),
    }
    lengths = [length + 2 * place for place, names in enumerate(network.event_columns) for _ in names]
    for number, (name, longest) in enumerate(zip(network.sequence_keys, lengths, strict=True)):
        inputs[f"rows_{number}"] = 0.1 * draw(batch, longest, widths[name])
        # From an empty history to one of the full length.
        counts = torch.arange(batch) * longest // max(batch - 1, 1)
        inputs[f"mask_{number}"] = torch.arange(longest) < counts.unsqueeze(1)
    return inputs
