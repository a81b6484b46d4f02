"""Run the same commands with two source trees and compare metrics, scores, weights and tables to the bit.

    python tools/same_bits.py --old ../old --new . --keep /tmp/same_bits

Each tree runs every case in folders of its own, by ``PYTHONPATH=<tree>/src`` and this interpreter. What is compared is
what a change of layout leaves: numbers of ``result.json``, columns of scores, and the tensors of an export by name.
With ``--keep`` the results of the old tree are written there and taken from there the next time; those of the new tree
are always made anew. The exit code is 0 where everything is equal.

Removed when the issue that asks for it is done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

Found = dict[str, NDArray[Any]]
ROOT = Path(__file__).resolve().parents[1]
LONGEST_SECONDS = 3600
"""Of a command."""
DTYPES = {"F32": np.float32, "F64": np.float64, "F16": np.float16, "I64": np.int64, "I32": np.int32, "U8": np.uint8}
SCORE = """
import sys
import numpy as np
import polars as pl
from stratarec import Scorer
export, frame, output = sys.argv[1:]
np.save(output, Scorer.open(export).score(pl.read_parquet(frame)))
"""


class Absent(Exception):
    """A log that is not here."""


@dataclass(frozen=True)
class Bench:
    """A source tree and the folder that one case works in."""

    tree: Path
    folder: Path
    data: Path
    kernels: Path
    """Where compiled kernels are kept."""

    def log(self, name: str) -> Path:
        """A real log."""
        path = self.data / name
        if not path.exists():
            raise Absent(f"no {path}")
        return path

    def start(self, *words: object, ranks: int = 1) -> subprocess.Popen[str]:
        """``stratarec`` with these words, by `ranks` processes."""
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        module = ["-m", *(launcher if ranks > 1 else []), "stratarec"]
        return self._start([sys.executable, *module, *map(str, words)])

    def run(self, *words: object, ranks: int = 1) -> None:
        """The same, waited for."""
        self._wait(self.start(*words, ranks=ranks))

    def script(self, text: str, *words: object) -> None:
        """A script with the tree's package."""
        self._wait(self._start([sys.executable, "-c", text, *map(str, words)]))

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.tree / "src"),
            "NUMBA_CACHE_DIR": str(self.kernels),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        with (self.folder / "output.txt").open("a") as file:
            return subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=file, stderr=subprocess.STDOUT, text=True
            )

    def _wait(self, process: subprocess.Popen[str]) -> None:
        if process.wait(LONGEST_SECONDS):
            last = (self.folder / "output.txt").read_text().strip().splitlines()[-15:]
            raise SystemExit(f"{self.tree}: {' '.join(map(str, process.args))}\n" + "\n".join(last))

    def recipe(self, name: str, *fields: str, prepare: bool = True) -> list[str]:
        """The recipe that comes with the tree, prepared: its file and fields, for `run`."""
        self.run("init", "--recipe", name, "-o", f"{name}.yaml")
        words = [f"{name}.yaml", *fields]
        if prepare:
            self.run("prepare", "-q", *words)
        return words

    def results(self, run: str, *logs: object, frame: Path | None = None) -> Found:
        """Everything of a run that must stay: metrics, scores, weights, tables; also scores of raw logs and frames."""
        path, place = self.folder / run, self.folder / f"{run}-out"
        place.mkdir()
        test = json.loads((path / "result.json").read_text())["test"]
        found = {f"{run}: metrics {name}": np.asarray(value) for name, value in numbers("", test)}
        self.run("predict", "-q", run, "-o", place / "test.parquet")
        if logs:
            self.run("predict", "-q", run, *logs, "-o", place / "log.parquet")
        for file in sorted(place.glob("*.parquet")):
            # Logs lie in a folder of each tree.
            columns = pl.read_parquet(file).drop("file", strict=False)
            found |= {f"{run}: {file.stem} {name}": columns[name].to_numpy() for name in columns.columns}
        self.run("export", "-q", run, "-o", place / "export")
        for file in sorted((place / "export").glob("*.safetensors")):
            found |= {f"{run}: {file.stem} {name}": values for name, values in tensors(file)}
        if frame is not None:
            self.script(SCORE, place / "export", frame, place / "scorer.npy")
            found[f"{run}: Scorer"] = np.load(place / "scorer.npy")
        return found


def numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number of nested JSON data, by its path."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (int, float)):
        yield name, value


