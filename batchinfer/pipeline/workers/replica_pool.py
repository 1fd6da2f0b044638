"""One or several engines over one plan: rows are handed out as engines finish theirs, and outlive an engine's death."""

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
from batchinfer.pipeline.workers.suspects import RowGroup, Suspects, proof_of
from batchinfer.pipeline.workers.transport import PROCESSES, Transport
from batchinfer.pipeline.workers.vacancies import Vacancies
from batchinfer.pipeline.workers.worker_handle import OF_ONE, WorkerHandle
from batchinfer.plan.order.backlog import Backlog, piece_rows
from batchinfer.report.tables.ranks import EngineRank

# The fewer rows are left, the fewer wait in an engine: its even share of them divided by this.
WAITING_LEFT = 2
# Deaths without a row that is found to be at fault, while rows under suspicion are run: halving 1,024 rows costs twelve
# at most. What dies as often as this does so for another reason.
MOST_ISOLATED = 24


class ReplicaPool:
    """All engines of a run, as one engine to whoever feeds it; `specs` has one for each, and `early` those of them that
    were started before. All are configured alike.

    An engine whose process was killed or failed at work is replaced, unless it gets nothing done between one death and
    the next; then the others go on, and the last one's death is an error. No answer is lost, none is received twice.
    Rows that waited in it are handed out again before anything else. Rows in work may have killed it: they run at the
    end, by themselves, until those that kill are found. These become error rows. After a signal no process is started.

    `rows`: how many there are in the plan. `name_rows` says in words which rows some keys stand for, `notice` tells a
    user of a death, `death_log` keeps its traceback, and the time inside `loading` is that in which no engine can work
    yet. `longest_step_s` forecasts the longest step of an engine: one that is silent for far longer is ended and
    replaced. `transport` starts workers. An engine that has lost its machine is started again, and may have to wait for
    resources.
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
        self._transport = transport
        self._longest_step_s = longest_step_s
        self._silent: set[bytes] = set()  # rows that were in work when an engine fell silent
        self._interrupts, self._notice, self._loading = interrupts, notice, loading
        self._death_log = death_log
        self._name_rows, self._backlog, self._suspects = name_rows, Backlog(), Suspects()
        self._left = rows  # that no engine has been given
        self._finishing = False
        self._isolated_deaths = 0  # of engines that ran rows under suspicion, since a row was found to kill
        self._ready_at: tuple[float, float] | None = None  # seconds: of the clock, and of this process's work
        self.restarts = 0
        self._agreement = Agreement()
        self._vacancies = Vacancies(transport, notice)
        self._shares_answers = "answers" in config.drafts
        self._replicas: list[Replica] = []
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
        """End all processes, also should ending one of them fail."""
        with ExitStack() as stack:
            for replica in self._replicas:
                stack.callback(replica.close)

    # What the feeder sees

    @property
    def info(self) -> EngineInfo | None:
        """The engine of a process that can work; None while there is none, or some load for the first time."""
        if any(replica.loads_first for replica in self._replicas):
            return None
        return next((replica.info for replica in self._replicas if replica.is_ready), None)

    @property
    def infos(self) -> list[EngineInfo]:
        """The engines of all processes that came to work."""
        return [replica.info for replica in self._replicas if replica.info is not None]

    @property
    def left(self) -> bool:
        """Whether nothing more is to be heard."""
        return all(replica.gone or replica.worker.left for replica in self._replicas)

    @property
    def wants_more(self) -> bool:
        """Whether there is an engine that would run the next rows of the plan soon, or wait for them; also where there
        are none: whoever asks finds that the plan has ended, also if no engine is left by then."""
        if not self._left:
            return True
        return self.info is not None and not self._divisible and self._next() is not None

    @property
    def has_room(self) -> bool:
        """Whether there is an engine that could run more than it has."""
        return self.info is not None and self._next() is not None

    def learn(self, answers: Sequence[TokenIds]) -> None:
        """Tell the engines that can work of answers, where drafts may come from them."""
        if self._shares_answers and answers:
            for replica in self._live:
                if replica.is_ready:
                    replica.worker.learn(answers)

    def expect(self, rows: int) -> None:
        """Take note that so many rows are to come, in place of all that were to come before."""
        self._left = len(self._backlog) + max(0, rows)

    def exhausted(self) -> None:
        """Take note that nothing of the plan is to come that was not submitted."""
        self._left = len(self._backlog)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take the next rows of the plan."""
        self._backlog.append(requests)
        self._hand_out()

    def receive(self, timeout_s: float) -> list[WorkDone]:
        """Return the work that has come, waiting for at most `timeout_s` when there is nothing. Raises the error that
        ended the last engine."""
        live = self._live
        self._vacancies.look(all_wait=bool(live) and all(replica.waits for replica in live))
        with self._loading() if self.info is None else nullcontext():
            heard = [done for replica in self._speaking(timeout_s) for done in self._told_others(replica)]
        self._agreement.settle(replica.worker for replica in self._live)
        heard += self._verdicts()
        if self._ready_at is None and self.info is not None:
            self._ready_at = time.monotonic(), time.process_time()
        self._hand_out()
        return heard

    def finish(self, within_s: float) -> None:
        """Tell all engines to drop what waits, finish what runs within `within_s` seconds, and leave."""
        self._finishing = True
        self._backlog.take_all()
        for replica in self._live:
            if replica.info is None:
                replica.close()
            else:
                replica.worker.finish(within_s)

    # Known once they have left

    @property
    def peak_rss(self) -> int | None:
        """The most bytes that each engine's process held, added up; None while none has left."""
        known = [r.worker.peak_rss for r in self._replicas if r.worker.peak_rss is not None]
        return sum(known) if known else None

    @property
    def other_cores(self) -> float | None:
        """CPU cores that other processes used meanwhile. For an engine this process is another one, too."""
        known = [r.worker.other_cores for r in self._replicas if r.worker.other_cores is not None]
        if not known or self._ready_at is None:
            return None
        began, worked = self._ready_at
        elapsed = time.monotonic() - began
        own = (time.process_time() - worked) / elapsed if elapsed > 0 else 0.0
        return max(0.0, sum(known) - own)

    @property
    def ranks(self) -> list[EngineRank]:
        """Return what the ranks of each engine had and took; none of engines that died, or are one alone."""
        return [rank for replica in self._replicas for rank in replica.ranks]

    @property
    def expert_tokens(self) -> ExpertTokens:
        """The tokens that the experts of all engines were given. The counts of processes that died are lost: to send
        them now and then, a step would have to wait for the device."""
        found: dict[int, list[int]] = {}
        for replica in self._replicas:
            for layer, tokens in replica.worker.expert_tokens.items():
                before = found.get(layer, [0] * len(tokens))
                found[layer] = [some + more for some, more in zip(before, tokens, strict=True)]
        return found

    @property
    def activities(self) -> list[WorkerActivity]:
        """Return what the engines' processes did so far, and when."""
        return [activity for replica in self._replicas for activity in replica.activities]

    # Handing out

    @property
    def _live(self) -> list[Replica]:
        return [replica for replica in self._replicas if not replica.gone]

    @property
    def _divisible(self) -> bool:
        """Whether a part of the backlog can be cut off where it costs least: what follows has been read."""
        return len(self._backlog) >= 2 * self._piece or len(self._backlog) >= self._left > 0

    @property
    def _piece(self) -> int:
        """Rows that are handed out at once."""
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
        """Give engines without work, once nothing of the plan is left, rows that were in work when one died."""
        for replica in self._live:
            if replica.is_ready and not replica.unfinished and self._suspects:
                group = self._group_for(replica)
                if group is not None:
                    replica.run_isolated(group)

    def _group_for(self, replica: Replica) -> RowGroup | None:
        """Return the rows that it is to run by itself; if it is doubted, first a row that was answered, so that it is
        not given up because of rows that kill."""
        answered = next((one.answered for one in self._replicas if one.answered is not None), None)
        if replica.doubted and answered is not None:
            return proof_of(answered)
        another = replica.number if len(self._live) > 1 else None
        return self._suspects.take(one=replica.doubted, not_of=another)

    def _give(self, replica: Replica, requests: list[Request]) -> None:
        # another run may have stored answers that were counted: there is no less than what is known
        self._left = max(self._left - len(requests), len(self._backlog))
        if requests:
            replica.submit(requests)

    def _next(self) -> Replica | None:
        """Return the engine with the least to do, if it may have more."""
        free = [replica for replica in self._live if replica.is_ready and replica.isolated is None]
        able = [replica for replica in free if len(replica.unfinished) < self._most(replica)]
        return min(able, key=lambda replica: replica.load, default=None)

    def _most(self, replica: Replica) -> int:
        """Return how many rows an engine may have at a time."""
        assert replica.info is not None
        engines, most = len(self._live), max_queued_requests(replica.info.max_num_seqs)
        if engines == 1:
            return most
        return max(1, min(most, replica.at_once + self._left // (WAITING_LEFT * engines)))

    # Hearing

    def _speaking(self, timeout_s: float) -> Iterator[Replica]:
        """Return the engines that have something to say."""
        heard = [replica for replica in self._live if not replica.worker.left]
        failed = [replica for replica in heard if replica.worker.ended]
        if failed:
            yield from failed
            return
        links = self._transport.speaking([replica.worker.link for replica in heard], timeout_s)
        spoke = [replica for link in links for replica in heard if replica.worker.link is link]
        for replica in heard:
            if replica not in spoke:
                replica.listen(partial(self._longest_of, replica))
        yield from spoke

    def _longest_of(self, replica: Replica) -> float:
        return 0.0 if replica.info is None else self._longest_step_s(replica.info)

    def _told_others(self, replica: Replica) -> list[WorkDone]:
        """Return what an engine has to say, and tell the others of its answers where drafts may come from them."""
        heard = self._from(replica)
        others = [other for other in self._live if other is not replica and other.is_ready]
        if self._shares_answers and others and not self._finishing:
            completions = [completion for done in heard for completion in done.completions]
            if answers := [c.tokens.token_ids for c in completions if isinstance(c.tokens, Tokens)]:
                for other in others:
                    other.worker.learn(answers)
        return heard

    def _from(self, replica: Replica) -> list[WorkDone]:
        try:
            heard = replica.receive()
        except BatchInferError as error:
            self._after(replica, error)
            return []
        if replica.isolated is not None and not replica.unfinished:
            self._suspects.finished(replica.isolated)
            replica.isolated = None
        return heard

    def _verdicts(self) -> list[WorkDone]:
        """Return rows that killed an engine by themselves, once an engine has shown that it runs others, or all are
        done."""
        found = []
        for replica in self._replicas:
            if replica.accused and (replica.works or not self._has_work):
                named = self._name_rows([request.key for request in replica.accused])
                self._notice(f"error row ({CODE}): {named}; an engine that computed nothing else died")
                found.append(replica.convict())
                self._isolated_deaths = 0
        return found

    # Deaths

    @property
    def _has_work(self) -> bool:
        return bool(self._left or self._suspects or any(replica.unfinished for replica in self._live))

    def _after(self, replica: Replica, error: BatchInferError) -> None:
        """Go on after what ended an engine's process, with a new one or with the others. Raises when neither can be."""
        crash, others = replica.worker.crash, len(self._live) > 1
        if crash is None and not (others and error.exit_code in OF_ONE):
            raise error
        if crash is not None and self._finishing and not replica.unfinished:
            replica.close()  # what it still had to say was of no use to anybody
            return
        death = replica.died()
        lost = crash is not None and replica.worker.link.lost
        if lost:
            replica.excuse()
        elif death.isolated is not None:
            self._isolated_deaths += 1
        again = crash is not None and self._may_restart(replica)
        if crash is not None and not (again or others):
            raise crash.error(self._told(death)) from error
        what = self._logged(replica, error, death)
        if crash is not None and crash.silent:
            self._take_back_silent(replica, death)
        else:
            self._take_back(replica, death, blamed=crash is not None and not lost)
        self._go_on(replica, what, again)

    def _logged(self, replica: Replica, error: BatchInferError, death: Death) -> str:
        """Write the engine's traceback to the log file. Return what happened, and the name of that file.

        An engine that refuses to load, with an error that explains itself, has no traceback to look at.
        """
        crash, traceback = replica.worker.crash, replica.worker.traceback
        what = str(error).removesuffix(f"\n{traceback}") if crash is None else crash.what
        told = [] if crash is None else [self._told(death)]
        if traceback and (crash is not None or type(error) is BatchInferError):
            told.append(self._death_log.add(f"{self._who(replica)}{what}", traceback))
        return "; ".join([what, *told])

    def _take_back_silent(self, replica: Replica, death: Death) -> None:
        """Take back the rows of an engine that fell silent: those in work are not blamed for the first time."""
        again = [request for request in death.in_work if request.key in self._silent]
        first = [request for request in death.in_work if request.key not in self._silent]
        self._silent.update(request.key for request in first)
        if death.isolated is None:
            rest = replace(death, in_work=again, waiting=[*first, *death.waiting])
            self._take_back(replica, rest, blamed=True)
        elif again or death.isolated.is_proof:
            self._take_back(replica, death, blamed=True)
        else:
            self._suspects.add(first)

    def _take_back(self, replica: Replica, death: Death, blamed: bool) -> None:
        """Take back its rows: waiting rows are the first to be handed out again, rows in work are `blamed`."""
        if death.isolated is not None and death.isolated.is_proof:
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
                self._suspects.died(death.in_work, replica.number)

    def _is_certain(self, death: Death) -> bool:
        """Whether one row that ran by itself killed an engine: neither what its process had run before, nor an engine
        that dies of anything, as long as there is another one to show that."""
        again = death.isolated is not None and death.isolated.died_in is not None
        return again or (death.fresh and len(self._live) == 1)

    def _go_on(self, replica: Replica, what: str, again: bool) -> None:
        if not again or not self._has_work:
            replica.close()
            rest = "no rows are left to run" if again else "the other engines go on"
            self._notice(f"{self._who(replica)}{what}; {rest}")
            return
        self._notice(f"{self._who(replica)}{what}; starting a new one")
        self._restart(replica)

    def _restart(self, replica: Replica) -> None:
        self.restarts += 1
        with self._loading() if self.info is None else nullcontext():
            replica.restart(len(self._replicas) + self.restarts - 1)

    def _who(self, replica: Replica) -> str:
        return f"engine {replica.number}: " if len(self._replicas) > 1 else ""

    def _may_restart(self, replica: Replica) -> bool:
        return self._may_start and replica.may_restart

    @property
    def _may_start(self) -> bool:
        """Whether any process may still be started in the place of one that died."""
        if self._interrupts.pending is not None or self._finishing:
            return False
        return self._isolated_deaths < MOST_ISOLATED

    def _named(self, death: Death) -> str:
        """Say in words which rows were in work."""
        if death.isolated is not None and death.isolated.is_proof:
            return "it was computing one row alone, which had been answered before"
        how = "it was computing only" if death.isolated else "it was computing"
        return f"{how} {self._name_rows([request.key for request in death.in_work])}"

    def _told(self, death: Death) -> str:
        """Say in words what the engine was doing when it died."""
        if not death.loaded:
            return "it was loading the model" + (" again, after a restart" if death.restarts else "")
        if not death.in_work:
            return "it was computing no row"
        named = self._named(death)
        return (
            named
            if death.fruitless < 2
            else f"{named}; it died {death.fruitless} times in a row with little done in between"
        )
