"""What ``doctor`` makes of figures, of a swarm's answers, and of a machine on which everything is wrong."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
import typer
from typer.testing import CliRunner

from dht_config.address import parse_address
from dht_config.errors import DeviceError, ExitCode, PortInUseError, UnreachableError
from dht_config.identity import load_or_create_organiser_key
from dht_config.invite import Invite
from dht_config.manifest import PROTOCOL_VERSION, parse_manifest
from dht_config.manifest import example_manifest as example
from dht_config.records import PeerProfile, SignedManifest, sign_manifest
from p2p_trainer import doctor
from p2p_trainer.cli import app
from p2p_trainer.doctor import CHECKS, MACHINE_CHECKS, SWARM_CHECKS, Patient, examine_machine, failing_lines
from p2p_trainer.findings import Finding
from p2p_trainer.hardware import DeviceFacts
from p2p_trainer.limits import Limits
from p2p_trainer.machine_checks import (
    Need,
    judge_device,
    judge_disk,
    judge_driver,
    judge_ip,
    judge_memory,
    judge_open_files,
    judge_shared_memory,
    need_of,
)
from p2p_trainer.nvml import CardFacts, NvmlFacts, Refusal
from p2p_trainer.reporting import Reporting
from p2p_trainer.run_model import check_model
from p2p_trainer.settings import PeerSettings
from p2p_trainer.swarm_checks import (
    judge_clock,
    judge_dials,
    judge_manifest,
    judge_nat,
    judge_peers,
    judge_port,
    judge_traffic,
)
from p2p_trainer.target import Target, read_target
from peers.daemon import DialOutcome, DialReport
from peers.dial_back import Reached
from peers.examination import ClockCompared, Dialled, DialledBack
from peers.membership import Member, View

ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmZtmD2qt6fJot32nabSP3CUjicnypEBz7bHVDhPQt9aAy"
GIGABYTE = 10**9
LIMITS = Limits(
    cores=8.0,
    total_memory_bytes=16 * GIGABYTE,
    free_memory_bytes=8 * GIGABYTE,
    memory_is_capped=False,
    shared_memory_bytes=64 * 10**6,
    shared_memory_free_bytes=64 * 10**6,
    open_files=1024,
    open_files_hard=4096,
)
CARD = DeviceFacts(
    kind="cuda",
    name="NVIDIA GeForce RTX 3090",
    total_bytes=24 * GIGABYTE,
    free_bytes=5 * GIGABYTE,
    utilisation=0.42,
    temperature_celsius=61,
    power_watts=123.4,
)


pytestmark = pytest.mark.usefixtures("untouched")


def refused(code: int, call: str = "nvmlInit") -> NvmlFacts:
    return NvmlFacts(refusals=(Refusal(call=call, code=code, text="said the library"),))


# ---------------------------------------------------------------- the machine


def judged_driver(nvml: NvmlFacts, **changed: Any) -> Finding:
    usual: dict[str, Any] = {"card_present": True, "torch_cuda": "12.8", "asked_for_cpu": False}
    return judge_driver(nvml, **{**usual, **changed})


def test_a_driver_that_works() -> None:
    facts = NvmlFacts(driver="555.55", cards=(CardFacts(uuid="GPU-1"),))
    assert judged_driver(facts) == Finding(check="driver", ok=True, cause="NVIDIA driver 555.55, torch for CUDA 12.8.")
    odd = replace(facts, refusals=(Refusal(call="nvmlDeviceGetPowerUsage", code=999, text="Unknown Error"),))
    assert judged_driver(odd).ok is True and "nvmlDeviceGetPowerUsage" in judged_driver(odd).cause


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "Restart the machine."),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "modprobe nvidia"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "--gpus all"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "off and on"),
    ],
)
def test_a_driver_that_does_not(code: int, remedy: str) -> None:
    finding = judged_driver(refused(code))
    assert finding.ok is False and remedy in finding.remedy


def test_without_a_card_no_driver_is_needed() -> None:
    assert judged_driver(refused(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND), card_present=False).ok is True


def test_a_torch_for_the_cpu_beside_a_card_is_wrong_unless_the_cpu_was_asked_for() -> None:
    facts = NvmlFacts(driver="555.55", cards=(CardFacts(uuid="GPU-1"),))
    assert judged_driver(facts, torch_cuda=None).ok is False
    assert judged_driver(facts, torch_cuda=None, asked_for_cpu=True).ok is True


def test_what_is_free_of_a_card_counts() -> None:
    assert judge_device(CARD, Need(device_bytes=5 * GIGABYTE), 8.0) == Finding(
        check="device",
        ok=True,
        cause="NVIDIA GeForce RTX 3090 (cuda:0), 5.0 GB of 24.0 GB free, 42% busy, 61 °C, 123 W.",
    )
    assert judge_device(CARD, Need(device_bytes=6 * GIGABYTE), 8.0).ok is False
    unknown = replace(CARD, free_bytes=None, utilisation=None, temperature_celsius=None, power_watts=None)
    assert judge_device(unknown, Need(device_bytes=6 * GIGABYTE), 8.0).cause == "NVIDIA GeForce RTX 3090 (cuda:0)."


def test_memory_includes_the_model_where_the_processor_computes() -> None:
    need = Need(host_bytes=4 * GIGABYTE, device_bytes=5 * GIGABYTE)
    assert judge_memory(LIMITS, need, computes_here=False).ok is True
    assert judge_memory(LIMITS, need, computes_here=True).ok is False
    capped = judge_memory(replace(LIMITS, memory_is_capped=True), need, computes_here=True)
    assert "docker run --memory" in capped.remedy


def test_what_a_model_needs_is_counted_in_its_parameters() -> None:
    text, digits = (parse_manifest(example(name), name) for name in ("stdlib-text", "digits"))
    assert need_of(text, 10**6).device_bytes == 16 * 10**6, "parameters, gradients, two moments"
    assert need_of(digits, 10**6).device_bytes == 12 * 10**6, "momentum"
    assert need_of(text, 10**6).disk_bytes == 3 * 20 * 10**6
    assert need_of(text, 10**6).host_bytes - need_of(text, 0).host_bytes == int(4e6 * (2 + 5.5 / 4))


def test_a_disk(tmp_path: Path) -> None:
    assert judge_disk(tmp_path, 10 * GIGABYTE, writable=True, need=Need(disk_bytes=GIGABYTE)).ok is True
    assert judge_disk(tmp_path, 10, writable=True, need=Need(disk_bytes=GIGABYTE)).ok is False
    assert judge_disk(tmp_path, 0, writable=True, need=Need()).ok is False
    assert judge_disk(tmp_path, 10 * GIGABYTE, writable=False, need=Need()).ok is False
    assert judge_disk(tmp_path, None, writable=True, need=Need()).ok is None


@pytest.mark.parametrize("size", [None, 0, 10**6, 64 * 10**6])
def test_shared_memory_is_never_in_the_way(size: int | None) -> None:
    assert judge_shared_memory(replace(LIMITS, shared_memory_bytes=size)).ok is True


@pytest.mark.parametrize(("hard", "ok"), [(2**31, True), (4096, True), (256, True), (255, False), (63, False)])
def test_a_limit_of_open_files_names_its_flags(hard: int, ok: bool) -> None:
    finding = judge_open_files(replace(LIMITS, open_files=min(hard, 64), open_files_hard=hard))
    assert finding.ok is ok
    assert ok or ("ulimit -n" in finding.remedy and "--ulimit nofile=" in finding.remedy)


def test_one_way_into_the_internet_is_enough() -> None:
    assert judge_ip("192.168.0.4", None).ok is True and judge_ip("192.168.0.4", None).remedy == ""
    assert judge_ip(None, "2001:db8::7").ok is True and "--host ::" in judge_ip(None, "2001:db8::7").remedy
    assert judge_ip(None, None).ok is False


# ---------------------------------------------------------------- the swarm


def test_addresses_that_are_silent_are_named() -> None:
    address = parse_address(ADDRESS)
    finding = judge_dials(
        Dialled(
            reports=(
                DialReport(address=address, outcome=DialOutcome.CONNECTED),
                DialReport(address=address, outcome=DialOutcome.REFUSED),
            )
        )
    )
    assert finding.ok is True and "1 of 2" in finding.cause and "nobody listens there" in finding.cause


@pytest.mark.parametrize(
    ("offset", "peers", "ok", "says"),
    [
        (0.3, 4, True, "0.3 s behind"),
        (-0.3, 4, True, "0.3 s ahead"),
        (420.0, 4, False, "420.0 s behind"),
        (-420.0, 1, False, "timedatectl"),
        (0.0, 0, None, "No peer"),
    ],
)
def test_a_clock(offset: float, peers: int, ok: bool | None, says: str) -> None:
    finding = judge_clock(ClockCompared(offset_seconds=offset, peers=peers))
    assert finding.ok is ok and says in f"{finding.cause} {finding.remedy}"


def signed_example(tmp_path: Path) -> SignedManifest:
    target = read_target("digits")
    assert target.manifest is not None and target.task is not None
    key = load_or_create_organiser_key(tmp_path / "organiser.key")
    return sign_manifest(key, target.manifest, target.task.version, [bytes(32)] * 2)


def test_the_runs_manifest_is_checked_as_for_joining(tmp_path: Path) -> None:
    signed, target = signed_example(tmp_path), read_target("digits")
    finding, learned = judge_manifest(signed, target, allow_files=False)
    assert finding.ok is True and learned is not None and f"{learned[1].num_elements:,}" in finding.cause


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"task_version": 99}, "version of the task digits"),
        ({"protocol_version": PROTOCOL_VERSION + 1}, "protocol version"),
    ],
)
def test_a_run_of_another_kind_is_told_apart(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    signed = signed_example(tmp_path).model_copy(update=changed)
    finding, learned = judge_manifest(signed, read_target("digits"), allow_files=False)
    assert finding.ok is False and says in finding.cause and learned is None


def profile(status: Any, rate: float = 0.0, device: str = "") -> Member:
    record = PeerProfile(
        software_version="0",
        status=status,
        samples_per_second=rate,
        processed_samples=0,
        credited_samples=0.0,
        micro_batch=0,
        device=device,
        joined_at=0.0,
        restart=0,
    )
    return Member(profile=record, expires=1.0)


def test_who_is_there_and_who_trains() -> None:
    assert judge_peers(View()).ok is None
    assert "nobody trains yet" in judge_peers(View(members={"a": profile("serving")})).cause
    view = View(members={"a": profile("serving"), "b": profile("training", 80.0, "A card"), "c": profile("training")})
    assert judge_peers(view).cause == "3 peer(s) in the DHT; 2 train, 80.0 samples/s in all on A card."


OWN = ("127.0.0.1", "192.168.0.4", "8.8.4.4")
ROUTER, PUBLIC = "8.8.8.8", "8.8.4.4"


def back(*answers: tuple[str, bool | None], port: int = 31337) -> DialledBack:
    told = tuple(Reached(peer_id="a", host=host, reached=reached) for host, reached in answers)
    return DialledBack(port=port, answers=told, asked=2)


@pytest.mark.parametrize(
    ("dialled", "port_ok", "nat_ok", "says"),
    [
        (back((PUBLIC, True)), True, True, "No NAT"),
        (back((PUBLIC, False)), False, True, "firewall"),
        (back((ROUTER, True)), True, True, "forwards the port"),
        (back((ROUTER, False)), False, False, f"--announce /ip4/{ROUTER}/tcp/31337"),
        (back((ROUTER, False), port=41234), False, False, "--port 31337"),
        (back((ROUTER, False), ("192.168.0.4", True)), False, False, "inside this network"),
        (back((PUBLIC, False), ("192.168.0.4", True)), False, True, "firewall"),
        (back(("192.168.0.4", True)), None, None, "nobody outside"),
        (back(("192.168.0.4", False)), False, None, "firewall"),
        (back(("", None)), None, None, "none of the 2"),
        (back(), None, None, "none of the 2"),
    ],
)
def test_a_port_is_reachable_if_somebody_outside_reached_it(
    dialled: DialledBack, port_ok: bool | None, nat_ok: bool | None, says: str
) -> None:
    port, nat = judge_port(dialled, OWN), judge_nat(dialled, OWN)
    assert (port.ok, nat.ok) == (port_ok, nat_ok)
    assert says in " ".join((port.cause, port.remedy, nat.cause, nat.remedy))


def test_a_port_on_which_the_peer_itself_listens_is_not_known() -> None:
    dialled = replace(back(), hindrance=PortInUseError("Port 31337 is in use by another program."))
    assert judge_port(dialled, OWN).ok is None and "31337" in judge_port(dialled, OWN).cause


def test_the_forecast_of_traffic_is_what_a_rehearsal_measured() -> None:
    """README: with four peers on stdlib-text each took 663 MB up an hour."""
    target = read_target("stdlib-text")
    assert target.manifest is not None and target.task is not None
    layout = check_model(target.manifest, target.task)
    finding = judge_traffic(target.manifest, layout, 3)
    assert "About 16.0 GB up" in finding.cause and "4 peers" in finding.cause
    assert pytest.approx(663e6, rel=0.02) == 16.0e9 / 24
    assert "as soon as a second peer trains" in judge_traffic(target.manifest, layout, 0).cause


# ---------------------------------------------------------------- the command


def patient(**settings: Any) -> Patient:
    return Patient(settings=PeerSettings(**settings), target=None, addresses=())


def test_programs_get_every_check_in_the_order_that_was_promised() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--device", "cpu"])
    rows = json.loads(result.stdout)
    assert [row["check"] for row in rows] == list(CHECKS)
    assert all(set(row) == {"check", "ok", "cause", "remedy"} for row in rows)
    assert all(row["ok"] is None for row in rows if row["check"] in SWARM_CHECKS)
    assert result.exit_code == (25 if any(row["ok"] is False for row in rows) else 0)


def test_people_get_one_line_each() -> None:
    result = CliRunner().invoke(app, ["doctor", "digits", "--device", "cpu", "--dir", "state"])
    lines = result.stdout.splitlines()
    assert len(lines) == len(CHECKS)
    assert any(line.startswith("✓ traffic") for line in lines)
    assert not Path("state").exists(), "looking changes nothing"


def test_what_is_wrong_is_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--dir", "file/peer"])
    assert result.exit_code == int(ExitCode.CHECKS_FAILED) == 25
    assert any(line.startswith("✗ disk") and "--dir" in line for line in result.stdout.splitlines())


def test_a_device_that_is_not_there_costs_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    result = CliRunner().invoke(app, ["doctor", "--json", "--device", "cuda:7"])
    rows = {row["check"]: row for row in json.loads(result.stdout)}
    assert result.exit_code == 25
    assert rows["device"]["ok"] is False and "cuda:7" in rows["device"]["cause"] and rows["device"]["remedy"]
    assert rows["memory"]["ok"] is not None


def test_nobody_at_the_invites_address_is_a_finding_and_the_machine_is_looked_at_all_the_same() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{ADDRESS.rpartition('/')[2]}"
    nobody = Invite(run_id="tiny-0123456789abcdef", organiser_public_key=bytes(32), addresses=(address,)).encode()
    result = CliRunner().invoke(app, ["doctor", nobody, "--json", "--wait-seconds", "0", "--device", "cpu"])
    rows = {row["check"]: row for row in json.loads(result.stdout)}
    assert result.exit_code == 25
    assert rows["swarm"]["ok"] is False and address in rows["swarm"]["cause"] and "--peer" in rows["swarm"]["remedy"]
    assert {rows[check]["ok"] for check in SWARM_CHECKS[1:]} == {None}
    assert all(rows[check]["ok"] is not None for check in MACHINE_CHECKS)


@pytest.mark.parametrize("broken", ["read_nvml", "pick_device", "read_limits", "_source_address"])
def test_no_check_takes_the_others_with_it(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(doctor, broken, fail)
    findings = examine_machine(patient(device="cpu"), Need(), MACHINE_CHECKS)
    assert [finding.check for finding in findings] == list(MACHINE_CHECKS)
    wrong = [finding.check for finding in findings if finding.ok is False and "broken" in finding.cause]
    assert (
        wrong
        == {
            "read_nvml": ["driver"],
            "pick_device": ["device"],
            "read_limits": ["device", "memory", "shared_memory", "open_files"],
            "_source_address": ["ip"],
        }[broken]
    )
    assert sum(finding.ok is True for finding in findings) >= 2


def test_a_terminal_without_check_marks_gets_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ascii:
        encoding = "ascii"

    monkeypatch.setattr(doctor.sys, "stdout", Ascii())
    assert (
        doctor.line(Finding(check="open_files", ok=False, cause="63.", remedy="More.")) == "NO open files    63. More."
    )


# ---------------------------------------------------------------- after a join that failed


def test_a_failed_join_is_followed_by_what_is_wrong_with_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_limits", lambda: replace(LIMITS, open_files=70, open_files_hard=70))
    monkeypatch.setattr(doctor, "_source_address", lambda destination: None)
    lines = failing_lines(UnreachableError("Nobody answered.", "Check the network."), patient())
    assert [line.split()[1] for line in lines] == ["ip", "open"]


def test_what_the_failure_itself_said_is_not_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_nvml", lambda: refused(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    monkeypatch.setattr(doctor, "nvidia_device_present", lambda: True)
    told = DeviceError("The driver was updated.", "Restart the machine. Or say --device cpu.")
    assert failing_lines(told, patient()) == []
    assert len(failing_lines(DeviceError("cuda:0 is not there.", "Check it."), patient())) == 1


def test_a_failure_that_is_not_the_machines_is_not_followed_by_anything() -> None:
    assert failing_lines(PortInUseError("Port 1 is in use.", "Take another."), patient()) == []


def test_a_target_decides_where_the_state_is() -> None:
    target = Target(run_id="digits-0123456789abcdef")
    assert Patient(settings=PeerSettings(), target=target, addresses=()).directory.parts[-2:] == (target.run_id, "peer")
    assert Patient(settings=PeerSettings(dir=Path("x")), target=target, addresses=()).directory == Path("x")


def test_who_does_not_wait_for_the_look_at_the_machine_gets_the_failures_exit_code() -> None:
    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended, Reporting(as_json=False) as reporting:
        reporting.look_into = interrupted
        raise DeviceError("cuda:0 is not there.", "Check it.")
    assert ended.value.exit_code == int(ExitCode.DEVICE)
