"""The composition root: one peer's life from the command line to its goodbye.

Order matters. The averaging process is forked first, before anything touches CUDA or starts a thread; then peers
are found, the manifest is checked, the model built, the throughput measured, the bases fetched, and training begins.
"""

from __future__ import annotations

import copy
import ipaddress
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from dht_config.address import Address, parse_addresses
from dht_config.errors import (
    CheckpointError,
    DeviceError,
    DeviceLostError,
    ManifestError,
    P2PTrainerError,
    PortInUseError,
)
from dht_config.identity import OrganiserKey
from dht_config.invite import MAX_ADDRESSES, Invite
from dht_config.manifest import RunManifest
from dht_config.network import NetworkSettings
from dht_config.records import SignedManifest, sign_manifest
from p2p_trainer.archive import Archive
from p2p_trainer.checkpoint import Checkpoint, load_checkpoint, optimizer_from_tensors, save_checkpoint
from p2p_trainer.devices import device_failures, pick_device, set_thread_count
from p2p_trainer.hardware import read_hardware
from p2p_trainer.inner_optimizer import build_inner_optimizer
from p2p_trainer.limits import raise_open_file_limit
from p2p_trainer.metrics import MetricsWriter
from p2p_trainer.modes import GradientMode, LocalMode, Mode
from p2p_trainer.run_directory import SIGNED_MANIFEST_NAME, RunDirectory
from p2p_trainer.serving import Door
from p2p_trainer.settings import PeerSettings, default_data_directory
from p2p_trainer.target import Target, check_model, checked_manifest, layout_of, trainable
from p2p_trainer.tasks import Task
from p2p_trainer.throughput import Throughput, inner_step, measure_throughput
from p2p_trainer.training import Accounts, LeaveFlag, LeaveRequested, Trainer, data_seed
from p2p_trainer.view import NOT_DIALLED, LiveView, PeerView, address_line, farewell, farewell_of_a_door
from peers.arena import SharedArena
from peers.contributed import last_contributed
from peers.daemon import check_port_free
from peers.fragments import FragmentLayout, gather_fragment, load_fragment, shift_fragment
from peers.ledger import Ledger
from peers.outer import NO_HISTORY, base_digest, build_outer_optimizer
from peers.pipe import (
    BeginTraining,
    Configure,
    Connected,
    FragmentMeta,
    Stopped,
    Synced,
    Syncing,
    Waiting,
)
from peers.process import SwarmHandle, start_swarm
from peers.settings import Role, SwarmSettings

STOP_SECONDS = 7.5
HURRY_SECONDS = 1.0
PACED_SECONDS = 2.0
NOT_STOPPED = "the averaging process did not end in time"

Message = TypeVar("Message")


