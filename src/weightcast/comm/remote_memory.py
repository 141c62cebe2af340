"""Memory of this process that others, on any host, read through NIXL without help of this process.

The owner registers one ``Arena`` and tells the address of each buffer.  ``comm/remote_reads.py`` reads there.
"""

from __future__ import annotations

import secrets

import torch

from weightcast.comm.nixl import let_go, make_agent, this_process, words_of
from weightcast.errors import ConfigError
from weightcast.runtime.streams import wait_for_streams
from weightcast.wire.bucket_sources import RemoteMemory

PAGE_BYTES = 4096
TOKEN_BYTES = 32


def round_up(size_bytes: int) -> int:
    """Returns a size in whole pages, in bytes."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class Arena:
    """Registered memory of this process that holds several buffers of one size.

    The memory begins with random bytes, so that a reader can tell it from other memory at the same address.
    """

    def __init__(self, count: int, size_bytes: int, device: torch.device) -> None:
        """Registers memory for ``count`` buffers; raises ConfigError if NIXL is missing or cannot do it."""
        self._size_bytes = size_bytes
        self._stride = round_up(size_bytes)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        # The memory comes before the agent, since UCX looks for GPUs that are in use when an agent starts.
        self._data = torch.empty(PAGE_BYTES + count * self._stride, dtype=torch.uint8, device=device)
        self._data[:TOKEN_BYTES].copy_(torch.frombuffer(bytearray(self._token), dtype=torch.uint8))
        self._name, self._agent = make_agent()
        try:
            self._registered = self._agent.register_memory(self._data)
            self._metadata = bytes(self._agent.get_agent_metadata())
        except Exception as error:  # NIXL raises classes of its own
            raise ConfigError(
                f"NIXL cannot register {self._data.numel()} bytes of {device} of this process: {words_of(error)}",
                hint='raise the limit of locked memory (ulimit -l), or use transport="direct"',
            ) from error

    def slot(self, index: int) -> torch.Tensor:
        """Returns one of the buffers, uint8."""
        return self._data[self._first(index) :][: self._size_bytes]

    def memory(self, index: int) -> RemoteMemory:
        """Returns the address of one of the buffers, once the current stream has written what it was given."""
        wait_for_streams(self._data.device)  # a reader knows nothing of streams
        return RemoteMemory(
            agent=self._name,
            metadata=self._metadata,
            address=self._data.data_ptr(),
            token=self._token,
            first_byte=self._first(index),
            size_bytes=self._size_bytes,
            owner=this_process(),
            gpu=self._data.get_device() if self._data.is_cuda else None,
        )

    def close(self) -> None:
        """Ends the registration and frees the memory; safe to call twice."""
        agent, self._agent = self._agent, None
        registered, self._registered = self._registered, None
        data, self._data = self._data, torch.empty(0, dtype=torch.uint8)
        if agent is not None:
            let_go(lambda: agent.deregister_memory(registered), data)

    def _first(self, index: int) -> int:
        return PAGE_BYTES + index * self._stride
