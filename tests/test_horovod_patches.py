"""The patches and their script: they apply to the release they name, and to nothing else."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "patches" / "build-horovod"


def _load_script():
    loader = importlib.machinery.SourceFileLoader("build_horovod", str(SCRIPT))
    spec = importlib.util.spec_from_loader("build_horovod", loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_horovod"] = module  # dataclasses and annotations look a module up by its name
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = writes
    return module


build = _load_script()


@pytest.fixture(scope="module")
def sdist():
    """The release, from the cache or fetched by name; skipped only where no index can be reached."""
    try:
        return build.fetch_sdist(build.cache_folder())
    except build.BuildError as error:
        if "sha256" in str(error):
            raise
        pytest.skip(f"Horovod's sdist can't be fetched here: {str(error).splitlines()[0]}")


@pytest.fixture
def source(sdist, tmp_path):
    return build.unpack(sdist, tmp_path)


def test_every_patch_applies_to_the_release(source):
    assert "set(CMAKE_CXX_STANDARD 17)" in (source / "CMakeLists.txt").read_text()
    assert "set(CMAKE_CXX_STANDARD 17)" in (source / "horovod/torch/CMakeLists.txt").read_text()
    assert "sleep_for(std::chrono::microseconds(100))" in (source / "horovod/torch/mpi_ops_v2.cc").read_text()
    assert (
        "iface = global_context.gloo_iface_;" in (source / "horovod/common/gloo/gloo_context.cc").read_text()
    )
    assert "global_ranks_.resize(size_);" in (source / "horovod/common/gloo/gloo_controller.cc").read_text()


def test_patch_program_agrees_with_our_applier(sdist, source, tmp_path):
    """`patch`, where it is installed, makes the same files."""
    import shutil
    import tarfile

    if shutil.which("patch") is None:
        pytest.skip("the program `patch` isn't installed")
    other = tmp_path / "other"
    with tarfile.open(sdist) as archive:
        archive.extractall(other)
    root = other / source.name
    for patch in build.patch_files():
        with open(patch) as text:
            subprocess.run(["patch", "-p1", "-s", "-F0"], stdin=text, cwd=root, check=True)
        for line in patch.read_text().splitlines():
            if line.startswith("+++ b/"):
                name = line[len("+++ b/") :]
                assert (root / name).read_bytes() == (source / name).read_bytes()


def test_applying_twice_is_refused(source):
    with pytest.raises(build.BuildError, match=r"0001-cxx17.patch doesn't apply at line 19"):
        build.apply_patch(build.patch_files()[0], source)


def test_other_source_is_refused(tmp_path):
    with pytest.raises(build.BuildError, match="isn't in this source; another release"):
        build.apply_patch(build.patch_files()[0], tmp_path)


def test_tampered_sdist_is_refused_before_it_is_unpacked(sdist, tmp_path):
    tampered = tmp_path / sdist.name
    content = bytearray(sdist.read_bytes())
    content[len(content) // 2] ^= 1
    tampered.write_bytes(content)
    with pytest.raises(build.BuildError, match="tampered"):
        build.unpack(tampered, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tampered_sdist_in_the_cache_is_named_by_the_command(tmp_path):
    cache = tmp_path / "commhooks" / "horovod"
    cache.mkdir(parents=True)
    (cache / f"horovod-{build.VERSION}.tar.gz").write_bytes(b"something else")
    command = [sys.executable, str(SCRIPT), "--check"]
    done = subprocess.run(
        command, env={"XDG_CACHE_HOME": str(tmp_path), "PATH": ""}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("build-horovod: ") and build.SDIST_SHA256 in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("patch", build.patch_files(), ids=lambda path: path.name)
def test_every_patch_has_its_header_and_little_else(patch):
    header, _, body = patch.read_text().partition("\n--- a/")
    for field in ("Applies to:", "Reason:", "Relies on:", "Works when:", "Delete:"):
        assert field in header, f"{patch.name} lacks {field}"
    ours = [line for line in body.splitlines() if line.startswith(("-", " ")) and not line.startswith("--- ")]
    assert len(ours) <= 2, "as little of Horovod's text as a patch can hold"


def test_key_follows_torch_and_patches(tmp_path, monkeypatch):
    key = build.build_key("2.13.0")
    assert key == build.build_key("2.13.0") != build.build_key("2.12.0")
    for patch in build.patch_files():
        (tmp_path / patch.name).write_text("another header\n" + patch.read_text())
    original = build.patch_files
    monkeypatch.setattr(build, "patch_files", lambda: original(tmp_path))
    assert build.build_key("2.13.0") == key, "a header alone needs no new build"
    first = original(tmp_path)[0]
    first.write_text(first.read_text().replace("STANDARD 17", "STANDARD 20"))
    assert build.build_key("2.13.0") != key


def test_missing_compiler_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no-such-compiler isn't installed"):
        build.build_environment(tmp_path, "key", "2.13.0")


def test_torch_2_14_gets_the_newer_standard(tmp_path):
    assert "-std=c++20" in build._compiler_wrapper(tmp_path, "g++", "2.14.0+cpu").read_text()
    assert "-std" not in build._compiler_wrapper(tmp_path, "g++", "2.13.0+cpu").read_text()


def test_second_run_finds_it_installed():
    version = f"{build.VERSION}+commhooks.{build.build_key(build.torch_version())}"
    if build.installed_version() != version:
        pytest.skip("this Python has no Horovod built from these patches; run patches/build-horovod")
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=20, check=True
    )
    assert f"{version} is installed already" in done.stdout
