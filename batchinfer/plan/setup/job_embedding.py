"""The vectors that a job makes: what it says of them, and what its checkpoint does."""

from __future__ import annotations

from batchinfer.core.embedding import Embedding
from batchinfer.core.sampling import Pooling
from batchinfer.job import Job
from batchinfer.models.files.sentence_modules import MODULES, PROMPTS, SentenceModules, sentence_modules

_NO_PROMPT = "none"


def job_embedding(job: Job, hidden: int) -> Embedding | None:
    """Return the vectors of a job whose model has `hidden` numbers in a hidden state; None: it generates texts. Raises
    JobFileError, SecurityRefusal."""
    if job.task != "embed":
        return None
    asked, modules = job.embed, sentence_modules(job.model.path)
    kept = hidden if asked.dimensions is None else asked.dimensions
    if kept > hidden:
        text = f"is {kept}, and the model's vectors have {hidden} dimensions; it must be from 1 to {hidden}"
        raise job.mistake("embed.dimensions", text)
    normalize = modules is None or modules.normalizes if asked.normalize == "auto" else asked.normalize
    pooling, prompt = _pooling(job, modules), _prompt(job, modules)
    if prompt and modules is not None and pooling == "mean" and not modules.pools_prompt:
        text = "the checkpoint leaves its prompt's tokens out of the mean (include_prompt), which is not computed"
        raise job.mistake("embed.prompt", f"{text}; set it to none, or pooling to last")
    return Embedding(pooling, normalize, kept, prompt)


def _pooling(job: Job, modules: SentenceModules | None) -> Pooling:
    asked = job.embed.pooling
    if asked != "auto":
        return asked
    if modules is None:
        return "last"
    if modules.pooling is None:
        text = f"is not given, and the checkpoint's pooling ({modules.mode}, see {MODULES}) is not computed"
        raise job.mistake("embed.pooling", f"{text}; last and mean are")
    return modules.pooling


def _prompt(job: Job, modules: SentenceModules | None) -> str:
    """Return the text that is put before others: nothing before prompts that are no texts as they are."""
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
