"""Read a YAML file and overrides from the command line as a typed recipe.

An unknown key is an error, which suggests the key that was probably meant. Relative paths start at
the working directory.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from stratarec.config import yaml
from stratarec.config.validate import (
    boolean_as_number,
    check_finite,
    first_mistake,
    short,
    unsupported_value,
)
from stratarec.data.prepare.config import PrepareConfig
from stratarec.distributed.config import DistributedConfig
from stratarec.errors import ConfigError
from stratarec.hot.config import HotConfig
from stratarec.io.atomic import open_regular
from stratarec.io.names import as_html, file_name, shell_word, visible
from stratarec.models import DLRMConfig, ModelConfig
from stratarec.planning.config import MemoryConfig
from stratarec.recipe.train_section import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Data, model, training and memory of one run.

    Examples
    --------
    >>> from stratarec import Recipe
    >>> recipe = Recipe.load("clicks.yaml", ["train.batch_size=512"])
    >>> recipe.name, recipe.train.batch_size
    ('clicks', 512)
    >>> str(recipe.run)
    'runs/clicks'
    >>> recipe.chosen["train.batch_size"]
    512
    """

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(extra="forbid")
    """Unknown keys are errors, in this section and in all sections below it."""

    name: str
    """Name of the recipe; by default it names the directory of the run."""
    data: PrepareConfig
    """Logs, and how a data set is prepared from them."""
    model: ModelConfig = field(default_factory=DLRMConfig)
    """Kind and sizes of the model."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Steps, optimizers, evaluation and checkpoints."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Memory and precision of the rows of tables; by default DRAM and float32."""
    hot: HotConfig = field(default_factory=HotConfig)
    """Frequent rows that stay in DRAM when their tables do not fit."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Distribution over several processes."""

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or "/" in self.name or visible(self.name) != self.name:
            raise ConfigError(
                f"name is {self.name!r}, expected a name without '/' or control characters, not . or .."
            )
        if len(self.name) > _LONGEST:
            raise ConfigError(f"name is {short(self.name)}, expected at most {_LONGEST} characters")
        schema = getattr(self.data.source, "schema", None)
        if schema is not None:  # others have theirs when their logs are opened
            self.train.check_labels(schema.label_columns)
            self.model.check_labels(schema.label_columns)
            self.model.check_vocabularies(schema.vocabularies())

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read a recipe and apply overrides.

        Parameters
        ----------
        path : path
            YAML file.
        overrides : sequence of str
            Fields and their values in YAML, such as ``train.batch_size=4096``.

        Raises
        ------
        ConfigError
            If a field is invalid. The message names the file, the field, its value and the expected
            values.

        Examples
        --------
        >>> Recipe.load("clicks.yaml", ["model.embedding_dim=8", "train.epochs=3"]).train.epochs
        3
        """
        return cls.from_dict(read_content(path, overrides), str(path))

    @classmethod
    def from_dict(cls, content: Any, origin: str = "recipe") -> Recipe:
        """Build a recipe from plain data.

        Parameters
        ----------
        content : mapping
            Sections and fields, such as `to_dict` returns.
        origin : str
            Where the content comes from, for error messages.

        Examples
        --------
        >>> content = recipe.to_dict()
        >>> content["name"] = "again"
        >>> Recipe.from_dict(content).name
        'again'
        """
        _check_mapping(content, origin)
        odd = unsupported_value(content)
        if odd:
            raise ConfigError(f"{origin}: {odd}")
        check_finite(content, f"{origin}: ")
        try:
            recipe = _adapter().validate_python(content)
        except pydantic.ValidationError as error:
            raise ConfigError(f"{origin}: {first_mistake(error, content, cls)}") from error
        mistaken = boolean_as_number(content, recipe.to_dict())
        if mistaken:
            raise ConfigError(f"{origin}: {mistaken}")
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, including fields with default values, as plain JSON data.

        Examples
        --------
        >>> recipe.to_dict()["data"]["path"]
        'data/clicks'
        """
        return _adapter().dump_python(self, mode="json")  # type: ignore[no-any-return]

    def with_overrides(self, overrides: Sequence[str]) -> Recipe:
        """Return a copy with overrides, in the form of `load`.

        Examples
        --------
        >>> recipe.with_overrides(["data.on_bad_row=skip"]).data.on_bad_row
        'skip'
        """
        content = self.to_dict()
        for override in overrides:
            _apply(content, override)
        return Recipe.from_dict(content, "the run's recipe")

    def with_fields(self, values: Mapping[str, Any]) -> Recipe:
        """Return a copy with new values for some fields, given by their paths. Lists become tuples.

        Examples
        --------
        >>> recipe.with_fields({"train.epochs": 3, "train.seed": 7}).train.seed
        7
        """
        recipe = self
        for place, value in values.items():
            recipe = _replaced(recipe, place.split("."), tuple(value) if isinstance(value, list) else value)
        return recipe

    @property
    def chosen(self) -> dict[str, Any]:
        """Path -> value of the fields that differ from their defaults."""
        return leaves(_adapter().dump_python(self, mode="json", exclude_defaults=True))

    def _repr_html_(self) -> str:
        return as_html(f"Recipe {self.name}: what differs from the defaults", self.chosen.items())

    @property
    def scratch_prefix(self) -> str:
        """Name prefix of the temporary directories in ``memory.*.path``, which store the rows of
        temporary models.
        """
        return f"{self.place}-reading-"

    @property
    def place(self) -> str:
        """Name of the recipe in a form that directory names can contain."""
        return file_name(self.name)

    @property
    def towers(self) -> int:
        """Number of towers of the model; 0 for a model without towers."""
        return 0 if self.model.towers is None else len(self.model.towers.plan)

    @property
    def modules(self) -> bool:
        """Whether the model has tower modules."""
        return self.model.towers is not None and not self.model.towers.plain

    @property
    def run(self) -> Path:
        """Directory of the run."""
        return Path(self.train.run) if self.train.run else Path("runs") / self.place


