"""What we rely on inside hivemind 1.1.12, one test for each private thing, so that an upgrade fails loudly."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
import textwrap
import time
import typing
from collections.abc import AsyncIterator as AbcAsyncIterator
from importlib import metadata
from pathlib import Path
from typing import Any

import hivemind
import pytest
from hivemind.averaging import control, key_manager, matchmaking
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import Matchmaking, PotentialLeaders
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase, p2p_daemon
from hivemind.proto import averaging_pb2
from hivemind.utils.serializer import MSGPackSerializer

import peers.servicer
from peers.daemon import limit_write_time
from peers.grouping import FragmentMatchmaking, GroupSearch, NodeAsDHT
from peers.servicer import SwarmServicer


def source_of(thing: Any) -> str:
    return textwrap.dedent(inspect.getsource(thing))


def calls_in(thing: Any, name: str) -> list[ast.Call]:
    """Calls of ``name`` (as written, such as ``self.dht.get``) in the source of ``thing``."""
    return [
        node
        for node in ast.walk(ast.parse(source_of(thing)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name
    ]


def reads_in(thing: Any, attribute: str) -> int:
    """How often ``self.<attribute>`` is read in the source of ``thing``."""
    return sum(
        isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and ast.unparse(node) == f"self.{attribute}"
        for node in ast.walk(ast.parse(source_of(thing)))
    )


def test_it_is_the_version_that_was_read() -> None:
    assert hivemind.__version__ == metadata.version("hivemind") == "1.1.12"


# Matchmaking


def test_matchmaking_reads_min_group_size_where_a_leader_decides_and_nowhere_else() -> None:
    assert reads_in(Matchmaking.look_for_group, "min_group_size") == 0
    assert reads_in(Matchmaking._request_join_potential_leaders, "min_group_size") == 1
    assert reads_in(Matchmaking.rpc_join_group, "min_group_size") == 1
    assert reads_in(Matchmaking, "min_group_size") == 2
    for decider in (Matchmaking._request_join_potential_leaders, Matchmaking.rpc_join_group):
        assert "len(self.current_followers) + 1 >= self.min_group_size" in source_of(decider)


def test_matchmaking_assigns_min_group_size_in_its_constructor_only() -> None:
    assignments = re.findall(r"self\.min_group_size\b[^=\n]*=(?!=)", source_of(Matchmaking))
    assert len(assignments) == 1
    assert re.search(r"self\.min_group_size\b[^=\n]*=(?!=)", source_of(Matchmaking.__init__))
    assert isinstance(FragmentMatchmaking.min_group_size, property) and FragmentMatchmaking.min_group_size.fset


def test_matchmaking_takes_what_we_give_it() -> None:
    parameters = inspect.signature(Matchmaking.__init__).parameters
    given = {
        "p2p", "schema_hash", "dht", "servicer_type", "prefix", "target_group_size", "min_group_size",
        "min_matchmaking_time", "request_timeout", "client_mode",
    }  # fmt: skip
    assert given <= set(parameters)
    assert list(parameters)[:4] == ["self", "p2p", "schema_hash", "dht"]


def test_matchmaking_keeps_its_followers_by_peer_id() -> None:
    assert "self.current_followers: Dict[PeerID, averaging_pb2.JoinRequest] = {}" in source_of(Matchmaking.__init__)


def test_a_step_is_used_through_the_attributes_of_our_group_search_only() -> None:
    used = set(re.findall(r"\bstep(?:_control)?\.(\w+)", source_of(matchmaking)))
    ours = set(GroupSearch.__dataclass_fields__) | {"get_timeout"}
    assert used == {"data_for_gather", "scheduled_time", "deadline", "get_timeout"}
    assert used <= ours
    assert {"data_for_gather", "scheduled_time", "deadline"} <= set(vars(control.StepControl))


def test_a_leader_is_asked_also_on_anothers_word_through_the_method_that_we_bound() -> None:
    asking = source_of(Matchmaking._request_join_group)
    assert asking.count("await self._request_join_group(suggested_leader)") == 1
    assert asking.count("await self.follower_assemble_group(leader, message)") == 1
    assert source_of(Matchmaking).count("follower_assemble_group(") == 2
    assert list(inspect.signature(Matchmaking.follower_assemble_group).parameters) == ["self", "leader", "msg"]


def test_a_leaders_answer_carries_peer_ids_and_gathered_blobs_in_one_order() -> None:
    fields = hivemind.averaging.group_info.GroupInfo.__dataclass_fields__
    assert list(fields) == ["group_id", "peer_ids", "gathered"]


def test_all_peers_declare_the_scheduled_time_so_that_the_smallest_peer_id_leads() -> None:
    source = "".join(source_of(PotentialLeaders).split())
    assert "max(step.scheduled_time,get_dht_time()+self.min_matchmaking_time)" in source
    assert (
        "(entry.expiration_time,maybe_next_leader.to_bytes())>(self.declared_expiration_time,self.peer_id.to_bytes(),)"
        in source
    )


def test_join_requests_carry_what_we_check_and_the_code_we_refuse_with() -> None:
    fields = set(averaging_pb2.JoinRequest.DESCRIPTOR.fields_by_name)
    assert {"gather", "group_key", "schema_hash", "expiration"} <= fields
    assert averaging_pb2.PROTOCOL_VIOLATION != averaging_pb2.BAD_GROUP_KEY


# GroupKeyManager


@pytest.mark.parametrize("method", ["store", "get"])
def test_the_key_manager_awaits_the_dht_with_return_future(method: str) -> None:
    awaited = [
        node.value
        for node in ast.walk(ast.parse(source_of(GroupKeyManager)))
        if isinstance(node, ast.Await) and isinstance(node.value, ast.Call)
    ]
    calls = [call for call in awaited if ast.unparse(call.func) == f"self.dht.{method}"]
    assert len(calls) == len(calls_in(GroupKeyManager, f"self.dht.{method}")) == 1
    (call,) = calls
    flags = [keyword for keyword in call.keywords if keyword.arg == "return_future"]
    assert [ast.unparse(flag.value) for flag in flags] == ["True"]
    signature = inspect.signature(getattr(NodeAsDHT, method))
    signature.bind(None, *call.args, **{keyword.arg: keyword.value for keyword in call.keywords if keyword.arg})


def test_the_key_manager_uses_nothing_else_of_the_dht() -> None:
    assert set(re.findall(r"\bdht\.(\w+)", source_of(GroupKeyManager))) == {"store", "get", "peer_id"}


def test_the_matchmaking_key_is_prefix_dot_0b() -> None:
    manager = GroupKeyManager.__new__(GroupKeyManager)
    manager.prefix, manager.group_bits = "run-f3", ""
    assert manager.current_key == "run-f3.0b"
    assert key_manager.is_valid_group("run-f3.0b")


# P2P


def test_send_protobuf_is_a_staticmethod_that_is_called_through_the_class() -> None:
    assert isinstance(inspect.getattr_static(P2P, "send_protobuf"), staticmethod)
    calls = re.findall(r"(\S+)\.send_protobuf\(", source_of(p2p_daemon))
    assert len(calls) >= 4 and set(calls) == {"P2P"}


def test_a_write_of_a_message_is_bounded_by_replacing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(protobuf: object, writer: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(P2P, "send_protobuf", staticmethod(never))
    limit_write_time(0.01)
    bounded = P2P.send_protobuf
    limit_write_time(0.01)
    assert P2P.send_protobuf is bounded, "installing twice must not wrap twice"
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(P2P.send_protobuf(None, None))


def test_unix_sockets_are_put_where_the_prefix_says() -> None:
    assert source_of(P2P.create).count("cls._UNIX_SOCKET_PREFIX +") == 2
    assert "/tmp" not in source_of(P2P.create)


def test_the_daemon_is_started_by_asyncios_create_subprocess_exec() -> None:
    (call,) = calls_in(P2P.create, "asyncio.subprocess.create_subprocess_exec")
    assert "preexec_fn" not in {keyword.arg for keyword in call.keywords}
    assert calls_in(p2p_daemon, "asyncio.subprocess.create_subprocess_exec") != []
    assert not re.search(r"\bPopen\b|os\.fork|posix_spawn", source_of(p2p_daemon))


def test_p2p_keeps_the_daemons_process_and_its_control_client() -> None:
    assert "self._child = await asyncio.subprocess.create_subprocess_exec" in source_of(P2P.create)
    assert "self._client" in source_of(p2p_daemon)
    parameters = inspect.signature(P2P.create).parameters
    assert {
        "host_maddrs",
        "announce_maddrs",
        "identity_path",
        "check_if_identity_free",
        "startup_timeout",
    } <= set(parameters)


# Clocks, DHT, serializer, servicer


@pytest.mark.parametrize(
    "module",
    [
        "hivemind.utils.timed_storage",
        "hivemind.dht.node",
        "hivemind.dht.protocol",
        "hivemind.averaging.matchmaking",
    ],
)
def test_modules_that_the_clock_patches_bind_get_dht_time_by_name(module: str) -> None:
    loaded = sys.modules[module]
    assert callable(loaded.get_dht_time)
    uses = [
        node
        for node in ast.walk(ast.parse(Path(str(loaded.__file__)).read_text()))
        if isinstance(node, ast.Name) and node.id == "get_dht_time" and isinstance(node.ctx, ast.Load)
    ]
    assert uses, "a module that no longer reads its own binding is not patched any more"


def test_no_module_of_the_dht_or_of_matchmaking_reads_another_clock() -> None:
    for module in ("timed_storage", "node", "protocol", "traverse", "storage", "routing", "crypto", "validation"):
        package = "utils" if module == "timed_storage" else "dht"
        text = (Path(str(hivemind.__file__)).parent / package / f"{module}.py").read_text()
        assert text.count("time.time") == (1 if module == "timed_storage" else 0), module
    assert "time.time" not in source_of(matchmaking) + source_of(key_manager)


def test_installing_replaces_a_binding_that_expiration_checks_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from hivemind.utils import timed_storage

    storage = timed_storage.TimedStorage()
    monkeypatch.setattr(timed_storage, "get_dht_time", lambda: time.time() + 100)
    assert not storage.store("key", "value", time.time() + 50)


def test_a_dht_node_can_live_in_our_loop_on_our_p2p_without_caching() -> None:
    parameters = set(inspect.signature(DHTNode.create).parameters)
    assert {
        "p2p",
        "initial_peers",
        "record_validator",
        "wait_timeout",
        "cache_locally",
        "cache_on_store",
        "cache_nearest",
        "ensure_bootstrap_success",
        "strict",
        "client_mode",
    } <= parameters
    assert "self.wait_timeout" in source_of(DHTProtocol)
    assert asyncio.iscoroutinefunction(DHTProtocol.call_ping)
    assert "uid_to_peer_id" in source_of(sys.modules["hivemind.dht.routing"])


def test_a_dht_node_that_only_asks_lacks_what_we_add_when_others_can_dial_us() -> None:
    """``become_known_in_dht`` does what the constructor does for nodes that answer."""
    text = source_of(DHTProtocol.create.__func__)
    assert "await self.add_p2p_handlers(self.p2p, AuthRPCWrapper(self, AuthRole.SERVICER, self.authorizer))" in text
    assert "self.node_info = dht_pb2.NodeInfo(node_id=node_id.to_bytes())" in text
    assert reads_in(DHTProtocol.create.__func__, "client_mode") == 1


def test_matchmaking_asks_whether_we_only_follow_at_every_step() -> None:
    """``RoundKeeper`` may change it between two searches."""
    assert "client_mode" not in vars(Matchmaking)
    assert re.findall(r"self\.client_mode = (.*)", source_of(Matchmaking)) == ["client_mode"]


def test_every_message_of_the_dht_is_unpacked_by_the_serializer_that_we_cap() -> None:
    assert isinstance(inspect.getattr_static(MSGPackSerializer, "loads"), classmethod)
    assert {"_ext_type_codes", "_TUPLE_EXT_TYPE_CODE"} <= set(vars(MSGPackSerializer))


def rpc_types(servicer: type[ServicerBase]) -> dict[str, tuple[bool, bool]]:
    servicer._collect_rpc_handlers()
    return {handler.method_name: (handler.stream_input, handler.stream_output) for handler in servicer._rpc_handlers}


def servicer_with(hint: Any) -> type[ServicerBase]:
    class Servicer(ServicerBase):
        async def rpc_stream(self, request: Any, context: P2PContext) -> Any: ...

    Servicer.rpc_stream.__annotations__ = {"request": hint, "context": P2PContext, "return": hint}
    return Servicer


def test_a_servicer_recognises_typings_async_iterator_only() -> None:
    request = averaging_pb2.JoinRequest
    assert rpc_types(servicer_with(typing.AsyncIterator[request])) == {"rpc_stream": (True, True)}
    assert rpc_types(servicer_with(AbcAsyncIterator[request])) == {"rpc_stream": (False, False)}


def test_our_servicers_streams_are_streams() -> None:
    assert rpc_types(SwarmServicer) == {
        "rpc_time": (False, False),
        "rpc_look": (False, False),
        "rpc_news": (False, False),
        "rpc_dial_back": (False, False),
        "rpc_join_group": (False, True),
    }
    assert peers.servicer.AsyncIterator is typing.AsyncIterator


def test_a_stub_is_found_by_the_servicers_class_name_and_our_namespace() -> None:
    assert ServicerBase._get_handle_name.__func__(SwarmServicer, "space", "rpc_time") == (
        "space::SwarmServicer.rpc_time"
    )
    parameters = inspect.signature(ServicerBase.get_stub).parameters
    assert {"p2p", "peer", "namespace"} <= set(parameters)


def test_matchmaking_asks_for_its_leader_under_its_prefix_as_namespace() -> None:
    assert "namespace=self._prefix" in source_of(Matchmaking)

    class AnyP2P:
        """A stub only remembers it."""

    run_id = "tiny-0123456789abcdef"
    for namespace in (f"{run_id}-f7", f"{run_id}-f255", f"p2p-trainer-{run_id}"):
        stub = SwarmServicer.get_stub(AnyP2P(), PeerID(b"\x12\x20" + bytes(32)), namespace=namespace)
        assert stub._namespace == f"p2p-trainer-{run_id}"


def test_of_equal_deadlines_the_lower_peer_id_leads() -> None:
    """``FragmentMatchmaking`` says by it who need not look for a leader."""
    assert "(entry.expiration_time, maybe_next_leader.to_bytes()) > (" in source_of(PotentialLeaders.pop_next_leader)


def test_a_peer_declares_itself_when_it_begins_to_look_and_withdraws_when_it_ends() -> None:
    """``NodeAsDHT`` leaves both out where they are of no use."""
    declaring = source_of(PotentialLeaders._declare_averager_periodically)
    assert declaring.count("key_manager.declare_averager(") == 2 and "looking_for_group=False" in declaring
    assert "value=looking_for_group" in source_of(GroupKeyManager.declare_averager)
