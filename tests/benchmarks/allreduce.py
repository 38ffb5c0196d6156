"""Our round against hivemind's all-reduce, and both against plain TCP, on this machine.

``python tests/benchmarks/allreduce.py --json FILE [--elements N] [--quick] [--repeats 3]``

Two and four processes on loopback average the same float32 tensors. The contenders take turns, so that what else the
machine does meets all of them: compare ratios, not megabytes per second of different days.

ours      ``peers.round.Round`` over direct connections, as the averaging process holds it
daemon    the same over the p2p daemon alone, as between peers that cannot dial each other, or with --no-direct
hivemind  ``AllReduceRunner`` with default part size, no compression and no timeouts, as ``DecentralizedAverager``
p2pd      the same bytes in the same pattern through streams of the p2p daemon, nothing done with them: what an
          all-reduce through the daemon could reach
raw_tcp   the same bytes in the same pattern through plain sockets, neither encrypted nor added up

*Megabytes per second* are 10**6 bytes of the averaged tensor (4 a parameter) over the seconds until the slowest peer
has the whole average: each peer's, not the sum. With two peers as much travels in each direction.
*CPU seconds per round* are those of the peer's process and its daemon, mean over the peers; ``daemon_cpu_seconds`` is
the daemon's part of it.
*Bytes on the wire* are what went to and came from other peers, framing and encryption included: the daemon's read and
write calls less those of its own process, or with direct connections those of the process itself. None where the
system does not count them (/proc/PID/io).

Fields at the top of the JSON are those of two processes; ``processes`` has them for each number of processes. Numbers
are medians over the repeats, ratios are medians of the ratios within each repeat. ``bytes_per_parameter`` is what a
peer sends (up) and receives (down) for each parameter that it does not reduce itself; ``measured`` says whether it
was counted on the wire or is ``encoded_bytes``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, AsyncIterator, ClassVar, Literal  # noqa: UP035  (ServicerBase recognises typing's AsyncIterator only)

import psutil
import torch
import uvloop
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import achain, anext, as_aiter, azip

from dht_config.address import parse_address
from dht_config.identity import load_or_create_identity
from dht_config.manifest import AveragingSection
from dht_config.network import NetworkSettings
from peers.closing import ClosingTimes
from peers.codecs import CODEC_NAMES, get_codec
from peers.contribution import Outgoing
from peers.daemon import DialOutcome, dial_all, die_with_parent, start_daemon
from peers.direct import DirectTransport, listen_next_to
from peers.heap import keep_freed_memory
from peers.ledger import PendingSpan
from peers.messages import Average, Part
from peers.process import SWARM_THREADS
from peers.reducer import Rules
from peers.round import Round
from peers.round_plan import GroupMember, plan_round
from peers.rounds import AVERAGE
from peers.swarm import WRITE_SECONDS
from peers.transport import DaemonTransport, Transport

ELEMENTS = 40_000_000
QUICK_ELEMENTS = 4_000_000
PROCESSES = (2, 4)
TENSOR_ELEMENTS = 1_000_000
"""hivemind averages a list of tensors; those of a model are about as big."""
SAMPLES = 8
"""What every peer's contribution weighs."""
ROUND_SECONDS = 240.0
ANSWER_SECONDS = 300.0
SETTLE_SECONDS = 0.2
"""Between the end of a round and the count of what it took: others may still be closing their streams."""
NAMESPACE = "benchmark"
CHUNK_BYTES = 1 << 18
TORCH_THREADS = torch.get_num_threads()
"""What hivemind leaves as it is."""