def read_content(path: str | Path, overrides: Sequence[str] = ()) -> Any:
    """Read a recipe and apply overrides. Return plain data whose fields are not checked yet."""
    try:
        content = read_yaml(Path(path), "the recipe")
        _check_mapping(content, str(path))
    except ConfigError as error:
        there = Path(path).is_file() or Path(path).is_dir()
        if not there or Path(path).suffix.lower() in (".yaml", ".yml"):
            raise
        raise ConfigError(
            f"{error}; if it is a log, draft a recipe first: stratarec init {shell_word(path)}"
        ) from error
    for override in overrides:
        _apply(content, override)
    _take_in_towers(content, Path(path).parent)
    return content


def _check_mapping(content: Any, origin: str) -> None:
    if content is None:
        raise ConfigError(f"{origin} is empty, expected a mapping with name, data, model and train")
    if not isinstance(content, Mapping):
        got = type(content).__name__
        raise ConfigError(f"{origin}: expected a mapping with name, data, model and train, got {got}")


def leaves(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return path -> value of a recipe's fields. A path is like ``train.batch_size``; an empty
    section is one value.
    """
    fields: dict[str, Any] = {}
    for key, value in content.items():
        is_section = isinstance(value, Mapping) and value
        fields |= leaves(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return fields


def with_values(content: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a recipe's content with new values for some fields, given by paths."""
    copied = copy.deepcopy(dict(content))
    for place, value in values.items():
        *path, last = place.split(".")
        section = copied
        for name in path:
            inner = section.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{place}: {name} is not a section of the recipe")
            section = inner
        section[last] = value
    return copied


def _replaced(section: Any, path: Sequence[str], value: Any) -> Any:
    name, *inner = path
    return replace(section, **{name: _replaced(getattr(section, name), inner, value) if inner else value})


@cache
def _adapter() -> pydantic.TypeAdapter[Recipe]:
    return pydantic.TypeAdapter(Recipe)


# Maximum number of characters of a value that an error message shows.
_LONGEST = 120


def read_yaml(path: Path, what: str) -> Any:
    """Return the content of a YAML file; error messages call the file `what`.

    Raises
    ------
    ConfigError
        If the file cannot be read, is too large, or is not valid YAML.
    """
    try:
        with open_regular(path) as file:
            text = file.read(yaml.LARGEST + 1)
        if len(text) > yaml.LARGEST:
            raise ConfigError(
                f"{path} is not a {what.split()[-1]}: it has more than {yaml.LARGEST:,} bytes"
            )
        return yaml.load(text.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start}: {error.reason}); save it as UTF-8"
        ) from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error


def _take_in_towers(content: dict[str, Any], folder: Path) -> None:
    """If `model.towers.plan` is a file name, relative to `folder`, replace it by the content of the
    file.
    """
    model = content.get("model")
    towers = model.get("towers") if isinstance(model, dict) else None
    if isinstance(model, dict) and isinstance(towers, dict) and isinstance(towers.get("plan"), str):
        plan = read_yaml(folder / towers["plan"], "model.towers.plan")
        # The section is copied and not changed, because a YAML alias may share it with other
        # sections.
        content["model"] = {**model, "towers": {**towers, "plan": plan}}


def _apply(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or "" in key.split("."):
        raise ConfigError(
            f"override {short(override)}: expected field=value, such as train.batch_size=4096"
        )
    try:
        value = yaml.load(text)
    except ValueError as error:
        raise ConfigError(f"override {short(override)}: the value is not valid YAML: {error}") from error
    *path, last = key.split(".")
    for name in path:
        inner = content.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {short(override)}: {name} is not a section")
        content = inner
    content[last] = value