@contextmanager
def leave_on_signal() -> Iterator[LeaveFlag]:
    """TERM and the first INT ask to leave; another one asks to hurry."""
    flag = LeaveFlag()

    def handle(number: int, frame: FrameType | None) -> None:
        flag.requests += 1
        flag.reason = "interrupted" if number == signal.SIGINT else "terminated"

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Who is told of what happens in a session, besides the view."""

    invite: Callable[[Invite], None] = lambda invite: None
    """Given an invite to this peer as soon as there is one."""
    event: Callable[[Mapping[str, Any]], None] = lambda event: None
    """Given every event of ``metrics.jsonl``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that training or serving needs; ``fragments`` is None when all bases must be fetched."""

    signed: SignedManifest
    manifest: RunManifest
    task: Task
    model: nn.Module
    layout: FragmentLayout
    arena: SharedArena
    checkpoint: Checkpoint | None
    fragments: list[FragmentMeta] | None


class Session:
    """One peer of one run, between its start and its end.

    :param role: "training" for a volunteer, "serving" for a bootstrap peer
    """

    def __init__(
        self,
        target: Target,
        settings: PeerSettings,
        role: Role,
        view: LiveView,
        leave: LeaveFlag,
        listener: Listener = Listener(),
    ) -> None:
        self.target, self.settings, self.role = target, settings, role
        self.view, self.leave, self.listener = view, leave, listener
        self.farewell = "Left before it took part in the run."
        """What to tell a person when ``run`` has returned."""

    def run(self) -> str:
        """Live until asked to leave; returns the reason. :raises P2PTrainerError: what a person can act on"""
        path = self.settings.dir
        if path is None:
            name = "peer" if self.role == "training" else "bootstrap"
            path = default_data_directory() / self.target.run_id / name
        if self.target.manifest is not None and self.target.task is not None:
            check_model(self.target.manifest, self.target.task)
        if self.target.invite is not None and not (path / SIGNED_MANIFEST_NAME).exists():  # else it is in already
            self.target.invite.refuse_if_expired(time.time())
        raise_open_file_limit()
        self.directory = RunDirectory(path)
        try:
            with MetricsWriter(self.directory.metrics_path, listener=self.listener.event) as self.metrics:
                self.swarm = self._start_swarm()
                try:
                    return self._live()
                except LeaveRequested as request:
                    self._stop()
                    self.metrics.write("leave", reason=str(request))
                    return str(request)
                except (DeviceError, DeviceLostError) as error:
                    # The averaging process is well, and the others should not have to find out that we are gone.
                    self._say_goodbye(error)
                    raise
                finally:
                    self.swarm.close()
        finally:
            self.directory.close()

    def _live(self) -> str:
        self.view.status(f"Looking for the run {self.target.run_id} ...")
        set_thread_count(self.settings.threads)
        connected = self._wait_for(Connected)
        self._remember_port(connected)
        prepared = self._prepare(connected)
        self.directory.keep_signed_manifest(prepared.signed)
        self._announce_invite(prepared.signed, connected)
        return self._serve(prepared) if self.role == "serving" else self._train(prepared, connected)

    # ------------------------------------------------------------- beginning

    def _start_swarm(self) -> SwarmHandle:
        """Fork the averaging process; it starts to look for peers at once."""
        target, directory = self.target, self.directory
        addresses, problems = parse_addresses([*target.addresses, *self.settings.peer])
        if problems and not addresses:
            raise problems[0]
        for problem in problems:
            self.view.status(f"Ignored: {problem}")
        identity = directory.identity()
        self.restart = directory.count_start()
        stored = directory.signed_manifest()
        self.stored = stored if stored is not None and stored.run_id() == target.run_id else None
        self.organiser: OrganiserKey | None = None
        if target.manifest is not None and (self.role == "serving" or not addresses):
            self.organiser = directory.organiser_key()
        known_key = self.stored.organiser_public_key if self.stored is not None else None
        if target.invite is not None:
            known_key = target.invite.organiser_public_key
        elif self.organiser is not None:
            known_key = self.organiser.public_key
        if self.stored is not None and self.stored.organiser_public_key != known_key:
            self.stored = None
        return start_swarm(
            SwarmSettings(
                run_id=target.run_id,
                identity=identity,
                run_directory=directory.path,
                network=self._network(),
                socket_directory=directory.socket_directory(),  # last of what can fail: nobody would remove it
                role=self.role,
                addresses=tuple(addresses),
                # A standby door that has been in the run opens it again by itself, as the first one does.
                may_start=self.organiser is not None or (self.role == "serving" and self.stored is not None),
                organiser_public_key=known_key,
                needs_manifest=self.organiser is None and self.stored is None,
                manifest_json=target.manifest.canonical_json() if target.manifest is not None else "",
                restart=self.restart,
                wait_seconds=self.settings.wait_seconds,
                up_bytes_per_second=self.settings.up_bytes_per_second,
                daily_bytes=self.settings.daily_bytes,
            )
        )

    def _network(self) -> NetworkSettings:
        """The network settings, on the last start's port if none is asked for and it is still free."""
        network = self.settings.network
        port = self.directory.remembered_port()
        if network.port or not port:
            return network
        try:
            check_port_free(network.host, port)
        except PortInUseError:
            return network
        return network.model_copy(update={"port": port})

    def _remember_port(self, connected: Connected) -> None:
        good, _ = parse_addresses(connected.addresses)
        if good and not self.settings.announce:
            self.directory.remember_port(good[0].transport.port)

    def _announce_invite(self, signed: SignedManifest, connected: Connected) -> None:
        good, _ = parse_addresses(connected.addresses)
        addresses = dialable(good)
        if not addresses:
            self.view.status(NOT_DIALLED)
        else:
            self.view.status(address_line([address.text for address in addresses], reach(addresses[0])))
            texts = [address.text for address in addresses]
            if self.role == "serving" and self.target.invite is not None:  # a standby: its invite names both doors
                texts += [text for text in self.target.invite.addresses if text not in texts]
            invite = Invite(
                run_id=self.target.run_id,
                organiser_public_key=signed.organiser_public_key,
                addresses=tuple(texts[:MAX_ADDRESSES]),
            )
            self.directory.keep_invite(invite.encode())
            self.listener.invite(invite)

    def _wait_for(self, kind: type[Message]) -> Message:
        """The next message of a kind; others are shown as progress. :raises LeaveRequested:"""
        while True:
            self.leave.check()
            for message in self.swarm.messages(0.2):
                if isinstance(message, kind):
                    return message
                if isinstance(message, Waiting):
                    self.view.status(message.text)
                elif isinstance(message, Syncing):
                    self.view.syncing(message.bytes_received, message.bytes_expected)

    # ------------------------------------------------- manifest, model, bases

    def _prepare(self, connected: Connected) -> Prepared:
        """Check the manifest, build the model, and put the bases we have into the arena."""
        signed = connected.signed_manifest or self.stored
        if signed is not None:
            manifest, task = checked_manifest(signed, self.target, allow_files=self.settings.allow_files)
        elif self.target.manifest is not None and self.target.task is not None:
            manifest, task = self.target.manifest, self.target.task
        else:
            raise ManifestError("The run's manifest is not known.", "Ask the organiser for an invite.")
        model = task.build_model()
        layout = layout_of(model, manifest)
        arena = SharedArena.create(layout.num_elements, build_outer_optimizer(manifest.outer_optimizer).states)
        checkpoint = self._load_checkpoint(layout) if signed is not None else None
        fragments: list[FragmentMeta] | None = None
        if checkpoint is not None:
            arena.base.copy_(checkpoint.tensors["base"])
            arena.outer_state.copy_(checkpoint.tensors["outer_state"])
            fragments = [FragmentMeta.from_json(row) for row in checkpoint.meta["fragments"]]
        elif signed is None:
            fragments = make_initial_bases(trainable(model), layout, arena)
            signed = self._sign(manifest, task, layout, arena, fragments)
        if signed is None:
            raise CheckpointError("The run's manifest is lost.", f"Remove {self.directory.path} to start anew.")
        return Prepared(
            signed=signed,
            manifest=manifest,
            task=task,
            model=model,
            layout=layout,
            arena=arena,
            checkpoint=checkpoint,
            fragments=fragments,
        )

    def _sign(
        self,
        manifest: RunManifest,
        task: Task,
        layout: FragmentLayout,
        arena: SharedArena,
        fragments: Sequence[FragmentMeta],
    ) -> SignedManifest:
        """Sign a new run. Its first bases cannot be made again, so they are kept before anybody hears of them."""
        if self.organiser is None:
            raise ManifestError("Only the organiser can start a run.", "Start it from its manifest file.")
        signed = sign_manifest(self.organiser, manifest, task.version, [meta.digest for meta in fragments])
        save_checkpoint(
            self.directory.path,
            {"base": arena.base.clone(), "outer_state": arena.outer_state.clone()},
            {
                **self._checkpoint_meta(layout),
                "clean": True,
                "restart": self.restart,
                "samples": 0,
                "steps": 0,
                "fragments": [meta.to_json() for meta in fragments],
            },
        )
        return signed

    def _load_checkpoint(self, layout: FragmentLayout) -> Checkpoint | None:
        found = load_checkpoint(self.directory.path, self.view.status)
        if found is None:
            return None
        expected = self._checkpoint_meta(layout)
        if any(found.meta.get(key) != value for key, value in expected.items()):
            self.view.status("The checkpoint in this directory belongs to another run: starting without it.")
            return None
        return found

    def _checkpoint_meta(self, layout: FragmentLayout) -> dict[str, Any]:
        """What a checkpoint must agree in to be ours."""
        return {"format": 2, "run_id": self.target.run_id, "bounds": list(layout.bounds)}

    # --------------------------------------------------------------- serving

    def _serve(self, prepared: Prepared) -> str:
        """Keep the door: answer, follow the bases, save them now and then."""
        samples = steps = 0
        self._configure(prepared, samples, steps, clean=True)
        synced = self._wait_for(Synced)
        self.view.status("Serving: volunteers can join. Ctrl-C ends this peer, not the run.")
        self._log_join(samples)
        door = Door(
            swarm=self.swarm,
            arena=prepared.arena,
            directory=self.directory.path,
            checkpoint_meta={**self._checkpoint_meta(prepared.layout), "restart": self.restart},
            checkpoint_seconds=self.settings.checkpoint_seconds,
            archive=Archive(self.directory.archive_path, self.settings.snapshot_versions, self.settings.snapshot_keep),
            metrics=self.metrics,
            view=self.view,
            leave=self.leave,
        )
        door.serve(synced.fragments)
        stopped = self._stop()
        problem = door.save(door.tensors(), stopped.fragments) if stopped is not None else NOT_STOPPED
        self.farewell = farewell_of_a_door(self.directory.path, problem)
        self.metrics.write("leave", reason=self.leave.reason, processed_samples=0, inner_steps=0, saved=not problem)
        return self.leave.reason

    # -------------------------------------------------------------- training

    def _train(self, prepared: Prepared, connected: Connected) -> str:
        device = pick_device(self.settings.device)
        with device_failures(device):
            return self._train_on(device, prepared, connected)

    def _train_on(self, device: torch.device, prepared: Prepared, connected: Connected) -> str:
        manifest, task, layout, arena = prepared.manifest, prepared.task, prepared.layout, prepared.arena
        machine = read_hardware(device, self.directory.path)
        self.metrics.write("machine", **asdict(machine))
        model = prepared.model.to(device)
        parameters = trainable(model)
        throughput = self._measure(task, model, manifest, device)
        optimizer = build_inner_optimizer(model.parameters(), manifest.inner_optimizer)
        meta = prepared.checkpoint.meta if prepared.checkpoint is not None else {}
        samples, steps = int(meta.get("samples", 0)), int(meta.get("steps", 0))
        restored = prepared.checkpoint is not None and _restore(prepared.checkpoint, parameters, optimizer)
        # A checkpoint from before the last start says nothing of what was contributed since.
        clean = not meta or (bool(meta.get("clean")) and meta.get("restart") == self.restart - 1)
        self._configure(prepared, samples, steps, clean=clean)
        synced = self._wait_for(Synced)
        for fragment in range(layout.num_fragments):
            where = layout.slice(fragment)
            if restored and synced.keep[fragment]:
                shift_fragment(parameters, layout, fragment, arena.base[where], arena.snapshot[where])
            else:
                load_fragment(parameters, layout, fragment, arena.base[where])
        accounts = Accounts(layout=layout, samples=synced.samples, steps=synced.steps, fragments=synced.fragments)
        self._say_what_was_lost(accounts, prepared.fragments)
        self._log_join(accounts.samples)
        self.metrics.write(
            "throughput",
            samples_per_second=throughput.samples_per_second,
            micro_batch=throughput.micro_batch,
            device=str(device),
            phase="solo",
        )
        self.swarm.send(
            BeginTraining(
                samples_per_second=throughput.samples_per_second,
                micro_batch=throughput.micro_batch,
                device=machine.device.name,
            )
        )
        self.view.status("In the swarm: training begins. Ctrl-C leaves; the run goes on, and your progress is kept.")
        peer_view = PeerView(run_id=self.target.run_id, state="training")
        micro_batch, seed = throughput.micro_batch, data_seed(self.target.run_id, connected.peer_id, self.restart)
        mode: Mode
        if manifest.averaging.mode == "gradient":
            mode = GradientMode(task, model, parameters, manifest, layout, arena, micro_batch, seed)
        else:
            mode = LocalMode(task, model, parameters, optimizer, manifest, layout, arena, micro_batch, seed)
        trainer = Trainer(
            task=task,
            model=model,
            parameters=parameters,
            optimizer=optimizer,
            mode=mode,
            settings=self.settings,
            accounts=accounts,
            arena=arena,
            swarm=self.swarm,
            metrics=self.metrics,
            view=self.view,
            peer_view=peer_view,
            leave=self.leave,
            checkpoint_directory=self.directory.path,
            checkpoint_meta={**self._checkpoint_meta(layout), "restart": self.restart},
        )
        reason = trainer.train()
        ended = time.time()
        self.view.status("Leaving: finishing rounds that are under way ...")
        stopped = self._stop(trainer)
        problem = self._save_last(trainer, stopped)
        peer_view.processed_samples, peer_view.credited_samples = accounts.samples, accounts.credited_samples
        self.farewell = farewell(peer_view, self.directory.path, problem)
        self.metrics.write(
            "leave",
            reason=reason,
            training_ended=ended,
            **accounts.fields(),
            fragments=accounts.by_fragment(),
            saved=not problem,
        )
        return reason

    def _say_what_was_lost(self, accounts: Accounts, saved: list[FragmentMeta] | None) -> None:
        """What a person who comes back should know: the swarm may have gone on without some of the work."""
        before = Accounts(layout=accounts.layout, samples=0, steps=0, fragments=saved) if saved is not None else None
        lost = accounts.dropped_samples - (before.dropped_samples if before is not None else 0.0)
        if lost >= 1:
            self.view.status(f"{lost:.0f} samples from before are in no base of the swarm: it went on without them.")

    def _measure(self, task: Task, model: nn.Module, manifest: RunManifest, device: torch.device) -> Throughput:
        """Samples per second alone, at the micro-batch chosen; paced if a slower machine is emulated."""
        seed = data_seed(self.target.run_id, "measuring", self.restart)

        def progress(fraction: float) -> None:
            self.leave.check()
            self.view.measuring(fraction)

        measured = measure_throughput(task, model, manifest.inner_optimizer, device, seed, on_progress=progress)
        if self.settings.emulate is None:
            return measured
        paced = paced_rate(task, model, manifest, measured.micro_batch, self.settings.emulate, self.leave)
        return Throughput(
            samples_per_second=paced,
            micro_batch=measured.micro_batch,
            measured_seconds=measured.measured_seconds,
        )

    def _configure(self, prepared: Prepared, samples: int, steps: int, *, clean: bool) -> None:
        self.swarm.configure(
            Configure(
                layout=prepared.layout,
                states=prepared.arena.states,
                signed_manifest=prepared.signed,
                fragments=prepared.fragments,
                samples=samples,
                steps=steps,
                clean=clean,
                contributed=last_contributed(self.directory.path) if self.role == "training" else (0, 0),
            ),
            prepared.arena,
        )

    def _log_join(self, samples: int) -> None:
        self.metrics.write(
            "join",
            peer_id=str(self.directory.identity().peer_id),
            run_id=self.target.run_id,
            restart=self.restart,
            processed_samples=samples,
        )

    # ------------------------------------------------------------------- end

    def _stop(self, trainer: Trainer | None = None) -> Stopped | None:
        """Say goodbye, answering the averaging process until it has ended; None if it took too long."""
        self.swarm.stop(self.leave.reason)
        give_up = time.monotonic() + STOP_SECONDS
        while time.monotonic() < give_up:
            if self.leave.requests > 1:
                give_up = min(give_up, time.monotonic() + HURRY_SECONDS)
            for message in self.swarm.messages(0.1):
                if isinstance(message, Stopped):
                    return message
                if trainer is not None:
                    trainer.handle(message)
        return None

    def _say_goodbye(self, error: P2PTrainerError) -> None:
        """Leave without the parameters, which are out of reach; the last checkpoint stays."""
        with suppress(P2PTrainerError):  # what stopped training is what a person should hear of
            self._stop()
        self.metrics.write("leave", reason=error.problem, exit_code=int(error.exit_code))

    def _save_last(self, trainer: Trainer, stopped: Stopped | None) -> str:
        """The checkpoint of a clean end; if the averaging process did not end, the last one stays.

        Returns what went wrong, or nothing.
        """
        if stopped is None:
            return NOT_STOPPED
        try:
            trainer.save(stopped.fragments, clean=stopped.clean)
        except CheckpointError as error:
            return error.problem
        return ""


