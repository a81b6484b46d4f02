"""Check slots in GPU memory against float64, then compare their speed with torch and with a large
copy.

``python tools/gpu/kernels.py [OUT.jsonl [tiles]]`` writes one line of JSON per cell. Kernels use
the tiles of `DeviceSlots`; with ``tiles``, other tiles are timed, too. With ``SMALL=1`` (for
compute-sanitizer), or in Triton's interpreter, sizes are tiny and times meaningless.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

# before Triton: may set it up
from cells import DEVICE, GPU, MACHINE, SMALL, out_of_time, use_device_slots, write

import triton  # isort: skip

from stratarec.embedding import EmbeddingBagConfig, RowOptimizerConfig
from stratarec.embedding.codecs import RecordCodec
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.slots import Level0
from stratarec.embedding.slots.device import Tile
from stratarec.embedding.tables.base import group_layout
from stratarec.kernels.bags import BagBatch
from stratarec.kernels.runtime.accelerator import open_device
from stratarec.kernels.update import Gradients

RATE = 0.05


def clock(run):
    """Return median milliseconds."""
    if SMALL:
        return host_clock(run)
    return triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median")


def host_clock(run, rounds=10):
    """Return median milliseconds of the host, which waits for the device each time."""
    seconds = []
    for _ in range(1 if SMALL else rounds):
        began = time.perf_counter()
        run()
        if GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 1e3 * sorted(seconds)[len(seconds) // 2]


def power_law(count, rows, alpha, generator):
    """Draw ids as dynamicemb's benchmark does: 1 <= x < rows with density x ** -alpha."""
    x = torch.rand(count, generator=generator, device=DEVICE, dtype=torch.float64)
    gamma = 1 - alpha
    y = (x * (float(rows) ** gamma - 1) + 1) ** (1 / gamma)
    return y.clamp(max=rows - 1).to(torch.int64)


