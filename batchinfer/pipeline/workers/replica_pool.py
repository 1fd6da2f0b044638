"""Distributes the requests of a plan among one or several engines, and recovers from deaths of engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from types import TracebackType

from batchinfer.core.errors import BatchInferError
from batchinfer.core.request import Request, TokenIds, Tokens
from batchinfer.core.samples import ExpertTokens
from batchinfer.engine.config import EngineConfig, EngineInfo, max_queued_requests
from batchinfer.filesystem.death_log import DeathLog
from batchinfer.pipeline.workers.agreement import Agreement
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.pipeline.workers.messages import WorkDone, WorkerSpec
from batchinfer.pipeline.workers.replica import CODE, Death, Replica, WorkerActivity
from batchinfer.pipeline.workers.resource_wait import ResourceWait
from batchinfer.pipeline.workers.suspects import RowGroup, Suspects, probe_of
from batchinfer.pipeline.workers.transport import PROCESSES, Transport
from batchinfer.pipeline.workers.worker_handle import SINGLE_ENGINE_CODES, WorkerHandle
from batchinfer.plan.order.backlog import Backlog, piece_rows
from batchinfer.report.tables.ranks import EngineRank

# At the end of a run, an engine may queue its even share of the remaining rows, divided by this
WAITING_LEFT = 2
# Limit on deaths while suspects run and no row is found to be the cause. Halving 1,024 rows costs at most twelve.
MOST_ISOLATED = 24


class ReplicaPool:
    """All engines of a run. `run_plan` uses them like a single engine.

    An engine that dies is restarted, unless it has died repeatedly with little work in between. Then the other engines
    continue without it. The death of the last engine is raised as an error. Each answer is received exactly once.

    Requests that waited in a dead engine are submitted again first. Requests that were running are suspects. They run
    at the end of the plan, in groups without other rows, until the rows that kill engines are found. These rows become
    error rows.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        config: EngineConfig,
        rows: int,
        interrupts: Interrupts,
        name_rows: Callable[[Sequence[bytes]], str],
        notice: Callable[[str], None],
        death_log: DeathLog,
        loading: Callable[[], AbstractContextManager[None]],
        longest_step_s: Callable[[EngineInfo], float] = lambda _: 0.0,
        transport: Transport = PROCESSES,
        early: Sequence[WorkerHandle] = (),
    ) -> None:
        """Start all engines.

        Args:
            specs: Specification of each engine's worker.
            config: Configuration of all engines.
            rows: Number of requests in the plan.
            interrupts: The signals of the run. No process is started after a signal.
            name_rows: Returns a text that names rows for the user, from their work keys.
            notice: Called with lines for the user about deaths of engines.
            death_log: Stores the tracebacks of deaths.
            loading: Returns a context manager that measures the time in which no engine is ready.
            longest_step_s: Forecasts the longest step of an engine in seconds, for the watchdog.
            transport: Starts workers.
            early: Workers that were started before, in the order of `specs`. Empty if there are none.
        """
        self._transport = transport
        self._longest_step_s = longest_step_s
        self._silent: set[bytes] = set()  # keys that were in work when the watchdog ended an engine
        self._interrupts, self._notice, self._loading = interrupts, notice, loading
        self._death_log = death_log
        self._name_rows, self._backlog, self._suspects = name_rows, Backlog(), Suspects()
        self._left = rows  # rows that no engine has received
        self._finishing = False
        self._isolated_deaths = 0  # deaths while suspects ran, since the last row was found to be the cause
        self._ready_at: tuple[float, float] | None = None  # wall and CPU time of this process in s
        self.restarts = 0
        self._agreement = Agreement()
        self._resource_wait = ResourceWait(transport, notice)
        self._shares_answers = "answers" in config.drafts
        self._replicas: list[Replica] = []
        self._idle_deaths: list[Replica] = []  # died when no rows were left; a later plan may bring rows
        try:
            with self._loading():
                for number, (spec, worker) in enumerate(zip_longest(specs, early)):
                    self._replicas.append(Replica(number, spec, config, transport, worker))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ReplicaPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes of all engines, even if an error occurs while one ends."""
        with ExitStack() as stack:
            for replica in self._replicas:
                stack.callback(replica.close)

    # The interface of the feeder

    @property
    def info(self) -> EngineInfo | None:
        """Return the description of an engine that is ready.

        Returns None while any engine loads for the first time, or if no engine is ready.
        """
        if any(replica.loads_first for replica in self._replicas):
            return None
        return next((replica.info for replica in self._replicas if replica.is_ready), None)

    @property
    def infos(self) -> list[EngineInfo]:
        """Return the descriptions of all engines whose current process became ready."""
        return [replica.info for replica in self._replicas if replica.info is not None]

    @property
    def left(self) -> bool:
        """Return True if every engine was closed, or its worker has sent its last message."""
        return all(replica.gone or replica.worker.left for replica in self._replicas)

    @property
    def wants_more(self) -> bool:
        """Return True if more requests should be submitted, because an engine has room for them.

        Also True once all expected requests of the plan were submitted and sent to engines, so that the caller reads on
        and finds the end of the plan.
        """
        if not self._left:
            return True
        return self.info is not None and not self._divisible and self._next() is not None

    @property
    def has_room(self) -> bool:
        """Return True if an engine is ready and could run more requests than it has."""
        return self.info is not None and self._next() is not None

    def learn(self, answers: Sequence[TokenIds]) -> None:
        """Send answers to all engines that are ready, if the engines use them as a source of draft tokens.

        Args:
            answers: Tokens of each answer.
        """
        if self._shares_answers and answers:
            for replica in self._live:
                if replica.is_ready:
                    replica.worker.learn(answers)

    def expect(self, rows: int) -> None:
        """Set the number of requests of the plan that will still be submitted."""
        self._left = len(self._backlog) + max(0, rows)

    def end_plan(self) -> None:
        """Record that all requests of the current plan were submitted, so that engines need not wait for more."""
        self._left = len(self._backlog)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the next requests of the plan, and send queued requests to engines that have room."""
        self._backlog.append(requests)
        self._hand_out()

    def receive(self, timeout_s: float) -> list[WorkDone]:
        """Return the answers and samples that have arrived from the engines.

        If there are none, wait for at most `timeout_s` seconds. Raises the error that ended the last engine.
        """
        self._restart_for_new_rows()
        live = self._live
        self._resource_wait.update(all_wait=bool(live) and all(replica.waits for replica in live))
        with self._loading() if self.info is None else nullcontext():
            results = [
                done
                for replica in self._with_messages(timeout_s)
                for done in self._receive_and_share(replica)
            ]
        self._agreement.answer_waiting(replica.worker for replica in self._live)
        results += self._fail_accused()
        if self._ready_at is None and self.info is not None:
            self._ready_at = time.monotonic(), time.process_time()
        self._hand_out()
        return results

    def finish(self, within_s: float) -> None:
        """Let all engines drop waiting requests, finish running ones within `within_s` seconds, and end."""
        self._finishing = True
        self._backlog.take_all()
        for replica in self._live:
            if replica.info is None:
                replica.close()
            else:
                replica.worker.finish(within_s)

    # Known when the engines have left

    @property
    def peak_rss(self) -> int | None:
        """Return the sum of the peak memory of the engines that have ended, in bytes. None if none has ended."""
        known = [r.worker.peak_rss for r in self._replicas if r.worker.peak_rss is not None]
        return sum(known) if known else None

    @property
    def other_cores(self) -> float | None:
        """Return the mean number of CPU cores that other processes used while engines were ready, or None if unknown.

        Engines and this process do not count.
        """
        known = [r.worker.other_cores for r in self._replicas if r.worker.other_cores is not None]
        if not known or self._ready_at is None:
            return None
        began, worked = self._ready_at
        elapsed = time.monotonic() - began
        own = (time.process_time() - worked) / elapsed if elapsed > 0 else 0.0
        return max(0.0, sum(known) - own)

    @property
    def ranks(self) -> list[EngineRank]:
        """Return the usage of each rank of the engines that have ended as planned. Empty for engines with one rank."""
        return [rank for replica in self._replicas for rank in replica.ranks]

    @property
    def expert_tokens(self) -> ExpertTokens:
        """Return the number of tokens of each expert by layer, summed over engines that have ended as planned.

        The counts of processes that died are lost.
        """
        # Regular counts would not be lost with a process, but would make steps wait for the device
        found: dict[int, list[int]] = {}
        for replica in self._replicas:
            for layer, tokens in replica.worker.expert_tokens.items():
                before = found.get(layer, [0] * len(tokens))
                found[layer] = [some + more for some, more in zip(before, tokens, strict=True)]
        return found

    @property
    def activities(self) -> list[WorkerActivity]:
        """Return the activities of all processes of all engines."""
        return [activity for replica in self._replicas for activity in replica.activities]

    # Distribution

    @property
    def _live(self) -> list[Replica]:
        return [replica for replica in self._replicas if not replica.gone]

    @property
    def _divisible(self) -> bool:
        return len(self._backlog) >= 2 * self._piece or len(self._backlog) >= self._left > 0

    @property
    def _piece(self) -> int:
        return piece_rows(self._left, len(self._live))

    def _hand_out(self) -> None:
        if self._finishing or self.info is None:
            return
        if len(self._replicas) == 1:
            self._give(self._replicas[0], self._backlog.take_all())
        while self._divisible and (replica := self._next()) is not None:
            self._give(replica, self._backlog.take(self._piece, len(self._live)))
        if not self._left:
            self._run_isolated()

    def _run_isolated(self) -> None:
        for replica in self._live:
            if replica.is_ready and not replica.unfinished and self._suspects:
                group = self._group_for(replica)
                if group is not None:
                    replica.run_isolated(group)

    def _group_for(self, replica: Replica) -> RowGroup | None:
        # A doubted engine first runs a row that was answered before. Suspects that kill it would end its use.
        answered = next((one.answered for one in self._replicas if one.answered is not None), None)
        if replica.is_doubted and answered is not None:
            return probe_of(answered)
        another = replica.number if len(self._live) > 1 else None
        return self._suspects.take(one=replica.is_doubted, not_of=another)

    def _give(self, replica: Replica, requests: list[Request]) -> None:
        # `_left` may be too small, because another run may have stored answers of rows in this plan
        self._left = max(self._left - len(requests), len(self._backlog))
        if requests:
            replica.submit(requests)

    def _next(self) -> Replica | None:
        free = [replica for replica in self._live if replica.is_ready and replica.isolated is None]
        able = [replica for replica in free if len(replica.unfinished) < self._most(replica)]
        return min(able, key=lambda replica: replica.load, default=None)

    def _most(self, replica: Replica) -> int:
        assert replica.info is not None
        engines, most = len(self._live), max_queued_requests(replica.info.max_num_seqs)
        if engines == 1:
            return most
        return max(1, min(most, replica.concurrent_rows + self._left // (WAITING_LEFT * engines)))

    # Messages

    def _with_messages(self, timeout_s: float) -> Iterator[Replica]:
        running = [replica for replica in self._live if not replica.worker.left]
        failed = [replica for replica in running if replica.worker.ended]
        if failed:
            yield from failed
            return
        links = self._transport.wait_for_messages([replica.worker.link for replica in running], timeout_s)
        with_messages = [replica for link in links for replica in running if replica.worker.link is link]
        for replica in running:
            if replica not in with_messages:
                replica.check_silence(partial(self._longest_of, replica))
        yield from with_messages

    def _longest_of(self, replica: Replica) -> float:
        return 0.0 if replica.info is None else self._longest_step_s(replica.info)

    def _receive_and_share(self, replica: Replica) -> list[WorkDone]:
        results = self._receive_from(replica)
        others = [other for other in self._live if other is not replica and other.is_ready]
        if self._shares_answers and others and not self._finishing:
            completions = [completion for done in results for completion in done.completions]
            if answers := [c.tokens.token_ids for c in completions if isinstance(c.tokens, Tokens)]:
                for other in others:
                    other.worker.learn(answers)
        return results

    def _receive_from(self, replica: Replica) -> list[WorkDone]:
        try:
            results = replica.receive()
        except BatchInferError as error:
            self._handle_end(replica, error)
            return []
        if replica.isolated is not None and not replica.unfinished:
            self._suspects.record_finish(replica.isolated)
            replica.isolated = None
        return results

    def _fail_accused(self) -> list[WorkDone]:
        # An engine must have finished other rows after the row killed it, which shows that the engine works.
        # If no work is left, the row is blamed anyway.
        found = []
        for replica in self._replicas:
            if replica.accused and (replica.has_finished_rows or not self._has_work):
                named = self._name_rows([request.key for request in replica.accused])
                self._notice(f"error row ({CODE}): {named}; an engine that computed nothing else died")
                found.append(replica.fail_accused())
                self._isolated_deaths = 0
        return found

    # Deaths

    @property
    def _has_work(self) -> bool:
        return bool(self._left or self._suspects or any(replica.unfinished for replica in self._live))

    def _handle_end(self, replica: Replica, error: BatchInferError) -> None:
        crash, others = replica.worker.crash, len(self._live) > 1
        if crash is None and not (others and error.exit_code in SINGLE_ENGINE_CODES):
            raise error
        if crash is not None and self._finishing and not replica.unfinished:
            replica.close()  # it had no requests, so nothing is lost
            return
        death = replica.reset_after_death()
        lost = crash is not None and replica.worker.link.lost
        if lost:
            replica.forget_deaths()
        elif death.isolated is not None:
            self._isolated_deaths += 1
        again = crash is not None and self._may_restart(replica)
        if crash is not None and not (again or others):
            raise crash.error(self._describe(death)) from error
        what = self._log_death(replica, error, death)
        if crash is not None and crash.silent:
            self._requeue_silent(replica, death)
        else:
            self._requeue(replica, death, blamed=crash is not None and not lost)
        self._go_on(replica, what, again)

    def _log_death(self, replica: Replica, error: BatchInferError, death: Death) -> str:
        # Only if the error does not explain itself. Returns a text for the user.
        crash, traceback = replica.worker.crash, replica.worker.traceback
        what = str(error).removesuffix(f"\n{traceback}") if crash is None else crash.what
        details = [] if crash is None else [self._describe(death)]
        if traceback and (crash is not None or type(error) is BatchInferError):
            details.append(self._death_log.add(f"{self._prefix(replica)}{what}", traceback))
        return "; ".join([what, *details])

    def _requeue_silent(self, replica: Replica, death: Death) -> None:
        # Rows that were in work when the watchdog ended an engine become suspects only the second time
        again = [request for request in death.in_work if request.key in self._silent]
        first = [request for request in death.in_work if request.key not in self._silent]
        self._silent.update(request.key for request in first)
        if death.isolated is None:
            rest = replace(death, in_work=again, waiting=[*first, *death.waiting])
            self._requeue(replica, rest, blamed=True)
        elif again or death.isolated.is_probe:
            self._requeue(replica, death, blamed=True)
        else:
            self._suspects.add(first)

    def _requeue(self, replica: Replica, death: Death, blamed: bool) -> None:
        if death.isolated is not None and death.isolated.is_probe:
            return
        waiting = death.waiting if blamed else [*death.in_work, *death.waiting]
        self._left += len(waiting)
        self._backlog.put_back(waiting)
        if blamed and death.isolated is None:
            self._suspects.add(death.in_work)
        elif blamed and death.isolated is not None:
            if len(death.in_work) == 1 and self._is_certain(death):
                replica.accused += death.in_work
            else:
                self._suspects.record_death(death.in_work, replica.number)

    def _is_certain(self, death: Death) -> bool:
        # Either the row killed an engine before, or it was the first row of a new process and there is no
        # other engine
        again = death.isolated is not None and death.isolated.died_in is not None
        return again or (death.fresh and len(self._live) == 1)

    def _go_on(self, replica: Replica, what: str, again: bool) -> None:
        if not again or not self._has_work:
            replica.close()
            self._idle_deaths += [replica] if again else []
            rest = "no rows are left to run" if again else "the other engines go on"
            self._notice(f"{self._prefix(replica)}{what}; {rest}")
            return
        self._notice(f"{self._prefix(replica)}{what}; starting a new one")
        self._restart(replica)

    def _restart_for_new_rows(self) -> None:
        if self._idle_deaths and self._has_work and not self._finishing:
            replicas, self._idle_deaths = self._idle_deaths, []
            for replica in replicas:
                self._notice(f"{self._prefix(replica)}starting a new one: there are rows again")
                self._restart(replica)

    def _restart(self, replica: Replica) -> None:
        self.restarts += 1
        with self._loading() if self.info is None else nullcontext():
            replica.restart(len(self._replicas) + self.restarts - 1)

    def _prefix(self, replica: Replica) -> str:
        return f"engine {replica.number}: " if len(self._replicas) > 1 else ""

    def _may_restart(self, replica: Replica) -> bool:
        return self._may_start and replica.can_restart

    @property
    def _may_start(self) -> bool:
        if self._interrupts.pending is not None or self._finishing:
            return False
        return self._isolated_deaths < MOST_ISOLATED

    def _describe_rows(self, death: Death) -> str:
        if death.isolated is not None and death.isolated.is_probe:
            return "it was computing one row alone, which had been answered before"
        how = "it was computing only" if death.isolated else "it was computing"
        return f"{how} {self._name_rows([request.key for request in death.in_work])}"

    def _describe(self, death: Death) -> str:
        if not death.loaded:
            return "it was loading the model" + (" again, after a restart" if death.restarts else "")
        if not death.in_work:
            return "it was computing no row"
        rows = self._describe_rows(death)
        if death.fruitless < 2:
            return rows
        return f"{rows}; it died {death.fruitless} times in a row with little done in between"
