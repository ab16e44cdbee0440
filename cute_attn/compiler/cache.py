"""Compiled kernels on disk: one file per kernel, written whole or not at all; a corrupt one is a miss.

Kernels are loaded as native code, so the cache is private to its user (mode 0700), and files that another user owns or
may write are not loaded. A file's digest covers its key, and the bytes that are checked are the bytes that are loaded:
a user who may rename folders above the cache can only make kernels go missing.
"""

import itertools
import json
import os
import pwd
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from cute_attn.compiler.fingerprint import digest

OBJECT, CUBIN, PTX = "kernel.o", "kernel.cubin", "kernel.ptx"
LIBRARY = "kernel.so"
ELSEWHERE = "CUTE_ATTN_CACHE_DIR names another folder"
_FILES = (OBJECT, CUBIN, PTX)
_NAMES = ("kernels", "locks")
_FORMAT = 2
_warned: set[str] = set()


@dataclass(frozen=True)
class Entry:
    """A stored kernel, in memory or on disk.

    Attributes:
        key: the key that identifies the entry.
        meta: name, target, tile, resources, warnings, seconds, ...
        files: contents of ``OBJECT``, ``CUBIN`` and ``PTX``, or from a bundle of ``LIBRARY`` and ``CUBIN``.
        size: bytes of its file in the cache.
        last_used: seconds since the epoch.
    """

    key: str
    meta: dict[str, Any]
    files: dict[str, bytes]
    size: int = field(default=0, compare=False)
    last_used: float = field(default=0.0, compare=False)


class CacheUnusable(ValueError):
    """The cache has no folder, or its contents cannot be trusted."""


class DiskCache:
    """Kernels below one folder, shared by any number of processes.

    A complete file is renamed into place: readers see all of a file or none, and several processes may write at once.
    A file counts as absent if its digest does not match or, with a warning, if another user owns or may write it; the
    next :meth:`put` replaces the file.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._kernels, self._locks = (root / name for name in _NAMES)

    def prepare(self) -> None:
        """Make the cache's folders, accessible only to this user. A folder that exists may be read-only.

        A root folder that holds other files too, such as ``/tmp``, keeps its mode.

        Raises:
            CacheUnusable: a folder cannot be made, or another user owns or may write it.
        """
        for folder in (self.root, self._kernels):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                status = folder.stat()
                if status.st_uid == os.geteuid() and status.st_mode & 0o077 and self._holds_nothing_else():
                    with suppress(OSError):  # it is read-only
                        folder.chmod(0o700)
                        status = folder.stat()
            except OSError as error:
                raise CacheUnusable(
                    f"the cache {self.root} cannot be made or read ({error}); {ELSEWHERE}"
                ) from None
            reason = _not_own(folder, status)
            if reason is not None:
                raise CacheUnusable(reason)

    def _holds_nothing_else(self) -> bool:
        return all(name in _NAMES or name.startswith("new-") for name in os.listdir(self.root))

    def get(self, key: str) -> Entry | None:
        """The entry stored under ``key``, verified, or None. Sets the file's time of last use to now."""
        path = self._kernels / key
        found = _read(path)
        if found is not None:
            with suppress(OSError):  # it is read-only, or was removed meanwhile
                os.utime(path)
        return found

    def put(self, entry: Entry) -> None:
        """Store an entry, replacing any with the same key.

        Raises:
            OSError: the file could not be written.
            CacheUnusable: :meth:`prepare` failed.
        """
        self.prepare()
        descriptor, scratch = tempfile.mkstemp(dir=self.root, prefix="new-")  # for this user only
        try:
            with open(descriptor, "wb") as file:
                file.writelines(_packed(entry))
            os.replace(scratch, self._kernels / entry.key)
        except BaseException:
            with suppress(OSError):
                os.unlink(scratch)
            raise

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Lock a kernel while this process builds it; other processes wait, then find the kernel built.

        Locks nothing if the cache is not writable, since no process would find the kernel.
        """
        with ExitStack() as held:
            with suppress(OSError):
                self._locks.mkdir(mode=0o700, parents=True, exist_ok=True)
                held.enter_context(FileLock(self._lock_file(key)))
            yield

    def _lock_file(self, key: str) -> Path:
        return self._locks / f"{key}.lock"

    def entries(self) -> list[Entry]:
        """All valid entries without their files, the most recently used first."""
        found = (_read(path) for path in self._stored())
        return sorted((replace(one, files={}) for one in found if one), key=lambda one: -one.last_used)

    def _stored(self) -> list[Path]:
        return list(self._kernels.iterdir()) if self._kernels.is_dir() else []

    def prune(self, older_than: float | None = None) -> tuple[int, int]:
        """Remove broken entries, and those not used for ``older_than`` seconds (None: all).

        Returns:
            the number of removed entries, and their size in bytes.
        """
        now = time.time()
        count = size = 0
        for path in self._stored():
            found = _read(path)
            if found is not None and older_than is not None and now - found.last_used < older_than:
                continue
            size += _remove(path)
            count += 1
            self._remove_lock(path.name)
        for leftover in self.root.glob("new-*"):  # left by a process that was killed while writing
            with suppress(FileNotFoundError):  # it has just been renamed
                if now - leftover.stat().st_mtime > 3600:
                    _remove(leftover)
        return count, size

    def _remove_lock(self, key: str) -> None:
        """Remove a kernel's lock file, unless a process that builds the kernel holds the lock."""
        path = self._lock_file(key)
        with suppress(OSError):  # Timeout is an OSError
            if path.exists():
                with FileLock(path, timeout=0):
                    path.unlink(missing_ok=True)


