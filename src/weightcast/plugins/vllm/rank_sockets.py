"""The executor in vLLM's API server, which reaches all ranks of the engine: by Unix sockets, or TCP to other hosts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable

from weightcast.errors import EngineFailure
from weightcast.plugins.other_hosts import Elsewhere, RankInvitation, Reception
from weightcast.plugins.rank_sockets import SwitchExecutor
from weightcast.wire.messages import Commit, Message


class VllmExecutor(SwitchExecutor):
    """Sends messages to all ranks; when all are ready to switch weights, calls their main threads."""

    def __init__(
        self,
        world_size: int,
        *,
        listen: Callable[[RankInvitation], None],
        on_main: Callable[[float, str], object],
        elsewhere: Elsewhere | None = None,
        on_far_rank_lost: Callable[[str], None] = lambda words: None,
    ) -> None:
        """Connects to every rank.

        Args:
            listen: Function that gives every rank the invitation; ranks of this host then listen, the others come.
            on_main: Function that lets every rank's main thread do its task, within a limit in seconds; it also gets
                the version that is committed, or an empty text if old weights come back.
            elsewhere: Address and secret for ranks on other hosts; None if there can be none.
            on_far_rank_lost: Called with words when the connection to a rank on another host has ended.

        Raises:
            EngineFailure: A rank neither listens nor comes.
            ConfigError: This host does not have the address for ranks on other hosts.
        """
        self._on_main = on_main
        self._on_far_rank_lost = on_far_rank_lost
        folder = tempfile.mkdtemp(prefix="weightcast-")
        try:
            with Reception(folder, elsewhere) as reception:
                try:
                    listen(reception.invitation)
                except EngineFailure as error:
                    raise EngineFailure(f"{error}{reception.turned_away()}", ranks=error.ranks) from error
                super().__init__(world_size, folder, reception)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # open connections do not need it

    def far_rank_lost(self, words: str) -> None:
        """Implements ``SwitchExecutor.far_rank_lost``."""
        self._on_far_rank_lost(words)

    def after_decision(self, message: Message, timeout_s: float) -> None:
        """Implements ``SwitchExecutor.after_decision``: the engine core takes the call between two steps."""
        version = str(self.opened.version) if isinstance(message, Commit) and self.opened is not None else ""
        self._on_main(timeout_s, version)
