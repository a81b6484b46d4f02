"""Training next to busy processes, and under a quota of processor time: DCN V2, batches of 256, on
two processors.

This library chooses how threads wait by itself. It is compared with plain torch with default
threads, and with torch at the best number of threads for each situation, which a user would have to
search. Torch uses the same network and one `nn.Embedding` with sparse gradients. Each contender is
a process, `python -m benchmarks.neighbours`, that trains on request; the contenders alternate.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.models import build_model
from stratarec.models.zoo.config import DCNv2Config
from stratarec.models.zoo.dcn import DCNv2Score
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.trainer import Trainer

BATCH, PROCESSORS = 256, 2
NEIGHBOURS = (1, 2, 4)
QUOTAS = (1.0, 1.5)
TARGETS = {
    **{f"fair_share_{count}": 0.8 for count in NEIGHBOURS},
    "quota_share_10": 0.9,
    "quota_share_15": 0.9,
}
_PERIOD = 0.1
_GROUP = "stratarec-neighbours"


def recipe(folder: Path, name: str, samples: int, **train: Any) -> Recipe:
    """Return the recipe of a run below `folder`, on the data set there."""
    source = {"kind": "synthetic", "samples": samples, "scale": 1.0, "max_rows": 100_000, "session_length": 1.0,
              "missing": 0.0, "seed": 7}  # fmt: skip
    data = {"path": str(folder / "data"), "source": source, "split": {"valid": 0.0, "test": 0.0}}
    settings = {"run": str(folder / name), "batch_size": BATCH, "report": False, **train}
    return Recipe.from_dict({"name": name, "data": data, "model": {"kind": "dcnv2"}, "train": settings})


class Plain:
    """The same model in plain torch."""

    def __init__(self, dataset: Dataset) -> None:
        rows = [dataset.table_rows()[feature.vocabulary] for feature in dataset.schema.sparse]
        self._names = [feature.name for feature in dataset.schema.sparse]
        self._starts = torch.tensor([0, *torch.tensor(rows).cumsum(0)[:-1].tolist()])
        config = DCNv2Config()
        self.table = nn.Embedding(sum(rows), config.embedding_dim, sparse=True)
        nn.init.normal_(self.table.weight, std=0.01)
        self.network = DCNv2Score(config, len(dataset.schema.dense), len(rows))
        self._dense = torch.optim.Adam(self.network.parameters(), lr=1e-3, fused=True)
        self._rows = torch.optim.Adagrad(self.table.parameters(), lr=0.02)

    def logits(self, batch: Batch) -> Tensor:
        ids = torch.stack([batch.sparse[name].values for name in self._names], dim=1)
        logits: Tensor = self.network(batch.dense, self.table(ids + self._starts))
        return logits

    def step(self, batch: Batch) -> None:
        loss = functional.binary_cross_entropy_with_logits(self.logits(batch), batch.label)
        for optimizer in (self._dense, self._rows):
            optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in (self._dense, self._rows):
            optimizer.step()
        loss.item()


class Orders(SilentProgress):
    """Progress that waits for orders between steps.

    An order is a number of seconds to train; the answer is the throughput of that time in samples
    per second.
    """

    def __init__(self, orders: IO[str], answers: IO[str]) -> None:
        self._orders = orders
        self._answers = answers
        self._until = -math.inf
        self._began = 0.0
        self._steps = 0

    def advance(self, amount: int, note: str = "") -> None:
        """Count a step; when the time of an order has passed, answer it and wait for the next
        order.
        """
        self._steps += 1
        now = time.perf_counter()
        if now < self._until:
            return
        self._answers.write(f"{BATCH * self._steps / (now - self._began)}\n")
        self._answers.flush()
        line = self._orders.readline()
        if not line:
            os._exit(0)
        self._began = time.perf_counter()
        self._steps = 0
        self._until = self._began + float(line)

    def say(self, message: str) -> None:
        """Print a message of the thread tuner."""
        print(message, file=sys.stderr)


def serve(kind: str, folder: Path, threads: int, name: str) -> None:
    """Train on request until the parent ends."""
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    orders = Orders(sys.stdin, reply)
    dataset = Dataset.open(str(folder / "data"))
    if kind == "ours":
        never = {"epochs": 10**6, "checkpoint": {"every_minutes": 0}}
        recipe_of_run = recipe(folder, name, dataset.samples("train"), **never)
        Trainer(recipe_of_run, dataset, orders).train(overwrite=True)
        return
    if threads:
        torch.set_num_threads(threads)
    plain, loader, epoch = Plain(dataset), Loader(dataset, "train", LoaderConfig(batch_size=BATCH)), 0
    while True:
        for batch in loader.epoch(epoch):
            plain.step(batch)
            orders.advance(1)
        epoch += 1


class Child:
    """A process that trains on request, started by a shell after it has run the command `first`."""

    def __init__(self, kind: str, folder: Path, first: str, *, threads: int = 0, name: str = "run") -> None:
        command = [sys.executable, "-m", "benchmarks.neighbours", kind, str(folder), str(threads), name]
        self.process = subprocess.Popen(
            ["sh", "-c", f'{first} && exec "$@"', "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _answer(self) -> float:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a child ended with code {self.process.wait()}")
        return float(line)

    def speed(self, seconds: float) -> float:
        """Train for `seconds` and return the samples per second."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


