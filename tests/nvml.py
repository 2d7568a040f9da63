"""A stand-in for NVIDIA's management library: cards as a test describes them, asked through the real pynvml.

Functions of pynvml are replaced by ones of the same parameters, which raise pynvml's own exceptions: before
nvmlInit NVMLError_Uninitialized, for what a card does not support NVMLError_NotSupported, as the library does.
"""

import inspect
import queue
from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml

# pynvml's function, with the attribute of a card that it tells.
TELLS = {
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetCudaComputeCapability": "capability",
    "nvmlDeviceGetNumGpuCores": "cores",
    "nvmlDeviceGetEnforcedPowerLimit": "enforced_mw",
    "nvmlDeviceGetPowerManagementLimit": "set_mw",
    "nvmlDeviceGetPowerManagementDefaultLimit": "default_mw",
    "nvmlDeviceGetCurrPcieLinkGeneration": "pcie_generation",
    "nvmlDeviceGetMaxPcieLinkGeneration": "pcie_generation_max",
    "nvmlDeviceGetCurrPcieLinkWidth": "pcie_width",
    "nvmlDeviceGetMaxPcieLinkWidth": "pcie_width_max",
    "nvmlDeviceGetPowerUsage": "power_mw",
    "nvmlDeviceGetTotalEnergyConsumption": "energy_mj",
    "nvmlDeviceGetCurrentClocksEventReasons": "reasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "reasons_as_older_drivers_tell",
}


@dataclass
class Card:
    """None: the card does not support to be asked for it. `lost`: it fell off the bus."""

    name: str | None = "NVIDIA CMP 170HX"
    uuid: str | None = "GPU-aaaa1111-0000-0000-0000-000000000000"
    memory_bytes: int | None = 64 * 2**30
    capability: tuple[int, int] | None = (8, 0)
    cores: int | None = 74 * 64
    enforced_mw: int | None = 180_000
    set_mw: int | None = 180_000
    default_mw: int | None = 250_000
    clocks_mhz: dict[int, int] = field(default_factory=lambda: {1: 1140, 2: 1728})  # by NVML_CLOCK_SM, _MEM
    clocks_max_mhz: dict[int, int] = field(default_factory=lambda: {1: 1410, 2: 1728})
    pcie_generation: int | None = 1
    pcie_generation_max: int | None = 2
    pcie_width: int | None = 16
    pcie_width_max: int | None = 16
    used_bytes: int = 0
    busy_percent: int | None = 0
    core_c: int | None = 40
    core_c_as_older_drivers_tell: int | None = None
    memory_c: int | None = 45
    power_mw: int | None = 60_000
    energy_mj: int | None = 1_000_000
    reasons: int | None = 0x1  # idle
    reasons_as_older_drivers_tell: int | None = None
    tells_xids: bool = True
    pci: tuple[int, int, int] = (0, 1, 0)  # domain, bus, device
    lost: bool = False
    parts: list["Card"] = field(default_factory=list)  # MIG devices


