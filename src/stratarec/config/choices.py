"""Fields of recipes that are checked against registries, so that a registered choice is valid
everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any

import pydantic
from pydantic_core import PydanticCustomError

from stratarec.errors import UNREGISTERED, ConfigError

_FORBID = pydantic.ConfigDict(extra="forbid")
_STRICT = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class OneOf:
    """Annotation of a text that is one of several names.

    Parameters
    ----------
    names : callable
        Returns the names, or name -> text for reference pages. It is called for every value,
        because names may be registered later.
    usual : str
        Names for which `names` is not called, because it loads slow modules.
    """

    def __init__(self, names: Callable[[], Iterable[str]], *usual: str) -> None:
        self.names = names
        self._usual = usual

    def _check(self, value: str, info: pydantic.ValidationInfo) -> str:
        if value not in self._usual and value not in (names := tuple(self.names())):
            if info.mode == "json":
                raise _unregistered(value, names)
            raise ValueError(f"got {value!r}, expected one of {', '.join(names)}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return handler.generate_schema(Annotated[source, pydantic.AfterValidator(self._check)])

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return {**handler(schema), "enum": list(self.names())}


class Sections:
    """Annotation of a section whose `kind` names the dataclass that reads it.

    Parameters
    ----------
    registered : callable
        Returns kind -> dataclass. It is called for every section, because kinds may be registered
        later.
    find : callable
        Returns the dataclass of a kind that `registered` does not list, or raises `ConfigError`;
        None for a kind that it leaves to `registered`.
    """

    def __init__(
        self, registered: Callable[[], Mapping[str, Any]], find: Callable[[str], Any] = lambda kind: None
    ) -> None:
        self._registered = registered
        self._find = find
        self._others: dict[str, Any] = {}

    @property
    def union(self) -> Any:
        """Union of the dataclasses that are known so far."""
        return reduce(or_, {**self._registered(), **self._others}.values())

    def _read(self, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Read a section of a recipe, or of an export's manifest, which is JSON and is read
        strictly.

        Pydantic passes JSON to a validator as Python values, and strict reading would refuse their
        lists. So the values are converted to JSON again.
        """
        kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
        strict = info.mode == "json"
        try:
            config = self._find(kind) if isinstance(kind, str) else None
        except ConfigError as error:  # a package that offers the kind does not load
            if not strict:
                raise
            raise PydanticCustomError(UNREGISTERED, "{text}", {"text": str(error)}) from error
        if config is not None:
            self._others[str(kind)] = config
        registered = {**self._registered(), **self._others}
        if strict and isinstance(kind, str) and kind not in registered:
            raise _unregistered(kind, registered)
        reader = _reader(self.union, strict)
        return reader.validate_json(json.dumps(value)) if strict else reader.validate_python(value)

    @staticmethod
    def _write(value: Any, info: pydantic.SerializationInfo) -> Any:
        kind: Any = type(value)
        writer: Any = _writer(kind)
        fields = writer.dump_python(value, mode=info.mode, exclude_defaults=info.exclude_defaults)
        return {"kind": value.kind} | fields

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        read, write = pydantic.PlainValidator(self._read), pydantic.PlainSerializer(self._write)
        return handler.generate_schema(Annotated[Any, read, write])

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return handler(_reader(self.union, False).core_schema)


def _unregistered(name: str, registered: Iterable[str]) -> PydanticCustomError:
    """Return the error about a name that a package registers, which is not imported, or a newer
    version has.
    """
    text = (
        f"{name!r} is not known here ({', '.join(registered)} are): install or import the package that "
        "provides it, or upgrade StrataRec"
    )
    return PydanticCustomError(UNREGISTERED, "{text}", {"text": text})


@cache
def _reader(union: Any, strict: bool) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(
        Annotated[union, pydantic.Field(discriminator="kind")], config=_STRICT if strict else _FORBID
    )


@cache
def _writer(config: type) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(config)
