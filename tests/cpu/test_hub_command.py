"""``cute-attn hub``: the folder, and what Hugging Face's kernels library makes of it."""

import importlib.util
import json

import pytest
from typer.testing import CliRunner

import cute_attn.flash_attn
from cute_attn import hub_command
from cute_attn.cli import app


def test_the_folder_has_flash_attentions_functions(tmp_path):
    done = CliRunner().invoke(app, ["hub", str(tmp_path / "kernel")])
    assert done.exit_code == 0, done.output
    assert f"export LOCAL_KERNELS=kernels-community/flash-attn2={tmp_path / 'kernel'}\n" in done.output
    found = sorted(str(p.relative_to(tmp_path / "kernel")) for p in tmp_path.rglob("*") if p.is_file())
    variants = [
        f"build/torch-{backend}/{name}"
        for backend in ("cpu", "cuda")
        for name in ("__init__.py", "metadata.json")
    ]
    assert found == variants
    for backend in ("cpu", "cuda"):
        folder = tmp_path / "kernel" / "build" / f"torch-{backend}"
        said = json.loads((folder / "metadata.json").read_text())
        assert said["backend"]["type"] == backend and said["id"] not in ("cute_attn", "flash_attn")
        spec = importlib.util.spec_from_file_location(said["id"], folder / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.flash_attn_varlen_func is cute_attn.flash_attn.flash_attn_varlen_func
        assert module.flash_attn_with_kvcache is cute_attn.flash_attn.flash_attn_with_kvcache


def test_writing_twice_changes_nothing(tmp_path):
    first = {path: path.read_text() for path in hub_command.write(tmp_path)}
    assert {path: path.read_text() for path in hub_command.write(tmp_path)} == first


def test_a_wrong_folder_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    done = CliRunner().invoke(app, ["hub", str(file)])
    assert isinstance(done.exception, ValueError) and "a file; accepted: a folder" in str(done.exception)
    with pytest.raises(ValueError, match="accepted: a path without ':' and '='"):
        hub_command.write(tmp_path / "a=b")


def test_hugging_faces_library_loads_it(tmp_path):
    kernels = pytest.importorskip("kernels")
    hub_command.write(tmp_path)
    loaded = kernels.get_local_kernel(tmp_path)
    assert loaded.flash_attn_func is cute_attn.flash_attn.flash_attn_func
