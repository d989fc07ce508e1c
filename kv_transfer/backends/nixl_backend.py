"""NIXL as the transport: the one adapter of `nixl`, and the one place that sets UCX's and NIXL's environment.

Owns: the agents, and the mapping of the library's strings and exceptions onto ours. Driver thread only.
Does not know: leases, requests. Without a progress thread, `messages()` and `Read.is_done()` drive progress, on the
passive side too.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from common.errors import PeerDisconnected, StartupError, TransferError
from kv_transfer.backends.backend import BlockGrid, MemoryRegion, Message, PreparedGrid, Read
from kv_transfer.descriptors import RangeList

DEFAULT_ENVIRONMENT = {
    "UCX_TLS": "sm,self,tcp",  # shared memory reads need no CPU of the peer; tcp between machines
    "NIXL_LOG_LEVEL": "FATAL",  # each fault is logged once, by us, after it was mapped
    "UCX_LOG_LEVEL": "FATAL",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
"""Set before the library loads, unless the operator set them. `cuda` devices add UCX's CUDA transports."""


class NixlBackend:
    """Two NIXL agents without progress threads (which spin: half to a whole core per idle process).

    One agent reads and is read; the other only sends notifications, and a P never makes it. On one
    connection, a read posted after a notification waits until the peer polls (measured over shared memory, peer polling
    every 5 ms: 5 to 20 ms instead of 5 us).

    Args:
        name: the reading agent's name, unique per process: the engine id.
        plugin: NIXL backend by name, `UCX` or another that is installed.
        environment: variables to set before the library loads, over the defaults.
        with_cuda: whether VRAM will be registered.

    Raises:
        StartupError: the library or the plugin cannot be loaded.
    """

    def __init__(
        self,
        name: str,
        plugin: str = "UCX",
        environment: Mapping[str, str] | None = None,
        with_cuda: bool = False,
    ) -> None:
        _prepare_environment(environment or {}, with_cuda)
        try:
            # Late: it costs a second, and it reads the environment when it loads.
            self._api: Any = importlib.import_module("nixl._api")
            bindings: Any = importlib.import_module("nixl._bindings")
        except ImportError as error:
            raise StartupError(f"NIXL does not load: {error}") from error
        kinds = [kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)]
        self._errors: tuple[type[Exception], ...] = (*kinds, RuntimeError)
        self._gone = (bindings.nixlRemoteDisconnectError, bindings.nixlNotFoundError)
        self._name, self._plugin = name, plugin
        self._reader = self._agent(name)
        self._sender: Any = None
        self._registered: list[object] = []

    @property
    def name(self) -> str:
        """The reading agent's name."""
        return self._name

    def register(self, region: MemoryRegion) -> None:
        """Register with every plugin that supports this memory."""
        descriptor = (region.address, region.num_bytes, region.device_index, "")
        try:
            self._registered.append(self._reader.register_memory([descriptor], _memory_type(region.device)))
        except self._errors as error:
            raise StartupError(f"NIXL cannot register {region.num_bytes} bytes on {region.device}: {error}") from error

    def metadata(self) -> bytes:
        """Connection data and remote keys of all that is registered so far."""
        data: bytes = self._reader.get_agent_metadata()
        return data

    def add_peer(self, metadata: bytes) -> str:
        """Load the metadata and begin to connect, both agents."""
        peer = ""
        try:
            for agent in (self._reader, self._sending_agent()):
                name = agent.add_remote_agent(metadata)
                peer = name.decode() if isinstance(name, bytes) else name
                agent.make_connection(peer)
        except self._errors as error:
            self._raise(error, "connecting")
        return peer

    def remove_peer(self, peer: str) -> None:
        """Drop its metadata and connections."""
        for agent in (self._reader, self._sending_agent()):
            try:
                agent.remove_remote_agent(peer)
            except self._errors:
                continue  # it is gone already, which is what was asked

    def prepare(self, peer: str | None, grid: BlockGrid) -> PreparedGrid:
        """One descriptor per block, written as one strided row (address, length, device, stride, count).

        Who prepares a pool of its own is going to read and to notify: that agent is made now, not at the first peer.
        """
        self._sending_agent()
        row = (grid.address, grid.block_bytes, grid.device_index, grid.block_bytes, grid.num_blocks)
        descriptors = np.array([row], dtype=np.uint64)
        try:
            handle = self._reader.prep_xfer_dlist(peer or "NIXL_INIT_AGENT", descriptors, _memory_type(grid.device))
        except self._errors as error:
            self._raise(error, "preparing descriptors")
        return _NixlGrid(handle)

    def read_blocks(
        self, local: PreparedGrid, local_ids: NDArray[np.int32], remote: PreparedGrid, remote_ids: NDArray[np.int32]
    ) -> Read:
        """One READ; NIXL merges descriptors that continue each other on both sides."""
        if not isinstance(local, _NixlGrid) or not isinstance(remote, _NixlGrid):
            raise TypeError("grids of another backend")
        try:
            handle = self._reader.make_prepped_xfer("READ", local.handle, local_ids, remote.handle, remote_ids)
        except self._errors as error:
            self._raise(error, "preparing a read")
        return self._post(handle)

    def read_ranges(self, peer: str, local: RangeList, remote: RangeList) -> Read:
        """One READ of ranges that were not prepared."""
        try:
            handle = self._reader.initialize_xfer("READ", self._descriptors(local), self._descriptors(remote), peer)
        except self._errors as error:
            self._raise(error, "preparing a read")
        return self._post(handle)

    def notify(self, peer: str, payload: bytes) -> None:
        """Send on the notifications' own connection."""
        try:
            self._sending_agent().send_notif(peer, payload)
        except self._errors as error:
            self._raise(error, "notifying")

    def messages(self) -> Sequence[Message]:
        """Every new notification; also lets what was sent go out."""
        try:
            if self._sender is not None:
                self._sender.get_new_notifs()
            notifications = self._reader.get_new_notifs()
        except self._errors as error:
            self._raise(error, "receiving")
        return [Message(sender, payload) for sender, payloads in notifications.items() for payload in payloads]

    def close(self) -> None:
        """Deregister. The agents themselves go with this object."""
        for descriptors in self._registered:
            try:
                self._reader.deregister_memory(descriptors)
            except self._errors:
                continue  # the process is ending; the next region still deserves its turn
        self._registered.clear()

    def state_of(self, handle: Any) -> str:
        """The library's word for how a transfer stands."""
        try:
            state: str = self._reader.check_xfer_state(handle)
        except self._errors as error:
            self._raise(error, "reading")
        return state

    def post(self, handle: Any) -> str:
        """Start a transfer, or start one that has ended once more; how it stands."""
        try:
            state: str = self._reader.transfer(handle)
        except self._errors as error:
            self._raise(error, "reading")
        return state

    def release(self, handle: Any) -> None:
        """Free a transfer."""
        try:
            handle.release()
        except self._errors:
            return  # still in flight: the handle's own finaliser keeps it until the agent ends

    def _sending_agent(self) -> Any:
        if self._sender is None:
            self._sender = self._agent(f"{self._name}/notify")
            self._warm_up()
        return self._sender

    def _warm_up(self) -> None:
        """Connect the two agents with each other and part again: an agent's first connection costs 20 to 60 ms."""
        try:
            for one, other in ((self._reader, self._sender), (self._sender, self._reader)):
                one.add_remote_agent(other.get_agent_metadata())
                one.make_connection(other.name)
            self._reader.remove_remote_agent(self._sender.name)
            self._sender.remove_remote_agent(self._reader.name)
        except self._errors as error:
            raise StartupError(f"NIXL cannot connect inside this process: {error}") from error

    def _agent(self, name: str) -> Any:
        try:
            agent = self._api.nixl_agent(
                name, self._api.nixl_agent_config(enable_prog_thread=False, backends=[self._plugin])
            )
        except self._errors as error:
            raise StartupError(f"NIXL does not start: {error}") from error
        if self._plugin not in agent.backends:
            available = ", ".join(agent.get_plugin_list())
            raise StartupError(f"NIXL has no backend {self._plugin!r}; there are: {available}")
        return agent

    def _post(self, handle: Any) -> Read:
        read = _NixlRead(self, handle)
        try:
            read.post_again()
        except TransferError:
            read.release()
            raise
        return read

    def _descriptors(self, ranges: RangeList) -> object:
        rows = np.empty((len(ranges), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = ranges.addresses, ranges.lengths, ranges.device_index
        descriptors: object = self._reader.get_xfer_descs(rows, _memory_type(ranges.device))
        return descriptors

    def _raise(self, error: Exception, doing: str) -> NoReturn:
        kind = PeerDisconnected if isinstance(error, self._gone) else TransferError
        raise kind(f"{doing}: {error}") from error


class _NixlGrid:
    """A prepared descriptor list."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def release(self) -> None:
        """Free the list."""
        self.handle.release()


class _NixlRead:
    """A posted transfer."""

    def __init__(self, backend: NixlBackend, handle: Any) -> None:
        self._backend = backend
        self._handle = handle
        self._is_done = False

    def is_done(self) -> bool:
        """Ask the library, which drives progress."""
        if not self._is_done:
            self._take_state(self._backend.state_of(self._handle))
        return self._is_done

    def post_again(self) -> None:
        """Start, or start over: the library takes a transfer that has ended as a new one, and checks nothing anew."""
        self._is_done = False
        self._take_state(self._backend.post(self._handle))

    def release(self) -> None:
        """Free the request."""
        self._backend.release(self._handle)

    def _take_state(self, state: str) -> None:
        """Turn the library's word into ours."""
        if state == "ERR":
            raise TransferError("reading: the transfer failed")
        self._is_done = state == "DONE"


def _memory_type(device: str) -> str:
    return "VRAM" if device.startswith("cuda") else "DRAM"


def _prepare_environment(overrides: Mapping[str, str], with_cuda: bool) -> None:
    defaults = dict(DEFAULT_ENVIRONMENT)
    if with_cuda:
        defaults["UCX_TLS"] += ",cuda_copy,cuda_ipc"
    for key, value in {**defaults, **overrides}.items():
        if key in overrides:
            os.environ[key] = value  # noqa: TID251 - UCX has no other way to be configured, and this is its adapter
        else:
            os.environ.setdefault(key, value)  # noqa: TID251 - the same
