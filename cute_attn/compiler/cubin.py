"""The costs of a compiled kernel, read from the compiler's outputs.

Registers, stack and static shared memory are read from the cubin's ELF, dynamic shared memory from the launch in the
lowered host code, spills and dropped optimisations from ptxas's remarks, and instructions from nvdisasm's output.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Attributes of the ".nv.info" section: a symbol's index and a 32-bit value each.
_REGISTER_COUNT = 0x2F
_FRAME_SIZE = 0x11
_VALUE_OF_SIZE = 4  # the attribute format that states its value's size; all others have no further bytes

# A launch configuration in the lowered host code: grid, block, bytes of dynamic shared memory, stream, attributes.
_LAUNCH_CONFIG = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
_LAUNCH_SMEM = re.compile(
    rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, {_LAUNCH_CONFIG}"
)
_FUNCTION = re.compile(r"^  llvm\.func ", re.MULTILINE)

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# C7508: setmaxnreg was ignored. C7510 to C7518: wgmma was serialised, or waits were added.
_PTXAS_WARNING = re.compile(r"\(C(?:7508|751[0-8])\).*?(?= in (?:the )?function\b| ptxas\b|$)")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")


@dataclass(frozen=True)
class Resources:
    """Resources of one thread, or one CTA, of a compiled kernel.

    Attributes:
        registers: 32-bit registers per thread.
        shared_memory_bytes: static and dynamic shared memory per CTA, without the system's.
        spill_store_bytes, spill_load_bytes: bytes spilled to and reloaded from local memory, as ptxas counts them.
        local_bytes: stack and local memory per thread.
    """

    registers: int
    shared_memory_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    local_bytes: int


def read_resources(cubin: bytes, remarks: str, module: str) -> Resources:
    """Read the maximum registers and memory of any kernel in a cubin, and the spills of all its kernels.

    Args:
        cubin: the ELF image.
        remarks: the compiler's output under ``remarks{ptx}``.
        module: the lowered module with its host code, as text.
    """
    text = _plain(remarks)
    spills = [(int(stores), int(loads)) for stores, loads in _SPILLS.findall(text)]
    if not spills:
        raise ValueError("the compiler printed no spill counts; its remarks may have changed their form")
    registers, frame, static = _elf_resources(cubin)
    return Resources(
        registers=registers,
        shared_memory_bytes=static + _dynamic_shared_memory(module),
        spill_store_bytes=sum(stores for stores, _ in spills),
        spill_load_bytes=sum(loads for _, loads in spills),
        local_bytes=frame,
    )


def read_warnings(remarks: str) -> tuple[str, ...]:
    """The compiler's warnings that cost speed: serialised wgmma (C7510 to C7518), dropped setmaxnreg (C7508)."""
    return tuple(dict.fromkeys(_PTXAS_WARNING.findall(_plain(remarks))))


def _plain(remarks: str) -> str:
    return " ".join(_ANSI.sub("", remarks).split())


def sections(elf: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each section of a 64-bit little-endian ELF image."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("the cubin is not a 64-bit ELF image")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, _kind, _flags, _address, offset, size in headers:
        start = names + name
        yield elf[start : elf.index(b"\0", start)].decode(), offset, size


def _elf_resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers, stack bytes and static shared memory: the maximum of each over the cubin's kernels."""
    registers = frame = shared = reserved = 0
    for name, offset, size in sections(cubin):
        if name == ".nv.info":
            for attribute, value in _info_values(cubin[offset : offset + size]):
                if attribute == _REGISTER_COUNT:
                    registers = max(registers, value)
                elif attribute == _FRAME_SIZE:
                    frame = max(frame, value)
        elif name.startswith(".nv.shared.reserved"):
            reserved = 1024  # from sm90 on a kernel's section starts with the system's reserved bytes
        elif name.startswith(".nv.shared."):
            shared = max(shared, size)
    if registers == 0:
        raise ValueError("the cubin states no register count")
    return registers, frame, max(0, shared - reserved)


def _info_values(info: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _VALUE_OF_SIZE:
            continue
        if size == 8:
            yield attribute, struct.unpack_from("<II", info, at)[1]
        at += size


def _dynamic_shared_memory(module: str) -> int:
    """The largest dynamic shared memory, in bytes, of any launch in the host code."""
    sizes = []
    for function in _FUNCTION.split(module)[1:]:
        for field in _LAUNCH_SMEM.findall(function):
            store = re.search(rf"llvm\.store (%\w+), {field} : i64", function)
            if store is None:
                continue
            constant = re.search(rf"{store[1]} = llvm\.mlir\.constant\((\d+) : i64\)", function)
            if constant is None:
                raise ValueError("a launch's shared memory is not a constant; a kernel's has to be")
            sizes.append(int(constant[1]))
    if not sizes:
        raise ValueError("no launch was found in the host code; its form may have changed")
    return max(sizes)


def cuda_tool(name: str) -> str:
    """Path of a CUDA binary utility: from its Python package, from PATH or CUDA_HOME, or from Triton."""
    try:
        for file in importlib.metadata.files(f"nvidia-cuda-{name}") or ():
            if file.name == name:
                return str(file.locate())
    except importlib.metadata.PackageNotFoundError:
        pass
    places = [os.environ.get("PATH", ""), os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        places.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        raise FileNotFoundError(f"{name} is not installed; `pip install nvidia-cuda-{name}` brings it")
    return found


def disassemble(cubin: bytes) -> str:
    """The cubin's SASS, as nvdisasm prints it."""
    return _nvdisasm(cubin, "-c")


def disassemble_json(cubin: bytes) -> Any:
    """The cubin's SASS as nvdisasm's JSON, with source lines if the kernel was built with line info.

    Raises:
        FileNotFoundError: nvdisasm is not installed.
    """
    return json.loads(_nvdisasm(cubin, "-json", "-g"))


def _nvdisasm(cubin: bytes, *options: str) -> str:
    tool = cuda_tool("nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"nvdisasm failed: {done.stderr.strip()}")
    return done.stdout


def count_instructions(sass: str) -> dict[str, int]:
    """Instructions in the SASS, by mnemonic without modifiers, most frequent first."""
    return dict(Counter(_INSTRUCTION.findall(sass)).most_common())
