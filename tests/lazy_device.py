"""A device in pure Python on which nothing runs until somebody waits for it.

The device detects errors that occur on a real device only by chance: missing waits, buffers that
are reused too early, memory that another stream still uses, and implicit transfers from the device
to the host.

- Operations are queued by stream. Results and new memory contain poison until the operations run.
- Copies between pinned memory and the device run late; copies of other memory wait for the stream,
  as on real devices.
- Memory without tensors is poisoned as soon as the stream that allocated it arrives there, because
  an allocator could reuse it from then on. `Driver.keep` delays this for another stream.
- Operations on tensors of both sides, and arrays of device tensors, raise an error.
- `WAITS` records the operations that the host waited for.

A `Schedule` decides when streams advance. Each schedule detects other faults, so use several. torch
has hooks for a device in Python (`torch.utils.backend_registration`, experimental); they must be
set once, before a process computes any gradient. The device does not show the numerics of real
kernels or the speed of a real device.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from stratarec.kernels.runtime import accelerator

NAME = "lazy"
SCHEDULES = ("all-lazy", "main-eager", "side-eager", "random1", "random2")
WAITS: list[str] = []
"""Operations that made the host wait, since the list was cleared."""

_LOCK = threading.RLock()
_LOCAL = threading.local()
_STREAMS: list[Stream] = []
_PINNED: dict[int, int] = {}
"""Address ranges of pinned memory: start and end. Pinned memory is never released."""
_SYNCHRONOUS = (
    "_local_scalar_dense",
    "nonzero",
    "_unique2",
    "masked_select",
    "equal",
    "is_nonzero",
    "repeat_interleave",
)


class Schedule:
    """Decides when streams advance on their own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._draws = random.Random(int(name.removeprefix("random"))) if name.startswith("random") else None

    def queued(self, stream: Stream) -> None:
        """Advance streams after an operation was queued."""
        main = stream.is_main
        if (self.name == "main-eager" and main) or (self.name == "side-eager" and not main):
            stream.drain()
        for each in _STREAMS if self._draws is not None else ():
            if self._draws is not None and self._draws.random() < 0.3:
                each.drain(min(each.queued, each.done + self._draws.randrange(1, 4)))


SCHEDULE = Schedule(SCHEDULES[0])
_KEPT: list[Any] = []


class Stream:
    """A queue of operations that run in order."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self.queued = self.done = 0
        _STREAMS.append(self)

    @property
    def is_main(self) -> bool:
        return self is _STREAMS[0]

    def put(self, work: Callable[[], object]) -> None:
        Chip.check()
        with _LOCK:
            self._work.append(work)
            self.queued += 1
            SCHEDULE.queued(self)

    def drain(self, upto: int | None = None) -> None:
        """Run all operations queued before `upto`."""
        with _LOCK:
            last = self.queued if upto is None else upto
            while self.done < last:
                work = self._work.popleft()
                try:
                    work()
                finally:
                    # not earlier: another thread may ask for an event while the operation runs
                    self.done += 1
                _reuse()

    def synchronize(self) -> None:
        if self.done < self.queued:
            WAITS.append("stream")
        self.drain()

    def forget(self) -> None:
        """Drop all queued operations."""
        self._work.clear()
        self.done = self.queued

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.put(event.arrive)


class Event:
    """End of the operations queued on a stream so far."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._upto = stream.queued

    def arrive(self) -> None:
        self._stream.drain(self._upto)

    @property
    def has_arrived(self) -> bool:
        return self._stream.done >= self._upto

    def query(self) -> bool:
        Chip.check()
        return self.has_arrived

    def synchronize(self) -> None:
        Chip.check()
        if not self.query():
            WAITS.append("event")
        self.arrive()


def current() -> Stream:
    result: Stream = getattr(_LOCAL, "stream", _STREAMS[0])
    return result


