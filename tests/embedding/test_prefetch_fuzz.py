"""Fuzz test of lookahead: it never hangs, its errors are typed, and its rows equal those of a
reference.

A case is a few collections that train at once, each on its own thread and in sessions. A session
reads batches through a `Prefetcher`. Its store may fail, a move of rows may be interrupted, its
source or its consumer may raise, and the consumer may leave, ask for more batches than it trained,
drain the prefetcher or close the tables. After that a collection either continues and matches
tables in memory bit for bit, or refuses to run until it is loaded and then matches its checkpoint
bit for bit.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from store_conformance import make_failing
from stratarec.batch.jagged import KeyedJagged
from stratarec.embedding import EmbeddingBagConfig, Prefetcher, StagedBatch, TieredEmbeddingBagCollection
from stratarec.embedding.tables.cached import CachedTables
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import StorageError, TrainingError

ROWS, BATCH, MOST_SECONDS = 600, 20, 60
# One case takes about a second; STRATAREC_FUZZ_CASES sets how many cases run.
CASES = int(os.environ.get("STRATAREC_FUZZ_CASES", "6"))
TABLES = tuple(
    EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=4, feature_names=(name,))
    for name in "ab"
)
EVENTS = ("none", "read", "write", "interrupt", "source", "consumer", "leave", "greedy", "drain", "close")


class InjectedError(Exception):
    """Error of a source or a consumer."""


@dataclass(frozen=True)
class Session:
    """One pass of a `Prefetcher` over some batches, and the event in it."""

    seed: int
    steps: int
    depth: int
    pause: int
    """Steps from one barrier to the next; 0 for none."""
    event: str
    at: int
    """Step of the event."""
    share: float
    """Share of a store operation that is done before it fails."""


SESSIONS = st.builds(
    Session,
    seed=st.integers(0, 1000),
    steps=st.integers(1, 12),
    depth=st.integers(0, 4),
    pause=st.integers(0, 3),
    event=st.sampled_from(EVENTS),
    at=st.integers(0, 11),
    share=st.sampled_from([0.0, 0.5, 1.0]),
)


def batch(number: int) -> KeyedJagged:
    draws = np.random.default_rng(number)
    ids = torch.from_numpy(np.minimum(draws.zipf(1.15, 2 * BATCH) - 1, ROWS - 1))
    return KeyedJagged(keys=("a", "b"), values=ids, offsets=None, batch_size=BATCH)


def rows_of(module: TieredEmbeddingBagCollection) -> dict[str, Tensor]:
    return {f"{name}.{part}": rows.clone() for name in "ab" for part, rows in module.table(name).items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, rows in one.items():
        assert torch.equal(rows, other[name]), name


class TrainedCollection:
    """A tiered collection, the same tables in memory, and the last checkpoint."""

    def __init__(self, folder: Path, home: Any, slots: int) -> None:
        self.folder = folder
        self.home = home
        self.slots = slots
        self.saves = 0
        self.made = 0
        self.plain = TieredEmbeddingBagCollection(TABLES)
        self.module = self.make()
        self.save()

    def make(self) -> TieredEmbeddingBagCollection:
        self.made += 1
        path = self.folder / f"rows-{self.made}"
        tier = TableTier(home=self.home, cache_rows=self.slots)
        tiers = TierConfig(tables=dict.fromkeys("ab", tier), ways=8, mapped_path=path, log_path=path)
        module = TieredEmbeddingBagCollection(TABLES, tiers=tiers)
        (tables,) = module.engine.tables
        assert isinstance(tables, CachedTables)
        self.store = make_failing(tables)
        return module

    def save(self) -> None:
        self.saves += 1
        path = self.folder / f"saved-{self.saves}"
        self.saved = path, self.module.save(path), rows_of(self.plain)

    def run(self, session: Session) -> None:
        """Run a session and check the state after it."""
        message = ""
        try:
            self._train(session)
        except (StorageError, InjectedError, KeyboardInterrupt):
            pass
        except TrainingError as error:
            message = str(error)
        assert not message or any(words in message for words in EXPECTED[session.event]), (session, message)
        self.store.forget()
        health = self.module.engine.health.state
        if health != "open":
            assert session.event == {"failed": "interrupt", "closed": "close"}[health]
            self._check_refused()
            self._restore(health)
        assert not len(self.module.engine.in_flight)
        assert_same(rows_of(self.plain), rows_of(self.module))
        if session.seed % 3 == 0:
            self.save()

    def _check_refused(self) -> None:
        for action in (
            lambda: self.module(batch(0)),
            lambda: self.module.stage(batch(0)),
            lambda: self.module.save(self.folder / "never"),
            lambda: self.module.table("a"),
        ):
            with pytest.raises(TrainingError, match=r"incomplete|closed"):
                action()
        assert not (self.folder / "never").exists()

    def _restore(self, health: str) -> None:
        path, manifest, rows = self.saved
        if health == "closed":
            self.module = self.make()
        self.module.load(path, manifest)
        self.plain = TieredEmbeddingBagCollection(TABLES)
        for name in "ab":
            for part, view in self.plain.table(name).items():
                view.copy_(rows[f"{name}.{part}"])
        self.plain.engine.step_clock.load_position(self.module.step, 0, ())

    def _source(self, session: Session) -> Iterator[KeyedJagged]:
        for step in range(session.steps):
            if session.event == "source" and step == session.at:
                raise InjectedError
            yield batch(session.seed + step)

    def _train(self, session: Session) -> None:
        ahead = Prefetcher(
            self.module.engine,
            self._source(session),
            lambda features, _: features,
            depth=session.depth,
            pause_after=lambda place: bool(session.pause) and (place + 1) % session.pause == 0,
        )
        with ahead as batches:
            for step, (features, handle) in enumerate(batches):
                if step == session.at and not self._trigger(session, batches, handle):
                    return
                for output in (self.module(handle), self.plain(features)):
                    output.pooled.square().sum().backward()

    def _trigger(self, session: Session, batches: Prefetcher[KeyedJagged], handle: StagedBatch) -> bool:
        """Trigger the session's event. Return whether the session continues."""
        event = session.event
        if event in ("read", "write"):
            self.store.fail(event, StorageError("no space"), share=session.share)
        elif event == "interrupt":
            self.store.fail("read", KeyboardInterrupt(), share=session.share)
            self.store.fail("write", KeyboardInterrupt(), share=session.share)
        elif event == "consumer":
            raise InjectedError
        elif event == "greedy":
            for _ in range(session.steps):
                next(batches, None)
        elif event == "drain":
            batches.drain()
        elif event == "close":
            self.module.close()
        return event not in ("leave", "greedy")


