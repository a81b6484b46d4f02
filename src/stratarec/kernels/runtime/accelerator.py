"""The network's device: opening it, copies to and from it, pinned memory, and errors.

    up      copies from pinned memory, on a separate stream; the computing stream waits for the
            copy, the host does not
    down    copies into pinned memory, on another stream; the host waits for all copies once a step,
            by `wait`

A buffer is reused once no tensor uses it and the copy that read or wrote it is done. This module
uses only torch's interfaces for any kind of device, all of them through `Driver`. Tests replace
`Driver` by a device that runs nothing until the host waits for it.
"""

from __future__ import annotations

import math
import os
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratarec.errors import ConfigError, TrainingError
from stratarec.kernels.runtime.memory import RECYCLER, buffer_bytes

CPU = torch.device("cpu")
TRITON = (3, 6), (3, 8)
"""Versions of Triton that were examined: from the first one to before the second."""
CAPABILITY = 8, 0
"""Compute capability of the oldest NVIDIA GPUs that Triton supports."""
_SMALLEST = 4096
_FREE_PER_SIZE = 4


class Transfers:
    """Copies of tensors between the host and the network's device. For a network on the host,
    nothing is copied.
    """

    device = CPU
    refusal = ""
    """Why the system refused pinned memory; empty if it did not."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor of this shape and `dtype` on the host, which is copied to the device
        without another copy.
        """
        return RECYCLER.empty(*shape) if dtype == torch.float32 else torch.empty(shape, dtype=dtype)

    def is_pinned(self, host: Tensor) -> bool:
        """Whether `host` is in a buffer from `empty` that the device can access directly."""
        return False

    def up(self, host: Tensor) -> Tensor:
        """Return a copy of `host` on the device, for operations that are queued on the current
        stream from now on.
        """
        return host

    def down(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Return a copy of `tensor` on the host, which is valid once `wait` has returned; in pinned
        `out` if given.
        """
        return tensor

    def wait(self) -> None:
        """Wait until every copy that any thread has started with `down` has arrived."""


HOST = Transfers()


class Driver:
    """torch's interfaces to a device, which are the same for every kind of device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.refusal = ""

    def stream(self) -> Any:
        """Return a new stream."""
        return torch.Stream(self.device)

    def current(self) -> Any:
        """Return the stream on which the calling thread computes."""
        return torch.accelerator.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which the calling thread computes on `stream`."""
        # An object of a stream keeps the previous stream, so each use needs its own. `set_stream`
        # would also leave the thread on the stream's device.
        return torch.Stream(stream.stream_id, stream.device_index, stream.device_type)

    def pinned(self, size: int) -> Tensor:
        """Return ``[size]`` bytes of host memory that the device can read and write directly.

        If the system refuses such memory, other memory is returned, whose copies take longer, and
        `refusal` says why.
        """
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            self.refusal = (
                f"{size:,} bytes of pinned memory for {self.device} were refused ({_first_line(error)}): "
                "copies take longer; raise `ulimit -l` or free memory"
            )
            return torch.empty(size, dtype=torch.uint8)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of `tensor`, made on another stream, until `stream` is done with it."""
        tensor.record_stream(stream)


class HostStream:
    """Stream of the host, and its only event: recorded operations have ended already."""

    def record_event(self) -> HostStream:
        return self

    def wait_event(self, event: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HostDriver(Driver):
    """`Driver` of the host, for kernels that run on its tensors."""

    _STREAM = HostStream()

    def __init__(self) -> None:
        super().__init__(CPU)

    def stream(self) -> Any:
        return self._STREAM

    def current(self) -> Any:
        return self._STREAM

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        pass


def driver_of(device: torch.device) -> Driver:
    """Return a driver of a device."""
    return HostDriver() if device.type == "cpu" else Driver(device)


class _Pinned:
    """Reusable pinned buffers."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: dict[int, list[tuple[Tensor, Any]]] = {}
        # Address of a buffer in use -> event of the copy that reads or writes the buffer.
        self._copies: dict[int, Any] = {}
        # Finalizers only append to this queue, because the garbage collector may run them in a
        # thread that has the lock.
        self._returned: deque[tuple[int, Tensor]] = deque()
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor in a buffer that is reused when the tensor's last view is deleted."""
        needed = math.prod(shape) * dtype.itemsize
        size = max(
            buffer_bytes(-(-needed // 4)), 1 << max(needed - 1, 1).bit_length() if needed < 1 << 20 else 0
        )
        size = max(size, _SMALLEST)
        memory = self._allocate(size)
        array = np.frombuffer(memory.numpy(), dtype=np.uint8)
        weakref.finalize(array, self._returned.append, (size, memory)).atexit = False
        with self._lock:
            self._copies[memory.data_ptr()] = None
        return torch.from_numpy(array)[:needed].view(dtype).view(shape)

    def _allocate(self, size: int) -> Tensor:
        with self._lock:
            self._recycle()
            free = self._free.get(size, [])
            done = _done(free)
            if done is not None:
                return free.pop(done)[0]
        return self._driver.pinned(size)

    def _recycle(self) -> None:
        """Make returned buffers available, and release a buffer if there are many of its size.
        Needs the lock.
        """
        while self._returned:
            size, memory = self._returned.popleft()
            free = self._free.setdefault(size, [])
            free.append((memory, self._copies.pop(memory.data_ptr())))
            done = _done(free) if len(free) > _FREE_PER_SIZE else None
            if done is not None:
                free.pop(done)

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` is in one of these buffers."""
        return tensor.untyped_storage().data_ptr() in self._copies

    def busy(self, tensor: Tensor, copy: Any) -> None:
        """Do not reuse the buffer of `tensor` before the event `copy` has occurred."""
        with self._lock:
            self._copies[tensor.untyped_storage().data_ptr()] = copy


def _done(free: list[tuple[Tensor, Any]]) -> int | None:
    """Return the index of a buffer that no copy reads or writes any more, or None."""
    try:
        return next((place for place, (_, copy) in enumerate(free) if copy is None or copy.query()), None)
    except torch.AcceleratorError:  # a failed device raises at any query, and this may run in a finalizer
        return None


class DeviceTransfers(Transfers):
    """`Transfers` of a network on a device; `up` and `down` each have a separate stream."""

    def __init__(self, driver: Driver) -> None:
        self.device = driver.device
        self._driver = driver
        self._pinned = _Pinned(driver)
        self._up = driver.stream()
        self._down = driver.stream()
        # Event of the latest copy to the host, set in the order of the stream.
        self._last: Any = None
        self._lock = threading.Lock()

    @property
    def refusal(self) -> str:  # type: ignore[override]
        return self._driver.refusal

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._pinned.empty(shape, dtype)

    def is_pinned(self, host: Tensor) -> bool:
        return self._pinned.holds(host)

    def up(self, host: Tensor) -> Tensor:
        source = host.detach()
        if not (source.is_contiguous() and self._pinned.holds(source)):
            source = self._pinned.empty(tuple(host.shape), host.dtype)
            source.copy_(host.detach())
        with self._driver.on(self._up):
            target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
            target.copy_(source, non_blocking=True)
            arrived = self._up.record_event()
        self._pinned.busy(source, arrived)
        computing = self._driver.current()
        computing.wait_event(arrived)
        self._driver.keep(target, computing)
        return target

    def down(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        tensor = tensor.detach().contiguous()
        self._down.wait_event(self._driver.current().record_event())
        host = self._pinned.empty(tuple(tensor.shape), tensor.dtype) if out is None else out
        with self._lock, self._driver.on(self._down):
            host.copy_(tensor, non_blocking=True)
            arrived = self._last = self._down.record_event()
        self._pinned.busy(host, arrived)
        self._driver.keep(tensor, self._down)
        return host

    def wait(self) -> None:
        # Copies on one stream complete in order, so the latest event covers all of them. The event
        # is never cleared: the prefetcher and autograd's thread start copies too, and no thread may
        # clear the event that another thread waits for.
        if self._last is not None:
            self._last.synchronize()


def device_memory(device: torch.device) -> tuple[int, int]:
    """Return free and total bytes of the device's memory; zeros where torch cannot tell."""
    try:
        free, total = torch.accelerator.get_memory_info(device)
    except (AttributeError, RuntimeError, NotImplementedError):
        return 0, 0
    return int(free), int(total)


_OPEN: dict[torch.device, DeviceTransfers] = {}


def transfers_of(device: torch.device) -> Transfers:
    """Return the `Transfers` of a device; each device has a single object."""
    if device.type == "cpu":
        return HOST
    if device not in _OPEN:
        _OPEN[device] = DeviceTransfers(Driver(device))
    return _OPEN[device]


def on_device(host: Tensor, tensor: Tensor) -> Tensor:
    """Return a host tensor, such as indices, on the device of `tensor`; it may be there already."""
    return host if host.device == tensor.device else transfers_of(tensor.device).up(host)


def backend(modules: Mapping[str, Any], tensor: Tensor) -> Any:
    """Return the module with an operation's kernels for the device of `tensor`; `modules` has one
    per device type.
    """
    kind = tensor.device.type
    if kind not in modules:
        raise ConfigError(
            f"a tensor is on device {kind!r}, expected {' or '.join(modules)}: move the model there"
        )
    return modules[kind]


def open_device(name: str, field: str = "train.device") -> torch.device:
    """Return the device called `name`, such as ``cpu`` or ``cuda:1``.

    Raises
    ------
    ConfigError
        If this machine or torch does not have the device. The message calls the setting `field`.
    """
    if name == "cpu":
        return CPU
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"{field} is {name!r}, expected cpu, or a device such as cuda, cuda:1 or xpu"
        ) from None
    elsewhere = "leave train.device at cpu" if field == "--gpu" else f"set {field} to cpu"
    built = torch.accelerator.current_accelerator(check_available=False)
    if built is None or built.type != device.type:
        target = "the CPU only" if built is None else built.type
        raise ConfigError(
            f"{field} is {name}, but torch {torch.__version__} is built for {target}: install a torch for "
            f"{device.type} (pytorch.org), or {elsewhere}"
        )
    if not torch.accelerator.is_available():
        raise ConfigError(
            f"{field} is {name}, but torch {torch.__version__} finds no such device or no driver for it "
            f"here: check that the driver is loaded and the device visible, or {elsewhere}"
        )
    count = torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise ConfigError(
            f"{field} is {name}, but this machine has {count}, numbered from 0: choose one "
            f"of these, or {elsewhere}"
        )
    # CUDA's matrix products are reproducible only with this setting, and torch refuses them without
    # it. It is read once.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # cuBLASLt searches for an algorithm at every call of a linear layer: 0.19 ms of the host's time
    # each on an H200, in steps of 6 ms.
    os.environ.setdefault("DISABLE_ADDMM_CUDA_LT", "1")
    return torch.device(device.type, device.index or 0)


def require_triton(device: torch.device = CPU) -> None:
    """Raise `ConfigError` unless row kernels can run: Triton's version was examined, and it
    supports the GPU.
    """
    try:
        installed = version("triton")
    except PackageNotFoundError:
        installed = "none"
    number = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if not TRITON[0] <= number < TRITON[1]:
        raise ConfigError(
            f"rows in GPU memory need Triton 3.6 or 3.7, and {installed} is installed: run "
            "pip install 'stratarec[gpu]', or keep rows in host memory (memory.hbm "
            "0; in Python, device cpu)"
        )
    if device.type == "cuda":
        require_capability(device, torch.cuda.get_device_capability(device))


def require_capability(device: torch.device, capability: tuple[int, int]) -> None:
    """Raise `ConfigError` for a GPU that is too old for Triton."""
    if capability < CAPABILITY:
        raise ConfigError(
            f"rows in GPU memory need a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or "
            "later, and "
            f"{device} has {capability[0]}.{capability[1]}: keep rows in host memory (memory.hbm 0; in "
            "Python, device cpu)"
        )


_DEVICE_ERRORS = ("CUDA error", "cuDNN error", "Triton Error")


@contextmanager
def device_errors(device: torch.device, batch_size: int, fitting: Callable[[], int]) -> Iterator[None]:
    """Context manager that reports an error of the device in one line.

    Parameters
    ----------
    device : torch.device
        Device of the network.
    batch_size : int
        Samples of a batch, for the message.
    fitting : callable
        Returns a batch size that fits the device's memory, or 0 if not even one sample fits.

    Raises
    ------
    TrainingError
        For an error of the device.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        # The traceback's frames would keep the tensors of the step, and so their memory.
        traceback.clear_frames(error.__traceback__)
        fits = fitting()
        advice = (
            f"batches of {fits:,} fit: set train.batch_size to {fits}"
            if fits
            else "not even one sample fits: "
        )
        raise TrainingError(
            f"{device} has too little memory for batches of {batch_size:,} samples; {advice}"
            f"{', or' if fits else 'set'} train.device to cpu. The last checkpoint is intact."
        ) from error
    except RuntimeError as error:
        if not (isinstance(error, torch.AcceleratorError) or str(error).startswith(_DEVICE_ERRORS)):
            raise
        raise TrainingError(
            f"{device} failed ({_first_line(error)}); the last checkpoint is intact: resume from it with "
            "--resume, on another device with train.device"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
