"""Starts the workers while the input is read. They load weights as soon as an answer is missing."""

from __future__ import annotations

from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.workers.interrupts import CONTINUES
from batchinfer.pipeline.workers.worker_specs import worker_specs
from batchinfer.plan.forecast.room import fits
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.answers.missing_keys import MissingKeys, key_batches
from batchinfer.store.index.index import Index
from batchinfer.store.results.planned_work import is_another_run_computing

_MANY = 200  # parts of a store; reading the keys of 200 parts takes 0.2 s


class EarlyLoading:
    """Lets engines load their weights while the input is read, as soon as a row is found whose answer is not stored.

    With several engines, it waits until there is a missing answer for each engine. If another run uses the same store,
    engines do not load early, because this run may have to wait for the other one.
    """

    def __init__(self, run: OpenRun, store: CompletionStore) -> None:
        self._run, self._store = run, store
        self._lacking: MissingKeys | None = None  # set when the first keys are read
        self._can_begin: bool | None = None  # whether rows may run before all are read; None: not checked yet
        # Whether it still looks for missing keys. With a draft model it never does: that model needs the memory first.
        self._waits = run.setup.first_draft_model is None and not is_another_run_computing(store.path)
        if self._waits and run.setup.setting.placement.replicas == 1:
            self._open()

    def look_for_missing(self, keys: bytes, last: bool = False) -> None:
        """Look up the work keys of new rows in the store. Engines load once enough answers are missing.

        Args:
            keys: The work keys, concatenated, 32 bytes each.
            last: True if few or no rows follow. Then a large store is not searched, because loading early would save
                little.

        Raises:
            BatchInferError: A worker cannot load, and no other engine can.
        """
        if self._waits and keys and not (last and self._is_large()):
            missing = self._watched()
            missing.add(keys)
            if missing.has_enough:
                self._load()
        self._run.launch.receive_messages()

    def _is_large(self) -> bool:
        return self._lacking is None and len(self._store.parts()) > _MANY

    def look_in_index(self, index: Index) -> None:
        """Look up all work keys of an index in the store, until enough answers are missing. Then engines load.

        Args:
            index: The index of all rows.
        """
        for keys in key_batches([*index.index_parts, *index.content_free_parts]):
            if not self._waits:
                return
            self.look_for_missing(keys)

    def can_run_waves(self, left_s: float) -> bool:
        """Return True if engines have loaded and should run rows in waves instead of waiting for the whole input.

        Their KV cache must have room for the longest row that the job allows, because the rows are not known yet.

        Args:
            left_s: Estimated seconds until the whole input is read.
        """
        if self._waits or not self._run.launch.loaded or left_s < self._run.options.waves_from_s:
            return False
        if self._can_begin is None:
            self._can_begin = not self._run.options.retry_errors and fits(self._run.job, self._run.setup)
        return self._can_begin

    def _watched(self) -> MissingKeys:
        if self._lacking is None:
            engines, again = self._run.setup.setting.placement.replicas, self._run.options.retry_errors
            # One missing answer per engine: the number of engines determines each engine's share of the machine
            self._lacking = MissingKeys(self._store.parts(), engines, again)
        return self._lacking

    def _load(self) -> None:
        self._waits, self._lacking = False, None
        self._open()
        self._run.launch.load()

    def _open(self) -> None:
        run = self._run
        with run.interrupts.deferred():  # a signal must not leave a started process unrecorded
            run.launch.open(worker_specs(run.job, run.setup.setting, run.options.engine))
        run.interrupts.raise_pending(CONTINUES)
