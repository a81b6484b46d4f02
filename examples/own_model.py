"""A PyTorch model with StrataRec's embedding tables in the place of TorchRec's `EmbeddingBagCollection`.

The rest is a plain training loop. `backward` updates the tables, so the dense optimizer has no table parameters.
``python own_model.py cuda`` trains network and rows in the memory of a GPU (``pip install 'stratarec[gpu]'``).
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor, nn

from stratarec import EmbeddingBagConfig, KeyedJagged, RowOptimizerConfig, TieredEmbeddingBagCollection


class TwoTowers(nn.Module):
    """A network on the vectors of user and items, and on their product."""

    def __init__(self, users: int, items: int, device: str, width: int = 16) -> None:
        super().__init__()
        # TorchRec: EmbeddingBagCollection(tables=[EmbeddingBagConfig(...)]), with the same fields.
        self.embeddings = TieredEmbeddingBagCollection(
            [
                EmbeddingBagConfig(name="users", num_embeddings=users, embedding_dim=width, feature_names=("user",)),
                EmbeddingBagConfig(name="items", num_embeddings=items, embedding_dim=width, feature_names=("seen",)),
            ],
            optimizer=RowOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.1),
            device=device,
        )
        self.network = nn.Sequential(nn.Linear(3 * width, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)

    def forward(self, features: KeyedJagged) -> Tensor:
        """Logits ``[B]``."""
        vectors = self.embeddings(features)
        user, seen = vectors["user"], vectors["seen"]
        logits: Tensor = self.network(torch.cat([user, seen, user * seen], dim=1)).squeeze(1)
        return logits


def batch(random: np.random.Generator, size: int = 512) -> tuple[KeyedJagged, Tensor]:
    """Draw users with one to four items each; users with even numbers like items with even numbers."""
    user, counts = random.integers(0, 1000, size), random.integers(1, 5, size)
    seen = random.integers(0, 5000, counts.sum())
    even = np.add.reduceat(seen % 2 == 0, np.cumsum([0, *counts[:-1]])) > counts / 2
    values = torch.from_numpy(np.concatenate([user, seen]))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate([np.ones(size, int), counts]))]))
    labels = torch.from_numpy((even == (user % 2 == 0)).astype(np.float32))
    return KeyedJagged(keys=("user", "seen"), values=values, offsets=offsets, batch_size=size), labels


def main(device: str = "cpu") -> None:
    """Train the model and print its accuracy."""
    random, model = np.random.default_rng(1), TwoTowers(1000, 5000, device)
    optimizer = torch.optim.Adam(model.network.parameters(), lr=1e-3)
    for step in range(400):
        features, labels = batch(random)
        # Ids stay on the CPU; vectors are on the device of the rows.
        loss = nn.functional.binary_cross_entropy_with_logits(model(features), labels.to(device))
        optimizer.zero_grad()
        loss.backward()  # rows of the tables are updated here
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    with torch.no_grad():
        features, labels = batch(random, 4096)
        right = ((model(features).cpu() > 0) == labels.bool()).float().mean().item()
    print(f"right in {right:.1%} of cases")
    assert right > 0.7


if __name__ == "__main__":
    main(*sys.argv[1:])
