"""What `batchinfer init` writes: a commented job that runs, and a few rows for it."""

from __future__ import annotations

import json

_JOB = """\
# A batchinfer job: every row of the input becomes a prompt, every prompt gets an answer.
#   batchinfer validate job.yaml     checks this file
#   batchinfer preview job.yaml      shows a few prompts as the model will read them
#   batchinfer run job.yaml          runs it; the same command again continues or does only what is new
# Paths are relative to this file. In any text, ${NAME} and ${NAME:-default} are environment variables, and
# ${date} is the day of the run.
name: my-first-job

model:
  path: @MODEL@    # folder with config.json, *.safetensors, tokenizer.json
  dtype: auto             # or float32, bfloat16, float16
  quantization: none      # or int8: weights of half the size, a little less exact
  max_model_len: auto     # most tokens of a row, prompt and answer together

input:
  path: prompts.jsonl     # a file, a folder, a glob such as data/*.parquet, or a list of them
  # sql: "select * from read_parquet('data/*.parquet') where lang = 'en'"    # instead of path
  id: id                  # this column becomes custom_id in the results
  limit: null             # only the first so many rows

prompt:
  system: "You answer in one short sentence."
  user: "{{ question }}"  # {{ column }} is the row's value
  # instead of user: `messages: column` (whole chats), `text: column` (no chat template), `token_ids: column`
  truncate: error         # a prompt that is too long: error row (error), or cut off (left, right)

sampling:
  max_tokens: 64
  temperature: 0          # 0: always the likeliest token
  top_p: 1
  top_k: 0
  seed: 0
  stop: []                # texts that end an answer
  from_columns: []        # e.g. [max_tokens]: rows set it themselves, in a column of that name

output:
  path: results           # a folder of Parquet files; state lies beside it in .batchinfer-results
  columns: [question]     # input columns to carry along

engine:
  device: auto            # or cpu, cuda
  max_num_seqs: auto      # most rows in work at once
  kv_memory: auto         # or 4GiB, or a share such as 0.8

on_error:
  max_error_rate: 0.01    # more bad rows than this: the job fails
  publish: false          # true: publish all the same
"""

_QUESTIONS = (
    ("q1", "What is the capital of France?"),
    ("q2", "How many legs does a spider have?"),
    ("q3", "Which planet is closest to the sun?"),
    ("q4", "What is the capital of France?"),
)


def init_text(model: str = "model") -> str:
    """A commented job file that runs on `prompts.jsonl` beside it; `model` is the checkpoint's folder."""
    return _JOB.replace("@MODEL@", json.dumps(model.replace("$", "$$"), ensure_ascii=False))


def init_files(model: str) -> dict[str, str]:
    """What `batchinfer init` writes: file name → text."""
    rows = (json.dumps({"id": name, "question": question}) for name, question in _QUESTIONS)
    return {"job.yaml": init_text(model), "prompts.jsonl": "".join(f"{row}\n" for row in rows)}
