"""The cache of native code: who may read and write it, several at once, and folders that cannot be used."""

import dataclasses
import errno
import os
import pwd
import resource
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cute_attn import compiler
from cute_attn.compiler import SpillWarning, cache, compiled, cubin
from cute_attn.compiler.cache import CUBIN, OBJECT, PTX, CacheUnusable, DiskCache, Entry
from tests import processes, toy

pytestmark = pytest.mark.filterwarnings("ignore::cute_attn.compiler.SpillWarning")  # of the toy kernel
PARTS = {OBJECT: b"object", CUBIN: b"cubin", PTX: b"ptx"}


def entry(key="key", **meta):
    return Entry(key, {"name": "one"} | meta, PARTS)


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch):
    monkeypatch.setattr(cache, "_warned", set())


@pytest.fixture
def built(fresh_cache, monkeypatch):
    """Keys of the kernels that were built. Compiling itself is not tested here, so a stub replaces it."""
    keys = []

    def build(kernel, target, key, options):
        keys.append(key)
        time.sleep(0.02)  # so that others come meanwhile
        resources = dataclasses.asdict(cubin.Resources(1, 2, 3, 4, 5))
        return entry(key, seconds=1.0, resources=resources, warnings=[], function="f")

    monkeypatch.setattr(compiled, "_build", build)
    return keys


@pytest.fixture(params=[0o022, 0o000], ids=["umask022", "umask000"])
def store(request, tmp_path):
    """A cache with one entry, ``key``."""
    before = os.umask(request.param)
    store = DiskCache(tmp_path / "parents" / "cache")
    store.put(entry())
    os.umask(before)
    return store


def test_only_the_user_has_access_to_folders_and_files(store):
    with store.lock("key"):
        folders = [store.root, *(p for p in store.root.rglob("*") if p.is_dir())]
    assert {folder.name for folder in folders} == {"cache", "kernels", "locks"}
    assert {mode(folder) for folder in folders} == {0o700}
    assert {mode(file) for file in (store.root / "kernels").rglob("*") if file.is_file()} == {0o600}


@pytest.mark.parametrize("name", ["", "kernels"])
def test_a_folder_with_more_permissions_loses_them(store, name):
    (store.root / name).chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.prepare()
        assert store.get("key") == entry()
    assert mode(store.root / name) == 0o700


def test_a_folder_with_other_files_keeps_its_permissions(store):
    (store.root / "other").mkdir()
    store.root.chmod(0o755)
    store.prepare()
    assert mode(store.root) == 0o755


@pytest.mark.parametrize("bits", [0o660, 0o602])
def test_an_entry_that_others_may_write_is_a_miss(store, bits):
    (store.root / "kernels" / "key").chmod(bits)
    with pytest.warns(UserWarning, match="may be written by others") as seen:
        assert store.get("key") is None and store.get("key") is None and store.entries() == []
    assert len(seen) == 1
    store.put(entry(name="two"))
    assert store.get("key").meta == {"name": "two"}


def test_what_belongs_to_another_user_is_neither_read_nor_written(store, monkeypatch):
    owner, before = os.geteuid(), sorted(store.root.rglob("*"))
    store.root.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.warns(UserWarning, match=f"belongs to user {owner}, so .* what user {owner + 1} alone"):
        assert store.get("key") is None
    with pytest.raises(CacheUnusable, match=f"cache belongs to user {owner}"):
        store.prepare()
    assert sorted(store.root.rglob("*")) == before and mode(store.root) == 0o777


def test_an_entry_under_another_key_is_a_miss(store):
    """Someone who may rename a folder above the cache could swap the names of this user's files."""
    os.link(store.root / "kernels" / "key", store.root / "kernels" / "other")
    os.symlink("key", store.root / "kernels" / "third")
    assert store.get("key") == entry() and store.get("other") is None and store.get("third") is None


# ---- several at once ----


def at_once(*calls):
    """Run each function in a separate thread; raises the exceptions that they raise."""
    barrier = threading.Barrier(len(calls))

    def run(call):
        barrier.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(run, call) for call in calls]:
            done.result()


def test_an_entry_is_there_while_it_is_replaced(store):
    missed = []

    def put():
        for i in range(100):
            store.put(entry(i=i))

    def get():
        missed.extend(i for i in range(300) if store.get("key") is None)

    at_once(put, put, put, get)
    assert missed == []


def test_pruning_beside_builders(store):
    def build():
        for i in range(100):
            with store.lock("key"):
                store.put(entry(i=i))

    def prune():
        for _ in range(200):
            store.prune()

    at_once(build, prune, prune)


def test_pruning_leaves_a_lock_that_is_held(store):
    lock = store.root / "locks" / "key.lock"
    with store.lock("key"):
        assert store.prune()[0] == 1 and store.entries() == [] and lock.exists()
    store.put(entry())
    store.prune()
    assert not lock.exists()


@pytest.mark.parametrize("switched_off", [False, True])
def test_threads_that_want_the_same_kernel_build_it_once(built, monkeypatch, switched_off):
    if switched_off:
        monkeypatch.setenv("CUTE_ATTN_CACHE", "0")
    names = [(toy.NAME, f"values={n}") for n in (1, 2)] * 4
    found = []
    at_once(*(lambda each=each: found.append(compiler.compile(*each, "sm80")) for each in names))
    assert len(built) == 2 and len(found) == 8 and len({id(compiled) for compiled in found}) == 2


