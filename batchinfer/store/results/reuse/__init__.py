"""Answers that need not be computed: which rows have them from earlier runs, and what rows with equal work save."""
