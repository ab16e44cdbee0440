"""``cute-attn hub``: the folder that it writes, and how Hugging Face's kernels library loads it."""

import importlib.util
import json

import pytest
from typer.testing import CliRunner

import cute_attn.flash_attn
from cute_attn.cli import hub
from cute_attn.cli.main import app
from cute_attn.flash_attn import flash_attn_3

VARIANTS = [
    f"{kernel}/build/torch-{backend}"
    for kernel in ("flash-attn2", "flash-attn3")
    for backend in ("cpu", "cuda")
]
FUNCTIONS = {"flash-attn2": cute_attn.flash_attn, "flash-attn3": flash_attn_3}


def test_the_folders_have_flash_attentions_functions(tmp_path):
    done = CliRunner().invoke(app, ["hub", str(tmp_path / "kernel")])
    assert done.exit_code == 0, done.output
    where = tmp_path / "kernel"
    repositories = {
        "kernels-community/flash-attn2": where / "flash-attn2",
        "kernels-community/flash-attn3": where / "flash-attn3",
        "varunneal/flash-attention-3": where / "flash-attn3",
    }
    entries = ":".join(f"{name}={path}" for name, path in repositories.items())
    assert f"export LOCAL_KERNELS={entries}\n" in done.output
    found = sorted(str(p.relative_to(where)) for p in tmp_path.rglob("*") if p.is_file())
    assert found == [f"{variant}/{name}" for variant in VARIANTS for name in ("__init__.py", "metadata.json")]
    ids = set()
    for variant in VARIANTS:
        folder = where / variant
        said = json.loads((folder / "metadata.json").read_text())
        assert said["backend"]["type"] == variant.rpartition("-")[2]
        assert said["id"] not in ("cute_attn", "flash_attn") and said["id"] not in ids
        ids.add(said["id"])
        spec = importlib.util.spec_from_file_location(said["id"], folder / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        wanted = FUNCTIONS[variant.partition("/")[0]]
        for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
            assert getattr(module, name) is getattr(wanted, name)
            assert getattr(module.flash_attn_interface, name) is getattr(wanted, name)  # nanochat asks so
        diffusers = ["_flash_attn_forward", "_flash_attn_backward"]
        if "flash-attn2" in variant:
            diffusers = [f"_wrapped{name}" for name in diffusers]
        assert all(hasattr(module.flash_attn_interface, name) for name in diffusers)
        assert set(module.__all__) <= set(vars(module))


IN_THE_WAY = {
    "module": ("flash-attn2/build/torch-cuda/__init__.py", '"""Somebody\'s own."""\n'),
    "metadata": ("flash-attn3/build/torch-cpu/metadata.json", '{"id": "theirs"}'),
    "no_json": ("flash-attn3/build/torch-cpu/metadata.json", "[1,"),
    "folder": ("flash-attn2/build", "a file"),
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_files_of_others_stay(tmp_path, name):
    where, text = IN_THE_WAY[name]
    (tmp_path / where).parent.mkdir(parents=True)
    (tmp_path / where).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(app, ["hub", str(tmp_path)])
    assert isinstance(done.exception, ValueError) and where in str(done.exception)
    assert "accepted: a fo" in str(done.exception).lower()
    assert (tmp_path / where).read_text() == text and sorted(tmp_path.rglob("*")) == before


@pytest.mark.doors("kernels")
def test_hugging_faces_library_loads_it(tmp_path, monkeypatch):
    import kernels

    hub.write(tmp_path)
    monkeypatch.setenv("LOCAL_KERNELS", hub.local_kernels(tmp_path))
    for repository, wanted in (
        ("kernels-community/flash-attn2", cute_attn.flash_attn),
        ("varunneal/flash-attention-3", flash_attn_3),
    ):
        loaded = kernels.get_kernel(repository, version=1)
        assert loaded.flash_attn_func is loaded.flash_attn_interface.flash_attn_func is wanted.flash_attn_func
