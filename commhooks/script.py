"""Runs a script or module in this interpreter exactly as ``python SCRIPT`` or ``python -m MODULE`` would.

Where in the flow: ``run`` patches first, then hands over to here.

Invariants: the script's module *is* ``__main__`` and stays it to the interpreter's end, so that pickling, exit handlers,
threads that outlive the script and multiprocessing's spawn find it; ``sys.argv`` and ``sys.path`` are what the script
would see; exceptions leave through here untouched, and our frames don't show in their traceback.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import types
import zipfile
from dataclasses import dataclass
from typing import Any

from commhooks.errors import ConfigError

# The modules that were __main__ before, kept alive: their code is still on the stack.
_replaced: list[types.ModuleType] = []


@dataclass(frozen=True)
class Target:
    """What to run: a script's path, or a module's name."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]


def parse_target(arguments: list[str]) -> Target:
    """Read ``SCRIPT ARGS`` or ``-m MODULE ARGS`` as Python does.

    Raises
    ------
    ConfigError
        Nothing to run, or an option that isn't ours.
    """
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        return Target(arguments[1], True, tuple(arguments[2:]))
    if not arguments or arguments[0].startswith("-"):
        given = repr(arguments[0]) if arguments else "nothing"
        raise ConfigError(f"expected a script or -m MODULE, got {given}: commhooks run train.py ARGS")
    return Target(arguments[0], False, tuple(arguments[1:]))


@dataclass(frozen=True)
class Program:
    """A script's code, and what its module needs to know about itself."""

    code: types.CodeType
    attributes: dict[str, Any]

    def run(self) -> None:
        """Run to the end as ``__main__``; what the script raises, ``SystemExit`` included, leaves through here."""
        main = types.ModuleType("__main__")
        main.__dict__.update(self.attributes, __builtins__=builtins, __annotations__={})
        _replaced.append(sys.modules["__main__"])
        sys.modules["__main__"] = main
        try:
            exec(self.code, main.__dict__)
        except SystemExit:
            raise
        except BaseException as error:
            _hide_our_frames(error)
            raise


def load(target: Target) -> Program:
    """Set ``sys.argv`` and ``sys.path`` up, and compile.

    Raises
    ------
    ConfigError
        There is no such script or module.
    SyntaxError
        The script's own.
    """
    return _module(target) if target.is_module else _script(target)


def _hide_our_frames(error: BaseException) -> None:
    """Let the traceback that the interpreter is going to print begin in the script.

    The hook is wrapped now, not before the script ran: the script may have set one of its own.
    """
    hook = sys.excepthook
    inside = error.__traceback__.tb_next if error.__traceback__ is not None else None

    def show(kind: type[BaseException], value: BaseException, traceback: Any) -> None:
        if value is error:
            traceback = inside
            value = value.with_traceback(inside)
        hook(kind, value, traceback)

    sys.excepthook = show


def _script(target: Target) -> Program:
    sys.argv = [target.name, *target.arguments]
    path = os.path.abspath(target.name)
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        return _folder(target.name, path)
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise ConfigError(f"can't open the script {path}: {error.strerror}") from None
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    attributes = {
        "__file__": path,
        "__loader__": loader,
        "__spec__": None,
        "__package__": None,
        "__cached__": None,
    }
    return Program(_compiled(source, path), attributes)


def _compiled(source: bytes, path: str) -> types.CodeType:
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        _hide_our_frames(error)
        raise


def _folder(name: str, path: str) -> Program:
    """A folder or zip archive with a ``__main__`` module in it."""
    _set_first_path(path)
    spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
    if spec is None or spec.loader is None:
        raise ConfigError(f"can't find a __main__ module in {name!r}")
    return _of_spec(spec, "__main__")


def _module(target: Target) -> Program:
    sys.argv = ["-m", *target.arguments]
    _set_first_path(os.getcwd())
    name, spec = target.name, _spec(target.name)
    if spec.submodule_search_locations is not None:
        name = f"{target.name}.__main__"
        spec = _spec(name)
    program = _of_spec(spec, name)
    sys.argv[0] = spec.origin or target.name
    return program


def _spec(name: str) -> importlib.machinery.ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except (
        ModuleNotFoundError
    ) as error:  # a parent package that doesn't exist; what a parent raises is its own
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None or spec.loader is None:
        raise ConfigError(f"there is no module {name} to run")
    return spec


def _of_spec(spec: importlib.machinery.ModuleSpec, name: str) -> Program:
    loader: Any = spec.loader
    code = loader.get_code(name) if hasattr(loader, "get_code") else None
    if code is None:
        raise ConfigError(f"the module {name} has no Python code to run")
    attributes = {
        "__file__": spec.origin,
        "__loader__": loader,
        "__spec__": spec,
        "__package__": spec.parent,
        "__cached__": spec.cached,
    }
    return Program(code, attributes)


def _set_first_path(folder: str) -> None:
    """Python puts the script's folder first; our own start put something else there (unless told to put nothing)."""
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[:1] = [folder]
