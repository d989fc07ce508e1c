"""NIXL as the transport: the one adapter of `nixl`, and the one place that sets UCX's and NIXL's environment.

Owns: the agent, and the mapping of the library's strings and exceptions onto ours. Driver thread only.
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
    """One NIXL agent without its progress thread (which spins: half to a whole core per idle process).

    Args:
        name: the agent's name, unique per process: the engine id.
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
            self._bindings: Any = importlib.import_module("nixl._bindings")
            config = self._api.nixl_agent_config(enable_prog_thread=False, backends=[plugin])
            self._agent: Any = self._api.nixl_agent(name, config)
        except (ImportError, RuntimeError) as error:  # nixlBackendError is a RuntimeError
            raise StartupError(f"NIXL does not start: {error}") from error
        if plugin not in self._agent.backends:
            available = ", ".join(self._agent.get_plugin_list())
            raise StartupError(f"NIXL has no backend {plugin!r}; there are: {available}")
        self._name = name
        self._registered: list[object] = []

    @property
    def name(self) -> str:
        """The agent's name."""
        return self._name

    def register(self, region: MemoryRegion) -> None:
        """Register with every plugin that supports this memory."""
        descriptor = (region.address, region.num_bytes, region.device_index, "")
        try:
            self._registered.append(self._agent.register_memory([descriptor], _memory_type(region.device)))
        except RuntimeError as error:
            raise StartupError(f"NIXL cannot register {region.num_bytes} bytes on {region.device}: {error}") from error

    def metadata(self) -> bytes:
        """Connection data and remote keys of all that is registered so far."""
        data: bytes = self._agent.get_agent_metadata()
        return data

    def add_peer(self, metadata: bytes) -> str:
        """Load the metadata and begin to connect."""
        try:
            name = self._agent.add_remote_agent(metadata)
            peer: str = name.decode() if isinstance(name, bytes) else name
            self._agent.make_connection(peer)
        except RuntimeError as error:
            self._raise(error, "connecting")
        return peer

    def remove_peer(self, peer: str) -> None:
        """Drop its metadata and connection."""
        try:
            self._agent.remove_remote_agent(peer)
        except RuntimeError:
            return  # it is gone already, which is what was asked

    def prepare(self, peer: str | None, grid: BlockGrid) -> PreparedGrid:
        """One descriptor per block, `[num_blocks, 3] uint64` of (address, length, device)."""
        descriptors = np.empty((grid.num_blocks, 3), dtype=np.uint64)
        offsets = np.arange(grid.num_blocks, dtype=np.uint64) * np.uint64(grid.block_bytes)
        descriptors[:, 0] = np.uint64(grid.address) + offsets
        descriptors[:, 1] = grid.block_bytes
        descriptors[:, 2] = grid.device_index
        try:
            handle = self._agent.prep_xfer_dlist(peer or "NIXL_INIT_AGENT", descriptors, _memory_type(grid.device))
        except RuntimeError as error:
            self._raise(error, "preparing descriptors")
        return _NixlGrid(handle)

    def read_blocks(
        self, local: PreparedGrid, local_ids: NDArray[np.int32], remote: PreparedGrid, remote_ids: NDArray[np.int32]
    ) -> Read:
        """One READ; NIXL merges descriptors that continue each other on both sides."""
        if not isinstance(local, _NixlGrid) or not isinstance(remote, _NixlGrid):
            raise TypeError("grids of another backend")
        try:
            handle = self._agent.make_prepped_xfer("READ", local.handle, local_ids, remote.handle, remote_ids)
        except RuntimeError as error:
            self._raise(error, "preparing a read")
        return self._post(handle)

    def read_ranges(self, peer: str, local: RangeList, remote: RangeList) -> Read:
        """One READ of ranges that were not prepared."""
        try:
            handle = self._agent.initialize_xfer("READ", self._descriptors(local), self._descriptors(remote), peer)
        except RuntimeError as error:
            self._raise(error, "preparing a read")
        return self._post(handle)

    def notify(self, peer: str, payload: bytes) -> None:
        """Send on the peer's connection."""
        try:
            self._agent.send_notif(peer, payload)
        except RuntimeError as error:
            self._raise(error, "notifying")

    def messages(self) -> Sequence[Message]:
        """Every new notification."""
        try:
            notifications = self._agent.get_new_notifs()
        except RuntimeError as error:
            self._raise(error, "receiving")
        return [Message(sender, payload) for sender, payloads in notifications.items() for payload in payloads]

    def close(self) -> None:
        """Deregister. The agent itself goes with this object."""
        for descriptors in self._registered:
            try:
                self._agent.deregister_memory(descriptors)
            except RuntimeError:
                continue  # the process is ending; the next region still deserves its turn
        self._registered.clear()

    def _post(self, handle: Any) -> Read:
        read = _NixlRead(self, handle)
        try:
            read.take_state(self._agent.transfer(handle))
        except RuntimeError as error:
            read.release()
            self._raise(error, "reading")
        return read

    def _descriptors(self, ranges: RangeList) -> object:
        rows = np.empty((len(ranges), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = ranges.addresses, ranges.lengths, ranges.device_index
        descriptors: object = self._agent.get_xfer_descs(rows, _memory_type(ranges.device))
        return descriptors

    def _state(self, handle: Any) -> str:
        try:
            state: str = self._agent.check_xfer_state(handle)
        except RuntimeError as error:
            self._raise(error, "reading")
        return state

    def _raise(self, error: RuntimeError, doing: str) -> NoReturn:
        gone = (self._bindings.nixlRemoteDisconnectError, self._bindings.nixlNotFoundError)
        kind = PeerDisconnected if isinstance(error, gone) else TransferError
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

    def take_state(self, state: str) -> None:
        """Turn the library's word into ours."""
        if state == "ERR":
            raise TransferError("reading: the transfer failed")
        self._is_done = state == "DONE"

    def is_done(self) -> bool:
        """Ask the library, which drives progress."""
        if not self._is_done:
            self.take_state(self._backend._state(self._handle))  # the read is the backend's own part
        return self._is_done

    def release(self) -> None:
        """Free the request."""
        try:
            self._handle.release()
        except RuntimeError:
            return  # still in flight: the handle's own finaliser keeps it until the agent ends


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
