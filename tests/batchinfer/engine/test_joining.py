"""Ranks that speak when they meet: each that sends meets one that receives, and what fails says what helps."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import DistBackendError

from batchinfer.core.errors import Unavailable
from batchinfer.engine.ranks import joining
from batchinfer.engine.ranks.joining import _speak
from batchinfer.engine.ranks.seat import Division
from batchinfer.models.parallel.group import Alone
from tests.thread_ranks import ThreadGroup, groups_of, of_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 3), (2, 2)])
def test_who_sends_tokens_has_sent_a_word(tensor: int, stages: int) -> None:
    division, words = Division(tensor, stages), dict[tuple[int, int], int]()

    class Counting(ThreadGroup):
        def send(self, x: torch.Tensor, to: int) -> None:
            words[self.rank, to] = words.get((self.rank, to), 0) + 1
            super().send(x, to)

    def meet(group: ThreadGroup) -> None:
        everyone = Counting(group.rank, group.meeting)
        _speak(group.rank, division, (everyone, Alone()), CPU)

    of_ranks(groups_of(division.ranks), meet)
    first = [rank for rank in range(1, division.ranks) if division.stage(rank) == 0]
    assert words == ({(0, rank): 1 for rank in first} if stages > 1 else {})


def test_gpus_of_several_kinds_do_not_form_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {0: [132, 9, 0], 1: [114, 9, 0]}

    def meet(group: ThreadGroup) -> str:
        with pytest.raises(Unavailable, match=r"several kinds .*\[114, 9, 0\]") as found:
            _speak(group.rank, Division(2, 1), (group, Alone()), torch.device(CPU.type, group.rank))
        return str(found.value)

    monkeypatch.setattr(joining, "_kind", lambda device: torch.tensor(kinds[device.index]))
    monkeypatch.setattr(torch, "ones", lambda *size, **named: torch.zeros(1, dtype=torch.int64))
    assert len({*of_ranks(groups_of(2), meet)}) == 1


def test_gpus_that_cannot_speak_say_what_helps() -> None:
    class Broken(Alone):
        def all_gather(self, x: torch.Tensor) -> torch.Tensor:
            raise DistBackendError("NCCL error: unhandled system error")

    with pytest.raises(Unavailable, match=r"unhandled system error; a container needs .*--shm-size"):
        _speak(0, Division(2, 1), (Broken(), Alone()), CPU)
