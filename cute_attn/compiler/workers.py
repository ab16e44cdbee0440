"""Worker processes that answer lines of JSON: ``python -m MODULE``, since spawning would rerun the caller's script."""

import concurrent.futures
import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class Worker:
    """A process that runs a module with this process's ``sys.path``, and answers one message at a time.

    The module reads lines of JSON from stdin until it ends. The first line is ``sys.path``; the module answers each
    later line with one line: see :mod:`cute_attn.compiler.prebuild_worker`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._stopped = False
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[str]":
        root = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C reaches only the caller; it stops its workers
            env=os.environ | {"PYTHONPATH": paths},
        )
        _send(process, [str(path) for path in sys.path])
        return process

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer. If the process ends, return ``{"error": ...}`` and start a new one."""
        _send(self._process, message)
        assert self._process.stdout is not None
        line = ""
        with contextlib.suppress(ValueError):  # another thread has stopped it and closed the pipe
            line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        status = _ended(self._process)
        if not self._stopped:
            self._process = self._start()
        return {"error": f"the process that built it ended with status {status}"}

    def stop(self) -> None:
        """End the process at once. The disk cache stays intact: files are written whole or not at all."""
        self._stopped = True
        self._process.terminate()
        _ended(self._process)


class Workers:
    """Up to ``count`` processes of one module, each started when a message finds no idle one."""

    def __init__(self, module: str, count: int) -> None:
        self._module = module
        self._own = threading.local()
        self._started: list[Worker] = []
        self._threads = concurrent.futures.ThreadPoolExecutor(count, initializer=self._start)

    def _start(self) -> None:
        self._own.worker = Worker(self._module)
        self._started.append(self._own.worker)

    def ask(self, message: dict[str, Any]) -> concurrent.futures.Future[dict[str, Any]]:
        """Queue a message; its result is the answer, see :meth:`Worker.ask`."""
        return self._threads.submit(lambda: self._own.worker.ask(message))

    def stop(self) -> None:
        """End all processes at once; messages that wait are not sent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._started:
            worker.stop()


def _ended(process: "subprocess.Popen[str]") -> int:
    """Wait for a process to end, close its pipes and return its status."""
    status = process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # input that it has not read
            pipe.close()
    return status


def _send(process: "subprocess.Popen[str]", message: Any) -> None:
    """Write one line of JSON. Errors are ignored: a missing answer shows that the process has ended."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ValueError):
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
