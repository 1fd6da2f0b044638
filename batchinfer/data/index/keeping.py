"""Ingest keeps what it knows of rows for the next run, and uses what the last one kept.

Three kinds of things are found again: a file that did not change, by what identifies it; a chunk, by the digest of its
bytes; and a row, by that of its values, wherever it stands now. Of these only a row is read again. Tokens are not kept:
a row whose answer the store lacks is prepared anew, and so are error rows, unless their whole chunk is as it was.
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
from batchinfer.data.index.index import attempt_columns
from batchinfer.data.input.chunk import InputChunk
from batchinfer.data.input.input_file import InputFile
from batchinfer.data.input.reader import Reader
from batchinfer.data.kept.chunks import KeptChunks, KeptReply, chunk_digest
from batchinfer.data.kept.earlier import EarlierRows, earlier_rows
from batchinfer.data.kept.files import KeptFile, KeptMarker, opened, read_marker
from batchinfer.data.kept.rows import (
    SEVERAL,
    KeptSource,
    Marks,
    Records,
    StretchSource,
    attempt_names,
    file_of,
    record_blocks,
    record_type,
    whole_file,
)
from batchinfer.data.kept.writer import KeptWriter
from batchinfer.data.prompts.prepared.rows import KEY_TYPE, Prepared, PreparedRows
from batchinfer.data.prompts.render_pool import ReadyChunk
from batchinfer.data.prompts.render_reply import BadReply, packed, unpacked
from batchinfer.data.prompts.render_worker import RenderSpec
from batchinfer.data.storage.digests import SETTLED_S
from batchinfer.data.storage.duck import connection, parquet
from batchinfer.data.storage.durable import FileOps

_TEXTS = 1 << 16  # of parameters that are remembered
_WORDS = 4  # of a key
_NO_TOKENS = np.zeros(0, np.int32)
Answered = Callable[[Records, int], Marks]


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where a job's kept index is, and which of its rows need no tokens: `answered` tells of records, each of which has
    that many attempts. `notice` hears why what was kept is not used. `fresh`: all input files are read, and no digest
    that was computed before counts. `forgotten` are keys whose rows are prepared anew. `earlier`: of rows that an index
    of other settings had, it is noted where they stood."""

    kept: Path
    answered: Answered
    notice: Callable[[str], None]
    fresh: bool = False
    forgotten: tuple[bytes, ...] = ()
    earlier: bool = False

    def forgetting(self, keys: Sequence[bytes]) -> Keeping:
        """Return what prepares the rows with these keys, too."""
        return replace(self, forgotten=(*self.forgotten, *keys))


@contextmanager
def kept_index(
    keeping: Keeping,
    spec: RenderSpec,
    material: str,
    attempts: int,
    folder: Path,
    ops: FileOps,
    *,
    whole: bool,
) -> Iterator[KeptIndex]:
    """Open what the last run kept, if it is of the same settings, and begin to write what is kept of this run.

    `spec` and `material` decide what becomes of a row. `folder` is that of the index. `whole`: whole files and chunks
    may be used again. What cannot be read is told, and not used.
    """
    identity = _identity(spec, material)
    with ExitStack() as stack:
        last: _Last | None = None
        earlier: EarlierRows | None = None
        try:
            marker = read_marker(keeping.kept)
            if marker is not None and marker.identity == identity and marker.attempts == attempts:
                opening = (opened(keeping.kept, one, fresh=keeping.fresh) for one in marker.stretches)
                last = _Last(marker, [stack.enter_context(one) for one in opening], keeping)
            elif marker is not None and keeping.earlier:
                noted = earlier_rows(keeping.kept, marker, _tokenizer(spec), folder, ops)
                earlier = stack.enter_context(noted)
        except (ValueError, OSError) as error:
            keeping.notice(f"what the last run kept of its rows cannot be used, all are read anew: {error}")
        source = KeptSource((), attempts) if last is None else last.source(stack, attempts)
        writer = stack.enter_context(KeptWriter(keeping.kept, ops))
        yield KeptIndex(replace(spec, kept=source), identity, attempts, last, writer, whole, earlier)


