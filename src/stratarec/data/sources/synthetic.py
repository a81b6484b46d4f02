"""A generated log with the columns of Criteo's: skewed tables, sessions, and a true model that can
be learned.

Every chunk is a function of the configuration and of the chunk's number. Rows of a table of R rows
are drawn as ``floor(R * u ** a)`` with u uniform in [0, 1). For any R, the first share q of the
rows then gets a share ``q ** (1 / a)`` of the accesses; a is chosen so that 6.8 % of the rows get
76 % (as published for Criteo in FAE, arXiv 2103.00686). The click probability comes from a
factorization machine over latent vectors of all rows, with first-order effects and the dense
columns as further terms. So a model with interactions scores better than one without. With
`SyntheticConfig.blocks`, only features in the same block interact."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.config.validate import check_ranges, check_seed
from stratarec.data.columns.converter import OnBadRow
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.base import ALL_CHUNKS, Chunk, ChunkShare, LogConfig
from stratarec.kernels.random import mix_array

CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
HOT_ROWS, HOT_ACCESSES = 0.068, 0.76
EXPONENT = math.log(HOT_ROWS) / math.log(HOT_ACCESSES)
DENSE = 13
_CHUNK = 1 << 17
# Seeds of the pilot sample and of the assignment of features to blocks. They are larger than all
# chunk numbers, which serve as seeds of chunks.
_PILOT_SEED, _BLOCK_SEED = 1 << 40, 1 << 41
_PILOT = 1 << 15
_LATENT = 4
# Features 0 to 15 describe the user and the session; the others change with every sample, like
# items.
_CONTEXT_FEATURES = 16
# Features with missing values, as in real logs.
_MISSING_SPARSE = (2, 21)
_MISSING_DENSE = (3, 9)
_MOST_BLOCKS = len(CRITEO_ROWS) // 2


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig(LogConfig):
    """Size and distribution of the generated log."""

    kind: Literal["synthetic"] = "synthetic"
    samples: int = 1_000_000
    """Number of rows of the log."""
    scale: float = 0.01
    """Factor on Criteo's 26 table sizes. A table has at least 3 rows, or its original size if that
    is smaller.
    """
    max_rows: int = 0
    """Maximum number of rows of a table; 0 for no maximum."""
    click_rate: float = 0.25
    """Share of positive labels."""
    signal: float = 1.8
    """Standard deviation of the true log-odds. With 1.8, the best possible AUC is about 0.84."""
    session_length: float = 4.0
    """Mean number of samples per session; 1 for no sessions."""
    session_keep: float = 0.9
    """Probability that a context feature has the same value in the next sample of a session."""
    missing: float = 0.1
    """Probability that a value is missing, in the columns with missing values."""
    blocks: int = 0
    """Number of blocks, to which features are assigned at random; block sizes differ by at most
    one. Only features in the same block interact. 0 lets all pairs of features interact; the total
    strength of interactions is the same."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(
            self,
            "data.source.",
            samples="[1, inf)",
            scale="(0, 100]",
            max_rows="[0, inf)",
            click_rate="(0, 1)",
            signal="[0, inf)",
            session_length="[1, inf)",
            session_keep="[0, 1]",
            missing="[0, 1)",
            blocks=f"[0, {_MOST_BLOCKS}]",
        )
        check_seed(self.seed, "data.source.seed")

    def table_rows(self) -> tuple[int, ...]:
        """Return the numbers of rows of the 26 tables."""
        cap = self.max_rows or max(CRITEO_ROWS) * 100
        return tuple(min(max(int(rows * self.scale), min(rows, 3)), cap) for rows in CRITEO_ROWS)

    def feature_blocks(self) -> tuple[tuple[int, ...], ...]:
        """Return the features (0 to 25) of each block; one block with all features if `blocks` is
        0.
        """
        features = np.arange(len(CRITEO_ROWS))
        if not self.blocks:
            return (tuple(features.tolist()),)
        order = np.random.default_rng([self.seed, _BLOCK_SEED]).permutation(features)
        return tuple(tuple(sorted(order[block :: self.blocks].tolist())) for block in range(self.blocks))


