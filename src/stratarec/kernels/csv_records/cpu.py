"""Numba body of the splitting of delimited text."""

from __future__ import annotations

from numba import njit

NEWLINE, RETURN = 10, 13


@njit(nogil=True, cache=True)
def split(content, delimiter, quote, ends, lines, fields, faults):
    count = seen = before = 0
    start = last = fault = 0
    found, quoted = 1, False
    for place in range(len(content)):
        byte = content[place]
        if byte == quote:
            after = content[place + 1] if place + 1 < len(content) else NEWLINE
            if after == RETURN and place + 2 < len(content):
                after = content[place + 2] if content[place + 2] == NEWLINE else RETURN
            # A quote opens at the beginning of a field, or goes on as the second of a pair.
            if not quoted and place > last and content[place - 1] != quote:
                fault = 1
            if quoted and after != quote and after != delimiter and after != NEWLINE:
                fault = 1
            quoted = not quoted
        elif byte == NEWLINE:
            seen += 1
            if quoted:
                continue
            size = place - start - (place > start and content[place - 1] == RETURN)
            ends[count] = place + 1
            lines[count] = before
            fields[count] = found if size else 0
            faults[count] = fault
            count += 1
            start = last = place + 1
            before, fault, found = seen, 0, 1
        elif quoted:
            continue
        elif byte == delimiter:
            found += 1
            last = place + 1
        elif byte == RETURN and place + 1 < len(content) and content[place + 1] != NEWLINE and not fault:
            fault = 2
    return count
