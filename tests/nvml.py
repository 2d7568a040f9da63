"""A stand-in for NVIDIA's management library: cards as a test describes them, asked through the real pynvml.

Functions of pynvml are replaced by ones of the same parameters, which raise pynvml's own exceptions: before
nvmlInit NVMLError_Uninitialized, for what a card does not support NVMLError_NotSupported, as the library does.
"""

import inspect
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
    lost: bool = False
    parts: list["Card"] = field(default_factory=list)  # MIG devices


class Library:
    """`opened` counts nvmlInit less nvmlShutdown: 0 when everybody left it as it was."""

    def __init__(self, monkeypatch, cards=(), driver="580.178.04", fails=None):
        self.cards, self.driver, self.fails, self.opened = list(cards), driver, fails, 0
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
        return SimpleNamespace(total=self._told(handle, handle.memory_bytes), used=0, free=handle.memory_bytes)

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
