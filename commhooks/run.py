"""Zero-code activation: run an unmodified training script with every DDP model registered.

Where in the flow: ``torchrun … -m commhooks.run train.py ARGS`` -> patch DDP once torch is imported -> the script
(``script``) -> the first training forward of each DDP model -> ``commhooks.register``.

Invariants: with ``COMMHOOKS=0`` nothing is patched.  A model is registered at its first forward that builds a graph,
not when it is built: until then the script may register a hook of its own (it wins, we step aside and say so) or call
``commhooks.register`` with arguments of its own.  That moment is the same on all ranks, as registering needs it to be.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from commhooks.after_import import after_import
from commhooks.config import Config
from commhooks.errors import CommhooksError, UnsupportedModelError
from commhooks.log import show_log
from commhooks.script import Program, load, parse_target

log = logging.getLogger(__name__)
Register = Callable[[Any], object]


# --- The command -------------------------------------------------------------------------------------------------------


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Only what stands before the script is ours."""
    own = [word for word in arguments[:1] if word in ("-h", "--help", "--json")]
    return own, arguments[len(own) :]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; everything from the script on belongs to the script."""
    parser.usage = "%(prog)s [-h] (SCRIPT | -m MODULE) [ARGS …]"
    parser.epilog = "Same as: torchrun … -m commhooks.run SCRIPT ARGS. COMMHOOKS=0 runs the script as if we weren't there."


def main(namespace: argparse.Namespace) -> int:
    """Run what ``namespace.rest`` says; see ``start``."""
    return start(namespace.rest)


def start(arguments: list[str]) -> int:
    """Activate, then run the script.

    Returns
    -------
    int
        0, or 2 with a line on standard error when there is nothing to run or a setting is wrong.  What the script
        raises leaves through here untouched, be it an error of ours.
    """
    try:
        program = _prepare(arguments)
    except CommhooksError as error:
        print(f"commhooks: error: {error}", file=sys.stderr)
        return 2
    program.run()
    return 0


def _prepare(arguments: list[str]) -> Program:
    target = parse_target(arguments)
    config = Config.load({}, os.environ)
    if config.enabled:
        show_log(config.log_level, os.environ)
        activate()
    return load(target)


# --- Patching ----------------------------------------------------------------------------------------------------------


def activate(register: Register | None = None) -> None:
    """Patch the frameworks as soon as the script imports them.

    Parameters
    ----------
    register : called with each DDP model; ``commhooks.register`` unless given.
    """
    after_import(
        "torch.nn.parallel.distributed", functools.partial(_patch_ddp, register=register or _register)
    )
    after_import("torch.multiprocessing.spawn", _patch_spawn)
    after_import("horovod.torch", _patch_horovod)


def _register(model: Any) -> object:
    import commhooks

    return commhooks.register(model)


_registers: dict[type, Register] = {}
_count = 0


def _patch_ddp(module: ModuleType, register: Register) -> None:
    """Let each new model wait for its first training forward; and let ``join()``, which may come first, not miss it."""
    ddp = module.DistributedDataParallel
    if ddp in _registers:
        return  # a forked worker inherits the patch
    _registers[ddp] = register
    build, join_hook = ddp.__init__, ddp.join_hook

    @functools.wraps(build)
    def build_and_wait(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.register_forward_pre_hook(before_forward)

    @functools.wraps(join_hook)
    def adopt_and_join(self: Any, **kwargs: Any) -> Any:
        # A rank without any batch never runs a forward, but all ranks come by here.
        if _stop_waiting(self):
            adopt(self)
        return join_hook(self, **kwargs)

    ddp.__init__, ddp.join_hook = build_and_wait, adopt_and_join


def before_forward(model: Any, inputs: object) -> None:
    """A forward pre-hook of DDP models; a plain function of this module, so that models can still be copied and saved."""
    import torch

    if torch.is_grad_enabled() and _stop_waiting(model):  # else an evaluation, perhaps on one rank only
        torch.compiler.disable(_adopt_in_forward)(model, inputs)


# A model that is compiled as a whole must not have this compiled into it.
before_forward._torchdynamo_disable = True  # type: ignore[attr-defined]


def _adopt_in_forward(model: Any, inputs: object) -> None:
    there = set(model._forward_pre_hooks)
    adopt(model)
    # torch has listed this forward's hooks already: those that registering has added would miss it.
    for key, hook in list(model._forward_pre_hooks.items()):
        if key not in there:
            hook(model, inputs)


def _stop_waiting(model: Any) -> bool:
    """Whether the model was waiting for its first training forward until now."""
    waiting = [key for key, hook in model._forward_pre_hooks.items() if hook is before_forward]
    for key in waiting:
        del model._forward_pre_hooks[key]
    return bool(waiting)


def adopt(model: Any) -> None:
    """Register one model unless it has a hook of its own or can't be served.

    Raises
    ------
    CommhooksError
        A setting or the network is wrong.  A model that isn't supported stays with plain DDP, on all ranks alike.
    """
    global _count
    _count += 1
    name = f"DDP model {_count} ({type(model.module).__name__})"
    if hook := own_hook(model):
        whose = (
            "is registered by the script"
            if hook.startswith("commhooks.")
            else "has a communication hook of its own"
        )
        log.info("%s %s, %s: left alone", name, whose, hook)
        return
    try:
        next(_registers[kind] for kind in type(model).__mro__ if kind in _registers)(model)
    except UnsupportedModelError as error:
        log.warning("%s stays with plain DDP: %s", name, error)
        return
    log.info("%s is registered; COMMHOOKS=0 switches this off", name)


def own_hook(model: Any) -> str | None:
    """The name of the hook that the script has registered, if any."""
    if model._comm_hooks:
        hook = model._comm_hooks[0][0]
        return f"{hook.__module__}.{hook.__qualname__}" if hasattr(hook, "__qualname__") else str(hook)
    # Hooks built into torch's C++ are only in the logged facts.
    return model._get_ddp_logging_data().get("comm_hook") or None


def _patch_horovod(module: ModuleType) -> None:
    try:
        from commhooks.horovod import install_for_run
    except (ImportError, CommhooksError) as error:
        log.warning("Horovod's optimizers are left alone: %s", error)
        return
    install_for_run()


# --- Workers that the script itself starts -----------------------------------------------------------------------------


class Activated:
    """A function that activates first; it can be pickled, which is how it reaches a spawned worker."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        show_log(logging.getLevelName(logging.getLogger("commhooks").level or logging.INFO), {})
        activate()
        return self._function(*args)


def _patch_spawn(module: Any) -> None:
    """``torch.multiprocessing.spawn`` starts ranks in fresh interpreters: activate there too."""
    start_processes = module.start_processes

    @functools.wraps(start_processes)
    def start_activated(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return start_processes(Activated(fn), *args, **kwargs)

    module.start_processes = start_activated


def _as_program(arguments: list[str]) -> int:
    own, rest = split_arguments(arguments)
    if own:
        parser = argparse.ArgumentParser(prog="python -m commhooks.run")
        add_arguments(parser)
        parser.parse_args(own)
    return start(rest)


if __name__ == "__main__":
    # The module under its real name does the work: this one is about to be replaced as __main__.
    from commhooks import run

    sys.exit(run._as_program(sys.argv[1:]))
