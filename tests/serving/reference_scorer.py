"""Compute scores from the files of an export alone, without importing StrataRec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import xxhash
from safetensors.torch import load_file
from torch.nn import functional

WORD = (1 << 64) - 1


def hash_value(value: Any) -> int:
    if isinstance(value, str):
        return xxhash.xxh3_64_intdigest(value.encode(), seed=0)
    z = (value + 0x5DEECE66D) & WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


class ReferenceScorer:
    def __init__(self, folder: Path) -> None:
        self.about = json.loads((folder / "manifest.json").read_text())
        self.n = load_file(folder / "network.safetensors")
        self.tables = load_file(folder / "tables.safetensors")
        self.ids = {}
        for name, entry in self.about["vocabularies"].items():
            values = pq.read_table(folder / entry["path"])["value"].to_pylist()
            self.ids[name] = {
                value: place for place, value in enumerate(values) if place >= entry["tail_buckets"]
            }

    def score(self, row: dict[str, Any]) -> float:
        schema, dense, bags = self.about["schema"], [], {}
        for feature in schema["dense"]:
            x, spread = row[feature["name"]], self.about["moments"][feature["name"]]
            x = np.nan if x is None else np.float64(x)
            x = np.sign(x) * np.log1p(np.abs(x)) if feature["transform"] == "log1p" else x
            x = (x - spread["mean"]) / spread["deviation"] if feature["standardize"] else x
            dense.append(np.float32(0 if np.isnan(x) else x))
        places = {feature["name"]: feature for feature in schema["sparse"]}
        for name, feature in places.items():
            own = places.get(feature["of"], {}).get("vocabulary")
            vocabulary = feature["vocabulary"] or own or feature["of"] or name
            values = self.values(row[name], feature)
            bags[name] = (vocabulary, [self.id(value, vocabulary) for value in values])
        pooled = []
        for entry in self.about["pooled"]:
            rows = self.rows(*bags[entry["feature"]])
            pooled.append(rows.mean(0) if entry["pooling"] == "mean" and len(rows) else rows.sum(0))
        order, vectors = [entry["feature"] for entry in self.about["pooled"]], list(pooled)
        for s, entry in enumerate(self.about["sequences"]):
            rows, target = (
                self.rows(*bags[entry["feature"]]),
                pooled[order.index(places[entry["feature"]]["of"])],
            )
            vectors.append(
                self.sequence(f"poolings.{s}", rows, target) if len(rows) else torch.zeros_like(target)
            )
        x = torch.tensor(dense)
        own = {"dlrm": self.dlrm, "dcnv2": self.dcnv2}.get(self.about["model"]["kind"])
        logit = own(x, vectors) if own else self.of_fields(x, vectors, [*order, "history"][: len(vectors)])
        return float(
            1 / (1 + np.exp(-np.float64(self.calibrated(float(logit) + self.about["correction"][0]))))
        )

    def calibrated(self, x: float) -> float:
        for entry in self.about["calibration"]:
            k, v, s = entry["knots"], entry["values"], entry["slopes"]
            if x < k[0]:
                return v[0] + s[0] * (x - k[0])
            if x >= k[-1]:
                return v[-1] + s[1] * (x - k[-1])
            i = max(place for place, knot in enumerate(k) if knot <= x)
            return v[i] + (x - k[i]) * (v[i + 1] - v[i]) / (k[i + 1] - k[i])
        return x

    def values(self, cell: Any, feature: dict[str, Any]) -> list[Any]:
        if feature["kind"] == "single":
            return [] if cell is None else [cell]
        if feature["separator"]:
            cell = [part.strip(" \t\r\n") for part in (cell or "").split(feature["separator"])]
            cell = [part for part in cell if part]
        cell = [part for part in cell or [] if part is not None]
        return (
            cell[-feature["max_length"] :]
            if feature["kind"] == "history"
            else cell[: feature["max_length"]]
        )

    def id(self, value: Any, vocabulary: str) -> int:
        entry = self.about["vocabularies"][vocabulary]
        value = str(value) if entry["type"] == "String" else value
        return self.ids[vocabulary].get(value, hash_value(value) % entry["tail_buckets"])

    def rows(self, table: str, ids: list[int]) -> torch.Tensor:
        entry, stored = self.about["tables"][table], self.tables[table][ids]
        if entry["codec"] == "fp32":
            return stored
        found = [self.decoded(record.numpy(), entry) for record in stored]
        for place, row in enumerate(ids):
            if entry["float32_rows"] and (self.tables[f"@rows/{table}"] == row).any():
                found[place] = self.tables[f"@float32/{table}"][self.tables[f"@rows/{table}"] == row][0]
        return torch.stack(found) if found else torch.zeros(0, entry["width"])

    def decoded(self, record: np.ndarray[Any, Any], entry: dict[str, Any]) -> torch.Tensor:
        width, kind = entry["width"], entry["codec"]
        if kind in ("fp16", "bf16"):
            return (
                torch.from_numpy(record).view(torch.float16 if kind == "fp16" else torch.bfloat16).float()
            )
        half = (width + 1) // 2
        codes = (
            record[:width]
            if kind == "int8"
            else np.concatenate([record[:half] & 15, record[:half] >> 4])[:width]
        )
        last = record[width if kind == "int8" else half :].copy()
        scale, offset = last.view(np.float16 if entry["parameters"] == "fp16" else np.float32).astype(
            np.float32
        )
        return torch.from_numpy(offset + codes.astype(np.float32) * scale)

    def linear(self, x: torch.Tensor, n: str) -> torch.Tensor:
        return functional.linear(x, self.n[f"{n}.weight"], self.n.get(f"{n}.bias"))

    def mlp(self, x: torch.Tensor, n: str) -> torch.Tensor:
        for k in range(20):
            linear, norm = f"{n}.{k}", f"{n}.{k + 1}"
            if f"{linear}.weight" in self.n and f"{linear}.running_mean" not in self.n:
                x = self.linear(x, linear)
                if f"{norm}.running_mean" in self.n:
                    x = (x - self.n[f"{norm}.running_mean"]) / torch.sqrt(
                        self.n[f"{norm}.running_var"] + 1e-5
                    )
                    x = x * self.n[f"{norm}.weight"] + self.n[f"{norm}.bias"]
                x = x.relu()
        return x

    def dlrm(self, dense: torch.Tensor, vectors: list[torch.Tensor]) -> torch.Tensor:
        front = [self.mlp(dense, "score.bottom")] if len(dense) else []
        v = [*front, *vectors]
        if self.about["model"]["interaction"] == "cat":
            return self.linear(self.mlp(torch.cat(v), "score.top"), "score.out")
        products = torch.stack([v[i] @ v[j] for i in range(len(v)) for j in range(i)])
        return self.linear(self.mlp(torch.cat([*front, products]), "score.top"), "score.out")

    def dcnv2(self, dense: torch.Tensor, vectors: list[torch.Tensor]) -> torch.Tensor:
        x = c = torch.cat([dense, *vectors])
        for k in range(self.about["model"]["cross_layers"]):
            n = f"score.cross.layers.{k}"
            low = (
                self.linear(self.linear(c, f"{n}.0"), f"{n}.1") if self.about["model"]["low_rank"] else None
            )
            c = x * (self.linear(c, n) if low is None else low) + c
        if self.about["model"]["structure"] == "stacked":
            return self.linear(self.mlp(c, "score.deep"), "score.out")
        return self.linear(torch.cat([c, self.mlp(x, "score.deep")]), "score.out")

    def of_fields(self, dense: torch.Tensor, vectors: list[torch.Tensor], names: list[str]) -> torch.Tensor:
        model = self.about["model"]
        scaled = [x * self.n["score.fields.numbers.weight"][:, i] for i, x in enumerate(dense)]
        fields = torch.stack([*scaled, *vectors])
        first = model["kind"] in ("fm", "wide_deep", "deepfm")
        e = fields[:, :-1] if first else fields
        logit = self.n["score.out.bias"] + fields[:, -1].sum() if first else self.n["score.out.bias"]
        if model["kind"] == "lr":
            return logit + fields.sum()
        if model["kind"] in ("fm", "deepfm"):
            logit = logit + sum(e[i] @ e[j] for i in range(len(e)) for j in range(i))
        if model["kind"] == "fm":
            return logit
        if model["kind"] == "finalmlp":
            return logit + self.finalmlp(e, dict(zip(names, vectors, strict=True)))
        if first:
            return logit + self.mlp(e.flatten(), "score.deep") @ self.n["score.out.linear.weight"][0]
        assert model["kind"] == "din"
        return self.linear(self.mlp(e.flatten(), "score.deep"), "score.out")

    def finalmlp(self, e: torch.Tensor, vectors: dict[str, torch.Tensor]) -> torch.Tensor:
        model, found = self.about["model"], []
        d = model["embedding_dim"]
        for s in range(2):
            n, g = f"score.streams.{s}", torch.tensor(1.0)
            if model["gate_features"]:
                context = torch.cat([vectors[name][-d:] for name in model["gate_features"][s]])
                g = 2 * torch.sigmoid(self.linear(self.mlp(context, f"{n}.gate.0"), f"{n}.gate.1"))
            found.append(self.mlp(g * e[:, :d].flatten(), f"{n}.deep"))
        x, y = (part.chunk(model["fusion_heads"]) for part in found)
        forms = self.n["score.forms.weight"].view(len(x), len(x[0]), len(y[0]))
        pairs = [x[k] @ forms[k] @ y[k] for k in range(len(x))]
        return torch.cat(found) @ self.n["score.out.linear.weight"][0] + sum(pairs)

    def sequence(self, n: str, rows: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        history = self.about["model"]["history"]
        if history["pooling"] == "target_attention":
            t = t.expand_as(rows)
            given = torch.cat([t, rows, t - rows, t * rows], dim=1)
            return (self.linear(self.mlp(given, f"{n}.score"), f"{n}.out") * rows).sum(0)
        rows = rows + self.n[f"{n}.position"][: len(rows)].flip(0)
        for k in range(history["layers"]):
            b = f"{n}.blocks.{k}"
            q, key, v = self.linear(self.norm(rows, f"{b}.before"), f"{b}.project").chunk(3, dim=1)
            q, key, v = (x.reshape(len(rows), history["heads"], -1).transpose(0, 1) for x in (q, key, v))
            mixed = functional.scaled_dot_product_attention(q, key, v).transpose(0, 1).reshape(rows.shape)
            rows = rows + self.linear(mixed, f"{b}.join")
            fed = functional.gelu(self.linear(self.norm(rows, f"{b}.between"), f"{b}.feed.0"))
            rows = rows + self.linear(fed, f"{b}.feed.2")
        return rows.mean(0)

    def norm(self, x: torch.Tensor, n: str) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.n[f"{n}.weight"], self.n[f"{n}.bias"], 1e-5)
