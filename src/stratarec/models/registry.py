"""Registry of models. A recipe selects a model by its `kind`, which is built in or comes from an
installed package.

A package provides a model by an entry point of the group ``stratarec.models``. The name of the
entry point is the kind, and its value is a subclass of `base.Score`. A package is imported only
when one of its kinds is used.
"""

from __future__ import annotations

import dataclasses
import importlib
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

from stratarec.config.choices import Sections
from stratarec.errors import ConfigError
from stratarec.models.config import VectorsConfig
from stratarec.models.zoo.config import (
    DCNv2Config,
    DeepFMConfig,
    DINConfig,
    DLRMConfig,
    EnsembleConfig,
    FinalMLPConfig,
    FMConfig,
    LRConfig,
    WideDeepConfig,
)
from stratarec.registry import Registry

if TYPE_CHECKING:
    from stratarec.models.base import Score
    from stratarec.models.towers import Build

GROUP = "stratarec.models"


class Model(NamedTuple):
    """An entry of `MODELS`."""

    config: type[VectorsConfig]
    """Class of the section ``model`` of this model."""
    score: str | type[Score]
    """Subclass of `Score`, or its module in `zoo` and its name, which is loaded when used: torch
    takes seconds.
    """


MODELS = Registry[Model](
    "model",
    {
        "dlrm": Model(DLRMConfig, "dlrm.DLRMScore"),
        "dcnv2": Model(DCNv2Config, "dcn.DCNv2Score"),
        "lr": Model(LRConfig, "first_order.LRScore"),
        "fm": Model(FMConfig, "first_order.FMScore"),
        "wide_deep": Model(WideDeepConfig, "first_order.WideDeepScore"),
        "deepfm": Model(DeepFMConfig, "first_order.DeepFMScore"),
        "finalmlp": Model(FinalMLPConfig, "finalmlp.FinalMLPScore"),
        "din": Model(DINConfig, "din.DINScore"),
        "ensemble": Model(EnsembleConfig, "ensemble.EnsembleScore"),
    },
)


def score_of(kind: str) -> type[Score]:
    """Return the score class of a kind.

    Raises
    ------
    ConfigError
        If the kind is unknown or defined more than once, or if the entry point cannot be loaded or
        is not a model.
    """
    offers = _offers().get(kind, ())
    if kind in MODELS:
        if offers:
            raise ConfigError(
                f"model.kind is {kind!r}, which StrataRec has and {_packages(offers)} provides, too: "
                "uninstall the package, or rename its model"
            )
        score = MODELS[kind].score
        if isinstance(score, str):
            module, _, name = score.partition(".")
            score = getattr(importlib.import_module(f"stratarec.models.zoo.{module}"), name)
        return score
    if not offers:
        kinds = ", ".join((*MODELS, *_offers()))
        raise ConfigError(
            f"model.kind is {kind!r}, expected one of {kinds}; if a package has it, install that package"
        )
    if len(offers) > 1:
        raise ConfigError(f"model.kind is {kind!r}, which {_packages(offers)} offer: uninstall all but one")
    return _load(offers[0])


def tower_of(config: VectorsConfig) -> Build:
    """Return the class of this model's tower modules; `Plain` if the outputs of towers are their
    vectors.
    """
    from stratarec.models.towers import Plain

    assert config.towers is not None
    tower = score_of(config.kind).tower
    if tower is None and not config.towers.plain:
        others = " or ".join(kind for kind in MODELS if has_towers(kind))
        raise ConfigError(
            f"model.kind {config.kind} has no tower modules, but model.towers.compression is "
            f"{config.towers.compression}; set it to 1, or model.kind to {others}"
        )
    return tower or Plain


def has_towers(kind: str) -> bool:
    """Whether a kind of model supports tower modules, which reduce the outputs of towers."""
    return score_of(kind).tower is not None


@cache
def _offers() -> dict[str, tuple[metadata.EntryPoint, ...]]:
    """Return the entry points of installed packages, by kind."""
    offers: dict[str, tuple[metadata.EntryPoint, ...]] = {}
    for entry in metadata.entry_points(group=GROUP):
        offers[entry.name] = (*offers.get(entry.name, ()), entry)
    return offers


def _packages(offers: tuple[metadata.EntryPoint, ...]) -> str:
    return " and ".join("a package" if entry.dist is None else entry.dist.name for entry in offers)


def _load(entry: metadata.EntryPoint) -> type[Score]:
    """Return the score class of an entry point."""
    from stratarec.models.base import Score

    where = f"model.kind is {entry.name!r}, which {_packages((entry,))} offers as {entry.value}"
    try:
        score = entry.load()
    except Exception as error:
        raise ConfigError(f"{where}, which does not load: {type(error).__name__}: {error}") from error
    config = getattr(score, "config", None)
    if not (isinstance(score, type) and issubclass(score, Score) and isinstance(config, type)):
        raise ConfigError(f"{where}, which is not a Score with a config")
    if not (issubclass(config, VectorsConfig) and dataclasses.is_dataclass(config)):
        raise ConfigError(f"{where}, whose config is not a dataclass that extends VectorsConfig")
    if getattr(config, "kind", None) != entry.name:
        raise ConfigError(
            f"{where}, whose config has the kind {getattr(config, 'kind', None)!r}, expected the same"
        )
    return score


def _of_package(kind: str) -> type[VectorsConfig] | None:
    """Return the settings of a model that an installed package offers; None for models in
    `MODELS`.
    """
    return score_of(kind).config if _offers() and (kind not in MODELS or kind in _offers()) else None


ModelConfig: TypeAlias = Annotated[
    VectorsConfig, Sections(lambda: {kind: model.config for kind, model in MODELS.items()}, _of_package)
]
"""The section ``model`` of a recipe."""
