"""The fake engine with answers from a file, for tests of result files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.core.request import Completion, Request, Tokens
from tests import fake_engine

SCRIPT = "ENGINE_SCRIPT"  # names a file with pairs: token ids within one prompt, and token ids of its answer


class ScriptedEngine(fake_engine.FakeEngine):
    """Answers prompts with the script, and others like the fake engine."""

    def _complete(self, request: Request) -> Completion:
        done, prompt = super()._complete(request), f" {' '.join(map(str, request.prompt))} "
        for told, answer in json.loads(Path(os.environ[SCRIPT]).read_text()):
            if f" {' '.join(map(str, told))} " in prompt:
                return replace(done, output=Tokens(np.array(answer, np.int32)))
        return done


class ScriptedWeights(fake_engine.FakeWeights):
    """The weights of a scripted engine."""

    def engine(self, *arguments: Any) -> fake_engine.BuiltFake:
        built = super().engine(*arguments)
        return replace(built, engine=ScriptedEngine(self.untimed, self.end, self.mortal))


def build(*arguments: Any) -> ScriptedWeights:
    """Return scripted weights, instead of `batchinfer.engine.load.build.load_weights`."""
    made = fake_engine.build(*arguments)
    return ScriptedWeights(made.load, made.untimed, made.end, made.mortal)
