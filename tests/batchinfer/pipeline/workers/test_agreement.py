"""All engines of a run use one choice by timing, even if the engine that made it dies."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.config import NO_CHOICE, Agreed, EngineConfig, EngineInfo, LoadConfig, Untimed
from batchinfer.filesystem.death_log import DeathLog
from batchinfer.filesystem.durable import FileOps
from batchinfer.pipeline.workers import replica
from batchinfer.pipeline.workers.agreement import Agreement
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.pipeline.workers.messages import WorkerSpec
from batchinfer.pipeline.workers.replica_pool import ReplicaPool
from tests import fake_engine

LOAD = LoadConfig(Path("no model"), "float32", "cpu")
CONFIG = EngineConfig(LOAD, 64, 64)


@dataclass
class Engine:
    """Stands in for a WorkerHandle."""

    number: int
    asks: bool = False
    decides: bool = False
    chosen: str | None = None
    told: str | None = None

    def answer(self, chosen: str | None) -> None:
        self.asks, self.decides, self.told = False, chosen is None, chosen

    def goes_on(self) -> None:
        """Continue loading until the engine needs the choice."""
        if self.decides:
            self.decides, self.chosen = False, f"as {self.number} chose"
        elif self.told is None and self.chosen is None:
            self.asks = True

    @property
    def uses(self) -> str | None:
        return self.told or self.chosen


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(("goes on", "dies")), st.integers(0, 3)), max_size=40),
)
def test_all_engines_use_one_choice(count: int, events: list[tuple[str, int]]) -> None:
    """Independent of the order in which engines ask, choose, die and restart."""
    agreement, engines, used = Agreement(), [Engine(n) for n in range(count)], set()
    for number, (event, which) in enumerate(events):
        if event == "dies":
            engines[which % count] = Engine(100 + number)
        else:
            engines[which % count].goes_on()
        agreement.answer_waiting(engines)
        used |= {one.uses for one in engines if one.uses is not None and not one.decides}
    assert used <= {agreement.chosen}
    for _ in range(3):
        for one in engines:
            one.goes_on()
            agreement.answer_waiting(engines)
    assert {one.uses for one in engines} == {agreement.chosen}, "no engine waits for ever"
    assert not any(one.asks or one.decides for one in engines)


class Asking(fake_engine.FakeWeights):
    """Chooses the number of its process. The first process that must choose may die or hang."""

    def engine(self, config: EngineConfig, streams: object, agreed: Agreed) -> fake_engine.BuiltFake:
        built = super().engine(config)
        return fake_engine.BuiltFake(built.engine, replace(built.info, ops=agreed(self._choose)))

    def _choose(self) -> str:
        tried, how = Path(os.environ["TRIED"]), os.environ["HOW"]
        first = not tried.exists()
        tried.touch()
        if first and how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if first and how == "hangs":
            time.sleep(600)
        if first and how == "raises":
            raise KeyError("an error of CUDA that no later call survives")
        return str(os.getpid())


def asking(load: LoadConfig, constraints: None, untimed: Untimed) -> Asking:
    return Asking(load, untimed, fake_engine.end_process, mortal=False)


@pytest.mark.parametrize(("how", "count"), [("chooses", 2), ("dies", 2), ("hangs", 2), ("raises", 1)])
def test_processes_agree_even_if_the_first_one_that_chooses_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, count: int
) -> None:
    """A choice that killed a process is not tried again."""
    monkeypatch.setattr(replica, "CHOOSING_S", 1.0)
    monkeypatch.setenv("TRIED", str(tmp_path / "tried"))
    monkeypatch.setenv("HOW", how)
    spec = WorkerSpec(LOAD, None, "tests.batchinfer.pipeline.workers.test_agreement:asking")
    log = DeathLog(tmp_path / "engine_errors.log", FileOps())
    with ReplicaPool([spec] * count, CONFIG, 1, Interrupts(), str, lambda _: None, log, nullcontext) as pool:
        infos: list[EngineInfo] = []
        until = time.monotonic() + 60
        while len(infos) < count and time.monotonic() < until:
            pool.receive(0.2)
            infos = pool.infos
        assert (tmp_path / "tried").exists()
        assert len(infos) >= min(2, count)
        assert len({info.ops for info in infos}) == 1
        assert infos[0].ops.isdigit() if how == "chooses" else infos[0].ops == NO_CHOICE
