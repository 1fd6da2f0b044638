"""One engine of a pool: its worker, and what the worker was given and has not given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from batchinfer.core.errors import OutOfMemory
from batchinfer.core.request import Completion, Request, RowError
from batchinfer.engine.config import EngineConfig, EngineInfo
from batchinfer.machine.waiting import Waited
from batchinfer.pipeline.workers.heartbeat import STARTING_S
from batchinfer.pipeline.workers.messages import WorkDone, WorkerSpec
from batchinfer.pipeline.workers.suspects import RowGroup
from batchinfer.pipeline.workers.transport import Transport
from batchinfer.pipeline.workers.worker_handle import WorkerHandle
from batchinfer.plan.order.backlog import tokens_of
from batchinfer.report.tables.ranks import EngineRank

# Deaths in a row with next to nothing done in between, after which an engine is not started again: rows that ran by
# themselves have died one after the other by then, so that it is no row that kills it.
FRUITLESS = 4
FRUITLESS_LOADING = 2  # of an engine that has not come to work again: no row has to do with it
# From this many on, it first runs a row that was answered before; where none was, rows under suspicion run one by one.
DOUBTED = 2
CODE = "engine_died"
# An engine that has work and says nothing is taken to hang after SILENT_STEPS times the longest step that it was
# forecast to have, or had, and at least SILENT_S seconds. A worker sends something after each step.
SILENT_STEPS, SILENT_S = 10, 60.0
# One that loads says so every second, from when it has imported what it needs, and takes as long as it takes.
LOADING_SILENT_S = 60.0
# Except for what it compares while it loads: kernels of libraries, one of which may hang on a GPU. Some are compiled.
CHOOSING_S = 1800.0


@dataclass(frozen=True, slots=True)
class Death:
    """A death tells what an engine's process left behind."""

    in_work: list[Request]
    waiting: list[Request]  # behind those in work
    isolated: RowGroup | None  # those in work are of it, and ran with no others
    fresh: bool  # the process had finished nothing
    loaded: bool  # it had come to work
    restarts: int  # processes of the same engine that died before
    fruitless: int  # deaths in a row, this one included, between which it got next to nothing done


class WorkerActivity(NamedTuple):
    """An activity of an engine's process lies between two moments of `time.perf_counter`."""

    engine: int  # its number in the run
    activity: str
    began: float
    ended: float
    on: tuple[str, str] | tuple[()] = ()  # on a cluster: its node, and the class of that machine


