"""The composition root: one peer's life from the command line to its goodbye.

Order matters. The averaging process is forked first, before anything touches CUDA or starts a thread; then peers
are found, the manifest is checked, the model built, the throughput measured, the bases fetched, and training begins.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from dht_config.address import INSIDE, dialable, parse_addresses, reach
from dht_config.errors import (
    CheckpointError,
    DeviceError,
    DeviceLostError,
    ManifestError,
    P2PTrainerError,
    PortInUseError,
    SwarmProcessDied,
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
from p2p_trainer.limits import raise_open_file_limit
from p2p_trainer.metrics import MetricsWriter
from p2p_trainer.modes import GradientMode, LocalMode, Mode
from p2p_trainer.planning.compiled import compiled
from p2p_trainer.planning.compute import in_dtype
from p2p_trainer.planning.own_plan import OwnPlan
from p2p_trainer.planning.plan_facts import Plan
from p2p_trainer.planning.planner import refuse_choices
from p2p_trainer.planning.probe import Prober, start_prober
from p2p_trainer.run_directory import RunDirectory
from p2p_trainer.run_files import SIGNED_MANIFEST_NAME
from p2p_trainer.run_model import check_model, checked_manifest, layout_of, refuse_another_layout, refuse_random_frozen
from p2p_trainer.running_statistics import averaged, restore_counters, trainable
from p2p_trainer.serving import Door
from p2p_trainer.settings import PeerSettings, default_data_directory
from p2p_trainer.strategies import PARTIAL, MemoryStrategy, build_strategy
from p2p_trainer.strategies.rotation import Rotation, next_trained
from p2p_trainer.target import Target
from p2p_trainer.tasks import Task
from p2p_trainer.training import Accounts, LeaveFlag, LeaveRequested, Trainer, data_seed
from p2p_trainer.view import NOT_DIALLED, LiveView, PeerView, address_line, farewell, farewell_of_a_door, only_inside
from peers.arena import SharedArena
from peers.contributed import last_contributed
from peers.daemon import check_port_free
from peers.fragments import FragmentLayout, gather_fragment
from peers.known_line import known_line
from peers.ledger import Counts, Ledger
from peers.outer import NO_HISTORY, base_digest, build_outer_optimizer
from peers.pipe import (
    BeginTraining,
    Configure,
    Connected,
    Event,
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
NOT_STOPPED = "the averaging process did not end in time"
CHECKPOINT_FORMAT = 3
EARLIER_FORMAT = 2
"""Of checkpoints in which all fragments have the same counts, and local values go by parameter."""

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
    """Without its tensors once they were taken over."""
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
            if self.role == "training":
                refuse_choices(self.target.manifest, self.settings)
        if self.target.invite is not None and not (path / SIGNED_MANIFEST_NAME).exists():  # else it is in already
            self.target.invite.refuse_if_expired(time.time())
        raise_open_file_limit()
        self.directory = RunDirectory(path)
        try:
            with MetricsWriter(self.directory.metrics_path, listener=self._heard) as self.metrics:
                self.swarm = self._start_swarm()
                self.prober: Prober | None = start_prober() if self.role == "training" else None
                try:
                    return self._live()
                except LeaveRequested as request:
                    self._stop()
                    self.metrics.write("leave", reason=str(request))
                    return str(request)
                except SwarmProcessDied as error:
                    self.farewell = f"Left: the last checkpoint is in {path}. The same command continues."
                    self.metrics.write("fault", reason=error.problem, exit_code=int(error.exit_code))
                    raise
                except (DeviceError, DeviceLostError) as error:
                    # The averaging process is well, and the others should not have to find out that we are gone.
                    self._say_goodbye(error)
                    raise
                finally:
                    self._end_prober()
                    self.swarm.close()
        finally:
            self.directory.close()

    def _heard(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "state":
            self.directory.keep_state(event["state"], event["reason"])
        self.listener.event(event)

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
        self.metrics.write("start", restart=self.restart)
        stored = directory.signed_manifest()
        self.stored = stored if stored is not None and stored.run_id() == target.run_id else None
        self.organiser: OrganiserKey | None = None
        if target.manifest is not None and (self.role == "serving" or not addresses):
            self.organiser = directory.organiser_key()
            if stored is None and (directory.path / SIGNED_MANIFEST_NAME).exists():
                raise CheckpointError(
                    f"{directory.path / SIGNED_MANIFEST_NAME} is damaged: it says which model the run began with.",
                    f"Every peer of the run has it: put a copy there, or remove {directory.path} to start anew.",
                )
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
                wished_cadence=self.settings.cadence,
                wished_codec=self.settings.codec,
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
            if self.role == "serving" and reach(addresses[0]) == INSIDE:
                self.view.status(only_inside(addresses[0].transport.port))
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
                else:
                    self._note_state(message)

    def _note_state(self, message: Any) -> None:
        """Where no trainer and no door does it: before there is one, and after."""
        if isinstance(message, Event) and message.name == "state":
            self.metrics.write(message.name, **message.fields)

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
        if signed is not None:
            refuse_another_layout(signed, layout)
        refuse_random_frozen(task, model)
        arena = SharedArena.create(layout.num_elements, build_outer_optimizer(manifest.outer_optimizer).states)
        checkpoint = self._load_checkpoint(layout) if signed is not None else None
        fragments: list[FragmentMeta] | None = None
        if checkpoint is not None:
            # Taken out: what is in the arena need not stay in memory twice.
            arena.base.copy_(checkpoint.tensors.pop("base"))
            arena.outer_state.copy_(checkpoint.tensors.pop("outer_state"))
            fragments = [FragmentMeta.from_json(row) for row in checkpoint.meta["fragments"]]
        elif signed is None:
            fragments = make_initial_bases(averaged(model), layout, arena)
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
        signed = sign_manifest(
            self.organiser, manifest, task.version, [meta.digest for meta in fragments], layout.digest
        )
        save_checkpoint(
            self.directory.path,
            {"base": arena.base.clone(), "outer_state": arena.outer_state.clone()},
            {
                **self._checkpoint_meta(layout),
                "clean": True,
                "restart": self.restart,
                "samples": 0,
                "steps": 0,
                "counts": [Counts() for _ in fragments],
                "fragments": [meta.to_json() for meta in fragments],
            },
        )
        return signed

    def _load_checkpoint(self, layout: FragmentLayout) -> Checkpoint | None:
        found = load_checkpoint(self.directory.path, self.view.status)
        if found is None:
            return None
        expected = self._checkpoint_meta(layout) | {"format": found.meta.get("format")}
        known = found.meta.get("format") in (CHECKPOINT_FORMAT, EARLIER_FORMAT)
        if not known or any(found.meta.get(key) != value for key, value in expected.items()):
            self.view.status("The checkpoint in this directory belongs to another run: starting without it.")
            return None
        return found

    def _checkpoint_meta(self, layout: FragmentLayout) -> dict[str, Any]:
        """What a checkpoint must agree in to be ours."""
        return {"format": CHECKPOINT_FORMAT, "run_id": self.target.run_id, "bounds": list(layout.bounds)}

    # --------------------------------------------------------------- serving

    def _serve(self, prepared: Prepared) -> str:
        """Keep the door: answer, follow the bases, save them now and then."""
        samples = steps = 0
        self._configure(prepared, samples, steps, [Counts()] * prepared.layout.num_fragments, clean=True)
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
        try:
            door.serve(synced.fragments)
        except SwarmProcessDied:
            if (left := self._last_word()) is not None:
                door.save(door.tensors(), left.fragments)
            raise
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
        own_plan = OwnPlan(
            manifest=manifest,
            task=task,
            model=prepared.model,
            layout=layout,
            device=device,
            settings=self.settings,
            seed=data_seed(self.target.run_id, "measuring", self.restart),
            view=self.view,
            metrics=self.metrics,
            leave=self.leave,
            line=known_line(self.directory.path, time.time()),
        )
        plan = own_plan.make(self._prober(), machine)
        self._end_prober()
        samples_per_second = own_plan.samples_per_second(plan)
        task = in_dtype(task, device, plan.compute_dtype)
        meta = prepared.checkpoint.meta if prepared.checkpoint is not None else {}
        samples, steps = int(meta.get("samples", 0)), int(meta.get("steps", 0))
        counts = restored_counts(meta, layout.num_fragments)
        strategy = self._build_strategy(plan, prepared, device, connected.peer_id, meta)
        if plan.compiled:
            self.view.status("Compiling the training step ...")
            seed = data_seed(self.target.run_id, "measuring", self.restart)
            task = compiled(
                task, strategy.model, plan.micro_batch, seed=seed, check=self.leave.check, say=self.view.status
            )
        restored = self._restored(prepared.checkpoint, strategy, layout)
        # A checkpoint from before the last start says nothing of what was contributed since.
        clean = not meta or (bool(meta.get("clean")) and meta.get("restart") == self.restart - 1)
        self._configure(prepared, samples, steps, counts, clean=clean)
        synced = self._wait_for(Synced)
        accounts = Accounts(
            layout=layout,
            samples=synced.samples,
            steps=synced.steps,
            counts=synced.counts,
            fragments=synced.fragments,
        )
        load_values(strategy, arena, accounts, restored, synced.keep)
        self._say_what_was_lost(accounts, prepared.fragments)
        self._log_join(accounts.samples)
        self.metrics.write(
            "throughput",
            samples_per_second=samples_per_second,
            micro_batch=plan.micro_batch,
            device=str(device),
            phase="solo",
        )
        self.swarm.send(
            BeginTraining(
                samples_per_second=samples_per_second,
                micro_batch=plan.micro_batch,
                device=machine.device.name,
            )
        )
        self.view.status("In the swarm: training begins. Ctrl-C leaves; the run goes on, and your progress is kept.")
        peer_view = PeerView(run_id=self.target.run_id, state="syncing")
        micro_batch, seed = plan.micro_batch, data_seed(self.target.run_id, connected.peer_id, self.restart)
        mode: Mode
        if manifest.averaging.mode == "gradient":
            model = strategy.model
            mode = GradientMode(task, model, trainable(model), manifest, layout, arena, micro_batch, seed)
        else:
            mode = LocalMode(
                task,
                strategy,
                manifest,
                layout,
                arena,
                micro_batch,
                seed,
                batch_size=plan.batch_size,
                lr_factor=plan.lr_factor,
            )
        partial = strategy.name in PARTIAL
        trainer = Trainer(
            task=task,
            strategy=strategy,
            mode=mode,
            rotation=Rotation(layout.num_fragments, strategy.trained, connected.peer_id) if partial else None,
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
            watch=own_plan.watch(plan, mode),
            steps_while_saving=plan.steps_while_saving,
        )
        try:
            reason = trainer.train()
        except SwarmProcessDied:
            # Nothing is lost if the averaging process could still say where the bases stand.
            if (left := self._last_word(trainer)) is not None:
                self._save_last(trainer, left)
            self.metrics.write("account", **accounts.fields())
            raise
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
        before = replace(accounts, fragments=saved) if saved is not None else None
        lost = accounts.dropped_samples - (before.dropped_samples if before is not None else 0.0)
        if lost >= 1:
            self.view.status(f"{lost:.0f} samples from before are in no base of the swarm: it went on without them.")

    def _build_strategy(
        self, plan: Plan, prepared: Prepared, device: torch.device, peer_id: str, meta: Mapping[str, Any]
    ) -> MemoryStrategy:
        """The memory strategy of the plan. :raises UsageError: it is not for this model, device or run"""
        layout, manifest, name = prepared.layout, prepared.manifest, plan.strategy
        trained = frozenset(range(layout.num_fragments))
        if name in PARTIAL:
            count = plan.fragments
            # Goes on with what it trained before, whose optimizer state is in the checkpoint.
            trained = frozenset(meta.get("trained", ()))
            if len(trained) != count:
                nothing = [0] * layout.num_fragments
                trained = next_trained(frozenset(), nothing, nothing, peer_id, count)
            self.view.status(f"Training {count} of {layout.num_fragments} fragments at a time, by turns.")
        return build_strategy(
            name, prepared.model, layout, manifest.inner_optimizer, device, trained, manifest.averaging.mode
        )

    def _restored(
        self, checkpoint: Checkpoint | None, strategy: MemoryStrategy, layout: FragmentLayout
    ) -> dict[int, torch.Tensor]:
        """Restore the optimizer and the model's counters; local values by fragment. Nothing else of the checkpoint's
        tensors stays in memory."""
        if checkpoint is None:
            return {}
        self._restore_optimizer(checkpoint, strategy)
        restore_counters(strategy.model, with_prefix(checkpoint.tensors, "counter."))
        values = local_values(checkpoint, layout)
        checkpoint.tensors.clear()
        return values

    def _restore_optimizer(self, checkpoint: Checkpoint, strategy: MemoryStrategy) -> None:
        """Take the state over if it is of the same fragments and fits; else it starts afresh, and a person hears of it.

        Another strategy may cut the parameters otherwise. Progress and counts do not depend on it.
        """
        if "optimizer" not in checkpoint.meta:
            return
        everything = range(len(checkpoint.meta["fragments"]))
        state = with_prefix(checkpoint.tensors, "optimizer.")
        fits = strategy.trained == frozenset(checkpoint.meta.get("trained", everything))
        if fits:
            try:
                optimizer_from_tensors(strategy.optimizer, state, checkpoint.meta["optimizer"])
            except CheckpointError:
                fits = False
        if not fits:
            self.view.status("The optimizer starts afresh: the checkpoint's state is not of what is trained now.")

    def _prober(self) -> Prober:
        if self.prober is None:
            raise RuntimeError("only a peer that trains measures its machine, and once")
        return self.prober

    def _end_prober(self) -> None:
        if self.prober is not None:
            self.prober.close()
            self.prober = None

    def _configure(
        self, prepared: Prepared, samples: int, steps: int, counts: Sequence[Counts], *, clean: bool
    ) -> None:
        fragments = prepared.layout.num_fragments
        self.swarm.configure(
            Configure(
                layout=prepared.layout,
                states=prepared.arena.states,
                signed_manifest=prepared.signed,
                fragments=prepared.fragments,
                samples=samples,
                steps=steps,
                clean=clean,
                counts=tuple(counts),
                contributed=(
                    last_contributed(self.directory.path, fragments)
                    if self.role == "training"
                    else (Counts(),) * fragments
                ),
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
                else:
                    self._note_state(message)
        return None

    def _last_word(self, trainer: Trainer | None = None) -> Stopped | None:
        """What a failing averaging process says of the bases; None if it could not say it."""
        if self.swarm.stopped is None:
            with suppress(P2PTrainerError):  # what stopped training is what a person should hear of
                return self._stop(trainer)
        return self.swarm.stopped

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


def make_initial_bases(
    values: Mapping[str, torch.Tensor], layout: FragmentLayout, arena: SharedArena
) -> list[FragmentMeta]:
    """Bases of version 0 from a freshly initialised model, outer state zero.

    :param values: parameters and running statistics, by name
    :raises ManifestError: one of them is not finite
    """
    for name, value in values.items():
        if not torch.isfinite(value.detach()).all():
            raise ManifestError(
                f"[model]: {name} begins with values that are not finite.",
                "A constant of a model should be a buffer registered with persistent=False.",
            )
    fragments = []
    for fragment in range(layout.num_fragments):
        where = layout.slice(fragment)
        gather_fragment(values, layout, fragment, arena.base[where])
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


def with_prefix(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Those of a checkpoint whose names begin so, by the rest of the name."""
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def restored_counts(meta: Mapping[str, Any], num_fragments: int) -> list[Counts]:
    """Each fragment's cumulative counts in a checkpoint; zeros if there is none."""
    everywhere = [meta.get("samples", 0), meta.get("steps", 0)]
    return [Counts(*row) for row in meta.get("counts", [everywhere] * num_fragments)]


