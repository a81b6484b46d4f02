"""The model of a step on a cluster: identities of bytes, what grows with what, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from errors import refuses
from stratarec.config.units import parse_rate
from stratarec.distributed.measure import Collective, NetworkFigures
from stratarec.distributed.simulate import Cluster, ExchangeModel, MeasuredCosts, Workload, step_time, traffic
from stratarec.errors import ConfigError

CLUSTER = Cluster(hosts=4, ranks=8, inside_bytes_per_second=1e11, between_bytes_per_second=1e10)
WORK = Workload(batch=1024, features=26, width=64, lookups=30.0, flops=1e6, parameters=10**6)
CALIBRATION = MeasuredCosts(
    flops_per_second=1e12, row_bytes_per_second=1e11, inside=Collective(alpha=1e-5, alpha_peer=1e-6),
    between=Collective(alpha=1e-5, alpha_peer=1e-6),
)  # fmt: skip
FLAT, SPTT = ExchangeModel(), ExchangeModel(kind="sptt")

clusters = st.builds(
    Cluster, hosts=st.integers(1, 200), ranks=st.integers(1, 16), inside_bytes_per_second=st.just(1e11),
    between_bytes_per_second=st.just(1e10),
)  # fmt: skip
wires = st.sampled_from(["fp32", "fp16", "bf16", "int8"])


def test_bytes_are_those_of_the_formulas() -> None:
    rows, ids = 2 * 1024 * 26 * 64 * 4, 1024 * 30 * 4
    flat, sptt = traffic(CLUSTER, WORK, FLAT), traffic(CLUSTER, WORK, SPTT)
    assert flat.between == pytest.approx((rows + ids) * 24 / 32)
    assert flat.inside == pytest.approx((rows + ids) * 7 / 32)
    assert sptt.between == pytest.approx(flat.between)
    assert sptt.inside == pytest.approx(rows * 7 / 8 + ids * 7 / 32)
    assert (max(flat.between_peers), min(sptt.between_peers)) == (31, 3)
    half = traffic(CLUSTER, WORK, replace(FLAT, wire="bf16"))
    assert half.between == pytest.approx((rows / 2 + ids) * 24 / 32)
    int8 = traffic(CLUSTER, WORK, replace(FLAT, wire="int8"))
    assert int8.between == pytest.approx((rows / 256 * 70 + ids) * 24 / 32)  # scale, offset and power: two bytes each


@given(clusters, wires)
def test_sptt_moves_the_bytes_of_flat_between_hosts_and_none_within_one(cluster: Cluster, wire: str) -> None:
    flat, sptt = (traffic(cluster, WORK, replace(each, wire=wire)) for each in (FLAT, SPTT))
    assert sptt.between == pytest.approx(flat.between)
    if cluster.hosts == 1:
        assert flat.between == sptt.between == 0
        assert flat.inside == pytest.approx(sptt.inside)
        for exchange in (FLAT, SPTT):
            assert step_time(cluster, WORK, exchange, CALIBRATION).between == 0
    if cluster.ranks == 1:
        assert flat.inside == sptt.inside == 0
    if cluster.all_ranks == 1:
        assert step_time(cluster, WORK, FLAT, CALIBRATION).reduction == 0


@given(clusters, st.floats(1, 64))
def test_towers_divide_the_rows_between_hosts_by_their_compression(cluster: Cluster, ratio: float) -> None:
    plain, towers = traffic(cluster, WORK, SPTT), traffic(cluster, WORK, replace(SPTT, compression=ratio))
    ids = 1024 * 30 * 4 * (cluster.hosts - 1) / cluster.hosts
    assert towers.between - ids == pytest.approx((plain.between - ids) / ratio, abs=1e-3)
    assert towers.inside == plain.inside


@given(clusters, wires, st.sampled_from(["flat", "sptt"]))
def test_more_to_do_takes_longer_and_faster_machines_less(cluster: Cluster, wire: str, kind: str) -> None:
    exchange = ExchangeModel(kind=kind, wire=wire)  # type: ignore[arg-type]

    def seconds(work: Workload = WORK, where: Cluster = cluster, rates: MeasuredCosts = CALIBRATION) -> float:
        return step_time(where, work, exchange, rates).total

    base = seconds()
    for change in ({"batch": 2048}, {"features": 52}, {"flops": 2e6}, {"lookups": 60.0}, {"parameters": 2 * 10**6}):
        assert seconds(replace(WORK, **change)) >= base  # type: ignore[arg-type]
    assert seconds(replace(WORK, gradient_bytes=2)) <= base
    assert seconds(where=replace(cluster, between_bytes_per_second=2e10)) <= base
    assert seconds(where=replace(cluster, inside_bytes_per_second=2e11)) <= base
    assert seconds(where=replace(cluster, hosts=cluster.hosts + 1)) >= base - 1e-12 or exchange.kind == "sptt"
    assert seconds(rates=replace(CALIBRATION, flops_per_second=2e12)) < base


def test_gradients_of_a_towers_module_stay_in_its_host() -> None:
    slow = replace(CLUSTER, between_bytes_per_second=1e3)
    tower = replace(WORK, tower_parameters=10**9)
    plain, more = (step_time(slow, work, SPTT, CALIBRATION).reduction for work in (WORK, tower))
    assert more - plain == pytest.approx(2 * 10**9 / 4 * 4 * 7 / 8 / 1e11, rel=5e-3)  # and a latency


def test_figures_that_cannot_be_are_refused() -> None:
    refused = [
        (CLUSTER, "hosts", 0), (CLUSTER, "between_bytes_per_second", -1.0), (CLUSTER, "ranks", 0),
        (CLUSTER, "inside_bytes_per_second", float("nan")), (WORK, "batch", 0), (WORK, "tower_flops", -1.0),
        (CALIBRATION, "flops_per_second", 0.0), (SPTT, "compression", 0.5), (FLAT, "compression", 2.0),
        (CALIBRATION.inside, "alpha", -1e-6),
    ]  # fmt: skip
    for config, name, value in refused:
        with pytest.raises(ConfigError, match="expected"):
            replace(config, **{name: value})  # type: ignore[type-var]
    with refuses(ConfigError, "fp8"):
        traffic(CLUSTER, WORK, ExchangeModel(wire="fp8"))  # type: ignore[arg-type]


def test_a_network_that_was_measured_predicts_what_it_measured() -> None:
    found = NetworkFigures(alpha=1e-4, alpha_peer=1e-5, beta=1e-8, sharing=2)
    assert found.latency(3) == pytest.approx(1.3e-4)
    assert found.latency(0) == 0
    assert found.transfer(4e6, 4) == pytest.approx(1e-8 * 2 * 4e6 * 2 / 4)


@pytest.mark.parametrize(
    ("text", "rate"), [("100Mbit", 12.5e6), ("1Gbit", 125e6), ("200Gbit", 25e9), ("2.5Gbit", 312.5e6)]
)
def test_rates_are_bits_a_second(text: str, rate: float) -> None:
    assert parse_rate(text, "--network") == rate


@pytest.mark.parametrize("text", ["", "200", "200 Gbit", "200gbit", "200GB", "200Gb", "-1Gbit", "0Gbit", "1e3Gbit",
                                  "infGbit", "1Gbit/s", "٣Gbit", "9999999999Tbit"])  # fmt: skip
def test_rates_in_other_words_are_refused(text: str) -> None:
    with refuses(ConfigError, "--network"):
        parse_rate(text, "--network")
