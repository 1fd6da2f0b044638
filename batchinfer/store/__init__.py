"""The data that a job keeps: its rows, answers and results. Each subpackage imports only the ones listed above it.

kept/         data about unchanged input files, for the next run
index/        the rows of a job on disk: work keys, lengths and token ids of the prompts
columns/      typed columns: a JSON schema turned into columns of the result
outputs/      the kinds of answers: tokens, scores, labels, vectors
accuracy/     comparison of answers with expected ones
answers/      the completion store: answers by work key, their last use and cleaning
results/      the join of index and completion store, and the published files
"""
