"""Compiled kernels on disk: one folder a kernel, written whole or not at all; a corrupt entry is a miss.

Entries are loaded as native code. So the cache is for its user alone (mode 0700), and what another user owns or may
write is not loaded.
"""

import json
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_attn.fingerprint import digest

OBJECT, CUBIN, PTX, META = "kernel.o", "kernel.cubin", "kernel.ptx", "meta.json"
_FILES = (OBJECT, CUBIN, PTX)
_NAMES = ("kernels", "locks")
_FORMAT = 1
_warned: set[Path] = set()


@dataclass(frozen=True)
class Entry:
    """A kernel on disk.

    Attributes:
        folder: of its files.
        meta: name, target, tile, resources, warnings, seconds, ...
        size: bytes of its files.
        last_used: seconds since the epoch.
    """

    folder: Path
    meta: dict[str, Any]
    size: int
    last_used: float

    @property
    def key(self) -> str:
        return self.folder.name

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


class DiskCache:
    """Entries below one folder, shared by any number of processes.

    An entry is renamed into place once complete, so a reader sees all of it or none. It holds a digest over its files.
    One that does not match counts as absent, and the next :meth:`put` replaces it; so does one that is not the user's
    own, with a warning.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._kernels, self._locks = (root / name for name in _NAMES)

    def prepare(self) -> bool:
        """Make the cache's folders, for this user alone; returns whether their contents can be trusted.

        A folder that holds more than the cache, such as ``/tmp``, is left as it is.
        """
        for folder in (self.root, self._kernels):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            if status.st_uid == os.geteuid() and status.st_mode & 0o077 and self._holds_nothing_else():
                with suppress(OSError):  # a read-only cache works as well
                    folder.chmod(0o700)
            if not self._is_own(folder):
                return False
        return True

    def _holds_nothing_else(self) -> bool:
        return all(name in _NAMES or name.startswith("new-") for name in os.listdir(self.root))

    def get(self, key: str) -> Entry | None:
        """The entry of that key, checked, or None. Its time of last use becomes now."""
        entry = self._read(self._kernels / key)
        if entry is not None:
            with suppress(OSError):  # a read-only cache works as well
                os.utime(entry.folder / META)
        return entry

    def put(self, key: str, meta: dict[str, Any], files: dict[str, bytes]) -> Entry:
        """Store a kernel's ``OBJECT``, ``CUBIN`` and ``PTX`` with their metadata."""
        self.prepare()
        scratch = Path(tempfile.mkdtemp(dir=self.root, prefix="new-"))
        try:
            for name in _FILES:
                _write(scratch / name, files[name])
            record = {
                "format": _FORMAT,
                "digest": _digest(meta, [files[name] for name in _FILES]),
                "meta": meta,
            }
            _write(scratch / META, json.dumps(record, indent=1).encode())
            target = self._kernels / key
            if target.exists():  # corrupt, or written by another process meanwhile
                os.rename(target, scratch / "old")
            os.rename(scratch, target)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        shutil.rmtree(target / "old", ignore_errors=True)
        entry = self._read(target)
        if entry is None:
            raise OSError(f"what was just written to {target} does not read back")
        return entry

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Held by the process that builds a kernel; others wait and then find it built."""
        from filelock import FileLock

        self._locks.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(self._locks / f"{key}.lock"):
            yield

    def entries(self) -> list[Entry]:
        """All sound entries, the most recently used first."""
        folders = self._kernels.iterdir() if self._kernels.is_dir() else ()
        entries = [entry for folder in folders if (entry := self._read(folder)) is not None]
        return sorted(entries, key=lambda entry: -entry.last_used)

    def prune(self, older_than: float | None = None) -> tuple[int, int]:
        """Remove entries not used for ``older_than`` seconds (None: all), and broken ones.

        Returns:
            the number of removed entries, and their bytes.
        """
        now = time.time()
        count = size = 0
        for folder in list(self._kernels.iterdir()) if self._kernels.is_dir() else []:
            entry = self._read(folder)
            if entry is not None and older_than is not None and now - entry.last_used < older_than:
                continue
            size += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            count += 1
            shutil.rmtree(folder, ignore_errors=True)
            (self._locks / f"{folder.name}.lock").unlink(missing_ok=True)
        for leftover in self.root.glob("new-*"):  # of a process killed while writing
            if now - leftover.stat().st_mtime > 3600:
                shutil.rmtree(leftover, ignore_errors=True)
        return count, size

    def _is_own(self, *paths: Path) -> bool:
        """Whether this user alone owns and may write these; warns once where not."""
        for path in paths:
            status, user = path.stat(), os.geteuid()
            if status.st_uid == user and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                continue
            if paths[0] not in _warned:
                _warned.add(paths[0])
                owner = status.st_uid
                why = "may be written by others" if owner == user else f"belongs to user {owner}"
                warnings.warn(
                    f"{path} {why}, so no kernel is loaded from there; accepted: what user {user} alone owns "
                    "and may write (CUTE_ATTN_CACHE_DIR names another folder)",
                    stacklevel=2,
                )
            return False
        return True

    def _read(self, folder: Path) -> Entry | None:
        try:
            if not self._is_own(folder, *(folder / name for name in (META, *_FILES))):
                return None
            record = json.loads((folder / META).read_bytes())
            contents = [(folder / name).read_bytes() for name in _FILES]
            sound = record["format"] == _FORMAT and record["digest"] == _digest(record["meta"], contents)
            used = (folder / META).stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not sound:
            return None
        return Entry(folder, record["meta"], sum(map(len, contents)), used)


def _write(path: Path, content: bytes) -> None:
    """For this user alone, whatever the umask."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)


def _digest(meta: dict[str, Any], contents: list[bytes]) -> str:
    return digest(json.dumps(meta, sort_keys=True).encode(), *contents)


def default_cache() -> DiskCache | None:
    """The user's cache: ``CUTE_ATTN_CACHE_DIR``, or ``cute_attn`` in the user's folder for caches.

    None where ``CUTE_ATTN_CACHE`` is ``0``.
    """
    if os.environ.get("CUTE_ATTN_CACHE", "1") == "0":
        return None
    folder = os.environ.get("CUTE_ATTN_CACHE_DIR")
    if folder:
        return DiskCache(Path(folder))
    caches = os.environ.get("XDG_CACHE_HOME")
    return DiskCache((Path(caches) if caches else Path.home() / ".cache") / "cute_attn")
