"""Zero-code runs: a script can't tell that it isn't started by Python itself, and its DDP models get registered."""

import copy
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from commhooks import run
from commhooks.errors import ConfigError, UnsupportedModelError

ROOT = Path(__file__).parent.parent

REPORT = """
import json, os, sys
import __main__
json.dump([
    sys.argv, sys.path, __name__, __file__, __package__, __cached__, type(__loader__).__name__,
    __spec__ and __spec__.name, type(__builtins__).__name__, __main__.__dict__ is globals(), sorted(globals()),
    "commhooks" in sys.modules and sys.argv[-1] == "tell",
], sys.stdout)
"""


def python(arguments, folder, **environ):
    """What ``python ARGUMENTS`` returns and prints, without the frames of the interpreter's own module runner."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **environ}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, re.sub(r'  File "<frozen runpy>".*\n', "", done.stderr)


def both(arguments, folder, **environ):
    """The same run by Python, by ``-m commhooks.run`` and by ``-m commhooks run``; all must agree, the result is returned."""
    expected = python(arguments, folder, **environ)
    assert python(["-m", "commhooks.run", *arguments], folder, **environ) == expected
    assert python(["-m", "commhooks", "run", *arguments], folder, **environ) == expected
    return expected


@pytest.fixture(params=["0", "1"], ids=["off", "on"])
def switch(request):
    return {"COMMHOOKS": request.param}


def test_a_script_sees_what_python_shows_it(tmp_path, switch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "script.py").write_text(REPORT)
    (tmp_path / "link.py").symlink_to(tmp_path / "deep" / "script.py")
    for name in ("deep/script.py", "link.py", str(tmp_path / "deep" / "script.py")):
        code, out, err = both([name, "-m", "--json", "a b", "--help"], tmp_path, **switch)
        assert (code, err) == (0, "") and '"--json", "a b"' in out


def test_a_module_and_a_package_see_what_python_shows_them(tmp_path, switch):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "__main__.py").write_text("from . import part\n" + REPORT)
    (tmp_path / "pack" / "part.py").write_text(REPORT)
    for name in ("pack", "pack.part"):
        code, out, err = both(["-m", name, "x", "-m"], tmp_path, **switch)
        assert (code, err) == (0, "") and "__main__" in out


def test_a_folder_and_an_archive_run_their_main(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(REPORT)
    with zipfile.ZipFile(tmp_path / "archive.pyz", "w") as archive:
        archive.writestr("__main__.py", REPORT)
    for name in ("folder", "archive.pyz"):
        assert both([name, "x"], tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('words')", 1),
        ("raise SystemExit", 0),
        ("def f():\n    raise ValueError('deep')\ntry:\n    f()\nexcept ValueError as e:\n    raise KeyError('top') from e", 1),
        ("import commhooks.errors as e\nraise e.PeerLost('rank 3')", 1),
        ("def broken(:", 1),
        ("import sys\nsys.excepthook = lambda kind, value, tb: print('mine', value, tb.tb_frame.f_code.co_name)\n1 / 0", 1),
        ("import os\nos._exit(9)", 9),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import atexit, __main__\natexit.register(lambda: print(__main__.x))\nx = 5", 0),
        ("import threading, __main__\nt = threading.Thread(target=lambda: (e.wait(9), print(x)))\n"
         "e = threading.Event()\nt.start()\nx = 'outlived'\ne.set()", 0),
    ],
)  # fmt: skip
def test_ends_as_it_would(tmp_path, body, code, switch):
    (tmp_path / "script.py").write_text(body + "\n")
    assert both(["script.py"], tmp_path, **switch)[0] == code
    (tmp_path / "script.py").rename(tmp_path / "module.py")
    if (
        "def broken" not in body and "excepthook" not in body
    ):  # Python shows frames of its own there, we don't
        assert both(["-m", "module"], tmp_path, **switch)[0] == code


def test_pickles_and_spawned_workers_find_main(tmp_path, switch):
    (tmp_path / "script.py").write_text(
        """
import multiprocessing, pickle
class Thing:
    def __eq__(self, other): return isinstance(other, Thing)
def work(thing): return thing, __name__
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Thing())) == Thing()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        thing, name = pool.apply(work, (Thing(),))
    print(thing == Thing(), name)
