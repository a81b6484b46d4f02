"""A trace of some steps: what every thread did when, as the file that ui.perfetto.dev and chrome://tracing open.

Stages are methods of objects (`steps/step.py`, `embedding/engine.py`). While the steps last these objects have others
in their place that note when they began and ended; before and after there is nothing of it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from stratarec.batch.batch import Batch
from stratarec.data.loading.loader import Loader
from stratarec.embedding import Handle
from stratarec.embedding.engine import Engine
from stratarec.embedding.tables.cached import CachedTables
from stratarec.io.atomic import write_text
from stratarec.models.request import Request
from stratarec.training.run.run_directory import TRACE

if TYPE_CHECKING:
    from stratarec.training.trainer import Trainer


class Span(NamedTuple):
    """What a thread did, in nanoseconds of one clock."""

    name: str
    thread: int
    begin: int
    end: int
    step: int | None


class Tracer:
    """Notes spans, of any thread."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.threads: dict[int, str] = {}
        self._replaced: list[tuple[Any, str]] = []

    def note(self, name: str, begin: int, step: int | None = None) -> None:
        """Something that began at `begin` ends."""
        thread = threading.get_native_id()
        if thread not in self.threads:
            self.threads[thread] = threading.current_thread().name
        # A list takes one item at a time, whoever else adds.
        self.spans.append(Span(name, thread, begin, time.perf_counter_ns(), step))

    @property
    def follows(self) -> bool:
        """Whether calls are noted now."""
        return bool(self._replaced)

    def follow(self, owner: Any, method: str, name: str) -> None:
        """Note every call of a method from now on."""
        call: Callable[..., Any] = getattr(owner, method)

        def noted(*args: Any, **named: Any) -> Any:
            begin = time.perf_counter_ns()
            try:
                return call(*args, **named)
            finally:
                self.note(name, begin)

        setattr(owner, method, noted)
        self._replaced.append((owner, method))

    def leave(self) -> None:
        """Let all methods be what they were."""
        while self._replaced:
            delattr(*self._replaced.pop())

    def content(self, process: str) -> dict[str, Any]:
        """The trace in Chrome's format: microseconds since the first span."""
        origin = min((span.begin for span in self.spans), default=0)
        events: list[dict[str, Any]] = [_named("process_name", process, 0)]
        events += [_named("thread_name", name, thread) for thread, name in self.threads.items()]
        for span in sorted(self.spans, key=lambda each: each.begin):
            times = {"ts": (span.begin - origin) / 1000, "dur": (span.end - span.begin) / 1000}
            step = {} if span.step is None else {"args": {"step": span.step}}
            events.append({"ph": "X", "name": span.name, "pid": os.getpid(), "tid": span.thread, **times, **step})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, name: str, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": os.getpid(), "tid": thread, "args": {"name": name}}


@contextmanager
def tracing(trainer: Trainer) -> Iterator[None]:
    """Write a trace of the steps that the recipe names, of the first rank; nothing where it names none."""
    steps = trainer.config.traced_steps
    if not steps or not trainer.mesh.is_first:
        yield
        return
    tracer, step, ended = Tracer(), trainer.step, 0

    def noted(batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> None:
        nonlocal ended
        number, begin = trainer.state.step, time.perf_counter_ns()
        if number not in steps:
            step(batch, request, prepared)
            return
        if not tracer.follows:  # the first of them here: a run that was resumed may begin in their middle
            _follow(tracer, trainer)
        if ended:
            tracer.note("wait for the next batch", ended)
        step(batch, request, prepared)
        tracer.note("step", begin, number)
        ended = time.perf_counter_ns()
        if number == steps[-1]:
            tracer.leave()

    trainer.step = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        tracer.leave()
        trainer.step = step  # type: ignore[method-assign]
        if tracer.spans:
            path = trainer.run / TRACE
            write_text(path, json.dumps(tracer.content(f"rank {trainer.mesh.rank}")))
            trainer.progress.say(f"trace {path}: open it at ui.perfetto.dev")
        else:
            trainer.progress.say(f"no trace: none of the steps {trainer.config.trace} was trained")


def _follow(tracer: Tracer, trainer: Trainer) -> None:
    """Note what a step consists of."""
    stages, engine = trainer.stages, trainer.model.embeddings.engine
    for name in ("request", "exchange", "forward", "backward", "update"):
        tracer.follow(stages, name, name)
    if type(trainer.loader) is Loader:
        tracer.follow(trainer.loader, "_read", "read row groups")
        tracer.follow(trainer.loader, "_batch", "collate")
    tracer.follow(engine, "look_up", "look up rows")
    tracer.follow(engine, "update", "update rows")
    tracer.follow(engine, "prepare_ahead", "prepare ahead")
    if isinstance(engine, Engine):
        for tables in engine.tables:
            tracer.follow(tables, "stage", "stage")
            if isinstance(tables, CachedTables):
                tracer.follow(tables.directory, "assign", "assign slots")
                tracer.follow(tables.mover, "prepare", "fetch rows")
                tracer.follow(tables.mover, "finish", "place rows")
