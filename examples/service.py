"""A web service for an exported model.

    pip install fastapi uvicorn
    stratarec export runs/clicks -o exported
    uvicorn service:app  # with EXPORTED=exported in the environment, or a directory of that name

    curl localhost:8000/score -H 'content-type: application/json' \
        -d '{"columns": {"user": ["u1", "u1"], "item": ["i1", "i2"], "country": ["de", "de"],
                         "device": ["phone", "phone"], "price": [9.5, 20],
                         "item_history": [["i7"], ["i7"]]}}'
"""

from __future__ import annotations

import os
from typing import Any

import torch
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from stratarec import Scorer, StrataError

# Each request has its own thread. Several torch threads a request would wait for each other longer
# than a row takes.
torch.set_num_threads(1)
scorer = Scorer.open(os.environ.get("EXPORTED", "exported"))
app = FastAPI(title="clicks")


class Request(BaseModel):
    """Columns of equal length, with values as in the log."""

    columns: dict[str, list[Any]]


@app.post("/score")
def score(request: Request) -> dict[str, list[float]]:
    """Return a probability for each row."""
    try:
        return {"scores": scorer.score(request.columns).tolist()}
    except StrataError as error:  # the message names the column and the row
        raise HTTPException(status_code=422, detail=str(error)) from error


@app.get("/health")
def health() -> dict[str, Any]:
    """Return the labels, the kind of the model and the library that computes it."""
    return {"labels": list(scorer.labels), "model": scorer.manifest.model.kind, "runtime": scorer.runtime}
