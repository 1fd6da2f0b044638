"""The scores of pairs that a job makes with a cross-encoder: what its checkpoint, its tokenizer and the job say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from batchinfer.core.errors import Mistake
from batchinfer.core.scoring import PairScoring, ScoreActivation
from batchinfer.data.tokenizer.pair_template import NoPairs, PairTemplate
from batchinfer.job import Job
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.files.cross_encoder import stated_activation
from batchinfer.models.opening import StoredModel
from batchinfer.models.spec.spec import ModelSpec

if TYPE_CHECKING:
    from batchinfer.data.tokenizer.tokenizer import Tokenizer  # slow to import, and not for `doctor`

_WITH_HEAD = "…ForSequenceClassification"
# By what torch calls their modules
_ACTIVATIONS: Mapping[str, ScoreActivation] = {"Sigmoid": "sigmoid", "Identity": "identity"}


def job_pairs(job: Job, tokenizer: Tokenizer, checkpoint: StoredModel) -> PairScoring | None:
    """Return how the job scores pairs, whose checkpoint `pair_mistakes` finds right; None: it scores none. Raises
    JobFileError."""
    if job.task != "rerank" or not isinstance(checkpoint, Checkpoint) or checkpoint.spec.classifier is None:
        return None
    try:
        template = PairTemplate.of(tokenizer.rust)
    except NoPairs as error:
        raise job.mistake("model.path", f"{error}; use another model") from None
    encoder = checkpoint.spec.encoder
    two_types = encoder is not None and encoder.token_types > 1
    typed = two_types and template.typed is not None and tokenizer.gives_types
    return PairScoring(checkpoint.spec.classifier.pooling, _activation(job), typed)


def _activation(job: Job) -> ScoreActivation:
    asked = job.rerank.activation
    if asked != "auto":
        return asked
    stated = stated_activation(job.model.path)
    if stated is None:
        return "sigmoid"
    name = stated.rpartition(".")[2]
    if name not in _ACTIVATIONS:
        text = f"is not given, and the checkpoint's ({stated[:80]}) is not computed; sigmoid and identity are"
        raise job.mistake("rerank.activation", text)
    return _ACTIVATIONS[name]


def pair_mistakes(job: Job, spec: ModelSpec) -> Iterator[Mistake]:
    """Yield what keeps a job with task: rerank from scoring pairs with this encoder."""
    what, head = f"the checkpoint is an encoder (model_type {spec.family})", spec.classifier
    if head is None:
        text = f"{what} without a classification head, and a cross-encoder has one ({_WITH_HEAD})"
        yield Mistake("task", f"rerank: {text}; use another model")
    elif head.labels != 1:
        text = f"{what} whose head has {head.labels} labels, and a reranker has one, of which scores are made"
        yield Mistake("task", f"rerank: {text}; use another model")
    elif job.rerank.document is None:
        text = f"{what}, which compares the prompt with a document: name the document's column"
        yield Mistake("rerank.document", f"is missing: {text}, and give the query alone in prompt")
