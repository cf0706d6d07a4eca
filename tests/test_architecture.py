"""The house: recipes over actors over policies, imports run down only, and decisions know of no I/O, clock or chance.

Read from the syntax trees of all product files; what an import brings with it is checked in a fresh process.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("policies", "actors", "recipes")
"""From the ground up. A layer may import those before it."""

FORBIDDEN_IN_POLICIES = {
    "ray",
    "zmq",
    "asyncio",
    "threading",
    "multiprocessing",
    "concurrent",
    "subprocess",
    "time",
    "datetime",
    "random",
    "secrets",
    "socket",
    "torch",
    "transformers",
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec"}
WITHOUT_TORCH = (
    "actors.controller",
    "actors.storage_unit",
    "actors.cut_coordinator",
    "actors.read_coalescer",
    "actors.client",
)


def _files(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) for every import of the file, at any depth, relative ones resolved."""
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield node.lineno, ".".join([*base, *([node.module] if node.module else [])])


def _offenders(layer: str, forbidden: set[str]) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in _files(layer)
        for line, module in _imports(file)
        if module.split(".")[0] in forbidden
    ]


@pytest.mark.parametrize("layer", LAYERS)
def test_the_layer_is_there(layer: str) -> None:
    """An empty layer would make every rule below hold."""
    assert _files(layer)


@pytest.mark.parametrize(("height", "layer"), list(enumerate(LAYERS)))
def test_imports_run_down_only(height: int, layer: str) -> None:
    assert _offenders(layer, {*LAYERS[height + 1 :], "tests"}) == []


def test_policies_know_of_no_io_clock_thread_or_chance() -> None:
    assert _offenders("policies", FORBIDDEN_IN_POLICIES) == []


def _numpy_random_uses(tree: ast.Module) -> Iterator[ast.Attribute]:
    """``np.random`` wherever it is not the start of a Philox generator whose key and counter are both given."""
    keyed = {
        id(node.func.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "Philox"
        and {"key", "counter"} <= {keyword.arg for keyword in node.keywords}
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node) in {"np.random", "numpy.random"}
            and id(node) not in keyed
        ):
            yield node


def test_policies_draw_no_random_numbers_of_their_own() -> None:
    """``np.random`` needs no import. A generator that gets its whole state from the caller is a mere function."""
    uses = [
        f"{file.relative_to(ROOT)}:{node.lineno} uses {ast.unparse(node)}"
        for file in _files("policies")
        for node in _numpy_random_uses(_tree(file))
    ]
    imports = [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in _files("policies")
        for line, module in _imports(file)
        if module.startswith("numpy.random")
    ]
    assert uses + imports == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("np.random.rand()", 1),
        ("draw = np.random", 1),
        ("np.random.Philox()", 1),
        ("np.random.Philox(key=seed, counter=position)", 0),
    ],
)
def test_the_rule_on_randomness_tells_them_apart(source: str, found: int) -> None:
    assert len(list(_numpy_random_uses(ast.parse(source)))) == found


@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_is_unpickled(layer: str) -> None:
    assert _offenders(layer, FORBIDDEN_MODULES) == []


@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_is_evaluated(layer: str) -> None:
    """The builtins only: a method of the same name, such as torch's ``module.eval()``, evaluates nothing."""
    calls = [
        f"{file.relative_to(ROOT)}:{node.lineno} calls {node.func.id}"
        for file in _files(layer)
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS
    ]
    assert calls == []


@pytest.mark.parametrize("layer", LAYERS)
def test_every_module_says_what_it_is_for(layer: str) -> None:
    silent = [str(file.relative_to(ROOT)) for file in _files(layer) if not ast.get_docstring(_tree(file))]
    assert silent == []


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_a_process_without_an_engine_loads_no_torch(module: str) -> None:
    """A coordinator or a unit starts in about a second and stays small, because torch never comes with it."""
    assert importlib.util.find_spec(module) is not None, f"{module} does not exist"
    script = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert {"torch", "transformers"} & set(json.loads(ended.stdout)) == set()
