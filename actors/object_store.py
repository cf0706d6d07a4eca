"""How much of this node's object store is free.

Ray has no public call for it; the node's own daemon is asked the way ``ray memory`` asks it (a few milliseconds).
Where that does not work, nothing is taken for free, and payloads travel in frames.
"""

from __future__ import annotations

import logging
from typing import Any

import ray

logger = logging.getLogger(__name__)


class ObjectStore:
    """The store of the node that this process runs on. ``reserve``: the fraction of it that is never offered."""

    def __init__(self, reserve: float) -> None:
        self._reserve = reserve
        self._warned = False

    def room(self) -> int:
        """Bytes that can be put into the store now without touching the reserve. Blocks for a few milliseconds."""
        try:
            from ray._private.internal_api import node_stats

            here = ray.get_runtime_context().get_node_id()
            node = next(node for node in ray.nodes() if node["NodeID"] == here)
            stats: Any = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
            used, total = stats.store_stats.object_store_bytes_used, stats.store_stats.object_store_bytes_avail
        except Exception as error:  # whatever another release of Ray does here, frames still work
            if not self._warned:
                self._warned = True
                logger.warning("the object store's use cannot be read, payloads travel in frames: %r", error)
            return 0
        return max(0, int(total * (1 - self._reserve)) - int(used))