class Quota:
    """A limit on the processor time of some processes, as a number of processors.

    It is a control group. If none can be created, a thread stops and resumes the processes in
    periods of 100 ms.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self.folder = _create_group(share)
        self.kind = (
            "paused" if self.folder is None else "v2" if (self.folder / "cpu.max").exists() else "v1"
        )
        self._pids: list[int] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._pause, daemon=True)
        if self.folder is None:
            self._thread.start()

    @property
    def first(self) -> str:
        """Shell command that enters the control group."""
        return "true" if self.folder is None else f"echo $$ > {self.folder}/cgroup.procs"

    def watch(self, child: Child) -> None:
        """Apply the quota to a child process."""
        self._pids.append(child.process.pid)

    def _pause(self) -> None:
        """Stop and resume all processes by the clock, because their processor time is known only to
        10 ms.
        """
        while not self._end.is_set():
            for number, seconds in (
                (signal.SIGCONT, self._share / PROCESSORS),
                (signal.SIGSTOP, 1 - self._share / PROCESSORS),
            ):
                for pid in self._pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(_PERIOD * seconds)

    def close(self) -> None:
        """Remove the control group after its processes have ended."""
        self._end.set()
        if self.folder is not None:
            self.folder.rmdir()


def _create_group(share: float) -> Path | None:
    for top, limits in (
        ("/sys/fs/cgroup", {"cpu.max": f"{int(share * 100_000)} 100000"}),
        (
            "/sys/fs/cgroup/cpu",
            {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": f"{int(share * 100_000)}"},
        ),
    ):
        folder = Path(top) / _GROUP
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            try:
                for name, value in limits.items():
                    if not (folder / name).exists():  # no group of this version, or without this controller
                        raise FileNotFoundError(name)
                    (folder / name).write_text(value)
                return folder
            except OSError:
                folder.rmdir()
                raise
    return None


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` processes that each keep one processor busy."""
    children = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def alternate(
    children: Mapping[str, Child], *, settle: float, rounds: int, seconds: float
) -> dict[str, float]:
    """Return the median samples per second of each child, in alternation.

    StrataRec trains for `settle` seconds before the measurement.
    """
    for name, child in children.items():
        child.speed(settle if name == "ours" else 1)
    measured: dict[str, list[float]] = {name: [] for name in children}
    for round_ in range(rounds):
        for name in list(children) if round_ % 2 else list(reversed(children)):
            measured[name].append(children[name].speed(seconds))
    return {name: median(speeds) for name, speeds in measured.items()}


