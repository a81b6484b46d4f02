"""What runs on the machines of a cluster: one piece of a stage."""

from __future__ import annotations

import pickle
import traceback
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stratarec.cluster.probing import Order
from stratarec.data.executing import Stage
from stratarec.data.lease import leased


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What became of a piece."""

    advance: int = 0
    """Of the progress."""
    error: Exception | None = None
    trace: str = ""
    """Where the error came from."""
    warned: tuple[str, ...] = ()


def work(shared: list[Any], order: Order, number: int) -> Ended:
    """Do a piece of the stage that the first reference leads to; whatever it raises is in what this gives."""
    with warnings.catch_warnings(record=True) as heard:
        try:
            _check(order)
            order.enter()
            advance = 0
            with leased(order.work, order.token) as check_lease:
                for amount in _stage(shared[0])(number):
                    advance += amount
                    check_lease()
        except Exception as error:
            return Ended(error=_portable(error), trace=traceback.format_exc())
    return Ended(advance=advance, warned=tuple(str(each.message) for each in heard))


# A worker is a process that does many pieces, of one stage after another.
@lru_cache(1)
def _check(order: Order) -> None:
    order.check()


@lru_cache(1)
def _stage(reference: Any) -> Stage:
    import ray

    found: Stage = ray.get(reference)
    return found


def _portable(error: Exception) -> Exception:
    """The error, or what it says where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
