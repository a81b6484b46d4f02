"""Parse and format bytes, rates and times."""

from __future__ import annotations

import re

from stratarec.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(value: object, field: str) -> int:
    """Return the number of bytes of a whole number or of text such as ``"4GiB"``, ``"512 MiB"``,
    ``"1.5TB"``.

    Parameters
    ----------
    value : object
        KiB, MiB and so on are powers of 1,024; KB, MB and so on are powers of 1,000. Upper and
        lower case do not matter.
    field : str
        Name of the field in the error.

    Raises
    ------
    ConfigError
        For any other value, and for less than one byte.
    """
    number, scale = value, 1
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)) and match[2].lower() in _UNITS:
        number, scale = float(match[1]), _UNITS[match[2].lower()]
    if isinstance(number, bool) or not isinstance(number, int | float) or number * scale != number * scale:
        raise ConfigError(
            f"{field} is {value!r}, expected a size such as 4GiB, 512MiB or a number of bytes"
        )
    if not 1 <= number * scale < 1 << 63:
        raise ConfigError(f"{field} is {value!r}, expected at least one byte and less than 8 EiB")
    return int(number * scale)


_RATE_UNITS = {"kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(kbit|Mbit|Gbit|Tbit)")


def parse_rate(text: str, field: str) -> float:
    """Return the bytes per second of a network rate such as ``100Mbit``, ``1Gbit`` or ``2.5Gbit``.

    Raises
    ------
    ConfigError
        For any other text. Upper and lower case differ, because Mbit, mbit and MB are different
        units.
    """
    match = _RATE.fullmatch(text)
    rate = float(match[1]) * _RATE_UNITS[match[2]] if match else 0.0
    if not 1e3 <= rate <= 1e15:
        raise ConfigError(
            f"{field} is {text!r}, expected a rate in bits per second such as 100Mbit, 1Gbit or 200Gbit"
        )
    return rate / 8


def format_bytes(size: float) -> str:
    """Format a number of bytes with a binary unit, such as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1024
    return f"{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Format a duration in its two largest units, such as ``2 h 5 min``."""
    total = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if total >= size:
            remainder = total % size // part
            return (
                f"{total // size} {unit} {remainder} {smaller}" if remainder else f"{total // size} {unit}"
            )
    return f"{total} s"


def format_milliseconds(seconds: float) -> str:
    """Format a duration in milliseconds, with three significant digits below 1,000 ms and no
    fraction above.
    """
    value = seconds * 1e3
    return f"{value:.3g} ms" if value < 999.5 else f"{value:,.0f} ms"