def paced_rate(
    task: Task, model: nn.Module, manifest: RunManifest, micro_batch: int, emulate: float, leave: LeaveFlag
) -> float:
    """Samples per second of a slowed-down machine alone: real steps on a copy, each stretched by sleeping.

    A machine whose step takes minutes is not measured for minutes.
    """
    section = manifest.inner_optimizer
    twin = copy.deepcopy(model)
    optimizer = build_inner_optimizer(twin.parameters(), section)
    batches = task.batches(0, section.batch_size)
    samples = 0
    inner_step(task, twin, optimizer, next(batches), micro_batch, section.clip_norm)  # the first step is slower
    began = time.monotonic()
    while samples == 0 or time.monotonic() - began < PACED_SECONDS:
        step_began = time.monotonic()
        inner_step(task, twin, optimizer, next(batches), micro_batch, section.clip_norm, between=leave.check)
        samples += section.batch_size
        if step_began + section.batch_size / emulate - time.monotonic() > PACED_SECONDS:
            return emulate  # as slow as it is told to be: sleeping it out would show no more
        while (left := step_began + section.batch_size / emulate - time.monotonic()) > 0:
            leave.check()
            time.sleep(min(left, 0.2))
    return samples / (time.monotonic() - began)


def dialable(addresses: Sequence[Address]) -> list[Address]:
    """Addresses that others may reach, public ones first; loopback only if there is nothing else."""
    ranked = sorted(addresses, key=_rank)
    elsewhere = [address for address in ranked if _rank(address) < 3]
    return elsewhere or ranked


