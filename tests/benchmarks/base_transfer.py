"""How long a newcomer waits for a base with one donor and with three, and what serving costs a donor's training.

``python tests/benchmarks/base_transfer.py --json FILE [--megabytes 8] [--seconds 10] [--repeats 3]``

Donors and newcomer are processes of their own, each with a p2p daemon and a line (``p2p_trainer.rehearsal.links``):
donors send at 5 Mbit/s, the newcomer receives at 50. Served and fetched is as in the averaging process: ``BaseServer``,
``BaseFetcher`` and ``DaemonTransport``, verification included, connecting not.

*Training*: beside one donor with a line of 100 Mbit/s a process makes steps of some real arithmetic at a pace, as
``join --emulate`` does. Stretches in which a newcomer fetches all the time take turns with stretches in which nobody
does; the ratio is of the steps in both, so that what else the machine does meets both. ``cpu_seconds_per_gigabyte`` is
what the donor's process and its daemon used, which a machine with no core to spare would take from training.

Measured with these defaults on 2 shared cores (load 6 from other work): a base of 8 MB was there after 13.6 s with one
donor and after 4.8 s with three, 2.8 times as fast; the lines alone take 12.8 and 4.3 s. Training went on at 0.98 of
its rate while 8 MB a second were served (19.3 of 19.6 steps a second); serving took 4.9 CPU seconds a gigabyte.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch
import uvloop
from hivemind.p2p import P2P, PeerID

from dht_config.address import parse_address
from dht_config.identity import load_or_create_identity
from dht_config.network import NetworkSettings
from p2p_trainer.rehearsal.links import LinkSpec, Network
from peers.base_fetch import BaseFetcher
from peers.base_server import BaseServer
from peers.bases import BASE
from peers.daemon import DialOutcome, dial_all, die_with_parent, start_daemon
from peers.donors import DonorRecords
from peers.heap import keep_freed_memory
from peers.lineage import Claim
from peers.messages import BaseAnswer, BaseRequest
from peers.outer import NO_HISTORY, base_digest
from peers.process import SWARM_THREADS
from peers.swarm import WRITE_SECONDS
from peers.transfer import FetchedBase, FrozenBase, PartialBase
from peers.transport import DaemonTransport

DONOR_LINE, NEWCOMER_LINE, FAST_LINE = "50M/5M/20ms", "50M/20ms", "100M/10ms"
DONORS = (1, 3)
STEPS_PER_SECOND = 20.0
STEP_ARITHMETIC_SECONDS = 0.02
"""Of the 0.05 s that a step is made to last, this much is arithmetic on a machine that does nothing else."""
STRETCHES = 3
NICE = {"donor": [], "newcomer": ["nice", "-n", "19"]}
"""The newcomer would be another machine: what it computes must not take a core that the donor's training needs."""
NAMESPACE = "benchmark"


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