class Contender:
    """One way to average, in one process of the group."""

    carried_by: ClassVar[Literal["daemon", "process"]] = "daemon"
    """Whose calls put the bytes on the wire."""

    def __init__(self, index: int, count: int, values: torch.Tensor, directory: Path) -> None:
        self.index, self.count, self.values, self.directory = index, count, values, directory

    async def start(self) -> Any:
        """Get ready; what the others need to know to connect."""

    async def connect(self, known: list[Any]) -> None:
        """Connect to those before us."""

    async def prepare(self, number: int) -> None:
        """Before the clock runs."""

    async def average(self, number: int) -> torch.Tensor | None:
        """What is measured; the average if it makes one."""

    async def close(self) -> None:
        """End what was started."""

    def share(self, index: int) -> memoryview:
        """The bytes of our contribution that peer ``index`` reduces."""
        size = self.values.numel()
        start, stop = size * index // self.count, size * (index + 1) // self.count
        return memoryview(self.values[start:stop].numpy()).cast("B")


class OnDaemon(Contender):
    """Has a p2p daemon of its own, started as the averaging process starts it."""

    p2p: P2P
    members: list[PeerID]

    async def start(self) -> Any:
        self.p2p = await start_daemon(
            NetworkSettings(host="127.0.0.1"),
            load_or_create_identity(self.directory / "identity.key").path,
            self.directory,
        )
        await self.serve()
        return str((await self.p2p.get_visible_maddrs(latest=True))[0])

    async def serve(self) -> None:
        """Add handlers."""

    async def connect(self, known: list[Any]) -> None:
        addresses = [parse_address(text) for text in known]
        self.members = [PeerID.from_base58(address.peer_id) for address in addresses]
        for report in await dial_all(self.p2p, addresses[: self.index]):
            if report.outcome is not DialOutcome.CONNECTED:
                raise RuntimeError(str(report))

    async def close(self) -> None:
        await self.p2p.shutdown()


def _not_over(rounds: dict[bytes, asyncio.Future[Any]]) -> dict[bytes, asyncio.Future[Any]]:
    """Without those of before, which hold their tensors; somebody may have announced the next one already."""
    return {group_id: future for group_id, future in rounds.items() if not future.done()}


