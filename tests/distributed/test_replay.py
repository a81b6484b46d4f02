"""Test the replay of a cluster that is not present: results match real processes, and step times
follow from links and cores.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from distributed.ranks import Ranks
from distributed.test_runs import make_config
from distributed.test_towers import make_recipe

from benchmarks.replay import Piece, Recording, play, record, train
from errors import refuses
from recipes import prepared
from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.measure import Collective, EchoChannel
from stratarec.distributed.mesh import Mesh
from stratarec.errors import ConfigError, TrainingError
from stratarec.planning.machine import Cluster
from stratarec.recipe import Recipe
from stratarec.training import forecast
from stratarec.training.forecast import predict_exchanges, predict_step, rank_pipeline, rank_seconds

STEPS = 3


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a prepared data set whose features repeat in sessions."""
    root = tmp_path_factory.mktemp("replay")
    prepared(Recipe.from_dict(make_config(root)).data)
    return root


def losses(mesh: Mesh, recipe: Recipe) -> list[float]:
    pipeline = rank_pipeline(recipe, Dataset.open(recipe.data.path), mesh)
    with closing(pipeline.model.embeddings):
        return train(pipeline, STEPS, lambda ahead: None, depth=1)[0]


def record_steps(recipe: Recipe) -> Recording:
    return record(recipe, Dataset.open(recipe.data.path), 2, 2, STEPS)


@pytest.mark.parametrize("exchange", ["flat", "sptt"])
def test_simulated_ranks_match_processes_bit_for_bit(
    ranks: Ranks, home: Path, exchange: str, tmp_path: Path
) -> None:
    recipe = make_recipe(home, tmp_path, distributed={"exchange": exchange})
    recording = record_steps(recipe)
    assert ranks.run(4, losses, recipe, local=2, towers=2 * (exchange == "sptt")) == [recording.losses] * 4
    for step in recording.schedule:
        assert any(piece.ahead for piece in step)
        assert min(piece.seconds for piece in step) >= 0
        # All ranks reach the same collectives in the same order.
        assert [piece.channel for piece in step] == [piece.channel for piece in recording.schedule[0]]
    assert sum(sum(piece.sent) for step in recording.schedule for piece in step) > 0
    links = Collective(alpha=1e-5, alpha_peer=0.0)
    fast = Cluster(hosts=2, ranks=2, inside=links, between=links)
    longest = max(sum(piece.seconds for piece in step) for step in recording.schedule)
    # The mean of `play` does not begin and end at exactly the same place of a step.
    assert (
        longest * 0.99
        <= play(recording.schedule, fast)
        < play(
            recording.schedule,
            Cluster(hosts=2, ranks=2, inside=links, between=links, between_bytes_per_second=1e6),
        )
    )


def test_an_error_of_a_simulated_rank_ends_the_others(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # two ranks have no samples, which is allowed
    recipe = make_recipe(home, tmp_path, batch_size=2, portions=1)
    assert len(record_steps(recipe).losses) > STEPS
    given = rank_pipeline

    def failing_pipeline(recipe: Recipe, dataset: Dataset, mesh: Mesh) -> object:
        if mesh.rank == 2:
            raise TrainingError("rank 2 is broken")
        return given(recipe, dataset, mesh)

    monkeypatch.setattr("benchmarks.replay.rank_pipeline", failing_pipeline)
    with pytest.raises(TrainingError) as caught:
        record_steps(recipe)
    assert "rank 2 is broken" in f"{caught.value} {caught.value.__cause__}"


def piece(seconds: float, *sent: float, members: tuple[int, ...] = (0, 1), ahead: bool = False) -> Piece:
    return Piece(seconds=seconds, ahead=ahead, channel=1 if sent else -1, members=members, sent=sent)


LINKS = Collective(alpha=0.5, alpha_peer=0.25)


def test_ranks_wait_for_the_slowest_rank_and_for_the_transfer() -> None:
    two = Cluster(hosts=2, between=LINKS, between_bytes_per_second=10.0)
    step = play([[piece(1.0, 0, 20), piece(1.0)], [piece(3.0, 30, 0), piece(2.0)]], two)
    # The slower rank arrives after 3 s, 30 bytes take 3 s, the latency is 0.75 s, and then it
    # computes for 2 s.
    assert step == pytest.approx(3 + 3 + 0.75 + 2)


def test_ranks_of_a_host_share_its_link_but_not_its_memory_bandwidth() -> None:
    members = (0, 1, 2, 3)
    where = Cluster(
        hosts=2,
        ranks=2,
        inside=LINKS,
        between=LINKS,
        inside_bytes_per_second=1e9,
        between_bytes_per_second=10.0,
    )
    sent = [tuple(0.0 if member == rank else 10.0 for member in members) for rank in members]
    step = play([[piece(1.0, *sent[rank], members=members)] for rank in members], where)
    assert step == pytest.approx(1 + 4 * 10 / 10 + 0.5 + 3 * 0.25)


def test_a_batch_is_staged_while_the_previous_one_trains_on_the_same_core() -> None:
    free = Cluster(hosts=2)
    both = [[piece(2.0, ahead=True), piece(3.0, 0, 0)]] * 2
    assert play(both, free) == pytest.approx(5)
    # Both threads start at the same time, and each gets half of the core.
    slow = Cluster(hosts=2, between=Collective(alpha=4.0, alpha_peer=0.0))
    assert play(both, slow) == pytest.approx(3 + 2 + 4)
    # The other thread computes while the training thread waits for its collective.
    ids = Piece(seconds=0.0, ahead=True, channel=0, members=(0, 1), sent=(0, 0))
    assert play([[ids, *step] for step in both], slow) == pytest.approx(3 + 4)


def test_a_rank_without_peers_receives_what_it_sends() -> None:
    channel = EchoChannel(1, 3)
    message = torch.tensor([1, 2, 3, 4, 5])
    assert channel.exchange(message, [1, 2, 2], [2, 2, 2]).tolist() == [2, 3] * 3
    assert channel.exchange(message, [1, 2, 2], [4, 0, 1]).tolist() == [0] * 5
    assert EchoChannel(0, 1).exchange(message, [5], [5]) is not None
    assert channel.sum(torch.tensor([1.0, 2.0, 3.0])).shape == (3,)


@pytest.mark.parametrize("exchange", ["flat", "sptt"])
def test_a_predicted_step_is_computation_plus_communication(
    home: Path, exchange: str, tmp_path: Path
) -> None:
    recipe = make_recipe(home, tmp_path, distributed={"exchange": exchange})
    where = Cluster(hosts=2, ranks=2)
    dataset = Dataset.open(recipe.data.path)
    seconds = rank_seconds(recipe, dataset, where)
    assert seconds > 0
    free = predict_step(recipe, dataset, where, seconds)
    assert free.step.total == pytest.approx(seconds)
    assert free.exchange.kind == exchange
    slow = Cluster(hosts=2, ranks=2, between_bytes_per_second=1e6)
    assert predict_step(recipe, dataset, slow, seconds).step.between > 0


def test_tables_too_large_to_measure_are_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(home, tmp_path)
    monkeypatch.setattr(forecast, "MEASURED_SHARE", 1e-12)
    with refuses(ConfigError, "--hosts"):
        predict_exchanges(recipe, Dataset.open(recipe.data.path), Cluster(hosts=2, ranks=2))
