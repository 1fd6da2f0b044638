"""Keeps prepared rows for the next run, and reuses the rows that the last run kept.

Besides segments that are reused whole, a run reuses unchanged files, identified by size, times and inode, and chunks of
changed files, identified by a digest of their bytes and position. Tokens are not kept: a chunk is prepared again if the
store has no answer for one of its rows.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from batchinfer.core.errors import StorageError
from batchinfer.core.sampling import SamplingParams
from batchinfer.core.version import __version__
from batchinfer.filesystem.digests import SETTLED_S
from batchinfer.filesystem.durable import FileOps
from batchinfer.input.chunk import InputChunk
from batchinfer.input.input_file import InputFile
from batchinfer.input.prompts.prepared.rows import PreparedPrompts, PreparedRows
from batchinfer.input.prompts.render_pool import ReadyChunk
from batchinfer.input.prompts.render_reply import BadReply, parse_reply, serialize_reply
from batchinfer.input.prompts.render_worker import RenderSpec
from batchinfer.input.reader import Reader
from batchinfer.store.index.reused_rows import NO_REUSED_ROWS, ReusedRows, reuse_segments
from batchinfer.store.kept.chunks import KeptChunk, KeptWriter, chunk_digest, kept_chunks
from batchinfer.store.kept.facts import SegmentFacts
from batchinfer.store.kept.files import (
    CHUNKS,
    FACTS,
    REPLIES,
    KeptFile,
    KeptMarker,
    KeptSegment,
    open_segment,
    read_marker,
    read_open_file,
    replace_marker,
)
from batchinfer.store.kept.finished import FinishedSegment
from batchinfer.store.kept.segments import SegmentBoundaries, count_reused, count_unchanged

_NO_TOKENS = np.zeros(0, np.int32)


def _no_finished(_: str, __: Sequence[str]) -> Sequence[FinishedSegment]:
    return ()


@dataclass(frozen=True, slots=True)
class KeptIndexReuse:
    """The kept index of a job (prepared rows of its last run), and how a run uses it.

    Attributes:
        kept: The folder of the kept index.
        answered: Returns True if the store has answers for all of the given rows, so that they need no
            tokens.
        notice: Called with the reason if kept rows are not used.
        fresh: True to read all input files, and not to trust cached digests.
        finished: Returns the leading segments whose index rows and answers can be reused, given a hash of the
            settings and the folders of all segments.
    """

    kept: Path
    answered: Callable[[PreparedPrompts], bool]
    notice: Callable[[str], None]
    fresh: bool = False
    finished: Callable[[str, Sequence[str]], Sequence[FinishedSegment]] = _no_finished


@dataclass(frozen=True, slots=True)
class RowsToKeep:
    """Describes the prepared rows that a run keeps for the next run: the input, and all settings that matter.

    Attributes:
        spec: How rows are prepared.
        material: Further settings that determine a prepared row, as text.
        shape: Settings that determine the index rows made from a prepared row, as text.
        files: The input files.
        taking: The folders for index parts and passthrough parts of reused segments. None: no segment is
            reused.
    """

    spec: RenderSpec
    material: str
    shape: str
    files: Sequence[InputFile]
    taking: tuple[Path, Path] | None

    @property
    def identity(self) -> str:
        """Return a hash of all settings that determine how an input row is prepared."""
        fields = self.spec.fields
        watched = None if fields.watched is None else sorted(fields.watched)
        versions = [__version__, *map(version, ("tokenizers", "jinja2"))]
        plan = self.spec.plan
        value = (
            versions,
            self.material,
            plan.mode,
            plan.values_are_text,
            replace(fields, watched=None),
            watched,
        )
        return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def finished_identity(self) -> str:
        """Return a hash of all settings that determine the index rows of finished segments."""
        return hashlib.sha256(f"{self.identity} {self.shape}".encode("utf-8", "surrogatepass")).hexdigest()


@contextmanager
def kept_index(keeping: KeptIndexReuse, asked: RowsToKeep, ops: FileOps) -> Iterator[KeptIndex]:
    """Open the kept index of the last run, if it has the same settings, and begin to write a new one.

    If the last one cannot be read, a notice is given and all rows are prepared again.

    Args:
        keeping: The kept index, and how it is used.
        asked: The rows of this run.
        ops: File operations.

    Raises:
        StorageError: A file cannot be written.
    """
    with ExitStack() as stack:
        last, reused, segments = None, NO_REUSED_ROWS, tuple[KeptSegment, ...]()
        try:
            marker = read_marker(keeping.kept)
            if marker is not None and marker.identity == asked.identity:
                opening = (open_segment(keeping.kept, one, fresh=keeping.fresh) for one in marker.segments)
                files = [stack.enter_context(one) for one in opening]
                first = _reuse_leading(keeping, asked, marker, files, ops)
                number = len(first.segments)
                last = _Last(keeping, asked.spec, [*zip(marker.segments, files, strict=True)][number:])
                reused, segments = first, marker.segments[:number]
        except (ValueError, KeyError, TypeError, OSError) as error:
            keeping.notice(
                f"the kept index of the last run cannot be used, so all rows are read again: {error}"
            )
        index = KeptIndex(keeping.kept, asked, last, reused, segments, ops)
        stack.callback(index.close)
        yield index


def _reuse_leading(
    keeping: KeptIndexReuse,
    asked: RowsToKeep,
    marker: KeptMarker,
    files: Sequence[Mapping[str, int]],
    ops: FileOps,
) -> ReusedRows:
    if keeping.fresh or asked.taking is None:
        return NO_REUSED_ROWS
    facts = [SegmentFacts.from_json(read_open_file(one[FACTS])) for one in files]
    known = keeping.finished(asked.finished_identity, marker.folders)
    known = known[: count_unchanged(marker.segments, facts, asked.files)]
    sizes = [sum(file.file.size for file in one.files) for one in marker.segments[: len(known)]]
    rest = sum(file.size for file in asked.files) - sum(sizes)
    chosen = [*zip(known, facts, strict=False)][: count_reused(sizes, rest)]
    return reuse_segments(keeping.kept, chosen, *asked.taking, ops, keeping.notice)


class _Last:
    def __init__(
        self,
        keeping: KeptIndexReuse,
        spec: RenderSpec,
        segments: Sequence[tuple[KeptSegment, Mapping[str, int]]],
    ) -> None:
        self._answered, self._spec = keeping.answered, spec
        self._by_digest: dict[str, KeptChunk] = {}
        self._of: dict[str, tuple[KeptFile, Sequence[KeptChunk]]] = {}
        for segment, own in segments:
            chunks = kept_chunks(read_open_file(own[CHUNKS]), own[REPLIES])
            self._by_digest |= {one.digest: one for one in chunks if one.digest}
            for one in () if keeping.fresh else segment.files:
                self._of[one.file.path] = one, chunks[one.first_chunk : one.first_chunk + one.chunks]

    def rows(self, chunk: KeptChunk) -> PreparedRows:
        spec = self._spec
        limits = spec.limits.vocab_size, len(spec.plan.ladder)
        try:
            return parse_reply(chunk.read(), spec.fields, *limits, reused=True)
        except BadReply as error:
            raise StorageError(
                f"the kept index changed while it was read: {error}; run the job again"
            ) from error

    def find(self, digest: str) -> KeptChunk | None:
        found = self._by_digest.get(digest)
        return found if found is not None and self._is_answered(found) else None

    def unchanged(self, file: InputFile) -> tuple[str, Sequence[KeptChunk]] | None:
        # A file must be read if it has changed, or a row has no answer
        known, chunks = self._of.get(file.path, (None, ()))
        if known is None or known.file != file or not file.inode:
            return None
        return (known.sha256, chunks) if all(map(self._is_answered, chunks)) else None

    def _is_answered(self, chunk: KeptChunk) -> bool:
        return bool(chunk.digest) and self._answered(self.rows(chunk).prompts)


@dataclass(frozen=True, slots=True)
class _Written:
    segment: KeptSegment
    facts: SegmentFacts
    files: range
    first_chunk: int


class KeptIndex:
    """Writes the kept index of a run, and reuses the kept index of the last run.

    It has prepared rows without their tokens, so the next run need not read unchanged input files. Its
    segments hold the rows of consecutive input files.
    """

    def __init__(
        self,
        kept: Path,
        asked: RowsToKeep,
        last: _Last | None,
        reused: ReusedRows,
        segments: tuple[KeptSegment, ...],
        ops: FileOps,
    ) -> None:
        """Begin to write the kept index of this run.

        Args:
            kept: The folder of the job's kept index.
            asked: The rows of this run.
            last: The kept index of the last run. None: it cannot be used.
            reused: The rows of reused segments.
            segments: The reused segments. They come first.
            ops: File operations.
        """
        self.asked, self.reused = asked, reused
        self._kept, self._last, self._ops = kept, last, ops
        self._reused_segments = segments
        self._began = time.time()
        # The digests of chunks that were yielded but not appended, with the kept chunk if it is reused
        self._given: deque[tuple[str, KeptChunk | None]] = deque()
        self._files: list[tuple[InputFile, int]] = []  # each file with the number of its first chunk
        self._count = self._appended = 0  # chunks
        self._boundaries = SegmentBoundaries(sum(file.size for file in asked.files))
        self._writer: KeptWriter | None = None  # of the current segment, once it has a row
        self._facts = SegmentFacts()
        self._first_chunk = self._first_file = 0  # of the current segment
        self._written: list[_Written] = []
        # The number of the first chunk and of the first file of each following segment
        self._begins: deque[tuple[int, int]] = deque()

    def close(self) -> None:
        """Discard the files of the current segment, if it is unfinished."""
        if self._writer is not None:
            self._writer.close()

    def chunks(self, reader: Reader, columns: Sequence[str] | None, typed: bool) -> Iterator[InputChunk]:
        """Yield the chunks of all input files, except files of reused segments.

        Chunks that the last run kept, and whose rows have answers, come with their prepared rows.

        Args:
            reader: Reads the input.
            columns: The columns to decode, or None for all.
            typed: True if passthrough columns take their types and values from the file. Unchanged files are
                then read as well.
        """
        reader.complete, reader_sha256 = True, reader.sha256
        reused = [one for segment in self._reused_segments for one in segment.files]
        reader_sha256.update({one.file.path: one.sha256 for one in reused})
        before = sum(one.file.size for one in reused)
        for file in reader.files[len(reused) :]:
            if self._boundaries.is_before(file.size):
                self._begins.append((self._count, len(self._files)))
            self._files.append((file, self._count))
            known = None if self._last is None or typed else self._last.unchanged(file)
            if known is not None:
                reader_sha256[file.path], chunks = known
                yield from self._replayed(file, before, chunks)
            else:
                one = replace(reader, files=(file,))
                for chunk in one.chunks(columns):
                    yield self._looked_up(replace(chunk, bytes_read=before + chunk.bytes_read))
                reader.complete = reader.complete and one.complete
            before += file.size

    def _replayed(self, file: InputFile, before: int, chunks: Sequence[KeptChunk]) -> Iterator[InputChunk]:
        rows, done = sum(chunk.rows for chunk in chunks), 0
        for chunk in chunks:
            done += chunk.rows
            yield self._ready(chunk, file.name, before + file.size * done // max(1, rows))

    def _looked_up(self, chunk: InputChunk) -> InputChunk:
        digest = chunk_digest(chunk)
        known = None if self._last is None else self._last.find(digest)
        if known is not None:
            ready = self._ready(known, chunk.file, chunk.bytes_read)
            return replace(ready, first_row=chunk.first_row, table=chunk.table)
        self._give(digest, None)
        return chunk

    def _ready(self, known: KeptChunk, file: str, bytes_read: int) -> ReadyChunk:
        assert self._last is not None, "there is no kept index"
        rows = self._last.rows(known)
        self._give(known.digest, known)
        return ReadyChunk(file=file, bytes_read=bytes_read, most_rows=known.rows, prepared=rows)

    def _give(self, digest: str, known: KeptChunk | None) -> None:
        self._given.append((digest, known))
        self._count += 1

    def finish_segment_if_due(self) -> bool:
        """Finish the current segment of the kept index if the next chunk begins a new one. Return True if so.

        Raises StorageError.
        """
        if not self._begins or self._begins[0][0] > self._appended:
            return False
        chunk, file = self._begins.popleft()
        self._finish_segment(file)
        self._first_chunk = chunk
        return True

    def _finish_segment(self, end: int) -> None:
        files = range(self._first_file, end)
        self._first_file = end
        if self._writer is not None:
            self._facts.files = len(files)
            digests = self._writer.finish(self._facts)
            segment = KeptSegment(self._writer.folder, digests, ())
            self._written.append(_Written(segment, self._facts, files, self._first_chunk))
        self._writer, self._facts = None, SegmentFacts()

    def append(self, rows: PreparedRows) -> None:
        """Write the prepared rows of the next chunk to the kept index. Raises StorageError.

        Call it for each chunk of `chunks`, in the same order.
        """
        if self._writer is None:
            self._writer = KeptWriter(self._kept, self._ops)
        digest, known = self._given.popleft()
        self._appended += 1
        params = [SamplingParams.from_json(text) for text in rows.prompts.params]
        self._note_facts(rows, params)
        if any(error.error_class == "resource" for error in rows.prompts.errors.values()):
            digest, self._facts.plain = "", False  # the error depends on resources; the next run may succeed
        if known is None and not _can_be_replayed(rows.prompts, params):
            digest = ""
        reply = known.read() if known is not None else _without_tokens(rows) if digest else b""
        self._writer.append(digest, len(rows), reply)

    def _note_facts(self, rows: PreparedRows, params: Sequence[SamplingParams]) -> None:
        facts, prompts = self._facts, rows.prompts
        facts.rows += len(rows)
        facts.read += rows.facts.read_rows
        facts.tokens += int(prompts.counts.sum(dtype=np.int64))
        facts.note_columns(rows.facts.names, rows.facts.found, rows.facts.kinds)
        asked = [one.logprobs for one in params if one.logprobs is not None]
        facts.logprobs = max(*asked, facts.logprobs or 0) if asked else facts.logprobs
        facts.prompt_logprobs |= any(one.prompt_logprobs is not None for one in params)
        facts.tools |= bool(prompts.own_texts.texts)
        facts.plain &= not prompts.unread

    def finish(self, reader: Reader) -> None:
        """Complete the kept index of this run, and replace the last one by it. Raises StorageError.

        Args:
            reader: The reader of the input, with the digests of the files that were read.
        """
        self._finish_segment(len(self._files))
        firsts = [*(first for _, first in self._files), self._count]
        for number, one in enumerate(self._written):
            files = [
                KeptFile(
                    file, reader.sha256[file.path], firsts[at] - one.first_chunk, firsts[at + 1] - firsts[at]
                )
                for at in one.files
                if (file := self._files[at][0]).path in reader.sha256 and self._shows_changes(file)
            ]
            self._written[number] = replace(one, segment=replace(one.segment, files=tuple(files)))
        segments = (*self._reused_segments, *(one.segment for one in self._written))
        replace_marker(self._kept, KeptMarker(self.asked.identity, segments), self._ops)

    @property
    def segments(self) -> tuple[tuple[str, int], ...]:
        """Return the folder and number of rows of each new segment that the next run can reuse, in row order.

        They directly follow the reused segments. The list ends before the first segment that cannot be
        reused.
        """
        found = []
        for one in self._written:
            if not one.facts.plain or len(one.segment.files) < one.facts.files:
                break
            found.append((one.segment.folder, one.facts.rows))
        return tuple(found)

    def _shows_changes(self, file: InputFile) -> bool:
        # Times have a limited resolution: soon after a change, another one may not change them
        return self._began - max(file.mtime_ns, file.ctime_ns) / 1e9 >= SETTLED_S


def _can_be_replayed(prompts: PreparedPrompts, params: Sequence[SamplingParams]) -> bool:
    # Sampled rows need their tokens to number equal rows, and rows with several answers need them, too
    used = np.unique(prompts.params_of[prompts.counts > 0]).tolist()
    greedy = all(params[number].greedy for number in used)
    return greedy and prompts.samples is None and not len(prompts.further)


def _without_tokens(rows: PreparedRows) -> bytes:
    return serialize_reply(replace(rows, prompts=replace(rows.prompts, tokens=_NO_TOKENS)))
