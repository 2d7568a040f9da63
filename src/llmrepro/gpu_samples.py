"""What GPUs do now, as NVML tells it: load, memory, temperatures, power, clocks, and what holds them back."""

import pynvml

from llmrepro import gpus
from llmrepro.gpus import GIB, Gpu

MEMORY_TEMPERATURE = 82  # NVML_FI_DEV_MEMORY_TEMP
# What NVML says of a card that fell off the bus, was taken away, or hangs until it is reset.
GONE = (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_GpuNotFound, pynvml.NVMLError_ResetRequired)
# NVML's bits, nvmlClocksEventReasons. Idle (1) is left out: it holds nobody back.
REASONS = {
    0x2: "applications_clocks",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
IDLE = 0x1


def sample(gpu: Gpu) -> dict:
    """A row of telemetry.csv; None for what the card or its driver does not tell.

    `lost` comes with it, for the guard: why the card can no longer be used, or None. A card that answers nothing
    at all is lost too: NVML does not always know why.
    """
    gone: list[pynvml.NVMLError] = []

    def ask(name: str, *args):
        if gpu.handle is None:
            return None
        try:
            return getattr(pynvml, name)(gpu.handle, *args)
        except GONE as error:
            gone.append(error)
        except pynvml.NVMLError:
            pass
        return None

    memory, busy = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetUtilizationRates")
    energy_mj = ask("nvmlDeviceGetTotalEnergyConsumption")
    row = {
        "busy": busy and busy.gpu / 100,
        "memory_gib": memory and memory.used / GIB,
        "free_gib": memory and memory.free / GIB,
        "temperature_c": _first(
            ask("nvmlDeviceGetTemperatureV", pynvml.NVML_TEMPERATURE_GPU),
            lambda: ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
        ),
        "memory_temperature_c": _field(ask("nvmlDeviceGetFieldValues", [MEMORY_TEMPERATURE])),
        "power_w": gpus.watts(ask("nvmlDeviceGetPowerUsage")),
        "power_limit_w": gpus.watts(ask("nvmlDeviceGetEnforcedPowerLimit")),
        "energy_j": None if energy_mj is None else energy_mj / 1000,
        "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
        "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
        "throttle": _words(
            _first(
                ask("nvmlDeviceGetCurrentClocksEventReasons"),
                lambda: ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
            )
        ),
    }
    silent = "it answers nothing" if all(value is None for value in row.values()) else None
    return {"device": f"gpu{gpu.index}", **row, "lost": str(gone[0]) if gone else silent}


def _first(found, otherwise):
    """What a driver tells, or what an older one does."""
    return otherwise() if found is None else found


def _field(values) -> int | None:
    """The one field value that was asked for."""
    if values is None or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return values[0].value.uiVal


def _words(reasons: int | None) -> str | None:
    """The reasons joined by "+"; "" for none."""
    if reasons is None:
        return None
    unknown = reasons & ~(IDLE | sum(REASONS))
    return "+".join(
        [word for bit, word in REASONS.items() if reasons & bit] + ([f"{unknown:#x}"] if unknown else [])
    )
