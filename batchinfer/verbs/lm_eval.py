"""Lets lm-evaluation-harness run a model with batchinfer (`pip install '.[lm-eval]'`): its requests become jobs.

Importing this module registers the model `batchinfer`. Run as a program, it is the harness's command line with that
model. Interface: https://github.com/EleutherAI/lm-evaluation-harness, lm_eval/api/model.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import AutoTokenizer

from batchinfer.core.errors import ErrorBudgetExceeded
from batchinfer.models.opening import open_checkpoint
from batchinfer.pipeline.library import run
from batchinfer.pipeline.result import RunResult

_MAX_TOKENS = 256  # of an answer, if the task does not set it
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
_DIGEST_CHARACTERS = 40  # hex digits in the name of a job's folder
Pair = tuple[Sequence[int], Sequence[int]]  # token ids of a context and its continuation


@register_model("batchinfer")
class BatchInferLM(TemplateLM):
    """A model for lm-evaluation-harness that runs on batchinfer.

    Each kind of request, such as generate_until, is one job. Answers are stored in a folder, so an interrupted
    evaluation continues.
    """

    def __init__(
        self,
        path: str,
        folder: str = "lm-eval",
        max_length: int | None = None,
        overrides: str | None = None,
        **_: Any,
    ) -> None:
        """Open a checkpoint.

        Args:
            path: The path of the checkpoint.
            folder: The folder for jobs, their results and stored answers.
            max_length: The maximum number of tokens of a prompt and its answer. None: as the checkpoint says.
            overrides: A JSON object with keys of the job file, such as {"engine.device": "cpu"}.
            **_: Further options of the harness, such as batch_size, which are ignored.
        """
        super().__init__()
        self._path, self._folder = Path(path).resolve(), Path(folder).resolve()
        self._overrides: dict[str, Any] = json.loads(overrides) if overrides else {}
        self.tokenizer = AutoTokenizer.from_pretrained(self._path)
        self.max_length = max_length or open_checkpoint(self._path).spec.max_positions

    @property
    def eot_token_id(self) -> int:
        """Return the id of the token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Return the id of the token that is the prompt of a request without a context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """Return a name that identifies this tokenizer in the harness's cache of rendered chats."""
        return str(self._path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text.

        Args:
            string: The text.
            add_special_tokens: True to add BOS and so on. None: as the tokenizer does, unless the text starts with BOS.
            **_: Ignored.
        """
        bos = self.tokenizer.bos_token
        if add_special_tokens is None and bos and string.startswith(bos):
            add_special_tokens = False
        asked = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer.encode(string, **asked)
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a chat with the checkpoint's chat template, and return the text of the prompt.

        Args:
            chat_history: The messages, with role and content.
            add_generation_prompt: True if the model answers the last message, False if it continues the last message.
        """
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._scored([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text. A text that is longer than the context is scored in several windows.

        Args:
            requests: The requests, each with one text.
            disable_tqdm: Ignored.
        """
        pairs, counts = list[Pair](), list[int]()
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, 1
            )
            found = [make_disjoint_window(one) for one in windows]
            pairs += found
            counts.append(len(found))
        scores = iter(self._scored(pairs))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate a text after each context, up to a stop string, and return the texts.

        Args:
            requests: The requests, each with a context and the options of its generation.
            disable_tqdm: Ignored.
        """
        rows = [self._generating(*request.args) for request in requests]
        sampling = {"from_columns": list(_SAMPLING)}
        result = self._run("generate", rows, {"prompt": {"token_ids": "context"}, "sampling": sampling})
        return [str(text) for text in result.to_arrow().column("generated_text").to_pylist()]

    def _generating(self, context: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(asked), _MAX_TOKENS))
        eos = self.tokenizer.decode(self.eot_token_id)
        stops = [
            one for one in handle_stop_sequences(kwargs.pop("until", None), eos=eos) if one and one != eos
        ]
        most = int(kwargs.pop("max_gen_toks"))
        ids = self.tok_encode(context)[-max(1, self.max_length - most) :]
        given = {name: kwargs[name] for name in _SAMPLING if kwargs.get(name) is not None}
        return {
            **dict.fromkeys(_SAMPLING),
            **given,
            "context": ids,
            "stop": stops or None,
            "max_tokens": most,
        }

    def _scored(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        rows = []
        for (
            context,
            continuation,
        ) in pairs:  # as the harness's own models do, truncate on the left what does not fit
            room = max(1, self.max_length + 1 - len(continuation))
            rows.append({"context": [*context][-room:], "continuation": [*continuation]})
        score = {"prompt": {"token_ids": "context"}, "score": {"continuation": "continuation"}}
        table = self._run("score", rows, score).to_arrow()
        columns = (table.column(name).to_pylist() for name in ("logprob", "is_greedy"))
        return list(zip(*columns, strict=True))

    def _run(self, task: str, rows: Sequence[Mapping[str, Any]], sections: Mapping[str, Any]) -> RunResult:
        # No row may fail: a metric would ignore it
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        name = hashlib.sha256(lines.encode()).hexdigest()[:_DIGEST_CHARACTERS]
        folder = self._folder / f"{task}-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
        job = {
            "name": f"lm-eval-{task}",
            "task": task,
            "model": {"path": str(self._path), "max_model_len": self.max_length},
            "input": {"path": str(folder / "rows.jsonl")},
            "output": {"path": str(folder / "result")},
            "cache": {"path": str(self._folder / "store")},
            "on_error": {"max_error_rate": 0},
            **sections,
        }
        result = run(job, self._overrides)
        if result.exit_code:
            raise ErrorBudgetExceeded(f"{folder / 'result'}: {result.message}")
        return result


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
