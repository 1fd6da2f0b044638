"""Everything that a job keeps: its rows, answers and results. Each sub-room imports only those above it.

kept/         what the job's last index knew of its input files
index/        the rows of a job on disk: work keys, lengths and token ids of the prompts
columns/      typed columns: a JSON schema turned into columns of the result
outputs/      the kinds of answers: tokens, scores, labels, vectors
accuracy/     answers compared with expected ones
answers/      the completion store: answers by work key, their last use and cleaning
results/      the join of index and completion store, and the published files
"""