class Chip:
    """Memory and failures of the device."""

    limit = 0
    """Bytes of memory; 0 for no limit."""
    held = most = 0
    """Bytes of all tensors, and their peak."""
    broken = short = False
    """Whether the device has failed, and whether it ran out of memory on a thread of autograd.

    A failed device raises an error at every later call. Errors of Python cannot leave threads of
    autograd, so the next call on the main thread raises the error about memory.
    """

    @classmethod
    def take(cls, size: int) -> None:
        cls.short = cls.short or bool(cls.limit and cls.held + size > cls.limit)
        if cls.short and threading.current_thread() is threading.main_thread():
            cls.short = False
            raise torch.OutOfMemoryError(f"lazy out of memory: {size} bytes beside {cls.held}\nsecond line")
        cls.held += size
        cls.most = max(cls.most, cls.held)

    @classmethod
    def check(cls) -> None:
        if cls.short:
            cls.take(0)
        if cls.broken:
            raise torch.AcceleratorError(
                "lazy error: an illegal memory access was encountered\nsecond line"
            )


class Memory:
    """Memory of tensors on the device, released with the last of them."""

    def __init__(self, inner: Tensor) -> None:
        Chip.take(inner.nbytes)
        self.streams: list[Stream] = []
        weakref.finalize(self, _freed, current(), self.streams, inner).atexit = False


_FREED: list[tuple[list[Event], Tensor]] = []
"""Memory without tensors, and the ends of the operations that may still use it."""


def _freed(made: Stream, others: list[Stream], inner: Tensor) -> None:
    """Poison memory once the stream that allocated it, and the streams that it is kept for, have
    arrived.
    """
    with _LOCK:
        Chip.held -= inner.nbytes
        _FREED.append(([stream.record_event() for stream in (made, *others)], inner))
        # Do not run the schedule, because this may happen during any operation.
        _reuse()


def _reuse() -> None:
    """Poison the memory that an allocator could reuse. No stream waits for that."""
    for entry in list(_FREED):
        if all(event.has_arrived for event in entry[0]) and entry in _FREED:
            _FREED.remove(entry)
            poison(entry[1])


