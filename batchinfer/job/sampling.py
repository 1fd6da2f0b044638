"""The section `sampling` of a job file, which describes how tokens are chosen."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from batchinfer.core.sampling import INT32_MAX, MAX_ALLOWED, MAX_SAMPLES, MAX_STOP_TOKENS, SamplingParams
from batchinfer.job.field_types import (
    SAMPLING_PARAMETERS,
    Biases,
    Choice,
    FromColumns,
    JsonSchema,
    Stops,
    Text,
    Words,
    bounded,
)
from batchinfer.job.section import Section


class SamplingSection(Section):
    """The choice of tokens, the same for every row, except for parameters in `from_columns`."""

    max_tokens: Annotated[int, bounded("max_tokens")] | Literal["fit"] = Field(
        default=256,
        description="Maximum tokens of an answer. `fit`: [the longest answer that the row's constraint "
        "allows](structured.md#how-long-an-answer-can-be), if it is finite.",
    )
    min_tokens: Annotated[int, bounded("min_tokens")] = Field(
        default=0, description="Minimum tokens of an answer: it does not end earlier."
    )
    temperature: Annotated[float, bounded("temperature")] = Field(
        default=0.0,
        description="0: always the most likely token. Higher values, up to 100: more random.",
    )
    top_p: Annotated[float, bounded("top_p")] = Field(
        default=1.0,
        description="Draw only from the most likely tokens that together have this much probability. 1: off.",
    )
    top_k: Annotated[int, bounded("top_k")] = Field(
        default=0,
        description="Draw only from this number of the most likely tokens. 0: off.",
    )
    min_p: Annotated[float, bounded("min_p")] = Field(
        default=0.0,
        description="Drop tokens less likely than this share of the most likely token. 0: off.",
    )
    seed: Annotated[int, bounded("seed")] = Field(
        default=0,
        description="Seed of the random draws, which are [the same in every run](engine.md#sampling). Answers that "
        "are the same to the bit also need `engine.deterministic`.",
    )
    stop: Stops = Field(
        default=(),
        description="A text, or a list of up to 16 texts, that end an answer. The stop text is cut off.",
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0, le=INT32_MAX)], ...] = Field(
        default=(), max_length=MAX_STOP_TOKENS, description="Up to 64 token ids that end an answer."
    )
    ignore_eos: bool = Field(
        default=False, description="Whether to go on after the model's end-of-text token."
    )
    repetition_penalty: Annotated[float, bounded("repetition_penalty")] = Field(
        default=1.0,
        description="Above 1: tokens of the prompt and of the answer so far become less likely. 1: off.",
    )
    presence_penalty: Annotated[float, bounded("presence_penalty")] = Field(
        default=0.0,
        description="Subtracted from the score of tokens that the answer already contains. 0: off.",
    )
    frequency_penalty: Annotated[float, bounded("frequency_penalty")] = Field(
        default=0.0,
        description="Subtracted from a token's score for each time that the answer contains it. 0: off.",
    )
    logprobs: Annotated[int, bounded("logprobs")] | None = Field(
        default=None,
        description="[Log-probabilities](output.md#log-probabilities) of each token of an answer, and of its N (0 to "
        "20) most likely alternatives. `null`: none.",
    )
    repetition_stop: Annotated[int, bounded("repetition_stop")] = Field(
        default=0,
        description="End an answer, with `finish_reason: repetition`, if its last N tokens [repeat a "
        "cycle](engine.md#answers-that-run-in-circles) of at most N / 4 tokens. 0: off.",
    )
    include_stop: bool = Field(
        default=False, description="Whether the stop text that ends an answer stays in the answer."
    )
    logit_bias: Biases = Field(
        default=(),
        description="Numbers to add to the scores of tokens: a mapping from up to 1,024 token ids to numbers from "
        "-100 to 100, such as `{50256: -100}`.",
        json_schema_extra={"default": {}},
    )
    allowed_token_ids: tuple[Annotated[int, Field(ge=0, le=INT32_MAX)], ...] = Field(
        default=(),
        max_length=MAX_ALLOWED,
        description="Up to 4,096 token ids, the only ones that answers may have. List the end-of-text token too if "
        "answers may end early. `[]`: all.",
    )
    bad_words: Words = Field(
        default=(),
        description="A text, or a list of up to 256, that [answers must not "
        "contain](engine.md#words-that-answers-do-not-get).",
    )

    json_schema: JsonSchema | None = Field(
        default=None,
        description="[JSON Schema](structured.md) that answers must match, written as a mapping. To turn its "
        "properties into columns, use `output.schema`.",
    )
    json_object: bool = Field(default=False, description="Whether answers must be JSON objects.")
    regex: Text | None = Field(
        default=None, description="Regular expression that must match the whole answer."
    )
    choice: Choice = Field(default=(), description="The allowed answers: a list of texts.")
    grammar: Text | None = Field(
        default=None, description="Grammar that answers follow, in Lark's notation or in GBNF (with `::=`)."
    )
    thinking_budget: Annotated[int, bounded("thinking_budget")] | None = Field(
        default=None,
        description="Maximum tokens of [reasoning](reasoning.md#a-budget); then its end is forced, and the answer "
        "follows. `null`: no limit.",
    )
    prompt_logprobs: Annotated[int, bounded("prompt_logprobs")] | None = Field(
        default=None,
        description="[Log-probabilities](output.md#log-probabilities-of-prompts) of each token of the prompt, and of "
        "its N (0 to 20) most likely alternatives. `null`: none.",
    )
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = Field(
        default=1,
        description="Number of [sampled answers](output.md#several-answers-to-a-row) to each row, up to 1,024. Each "
        "is a row of the result with a `sample_index`.",
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = Field(
        default=1,
        description="Number of answers to compute for each row, up to 1,024. The `n` answers with the likeliest "
        "tokens [are published](output.md#the-best-of-several-answers).",
    )
    from_columns: FromColumns = Field(
        default=(),
        description="[Parameters](input.md#a-rows-own-sampling-parameters), or `n`, that rows set themselves: "
        "`[max_tokens]`, or `{temperature: temp_col}` for another column.",
        json_schema_extra={"default": []},
    )

    @property
    def fits(self) -> bool:
        """Return True for `max_tokens: fit`: the limit of a row is the longest answer that its constraint allows."""
        return self.max_tokens == "fit"

    @property
    def chooses(self) -> bool:
        """Return True if more answers to a row are computed than published (best_of is greater than n)."""
        return self.best_of > self.n

    def params(self) -> SamplingParams:
        """Return the sampling parameters of a row that sets none itself.

        With `max_tokens: fit`, `max_tokens` is 2^31 - 1 here: each row's constraint determines it later.
        """
        given = {name: getattr(self, name) for name in SAMPLING_PARAMETERS}
        return SamplingParams(**self._limited(given))

    def given_params(self) -> dict[str, Any]:
        """Return the sampling parameters that the job file sets, by name, with their values as the engine gets them."""
        return self._limited(self.explicit_params())

    def _limited(self, given: dict[str, Any]) -> dict[str, Any]:
        # A row's constraint replaces the number for `fit` later; the best answers are chosen by their log-probabilities
        given = given | ({"max_tokens": INT32_MAX} if self.fits else {})
        return given | ({"logprobs": 0} if self.chooses and given.get("logprobs") is None else {})

    @property
    def asks_logprobs(self) -> bool:
        """Return True if answers may have log-probabilities. The result then has a column for them."""
        return self.logprobs is not None or self.chooses or "logprobs" in dict(self.from_columns)

    @property
    def asks_prompt_logprobs(self) -> bool:
        """Return True if rows may have log-probabilities of their prompts. The result then has a column for them."""
        return self.prompt_logprobs is not None or "prompt_logprobs" in dict(self.from_columns)

    @property
    def parameter_columns(self) -> tuple[tuple[str, str], ...]:
        """Return (parameter, column) for each sampling parameter that rows set themselves."""
        return tuple(pair for pair in self.from_columns if pair[0] != "n")

    @property
    def samples_column(self) -> str | None:
        """Return the column that sets the number of answers (`n`) of each row, or None."""
        return dict(self.from_columns).get("n")

    @property
    def asks_samples(self) -> bool:
        """Return True if rows may have several answers, so that the result has the column `sample_index`."""
        return self.n > 1 or self.best_of > 1 or self.samples_column is not None

    def row_parameters(self) -> str:
        """Return `from_columns` as text for users, such as `max_tokens, temperature (column temp_col)`."""
        return ", ".join(
            name if name == column else f"{name} (column {column})" for name, column in self.from_columns
        )

    def explicit_params(self) -> dict[str, Any]:
        """Return the sampling parameters that the job file sets, by name, with their values as in the job file."""
        return {name: getattr(self, name) for name in SAMPLING_PARAMETERS if name in self.model_fields_set}

    def explicit_options(self) -> dict[str, Any]:
        """Return the options that the job file sets, by name: sampling parameters, and `n` if it is above 1."""
        return self.explicit_params() | ({"n": self.n} if self.n > 1 else {})
