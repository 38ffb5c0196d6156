"""A probe that is killed, hangs, fails or lies costs a measurement; whoever asked goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from test_memory_limits import MEGABYTE, needs_memory_limits, run_in
from torch import Tensor, nn

from dht_config.errors import DataError
from dht_config.manifest import RunManifest, parse_manifest
from p2p_trainer.planning import probe
from p2p_trainer.planning.probe import Prober, ProbeRequest, allow_no_more_than, start_prober
from p2p_trainer.rehearsal.memory_limits import MemoryLimits
from p2p_trainer.tasks import Batch
from p2p_trainer.throughput import Throughput, measure_micro_batches

MANIFEST = """
[run]
name = "probed"
fragments = 2
[task]
name = "digits"
[model]
hidden_sizes = [16]
[inner_optimizer]
batch_size = {batch}
"""

Measure = Callable[..., str]


class Tiny:
    """As many layers as the manifest says, and no data to read."""

    name, version, unit = "digits", 1, "samples"

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = [4, *sizes, 4]

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(self.sizes)))

    def batches(self, seed: int, batch_size: int) -> Iterator[Batch]:
        return repeat((torch.ones(batch_size, 4),))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(batch[0]).square().mean()
        return loss

    def held_out(self, batch_size: int, max_samples: int) -> list[Batch]:
        return []


def manifest(batch: int = 4) -> RunManifest:
    return parse_manifest(MANIFEST.format(batch=batch), source="a test")


def request(**changes: Any) -> ProbeRequest:
    asked: dict[str, Any] = {
        "manifest": manifest(),
        "strategy": "full",
        "trained": frozenset({0, 1}),
        "device": "cpu",
        "compute_dtype": "float32",
        "threads": 1,
        "seed": 0,
        "budget_bytes": None,
        "limit_seconds": 0.2,
    }
    return ProbeRequest(**{**asked, **changes})


@pytest.fixture
def prober_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Measure | None], Prober]]:
    """Starts a prober whose probes measure with this function."""
    started: list[Prober] = []

    def start(measure: Measure | None = None) -> Prober:
        monkeypatch.setattr(probe, "load_task", lambda _name, model, _data: Tiny(model["hidden_sizes"]))
        if measure is not None:
            monkeypatch.setattr(probe, "measure_micro_batches", measure)
        started.append(start_prober())
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A probe is forked from this process, where other tests may have made torch start threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


ONE = Throughput(samples_per_second=3.0, micro_batch=1, measured_seconds=1.0, peak_bytes=10)


def test_a_probe_measures_every_micro_batch_and_leaves_nothing(prober_of: Callable[..., Prober]) -> None:
    prober = prober_of()
    shares: list[float] = []
    found = prober.measure(request(), shares.append)
    assert (found.stopped, found.failure, found.killed) == ("done", "", False)
    assert [one.micro_batch for one in found.results] == [1, 2, 4]
    assert all(one.peak_bytes is not None and one.samples_per_second > 0 for one in found.results)
    assert found.program_bytes is not None and found.program_bytes > 10**7
    assert all(0 <= share <= 1 for share in shares)
    (forker,) = psutil.Process().children()
    assert not forker.children(recursive=True)


def test_what_was_measured_before_the_kernel_killed_it_counts_and_the_next_probe_works(
    prober_of: Callable[..., Prober],
) -> None:
    def killed(*arguments: Any, **named: Any) -> str:
        arguments[4](ONE)
        os.kill(os.getpid(), signal.SIGKILL)
        return "done"

    prober = prober_of(killed)
    for _ in range(2):
        found = prober.measure(request())
        assert (found.results, found.stopped, found.failure, found.killed) == ((ONE,), "memory", "", True)


def test_a_probe_that_dies_otherwise_says_how(prober_of: Callable[..., Prober]) -> None:
    def aborted(*_arguments: Any, **_named: Any) -> str:
        os.kill(os.getpid(), signal.SIGUSR1)
        return "done"

    found = prober_of(aborted).measure(request())
    assert found.results == () and found.stopped is None and "SIGUSR1" in found.failure


def test_a_probe_that_fails_is_one_line(prober_of: Callable[..., Prober]) -> None:
    def failed(*_arguments: Any, **_named: Any) -> str:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied\nand more")

    found = prober_of(failed).measure(request())
    assert found.failure == "RuntimeError: mat1 and mat2 shapes cannot be multiplied"


def test_a_probe_that_hangs_is_ended(prober_of: Callable[..., Prober], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SILENCE_SECONDS", 5.0)

    def hung(*arguments: Any, **_named: Any) -> str:
        arguments[4](ONE)
        signal.pause()
        return "done"

    found = prober_of(hung).measure(request())
    assert found.results == (ONE,) and found.stopped is None and "said nothing" in found.failure


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 0.0, -1.0])
def test_nonsense_is_not_believed(prober_of: Callable[..., Prober], rate: float) -> None:
    def lies(*arguments: Any, **_named: Any) -> str:
        arguments[4](Throughput(samples_per_second=rate, micro_batch=1, measured_seconds=1.0))
        return "done"

    found = prober_of(lies).measure(request())
    assert found.results == () and found.failure == "it reported nonsense"


def test_what_a_person_can_act_on_comes_through_as_it_is(prober_of: Callable[..., Prober]) -> None:
    def no_data(*_arguments: Any, **_named: Any) -> str:
        raise DataError("There are no data.", "Put them there.")

    with pytest.raises(DataError, match="no data"):
        prober_of(no_data).measure(request())


def test_who_does_not_want_to_wait_ends_it_with_all_its_processes(prober_of: Callable[..., Prober]) -> None:
    def slow(*_arguments: Any, **_named: Any) -> str:
        signal.pause()
        return "done"

    prober = prober_of(slow)
    (forker,) = psutil.Process().children()

    def leave(_share: float) -> None:
        if forker.children():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prober.measure(request(), leave)
    wait_until(lambda: not psutil.Process().children(recursive=True))


def test_the_process_that_forks_is_gone(prober_of: Callable[..., Prober]) -> None:
    prober = prober_of()
    prober.close()
    assert prober.measure(request()).failure == "it could not be started"


def test_a_model_that_a_budget_does_not_hold_is_no_failure(prober_of: Callable[..., Prober]) -> None:
    """Its parameters alone take 67 MB; the budget and what is overlooked are 32."""
    big = parse_manifest(MANIFEST.format(batch=4).replace("[16]", "[4096, 4096]"), source="a test")
    found = prober_of().measure(request(manifest=big, budget_bytes=0))
    assert (found.results, found.stopped, found.failure) == ((), "memory", "")


def test_a_limit_refuses_what_is_beyond_it() -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            allow_no_more_than(64 * MEGABYTE)
            torch.ones(8 * MEGABYTE)  # four bytes each
            try:
                torch.ones(32 * MEGABYTE)
            except RuntimeError as error:
                code = 0 if "allocate memory" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


HUNGRY = """
import json, sys
import torch
sys.path.insert(0, {here!r})
from p2p_trainer.planning import probe
from test_probe import ONE, Tiny, request

def hungry(*arguments, **named):
    arguments[4](ONE)
    held = []
    while True:
        held.append(torch.ones(1 << 22))

probe.load_task = lambda *_: Tiny([])
probe.measure_micro_batches = hungry
prober = probe.start_prober()
found = [prober.measure(request()) for _ in range(2)]
prober.close()
print(json.dumps([[one.results == (ONE,), one.stopped, one.failure] for one in found]))
"""


@needs_memory_limits
def test_the_kernel_takes_the_probe_and_not_who_asked() -> None:
    with MemoryLimits({"a": 700 * MEGABYTE}) as limits:
        ended = run_in(limits, "a", HUNGRY.format(here=str(Path(__file__).parent)))
        assert ended.returncode == 0
        assert json.loads(ended.stdout) == [[True, "memory", ""]] * 2
        assert limits.use("a").kills == 2


def test_the_real_measurement_is_what_a_probe_calls() -> None:
    assert probe.measure_micro_batches is measure_micro_batches


def wait_until(condition: Callable[[], bool], within_seconds: float = 30.0) -> None:
    deadline = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
