"""The engines' processes are started beside the reading of the input; they load once there is something to compute."""

from __future__ import annotations

from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.workers.interrupts import CONTINUES
from batchinfer.pipeline.workers.places import worker_specs
from batchinfer.plan.forecast.room import fits
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.answers.missing_keys import MissingKeys, key_batches
from batchinfer.store.index.index import Index
from batchinfer.store.results.planned_work import is_another_run_computing

_MANY = 200  # parts of a store, of which the keys are read in 0.2 s


class EarlyLoading:
    """Watches the keys that are read, for one that the store lacks. What the engines get of the machine depends on
    their number, so as many as there are engines have to be found where there are several.

    Nothing is started early while another run works on answers of the same store: this one may have to wait for them.
    """

    def __init__(self, run: OpenRun, store: CompletionStore) -> None:
        self._run, self._store = run, store
        self._lacking: MissingKeys | None = None  # once the first keys are read
        self._begins: bool | None = None  # whether rows may run before all are read; None: not known yet
        # A draft model has the memory first
        self._waits = run.setup.drafts is None and not is_another_run_computing(store.path)  # for keys
        if self._waits and run.setup.setting.placement.replicas == 1:
            self._open()

    def read(self, keys: bytes, last: bool = False) -> None:
        """Take the keys of rows that were read, 32 bytes each; `last`: there are no more, or few. Raises what keeps a
        single engine from loading."""
        if self._waits and keys and not (last and self._is_large()):
            missing = self._watched()
            missing.add(keys)
            if missing.has_enough:
                self._load()
        self._run.launch.look()

    def _is_large(self) -> bool:
        """Whether a plan, which comes once all rows are read, says as soon what is lacking as the store's keys do that
        nobody has looked at yet."""
        return self._lacking is None and len(self._store.parts()) > _MANY

    def found(self, index: Index) -> None:
        """Look through an index that an earlier run has left: then no row is read."""
        for keys in key_batches([*index.index_parts, *index.content_free_parts]):
            if not self._waits:
                return
            self.read(keys)

    def waits_for(self, left_s: float) -> bool:
        """Whether engines have loaded, and would wait for too long until the rest of the input is read, `left_s`
        seconds from now: where they can be made ready for any row of the job, they run what was read already."""
        if self._waits or not self._run.launch.loaded or left_s < self._run.options.waves_from_s:
            return False
        if self._begins is None:
            self._begins = not self._run.options.retry_errors and fits(self._run.job, self._run.setup)
        return self._begins

    def _watched(self) -> MissingKeys:
        if self._lacking is None:
            engines, again = self._run.setup.setting.placement.replicas, self._run.options.retry_errors
            self._lacking = MissingKeys(self._store.parts(), engines, again)
        return self._lacking

    def _load(self) -> None:
        self._waits, self._lacking = False, None
        self._open()
        self._run.launch.load()

    def _open(self) -> None:
        run = self._run
        with run.interrupts.deferred():  # or a process might be started that nobody knows of
            run.launch.open(worker_specs(run.job, run.setup.setting, run.options.engine))
        run.interrupts.raise_pending(CONTINUES)
