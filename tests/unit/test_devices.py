import logging
import warnings
from pathlib import Path

import pynvml
import pytest
import torch

from dht_config.errors import DeviceError, DeviceLostError, ExitCode
from p2p_trainer import devices, limits
from p2p_trainer.nvml import NvmlFacts, Refusal

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@pytest.fixture
def machine_with_an_nvidia_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(devices, "_PROC", tmp_path)
    monkeypatch.setattr(devices, "_PCI", tmp_path / "pci")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_cpu_can_always_be_asked_for() -> None:
    assert devices.pick_device("cpu") == torch.device("cpu")


@without_cuda
def test_without_a_graphics_card_the_cpu_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "_PROC", tmp_path)
    monkeypatch.setattr(devices, "_PCI", tmp_path / "pci")
    assert devices.pick_device() == torch.device("cpu")


@without_cuda
@pytest.mark.parametrize("requested", ["cuda", "cuda:0", "cuda:7"])
def test_a_missing_cuda_device_is_an_error_and_never_the_cpu(requested: str) -> None:
    with pytest.raises(DeviceError) as caught:
        devices.pick_device(requested)
    assert requested in caught.value.problem
    assert "--device cpu" in caught.value.remedy


def test_a_cuda_index_beyond_the_last_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match="cuda:0 to cuda:1"):
        devices.pick_device("cuda:2")


@pytest.mark.parametrize("requested", ["gpu", "", "cuda:x", "meta", "xpu"])
def test_a_device_that_cannot_train_is_an_error(requested: str) -> None:
    with pytest.raises(DeviceError):
        devices.pick_device(requested)


def test_a_driver_that_hides_the_card_is_an_error_and_never_the_cpu(
    machine_with_an_nvidia_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(DeviceError, match="--device cpu"):
        devices.pick_device()
    assert devices.pick_device("cpu") == torch.device("cpu")


def test_a_torch_without_cuda_beside_a_card_is_said(
    machine_with_an_nvidia_device: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with caplog.at_level(logging.WARNING):
        assert devices.pick_device() == torch.device("cpu")
    assert len(caplog.records) == 1


def test_a_volunteer_who_hides_the_card_gets_the_cpu(
    machine_with_an_nvidia_device: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.pick_device() == torch.device("cpu")
    assert not caplog.records


@without_cuda
def test_a_card_without_a_driver_is_not_overlooked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "_PROC", tmp_path)
    monkeypatch.setattr(devices, "_PCI", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "0000:01:00.1").mkdir()
    (tmp_path / "0000:01:00.1/vendor").write_text("0x10de\n")
    (tmp_path / "0000:01:00.1/class").write_text("0x040300\n")  # its sound
    assert devices.pick_device() == torch.device("cpu")
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0/vendor").write_text("0x10de\n")
    (tmp_path / "0000:01:00.0/class").write_text("0x030000\n")
    with pytest.raises(DeviceError, match="driver"):
        devices.pick_device()


@pytest.mark.parametrize("visible", ["7", "GPU-00000000", "MIG-GPU-1/2/3"])
def test_a_card_that_is_hidden_by_mistake_is_an_error(
    machine_with_an_nvidia_device: None, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(DeviceError):
        devices.pick_device()


def test_what_torch_warns_of_is_told_in_the_one_line(
    machine_with_an_nvidia_device: None, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def unavailable() -> bool:
        warnings.warn("CUDA initialization: The driver is too old.\nMore", stacklevel=1)
        return False

    monkeypatch.setattr(devices, "read_nvml", NvmlFacts)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    with pytest.raises(DeviceError, match="The driver is too old"):
        devices.pick_device()
    assert not recwarn.list


def test_apples_device_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "_PROC", tmp_path)
    monkeypatch.setattr(devices, "_PCI", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(devices, "_proven", lambda device: device)
    assert devices.pick_device() == torch.device("mps")


def test_a_device_that_stops_is_told_apart_from_a_mistake_and_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    with pytest.raises(DeviceLostError, match="unspecified launch failure") as caught, devices.device_failures(cuda):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\nCUDA kernel errors might be ...")
    assert caught.value.exit_code == ExitCode.DEVICE_LOST and "checkpoint" in caught.value.remedy
    monkeypatch.setattr(devices, "_computes", lambda device: False)
    with pytest.raises(DeviceLostError), devices.device_failures(cuda):
        raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")
    for error in (torch.OutOfMemoryError("no memory"), torch.AcceleratorError("CUDA error: out of memory")):
        with pytest.raises(DeviceError, match="no memory left"), devices.device_failures(cuda):
            raise error
    with pytest.raises(RuntimeError, match="a mistake"), devices.device_failures(cpu):
        raise RuntimeError("a mistake")
    monkeypatch.setattr(devices, "_computes", lambda device: True)
    with pytest.raises(RuntimeError, match="a mistake"), devices.device_failures(cuda):
        raise RuntimeError("a mistake")


def test_the_remedy_of_a_lost_card_is_nvmls(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Refusal(call="nvmlDeviceGetMemoryInfo", code=pynvml.NVML_ERROR_GPU_IS_LOST, text="GPU is lost")
    monkeypatch.setattr(devices, "read_nvml", lambda: NvmlFacts(refusals=(lost,)))
    with (
        pytest.raises(DeviceLostError, match=r"fell off the bus.*off and on"),
        devices.device_failures(torch.device("cuda", 0)),
    ):
        raise torch.AcceleratorError("CUDA error: GPU is lost")


def test_without_nvidias_library_nobody_is_told_to_install_it_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Refusal(call="nvmlInit", code=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, text="not found")
    monkeypatch.setattr(devices, "read_nvml", lambda: NvmlFacts(refusals=(missing,)))
    for device in (torch.device("cuda", 0), torch.device("mps")):
        with pytest.raises(DeviceLostError) as caught, devices.device_failures(device):
            raise torch.AcceleratorError("it failed")
        assert caught.value.remedy.startswith("Then start") and "libnvidia" not in caught.value.problem


def test_a_device_that_does_not_compute_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available\nmore")

    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(DeviceError, match="no kernel image is available"):
        devices.pick_device("cpu")


def test_the_number_of_threads_can_be_limited() -> None:
    before = torch.get_num_threads()
    try:
        assert devices.set_thread_count(1) == 1
        assert devices.set_thread_count(None) == 1
    finally:
        torch.set_num_threads(before)


def test_a_control_group_limits_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(devices, "read_group_limits", lambda: limits.GroupLimits(cores=1.5))
    try:
        torch.set_num_threads(8)
        assert devices.set_thread_count(None) == 2
        assert devices.set_thread_count(4) == 4, "a person's word counts more"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [0, -1])
def test_a_number_of_threads_that_cannot_compute_is_refused(threads: int) -> None:
    with pytest.raises(DeviceError):
        devices.set_thread_count(threads)
