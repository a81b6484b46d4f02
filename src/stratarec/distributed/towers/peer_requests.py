"""What ranks of equal place on all hosts ask of each other's towers: ids, runs and windows, and how they are joined.

Shapes: B_s samples of the peer on host s, R_s runs of its samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stratarec.batch.jagged import offsets_of, slice_places
from stratarec.distributed.exchange.input_dist import Requests, RowRequest, bags_of, joined, read
from stratarec.distributed.sharding import IdStream
from stratarec.distributed.towers.peer_exchange import packed, unpacked
from stratarec.models.history import HistoryWindows
from stratarec.models.request import Request


@dataclass(frozen=True, kw_only=True)
class TowerRequest:
    """What one peer asks of one tower.

    Parameters
    ----------
    asked : sequence of RowRequest
        Stream by stream.
    samples : int
        B_s.
    runs : Tensor or None
        ``[R_s]`` samples of each run; None where every sample is one.
    shared : frozenset of str
        Features that are asked for by run.
    windows : mapping of str to Windows
        Of every feature that is not pooled.
    """

    asked: Sequence[RowRequest]
    samples: int
    runs: Tensor | None
    shared: frozenset[str]
    windows: Mapping[str, HistoryWindows]

    def message(self, ids: Tensor) -> Tensor:
        """As it travels; `ids` are the lengths and ids of `asked`."""
        note = {
            "announced": [number for each in self.asked for number in each.announced],
            "samples": self.samples,
            "shared": sorted(self.shared),
            "runs": self.runs is not None,
            "windows": {key: window.inverse is not None for key, window in self.windows.items()},
        }
        arrays = [ids] if self.runs is None else [ids, self.runs.int()]
        for window in self.windows.values():
            parts = (window.start, window.length, window.inverse)
            arrays += [part.int() for part in parts if part is not None]
        return packed(note, arrays)

    @classmethod
    def of(cls, message: Tensor) -> TowerRequest:
        """What a message says."""
        note, (ids, *arrays) = unpacked(message)
        found = iter(arrays)
        runs = next(found).long() if note["runs"] else None
        windows = {
            key: HistoryWindows(
                start=next(found).long(), length=next(found).long(), inverse=next(found) if inverse else None
            )
            for key, inverse in note["windows"].items()
        }
        asked = read(ids, note["announced"])
        return cls(
            asked=asked, samples=note["samples"], runs=runs, shared=frozenset(note["shared"]), windows=windows
        )  # fmt: skip

    def by_sample(self, streams: Sequence[IdStream]) -> TowerRequest:
        """The same, asked for sample by sample."""
        if self.runs is None:
            return self
        asked = [
            _repeated(each, self.runs) if stream.key in self.shared else each
            for stream, each in zip(streams, self.asked, strict=True)
        ]
        return replace(self, asked=asked, runs=None, shared=frozenset())


def _repeated(asked: RowRequest, times: Tensor) -> RowRequest:
    """Each bag so many times."""
    if asked.lengths is None:
        return RowRequest(bags=int(times.sum()), ids=asked.ids.repeat_interleave(times))
    lengths = asked.lengths.long()
    start = (offsets_of(lengths)[:-1]).repeat_interleave(times)
    lengths = lengths.repeat_interleave(times)
    return RowRequest(bags=len(lengths), ids=asked.ids[slice_places(start, lengths)[0]], lengths=lengths)


def join(parts: Sequence[TowerRequest], streams: Sequence[IdStream]) -> Request:
    """One request of the samples of all parts, one after another."""
    shared = frozenset[str]().union(*(part.shared for part in parts))
    # Runs may share other features with each peer; then they are of no use to all, and go by sample.
    if any(part.runs is not None and part.shared != shared for part in parts):
        parts, shared = [part.by_sample(streams) for part in parts], frozenset()
    features = joined(streams, [part.asked for part in parts], least=sum(part.samples for part in parts))
    starts = None
    if shared:
        sizes = [torch.ones(part.samples, dtype=torch.int64) if part.runs is None else part.runs for part in parts]
        starts = offsets_of(torch.cat(sizes))
    windows = {}
    for place, stream in enumerate(streams):
        if stream.kind == "sequence":
            events = [part.asked[place].ids.numel() for part in parts]
            windows[stream.key] = _joined_windows([part.windows[stream.key] for part in parts], events)
    return Request(features=features, starts=starts, shared=shared, windows=windows)


def _joined_windows(parts: Sequence[HistoryWindows], events: Sequence[int]) -> HistoryWindows:
    firsts, histories = np.cumsum([0, *events]).tolist(), np.cumsum([0, *(len(part.start) for part in parts)]).tolist()
    start = torch.cat([part.start + first for part, first in zip(parts, firsts, strict=False)])
    inverse = None
    if any(part.inverse is not None for part in parts):
        own = [torch.arange(len(part.start)) if part.inverse is None else part.inverse for part in parts]
        inverse = torch.cat([part + first for part, first in zip(own, histories, strict=False)])
    return HistoryWindows(start=start, length=torch.cat([part.length for part in parts]), inverse=inverse)


def messages(request: Request, samples: int, requests: Requests) -> list[Tensor]:
    """What a rank asks of each tower for a batch of so many samples; `requests` has a tower in the place of a rank.

    Raises
    ------
    ConfigError
        For a missing feature or an id outside its table.
    """
    asked, _ = requests.split(request.features)
    runs = None if request.starts is None else request.starts.diff()
    found = []
    for streams, part in zip(requests.streams, asked, strict=True):
        windows = {stream.key: _windows(request, stream.key) for stream in streams if stream.kind == "sequence"}
        shared = request.shared & {stream.key for stream in streams}
        mine = TowerRequest(asked=part, samples=samples, runs=runs if shared else None, shared=shared, windows=windows)
        found.append(mine.message(requests.message(part)))
    return found


def _windows(request: Request, key: str) -> HistoryWindows:
    """Which of a feature's ids the histories are."""
    if key in request.windows:
        return request.windows[key]
    features = request.features
    ids, lengths = bags_of(features, key)
    if lengths is None:
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
    return HistoryWindows(start=offsets_of(lengths)[:-1], length=lengths)
