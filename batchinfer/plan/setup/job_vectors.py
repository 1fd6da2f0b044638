"""Determines the vectors and pair scores that a job computes."""

from __future__ import annotations

from collections.abc import Mapping

from batchinfer.core.embedding import Dense, Embedding
from batchinfer.core.errors import JobFileError
from batchinfer.core.sampling import Pooling
from batchinfer.core.scoring import PairScoring, ScoreActivation
from batchinfer.input.prompts.parameters.vector_requests import VectorRequests
from batchinfer.input.tokenizer.pair_template import NoPairs, PairTemplate
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job
from batchinfer.job.embedding import EmbedSection
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.files.sentence_modules import (
    MODULES,
    PROMPTS,
    SentenceModules,
    sentence_modules,
    stated_activation,
)
from batchinfer.models.opening import StoredModel

# By the names of torch modules
_ACTIVATIONS: Mapping[str, ScoreActivation] = {"Sigmoid": "sigmoid", "Identity": "identity"}
_NO_PROMPT = "none"


def job_embedding(job: Job, hidden: int, causal: bool = True) -> Embedding | None:
    """Return how the job computes vectors: pooling, normalisation, dimensions and prompt.

    Returns None if neither the job nor a row requests vectors.

    Args:
        job: The job.
        hidden: Number of values of the model's hidden states.
        causal: True for decoders, False for encoders.

    Raises:
        JobFileError: The model does not support the job's options for vectors.
        SecurityRefusal: A file is not safe to load.
    """
    if not job.embeds:
        return None
    asked, modules = job.embed, sentence_modules(job.model.path)
    dense = () if modules is None else modules.dense
    width = _width(job, hidden, dense)
    kept = width if asked.dimensions is None else asked.dimensions
    if kept > width:
        text = f"is {kept}, and the model's vectors have {width} dimensions; it must be from 1 to {width}"
        raise job.mistake("embed.dimensions", text)
    normalize = modules is None or modules.normalizes if asked.normalize == "auto" else asked.normalize
    pooling, prompt = _pooling(job, modules, causal), _prompt(job, modules)
    if prompt and modules is not None and not _may_pool_prompts(pooling, modules):
        text = "the checkpoint leaves its prompt's tokens out of the pooling (include_prompt), which is not computed"
        raise job.mistake("embed.prompt", f"{text}; set it to none, or pooling to last")
    return Embedding(pooling, normalize, kept, prompt, dense)


def requested_vectors(
    job: Job, hidden: int, causal: bool = True
) -> tuple[Embedding | None, VectorRequests | None, str]:
    """Return how the job computes vectors, and which vectors OpenAI requests in its input may ask for.

    Unsupported options raise an error only if the job file requests vectors. If only rows may request them, the reason
    is returned instead, and such rows become error rows.

    Args:
        job: The job.
        hidden: Number of values of the model's hidden states.
        causal: True for decoders, False for encoders.

    Returns:
        Three values: how the job computes vectors, or None; what OpenAI requests may ask for, or None if they may not
            ask for vectors; and why the model supports no vectors, or "".

    Raises:
        JobFileError: The job file requests vectors, and the model does not support its options.
        SecurityRefusal: A file is not safe to load.
    """
    try:
        made = job_embedding(job, hidden, causal)
    except JobFileError as error:
        if job.task == "embed" or job.embed != EmbedSection():
            raise
        return None, None, "; ".join(one.message for one in error.mistakes)
    if made is None or not job.requests:
        return made, None, ""
    modules = sentence_modules(job.model.path)
    prompts = {} if modules is None or not _may_pool_prompts(made.pooling, modules) else modules.prompts
    return made, VectorRequests(made.prompt, made.width(hidden), made.normalize, prompts), ""


def _may_pool_prompts(pooling: Pooling, modules: SentenceModules) -> bool:
    return pooling == "last" or modules.pools_prompt


def _width(job: Job, hidden: int, layers: tuple[Dense, ...]) -> int:
    for layer in layers:
        if layer.inputs != hidden:
            text = (
                f"{layer.file} takes vectors of {layer.inputs} numbers, but its input vectors have {hidden}"
            )
            raise job.mistake("model.path", text)
        hidden = layer.outputs
    return hidden


def _pooling(job: Job, modules: SentenceModules | None, causal: bool) -> Pooling:
    asked = job.embed.pooling
    if asked == "auto":
        found = _usual(causal) if modules is None else modules.pooling
        if found is None:
            assert modules is not None, "the default pooling is supported"
            text = (
                f"is not given, and the checkpoint's pooling ({modules.mode}, see {MODULES}) is not computed"
            )
            raise job.mistake("embed.pooling", f"{text}; last, mean and cls are")
        asked = found
    if asked == "cls" and causal:
        text = "cls is the state of the first token, which in a decoder sees no other; use last or mean"
        raise job.mistake("embed.pooling", text)
    return asked


def _usual(causal: bool) -> Pooling:
    return "last" if causal else "mean"


def _prompt(job: Job, modules: SentenceModules | None) -> str:
    asked, prompt = job.embed.prompt, job.prompt
    as_it_is = job.requests or prompt is None or prompt.text is not None or not prompt.chat
    if asked == _NO_PROMPT or not as_it_is:
        return ""
    prompts = {} if modules is None else modules.prompts
    name = asked if asked is not None or modules is None else modules.default_prompt
    if name is None:
        return ""
    if name not in prompts:
        there = f"it has {', '.join(prompts)}" if prompts else "it has none"
        raise job.mistake("embed.prompt", f"{name!r} is no prompt of the checkpoint ({PROMPTS}); {there}")
    return prompts[name]


def job_pairs(job: Job, tokenizer: Tokenizer, checkpoint: StoredModel) -> PairScoring | None:
    """Return how a cross-encoder scores pairs of texts, or None if the job does not rerank with a cross-encoder.

    Args:
        job: The job.
        tokenizer: The tokenizer of the job's model.
        checkpoint: The job's model. `check_model` must have accepted it.

    Raises:
        JobFileError: The tokenizer cannot join two texts, or the activation function is unsupported.
    """
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