_WAITS = ("waits for the backward pass", "do not fit level 0 together", "dropped before", "before batch")
EXPECTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(EVENTS, ()),
    "greedy": (*_WAITS, "rows do not fit"),
    "interrupt": ("incomplete",),
    "close": ("closed",),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile the kernels first, so that compilation is not taken for a hang."""
    for home in ("dram", "log"):
        each = TrainedCollection(tmp_path_factory.mktemp(home), home, 96)
        for seed, event in enumerate(("none", "write", "interrupt")):
            each.run(Session(seed=seed, steps=8, depth=2, pause=0, event=event, at=4, share=0.5))
        each.module.close()


def run_all(trained: list[TrainedCollection], sessions: list[list[Session]]) -> None:
    """Run the sessions of every collection on its own thread."""
    errors: list[BaseException] = []

    def work(each: TrainedCollection, own: list[Session]) -> None:
        try:
            for session in own:
                each.run(session)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=pair, daemon=True)
        for pair in zip(trained, sessions, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(MOST_SECONDS)
    assert not [thread for thread in threads if thread.is_alive()], f"it hangs: {sessions}"
    if errors:
        raise errors[0]


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
# Shrinking a case would wait for its hang again and again.
@settings(deadline=None, max_examples=CASES, phases=[Phase.generate])
@given(
    sessions=st.lists(st.lists(SESSIONS, min_size=1, max_size=4), min_size=1, max_size=3),
    home=st.sampled_from(["dram", "log"]),
    slots=st.sampled_from([96, 200]),
)
def test_rows_match_the_reference_after_any_event_during_lookahead(
    sessions: list[list[Session]], home: str, slots: int
) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        trained = [
            TrainedCollection(Path(folder, str(place)), home, slots) for place in range(len(sessions))
        ]
        run_all(trained, sessions)
        for each in trained:
            each.module.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]
