"""Several engines run one plan: each row is answered once, at any speeds and with any deaths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from batchinfer.core.errors import BatchInferError, JobFileError, Mistake, OutOfMemory, Unavailable
from batchinfer.core.request import Completion, Request, RowError, Tokens
from batchinfer.core.samples import DraftSourceName, StepSample
from batchinfer.engine.config import EngineConfig, EngineInfo, LoadConfig
from batchinfer.filesystem.death_log import DeathLog
from batchinfer.filesystem.durable import FileOps
from batchinfer.pipeline.workers import feed, resource_wait
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.pipeline.workers.messages import (
    Add,
    Failed,
    Finish,
    HeartbeatMessage,
    Learn,
    Left,
    Ready,
    WorkDone,
    WorkerSpec,
)
from batchinfer.pipeline.workers.replica_pool import MOST_ISOLATED, ReplicaPool
from batchinfer.pipeline.workers.transport import Link
from batchinfer.plan.order.plan import PlanBatch
from tests.batchinfer.plan.order.test_backlog import rows
from tests.examples import examples
from tests.memory_transport import DiedError, MemoryLink, MemoryTransport

LOAD = LoadConfig(Path("model"), "float32", "cpu")
CONFIG = EngineConfig(LOAD, max_model_len=64, longest=64)
NO_LOG = Path("/dev/null/engine_errors.log")  # cannot be written
WINDOW = 50
AT_ONCE = 8
KILLED = (
    "the engine's process was killed (signal 9, SIGKILL), most likely by the kernel because memory ran out"
)


@dataclass
class Fate:
    """The course of one start of an engine."""

    speed: int = 1  # rows per poll
    dies_after: int | None = None  # rows
    fails_after: int | None = None  # rows; the failure is sent with the last answers
    loads_for: int = 0  # polls until it is ready
    refuses: BatchInferError | None = None  # raised during loading
    killers: frozenset[bytes] = frozenset()  # keys of rows that kill it


class Engines(MemoryTransport):
    """Starts workers with the given fates in order, and further ones with the fate `other`."""

    def __init__(self, fates: Sequence[Fate] = (), other: Fate | None = None) -> None:
        self.workers: list[Started] = []
        self._fates = [*fates], other or Fate()
        super().__init__(self._next)

    def _next(self, spec: WorkerSpec) -> Started:
        fates, other = self._fates
        number = len(self.workers)
        self.workers.append(Started(fates[number] if number < len(fates) else other))
        return self.workers[-1]


class NodeLink(MemoryLink):
    """A worker on a cluster. It waits for resources during a number of polls. When it dies, its node is lost."""

    def __init__(self, worker: Started, waits: int) -> None:
        super().__init__(worker)
        self.waits, self.looks = waits, 0

    @property
    def placed(self) -> bool:  # type: ignore[override]
        return self.waits <= 0

    @property
    def lost(self) -> bool:  # type: ignore[override]
        return bool(self.worker.died)  # type: ignore[attr-defined]

    def turn(self) -> bool:
        self.waits -= 1
        self.looks += 1
        assert self.placed or self.looks < MOST_LOOKS, (
            "the pool waits without end for an engine without resources"
        )
        return super().turn() if self.placed else False


class OnNodes(Engines):
    """Engines on a node each. `waits`: for each worker in the order of starts, the polls until it has a node; 0 if
    not listed.
    """

    wanted, wait_s = "node with 1 free CPU", 0.2

    def __init__(self, fates: Sequence[Fate], waits: Sequence[int]) -> None:
        super().__init__(fates)
        self._waits = [*waits]

    def start(self, spec: WorkerSpec) -> Link:
        self.started.append(NodeLink(self._next(spec), self._waits.pop(0) if self._waits else 0))
        return self.started[-1]


NEVER, MOST_LOOKS = 1 << 30, 100_000  # polls of an engine before it has a node


class Started:
    """A worker with a known fate. It counts how often its turn was announced."""

    def __init__(self, fate: Fate) -> None:
        self.fate = fate
        self.loaded = self.leaves = self.died = False
        self.queue: list[Request] = []
        self.pieces: list[list[Request]] = []
        self.most, self.finished, self.heard = 0, 0, 0
        self.learned: list[list[int]] = []

    def hear(self, message: object) -> None:
        if isinstance(message, Add):
            self.pieces.append(list(message.requests))
            self.queue += message.requests
            self.most = max(self.most, len(self.queue))
        elif isinstance(message, Learn):
            self.learned += [answer.tolist() for answer in message.answers]
        elif isinstance(message, Finish):
            self.leaves = True

    def turn(self) -> list[object]:
        self.heard += 1
        if self.leaves:  # running rows may finish
            last, self.queue = self.queue[:AT_ONCE], []
            return [*([self._answered(last)] if last else []), Left(10, 0.5, {0: [1, 2]})]
        if not self.loaded:
            return self._load()
        spent = self.fate.dies_after is not None and self.finished >= self.fate.dies_after
        if spent or any(request.key in self.fate.killers for request in self.queue[:AT_ONCE]):
            self.died = True
            raise DiedError
        done, self.queue = self.queue[: self.fate.speed], self.queue[self.fate.speed :]
        if not done:
            return []
        said: list[object] = [self._answered(done)]
        if self.fate.fails_after is not None and self.finished >= self.fate.fails_after:
            said.append(Failed(BatchInferError.exit_code, "it broke", "a traceback"))
        return said

    def _answered(self, done: Sequence[Request]) -> WorkDone:
        self.finished += len(done)
        running = min(AT_ONCE, len(self.queue))
        step = StepSample(0, *[0] * 11, running, len(self.queue) - running, *[0] * 5, None)  # type: ignore[arg-type]
        return WorkDone([Completion(r.key, Tokens(r.prompt[:1]), "stop") for r in done], [], [step])

    def _load(self) -> list[object]:
        if self.heard <= self.fate.loads_for:
            return [HeartbeatMessage()]
        problem, self.loaded = self.fate.refuses, True
        if problem is not None:
            return [Failed(problem.exit_code, str(problem), "a traceback")]
        return [Ready(EngineInfo("fake", "cpu", "float32", 1, AT_ONCE, 512, 16, 1, 0, 0))]


class Kept:
    def __init__(self, stop_after: int | None = None) -> None:
        self.answers: Counter[bytes] = Counter()
        self.errors: dict[bytes, RowError] = {}
        self.planned_rows = 0
        self.held = 0
        self.stop_after = stop_after

    def register(self, window: Any, requests: Sequence[Request]) -> None:
        self.planned_rows += len(requests)
        self.held = max(self.held, self.planned_rows - self.answers.total())

    def take(self, done: WorkDone) -> None:
        self.answers.update(completion.key for completion in done.completions)
        self.errors |= {one.key: one.error for one in done.completions if one.error is not None}

    def should_stop(self) -> bool:
        return self.stop_after is not None and self.answers.total() >= self.stop_after

    def tick(self) -> None:
        pass


@contextmanager
def pool_of(
    engines: Engines,
    replicas: int,
    requests: Sequence[Request],
    interrupts: Interrupts | None = None,
    drafts: tuple[DraftSourceName, ...] = (),
    log: Path = NO_LOG,
) -> Iterator[tuple[ReplicaPool, list[str]]]:
    notices: list[str] = []
    specs = [WorkerSpec(LOAD, None)] * replicas
    named = "rows {}".format
    with ReplicaPool(
        specs, replace(CONFIG, drafts=drafts), len(requests), interrupts or Interrupts(),
        lambda keys: named(len(keys)), notices.append, DeathLog(log, FileOps()),
        nullcontext, transport=engines,
    ) as pool:  # fmt: skip
        yield pool, notices


def run(
    pool: ReplicaPool,
    requests: Sequence[Request],
    sink: Kept,
    interrupts: Interrupts | None = None,
    plans: feed.Plans | None = None,
) -> None:
    feed.run_plan(batches_of(requests), pool, sink, interrupts or Interrupts(), lambda _: None, plans)


def batches_of(requests: Sequence[Request]) -> Iterator[tuple[PlanBatch, list[Request]]]:
    for at in range(0, len(requests), WINDOW):
        yield PlanBatch(pa.table({})), list(requests[at : at + WINDOW])


class LaterPlans:
    """Plans that each appear some polls after all earlier requests were answered."""

    def __init__(self, pool: ReplicaPool, later: Sequence[Sequence[Request]], turns: int) -> None:
        self._pool, self._later, self._turns, self._waited = pool, [*later], turns, 0
        self._looks = 0

    @property
    def will_plan_again(self) -> bool:
        return bool(self._later)

    def next(self, exhausted: bool, idle: bool) -> feed.Batches | None:
        self._looks += 1
        assert self._looks < 2_000, "the run does not end"
        self._waited += idle
        if not self._later or self._waited < self._turns:
            return None
        self._waited, requests = 0, self._later.pop(0)
        self._pool.expect(len(requests))
        return batches_of(requests)


def failure(pool: ReplicaPool, requests: Sequence[Request], sink: Kept) -> BatchInferError | None:
    try:
        run(pool, requests, sink)
    except BatchInferError as error:
        return error
    return None


@dataclass
class Ended:
    """The outcome of a run over a pool."""

    pool: ReplicaPool
    sink: Kept
    notices: list[str]
    failed: BatchInferError | None


def run_of(engines: Engines, replicas: int, requests: Sequence[Request], log: Path = NO_LOG) -> Ended:
    """Run the requests, and return the outcome, also of a failed run."""
    sink = Kept()
    with pool_of(engines, replicas, requests, log=log) as (pool, notices):
        failed = failure(pool, requests, sink)
    return Ended(pool, sink, notices, failed)


def whole_run(engines: Engines, replicas: int, requests: Sequence[Request], log: Path = NO_LOG) -> Ended:
    """Run the requests, and check that the run succeeds and answers each of them once."""
    ended = run_of(engines, replicas, requests, log)
    assert ended.failed is None
    assert ended.sink.answers == Counter(request.key for request in requests)
    return ended


GROUPS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 90), st.integers(1, 9)), max_size=10)
FATES = st.lists(
    st.builds(
        Fate,
        speed=st.integers(1, 20),
        dies_after=st.one_of(st.none(), st.integers(0, 60)),
        loads_for=st.integers(0, 5),
    ),
    max_size=6,
)


@settings(max_examples=examples(26, 80), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(groups=GROUPS, fates=FATES, replicas=st.integers(1, 4))
def test_every_row_is_answered_once_or_all_engines_are_dead(
    groups: list[tuple[int, int, int]], fates: list[Fate], replicas: int
) -> None:
    requests, engines = rows(*groups), Engines(fates)
    ended = run_of(engines, replicas, requests)
    failed, sink = ended.failed, ended.sink
    assert ended.pool.restarts == len(engines.workers) - replicas
    if failed is None:
        assert set(sink.answers) == {request.key for request in requests}
        died_alone = [one.pieces[0] for one in engines.workers if one.died and len(one.pieces) == 1]
        assert set(sink.errors) <= {piece[0].key for piece in died_alone if len(piece) == 1}
    else:
        assert KILLED in str(failed)
        assert failed.exit_code == 71
        assert not any(not one.died for one in engines.workers)
    assert set(sink.answers.values()) <= {1}
    assert all(link.closed for link in engines.started)


@settings(max_examples=examples(12, 300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    count=st.integers(0, 200),
    fates=st.lists(st.builds(Fate, st.integers(1, 20), dies_after=st.integers(0, 40)), max_size=6),
    waits=st.lists(st.one_of(st.just(NEVER), st.integers(0, 30)), max_size=8),
    replicas=st.integers(1, 3),
)
def test_engines_that_lose_their_nodes_are_started_again(
    count: int, fates: list[Fate], waits: list[int], replicas: int
) -> None:
    """All rows are answered once, unless no engine gets a node in time."""
    requests = rows(*[(1, 0, 10)] * count)
    engines = OnNodes(fates, waits)
    ended = run_of(engines, replicas, requests)
    assert ended.pool.restarts == len(engines.workers) - replicas
    assert set(ended.sink.answers.values()) <= {1}
    if ended.failed is None:
        assert set(ended.sink.answers) == {request.key for request in requests}
    else:
        assert "there was no node with 1 free CPU for 0 s (ray.wait_s)" in str(ended.failed)
        assert ended.failed.exit_code == 69
        assert all(link.lost or not link.placed for link in engines.started)
    assert not ended.sink.errors
    assert all(link.closed for link in engines.started)
    event(f"restarts: {min(ended.pool.restarts, 3)}, {ended.failed is None}")


def test_a_row_is_not_to_blame_for_lost_nodes_nor_is_a_new_engine() -> None:
    """The same row is running each time."""
    engines = OnNodes([Fate(dies_after=0)] * 8, [0, 1, 2] * 4)
    ended = whole_run(engines, 1, rows((1, 0, 10)))
    assert (len(engines.workers), ended.sink.errors) == (9, {})


@pytest.mark.parametrize("waits", [[0, 0, 20], [0, 20], [20, 0]])
def test_others_go_on_without_an_engine_that_waits(waits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the start. The waiting engine gets rows later. The watchdog ignores its wait."""
    monkeypatch.setattr("batchinfer.pipeline.workers.replica.STARTING_S", 0.0)
    engines = OnNodes([Fate(), Fate(dies_after=4 if len(waits) > 2 else None)], waits)
    ended = whole_run(engines, 2, rows(*[(1, 0, 10)] * 2000))
    assert [one.died for one in engines.workers] == ([False, True, False] if len(waits) > 2 else [False] * 2)
    assert all(one.finished > 40 for one in engines.workers if not one.died)
    assert not any("waiting up to" in line for line in ended.notices)


