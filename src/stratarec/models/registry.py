"""Registry of models. A recipe selects a model by its `kind`, which is built in or comes from an installed package.

A package provides a model by an entry point of the group ``stratarec.models``. The name of the entry point is the kind,
and its value is a subclass of `base.Score`. A package is imported only when one of its kinds is used.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from functools import cache, reduce
from importlib import metadata
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import pydantic

from stratarec.config.validate import first_mistake
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

if TYPE_CHECKING:
    from stratarec.models.base import Score
    from stratarec.models.towers import Build

GROUP = "stratarec.models"
# Built-in models and their settings. The score of a model is loaded when it is used, because torch takes seconds to
# load. To add a model, write its module and its settings, and add it here.
BUILT_IN: dict[str, tuple[type[VectorsConfig], str]] = {
    "dlrm": (DLRMConfig, "dlrm.DLRMScore"),
    "dcnv2": (DCNv2Config, "dcn.DCNv2Score"),
    "lr": (LRConfig, "first_order.LRScore"),
    "fm": (FMConfig, "first_order.FMScore"),
    "wide_deep": (WideDeepConfig, "first_order.WideDeepScore"),
    "deepfm": (DeepFMConfig, "first_order.DeepFMScore"),
    "finalmlp": (FinalMLPConfig, "finalmlp.FinalMLPScore"),
    "din": (DINConfig, "din.DINScore"),
    "ensemble": (EnsembleConfig, "ensemble.EnsembleScore"),
}
_WITH_TOWERS = ("dlrm", "dcnv2")


def score_of(kind: str) -> type[Score]:
    """Return the score class of a kind.

    Raises
    ------
    ConfigError
        If the kind is unknown or defined more than once, or if the entry point cannot be loaded or is not a model.
    """
    offers = _offers().get(kind, ())
    if kind in BUILT_IN:
        if offers:
            raise ConfigError(
                f"model.kind is {kind!r}, which is built into StrataRec and also provided by {_packages(offers)}: "
                "uninstall the package, or rename its model"
            )
        module, _, name = BUILT_IN[kind][1].partition(".")
        score: type[Score] = getattr(importlib.import_module(f"stratarec.models.zoo.{module}"), name)
        return score
    if not offers:
        raise ConfigError(f"model.kind is {kind!r}, expected one of {', '.join((*BUILT_IN, *_offers()))}")
    if len(offers) > 1:
        raise ConfigError(f"model.kind is {kind!r}, which {_packages(offers)} offer: uninstall all but one")
    return _load(offers[0])


def tower_of(config: VectorsConfig) -> Build:
    """Return the class of this model's tower modules; `Plain` if the outputs of towers are their vectors."""
    from stratarec.models.towers import CrossTower, DotTower, Plain

    assert config.towers is not None
    if not config.towers.plain and not has_towers(config.kind):
        raise ConfigError(
            f"model.kind {config.kind} has no tower modules, but model.towers.compression is "
            f"{config.towers.compression}; set it to 1, or model.kind to {' or '.join(_WITH_TOWERS)}"
        )
    with_towers: dict[str, Build] = {"dlrm": DotTower, "dcnv2": CrossTower}
    return with_towers.get(config.kind, Plain)


def has_towers(kind: str) -> bool:
    """Whether a kind of model supports tower modules, which reduce the outputs of towers."""
    return kind in _WITH_TOWERS


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
        raise ConfigError(f"{where}, whose config has the kind {getattr(config, 'kind', None)!r}, expected the same")
    return score


# A union, so that pydantic can list the known kinds. Type checkers see `VectorsConfig` instead.
if TYPE_CHECKING:
    _BuiltIn: TypeAlias = VectorsConfig
else:
    _BuiltIn = Annotated[reduce(or_, (model[0] for model in BUILT_IN.values())), pydantic.Field(discriminator="kind")]
_STRICT = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@cache
def _section(config: Any, strict: bool) -> tuple[Any, pydantic.TypeAdapter[Any]]:
    """Return a class with this config as the section ``model``, and its reader, which refuses unknown fields."""
    settings = _STRICT if strict else pydantic.ConfigDict(extra="forbid")
    section = dataclasses.make_dataclass("Section", [("model", config)], namespace={"__pydantic_config__": settings})
    return section, pydantic.TypeAdapter(section)


@cache
def _built_in_reader() -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(_BuiltIn, config=_STRICT)


def _read(value: Any, handler: Any, info: pydantic.ValidationInfo) -> Any:
    """Read the section ``model`` of a recipe, or of an export's manifest, which is JSON and is read strictly.

    Pydantic passes JSON to a validator as Python values, and strict reading would refuse their lists. So the values are
    converted to JSON again.
    """
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    strict = info.mode == "json"
    if not isinstance(kind, str) or not _offers() or (kind in BUILT_IN and kind not in _offers()):
        return _built_in_reader().validate_json(json.dumps(value)) if strict else handler(value)
    config: Any = score_of(kind).config
    if isinstance(value, config):
        return value
    content, (section, reader) = {"model": value}, _section(config, strict)
    try:
        read = reader.validate_json(json.dumps(content)) if strict else reader.validate_python(content)
    except pydantic.ValidationError as error:
        raise ConfigError(first_mistake(error, content, section)) from error
    return read.model


def _write(value: Any, handler: Any, info: pydantic.SerializationInfo) -> Any:
    """Return the configuration of a model, built in or from a package, as plain data."""
    if value.kind in BUILT_IN:
        return handler(value)
    return pydantic.TypeAdapter(type(value)).dump_python(value, mode="json" if info.mode == "json" else "python")


# The section ``model`` of a recipe; configs of packages extend `VectorsConfig` and are not members of the union.
ModelConfig: TypeAlias = Annotated[_BuiltIn, pydantic.WrapValidator(_read), pydantic.WrapSerializer(_write)]
