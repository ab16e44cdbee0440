"""Read the GPU's clock, power and heat, and what limits its clock, by NVML, a library that comes with the driver."""

import ctypes
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# NVML's bits of the reasons why the clock is not higher (nvml.h, nvmlClocksEventReasons).
_REASONS = {
    0x1: "idle", 0x2: "clock setting", 0x4: "power", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake", 0x100: "display clock",
}  # fmt: skip
_SLOWED = ("hardware slowdown", "heat", "heat (hardware)", "power brake")
_CLOCK_SM, _TEMPERATURE_GPU = 1, 0  # NVML's numbers of them


@dataclass(frozen=True)
class State:
    """The GPU at one moment, and the ``reasons`` why its clock is not higher; None for unknown values."""

    clock_mhz: int | None = None
    watts: int | None = None
    celsius: int | None = None
    reasons: tuple[str, ...] = ()

    @property
    def slowed(self) -> bool:
        """True if heat or the hardware, not the power limit, lowers the clock: measured times then mean little."""
        return any(reason in _SLOWED for reason in self.reasons)


def summary(states: Iterable[State]) -> State:
    """The median clock and power, the highest temperature and all reasons of some states."""
    known = list(states)
    reasons = dict.fromkeys(reason for state in known for reason in state.reasons if reason != "idle")
    return State(
        known_median(state.clock_mhz for state in known),
        known_median(state.watts for state in known),
        max((state.celsius for state in known if state.celsius is not None), default=None),
        tuple(reasons),
    )


def known_median(values: Iterable[int | None]) -> int | None:
    """The median of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return round(statistics.median(known)) if known else None


class Sensor:
    """Reads the state of the GPU with torch's UUID, and its driver's version; unknown ones are None."""

    def __init__(self, uuid: str) -> None:
        self._gpu, version = ctypes.c_void_p(), ctypes.create_string_buffer(80)
        try:
            self._nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self._nvml = None
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), ctypes.byref(self._gpu))
        known = self._call("nvmlSystemGetDriverVersion", version, ctypes.c_uint(len(version)))
        self.driver = version.value.decode() if known else None

    def _call(self, function: str, *arguments: Any) -> bool:
        """Call a function of NVML, if this version has it; returns whether it succeeded."""
        found = getattr(self._nvml, function, None)
        return found is not None and found(*arguments) == 0

    def _ask(self, function: str, *which: int) -> int | None:
        """A number that NVML's function has of this GPU, or None."""
        number = ctypes.c_ulonglong()  # which also holds the smaller numbers of most functions
        return number.value if self._call(function, self._gpu, *which, ctypes.byref(number)) else None

    def read(self) -> State:
        power = self._ask("nvmlDeviceGetPowerUsage")
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        reasons = self._ask(names[0]) or self._ask(names[1])  # the second: of an older driver
        return State(
            self._ask("nvmlDeviceGetClockInfo", _CLOCK_SM),
            None if power is None else round(power / 1000),
            self._ask("nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
            tuple(name for bit, name in _REASONS.items() if (reasons or 0) & bit),
        )
