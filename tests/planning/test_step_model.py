"""Test the model of a step: identities of bytes, monotonic costs, overlap of preparation and
training, and refused figures.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from errors import refuses
from stratarec.config.units import parse_rate
from stratarec.distributed.measure import Collective
from stratarec.errors import ConfigError
from stratarec.planning.bytes import RowShape
from stratarec.planning.machine import Cluster, DramTier, Machine, NetworkRates, Tiers, WorkCosts, _fitted
from stratarec.planning.step_model import (
    ExchangeModel,
    StepTime,
    StepWork,
    TableSeconds,
    exchange_bytes,
    reduction_seconds,
    step_time,
)

LATENCY = Collective(alpha=1e-5, alpha_peer=1e-6)
CLUSTER = Cluster(
    hosts=4,
    ranks=8,
    inside_bytes_per_second=1e11,
    between_bytes_per_second=1e10,
    inside=LATENCY,
    between=LATENCY,
)
WORK = StepWork(batch=1024, features=26, width=64, lookups=30.0, flops=1e6, parameters=10**6)
TIERS = Tiers(dram=DramTier(row_bytes_per_second=1e11))
MACHINE = Machine(tiers=TIERS, network=NetworkRates(flops_per_second=1e12), cluster=CLUSTER)
FLAT, SPTT = ExchangeModel(), ExchangeModel(kind="sptt")

clusters = st.builds(
    Cluster,
    hosts=st.integers(1, 200),
    ranks=st.integers(1, 16),
    inside_bytes_per_second=st.just(1e11),
    between_bytes_per_second=st.just(1e10),
    inside=st.just(LATENCY),
    between=st.just(LATENCY),
)
wires = st.sampled_from(["fp32", "fp16", "bf16", "int8"])


def test_bytes_follow_the_formulas() -> None:
    rows = 2 * 1024 * 26 * 64 * 4
    flat, sptt = exchange_bytes(CLUSTER, WORK, FLAT), exchange_bytes(CLUSTER, WORK, SPTT)
    assert flat.between == pytest.approx(rows * 24 / 32)
    assert flat.inside == pytest.approx(rows * 7 / 32)
    assert sptt.between == pytest.approx(flat.between)
    assert sptt.inside == pytest.approx(rows * 7 / 8)
    assert (max(flat.between_peers), min(sptt.between_peers)) == (31, 3)
    half = exchange_bytes(CLUSTER, WORK, replace(FLAT, wire="bf16"))
    assert half.between == pytest.approx(rows / 2 * 24 / 32)
    int8 = exchange_bytes(CLUSTER, WORK, replace(FLAT, wire="int8"))
    # scale, offset and power: two bytes each
    assert int8.between == pytest.approx(rows / 256 * 70 * 24 / 32)


@given(clusters, wires)
def test_sptt_sends_the_bytes_of_flat_between_hosts_and_none_within_a_host(
    cluster: Cluster, wire: str
) -> None:
    flat, sptt = (exchange_bytes(cluster, WORK, replace(each, wire=wire)) for each in (FLAT, SPTT))
    assert sptt.between == pytest.approx(flat.between)
    if cluster.hosts == 1:
        assert flat.between == sptt.between == 0
        assert flat.inside == pytest.approx(sptt.inside)
        for exchange in (FLAT, SPTT):
            assert step_time(WORK, replace(MACHINE, cluster=cluster), exchange=exchange).between == 0
    if cluster.ranks == 1:
        assert flat.inside == sptt.inside == 0
    if cluster.all_ranks == 1:
        assert reduction_seconds(cluster, WORK) == 0


@given(clusters, st.floats(1, 64))
def test_towers_divide_the_rows_between_hosts_by_their_compression(cluster: Cluster, ratio: float) -> None:
    plain = exchange_bytes(cluster, WORK, SPTT)
    towers = exchange_bytes(cluster, WORK, replace(SPTT, compression=ratio))
    assert towers.between == pytest.approx(plain.between / ratio)
    assert towers.inside == plain.inside


@given(clusters, wires, st.sampled_from(["flat", "sptt"]))
def test_more_work_takes_longer_and_faster_machines_take_less(
    cluster: Cluster, wire: str, kind: str
) -> None:
    exchange = ExchangeModel(kind=kind, wire=wire)  # type: ignore[arg-type]

    def seconds(work: StepWork = WORK, where: Cluster = cluster, flops: float = 1e12) -> float:
        machine = Machine(tiers=TIERS, network=NetworkRates(flops_per_second=flops), cluster=where)
        return step_time(work, machine, exchange=exchange).total

    base = seconds()
    for change in (
        {"batch": 2048},
        {"features": 52},
        {"flops": 2e6},
        {"lookups": 60.0},
        {"parameters": 2 * 10**6},
    ):
        assert seconds(replace(WORK, **change)) >= base  # type: ignore[arg-type]
    assert seconds(replace(WORK, gradient_bytes=2)) <= base
    assert seconds(where=replace(cluster, between_bytes_per_second=2e10)) <= base
    assert seconds(where=replace(cluster, inside_bytes_per_second=2e11)) <= base
    assert (
        seconds(where=replace(cluster, hosts=cluster.hosts + 1)) >= base - 1e-12 or exchange.kind == "sptt"
    )
    assert seconds(flops=2e12) < base


def test_gradients_of_a_towers_module_stay_on_its_host() -> None:
    slow = replace(CLUSTER, between_bytes_per_second=1e3)
    tower = replace(WORK, tower_parameters=10**9)
    plain, more = (reduction_seconds(slow, work) for work in (WORK, tower))
    assert more - plain == pytest.approx(2 * 10**9 / 4 * 4 * 7 / 8 / 1e11, rel=5e-3)  # and a latency


def test_impossible_figures_are_refused() -> None:
    refused = [
        (CLUSTER, "hosts", 0), (CLUSTER, "between_bytes_per_second", -1.0), (CLUSTER, "ranks", 0),
        (CLUSTER, "inside_bytes_per_second", float("nan")), (WORK, "batch", 0), (WORK, "tower_flops", -1.0),
        (MACHINE.network, "flops_per_second", 0.0), (SPTT, "compression", 0.5), (FLAT, "compression", 2.0),
        (LATENCY, "alpha", -1e-6),
    ]  # fmt: skip
    for config, name, value in refused:
        with pytest.raises(ConfigError, match="expected"):
            replace(config, **{name: value})  # type: ignore[type-var]
    with refuses(ConfigError, "fp8"):
        exchange_bytes(CLUSTER, WORK, ExchangeModel(wire="fp8"))  # type: ignore[arg-type]


def test_one_rank_sends_nothing_and_its_lookups_are_predicted_from_its_memory() -> None:
    alone = step_time(WORK, replace(MACHINE, cluster=Cluster()))
    assert (alone.reduction, alone.inside, alone.between) == (0, 0, 0)
    assert alone.tables.compute == pytest.approx(1024 * 30 * 64 * 4 * 3 / 1e11)
    assert alone.network == pytest.approx(1024 * 1e6 / 1e12)


def test_a_measured_network_predicts_its_own_measurement() -> None:
    result = Collective(alpha=1e-4, alpha_peer=1e-5)
    assert result.latency(3) == pytest.approx(1.3e-4)
    assert result.latency(0) == 0


@pytest.mark.parametrize(
    ("text", "rate"), [("100Mbit", 12.5e6), ("1Gbit", 125e6), ("200Gbit", 25e9), ("2.5Gbit", 312.5e6)]
)
def test_rates_are_in_bits_per_second(text: str, rate: float) -> None:
    assert parse_rate(text, "--network") == rate


@pytest.mark.parametrize(
    "text",
    [
        "",
        "200",
        "200 Gbit",
        "200gbit",
        "200GB",
        "200Gb",
        "-1Gbit",
        "0Gbit",
        "1e3Gbit",
        "infGbit",
        "1Gbit/s",
        "٣Gbit",
        "9999999999Tbit",
    ],
)
def test_invalid_rates_are_refused(text: str) -> None:
    with refuses(ConfigError, "--network"):
        parse_rate(text, "--network")


def test_the_fit_recovers_the_costs_of_its_samples() -> None:
    draws = np.random.default_rng(0)
    costs = np.array([1.0, 2e-4, 3e-5, 4e-8, 5e-8])
    counts = draws.random((20, 5)) * [1e-2, 0, 30, 1e5, 1e5] + [0, 1, 0, 0, 0]
    result = WorkCosts(**_fitted(np.column_stack([counts, counts @ costs])))
    assert [result.bytes_factor, result.step, result.table, result.lookup, result.row] == pytest.approx(
        costs, rel=1e-3
    )


def test_without_measurements_only_bytes_count() -> None:
    assert WorkCosts().seconds(0.5, 1e6, 1e6) == 0.5


def test_more_rows_take_more_bytes_of_level0() -> None:
    dram = DramTier(sequential_bytes_per_second=4e10, row_bytes_per_second=1e10, bytes=1 << 34)
    shape = RowShape(width=16, row_state=True, full_state=0)
    few, many = (dram.lookup_seconds(shape, 1000, distinct) for distinct in (10, 900))
    assert 0 < few < many


@pytest.mark.parametrize(
    ("busy_share", "lookahead", "expected"),
    [(1.0, 1, 1 + 2 + 4), (0.5, 1, 3.5), (0.25, 1, 3.0), (1.0, 0, 1 + 2 + 4 + 1.5), (1.0, 1, 20.0)],
)
def test_preparation_uses_the_cores_that_training_leaves(
    busy_share: float, lookahead: int, expected: float
) -> None:
    device = 20.0 if expected == 20 else 1.5
    tables = TableSeconds(compute=1.0, staging=4.0, device=device)
    step = StepTime(samples=8, tables=tables, network=2.0, lookahead=lookahead, busy_share=busy_share)
    assert step.total == expected