class Lazy(Tensor):
    """Tensor on the device; its values are in `inner` on the host."""

    inner: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory | None = None) -> Lazy:
        result = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        result.inner = inner
        result.memory = memory or Memory(inner)
        return result  # type: ignore[no-any-return]

    def __init__(self, inner: Tensor, memory: Memory | None = None) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Lazy{tuple(self.shape)}"

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError("a tensor of the device was taken for an array of the host")

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, other: Lazy) -> None:
        self.inner = other.inner
        self.memory = other.memory

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def poison(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(77 if tensor.dtype == torch.uint8 else -77)


def fresh(like: Tensor) -> Lazy:
    """Allocate memory on the device."""
    inner = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
    poison(inner)
    return Lazy(inner)


def inner(values: Any) -> Any:
    """Replace tensors of the device by their values, because `tree_map` takes most of the time of
    an operation.
    """
    if isinstance(values, Lazy):
        return values.inner
    if isinstance(values, tuple | list):
        return type(values)(map(inner, values))
    return {name: inner(each) for name, each in values.items()} if isinstance(values, dict) else values


def leaves(values: Any) -> list[Any]:
    if isinstance(values, tuple | list):
        return [leaf for each in values for leaf in leaves(each)]
    return leaves(list(values.values())) if isinstance(values, dict) else [values]


def tensors(values: Any) -> list[Tensor]:
    return [each for each in leaves(values) if isinstance(each, Tensor)]


def run(func: Any, args: Any, options: dict[str, Any]) -> Any:
    """Queue an operation on the current stream."""
    name = func._schema.name.removeprefix("aten::")
    Chip.check()
    if name == "_to_copy":
        return _converted(args[0], options)
    if name == "copy_":
        return _copied(
            args[0], args[1], bool(args[2] if len(args) > 2 else options.get("non_blocking", False))
        )
    if name == "record_stream":
        raise AssertionError("streams of torch's own are none of this device: Driver.keep")
    by_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
    if by_mask or (name in _SYNCHRONOUS and "output_size" not in options):
        WAITS.append(name)
        current().drain()
        return tree_map(
            lambda each: Lazy(each) if isinstance(each, Tensor) else each,
            func(*inner(args), **inner(options)),
        )
    for each in tensors((args, options)):
        if not isinstance(each, Lazy) and each.dim():
            raise RuntimeError(
                f"{name}: tensors of the host and of the device {tuple(each.shape)} in one operation"
            )
    if options.get("device") is not None:
        options = {**options, "device": torch.device("cpu")}
    schema = func._schema
    if any(each.alias_info is not None and each.alias_info.is_write for each in schema.arguments):
        return _changed(func, args, options)
    if any(each.alias_info is not None for each in schema.returns) or name in (
        "_unsafe_view",
        "detach",
        "alias",
    ):
        memory = next(each.memory for each in tensors(args) if isinstance(each, Lazy))
        result = func(*inner(args), **inner(options))
        return tree_map(lambda each: Lazy(each, memory) if isinstance(each, Tensor) else each, result)
    return _made(func, args, options)


_SHAPES: dict[Any, Any] = {}


def _described(each: Any) -> Any:
    return (each.size(), each.stride(), each.dtype) if isinstance(each, Tensor) else (type(each), each)


def _made(func: Any, args: Any, options: dict[str, Any]) -> Any:
    """Queue an operation and return its poisoned results."""

    def shape(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device="meta")

    key = (func, *map(_described, leaves((args, options))), *options)
    if key not in _SHAPES:
        shapes, chosen = tree_map(shape, inner((args, options)))
        chosen = {**chosen, "device": "meta"} if "device" in chosen else chosen
        _SHAPES[key] = func(*shapes, **chosen)
    outs = tree_map(lambda each: fresh(each) if isinstance(each, Tensor) else each, _SHAPES[key])
    targets, given, given_options = [each.inner for each in tensors(outs)], inner(args), inner(options)

    def work() -> None:
        for target, found in zip(targets, tensors(func(*given, **given_options)), strict=True):
            if found.numel():  # some kernels omit results that are not used
                target.copy_(found)

    current().put(work)
    return outs


def _changed(func: Any, args: Any, options: dict[str, Any]) -> Any:
    """Queue an operation that writes to its arguments."""
    schema, given, given_options = func._schema, inner(args), inner(options)
    current().put(lambda: func(*given, **given_options))
    actual = []
    for each in schema.returns:
        for place, argument in enumerate(schema.arguments):
            mine, theirs = each.alias_info, argument.alias_info
            if mine is not None and theirs is not None and mine.before_set == theirs.before_set:
                actual.append(args[place] if place < len(args) else options[argument.name])
                break
    return None if not actual else actual[0] if len(actual) == 1 else tuple(actual)


def _converted(source: Tensor, options: dict[str, Any]) -> Tensor:
    device = options.get("device")
    to_device = isinstance(source, Lazy) if device is None else torch.device(device).type == NAME
    shape = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="meta")
    shape = shape.to(
        dtype=options.get("dtype") or source.dtype,
        memory_format=options.get("memory_format") or torch.preserve_format,
    )
    if to_device:
        target: Tensor = fresh(shape)
    else:
        target = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
    return _copied(target, source, bool(options.get("non_blocking", False)))


def _is_pinned(tensor: Tensor) -> bool:
    # A copy, because another thread may add a buffer.
    return any(low <= tensor.data_ptr() < high for low, high in tuple(_PINNED.items()))


def _at(tensor: Tensor) -> Tensor:
    """Return the memory of a pinned tensor by address, because a running copy does not keep its
    buffer alive.
    """
    assert tensor.is_contiguous()
    bytes_ = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(bytes_, dtype=tensor.dtype).view(tensor.shape) if tensor.numel() else tensor