async def commands() -> AsyncIterator[dict[str, Any]]:
    """What the parent says, line by line."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield json.loads(line)


async def start(host: str, directory: Path) -> P2P:
    identity = load_or_create_identity(directory / "identity.key")
    return await start_daemon(NetworkSettings(host=host), identity.path, directory)


# -------------------------------------------------------------------------- a donor


def train(steps: Any) -> None:
    """Make steps at a pace and count them, until killed."""
    die_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    left = torch.rand(128, 128)
    began = time.perf_counter()
    rounds = 0
    while time.perf_counter() - began < 1.0:
        left @ left
        rounds += 1
    rounds = max(1, int(rounds * STEP_ARITHMETIC_SECONDS))
    while True:
        began = time.monotonic()
        for _ in range(rounds):
            left @ left
        time.sleep(max(0.0, began + 1 / STEPS_PER_SECOND - time.monotonic()))
        steps.value += 1


async def donate(host: str, directory: Path, elements: int, steps: Any) -> None:
    values = torch.rand(2, elements, generator=torch.Generator().manual_seed(0))
    digest = base_digest(
        fragment=0,
        version=1,
        total_element_samples=elements,
        history=NO_HISTORY,
        base=values[0],
        outer_state=values[1:],
    )

    async def freeze(fragment: int) -> FrozenBase:
        return FrozenBase(
            version=1,
            digest=digest,
            total_element_samples=elements,
            history=NO_HISTORY,
            history_before=NO_HISTORY,
            payload=await asyncio.to_thread(values.numpy().tobytes),
            receipts=(),
        )

    p2p = await start(host, directory)
    try:
        server = BaseServer(lambda header: header.digest == digest, freeze)
        await DaemonTransport(p2p, NAMESPACE, WRITE_SECONDS).serve(BASE, server.answer, BaseRequest)
        address = str((await p2p.get_visible_maddrs(latest=True))[0])
        say(address=address, digest=digest.hex())
        processes = [psutil.Process(), psutil.Process(p2p._child.pid)]
        async for _ in commands():
            times = [process.cpu_times() for process in processes]
            say(
                steps=steps.value,
                at=time.monotonic(),
                cpu_seconds=sum(one.user + one.system for one in times),
                bytes_sent=server.bytes_sent,
            )
    finally:
        await p2p.shutdown()


# ----------------------------------------------------------------------- a newcomer


async def come(host: str, directory: Path, elements: int) -> None:
    p2p = await start(host, directory)
    transport = DaemonTransport(p2p, NAMESPACE, WRITE_SECONDS)

    async def call(donor: str, requests: AsyncIterator[BaseRequest]) -> AsyncGenerator[BaseAnswer, None]:
        return await transport.call(PeerID.from_base58(donor), BASE, requests, BaseAnswer)

    async def fetch(addresses: list[str], claim: Claim) -> FetchedBase:
        partial = PartialBase(fragment=0, size=elements, states=1, claim=claim)
        donors = [parse_address(address).peer_id for address in addresses]
        fetched = await BaseFetcher(call, DonorRecords(time.monotonic)).fetch(partial, donors)
        if fetched is None:
            raise RuntimeError("no donor delivered")
        return fetched

    try:
        say(ready=True)
        async for command in commands():
            addresses = command["addresses"]
            for report in await dial_all(p2p, [parse_address(address) for address in addresses]):
                if report.outcome is not DialOutcome.CONNECTED:
                    raise RuntimeError(str(report))
            claim = Claim(version=1, digest=bytes.fromhex(command["digest"]), total_samples=1)
            began = time.monotonic()
            fetched = await fetch(addresses, claim)
            while time.monotonic() - began < command["seconds"]:
                fetched = await fetch(addresses, claim)
            say(seconds=fetched.seconds, bytes_received=fetched.bytes_received, donors=len(fetched.donors))
    finally:
        await p2p.shutdown()


def child(role: str, host: str, directory: Path, elements: int) -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(SWARM_THREADS)
    keep_freed_memory()
    die_with_parent(signal.SIGTERM)
    uvloop.install()
    if role == "donor":
        context = multiprocessing.get_context("fork")
        steps = context.Value("q", 0, lock=False)
        context.Process(target=train, args=(steps,), daemon=True).start()
        asyncio.run(donate(host, directory, elements, steps))
    else:
        asyncio.run(come(host, directory, elements))


# ---------------------------------------------------------------------- the parent


class Child:
    """A process at one of the network's peers."""

    def __init__(self, network: Network, name: str, role: str, directory: Path, elements: int) -> None:
        own = directory / name
        own.mkdir()
        arguments = ["--role", role, "--host", network.address(name), "--directory", str(own)]
        self.process = subprocess.Popen(
            network.command(name, [*NICE[role], sys.executable, __file__, *arguments, "--elements", str(elements)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said = self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with exit code {self.process.wait()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)

    def ask(self, **what: Any) -> dict[str, Any]:
        self.tell(**what)
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def newcomer_seconds(directory: Path, elements: int, repeats: int) -> dict[str, Any]:
    """Seconds until a base is here and verified, for each number of donors."""
    names = [f"donor-{number}" for number in range(max(DONORS))]
    links = {**{name: LinkSpec.parse(DONOR_LINE) for name in names}, "newcomer": LinkSpec.parse(NEWCOMER_LINE)}
    seconds: dict[int, list[float]] = {count: [] for count in DONORS}
    with ExitStack() as stack:
        network = stack.enter_context(Network(links))
        donors = [Child(network, name, "donor", directory, elements) for name in names]
        newcomer = Child(network, "newcomer", "newcomer", directory, elements)
        for process in (*donors, newcomer):
            stack.callback(process.close)
        for _ in range(repeats):
            for count in DONORS:
                addresses = [donor.said["address"] for donor in donors[:count]]
                told = newcomer.ask(addresses=addresses, digest=donors[0].said["digest"], seconds=0.0)
                seconds[count].append(told["seconds"])
    few, many = (statistics.median(seconds[count]) for count in DONORS)
    return {
        "newcomer_seconds": {str(count): statistics.median(times) for count, times in seconds.items()},
        "newcomer_seconds_of_each": {str(count): times for count, times in seconds.items()},
        "times_faster_with_three_donors": few / many,
        "seconds_at_the_lines_rate": {
            str(count): 8 * 8 * elements / (count * LinkSpec.parse(DONOR_LINE).up_bits_per_second) for count in DONORS
        },
    }


def training_while_serving(directory: Path, elements: int, seconds: float) -> dict[str, Any]:
    """A donor's steps while it serves against those while it does not, in turns."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    served, cpu_seconds, serving_seconds = 0, 0.0, 0.0
    line = LinkSpec.parse(FAST_LINE)
    with ExitStack() as stack:
        network = stack.enter_context(Network({"fast-donor": line, "guest": line}))
        donor = Child(network, "fast-donor", "donor", directory, elements)
        newcomer = Child(network, "guest", "newcomer", directory, elements)
        for process in (donor, newcomer):
            stack.callback(process.close)
        for stretch in range(2 * STRETCHES):
            serving = stretch % 2 == 1
            before = donor.ask()
            if serving:
                newcomer.ask(addresses=[donor.said["address"]], digest=donor.said["digest"], seconds=seconds)
            else:
                time.sleep(seconds)
            after = donor.ask()
            lasted = after["at"] - before["at"]
            rates[serving].append((after["steps"] - before["steps"]) / lasted)
            if serving:
                served += after["bytes_sent"] - before["bytes_sent"]
                cpu_seconds += after["cpu_seconds"] - before["cpu_seconds"]
                serving_seconds += lasted
    return {
        "steps_per_second": {
            "serving": statistics.mean(rates[True]),
            "not_serving": statistics.mean(rates[False]),
        },
        "training_rate_while_serving": statistics.mean(rates[True]) / statistics.mean(rates[False]),
        "served_megabytes_per_second": served / 1e6 / serving_seconds,
        "cpu_seconds_per_gigabyte": cpu_seconds / (served / 1e9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    parser.add_argument("--megabytes", type=float, default=8.0, help="of the base")
    parser.add_argument("--seconds", type=float, default=10.0, help="each stretch of training")
    parser.add_argument("--repeats", type=int, default=3, help="fetches with each number of donors")
    for name in ("--role", "--host", "--directory", "--elements"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        child(options.role, options.host, Path(options.directory), int(options.elements))
        return
    elements = int(options.megabytes * 1e6 / 8)
    directory = Path(tempfile.mkdtemp(prefix="p2p-trainer-benchmark-"))
    try:
        result = {
            "base_bytes": 8 * elements,
            "lines": {"donor": DONOR_LINE, "newcomer": NEWCOMER_LINE, "training": FAST_LINE},
            **newcomer_seconds(directory, elements, options.repeats),
            **training_while_serving(directory, elements, options.seconds),
        }
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
