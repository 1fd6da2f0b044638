"""Generates the files that `batchinfer init` writes: a commented job file that runs, and a few rows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal, get_args

from batchinfer_kernels.arithmetic import RequestedQuantization

ModelKind = Literal["floats", "quantised", "gguf"]  # how the model stores its weights
_FOLDER = "folder with config.json, *.safetensors, tokenizer.json"
_GGUF = "GGUF: weights, configuration and tokenizer in one file or its parts"
_NAMED = "name of a model that batchinfer pull downloads"
# Comments on model.quantization
_NOTES: dict[ModelKind, str] = {
    "floats": "int8, fp8 and int4 take less memory, and change answers",
    "quantised": "auto: as the checkpoint stores its weights if this machine multiplies them so, else none",
    "gguf": "auto and none: weights are dequantised while loading; int8 and int4 take less memory",
}

_JOB = """\
# A batchinfer job: every row of the input becomes a prompt, every prompt gets an answer.
#   batchinfer validate job.yaml     checks this file
#   batchinfer preview job.yaml      shows a few prompts as the model will read them
#   batchinfer run job.yaml          runs it; the same command again continues or does only what is new
# Paths are relative to this file. In any text, ${NAME} and ${NAME:-default} are environment variables, and
# ${date} is the day of the run.
name: @NAME@

model:
  path: @MODEL@    # @PATH_NOTE@
  dtype: auto             # or float32, bfloat16, float16
  quantization: auto      # or @QUANTIZATIONS@
                          # @QUANTIZATION_NOTE@
  max_model_len: auto     # maximum tokens of a row, prompt and answer together

input:
  path: prompts.jsonl     # a file, a folder, a glob such as data/*.parquet, or a list of them
  # sql: "select * from read_parquet('data/*.parquet') where lang = 'en'"    # instead of path
  id: id                  # this column becomes custom_id in the results
  limit: null             # read only the first N rows

prompt:
  system: @SYSTEM@
  user: "{{ @COLUMN@ }}"  # {{ column }} is the row's value
  # instead of user: `messages: column` (whole chats), `text: column` (no chat template), `token_ids: column`
  truncate: error         # a prompt that is too long: error row (error), or cut off (left, right)

sampling:
  max_tokens: @MAX_TOKENS@
  temperature: 0          # 0: always the most likely token
  top_p: 1
  top_k: 0
  seed: 0
  stop: []                # texts that end an answer
  from_columns: []        # e.g. [max_tokens]: rows set it themselves, in a column of that name

output:
  path: results           # a folder of Parquet files; the state is next to it, in .batchinfer-results
  columns: [@COLUMN@]     # input columns to carry along
@OUTPUT@

engine:
  device: auto            # or cpu, cuda
  max_num_seqs: auto      # maximum rows computed at once
  kv_memory: auto         # or 4GiB, or a share such as 0.8

on_error:
  max_error_rate: 0.01    # more bad rows than this: the job fails
  publish: false          # true: publish all the same
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """Example rows and an instruction, for the job that `batchinfer init` writes.

    Attributes:
        system: The system message with the instruction.
        column: The name of the column with the texts of the rows.
        texts: The text of each row.
        max_tokens: The value of `sampling.max_tokens`, as YAML.
        output: Further lines of the section `output`.
    """

    system: str
    column: str
    texts: tuple[str, ...]
    max_tokens: str
    output: str = (
        "  # schema_file: order.schema.json    # a JSON Schema of answers; its properties are columns"
    )


QUESTIONS = Sample(
    "You answer in one short sentence.",
    "question",
    (
        "Which city is the capital of France?",
        "How many legs does a spider have?",
        "Which planet is closest to the sun?",
        "Which city is the capital of France?",
    ),
    "64",
)
# For the quickstart's model, which was trained with this instruction (jobs/quickstart/job.yaml)
ORDERS = Sample(
    "Write the order as one line of JSON with the keys customer, quantity, item and due. "
    "Copy the customer and the item as written. The due date is YYYY-MM-DD.",
    "text",
    (
        "Hi, this is Maria Lindqvist. Could you put me down for a dozen oak bookshelves? "
        "I need them by March 14th, 2026.",
        "Petra Moreau wants 26 teddy bears, due 2027-03-14.",
        "I need to order 40 garden chairs, they must be here by 2026-05-02. Sincerely, Octavia Macdonald",
        "Petra Moreau wants 26 teddy bears, due 2027-03-14.",
    ),
    "96",
)


def init_text(
    model: str = "model",
    sample: Sample = QUESTIONS,
    name: str = "my-job",
    kind: ModelKind = "floats",
    pulled: bool = False,
) -> str:
    """Return the text of a new, commented job file that runs on the file `prompts.jsonl` in its folder.

    Args:
        model: The checkpoint's path, or its name in the Hugging Face cache.
        sample: The instruction and the input column.
        name: The name of the job.
        kind: How the model stores its weights. Comments about quantisation depend on it.
        pulled: True if `model` is a name in the cache.
    """
    values = {
        "@NAME@": yaml_text(name),
        "@MODEL@": yaml_text(model),
        "@PATH_NOTE@": _NAMED if pulled else _GGUF if kind == "gguf" else _FOLDER,
        "@QUANTIZATIONS@": ", ".join(one for one in get_args(RequestedQuantization) if one != "auto"),
        "@QUANTIZATION_NOTE@": _NOTES[kind],
        "@SYSTEM@": yaml_text(sample.system),
        "@COLUMN@": sample.column,
        "@MAX_TOKENS@": sample.max_tokens,
        "@OUTPUT@": sample.output,
    }
    return re.sub("@[A-Z_]+@", lambda mark: values[mark[0]], _JOB)


def yaml_text(text: str) -> str:
    """Return a text as a quoted YAML scalar for a job file. $ is escaped, so that no variable is expanded."""
    return json.dumps(text.replace("$", "$$"), ensure_ascii=False)


def init_files(
    model: str,
    sample: Sample = QUESTIONS,
    name: str = "my-job",
    kind: ModelKind = "floats",
    pulled: bool = False,
) -> dict[str, str]:
    """Return the files that `batchinfer init` writes, as texts by file name. `init_text` explains the arguments."""
    rows = (json.dumps({"id": f"r{n}", sample.column: text}) for n, text in enumerate(sample.texts, 1))
    prompts = "".join(f"{row}\n" for row in rows)
    return {"job.yaml": init_text(model, sample, name, kind, pulled), "prompts.jsonl": prompts}
