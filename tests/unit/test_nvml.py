"""The real ``pynvml`` on a library that refuses in every way: figures are lost, never the peer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import nvml_stub
import pynvml
import pytest
from nvml_stub import CALLS, GIGABYTE

from p2p_trainer.nvml import CardFacts, match_card, visible_devices

READ = """
import json
from dataclasses import asdict
from p2p_trainer.nvml import read_nvml
facts = read_nvml()
print(json.dumps({**asdict(facts), "failure": facts.failure and facts.failure.code}))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))


def read(library: Path, **environment: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(nvml_stub.run(library, READ, **environment).stdout)
    return facts


def test_everything_that_a_healthy_card_tells(library: Path) -> None:
    facts = read(library)
    assert facts["driver"] == "555.55.55" and facts["refusals"] == [] and facts["failure"] is None
    first, second = facts["cards"]
    assert first == {
        "uuid": "GPU-12345670-89ab-cdef-0123-456789abcdef",
        "name": "NVIDIA Stub 0",
        "total_bytes": 24 * GIGABYTE,
        "free_bytes": 5 * GIGABYTE,
        "utilisation": 0.42,
        "temperature_celsius": 61,
        "power_watts": 123.4,
    }
    assert second["uuid"] != first["uuid"]


def test_mig_instances_are_cards_of_their_own(library: Path) -> None:
    cards = read(library, NVML_STUB_MIG="3")["cards"]
    assert [card["uuid"][:4] for card in cards] == ["GPU-", "GPU-", "MIG-", "MIG-", "MIG-"]
    assert cards[2]["total_bytes"] == 5 * GIGABYTE and cards[2]["free_bytes"] == 4 * GIGABYTE
    assert cards[2]["temperature_celsius"] == 61 and cards[2]["utilisation"] is None


@pytest.mark.parametrize("memory", ["0 0", "1000 2000"])
def test_memory_that_cannot_be_is_no_answer(library: Path, memory: str) -> None:
    facts = read(library, NVML_STUB_MEMORY=memory)
    assert all(card["total_bytes"] is None and card["free_bytes"] is None for card in facts["cards"])
    assert all(card["name"] for card in facts["cards"])


def test_a_name_of_any_bytes_is_no_error(library: Path) -> None:
    script = "import os; os.environb[b'NVML_STUB_NAME'] = b'\\xff\\x1b[31m'\n" + READ
    cards = json.loads(nvml_stub.run(library, script).stdout)["cards"]
    assert all(card["name"].isprintable() and card["total_bytes"] for card in cards)


def test_every_error_of_every_call_costs_that_figure_and_no_other(library: Path) -> None:
    script = f"""
import json, logging, os
import pynvml
from dataclasses import asdict
from p2p_trainer.nvml import explain, read_nvml
logging.basicConfig(level=logging.WARNING)
known = {{value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}}
codes = sorted(known | {{42, -1, 2**31 - 1}})
found = []
for call in {CALLS!r}:
    for code in codes:
        os.environ["NVML_STUB_FAIL"] = f"{{call}}={{code}},nvmlErrorString={{code % 2}}"
        facts = read_nvml()
        cause, remedy = explain(code, facts.refusals[0].text if facts.refusals else "")
        found.append([call, code, asdict(facts), cause, remedy])
print(json.dumps(found))
"""
    done = nvml_stub.run(library, script, NVML_STUB_MIG="1")
    found = json.loads(done.stdout)
    assert len(found) >= 14 * 34
    healthy = read(library, NVML_STUB_MIG="1")
    gone = {
        "nvmlDeviceGetUtilizationRates": "utilisation",
        "nvmlDeviceGetTemperature": "temperature_celsius",
        "nvmlDeviceGetPowerUsage": "power_watts",
    }
    for call, code, facts, cause, remedy in found:
        if call != "nvmlDeviceGetMigDeviceHandleByIndex":  # an empty slot is no refusal
            assert any(refusal["code"] == code for refusal in facts["refusals"]), (call, code)
        assert cause and remedy
        if call in gone:
            expected = [{**card, gone[call]: None} for card in healthy["cards"]]
            assert facts["cards"] == expected, (call, code)
    assert done.stderr.count("WARNING") == 1, "one warning at most, whatever is refused and how often"


def test_errors_in_any_two_calls_at_once(library: Path) -> None:
    script = f"""
import itertools, os
from p2p_trainer.nvml import read_nvml
for first, second in itertools.combinations({CALLS!r}, 2):
    for code in (3, 15, 999):
        os.environ["NVML_STUB_FAIL"] = f"{{first}}={{code}},{{second}}={{code}}"
        assert read_nvml().refusals
"""
    assert nvml_stub.run(library, script, NVML_STUB_MIG="2").stderr.count("\n") <= 1


def test_what_a_card_does_not_support_is_not_worth_a_warning(library: Path) -> None:
    fail = f"nvmlDeviceGetPowerUsage={pynvml.NVML_ERROR_NOT_SUPPORTED}"
    assert nvml_stub.run(library, READ, NVML_STUB_FAIL=fail).stderr == ""


def test_an_old_driver_without_most_functions(tmp_path: Path) -> None:
    facts = read(nvml_stub.build(tmp_path, "-DOLD"))
    assert facts["driver"] == "" and facts["failure"] is None
    assert [(card["name"], card["total_bytes"], card["power_watts"]) for card in facts["cards"]] == [
        ("NVIDIA Stub 0", 24 * GIGABYTE, None),
        ("NVIDIA Stub 1", 24 * GIGABYTE, None),
    ]


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not ELF")
    done = nvml_stub.run(tmp_path, READ)
    facts = json.loads(done.stdout)
    assert facts["failure"] == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND and done.stderr == ""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "Restart the machine"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "modprobe nvidia"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "off and on again"),
    ],
)
def test_a_hidden_card_is_an_error_with_its_own_remedy_and_never_the_cpu(library: Path, code: int, says: str) -> None:
    script = """
import pathlib, sys, tempfile, torch
from dht_config.errors import DeviceError
from p2p_trainer import devices
proc = pathlib.Path(tempfile.mkdtemp())
(proc / "driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
devices._PROC = proc
torch.cuda.is_available = lambda: False
torch.version.cuda = "12.8"
for requested in (None, "cuda", "cuda:1"):
    try:
        print("took", devices.pick_device(requested))
    except DeviceError as error:
        print(int(error.exit_code), error)
"""
    done = nvml_stub.run(library, script, NVML_STUB_FAIL=f"nvmlInitWithFlags={code}")
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("21 ") and says in line and "--device cpu" in line for line in lines)


