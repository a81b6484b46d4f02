"""Buffers of batches on a device, and the order of the streams that use them.

    upload    copies the packed words of batch n + 2
    moves     sorts the lookups of batch n + 1, encodes the rows that it evicts, decodes the rows
              that it fetches
    compute   trains batch n; the stream on which the training thread computes

A batch may evict a slot only if the last batch that used the slot is before its horizon. So moves
wait for the steps of these batches, and not for the steps that are queued after them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from stratarec.kernels.runtime.accelerator import Driver


class StepOrder:
    """Order of steps and moves in host memory: each operation ends before the next begins."""

    streams: tuple[Any, ...] = ()
    """Streams that read and write the buffers of batches, except the upload stream."""

    def after(self, horizon: int) -> None:
        """Make the next moves wait for the steps of all batches before number `horizon`."""

    def released(self, number: int) -> None:
        """Record that no further work will be queued for batch `number`."""

    def ready(self) -> Any:
        """Return an event that occurs when the moves queued so far have ended."""

    def start(self, ready: Any) -> None:
        """Make the computing stream wait for an event of `ready`."""

    def moving(self) -> AbstractContextManager[None]:
        """Return a context in which moves are queued."""
        return nullcontext()

    def rarely(self) -> AbstractContextManager[None]:
        """Return a context in which other operations on slots are queued: after all moves, and
        before later ones.
        """
        return nullcontext()

    def join(self) -> None:
        """Make the computing stream wait for all moves that are queued."""


class DeviceOrder(StepOrder):
    """`StepOrder` of the streams of a device.

    Parameters
    ----------
    driver : Driver
        Calls of the device: streams, events and copies.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._moves = driver.stream()
        self.streams = (self._moves, driver.current())
        # Number of a batch -> event at the end of its step. Two threads add and remove entries.
        self._steps: dict[int, Any] = {}
        self._other: Any = None
        self._lock = threading.Lock()

    def after(self, horizon: int) -> None:
        with self._lock:
            events = [self._steps.pop(number) for number in list(self._steps) if number < horizon]
        for event in events:
            self._moves.wait_event(event)

    def released(self, number: int) -> None:
        event = self._driver.current().record_event()
        with self._lock:
            self._steps[number] = event

    def ready(self) -> Any:
        return self._moves.record_event()

    def start(self, ready: Any) -> None:
        self._driver.current().wait_event(ready)

    @contextmanager
    def moving(self) -> Iterator[None]:
        with self._driver.on(self._moves):
            if self._other is not None:
                self._moves.wait_event(self._other)
            yield

    @contextmanager
    def rarely(self) -> Iterator[None]:
        self.join()
        yield
        self._other = self._driver.current().record_event()

    def join(self) -> None:
        self._driver.current().wait_event(self._moves.record_event())


class Place:
    """A pinned buffer, and a buffer of the device that begins with its words and has more.

    Parameters
    ----------
    sizes : tuple of int
        Number of int32 words of both.
    driver : Driver
        Calls of the device: streams, events and copies.
    upload : stream
        Stream of copies to the device.
    users : sequence of stream
        Other streams that use the buffer of the device.
    """

    def __init__(self, sizes: tuple[int, int], driver: Driver, upload: Any, users: Sequence[Any]) -> None:
        self.sizes = sizes
        self._driver = driver
        self._upload = upload
        self.host = driver.pinned(4 * sizes[0]).view(torch.int32)
        with driver.on(upload):
            self.device = torch.empty(sizes[1], dtype=torch.int32, device=driver.device)
        # For buffers that are dropped and not given back: their memory is not reused before the
        # streams are done.
        for stream in users:
            driver.keep(self.device, stream)
        self.arrived: Any = None
        self._free: Any = None

    def send(self, words: int) -> None:
        """Start to copy the first `words` words to the device."""
        if self._free is not None:
            self._upload.wait_event(self._free)
        with self._driver.on(self._upload):
            self.device[:words].copy_(self.host[:words], non_blocking=True)
            self.arrived = self._upload.record_event()

    def wait(self) -> None:
        """Make the current stream wait for the copy."""
        self._driver.current().wait_event(self.arrived)

    def release(self) -> None:
        """Record that all work that uses the buffers is queued on the computing stream."""
        self._free = self._driver.current().record_event()

    @property
    def is_sent(self) -> bool:
        """Whether the host may write the pinned buffer."""
        return self.arrived is None or bool(self.arrived.query())


def room_for(count: int) -> int:
    """Return the size class of `count`: the next of 1, 1.25, 1.5 and 1.75 times a power of two, at
    least 64.

    Batches of a class have lists of one size, so one CUDA graph serves all of them.
    """
    if count <= 64:
        return 64
    step = 1 << (count - 1).bit_length() - 3
    return -(-count // step) * step


def sequence_room(count: int) -> int:
    """Return the rows of a sequence feature with `count` lookups on a device; the last is zeros."""
    return room_for(count + 1)


class Ring:
    """Reuses the places of batches. It grows to the largest number of batches that are in flight at
    once.

    Parameters
    ----------
    driver : Driver
        Calls of the device: streams, events and copies.
    users : sequence of stream
        Streams that use the places.
    """

    def __init__(self, driver: Driver, users: Sequence[Any] = ()) -> None:
        self._driver = driver
        self._upload = driver.stream()
        self._users = users
        self._free: dict[tuple[int, int], list[Place]] = {}
        self._lock = threading.Lock()
        self.nbytes = 0
        """Bytes of pinned memory."""
        self.device_bytes = 0
        """Bytes of the device's memory."""

    def take(self, sent: int, total: int) -> Place:
        """Return a place with room for `sent` words on the host and `total` words on the device."""
        sizes = room_for(sent), room_for(total)
        with self._lock:
            free = self._free.setdefault(sizes, [])
            for number, place in enumerate(free):
                if place.is_sent:
                    return free.pop(number)
            self.nbytes += 4 * sizes[0]
            self.device_bytes += 4 * sizes[1]
        return Place(sizes, self._driver, self._upload, self._users)

    def give_back(self, place: Place) -> None:
        """Reuse a place once the device is done with it."""
        place.release()
        with self._lock:
            self._free[place.sizes].append(place)
