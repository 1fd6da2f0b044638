"""One engine of a pool: its worker, and its unfinished requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from batchinfer.core.errors import OutOfMemory
from batchinfer.core.request import Completion, Request, RowError
from batchinfer.engine.config import EngineConfig, EngineInfo
from batchinfer.machine.waiting import WaitTimer
from batchinfer.pipeline.workers.heartbeat import STARTING_S
from batchinfer.pipeline.workers.messages import WorkDone, WorkerSpec
from batchinfer.pipeline.workers.suspects import RowGroup
from batchinfer.pipeline.workers.transport import Transport
from batchinfer.pipeline.workers.worker_handle import WorkerHandle
from batchinfer.plan.order.backlog import tokens_of
from batchinfer.report.tables.ranks import EngineRank

# An engine is not restarted after this many deaths in a row with little work between them. By then several single rows
# have died, so no row is the cause.
FRUITLESS = 4
FRUITLESS_LOADING = 2  # the same for an engine that dies while it loads, where no row can be the cause
# After this many such deaths, the engine first runs a row that was answered before. If there is none, suspects run one
# by one.
DOUBTED = 2
CODE = "engine_died"
# The watchdog of an engine with work: SILENT_STEPS times its longest step, forecast or measured, and at least SILENT_S
# seconds. A worker sends a message after each step.
SILENT_STEPS, SILENT_S = 10, 60.0
# The watchdog of an engine that loads, which sends a heartbeat every second after its imports
LOADING_SILENT_S = 60.0
# Limit on comparing kernels while loading: a library's kernel may hang on a GPU, but compilation takes long, too
CHOOSING_S = 1800.0


@dataclass(frozen=True, slots=True)
class Death:
    """The state of an engine when its process died.

    Attributes:
        in_work: Requests that may have been running.
        waiting: Requests that were queued after the requests in work.
        isolated: The group of suspects that ran without other rows. None if the engine ran other rows.
        fresh: Whether the process had not finished any row.
        loaded: Whether the engine was ready for requests.
        restarts: Number of earlier processes of the same replica that died.
        fruitless: Number of successive deaths with little work between them, including this one.
    """

    in_work: list[Request]
    waiting: list[Request]
    isolated: RowGroup | None
    fresh: bool
    loaded: bool
    restarts: int
    fruitless: int


class WorkerActivity(NamedTuple):
    """An activity of an engine's process, with times of `time.perf_counter`.

    Attributes:
        engine: Number of the engine's process in the order of starts.
        activity: Name of the activity, such as "loading".
        began: Start of the activity.
        ended: End of the activity.
        on: The node and its machine class, on a cluster. Else empty.
    """

    engine: int
    activity: str
    began: float
    ended: float
    on: tuple[str, str] | tuple[()] = ()


class Replica:
    """One of the engines of a run, as the driver sees it.

    A replica lives longer than its worker: if the worker dies, another worker may replace it.
    """

    def __init__(
        self,
        number: int,
        spec: WorkerSpec,
        config: EngineConfig,
        transport: Transport,
        early: WorkerHandle | None = None,
    ) -> None:
        """Start the worker of a replica, unless `early` is given, and send it the configuration of its engine.

        Args:
            number: Number of the replica.
            spec: Specification of the worker.
            config: Configuration of the engine.
            transport: Starts the worker.
            early: The worker, if it was started before the plan was known.
        """
        self.number, self.spec, self._transport = number, spec, transport
        self._config = replace(config, load=spec.load)
        self._engine = number  # number of the current process in the run's order of starts
        self.unfinished: dict[bytes, Request] = {}  # in the order of submission
        self.restarts = 0
        self.isolated: RowGroup | None = None  # the suspects that it runs without other rows
        self.answered: Request | None = None  # the last row that it answered without an error
        self.accused: list[Request] = []  # single rows that killed it, until it has finished another row
        self.fruitless = 0  # deaths in a row with little work between them
        self._finished = 0  # rows finished by the current process
        self.gone = False  # closed
        self.load = 0  # upper bound of the prompt and output tokens of unfinished requests
        self._running = self._waiting = 0  # rows after the last step
        self._longest_step_s = 0.0
        self._silence, self._choosing = WaitTimer(), WaitTimer()
        self._past: list[WorkerActivity] = []  # of earlier processes
        self.worker = early or WorkerHandle(spec, transport)
        self.worker.configure(self._config)

    @property
    def info(self) -> EngineInfo | None:
        """Return the description of the replica's engine, or None while it loads."""
        return self.worker.info

    @property
    def loads_first(self) -> bool:
        """Return True if the first process of this replica is still loading.

        False for a process that replaces another one, and while the worker waits for resources of a cluster.
        """
        return self.info is None and not self.gone and not self.restarts and not self.waits

    @property
    def waits(self) -> bool:
        """Return True if the replica's worker waits for resources of a cluster."""
        return not self.gone and not self.worker.placed

    @property
    def is_ready(self) -> bool:
        """Return True if the replica can run requests."""
        return self.info is not None and not self.gone

    @property
    def concurrent_rows(self) -> int:
        """Return how many rows the replica can run in parallel: `max_num_seqs`, or fewer if its KV cache is full.

        The replica must be ready.
        """
        assert self.info is not None
        return self._running if self._waiting else self.info.max_num_seqs

    def submit(self, requests: Sequence[Request]) -> None:
        """Send requests to the replica's worker."""
        self.unfinished.update((request.key, request) for request in requests)
        self.load += sum(map(tokens_of, requests))
        self.worker.submit(requests)

    def receive(self) -> list[WorkDone]:
        """Return the answers and samples that have arrived from the replica's worker.

        Raises the error that ended the worker's process.
        """
        results = self.worker.receive(0)
        if not self.worker.waits_for:
            self._silence.reset()
        for done in results:
            done.engine, done.replica = self._engine, self.number
            if (placed := self.worker.placement) is not None:
                done.completions = [
                    replace(one, engine_class=placed.machine_class) for one in done.completions
                ]
            for completion in done.completions:
                request = self.unfinished.pop(completion.key)
                self.load -= tokens_of(request)
                if completion.error is None:
                    self.answered = request
            self._finished += len(done.completions)
            if self.isolated is not None and self.isolated.is_probe:
                done.completions, done.requests = [], []  # the answer of a probe belongs to no row
            self._longest_step_s = max([self._longest_step_s, *(step.duration_s for step in done.steps)])
            if done.steps:
                self._running, self._waiting = done.steps[-1].running, done.steps[-1].waiting
        return results

    def check_silence(self, longest_step_s: Callable[[], float]) -> None:
        """Kill the replica's process if it has sent no message for too long while it loads or has work.

        Call it when no message has arrived.

        Args:
            longest_step_s: Returns the forecast duration of the longest step in seconds. It determines the limit.
        """
        loads = self.info is None
        if self.waits:
            self._silence.reset()
            return
        if not self.worker.decides:
            self._choosing.reset()
        elif self._choosing.update() > CHOOSING_S:
            self.worker.give_up(CHOOSING_S)
            return
        if (self.worker.untimed and not self.worker.waits_for) or not (loads or self.unfinished):
            self._silence.reset()
            return
        if self._silence.update() <= (least_s := self._silent_s(loads)):
            return
        limit_s = (
            least_s if loads else max(least_s, SILENT_STEPS * max(longest_step_s(), self._longest_step_s))
        )
        if self._silence.seconds > limit_s:
            self.worker.give_up(limit_s)

    def _silent_s(self, loads: bool) -> float:
        if loads:
            return LOADING_SILENT_S if self.worker.beats else STARTING_S
        return SILENT_S

    def run_isolated(self, group: RowGroup) -> None:
        """Run a group of suspects without other rows, to find out whether they kill the engine.

        The replica must have no unfinished requests.
        """
        self.isolated = group
        self.submit(group.requests)

    def reset_after_death(self) -> Death:
        """Forget the unfinished requests of the replica after its process has died.

        Returns:
            These requests, and the state of the engine when it died.
        """
        # Engines admit requests in order, so those in work are among the first unfinished ones
        requests, running = list(self.unfinished.values()), self._most_running()
        in_work, isolated, fresh = requests[:running], self.isolated, not self._finished
        little = fresh if isolated is not None else self._finished < max(1, len(in_work))
        self.fruitless = self.fruitless + 1 if little else 0
        self.unfinished, self.isolated = {}, None
        self.load = self._running = self._waiting = self._finished = 0
        return Death(
            in_work, requests[running:], isolated, fresh, self.info is not None, self.restarts, self.fruitless
        )

    def _most_running(self) -> int:
        if self.info is None:
            return 0
        return self.info.max_num_seqs if self.isolated is None else len(self.unfinished)

    @property
    def activities(self) -> list[WorkerActivity]:
        """Return the activities of all processes that the replica has had."""
        worker, placed = self.worker, self.worker.placement
        on = () if placed is None else (placed.node, placed.machine_class)
        return [*self._past, *(WorkerActivity(self._engine, *one, on) for one in worker.activities)]

    @property
    def ranks(self) -> list[EngineRank]:
        """Return the usage of each rank of the replica's engine. Empty until the engine has ended as planned."""
        return [EngineRank(self._engine, self.number, use) for use in self.worker.ranks]

    @property
    def can_restart(self) -> bool:
        """Return True if another process may be started: not too many in succession have died after little work."""
        return self.fruitless < (FRUITLESS if self.info is not None else FRUITLESS_LOADING)

    @property
    def is_doubted(self) -> bool:
        """Return True if the engine itself may be the cause of the replica's deaths, and not a row."""
        return self.fruitless >= DOUBTED and not self.has_finished_rows

    @property
    def has_finished_rows(self) -> bool:
        """Return True if the current process of the replica has finished rows."""
        return self._finished > 0

    def fail_accused(self) -> WorkDone:
        """Return error rows for the accused rows: single rows that killed the replica's engine when they ran alone.

        They are no longer accused after this.
        """
        text = "the engine's process died while it computed this row, with other rows and again with this row alone"
        error = RowError(CODE, "engine", text, retryable=True)
        rows, self.accused = self.accused, []
        found = [Completion(row.key, None, "error", error) for row in rows]
        return WorkDone(found, engine=self._engine, replica=self.number)

    def restart(self, engine: int) -> None:
        """Start another process for the replica.

        If ranks ran out of memory, the new engine uses smaller steps, because a rank cannot split a step on its own.

        Args:
            engine: Number of the new process in the order of starts.
        """
        crash = self.worker.crash
        if self.spec.others and crash is not None and crash.kind is OutOfMemory:
            self._config = halve_step_limits(self._config, self.info)
        self._past = self.activities
        self.restarts += 1
        self.gone = False
        self._engine = engine
        self.worker.close()
        self.worker = WorkerHandle(self.spec, self._transport)
        self.worker.configure(self._config)
        self._silence.reset()

    def forget_deaths(self) -> None:
        """Reset the count of successive deaths, after a death that the replica's engine did not cause."""
        self.fruitless = 0

    def close(self) -> None:
        """End the process of the replica."""
        self.gone = True
        self.worker.close()


def halve_step_limits(config: EngineConfig, info: EngineInfo | None) -> EngineConfig:
    """Return an engine configuration with half the tokens and rows per step, for an engine that ran out of memory.

    Args:
        config: The configuration.
        info: The engine that was built from it. None: the configuration is returned unchanged.
    """
    if info is None:
        return config
    return replace(
        config,
        max_num_seqs=max(1, info.max_num_seqs // 2),
        max_num_batched_tokens=max(1, info.max_num_batched_tokens // 2),
    )
