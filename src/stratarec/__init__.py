"""Train recommendation models whose embedding tables outgrow fast memory.

dataset = stratarec.Dataset.open("data/demo")
recipe = stratarec.Recipe.load("demo.yaml")
result = stratarec.Trainer(recipe, dataset).train()
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stratarec.io.lazy_names import lazy_names

if TYPE_CHECKING:
    from stratarec.batch.batch import Batch as Batch
    from stratarec.batch.jagged import InverseJagged as InverseJagged
    from stratarec.batch.jagged import JaggedTensor as JaggedTensor
    from stratarec.batch.jagged import KeyedJagged as KeyedJagged
    from stratarec.data.dataset.dataset import Dataset as Dataset
    from stratarec.data.loading.loader import Loader as Loader
    from stratarec.data.loading.loader import LoaderConfig as LoaderConfig
    from stratarec.data.prepare.config import PrepareConfig as PrepareConfig
    from stratarec.data.prepare.prepare import prepare as prepare
    from stratarec.embedding import EmbeddingBagConfig as EmbeddingBagConfig
    from stratarec.embedding import RowOptimizerConfig as RowOptimizerConfig
    from stratarec.embedding import TieredEmbeddingBagCollection as TieredEmbeddingBagCollection
    from stratarec.errors import StrataError as StrataError
    from stratarec.estimator.click_model import ClickModel as ClickModel
    from stratarec.recipe import Recipe as Recipe
    from stratarec.serving.scorer import Scorer as Scorer
    from stratarec.training.trainer import Trainer as Trainer

# Libraries that report their use to their makers unless a variable is set before they are imported.
# Ray's is set where Ray is imported.
_SILENT = {
    "ORT_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
for _name, _value in _SILENT.items():
    os.environ.setdefault(_name, _value)

__getattr__, __all__ = lazy_names(__name__, __file__)
