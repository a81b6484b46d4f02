"""Record the operations of each thread during some steps, in the format of ui.perfetto.dev and
chrome://tracing.

A hook of the training loop records each traced step. From the first to the last traced step,
functions with the decorator `traced` report their calls. All other steps only check that no tracer
listens, which costs little.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from stratarec.distributed.mesh import Mesh
from stratarec.io.atomic import write_text
from stratarec.progress import Progress, listen
from stratarec.recipe.train_section import TrainConfig
from stratarec.training.run.run_directory import TRACE

Hook = Callable[[int], AbstractContextManager[object]]
"""Function from the number of a step to a context in which the step runs."""


class Span(NamedTuple):
    """One piece of work of one thread. Times are nanoseconds of a clock that all threads share."""

    name: str
    thread: int
    begin: int
    end: int
    step: int | None


class Tracer:
    """Records the spans of all threads."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.threads: dict[int, str] = {}

    def note(self, name: str, begin: int, step: int | None = None) -> None:
        """Record a span that began at `begin` and ends now."""
        thread = threading.get_native_id()
        if thread not in self.threads:
            self.threads[thread] = threading.current_thread().name
        # Appending to a list is atomic.
        self.spans.append(Span(name, thread, begin, time.perf_counter_ns(), step))

    def content(self, process: str) -> dict[str, Any]:
        """Return the trace in Chrome's format; times are microseconds since the first span."""
        origin = min((span.begin for span in self.spans), default=0)
        events: list[dict[str, Any]] = [_named("process_name", process, 0)]
        events += [_named("thread_name", name, thread) for thread, name in self.threads.items()]
        for span in sorted(self.spans, key=lambda item: item.begin):
            times = {"ts": (span.begin - origin) / 1000, "dur": (span.end - span.begin) / 1000}
            step = {} if span.step is None else {"args": {"step": span.step}}
            events.append(
                {"ph": "X", "name": span.name, "pid": os.getpid(), "tid": span.thread, **times, **step}
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, name: str, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": os.getpid(), "tid": thread, "args": {"name": name}}


@contextmanager
def tracing(config: TrainConfig, mesh: Mesh, run: Path, progress: Progress) -> Iterator[list[Hook]]:
    """Trace the steps that the recipe names, on the first rank only. Write the trace to `run` when
    the context ends.

    Yields the hooks that trace a step, for the training loop.
    """
    steps = config.traced_steps
    if not steps or not mesh.is_first:
        yield []
        return
    tracer, ended = Tracer(), 0

    @contextmanager
    def trace_step(step: int) -> Iterator[None]:
        nonlocal ended
        if step not in steps:
            yield
            return
        begin = time.perf_counter_ns()
        listen(tracer.note)
        if ended:
            tracer.note("wait for the next batch", ended)
        yield
        tracer.note("step", begin, step)
        ended = time.perf_counter_ns()
        if step == steps[-1]:
            listen(None)

    try:
        yield [trace_step]
    finally:
        listen(None)
        if tracer.spans:
            path = run / TRACE
            write_text(path, json.dumps(tracer.content(f"rank {mesh.rank}")))
            progress.say(f"trace {path}: open it at ui.perfetto.dev")
        else:
            progress.say(f"no trace: none of the steps {config.trace} was trained")