def _packed(entry: Entry) -> list[bytes]:
    """The bytes of an entry's file: a line of JSON, then the entry's files."""
    files = [entry.files[name] for name in _FILES]
    header = {
        "format": _FORMAT,
        "digest": _digest(entry.key, entry.meta, files),
        "sizes": [len(file) for file in files],
        "meta": entry.meta,
    }
    return [json.dumps(header).encode(), b"\n", *files]


def _read(path: Path) -> Entry | None:
    """The entry of a cache file, or None unless it is intact and only this user may write it."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())  # of the open file, even if another file has its path by now
            reason = _not_own(path, status)
            if reason is not None:
                warn_once(reason)
                return None
            line, _, rest = file.read().partition(b"\n")
        header = json.loads(line)
        ends = list(itertools.accumulate(header["sizes"]))
        files = [rest[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        sound = header["format"] == _FORMAT and header["digest"] == _digest(path.name, header["meta"], files)
        contents = dict(zip(_FILES, files, strict=True))
        entry = Entry(path.name, header["meta"], contents, status.st_size, status.st_mtime)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return entry if sound else None


def _digest(key: str, meta: dict[str, Any], files: list[bytes]) -> str:
    return digest(key.encode(), json.dumps(meta, sort_keys=True).encode(), *files)


def _remove(path: Path) -> int:
    """Remove a file, or a folder found in its place; return the number of bytes removed."""
    with suppress(OSError):  # another process removed it
        if path.is_dir():
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            shutil.rmtree(path, ignore_errors=True)
        else:
            size = path.stat().st_size
            path.unlink()
        return size
    return 0


def _not_own(path: Path, status: os.stat_result) -> str | None:
    """Why a file is not loaded, or None if this user owns it and nobody else may write it."""
    user = os.geteuid()
    if status.st_uid == user and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    why = "may be written by others" if status.st_uid == user else f"belongs to user {status.st_uid}"
    return (
        f"{path} {why}, so no kernel is loaded from there; accepted: what user {user} alone owns and may write "
        f"({ELSEWHERE})"
    )


def warn_once(reason: str) -> None:
    """Warn with the text ``reason``, once per process."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(reason, stacklevel=2)


def caches_folder() -> Path:
    """The user's folder for caches: ``XDG_CACHE_HOME`` if it is an absolute path, else ``~/.cache``."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return Path(given) if os.path.isabs(given) else _home() / ".cache"


def _home() -> Path:
    home = os.environ.get("HOME")
    if not home:
        with suppress(KeyError):
            home = pwd.getpwuid(os.getuid()).pw_dir
    if not home:
        raise CacheUnusable(
            f"HOME is not set and user {os.getuid()} has no home, so there is no folder for compiled kernels; "
            "accepted: a folder as CUTE_ATTN_CACHE_DIR"
        )
    return Path(home).absolute()


_SWITCH = "CUTE_ATTN_CACHE"
_ON, _OFF = ("", "1", "on", "true", "yes"), ("0", "off", "false", "no")


def switched_off() -> str | None:
    """Why the disk cache is off, such as ``"CUTE_ATTN_CACHE is '0'"``, or None."""
    given = os.environ.get(_SWITCH, "")
    word = given.strip().lower()
    if word not in (*_ON, *_OFF):
        warn_once(
            f"{_SWITCH} is {given!r}, which leaves the cache on; accepted: {', '.join((*_ON[1:], *_OFF))}"
        )
    return f"{_SWITCH} is {given!r}" if word in _OFF else None


def default_cache() -> DiskCache | None:
    """The user's cache: in ``CUTE_ATTN_CACHE_DIR``, or in ``cute_attn`` below :func:`caches_folder`.

    None if ``CUTE_ATTN_CACHE`` is 0, off, false or no.

    Raises:
        CacheUnusable: the user has no home folder.
    """
    if switched_off():
        return None
    given = os.environ.get("CUTE_ATTN_CACHE_DIR")
    if not given:
        return DiskCache(caches_folder() / "cute_attn")
    folder = Path(given)
    if folder.parts[:1] == ("~",):
        folder = _home().joinpath(*folder.parts[1:])
    return DiskCache(folder.absolute())


def needed_cache(who: str) -> DiskCache:
    """:func:`default_cache`. Raises ValueError if it is off; who: "prebuilding needs" or the like, for the message."""
    cache = default_cache()
    if cache is None:
        raise ValueError(f"{switched_off()}; {who} the disk cache")
    return cache


def usable_cache() -> DiskCache | None:
    """:func:`default_cache` with its folders made; None if it is switched off or, with a warning, unusable."""
    try:
        cache = default_cache()
        if cache is not None:
            cache.prepare()
    except CacheUnusable as reason:
        warn_once(f"compiled kernels stay in this process: {reason}")
        return None
    return cache
