"""How a row becomes the bytes of its home, and floats again. Which codecs there are, `KINDS` says."""

from __future__ import annotations

from stratarec.embedding.codecs.record import CodecConfig, CodecKind, RecordCodec
from stratarec.kernels.codec.kinds import KINDS

__all__ = ["KINDS", "CodecConfig", "CodecKind", "RecordCodec"]
