"""Models that compute logits from a batch. A recipe selects a model by `model.kind`.

Each model is a module of `zoo/`, its settings in `zoo/config.py`, and an entry of `registry.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratarec.io.lazy_names import lazy_names

if TYPE_CHECKING:
    from stratarec.models.base import CTRModel as CTRModel
    from stratarec.models.base import Network as Network
    from stratarec.models.base import Score as Score
    from stratarec.models.build import build_model as build_model
    from stratarec.models.build import build_network as build_network
    from stratarec.models.config import HeadsConfig as HeadsConfig
    from stratarec.models.config import HistoryConfig as HistoryConfig
    from stratarec.models.config import VectorsConfig as VectorsConfig
    from stratarec.models.layers import MLP as MLP
    from stratarec.models.registry import ModelConfig as ModelConfig
    from stratarec.models.request import Segments as Segments
    from stratarec.models.tower_config import TowersConfig as TowersConfig
    from stratarec.models.zoo.config import DLRMConfig as DLRMConfig
    from stratarec.models.zoo.fields import Fields as Fields
    from stratarec.models.zoo.fields import Terms as Terms

__getattr__, __all__ = lazy_names(__name__, __file__)
