import logging
import types
from pathlib import Path

import pynvml
import pytest
import torch

from dht_config.errors import DeviceError
from p2p_trainer import hardware

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@pytest.fixture
def machine_with_an_nvidia_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(hardware, "_PROC", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_cpu_can_always_be_asked_for() -> None:
    assert hardware.pick_device("cpu") == torch.device("cpu")


@without_cuda
def test_without_a_graphics_card_the_cpu_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "_PROC", tmp_path)
    assert hardware.pick_device() == torch.device("cpu")


@without_cuda
@pytest.mark.parametrize("requested", ["cuda", "cuda:0", "cuda:7"])
def test_a_missing_cuda_device_is_an_error_and_never_the_cpu(requested: str) -> None:
    with pytest.raises(DeviceError) as caught:
        hardware.pick_device(requested)
    assert requested in caught.value.problem
    assert "--device cpu" in caught.value.remedy


def test_a_cuda_index_beyond_the_last_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match="cuda:0 to cuda:1"):
        hardware.pick_device("cuda:2")


@pytest.mark.parametrize("requested", ["gpu", "", "cuda:x", "meta", "xpu"])
def test_a_device_that_cannot_train_is_an_error(requested: str) -> None:
    with pytest.raises(DeviceError):
        hardware.pick_device(requested)


def test_a_driver_that_hides_the_card_is_an_error_and_never_the_cpu(
    machine_with_an_nvidia_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(DeviceError, match="--device cpu"):
        hardware.pick_device()
    assert hardware.pick_device("cpu") == torch.device("cpu")


def test_a_torch_without_cuda_beside_a_card_is_said(
    machine_with_an_nvidia_device: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with caplog.at_level(logging.WARNING):
        assert hardware.pick_device() == torch.device("cpu")
    assert len(caplog.records) == 1


def test_a_volunteer_who_hides_the_card_gets_the_cpu(
    machine_with_an_nvidia_device: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.pick_device() == torch.device("cpu")
    assert not caplog.records


def test_a_device_that_does_not_compute_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available\nmore")

    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(DeviceError, match="no kernel image is available"):
        hardware.pick_device("cpu")


def test_the_processor_has_a_name_that_fits_a_profile() -> None:
    name = hardware.device_name(torch.device("cpu"))
    assert 0 < len(name) <= 64


def test_the_processor_has_a_name_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_PROC", tmp_path)
    assert hardware.device_name(torch.device("cpu"))


@pytest.fixture
def cuda_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Torch's name")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: types.SimpleNamespace(uuid="1234-5678"))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_nvml_names_a_card_found_by_its_uuid(
    cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch, as_bytes: bool
) -> None:
    def name(uuid: str) -> str | bytes:
        assert uuid == "GPU-1234-5678"
        return b"NVIDIA  Card" if as_bytes else "NVIDIA  Card"

    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", name)
    assert hardware.device_name(cuda_device) == "NVIDIA Card"


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetName", "nvmlShutdown"])
@pytest.mark.parametrize(
    "code",
    [
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_UNKNOWN,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_NOT_FOUND,
    ],
)
def test_whatever_nvml_refuses_torch_names_the_card(
    cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda _handle: "NVIDIA Card")
    monkeypatch.setattr(pynvml, function, refuse)
    assert hardware.device_name(cuda_device) == "Torch's name"


def test_the_number_of_threads_can_be_limited() -> None:
    before = torch.get_num_threads()
    try:
        assert hardware.set_thread_count(1) == 1
        assert hardware.set_thread_count(None) == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [0, -1])
def test_a_number_of_threads_that_cannot_compute_is_refused(threads: int) -> None:
    with pytest.raises(DeviceError):
        hardware.set_thread_count(threads)