def test_an_engine_that_waits_keeps_no_run_from_ending() -> None:
    engines = OnNodes([Fate(), Fate(dies_after=4)], [0, 0, NEVER])
    whole_run(engines, 2, rows(*[(1, 0, 10)] * 40))
    engines, interrupts = OnNodes([Fate(dies_after=4)], [0, NEVER]), Interrupts()
    with pool_of(engines, 1, rows(*[(1, 0, 10)] * 40), interrupts) as (pool, _):
        sink = Kept()
        sink.tick = lambda: setattr(interrupts, "pending", 2 if len(engines.workers) > 1 else None)  # type: ignore[method-assign]
        run(pool, rows(*[(1, 0, 10)] * 40), sink, interrupts)
        assert (sink.answers.total(), pool.left) == (4, False)
        pool.finish(1.0)
        assert pool.left


def test_a_run_without_an_engine_reports_periodically_why_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_wait, "FIRST_S", 0.0)
    monkeypatch.setattr(resource_wait, "TELL_S", 0.05)
    ended = run_of(OnNodes([], [NEVER]), 1, rows((1, 0, 10)))
    assert ended.failed is not None
    assert 2 <= sum("for a node with 1 free CPU" in line for line in ended.notices) <= 4


@given(
    counts=st.lists(st.integers(0, 40), min_size=2, max_size=4),
    fates=st.lists(st.builds(Fate, st.integers(1, 20), dies_after=st.integers(0, 40)), max_size=6),
    replicas=st.integers(1, 3),
    turns=st.integers(1, 5),
)
def test_engines_that_die_between_plans_are_started_again(
    counts: list[int], fates: list[Fate], replicas: int, turns: int
) -> None:
    requests = rows(*[(1, 0, 10)] * sum(counts))
    plans = [requests[sum(counts[:at]) : sum(counts[: at + 1])] for at in range(len(counts))]
    engines, sink, failed = Engines(fates), Kept(), None
    with pool_of(engines, replicas, plans[0]) as (pool, _):
        try:
            run(pool, plans[0], sink, plans=LaterPlans(pool, plans[1:], turns))
        except BatchInferError as error:
            failed = error
    assert set(sink.answers.values()) <= {1}
    assert failed is not None or set(sink.answers) == {request.key for request in requests}