def local_values(checkpoint: Checkpoint, layout: FragmentLayout) -> dict[int, torch.Tensor]:
    """Local values by fragment, of those that had any of their own; empty if the checkpoint holds bases only."""
    if checkpoint.meta["format"] == EARLIER_FORMAT:
        parameters = {name: checkpoint.tensors.get(f"parameter.{name}") for name in layout.names}
        there = {name: value for name, value in parameters.items() if value is not None}
        found = {}
        for fragment in range(layout.num_fragments) if len(there) == len(parameters) else ():
            found[fragment] = torch.empty(layout.size(fragment))
            gather_fragment(there, layout, fragment, found[fragment])
        return found
    names = {fragment: f"local.{fragment}" for fragment in range(layout.num_fragments)}
    return {fragment: checkpoint.tensors[name] for fragment, name in names.items() if name in checkpoint.tensors}


def load_values(
    strategy: MemoryStrategy,
    arena: SharedArena,
    accounts: Accounts,
    restored: dict[int, torch.Tensor],
    keep: Sequence[bool],
) -> None:
    """Put every fragment on its base, with its progress since the reference where that stands.

    :param restored: local values of a checkpoint; empty afterwards
    :param keep: of each fragment, whether its progress stands
    """
    layout = accounts.layout
    for fragment in range(layout.num_fragments):
        where = layout.slice(fragment)
        values = restored.pop(fragment, None)
        if values is not None and keep[fragment]:
            stepped = slice(layout.parameters_of(fragment))
            values[stepped].sub_(arena.snapshot[where][stepped]).add_(arena.base[where][stepped])
            strategy.load(fragment, values, pending=accounts.is_pending(fragment))
        else:
            strategy.load(fragment, arena.base[where])