def _copied(target: Tensor, source: Tensor, unwaited: bool) -> Tensor:
    here, there = (_at(each) if _is_pinned(each) else each for each in inner((target, source)))
    if isinstance(target, Lazy) and not isinstance(source, Lazy):
        current().put(lambda: here.copy_(there))
        if not (unwaited and _is_pinned(source)):
            WAITS.append("copy to the device")
            current().drain()
    elif isinstance(target, Lazy):
        current().put(lambda: here.copy_(there))
    elif unwaited and _is_pinned(target):
        poison(target)
        current().put(lambda: here.copy_(there))
    else:
        WAITS.append("copy to the host")
        current().put(lambda: here.copy_(there))
        current().drain()
    return target


class Driver(accelerator.Driver):
    """Driver of the lazy device, instead of torch's."""

    def stream(self) -> Stream:
        return Stream()

    def current(self) -> Stream:
        return current()

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, _LOCAL.stream = current(), stream
        try:
            yield
        finally:
            _LOCAL.stream = before

    def pinned(self, size: int) -> Tensor:
        result = torch.empty(size, dtype=torch.uint8)
        _PINNED[result.data_ptr()] = result.data_ptr() + size
        _KEPT.append(result)
        return result

    def keep(self, tensor: Tensor, stream: Any) -> None:
        assert isinstance(tensor, Lazy)
        tensor.memory.streams.append(stream)


class Backend:
    """The module ``torch.lazy``."""

    present = True
    """Whether the device exists."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return Backend.present

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class _Hook(torch._C._acc.PrivateUse1Hooks):  # type: ignore[misc]
    def is_available(self) -> bool:
        return Backend.present

    def has_primary_context(self, device: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


def _narrowed(func: Any, args: Any, options: dict[str, Any]) -> Any:
    """Run an operation under autocast, as on the CPU."""
    kind = torch.get_autocast_dtype(NAME)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        given = tree_map(
            lambda each: (
                each.to(kind) if isinstance(each, Tensor) and each.dtype == torch.float32 else each
            ),
            args,
        )
        return func(*given, **options)


def follow(schedule: str) -> None:
    """Switch to another schedule."""
    global SCHEDULE
    SCHEDULE = Schedule(schedule)


def install(schedule: str = SCHEDULES[0]) -> None:
    """Register the device ``lazy`` in this process; call it before the first gradient is
    computed.
    """
    Stream()
    follow(schedule)
    _setup_privateuseone_for_python_backend(NAME, backend_module=Backend(), hook=_Hook())
    own, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")

    def empty(size: Any, *, dtype: Any = None, **options: Any) -> Lazy:
        return fresh(torch.empty(size, dtype=dtype, device="meta"))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> Lazy:
        return fresh(torch.empty_strided(size, stride, dtype=dtype, device="meta"))

    own.impl("empty.memory_format", empty, "PrivateUse1")
    own.impl("empty_strided", empty_strided, "PrivateUse1")
    # These create an empty tensor and resize it in another operation, but tensors of this device
    # cannot be resized.
    for name in ("arange", "arange.start", "arange.start_step", "stack"):
        whole, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, whole), overload or "default")
        own.impl(name, lambda *args, _func=func, **options: run(_func, args, options), "PrivateUse1")
    rest.fallback(lambda func, *args, **options: run(func, args, options), "PrivateUse1")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in ("linear", "matmul", "mm", "bmm", "baddbmm", "addmm", "scaled_dot_product_attention"):
        func = getattr(torch.ops.aten, name).default
        own.impl(
            name,
            lambda *args, _func=func, **options: _narrowed(_func, args, options),
            "AutocastPrivateUse1",
        )
    _KEPT.extend((own, rest))
    accelerator.Driver = Driver  # type: ignore[misc]
