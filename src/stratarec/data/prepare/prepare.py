"""Prepare a data set from raw logs, in three passes. An interrupted pass resumes where it stopped.

1. *spill*: source chunks are checked, typed and written to partitions by the hash of user or
   session (`workspace.py`). If the split of a row is known when it is read, its values are counted
   at the same time.
2. *count*: the remaining statistics of training rows are computed for each partition and added in a
   fixed order (`passes.py`). Then ids are assigned and groups are chosen.
3. *encode*: each partition becomes one shard of each split (`passes.py`).

Work on columns runs on all processors, and the next file or partition is read while the results of
the last one are written (`threads.py`). Memory holds either the chunks of two spilled files, or one
partition, the encoded rows of the partition before, and the vocabularies. All files are written to
``<path>.preparing`` (`workspace.py`). The last step renames the finished data set to `path`; until
then, an earlier data set stays there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import polars as pl

from stratarec.data.data_quality import hashed_share
from stratarec.data.dataset.compatibility import settings, settings_difference
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import (
    DATASET,
    MANIFEST,
    Carried,
    CarriedClicks,
    DatasetManifest,
    LabelCount,
    LeakInfo,
    MomentsInfo,
    Origin,
    Provenance,
    RowsInfo,
    Shard,
    VocabularyInfo,
)
from stratarec.data.dataset.writer import write_clicks, write_counts, write_events, write_vocabulary
from stratarec.data.dedup_groups import choose_groups, describe
from stratarec.data.durations import in_unit
from stratarec.data.prepare.base_dataset import BaseDataset
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.executor import Executor, SerialExecutor, revoke_leases
from stratarec.data.prepare.passes import Partitions, PartitionStatistics, ShardWriter
from stratarec.data.prepare.workspace import WORK, SpilledFile, SpillPass, Workspace, log_shares
from stratarec.data.sources import Source, open_source
from stratarec.data.sources.clicks import ClicksSource
from stratarec.data.sources.files import LogPathError, hash_logs
from stratarec.data.splits import Splitter
from stratarec.data.threads import map_threads
from stratarec.data.transforms import Moments
from stratarec.data.vocabulary import EvictionFilter, Vocabulary
from stratarec.errors import DataError, DatasetError
from stratarec.io.atomic import remove_leftovers, storage_errors
from stratarec.io.owned_directory import (
    check_replaceable,
    claim,
    directory_lock,
    directory_state,
    named_directory,
    recover_replacement,
    remove_directory,
    replace_directory_at,
    write_marker,
)
from stratarec.progress import Progress, SilentProgress

# Increase this number when a change of the code changes the data set that the same logs and
# settings give.
_VERSION = 8


def prepare(
    config: PrepareConfig,
    *,
    name: str = "",
    overwrite: bool = False,
    progress: Progress | None = None,
    executor: Executor | None = None,
    complete_base: bool = False,
) -> Dataset:
    """Prepare a data set, or open the existing one if neither settings nor logs have changed.

    Parameters
    ----------
    config : PrepareConfig
        The ``data`` section of a recipe.
    name : str
        Name of the data set; by default that of its directory.
    overwrite : bool
        Whether to replace a data set that was prepared from other logs or settings.
    progress : Progress, optional
        Receives the passes and their progress; by default nothing is shown.
    executor : Executor, optional
        Runs the pieces of each pass, for example on Ray (`ray_executor.on_ray`); by default in this
        process.
    complete_base : bool
        Whether held-out values of the base have rows, as in a model after `train.refit`.

    Raises
    ------
    DataError
        If the logs cannot be read as the recipe says. The message names the file, the row and the
        field.
    DatasetError
        If ``config.path`` contains a data set of other logs or settings, and `overwrite` is false.
    StorageError
        If an output cannot be written, or if ``config.path`` contains something other than a data
        set. Its content is then left unchanged.

    Examples
    --------
    >>> from stratarec import Recipe, prepare
    >>> dataset = prepare(Recipe.load("clicks.yaml").data)
    >>> dataset.name
    'clicks'
    """
    progress, executor = progress or SilentProgress(), executor or SerialExecutor()
    pipeline = PreparePipeline(config, name, progress, executor, complete_base=complete_base)
    with storage_errors(pipeline.final):
        return pipeline.run(overwrite)


class PreparePipeline:
    """One call of `prepare`: the checks before it, its passes in order, and the publication of its
    output.
    """

    def __init__(
        self,
        config: PrepareConfig,
        name: str,
        progress: Progress,
        executor: Executor,
        *,
        complete_base: bool,
    ) -> None:
        self.final = named_directory(config.path)
        self.config = config
        self.name = name or self.final.name
        self.progress = progress
        self.executor = executor
        self.work = self.final.with_name(f"{self.final.name}.preparing")
        try:
            self.source: Source = open_source(
                config.source, on_bad_row=config.on_bad_row, split=config.split
            )
        except LogPathError as error:
            raise DataError(f"data.source.paths: {error}") from error
        self.schema = self.source.schema
        config.vocabulary.check(self.schema)
        self.base = BaseDataset.of(config, self.schema, complete=complete_base)
        if self.base is not None and isinstance(self.source, ClicksSource):
            self.source.resume(self.base.clicks())
        self.splitter = Splitter(config.split, self.schema, self.source.files)

    def run(self, overwrite: bool) -> Dataset:
        there = self._look(overwrite)
        self._hash_logs()
        self.origin = self._origin()
        if there and not overwrite:
            return self._finished()
        claim(self.work, WORK)
        with directory_lock(self.work), nullcontext() if self.base is None else self.base.locked():
            if not overwrite and self.final.exists():  # another process has just finished it
                remove_directory(self.work)
                return self._finished()
            revoke_leases(self.work)
            remove_leftovers(self.work)
            self._work()
        return Dataset.open(self.final, verify="used")

    def _origin(self) -> Origin:
        """Return the inputs that determine the result. An interrupted run is resumed only if they
        are the same.
        """
        files = self.splitter.file_split
        return Origin(
            format=_VERSION,
            settings=settings(self.config),
            source=json.loads(json.dumps(self.source.fingerprint())),
            # The patterns of `data.split` are not compared: they may contain directories, which the
            # fingerprint omits.
            file_split=None if files is None else tuple(files.tolist()),
            base=None if self.base is None else self.base.fingerprint,
        )

    def _look(self, overwrite: bool) -> bool:
        """Return whether `path` has a data set; raise `StorageError` if it has anything else."""
        recover_replacement(self.final, DATASET, lambda path: (path / MANIFEST).is_file())
        if overwrite:
            check_replaceable(self.final, DATASET)
            if directory_state(self.final, DATASET) == "ours":
                # A data set in use is refused at the start, not only at the end.
                with directory_lock(self.final):
                    pass
        elif directory_state(self.final, DATASET) == "free" and self.final.exists():
            raise DatasetError(
                f"{self.final} exists and is not a prepared data set; name another data.path"
            )
        return self.final.exists()

    def _hash_logs(self) -> None:
        """Hash logs whose hashes are not cached, so that the contents of logs can be compared."""
        if self.source.files:
            self.progress.start("check", self.source.total_bytes, "B")
            hash_logs(self.source.files, self.progress.advance)
            self.progress.finish()

    def _finished(self) -> Dataset:
        if not (self.final / MANIFEST).is_file():
            raise DatasetError(
                f"{self.final} exists and is not a prepared data set; name another data.path"
            )
        dataset = Dataset.open(self.final)
        difference = self._difference(dataset)
        if difference:
            raise DatasetError(f"{difference}; name another data.path, or pass --overwrite")
        self.progress.say(f"{self.final} is up to date")
        return dataset

    def _difference(self, dataset: Dataset) -> str:
        """Return how the inputs of a data set differ from those of this call; empty if they are the
        same.
        """
        before = dataset.about.origin
        difference = settings_difference(self.origin.settings, before.settings)
        if difference is not None:
            return (
                f"{self.final} was prepared with data.{difference.field} = {difference.have!r}, "
                f"not {difference.want!r}"
            )
        if before.format != self.origin.format:
            return f"{self.final} was prepared by another version of StrataRec"
        if before.base != self.origin.base:
            return (
                f"{self.final} was prepared with {'another' if before.base else 'no'} data.vocabulary.base"
            )
        if (before.source, before.file_split) != (self.origin.source, self.origin.file_split):
            return f"{self.final} was prepared from logs with other content, {', '.join(dataset.about.paths[:3])}"
        return ""

    def _work(self) -> None:
        self.workspace = Workspace(
            self.work, self.origin, self.schema, self.splitter, self.config.vocabulary
        )
        resumed = self.workspace.open(self._estimate_partitions, self.progress.say)
        try:
            self._publish(self._manifest())
        except DatasetError as error:
            if not resumed:
                raise
            self.workspace.restart(str(error), self.progress.say)
            self.workspace.open(self._estimate_partitions, self.progress.say)
            self._publish(self._manifest())

    def _manifest(self) -> DatasetManifest:
        """Run or resume every pass, and return the manifest of the output."""
        workspace, config, schema = self.workspace, self.config, self.schema
        self.executor.begin(workspace.root, self.source.files if self.source.divisible else ())
        partitions = self._partitions()
        statistics = PartitionStatistics(
            folder=workspace.folder("counts"),
            partitions=partitions,
            config=config.vocabulary,
            repeats_counted=config.groups != "none" and bool(schema.session_keys),
        )
        statistics.run(self.executor, self.progress)
        vocabularies, infos = self._vocabularies(statistics)
        observed, repeats = statistics.moments(), statistics.repeats()
        moments = observed if self.base is None else self.base.moments()
        groups = choose_groups(config.groups, schema, repeats)
        for line in describe(groups or {}, schema, repeats):
            self.progress.say(line)
        writer = ShardWriter(
            folder=workspace.folder("encoded"),
            partitions=partitions,
            output=workspace.output,
            statistics=statistics,
            vocabularies=vocabularies,
            moments=moments,
            groups=groups,
            keep_rows=config.keep_rows,
            hash_share=hashed_share(schema, config.split, sum(file.samples for file in partitions.files)),
        )
        writer.run(self.executor, self.progress)
        shards, labels = writer.shards(), writer.labels()
        self._check_splits(partitions, shards, labels["train"])
        weights = writer.weights()
        if not weights["train"]:
            raise DataError(
                f"column {schema.weight!r}: every weight of the training split is 0, expected one above 0"
            )
        for split in (name for name, weight in weights.items() if shards[name] and not weight):
            self.progress.say(
                f"column {schema.weight!r}: every weight of split {split} is 0, so it gives no metric"
            )
        return DatasetManifest(
            name=self.name,
            columns=schema,
            groups=None
            if groups is None
            else {group: tuple(features) for group, features in groups.items()},
            splits=shards,
            positives={split: counts[schema.label_column].positives for split, counts in labels.items()},
            labels=labels if schema.labels else {},
            vocabularies=infos,
            carried=self._carried(writer, sum(shard.samples for shard in shards["train"])),
            about=self._about((moments, observed), writer),
        )

    def _about(self, moments: Sequence[Mapping[str, Moments]], writer: ShardWriter) -> Provenance:
        used, observed = ({name: MomentsInfo.of(m) for name, m in part.items()} for part in moments)
        files = writer.partitions.files
        return Provenance(
            origin=self.origin,
            paths=tuple(getattr(self.config.source, "paths", ())),
            bad_rows=sum(file.bad_rows for file in files),
            bad_examples=tuple([text for file in files for text in file.bad_examples][:5]),
            moments=used,
            observed=observed,
            leaks=tuple(LeakInfo(feature=leak.feature, text=leak.text) for leak in writer.leaks()),
            repeated=writer.repeated_shares(),
            rows=RowsInfo(
                kept=self.config.keep_rows,
                files=tuple(self.source.files) if all(file.by_file for file in files) else (),
            ),
        )

    def _partitions(self) -> Partitions:
        workspace, config = self.workspace, self.config
        events = None if self.base is None else self.base.events()
        spilled = self._spill()
        partitions = Partitions(
            workspace.spill, spilled, self.schema, self.splitter, config.shard_samples, events
        )
        if partitions.span is not None:
            self.progress.say(f"times span {partitions.span}")
            partitions.span.check_split(config.split)
        return partitions

    def _spill(self) -> list[SpilledFile]:
        finished = self.workspace.spilled()
        if finished is not None:
            return finished
        shares = log_shares(self.source, self.executor.readers)
        data_pass = SpillPass(
            source=self.source, folder=self.workspace.source, spill=self.workspace.spill, shares=shares
        )
        done = data_pass.run(self.executor, self.progress)
        notes = [note for file in done for note in file.notes]
        if not any(file.samples for file in done):
            raise DataError(
                "; ".join([f"{', '.join(self.source.files[:3])}: no usable row in the input", *notes])
            )
        for note in notes:
            self.progress.say(note)
        self.workspace.finish_spilling(len(done))
        return done

    def _times(self, partitions: Partitions) -> tuple[int, int] | None:
        """Return the first time of this log, and the last time of all logs so far. None if the log
        has no times.
        """
        span, earlier = partitions.span, None if self.base is None else self.base.carried.times
        return None if span is None else (span.first, max(span.last, earlier[1] if earlier else span.last))

    def _decay(self, now: int) -> float:
        """Return the factor by which the recent counts of the base have decayed until the time
        `now`.
        """
        earlier = None if self.base is None else self.base.carried.times
        if earlier is None:
            return 1.0
        half_life = in_unit(
            self.config.vocabulary.half_life, self.schema.time_unit, "data.vocabulary.half_life"
        )
        return float(2.0 ** ((earlier[1] - now) / half_life))

    def _eviction_filter(self, name: str, now: int) -> EvictionFilter | None:
        rule = self.config.vocabulary.evict.get(name)
        if rule is None:
            return None
        idle = (
            in_unit(rule.idle, self.schema.time_unit, f"data.vocabulary.evict.{name}.idle")
            if rule.idle
            else None
        )
        return EvictionFilter(before=None if idle is None else now - idle, keep=rule.keep)

    def _vocabularies(
        self, statistics: PartitionStatistics
    ) -> tuple[dict[str, Vocabulary], dict[str, VocabularyInfo]]:
        """Build the vocabularies: values of the base keep their ids, and new values are ranked by
        their counts.
        """
        times, names = self._times(statistics.partitions), list(self.schema.vocabularies())
        now, values, types = 0 if times is None else times[1], statistics.values(), statistics.value_types()

        def build(number: int) -> tuple[Vocabulary, VocabularyInfo]:
            name = names[number]
            vocabulary = self._vocabulary(name, values.pop(name), types[name], now)
            return vocabulary, write_vocabulary(self.workspace.output, number, name, vocabulary)

        built = map_threads(build, range(len(names)))
        return (
            {name: vocabulary for name, (vocabulary, _) in zip(names, built, strict=True)},
            {name: info for name, (_, info) in zip(names, built, strict=True)},
        )

    def _vocabulary(self, name: str, counted: pl.DataFrame, kind: pl.DataType, now: int) -> Vocabulary:
        """Build one vocabulary from the counts of its values, whose type is `kind`."""
        limits, base = self.config.vocabulary.limits(name), None
        if limits.kind == "count":
            counted = counted.cast({"value": kind})
            recent = pl.col("count").cast(pl.Float64).alias("recent")
            counted = counted.select("value", "count", "held_out", recent, "last")
        if self.base is not None:
            base, counted = self.base.vocabulary(name, counted, kind, self._decay(now))
        if limits.kind == "hash":
            return Vocabulary.hashed(counted, kind, limits.buckets, base)
        vocabulary = Vocabulary.rank(counted, limits, base, self._eviction_filter(name, now))
        more = None if self.base is None else self.base.held_out_values(name)
        if base is not None and more is not None and vocabulary.rows == base.rows:
            # Without new values, models of the base can be evaluated on this data set, also after a
            # refit.
            return vocabulary.with_held_out(more)
        return vocabulary

    def _carried(self, writer: ShardWriter, samples: int) -> Carried:
        """Write the state that a data set with this one as its base needs."""
        output, counts, partitions = self.workspace.output, {}, writer.partitions
        for number, (name, vocabulary) in enumerate(writer.vocabularies.items()):
            if vocabulary.counted is None:
                continue
            most = self.config.vocabulary.limits(name).candidates
            rows = len(vocabulary.values) - vocabulary.values.null_count()
            dropped = len(vocabulary.counted) - rows - most
            if dropped > 0:
                self.progress.say(
                    f"vocabulary {name!r}: the counts of {dropped:,} rare values are dropped, as "
                    f"data.vocabulary.candidates is {most:,}"
                )
            counts[name] = write_counts(output, number, name, vocabulary.counted.head(rows + most))
        frames = [*writer.events(), *([] if partitions.other_events is None else [partitions.other_events])]
        earlier = 0 if self.base is None else self.base.carried.samples
        return Carried(
            counts=counts,
            events=tuple(write_events(output, number, frame) for number, frame in enumerate(frames)),
            samples=samples + earlier,
            times=self._times(partitions),
            clicks=self._clicks(),
        )

    def _clicks(self) -> CarriedClicks | None:
        if not isinstance(self.source, ClicksSource):
            return None
        return write_clicks(self.workspace.output, self.source.memory(self.workspace.source))

    def _check_splits(
        self,
        partitions: Partitions,
        shards: Mapping[str, Sequence[Shard]],
        labels: Mapping[str, LabelCount],
    ) -> None:
        """Raise `DataError` if the training split has only one class, or if a configured split is
        empty.
        """
        samples = {name: sum(shard.samples for shard in parts) for name, parts in shards.items()}
        for name, count in labels.items():
            if not 0 < count.positives < count.known:
                which = f" with the label {name!r}" if self.schema.labels else ""
                raise DataError(
                    f"the training split has {count.known} samples{which}, {count.positives} of them "
                    "positive; expected both classes: check data.split"
                )
        for name in ("valid", "test"):
            if self.config.split.asks_for(name) and not samples[name]:
                asked = getattr(self.config.split, name)
                span = f"; the log spans {partitions.span}" if self.config.split.by == "time" else ""
                raise DataError(
                    f"the {name} split has no samples: check data.split.{name}, which is {asked!r}{span}"
                )

    def _estimate_partitions(self) -> int:
        return max(round(self.source.estimate_rows() / self.config.shard_samples), 1)

    def _publish(self, manifest: DatasetManifest) -> None:
        """Move the output to `path`, replacing an earlier data set."""
        output, about = self.workspace.output, manifest.about
        remove_leftovers(output)  # of tasks that died elsewhere
        manifest.write(output)
        write_marker(output, DATASET)
        Dataset.open(output, verify="used")
        old = replace_directory_at(output, self.final, DATASET)
        remove_directory(self.work)
        if old is not None:
            remove_directory(old)
        if about.bad_rows:
            self.progress.say(
                f"left out {about.bad_rows} bad rows, such as {'; '.join(about.bad_examples[:2])}"
            )
