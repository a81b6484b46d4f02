"""Bytes, rates and seconds as people write and read them."""

from __future__ import annotations

import re

from stratarec.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(value: object, field: str) -> int:
    """Bytes that `value` says: a whole number, or text such as ``"4GiB"``, ``"512 MiB"``, ``"1.5TB"``.

    Parameters
    ----------
    value : object
        Units in *iB* are powers of 1,024, those in *B* powers of 1,000; capitals do not matter.
    field : str
        Names the field in the error.

    Raises
    ------
    ConfigError
        For anything else, and for less than one byte.
    """
    number, scale = value, 1
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(f"{field} is {value!r}, expected a size such as 4GiB, 512MiB or a number of bytes")
        number, scale = float(match[1]), _UNITS[match[2].lower()]
    if isinstance(number, bool) or not isinstance(number, int | float) or number * scale != number * scale:
        raise ConfigError(f"{field} is {value!r}, expected a size such as 4GiB, 512MiB or a number of bytes")
    if not 1 <= number * scale < 1 << 63:
        raise ConfigError(f"{field} is {value!r}, expected at least one byte and less than 8 EiB")
    return int(number * scale)


_RATE_UNITS = {"kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(kbit|Mbit|Gbit|Tbit)")


def parse_rate(text: str, field: str) -> float:
    """Bytes a second of a network's rate such as ``100Mbit``, ``1Gbit`` or ``2.5Gbit``: bits, powers of 1,000.

    Raises
    ------
    ConfigError
        For anything else, capitals included: Mbit, mbit and MB are three things.
    """
    match = _RATE.fullmatch(text)
    rate = float(match[1]) * _RATE_UNITS[match[2]] if match else 0.0
    if not 1e3 <= rate <= 1e15:
        raise ConfigError(f"{field} is {text!r}, expected a rate in bits a second such as 100Mbit, 1Gbit or 200Gbit")
    return rate / 8


def readable(size: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1024
    return f"{size:.2f} TiB"


def readable_seconds(seconds: float) -> str:
    """A length of time in its two largest units."""
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit} {rest} {smaller}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def milliseconds(seconds: float) -> str:
    """A length of time in milliseconds: three digits, or all of a large number's."""
    found = seconds * 1e3
    return f"{found:.3g} ms" if found < 999.5 else f"{found:,.0f} ms"