def _identity(spec: RenderSpec, material: str) -> str:
    fields = spec.fields
    watched = None if fields.watched is None else sorted(fields.watched)
    versions = [__version__, *map(version, ("tokenizers", "jinja2"))]
    value = (
        versions,
        material,
        spec.plan.mode,
        spec.plan.values_are_text,
        replace(fields, watched=None),
        watched,
    )
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()


def _tokenizer(spec: RenderSpec) -> str:
    return hashlib.sha256(spec.definition.encode("utf-8", "surrogatepass")).hexdigest()


class _Last:
    """The chunks and files that the last run kept, and which of its rows can be used again."""

    def __init__(self, marker: KeptMarker, files: Sequence[Mapping[str, int]], keeping: Keeping) -> None:
        self._files = files
        rows = [one["rows.bin"] for one in files]
        self._usable, errors, self.has_samples = _usable(rows, marker.attempts, keeping)
        self._chunks: list[KeptChunks] = []
        self._of: dict[str, tuple[KeptFile, KeptChunks]] = {}
        for stretch, own, usable, bad in zip(marker.stretches, files, self._usable, errors, strict=True):
            chunks = KeptChunks(whole_file(own["chunks.jsonl"]), own["replies.bin"])
            chunks.choose(~(usable | bad))
            self._chunks.append(chunks)
            if not keeping.fresh:
                self._of |= {one.file.path: (one, chunks) for one in stretch.files}

    def source(self, stack: ExitStack, attempts: int) -> KeptSource:
        """Return the rows as workers get them, while the stack is open."""
        stretches = []
        for files, marks in zip(self._files, self._usable, strict=True):
            usable = stack.enter_context(file_of(marks))
            rows, words, order = files["rows.bin"], files["words.bin"], files["order.bin"]
            stretches.append(StretchSource(rows, words, order, files["params.bin"], usable))
        return KeptSource(tuple(stretches), attempts)

    def find(self, digest: str) -> KeptReply | None:
        """Return a chunk with this digest that can be used again."""
        found = (chunks.find(digest) for chunks in self._chunks)
        return next((one for one in found if one is not None), None)

    def is_new(self, file: InputFile) -> bool:
        """Whether a file with this name and size was not read last."""
        known = self._of.get(file.path)
        return known is None or known[0].file.size != file.size

    def unchanged(self, file: InputFile) -> tuple[str, list[KeptReply]] | None:
        """Return the sha256 and the chunks of a file that is as it was; None: it has to be read."""
        known, own = self._of.get(file.path, (None, None))
        if known is None or own is None or known.file != file or not file.inode:
            return None
        chunks = own.run(known.first_chunk, known.chunks)
        return None if chunks is None else (known.sha256, chunks)


def _usable(files: Sequence[int], attempts: int, keeping: Keeping) -> tuple[list[Marks], list[Marks], bool]:
    """Return of each stretch which rows need no tokens, which are error rows, and whether some of the first are
    sampled. The first have their answers, and no other row had the same key of a sampled answer."""
    usable, errors, sampled = ([np.zeros(0, np.bool_)] for _ in range(3))
    words, ends = [np.zeros(0, np.uint64)], [0]
    for block in (block for file in files for block in _blocks_to_end(file, attempts, ends)):
        errors.append(block["count"] == 0)
        several = block["sampled"] == SEVERAL  # of which each is another's key, made from the tokens
        usable.append(~errors[-1] & ~several & keeping.answered(block, attempts))
        sampled.append(block["sampled"] != 0)
        words.append(np.ascontiguousarray(block["key"][sampled[-1]]).view(np.uint64)[::_WORDS])
    found, rows, keys = np.concatenate(usable), np.flatnonzero(np.concatenate(sampled)), np.concatenate(words)
    _, which, times = np.unique(keys, return_inverse=True, return_counts=True)
    found[rows[times[which] > 1]] = False
    forgotten = np.frombuffer(b"".join(keeping.forgotten), np.uint64)[::_WORDS]
    found[rows[np.isin(keys, forgotten)]] = False
    cuts = ends[1:-1]
    return np.split(found, cuts), np.split(np.concatenate(errors), cuts), bool(found[rows].any())


