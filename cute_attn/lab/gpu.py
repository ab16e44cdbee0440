"""Limits and rates per clock of a multiprocessor of each target.

From the CUDA C++ Programming Guide's tables of compute capabilities and of arithmetic instructions; the tensor cores'
rate is the data sheet's dense fp16 rate over multiprocessors and boost clock. On Hopper mma.sync reaches 0.62 of what
wgmma does (Luo et al. 2024, https://arxiv.org/abs/2402.13499). Memory: nine tenths of the data sheet's rate, at the
boost clock.
"""

from dataclasses import dataclass

REGISTERS = 65_536
RESERVED_SHARED_MEMORY = 1024
"""Bytes that the system reserves in each block."""
SCHEDULERS = 4
"""Warp schedulers, each of which issues one instruction per clock."""
SPECIAL = 16
"""Lanes of a special-function instruction per clock."""
SHARED_BYTES = 128
"""Bytes of shared memory per clock: a wavefront."""
ADDED_BYTES = 32
"""Bytes of fp32 additions to global memory per clock, in L2: as measured on an H200, bench/notes.md."""
_REGISTER_GRAIN = 256  # a warp's registers are allocated in multiples of this


@dataclass(frozen=True)
class Multiprocessor:
    """Maximum shared memory, warps and blocks of a multiprocessor; its floating-point operations per clock by mma.sync
    and wgmma with 16-bit operands. For the whole GPU: ``count`` of multiprocessors, and memory ``bytes`` per clock.
    """

    shared_memory: int
    warps: int
    blocks: int
    mma_sync: float
    wgmma: float
    count: int
    bytes: float


MULTIPROCESSORS = {
    "sm80": Multiprocessor(167_936, 64, 32, 2048, 0, 108, 1300),  # A100, 80 GB
    "sm86": Multiprocessor(102_400, 48, 16, 1024, 0, 84, 360),  # A40
    "sm89": Multiprocessor(102_400, 48, 24, 1024, 0, 142, 310),  # L40S
    "sm90": Multiprocessor(233_472, 64, 32, 0.62 * 4096, 4096, 132, 2200),  # H200
    # B200; mma.sync is taken to be as on Hopper
    "sm100": Multiprocessor(233_472, 64, 32, 0.62 * 4096, 0, 148, 3900),
    "sm120": Multiprocessor(102_400, 48, 24, 1024, 0, 188, 620),  # RTX PRO 6000
}


def resident_blocks(target: str, threads: int, registers: int, shared_memory: int) -> tuple[int, str]:
    """How many blocks a multiprocessor holds at a time, and what limits them; registers: per thread at launch."""
    limits = MULTIPROCESSORS[target]
    warps = -(-threads // 32)
    registers_of_warp = -(-32 * registers // _REGISTER_GRAIN) * _REGISTER_GRAIN
    # A scheduler has a quarter of the registers for its warps.
    warps_by_registers = REGISTERS // SCHEDULERS // registers_of_warp * SCHEDULERS
    most = {
        "shared memory": limits.shared_memory // (shared_memory + RESERVED_SHARED_MEMORY),
        "registers": warps_by_registers // warps,
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
    }
    what = min(most, key=lambda name: most[name])
    return most[what], what