def gate(folder: Path, samples: int) -> None:
    """Check that plain torch gives the same logits, and that runs are bitwise equal however threads
    wait.
    """
    dataset = prepare(recipe(folder, "gate", samples).data)
    batch = next(iter(Loader(dataset, "train", LoaderConfig(batch_size=BATCH)).batches(0)))
    plain = Plain(dataset)
    ours = build_model(DCNv2Config(initial_logit="zero"), dataset.schema, dataset.table_rows())
    plain.network.load_state_dict(ours.network.score.state_dict())
    rows = [ours.embeddings.table(feature.vocabulary)["weight"] for feature in dataset.schema.sparse]
    with torch.no_grad():
        plain.table.weight.copy_(torch.cat(rows))
        torch.testing.assert_close(plain.logits(batch), ours(batch), rtol=1e-4, atol=1e-5)
    outcomes = []
    for number, sleep in enumerate((False, True)):
        recipe_of_run = recipe(folder, f"gate-{number}", samples, max_steps=30, threads=PROCESSORS)
        trainer = Trainer(recipe_of_run, dataset)
        trainer._session.threads._is_asleep = sleep
        trainer.train(overwrite=True)
        outcomes.append([weight.clone() for weight in trainer.parts.model.network.parameters()])
    if not all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True)):
        raise AssertionError("the result of a run depends on whether waiting threads sleep")


def contenders(stack: ExitStack, folder: Path, name: str, first: str) -> dict[str, Child]:
    """Start StrataRec, torch with default threads, and torch with each smaller number of
    threads.
    """
    children = {"ours": Child("ours", folder, first, name=name), "torch": Child("torch", folder, first)}
    for threads in range(1, PROCESSORS):
        children[f"torch {threads}"] = Child("torch", folder, first, threads=threads)
    for child in children.values():
        stack.callback(child.close)
    return children


def _pin_command(processors: Sequence[int]) -> str:
    return f"taskset -pc {','.join(map(str, processors))} $$ > /dev/null"


def _row(situation: str, speeds: Mapping[str, float]) -> dict[str, Any]:
    others = [speed for name, speed in speeds.items() if name.startswith("torch")]
    return {
        "situation": situation,
        "ours": speeds["ours"],
        "torch": speeds["torch"],
        "torch_best": max(others),
    }


def run(quick: bool) -> dict[str, Any]:
    """Measure alone, next to busy processes, and under quotas."""
    samples = 100_000 if quick else 300_000
    rounds = 1 if quick else 3
    timing: dict[str, Any] = {"settle": 4.0, "rounds": rounds, "seconds": 1.5}
    rows, metrics, kinds = [], {}, set()
    with tempfile.TemporaryDirectory() as place, ExitStack() as whole:
        folder = Path(place)
        gate(folder, samples)
        processors = sorted(os.sched_getaffinity(0))[:PROCESSORS]
        with ExitStack() as stack:
            children = contenders(stack, folder, "free", _pin_command(processors))
            quiet = _row("alone", alternate(children, **timing))
            rows.append(quiet)
            for count in NEIGHBOURS:
                with busy(count):
                    row = _row(f"beside {count}", alternate(children, **timing))
                rows.append(row)
                fair = PROCESSORS / (PROCESSORS + count)
                for name in ("ours", "torch", "torch_best"):
                    share = row[name] / (fair * quiet[name])
                    row[f"{name}_share"] = share
                    metrics[f"fair_share_{count}" + ("" if name == "ours" else f"_{name}")] = share
        single = Child("ours", folder, _pin_command(processors[:1]), name="single")
        whole.callback(single.close)
        for share in QUOTAS:
            with ExitStack() as stack:
                quota = Quota(share)
                stack.callback(quota.close)
                kinds.add(quota.kind)
                children = contenders(stack, folder, f"quota-{share}", quota.first)
                for child in children.values():
                    quota.watch(child)
                speeds = alternate({**children, "single": single}, **timing)
            row = _row(f"quota {share}", speeds) | {"one_processor": speeds["single"]}
            rows.append(row)
            for name in ("ours", "torch", "torch_best"):
                row[f"{name}_share"] = row[name] / (share * speeds["single"])
            for name, suffix in (("ours", ""), ("torch_best", "_torch_best")):
                metrics[f"quota_share_{round(10 * share)}{suffix}"] = row[f"{name}_share"]
    return {
        "config": {
            "batch": BATCH,
            "model": "dcnv2",
            "samples": samples,
            "quotas_by": sorted(kinds),
            "timing": timing,
            "targets": TARGETS,
        },
        "metrics": {**metrics, "ratio_torch_alone": quiet["ours"] / quiet["torch"]},
        "samples": {"rows": rows},
    }


def main(arguments: Sequence[str]) -> None:
    kind, folder, threads, name = arguments
    serve(kind, Path(folder), int(threads), name)


if __name__ == "__main__":
    main(sys.argv[1:])