@pytest.mark.parametrize("speeds", [(1, 1), (1, 4), (4, 1, 1)])
def test_engines_of_different_speeds_end_together(speeds: tuple[int, ...]) -> None:
    engines = Engines([Fate(speed) for speed in speeds])
    whole_run(engines, len(speeds), rows(*[(1, 0, 10)] * 600))
    heard = [-(-one.finished // one.fate.speed) for one in engines.workers]
    # one engine may run one last step while the others are idle
    assert max(heard) <= 600 / sum(speeds) + AT_ONCE


def test_groups_go_to_one_engine_each() -> None:
    requests = rows(*[(7, 200, 4)] * 90)
    engines = Engines([Fate(3), Fate(5)])
    whole_run(engines, 2, requests)
    place = {r.key: at for at, one in enumerate(engines.workers) for piece in one.pieces for r in piece}
    for at in range(0, len(requests), 7):
        assert len({place[request.key] for request in requests[at : at + 7]}) == 1
    assert len(set(place.values())) == 2


def test_a_group_of_all_rows_is_divided_among_engines() -> None:
    """A common system prompt must not assign all rows to one engine."""
    engines = Engines([Fate(2), Fate(2)])
    whole_run(engines, 2, rows((400, 30, 20)))
    assert min(one.finished for one in engines.workers) > 150


@pytest.mark.parametrize("drafts", [("prompt",), ("prompt", "answers")])
def test_engines_receive_answers_of_others_if_drafts_use_them(
    drafts: tuple[DraftSourceName, ...],
) -> None:
    requests, engines, sink = rows(*[(1, 0, 3)] * 200), Engines([Fate(2), Fate(3)]), Kept()
    with pool_of(engines, 2, requests, drafts=drafts) as (pool, _):
        run(pool, requests, sink)
    one, other = engines.workers
    assert sink.answers.total() == 200 == one.finished + other.finished
    if "answers" not in drafts:
        assert not one.learned + other.learned
        return
    for learns, tells in ((one, other), (other, one)):
        said = [[int(r.prompt[0])] for piece in tells.pieces for r in piece]
        assert 0.8 * len(said) <= len(learns.learned) <= len(said), "only answers at the end may be missing"
        assert all(answer in said for answer in learns.learned)


def test_what_is_held_is_bounded() -> None:
    engines = Engines([Fate(3), Fate(5)])
    ended = whole_run(engines, 2, rows(*[(1, 0, 3)] * 6_000))
    assert max(one.most for one in engines.workers) <= 1024
    assert ended.sink.held <= 4096


def test_an_engine_that_dies_costs_its_rows_in_flight() -> None:
    """Other engines run these rows. The first engine dies twice."""
    engines = Engines([Fate(dies_after=5), Fate(), Fate(dies_after=7)])
    ended = whole_run(engines, 2, rows(*[(1, 0, 10)] * 300))
    assert ended.pool.restarts == 2
    assert ended.pool.peak_rss == 20  # of the last start of each engine
    assert ended.pool.expert_tokens == {0: [2, 4]}
    assert ended.notices == [
        f"engine 0: {KILLED}; it was computing rows 8; starting a new one",
        f"engine 0: {KILLED}; it was computing rows 8; "
        "it died 2 times in a row with little done in between; starting a new one",
    ]


def test_an_engine_that_dies_with_nothing_to_do_accuses_no_row() -> None:
    engines = Engines([Fate(), Fate(dies_after=0)])
    ended = whole_run(engines, 2, rows((1, 0, 10)))
    assert ended.notices == [f"engine 1: {KILLED}; it was computing no row; no rows are left to run"]


def test_an_engine_that_fails_as_it_answers_loses_no_answer() -> None:
    """The answers are taken first. The failure is read at the next poll."""
    engines = Engines([Fate(speed=3, fails_after=3)])
    ended = whole_run(engines, 1, rows(*[(1, 0, 10)] * 20))
    assert (ended.pool.restarts, engines.workers[0].finished) == (1, 3)
    (notice,) = ended.notices
    assert "it broke; it was computing rows 8; its traceback " in notice
    assert notice.endswith("; starting a new one")


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(("first", "count"), [(0, 1), (7, 1), (99, 1), (0, 3), (40, 4), (95, 5), (50, 12)])
def test_rows_that_kill_engines_cost_only_themselves(replicas: int, first: int, count: int) -> None:
    """A plan groups similar rows: one cause may kill several engines in a row."""
    requests = rows(*[(1, 0, 10)] * 100)
    killers = frozenset(request.key for request in requests[first : first + count])
    engines = Engines(other=Fate(speed=3, loads_for=3 * (replicas % 2), killers=killers))
    ended = whole_run(engines, replicas, requests)
    found = {(key, error.code, error.retryable) for key, error in ended.sink.errors.items()}
    assert found == {(key, "engine_died", True) for key in killers}
    if count == 1:
        most = 1 + 4 + 1  # eight rows, three halves of them, one row and that row again
        assert ended.pool.restarts <= most
        assert "error row (engine_died): rows 1; an engine that computed nothing else died" in ended.notices


def test_a_run_ends_when_the_last_rows_kill_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows were requested while the engines were full, and afterwards no engine was left."""
    monkeypatch.setitem(globals(), "AT_ONCE", 2)
    requests = rows(*[(1, 0, 10)] * 4)
    killers = frozenset(request.key for request in requests[1:])
    other = Fate(speed=2, killers=killers)
    engines, sink = Engines([Fate(speed=2, loads_for=1, killers=killers)], other=other), Kept()
    with pool_of(engines, 2, requests) as (pool, _), monkeypatch.context() as patch:
        heard, receive = Counter[str](), pool.receive

        def limited(timeout_s: float) -> list[WorkDone]:
            heard["times"] += 1
            assert heard["times"] < 200, "the run does not end"
            return receive(timeout_s)

        patch.setattr(pool, "receive", limited)
        run(pool, requests, sink)
    assert set(sink.errors) == killers
    assert len(sink.answers) == 4


def test_an_engine_that_cannot_repeat_an_answered_row_is_given_up() -> None:
    """No row is blamed for these deaths."""
    spoilt = Fate(dies_after=0)
    engines = Engines([Fate(dies_after=8), *[spoilt] * 9])
    ended = run_of(engines, 1, rows(*[(1, 0, 10)] * 12))
    assert "it was computing one row alone, which had been answered before; it died 4 times in a row" in str(
        ended.failed
    )
    assert (len(ended.sink.answers), len(ended.sink.errors), len(engines.workers)) == (8, 0, 5)
    assert "one row alone, which had been answered before; it died 3 times in a row" in ended.notices[-1]


@settings(max_examples=examples(20, 60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    count=st.integers(1, 400),
    places=st.sets(st.integers(0, 399), max_size=5),
    replicas=st.integers(1, 3),
    speed=st.integers(1, AT_ONCE),
)
def test_rows_that_kill_engines_are_found_or_the_engine_is_given_up(
    count: int, places: set[int], replicas: int, speed: int
) -> None:
    requests = rows(*[(1, 0, 10)] * count)
    killers = frozenset(requests[place].key for place in places if place < count)
    ended = run_of(Engines(other=Fate(speed=speed, killers=killers)), replicas, requests)
    failed, sink = ended.failed, ended.sink
    assert ended.pool.restarts <= 8 * len(killers)
    assert set(sink.errors) <= killers
    assert max(sink.answers.values(), default=1) == 1
    if failed is None:
        assert set(sink.errors) == killers
        assert len(sink.answers) == count
    else:
        assert "in a row with little done in between" in str(failed)
        assert len(killers) > 1, "one row never ends a job"


@pytest.mark.parametrize("count", [2, 8, 100])
def test_an_engine_that_dies_of_every_row_blames_none(count: int) -> None:
    engines = Engines(other=Fate(dies_after=0))
    ended = run_of(engines, 1, rows(*[(1, 0, 10)] * count))
    assert "died 4 times in a row" in str(ended.failed)
    assert (len(engines.workers), len(ended.sink.answers), len(ended.notices)) == (4, 0, 3)


def test_the_run_continues_without_an_engine_whose_device_is_full() -> None:
    engines = Engines([Fate(refuses=OutOfMemory("no room")), Fate(loads_for=3)])
    ended = whole_run(engines, 2, rows(*[(1, 0, 10)] * 30))
    assert ended.notices == ["engine 0: no room; the other engines go on"]


@pytest.mark.parametrize(
    ("problems", "code"),
    [
        ([Unavailable("no device"), Unavailable("no device")], 69),
        ([JobFileError("model", [Mistake("model", "unknown")])], 78),
    ],
    ids=["of-each", "of-the-checkpoint"],
)
def test_what_all_engines_refuse_ends_the_run(problems: list[BatchInferError], code: int) -> None:
    engines = Engines([Fate(refuses=problem) for problem in problems])
    ended = run_of(engines, 2, rows((3, 0, 3)))
    assert ended.failed is not None
    assert (ended.failed.exit_code, ended.pool.restarts) == (code, 0)


def test_a_traceback_is_logged_or_the_run_says_why_not(tmp_path: Path) -> None:
    """A log that has grown too large is restarted."""
    log, fates = tmp_path / "engine_errors.log", [Fate(fails_after=20), Fate(refuses=BatchInferError("no"))]
    for size in (2_000_000, 0):
        log.write_bytes(size * b"x")
        notices = whole_run(Engines(fates), 2, rows(*[(1, 0, 10)] * 90), log).notices
        assert len([line for line in notices if f"its traceback is in {log}" in line]) == 2
        entries = log.read_text().split("\n\n")
        assert [entry.splitlines()[-1] for entry in entries[:-1]] == ["a traceback"] * 2
        assert log.stat().st_size < 1000
    (line, _) = whole_run(Engines(fates), 2, rows(*[(1, 0, 10)] * 90)).notices
    assert "its traceback could not be written: /dev/null/engine_errors.log.tmp: cannot " in line


def test_no_row_is_submitted_before_all_engines_have_loaded() -> None:
    """Otherwise the first engine would compute all rows of a small job."""
    engines = Engines([Fate(), Fate(loads_for=40)])
    whole_run(engines, 2, rows(*[(1, 0, 10)] * 10))
    assert [one.finished for one in engines.workers] == [5, 5]


def test_after_a_signal_no_engine_starts_and_all_are_notified() -> None:
    interrupts = Interrupts()
    engines = Engines([Fate(dies_after=4), Fate()])
    requests, sink = rows(*[(1, 0, 10)] * 200), Kept()
    sink.take = lambda done: (Kept.take(sink, done), setattr(interrupts, "pending", 15))[0]  # type: ignore[method-assign]
    with pool_of(engines, 2, requests, interrupts) as (pool, _):
        run(pool, requests, sink, interrupts)
        assert pool.left
        assert pool.restarts == 0
    assert len(engines.workers) == 2
    assert 0 < sink.answers.total() < 200
    assert sink.answers.total() == sum(one.finished for one in engines.workers), "last answers count, too"


def test_when_one_process_cannot_be_started_the_others_are_ended() -> None:
    class Scarce(Engines):
        def start(self, spec: WorkerSpec) -> Link:
            if len(self.started) == 2:
                raise OSError("too many processes")
            return super().start(spec)

    engines = Scarce()
    with pytest.raises(OSError, match="too many"), pool_of(engines, 3, []):
        pass
    assert [link.closed for link in engines.started] == [True, True]


def test_an_engine_that_dies_after_each_row_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers rows between its deaths. Loading its model again and again would take all night."""
    monkeypatch.setitem(globals(), "AT_ONCE", 64)
    engines = Engines(other=Fate(dies_after=1))
    ended = run_of(engines, 1, rows(*[(1, 0, 10)] * 64))
    assert ended.failed is not None
    assert (len(engines.workers), len(ended.sink.errors)) == (1 + MOST_ISOLATED, 0)


def test_rows_that_a_broken_engine_accuses_run_on_other_engines() -> None:
    """Rows die in it one by one. The other engine has finished its rows, and answers them."""
    broken = Fate(dies_after=0)
    engines = Engines([broken, Fate(loads_for=0, speed=2), *[broken] * 9])
    assert not whole_run(engines, 2, rows(*[(1, 0, 10)] * 12)).sink.errors


@pytest.mark.parametrize("finishing", [False, True])
def test_a_new_worker_that_still_loads_is_not_waited_for(finishing: bool) -> None:
    engines = Engines([Fate(dies_after=0), Fate(loads_for=3)])
    with pool_of(engines, 1, rows((1, 0, 10))) as (pool, _):
        pool.receive(0.1)  # it is ready
        pool.submit(rows((1, 0, 10)))
        pool.receive(0.1)
        assert [len(worker.pieces) for worker in engines.workers] == [1, 0]
        if finishing:
            pool.finish(1.0)
        assert engines.started[0].closed
        assert (engines.started[1].closed, pool.left) == (finishing, finishing)
