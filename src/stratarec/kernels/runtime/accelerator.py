"""The device that a network is on: which there are, its streams and events, pinned memory, and what travels.

    up      from pinned memory, on a stream of its own; the stream that computes waits for it, the host does not
    down    into pinned memory, on another one; the host waits for it once a step, by `wait`

Buffers are taken again when no tensor lies in them any more and the copy that read or wrote them is done. Everything
here goes by the names that torch has for any kind of device, and `Driver` is all of them: tests put a device there on
which nothing runs until somebody waits for it. On the host `HOST` stands in the same place, and does nothing.
"""

from __future__ import annotations

import math
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from stratarec.errors import ConfigError, TrainingError
from stratarec.kernels.runtime.memory import RECYCLER, buffer_bytes

CPU = torch.device("cpu")
_SMALLEST = 4096
_KEPT_PER_SIZE = 4


class Transfers(Protocol):
    """Takes tensors between the host and the device of a network."""

    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        """A float32 tensor of the host that goes up without being copied first."""

    def up(self, host: Tensor) -> Tensor:
        """The same values on the device, for what is queued on the current stream from now on."""

    def down(self, tensor: Tensor) -> Tensor:
        """The same values on the host, once `wait` has returned."""

    def wait(self) -> None:
        """Return once every copy that was started with `down`, by any thread, has arrived."""


class Host:
    """`Transfers` of a network that is on the host."""

    device = CPU

    def empty(self, *shape: int) -> Tensor:
        """See `Transfers.empty`."""
        return RECYCLER.empty(*shape)

    def up(self, host: Tensor) -> Tensor:
        """Itself."""
        return host

    def down(self, tensor: Tensor) -> Tensor:
        """Itself."""
        return tensor

    def wait(self) -> None:
        """There is nothing to wait for."""


HOST = Host()


class Driver:
    """What torch says of a device, by names that are the same for every kind of device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> Any:
        """A new stream, which is also a context manager."""
        return torch.Stream(self.device)

    def current(self) -> Any:
        """The stream on which this thread computes."""
        return torch.accelerator.current_stream(self.device)

    def pinned(self, size: int) -> Tensor:
        """``[size]`` bytes of the host that the device reads and writes by itself."""
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise TrainingError(
                f"{size:,} bytes of pinned memory for {self.device} were refused ({_line(error)}): raise `ulimit -l`, "
                "free memory, or set train.device to cpu"
            ) from error

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Do not give the memory of `tensor`, made on another stream, to anybody before `stream` is done with it."""
        tensor.record_stream(stream)


