"""Models that compute logits from a batch. A recipe selects a model by `model.kind`.

Each model is a module of `zoo/`, its settings in `zoo/config.py`, and an entry of `registry.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    from stratarec.models.request import Runs as Runs
    from stratarec.models.tower_config import TowersConfig as TowersConfig
    from stratarec.models.zoo.config import DLRMConfig as DLRMConfig
    from stratarec.models.zoo.fields import Fields as Fields
    from stratarec.models.zoo.fields import Terms as Terms

# Loaded when first used: recipes are read without torch and Numba, which take seconds to load.
_HOMES = {
    "CTRModel": "base",
    "DLRMConfig": "zoo.config",
    "Fields": "zoo.fields",
    "HeadsConfig": "config",
    "HistoryConfig": "config",
    "MLP": "layers",
    "ModelConfig": "registry",
    "Network": "base",
    "Runs": "request",
    "Score": "base",
    "Terms": "zoo.fields",
    "TowersConfig": "tower_config",
    "VectorsConfig": "config",
    "build_model": "build",
    "build_network": "build",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
