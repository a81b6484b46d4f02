"""The stages of `prepare` in order: from a source to the files of a data set and its manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from stratarec.data.data_quality import hashed_share
from stratarec.data.dataset.manifest import (
    Carried,
    CarriedClicks,
    DatasetManifest,
    LabelCount,
    LeakInfo,
    MomentsInfo,
    Origin,
    Provenance,
    RepeatsInfo,
    RowsInfo,
    Shard,
    VocabularyInfo,
)
from stratarec.data.dataset.writer import write_clicks, write_counts, write_events, write_shard, write_vocabulary
from stratarec.data.dedup_groups import Repeats, choose_groups, describe
from stratarec.data.durations import in_unit
from stratarec.data.prepare.base_dataset import BaseDataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.count import PartitionCounts
from stratarec.data.prepare.executor import Executor
from stratarec.data.prepare.partition import Partition, Partitions, PerPartitionStage, note_path
from stratarec.data.prepare.workspace import PartitionStage, SpilledChunk, Workspace, log_shares
from stratarec.data.sources import Source
from stratarec.data.sources.clicks import ClicksSource
from stratarec.data.splits import SPLITS, Splitter
from stratarec.data.transforms import Moments
from stratarec.data.vocabulary import EvictionFilter, Vocabulary
from stratarec.errors import DataError
from stratarec.io.atomic import read_json, reporting_damage
from stratarec.progress import Progress


@dataclass(frozen=True, kw_only=True)
class ShardWriter:
    """What shards hold, and where they are written."""

    output: Path
    """Directory of the data set."""
    vocabularies: Mapping[str, Vocabulary]
    moments: Mapping[str, Moments]
    groups: Mapping[str, Sequence[str]] | None
    keep_rows: bool

    def write(self, number: int, part: Partition) -> dict[str, Any]:
        """Write the shards of a partition, and say of each split that has samples what they are."""
        written = {}
        for split, name in enumerate(SPLITS):
            encoded = part.encode(split, self.vocabularies, self.moments, self.groups, keep_rows=self.keep_rows)
            if encoded.samples.num_rows:
                written[name] = write_shard(self.output, name, number, encoded).to_dict()
            del encoded
        return written

    @property
    def bytes(self) -> int:
        """Memory of the vocabularies."""
        return sum(int(known.values.estimated_size()) + known.counts.nbytes for known in self.vocabularies.values())


def encode_shards(
    folder: Path, partitions: Partitions, shards: ShardWriter, executor: Executor, progress: Progress
) -> dict[str, tuple[Shard, ...]]:
    """The shards of each split, of which those without a note in `folder` are written first."""
    stage = PerPartitionStage(partitions=partitions, notes=folder, make=shards.write, held=shards.bytes)
    stage.run("encode", executor, progress)
    splits: dict[str, list[Shard]] = {name: [] for name in SPLITS}
    for path in (note_path(folder, number) for number in range(len(partitions))):
        with reporting_damage(path):
            for name, shard in read_json(path).items():
                splits[name].append(Shard.model_validate_json(json.dumps(shard)))
    return {name: tuple(found) for name, found in splits.items()}


class PreparePipeline:
    """One pass through all stages.

    Parameters
    ----------
    workspace : Workspace
        Open.
    source : Source
    splitter : Splitter
    config : PrepareConfig
    base : BaseDataset or None
        Whose ids and moments are kept.
    executor : Executor
    progress : Progress
    """

    def __init__(
        self,
        workspace: Workspace,
        source: Source,
        splitter: Splitter,
        config: PrepareConfig,
        base: BaseDataset | None,
        executor: Executor,
        progress: Progress,
    ) -> None:
        self._workspace, self._source, self._splitter = workspace, source, splitter
        self._config, self._executor, self._progress = config, executor, progress
        self._schema, self._base = source.schema, base
        executor.begin(workspace.root, source.files if source.divisible else ())

    def manifest(self, name: str, origin: Origin) -> DatasetManifest:
        """What ``dataset.json`` is to say of the output, after every stage: each from where it stopped before."""
        workspace, config = self._workspace, self._config
        partitions = self._partitions()
        by_session = config.groups != "none" and bool(self._schema.session_keys)
        hashed = hashed_share(self._schema, config.split, sum(chunk.samples for chunk in partitions.chunks))
        counts = PartitionCounts(
            workspace.folder("counts"), self._schema, config.vocabulary, repeats=by_session, hashed=hashed
        )  # fmt: skip
        counts.count(partitions, self._executor, self._progress)
        vocabularies, infos = self._vocabularies(counts, partitions)
        observed = counts.moments()
        moments = observed if self._base is None else self._base.moments()
        repeats = counts.repeats()
        groups = choose_groups(config.groups, self._schema, repeats)
        for line in describe(groups or {}, self._schema, repeats):
            self._progress.say(line)
        wanted = ShardWriter(
            output=workspace.output,
            vocabularies=vocabularies,
            moments=moments,
            groups=groups,
            keep_rows=config.keep_rows,
        )
        shards = encode_shards(workspace.folder("encoded"), partitions, wanted, self._executor, self._progress)
        carried = self._carried(vocabularies, counts, partitions, sum(shard.samples for shard in shards["train"]))
        labels = counts.labels()
        self._check_splits(partitions, shards, labels["train"])
        if not counts.weight():
            raise DataError(f"column {self._schema.weight!r}: every weight of the training split is 0, expected others")
        return DatasetManifest(
            name=name,
            columns=self._schema,
            groups=None if groups is None else {group: tuple(features) for group, features in groups.items()},
            splits=shards,
            positives={split: found[self._schema.label_column].positives for split, found in labels.items()},
            labels=labels if self._schema.labels else {},
            vocabularies=infos,
            carried=carried,
            about=self._about(origin, partitions.chunks, (moments, observed), repeats, counts),
        )

    def _about(
        self,
        origin: Origin,
        chunks: Sequence[SpilledChunk],
        moments: Sequence[Mapping[str, Moments]],
        repeats: Repeats,
        counts: PartitionCounts,
    ) -> Provenance:
        used, observed = ({name: MomentsInfo.of(found) for name, found in each.items()} for each in moments)
        return Provenance(
            origin=origin,
            paths=tuple(getattr(self._config.source, "paths", ())),
            bad_rows=sum(chunk.bad_rows for chunk in chunks),
            bad_examples=tuple([text for chunk in chunks for text in chunk.bad_examples][:5]),
            repeats=RepeatsInfo.model_validate_json(json.dumps(repeats.to_dict())),
            moments=used,
            observed=observed,
            leaks=tuple(LeakInfo(feature=leak.feature, text=leak.text) for leak in counts.leaks()),
            repeated=counts.repeated_shares(),
            rows=RowsInfo(
                kept=self._config.keep_rows,
                files=tuple(self._source.files) if all(chunk.by_file for chunk in chunks) else (),
            ),
        )

    def _partitions(self) -> Partitions:
        workspace, config = self._workspace, self._config
        events = None if self._base is None else self._base.events()
        spilled = self._spill()
        partitions = Partitions(workspace.spill, spilled, self._schema, self._splitter, config.shard_samples, events)
        if partitions.span is not None:
            self._progress.say(f"times span {partitions.span}")
            partitions.span.check_split(config.split)
        return partitions

    def _spill(self) -> list[SpilledChunk]:
        finished = self._workspace.spilled()
        if finished is not None:
            return finished
        shares = log_shares(self._source, self._executor.readers)
        dealing = PartitionStage(
            source=self._source, folder=self._workspace.source, spill=self._workspace.spill, shares=shares
        )
        done = dealing.run(self._executor, self._progress)
        notes = [chunk.note for chunk in done if chunk.note]
        if not any(chunk.samples for chunk in done):
            raise DataError("; ".join([f"{', '.join(self._source.files[:3])}: no usable row in the input", *notes]))
        for note in notes:
            self._progress.say(note)
        self._workspace.finish_spilling(len(done))
        return done

    def _times(self, partitions: Partitions) -> tuple[int, int] | None:
        """The first of the log, and the last of all logs so far."""
        span, earlier = partitions.span, None if self._base is None else self._base.carried.times
        return None if span is None else (span.first, max(span.last, earlier[1] if earlier else span.last))

    def _faded(self, now: int) -> float:
        """What a lookup of the logs before is worth by now."""
        earlier = None if self._base is None else self._base.carried.times
        if earlier is None:
            return 1.0
        field = "data.vocabulary.half_life"
        return float(
            2.0 ** ((earlier[1] - now) / in_unit(self._config.vocabulary.half_life, self._schema.time_unit, field))
        )

    def _eviction_filter(self, name: str, now: int) -> EvictionFilter | None:
        rule = self._config.vocabulary.evict.get(name)
        if rule is None:
            return None
        idle = in_unit(rule.idle, self._schema.time_unit, f"data.vocabulary.evict.{name}.idle") if rule.idle else None
        return EvictionFilter(before=None if idle is None else now - idle, keep=rule.keep)

    def _vocabularies(
        self, counts: PartitionCounts, partitions: Partitions
    ) -> tuple[dict[str, Vocabulary], dict[str, VocabularyInfo]]:  # fmt: skip
        """Rank the counts of all partitions, after the values of the base."""
        ranked, infos, times = {}, {}, self._times(partitions)
        now = 0 if times is None else times[1]
        for place, name in enumerate(self._schema.vocabularies()):
            counted, limits = counts.values(place, name), self._config.vocabulary.limits(name)
            counted = counted.select("value", "count", pl.col("count").cast(pl.Float64).alias("recent"), "last")
            known = None
            if self._base is not None:
                known, counted = self._base.vocabulary(name, counted, self._faded(now))
            vocabulary = Vocabulary.of(counted, limits, known, self._eviction_filter(name, now))
            ranked[name] = vocabulary
            infos[name] = write_vocabulary(self._workspace.output, place, name, vocabulary)
        return ranked, infos

    def _carried(
        self, vocabularies: Mapping[str, Vocabulary], counts: PartitionCounts, partitions: Partitions, samples: int
    ) -> Carried:
        """Write what a data set that goes on from this one needs beside the samples."""
        output, found = self._workspace.output, {}
        for place, (name, vocabulary) in enumerate(vocabularies.items()):
            if vocabulary.counted is None:
                continue
            most = self._config.vocabulary.limits(name).candidates
            known = len(vocabulary.values) - vocabulary.values.null_count()
            forgotten = len(vocabulary.counted) - known - most
            if forgotten > 0:
                self._progress.say(
                    f"vocabulary {name!r}: the counts of {forgotten:,} rare values are forgotten, as "
                    f"data.vocabulary.candidates is {most:,}"
                )
            found[name] = write_counts(output, place, name, vocabulary.counted.head(known + most))
        frames = [*counts.events(), *([] if partitions.other_events is None else [partitions.other_events])]
        earlier = 0 if self._base is None else self._base.carried.samples
        return Carried(
            counts=found,
            events=tuple(write_events(output, number, frame) for number, frame in enumerate(frames)),
            samples=samples + earlier,
            times=self._times(partitions),
            clicks=self._clicks(),
        )

    def _clicks(self) -> CarriedClicks | None:
        if not isinstance(self._source, ClicksSource):
            return None
        return write_clicks(self._workspace.output, self._source.memory(self._workspace.source))

    def _check_splits(
        self, partitions: Partitions, shards: Mapping[str, Sequence[Shard]], labels: Mapping[str, LabelCount]
    ) -> None:
        """Refuse a training split of one class, and an empty split that was asked for."""
        samples = {name: sum(shard.samples for shard in found) for name, found in shards.items()}
        for name, count in labels.items():
            if not 0 < count.positives < count.known:
                which = f" with the label {name!r}" if self._schema.labels else ""
                raise DataError(
                    f"the training split has {count.known} samples{which}, {count.positives} of them positive; "
                    "expected both classes: check data.split"
                )
        for name in ("valid", "test"):
            if self._config.split.asks_for(name) and not samples[name]:
                asked = getattr(self._config.split, name)
                span = f"; the log spans {partitions.span}" if self._config.split.by == "time" else ""
                raise DataError(
                    f"no sample falls into the {name} split: check data.split.{name}, which is {asked!r}{span}"
                )
