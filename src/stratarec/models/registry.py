"""Which models there are: a recipe names one by its `kind`, StrataRec's own or one of an installed package.

A package offers a model by an entry point of the group ``stratarec.models``: its name is the kind, its value a class of
scores (`base.Score`). Entry points are listed when a recipe names a kind; code of a package is loaded when a recipe
names a kind that is the package's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cache, reduce
from importlib import metadata
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import pydantic

from stratarec.config.validate import explain
from stratarec.errors import ConfigError
from stratarec.models.base import Score, VectorsConfig
from stratarec.models.towers.modules import CrossTower, DotTower, Plain
from stratarec.models.towers.network import Build
from stratarec.models.zoo.autoint import AutoIntScore
from stratarec.models.zoo.dcn import DCNv2Score
from stratarec.models.zoo.deepfm import DeepFMScore
from stratarec.models.zoo.din import DINScore
from stratarec.models.zoo.dlrm import DLRMScore
from stratarec.models.zoo.ensemble import EnsembleScore
from stratarec.models.zoo.finalmlp import FinalMLPScore
from stratarec.models.zoo.fm import FMScore
from stratarec.models.zoo.lr import LRScore
from stratarec.models.zoo.masknet import MaskNetScore
from stratarec.models.zoo.wide_deep import WideDeepScore
from stratarec.models.zoo.xdeepfm import XDeepFMScore

GROUP = "stratarec.models"
SCORES: tuple[type[Score], ...] = (
    DLRMScore, DCNv2Score, LRScore, FMScore, WideDeepScore, DeepFMScore, XDeepFMScore, AutoIntScore, MaskNetScore,
    FinalMLPScore, DINScore, EnsembleScore,
)  # fmt: skip
"""StrataRec's own models: to add one, write its file and name its score here."""
_OWN = {score.config.kind: score for score in SCORES}  # type: ignore[misc]
_TOWERS: dict[str, Build] = {"dlrm": DotTower, "dcnv2": CrossTower}


def score_of(kind: str) -> type[Score]:
    """The class of scores that a kind names.

    Raises
    ------
    ConfigError
        Where there is none, several packages offer it, one offers a name of StrataRec's own, or what it offers does not
        load or is no model.
    """
    offers = _offers().get(kind, ())
    if kind in _OWN:
        if offers:
            raise ConfigError(
                f"model.kind is {kind!r}, which StrataRec has itself, and {_packages(offers)} offers a model of that "
                "name: uninstall it, or have it name its model otherwise"
            )
        return _OWN[kind]
    if not offers:
        raise ConfigError(f"model.kind is {kind!r}, expected one of {', '.join((*_OWN, *_offers()))}")
    if len(offers) > 1:
        raise ConfigError(f"model.kind is {kind!r}, which {_packages(offers)} offer: uninstall all but one")
    return _load(offers[0])


def tower_of(config: VectorsConfig) -> Build:
    """Return what builds a tower's module of this model; towers without modules need none."""
    assert config.towers is not None
    if not config.towers.plain and not has_towers(config.kind):
        raise ConfigError(
            f"model.kind {config.kind} has no tower modules, but model.towers.compression is "
            f"{config.towers.compression}; set it to 1, or model.kind to {' or '.join(_TOWERS)}"
        )
    return _TOWERS.get(config.kind, Plain)


def has_towers(kind: str) -> bool:
    """Whether a model has tower modules, which compress what towers send."""
    return kind in _TOWERS


@cache
def _offers() -> dict[str, tuple[metadata.EntryPoint, ...]]:
    """What installed packages offer, by kind."""
    found: dict[str, tuple[metadata.EntryPoint, ...]] = {}
    for entry in metadata.entry_points(group=GROUP):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found


def _packages(offers: tuple[metadata.EntryPoint, ...]) -> str:
    return " and ".join("a package" if entry.dist is None else entry.dist.name for entry in offers)


def _load(entry: metadata.EntryPoint) -> type[Score]:
    """The class that an entry point names."""
    where = f"model.kind is {entry.name!r}, which {_packages((entry,))} offers as {entry.value}"
    try:
        found = entry.load()
    except Exception as error:
        raise ConfigError(f"{where}, and that does not load: {type(error).__name__}: {error}") from error
    config = getattr(found, "config", None)
    if not (isinstance(found, type) and issubclass(found, Score) and isinstance(config, type)):
        raise ConfigError(f"{where}, which is no Score with a config")
    if not (issubclass(config, VectorsConfig) and dataclasses.is_dataclass(config)):
        raise ConfigError(f"{where}, whose config is no dataclass that extends VectorsConfig")
    if getattr(config, "kind", None) != entry.name:
        raise ConfigError(f"{where}, whose config has the kind {getattr(config, 'kind', None)!r}, expected the same")
    return found


# A union is what lets pydantic name the kinds that there are; for a type checker its members are VectorsConfig.
if TYPE_CHECKING:
    _Own: TypeAlias = VectorsConfig
else:
    _Own = Annotated[reduce(or_, (score.config for score in SCORES)), pydantic.Field(discriminator="kind")]
_STRICT = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@cache
def _section(config: Any, strict: bool) -> tuple[Any, pydantic.TypeAdapter[Any]]:
    """What has a section ``model`` of this class, and what reads it; fields that it lacks are refused."""
    settings = _STRICT if strict else pydantic.ConfigDict(extra="forbid")
    section = dataclasses.make_dataclass("Section", [("model", config)], namespace={"__pydantic_config__": settings})
    return section, pydantic.TypeAdapter(section)


@cache
def _own_reader() -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(_Own, config=_STRICT)


def _read(value: Any, handler: Any, info: pydantic.ValidationInfo) -> Any:
    """The section of a recipe, or of an export's manifest, which is JSON that is read strictly.

    What a validator is given of JSON is JSON no more, and strict reading would refuse its lists: it is made that again.
    """
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    strict = info.mode == "json"
    if not isinstance(kind, str) or not _offers() or (kind in _OWN and kind not in _offers()):
        return _own_reader().validate_json(json.dumps(value)) if strict else handler(value)
    config: Any = score_of(kind).config
    if isinstance(value, config):
        return value
    content, (section, reader) = {"model": value}, _section(config, strict)
    try:
        read = reader.validate_json(json.dumps(content)) if strict else reader.validate_python(content)
    except pydantic.ValidationError as error:
        raise ConfigError(explain(error, content, section)) from error
    return read.model


def _write(value: Any, handler: Any, info: pydantic.SerializationInfo) -> Any:
    """Plain data of a model, own or not."""
    if value.kind in _OWN:
        return handler(value)
    return pydantic.TypeAdapter(type(value)).dump_python(value, mode="json" if info.mode == "json" else "python")


ModelConfig: TypeAlias = Annotated[_Own, pydantic.WrapValidator(_read), pydantic.WrapSerializer(_write)]
"""What a recipe says of its model; those of packages are no members of the union, and extend `VectorsConfig`."""