def test_the_figures_of_a_cuda_device_are_torchs_where_nvml_refuses(library: Path) -> None:
    script = f"""
import json, os, types
import torch
from dataclasses import asdict
from p2p_trainer.hardware import read_device
from p2p_trainer.limits import read_limits
properties = types.SimpleNamespace(uuid="12345671-89ab-cdef-0123-456789abcdef", total_memory=24 * 10**9)
torch.cuda.get_device_properties = lambda device: properties
torch.cuda.mem_get_info = lambda device: (6 * 10**9, 24 * 10**9)
torch.cuda.get_device_name = lambda device: "torch's name"
limits = read_limits()
for fail in ("", *(f"{{call}}={{code}}" for call in {CALLS!r} for code in (3, 15, 18, 999))):
    os.environ["NVML_STUB_FAIL"] = fail
    print(json.dumps([fail, asdict(read_device(torch.device("cuda", 0), limits))]))
"""
    rows = [json.loads(line) for line in nvml_stub.run(library, script).stdout.splitlines()]
    assert len(rows) == 1 + 4 * len(CALLS)
    healthy = rows[0][1]
    assert healthy["name"] == "NVIDIA Stub 1" and healthy["driver"] == "555.55.55", "the second card, by its UUID"
    assert healthy["free_bytes"] == 5 * GIGABYTE, "what other programs leave, not what there is"
    for fail, facts in rows[1:]:
        assert facts["name"] in ("NVIDIA Stub 1", "torch's name"), fail
        assert facts["total_bytes"] == 24 * GIGABYTE
        assert facts["free_bytes"] in (5 * GIGABYTE, 6 * GIGABYTE)


# ---------------------------------------------------------------- which card is which

GPU = [CardFacts(uuid=f"GPU-{digit * 8}-0000-0000-0000-000000000000") for digit in "ab"]
MIG = [CardFacts(uuid=f"MIG-{digit * 8}-0000-0000-0000-000000000000") for digit in "cd"]
CARDS = [*GPU, *MIG]


@pytest.mark.parametrize("visible", [None, ("0", "1"), ("1",), ("7",)])
def test_a_card_is_found_by_the_uuid_that_cuda_gives_whatever_its_index(visible: tuple[str, ...] | None) -> None:
    assert match_card(CARDS, "bbbbbbbb-0000-0000-0000-000000000000", 0, visible) == GPU[1]
    assert match_card(CARDS, "GPU-BBBBBBBB-0000-0000-0000-000000000000", 0, visible) == GPU[1]


def test_a_mig_instance_is_found_by_its_own_uuid_or_by_what_is_visible() -> None:
    assert match_card(CARDS, "dddddddd-0000-0000-0000-000000000000", 0, None) == MIG[1]
    # CUDA gives the whole card's UUID: the environment says which instance.
    assert match_card(CARDS, "aaaaaaaa-0000-0000-0000-000000000000", 0, (MIG[1].uuid,)) == MIG[1]
    assert match_card(CARDS, "aaaaaaaa-0000-0000-0000-000000000000", 0, ("MIG-GPU-aaaaaaaa/1/0",)) is None


def test_entries_may_be_cut_short_but_not_so_short_that_two_fit() -> None:
    assert match_card(CARDS, None, 1, ("GPU-bbbb", "GPU-aaaa")) == GPU[0]
    assert match_card(CARDS, None, 0, ("GPU-",)) is None
    assert match_card(CARDS, None, 0, ("MIG-c",)) == MIG[0]


@pytest.mark.parametrize("visible", [None, ("0",), ()])
def test_without_a_uuid_no_card_is_guessed(visible: tuple[str, ...] | None) -> None:
    assert match_card(CARDS, None, 0, visible) is None
    assert match_card([replace(card, uuid="") for card in CARDS], "ffff", 0, visible) is None


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        (None, None),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0,1", ("0", "1")),
        (" 1 , -1, 2", ("1",)),
        ("GPU-8932f937,MIG-1234", ("GPU-8932f937", "MIG-1234")),
    ],
)
def test_what_cuda_visible_devices_leaves(text: str | None, entries: tuple[str, ...] | None) -> None:
    assert visible_devices(text) == entries
