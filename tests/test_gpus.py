"""What the kit says of GPUs: what NVML tells, and nothing where it does not."""

import pynvml
import pytest
from nvml import Card, Library

from llmrepro import gpus, machine


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch):
    monkeypatch.delenv(gpus.VISIBLE, raising=False)


@pytest.fixture
def bus(monkeypatch, tmp_path):
    """A PCI bus with these devices: (class, vendor, device)."""

    def make(*devices):
        monkeypatch.setattr(gpus, "PCI", tmp_path)
        for number, told in enumerate(devices):
            folder = tmp_path / f"0000:00:{number:02x}.0"
            folder.mkdir()
            for name, value in zip(("class", "vendor", "device"), told, strict=True):
                (folder / name).write_text(value + "\n")

    return make


NVIDIA, AMD = ("0x030200", "0x10de", "0x20c2"), ("0x030000", "0x1002", "0x744c")
BRIDGE, INSTINCT, NPU = (
    ("0x060400", "0x1002", "0x1234"),
    ("0x120000", "0x1002", "0x74a1"),
    ("0x120000", "0x8086", "0x7d1d"),
)


def test_a_card_is_told_as_nvml_tells_it(monkeypatch):
    library = Library(monkeypatch, [Card(enforced_mw=175_500)])
    assert gpus.describe() == gpus.Found(
        [
            {
                "index": 0,
                "name": "NVIDIA CMP 170HX",
                "memory_gib": 64.0,
                "driver": "580.178.04",
                "compute_capability": "8.0",
                "power_limit_w": 175.5,
                "power_limit_set_w": 180.0,
                "power_limit_default_w": 250.0,
                "sm_clock_mhz": 1140,
                "memory_clock_mhz": 1728,
                "sm_clock_max_mhz": 1410,
                "memory_clock_max_mhz": 1728,
                "pcie_generation": 1,
                "pcie_width": 16,
                "pcie_generation_max": 2,
                "pcie_width_max": 16,
                "multiprocessors": 74,
            }
        ]
    )
    assert library.opened == 0


def test_what_a_card_does_not_support_is_unknown_and_the_rest_is_told(monkeypatch):
    bare = Card(memory_bytes=None, capability=None, enforced_mw=None, default_mw=None, clocks_mhz={2: 1728})
    Library(monkeypatch, [bare])
    (found,) = gpus.describe().gpus
    unknown = {name for name, value in found.items() if value is None}
    assert unknown == {
        *("memory_gib", "compute_capability", "power_limit_w", "power_limit_default_w", "sm_clock_mhz"),
        "multiprocessors",  # known only with the capability
    }
    assert gpus.line(found) == "NVIDIA CMP 170HX, PCIe 2.0 x16, driver 580.178.04"


def test_a_lost_card_is_one_of_which_nothing_is_known(monkeypatch):
    Library(monkeypatch, [Card(lost=True), Card(name="NVIDIA H200")])
    lost, whole = gpus.describe().gpus
    assert {name for name, value in lost.items() if value is not None} == {"index", "driver"}
    assert whole["name"] == "NVIDIA H200"
    assert gpus.line(lost).startswith("GPU 0, which does not tell its name")


def test_no_cards_is_not_unknown(monkeypatch):
    Library(monkeypatch, [])
    assert gpus.describe() == gpus.Found([])


@pytest.mark.parametrize(
    ("error", "devices", "said"),
    [
        (
            pynvml.NVMLError_LibraryNotFound,
            [AMD, BRIDGE],
            "which comes with NVIDIA's driver, is not here, and no NVIDIA GPU is on the PCI bus",
        ),
        (pynvml.NVMLError_LibraryNotFound, [NVIDIA], "while NVIDIA GPU 10de:20c2 is on the PCI bus"),
        (pynvml.NVMLError_DriverNotLoaded, [], "NVIDIA's driver is not loaded, and no NVIDIA GPU"),
        (pynvml.NVMLError_LibRmVersionMismatch, [], "restart the machine"),
        (pynvml.NVMLError_NoPermission, [], "NVIDIA's driver says: Insufficient Permissions"),
    ],
)
def test_without_nvml_it_is_unknown_and_why(monkeypatch, bus, error, devices, said):
    bus(*devices)
    Library(monkeypatch, fails=error)
    found = gpus.describe()
    assert found.gpus is None
    assert said in found.unknown


def test_a_bus_that_cannot_be_seen_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "PCI", tmp_path / "none")
    Library(monkeypatch, fails=pynvml.NVMLError_LibraryNotFound)
    assert gpus.describe().unknown.endswith("and the PCI bus is not to be seen")
    assert gpus.others() is None


def test_gpus_that_nvml_does_not_know_are_told_by_their_ids(bus):
    bus(NVIDIA, BRIDGE, AMD, INSTINCT, NPU)
    assert gpus.others() == ["AMD GPU 1002:744c", "AMD GPU 1002:74a1"]


UUIDS = ("GPU-aaaa1111-x", "GPU-aaaa2222-x", "GPU-bbbb3333-x")


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("1", [1]),
        ("2, 0", [2, 0]),
        ("", []),
        ("-1", []),
        ("0,9,1", [0]),  # up to the first that names none
        ("0,0,1", [0]),
        ("GPU-bbbb3333-x,0", [2, 0]),
        ("GPU-bb", [2]),
        ("GPU-aaaa", []),  # which of two?
        ("GPU-cc", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_respected(monkeypatch, visible, indices):
    Library(monkeypatch, [Card(uuid=u) for u in UUIDS])
    monkeypatch.setenv(gpus.VISIBLE, visible)
    assert [gpu["index"] for gpu in gpus.describe().gpus] == indices
    assert machine.minimal_environment()[gpus.VISIBLE] == visible


def test_a_part_of_a_card_has_its_own_memory_and_the_cards_number(monkeypatch):
    parts = [Card(name="NVIDIA H200 MIG 1g.18gb", uuid=f"MIG-{n}", memory_bytes=16 * 2**30) for n in range(2)]
    Library(monkeypatch, [Card(), Card(name="NVIDIA H200", parts=parts)])
    monkeypatch.setenv(gpus.VISIBLE, "MIG-1,MIG-0,MIG-9")
    found = [(gpu["index"], gpu["name"], gpu["memory_gib"]) for gpu in gpus.describe().gpus]
    assert found == 2 * [(1, "NVIDIA H200 MIG 1g.18gb", 16.0)]


def test_engines_count_gpus_as_nvml_does(monkeypatch):
    assert machine.minimal_environment()["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert gpus.VISIBLE not in machine.minimal_environment()


def test_the_command_for_a_power_limit():
    assert gpus.power_limit_command(0, 180.0) == "sudo nvidia-smi -i 0 -pl 180"
    assert gpus.power_limit_command(3, 172.5) == "sudo nvidia-smi -i 3 -pl 172.5"