def _blocks_to_end(file: int, attempts: int, ends: list[int]) -> Iterator[Records]:
    """Yield the records of a file, and then note how many there were with those of the files before."""
    rows = ends[-1]
    for block in record_blocks(file, attempts):
        rows += len(block)
        yield block
    ends.append(rows)


class KeptIndex:
    """Joins what the last run kept to what this one keeps. `spec` is that of workers that know the rows."""

    def __init__(
        self,
        spec: RenderSpec,
        identity: str,
        attempts: int,
        last: _Last | None,
        writer: KeptWriter,
        whole: bool,
        earlier: EarlierRows | None,
    ) -> None:
        self.spec, self._earlier = spec, earlier
        self._identity, self._attempts, self._whole = identity, attempts, whole
        self._last, self._writer, self._began = last, writer, time.time()
        self._digests: deque[str] = deque()  # of chunks that were given out
        self._replies: deque[bytes | None] = deque()
        self._files: list[tuple[InputFile, int]] = []  # and their first chunks
        self._given = 0
        self._greedy: dict[str, bool] = {}
        # A row that comes later may equal one of a sampled answer that is known: see `finish`
        self.may_need_tokens = last is not None and last.has_samples

    def lacks_files(self, reader: Reader) -> bool:
        """Whether files have rows that are surely new, behind others that are not read again."""
        last = self._last
        if last is None or not self._whole or last.unchanged(reader.files[0]) is None:
            return False
        return any(last.is_new(file) for file in reader.files)

    def chunks(self, reader: Reader, columns: Sequence[str] | None, typed: bool) -> Iterator[InputChunk]:
        """Yield the chunks of all files. `typed`: columns are carried that only the file has, with their types."""
        before, reader.complete = 0, True
        for file in reader.files:
            self._files.append((file, self._given))
            known = None if self._last is None or typed or not self._whole else self._last.unchanged(file)
            if known is not None:
                reader.sha256[file.path], chunks = known
                yield from self._replayed(file, before, chunks)
            else:
                one = replace(reader, files=(file,))
                for chunk in one.chunks(columns):
                    yield self._looked_up(replace(chunk, bytes_read=before + chunk.bytes_read))
                reader.complete = reader.complete and one.complete
            before += file.size

    def _replayed(self, file: InputFile, before: int, chunks: Sequence[KeptReply]) -> Iterator[InputChunk]:
        rows, done = sum(chunk.rows for chunk in chunks), 0
        for chunk in chunks:
            done += chunk.rows
            whole = ReadyChunkOf(file.name, before + file.size * done // max(1, rows))
            yield self._ready(chunk, whole)

    def _looked_up(self, chunk: InputChunk) -> InputChunk:
        digest = chunk_digest(chunk) if self._whole else ""
        known = self._last.find(digest) if self._last is not None and digest else None
        if known is not None:
            return self._ready(known, chunk)
        self._give(digest, None)
        return chunk

    def _ready(self, known: KeptReply, chunk: InputChunk | ReadyChunkOf) -> InputChunk:
        reply, spec = known.read(), self.spec
        try:
            rows = unpacked(reply, spec.fields, spec.limits.vocab_size, len(spec.plan.ladder))
        except BadReply as error:
            raise StorageError(
                f"what the last run kept has changed within seconds: {error}; run again"
            ) from error
        self._give(known.digest, reply)
        return ReadyChunk(
            file=chunk.file,
            bytes_read=chunk.bytes_read,
            most_rows=known.rows,
            first_row=chunk.first_row,
            table=chunk.table,
            prepared=rows,
        )

    def _give(self, digest: str, reply: bytes | None) -> None:
        self._digests.append(digest)
        self._replies.append(reply)
        self._given += 1

    def append(self, rows: PreparedRows) -> None:
        """Keep the rows of the next chunk that was given out. Raises StorageError."""
        digest, reply = self._digests.popleft(), self._replies.popleft()
        prompts = rows.prompts
        if self._earlier is not None:
            self._earlier.note(prompts.digests, len(rows))
        records = self._records(prompts)
        if any(error.error_class == "resource" for error in prompts.errors.values()):
            digest = ""  # another time the machine may allow it
        if reply is None:
            known = np.ones(len(rows), np.bool_)
            reply = packed(replace(rows, prompts=replace(prompts, tokens=_NO_TOKENS, known=known)))
        self._writer.append(digest if prompts.digests else "", records, reply)

    def _records(self, prompts: Prepared) -> Records:
        records = np.zeros(len(prompts), record_type(self._attempts))
        if prompts.digests:
            words = np.frombuffer(prompts.digests, "<u8").reshape(-1, 2)
            records["word"], records["rest"] = words[:, 0], words[:, 1]
        records["count"], records["opening"] = prompts.counts, prompts.openings
        places = self._writer.texts(prompts.params)
        if not len(places):
            return records
        records["tools_at"] = -1
        if prompts.own_texts.texts:
            none = np.array([[-1, 0]], np.int64)
            tools = np.vstack([none, self._writer.texts(prompts.own_texts.texts)])[prompts.own_texts.of]
            records["tools_at"], records["tools_size"] = tools[:, 0], tools[:, 1]
        greedy = np.array([self._is_greedy(text) for text in prompts.params], np.bool_)
        records["sampled"] = ~greedy[prompts.params_of] & (prompts.counts > 0)
        records["sampled"][prompts.answers(1) > 1] = SEVERAL
        work = [(prompts.params_of, prompts.max_tokens, prompts.keys)]
        work += [(rung.params_of, rung.max_tokens, rung.keys) for rung in prompts.rungs]
        for attempt, (numbers, most, keys) in enumerate(work, 1):
            names = attempt_names(attempt)
            there = numbers >= 0
            records[names[0]] = np.frombuffer(keys, KEY_TYPE)
            records[names[1]] = np.where(there, places[numbers, 0], -1)
            records[names[2]] = np.where(there, places[numbers, 1], 0)
            records[names[3]] = most
        return records

    def _is_greedy(self, text: str) -> bool:
        if text not in self._greedy:
            self._greedy = self._greedy if len(self._greedy) < _TEXTS else {}
            self._greedy[text] = SamplingParams.from_json(text).greedy
        return self._greedy[text]

    def drain(self) -> None:
        """Let others read what was noted so far of earlier rows. Raises StorageError."""
        if self._earlier is not None:
            self._earlier.drain()

    def finish(self, reader: Reader, parts: Sequence[Path], spill: Path) -> Sequence[bytes]:
        """Put what was kept of this run in the place of what the last one kept. `parts`: of the index of all rows.
        Return the keys of rows whose tokens are needed after all: then nothing is kept. Raises StorageError."""
        lacking = self._equal_samples(parts, spill) if self.may_need_tokens else ()
        if not lacking:
            self._commit(reader)
            if self._earlier is not None:
                self._earlier.commit()
        return lacking

    def _equal_samples(self, parts: Sequence[Path], spill: Path) -> Sequence[bytes]:
        """Return the keys of known rows, those of sampled answers, that other rows have, too: one of them gets a key
        that says so, which takes its tokens."""
        key = attempt_columns(1)[0]
        rows = f"{parquet(parts)} WHERE {key} IS NOT NULL AND NOT greedy"
        with connection(spill) as database:
            found = database.sql(
                f"SELECT {key} FROM {rows} GROUP BY {key} HAVING count(*) > 1 AND count(token_offset) < count(*)"
            ).to_arrow_table()
        keys: list[bytes] = found.column(0).to_pylist()
        return keys

    def _commit(self, reader: Reader) -> None:
        firsts = [first for _, first in self._files]
        files = [
            KeptFile(file, reader.sha256[file.path], first, end - first)
            for (file, first), end in zip(self._files, [*firsts[1:], self._given], strict=True)
            if self._whole and file.path in reader.sha256 and self._shows_changes(file)
        ]
        self._writer.commit(self._identity, self._attempts, _tokenizer(self.spec), files)

    def _shows_changes(self, file: InputFile) -> bool:
        """Whether a change of the file since it was listed shows in its times, which have ticks."""
        return self._began - max(file.mtime_ns, file.ctime_ns) / 1e9 >= SETTLED_S


@dataclass(frozen=True, slots=True)
class ReadyChunkOf:
    """A place in a file: where a chunk stands that is not read again."""

    file: str
    bytes_read: int
    first_row: None = None
    table: None = None
