"""DataPlane: launch, attach, save, restore, close.

    with DataPlane.launch() as plane:
        client = plane.client()
        client.put("train", ["a", "b"], {"ids": [ids_a, ids_b]})
        plane.save("checkpoints")

A plane is one controller and its storage units, as Ray actors. It lives as long as the driver that launched it, unless
it is closed before. Others reach it by its address (hand it on through Ray) or by `attach`.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.address import NAMESPACE
from actors.checkpoint_files import StoredCheckpoint
from actors.checkpointing import SavedCheckpoint, restore_plane, save_plane
from actors.client import DataPlaneClient, PlaneAddress
from actors.remote import ControllerActor, UnitActor
from actors.wire.secret import new_secret
from policies.config import PlaneConfig
from policies.errors import LaunchError
from policies.sampler_registry import SamplerRegistry
from policies.sampling import Sampler

REFERRED_AT_ONCE = 16
"""Calls of a unit through Ray that may wait at one time, each in a thread of the unit's."""

LOOPBACK = "127.0.0.1"
LOCAL_OBJECT_STORE_BYTES = 256 << 20


class DataPlane:
    def __init__(self, address: PlaneAddress, actors: Sequence[Any], config: PlaneConfig, owns_ray: bool) -> None:
        """Use `launch` or `attach`."""
        self.address = address
        self.config = config
        self._actors = list(actors)
        self._owns_ray = owns_ray
        self._client: DataPlaneClient | None = None

    @classmethod
    def launch(
        cls,
        config: PlaneConfig | None = None,
        *,
        name: str = "plane",
        ray_options: Mapping[str, Any] | None = None,
        samplers: Mapping[str, type[Sampler]] | None = None,
    ) -> DataPlane:
        """Start a controller and ``config.units`` storage units. Claims may name the shipped samplers and those of
        ``samplers`` (name → class, see `policies.sampling`).

        Uses the Ray this process is connected to; when it is not connected, ``ray.init(**ray_options)`` starts a local
        one, which `close` shuts down again. Raises `LaunchError` within ``config.launch_timeout_s`` when Ray cannot
        place the actors; then none of them is left behind.
        """
        config = config or PlaneConfig()
        SamplerRegistry(samplers)  # refuses here what the controller would refuse
        owns_ray = not ray.is_initialized()
        if owns_ray:
            local = {"include_dashboard": False, "object_store_memory": LOCAL_OBJECT_STORE_BYTES}
            ray.init(**{**local, "namespace": NAMESPACE, **(ray_options or {})})
        try:
            address, actors = _start_actors(config, name, samplers)
        except BaseException:
            if owns_ray:
                ray.shutdown()
            raise
        return cls(address, actors, config, owns_ray)

    @classmethod
    def attach(cls, name: str = "plane") -> DataPlane:
        """Reach a plane that another driver of the same Ray cluster launched under ``name``."""
        try:
            controller: Any = ray.get_actor(f"{name}/controller", namespace=NAMESPACE)
        except ValueError as error:
            raise LaunchError(f"no plane named {name!r} runs in this Ray cluster; launch it first: {error}") from None
        address, config = ray.get([controller.address.remote(), controller.config.remote()])
        return cls(address, [], config, owns_ray=False)

    def __enter__(self) -> DataPlane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def client(self) -> DataPlaneClient:
        """This process's client of the plane; closed together with it."""
        if self._client is None:
            self._client = DataPlaneClient(self.address)
        return self._client

    def save(
        self,
        directory: str | Path,
        *,
        job: Mapping[str, Any] | None = None,
        fingerprint: Mapping[str, Any] | None = None,
        checkpoint_id: str | None = None,
    ) -> SavedCheckpoint:
        """Write a checkpoint of the whole plane under ``directory``; see `actors.checkpointing.save_plane`."""
        return save_plane(self.client(), directory, job or {}, fingerprint or {}, checkpoint_id or uuid.uuid4().hex)

    def restore(
        self, checkpoint: StoredCheckpoint | str | Path, *, fingerprint: Mapping[str, Any] | None = None
    ) -> StoredCheckpoint:
        """Fill this plane, which must be empty, from a checkpoint; see `actors.checkpointing.restore_plane`."""
        return restore_plane(self.client(), checkpoint, fingerprint)

    def close(self) -> None:
        """Close the client and, where this object launched them, end the plane's actors (and the Ray it started)."""
        if self._client is not None:
            self._client.close()
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._owns_ray and ray.is_initialized():
            ray.shutdown()


def _start_actors(
    config: PlaneConfig, name: str, samplers: Mapping[str, type[Sampler]] | None
) -> tuple[PlaneAddress, list[Any]]:
    secret = new_secret(config.encryption)
    host = LOOPBACK if sum(node["Alive"] for node in ray.nodes()) == 1 else None
    actors: list[Any] = []
    try:
        controller = ControllerActor.options(name=f"{name}/controller", namespace=NAMESPACE).remote(
            host, secret, config, samplers
        )
        actors.append(controller)
        strategies = _strategies(config)
        incarnations = secrets.SystemRandom().sample(range(1 << 31), config.units)
        units = {
            f"u{i}": UnitActor.options(
                name=f"{name}/u{i}",
                namespace=NAMESPACE,
                num_cpus=config.unit_cpus,
                max_concurrency=REFERRED_AT_ONCE,
                scheduling_strategy=strategies[i % len(strategies)],
            ).remote(f"u{i}", incarnations[i], host, secret, config, f"{name}/u{i}")
            for i in range(config.units)
        }
        actors += units.values()
        address, *locations = ray.get(
            [controller.address.remote(), *(unit.location.remote() for unit in units.values())],
            timeout=config.launch_timeout_s,
        )
        ray.get([unit.connect.remote(address.endpoint) for unit in units.values()])
        ray.get(controller.register_units.remote(dict(zip(units, locations, strict=True))))
    except ray.exceptions.GetTimeoutError:
        _kill(actors)
        needed = config.units * config.unit_cpus
        raise LaunchError(
            f"the actors of plane {name!r} did not start within {config.launch_timeout_s:g} s: its {config.units} "
            f"units need {needed:g} CPUs, the cluster has {ray.cluster_resources().get('CPU', 0):g} of which "
            f"{ray.available_resources().get('CPU', 0):g} are free; launch fewer units, set unit_cpus to 0, or free "
            "CPUs"
        ) from None
    except (ray.exceptions.RayError, ValueError) as error:
        _kill(actors)
        raise LaunchError(f"plane {name!r} could not be started: {error}") from error
    except BaseException:
        _kill(actors)
        raise
    return address, actors


def _strategies(config: PlaneConfig) -> list[NodeAffinitySchedulingStrategy]:
    """Where units go, in turn. Ray's own spreading is a best effort, so each unit is sent to a node by its id; one that
    reserves CPUs may go elsewhere when that node has none left, unless all are to be here."""
    if config.unit_placement == "here":
        return [NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)]
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    return [NodeAffinitySchedulingStrategy(node, soft=config.unit_cpus > 0) for node in nodes]


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)
