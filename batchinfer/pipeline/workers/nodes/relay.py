"""A process of a node: it is started, and its messages are passed on, until it or the run has ended."""

from __future__ import annotations

import threading
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from batchinfer.core.errors import BatchInferError, SecurityRefusal, Unavailable
from batchinfer.machine.spawning import Child, Ended, receiving
from batchinfer.pipeline.workers.endings import failure
from batchinfer.pipeline.workers.engine_entry import RANK, WORKER
from batchinfer.pipeline.workers.heartbeat import STARTING_S, Heartbeat
from batchinfer.pipeline.workers.messages import Configure, Pulse
from batchinfer.pipeline.workers.nodes.model_files import differences, digests
from batchinfer.pipeline.workers.nodes.offer import NodeOffer
from batchinfer.pipeline.workers.nodes.orders import ProcessEnded, StartProcess
from batchinfer.pipeline.workers.nodes.wire import Wire

_REAP_S = 5.0


class Relay:
    """Passes messages between a process of this machine and the run, each of which ends with the other.

    The thread that starts the process lives as long as it does, as the system ends a process with the thread that made
    it: so none outlives this process, however it ends.
    """

    def __init__(
        self, order: StartProcess, wire: Wire, offer: NodeOffer, known: MutableMapping[str, str]
    ) -> None:
        """known: digests of files, see `file_sha256`."""
        self._order, self._wire, self._offer, self._known = order, wire, offer, known
        self._child: Child | None = None
        self._dying, self._unwanted = threading.Lock(), False
        self._thread = threading.Thread(target=self._live, daemon=True, name="process")
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether the process has ended, and all that it said was passed on."""
        return not self._thread.is_alive()

    def end(self) -> None:
        """End the process, and wait until it has."""
        self._wire.hang_up()
        self._kill()
        self._thread.join(_REAP_S)

    def _live(self) -> None:
        down = threading.Thread(target=self._pass_down, daemon=True, name="from the run")
        ended = Ended(None)
        try:
            with Heartbeat(self._beat):
                child = self._started()
        except (BatchInferError, OSError, EOFError) as error:
            with suppress(OSError):
                self._wire.send(failure(error))
            down.start()
        else:
            down.start()
            self._pass_up(child)
            ended = self._reaped(child)
        with suppress(OSError):
            self._wire.send(ProcessEnded(ended.code, ended.cpu_s))
        self._wire.stop_sending()
        down.join()  # what the run still says is read: else the system might drop what was sent last
        self._wire.close()
        if self._child is not None:
            self._child.close()

    def _started(self) -> Child:
        """Start the process. Raises Unavailable where its files are not those of the run, and OSError."""
        order = self._order
        if order.spec.factory != self._offer.factory:
            raise SecurityRefusal(f"{self._offer.name} starts no {order.spec.factory[:80]}")
        spec = self._offer.placed(order.spec)
        self._check_files()
        with self._dying:
            if self._unwanted:
                raise EOFError("the run wants it no longer")
            if order.seat is None:
                self._child = Child(WORKER, spec)
            else:
                self._child = Child(RANK, spec, replace(order.seat, address=self._wire.own_address))
            return self._child

    def _check_files(self) -> None:
        for folder, expected in self._order.files.items():
            try:
                found = digests(Path(folder), self._known)
            except OSError as error:
                raise Unavailable(f"{self._offer.name}: {folder} cannot be read: {error}") from error
            if why := differences(expected, found):
                raise Unavailable(f"{self._offer.name}: {folder} is not what the run reads: {why}")

    def _pass_up(self, child: Child) -> None:
        """Pass on what the process says, until it has ended or nobody hears it. Until it has imported what it needs
        this one says that it is there."""
        with suppress(EOFError, OSError), Heartbeat(self._beat, STARTING_S) as starting:
            while True:
                with receiving():
                    message = child.connection.recv()
                starting.stop()
                self._wire.send(message)

    def _beat(self) -> None:
        self._wire.send(Pulse())

    def _pass_down(self) -> None:
        """Pass on what the run says, until it is gone: then the process ends."""
        with suppress(EOFError):
            while True:
                with receiving():
                    message = self._wire.recv()
                if isinstance(message, Configure):
                    message = Configure(self._offer.configured(message.config, self._order.spec))
                if self._child is not None:
                    with suppress(BrokenPipeError, ConnectionResetError):
                        self._child.connection.send(message)
        self._kill()

    def _reaped(self, child: Child) -> Ended:
        with self._dying:
            found = child.wait(_REAP_S)
            child.kill()
        return found or child.wait(0) or Ended(None)

    def _kill(self) -> None:
        with self._dying:
            self._unwanted = True
            if self._child is not None:
                self._child.kill()