"""
    )
    assert both(["script.py"], tmp_path, **switch) == (0, "True __mp_main__\n", "")
    (tmp_path / "script.py").rename(tmp_path / "module.py")
    assert both(["-m", "module"], tmp_path, **switch) == (0, "True __mp_main__\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected a script or -m MODULE, got nothing"),
        (["--fast", "x.py"], "expected a script or -m MODULE, got '--fast'"),
        (["gone.py"], "can't open the script"),
        (["-m", "gone"], "there is no module gone to run"),
        (["-m", "gone.deeper"], "there is no module gone.deeper to run"),
    ],
)
def test_nothing_to_run_is_one_line(tmp_path, arguments, words):
    for start in (["-m", "commhooks.run"], ["-m", "commhooks", "run"]):
        code, out, err = python([*start, *arguments], tmp_path)
        assert (
            (code, out) == (2, "")
            and err.startswith("commhooks: error: ")
            and words in err
            and err.count("\n") == 1
        )


def test_a_bad_setting_stops_before_the_script(tmp_path):
    (tmp_path / "script.py").write_text("print('started')")
    code, out, err = python(["-m", "commhooks.run", "script.py"], tmp_path, COMMHOOKS_OVERLAPS="forward")
    assert (code, out) == (2, "") and "COMMHOOKS_OVERLAP " in err


def test_help_is_ours_only_before_the_script(tmp_path):
    code, out, _ = python(["-m", "commhooks.run", "--help"], tmp_path)
    assert code == 0 and "SCRIPT | -m MODULE" in out


def test_torch_is_not_imported_for_a_script_that_does_not_import_it(tmp_path):
    (tmp_path / "script.py").write_text("import sys; print('torch' in sys.modules)")
    assert both(["script.py"], tmp_path, COMMHOOKS="1")[1] == "False\n"


# --- Activation --------------------------------------------------------------------------------------------------------


@pytest.fixture
def activated(monkeypatch, tmp_path):
    """DDP patched, with a registration that only takes notes; one rank."""
    registered = []
    monkeypatch.setattr(run, "_registers", {})
    monkeypatch.setattr(run, "_count", 0)
    for name in ("__init__", "join_hook"):
        monkeypatch.setattr(DDP, name, getattr(DDP, name))
    run._patch_ddp(sys.modules[DDP.__module__], registered.append)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield registered
    dist.destroy_process_group()


def model():
    return DDP(nn.Linear(3, 2))


def hook(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_a_model_is_registered_once_at_its_first_training_forward(activated):
    ddp = model()
    with torch.no_grad():
        ddp(torch.ones(1, 3))
    assert activated == []
    for _ in range(2):
        ddp(torch.ones(1, 3)).sum().backward()
    assert activated == [ddp]
    assert not ddp._forward_pre_hooks


def test_hooks_that_registering_adds_do_not_miss_the_first_forward(activated):
    seen = []
    run._registers[DDP] = lambda ddp: ddp.register_forward_pre_hook(
        lambda model, inputs: seen.append(len(inputs))
    )
    ddp = model()
    for _ in range(2):
        ddp(torch.ones(1, 3)).sum().backward()
    assert seen == [1, 1]


def test_a_compiled_model_is_registered_and_registering_is_not_compiled(activated):
    compiling = []
    run._registers[DDP] = lambda ddp: compiling.append((ddp, torch.compiler.is_compiling()))
    ddp = model()
    compiled = torch.compile(ddp, backend="eager")
    for _ in range(3):
        compiled(torch.ones(1, 3)).sum().backward()
    assert compiling == [(ddp, False)]


def test_a_subclass_and_a_second_model_too(activated):
    class Mine(DDP):
        def __init__(self, module):
            super().__init__(module, gradient_as_bucket_view=True)

    first, second = Mine(nn.Linear(3, 2)), model()
    for ddp in (second, first):
        ddp(torch.ones(1, 3)).sum().backward()
    assert activated == [second, first]


@pytest.mark.parametrize("builtin", [False, True])
def test_the_scripts_own_hook_wins(activated, caplog, builtin):
    ddp = model()
    if builtin:
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    else:
        ddp.register_comm_hook(None, hook)
    with caplog.at_level("INFO", "commhooks"):
        ddp(torch.ones(1, 3)).sum().backward()
    assert activated == []
    assert (
        "has a communication hook of its own" in caplog.text
        and ("ALLREDUCE" if builtin else "hook") in caplog.text
    )


def test_join_registers_before_a_rank_without_batches_waits(activated):
    ddp = model()
    with ddp.join():
        pass
    assert activated == [ddp]


def test_an_unsupported_model_stays_with_plain_ddp(activated, caplog):
    def refuse(model):
        raise UnsupportedModelError("sparse all over")

    run._registers[DDP] = refuse
    ddp = model()
    ddp(torch.ones(1, 3)).sum().backward()
    assert "stays with plain DDP: sparse all over" in caplog.text


def test_a_wrong_setting_is_an_error(activated):
    def refuse(model):
        raise ConfigError("no such interface")

    run._registers[DDP] = refuse
    with pytest.raises(ConfigError):
        model()(torch.ones(1, 3))


def test_waiting_models_can_be_copied_and_saved(activated):
    ddp = model()
    pickle.dumps(ddp)
    torch.save(ddp, io.BytesIO())
    twin = copy.deepcopy(ddp)
    twin(torch.ones(1, 3)).sum().backward()
    assert activated == [twin]
    ddp(torch.ones(1, 3)).sum().backward()
    assert activated == [twin, ddp]


def test_signature_and_name_stay(activated):
    import inspect

    assert list(inspect.signature(DDP.__init__).parameters)[:3] == ["self", "module", "device_ids"]
    assert DDP.__init__.__name__ == "__init__"


def test_after_import_leaves_no_trace(tmp_path, monkeypatch):
    from commhooks.after_import import after_import

    (tmp_path / "lazy_one.py").write_text("x = __loader__, __spec__.loader")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    seen = []
    after_import("lazy_one", seen.append)
    import lazy_one

    assert seen == [lazy_one] and sys.meta_path == finders
    assert (
        lazy_one.x[0] is lazy_one.x[1] is lazy_one.__loader__
        and "commhooks" not in type(lazy_one.__loader__).__module__
    )
    after_import("lazy_one", seen.append)
    assert len(seen) == 2
    del sys.modules["lazy_one"]


def test_after_import_waits_for_a_module_that_is_not_there_yet(tmp_path, monkeypatch):
    from commhooks.after_import import after_import

    seen = []
    after_import("lazy_two", seen.append)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError):
        import lazy_two
    (tmp_path / "lazy_two.py").write_text("")
    import importlib

    importlib.invalidate_caches()
    import lazy_two

    assert seen == [lazy_two]
    del sys.modules["lazy_two"]