class Library:
    """`opened` counts nvmlInit less nvmlShutdown: 0 when everybody left it as it was. `happens(card, xid)` is an
    error of a card, which sets of events hear that it was registered with."""

    def __init__(self, monkeypatch, cards=(), driver="580.178.04", fails=None):
        self.cards, self.driver, self.fails, self.opened = list(cards), driver, fails, 0
        self.sets: list[tuple[queue.SimpleQueue, list[Card]]] = []  # of events, with the cards they hear of
        named = {n: getattr(self, n) for n in dir(self) if n.startswith("nvml")}
        for name, function in {**named, **{n: self._teller(a) for n, a in TELLS.items()}}.items():
            real = list(inspect.signature(inspect.unwrap(getattr(pynvml, name))).parameters.values())
            ours = list(inspect.signature(function).parameters.values())
            least = [p for p in real if p.default is p.empty]
            assert len(least) <= len(ours) <= len(real), f"{name} takes other arguments"
            monkeypatch.setattr(pynvml, name, function)

    def nvmlInit(self):
        if self.fails is not None:
            raise self.fails()
        self.opened += 1

    def nvmlShutdown(self):
        self._ready()
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self):
        self._ready()
        return self.driver

    def nvmlDeviceGetCount(self):
        self._ready()
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        self._ready()
        if not 0 <= index < len(self.cards):
            raise pynvml.NVMLError_InvalidArgument()
        if self.cards[index].lost:
            raise pynvml.NVMLError_GpuIsLost()
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._ready()
        for card in (*self.cards, *(part for whole in self.cards for part in whole.parts)):
            if card.uuid == uuid:
                return card
        raise pynvml.NVMLError_NotFound()

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migHandle):
        self._ready()
        return next(card for card in self.cards if any(part is migHandle for part in card.parts))

    def nvmlDeviceGetIndex(self, handle):
        self._ready()
        return next(i for i, card in enumerate(self.cards) if card is handle)

    def nvmlDeviceGetMemoryInfo(self, handle):
        total = self._told(handle, handle.memory_bytes)
        return SimpleNamespace(total=total, used=handle.used_bytes, free=total - handle.used_bytes)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self._told(handle, handle.busy_percent), memory=0)

    def nvmlDeviceGetTemperatureV(self, handle, sensor):
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._told(handle, handle.core_c)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._told(handle, handle.core_c_as_older_drivers_tell)

    def nvmlDeviceGetFieldValues(self, handle, fieldIds):
        """A field that a card does not support has its own return code, and the call succeeds."""
        self._told(handle, 0)
        values = (pynvml.c_nvmlFieldValue_t * len(fieldIds))()
        for value, field_id in zip(values, fieldIds, strict=True):
            value.fieldId, known = (
                field_id,
                field_id == pynvml.NVML_FI_DEV_MEMORY_TEMP and handle.memory_c is not None,
            )
            value.nvmlReturn = pynvml.NVML_SUCCESS if known else pynvml.NVML_ERROR_NOT_SUPPORTED
            if known:
                value.valueType, value.value.uiVal = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, handle.memory_c
        return values

    def nvmlDeviceGetPciInfo(self, handle):
        domain, bus, device = self._told(handle, handle.pci)
        return SimpleNamespace(domain=domain, bus=bus, device=device)

    def nvmlEventSetCreate(self):
        self._ready()
        self.sets.append((queue.SimpleQueue(), []))
        return self.sets[-1]

    def nvmlEventSetFree(self, eventSet):
        self.sets.remove(eventSet)

    def nvmlDeviceRegisterEvents(self, handle, eventTypes, eventSet):
        assert eventTypes == pynvml.nvmlEventTypeXidCriticalError
        self._told(handle, handle.tells_xids or None)
        eventSet[1].append(handle)

    def nvmlEventSetWait_v2(self, eventSet, timeoutms):
        try:
            event = eventSet[0].get(timeout=timeoutms / 1000)
        except queue.Empty:
            raise pynvml.NVMLError_Timeout() from None
        if isinstance(event, pynvml.NVMLError):
            raise event
        return event

    def happens(self, card, xid):
        event = SimpleNamespace(device=card, eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=xid)
        for events, registered in self.sets:
            if card in registered:
                events.put(event)

    def nvmlDeviceGetClockInfo(self, handle, type):
        return self._told(handle, handle.clocks_mhz.get(type))

    def nvmlDeviceGetMaxClockInfo(self, handle, type):
        return self._told(handle, handle.clocks_max_mhz.get(type))

    def _teller(self, attribute):
        return lambda handle: self._told(handle, getattr(handle, attribute))

    def _told(self, handle, value):
        self._ready()
        if handle.lost:
            raise pynvml.NVMLError_GpuIsLost()
        if value is None:
            raise pynvml.NVMLError_NotSupported()
        return value

    def _ready(self):
        if self.opened < 1:
            raise pynvml.NVMLError_Uninitialized()