FORK = """
import io, os, sys, threading
from cute_attn import compiler
from cute_attn.compiler import compiled
from cute_attn.compiler.cache import CUBIN, OBJECT, PTX, Entry
from tests import toy


def build(kernel, target, key, options):
    if threading.current_thread() is thread:
        sys.stderr, own = io.StringIO(), sys.stderr  # as the compiler does
        building.set()
        forked.wait()
        sys.stderr = own
    resources = dict.fromkeys(compiler.Resources.__dataclass_fields__, 0)
    meta = {"seconds": 1.0, "resources": resources, "warnings": [], "function": "f"}
    return Entry(key, meta, {OBJECT: b"", CUBIN: b"", PTX: b""})

compiled._build, own = build, sys.stderr
building, forked = threading.Event(), threading.Event()
thread = threading.Thread(target=compiler.compile, args=(toy.NAME, None, "sm80"))
thread.start()
building.wait()
child = os.fork()
if child == 0:
    free = compiled._building.acquire(blocking=False)
    built = free and compiler.compile(toy.NAME, "values=4", "sm80").not_stored is None
    os._exit(0 if built and sys.stderr is own else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
forked.set()
thread.join()
print("the child's status is", status)
"""


def test_a_child_forked_during_a_build_builds_as_well(fresh_cache, tmp_path):
    (tmp_path / "fork.py").write_text(FORK)
    done = processes.run(str(tmp_path / "fork.py"))
    assert done.stdout == "the child's status is 0\n", done.stderr


# ---- folders that cannot be used ----


def without_room(put):
    """``put`` while this process may write nothing to files; its log may be one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def failing(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            put(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return failing


@pytest.fixture(params=["it cannot be made", "others may write", "no home", "the disk is full", "read-only"])
def unwritable(request, fresh_cache, monkeypatch):
    """A cache that cannot store anything, and the text of the warning about it."""

    def read_only(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    def nobody(uid):
        raise KeyError(uid)

    if request.param == "it cannot be made":
        fresh_cache.write_text("a file")
        monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(fresh_cache / "below"))
        yield "below cannot be made or read .*Not a directory"
    elif request.param == "others may write":
        fresh_cache.mkdir()
        (fresh_cache / "other").touch()
        fresh_cache.chmod(0o777)
        yield "may be written by others"
        assert [path.name for path in fresh_cache.iterdir()] == ["other"]
    elif request.param == "no home":
        for name in ("CUTE_ATTN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", nobody)
        yield "HOME is not set and user .* has no home.*; accepted: a folder as CUTE_ATTN_CACHE_DIR"
    elif request.param == "the disk is full":
        monkeypatch.setattr(DiskCache, "put", without_room(DiskCache.put))
        yield "cannot be written .File too large."
    else:
        DiskCache(fresh_cache).put(entry("another"))
        (fresh_cache / "locks").write_text("so that no lock can be made")
        monkeypatch.setattr(tempfile, "mkstemp", read_only)
        yield "cannot be written .Read-only file system.; CUTE_ATTN_CACHE_DIR names another folder"


def test_a_kernel_that_cannot_be_stored_is_kept(built, unwritable):
    with pytest.warns(UserWarning, match=f"compiled kernels stay in this process: .*{unwritable}") as seen:
        first, second = (compiler.compile(toy.NAME, f"values={n}", "sm80") for n in (1, 2))
    assert sum(one.category is not SpillWarning for one in seen) == 1 and len(built) == 2
    assert first.not_stored and second.not_stored
    assert compiler.compile(toy.NAME, "values=1", "sm80") is first and len(built) == 2


@pytest.mark.filterwarnings("ignore:compiled kernels stay in this process")
def test_what_is_prebuilt_has_to_be_stored(built, unwritable):
    seconds, error = compiler.build_for_later(toy.NAME, "values=1", "sm80")
    why = ("there is no disk cache", "cannot be written", "may be written by others")
    assert seconds == 1.0 and any(text in error for text in why)


def test_nothing_is_left_of_what_could_not_be_written(store, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            store.put(entry(name="two"))
    assert sorted(path.name for path in store.root.iterdir()) == ["kernels"]
    assert store.get("key") == entry()


# ---- where it is ----


@pytest.mark.parametrize(
    "given, root",
    [
        ({"CUTE_ATTN_CACHE_DIR": "/somewhere"}, "/somewhere"),
        ({"CUTE_ATTN_CACHE_DIR": "~/kernels"}, "/home/me/kernels"),
        ({"CUTE_ATTN_CACHE_DIR": "kernels"}, "{here}/kernels"),
        ({"XDG_CACHE_HOME": "/somewhere"}, "/somewhere/cute_attn"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/cute_attn"),
        ({}, "/home/me/.cache/cute_attn"),
        ({"HOME": ""}, "{own}/.cache/cute_attn"),
    ],
)
def test_the_default_folder(monkeypatch, tmp_path, given, root):
    for name in ("CUTE_ATTN_CACHE", "CUTE_ATTN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | given).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    found = cache.default_cache().root
    monkeypatch.chdir("/")
    assert found == Path(root.format(here=tmp_path, own=pwd.getpwuid(os.getuid()).pw_dir))


def test_words_that_switch_the_cache_off_and_leave_it_on(monkeypatch, recwarn):
    for word in ("0", "no", "OFF", "False", " 0 "):
        monkeypatch.setenv("CUTE_ATTN_CACHE", word)
        assert cache.default_cache() is None and cache.switched_off() == f"CUTE_ATTN_CACHE is {word!r}"
    for word in ("", "1", "yes", "On", "TRUE"):
        monkeypatch.setenv("CUTE_ATTN_CACHE", word)
        assert cache.default_cache() is not None and not recwarn
    monkeypatch.setenv("CUTE_ATTN_CACHE", "never")
    with pytest.warns(UserWarning, match="'never', which leaves the cache on; accepted: 1, on,"):
        assert cache.default_cache() is not None
