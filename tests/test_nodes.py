"""A plane across several nodes: Ray's own test cluster, three raylets on one machine."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json
import ray
from ray.cluster_utils import Cluster
import numpy as np
from actors.data_plane import DataPlane
from policies.config import PlaneConfig

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
for _ in range(2):
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
ray.init(address=cluster.address, log_to_driver=False)
here = ray.get_runtime_context().get_node_id()
found = {}
try:
    for placement in ("spread", "here"):
        with DataPlane.launch(PlaneConfig(units=3, unit_placement=placement), name=placement) as plane:
            client = plane.client()
            client.put("train", ["a"], {"x": [np.arange(3)]})
            actors = ray._private.state.actors().values()
            units = [a for a in actors if a["ActorClassName"] == "StorageUnit" and a["State"] == "ALIVE"]
            found[placement] = {
                "nodes": len({a["Address"]["NodeID"] for a in units}),
                "all_here": all(a["Address"]["NodeID"] == here for a in units),
                "loopback": plane.address.endpoint.startswith("tcp://127.0.0.1"),
                "rows": [row.tolist() for row in client.get("train", ["a"])["x"]],
            }
finally:
    ray.shutdown()
    cluster.shutdown()
print(json.dumps(found))
"""


def test_units_spread_over_the_nodes_or_stay_with_the_launcher() -> None:
    """In a process of its own, since a process is connected to one Ray at a time."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["spread"]["nodes"] == 3 and not found["spread"]["all_here"]
    assert found["here"] == {"nodes": 1, "all_here": True, "loopback": False, "rows": [[0, 1, 2]]}
    assert found["spread"]["rows"] == [[0, 1, 2]]
