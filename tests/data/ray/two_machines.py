"""Start a Ray cluster of two machines with one processor each, as Ray sees it, until standard input
closes.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