def reach(address: Address) -> str:
    """From where an address can be dialled, in words; empty if from everywhere, as far as one can see."""
    return ("", "inside this network", "inside this network", "on this machine alone")[_rank(address)]


def _rank(address: Address) -> int:
    try:
        ip = ipaddress.ip_address(address.transport.host)
    except ValueError:
        return 0  # a name
    return 3 if ip.is_loopback else 2 if ip.is_link_local else 1 if ip.is_private else 0


def make_initial_bases(
    parameters: Mapping[str, nn.Parameter], layout: FragmentLayout, arena: SharedArena
) -> list[FragmentMeta]:
    """Bases of version 0 from a freshly initialised model, outer state zero."""
    fragments = []
    for fragment in range(layout.num_fragments):
        where = layout.slice(fragment)
        gather_fragment(parameters, layout, fragment, arena.base[where])
        digest = base_digest(
            fragment=fragment,
            version=0,
            total_element_samples=0,
            history=NO_HISTORY,
            base=arena.base[where],
            outer_state=arena.outer_state[:, where],
        )
        ledger = Ledger.open(layout.size(fragment)).to_json()
        fragments.append(
            FragmentMeta(version=0, digest=digest, total_element_samples=0, history=NO_HISTORY, ledger=ledger)
        )
    return fragments


def _restore(checkpoint: Checkpoint, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> bool:
    """Load local parameters and optimizer state; False if the checkpoint holds bases only."""
    stored = {name: checkpoint.tensors.get(f"parameter.{name}") for name in parameters}
    if any(value is None for value in stored.values()):
        return False
    with torch.no_grad():
        for name, parameter in parameters.items():
            value = stored[name]
            if value is not None:
                parameter.copy_(value)
    prefix = "optimizer."
    state = {name[len(prefix) :]: value for name, value in checkpoint.tensors.items() if name.startswith(prefix)}
    optimizer_from_tensors(optimizer, state, checkpoint.meta["optimizer"])
    return True
