"""Where the nodes of a run meet: torch's rendezvous, in a store that the first node holds."""

import os
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from launcher.errors import LauncherError
from launcher.outcome import LISTENER

JOIN_SECONDS = 900
"""How long a node waits for the others."""
STORE_SECONDS = 60
"""How long it waits for an answer of the store."""
THIS_MACHINE = "localhost"


@dataclass(frozen=True)
class Meeting:
    """Where the nodes of a run meet."""

    node: int = 0
    """Which of them this one is; 0: the first."""
    host: str = THIS_MACHINE
    """The first one's."""
    port: int = 0
    """0: a free one, where there is no other node."""

    @classmethod
    def parse(cls, node: int, endpoint: str | None) -> "Meeting":
        """Of ``HOST:PORT``; None: no other node comes. Raises LauncherError."""
        if endpoint is None:
            if node != 0:
                raise LauncherError(f"--node {node}: where it meets the others is missing: --rendezvous HOST:PORT")
            return cls()
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            raise LauncherError(f"--rendezvous {endpoint}: must be HOST:PORT, where the first node listens")
        return cls(node, host, int(port))

    @property
    def local_addr(self) -> str | None:
        """The name that ranks of other nodes find this one by; None: the machine's."""
        return THIS_MACHINE if self.host == THIS_MACHINE else None

    def handler(self, least: int, most: int, last_call: float) -> "Handler":
        """torch's rendezvous of `least` to `most` nodes.

        Args:
            last_call: seconds that further nodes are waited for once there are enough.

        Raises:
            LauncherError: the first node can't be reached, or its port is taken.
        """
        is_first = self.node == 0
        listener = os.environ.pop(LISTENER, None)
        try:
            store = TCPStore(
                self.host,
                self.port,
                is_master=is_first,
                wait_for_workers=False,
                timeout=timedelta(seconds=STORE_SECONDS if is_first else JOIN_SECONDS),
                master_listen_fd=int(listener) if is_first and listener else None,
            )
        except RuntimeError as error:  # torch's DistError is one
            what = "can't be listened on" if is_first else f"the first node can't be reached within {JOIN_SECONDS} s"
            raise LauncherError(f"{self.host}:{self.port}: {what}: {str(error).splitlines()[0]}") from error
        store.set_timeout(timedelta(seconds=STORE_SECONDS))
        run_id = f"{self.host}:{store.port}"
        timeout = RendezvousTimeout(timedelta(seconds=JOIN_SECONDS), timedelta(seconds=last_call))
        backend = C10dRendezvousBackend(store, run_id)
        return Handler.from_backend(run_id, store, backend, least, most, self.local_addr, timeout)  # type: ignore[no-any-return]


class Handler(DynamicRendezvousHandler):
    """torch's rendezvous, undisturbed by a node that comes late: it takes part when ranks start the next time, and no
    update is lost for it."""

    def next_rendezvous(self) -> RendezvousInfo:
        while True:
            try:
                return super().next_rendezvous()
            except RendezvousTimeoutError:
                if not self._state_holder.state.complete:
                    raise
                # the others have enough nodes, and this one waits until they meet again, however long that takes

    def num_nodes_waiting(self) -> int:
        return 0

    def leave(self) -> None:
        """Goes, and lets the others meet again without this node; `shutdown` keeps everybody from it."""
        self._stop_heartbeats()