class Replica:
    """A place for an engine: should its worker die, another one may be started in its place."""

    def __init__(
        self,
        number: int,
        spec: WorkerSpec,
        config: EngineConfig,
        transport: Transport,
        early: WorkerHandle | None = None,
    ) -> None:
        """early: the worker, if it was started before the plan was known."""
        self.number, self.spec, self._transport = number, spec, transport
        self._config = replace(config, load=spec.load)
        self._engine = number  # how many were started in the run before the present process
        self.unfinished: dict[bytes, Request] = {}  # in the order in which they were submitted
        self.restarts = 0
        self.isolated: RowGroup | None = None  # what it runs with no other rows
        self.answered: Request | None = None  # the last row that it answered without an error
        self.accused: list[Request] = []  # died by themselves, and it has finished nothing since
        self.fruitless = 0  # deaths in a row between which it got next to nothing done
        self._finished = 0  # rows, by the present process
        self.gone = False  # nothing more is to be heard or expected
        self.load = 0  # tokens of what is unfinished, prompts and answers as long as they may be
        self._running = self._waiting = 0  # rows, after its last step
        self._longest_step_s = 0.0
        self._silence, self._choosing = Waited(), Waited()
        self._past: list[WorkerActivity] = []  # of the processes before the present one
        self.worker = early or WorkerHandle(spec, transport)
        self.worker.configure(self._config)

    @property
    def info(self) -> EngineInfo | None:
        """The engine that the present process has built; None while it loads."""
        return self.worker.info

    @property
    def loads_first(self) -> bool:
        """Whether it loads its first engine."""
        return self.info is None and not self.gone and not self.restarts and not self.waits

    @property
    def waits(self) -> bool:
        """Whether it waits for resources."""
        return not self.gone and not self.worker.placed

    @property
    def is_ready(self) -> bool:
        return self.info is not None and not self.gone

    @property
    def at_once(self) -> int:
        """The number of rows that it runs at once: its limit, or fewer if its cache has room for fewer."""
        assert self.info is not None
        return self._running if self._waiting else self.info.max_num_seqs

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand these requests to the worker."""
        self.unfinished.update((request.key, request) for request in requests)
        self.load += sum(map(tokens_of, requests))
        self.worker.submit(requests)

    def receive(self) -> list[WorkDone]:
        """Return the work that has come. Raises the error that ended the process."""
        heard = self.worker.receive(0)
        if not self.worker.waits_for:
            self._silence.again()
        for done in heard:
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
            if (
                self.isolated is not None and self.isolated.is_proof
            ):  # its steps count, its answer is nobody's
                done.completions, done.requests = [], []
            self._longest_step_s = max([self._longest_step_s, *(step.duration_s for step in done.steps)])
            if done.steps:
                self._running, self._waiting = done.steps[-1].running, done.steps[-1].waiting
        return heard

    def listen(self, longest_step_s: Callable[[], float]) -> None:
        """Note that it has said nothing, once more. Ends a process that has work, or loads, and has said nothing for
        too long while this process ran: a step is forecast to take `longest_step_s` at the most."""
        loads = self.info is None
        if self.waits:
            self._silence.again()
            return
        if not self.worker.decides:
            self._choosing.again()
        elif self._choosing.look() > CHOOSING_S:
            self.worker.give_up(CHOOSING_S)
            return
        if (self.worker.untimed and not self.worker.waits_for) or not (loads or self.unfinished):
            self._silence.again()
            return
        if self._silence.look() <= (least_s := self._silent_s(loads)):
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
        """Hand out rows that are to run with no others; nothing else is unfinished."""
        self.isolated = group
        self.submit(group.requests)

    def died(self) -> Death:
        """Note that its process died, which will not be asked any more for what it had not given back.

        It admits requests in order, so those in work are among the first of these.
        """
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
        """Return what its processes did so far."""
        worker, placed = self.worker, self.worker.placement
        on = () if placed is None else (placed.node, placed.machine_class)
        return [*self._past, *(WorkerActivity(self._engine, *one, on) for one in worker.activities)]

    @property
    def ranks(self) -> list[EngineRank]:
        """Return what the ranks of its present process had and took, once that has left."""
        return [EngineRank(self._engine, self.number, use) for use in self.worker.ranks]

    @property
    def may_restart(self) -> bool:
        """Whether another process may do better."""
        return self.fruitless < (FRUITLESS if self.info is not None else FRUITLESS_LOADING)

    @property
    def doubted(self) -> bool:
        """Whether the engine itself may be at fault, and not a row: it died several times, and has not shown since that
        it works."""
        return self.fruitless >= DOUBTED and not self.works

    @property
    def works(self) -> bool:
        """Whether its present process has finished rows."""
        return self._finished > 0

    def convict(self) -> WorkDone:
        """Return the rows that it had accused, as error rows."""
        text = "the engine's process died while it computed this row, with other rows and again with this row alone"
        error = RowError(CODE, "engine", text, retryable=True)
        rows, self.accused = self.accused, []
        found = [Completion(row.key, None, "error", error) for row in rows]
        return WorkDone(found, engine=self._engine, replica=self.number)

    def restart(self, engine: int) -> None:
        """Start another process, the `engine`-th of the run; with smaller steps where ranks that share a model had no
        memory for them: none can run a step in parts by itself."""
        crash = self.worker.crash
        if self.spec.others and crash is not None and crash.kind is OutOfMemory:
            self._config = smaller(self._config, self.info)
        self._past = self.activities
        self.restarts += 1
        self._engine = engine
        self.worker.close()
        self.worker = WorkerHandle(self.spec, self._transport)
        self.worker.configure(self._config)
        self._silence.again()

    def excuse(self) -> None:
        """Forget the deaths of the engine: the last one was no fault of it."""
        self.fruitless = 0

    def close(self) -> None:
        """End the process."""
        self.gone = True
        self.worker.close()


def smaller(config: EngineConfig, info: EngineInfo | None) -> EngineConfig:
    """Return the configuration with steps of half as many tokens and rows. `info`: the engine that it became; None: it
    became none."""
    if info is None:
        return config
    return replace(
        config,
        max_num_seqs=max(1, info.max_num_seqs // 2),
        max_num_batched_tokens=max(1, info.max_num_batched_tokens // 2),
    )
