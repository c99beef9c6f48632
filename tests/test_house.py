"""The rules of the house, checked on the syntax tree: a pure core, one owner for each foreign thing, a light import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commhooks.config import KNOBS
from commhooks.env_command import markdown_table

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "commhooks"
PURE_STANDARD = {
    "__future__", "abc", "bisect", "collections", "copy", "dataclasses", "enum", "fractions", "functools", "hashlib",
    "heapq", "io", "itertools", "json", "math", "operator", "re", "statistics", "string", "struct", "textwrap", "types",
    "typing", "warnings", "xml", "zlib",
}  # fmt: skip
PURE = PURE_STANDARD | {"numpy", "scipy", "networkx"}
HEAVY = {
    "torch",
    "horovod",
    "scipy",
    "networkx",
    "numpy",
    "matplotlib",
    "sklearn",
    "asyncio",
    "multiprocessing",
}


def sources(folder: Path) -> list[Path]:
    """The Python files under a folder, in a stable order."""
    return sorted(folder.rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every imported module with its line; ``from a import b`` counts as ``a`` and ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or "."
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def impurities(text: str) -> list[str]:
    """What a module of the core must not do: import the outer world, or reach it through a builtin."""
    tree = ast.parse(text)
    found = [
        f"line {line} imports {name}"
        for line, name in imports(tree)
        if name.split(".")[0] not in PURE and not name.startswith(("commhooks.core", "commhooks.errors"))
    ]
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    reaching = {"open", "print", "input", "__import__"}
    return found + [f"line {call.lineno} calls {call.func.id}" for call in calls if call.func.id in reaching]


@pytest.mark.parametrize("path", sources(PACKAGE / "core"), ids=lambda path: path.name)
def test_the_core_is_pure(path):
    assert impurities(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    ["import time", "from os import environ", "import numpy, random", "from commhooks.config import Config", "import torch",
     "def f():\n    import threading", "from .. import config", "open('x')"],
)  # fmt: skip
def test_the_test_of_purity_can_fail(text):
    assert impurities(text)


@pytest.mark.parametrize(
    ("module", "owners"),
    [
        ("horovod", {"horovod.py"}),
        ("subprocess", {"shell.py"}),
    ],
)
def test_a_foreign_thing_has_one_owner(module, owners):
    users = {
        str(path.relative_to(PACKAGE))
        for path in sources(PACKAGE)
        if any(name.split(".")[0] == module for _, name in imports(ast.parse(path.read_text())))
    }
    assert users <= owners


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after a statement (and what it loads by itself not)."""
    code = f"import sys; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return {name.split(".")[0] for name in done.stdout.split()}


def test_the_import_is_light():
    assert not loaded_by("import commhooks") & HEAVY
    assert not loaded_by("import commhooks.cli, commhooks.config, commhooks.errors") & HEAVY


def test_the_test_of_lightness_can_fail():
    assert "networkx" in loaded_by("import commhooks, networkx") & HEAVY


def test_importing_any_module_does_nothing():
    """No thread, no environment variable, no patch of DDP, no file in the current folder, no output."""
    names = [
        ".".join(("commhooks", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in sources(PACKAGE)
    ]
    names = [
        name.removesuffix(".__init__")
        for name in names
        if not name.endswith(("__main__", "commhooks.horovod"))
    ]
    code = f"""
import importlib, os, sys, threading
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
def state():
    return dict(os.environ), threading.active_count(), DDP.__init__, DDP.register_comm_hook, sorted(os.listdir("."))
before = state()
for name in {names!r}:
    importlib.import_module(name)
    assert state() == before, name
"""
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_tests_do_not_sleep():
    """A sleep that waits for another process is wrong on a slow machine; a loop with a deadline polls a condition."""
    sleeps = [
        f"{path.name}:{number}"
        for path in sources(ROOT / "tests")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "sleep(" in line and path.name not in {"test_house.py"}
    ]
    assert sleeps == []


def test_the_readme_has_the_table_of_the_knobs():
    assert markdown_table() in (ROOT / "README.md").read_text()


def test_the_environment_is_read_in_entry_points_only():
    entry_points = {
        "cli.py",
        "env_command.py",
        "run.py",
        "lab.py",
        "doctor.py",
        "shell.py",
        "groups.py",
        "horovod.py",
        "lab_ranks.py",
        "probe.py",
        "bench/launch.py",
    }
    readers = {
        str(path.relative_to(PACKAGE))
        for path in sources(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"})
    }
    assert readers <= entry_points, "take the environment as an argument"


def test_every_setting_is_read_by_someone():
    """A documented setting that nobody reads is a lie to its user."""
    read = {
        node.attr
        for path in sources(PACKAGE)
        if path.name not in {"config.py", "env_command.py"}
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value).split(".")[-1] in {"config", "_config", "settings"}
    }
    assert {row.name for row in KNOBS} - read == set()