class SyntheticSource:
    """Rows of the generated log in order of time."""

    divisible = False

    def __init__(self, config: SyntheticConfig, on_bad_row: OnBadRow = "error") -> None:
        self._config = config
        self._rows = np.array(config.table_rows(), dtype=np.float64)
        self.files: tuple[str, ...] = ()
        self.total_bytes = config.samples
        self.schema = Schema(
            label="label",
            dense=tuple(DenseFeature(name=f"I{i + 1}") for i in range(DENSE)),
            sparse=tuple(SparseFeature(name=f"C{i + 1}") for i in range(len(CRITEO_ROWS))),
            time="time",
            session="session",
            user="user",
        )

    def estimate_rows(self) -> int:
        return self._config.samples

    def fingerprint(self) -> dict[str, object]:
        return {"kind": "synthetic", "config": repr(self._config), "version": 1}

    def chunks(self, workspace: Path, share: ChunkShare = ALL_CHUNKS) -> Iterator[Chunk]:
        for index in range(-(-self._config.samples // _CHUNK)):
            if index in share.done:
                continue
            first = index * _CHUNK
            count = min(_CHUNK, self._config.samples - first)
            frame = self.truth(index, count).drop("probability", "additive")
            yield Chunk(index=index, file=0, frame=frame, bytes_done=first + count)

    def truth(self, index: int, count: int) -> pl.DataFrame:
        """Generate a chunk with two more columns: the true click `probability`, and `additive`, the
        log-odds without interactions."""
        draws = np.random.default_rng([self._config.seed, index])
        session = self._sessions(draws, count)
        rows = self._draw_rows(draws, session)
        dense = np.floor(np.exp(draws.normal(1.0, 1.2, (count, DENSE)))).astype(np.float32)
        additive, interaction = self._scores(rows, dense)
        center, gain, bias = self._calibration
        odds = bias + gain * (additive + interaction - center)
        probability = 1 / (1 + np.exp(-odds))
        label = (draws.random(count) < probability).astype(np.uint8)
        columns: dict[str, pl.Series] = {"label": pl.Series(label)}
        for i in range(DENSE):
            missing = draws.random(count) < (self._config.missing if i in _MISSING_DENSE else 0)
            columns[f"I{i + 1}"] = pl.Series(dense[:, i]).set(pl.Series(missing), None)
        for i in range(len(CRITEO_ROWS)):
            missing = draws.random(count) < (self._config.missing if i in _MISSING_SPARSE else 0)
            columns[f"C{i + 1}"] = pl.Series(self._names(rows[i], i)).set(pl.Series(missing), None)
        number = session + index * _CHUNK
        columns["time"] = pl.Series(
            1_700_000_000 + 30 * number + np.arange(count) - np.searchsorted(session, session)
        )
        columns["session"] = pl.Series(number)
        users = max(self._config.samples // 40, 1)
        columns["user"] = pl.Series(
            (mix_array(number.astype(np.uint64)) % np.uint64(users)).astype(np.int64)
        )
        columns["probability"] = pl.Series(probability)
        columns["additive"] = pl.Series(additive)
        return pl.DataFrame(columns)

    def _sessions(self, draws: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Draw the ``[count]`` session numbers of the samples, such as 0, 0, 1, ..."""
        starts = draws.random(count) < 1 / self._config.session_length
        return np.cumsum(starts).astype(np.int64)

    def _draw_rows(self, draws: np.random.Generator, session: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Draw a ``[count]`` array of popularity ranks for each feature."""
        count = len(session)
        first = np.diff(session, prepend=-1) != 0
        places = np.arange(count)
        columns = []
        for i, rows in enumerate(self._rows):
            row = np.minimum(rows * draws.random(count) ** EXPONENT, rows - 1).astype(np.int64)
            if i < _CONTEXT_FEATURES:
                changed = first | (draws.random(count) >= self._config.session_keep)
                row = row[np.maximum.accumulate(np.where(changed, places, 0))]
            columns.append(row)
        return columns

    def _names(self, rows: NDArray[np.int64], feature: int) -> NDArray[np.int64]:
        """Return raw values: popularity ranks, scrambled so that only counting shows which values
        are popular.
        """
        keys = rows.astype(np.uint64) + np.uint64((feature + 1) << 40)
        return mix_array(keys).astype(np.int64)

    def _scores(
        self, rows: list[NDArray[np.int64]], dense: NDArray[np.float32]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the first-order and the second-order terms of the log-odds, before scaling."""
        count = len(rows[0])
        additive = (np.log1p(dense) - 1.3) @ np.linspace(-0.12, 0.12, DENSE)
        blocks = self._config.feature_blocks()
        block_of = {feature: number for number, block in enumerate(blocks) for feature in block}
        totals = np.zeros((len(blocks), _LATENT, count))
        squares = np.zeros(count)
        for i, row in enumerate(rows):
            key = mix_array(row.astype(np.uint64) + np.uint64(((i + 1) << 40) + self._config.seed))
            additive += 0.4 * _noise(key)
            for k in range(_LATENT):
                latent = _noise(key + np.uint64(k + 1))
                totals[block_of[i], k] += latent
                squares += latent * latent
        pairs = sum(math.comb(len(block), 2) for block in blocks)
        weight = 0.06 * math.sqrt(math.comb(len(rows), 2) / pairs)
        return additive, weight * (sum((total * total).sum(0) for total in totals) - squares)

    @cached_property
    def _calibration(self) -> tuple[float, float, float]:
        """Return the center, gain and bias with which a pilot sample has the configured `signal`
        and `click_rate`.
        """
        draws = np.random.default_rng([self._config.seed, _PILOT_SEED])
        rows = self._draw_rows(draws, np.arange(_PILOT))
        dense = np.floor(np.exp(draws.normal(1.0, 1.2, (_PILOT, DENSE)))).astype(np.float32)
        score = np.add(*self._scores(rows, dense))
        center, gain = float(score.mean()), self._config.signal / float(score.std())
        low, high = -30.0, 30.0
        for _ in range(60):
            middle = (low + high) / 2
            rate = float((1 / (1 + np.exp(-(middle + gain * (score - center))))).mean())
            low, high = (middle, high) if rate < self._config.click_rate else (low, middle)
        return center, gain, low


def _noise(key: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return uniform numbers in [-sqrt(3), sqrt(3)): mean 0, variance 1."""
    unit = (mix_array(key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return (2 * unit - 1) * math.sqrt(3)
