"""Test which networks may run as a CUDA graph. The graphs themselves need a GPU (`training/test_gpu.py`)."""

from __future__ import annotations

import device_jobs
import pytest
import torch

from stratarec.models.device_graph import NetworkGraph, _can_be_captured

CAPTURED = {"dlrm", "dcnv2", "deepfm"}


@pytest.mark.parametrize("name", [*device_jobs.KINDS, "towers", "dropout and normalization"])
def test_only_networks_with_the_same_kernels_each_step_are_captured(name: str) -> None:
    model, _ = device_jobs.built(device_jobs.CASES[name])
    assert _can_be_captured(model.network) == (name in CAPTURED)
    model.embeddings.close()


def test_on_the_cpu_a_network_is_called_directly() -> None:
    model, _ = device_jobs.built(device_jobs.CASES["dlrm"])
    graph, pooled = NetworkGraph(), torch.zeros(2, 1, requires_grad=True)
    assert not graph.applies(model.network, pooled)
    model.embeddings.close()
