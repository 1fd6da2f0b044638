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
from batchinfer.data.index.known_answers import AnswersWriter, KnownAnswers
from batchinfer.data.index.taken import NOTHING_TAKEN, TakenRows, taken_over
from batchinfer.data.input.chunk import GrowingSize, InputChunk, SizeOfChunks
from batchinfer.data.input.input_file import InputFile
from batchinfer.data.input.reader import Reader
from batchinfer.data.kept.chunks import KeptChunks, KeptReply, chunk_digest
from batchinfer.data.kept.earlier import EarlierRows, earlier_rows
from batchinfer.data.kept.facts import StretchFacts
from batchinfer.data.kept.files import (
    OF_ROWS,
    KeptFile,
    KeptMarker,
    KeptStretch,
    opened,
    put_in_place,
    read_marker,
)
from batchinfer.data.kept.record_shape import RecordShape
from batchinfer.data.kept.rows import (
    SAMPLE_KEYS,
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
from batchinfer.data.kept.stretches import StretchCuts, unchanged_stretches, worth_taking
from batchinfer.data.kept.whole import NO_PLACE, KeptPlaces, WholeStretch
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


def _none_whole(_: str, __: Sequence[str]) -> Sequence[WholeStretch]:
    return ()


def _no_places(_: Sequence[WholeStretch]) -> KeptPlaces | None:
    return None


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where a job's kept index is, and which of its rows need no tokens: `answered` tells of records, each of which
    has that many attempts. `notice` hears why what was kept is not used. `fresh`: all input files are read, and no
    digest that was computed before counts. `forgotten` are keys whose rows are prepared anew. `whole` tells, of rows
    of these settings, which of these stretches, from the first one on, can be taken over whole, and `places` where the
    answers of their rows are; `in_pieces`: none is taken over.
    `anew`: no row is known, whatever was kept. `earlier`: when the job's result was published, in Unix
    time: of rows that an index of other settings had, it is noted where they stood; None: it is not."""

    kept: Path
    answered: Answered
    notice: Callable[[str], None]
    fresh: bool = False
    whole: Callable[[str, Sequence[str]], Sequence[WholeStretch]] = _none_whole
    places: Callable[[Sequence[WholeStretch]], KeptPlaces | None] = _no_places
    forgotten: tuple[bytes, ...] = ()
    in_pieces: bool = False
    anew: bool = False
    earlier: float | None = None

    def forgetting(self, keys: Sequence[bytes]) -> Keeping:
        """Return what prepares the rows with these keys, too, and takes over no stretch whole."""
        return replace(self, forgotten=(*self.forgotten, *keys), in_pieces=True)


@dataclass(frozen=True, slots=True)
class RowsToKnow:
    """The rows that are to be known: what decides what becomes of one (`spec`, `material`), what more decides what is
    written of it (`shape`), how many keys one has, of which files they are, and the folder of their index.
    `whole`: whole files and chunks may be used again; `taking`: whole stretches, too, as the first parts of an index,
    whose folders these are. `chunk`: how much is read at once of a file of which nothing is known."""

    spec: RenderSpec
    material: str
    shape: str
    attempts: int
    samples: int
    files: Sequence[InputFile]
    folder: Path
    whole: bool
    taking: tuple[Path, Path] | None
    chunk: SizeOfChunks

    @property
    def records(self) -> RecordShape:
        """Return how many keys a row has."""
        return RecordShape(self.attempts, self.samples)

    @property
    def identity(self) -> str:
        """Return what the records of rows follow from."""
        return _identity(self.spec, self.material)

    @property
    def whole_identity(self) -> str:
        """Return what whole stretches follow from."""
        return hashlib.sha256(f"{self.identity} {self.shape}".encode("utf-8", "surrogatepass")).hexdigest()


@contextmanager
def kept_index(keeping: Keeping, asked: RowsToKnow, ops: FileOps) -> Iterator[KeptIndex]:
    """Open what the last run kept, if it is of the same settings, and begin to write what is kept of this run. What
    cannot be read is told, and not used. Raises StorageError."""
    with ExitStack() as stack:
        last: _Last | None = None
        taken = NOTHING_TAKEN
        earlier: EarlierRows | None = None
        try:
            marker = None if keeping.anew else read_marker(keeping.kept)
            if marker is not None and (marker.identity, marker.shape) == (asked.identity, asked.records):
                opening = (opened(keeping.kept, one, fresh=keeping.fresh) for one in marker.stretches)
                files = [stack.enter_context(one) for one in opening]
                facts = [StretchFacts.from_json(whole_file(one["facts.json"])) for one in files]
                whole = _whole(keeping, asked, marker)
                places = keeping.places(whole) if len(whole) == len(files) else None
                first = _taken(keeping, asked, marker, facts, whole, ops)
                last, taken = _Last(marker, files, facts, keeping, len(first.stretches), places), first
            elif marker is not None and keeping.earlier is not None:
                noted = earlier_rows(
                    keeping.kept, marker, keeping.earlier, _tokenizer(asked.spec), asked.folder, ops
                )
                earlier = stack.enter_context(noted)
        except (ValueError, KeyError, TypeError, OSError) as error:
            keeping.notice(f"what the last run kept of its rows cannot be used, all are read anew: {error}")
        source = KeptSource((), asked.records) if last is None else last.source(stack, asked.records)
        answers = None
        if last is not None and last.places is not None:
            answers = AnswersWriter(last.places, asked.folder, ops)
            stack.callback(answers.close)
        index = KeptIndex(keeping.kept, asked, source, last, taken, earlier, answers, ops)
        stack.callback(index.close)
        yield index


def _whole(keeping: Keeping, asked: RowsToKnow, marker: KeptMarker) -> Sequence[WholeStretch]:
    """Return the stretches, from the first one on, of which all rows are answered, and it is known where."""
    if keeping.fresh or keeping.in_pieces or not asked.whole or asked.taking is None:
        return ()
    return keeping.whole(asked.whole_identity, marker.folders)


def _taken(
    keeping: Keeping,
    asked: RowsToKnow,
    marker: KeptMarker,
    facts: Sequence[StretchFacts],
    whole: Sequence[WholeStretch],
    ops: FileOps,
) -> TakenRows:
    """Take over the first of these stretches, as far as their files did not change."""
    if asked.taking is None:
        return NOTHING_TAKEN
    known = whole[: unchanged_stretches(marker.stretches, facts, asked.files)]
    sizes = [sum(file.file.size for file in one.files) for one in marker.stretches[: len(known)]]
    rest = sum(file.size for file in asked.files) - sum(sizes)
    most = worth_taking(sizes, rest)
    chosen = [*zip(known, facts, strict=False)][:most]
    return taken_over(keeping.kept, chosen, *asked.taking, ops, keeping.notice)


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
    """The chunks and files that the last run kept, and which of its rows can be used again. All can of the first
    `taken` stretches. `places`: where the answers of all rows are; None: that is not known."""

    def __init__(
        self,
        marker: KeptMarker,
        files: Sequence[Mapping[str, int]],
        facts: Sequence[StretchFacts],
        keeping: Keeping,
        taken: int,
        places: KeptPlaces | None,
    ) -> None:
        self._files, self._taken, self.places = files, taken, places
        rows = [one["rows.bin"] for one in files[taken:]]
        before = np.cumsum([0, *(one.rows for one in facts)]).tolist()
        there = None if places is None else places.places[before[taken] :] != NO_PLACE
        self._usable, errors, samples = _usable(rows, marker.shape, keeping, there)
        self.has_samples = samples or any(one.sampled for one in facts[:taken])
        lacking = [np.zeros(one.rows, np.bool_) for one in facts[:taken]]
        lacking += [~(usable | bad) for usable, bad in zip(self._usable, errors, strict=True)]
        self._chunks: list[KeptChunks] = []
        self._of: dict[str, tuple[KeptFile, KeptChunks]] = {}
        for stretch, own, needs_tokens, first in zip(
            marker.stretches, files, lacking, before[:-1], strict=True
        ):
            chunks = KeptChunks(whole_file(own["chunks.jsonl"]), own["replies.bin"], first)
            chunks.choose(needs_tokens)
            self._chunks.append(chunks)
            if not keeping.fresh:
                self._of |= {one.file.path: (one, chunks) for one in stretch.files}
        self.stretches = marker.stretches[:taken]

    def source(self, stack: ExitStack, shape: RecordShape) -> KeptSource:
        """Return the rows as workers get them, while the stack is open."""
        stretches = []
        for number, files in enumerate(self._files):
            own = number - self._taken
            usable = None if own < 0 else stack.enter_context(file_of(self._usable[own]))
            stretches.append(StretchSource(tuple(files[name] for name in OF_ROWS), usable))
        return KeptSource(tuple(stretches), shape)

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


def _usable(
    files: Sequence[int], shape: RecordShape, keeping: Keeping, there: Marks | None
) -> tuple[list[Marks], list[Marks], bool]:
    """Return of each stretch which rows need no tokens, which are error rows, and whether some of the first are
    sampled. The first have their answers, and no other row had the same key of a sampled answer. `there`: which rows
    of all have an answer; None: that is looked for."""
    if not files:
        return [], [], False
    usable, errors, sampled = ([np.zeros(0, np.bool_)] for _ in range(3))
    words, ends, at = [np.zeros(0, np.uint64)], [0], 0
    for block in (block for file in files for block in _blocks_to_end(file, shape, ends)):
        errors.append(block["count"] == 0)
        several = block["sampled"] == SEVERAL  # of which each is another's key, made from the tokens
        has = keeping.answered(block, shape.attempts) if there is None else there[at : at + len(block)]
        usable.append(~errors[-1] & ~several & has)
        at += len(block)
        sampled.append(block["sampled"] != 0)
        words.append(np.ascontiguousarray(block["key"][sampled[-1]]).view(np.uint64)[::_WORDS])
    found, rows, keys = np.concatenate(usable), np.flatnonzero(np.concatenate(sampled)), np.concatenate(words)
    _, which, times = np.unique(keys, return_inverse=True, return_counts=True)
    found[rows[times[which] > 1]] = False
    forgotten = np.frombuffer(b"".join(keeping.forgotten), np.uint64)[::_WORDS]
    found[rows[np.isin(keys, forgotten)]] = False
    cuts = ends[1:-1]
    return np.split(found, cuts), np.split(np.concatenate(errors), cuts), bool(found[rows].any())


def _blocks_to_end(file: int, shape: RecordShape, ends: list[int]) -> Iterator[Records]:
    """Yield the records of a file, and then note how many there were with those of the files before."""
    rows = ends[-1]
    for block in record_blocks(file, shape):
        rows += len(block)
        yield block
    ends.append(rows)


@dataclass(frozen=True, slots=True)
class _Written:
    """A stretch that was written, and which of the files that were read are its."""

    stretch: KeptStretch
    facts: StretchFacts
    files: range
    first_chunk: int


class KeptIndex:
    """Joins what the last run kept to what this one keeps, a stretch after another. `spec` is that of workers that know
    the rows, `taken` what was taken over whole."""

    def __init__(
        self,
        kept: Path,
        asked: RowsToKnow,
        source: KeptSource,
        last: _Last | None,
        taken: TakenRows,
        earlier: EarlierRows | None,
        answers: AnswersWriter | None,
        ops: FileOps,
    ) -> None:
        self.known: KnownAnswers | None = None  # once all is finished, if it is known where answers are
        self._answers = answers
        self.spec, self.taken = replace(asked.spec, kept=source), taken
        self._kept, self.asked, self._last, self._ops = kept, asked, last, ops
        self._earlier = earlier
        self._shape, self._whole = asked.records, asked.whole
        self._began = time.time()
        self._digests: deque[str] = deque()  # of chunks that were given out
        # and what was kept of them, with the number of the first row
        self._replies: deque[tuple[bytes, int] | None] = deque()
        self._files: list[tuple[InputFile, int]] = []  # and their first chunks
        self._given = self._appended = 0
        self._size = GrowingSize(asked.chunk)
        self._cuts = StretchCuts(sum(file.size for file in asked.files))
        self._writer: KeptWriter | None = None  # of the stretch that is being written, once it has a row
        self._facts = StretchFacts()
        self._first_chunk = self._first_file = 0  # of that stretch
        self._written: list[_Written] = []
        self._begins: deque[tuple[int, int]] = (
            deque()
        )  # the chunks and files with which other stretches begin
        self._params: dict[str, tuple[bool, int | None, bool]] = {}
        # A row that comes later may equal one of a sampled answer that is known: see `finish`
        self.may_need_tokens = last is not None and last.has_samples

    @property
    def knows(self) -> bool:
        """Whether the last run kept something that can be used."""
        return self._last is not None

    @property
    def _stretches_taken(self) -> tuple[KeptStretch, ...]:
        return () if self._last is None else self._last.stretches

    def close(self) -> None:
        """Give up what was not finished."""
        if self._writer is not None:
            self._writer.close()

    def lacks_files(self, reader: Reader) -> bool:
        """Whether files have rows that are surely new, behind others that are not read again."""
        last = self._last
        if last is None or not self._whole or last.unchanged(reader.files[0]) is None:
            return False
        return any(last.is_new(file) for file in reader.files)

    def chunks(self, reader: Reader, columns: Sequence[str] | None, typed: bool) -> Iterator[InputChunk]:
        """Yield the chunks of all files but those that were taken over. `typed`: columns are carried that only the file
        has, with their types."""
        reader.complete, reader_sha256 = True, reader.sha256
        taken = [one for stretch in self._stretches_taken for one in stretch.files]
        reader_sha256.update({one.file.path: one.sha256 for one in taken})
        before = sum(one.file.size for one in taken)
        for file in reader.files[len(taken) :]:
            if self._whole and self._cuts.before(file.size):
                self._begins.append((self._given, len(self._files)))
            self._files.append((file, self._given))
            known = None if self._last is None or typed or not self._whole else self._last.unchanged(file)
            if known is not None:
                reader_sha256[file.path], chunks = known
                yield from self._replayed(file, before, chunks)
            else:
                one = replace(reader, files=(file,), chunk=self._size)
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
        self._give(known.digest, (reply, known.first_of_all))
        return ReadyChunk(
            file=chunk.file,
            bytes_read=chunk.bytes_read,
            most_rows=known.rows,
            first_row=chunk.first_row,
            table=chunk.table,
            prepared=rows,
        )

    def _give(self, digest: str, reply: tuple[bytes, int] | None) -> None:
        self._digests.append(digest)
        self._replies.append(reply)
        self._given += 1

    def turns(self) -> bool:
        """Whether the next rows are the first of another stretch; the one before is finished. Raises StorageError."""
        if not self._begins or self._begins[0][0] > self._appended:
            return False
        chunk, file = self._begins.popleft()
        self._finish_stretch(file)
        self._first_chunk = chunk
        return True

    def _finish_stretch(self, end: int) -> None:
        """Finish the stretch that is being written, whose files are those before the number `end`."""
        files = range(self._first_file, end)
        self._first_file = end
        if self._writer is not None:
            self._facts.files = len(files)
            digests = self._writer.finish(self._facts)
            stretch = KeptStretch(self._writer.folder, digests, ())
            self._written.append(_Written(stretch, self._facts, files, self._first_chunk))
        self._writer, self._facts = None, StretchFacts()

    def append(self, rows: PreparedRows) -> None:
        """Keep the rows of the next chunk that was given out. Raises StorageError."""
        if self._writer is None:
            self._writer = KeptWriter(self._kept, self._ops)
        writer, prompts = self._writer, rows.prompts
        digest, known = self._digests.popleft(), self._replies.popleft()
        self._appended += 1
        self._note_answers(rows, None if known is None else known[1])
        if self._earlier is not None:
            self._earlier.note(prompts.digests, len(rows))
        records = self._records(writer, prompts)
        records["has_id"] = rows.facts.ids.is_valid().to_numpy(zero_copy_only=False)
        self._note_facts(rows, records)
        if any(error.error_class == "resource" for error in prompts.errors.values()):
            digest, self._facts.plain = "", False  # another time the machine may allow it
        reply = _kept_reply(rows) if known is None else known[0]
        writer.append(digest if prompts.digests else "", records, rows.facts.ids, reply)
        writer.append_runs(prompts.runs, records)
        if known is None:
            self._size.read(len(rows), int(prompts.known_work().sum()))

    def _note_answers(self, rows: PreparedRows, first: int | None) -> None:
        """Note where the answers of rows are. `first`: the number of the first of a chunk that is known; None: its rows
        say which they are."""
        if self._answers is None:
            return
        known = rows.prompts.kept_rows
        none = np.full(len(rows), -1, np.int32) if known is None else known
        self._answers.note(none if first is None else np.arange(first, first + len(rows)))

    def _note_facts(self, rows: PreparedRows, records: Records) -> None:
        """Add what is known of these rows together to what is known of the stretch."""
        facts, prompts, params = self._facts, rows.prompts, [self._asks(text) for text in rows.prompts.params]
        facts.rows += len(rows)
        facts.read += rows.facts.read_rows
        facts.tokens += int(prompts.counts.sum(dtype=np.int64))
        facts.note_columns(rows.facts.names, rows.facts.found, rows.facts.kinds)
        asked = [one[1] for one in params if one[1] is not None]
        facts.logprobs = max(*asked, facts.logprobs or 0) if asked else facts.logprobs
        facts.prompt_logprobs |= any(one[2] for one in params)
        facts.tools |= bool(prompts.own_texts.texts)
        facts.sampled |= bool(records["sampled"].any())
        facts.plain &= not prompts.unread

    def _records(self, writer: KeptWriter, prompts: Prepared) -> Records:
        records = np.zeros(len(prompts), record_type(self._shape))
        if prompts.digests:
            words = np.frombuffer(prompts.digests, "<u8").reshape(-1, 2)
            records["word"], records["rest"] = words[:, 0], words[:, 1]
        records["count"], records["opening"] = prompts.counts, prompts.openings
        if prompts.sample_keys:  # else there are error rows alone
            records[SAMPLE_KEYS] = np.frombuffer(prompts.sample_keys, records.dtype[SAMPLE_KEYS])
        places = writer.texts(prompts.params)
        if not len(places):
            return records
        records["tools_at"] = -1
        if prompts.own_texts.texts:
            none = np.array([[-1, 0]], np.int64)
            tools = np.vstack([none, writer.texts(prompts.own_texts.texts)])[prompts.own_texts.of]
            records["tools_at"], records["tools_size"] = tools[:, 0], tools[:, 1]
        greedy = np.array([self._asks(text)[0] for text in prompts.params], np.bool_)
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

    def _asks(self, text: str) -> tuple[bool, int | None, bool]:
        """Return whether work with these parameters is greedy, and which log-probabilities it asks for."""
        if text not in self._params:
            self._params = self._params if len(self._params) < _TEXTS else {}
            params = SamplingParams.from_json(text)
            self._params[text] = params.greedy, params.logprobs, params.prompt_logprobs is not None
        return self._params[text]

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
            self.known = None if self._answers is None else self._answers.commit()
            if self._earlier is not None:
                self._earlier.commit()
        return lacking

    def _equal_samples(self, parts: Sequence[Path], spill: Path) -> Sequence[bytes]:
        """Return the keys of known rows, those of sampled answers, that other rows have, too: one of them gets a key
        that says so, which takes its tokens. Rows that were taken over come before all others, and keep their keys."""
        key = attempt_columns(1)[0]
        rows = f"{parquet(parts)} WHERE {key} IS NOT NULL AND NOT greedy"
        with connection(spill) as database:
            found = database.sql(
                f"SELECT {key} FROM {rows} GROUP BY {key} HAVING count(*) > 1 AND count(token_offset) < count(*)"
            ).to_arrow_table()
        keys: list[bytes] = found.column(0).to_pylist()
        return keys

    def _commit(self, reader: Reader) -> None:
        self._finish_stretch(len(self._files))
        firsts = [*(first for _, first in self._files), self._given]
        for number, one in enumerate(self._written):
            files = [
                KeptFile(
                    file, reader.sha256[file.path], firsts[at] - one.first_chunk, firsts[at + 1] - firsts[at]
                )
                for at in one.files
                if self._whole
                and (file := self._files[at][0]).path in reader.sha256
                and self._shows_changes(file)
            ]
            self._written[number] = replace(one, stretch=replace(one.stretch, files=tuple(files)))
        asked, stretches = self.asked, [one.stretch for one in self._written]
        all_of_them = (*self._stretches_taken, *stretches)
        marker = KeptMarker(asked.identity, asked.records, all_of_them, _tokenizer(asked.spec))
        put_in_place(self._kept, marker, self._ops)

    @property
    def stretches(self) -> tuple[tuple[str, int], ...]:
        """Return the stretches that were written and can be taken over whole the next time, as far as they follow those
        that were taken over now; and how many rows each has."""
        found = []
        for one in self._written:
            if not one.facts.plain or len(one.stretch.files) < one.facts.files:
                break
            found.append((one.stretch.folder, one.facts.rows))
        return tuple(found)

    def _shows_changes(self, file: InputFile) -> bool:
        """Whether a change of the file since it was listed shows in its times, which have ticks."""
        return self._began - max(file.mtime_ns, file.ctime_ns) / 1e9 >= SETTLED_S


def _kept_reply(rows: PreparedRows) -> bytes:
    """Return what is kept of a chunk that was read: its rows, all of them known."""
    known = np.ones(len(rows), np.bool_)
    return packed(
        replace(rows, prompts=replace(rows.prompts, tokens=_NO_TOKENS, known=known, kept_rows=None))
    )


@dataclass(frozen=True, slots=True)
class ReadyChunkOf:
    """A place in a file: where a chunk stands that is not read again."""

    file: str
    bytes_read: int
    first_row: None = None
    table: None = None
