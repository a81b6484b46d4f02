"""One training of FuxiCTR, by FuxiCTR's own interpreter: ``PYTHON fuxictr_run.py JOB.json
OUT.json``.

The script does the work of FuxiCTR's ``run_expid.py`` and records the time of each evaluation. A
job has ``checkout``, ``model``, ``threads``, ``files`` (Parquet), ``columns`` and ``params``. The
script imports nothing of StrataRec.
"""

import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path


def settings(job, folder):
    """Return the parameters of a run whose files are all in `folder`."""
    import polars

    paths = {}
    for split, file in job["files"].items():
        paths[f"{split}_data"] = str(folder / f"{split}.csv")
        polars.read_parquet(file).write_csv(paths[f"{split}_data"])
    column = {"name": job["columns"], "active": True, "dtype": "str", "type": "categorical"}
    return {
        **paths,
        **job["params"],
        "data_root": str(folder),
        "data_format": "csv",
        "dataset_id": "log",
        "feature_cols": [column],
        "label_col": {"name": "label", "dtype": "float"},
        "min_categr_count": 1,
        "model": job["model"],
        "model_id": "run",
        "model_root": str(folder),
        "task": "binary_classification",
        "loss": "binary_crossentropy",
        "optimizer": "adam",
        "metrics": ["AUC", "logloss"],
        # Both metrics are evaluated, but only AUC selects the best epoch.
        "monitor": {"AUC": 1, "logloss": 0},
        "monitor_mode": "max",
        "early_stop_patience": 2,
        "save_best_only": True,
        "shuffle": True,
        "num_workers": 0,
        "verbose": 0,
        "gpu": -1,
        "eval_steps": None,
        "group_id": None,
        "use_features": None,
        "feature_specs": None,
        "feature_config": None,
        "pickle_feature_encoder": False,
        "debug_mode": False,
    }


def recording(kind):
    """Return a subclass of the model `kind` that records its evaluations."""

    class Recording(kind):
        def fit(self, *args, **kwargs):
            self.evaluations = []
            self.began = (time.perf_counter(), time.process_time())
            super().fit(*args, **kwargs)

        def checkpoint_and_earlystop(self, logs, *args, **kwargs):
            seconds, processor = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
            self.evaluations.append(
                {
                    "step": self._total_steps,
                    "auc": float(logs["AUC"]),
                    "log_loss": float(logs["logloss"]),
                    "seconds": seconds,
                    "processor_seconds": processor,
                }
            )
            super().checkpoint_and_earlystop(logs, *args, **kwargs)

    return Recording


def train(job, folder):
    """Return the test metrics and the evaluations."""
    zoo = Path(job["checkout"]) / "model_zoo" / job["model"]
    torch_zoo = zoo / f"{job['model']}_torch"
    sys.path[:0] = [job["checkout"], str(torch_zoo if torch_zoo.is_dir() else zoo)]
    import torch
    from fuxictr.features import FeatureMap
    from fuxictr.preprocess import FeatureProcessor, build_dataset
    from fuxictr.pytorch.dataloaders import RankDataLoader
    from fuxictr.pytorch.torch_utils import seed_everything

    torch.set_num_threads(job["threads"])
    params = settings(job, folder)
    seed_everything(seed=params["seed"])
    files = build_dataset(FeatureProcessor(**params), **params)
    params |= dict(zip(("train_data", "valid_data", "test_data"), files, strict=True))
    features = FeatureMap("log", str(folder / "log"))
    features.load(str(folder / "log" / "feature_map.json"), params)
    model = recording(getattr(importlib.import_module("src"), job["model"]))(features, **params)
    training, validation = RankDataLoader(features, stage="train", **params).make_iterator()
    model.fit(training, validation_data=validation, **params)
    metrics = model.evaluate(RankDataLoader(features, stage="test", **params).make_iterator())
    return {
        "auc": float(metrics["AUC"]),
        "log_loss": float(metrics["logloss"]),
        "evaluations": model.evaluations,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        result = train(json.loads(Path(sys.argv[1]).read_text()), Path(directory))
    Path(sys.argv[2]).write_text(json.dumps(result))
    os._exit(0)
