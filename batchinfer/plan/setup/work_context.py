"""The context of a job's work keys, as a run and a plan of the job compute it."""

from __future__ import annotations

from batchinfer.core.hub import ADAPTER_WEIGHTS
from batchinfer.data.columns.answer_check import CHECK_VERSION
from batchinfer.data.storage.remembered import read_strings, write_strings
from batchinfer.data.storage.state import StateFolder
from batchinfer.models.files.fingerprint import file_sha256
from batchinfer.plan.setup.job_setup import Setup


def work_context(setup: Setup, state: StateFolder, remember: bool = False) -> bytes:
    """Return the digest of all but the rows that decides an answer: the first part of every work key.

    Weight files whose digest the state does not know are hashed; `remember`: the state is to know it afterwards.
    """
    digests = read_strings(state.fingerprints)
    before = dict(digests)
    model = setup.checkpoint.fingerprint(digests)
    for _, folder in setup.setting.adapters:
        file_sha256(folder / ADAPTER_WEIGHTS, digests, lambda _: None)
    if remember and digests != before:
        with state.exclusively():
            write_strings(state.fingerprints, digests, state.ops)
    checked = 0 if setup.columns is None else CHECK_VERSION
    kind, tokenizer = setup.output.name, setup.tokenizer.fingerprint
    return setup.setting.context(setup.checkpoint, model, tokenizer, columns=checked, output=kind)