class _Pinned:
    """Pinned buffers that are used again."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: dict[int, list[tuple[Tensor, Any]]] = {}
        # Of buffers in use by their address: the copy that reads or writes them.
        self._copies: dict[int, Any] = {}
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in a buffer, which comes back when the last view of the tensor is gone."""
        wanted = math.prod(shape) * dtype.itemsize
        size = max(buffer_bytes(-(-wanted // 4)), 1 << max(wanted - 1, 1).bit_length() if wanted < 1 << 20 else 0)
        size = max(size, _SMALLEST)
        memory = self._taken(size)
        array = np.frombuffer(memory.numpy(), dtype=np.uint8)
        weakref.finalize(array, self._give_back, size, memory).atexit = False
        with self._lock:
            self._copies[memory.data_ptr()] = None
        return torch.from_numpy(array)[:wanted].view(dtype).view(shape)

    def _taken(self, size: int) -> Tensor:
        with self._lock:
            free = self._free.get(size, [])
            done = _done(free)
            if done is not None:
                return free.pop(done)[0]
        return self._driver.pinned(size)

    def _give_back(self, size: int, memory: Tensor) -> None:
        with self._lock:
            free = self._free.setdefault(size, [])
            free.append((memory, self._copies.pop(memory.data_ptr())))
            done = _done(free) if len(free) > _KEPT_PER_SIZE else None
            if done is not None:
                free.pop(done)

    def holds(self, tensor: Tensor) -> bool:
        """Whether it lies in one of these buffers."""
        return tensor.untyped_storage().data_ptr() in self._copies

    def busy(self, tensor: Tensor, copy: Any) -> None:
        """The buffer of `tensor` is in use until the event `copy`."""
        with self._lock:
            self._copies[tensor.untyped_storage().data_ptr()] = copy


def _done(free: list[tuple[Tensor, Any]]) -> int | None:
    """The place of a buffer that no copy reads or writes any more."""
    try:
        return next((place for place, (_, copy) in enumerate(free) if copy is None or copy.query()), None)
    except torch.AcceleratorError:  # a device that failed says so to whoever asks it anything; this may be a finalizer
        return None


class DeviceTransfers:
    """`Transfers` of a network on a device, over two streams beside the one that computes."""

    def __init__(self, driver: Driver) -> None:
        self.device, self._driver, self._pinned = driver.device, driver, _Pinned(driver)
        self._up, self._down = driver.stream(), driver.stream()
        # The event of the latest copy to the host, set in the order of the stream.
        self._last: Any = None
        self._lock = threading.Lock()

    def empty(self, *shape: int) -> Tensor:
        """See `Transfers.empty`."""
        return self._pinned.empty(shape, torch.float32)

    def up(self, host: Tensor) -> Tensor:
        """See `Transfers.up`."""
        source = host.detach()
        if not (source.is_contiguous() and self._pinned.holds(source)):
            source = self._pinned.empty(tuple(host.shape), host.dtype)
            source.copy_(host.detach())
        with self._up:
            found = torch.empty(source.shape, dtype=source.dtype, device=self.device)
            found.copy_(source, non_blocking=True)
            arrived = self._up.record_event()
        self._pinned.busy(source, arrived)
        computing = self._driver.current()
        computing.wait_event(arrived)
        self._driver.keep(found, computing)
        return found

    def down(self, tensor: Tensor) -> Tensor:
        """See `Transfers.down`."""
        tensor = tensor.detach().contiguous()
        self._down.wait_event(self._driver.current().record_event())
        host = self._pinned.empty(tuple(tensor.shape), tensor.dtype)
        with self._lock, self._down:
            host.copy_(tensor, non_blocking=True)
            arrived = self._last = self._down.record_event()
        self._pinned.busy(host, arrived)
        self._driver.keep(tensor, self._down)
        return host

    def wait(self) -> None:
        """See `Transfers.wait`."""
        # Copies on one stream complete in order: the latest event covers all. It is not cleared: the prefetcher and
        # autograd's thread start copies too, and one thread must not clear the event that another will wait for.
        if self._last is not None:
            self._last.synchronize()


def memory_bytes(device: torch.device) -> int:
    """What the device's memory holds in all; 0 where torch does not say."""
    try:
        return int(torch.accelerator.get_memory_info(device)[1])
    except (AttributeError, RuntimeError, NotImplementedError):
        return 0


_OPEN: dict[torch.device, DeviceTransfers] = {}


def transfers_of(device: torch.device) -> Transfers:
    """Those of a device, the same for all who ask."""
    if device.type == "cpu":
        return HOST
    found = _OPEN.get(device)
    if found is None:
        found = _OPEN[device] = DeviceTransfers(Driver(device))
    return found


def beside(host: Tensor, tensor: Tensor) -> Tensor:
    """A tensor of the host, such as places, where `tensor` is."""
    return host if tensor.device.type == "cpu" else transfers_of(tensor.device).up(host)


def open_device(name: str, field: str = "train.device") -> torch.device:
    """The device of that name.

    Raises
    ------
    ConfigError
        Where there is none such here: says why, and what to change.
    """
    if name == "cpu":
        return CPU
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{field} is {name!r}, expected cpu, or a device such as cuda, cuda:1 or xpu") from None
    elsewhere = "leave train.device at cpu" if field == "--gpu" else f"set {field} to cpu"
    built = torch.accelerator.current_accelerator(check_available=False)
    if built is None or built.type != device.type:
        what = "the CPU alone" if built is None else built.type
        raise ConfigError(
            f"{field} is {name}, and torch {torch.__version__} is built for {what}: install a torch for {device.type} "
            f"(pytorch.org), or {elsewhere}"
        )
    if not torch.accelerator.is_available():
        raise ConfigError(
            f"{field} is {name}, and torch {torch.__version__} finds no such device or no driver for it here: look "
            f"whether the driver is loaded and the device visible, or {elsewhere}"
        )
    count = torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise ConfigError(
            f"{field} is {name}, and there are {count} here, counted from 0; name another, or {elsewhere}"
        )
    # Matrix products of CUDA repeat to the bit with this alone, and torch refuses them without; it is read once.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device(device.type, device.index or 0)


@contextmanager
def device_errors(device: torch.device, batch_size: int, fitting: Callable[[], int]) -> Iterator[None]:
    """Errors of the device as one line each; `fitting` tells a smaller batch that its memory holds, or 0."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        # What the step had made lies in its frames.
        traceback.clear_frames(error.__traceback__)
        fits = fitting()
        advice = f"batches of {fits:,} fit: set train.batch_size to {fits}" if fits else "not even one sample fits: "
        raise TrainingError(
            f"{device} has too little memory for batches of {batch_size:,} samples; {advice}"
            f"{', or' if fits else 'set'} train.device to cpu. The last checkpoint is as it was."
        ) from error
    except RuntimeError as error:
        if not (isinstance(error, torch.AcceleratorError) or str(error).startswith(("CUDA error", "cuDNN error"))):
            raise
        raise TrainingError(
            f"{device} failed ({_line(error)}); the last checkpoint is as it was: go on from it with --resume, on "
            "another device with train.device"
        ) from error


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
