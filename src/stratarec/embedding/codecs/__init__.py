"""How a row becomes the bytes of its home, and floats again."""

from __future__ import annotations

from stratarec.embedding.codecs.config import CodecConfig
from stratarec.embedding.codecs.record import RecordCodec

__all__ = ["CodecConfig", "RecordCodec"]
