"""Evaluate the test split once at the end of a run, and write the result and the report.

The tested weights are from the checkpoint that is best on the validation split, or from the last
one without such a split.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stratarec.config.units import format_bytes
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.splits import SPLITS
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharded_engine import ShardedEngine
from stratarec.embedding.engine import Engine
from stratarec.embedding.lookup_engine import PARTS
from stratarec.errors import Interrupted
from stratarec.io.names import as_html
from stratarec.models import CTRModel
from stratarec.models.calibration import Calibration, LogitMap
from stratarec.models.metrics import METRICS, figures
from stratarec.planning.bytes import MEMORIES, Memory
from stratarec.planning.plan import Plan, compare_totals
from stratarec.progress import Progress
from stratarec.recipe import Recipe
from stratarec.reporting.metric_texts import show, speed_text
from stratarec.training.baseline.baselines import compare_with_baselines
from stratarec.training.evaluate import ScoredSamples, corrected_by, fit, fit_again, measured, score_split
from stratarec.training.explain.explain import for_report
from stratarec.training.resolve import exchange_remark
from stratarec.training.run.run_directory import REPORT, write_result
from stratarec.training.steps.cadence import Stopped
from stratarec.training.steps.state import TrainingState
from stratarec.training.torch_setup import peak_rss_bytes


class TrainResult(dict[str, Any]):
    """Content of ``result.json``, with a table for notebooks."""

    def _repr_html_(self) -> str:
        metrics = self.get("test") or self.get("valid") or {}
        split = "test" if self.get("test") else "validation"
        rows = [
            (f"{split} {metric.label}", show(metrics[name], 5))
            for name, metric in METRICS.items()
            if metric.label and metrics.get(name) is not None
        ]
        rows += [
            ("samples", f"{metrics['samples']:,} of the {split} split")
            if metrics
            else ("test", "no split to test on"),
            ("speed", f"{speed_text(self['samples_per_second'])} over {self['steps']:,} steps"),
            ("tables and state", format_bytes(self["table_bytes"])),
            ("peak memory", format_bytes(self["peak_rss_bytes"])),
            ("tested model", self["checkpoint"]),
            *([("model", f"refit, {refit['checkpoint']}")] if (refit := self.get("refit")) else []),
        ]
        return as_html("Result", rows)


@dataclass(frozen=True, kw_only=True)
class FinalEvaluation:
    """Tests a trained model, and writes the result and the report of the run."""

    run: Path
    recipe: Recipe
    dataset: Dataset
    model: CTRModel
    """Model that has the weights to test."""
    plan: Plan | None
    progress: Progress
    check: Callable[[], None]
    """Function that is called before each batch. It raises `Stopped` if the user asked to stop."""
    mesh: Mesh
    """Processes that test together. Only the first rank writes files."""
    figures: Callable[[], list[dict[str, float]]]
    """Function that returns the `RankFigures` of all ranks."""
    sharing: str
    """Text of one line about how the run shared its cores with other processes; empty if it did
    not.
    """

    def write(self, state: TrainingState, path: Path) -> dict[str, Any]:
        """Test the model, write the result and the report, and return the result.

        `path` is the checkpoint that has the tested weights.

        Raises
        ------
        Interrupted
            If the user stops the test. Nothing is written then.
        """
        result: dict[str, Any] = {
            "checkpoint": path.name,
            "steps": state.step,
            "samples_per_second": state.speed,
            "table_bytes": round(self._sum(self.model.embeddings.engine.nbytes)),
            "output_bytes": round(
                self._sum(self.model.embeddings.engine.bytes_by_part().get("outputs", 0))
            ),
            "memory": self._memory(),
            "parts": self._parts(),
            "caches": self._caches(),
            "network_bytes": sum(tensor.nbytes for tensor in self.model.network.state_dict().values()),
        }
        if self.mesh.ranks > 1:
            self._gather_reasons(state)
            result["ranks"] = self.figures()
            if exchange := exchange_remark(self.recipe, self.mesh):
                result["exchange"] = exchange
        outcome, maps, scored = self._outcome(path)
        result |= outcome
        split = "test" if "test" in scored else "valid"
        result["baselines"] = compare_with_baselines(
            self.dataset, split, scored.get(split), self.recipe.model
        )
        importance = self._importance(maps) if self.recipe.train.report else ""
        result["peak_rss_bytes"] = peak_rss_bytes()
        if self.sharing:
            result["sharing"] = self.sharing

        def write() -> None:
            write_result(self.run, result)
            page = self.run / REPORT
            if not self.recipe.train.report:
                page.unlink(missing_ok=True)  # the report of an earlier, shorter run
                return
            # Imported here, because the drawing library is slow to load.
            from stratarec.reporting.run_page import write_report

            plan = None if self.plan is None else self.plan.to_dict()
            recipes = (self.recipe.to_dict(), self.recipe.chosen)
            write_report(page, recipes, self.dataset, asdict(state), result, plan, importance)

        self.mesh.first(write)
        return result

    def _gather_reasons(self, state: TrainingState) -> None:
        """Collect from all ranks the reasons why a repeated run may not give the same bits; add
        them to `state`.
        """
        reasons, say = {tuple(entry) for entry in state.may_differ}, self.progress.say
        for rank, text in enumerate(self.mesh.rows.gather(json.dumps(state.may_differ).encode())):
            for step, reason in json.loads(text):
                if (step, reason) not in reasons:
                    state.may_differ.append((step, f"rank {rank}: {reason}"))
                    say(
                        f"rank {rank}: {reason}: from step {step:,} on another run "
                        "may differ in its last bits"
                    )

    def _outcome(self, path: Path) -> tuple[dict[str, Any], tuple[LogitMap, ...], dict[str, ScoredSamples]]:
        """Return the metrics of the test split, the calibration, and the scored samples of both
        splits.

        With a calibration, the metrics also include those of the validation split, and those
        without the calibration.
        """
        kinds = self.recipe.train.fitted
        samples = {"test": self._evaluated("test", path)} if self.dataset.samples("test") else {}
        if self.dataset.samples("valid") and (kinds != ("none",) or not samples):
            samples["valid"] = self._evaluated("valid", path)
        maps = fit(kinds, samples["valid"]) if "valid" in samples else ()
        plain = {split: self._figures(scored) for split, scored in samples.items()}
        if not maps:
            return ({"test": plain["test"]} if "test" in plain else {}), (), samples
        again: tuple[LogitMap, ...] = ()
        if self.recipe.train.refit:
            again = fit_again(
                kinds, ScoredSamples.joined(samples[name] for name in SPLITS[1:] if name in samples)
            )
        samples = {split: corrected_by(maps, scored) for split, scored in samples.items()}
        metrics = {split: self._figures(scored) for split, scored in samples.items()}
        curves = {"calibration": maps, "refit_calibration": again}
        stored = {name: [curve.to_dict() for curve in group] for name, group in curves.items()}
        return {**metrics, "uncalibrated": plain, **stored}, maps, samples

    def _importance(self, maps: Sequence[LogitMap]) -> dict[str, Any] | str:
        """Return the importance of features for the calibrated model, or a text that says why it
        was not measured.
        """
        split = next((name for name in ("test", "valid") if self.dataset.samples(name)), "")
        if not split:
            return "the data set has neither a test nor a validation split"
        if self.mesh.ranks > 1:
            return "several ranks trained the model"
        network = self.model.network
        network.calibration = Calibration(maps).to(self.model.device) if maps else None
        try:
            return for_report(self.model, self.dataset, split, self.recipe.train.precision, self.check)
        except Stopped:
            return "the measurement was stopped"
        finally:
            network.calibration = None

    def _figures(self, samples: ScoredSamples) -> dict[str, Any]:
        return figures(measured(self.dataset.schema.label_columns, samples))

    def _evaluated(self, split: str, path: Path) -> ScoredSamples:
        try:
            return score_split(
                self.model,
                self.dataset,
                split,
                precision=self.recipe.train.precision,
                progress=self.progress,
                check=self.check,
                mesh=self.mesh,
            )
        except Stopped as error:
            raise Interrupted(
                f"stopped in the final test; the trained model is {path}; repeat the command "
                "with --resume to test it"
            ) from error

    def _sum(self, number: float) -> float:
        """Return the sum of a number over all ranks."""
        return sum(value for (value,) in self.mesh.rows.gather_floats([number]))

    def _used(self) -> dict[Memory, int]:
        """Return the bytes that this rank uses in each memory."""
        by_memory = self.model.embeddings.engine.bytes_by_memory()
        return {name: by_memory.get(name, 0) for name in MEMORIES}

    def _parts(self) -> dict[str, int]:
        """Return the bytes that all ranks together use for each purpose."""
        by_part = self.model.embeddings.engine.bytes_by_part()
        return {name: round(self._sum(by_part.get(name, 0))) for name in PARTS}

    def _caches(self) -> list[dict[str, Any]]:
        """Return the mean distinct and missed rows per batch of each cached table, added over all
        ranks.
        """
        engine = self.model.embeddings.engine
        mine = engine.local if isinstance(engine, ShardedEngine) else engine
        by_table = {table.name: np.zeros(2) for table in engine.configs}
        for group in mine.tables if isinstance(mine, Engine) else ():
            if group.traffic.samples:
                for table, figures in zip(group.configs, group.traffic.mean_per_batch.T, strict=True):
                    by_table[table.name] += figures
        if not by_table:  # the model has no sparse features
            return []
        ranks = self.mesh.rows.gather_floats(np.concatenate(list(by_table.values())).tolist())
        sums = np.sum(ranks, axis=0).reshape(-1, 2).tolist()
        return [
            {"table": name, "distinct": distinct, "missed": missed}
            for name, (distinct, missed) in zip(by_table, sums, strict=True)
            if distinct
        ]

    def _memory(self) -> list[dict[str, Any]]:
        """Return planned and used bytes of each memory; an empty list without a plan."""
        if self.plan is None:
            return []
        used = {name: round(self._sum(size)) for name, size in self._used().items()}
        rows = compare_totals(self.plan, used)
        return [{**asdict(row), "defect": row.defect} for row in rows]