def copy_rate():
    size = 1 << 12 if SMALL else 1 << 30
    source, target = torch.randn(size // 4, device=DEVICE), torch.empty(size // 4, device=DEVICE)
    ms = clock(lambda: target.copy_(source))
    return 2 * size / ms / 1e6  # GB/s


class Case:
    """T tables of R rows of D floats, B samples, bags of L ids."""

    def __init__(self, name, T, R, D, B, L, alpha, kind="sgd"):
        if SMALL:
            T, R, B, L = min(T, 2), 97, 23, min(L, 3)
        self.name = name
        self.T = T
        self.R = R
        self.D = D
        self.B = B
        self.L = L
        self.kind = kind
        g = torch.Generator(device=DEVICE).manual_seed(1)
        n = T * B * L
        self.ids = (
            power_law(n, R, alpha, g) if alpha else torch.randint(0, R, (n,), generator=g, device=DEVICE)
        )
        self.rows = self.ids + torch.arange(T, device=DEVICE).repeat_interleave(B * L) * R
        names = [str(table) for table in range(T)]
        tables = [
            EmbeddingBagConfig(
                name=each, num_embeddings=R, embedding_dim=D, feature_names=(each,), pooling="sum"
            )
            for each in names
        ]
        firsts = [R * table for table in range(T)]
        layout = group_layout(
            tables, {each: D * place for place, each in enumerate(names)}, firsts, [R] * T
        )
        bags = BagBatch(
            values=self.ids.cpu().numpy(),
            offsets=None if L == 1 else np.arange(0, n + 1, L, dtype=np.int64),
            weights=None,
            batch=B,
            key=np.arange(T, dtype=np.int64),
        )
        optimizer = RowOptimizerConfig(kind=kind, learning_rate=RATE)
        self.slots = Level0(open_device(DEVICE)).slots(T * R, D, optimizer)
        self.weights = self.slots.views(0, T * R)["weight"]
        self.weights.copy_(torch.randn(T * R, D, generator=g, device=DEVICE) * 0.1)
        self.stage = lambda: self.slots.pack((self.slots.stage(layout, bags),)).staged[0]
        self.staged = self.stage()
        self.rule = optimizer.rule(0)
        self.out = torch.full((B, T * D), float("nan"), device=DEVICE)
        self.gradient = torch.randn(B, T * D, generator=g, device=DEVICE)
        self.n = n
        self.distinct = int(torch.unique(self.rows).numel())
        self.state_floats = {"sgd": 0, "rowwise_adagrad": 1, "adagrad": D, "adam": 2 * D}[kind]

    def forward(self, tile=None):
        if tile:
            self.slots._pool_tile = Tile(tile[0], self.slots._tile.columns, tile[1])
        self.slots.pool(self.staged, self.out)

    def forward_bytes(self, rows):
        """Return the bytes of the forward pass if `rows` rows are read from memory and the others
        from caches.
        """
        return 4 * self.D * (rows + self.T * self.B) + 4 * self.n

    def group(self):
        self.staged = self.stage()
        self.staged.list_rows(self.T * self.D)

    def regroup(self):
        """Sort and list the lookups again, without staging."""
        self.staged.lists.listed_for = -1
        self.staged.list_rows(self.T * self.D)

    def update(self, tile=None):
        if tile:
            self.slots._tile = Tile(tile[0], self.slots._tile.columns, tile[1])
        self.slots.update(self.staged, Gradients(self.gradient, ()), self.rule, None)

    def update_bytes(self):
        gradients = 4 * self.D * (self.n if self.L == 1 else self.T * self.B)
        return gradients + 2 * 4 * (self.D + self.state_floats) * self.distinct

    def check(self):
        """Return the largest relative errors of pooled vectors and of rows after one step, against
        float64.
        """
        self.forward()
        rows = self.weights
        want = rows[self.rows].double().view(self.T, self.B, self.L, self.D).sum(2)
        got = self.out.view(self.B, self.T, self.D).transpose(0, 1).double()
        first = float((want - got).norm() / want.norm())
        del want, got
        ids, place = torch.unique(self.rows, return_inverse=True)
        seen = torch.zeros(len(rows), dtype=torch.bool, device=DEVICE)
        seen[ids] = True
        unseen = torch.randperm(len(rows), device=DEVICE)[:200_000]
        unseen = unseen[~seen[unseen]]
        before, others = rows[ids].double(), rows[unseen].clone()
        bag = torch.arange(self.n, device=DEVICE) // self.L
        each = self.gradient.view(self.B, self.T, self.D).transpose(0, 1).reshape(-1, self.D)[bag].double()
        sums = torch.zeros_like(before).index_add_(0, place, each)
        del each, bag
        self.update()
        change = rows[ids].double() - before
        if self.kind == "sgd":
            want = -RATE * sums
        elif self.kind == "rowwise_adagrad":
            want = -RATE * sums / (sums.square().mean(1, keepdim=True).sqrt() + 1e-8)
        else:  # also Adam's first step
            want = -RATE * sums / (sums.abs() + 1e-8)
        return first, float((want - change).norm() / want.norm()), bool((rows[unseen] == others).all())


CASES = [
    # name, tables, rows, width, batch, bag, alpha, optimizer
    ("criteo_4096", 26, 400_000, 64, 4096, 1, 1.05, "rowwise_adagrad"),
    ("dynamicemb_sgd", 10, 1_677_721, 128, 104_857, 1, 1.05, "sgd"),
    ("dynamicemb_adam", 10, 1_677_721, 128, 104_857, 1, 1.05, "adam"),
    ("bags_uniform", 26, 1_000_000, 64, 16_384, 20, 0.0, "rowwise_adagrad"),
    ("bags_skewed", 26, 1_000_000, 64, 16_384, 20, 1.05, "rowwise_adagrad"),
    ("wide_uniform", 10, 1_000_000, 128, 32_768, 10, 0.0, "adagrad"),
    ("small_1000_bags", 1, 1_000_000, 64, 1000, 10, 0.0, "sgd"),
]
# Bags or rows of a program, warps.
TILES = [(4, 1), (8, 1), (8, 2), (8, 4), (16, 4)]
STEPS = [(8, 4), (4, 1), (4, 2), (2, 1), (8, 2)]


def torch_step(case):
    """Time `nn.EmbeddingBag` with sparse gradients and `optim.Adagrad`; extrapolate from at most
    four tables.
    """
    tables = min(case.T, 4)
    bags = [
        torch.nn.EmbeddingBag(case.R, case.D, mode="sum", sparse=True, device=DEVICE) for _ in range(tables)
    ]
    optimizer = torch.optim.Adagrad([bag.weight for bag in bags], lr=RATE)
    per = case.B * case.L
    ids = [case.ids[t * per : (t + 1) * per] for t in range(tables)]
    offsets = torch.arange(0, per, case.L, device=DEVICE)
    gradients = [case.gradient[:, t * case.D : (t + 1) * case.D].contiguous() for t in range(tables)]

    def forward():
        return [bag(each, offsets) for bag, each in zip(bags, ids, strict=True)]

    def step():
        torch.autograd.backward(forward(), gradients)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return case.T / tables * clock(forward), case.T / tables * clock(step)


def measure(case, peak):
    """Write the cells of a case; return whether its results are correct."""
    forward, update, untouched = case.check()
    if not (forward < 1e-5 and update < 1e-3 and untouched):
        write(cell="wrong", name=case.name, forward=forward, update=update, untouched=untouched)
        return False
    forward_ms = clock(case.forward)
    case.group()
    update_ms = clock(case.update)
    write(
        cell="kernels",
        name=case.name,
        kind=case.kind,
        lookups=case.n,
        distinct=case.distinct,
        forward_ms=forward_ms,
        forward_share=case.forward_bytes(case.n) / forward_ms / 1e6 / peak,
        forward_share_distinct=case.forward_bytes(case.distinct) / forward_ms / 1e6 / peak,
        stage_ms=host_clock(case.stage),
        group_ms=clock(case.regroup),
        update_ms=update_ms,
        update_share=case.update_bytes() / update_ms / 1e6 / peak,
        index_select_ms=clock(lambda: torch.index_select(case.weights, 0, case.rows))
        if case.n * case.D < 2**30
        else None,
        errors=[forward, update],
    )
    if case.kind in ("adagrad", "rowwise_adagrad") and not SMALL:
        try:
            forward_ms, step_ms = torch_step(case)
            write(cell="torch", name=case.name, forward_ms=forward_ms, step_ms=step_ms)
        except torch.OutOfMemoryError:
            write(cell="torch", name=case.name, out_of_memory=True)
    if "tiles" in sys.argv[2:]:
        write(
            cell="tiles",
            name=case.name,
            forward_ms={str(tile): clock(lambda: case.forward(tile)) for tile in TILES},
            update_ms={str(tile): clock(lambda: case.update(tile)) for tile in STEPS},
        )
    return True


def records(count=40_000):
    """Time encoding and decoding of rows, from and to pinned and pageable memory of the host."""
    width, rows = 64, 97 if SMALL else count
    optimizer = RowOptimizerConfig(kind="rowwise_adagrad", learning_rate=RATE)
    memory = Level0(open_device(DEVICE)).slots(rows, width, optimizer)
    places, keys = np.arange(rows, dtype=np.int64), np.zeros(rows, dtype=np.uint64)
    for kind in ("fp32", "int8", "int4"):
        codec = RecordCodec.of(CodecConfig(kind=kind), width, optimizer)
        shape = rows, codec.record_bytes
        buffers = {
            "pinned": memory.transfers.empty(*shape, dtype=torch.uint8).numpy(),
            "pageable": np.zeros(shape, np.uint8),
        }
        for name, buffer in buffers.items():
            encode_ms = host_clock(lambda: memory.encode(codec, places, buffer, places, keys, 0))
            decode_ms = host_clock(lambda: memory.decode(codec, buffer, places, places))
            gigabytes = buffer.nbytes / 1e6
            write(
                cell="records",
                codec=kind,
                memory=name,
                rows=rows,
                encode_ms=encode_ms,
                decode_ms=decode_ms,
                encode_GBps=gigabytes / encode_ms,
                decode_GBps=gigabytes / decode_ms,
            )


def main() -> int:
    use_device_slots()
    peak = copy_rate()
    write(cell="copy", GBps=peak, **MACHINE)
    wrong = 0
    for given in CASES:
        if out_of_time(given[0]):
            return 1
        wrong += not measure(Case(*given), peak)
        if GPU:
            torch.cuda.empty_cache()
    records()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