class OverDaemon(OnDaemon):
    """``Round``, wired as ``RoundKeeper`` does it."""

    async def serve(self) -> None:
        keep_freed_memory()
        self._rounds: dict[bytes, asyncio.Future[Round]] = {}
        self._transport = await self.transport(DaemonTransport(self.p2p, NAMESPACE, WRITE_SECONDS))
        await self._transport.serve(AVERAGE, self.answer_sender, Part)

    async def transport(self, daemon: DaemonTransport) -> Transport:
        return daemon

    async def prepare(self, number: int) -> None:
        self._rounds = _not_over(self._rounds)

    def _round(self, group_id: bytes) -> asyncio.Future[Round]:
        return self._rounds.setdefault(group_id, asyncio.get_running_loop().create_future())

    async def answer_sender(self, stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncIterator[Average]:
        # as RoundKeeper.answer_sender
        first = await stream.__aiter__().__anext__()
        if first.header is not None:
            current = await self._round(first.header.group_id)
            async for answer in current.answer(achain(as_aiter(first), stream), remote_id):
                yield answer

    async def average(self, number: int) -> torch.Tensor | None:
        size = self.values.numel()
        spans = (PendingSpan(start=0, stop=size, samples=SAMPLES, steps=1),)
        plan = plan_round(
            group_id=b"benchmark-%d" % number,
            tick=number,
            fragment=0,
            size=size,
            members=[GroupMember(peer_id=peer_id, spans=spans, samples=SAMPLES, steps=1) for peer_id in self.members],
            target_group_size=AveragingSection().target_group_size,
            part_elements=AveragingSection().part_bytes // 4,
        )

        async def call_reducer(reducer: PeerID, parts: AsyncIterator[Part]) -> AsyncIterator[Average]:
            return await self._transport.call(reducer, AVERAGE, parts, Average)

        times = ClosingTimes(grace_seconds=ROUND_SECONDS, deadline_seconds=ROUND_SECONDS)
        current = Round(plan, self.p2p.peer_id, Outgoing.of(self.values), call_reducer, times, Rules())
        self._round(plan.group_id).set_result(current)
        result = await current.run()
        if any(len(part.included) != self.count for part in result.parts):
            raise RuntimeError("a contribution was left out")
        return result.average


class Ours(OverDaemon):
    """The same with direct connections; they are found during the first round, which is not counted."""

    carried_by = "process"

    async def transport(self, daemon: DaemonTransport) -> Transport:
        self._direct = DirectTransport(self.p2p, daemon, listen_next_to("127.0.0.1", 0))
        await self._direct.start()
        return self._direct

    async def close(self) -> None:
        await self._direct.close()
        await super().close()


class Averager(ServicerBase):  # type: ignore[misc]  # hivemind ships no types
    """What ``DecentralizedAverager`` does with a call of another peer."""

    def __init__(self) -> None:
        self._groups: dict[bytes, asyncio.Future[AllReduceRunner]] = {}

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        request = await anext(stream)
        runner = await self.group(request.group_id)
        async for message in runner.rpc_aggregate_part(achain(as_aiter(request), stream), context):
            yield message

    def forget(self) -> None:
        self._groups = _not_over(self._groups)

    def group(self, group_id: bytes) -> asyncio.Future[AllReduceRunner]:
        return self._groups.setdefault(group_id, asyncio.get_running_loop().create_future())


class Hivemind(OnDaemon):
    """``AllReduceRunner``, wired as ``DecentralizedAverager`` does it: differences are added to the local tensors."""

    async def serve(self) -> None:
        self._averager = Averager()
        await self._averager.add_p2p_handlers(self.p2p, namespace=NAMESPACE)

    async def prepare(self, number: int) -> None:
        self._averager.forget()
        self._local = self.values.clone()

    async def average(self, number: int) -> torch.Tensor | None:
        tensors = self._local.split(TENSOR_ELEMENTS)
        runner = AllReduceRunner(
            p2p=self.p2p,
            servicer_type=Averager,
            prefix=NAMESPACE,
            group_id=b"benchmark-%d" % number,
            tensors=tensors,
            weight=float(SAMPLES),
            ordered_peer_ids=self.members,
            peer_fractions=(1 / self.count,) * self.count,
        )
        self._averager.group(runner.group_id).set_result(runner)
        async for tensor, update in azip(as_aiter(*tensors), runner):
            tensor.add_(update, alpha=1.0)
        return self._local


class P2pd(OnDaemon):
    """Streams of the daemon: what a reducer is sent it answers with as many bytes of its own."""

    async def serve(self) -> None:
        await self.p2p.add_binary_stream_handler(NAMESPACE, self._serve_stream)

    async def _serve_stream(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = self.share(self.index)
        await asyncio.gather(_drain(reader, len(own)), _fill(writer, own))
        await reader.read()  # the caller closes first: the daemon resets a stream that its handler leaves
        writer.close()

    async def average(self, number: int) -> torch.Tensor | None:
        await asyncio.gather(*(self._exchange(index) for index in range(self.count) if index != self.index))
        return None

    async def _exchange(self, index: int) -> None:
        _, reader, writer = await self.p2p.call_binary_stream_handler(self.members[index], NAMESPACE)
        share = self.share(index)
        await asyncio.gather(_fill(writer, share), _drain(reader, len(share)))
        writer.close()


async def _fill(writer: asyncio.StreamWriter, body: memoryview) -> None:
    for start in range(0, len(body), CHUNK_BYTES):
        writer.write(body[start : start + CHUNK_BYTES])
        await writer.drain()


async def _drain(reader: asyncio.StreamReader, size: int) -> None:
    while size:
        chunk = await reader.read(min(size, CHUNK_BYTES))
        if not chunk:
            raise EOFError("a stream ended early")
        size -= len(chunk)


class RawTCP(Contender):
    """A connection for each pair; in each direction a contribution's share and as many averages."""

    async def start(self) -> Any:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=self.count)
        self._links: dict[int, socket.socket] = {}
        return self._listener.getsockname()

    async def connect(self, known: list[Any]) -> None:
        for index in range(self.index):
            self._links[index] = socket.create_connection(known[index])
            self._links[index].sendall(bytes([self.index]))
        for _ in range(self.index + 1, self.count):
            link, _ = self._listener.accept()
            self._links[link.recv(1)[0]] = link

    async def average(self, number: int) -> torch.Tensor | None:
        duties = [
            asyncio.to_thread(duty, link, index)
            for index, link in self._links.items()
            for duty in (self._send, self._receive)
        ]
        await asyncio.gather(*duties)
        return None

    def _send(self, link: socket.socket, index: int) -> None:
        link.sendall(self.share(index))
        link.sendall(self.share(self.index))

    def _receive(self, link: socket.socket, index: int) -> None:
        buffer = bytearray(CHUNK_BYTES)
        size = len(self.share(index)) + len(self.share(self.index))
        while size:
            received = link.recv_into(buffer, min(size, len(buffer)))
            if not received:
                raise EOFError("a connection ended early")
            size -= received

    async def close(self) -> None:
        for link in (*self._links.values(), self._listener):
            link.close()


CONTENDERS: dict[str, type[Contender]] = {
    "ours": Ours,
    "daemon": OverDaemon,
    "hivemind": Hivemind,
    "p2pd": P2pd,
    "raw_tcp": RawTCP,
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and its daemon have used so far."""

    process_cpu_seconds: float
    daemon_cpu_seconds: float
    wire_bytes_up: int | None
    wire_bytes_down: int | None

    @classmethod
    def now(cls, carried_by: str) -> Usage:
        process = psutil.Process()
        daemons = process.children()
        up = down = None
        with contextlib.suppress(OSError, IndexError):
            own, daemon = _calls(process.pid), _calls(daemons[0].pid)
            if carried_by == "process":
                up, down = own["wchar"], own["rchar"]
            else:
                up, down = daemon["wchar"] - own["rchar"], daemon["rchar"] - own["wchar"]
        return cls(_cpu_seconds(process), sum(_cpu_seconds(daemon) for daemon in daemons), up, down)

    def since(self, before: Usage) -> Usage:
        known = self.wire_bytes_up is not None and before.wire_bytes_up is not None
        return Usage(
            self.process_cpu_seconds - before.process_cpu_seconds,
            self.daemon_cpu_seconds - before.daemon_cpu_seconds,
            self.wire_bytes_up - before.wire_bytes_up if known else None,
            self.wire_bytes_down - before.wire_bytes_down if known else None,
        )


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _calls(pid: int) -> dict[str, int]:
    """Bytes that went through a process's read and write calls, sockets included."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {name: int(number) for name, number in (line.split(": ") for line in lines)}


def _child(
    contender: type[Contender], index: int, count: int, pattern: torch.Tensor, pipe: Connection, directory: Path
) -> None:
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if contender is Hivemind:
        os.environ["GOMAXPROCS"] = str(os.cpu_count())  # Go's default
        torch.set_num_threads(TORCH_THREADS)
    uvloop.install()
    try:
        asyncio.run(_live(contender(index, count, pattern * (index + 1), directory), pipe, pattern))
    except BaseException:
        pipe.send(RuntimeError(traceback.format_exc()))


async def _live(contender: Contender, pipe: Connection, pattern: torch.Tensor) -> None:
    """Does what the parent says, one step at a time, so that all processes of a group are at the same step."""
    loop = asyncio.get_running_loop()

    async def told() -> Any:
        return await loop.run_in_executor(None, pipe.recv)

    pipe.send(await contender.start())
    try:
        await contender.connect(await told())
        pipe.send("connected")
        while (number := await told()) is not None:
            await contender.prepare(number)
            pipe.send("prepared")
            await told()
            before = Usage.now(contender.carried_by)
            began = time.perf_counter()
            average = await contender.average(number)
            pipe.send(time.perf_counter() - began)
            await told()
            await asyncio.sleep(SETTLE_SECONDS)
            pipe.send(Usage.now(contender.carried_by).since(before))
            if average is not None and number == 0:
                torch.testing.assert_close(average, pattern * ((contender.count + 1) / 2))
    finally:
        await contender.close()
    pipe.send("closed")


class Group:
    """The processes of one contender."""

    def __init__(self, name: str, count: int, pattern: torch.Tensor, directory: Path) -> None:
        self.name, self.count, self.directory = name, count, directory
        context = multiprocessing.get_context("fork")  # under spawn hivemind breaks
        self._pipes: list[Connection] = []
        self._processes = []
        self._numbers = itertools.count()
        for index in range(count):
            ours, theirs = context.Pipe()
            sockets = Path(tempfile.mkdtemp(prefix=f"{index}-", dir=directory))
            process = context.Process(
                target=_child, args=(CONTENDERS[name], index, count, pattern, theirs, sockets), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        known = self._answers()
        self._tell(known)
        self._answers()

    def _tell(self, message: Any) -> None:
        for pipe in self._pipes:
            pipe.send(message)

    def _answers(self) -> list[Any]:
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(ANSWER_SECONDS):
                raise TimeoutError(f"{self.name}: a process says nothing")
            answers.append(pipe.recv())
            if isinstance(answers[-1], Exception):
                raise answers[-1]
        return answers

    def round(self) -> dict[str, float | None]:
        """One round of everyone."""
        steps: list[list[Any]] = []
        for message in (next(self._numbers), "go", "count"):
            self._tell(message)
            steps.append(self._answers())
        _, seconds, usages = steps
        up, down = (
            None if None in numbers else statistics.mean(numbers)
            for numbers in ([usage.wire_bytes_up for usage in usages], [usage.wire_bytes_down for usage in usages])
        )
        return {
            "seconds": max(seconds),
            "cpu_seconds": statistics.mean(usage.process_cpu_seconds + usage.daemon_cpu_seconds for usage in usages),
            "daemon_cpu_seconds": statistics.mean(usage.daemon_cpu_seconds for usage in usages),
            "wire_bytes_up": up,
            "wire_bytes_down": down,
        }

    def close(self, patient: bool = True) -> None:
        with contextlib.suppress(OSError):
            self._tell(None)
        for process in self._processes:
            process.join(10.0 if patient else 1.0)
            if process.is_alive():
                process.kill()
                process.join()


def measure(count: int, elements: int, repeats: int, names: list[str], directory: Path) -> dict[str, Any]:
    """All contenders with ``count`` processes; the first round of each is not counted."""
    pattern = torch.rand(elements, generator=torch.Generator().manual_seed(0)) - 0.5
    groups: list[Group] = []
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    try:
        for name in names:
            groups.append(Group(name, count, pattern, directory))
        for repeat in range(repeats + 1):
            for group in groups:
                measured = group.round()
                if repeat:
                    rounds[group.name].append(measured)
    finally:
        for group in groups:
            group.close()
    megabytes = elements * 4 / 1e6
    results: dict[str, Any] = {}
    for name, measured_rounds in rounds.items():
        result = {key: _median([row[key] for row in measured_rounds]) for key in measured_rounds[0]}
        result["megabytes_per_second"] = megabytes / result["seconds"]
        result["seconds_of_each"] = [row["seconds"] for row in measured_rounds]
        results[name] = result
    ratios = {
        f"{name}_to_{other}": {
            "megabytes_per_second": _ratio(rounds[other], rounds[name], "seconds"),
            "cpu_seconds": _ratio(rounds[name], rounds[other], "cpu_seconds"),
        }
        for name, other in (
            ("ours", "hivemind"),
            ("daemon", "hivemind"),
            ("ours", "daemon"),
            ("daemon", "p2pd"),
            ("ours", "raw_tcp"),
            ("hivemind", "raw_tcp"),
        )
        if name in rounds and other in rounds
    }
    return {**results, "ratios": ratios}


def _median(numbers: list[Any]) -> Any:
    return None if None in numbers else statistics.median(numbers)


def _ratio(above: list[dict[str, Any]], below: list[dict[str, Any]], key: str) -> float:
    return statistics.median(one[key] / max(other[key], 1e-9) for one, other in zip(above, below, strict=True))


def bytes_per_parameter(elements: int, wire: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """For each codec, of contributions and of averages; with two peers every parameter travels once in each direction.

    Averages are never sparse: beside sparse contributions they are taken to be int8.
    """
    encoded = {name: get_codec(name).encoded_bytes(elements) / elements for name in CODEC_NAMES}
    table: dict[str, dict[str, Any]] = {
        name: {"up": each, "down": encoded["int8" if name == "sparse" else name], "measured": False}
        for name, each in encoded.items()
    }
    if wire is not None and wire["wire_bytes_up"] is not None:
        table["float32"] = {
            "up": wire["wire_bytes_up"] / elements,
            "down": wire["wire_bytes_down"] / elements,
            "measured": True,
        }
    return table


def report(by_count: dict[int, dict[str, Any]], elements: int, repeats: int) -> dict[str, Any]:
    """What goes into the JSON."""
    first = by_count[min(by_count)]
    names = [name for name in CONTENDERS if name in first]
    return {
        "elements": elements,
        "repeats": repeats,
        **{f"{name}_megabytes_per_second": first[name]["megabytes_per_second"] for name in names},
        "cpu_seconds_per_round": {name: first[name]["cpu_seconds"] for name in names},
        "ratios": first["ratios"],
        "bytes_per_parameter": bytes_per_parameter(elements, first.get("ours")),
        "processes": {str(count): results for count, results in by_count.items()},
    }


def show(by_count: dict[int, dict[str, Any]], elements: int) -> None:
    """The same for people."""
    print(f"{elements / 1e6:g} M float32; medians. MB/s of tensor, CPU seconds a peer (daemon's part), MB on the wire")
    print(f"{'processes':>9}  {'':9} {'MB/s':>7} {'CPU s':>7} {'daemon':>7} {'MB up':>7} {'MB down':>7}")
    for count, results in by_count.items():
        for name in CONTENDERS:
            if name in results:
                row = results[name]
                wire = [
                    f"{row[key] / 1e6:7.1f}" if row[key] else "      -" for key in ("wire_bytes_up", "wire_bytes_down")
                ]
                print(
                    f"{count:9}  {name:9} {row['megabytes_per_second']:7.1f} {row['cpu_seconds']:7.2f} "
                    f"{row['daemon_cpu_seconds']:7.2f} {' '.join(wire)}"
                )
        for name, ratio in results["ratios"].items():
            print(f"{'':9}  {name}: {ratio['megabytes_per_second']:.2f} x MB/s, {ratio['cpu_seconds']:.2f} x CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    parser.add_argument("--elements", type=int, help=f"float32 to average ({ELEMENTS}; {QUICK_ELEMENTS} with --quick)")
    parser.add_argument("--quick", action="store_true", help="less to average")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each contender")
    parser.add_argument("--processes", type=int, nargs="+", default=list(PROCESSES), help="sizes of the groups")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), help="contenders")
    options = parser.parse_args()
    elements = options.elements or (QUICK_ELEMENTS if options.quick else ELEMENTS)
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    torch.set_num_threads(SWARM_THREADS)  # here as well: a forked child cannot use its parent's thread pool
    directory = Path(tempfile.mkdtemp(prefix="p2p-trainer-benchmark-"))
    by_count: dict[int, dict[str, Any]] = {}
    try:
        for count in options.processes:
            by_count[count] = measure(count, elements, options.repeats, options.only, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    show(by_count, elements)
    if options.json is not None:
        options.json.write_text(json.dumps(report(by_count, elements, options.repeats), indent=1) + "\n")


if __name__ == "__main__":
    main()
