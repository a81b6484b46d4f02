"""Test a codec of another package: it is compiled into the kernels, trained, planned, exported and
scored.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from added import train_with
from errors import refuses
from stratarec.errors import ConfigError
from stratarec.kernels import swap
from stratarec.kernels.codec.kinds import KINDS

REGISTERS = """
import numpy as np
from numba import njit
from stratarec.kernels.codec.kinds import KINDS, Kind
from stratarec.kernels.codec.kinds.base import FP32_LIMIT, fits
from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.simd.bits import bits_float, float_bits

BYTES = {**BODY, "cache": False}

@njit(**BYTES)
def encode(form, values, start, records, at, base):
    # The upper three bytes of a float32.
    for d in range(np.uint64(form.width)):
        word = np.uint32(float_bits(values[start + d]))
        for byte in range(np.uint64(3)):
            records[at + np.uint64(3) * d + byte] = np.uint8(word >> np.uint32(8 * byte + 8))
    return fits(values, start, np.uint64(form.width), np.uint32(FP32_LIMIT))

@njit(**BYTES)
def decode(form, values, start, records, at):
    for d in range(np.uint64(form.width)):
        word = np.uint32(0)
        for byte in range(np.uint64(3)):
            word |= np.uint32(records[at + np.uint64(3) * d + byte]) << np.uint32(8 * byte + 8)
        values[start + d] = bits_float(word)

def plain_encode(values, word, wide):
    return values.view(np.uint8).reshape(-1, 4)[:, 1:].tobytes() if np.isfinite(values).all() else None

def plain_decode(stored, width, wide):
    kept = np.frombuffer(stored, np.uint8)[: 3 * width].reshape(-1, 3)
    return np.pad(kept, ((0, 0), (1, 0))).view(np.float32).reshape(-1)

FP24 = Kind(
    name="fp24", about="D numbers of 3 bytes, each the upper part of a float32", weight_bytes=lambda width: 3 * width,
    encode=encode, decode=decode, plain_encode=plain_encode, plain_decode=plain_decode, encode_rate=4e9,
    decode_rate=4e9, penalty=0.1,
)
KINDS.register("fp24", FP24)
"""
CHECKS = """
import sys
import numpy as np
from stratarec import Scorer
from stratarec.embedding.config import CodecConfig
from stratarec.kernels.codec import cpu
from stratarec.recipe import _adapter
from stratarec.testing import check_codec
from stratarec.training.export.export import export
from stratarec.training.run.open_run import open_run

assert not cpu.encode.stats.cache_path
check_codec(CodecConfig(kind="fp24"), error=lambda rows: np.maximum(2.0**-15 * np.abs(rows), 1e-40))
with open_run(sys.argv[1] + "/run") as trained:
    codecs = {placed.codec.kind for placed in trained.plan.tables if placed.tier != "level0"}
    export(trained, Path(sys.argv[1]) / "export")
scorer = Scorer.open(sys.argv[1] + "/export")
columns = scorer.manifest.columns
frame = {feature.name: [1, 2] for feature in (*columns.dense, *columns.sparse)}
print(json.dumps([sorted(codecs), scorer.score(frame).tolist(), result["test"]["auc"]]))
assert "fp24" in json.dumps(_adapter().json_schema())
assert "upper part of a float32" in (Path(sys.argv[1]) / "export" / "README.txt").read_text()
"""
CHANGES = {
    "data.source.scale": 0.05,
    "data.vocabulary": {"min_count": 1, "tail_buckets": 4},
    "model.embedding_dim": 16,
    "train.max_steps": 60,
    "train.batch_size": 32,
    "memory": {"precision": "fp24", "lookahead": 0, "cache": {"fraction": 0.05, "ways": 8}},
}


@pytest.mark.slow
def test_a_codec_of_a_package_is_trained_and_exported(tmp_path: Path) -> None:
    codecs, scores, auc = json.loads(
        train_with(REGISTERS, tmp_path, json.dumps(CHANGES), CHECKS).splitlines()[-1]
    )
    assert codecs == ["fp24"]
    assert all(0 < score < 1 for score in scores)
    assert auc > 0.55


def test_a_codec_is_refused_once_kernels_contain_the_others() -> None:
    assert swap
    with refuses(ConfigError, "late codec kernels"):
        KINDS.register("late", KINDS["int8"])
