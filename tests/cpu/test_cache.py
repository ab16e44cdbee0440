"""Access to the cache of native code: its user alone."""

import os
import warnings

import pytest

from cute_attn import cache, compiler
from cute_attn.cache import CUBIN, META, OBJECT, PTX, DiskCache
from tests import toy

FILES = {OBJECT: b"object", CUBIN: b"cubin", PTX: b"ptx"}


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch):
    monkeypatch.setattr(cache, "_warned", set())


@pytest.fixture(params=[0o022, 0o000], ids=["umask022", "umask000"])
def store(request, tmp_path):
    """A cache with one entry, ``key``."""
    before = os.umask(request.param)
    store = DiskCache(tmp_path / "parents" / "cache")
    store.put("key", {"name": "one"}, FILES)
    os.umask(before)
    return store


def test_only_the_user_has_access_to_folders_and_files(store):
    with store.lock("key"):
        folders = [store.root, *(p for p in store.root.rglob("*") if p.is_dir())]
    assert {folder.name for folder in folders} == {"cache", "kernels", "locks", "key"}
    assert {mode(folder) for folder in folders} == {0o700}
    assert {mode(file) for file in (store.root / "kernels").rglob("*") if file.is_file()} == {0o600}


@pytest.mark.parametrize("name", ["", "kernels"])
def test_a_folder_with_more_permissions_loses_them(store, name):
    (store.root / name).chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.prepare() and store.get("key").meta == {"name": "one"}
    assert mode(store.root / name) == 0o700


def test_a_folder_with_other_files_keeps_its_permissions(store):
    (store.root / "other").mkdir()
    store.root.chmod(0o755)
    assert store.prepare() and mode(store.root) == 0o755
    store.root.chmod(0o777)
    with pytest.warns(UserWarning, match="cache may be written by others, so no kernel is loaded from there"):
        assert not store.prepare()
    assert mode(store.root) == 0o777


@pytest.mark.parametrize("bits", [0o770, 0o702])
@pytest.mark.parametrize("name", ["", OBJECT, CUBIN, PTX, META])
def test_an_entry_that_others_may_write_is_a_miss(store, name, bits):
    (store.root / "kernels" / "key" / name).chmod(bits)
    with pytest.warns(UserWarning, match="may be written by others") as seen:
        assert store.get("key") is None and store.get("key") is None and store.entries() == []
    assert len(seen) == 1
    store.put("key", {"name": "two"}, FILES)
    assert store.get("key").meta == {"name": "two"}


def test_an_entry_of_another_user_is_a_miss(store, monkeypatch):
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.warns(
        UserWarning, match=f"key belongs to user {owner}, so .* what user {owner + 1} alone"
    ) as seen:
        assert store.get("key") is None and store.get("key") is None
    assert len(seen) == 1


def test_a_folder_of_another_user_is_neither_read_nor_written(store, monkeypatch):
    owner, before = os.geteuid(), sorted(store.root.rglob("*"))
    store.root.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.warns(UserWarning, match=f"cache belongs to user {owner}"):
        assert not store.prepare()
    assert sorted(store.root.rglob("*")) == before and mode(store.root) == 0o777


def test_kernels_are_not_stored_where_others_may_write(fresh_cache):
    """This process has them in memory; a new one builds them again."""
    fresh_cache.mkdir()
    (fresh_cache / "other").touch()
    fresh_cache.chmod(0o777)
    with pytest.warns(UserWarning, match="may be written by others"):
        compiled = compiler.compile(toy.NAME, target="sm80")
    assert callable(compiled.function)
    assert [path.name for path in fresh_cache.iterdir()] == ["other"]
