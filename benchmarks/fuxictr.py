"""FuxiCTR as a peer of `quality`: its own code and interpreter, trained on the same files with one
thread.

Set ``STRATAREC_FUXICTR`` to a checkout of its repository (its package lacks the model zoo), and
``STRATAREC_FUXICTR_PYTHON`` to an interpreter with its dependencies (``pip install fuxictr
"polars<2" keras_preprocessing``). Both sides are compared by processor seconds. These equal clock
seconds on an idle machine, because no side waits for anything else, and exclude other work on a
busy one.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.kept import kept
from benchmarks.registry import PeerMissing
from stratarec.errors import TrainingError

SHARED = {"learning_rate": 0.001, "batch_size": 4096, "embedding_dim": 10}
DEEP = {"batch_norm": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "fm": ("FM", {}),
    "deepfm": ("DeepFM", {"hidden_units": [400, 400, 400], "hidden_activations": "relu", "net_dropout": 0.2, **DEEP}),
    "dcnv2": (
        "DCNv2",
        {
            "model_structure": "parallel", "use_low_rank_mixture": False, "num_cross_layers": 4, "net_dropout": 0.4,
            "stacked_dnn_hidden_units": [], "parallel_dnn_hidden_units": [400, 400, 400], "dnn_activations": "relu",
            **DEEP,
        },
    ),
    "dlrm": (
        "DLRM",
        {
            "top_mlp_units": [400, 400, 400], "top_mlp_activations": "ReLU", "top_mlp_dropout": 0.4,
            "bottom_mlp_units": [64, 64], "bottom_mlp_activations": "ReLU", "bottom_mlp_dropout": 0,
            "interaction_op": "cat", **DEEP,
        },
    ),
    "finalmlp": (
        "FinalMLP",
        {
            "mlp1_hidden_units": [400], "mlp1_hidden_activations": "relu", "mlp1_dropout": 0.4, "mlp1_batch_norm": True,
            "mlp2_hidden_units": [100], "mlp2_hidden_activations": "relu", "mlp2_dropout": 0.4, "mlp2_batch_norm": True,
            "use_fs": True, "fs_hidden_units": [400], "fs1_context": ["user"], "fs2_context": ["item"], "num_heads": 5,
        },
    ),
}  # fmt: skip


def installed() -> tuple[str, str]:
    """Return the interpreter and the checkout, or raise `PeerMissing` if they are not
    configured.
    """
    python, checkout = (
        os.environ.get(name, "") for name in ("STRATAREC_FUXICTR_PYTHON", "STRATAREC_FUXICTR")
    )
    if not (Path(python).is_file() and (Path(checkout) / "model_zoo").is_dir()):
        raise PeerMissing(
            "FuxiCTR left out: set STRATAREC_FUXICTR to a checkout of its repository, and "
            "STRATAREC_FUXICTR_PYTHON to an interpreter with its dependencies"
        )
    return python, checkout


def trained(
    name: str, decay: float, seed: int, files: Mapping[str, Path], *, threads: int, epochs: int, path: Path
) -> dict[str, Any]:
    """Train FuxiCTR and return results in the format of `quality.one`; results are stored at `path`
    and reused.
    """
    model, params = MODELS[name]
    # FuxiCTR's FM has one regularizer, as all its weights are embedding rows.
    deep = {"embedding_regularizer": decay, "net_regularizer": 0}
    regularizer = {"regularizer": decay} if name == "fm" else deep
    columns = [
        "user",
        "item",
        "daytime",
        "weekday",
        "isweekend",
        "homework",
        "cost",
        "weather",
        "country",
        "city",
    ]
    job = {
        "model": model, "threads": threads, "columns": columns,
        "files": {split: str(file) for split, file in files.items()},
        "params": {**SHARED, **params, **regularizer, "seed": seed, "epochs": epochs},
    }  # fmt: skip
    return kept(path, job, lambda: _trained(job, threads))


def _trained(job: Mapping[str, Any], threads: int) -> dict[str, Any]:
    python, checkout = installed()
    with tempfile.TemporaryDirectory() as folder:
        job_file, out = Path(folder) / "job.json", Path(folder) / "out.json"
        job_file.write_text(json.dumps({**job, "checkout": checkout}))
        script = Path(__file__).with_name("fuxictr_run.py")
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": checkout}
        command = [python, str(script), str(job_file), str(out)]
        done = subprocess.run(command, check=False, env=environment, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise TrainingError(
                f"FuxiCTR's {job['model']} ended with status {done.returncode}; see its error above"
            )
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def best(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the evaluation of `run` with the highest AUC."""
    evaluation: Mapping[str, Any] = max(run["evaluations"], key=lambda each: each["auc"])
    return evaluation


def ratio(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Return their processor seconds to their best validation AUC over ours to reach it, or 0 if we
    never do.
    """
    goal = best(theirs)
    for each in ours["evaluations"]:
        if each["auc"] >= goal["auc"]:
            return float(goal["processor_seconds"] / each["processor_seconds"])
    return 0.0


def _epoch(run: Mapping[str, Any]) -> float:
    """Return the median processor seconds between evaluations, which excludes start-up and
    compilation.
    """
    times = [each["processor_seconds"] for each in run["evaluations"]]
    return median(late - early for early, late in pairwise(times))


def metrics(
    name: str, ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return the metrics of one model; ratios are over all pairs of runs."""
    pairs = [ratio(one, other) for one in ours for other in theirs]
    return {
        f"auc_fuxictr_{name}": mean(run["auc"] for run in theirs),
        f"log_loss_fuxictr_{name}": mean(run["log_loss"] for run in theirs),
        f"processor_seconds_to_best_fuxictr_{name}": mean(best(run)["processor_seconds"] for run in theirs),
        f"ratio_fuxictr_{name}": median(pairs),
        f"reached_fuxictr_{name}": mean(each > 0 for each in pairs),
        f"ratio_fuxictr_epoch_{name}": mean(map(_epoch, theirs)) / mean(map(_epoch, ours)),
    }