def tensors(path: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Tensors of a safetensors file; those of types that numpy has not, as bytes."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:begin]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield name, np.frombuffer(content[begin + first : begin + last], DTYPES.get(entry["dtype"], np.uint8))


def every(**fields: object) -> list[str]:
    """Fields of the section ``train``, with what all cases share."""
    shared = {"report": "false", "log_every": 10, "threads": 2, "checkpoint.every_minutes": 0}
    return [f"train.{name}={value}" for name, value in {**shared, **fields}.items()]


def demo(bench: Bench) -> Found:
    """The made-up log: float32 tables in DRAM, two threads; then from its weights with Adam, bf16 and clipping."""
    words = bench.recipe("demo", "data.source.samples=30000", *every(batch_size=512, eval_every=20))
    bench.run("train", "-q", *words, "train.run=plain", "train.calibration=platt")
    changes = every(batch_size=256, max_steps=60, clip_norm=1, clip_rows="true", precision="bf16")
    changes += ["train.embedding.kind=adam", "train.embedding.learning_rate=0.001", "train.average.decay=0.9"]
    bench.run("train", "-q", *words, *changes, "train.run=adam")
    return bench.results("plain") | bench.results("adam")


def frappe(bench: Bench) -> Found:
    """Adam on all rows at every step, clipping, dropout; scored from raw files and by `Scorer`."""
    files = [bench.log(f"frappe_x1/{split}.parquet") for split in ("train", "valid", "test")]
    fields = [f"data.source.paths=[{','.join(map(str, files))}]", *every(run="run", epochs=2, max_steps=60)]
    bench.run("train", "-q", *bench.recipe("frappe_x1", *fields))
    return bench.results("run", files[2], frame=files[2])


def globo(bench: Bench) -> Found:
    """Clicks; int8 rows in a log on disk under a small cache, staged ahead; killed, then resumed."""
    log = pl.scan_parquet(bench.log("globo_clicks.parquet")).filter(pl.col("user_id") % 60 == 0)
    log.sink_parquet(bench.folder / "clicks.parquet")
    # So wide, so small a batch and so little DRAM that articles go to the log; a given fraction, as what a planner
    # chooses may change.
    fields = ["data.source.paths=[clicks.parquet]", "data.vocabulary.min_count=1", "model.embedding_dim=128"]
    fields += every(run="run", batch_size=64, max_steps=150, eval_every=75)
    fields += [f"train.{each}.schedule.total_steps=150" for each in ("dense", "embedding")]
    memory = ["precision=int8", "state=bf16", "lookahead=2", "dram=8200000", "block={path: rows, budget: 64MiB}"]
    memory += ["cache.fraction=0.3"]
    fields += [f"memory.{each}" for each in memory]
    words = ["-q", *bench.recipe("globo", *fields), "train.checkpoint.every_steps=10"]
    process = bench.start("train", *words)
    while process.poll() is None and len(list(bench.folder.glob("run/checkpoints/step-*"))) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise SystemExit(f"{bench.tree}: globo ended before it was killed; see {bench.folder / 'output.txt'}")
    bench.run("train", *words, "--resume")
    if not any((bench.folder / "rows").iterdir()):
        raise SystemExit(f"{bench.tree}: globo has no table in the log")
    return bench.results("run")


def trivago(bench: Bench) -> Found:
    """Deduplicated histories under a transformer, then under target attention with int8 rows; both by `Scorer`."""
    log = pl.read_parquet(bench.log("trivago_impressions.parquet")).head(60_000)
    log.write_parquet(bench.folder / "log.parquet")
    frame = log.tail(2_000)
    shown = [frame["item_id"].to_list()[max(row - row % 7, 0) : row] for row in range(len(frame))]
    frame.with_columns(pl.Series("history", shown, dtype=pl.List(log["item_id"].dtype))).write_parquet(
        bench.folder / "frame.parquet"
    )
    words = bench.recipe("trivago", "data.source.paths=[log.parquet]", *every(batch_size=512, max_steps=80))
    bench.run("train", "-q", *words, "train.run=transformer", "model.history.pooling=transformer")
    tiered = ["memory.precision=int8", "memory.cache.fraction=0.1", "model.history.pooling=target_attention"]
    bench.run("train", "-q", *words, "train.run=din", *tiered)
    raw = ["log.parquet", "--history", "log.parquet"]
    frame_path = bench.folder / "frame.parquet"
    return bench.results("transformer", *raw, frame=frame_path) | bench.results("din", frame=frame_path)


def hot(bench: Bench) -> Found:
    """Hot rows with batches of their own: proportional and adaptive."""
    fields = ["data.source.samples=30000", "data.source.scale=0.02", *every(batch_size=256, epochs=2, max_steps=120)]
    fields += ["memory.precision=int8", "memory.cache.fraction=0.1", "hot.budget=256KiB"]
    words, found = bench.recipe("demo", *fields), {}
    for kind in ("proportional", "adaptive"):
        bench.run("train", "-q", *words, f"hot.batches={kind}", f"train.run={kind}")
        found |= bench.results(kind)
    return found


def ranks(bench: Bench) -> Found:
    """Two ranks: tables in float32, rows of int8 tables in two portions, and a tower a host."""
    fields = ["data.source.samples=20000", *every(batch_size=512, threads=1, max_steps=40)]
    words, found = bench.recipe("demo", *fields), {}
    halves = [[f"C{number}" for number in numbers_of] for numbers_of in (range(1, 14), range(14, 27))]
    towers = f"model.towers.plan={json.dumps(halves)}"
    tiered = ["memory.precision=int8", "memory.cache.fraction=0.1", "memory.lookahead=2"]
    sides: dict[str, list[str]] = {
        "flat": ["distributed.sharding=table"],
        "rows": [*tiered, "distributed.sharding=row", "distributed.wire=bf16", "train.portions=2"],
        "towers": [*tiered, towers, "distributed.hosts=2", "distributed.exchange=sptt"],
    }
    for name, changes in sides.items():
        bench.run("train", "-q", *words, *changes, f"train.run={name}", ranks=2)
        found |= bench.results(name)
    return found


CASES: dict[str, Callable[[Bench], Found]] = {
    each.__name__: each for each in (demo, frappe, globo, trivago, hot, ranks)
}


def sources_hash(tree: Path) -> str:
    """Names the folder of compiled kernels: Numba itself sees only changes of the file of the outermost one."""
    files = sorted((tree / "src").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def results_of(name: str, tree: Path, kept: Path, data: Path, *, again: bool) -> Found:
    """What a case gives with a tree; taken from `kept` unless it is to be made `again`."""
    file = kept / f"{name}.npz"
    if file.exists() and not again:
        return dict(np.load(file))
    folder = kept / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    used = cpu_seconds()
    found = CASES[name](Bench(tree, folder, data, kept.parent / f"kernels-{sources_hash(tree)}"))
    print(f"  {name}, {tree}: {len(found)} results, {cpu_seconds() - used:.0f} processor seconds", flush=True)
    np.savez(file, **found)  # type: ignore[arg-type]
    shutil.rmtree(folder)
    return found


def cpu_seconds() -> float:
    """Of all children so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def differences(old: Found, new: Found) -> Iterator[str]:
    """A line for each result that is not the same to the bit."""
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            yield f"{name}: only in the {'old' if name in old else 'new'} tree"
            continue
        one, other = old[name], new[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            yield f"{name}: {one.dtype}{list(one.shape)}, now {other.dtype}{list(other.shape)}"
        elif one.tobytes() != other.tobytes():
            differ = np.atleast_1d(one != other)
            most = np.abs(np.atleast_1d(one).astype(float) - np.atleast_1d(other).astype(float)).max()
            yield f"{name}: {differ.sum()} of {differ.size} differ, by at most {most:.3g}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="a source tree")
    parser.add_argument("--new", type=Path, help="the other; without it only the old one runs")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--keep", type=Path, help="folder for results; those of the old tree are used again")
    default = Path(os.environ.get("STRATAREC_TEST_DATA", ROOT.parent / "shared" / "data"))
    parser.add_argument("--data", type=Path, default=default, help=f"the real logs (default: {default})")
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        kept, data = (options.keep or Path(temporary)).resolve(), options.data.resolve()
        for name in options.only:
            try:
                old = results_of(name, options.old.resolve(), kept / "old", data, again=False)
                if options.new is None:
                    continue
                new = results_of(name, options.new.resolve(), kept / "new", data, again=True)
            except Absent as absent:
                print(f"{name}: skipped, {absent}", flush=True)
                continue
            lines = list(differences(old, new))
            wrong += bool(lines)
            print(f"{name}: {len(old)} results, " + (f"{len(lines)} differ" if lines else "all equal"), flush=True)
            print("".join(f"  {line}\n" for line in lines[:20]), end="", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
